"""A tape of tensor ops, and how to play it with little memory.

A step reads some storages and writes others. Played in the order of the program, a constructor that
initialises all layers and then touches each again would keep the whole model alive in between. Only
random ops must keep their order, so the tape is played by (level, place on the tape), where

    level(step) = max(place if it draws random numbers,
                      levels of earlier writers of what it reads,
                      levels of earlier users of what it writes)

which puts every step right behind the last draw that it depends on (`_ordered`). Walking that order
backwards tells what a later step still needs (`_turns`): the rest is dropped as soon as it is written,
and steps that write nothing needed are left out, unless they draw.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from runtime.deferred_init.random_streams import Draw, RandomReplay

_BY_SHAPE = {getattr(torch.ops.aten, f"{name}_like").default for name in ("zeros", "ones", "full")}
"""Ops whose result depends on the shape of what they are given, and not on what is in it."""


@dataclass(frozen=True)
class Ref:
    """A tensor on a tape: a window into a storage."""

    storage: int
    """Number of its storage on the tape."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Elements of the storage before its first one."""

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor that this is in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.sizes, self.strides)


@dataclass(frozen=True)
class Step:
    """One op."""

    call: Callable[..., Any]
    args: Sequence[Any]
    """Its arguments, with a Ref for every tensor; `kwargs` likewise."""
    kwargs: Mapping[str, Any]
    outputs: tuple[Ref | None, ...]
    """For each tensor of its result, in order, the new storage that it fills; None for one that it was given."""
    reads: frozenset[int]
    """Storages whose content it needs, those that it changes in part included."""
    writes: frozenset[int]
    """Storages that it changes or makes."""
    default_dtype: torch.dtype
    """torch's default dtype when the program ran it."""
    draw: Draw | None = None
    """The random numbers that it uses."""

    @property
    def overwrites(self) -> frozenset[int]:
        """Storages whose earlier content it does not need and replaces whole."""
        return self.writes - self.reads


@dataclass
class Tape:
    """What a program did to tensors."""

    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """All storages, on the meta device; a step's numbers are places here."""
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Content, before the first step, of the storages that the program did not fill itself."""
    steps: list[Step] = field(default_factory=list)
    """In the order of the program."""
    end: Draw | None = None
    """What the program did to the default generator after the last draw."""

    def play(self, finals: Mapping[str, Ref]) -> Iterator[tuple[str, Tensor]]:
        """Run the steps on the CPU; yield each of `finals` as soon as no later step uses its storage.

        Memory that no step fills reads as zeros. Random numbers come from the generators as they
        stand; a caller that draws from them in between changes what follows.
        """
        names: dict[int, list[str]] = {}
        for name, ref in finals.items():
            names.setdefault(ref.storage, []).append(name)
        memory = Memory(self)
        turns = _turns(_ordered(self.steps), frozenset(names))
        draws = [step.draw for step, _, _ in turns if step.draw] + ([self.end] if self.end else [])
        random = RandomReplay(draws)

        def release(numbers: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
            """Yield the finals in some storages, and keep nothing of one that was taken."""
            for number in sorted(numbers):
                tensors = [(name, memory.view(finals[name])) for name in names[number]]
                memory.drop(frozenset({number}))
                while tensors:
                    yield tensors.pop(0)

        yield from release(frozenset(names).difference(*(finished for _, finished, _ in turns)))
        for step, finished, drops in turns:
            if step.draw:
                random.arrive(step.draw)
            memory.run(step)
            memory.drop(drops)
            yield from release(finished)
        if self.end:
            random.arrive(self.end)

    def value(self, ref: Ref) -> Tensor | None:
        """Compute a tensor as it is after the last step; None if it depends on random numbers."""
        needed, chosen = {ref.storage}, []
        for step in reversed(self.steps):
            if needed & step.writes:
                if step.draw:
                    return None
                read = frozenset[int]() if step.call in _BY_SHAPE else step.reads
                needed = (needed - step.overwrites) | read
                chosen.append(step)
        memory = Memory(self)
        for step in reversed(chosen):
            memory.run(step)
        return memory.view(ref)


class Memory:
    """Storages that hold data at the moment."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._held: dict[int, torch.UntypedStorage] = {}

    def run(self, step: Step) -> None:
        """Do one step."""
        for number in step.overwrites.difference(ref.storage for ref in step.outputs if ref):
            if number not in self._held:
                self._held[number] = _bytes(torch.empty, self._tape.storages[number])
        args, kwargs = tree_map_only(Ref, self.view, (step.args, dict(step.kwargs)))
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(step.default_dtype)
        try:
            with torch.no_grad():
                result = step.call(*args, **kwargs)
        finally:
            torch.set_default_dtype(default_dtype)
        for ref, tensor in zip(step.outputs, tensors_of(result), strict=True):
            if ref is not None:
                self._keep(ref, tensor)

    def view(self, ref: Ref) -> Tensor:
        """Return a tensor; its storage starts as its constant, or else as zeros."""
        if ref.storage not in self._held:
            constant = self._tape.constants.get(ref.storage)
            self._held[ref.storage] = (
                _bytes(torch.zeros, self._tape.storages[ref.storage])
                if constant is None
                else torch.empty(0, dtype=torch.uint8).set_(constant).clone().untyped_storage()
            )
        return ref.over(self._held[ref.storage])

    def drop(self, numbers: frozenset[int]) -> None:
        """Free storages."""
        for number in numbers:
            self._held.pop(number, None)

    def _keep(self, ref: Ref, tensor: Tensor) -> None:
        """Hold an op's new tensor, laid out as the program saw it: kernels of CPU and meta may differ."""
        storage = tensor.untyped_storage()
        layout = (tensor.stride(), tensor.storage_offset(), storage.nbytes())
        if layout == (ref.strides, ref.offset, self._tape.storages[ref.storage].nbytes()):
            self._held[ref.storage] = storage
        elif tensor.numel():  # on a CPU batch norm leaves out statistics that an evaluation does not take
            self.view(ref).copy_(tensor)


def _bytes(make: Callable[..., Tensor], like: torch.UntypedStorage) -> torch.UntypedStorage:
    return make(like.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _ordered(steps: Sequence[Step]) -> list[Step]:
    """Return the steps, each right behind the last draw that it depends on."""
    levels: list[int] = []
    written: dict[int, int] = {}
    used: dict[int, int] = {}
    for place, step in enumerate(steps):
        before = [written.get(number, -1) for number in step.reads] + [used.get(number, -1) for number in step.writes]
        level = max([place if step.draw else -1, *before])
        levels.append(level)
        for number in step.writes:
            written[number] = level
        for number in step.reads | step.writes:
            used[number] = max(level, used.get(number, -1))
    return [steps[place] for place in sorted(range(len(steps)), key=lambda place: (levels[place], place))]


def _turns(steps: Sequence[Step], finals: frozenset[int]) -> list[tuple[Step, frozenset[int], frozenset[int]]]:
    """Return the steps that matter, each with what ends there.

    That is the storages of finals that no later step uses, and those whose content nobody needs any more.
    """
    turns = []
    needed, waiting = finals, finals
    for step in reversed(steps):
        if step.draw is None and not step.writes & needed:
            continue
        touched = step.reads | step.writes
        finished = touched & waiting
        turns.append((step, finished, touched - needed))
        waiting -= finished
        needed = (needed - step.overwrites) | step.reads
    return turns[::-1]
