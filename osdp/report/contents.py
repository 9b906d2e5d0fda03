"""What a report says, gathered from plans: nothing here is drawn or written.

Planned --plan_contents--> PlanContents --Report--> `osdp.report.render`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from osdp.cli.reports.figures import figures_of, format_count, format_seconds, name_phase, rates, source_kind
from osdp.cli.reports.plan import TERMS, baseline_name, why_more_headroom
from osdp.cli.reports.rows import RECOMPUTED
from osdp.cli.reports.verdict import summary, verdict
from osdp.planning.request import Planned
from osdp.report.frontier_picture import FrontierPoint, frontier_point
from osdp.report.memory_curve import MemoryCurve, memory_curve
from osdp.report.model_strip import ModelStrip, PricesWanted, model_strip, operators_in
from osdp.report.step_streams import StepStreams, step_streams
from osdp.report.tracked_parts import with_tracked
from planner.analysis.explain import OpenPlan, open_plan
from planner.analysis.plan_diff import HIDDEN
from planner.analysis.what_if import WhatIf
from planner.plan import Plan
from profiler.byte_sizes import format_bytes
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph
from profiler.yaml_files import to_yaml

if TYPE_CHECKING:  # What plans does not wait for torch.
    from osdp.planning.verify import Verified


@dataclass(frozen=True)
class Fact:
    """One figure at the top of a report."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class BaselineRow:
    """One uniform configuration under the same limit."""

    name: str
    recompute: str
    micro_batch: int
    peak: str
    samples_per_s: float | None
    """None if it does not fit."""
    ratio: float | None
    """How many times as fast the plan is."""


@dataclass(frozen=True)
class TimeRow:
    """One term of the step's time."""

    name: str
    seconds: str
    share: float


@dataclass(frozen=True)
class Source:
    """A figure of the cluster and where it comes from."""

    name: str
    value: str
    kind: str
    """`measured`, `datasheet`, `paper`, `derived` or `assumed`."""
    text: str


@dataclass(frozen=True)
class PlanContents:
    """What a report says of one plan."""

    plan: Plan
    verdict: str
    facts: tuple[Fact, ...]
    memory: MemoryCurve
    strip: ModelStrip
    streams: StepStreams
    times: tuple[TimeRow, ...]
    plan_yaml: str
    baselines: tuple[BaselineRow, ...] = ()
    """Empty for a plan that was not just found."""
    point: FrontierPoint | None = None
    """None for the same."""

    @property
    def limit(self) -> str:
        return format_bytes(self.plan.limit_bytes)

    @property
    def overlap(self) -> str:
        """How much of the communication runs under computation, in words."""
        times = self.plan.predicted.time_by_term
        hidden_s, exposed_s = times[HIDDEN], times["exposed_communication_s"]
        if not hidden_s + exposed_s:
            return "no communication"
        return f"{hidden_s / (hidden_s + exposed_s):.0%} of the communication overlaps with computation"


@dataclass(frozen=True)
class Report:
    """One or several plans for a model and a cluster."""

    plans: tuple[PlanContents, ...]
    """By growing limit."""
    model: str
    """Its size in words."""
    cluster: str
    rates: str
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    how: str
    """Version and command, one a line."""
    refused: tuple[str, ...] = ()
    """Limits within which nothing fits, and why."""
    more: WhatIf | None = None
    """What more would buy, if that was asked of one plan."""
    verified: Verified | None = None
    """A step of the plan that was run, if it was."""


def make_report(found: Sequence[Planned], how: str, refused: Sequence[str] = (), more: WhatIf | None = None) -> Report:
    """Return the report of at least one plan, all for one model and cluster.

    Of one plan it has the prices of all alternatives, which take as long as `osdp explain`, else of some.
    """
    prices = PricesWanted.ALL if len(found) == 1 else PricesWanted.SAMPLED
    plans = tuple(plan_contents(planned, how, prices) for planned in found)
    return _report(plans, found[0].graph, found[0].cluster, how, tuple(refused), more)


def explained_report(
    view: OpenPlan, how: str, more: WhatIf | None = None, prices: PricesWanted = PricesWanted.ALL
) -> Report:
    """Return the report of a plan that was made before, with its prediction made anew; without uniform plans."""
    view = replace(view, plan=replace(view.plan, predicted=view.prediction))
    contents = open_contents(view, summary(view.plan, view.space.graph, view.load.cluster), how, prices)
    return _report((contents,), view.space.graph, view.load.cluster, how, (), more)


def verified_report(view: OpenPlan, verified: Verified, how: str) -> Report:
    """Return the same with what a step held that was run; what the step does not have is on top as predicted."""
    report = explained_report(view, how)
    (contents,) = report.plans
    apart_bytes = view.prediction.peak_memory_bytes - verified.predicted_peak_bytes
    memory = replace(contents.memory, tracked_bytes=verified.tracked_peak_bytes + apart_bytes)
    if verified.parts:
        memory = with_tracked(memory, view, verified.parts, "tracked")
    return replace(report, plans=(replace(contents, memory=memory),), verified=verified)


