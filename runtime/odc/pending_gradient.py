"""The gradient of a parameter whose ranks have yet to synchronize: nobody may read or replace it, only add to it.

What was pushed lies in the window, and FSDP2's sharded gradient has none of it.  Whatever a loop does to that (clip,
unscale, log its norm, scale it) would be lost or wrong without a word.  So the DTensor that FSDP2 made changes its
class until ranks have synchronized, which takes no memory and lets FSDP2 add to the local tensor as before (checked
on torch 2.13).
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError

ADVICE = "call model.finish_gradients() on all ranks after the last backward, before anything that uses .grad"


class PendingGradient(DTensor):
    """A DTensor on which every operation but `add_` raises OsdpError. Its shape, dtype and device can be read."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:  # type: ignore[override]
        # Autograd adds what comes of parameters alone, such as an L2 penalty; the order of sums does not matter.
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls) and not isinstance(args[1], cls):
            restore(args[0])
            try:
                args[0].add_(*args[1:], **(kwargs or {}))
            finally:
                suspend(args[0])
            return args[0]
        raise _refusal(str(func))

    def to_local(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal("to_local")

    def full_tensor(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal("full_tensor")

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal("redistribute")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal("pickle")

    @property
    def data(self) -> NoReturn:
        raise _refusal(".data")

    @data.setter
    def data(self, _: Tensor) -> NoReturn:
        raise _refusal(".data")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PendingGradient(shape={tuple(self.shape)}, complete after model.finish_gradients())"


def suspend(gradient: Tensor) -> None:
    """Refuse operations on a DTensor from now on."""
    gradient.__class__ = PendingGradient


def restore(gradient: Tensor | None) -> None:
    """Make a suspended gradient a DTensor again; leave others alone."""
    if isinstance(gradient, PendingGradient):
        gradient.__class__ = DTensor  # type: ignore[assignment]


def _refusal(operation: str) -> OsdpError:
    what = "under odc a gradient is not complete before ranks have synchronized"
    return OsdpError(what, got=operation, expected="the optimizer's step", advice=ADVICE)
