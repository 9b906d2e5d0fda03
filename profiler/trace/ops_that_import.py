"""Ops that import modules when they first run, as `mean` on the meta device does.

An exception that is caught while a module is imported may stay in a reference cycle with the frames around it, which
hold tensors of the pass: then it leaves something, and all of it runs again.  So such cycles go at once.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch


class OpRunner:
    """Runs the ops of one pass."""

    def __init__(self, live: Sized) -> None:
        """`live` are the storages that are alive."""
        self._live = live
        self.freed_others = False
        """Whether cycles that the model has made went too, so that less was held than in other passes."""

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an op returns."""
        modules = len(sys.modules)
        # The kernel of an op that the model defines may be in Python, and rely on modes (private; torch 2.11 and 2.13).
        with torch._C._EnableTorchFunction():
            out = func(*args, **kwargs)
        if len(sys.modules) > modules:
            live = len(self._live)
            gc.collect()
            # What the frames of the import hold is alive anyway, as the op has not returned.
            self.freed_others |= len(self._live) < live
        return out
