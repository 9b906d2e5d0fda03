"""Where a trace happens: a device whose tensors have shapes and no data.

The meta device comes first: it is torch's quickest.  A model that wants to see a real device
(`torch.autocast(x.device.type)`, say) cannot run there and gets `FakeTensorMode`, whose tensors
claim to be on the CPU and cost about five times as much.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.fake_devices import modules_converted
from profiler.model_source import Inputs
from profiler.module_copies import copied
from profiler.opaque_parameters import is_opaque, rebuilt, tensors_of
from profiler.trace.data_dependent import DataDependent
from profiler.trace.op_cost import Op, describe
from profiler.trace.python_values import PythonValues, as_if_real, drawing_once
from profiler.trace.shapes import make, predict
from profiler.trace.uncompiled_mode import UncompiledMode

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


_CPU_AUTOGRAD = torch._C.DispatchKey.AutogradCPU
"""Under which a library registers what an op is made of on a CPU where other devices have one kernel for all of it."""


class UnlikeOpError(NotImplementedError):
    """An op is made of others on the device that a trace stands for, and not on that where it runs."""


class MetaDevice:
    """Tensors on the meta device; the meter makes outputs itself where it knows their layout."""

    torch_device = torch.device("meta")
    synthesize = True

    def __init__(self, expert_imbalance: float = 1.0) -> None:
        self.data = DataDependent(expert_imbalance)
        self.stands_for = ""
        """Type of the device that kernels are chosen of; none: that does not matter."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Open a context in which factories make tensors of this device."""
        with self.torch_device, PythonValues(self.data, self.torch_device, is_default=True):
            yield

    def running(self) -> AbstractContextManager[Any]:
        """Return the context of the forward; the meter moves factories itself."""
        return PythonValues(self.data, self.torch_device)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor is of this device."""
        return tensor.is_meta

    def describe(self, op: OpOverload) -> Op:
        """Return how the meter treats an op; raise UnlikeOpError for one of a library that a CPU does not run so."""
        # Of torch's own, `device_kernels` sees to those.
        if self.stands_for == "cpu" and op.namespace != "aten" and op.has_kernel_for_dispatch_key(_CPU_AUTOGRAD):
            raise UnlikeOpError(f"{op} on a meta tensor does not run the kernel that it has for AutogradCPU")
        return describe(op)


class FakeCpu:
    """Fake tensors, which have no data and report the CPU as their device."""

    torch_device = torch.device("cpu")
    synthesize = False

    def __init__(self, expert_imbalance: float = 1.0) -> None:
        self.data, self.stands_for = DataDependent(expert_imbalance), ""
        from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy: only if needed

        self._mode: FakeTensorMode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def building(self) -> Iterator[None]:
        values = PythonValues(self.data, self.torch_device)
        with warnings.catch_warnings(), self._mode, as_if_real(), modules_converted(), drawing_once(), values:
            # Copying a fake parameter, as nn.Transformer does, looks at its address to no harm.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open the context of the forward; torch's own log of what raises in it is not for users."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        before = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with self._mode, as_if_real(), modules_converted(), PythonValues(self.data, self.torch_device):
                yield
        finally:
            log.setLevel(before)

    def holds(self, tensor: Tensor) -> bool:
        return getattr(tensor, "fake_mode", None) is self._mode

    def describe(self, op: OpOverload) -> Op:
        return describe(op)


DatalessDevice = MetaDevice | FakeCpu


class _WithoutFills(UncompiledMode):
    """Leaves out what fills tensors that have no data, which is where building spends its time."""

    def __init__(self, device: DatalessDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._device.data.run(func, args, kwargs or {}, self._call)

    def _call(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in _FILLS and self._device.holds(args[0]):
            return args[0]
        if func is aten._to_copy.default and self._device.holds(args[0]):
            kwargs = {**kwargs, "device": self._device.torch_device}  # as module.to("cpu") asks
        layouts = predict(func, args, kwargs) if self._device.synthesize and self._is_here(args, kwargs) else None
        return func(*args, **kwargs) if layouts is None else make(layouts)

    def _is_here(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether an op takes and makes tensors of the device only."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        placed = bool(tensors) if device is None else device == self._device.torch_device
        return placed and all(self._device.holds(tensor) for tensor in tensors)


aten = torch.ops.aten
_FILLS = {getattr(aten, f"{name}_").default for name in ("normal", "uniform", "zero", "copy", "erfinv", "clamp")}
_FILLS |= {aten.fill_.Scalar, aten.fill_.Tensor, aten.mul_.Scalar, aten.mul_.Tensor, aten.div_.Tensor, aten.add_.Tensor}


@contextmanager
def making(device: DatalessDevice) -> Iterator[None]:
    """Open a context where factories make tensors of the device and fills are left out."""
    with without_logs(), device.building(), _WithoutFills(device), device.data.building():
        yield


@contextmanager
def without_logs() -> Iterator[None]:
    """Have libraries log errors only: what they advise is for a training, not for a trace of it."""
    before = logging.root.manager.disable
    if before >= logging.WARNING:  # either call goes through all loggers there are
        yield
        return
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


_OF_MODULES = vars(nn.Module()).keys()
"""What every module has."""


def adapt(module: nn.Module, device: DatalessDevice, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """Return the module with all tensors on the device, and parameters of other dtypes by name.

    Where anything has to change, this is a copy, so that a module which the user holds on to stays
    as it is; tied parameters stay tied.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    moved = {
        id(tensor): _opaque(name, tensor, device)
        if is_opaque(tensor)
        else _like(tensor, device, dtypes.get(name, tensor.dtype))
        for name, tensor in tensors
    }
    for parameter in module.parameters():
        device.data.values.forget(moved[id(parameter)])  # it trains
    if all(moved[id(tensor)] is tensor for _, tensor in tensors):
        return module
    try:
        return copied(module, moved)
    except Exception:
        return copied(module, moved | _not_copied(module, moved))


