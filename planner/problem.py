"""The input of the search: a model, a cluster, a memory limit, and the choices that the user fixed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.cost.stragglers import BALANCED, Imbalance, Waits
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

MAX_MICRO_BATCH = 4096
"""The largest that is tried.  All to 16 are, to 64 every fourth, and then multiples of 8 that grow by about an eighth:
throughput is flat."""

Progress = Callable[[str, float], None]
"""Called with a description of the current work and the fraction done."""


@dataclass(frozen=True)
class Pins:
    """Choices that the user fixed; the search keeps them."""

    strategies: Mapping[int, tuple[Strategy, ...]] = field(default_factory=dict)
    """Strategies of the slices of operators, one for an operator that stays whole, by its index in the graph."""
    recompute: Mapping[int, Recompute] = field(default_factory=dict)
    """What of blocks is recomputed, by the block's index in the graph."""


NO_PINS = Pins()


@dataclass(frozen=True)
class Task:
    """One search problem."""

    graph: ModelGraph
    cluster: Cluster
    limit_bytes: int
    """Per device, reserve included."""
    optimizer: str = "adam"
    global_batch: int | None = None
    """Samples per step of all ranks; None: one micro-batch of any size per step."""
    micro_batch: int | None = None
    """Fixed micro-batch per rank; None: searched."""
    pins: Pins = NO_PINS
    """Choices that the user fixed."""
    imbalance: Imbalance = BALANCED
    """How much the compute time of micro-batches varies."""
    for_uneven: bool = True
    """Whether strategies that are only for uneven micro-batches (`StrategySpec.offered`) may be taken for such."""

    def waits(self, micro_batch: int, accumulation: int) -> Waits:
        """Return how long ranks wait for the slowest at one point of the sweep."""
        return self.imbalance.waits(self.cluster.world_size, micro_batch, accumulation)


def micro_batches(task: Task) -> list[tuple[int, int]]:
    """Return the (micro-batch, accumulation) pairs of the sweep, in ascending order.

    Raises `OsdpError` if the global batch cannot be split as asked.
    """
    world = task.cluster.world_size
    if task.global_batch is not None:
        per_rank, rest = divmod(task.global_batch, world)
        if rest or not per_rank:
            what, got = "the global batch must be a multiple of the number of ranks", str(task.global_batch)
            advice = f"--global-batch {max(1, round(task.global_batch / world)) * world}"
            raise OsdpError(what, got=got, expected=f"a multiple of {world}", advice=advice)
        sizes = [task.micro_batch] if task.micro_batch else range(1, per_rank + 1)
        pairs = [(size, per_rank // size) for size in sizes if per_rank % size == 0]
        if not pairs:
            what, got = "the micro-batch does not divide the global batch", str(task.micro_batch)
            expected = f"a divisor of {per_rank} ({task.global_batch} over {world} ranks)"
            raise OsdpError(what, got=got, expected=expected)
        return pairs
    if task.micro_batch:
        return [(task.micro_batch, 1)]
    sizes, size = [], 1
    while size <= MAX_MICRO_BATCH:
        sizes.append(size)
        size += 1 if size < 16 else 4 if size < 64 else size // 64 * 8
    return [(size, 1) for size in sizes]
