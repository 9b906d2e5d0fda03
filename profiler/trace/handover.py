"""What a block is handed and hands on, and a stand-in that hands on the same without running it.

    arguments -> boundary -> forward -> outputs          gradients <- boundary <- backward <- gradients
    arguments -> boundary -> stand-in -> outputs         gradients <- boundary <- stand-in <- gradients

A stand-in does to live memory what the block that it stands for does to that of others: it takes the same arguments,
keeps the same of them and of its outputs until its backward, and makes outputs and gradients of the same layouts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from profiler.handed_containers import HandedContainers
from profiler.trace.autograd_order import next_number
from profiler.trace.elementwise import Layout

PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
"""Classes of values that are compared by value."""


class UnlikeError(Exception):
    """Blocks that were taken for alike are not."""


class Replayed(NamedTuple):
    """An execution of a block that is not run, as others are alike."""

    first: int
    """The first of them, which runs."""
    last: int
    """The last of them, which runs, and whose backward is before its own."""
    operator: int
    """Operator of its last call."""
    saves: bool
    """Whether it saves anything for backward."""


@dataclass(frozen=True, slots=True)
class StandIns:
    """What is not run in a pass."""

    executions: Mapping[int, Replayed]
    """By number."""
    idle: frozenset[str]
    """Paths of the blocks of which no execution runs."""

    def are_around(self, path: str) -> bool:
        """Return whether a module is inside a block that does not run."""
        return bool(self.idle) and any(path[:end] in self.idle for end, mark in enumerate(path) if mark == ".")


NO_STAND_INS = StandIns({}, frozenset())


@dataclass(frozen=True, slots=True)
class Shape:
    """Nested arguments or outputs, but for the numbers in tensors."""

    structure: TreeSpec
    leaves: tuple[Any, ...]
    """Of arguments: tensors by layout, need of a gradient and shared storages, others by value or identity.

    Of outputs: (layout, need of a gradient) of tensors that are made, (None, place) of arguments, (class, value).
    """


@dataclass(slots=True)
class Handover:
    """What one run of a block was handed, and handed on."""

    begins: int = field(default_factory=next_number)
    """Number of the next autograd node as the block begins."""
    leaves: list[Any] = field(default_factory=list)
    """Arguments, as the block gets them; only while it runs."""
    containers: HandedContainers | None = None
    """Of the arguments; only while it runs."""
    trained: tuple[Tensor, ...] = ()
    """Those of them that need gradients, each once; only while it runs."""
    arguments: Shape | None = None
    outputs: Shape | None = None
    """None for what no stand-in can hand on."""
    gradients: tuple[Layout | None, ...] = ()
    """Of what needs them; None for those that get none, as the block does not use them."""
    are_dense: bool = True
    """Whether the gradients have storages of their own size."""
    is_shared: bool = False
    """Whether something that needs a gradient is used by others than the block too."""

    @property
    def makes_a_difference(self) -> bool:
        """Whether gradients that leave the block together are others than those that leave it one by one."""
        return self.is_shared or None in self.gradients

    def hand(self, args: Any, kwargs: Any, bounded: Handover | None = None) -> tuple[Any, Any]:
        """Return the arguments of the block as it gets them.

        There is no boundary if the same handover has been seen `bounded`.
        """
        given = hooked = args, kwargs
        leaves, structure = tree_flatten(given)
        trained = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        if bounded is not None:
            # What leaves the block in all: stand-ins hand it on together, of which others see nothing.
            self.trained, self.gradients, self.are_dense = (*trained.values(),), bounded.gradients, bounded.are_dense
        elif trained and torch.is_grad_enabled():
            handed = _Boundary.apply(self, *trained.values())  # type: ignore[no-untyped-call]
            self.begins = next_number()
            handed = _Filled.apply(self, *handed)  # type: ignore[no-untyped-call]
            replaced = dict(zip(trained, handed, strict=True))
            leaves = [replaced.get(id(leaf), leaf) for leaf in leaves]
            self.trained = handed
            hooked = tree_unflatten(leaves, structure)
        self.leaves = leaves
        self.arguments = Shape(structure, _arguments(leaves))
        self.containers = HandedContainers(given, hooked)
        args, kwargs = self.containers.handed
        return args, kwargs

    def returned(self, out: Any, is_made: Callable[[Tensor], bool]) -> list[Tensor]:
        """Note what the block returns, and return what it made of that.

        `is_made` tells the tensors that a stand-in can make.
        """
        leaves, structure = tree_flatten(out)
        places = {id(leaf): place for place, leaf in enumerate(self.leaves)}
        storages = {leaf.untyped_storage()._cdata for leaf in self.leaves if isinstance(leaf, Tensor)}
        described, made = list[Any](), list[Tensor]()
        for leaf in leaves:
            if isinstance(leaf, PLAIN):
                described.append((leaf.__class__, leaf))
            elif id(leaf) in places:
                described.append((None, places[id(leaf)]))
            elif isinstance(leaf, Tensor) and is_made(leaf) and leaf.untyped_storage()._cdata not in storages:
                described.append((dense_layout(leaf), leaf.requires_grad))
                storages.add(leaf.untyped_storage()._cdata)
                made.append(leaf)
        if len(described) == len(leaves) and all(map(dense_layout, made)):
            self.outputs = Shape(structure, tuple(described))
        if self.end():  # it has changed what it was handed, which no stand-in does
            self.outputs = None
        return made

    def end(self) -> bool:
        """Give the caller's containers back; return whether the block has changed them."""
        assert self.containers is not None
        assert self.arguments is not None
        leaves, structure = tree_flatten(self.containers.handed)
        is_changed = structure != self.arguments.structure or list(map(id, leaves)) != list(map(id, self.leaves))
        self.containers.give_back({})
        self.leaves, self.trained, self.containers = [], (), None
        return is_changed


