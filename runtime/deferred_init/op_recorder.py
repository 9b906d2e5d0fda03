"""Puts ops on a tape, running them on the meta device: code that makes tensors runs without making them.

Two modes are active while it runs. The recorder itself is a dispatch mode: it sees every op below autograd and
runs it on the meta device. The function mode keeps up appearances: the code believes
that its tensors are on the CPU, which is where the tape will be played.

Tensors are known by their storage, so that views, `.data`, `nn.Parameter` and ties need no entries.
Ops that look at values (`item`, a boolean mask) get them, computed on the spot, unless they depend on
random numbers, which are not drawn yet.
"""

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.errors import OsdpError
from runtime.deferred_init.op_tape import Ref, Step, Tape, tensors_of
from runtime.deferred_init.random_streams import RandomLog

META = torch.device("meta")
CPU = torch.device("cpu")
ADVICE = "build the model on the CPU and pass the module itself"

Inputs = tuple[list[Any], dict[str, Any]]
Outputs = tuple[Ref | None, ...]
_aten = torch.ops.aten
_FILLS = {
    _aten.bernoulli_,
    _aten.cauchy_,
    _aten.copy_,
    _aten.exponential_,
    _aten.fill_,
    _aten.geometric_,
    _aten.log_normal_,
    _aten.normal_,
    _aten.random_,
    _aten.uniform_,
    _aten.zero_,
}
"""They replace what they write without reading it."""
_LOOKS_AT_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a tape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.is_paused = False
        """Whether ops are the recorder's own and none of the tape's."""
        self._random = RandomLog()
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs within. The default generator is afterwards as it was before."""
        with self._random.watching():
            with _Appearances(self), self, _whole_trunc_normal(self):
                yield
            end = self._random.look(torch.default_generator)
            self.tape.end = end if end.jump is not None else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing of what runs within."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def adopt(self, tensor: Tensor) -> Ref:
        """Return the Ref of a tensor that the recorded code did not make; one with data is a constant."""
        storage = tensor.untyped_storage()
        if not tensor.is_meta:
            self._twin(storage)
        elif id(storage) not in self._numbers:
            self._enter(storage)
        return self.ref(tensor)

    def ref(self, tensor: Tensor) -> Ref:
        """Return what a tensor is on the tape."""
        number = self._numbers.get(id(tensor.untyped_storage()))
        if number is None and tensor.is_meta:
            what = "the factory uses a tensor on the meta device, which has no data"
            got = f"shape {tuple(tensor.shape)} in {user_frame()}"
            expected = "tensors without a device, on the CPU, or with data"
            advice = "make the whole model within the factory, and leave the device out"
            raise OsdpError(what, got=got, expected=expected, advice=advice)
        if number is None:
            return self.adopt(tensor)
        return Ref(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the tape."""
        return id(tensor.untyped_storage()) in self._numbers

    def as_meta(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the meta device that stands for a tensor."""
        if tensor.is_meta:
            return tensor
        ref = self.ref(tensor)
        return ref.over(self.tape.storages[ref.storage])

    def value(self, tensor: Tensor, op: str) -> Tensor:
        """Compute a tensor, for an op that wants to look at it. Raises OsdpError if it is random."""
        with self.paused():
            value = self.tape.value(self.ref(tensor))
        if value is None:
            what = "the model's constructor reads random values, which are not drawn while it is recorded"
            raise OsdpError(what, got=f"{op} in {user_frame()}", advice=ADVICE)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if foreign := [one.__name__ for one in types if one.__module__.split(".")[0] != "torch"]:
            what = f"the factory makes tensors of class {foreign[0]}, whose values cannot be made shard by shard"
            advice = "give OSDP the module itself, with its values, instead of what makes one"
            raise OsdpError(what, got=f"{func} in {user_frame()}", expected="PyTorch's own tensors", advice=advice)
        with self.paused():
            return self._op(func, args, dict(kwargs or {}))

    def _op(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op on the meta device and put it on the tape."""
        if self._is_meant_for_meta(args, kwargs):
            return func(*args, **kwargs)
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = kwargs | {"device": CPU}
        # A storage with data is given to a tensor: so torch.load makes its tensors.
        args = [self._twin(arg) if isinstance(arg, torch.UntypedStorage) else arg for arg in args]
        result = self._run(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return result
        changed = [self.ref(tensor) for tensor in _changed(func, args, kwargs)]
        outputs = tuple(self._new(tensor) for tensor in tensors_of(result))
        fills_nothing = func.overloadpacket.__name__.removeprefix("new_").startswith("empty")
        if not fills_nothing and (changed or any(outputs)):
            is_whole = func.overloadpacket in _FILLS or any(argument.is_out for argument in func._schema.arguments)
            self.append(func, (list(args), kwargs), changed, outputs, is_whole)
        return result

    def append(self, call: Any, inputs: Inputs, changed: Sequence[Ref], outputs: Outputs, is_whole: bool) -> None:
        """Put a call on the tape: what it changes, as a whole or in part, and the new storages that it returns."""
        args, kwargs = tree_map_only(Tensor, self.ref, inputs)
        refs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref)]
        whole = {ref.storage for ref in changed if is_whole and _covers(ref, self.tape.storages[ref.storage])}
        # A storage that is replaced and read by the same op is among the Refs twice.
        whole = {number for number in whole if sum(ref.storage == number for ref in refs) == 1}
        reads = frozenset(ref.storage for ref in refs) - whole
        writes = frozenset(ref.storage for ref in (*changed, *outputs) if ref)
        draw = None
        # What is no op is a function that draws, and has no tags.
        if torch.Tag.nondeterministic_seeded in getattr(call, "tags", [torch.Tag.nondeterministic_seeded]):
            generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
            draw = self._random.draw(generators[0] if generators else torch.default_generator)
        self.tape.steps.append(Step(call, args, kwargs, outputs, reads, writes, torch.get_default_dtype(), draw))

    def _is_meant_for_meta(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether an op works on a tensor that the code itself put on the meta device."""
        device = kwargs.get("device")
        tensors = tensors_of((list(args), kwargs))
        is_there = bool(tensors) and tensors[0].is_meta and not self.knows(tensors[0])
        return is_there and (device is None or device == META)

    def _run(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an op on the meta device, or on real data if its result depends on values."""
        meta_args, meta_kwargs = tree_map_only(Tensor, self.as_meta, (list(args), dict(kwargs)))
        for name, value in {"device": META, "generator": None, "pin_memory": False}.items():
            if name in meta_kwargs:
                meta_kwargs[name] = value
        try:
            return func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if func is _aten.index.Tensor:  # how many elements masks select depends on nothing else
                values = [None if one is None else self.value(one, str(func)) for one in args[1]]
                return func(meta_args[0], [None if one is None else one.to(META) for one in _without_masks(values)])
            if _LOOKS_AT_DATA & set(func.tags) and not func._schema.is_mutable:
                real = tree_map_only(Tensor, lambda tensor: self.value(tensor, str(func)), (list(args), kwargs))
                return func(*real[0], **real[1])
            if isinstance(error, NotImplementedError):
                what = "the model's constructor runs an op that cannot be recorded"
                raise OsdpError(what, got=f"{func} in {user_frame()}", advice=ADVICE) from error
            raise

    def _new(self, tensor: Tensor) -> Ref | None:
        """Return the Ref of an op's result if its storage is new, else None."""
        storage = tensor.untyped_storage()
        if id(storage) in self._numbers or not tensor.is_meta:
            return None
        self._enter(storage)
        return self.ref(tensor)

    def _twin(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return the storage on the meta device that stands for one with data, which is a constant."""
        if storage.device == META:
            return storage
        if id(storage) not in self._numbers:
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
            number = self._enter(twin)
            self._know(storage, number)
            self.tape.constants[number] = storage
        return self.tape.storages[self._numbers[id(storage)]]

    def _enter(self, storage: torch.UntypedStorage) -> int:
        number = len(self.tape.storages)
        self.tape.storages.append(storage)
        self._know(storage, number)
        return number

    def _know(self, storage: torch.UntypedStorage, number: int) -> None:
        self._numbers[id(storage)] = number
        self._storages.append(storage)  # held, so that no other storage gets the same id


def user_frame() -> str:
    """Return file, line and function of the innermost frame outside torch and this package."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    for frame in frames:
        code = frame.f_code
        if not code.co_filename.startswith(ours) and code.co_filename != contextlib.__file__:
            return f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
    return "torch's own code"


def _changed(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an op writes to, by its schema; statistics of batch norm, of which it does not tell."""
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if func is _aten.native_batch_norm.default:
        written += ["running_mean", "running_var"]
    return tensors_of([values.get(name) for name in written])


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the indices of an indexing op, with those that masks select in their place."""
    found: list[Tensor | None] = []
    for index in indices:
        found += [index] if index is None or index.dtype not in (torch.bool, torch.uint8) else index.nonzero().unbind(1)
    return found


def _covers(ref: Ref, storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor is all of its storage, every byte once."""
    expected = 1
    for size, stride in sorted(zip(ref.sizes, ref.strides, strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected * ref.dtype.itemsize == storage.nbytes()


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
            # To its own device a tensor moves without a copy; off the meta device it would be copied.
            args = tuple(META if isinstance(arg, str | torch.device) else arg for arg in args)
            kwargs = kwargs | ({"device": META} if "device" in kwargs else {})
        elif func == _SET_DATA:
            with self._recorder.paused():
                args = (args[0], self._recorder.as_meta(args[1]))
        elif func in _OUT_OF_SIGHT:
            what = "the model's constructor passes a tensor's memory to code outside PyTorch, which cannot be recorded"
            got = f"{func.__name__} in {user_frame()}"
            raise OsdpError(what, got=got, expected="PyTorch ops only", advice=ADVICE)
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
        with recorder.paused():
            recorder.append(original, ([tensor, *args], kwargs), [recorder.ref(tensor)], (None,), is_whole=True)
        return tensor

    with patch.object(torch.nn.init, "_no_grad_trunc_normal_", recorded):
        yield
