"""The plan: what the planner hands to the runtime, and to the user as a YAML file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from planner.cost.ddp import as_run, can_replicate, fits_replicated
from planner.cost.peak_memory import peak_memory
from planner.cost.simulator import simulated_s
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.stragglers import NO_WAITS, Waits
from planner.cost.workload import Workload
from planner.model.fsdp_units import check_scalars
from planner.search.search_space import Space, Spanning, StageDecision
from planner.strategies.notation import format_choice, parse_choice
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import RingRule
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph

_STRICT: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class ModelRef:
    """The model that a plan is for."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    name: str
    """As given to `--model`."""
    fingerprint: str
    """Of the traced graph."""
    parameters: int
    """Number of parameters."""
    sequence_length: int
    precision: str
    """`fp32` or `bf16`."""


@dataclass(frozen=True)
class ClusterRef:
    """The cluster that a plan is for."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    name: str
    fingerprint: str
    nodes: int
    gpus_per_node: int
    ring: tuple[RingRule, ...] = ()
    """Where reduce-scatters go round a ring of ours, as the cluster says."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects; nothing here was measured."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    peak_memory_bytes: int
    """Per device, reserve included."""
    memory_by_category: dict[str, int]
    """Bytes at the peak by category."""
    peak_phase: str
    """Phase, and the operator where there is one."""
    step_time_s: float
    time_by_term: dict[str, float]
    """Seconds by term; `hidden_communication_s` is not part of the sum."""
    samples_per_s: float
    """Of all ranks together."""

    @property
    def reserve_bytes(self) -> int:
        """The part of the peak that is not PyTorch's."""
        return self.memory_by_category.get("reserve", 0)

    @property
    def tensors_bytes(self) -> int:
        """The peak without that."""
        return self.peak_memory_bytes - self.reserve_bytes


@dataclass(frozen=True)
class Asked:
    """What the user decided, so that the same can be asked again under other circumstances."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT

    micro_batch: int | None = None
    """Samples per rank in one forward; None: searched."""
    global_batch: int | None = None
    """Samples per step of all ranks; None: one micro-batch per step."""
    pins: list[str] = field(default_factory=list)
    """As `--pin` takes them (`planner.pins`)."""
    imbalance: str = ""
    """As `--imbalance` takes it, a file by its whole path; empty: none."""


@dataclass(frozen=True)
class Plan:
    """A strategy for every operator, and which blocks are recomputed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    SCHEMA: ClassVar[str] = "osdp.plan/1"

    schema: str
    model: ModelRef
    cluster: ClusterRef
    optimizer: str
    limit_bytes: int
    """Memory per device that the user allows, reserve included."""
    micro_batch: int
    """Samples per rank in one forward."""
    accumulation: int
    """Micro-batches per step."""
    predicted: Prediction
    gap: float
    """No plan of the searched space has more than samples_per_s / (1 - gap)."""
    choices: dict[str, str]
    """Strategy of every operator, or of its slices, by its name (`planner.strategies.notation.parse_choice`)."""
    recomputed_blocks: list[str]
    """Names of the blocks whose forward runs again in backward."""
    headroom_bytes: int = 0
    """Part of the limit that was to be left free."""
    asked: Asked = field(default_factory=Asked)
    """What the user decided beside the limit."""
    waits: Waits = NO_WAITS
    """How long ranks wait for the slowest, as priced."""

    @property
    def usable_bytes(self) -> int:
        """What the predicted peak was to stay within: the limit without the headroom."""
        return self.limit_bytes - self.headroom_bytes


