"""What Python asks of tensors without data outside of ops: their values as lists and arrays, and other devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from profiler.fake_devices import DEVICE, device_of
from profiler.trace.data_checks import passing_value
from profiler.trace.data_dependent import DataDependent, UnknownValueError
from profiler.trace.known_values import computing, has_data
from profiler.trace.matching import matched_in_order
from profiler.trace.uncompiled_mode import UncompiledMode

_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: Tensor.numpy,
    Tensor.__array__: Tensor.numpy,
}
_SPLITS = {torch.tensor_split, Tensor.tensor_split}
_ALIGNS = {torch.ctc_loss, torch.nn.functional.ctc_loss}
_FROM_PYTHON = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
_OTHERS = {Tensor.item, Tensor.__contains__, Tensor.__format__, Tensor.cuda, Tensor.to, Tensor.__deepcopy__}
_SEEN_TO = frozenset({*_READS, *_SPLITS, *_ALIGNS, *_FROM_PYTHON, *_OTHERS})
"""All of which a call is more than passed on; of others only a `device` is."""


class AssumedNumber(float):
    """A number that is assumed: to compute with, to print and to check, but not to decide by."""

    def _refuse(self, *others: object) -> Any:
        raise UnknownValueError("a branch or a whole number depends on data, on a floating-point number that was read")

    def _check(self, *others: object) -> Any:
        return self._refuse() if (passing := passing_value()) is None else passing

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _check
    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = _refuse
    __hash__ = float.__hash__


class PythonValues(TorchFunctionMode):
    """Reads known values, makes known ones of Python's numbers, and keeps tensors on the device of the trace."""

    def __init__(self, data: DataDependent, device: torch.device, *, is_default: bool = False) -> None:
        """`is_default`: whether tensors made without naming a device are on `device`."""
        super().__init__()
        self._data = data
        self._device = device
        self._is_default = is_default

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN_TO and "device" not in kwargs:  # nearly every call of a trace
            return func(*args, **kwargs)
        if func in _READS and not has_data(args[0]):
            return self._read(args[0], _READS[func])
        if func is Tensor.item and not has_data(args[0]) and self._data.values.read(args[0]) is None:
            found = func(args[0])  # of a floating-point number, or a check; others are refused
            return found if type(found) is bool else AssumedNumber(found)
        if func is Tensor.__contains__:
            try:
                return func(*args)
            except UnknownValueError:  # is there padding among these tokens?
                self._data.note("values that a model looks for in data (value in tensor) are assumed not to be there")
                return False
        if func is Tensor.__format__ and not args[0].dim() and self._data.values.read(args[0]) is not None:
            return format(self._read(args[0], Tensor.item), *args[1:])  # self.experts[f"expert_{index}"]
        if func is Tensor.__deepcopy__:
            return _copied(*args)
        if func is Tensor.cuda:
            return args[0]
        if func in _SPLITS and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], self._read(args[1], Tensor.tolist), *args[2:])  # it takes them on the CPU only
        if func in _ALIGNS:  # of lists of lengths it reads the targets
            args = [torch.tensor(arg, device="cpu") if isinstance(arg, (list, tuple)) else arg for arg in args]
        if func is Tensor.to:
            args = [self._here(arg) for arg in args]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._here(kwargs["device"])}
        if func in _FROM_PYTHON and self._device.type == "meta":
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def _read(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
        """Return what `read` makes of a tensor's values, which are its own to keep."""
        values = tensor if has_data(tensor) else self._data.values.read(tensor)
        if values is None:
            raise UnknownValueError(f"the values of a tensor of type {tensor.dtype} are read, which depend on data")
        self._data.ask()
        self._data.note_read()
        with computing():
            return read(values.clone())

    def _here(self, device: Any) -> Any:
        """Return the device of the trace instead of an accelerator's."""
        if isinstance(device, (str, torch.device)):
            return device if torch.device(device).type in ("cpu", "meta") else self._device
        return self._device if type(device) is int else device

    def _made(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a tensor of Python's numbers, with known values."""
        default = self._device if self._is_default else None
        if func is Tensor.new_tensor:
            func, default, args = torch.tensor, args[0].device, args[1:]
        device = kwargs.get("device") or default
        kwargs = {**kwargs, "device": device}
        if (
            device is None
            or torch.device(device).type != "meta"
            or any(isinstance(x, Tensor) for x in tree_leaves(args))
        ):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": "cpu"})
        return self._data.values.moved(made.detach()).requires_grad_(made.requires_grad)


class _AnsweringMode(UncompiledMode):
    """Answers what depends on data in a program that runs on fake tensors."""

    def __init__(self, data: DataDependent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._data = data

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return device_of(args[0])
        if any(kind.__name__ != "FakeTensor" for kind in types):  # a DTensor's own op; its parts come here, too
            return func(*args, **kwargs or {})
        return self._data.run(func, args, kwargs or {}, lambda op, args, kwargs: op(*args, **kwargs))


class _FakeToTorchOnly(type):
    """A class of which fake tensors are instances for torch, and for nobody else."""

    def __instancecheck__(cls, instance: object) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor

        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return asked_by.partition(".")[0] == "torch" and isinstance(instance, FakeTensor)

    def __subclasscheck__(cls, subclass: type) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor

        return issubclass(subclass, FakeTensor)


class _FakeTensor(metaclass=_FakeToTorchOnly):
    pass


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a deep copy; of what has data, and so of the values that a fake tensor knows, without modes.

    A mode for fake tensors fails at that, and harms the process's memory (torch 2.11 and 2.13): so it copies no
    BatchNorm, which knows that it has counted 0 batches.
    """
    known = getattr(tensor, "constant", None)
    if isinstance(known, Tensor) and id(known) not in memo:
        with computing():
            memo[id(known)] = known.clone()
    with computing() if has_data(tensor) else nullcontext():
        copied: Tensor = Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]
    return copied


def as_if_real() -> AbstractContextManager[Any]:
    """Let libraries that ask whether a tensor is fake run as in training, not as when they are exported.

    Transformers makes attention masks that it does without in training if it finds a FakeTensor.
    """
    return patch.object(torch._subclasses, "FakeTensor", _FakeTensor)


@contextmanager
def answering(data: DataDependent, *, is_building: bool = False) -> Iterator[None]:
    """Answer what depends on data as a trace does, for a program that runs, or builds a model, on fake tensors."""
    data.begin(1)
    building, drawing = (data.building(), drawing_once()) if is_building else (nullcontext(), nullcontext())
    values = PythonValues(data, torch.device("cpu"))
    with building, drawing, as_if_real(), _AnsweringMode(data), values, matched_in_order(data):
        yield


def drawing_once() -> AbstractContextManager[Any]:
    """Let `nn.init.trunc_normal_` draw once; that of torch 2.13 draws until it likes the values, which nobody knows.

    Its inner function is private; torch 2.11 (read), 2.12 (read) and 2.13 (run) have it, with the tensor first.
    """

    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return tensor.normal_()

    return patch.object(torch.nn.init, "_no_grad_trunc_normal_", draw)
