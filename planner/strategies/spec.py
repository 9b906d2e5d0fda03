"""Strategies: the value that an operator takes (`Strategy`), and what the planner needs to know of it (`StrategySpec`).

A *unit* is a set of operators that are wrapped, gathered and reduced together (`planner.model.fsdp_units`).
In the files of the strategies, P are a unit's parameters and T its trainable ones, every tensor's rows padded
to a multiple of the ranks that it is split over; e_p bytes per parameter in compute dtype, e_r in reduce
dtype (`profiler.model_graph.Parameter` says how many); N ranks in all, n nodes of g ranks, groups of G ranks.
AG(n, S) is an all-gather, RS a reduce-scatter and AR an all-reduce over n ranks of a tensor of S bytes in all.  S, SG,
U, AG, RSI, AGX, AGH, UX, RSX, H and W are the bytes of `planner.cost.unit_memory`.

The defaults of `StrategySpec` are what PyTorch's `fully_shard` does on a mesh of G ranks:

    forward                 AG(G, e_p P)
    backward                AG(G, e_p P), unless unsharded parameters are kept from forward to backward
    reduction               RS(G, e_r T)
    once per step           AR(N/G, e_r T/G) across the groups
    +offload, host copies   S before each gather, SG after the reduction (once per step if G < N)

To add a strategy is to add one file here with a `SPEC`, and to name the file of `runtime/strategies/` that wraps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.collectives import Operation, collective_s
from profiler.cluster.cluster import Cluster

Phase = Literal["forward", "backward", "reduce", "step"]
"""`forward` and `backward`: before those; `reduce`: after backward, in every micro-batch; `step`: after backward, in
the last micro-batch of a step only."""


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """A strategy with its group size, as one operator (or one slice of it) takes it."""

    name: str
    """Key into `SPECS`."""
    group: int
    """Ranks over which one copy of the parameters is split."""
    offload: bool = False
    """Whether sharded parameters, gradients and optimizer states are in host memory."""
    secondary: int = 0
    """Ranks over which the secondary copy, kept from forward to backward, is split; 0 if there is none."""
    owner: int | None = None
    """Rank that the user chose as owner, for strategies with one; None: by size (`assign_owners`)."""

    def __str__(self) -> str:
        argument = f":{getattr(self, self.spec.argument)}" if self.spec.argument else ""
        argument += "" if self.owner is None else f"@{self.owner}"
        return self.name + argument + ("+offload" if self.offload else "")

    @property
    def spec(self) -> StrategySpec:
        """Its specification."""
        return SPECS[self.name]

    @property
    def keeps_unsharded(self) -> bool:
        """Whether unsharded parameters live from forward to backward."""
        return self.spec.keeps_unsharded

    @property
    def reshard_after_forward(self) -> bool | int:
        """The argument of that name of `fully_shard`."""
        return self.secondary or not self.keeps_unsharded

    @property
    def parts(self) -> int:
        """Number of equal parts that each tensor is cut into."""
        return 1 if self.spec.has_owner else self.group


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, or one-sided operation, that a unit sends."""

    operation: Operation
    ranks: int
    """Ranks of the group."""
    stride: int
    """Distance of neighbours in the group, in ranks of the world."""
    size_bytes: int
    """Size of the whole tensor, as `planner.collectives.collective_s` takes it."""
    phase: Phase
    algorithm: str = "native"
    """`native` (the backend's), or `ring` (ours)."""
    shared: bool = False
    """Whether all units of the strategy send one together, once per step, with the bytes of all."""

    def time_s(self, cluster: Cluster) -> float:
        """Return how long it takes."""
        return collective_s(self.operation, self.size_bytes, cluster, self.ranks, self.stride)


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes of a unit's flat tensors."""

    gathered: int
    """Unsharded parameters in compute dtype, padded."""
    reduced: int
    """Unsharded gradients of trainable parameters in reduce dtype, padded."""
    rested: int
    """Parameters as they rest, padded."""


