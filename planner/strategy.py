"""The strategies: what each keeps in memory, what it communicates, all in one place.

A *unit* is a set of operators that are wrapped, gathered and reduced together (one
`fully_shard` call).  For a unit whose parameters are split over ws of the N ranks, with
e_p bytes per parameter in compute dtype and e_r = 4 in reduce dtype, per parameter tensor of
first dimension d0 and `rest` elements per row padded to ceil(d0/ws) ws rows (FSDP2 pads so),

    S    sharded parameters, fp32                   4 pad/ws             `UnitBytes.parameters`
    SG   sharded gradients                          e_r pad/ws           `UnitBytes.gradients`
    OPT  optimizer states (Adam: 2 S + 512)                              `UnitBytes.optimizer`
    U    unsharded parameters                       e_p pad              `UnitBytes.unsharded`
    AG   all-gather output (none if ws = 1)         e_p pad              `UnitBytes.gathered`
    RSI  reduce-scatter input                       e_r pad              `UnitBytes.reduce_input`
    G    unsharded gradients                        e_p numel            `UnitBytes.full_gradients`

each tensor rounded up to 512 bytes.  Source: measured on FSDP2 (torch 2.13.0) with PyTorch's
memory tracker on fake tensors.

Adding a strategy is adding one `StrategyKind` to `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from planner.collectives import collective_s
from profiler.cluster import Cluster
from profiler.errors import OsdpError
from profiler.graph import Parameter

ALLOCATION_BYTES = 512
"""Granularity of PyTorch's CUDA caching allocator (kMinBlockSize in CUDACachingAllocator)."""

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes per parameter in compute dtype."""
REDUCE_BYTES = 4
"""Gradients are reduced and kept in fp32 under every precision."""
MASTER_BYTES = 4
"""Sharded parameters rest in fp32 under every precision."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps per parameter."""

    moments: int
    """fp32 tensors of the parameter's size kept between steps."""
    has_step_counter: bool
    """Whether it keeps one scalar tensor per parameter."""
    temporaries: int
    """fp32 tensors of the parameter's size that live while it steps (foreach implementation)."""
    touched: int
    """fp32 tensors of the parameter's size that a step reads and writes."""


OPTIMIZERS = {
    "adam": Optimizer(moments=2, has_step_counter=True, temporaries=1, touched=18),
    "adamw": Optimizer(moments=2, has_step_counter=True, temporaries=1, touched=20),
    "sgd": Optimizer(moments=0, has_step_counter=False, temporaries=0, touched=3),
}
"""`torch.optim` with default arguments: SGD without momentum, Adam in its foreach form.

`touched`, from `torch/optim/adam.py` of torch 2.13: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
addcdiv 4, and for AdamW's decay mul 2; SGD: add 3."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit on the fullest rank (rank 0, which never has the short shard)."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded: int = 0
    gathered: int = 0
    reduce_input: int = 0
    full_gradients: int = 0

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds that one unit's collectives take."""

    forward_gather_s: float
    """Before its forward."""
    backward_gather_s: float
    """Before its backward; 0 if kept unsharded."""
    reduce_s: float
    """After its backward, in every micro-batch."""
    step_reduce_s: float
    """After its backward, in the last micro-batch of a step only."""


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """A strategy with its group size, as one operator takes it."""

    name: str
    """Key into `STRATEGIES`."""
    group: int
    """Ranks over which one copy of the parameters is split."""

    def __str__(self) -> str:
        return f"{self.name}:{self.group}" if STRATEGIES[self.name].sized else self.name

    @property
    def keeps_unsharded(self) -> bool:
        """Whether unsharded parameters live from forward to backward."""
        return STRATEGIES[self.name].keeps_unsharded


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """One entry of the registry."""

    name: str
    summary: str
    groups: Callable[[Cluster], tuple[int, ...]]
    """Group sizes that it can take on a cluster."""
    sized: bool
    """Whether the group size is a choice (and so part of the printed name)."""
    keeps_unsharded: bool


