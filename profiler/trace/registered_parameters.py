"""Refuses forwards that make or remove parameters of modules.

A plan says of each parameter what becomes of it, and an optimizer is made of them, before the first forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from profiler.errors import OsdpError


@contextmanager
def parameters_stay(model: str, root: nn.Module) -> Iterator[None]:
    """Raise OsdpError at the end if modules have parameters of other names than before.

    Also in place of what code raises that looks for these names; OsdpErrors come first.
    """
    before = _names(root)
    try:
        yield
    except OsdpError:
        raise
    except Exception as error:
        if (refusal := _refusal(model, before, _names(root))) is not None:
            raise refusal from error
        raise
    if (refusal := _refusal(model, before, _names(root))) is not None:
        raise refusal


def _names(root: nn.Module) -> list[str]:
    return [name for name, _ in root.named_parameters(remove_duplicate=False)]


def _refusal(model: str, before: list[str], now: list[str]) -> OsdpError | None:
    """Return the error to raise of a forward that has changed which parameters there are."""
    were, are = set(before), set(now)
    if removed := [name for name in before if name not in are]:
        return OsdpError(
            f"the forward of {model} removes the parameter `{removed[0]}`, which sharding cannot follow",
            got=f"{len(removed)} parameters that are there only before the first forward",
            expected="the parameters that the model was built with",
            advice="remove it in __init__, or before the model is given to OSDP",
        )
    if made := [name for name in now if name not in were]:
        return OsdpError(
            f"the forward of {model} makes the parameter `{made[0]}`, which is not there to be planned or sharded",
            got=f"{len(made)} parameters that are there only after the first forward",
            expected="all parameters there when the model is built, as an optimizer needs them too",
            advice="create it in __init__, of a shape that the constructor is given; what is not trained, as a buffer",
        )
    return None
