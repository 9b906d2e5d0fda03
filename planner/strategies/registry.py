"""The strategies: where parameters rest, what is communicated, and how the runtime wraps them.

A *unit* is a set of operators that are wrapped, gathered and reduced together (`planner.model.fsdp_units`).
Per micro-batch a unit over N ranks sends (`unit_collectives`), with P its parameters and T the
trainable ones, every tensor's rows padded to a multiple of the ranks that it is split over, e_p
bytes per parameter in compute dtype and e_r = 4 in reduce dtype, n nodes of g ranks:

    strategy            forward                     backward         reduction             once per step
    replicate           -                           -                -                     AR(N, e_r T)
    shard               AG(N, e_p P)                AG(N, e_p P)     RS(N, e_r T)          -
    shard_grad          AG(N, e_p P)                -                RS(N, e_r T)          -
    group_shard:G       AG(G, e_p P)                AG(G, e_p P)     RS(G, e_r T)          AR(N/G, e_r T/G)
    hierarchical        AG(n, e_p P/g) AG(g, e_p P) as forward       RS(g, e_r T) RS(n, e_r T/g)  -
    secondary_shard:K   AG(N, e_p P)                AG(K, e_p P)     RS(N, e_r T)          -
    owner (no padding)  broadcast(N, e_p P)         broadcast again  reduce(N, e_r T)      -
    odc:G               pull(G, e_p P)              pull(G, e_p P)   push(G, e_r T)        barrier, AR(N/G, e_r T/G),
                                                                                           publish, barrier
    odc_ordered:G       as odc:G

`odc` keeps a window that all G ranks of its group map: the published shard, and an accumulator for its
gradient.  Ranks meet once per step: at the first barrier all pushes are over and the accumulator becomes
the gradient, at the second all shards are published.  Each unit is charged for both.  Publish reads the
fp32 shard and writes it in compute dtype, and reads, copies out and clears the accumulator.  What others push
is added as it comes, so that the last bits of a sum differ from run to run; `odc_ordered` keeps an accumulator
for each rank of the group and adds them up in the order of ranks, which gives the same bits in every run.

Each is a row of `STRATEGIES`, and adding a strategy is adding a row.  `+offload` keeps what rests on
the host; it adds no collective.  `planner.cost.unit_memory` has what a unit holds on the device, and
`planner.cost.unit_communication` how long it communicates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from planner.collectives import Operation, collective_s
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import Parameter

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per parameter in compute dtype."""
REDUCE_BYTES = 4
"""Gradients are reduced and kept in fp32 under every precision."""
MASTER_BYTES = 4
"""Sharded parameters rest in fp32 under every precision."""
MAX_SLICES = 1024
"""Slices of one operator; more is taken for a slip of the pen."""

