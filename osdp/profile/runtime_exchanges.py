"""The collectives as the runtime runs them, with the copies that it makes around them.

A unit's flat tensor of S bytes is cut into a few parameters, all fp32:

    all_gather       shards copied into this rank's part of the flat tensor, gathered in place, and copied out
                     into whole parameters (FSDP2's `foreach_all_gather` and `foreach_all_gather_copy_out`)
    reduce_scatter   gradients cut for the ranks and copied into the flat tensor, averaged, and left as views
                     of this rank's part (`foreach_reduce`); `runtime.strategies.ring_reduce_scatter` has the ring
    all_reduce       averaged in place (`foreach_reduce` across copies, and DistributedDataParallel's buckets)
    broadcast        the owner copies its parameters into the flat tensor and sends it (`runtime.strategies.owner`)
    reduce           gradients copied into the flat tensor, summed at the owner, divided, and copied there
    pull, push       as all_gather and reduce_scatter, through windows in shared memory (`runtime.odc`)
    publish          a rank's shard copied into its window, and its accumulator read and cleared: S bytes read
                     and written in all, on each rank alone

Read in torch 2.13; public operations stand for FSDP2's own, which move the same bytes.  What is allocated
anew for each of them there is allocated inside here too.
"""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.odc.shared_memory import SharedMemoryTransport
from runtime.odc.windows import Window, WindowSpec
from runtime.strategies.ring_reduce_scatter import ring_reduce_scatter
from runtime.torch_compat import all_gather, reduce_scatter

PARAMETERS = 4
"""Into which a flat tensor is cut: a linear layer's and a norm's weight and bias."""
PUBLISH_PASSES = 5
"""Tensors of a shard's size that publishing and taking read and write, as `planner.strategies.odc` counts them."""
MAX_ROOTS = 4
"""Owners that take turns, spread over the group: where the tree of a broadcast begins decides what crosses nodes."""

Exchange = Callable[[int], list[Tensor]]
"""Runs a collective once with all that belongs to it; the argument counts calls. Returns what this rank got."""


def element_unit(world_size: int) -> int:
    """Return the number of elements of which sizes are multiples, so that every group cuts them evenly."""
    return world_size * PARAMETERS


