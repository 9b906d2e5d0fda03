"""Values of tensors without data, where they follow from what is known: shapes, constants, assumptions.

A trace has no data, but it knows what `torch.arange(n)` holds, and so what any op makes of it.  `KnownValues`
notes, for the storages whose contents are known, how to compute them on the CPU (`Contents`), and computes
nothing until a value is asked for:

    known(output of op) = known(every tensor argument)

A storage is known as a whole, so views cost nothing; an op that writes unknown values into it makes it unknown.
Equal ops on equal contents share their result, so what one layer asks is not computed again for the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from profiler.simulated_ranks import Part, exchanged

CPU = torch.device("cpu")
Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]
"""Of a tensor: dtype, shape, strides, offset, and the bytes of its storage."""


class Contents:
    """What a storage holds, computed when it is first asked for."""

    __slots__ = ("_compute", "_storage")

    def __init__(self, compute: Callable[[], torch.UntypedStorage]) -> None:
        self._compute: Callable[[], torch.UntypedStorage] | None = compute
        self._storage: torch.UntypedStorage | None = None

    def storage(self) -> torch.UntypedStorage:
        """Return a storage on the CPU, which nobody may write into."""
        if self._storage is None:
            assert self._compute is not None
            self._storage, self._compute = self._compute(), None
        return self._storage


class View(NamedTuple):
    """How a tensor reads contents."""

    contents: Contents
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


class _Held(weakref.ref[torch.UntypedStorage]):
    """A storage of which the contents are known."""

    __slots__ = ("contents", "key")

    contents: Contents
    key: int


@dataclass(frozen=True, slots=True)
class Effects:
    """What an op does beside computing its outputs from its arguments."""

    names: tuple[str, ...]
    """Its arguments."""
    written: tuple[str, ...]
    """Those that it writes into."""
    random: bool
    """Whether it draws, so that its outputs are not known."""


class KnownValues:
    """Which storages have known contents.  `follow` after every op."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._memo: dict[Any, list[Any]] = {}
        """By op and frozen arguments: what it makes, or what it writes into becomes."""

    def clear_memo(self) -> None:
        """Drop results that only equal ops would ask for again."""
        self._memo.clear()

    # --- reading ----------------------------------------------------------------------------------

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values, on the CPU, not to be written into; None if they are not known."""
        view = self._view(tensor)
        if view is None:
            return None
        with computing():
            return view.over(view.contents.storage())

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values are known."""
        return self._view(tensor) is not None

    def _view(self, tensor: Tensor) -> View | None:
        storage = tensor.untyped_storage()
        if (held := self._held.get(storage._cdata)) is not None:
            contents = held.contents
        elif has_data(tensor) and tensor.is_cpu:
            contents = Contents(lambda: storage)
        else:
            return None
        return View(contents, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    # --- noting -----------------------------------------------------------------------------------

    def assume(self, tensor: Tensor, key: Any, compute: Callable[[], Tensor]) -> None:
        """Note that `compute` returns the values of a tensor; for tensors of a layout, equal keys share them."""
        layout = _layout(tensor)
        made = self._memo.get((key, layout))
        if made is None:
            made = self._memo[key, layout] = [Contents(lambda: _laid_out(compute(), *layout))]
        self._hold(tensor, made[0])

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Note that `target` holds the values of `source`, whose dtype may be another, if those are known."""
        view, layout = self._view(source), _layout(target)
        if view is not None:
            self._hold(target, Contents(lambda: _laid_out(view.over(view.contents.storage()), *layout)))

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor with the values of one that has data, any other as it is."""
        if not has_data(tensor):
            return tensor
        moved = tensor.to("meta")
        self.carry(tensor, moved)
        return moved

    def forget(self, tensor: Tensor) -> None:
        """Note that nothing is known of a tensor's storage any more."""
        self._held.pop(tensor.untyped_storage()._cdata, None)

    def follow(
        self,
        op: OpOverload,
        effects: Effects,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        out: Any,
    ) -> bool:
        """Note what is known after `out = op(*args, **kwargs)`; return whether `out` is.

        `effects` are those of the op, `tensors` the tensors among the arguments.
        """
        known = not effects.random
        for tensor in tensors:
            if tensor.untyped_storage()._cdata not in self._held and not (has_data(tensor) and tensor.is_cpu):
                known = False
                break
        if not effects.written:
            if known:
                self._note_outputs(op, args, kwargs, out)
            return known
        named = {**dict(zip(effects.names, args, strict=False)), **kwargs}
        written = list(_tensors([named.get(name) for name in effects.written]))
        if known and len(written) == 1 and not has_data(written[0]):
            self._note_write(op, args, kwargs, written[0])
        else:
            for tensor in written:
                self.forget(tensor)
        return known

    def exchange(self, op: OpOverload, written: Effects, args: Sequence[Any], out: Any) -> None:
        """Note what is known after a collective of ranks that hold the same, which is not run again for its values."""
        found = []
        for exchange in exchanged(op, args, out):
            view = self._view(exchange.source)
            if view is not None and exchange.is_known:
                found.append((exchange.target, _received(view, exchange.part, _layout(exchange.target))))
        named = dict(zip(written.names, args, strict=False))
        for tensor in _tensors([named.get(name) for name in written.written]):
            self.forget(tensor)
        for target, contents in found:
            if has_data(target):
                with computing():
                    target.copy_(View(contents, *_layout(target)[:4]).over(contents.storage()))
            else:
                self._hold(target, contents)

    def computed(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Return what an op makes of known values: numbers as they are, tensors without data, unless all come with it.

        Return NotImplemented if some of the `tensors` in its arguments are not known.
        """
        if any(self._view(tensor) is None for tensor in tensors):
            return NotImplemented
        if all(map(has_data, tensors)):
            with computing():
                return op(*args, **kwargs)
        template = self._template((list(args), _on_cpu(kwargs)))
        key = ("computed", op, _frozen(template))
        made = self._memo.get(key)
        if made is None:
            found = _run(op, template)
            made = self._memo[key] = [found, *(Contents(tensor.untyped_storage) for tensor in _tensors(found))]
        contents = iter(made[1:])
        dataless = next(tensor for tensor in tensors if not has_data(tensor))

        def without_data(found: Tensor) -> Tensor:
            like = dataless.new_empty_strided(found.shape, found.stride(), dtype=found.dtype)
            self._hold(like, next(contents))
            return like

        return tree_map_only(Tensor, without_data, made[0])

    def _note_outputs(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        outputs = list(_tensors(out))
        if not outputs or any(tensor.untyped_storage()._cdata in self._held for tensor in outputs):
            return  # no tensors, or views
        if any(map(has_data, outputs)):
            return
        template = self._template((list(args), _on_cpu(kwargs)))
        layouts = [_layout(tensor) for tensor in outputs]
        key = (op, _frozen(template), tuple(layouts))
        made = self._memo.get(key)
        if made is None:
            results: list[Tensor] = []

            def output(index: int) -> torch.UntypedStorage:
                if not results:
                    results.extend(_tensors(_run(op, template)))
                return _laid_out(results[index], *layouts[index])

            made = [Contents(partial(output, index)) for index in range(len(outputs))]
            self._memo[key] = made
        for tensor, contents in zip(outputs, made, strict=True):
            self._hold(tensor, contents)

    def _note_write(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], target: Tensor) -> None:
        before = self._view(target)
        assert before is not None
        template = self._template((list(args), _on_cpu(kwargs)))
        key = (op, _frozen(template))
        made = self._memo.get(key)
        if made is None:

            def after() -> torch.UntypedStorage:
                copy: torch.UntypedStorage = before.contents.storage().clone()  # type: ignore[no-untyped-call]
                _run(op, template, {before: before.over(copy)})
                return copy

            made = self._memo[key] = [Contents(after)]
        self._hold(target, made[0])

    def _hold(self, tensor: Tensor, contents: Contents) -> None:
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None:
            held = _Held(storage, lambda dead: self._held.pop(dead.key, None))
            held.key = storage._cdata
            self._held[held.key] = held
        held.contents = contents

    def _template(self, value: Any) -> Any:
        """Return a value with views in place of its tensors, all of which are known."""
        if isinstance(value, Tensor):
            return self._view(value)
        if isinstance(value, (list, tuple)):
            return [self._template(item) for item in value]
        if isinstance(value, dict):
            return {name: self._template(item) for name, item in value.items()}
        return value


@contextmanager
def computing() -> Iterator[None]:
    """Let ops compute, whatever modes are active."""
    # Both guards are private; written for torch 2.11 to 2.13.
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _run(op: OpOverload, template: Any, replaced: Mapping[View, Tensor] = MappingProxyType({})) -> Any:
    """Run an op on the values that a template's views read."""

    def filled(value: Any) -> Any:
        if isinstance(value, View):
            return replaced[value] if value in replaced else value.over(value.contents.storage())
        if isinstance(value, list):
            return [filled(item) for item in value]
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return value

    with computing():
        args, kwargs = filled(template)
        out = op(*args, **kwargs)
        return out.zero_() if op.overloadpacket in _EMPTY else out


_EMPTY = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}


def _laid_out(
    values: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, size_bytes: int
) -> torch.UntypedStorage:
    """Return a storage whose view of that layout holds the values."""
    with computing():
        storage = torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()
        torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides).copy_(values.view(shape))
    return storage