def dense_layout(tensor: Tensor) -> Layout | None:
    """Return the layout of a tensor that fills its storage, None of any other."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    fills = tensor.untyped_storage().nbytes() == (span if tensor.numel() else 0) * tensor.element_size()
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype) if fills else None


def _arguments(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what `Shape.leaves` holds of arguments."""
    described: list[Any] = []
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            place = storages.setdefault(leaf.untyped_storage()._cdata, len(storages))
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, place))
        elif isinstance(leaf, PLAIN):
            described.append((leaf.__class__, leaf))
        else:
            described.append(_identity(leaf))
    return tuple(described)


def _identity(value: Any) -> tuple[int, object]:
    """Return what is equal for the same object only, and is for none that comes later at its address."""
    try:
        reference: object = weakref.ref(value)
    except TypeError:
        reference = object()
    return id(reference), reference


class _Boundary(torch.autograd.Function):
    """Hands a block its inputs as FSDP2 does: their gradients leave it together, when all of them are there."""

    @staticmethod
    def forward(ctx: Any, handover: Handover, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.handover = handover
        return tuple(tensor.detach() for tensor in tensors)  # no views, so that the block may change them in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


class _Filled(torch.autograd.Function):
    """Makes, as FSDP2 does, gradients of zeros for inputs that the block does not use, and notes which it has made."""

    @staticmethod
    def forward(ctx: Any, handover: Handover, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.noted, ctx.layouts = handover, [(one.shape, one.dtype, one.device) for one in tensors]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        layouts = [None if one is None else dense_layout(one) for one in gradients]
        ctx.noted.are_dense = all(
            layout is not None or one is None for layout, one in zip(layouts, gradients, strict=True)
        )
        ctx.noted.gradients = tuple(layouts)
        filled = (
            torch.zeros(shape, dtype=dtype, device=device) if one is None else one
            for one, (shape, dtype, device) in zip(gradients, ctx.layouts, strict=True)
        )
        return (None, *filled)


def note_shared(loss: Tensor) -> None:
    """Note of everything that was handed over on the way to a loss whether others use it too."""
    # As long as a node of C++ is referred to, it is the same object in Python.
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, uses = {*nodes}, Counter[tuple[Node | None, int]]()
    for node in nodes:
        uses.update(node.next_functions)
        for made, _ in node.next_functions:
            if made is not None and made not in seen:
                seen.add(made)
                nodes.append(made)
    for node in nodes:
        handover = getattr(node, "handover", None)
        if isinstance(handover, Handover):
            handover.is_shared = any(uses[edge] > 1 for edge in node.next_functions if edge[0] is not None)


@dataclass(frozen=True, slots=True)
class StandIn:
    """Hands on what a block does."""

    like: Handover
    """Of the block that it stands for, which has run."""
    last: Callable[[], Any]
    """Gives the execution of one whose backward runs before its own."""
    keeps: Sequence[Tensor]
    """Those of its arguments that it keeps until its backward."""
    keeps_made: Sequence[int]
    """Which of the tensors that it makes."""
    make: Callable[[Layout], Tensor]
    """Makes tensors of which nothing is known."""

    def run(self, own: Handover) -> Any:
        """Return outputs for arguments that were handed over.  Raises UnlikeError."""
        wanted, leaves = self.like.outputs, own.leaves
        if wanted is None or own.arguments != self.like.arguments:
            raise UnlikeError
        layouts = [value for value in wanted.leaves if isinstance(value[0], Layout)]
        made = _Standing.apply(self, layouts, *own.trained) if layouts else ()  # type: ignore[no-untyped-call]
        if [one.requires_grad for one in made] != [needed for _, needed in layouts]:
            raise UnlikeError
        fresh = iter(made)
        outputs = [
            next(fresh) if isinstance(kind, Layout) else leaves[value] if kind is None else value
            for kind, value in wanted.leaves
        ]
        own.end()
        return tree_unflatten(outputs, wanted.structure)


class _Standing(torch.autograd.Function):
    """The one node of a stand-in."""

    @staticmethod
    def forward(
        ctx: Any, stand_in: StandIn, layouts: Sequence[tuple[Layout, bool]], *trained: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        made = tuple(stand_in.make(layout) for layout, _ in layouts)
        ctx.mark_non_differentiable(*(one for one, (_, needed) in zip(made, layouts, strict=True) if not needed))
        ctx.save_for_backward(*stand_in.keeps, *(made[place] for place in stand_in.keeps_made))
        ctx.last, ctx.make, ctx.count = stand_in.last, stand_in.make, len(trained)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        last = ctx.last().handover
        if not last.are_dense or len(last.gradients) != ctx.count:
            raise UnlikeError
        return (None, None, *(None if layout is None else ctx.make(layout) for layout in last.gradients))