def roots_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of a group that are owners in turn."""
    last = group.size() - 1
    count = min(group.size(), MAX_ROOTS)
    return tuple(round(index * last / max(count - 1, 1)) for index in range(count))


def prepare(operation: str, algorithm: str, group: dist.ProcessGroup, numel: int, device: torch.device) -> Exchange:
    """Return a collective over flat tensors of `numel` elements, a multiple of `element_unit`.

    Inputs are filled with the number of this rank in the world, plus 1.
    """
    make: Callable[[], Exchange] = getattr(_Exchanges(algorithm, group, numel, device), operation)
    return make()


class _Exchanges:
    """Makes each collective, by its name, over one size of tensor."""

    def __init__(self, algorithm: str, group: dist.ProcessGroup, numel: int, device: torch.device) -> None:
        self.algorithm, self.group, self.numel, self.device = algorithm, group, numel, device
        self.ranks, self.value = group.size(), float(dist.get_rank() + 1)

    def _filled(self, numel: int) -> Tensor:
        return torch.full((numel,), self.value, device=self.device)

    def _parameters(self) -> list[Tensor]:
        """Return whole parameters, or their gradients."""
        return [self._filled(self.numel // PARAMETERS) for _ in range(PARAMETERS)]

    def all_gather(self) -> Exchange:
        return self._gathering(lambda flat, mine: all_gather(flat, mine, self.group))

    def pull(self) -> Exchange:
        shard_numel = self.numel // self.ranks
        return self._through_window(lambda window: self._gathering(lambda flat, _: window.pull(flat)), shard_numel)

    def _gathering(self, gather: Callable[[Tensor, Tensor], None]) -> Exchange:
        """Return what FSDP2 does around a gather of (the flat tensor, this rank's part of it)."""
        each = self.numel // self.ranks // PARAMETERS
        shards = [self._filled(each) for _ in range(PARAMETERS)]

        def run(_: int) -> list[Tensor]:
            flat = torch.empty(self.numel, device=self.device)
            mine = flat.view(self.ranks, -1)[self.group.rank()]
            for part, shard in zip(torch.split(mine, each), shards, strict=True):
                part.copy_(shard)
            gather(flat, mine)
            whole = [torch.empty(self.ranks, each, device=self.device) for _ in shards]
            torch.split_with_sizes_copy(flat.view(self.ranks, -1), [each] * PARAMETERS, dim=1, out=whole)
            return whole

        return run

    def reduce_scatter(self) -> Exchange:
        scatter = ring_reduce_scatter if self.algorithm == "ring" else reduce_scatter
        return self._reducing(lambda mine, flat: scatter(mine, flat, dist.ReduceOp.AVG, self.group))

    def push(self) -> Exchange:
        def make(window: Window) -> Exchange:
            def push(mine: Tensor, flat: Tensor) -> None:
                mine.zero_()  # FSDP2 gets zeros until the ranks have synchronized
                window.push(flat)

            return self._reducing(push)

        return self._through_window(make, self.numel // self.ranks)

    def _reducing(self, scatter: Callable[[Tensor, Tensor], None]) -> Exchange:
        """Return what FSDP2 does around a reduction to (this rank's part, of the flat tensor)."""
        gradients = self._parameters()

        def run(_: int) -> list[Tensor]:
            flat = torch.empty(self.numel, device=self.device)
            rows = [gradient.view(self.ranks, -1) for gradient in gradients]
            torch.cat(rows, dim=1, out=flat.view(self.ranks, -1))
            mine = torch.empty(self.numel // self.ranks, device=self.device)
            scatter(mine, flat)
            return list(torch.split(mine, mine.numel() // PARAMETERS))

        return run

    def all_reduce(self) -> Exchange:
        flat = self._filled(self.numel)

        def run(_: int) -> list[Tensor]:
            dist.all_reduce(flat, dist.ReduceOp.AVG, self.group)
            return [flat]

        return run

    def broadcast(self) -> Exchange:
        roots, owned = roots_of(self.group), self._parameters()

        def run(turn: int) -> list[Tensor]:
            root = roots[turn % len(roots)]
            flat = torch.empty(self.numel, device=self.device)
            if root == self.group.rank():
                _copy_in(flat, owned)
            dist.broadcast(flat, dist.get_global_rank(self.group, root), self.group)
            return [flat]

        return run

    def reduce(self) -> Exchange:
        roots, gradients = roots_of(self.group), self._parameters()

        def run(turn: int) -> list[Tensor]:
            root = roots[turn % len(roots)]
            flat = torch.empty(self.numel, device=self.device)
            _copy_in(flat, gradients)
            dist.reduce(flat, dist.get_global_rank(self.group, root), dist.ReduceOp.SUM, self.group)
            flat.div_(self.ranks)
            is_owner = root == self.group.rank()
            return [part.clone() for part in torch.split(flat, self.numel // PARAMETERS)] if is_owner else []

        return run

    def publish(self) -> Exchange:
        shard = self._filled(max(1, self.numel // PUBLISH_PASSES))

        def make(window: Window) -> Exchange:
            def run(_: int) -> list[Tensor]:
                window.publish(shard)
                return [window.take_gradient()]

            return run

        return self._through_window(make, shard.numel())

    def _through_window(self, make: Callable[[Window], Exchange], shard_numel: int) -> Exchange:
        """Return an exchange through a window that is closed with it. A collective call."""
        transport = SharedMemoryTransport(self.group, [WindowSpec("profile", shard_numel, torch.float32)])
        (window,) = transport.windows
        window.publish(torch.full((shard_numel,), self.value))
        transport.barrier()
        window.push(torch.zeros(self.ranks * shard_numel))  # touches the memory, which takes time once
        transport.barrier()
        run = make(window)
        weakref.finalize(run, transport.close)
        return run


def _copy_in(flat: Tensor, parameters: list[Tensor]) -> None:
    for part, parameter in zip(torch.split(flat, parameters[0].numel()), parameters, strict=True):
        part.copy_(parameter)