def _received(view: View, part: Part, layout: Layout) -> Contents:
    """Return what a storage of that layout holds which has received a part of a view."""
    return Contents(lambda: _laid_out(part.repeated(view.over(view.contents.storage()), layout[1]), *layout))


def _layout(tensor: Tensor) -> Layout:
    size_bytes = tensor.untyped_storage().nbytes()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), size_bytes


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": CPU} if kwargs.get("device") is not None else kwargs


def _frozen(value: Any) -> Any:
    """Return a hashable that is equal for equal templates only."""
    if isinstance(value, View):
        return value
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    return value.__class__, value  # the class, because 1 == 1.0 == True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def effects_of(op: OpOverload) -> Effects:
    """Return what an op does, from its schema."""
    arguments = op._schema.arguments
    written = (one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write)
    random = torch.Tag.nondeterministic_seeded in op.tags
    return Effects(tuple(one.name for one in arguments), tuple(written), random)


def has_data(tensor: Tensor) -> bool:
    """Return whether a tensor is a real one, with values of its own."""
    # In this order: a fake tensor asks every dispatch mode for its device.
    return not _is_fake(tensor) and not tensor.is_meta


def _is_fake(tensor: Tensor) -> bool:
    # Most are plain: to look for an attribute that is missing takes longer than all else here.
    return type(tensor) not in _PLAIN and getattr(tensor, "fake_mode", None) is not None


_PLAIN = (Tensor, torch.nn.Parameter)
