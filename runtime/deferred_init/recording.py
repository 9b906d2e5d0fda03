"""Runs code that makes tensors without making them, and records what it does.

Two modes are active while it runs. The dispatch mode sees every op below autograd and hands it to the
recorder, which runs it on the meta device. The function mode keeps up appearances: the code believes
that its tensors are on the CPU, which is where the tape will be played.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import OsdpError
from runtime.deferred_init.op_recorder import ADVICE, CPU, META, OpRecorder, place


@contextmanager
def recording(recorder: OpRecorder) -> Iterator[None]:
    """Record what runs within. The default generator is afterwards as it was before."""
    with recorder.watching(), _Appearances(recorder), _Dispatch(recorder), _whole_trunc_normal(recorder):
        yield


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every op to the recorder."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recorder.is_paused:
            return func(*args, **(kwargs or {}))
        with self._recorder.paused():
            return self._recorder.op(func, args, dict(kwargs or {}))


class _Appearances(TorchFunctionMode):
    """Makes tensors on the meta device look as if they were on the CPU."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.is_paused:
            return func(*args, **kwargs)
        if str(kwargs.get("device")) == "meta":
            with self._recorder.paused():  # the code itself wants no data
                return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_meta and self._recorder.knows(args[0]):
            return self._pretend(func, args, kwargs)
        return func(*args, **kwargs)

    def _pretend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function on a recorded tensor as if it were on the CPU."""
        if func in _ON_CPU:
            return _ON_CPU[func]
        if func is Tensor.tolist:
            return self._recorder.value(args[0], "tolist").tolist()
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.to:
            # Told to go where it is, a tensor stays; told to leave the meta device, it would be copied.
            args = tuple(META if isinstance(arg, str | torch.device) else arg for arg in args)
            kwargs = kwargs | ({"device": META} if "device" in kwargs else {})
        elif func == _SET_DATA:
            with self._recorder.paused():
                args = (args[0], self._recorder.as_meta(args[1]))
        elif func in _OUT_OF_SIGHT:
            raise OsdpError(
                "the model's constructor hands a tensor's memory to other code, which cannot be recorded",
                got=f"{func.__name__} in {place()}",
                expected="computations with torch",
                advice=ADVICE,
            )
        return func(*args, **kwargs)


def _property(name: str) -> Any:
    """Return one of torch.Tensor's properties, of which the type stubs know only the values."""
    return getattr(Tensor, name)


_SET_DATA = _property("data").__set__
_ON_CPU = {
    _property("device").__get__: CPU,
    _property("is_meta").__get__: False,
    _property("is_cpu").__get__: True,
    _property("is_cuda").__get__: False,
}
_OUT_OF_SIGHT = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__)


@contextmanager
def _whole_trunc_normal(recorder: OpRecorder) -> Iterator[None]:
    """Record `nn.init.trunc_normal_` as one step: it draws again where it does not like what it drew.

    Its inner function is private; torch 2.11 (read) and 2.13 (run) have it, with the tensor first.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not recorder.knows(tensor) and tensor.is_meta:
            return original(tensor, *args, **kwargs)
        recorder.append_whole(original, (tensor, *args), kwargs)
        return tensor

    with patch.object(torch.nn.init, "_no_grad_trunc_normal_", recorded):
        yield
