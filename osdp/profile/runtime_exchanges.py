"""The collectives as the runtime runs them, with the copies that it makes around them.

A unit's flat tensor of S bytes is cut into a few parameters, all fp32:

    all_gather       shards copied into this rank's part of the flat tensor, gathered in place, and copied out
                     into whole parameters (FSDP2's `foreach_all_gather` and `foreach_all_gather_copy_out`)
    reduce_scatter   gradients cut for the ranks and copied into the flat tensor, averaged, and left as views
                     of this rank's part (`foreach_reduce`); `runtime.strategies.ring_reduce_scatter` has the ring
    all_reduce       averaged in place (`foreach_reduce` across copies, and DistributedDataParallel's buckets)
    broadcast        the owner copies its parameters into the flat tensor and sends it (`runtime.strategies.owner`)
    reduce           gradients copied into the flat tensor, summed at the owner, divided, and copied there
    pull, push       as all_gather and reduce_scatter, through windows (`runtime.odc`): on CPU ranks in shared
                     memory, on GPUs in their own
    publish          a rank's shard copied into its window, and its accumulator read and cleared: S bytes read
                     and written in all, on each rank alone

Read in torch 2.13; public operations stand for FSDP2's own, which move the same bytes.  What is allocated
anew for each of them there is allocated inside here too; on a GPU that takes the host's time alone.

Inputs come in several sets, which take turns, so that on a GPU they are not in a cache by the second call.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.odc.cupy_device import CupyDevice
from runtime.odc.gpu_windows import DeviceTransport
from runtime.odc.shared_memory import SharedMemoryTransport
from runtime.odc.windows import Transport, Window, WindowSpec
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


def prepare(
    operation: str, algorithm: str, group: dist.ProcessGroup, numel: int, device: torch.device, sets: int = 1
) -> Exchange:
    """Return a collective over flat tensors of `numel` elements, a multiple of `element_unit`.

    Its inputs are so many sets, filled with the number of this rank in the world, plus 1.
    """
    make: Callable[[], Exchange] = getattr(_Exchanges(algorithm, group, numel, device, sets), operation)
    return make()


def open_windows(group: dist.ProcessGroup, specs: Sequence[WindowSpec], device: torch.device) -> Transport:
    """Open windows over ranks that can have them (`runtime.odc.choose_transport`). A collective call."""
    if device.type == "cpu":
        return SharedMemoryTransport(group, specs)
    return DeviceTransport(group, specs, _gpu())


@cache
def _gpu() -> CupyDevice:
    """Return this rank's GPU, whose kernels are loaded once for all the windows of a profile."""
    return CupyDevice()


