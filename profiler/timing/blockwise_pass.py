"""One training pass of a real model, block by block: what has run forward runs backward before the next block begins.

A *segment* is a block, or what runs before, between or after blocks.  At its end its output tensors are
detached, and it runs backward at once from random gradients, so that only one segment's activations are live at a
time.  Every forward of an operator's module begins an *entry*: all that runs until the next one belongs to it.

Autograd numbers its nodes as the forward makes them, and runs those that are ready in falling order; a
node's consumers have higher numbers, so it runs all in falling order.  The backward of an entry therefore
lasts from its last node to the last node of the entry before, which is where the clock is read.
"""

import functools
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.errors import OsdpError
from profiler.model_source import Inputs
from profiler.timing.stopwatch import Clock, Stopwatch
from profiler.trace.autograd_order import next_number, number_of, without_own_node
from profiler.trace.metered_pass import find_loss, replaced_forwards


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times and saved bytes of one pass by entry, in order."""

    entries: Sequence[int]
    """Operator of each."""
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    saved_bytes: Sequence[int]
    """Activations that it was the first to keep for backward; empty if not counted."""
    is_host_bound: bool = False
    """Whether the device may have waited for the host."""
    forward_launch_s: Sequence[float] = ()
    """Seconds in which the host launched the forward of each; 0 where it computes itself."""
    backward_launch_s: Sequence[float] = ()

    @property
    def total_s(self) -> float:
        """Seconds of the whole pass without what cutting it costs."""
        return sum(self.forward_s) + sum(self.backward_s)


class PassError(Exception):
    """An exception in a pass, with the operator that ran last; `__cause__` is the exception."""

    def __init__(self, operator: int | None, direction: str) -> None:
        super().__init__(operator, direction)
        self.operator = operator
        self.direction = direction


class _Label(NamedTuple):
    direction: str
    """`forward` or `backward`."""
    entry: int


def run_blockwise(
    module: nn.Module,
    operators: Mapping[str, int],
    blocks: Collection[str],
    inputs: Inputs,
    clock: Clock,
    count_saved: bool,
) -> PassTimes:
    """Run one forward and backward, cut at the blocks; counting what is kept for backward makes it slower.

    `operators` are by the paths of their modules, `blocks` paths.  Raises PassError for what the model
    raises, OsdpError for a loss that cannot be trained.
    """
    run = _Run(Stopwatch(clock))

    def watched(path: str, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        is_block = path in blocks
        return run.watched(forward, operators.get(path), is_block) if is_block or path in operators else None

    saved = _Saved((*module.parameters(), *module.buffers()), run)
    counting = saved_tensors_hooks(saved.keep, lambda tensor: tensor) if count_saved else nullcontext()
    with replaced_forwards(module, watched), counting:
        run.go(module, inputs)
    every = range(len(run.entries))
    (forward_s, backward_s), launches_s = (
        [[totals.get(_Label(way, i), 0.0) for i in every] for way in ("forward", "backward")]
        for totals in (run.watch.totals(), run.watch.launches())
    )
    saved_bytes = [saved.bytes[i] for i in every] if count_saved else []
    return PassTimes(run.entries, forward_s, backward_s, saved_bytes, run.watch.is_host_bound, *launches_s)


class _Run:
    """A pass that is under way."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.entries: list[int] = []
        self.in_backward = False
        self._starts = [0]
        """Numbers from which on nodes belong to each entry; what precedes the first belongs to it."""
        self._done: set[int] = set()
        """Numbers of the nodes whose backward was run; to hold the nodes would hold the leaves below them."""

    @property
    def entry(self) -> int:
        """The entry that runs now."""
        return max(0, len(self.entries) - 1)

    def go(self, module: nn.Module, inputs: Inputs) -> None:
        """Run forward, loss and backward."""
        try:
            with torch.enable_grad():
                self.watch.switch(_Label("forward", 0))
                output = module(*inputs[0], **inputs[1])
                loss, _ = find_loss(output)
                self.watch.switch(None)
            self._go_back([loss])
        except OsdpError:  # of a loss that cannot be trained
            raise
        except Exception as error:
            label = self.watch.running if isinstance(self.watch.running, _Label) else _Label("forward", self.entry)
            operator = self.entries[label.entry] if self.entries else None
            raise PassError(operator, label.direction) from error

    # --- forward ----------------------------------------------------------------------------------

    def watched(self, inner: Callable[..., Any], operator: int | None, is_block: bool) -> Callable[..., Any]:
        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.in_backward:  # a model that checkpoints itself
                return inner(*args, **kwargs)
            if is_block:
                args, kwargs = self._cut((args, kwargs))
            if operator is not None:
                self._enter(operator)
            output = inner(*args, **kwargs)
            return self._cut(output) if is_block else output

        return forward

    def _enter(self, operator: int) -> None:
        if self.entries:
            self._starts.append(next_number())
        self.entries.append(operator)
        self.watch.switch(_Label("forward", self.entry))

    def _cut(self, tree: Any) -> Any:
        """Run the backward of what led to the tensors in `tree`, and return them as leaves."""
        self.watch.switch(None)
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        self._go_back(tensors)
        leaves: dict[int, Tensor] = {}  # one for a tensor that comes twice: models ask `key is query`
        for tensor in tensors:
            if tensor.grad_fn is not None and id(tensor) not in leaves:
                leaves[id(tensor)] = tensor.detach().requires_grad_()
        cut = tree_map_only(Tensor, lambda tensor: leaves.get(id(tensor), tensor), tree)
        self.watch.switch(_Label("forward", self.entry))
        return cut

    # --- backward ---------------------------------------------------------------------------------

    def _go_back(self, tensors: Sequence[Tensor]) -> None:
        """Run the backward of what led to the tensors and was not run back yet, and drop the gradients."""
        nodes, leaves = self._new(tensors)
        roots = list({id(tensor): tensor for tensor in tensors if tensor.grad_fn in nodes.values()}.values())
        if not leaves or not roots:
            return
        gradients = [torch.randn_like(root) if root.dim() else torch.ones_like(root) for root in roots]
        last = {bisect_right(self._starts, number) - 1: nodes[number] for number in sorted(nodes)}
        for entry, node in last.items():
            label = _Label("backward", entry)
            node.register_prehook(lambda _, label=label: self.watch.switch(label))
        self._done |= nodes.keys()
        self.in_backward = True
        self.watch.switch(_Label("backward", max(last)))
        with torch.autocast(roots[0].device.type, enabled=False):  # a loop runs it after the forward
            torch.autograd.backward(roots, gradients, inputs=leaves)
        self.watch.switch(None)
        self.in_backward = False
        for leaf in leaves:
            leaf.grad = None

    def _new(self, tensors: Iterable[Tensor]) -> tuple[dict[int, Node], list[Tensor]]:
        """Return the nodes that led to the tensors and were not run back yet, by number, and the leaves below them.

        A tensor that went past a block on its own, as a residual may, still leads to nodes that were.
        """
        found: dict[int, Node] = {}
        leaves: dict[Node, Tensor] = {}
        stack = [tensor.grad_fn for tensor in tensors]
        while stack:
            node = stack.pop()
            if node is None:
                continue
            if node.name().endswith("AccumulateGrad"):  # these have no numbers of their own
                leaves[node] = node.variable  # type: ignore[attr-defined]
            elif (number := number_of(node)) not in found and number not in self._done:
                found[number] = node
                stack += [below for below, _ in node.next_functions]
        return found, list(leaves.values())


class _Saved:
    """Counts the storages that autograd keeps, each once, for the entry that was the first to keep it."""

    def __init__(self, resident: Iterable[Tensor], run: _Run) -> None:
        self.bytes: Counter[int] = Counter()
        self._run = run
        self._resident = [tensor.untyped_storage() for tensor in resident]
        self._seen = {storage.data_ptr(): weakref.ref(storage) for storage in self._resident}

    def keep(self, tensor: Tensor) -> Tensor:
        """Note that autograd keeps the tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._seen and not self._run.in_backward:
            # A storage that dies leaves its address to others.
            self._seen[address] = weakref.ref(storage, lambda dead: self._forget(address, dead))
            self.bytes[self._run.entry] += storage.nbytes()
        return without_own_node(tensor)

    def _forget(self, address: int, dead: weakref.ref[torch.UntypedStorage]) -> None:
        if self._seen.get(address) is dead:
            del self._seen[address]