def _group_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Divisors of the world that neither split a node unevenly nor a group of nodes."""
    node, world = cluster.gpus_per_node, cluster.world_size
    sizes = range(2, world)
    return tuple(g for g in sizes if world % g == 0 and (node % g == 0 or g % node == 0))


def _world(cluster: Cluster) -> tuple[int, ...]:
    return (cluster.world_size,) if cluster.world_size > 1 else ()


STRATEGIES = {
    kind.name: kind
    for kind in (
        StrategyKind("replicate", "a full copy on every rank; gradients all-reduced once per step", lambda _: (1,),
                     sized=False, keeps_unsharded=False),
        StrategyKind("shard", "split over all ranks; gathered in forward and again in backward", _world,
                     sized=False, keeps_unsharded=False),
        StrategyKind("shard_grad", "split over all ranks; gathered once and kept to backward (ZeRO-2)", _world,
                     sized=False, keeps_unsharded=True),
        StrategyKind("group_shard", "split inside a group, replicated across groups (HSDP)", _group_sizes,
                     sized=True, keeps_unsharded=False),
    )
}  # fmt: skip


def strategies_on(cluster: Cluster) -> tuple[Strategy, ...]:
    """Return every strategy that the cluster allows, in the order of the registry."""
    return tuple(Strategy(kind.name, group) for kind in STRATEGIES.values() for group in kind.groups(cluster))


def parse_strategy(text: str, cluster: Cluster) -> Strategy:
    """Return the strategy that `str(strategy)` printed.

    Raises `OsdpError` if it is unknown or does not fit the cluster.
    """
    known = {str(strategy): strategy for strategy in strategies_on(cluster)}
    if text not in known:
        raise OsdpError(f"no such strategy on {cluster.nodes} x {cluster.gpus_per_node} ranks", got=text,
                        expected=", ".join(known))  # fmt: skip
    return known[text]


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def _padded_rows(parameter: Parameter, group: int) -> tuple[int, int]:
    """Return (rows per shard, elements per row) after FSDP2's padding of the first dimension."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // group), parameter.numel // max(rows, 1)


def padded_numel(parameters: Iterable[Parameter], group: int) -> int:
    """Return the number of elements of the parameters, each padded to the group."""
    return sum(rows * rest * group for rows, rest in (_padded_rows(p, group) for p in parameters))


def unit_bytes(parameters: Iterable[Parameter], strategy: Strategy, precision: str, optimizer: Optimizer) -> UnitBytes:
    """Return the memory of a unit; equations at the top of this module."""
    parameters, group = tuple(parameters), strategy.group
    compute = COMPUTE_BYTES[precision]
    total, flat, flat_trained = UnitBytes(), 0, 0
    for parameter in parameters:
        rows, rest = _padded_rows(parameter, group)
        shard, padded = rows * rest, rows * rest * group
        flat += padded
        state = 0
        if parameter.trainable:
            flat_trained += padded
            state = optimizer.moments * _rounded(MASTER_BYTES * shard)
            state += ALLOCATION_BYTES if optimizer.has_step_counter else 0
        total += UnitBytes(
            parameters=_rounded(MASTER_BYTES * shard),
            optimizer=state,
            unsharded=_rounded(compute * padded),
            full_gradients=_rounded(compute * parameter.numel) if parameter.trainable else 0,
        )
    return total + UnitBytes(
        gradients=_rounded(REDUCE_BYTES * flat_trained // group),
        gathered=_rounded(compute * flat) if group > 1 else 0,
        reduce_input=_rounded(REDUCE_BYTES * flat_trained),
    )


def unit_traffic(parameters: Iterable[Parameter], strategy: Strategy, precision: str, cluster: Cluster) -> UnitTraffic:
    """Return the seconds of a unit's collectives; each is one collective for the whole unit."""
    parameters, group = tuple(parameters), strategy.group
    trained = [parameter for parameter in parameters if parameter.trainable]
    gather_s = collective_s("all_gather", COMPUTE_BYTES[precision] * padded_numel(parameters, group), cluster, group)
    reduced_bytes = REDUCE_BYTES * padded_numel(trained, group)
    replicas = cluster.world_size // group
    return UnitTraffic(
        forward_gather_s=gather_s,
        backward_gather_s=0.0 if strategy.keeps_unsharded else gather_s,
        reduce_s=collective_s("reduce_scatter", reduced_bytes, cluster, group),
        step_reduce_s=collective_s("all_reduce", reduced_bytes / group, cluster, replicas, stride=group),
    )
