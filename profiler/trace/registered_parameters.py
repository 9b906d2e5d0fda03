"""Refuses forwards that make, remove, tie or untie parameters of modules.

A plan says of each parameter what becomes of it, and an optimizer is made of them, before the first forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from profiler.errors import OsdpError


@contextmanager
def parameters_stay(model: str, root: nn.Module) -> Iterator[None]:
    """Raise OsdpError at the end if modules have parameters of other names than before, or others of them are tied.

    Also in place of what code raises that looks for these names; OsdpErrors come first.
    """
    before = _first_names(root)
    try:
        yield
    except OsdpError:
        raise
    except Exception as error:
        if (refusal := _refusal(model, before, _first_names(root))) is not None:
            raise refusal from error
        raise
    if (refusal := _refusal(model, before, _first_names(root))) is not None:
        raise refusal


def _first_names(root: nn.Module) -> dict[str, str]:
    """Return under which name each parameter is met first, by each of its names: those of tied ones are the same."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in root.named_parameters(remove_duplicate=False)}


def _refusal(model: str, before: dict[str, str], now: dict[str, str]) -> OsdpError | None:
    """Return the error to raise of a forward that has changed which parameters there are."""
    if removed := [name for name in before if name not in now]:
        return OsdpError(
            f"the forward of {model} removes the parameter `{removed[0]}`, which sharding cannot follow",
            got=f"{len(removed)} parameters that are there only before the first forward",
            expected="the parameters that the model was built with",
            advice="remove it in __init__, or before the model is given to OSDP",
        )
    if made := [name for name in now if name not in before]:
        return OsdpError(
            f"the forward of {model} makes the parameter `{made[0]}`, which is not there to be planned or sharded",
            got=f"{len(made)} parameters that are there only after the first forward",
            expected="all parameters there when the model is built, as an optimizer needs them too",
            advice="create it in __init__, of a shape that the constructor is given; what is not trained, as a buffer",
        )
    if changed := [name for name in now if now[name] != before[name]]:
        name = changed[0]
        tied, other = ("ties", now[name]) if now[name] != name else ("no longer ties", before[name])
        return OsdpError(
            f"the forward of {model} {tied} the parameter `{name}` to `{other}`, which sharding cannot follow",
            got=f"{len(changed)} parameters that are tied otherwise after the first forward than before",
            expected="the same parameters tied from when the model is built",
            advice="tie them in __init__",
        )
    return None