class _Exchanges:
    """Makes each collective, by its name, over one size of tensor."""

    def __init__(self, algorithm: str, group: dist.ProcessGroup, numel: int, device: torch.device, sets: int) -> None:
        self.algorithm, self.group, self.numel, self.device, self.sets = algorithm, group, numel, device, sets
        self.ranks, self.value = group.size(), float(dist.get_rank() + 1)

    def _filled(self, numel: int) -> Tensor:
        return torch.full((numel,), self.value, device=self.device)

    def _parameters(self) -> list[list[Tensor]]:
        """Return sets of whole parameters, or of their gradients."""
        return self._sets_of(self.numel // PARAMETERS)

    def _sets_of(self, numel: int) -> list[list[Tensor]]:
        return [[self._filled(numel) for _ in range(PARAMETERS)] for _ in range(self.sets)]

    def all_gather(self) -> Exchange:
        return self._gathering(lambda turn, flat, mine: all_gather(flat, mine, self.group))

    def pull(self) -> Exchange:
        def make(windows: Sequence[Window]) -> Exchange:
            return self._gathering(lambda turn, flat, _: windows[turn % self.sets].pull(flat))

        return self._through_windows(make, self.numel // self.ranks)

    def _gathering(self, gather: Callable[[int, Tensor, Tensor], None]) -> Exchange:
        """Return what FSDP2 does around a gather of (the turn, the flat tensor, this rank's part of it)."""
        each = self.numel // self.ranks // PARAMETERS
        sets = self._sets_of(each)

        def run(turn: int) -> list[Tensor]:
            shards = sets[turn % self.sets]
            flat = torch.empty(self.numel, device=self.device)
            mine = flat.view(self.ranks, -1)[self.group.rank()]
            for part, shard in zip(torch.split(mine, each), shards, strict=True):
                part.copy_(shard)
            gather(turn, flat, mine)
            whole = [torch.empty(self.ranks, each, device=self.device) for _ in shards]
            torch.split_with_sizes_copy(flat.view(self.ranks, -1), [each] * PARAMETERS, dim=1, out=whole)
            return whole

        return run

    def reduce_scatter(self) -> Exchange:
        scatter = ring_reduce_scatter if self.algorithm == "ring" else reduce_scatter
        return self._reducing(lambda turn, mine, flat: scatter(mine, flat, dist.ReduceOp.AVG, self.group))

    def push(self) -> Exchange:
        def make(windows: Sequence[Window]) -> Exchange:
            def push(turn: int, mine: Tensor, flat: Tensor) -> None:
                mine.zero_()  # FSDP2 gets zeros until the ranks have synchronized
                windows[turn % self.sets].push(flat)

            return self._reducing(push)

        return self._through_windows(make, self.numel // self.ranks)

    def _reducing(self, scatter: Callable[[int, Tensor, Tensor], None]) -> Exchange:
        """Return what FSDP2 does around a reduction to (the turn, this rank's part, of the flat tensor)."""
        sets = self._parameters()

        def run(turn: int) -> list[Tensor]:
            flat = torch.empty(self.numel, device=self.device)
            rows = [gradient.view(self.ranks, -1) for gradient in sets[turn % self.sets]]
            torch.cat(rows, dim=1, out=flat.view(self.ranks, -1))
            mine = torch.empty(self.numel // self.ranks, device=self.device)
            scatter(turn, mine, flat)
            return list(torch.split(mine, mine.numel() // PARAMETERS))

        return run

    def all_reduce(self) -> Exchange:
        sets = [self._filled(self.numel) for _ in range(self.sets)]

        def run(turn: int) -> list[Tensor]:
            flat = sets[turn % self.sets]
            dist.all_reduce(flat, dist.ReduceOp.AVG, self.group)
            return [flat]

        return run

    def broadcast(self) -> Exchange:
        roots, sets = roots_of(self.group), self._parameters()

        def run(turn: int) -> list[Tensor]:
            root = roots[turn % len(roots)]
            flat = torch.empty(self.numel, device=self.device)
            if root == self.group.rank():
                _copy_in(flat, sets[turn % self.sets])
            dist.broadcast(flat, dist.get_global_rank(self.group, root), self.group)
            return [flat]

        return run

    def reduce(self) -> Exchange:
        roots, sets = roots_of(self.group), self._parameters()

        def run(turn: int) -> list[Tensor]:
            root = roots[turn % len(roots)]
            flat = torch.empty(self.numel, device=self.device)
            _copy_in(flat, sets[turn % self.sets])
            dist.reduce(flat, dist.get_global_rank(self.group, root), dist.ReduceOp.SUM, self.group)
            flat.div_(self.ranks)
            is_owner = root == self.group.rank()
            return [part.clone() for part in torch.split(flat, self.numel // PARAMETERS)] if is_owner else []

        return run

    def publish(self) -> Exchange:
        shards = [self._filled(max(1, self.numel // PUBLISH_PASSES)) for _ in range(self.sets)]

        def make(windows: Sequence[Window]) -> Exchange:
            def run(turn: int) -> list[Tensor]:
                window = windows[turn % self.sets]
                window.publish(shards[turn % self.sets])
                return [window.take_gradient()]

            return run

        return self._through_windows(make, shards[0].numel())

    def _through_windows(self, make: Callable[[Sequence[Window]], Exchange], shard_numel: int) -> Exchange:
        """Return an exchange through windows that are closed with it. A collective call."""
        specs = [WindowSpec(f"profile {number}", shard_numel, torch.float32) for number in range(self.sets)]
        transport = open_windows(self.group, specs, self.device)
        for window in transport.windows:
            window.publish(self._filled(shard_numel))
        transport.barrier()
        for window in transport.windows:  # touches the memory, which takes time once
            window.push(torch.zeros(self.ranks * shard_numel, device=self.device))
        transport.barrier()
        run = make(transport.windows)
        weakref.finalize(run, transport.close)
        return run


def _copy_in(flat: Tensor, parameters: list[Tensor]) -> None:
    for part, parameter in zip(torch.split(flat, parameters[0].numel()), parameters, strict=True):
        part.copy_(parameter)