@dataclass(frozen=True)
class StrategySpec:
    """What the planner needs to know of a strategy; the defaults are those of `fully_shard`."""

    name: str
    preference: int
    """The search prefers strategies with lower numbers."""
    summary: str
    wrapping: str = "fully_sharded"
    """The file of `runtime/strategies/` that wraps its units."""
    argument: Literal["", "group", "secondary"] = ""
    """The field of `Strategy` that is part of the printed name, if it has several values."""
    baseline: str = ""
    """Common name of the configuration in which all operators take it, if plans are compared with that."""
    stride: int = 1
    """Distance of neighbours in the group that a copy is split over; if it is not 1, groups times it are the world."""
    gather: Operation = "all_gather"
    """What makes a unit whole before forward and before backward."""
    reduction: Operation = "reduce_scatter"
    """What reduces its gradients in every micro-batch."""
    keeps_unsharded: bool = False
    """Whether unsharded parameters live from forward to backward."""
    joins: bool = True
    """Whether neighbouring operators form one unit."""
    has_owner: bool = False
    """Whether one rank holds each unit whole, so that ranks differ."""
    stalls: bool = False
    """Whether it communicates on the compute stream: no overlap and no prefetch."""
    frees_before_reduction: bool = True
    """Whether unsharded parameters are freed before gradients are reduced."""
    offload_buffers: bool = True
    """Whether an offloaded gradient passes through a buffer of its own on the device as it is reduced."""
    one_sided: bool = False
    """Whether ranks read and write each other's windows, and wait for each other only once per step."""
    ordered: bool = False
    """Whether a window has an accumulator for every rank of its group, so that sums are the same in every run."""
    by_ddp: bool = False
    """Whether DistributedDataParallel can run it."""

    def groups(self, cluster: Cluster) -> tuple[int, ...]:
        """Return the numbers of ranks that it can shard a copy over on a cluster."""
        return (cluster.world_size,) if cluster.world_size > 1 else ()

    def on(self, cluster: Cluster) -> tuple[Strategy, ...]:
        """Return its strategies on a cluster, without offload."""
        return tuple(Strategy(self.name, group) for group in self.groups(cluster))

    def offered(self, strategy: Strategy, uneven: bool) -> bool:
        """Return whether the search offers one of its strategies, given whether micro-batches are uneven."""
        return True

    def worth_splitting(self, strategy: Strategy) -> bool:
        """Return whether slices of an operator need less memory than the whole."""
        return self.joins and strategy.group > 1 and not self.keeps_unsharded

    # --- communication ---

    def collectives(self, volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
        """Return what a unit sends; groups of one rank and empty tensors are left out by `unit_collectives`."""
        group, replicas = strategy.group, cluster.world_size // strategy.group
        return (
            Collective(self.gather, group, self.stride, volume.gathered, "forward"),
            *self.backward_gathers(volume, strategy),
            Collective(self.reduction, group, self.stride, volume.reduced, "reduce"),
            Collective("all_reduce", replicas, group if self.stride == 1 else 1, volume.reduced // group, "step"),
        )

    def backward_gathers(self, volume: Volume, strategy: Strategy) -> tuple[Collective, ...]:
        """Return what is sent before backward."""
        again = Collective(self.gather, strategy.group, self.stride, volume.gathered, "backward")
        return () if self.keeps_unsharded else (again,)

    def extra_s(self, collective: Collective, cluster: Cluster) -> float:
        """Return the seconds that one of its collectives takes in addition to the communication."""
        return 0.0

    def host_copies(self, strategy: Strategy, cluster: Cluster) -> tuple[tuple[Phase, bool], ...]:
        """Return the copies of an offloaded unit: the phase, and whether it is the gradient's or else the shard's.

        Gradients that are all-reduced once per step wait on the device.
        """
        is_gathered_again = not (self.keeps_unsharded or strategy.secondary)
        gradient: Phase = "step" if strategy.group < cluster.world_size else "reduce"
        return ("forward", False), *((("backward", False),) if is_gathered_again else ()), (gradient, True)

    # --- memory ---

    def temporaries(self, size_bytes: int, ranks_per_node: int) -> tuple[int, ...]:
        """Return the sizes of tensors that only a gather or reduction of so many bytes holds as it runs."""
        return ()

    def accumulators(self, strategy: Strategy) -> int:
        """Return how many accumulators each rank has in its window; 0 if there is no window."""
        return 0


SPECS: dict[str, StrategySpec] = {}
"""Every strategy by name, in the order in which the search prefers them; `planner.strategies.registry` fills it."""
