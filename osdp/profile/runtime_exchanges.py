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

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from osdp.profile.lines import Line
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


def prepare(line: Line, group: dist.ProcessGroup, numel: int, device: torch.device) -> Exchange:
    """Return a collective over flat tensors of `numel` elements, a multiple of `element_unit`.

    Inputs are filled with the number of this rank in the world, plus 1.
    """
    value = float(dist.get_rank() + 1)
    return _PREPARE[line.operation](line, group, numel, value, device)


def _prepare_all_gather(
    line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device
) -> Exchange:
    return _gathering(lambda flat, mine: all_gather(flat, mine, group), group, numel, value, device)


def _gathering(
    gather: Callable[[Tensor, Tensor], None], group: dist.ProcessGroup, numel: int, value: float, device: torch.device
) -> Exchange:
    """Return what FSDP2 does around a gather of (the flat tensor, this rank's part of it)."""
    ranks, each = group.size(), numel // group.size() // PARAMETERS
    shards = [torch.full((each,), value, device=device) for _ in range(PARAMETERS)]

    def run(_: int) -> list[Tensor]:
        flat = torch.empty(numel, device=device)
        mine = flat.view(ranks, -1)[group.rank()]
        for part, shard in zip(torch.split(mine, each), shards, strict=True):
            part.copy_(shard)
        gather(flat, mine)
        whole = [torch.empty(ranks, each, device=device) for _ in shards]
        torch.split_with_sizes_copy(flat.view(ranks, -1), [each] * PARAMETERS, dim=1, out=whole)
        return whole

    return run


def _prepare_reduce_scatter(
    line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device
) -> Exchange:
    scatter = ring_reduce_scatter if line.algorithm == "ring" else reduce_scatter
    return _reducing(lambda mine, flat: scatter(mine, flat, dist.ReduceOp.AVG, group), group, numel, value, device)


def _reducing(
    scatter: Callable[[Tensor, Tensor], None], group: dist.ProcessGroup, numel: int, value: float, device: torch.device
) -> Exchange:
    """Return what FSDP2 does around a reduction to (this rank's part, of the flat tensor)."""
    ranks, gradients = group.size(), _parameters(numel, value, device)

    def run(_: int) -> list[Tensor]:
        flat = torch.empty(numel, device=device)
        torch.cat([gradient.view(ranks, -1) for gradient in gradients], dim=1, out=flat.view(ranks, -1))
        mine = torch.empty(numel // ranks, device=device)
        scatter(mine, flat)
        return list(torch.split(mine, mine.numel() // PARAMETERS))

    return run


def _prepare_all_reduce(
    line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device
) -> Exchange:
    flat = torch.full((numel,), value, device=device)

    def run(_: int) -> list[Tensor]:
        dist.all_reduce(flat, dist.ReduceOp.AVG, group)
        return [flat]

    return run


def _prepare_broadcast(
    line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device
) -> Exchange:
    roots, owned = roots_of(group), _parameters(numel, value, device)

    def run(turn: int) -> list[Tensor]:
        root = roots[turn % len(roots)]
        flat = torch.empty(numel, device=device)
        if root == group.rank():
            _copy_in(flat, owned)
        dist.broadcast(flat, dist.get_global_rank(group, root), group)
        return [flat]

    return run


def _prepare_reduce(line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device) -> Exchange:
    roots, gradients = roots_of(group), _parameters(numel, value, device)

    def run(turn: int) -> list[Tensor]:
        root = roots[turn % len(roots)]
        flat = torch.empty(numel, device=device)
        _copy_in(flat, gradients)
        dist.reduce(flat, dist.get_global_rank(group, root), dist.ReduceOp.SUM, group)
        flat.div_(group.size())
        return [part.clone() for part in torch.split(flat, numel // PARAMETERS)] if root == group.rank() else []

    return run


def _prepare_pull(line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device) -> Exchange:
    def make(window: Window) -> Exchange:
        return _gathering(lambda flat, mine: window.pull(flat), group, numel, value, device)

    return _through_window(make, group, numel // group.size(), value)


def _prepare_push(line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device) -> Exchange:
    def make(window: Window) -> Exchange:
        def push(mine: Tensor, flat: Tensor) -> None:
            mine.zero_()  # FSDP2 gets zeros until the ranks have met
            window.push(flat)

        return _reducing(push, group, numel, value, device)

    return _through_window(make, group, numel // group.size(), value)


def _prepare_publish(line: Line, group: dist.ProcessGroup, numel: int, value: float, device: torch.device) -> Exchange:
    shard = torch.full((max(1, numel // PUBLISH_PASSES),), value, device=device)

    def make(window: Window) -> Exchange:
        def run(_: int) -> list[Tensor]:
            window.publish(shard)
            return [window.take_gradient()]

        return run

    return _through_window(make, group, shard.numel(), value)


def _through_window(
    make: Callable[[Window], Exchange], group: dist.ProcessGroup, shard_numel: int, value: float
) -> Exchange:
    """Return an exchange through a window that goes with it; shards hold the ranks' values. A collective call."""
    transport = SharedMemoryTransport(group, [WindowSpec("profile", shard_numel, torch.float32)])
    (window,) = transport.windows
    window.publish(torch.full((shard_numel,), value))
    transport.meet()
    window.push(torch.zeros(group.size() * shard_numel))  # touches the memory, which takes time once
    transport.meet()
    run = make(window)
    weakref.finalize(run, transport.close)
    return run


_PREPARE = {
    "all_gather": _prepare_all_gather,
    "reduce_scatter": _prepare_reduce_scatter,
    "all_reduce": _prepare_all_reduce,
    "broadcast": _prepare_broadcast,
    "reduce": _prepare_reduce,
    "pull": _prepare_pull,
    "push": _prepare_push,
    "publish": _prepare_publish,
}


def _parameters(numel: int, value: float, device: torch.device) -> list[Tensor]:
    """Return whole parameters, or their gradients."""
    return [torch.full((numel // PARAMETERS,), value, device=device) for _ in range(PARAMETERS)]


def _copy_in(flat: Tensor, parameters: list[Tensor]) -> None:
    for part, parameter in zip(torch.split(flat, parameters[0].numel()), parameters, strict=True):
        part.copy_(parameter)
