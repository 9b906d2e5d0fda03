"""Adds up the bytes of live tensor storages, on any device and on fake tensors.

    with LiveBytes() as live:
        live.hold([*model.parameters(), *states], "parameters")
        loss = model(batch)
        loss.backward()
    print(live.peak_bytes, live.peak.categories)

PyTorch reports peak memory for CUDA only.  `LiveBytes` is a dispatch mode and so works on CPU and on
fake tensors too: it sees every tensor that an operator returns, every `resize_` of a storage (which
is how FSDP2 allocates and frees unsharded parameters), and every storage's death.  Views share their
storage, which counts once; tensors on the meta device do not count.  What a kernel or a communication
library allocates for itself is invisible to it.

Every storage is of a category.  Of a module that is watched (`watch`) the running program tells them:

    parameters             of the module, local parts, and its buffers
    optimizer              states that the optimizer keeps
    gradients              of local parameters, and of unsharded ones once autograd has accumulated them
    unsharded_parameters   those that modules compute with, where they are not the local ones
    communication_buffers  arguments of collectives that are none of these
    activations            all the rest, unless `category` says otherwise
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from profiler.byte_sizes import allocated_bytes
from profiler.fake_devices import DEVICE, device_of
from profiler.kept_storage import keeps_storage, with_kept_storage
from runtime.autograd_compat import without_transforms
from runtime.strategies import offloaded_input
from runtime.torch_compat import held_tensor

ACTIVATIONS = "activations"
HOST = "host"
"""Category of host memory: it is tracked, but not part of any total."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The allocation after which most was live."""

    total_bytes: int
    phase: str
    """`LiveBytes.phase` at that time."""
    op: str
    """Operator that allocated."""
    categories: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category; they sum to `total_bytes`."""


@dataclass(slots=True)
class _Storage:
    """A storage that is counted."""

    reference: weakref.ref[torch.UntypedStorage]
    number: int
    """Counts the storages; another never has it."""
    size_bytes: int
    category: str


@dataclass(frozen=True, slots=True)
class _Op:
    """What is asked of an operator at each of its calls."""

    name: str
    keeps_storage: bool
    """Whether `with_kept_storage` may have to do with it."""
    communicates: bool


@cache
def _described(op: Any) -> _Op:
    return _Op(str(op), keeps_storage(op), op.namespace in ("c10d", "fsdp"))


_is_wrapper = cache(is_traceable_wrapper_subclass_type)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is allocated while it is entered, and what is passed to `hold`.

    Each storage counts rounded up to `ALLOCATION_BYTES`, so that a figure taken on CPU is comparable with
    the allocator's on CUDA.  It is of the category that was current when it was made, until `label`
    says otherwise.
    """

    def __init__(self, category: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total_bytes = 0
        """Live now."""
        self.phase = ""
        """Name of what runs now; set by the user, recorded with the peak."""
        self.category = category
        """Of what is allocated from now on; set by the user."""
        self.homes: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        """Of each parameter that is watched: HOST if its shard is offloaded, else empty."""
        self.peak = Peak(0, "", "")
        self._live: dict[int, _Storage] = {}
        self._numbers = count()
        self._categories: Counter[str] = Counter()
        self._at_peak = False
        """Whether nothing has changed since the peak."""
        self._hooked: MutableMapping[Tensor, RemovableHandle] = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: what is tracked is never compiled, and the guard against it would cost time at every op."""
        return False

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once since the start or `reset_peak`."""
        return self.peak.total_bytes

    def categories(self) -> dict[str, int]:
        """Return the bytes that live now by category, without the host's."""
        return {category: size for category, size in self._categories.items() if size and category != HOST}

    def changed(self) -> None:
        """Called after every change of the live bytes; for subclasses."""

    def resized(self, number: int, size_bytes: int) -> None:
        """Called when the storage of a number has so many bytes of the device from now on; for subclasses."""

    def reset_peak(self) -> None:
        """Forget the peak; what is live now is the new one."""
        self._note_peak("reset_peak")

    def hold(self, tensors: Iterable[Tensor], category: str = "") -> None:
        """Count tensors that were made before: parameters, optimizer states, a batch.

        Of a DTensor the local part counts. One that is known already does not count again.
        """
        for tensor in tensors:
            if tensor.is_meta:
                continue
            self._count(_storage(tensor), "hold")
            if category:
                self.label(tensor, category)

    def label(self, tensor: Tensor, category: str) -> None:
        """Say what a tensor's storage is for; at the peak too, if nothing has changed since."""
        known = self._live.get(_storage(tensor)._cdata)
        if known is None or known.category == category:
            return
        was_at_peak, size_bytes = self._at_peak, known.size_bytes
        moves = HOST in (category, known.category)
        self._change(known, 0)
        known.category = category
        self._change(known, size_bytes)
        if moves:
            self.resized(known.number, 0 if category == HOST else size_bytes)
        if was_at_peak and category != HOST:
            self._note_peak(self.peak.op)
        elif self.total_bytes > self.peak.total_bytes:  # it was host memory
            self._note_peak("label")

    def category_of(self, tensor: Tensor) -> str:
        """Return what a tensor's storage is for; empty if it is not counted."""
        known = self._live.get(_storage(tensor)._cdata)
        return known.category if known else ""

    def watch(self, module: nn.Module, offloaded: Collection[str] = ()) -> None:
        """Label parameters, and from now on unsharded ones and gradients.

        `offloaded` names parameters whose shards, gradients and states are in the host's memory.
        """
        for name, parameter in module.named_parameters():
            self.homes[parameter] = HOST if name in offloaded else ""
            self.hold([parameter], self.homes[parameter] or "parameters")
            if parameter.grad is not None:
                self.hold([parameter.grad], self.homes[parameter] or "gradients")
            self._watch_gradient(parameter)
        self.hold(module.buffers(), "parameters")
        for part in module.modules():
            if part._parameters:
                self._handles.append(part.register_forward_pre_hook(self._label_used))
            if isinstance(part, FSDPModule):
                self._handles.append(part.register_forward_hook(self._label_kept))

    def unwatch(self) -> None:
        """Remove all hooks."""
        for handle in (*self._handles, *self._hooked.values()):
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def label_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Label the gradients of parameters; DDP's buckets call no hook."""
        for parameter in parameters:
            if parameter.grad is not None:
                self.label(parameter.grad, self.homes.get(parameter, "") or "gradients")

    def hold_states(self, optimizer: torch.optim.Optimizer, home: str = "") -> None:
        """Count and label what an optimizer keeps."""
        states = tree_leaves(list(optimizer.state.values()))
        self.hold((state for state in states if isinstance(state, Tensor)), home or "optimizer")

    def __enter__(self) -> Self:
        tracker, resize = self, torch.UntypedStorage.resize_
        self._resize = resize

        def resize_(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
            resize(storage, size_bytes)
            tracker._count(storage, "resize_")
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._empty_on_host = offloaded_input.empty_on_host
        offloaded_input.empty_on_host = self._counted_on_host
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        offloaded_input.empty_on_host = self._empty_on_host

    def _counted_on_host(self, like: Tensor) -> Tensor:
        """Return the host's memory for a copy of a tensor, of that category."""
        before, self.category = self.category, HOST
        try:
            return self._empty_on_host(like)
        finally:
            self.category = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return device_of(args[0])
        for kind in types:
            if _is_wrapper(kind):
                return NotImplemented  # DTensor and its like unwrap themselves; their inner ops come back here
        out, op = func(*args, **kwargs or {}), _described(func)
        if op.keeps_storage:
            out = with_kept_storage(func, args, out)
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):  # most, for which this is faster
            if isinstance(leaf, Tensor) and not leaf.is_meta and not _is_wrapper(type(leaf)):
                self._count(leaf.untyped_storage(), op.name)
        for leaf in tree_leaves((args, kwargs, out)) if op.communicates else ():
            if isinstance(leaf, Tensor) and self.category_of(leaf) == ACTIVATIONS:
                self.label(leaf, "communication_buffers")
        return out

    def _label_used(self, module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and self.category_of(parameter) not in ("parameters", HOST):
                self.label(parameter, "unsharded_parameters")
                self._watch_gradient(parameter)

    def _label_kept(self, module: nn.Module, *_: Any) -> None:
        """Label what a unit keeps from forward to backward: a secondary copy."""
        for parameter in module.parameters():
            if self.category_of(parameter) == ACTIVATIONS:
                self.label(parameter, "unsharded_parameters")

    def _watch_gradient(self, parameter: Tensor) -> None:
        # What FSDP1 computes with is a view of what it gathered, to which autograd adds nothing up.
        if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
            hook: Any = parameter.register_post_accumulate_grad_hook
            self._hooked[parameter] = hook(lambda trained: self.label_gradients([trained]))

    def _count(self, storage: torch.UntypedStorage, op: str) -> None:
        """Count a storage with its present size."""
        key, size = storage._cdata, allocated_bytes(storage.nbytes())
        known = self._live.get(key)
        if known is None:
            reference = weakref.ref(storage, partial(self._release, key))
            known = self._live[key] = _Storage(reference, next(self._numbers), 0, self.category)
        if size == known.size_bytes:
            return
        self._change(known, size)
        if known.category != HOST:
            self.resized(known.number, size)
        if self.total_bytes > self.peak.total_bytes:
            self._note_peak(op)

    def _change(self, known: _Storage, size_bytes: int) -> None:
        self.total_bytes += size_bytes - known.size_bytes if known.category != HOST else 0
        self._categories[known.category] += size_bytes - known.size_bytes
        known.size_bytes = size_bytes
        self._at_peak = False
        self.changed()

    def _note_peak(self, op: str) -> None:
        self.peak = Peak(self.total_bytes, self.phase, op, self.categories())
        self._at_peak = True

    def _release(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        """Stop counting a storage that died; its address may already be another's."""
        known = self._live[key]
        if known.reference is reference:
            del self._live[key]
            size_bytes = known.size_bytes
            self._change(known, 0)
            if size_bytes and known.category != HOST:
                self.resized(known.number, 0)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return held_tensor(without_transforms(tensor)).untyped_storage()