Phase = Literal["forward", "backward", "reduce", "step"]
"""`forward`, `backward`: before it; `reduce`: after backward, in every micro-batch; `step`: after
backward, in the last micro-batch of a step only."""


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """A strategy with its group size, as one operator (or one slice of it) takes it."""

    name: str
    """Key into `STRATEGIES`."""
    group: int
    """Ranks over which one copy of the parameters is split."""
    offload: bool = False
    """Whether what rests (parameters, gradients, optimizer states) is in the host's memory."""
    secondary: int = 0
    """Ranks over which the secondary copy, kept from forward to backward, is split; 0 if there is none."""
    owner: int | None = None
    """Rank that a user gave a unit of strategy `owner` to; None: by size, see `assign_owners`."""

    def __str__(self) -> str:
        number = {"group": f":{self.group}", "secondary": f":{self.secondary}", "": ""}[self.kind.number]
        number += "" if self.owner is None else f"@{self.owner}"
        return self.name + number + ("+offload" if self.offload else "")

    @property
    def kind(self) -> StrategyKind:
        """Its row of the registry."""
        return STRATEGIES[self.name]

    @property
    def keeps_unsharded(self) -> bool:
        """Whether unsharded parameters live from forward to backward."""
        return self.kind.keeps_unsharded

    @property
    def reshard_after_forward(self) -> bool | int:
        """What `fully_shard` takes by that name."""
        return self.secondary or not self.keeps_unsharded

    @property
    def accumulators(self) -> int:
        """How many accumulators each rank has in a window: one, or one for each rank; 0 if there is no window."""
        if not self.kind.one_sided:
            return 0
        return self.group if self.kind.ordered else 1

    @property
    def parts(self) -> int:
        """Number of equal parts that each tensor is cut into."""
        return 1 if self.kind.wrapping == "owner" else self.group


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective, or one-sided operation, that a unit sends."""

    kind: Operation
    ranks: int
    """Ranks of the group."""
    stride: int
    """Distance of neighbours in the group, in ranks of the world."""
    size_bytes: int
    """Size of the whole tensor, as `planner.collectives.collective_s` takes it."""
    phase: Phase
    algorithm: str = "native"
    """`native` (the backend's), or `ring` (ours)."""

    def time_s(self, cluster: Cluster) -> float:
        """Return how long it takes."""
        return collective_s(self.kind, self.size_bytes, cluster, self.ranks, self.stride)


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes of a unit's flat tensors."""

    gathered: int
    """Unsharded parameters in compute dtype, padded."""
    reduced: int
    """Unsharded gradients of trainable parameters in reduce dtype, padded."""
    rested: int
    """Parameters as they rest, in fp32, padded."""


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """One row of the registry."""

    name: str
    summary: str
    groups: Callable[[Cluster], tuple[int, ...]]
    """The numbers that it can take on a cluster: its group sizes (`secondary`: its secondary ones)."""
    collectives: Callable[[Volume, Strategy, Cluster], tuple[Collective, ...]]
    """What a unit sends; groups of one rank and empty tensors are left out by `unit_collectives`."""
    number: Literal["", "group", "secondary"] = ""
    """Which number is a choice (and so part of the printed name)."""
    keeps_unsharded: bool = False
    """Whether unsharded parameters live from forward to backward."""
    wrapping: Literal["fully_shard", "owner"] = "fully_shard"
    """What the runtime wraps a unit with: PyTorch's `fully_shard`, or its own whole-tensor sharding."""
    two_phase: bool = False
    """Whether gathers and reductions go across nodes and inside nodes in turn."""
    one_sided: bool = False
    """Whether ranks read and write each other's windows, and meet only once per step."""
    ordered: bool = False
    """Whether a window has an accumulator for every rank of its group, so that sums are the same in every run."""

    @property
    def joins(self) -> bool:
        """Whether neighbouring operators form one unit."""
        return self.wrapping == "fully_shard"

    def on(self, cluster: Cluster) -> tuple[Strategy, ...]:
        """Return its strategies on a cluster, without offload."""
        if self.number == "secondary":
            return tuple(Strategy(self.name, cluster.world_size, secondary=k) for k in self.groups(cluster))
        return tuple(Strategy(self.name, group) for group in self.groups(cluster))


def _group_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Divisors of the world that neither split a node unevenly nor a group of nodes."""
    node, world = cluster.gpus_per_node, cluster.world_size
    sizes = range(2, world)
    return tuple(g for g in sizes if world % g == 0 and (node % g == 0 or g % node == 0))


def _sizes_in_node(cluster: Cluster) -> tuple[int, ...]:
    """Divisors of the ranks of a node, the whole node too."""
    return tuple(g for g in range(2, cluster.gpus_per_node + 1) if cluster.gpus_per_node % g == 0)


def _world(cluster: Cluster) -> tuple[int, ...]:
    return (cluster.world_size,) if cluster.world_size > 1 else ()


def _world_of_nodes(cluster: Cluster) -> tuple[int, ...]:
    return _world(cluster) if cluster.nodes > 1 and cluster.gpus_per_node > 1 else ()


def _in_group(volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
    """Gather and scatter inside the group; all-reduce shards across groups once per step."""
    group, replicas = strategy.group, cluster.world_size // strategy.group
    again = strategy.secondary or group
    backward = (Collective("all_gather", again, 1, volume.gathered, "backward"),)
    return (
        Collective("all_gather", group, 1, volume.gathered, "forward"),
        *(() if strategy.keeps_unsharded else backward),
        Collective("reduce_scatter", group, 1, volume.reduced, "reduce"),
        Collective("all_reduce", replicas, group, volume.reduced // group, "step"),
    )


def _in_two_phases(volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
    """Gather across nodes, then inside; scatter inside nodes, then across."""
    nodes, node = cluster.nodes, cluster.gpus_per_node
    phases: tuple[Phase, Phase] = "forward", "backward"
    gathers = [
        (
            Collective("all_gather", nodes, node, volume.gathered // node, phase),
            Collective("all_gather", node, 1, volume.gathered, phase),
        )
        for phase in phases
    ]
    return (
        *gathers[0],
        *gathers[1],
        Collective("reduce_scatter", node, 1, volume.reduced, "reduce"),
        Collective("reduce_scatter", nodes, node, volume.reduced // node, "reduce"),
    )


def _from_owner(volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
    """Broadcast from the owner, twice; reduce to it."""
    return (
        Collective("broadcast", strategy.group, 1, volume.gathered, "forward"),
        Collective("broadcast", strategy.group, 1, volume.gathered, "backward"),
        Collective("reduce", strategy.group, 1, volume.reduced, "reduce"),
    )


def _one_sided(volume: Volume, strategy: Strategy, cluster: Cluster) -> tuple[Collective, ...]:
    """Pull, pull and push inside the group; meet, all-reduce across groups and publish once per step."""
    group, replicas = strategy.group, cluster.world_size // strategy.group
    # The first accumulator is read and written to the gradient, each other is read and added to it; all are cleared.
    moved = 4 * strategy.accumulators - 1
    copied = volume.rested + volume.gathered + moved * volume.reduced
    return (
        Collective("pull", group, 1, volume.gathered, "forward"),
        Collective("pull", group, 1, volume.gathered, "backward"),
        Collective("push", group, 1, volume.reduced, "reduce"),
        Collective("barrier", group, 1, 0, "step"),
        Collective("all_reduce", replicas, group, volume.reduced // group, "step"),
        Collective("publish", group, 1, copied // group, "step"),
        Collective("barrier", group, 1, 0, "step"),
    )


STRATEGIES = {
    kind.name: kind
    for kind in (
        StrategyKind(
            "replicate", "a full copy on every rank; gradients all-reduced once per step", lambda _: (1,), _in_group
        ),
        StrategyKind("shard", "split over all ranks; gathered in forward and again in backward", _world, _in_group),
        StrategyKind(
            "shard_grad",
            "split over all ranks; gathered once and kept to backward (ZeRO-2)",
            _world,
            _in_group,
            keeps_unsharded=True,
        ),
        StrategyKind(
            "group_shard",
            "split inside a group, replicated across groups (HSDP)",
            _group_sizes,
            _in_group,
            number="group",
        ),
        StrategyKind(
            "hierarchical",
            "split over all ranks; gathered across nodes, then inside",
            _world_of_nodes,
            _in_two_phases,
            two_phase=True,
        ),
        StrategyKind(
            "secondary_shard",
            "split over all ranks; a copy inside a group serves backward (hpZ)",
            _group_sizes,
            _in_group,
            number="secondary",
        ),
        StrategyKind(
            "owner",
            "whole tensors on one rank each; broadcast for forward and backward",
            _world,
            _from_owner,
            wrapping="owner",
        ),
        StrategyKind(
            "odc",
            "split inside a group of a node; pulled and pushed without waiting, met once per step",
            _sizes_in_node,
            _one_sided,
            number="group",
            one_sided=True,
        ),
        StrategyKind(
            "odc_ordered",
            "as odc, with gradients that are the same in every run, bit by bit",
            _sizes_in_node,
            _one_sided,
            number="group",
            one_sided=True,
            ordered=True,
        ),
    )
}


# --- names -----------------------------------------------------------------------------------


def strategies_on(cluster: Cluster, uneven: bool = False) -> tuple[Strategy, ...]:
    """Return every strategy that the search offers on the cluster, in the order of the registry.

    Each is also offered with offload, after all without, if the figures of the host are known.  `odc` is
    offered only where micro-batches are uneven, which is what it is for, and on the device; `odc_ordered`, which
    does the same with more memory, never.
    """
    known = [strategy for strategy in known_strategies(cluster) if cluster.host or not strategy.offload]
    known = [strategy for strategy in known if not strategy.kind.ordered]
    return tuple(strategy for strategy in known if not strategy.kind.one_sided or (uneven and not strategy.offload))


def known_strategies(cluster: Cluster) -> tuple[Strategy, ...]:
    """Return every strategy that a plan for the cluster can name: first without, then with offload."""
    on_device = tuple(strategy for kind in STRATEGIES.values() for strategy in kind.on(cluster))
    return on_device + tuple(replace(strategy, offload=True) for strategy in on_device)


def parse_strategy(text: str, cluster: Cluster) -> Strategy:
    """Return the strategy that `str(strategy)` printed; of `owner`, `owner@3` says which rank it is.

    Raises `OsdpError` if it is unknown or does not fit the cluster.
    """
    known = {str(strategy): strategy for strategy in known_strategies(cluster)}
    given = re.fullmatch(r"owner@([0-9]{1,9})((?:\+offload)?)", text)
    if given is not None and (free := known.get(f"owner{given[2]}")) is not None:
        return _owned_by(free, int(given[1]), cluster)
    if text not in known:
        name = re.fullmatch(r"([a-z_]+)(?:[:@][0-9]+)?(?:\+offload)?", text)
        if cluster.world_size == 1 and name is not None and name[1] in STRATEGIES and name[1] not in known:
            raise OsdpError(
                f"{text} needs several ranks",
                got="1 rank",
                expected=", ".join(known),
                advice="two ranks or more: torchrun --nproc_per_node, or --gpus-per-node",
            )
        plain = [name for name, strategy in known.items() if not strategy.offload]
        raise OsdpError(
            f"no such strategy on {cluster.nodes} x {cluster.gpus_per_node} ranks",
            got=text or "nothing",
            expected=f"{', '.join(plain)}; each also with +offload",
        )
    return known[text]


def _owned_by(strategy: Strategy, rank: int, cluster: Cluster) -> Strategy:
    if rank >= cluster.world_size:
        raise OsdpError(
            "there is no such rank to own parameters",
            got=f"owner@{rank}",
            expected=f"a rank from 0 to {cluster.world_size - 1}",
        )
    return replace(strategy, owner=rank)


def format_choice(slices: Sequence[Strategy]) -> str:
    """Return an operator's choice as plans write it.

    That is the strategy if there is one slice, else `split(...)` with the slices' strategies in
    order, equal neighbours counted: `split(2*shard, replicate)` has three slices.
    """
    if len(slices) == 1:
        return str(slices[0])
    runs = [(str(strategy), len(list(run))) for strategy, run in groupby(slices)]
    return f"split({', '.join(name if count == 1 else f'{count}*{name}' for name, count in runs)})"


def parse_choice(text: str, cluster: Cluster) -> tuple[Strategy, ...]:
    """Return the strategies of an operator's slices, one if it is not split: what `format_choice` printed.

    Raises `OsdpError` if the form is another, or a strategy is unknown or does not fit the cluster.
    """
    inside = re.fullmatch(r"\s*split\((.*)\)\s*", text)
    if inside is None:
        return (parse_strategy(text.strip(), cluster),)
    slices: list[Strategy] = []
    for part in inside[1].split(","):
        counted = re.fullmatch(r"\s*(?:([0-9]{1,6})\s*\*)?\s*(.*?)\s*", part)
        assert counted is not None, "the pattern takes every text of one line"
        count = int(counted[1] or 1)
        slices += [parse_strategy(counted[2], cluster)] * min(count, MAX_SLICES + 1)
        if not 1 <= count <= MAX_SLICES or len(slices) > MAX_SLICES:
            raise OsdpError("a split has a count that cannot be", got=text, expected=f"1 to {MAX_SLICES} slices in all")
    if len(slices) < 2:
        raise OsdpError(
            "a split needs two slices or more",
            got=text,
            expected="for instance split(2*shard)",
            advice=f"write {slices[0]} for an operator in one piece",
        )
    return tuple(slices)


# --- traffic ---------------------------------------------------------------------------------


def padded_rows(parameter: Parameter, parts: int) -> tuple[int, int]:
    """Return (rows per part, elements per row) after FSDP2's padding of the first dimension."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // parts), parameter.numel // max(rows, 1)


def padded_numel(parameters: Iterable[Parameter], parts: int) -> int:
    """Return the number of elements of the parameters, each padded to so many equal parts."""
    return sum(rows * rest * parts for rows, rest in (padded_rows(p, parts) for p in parameters))


def unit_collectives(
    parameters: Iterable[Parameter], strategy: Strategy, precision: str, cluster: Cluster
) -> tuple[Collective, ...]:
    """Return everything that one unit sends; see the table at the top of this module.

    Of a phase, collectives are in the order in which they are sent.  A unit of strategy `owner` is
    one operator, so that it has one owner.  What offload copies between host and device is no
    collective: `planner.cost.unit_communication` has it.
    """
    parameters = tuple(parameters)
    trained = [parameter for parameter in parameters if parameter.trainable]
    volume = Volume(
        gathered=COMPUTE_BYTES[precision] * padded_numel(parameters, strategy.parts),
        reduced=REDUCE_BYTES * padded_numel(trained, strategy.parts),
        rested=MASTER_BYTES * padded_numel(parameters, strategy.parts),
    )
    sent = strategy.kind.collectives(volume, strategy, cluster)
    sent = tuple(c for c in sent if c.ranks > 1 and (c.size_bytes > 0 or c.kind == "barrier"))
    if not cluster.ring:
        return sent
    return tuple(replace(c, algorithm=cluster.algorithm(c.kind, c.ranks, c.stride, c.size_bytes)) for c in sent)


def assign_owners(
    sizes_bytes: Sequence[int], ranks: int, given: Mapping[int, int] = MappingProxyType({})
) -> tuple[int, ...]:
    """Return the owning rank of each unit of strategy `owner`, in the order given.

    Largest first to the rank that owns least, ties to the lowest rank (Graham's longest processing
    time rule, SIAM J. Appl. Math. 1969: the fullest rank is within 4/3 of the best that can be).
    `given` has the ranks of those that the user decided, by their position.
    """
    owned, owners = [0] * ranks, dict(given)
    for index, rank in given.items():
        owned[rank] += sizes_bytes[index]
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        if index not in given:
            owners[index] = owned.index(min(owned))
            owned[owners[index]] += sizes_bytes[index]
    return tuple(owners[index] for index in range(len(sizes_bytes)))