def cluster_fingerprint(cluster: Cluster) -> str:
    """Return a hash of every figure of a cluster."""
    figures = asdict(cluster)
    for name in ("host", "ring", "measured"):
        if not figures[name]:
            del figures[name]  # so that clusters without keep the fingerprint that older plans know
    text = json.dumps(figures, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def predict(options: Sequence[StageCandidate], space: Space, load: Workload) -> Prediction:
    """Evaluate a plan, one option per stage, by the pure cost functions: its step takes what the simulator says.

    The closed form has the terms; exposed communication takes the rounding by which the two differ.
    """
    peak, time, step_time_s = peak_memory(options, load), step_time(options, load), simulated_s(options, load)
    time = replace(time, exposed_communication_s=max(0.0, time.exposed_communication_s + step_time_s - time.total_s))
    operator = space.operator_at(peak)
    where = f"{peak.phase} of {operator.name}" if operator else peak.phase
    categories = {name: round(value) for name, value in peak.categories.items()}
    return Prediction(
        peak_memory_bytes=sum(categories.values()),
        memory_by_category=categories,
        peak_phase=where,
        step_time_s=step_time_s,
        time_by_term=asdict(time),
        samples_per_s=load.samples_per_step / step_time_s,
    )


def make_plan(
    options: Sequence[StageCandidate],
    spanning: Spanning,
    space: Space,
    load: Workload,
    *,
    limit_bytes: int,
    gap: float,
    headroom_bytes: int = 0,
    asked: Asked = Asked(),
) -> Plan:
    """Write a search result down as a plan, priced as it will be run within the limit without the headroom."""
    graph, cluster = space.graph, load.cluster
    options = as_run(tuple(options), spanning, None, space, load, limit_bytes - headroom_bytes)
    choices = space.spanning_choices(spanning) | dict(
        zip(space.model.idle, space.idle_strategies(cluster), strict=True)
    )
    recomputed = []
    for stage, option in zip(space.model.stages, options, strict=True):
        for operator, strategy in zip(stage.operators, option.strategies, strict=True):
            choices[operator] = strategy
        if option.recompute:
            recomputed.append(stage.name)
    return Plan(
        schema=Plan.SCHEMA,
        model=model_ref(graph),
        cluster=ClusterRef(
            cluster.name, cluster_fingerprint(cluster), cluster.nodes, cluster.gpus_per_node, cluster.ring
        ),
        optimizer=load.optimizer_name,
        limit_bytes=limit_bytes,
        micro_batch=load.micro_batch,
        accumulation=load.accumulation,
        predicted=predict(options, space, load),
        gap=gap,
        choices=_written(choices, space),
        recomputed_blocks=recomputed,
        headroom_bytes=headroom_bytes,
        asked=asked,
        waits=load.waits,
    )


def _written(choices: Mapping[int, Strategy], space: Space) -> dict[str, str]:
    """Return the choices of a space's operators under the names of the graph's."""
    written, start = {}, 0
    for index, operator in enumerate(space.graph.operators):
        stop = start + space.counts.get(index, 1)
        written[operator.name] = format_choice([choices[piece] for piece in range(start, stop)])
        start = stop
    return written


def read_choices(plan: Plan, graph: ModelGraph, cluster: Cluster) -> list[tuple[Strategy, ...]]:
    """Return the strategies of every operator's slices, one for an operator that is not split.

    Raises `OsdpError` if the choices do not cover the model or name unknown strategies or blocks.
    """
    missing = [operator.name for operator in graph.operators if operator.name not in plan.choices]
    foreign = set(plan.choices) - {operator.name for operator in graph.operators}
    unknown = set(plan.recomputed_blocks) - {block.name for block in graph.blocks}
    if missing or foreign or unknown:
        raise OsdpError(
            "the plan's operators or blocks are not the model's",
            got=", ".join([*sorted(foreign), *sorted(unknown)][:5]) or "none that the model lacks",
            expected=f"also {', '.join(missing[:5])}" if missing else "only what the model has",
            advice="plan the model again",
        )
    choices = [parse_choice(plan.choices[operator.name], cluster) for operator in graph.operators]
    for operator in graph.operators:
        check_scalars(operator)
    return choices


def space_of(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Space:
    """Return the space that a plan is evaluated in: the model with the operators split that it splits.

    Raises `OsdpError` as `read_choices` does, and for operators that cannot be split.
    """
    slices = [len(choice) for choice in read_choices(plan, graph, cluster)]
    return Space(graph, {index: count for index, count in enumerate(slices) if count > 1})


@dataclass(frozen=True)
class Decisions:
    """What a plan decides, in the terms of a space."""

    choices: tuple[StageDecision, ...]
    """One per stage in execution order."""
    spanning: tuple[Strategy, ...]
    """One for each operator that runs in several stages."""
    idle: tuple[Strategy, ...]
    """One for each operator that is never called."""

    def options(self, space: Space, load: Workload, limit_bytes: float) -> tuple[StageCandidate, ...]:
        """Return what they cost as they are run within a limit, one option per stage."""
        options = space.fixed(load, self.choices, self.spanning, self.idle)
        return as_run(options, self.spanning, self.idle, space, load, limit_bytes)


def decisions_of(plan: Plan, space: Space, cluster: Cluster) -> Decisions:
    """Return what a plan decides; `space` is as `space_of` makes it.

    Raises `OsdpError` as `read_choices` does, and if the space splits other operators than the plan.
    """
    slices = read_choices(plan, space.graph, cluster)
    counts = {index: len(found) for index, found in enumerate(slices) if len(found) > 1}
    if counts != space.counts:
        names = (space.graph.operators[index].name for index in sorted(counts.keys() | space.counts.keys()))
        raise OsdpError(
            "the plan splits other operators than this space does",
            got=", ".join(names),
            expected="a space that was made for the plan",
            advice="planner.plan.space_of",
        )
    strategies = [strategy for found in slices for strategy in found]
    choices = tuple(
        StageDecision(tuple(strategies[o] for o in stage.operators), stage.name in plan.recomputed_blocks)
        for stage in space.model.stages
    )
    return Decisions(
        choices, tuple(strategies[o] for o in space.model.spanning), tuple(strategies[o] for o in space.model.idle)
    )


def options_of(plan: Plan, space: Space, load: Workload) -> tuple[tuple[StageCandidate, ...], tuple[Strategy, ...]]:
    """Return the options that a plan's choices mean, one per stage, and the spanning operators' strategies.

    Raises `OsdpError` as `decisions_of` does.
    """
    decisions = decisions_of(plan, space, load.cluster)
    return decisions.options(space, load, plan.usable_bytes), decisions.spanning


def runs_by_ddp(plan: Plan, graph: ModelGraph, cluster: Cluster) -> bool:
    """Return whether DistributedDataParallel runs a plan: it can, and the plan fits so on the cluster.

    It is found out from the plan's choices, not from its prediction.  Raises `OsdpError` as `decisions_of` does.
    """
    slices = read_choices(plan, graph, cluster)
    taken = [strategy for found in slices for strategy in found]
    if len(taken) > len(slices) or not can_replicate(graph, taken, plan.model.precision):
        return False
    space = Space(graph)
    load = Workload(cluster, plan.optimizer, plan.model.precision, plan.micro_batch, plan.accumulation)
    decided = decisions_of(plan, space, cluster)
    recomputed = [choice.recompute for choice in decided.choices]
    return fits_replicated(space, load, recomputed, plan.usable_bytes)


def model_ref(graph: ModelGraph) -> ModelRef:
    """Return what a plan remembers of a model."""
    return ModelRef(graph.name, graph.fingerprint, graph.numel, graph.sequence_length, graph.precision)


def check_parameters(plan: Plan, graph: ModelGraph) -> None:
    """Raise `OsdpError` if a model has other operators than the one of the plan, or another number of parameters."""
    odd = sorted({operator.name for operator in graph.operators} ^ set(plan.choices))
    if odd or graph.numel != plan.model.parameters:
        raise _other_model(plan, graph, f"; operators that differ: {', '.join(odd[:5])}" if odd else "")


def check_model(plan: Plan, graph: ModelGraph) -> None:
    """Raise `OsdpError` if the plan was made for another model, or for other costs of it."""
    if plan.model.fingerprint != graph.fingerprint:
        check_parameters(plan, graph)
        raise _other_model(plan, graph, "; the operators' names agree, sizes do not")


def _other_model(plan: Plan, graph: ModelGraph, detail: str) -> OsdpError:
    return OsdpError(
        "this plan was made for another model",
        got=f"{graph.name} ({graph.fingerprint}, {graph.numel:,} parameters){detail}",
        expected=f"{plan.model.name} ({plan.model.fingerprint}, {plan.model.parameters:,} parameters)",
        advice="plan this model again, or give the model, --seq and --precision that the plan was made for",
    )
