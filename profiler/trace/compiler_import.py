"""Recomputation without the import of `torch._dynamo`.

`torch.utils.checkpoint` marks functions as not to be compiled, and asks for a setting that only compilation reads.
Either imports torch's compiler on first use, sympy and all of `torch.distributed.fsdp` with it: 1 s of CPU, and
reference cycles that hold the frames above.  Nothing is compiled during a trace.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

_COMPILER = "torch._dynamo"
_MARKED = ("checkpoint", "_run_fn_with_dynamo_disabled")
"""Names of the marked functions in `torch.utils.checkpoint`; not every version of torch has the second."""
_UNCOMPILED = "__dynamo_disable"
"""Where `torch._disable_dynamo` keeps what it calls in the marked function's place, made on the first call."""
_SETTINGS = {"error_on_nested_fx_trace": True}
"""What is asked for, with torch's own default: it counts where `torch.compile` or `torch.export` runs the step."""


class _Lazy:
    """A module that is imported when anything else than what is given here is asked of it."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self._name, self._given = name, given

    def __getattr__(self, name: str) -> Any:
        return self._given[name] if name in self._given else getattr(importlib.import_module(self._name), name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Call the marked functions as they are inside, unless torch's compiler is there already."""
    if _COMPILER in sys.modules:
        yield
        return
    spared = [one for one in map(_inner, _MARKED) if one is not None]
    for function in spared:
        setattr(function, _UNCOMPILED, function)
    given = {"config": _Lazy(f"{_COMPILER}.config", _SETTINGS), "disable": _as_it_is}
    stand_in = _Lazy(_COMPILER, given)
    vars(torch)["_dynamo"] = stand_in  # an import of it replaces this
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:
            del vars(torch)["_dynamo"]
        for function in spared:
            delattr(function, _UNCOMPILED)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _inner(name: str) -> Callable[..., Any] | None:
    """Return the function inside one that is marked."""
    inner: Callable[..., Any] | None = getattr(getattr(checkpoint, name, None), "__wrapped__", None)
    return inner