def _report(
    plans: tuple[PlanContents, ...],
    graph: ModelGraph,
    cluster: Cluster,
    how: str,
    refused: tuple[str, ...],
    more: WhatIf | None,
) -> Report:
    return Report(
        plans=plans,
        model=_model(graph, plans[0].plan),
        cluster=_cluster(cluster),
        rates=rates(cluster, plans[0].plan.model),
        sources=tuple(Source(name, value, source_kind(text), text) for name, value, text in figures_of(cluster)),
        notes=graph.notes,
        how=how,
        refused=refused,
        more=more,
    )


def plan_contents(planned: Planned, how: str, prices: PricesWanted) -> PlanContents:
    """Return what a report says of one plan that was just found."""
    view = open_plan(planned.plan, planned.graph, planned.cluster)
    contents = open_contents(view, verdict(planned), how, prices)
    facts = contents.facts
    if planned.tighter is not None:
        why = why_more_headroom(planned, planned.tighter)
        facts = (*facts, Fact("headroom", format_bytes(planned.plan.headroom_bytes), why))
    return replace(contents, facts=facts, baselines=tuple(_baselines(planned)), point=frontier_point(planned))


def open_contents(view: OpenPlan, text: str, how: str, prices: PricesWanted) -> PlanContents:
    """Return what a plan says by itself, under a verdict."""
    plan = view.plan
    options = view.decided.options(view.space, view.load, plan.usable_bytes)
    streams = step_streams(view, options)
    strip = model_strip(view, options, prices)
    return PlanContents(
        plan=plan,
        verdict=text,
        facts=_facts(plan, view.load.cluster, strip),
        memory=memory_curve(view, options, streams),
        strip=strip,
        streams=streams,
        times=_times(plan),
        plan_yaml=to_yaml(plan, how),
    )


def _facts(plan: Plan, cluster: Cluster, strip: ModelStrip) -> tuple[Fact, ...]:
    predicted = plan.predicted
    free_bytes = plan.limit_bytes - predicted.peak_memory_bytes
    used = predicted.peak_memory_bytes / plan.limit_bytes
    bound = format_count(predicted.samples_per_s / (1 - plan.gap))
    samples = cluster.world_size * plan.micro_batch * plan.accumulation
    times = f", {plan.accumulation} micro-batches" if plan.accumulation > 1 else ""
    batch = f"per rank{times}: {samples:,} samples per step"
    found = [
        Fact("samples/s", format_count(predicted.samples_per_s), f"{format_seconds(predicted.step_time_s)} per step"),
        Fact("peak memory", format_bytes(predicted.peak_memory_bytes), f"in {name_phase(predicted.peak_phase)}"),
        Fact("free under the limit", format_bytes(free_bytes), f"{used:.1%} of {format_bytes(plan.limit_bytes)} used"),
        Fact("certified gap", f"{plan.gap:.2%}", f"no plan of the search space has more than {bound} samples/s"),
        Fact("micro-batch", str(plan.micro_batch), batch),
    ]
    if strip.parts:
        largest = max(strip.parts, key=lambda prices: prices.count)
        found.append(Fact("what binds", largest.binds, f"{largest.count} x {largest.label}: {largest.why}"))
    return tuple(found)


def _times(plan: Plan) -> tuple[TimeRow, ...]:
    predicted = plan.predicted
    terms = [(label, predicted.time_by_term.get(term, 0.0)) for term, label in TERMS.items()]
    rows = [TimeRow(label, format_seconds(s), s / predicted.step_time_s) for label, s in terms if s]
    hidden = predicted.time_by_term[HIDDEN]
    return (*rows, TimeRow("overlapped communication, not part of the sum", format_seconds(hidden), 0.0))


def _baselines(planned: Planned) -> list[BaselineRow]:
    speed = planned.plan.predicted.samples_per_s
    return [
        BaselineRow(
            baseline_name(baseline),
            RECOMPUTED[baseline.recompute],
            baseline.load.micro_batch,
            format_bytes(baseline.peak_memory_bytes),
            baseline.samples_per_s if baseline.feasible else None,
            speed / baseline.samples_per_s if baseline.feasible else None,
        )
        for baseline in planned.found.baselines
    ]


def _model(graph: ModelGraph, plan: Plan) -> str:
    tokens = f", {graph.sequence_length} tokens per sample" if graph.sequence_length > 1 else ""
    return f"{operators_in(graph)}; {plan.model.precision}, {plan.optimizer}{tokens}"


def _cluster(cluster: Cluster) -> str:
    device = cluster.device
    return f"{cluster.nodes} x {cluster.gpus_per_node} {device.name}, {format_bytes(device.memory_bytes.value)} each"
