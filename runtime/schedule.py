"""The schedule: what the runtime will do to a model, as data that can be printed and verified.

    Plan --compile_plan--> Schedule --apply_schedule--> ShardedModel

A *unit* is a set of modules that are gathered and reduced together.  Units are in the order of
their first forward.  The all-gather of a unit is issued while the unit before it computes (in
backward: the unit after it), and its gradients are reduced when its own backward is over.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.strategies.notation import format_choice
from planner.strategies.spec import Collective, Strategy
from profiler.byte_sizes import format_bytes
from runtime.local_shards import Origin


@dataclass(frozen=True)
class ScheduledParameter:
    """One parameter tensor as it will be registered."""

    path: str
    """Fully qualified name in the model after splitting."""
    origin: Origin
    """Which part of which parameter of the original model it is."""
    trainable: bool
    element_bytes: int = 4
    """Of one element as it rests."""
    keeps_dtype: bool = False
    """Whether it computes in what it rests in under mixed precision too."""


@dataclass(frozen=True)
class ScheduledUnit:
    """Modules that are wrapped, gathered and reduced together."""

    name: str
    """The block, or the first operator."""
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    """Paths of the modules that are wrapped, after splitting."""
    parameters: tuple[ScheduledParameter, ...]
    """Every parameter that it gathers, in the order of its operators."""
    strategy: Strategy
    collectives: tuple[Collective, ...]
    """What it communicates in a micro-batch and in a step."""
    owner: int | None = None
    """Rank that keeps its parameters, of strategy `owner`."""
    idle: bool = False
    """Whether the model never runs it."""
    is_plain: bool = False
    """Whether it is nothing but tensors on every rank (`planner.strategies.unit_collectives.is_plain`)."""
    uncalled: tuple[str, ...] = ()
    """Of the modules, those that a forward never runs: others run with the parameters that they share."""

    @property
    def reduces_once_per_step(self) -> bool:
        """Whether it communicates in a step's last micro-batch only."""
        return any(collective.phase == "step" for collective in self.collectives)


@dataclass(frozen=True)
class Split:
    """A linear operator that is cut into slices along its input features."""

    module: str
    """Path of the linear layer."""
    count: int

    def slice_path(self, index: int) -> str:
        """Return the path of one slice's module."""
        return f"{self.module}.slices.{index}"


@dataclass(frozen=True)
class Schedule:
    """Everything that is done to a model to run a plan."""

    nodes: int
    ranks_per_node: int
    precision: str
    """That of `profiler.mixed_precision`: `fp32`, `bf16`, `amp-bf16` or `amp-fp16`."""
    accumulation: int
    """Micro-batches per step."""
    units: tuple[ScheduledUnit, ...]
    """In the order of their first forward."""
    splits: tuple[Split, ...]
    """Operators that are cut into slices, before anything else is done."""
    recomputed: tuple[str, ...]
    """Blocks whose forward runs again in backward."""
    by_ddp: bool
    """Whether it is run as DistributedDataParallel runs it: all is replicated, and its buckets fit as well."""
    master_weights: str = ""
    """What trained parameters of fewer bits rest in: `fp32`, or empty for the dtype that they have."""
    selective: frozenset[str] = frozenset()
    """Those of the recomputed blocks that keep what matrix products and attention return."""
    offloaded: Mapping[str, str | None] = field(default_factory=dict)
    """Those whose input is in the host's memory until they run again, each with the one whose backward follows its own
    and whose input comes back meanwhile."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def collectives(self) -> Counter[Collective]:
        """Return how often each collective is sent in a step (by units; DDP sends buckets)."""
        counts: Counter[Collective] = Counter()
        for unit in self.units:
            for collective in unit.collectives:
                counts[collective] += 1 if collective.phase == "step" else self.accumulation
        return counts

    def _again(self, block: str) -> str:
        """Say whether a block runs again."""
        if block not in self.recomputed:
            return ""
        if block in self.offloaded:
            return " (recomputed, input offloaded)"
        return " (recomputed selectively)" if block in self.selective else " (recomputed)"

    def __str__(self) -> str:
        """Return a table of the units, in execution order.

        The mesh is (copies x shards of each); the bytes are of all the unit's parameters as they rest.  A
        unit is gathered while the one named there computes: in forward, and then in backward.
        """
        head = f"{self.world_size} ranks ({self.nodes} x {self.ranks_per_node}), {self.precision}, "
        head += f"{len(self.units)} units, {len(self.recomputed)} blocks recomputed"
        if self.by_ddp:
            head += "; all replicated: gradients all-reduced in buckets, as DistributedDataParallel does"
        rows = [("unit", "operators", "strategy", "mesh", "bytes", "after forward", "gathered under", "then under")]
        for index, unit in enumerate(self.units):
            before = self.units[index - 1].name if index else "nothing"
            after = self.units[index + 1].name if index + 1 < len(self.units) else "nothing"
            size = sum(parameter.element_bytes * parameter.origin.numel for parameter in unit.parameters)
            gathers = any(collective.phase == "forward" for collective in unit.collectives)
            again = any(collective.phase == "backward" for collective in unit.collectives)
            rows.append(
                (
                    unit.name + self._again(unit.name),
                    str(len(unit.operators)),
                    format_choice((unit.strategy,)) + (f" on rank {unit.owner}" if unit.owner is not None else ""),
                    f"{self.world_size // unit.strategy.group} x {unit.strategy.group}",
                    format_bytes(size),
                    _after_forward(unit.strategy),
                    before if gathers else "-",
                    after if again else "-",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, *lines])


def _after_forward(strategy: Strategy) -> str:
    """Say what becomes of gathered parameters after the forward."""
    if strategy.keeps_unsharded:
        return "kept"
    return f"kept by {strategy.secondary}" if strategy.secondary else "resharded"