def _not_copied(module: nn.Module, moved: Mapping[int, Any]) -> dict[int, Any]:
    """Return, by identity, attributes that cannot be copied: Python modules, locks, generators, open files."""
    known = {**moved, **{id(one): one for one in module.modules()}}
    found = {}
    for value in (value for one in module.modules() for name, value in vars(one).items() if name not in _OF_MODULES):
        try:
            copy.deepcopy(value, dict(known))
        except Exception:
            found[id(value)] = value
    return found


def _opaque(name: str, parameter: nn.Parameter, device: DatalessDevice) -> nn.Parameter:
    if all(device.holds(tensor) for tensor in tensors_of(name, parameter)):
        return parameter
    return rebuilt(name, parameter, lambda tensor: _like(tensor, device, tensor.dtype))


def _like(tensor: Tensor, device: DatalessDevice, dtype: torch.dtype) -> Tensor:
    """Return the tensor on the device; a parameter in memory of its own and in the order of its rows, as if sharded."""
    is_parameter = isinstance(tensor, nn.Parameter)
    is_apart = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    if device.holds(tensor) and tensor.dtype == dtype and (is_apart or not is_parameter):
        return tensor
    with device.running():
        if is_parameter:
            placed = torch.empty(tensor.shape, dtype=dtype, device=device.torch_device)
        else:
            placed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device.torch_device)
    if is_parameter:
        return nn.Parameter(placed, requires_grad=tensor.requires_grad)
    device.data.values.carry(tensor, placed)
    return placed.requires_grad_(tensor.requires_grad)


def feed(example: Callable[[], Inputs], device: DatalessDevice) -> Inputs:
    """Make the arguments of one forward, on the device."""
    with making(device):
        inputs = example()

    def placed(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            kept = (None, value.batch_sizes)  # by which PyTorch slices: it is on the CPU always, and has values
            return PackedSequence(*(one if any(one is other for other in kept) else placed(one) for one in value))
        return _like(value, device, value.dtype)

    is_leaf = lambda one: isinstance(one, PackedSequence)  # noqa: E731
    return tree_map_only((Tensor, PackedSequence), placed, inputs, is_leaf=is_leaf)  # type: ignore[no-any-return]


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Put the module in training mode, and back into what it was."""
    before = [(child, child.training) for child in module.modules()]
    module.train()
    try:
        yield
    finally:
        for child, mode in before:
            child.training = mode
