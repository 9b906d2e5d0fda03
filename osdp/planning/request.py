"""From a model and a cluster to a plan.

    ModelSource --trace_model--> ModelGraph --search--> Found --make_plan--> Plan

Nothing here prints; `osdp.cli` does.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from osdp.planning.allocator_headroom import LEAST_SHARE, ROOMY, TIGHT, AllocatorHeadroom
from osdp.planning.imbalance_option import lasting
from osdp.planning.memory_options import NO_HEADROOM, Headroom, check_headroom
from osdp.planning.named_model import NamedModel, Traced, TraceSettings
from planner.cost.stragglers import BALANCED, Imbalance
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.pins import Pin, parse_pin, resolve
from planner.plan import Asked, Plan
from planner.pricing import PricedPlan, make_plan
from planner.problem import Pins, Progress, Task
from planner.search.baselines import Baseline
from planner.search.infeasible import NothingFits, Remedy, blame
from planner.search.search import FEWER_MADE, Effort, Found, search
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource

SIMPLE, BEST = "simple", "best"
"""Styles of a plan: as one would write it (`planner.search.simple_plan`), or the fastest that there is."""
MATERIAL_GAIN = 0.02
"""What a plan has to gain over a simple one to be worth its many parts; more than what predictions are off."""


@dataclass(frozen=True)
class Request:
    """What the user asks of a model and a cluster."""

    limit_bytes: int
    """Memory per device that may be used, reserve included; see `memory_limit`."""
    precision: str = "fp32"
    """Compute dtype: `fp32` or `bf16`."""
    optimizer: str = "adam"
    """As `planner.optimizers.optimizer_name` gives it."""
    micro_batch: int | None = None
    """Samples per rank in one forward; None: searched."""
    global_batch: int | None = None
    """Samples per step of all ranks; None: one micro-batch per step."""
    headroom: Headroom = NO_HEADROOM
    roomier: Headroom | None = None
    """A larger one to have where a step is shorter with it; None: the one above, whatever that costs."""
    pins: tuple[Pin, ...] = ()
    """What every plan of the search has to keep."""
    imbalance: Imbalance = BALANCED
    """How unlike micro-batches are."""
    imbalance_as_given: str = ""
    """As the user gave that; the plan's file gets it as `lasting` makes it."""
    master_weights: str = ""
    """What trained parameters of fewer bits rest in: `fp32`, or empty for the dtype that they have."""
    expert_imbalance: float = 1.0
    """Largest load over the mean of what a router chooses from; see `profiler.trace.data_dependent`."""
    effort: Effort = field(default_factory=Effort)
    """How plans are looked for, and how long."""
    style: str = ""
    """`SIMPLE`, `BEST`, or empty for the simple plan unless the best is faster by `MATERIAL_GAIN`."""

    @property
    def headroom_bytes(self) -> int:
        return self.headroom.of(self.limit_bytes)

    @property
    def usable_bytes(self) -> int:
        """What the search may use."""
        return self.limit_bytes - self.headroom_bytes


@dataclass(frozen=True)
class Planned:
    """A plan and how it was found, for reports."""

    plan: Plan
    graph: ModelGraph
    found: Found
    """The search's result, with the plan that is written."""
    request: Request
    """What was asked, with the headroom that the plan has."""
    trace_s: float | None
    """Seconds that tracing took; None: the graph is of an earlier trace."""
    search_s: float
    """Seconds that the searches took."""
    tighter: Planned | None = None
    """The plan with less headroom, whose step retries of the allocator make longer than this one's; None: none was."""

    @property
    def cluster(self) -> Cluster:
        return self.found.load.cluster

    @property
    def as_run(self) -> PricedPlan:
        """The plan as the runtime executes it, which is what it is priced as."""
        found, usable_bytes = self.found, self.plan.limit_bytes - self.plan.headroom_bytes
        return PricedPlan(found.load, found.space, found.spanning, found.options).as_run(usable_bytes)

    @property
    def pins(self) -> Pins:
        """What the user decided."""
        return pins_of(self.plan, self.graph, self.cluster)

    @property
    def best_baseline(self) -> Baseline | None:
        """The fastest uniform configuration that fits, if one does."""
        fitting = [baseline for baseline in self.found.baselines if baseline.feasible]
        return max(fitting, key=lambda baseline: baseline.samples_per_s, default=None)


def plan_model(
    source: ModelSource | NamedModel, cluster: Cluster, request: Request, progress: Progress = lambda what, done: None
) -> Planned:
    """Trace a model and return the fastest plan within the limit.

    Raises OsdpError for what cannot be asked, a model that cannot be traced, and where nothing fits.
    """
    traced = trace(source, cluster, request, progress)
    return replace(plan_graph(traced.graph, cluster, request, progress), trace_s=traced.trace_s)


def plan_graph(
    graph: ModelGraph, cluster: Cluster, request: Request, progress: Progress = lambda what, fraction: None
) -> Planned:
    """Return the fastest plan within the limit for a model that was traced. Raises OsdpError as `plan_model` does."""
    task, began_s = task_of(request, graph, cluster), time.perf_counter()
    space, last = Space(graph, pins=task.pins), 1.0 if request.roomier is None else 0.5
    try:
        found = find_plan(task, request, part_of(progress, 0.0, last), space)
    except NothingFits as refused:
        raise explain_refusal(refused, task, request) from None
    planned = Planned(written(found, request), graph, found, request, 0.0, time.perf_counter() - began_s)
    if request.roomier is not None and would_gain_by_room(planned, request.roomier):
        planned = with_more_room(planned, request.roomier, part_of(progress, last, 1.0), space)
    progress("done", 1.0)
    return planned


def with_more_room(tight: Planned, headroom: Headroom, progress: Progress, space: Space) -> Planned:
    """Return the plan with a larger headroom if it is faster when retries are counted, else the one that there is."""
    request, began_s = tight.request, time.perf_counter()
    effort = replace(request.effort, seconds=request.effort.seconds - tight.search_s, remedies=False)
    if effort.seconds <= 0:
        return tight
    roomier, found = replace(request, headroom=headroom, roomier=None), None
    with suppress(OsdpError):  # nothing fits, or no simple plan does
        task = task_of(roomier, tight.graph, tight.cluster)
        found = find_plan(task, replace(roomier, effort=effort), progress, space)
    search_s = tight.search_s + time.perf_counter() - began_s
    if found is None or samples_with_retries_per_s(found, ROOMY) <= samples_with_retries_per_s(tight.found, TIGHT):
        return replace(tight, search_s=search_s)
    return Planned(written(found, roomier), tight.graph, found, roomier, tight.trace_s, search_s, tighter=tight)


def would_gain_by_room(planned: Planned, roomier: Headroom) -> bool:
    """Return whether retries take a share of a plan's step that may be worth a plan with more headroom."""
    fits = planned.plan.predicted.peak_memory_bytes <= planned.plan.limit_bytes - roomier.of(planned.plan.limit_bytes)
    return not fits and TIGHT.retries_s >= LEAST_SHARE * planned.plan.predicted.step_time_s


def samples_with_retries_per_s(found: Found, headroom: AllocatorHeadroom) -> float:
    """Return the samples per second of a plan whose step is longer for what the allocator gives back."""
    load = found.load
    samples = load.cluster.world_size * load.micro_batch * load.accumulation
    return samples / (samples / found.samples_per_s + headroom.retries_s)


def part_of(progress: Progress, first: float, last: float) -> Progress:
    """Return the progress of a part of the work, from one share of it to another."""
    return lambda what, fraction: progress(what, first + (last - first) * fraction)


def find_plan(task: Task, request: Request, progress: Progress, space: Space | None = None) -> Found:
    """Return the plan of a task in the style, and with the effort, of a request; `space` is as for `search`.

    Raises NothingFits, and OsdpError as `preferred` does.
    """
    few = replace(request.effort, labels=min(request.effort.labels, FEWER_MADE))
    gain, effort = (None, request.effort) if request.style == BEST else (MATERIAL_GAIN, few)
    return preferred(search(task, progress, space, material_gain=gain, effort=effort), request)


def preferred(best: Found, request: Request) -> Found:
    """Return the plan that is written: the simple one where it is asked for, or where the best gains little over it.

    Raises OsdpError if a simple one is asked for and none fits.
    """
    simple = best.simple
    if simple is None and request.style == SIMPLE:
        what, expected = "no simple plan fits", "one strategy for all blocks and one for what is outside them"
        advice = "leave --simple out, or allow more memory (--mem)"
        raise OsdpError(what, got="--simple", expected=expected, advice=advice)
    is_material = simple is None or best.samples_per_s >= (1 + MATERIAL_GAIN) * simple.samples_per_s
    if simple is None or (is_material and request.style != SIMPLE):
        return best
    taken = {name: getattr(simple, name) for name in ("load", "space", "options", "spanning", "samples_per_s")}
    return replace(best, **taken)


def trace(source: ModelSource | NamedModel, cluster: Cluster, request: Request, progress: Progress) -> Traced:
    """Return the model's graph.

    Raises OsdpError for what cannot be asked, and for a model that cannot be traced.
    """
    check_headroom(request.headroom, request.limit_bytes, cluster)
    # Raises for an unknown precision or optimizer before the trace takes its seconds.
    Workload(cluster, request.optimizer, request.precision, micro_batch=1)
    progress(f"tracing {source.name}", 0.0)
    asked = request.micro_batch, request.master_weights, request.expert_imbalance, cluster.world_size
    settings = TraceSettings(request.precision, cluster.device.kind, *asked)
    return source.traced(settings) if isinstance(source, NamedModel) else settings.trace(source)


def task_of(request: Request, graph: ModelGraph, cluster: Cluster) -> Task:
    """Return what the search is asked; raises OsdpError for pins that cannot be honoured."""
    usable_bytes, optimizer, imbalance = request.usable_bytes, request.optimizer, request.imbalance
    batches, pins = (request.global_batch, request.micro_batch), resolve(request.pins, graph, cluster)
    return Task(graph, cluster, usable_bytes, optimizer, *batches, pins=pins, imbalance=imbalance)


def pins_of(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Pins:
    """Return what the user pinned when a plan was made; raises OsdpError as `task_of` does."""
    return resolve([parse_pin(pin) for pin in plan.asked.pins], graph, cluster)


def written(found: Found, request: Request) -> Plan:
    pins, imbalance = [str(pin) for pin in request.pins], lasting(request.imbalance_as_given)
    asked = Asked(request.micro_batch, request.global_batch, pins, imbalance, request.expert_imbalance)
    return make_plan(
        found.options,
        found.spanning,
        found.space,
        found.load,
        limit_bytes=request.limit_bytes,
        gap=found.gap,
        headroom_bytes=request.headroom_bytes,
        asked=asked,
    )


def explain_refusal(refused: NothingFits, task: Task, request: Request) -> NothingFits:
    """Return the refusal in the user's terms: with the headroom, and the pin that is to blame, if one is."""
    refusal = refused.refusal
    blamed = blame(task, refusal.load, request.pins)
    remedies = [
        replace(remedy, needed_bytes=request.headroom.over(remedy.needed_bytes))
        for remedy in (*blamed, *refusal.remedies)
    ]
    if request.headroom_bytes and refusal.needed_bytes <= request.limit_bytes:
        remedies.insert(len(blamed), Remedy("--headroom 0", refusal.needed_bytes))
    found = replace(refusal, remedies=tuple(remedies), headroom_bytes=request.headroom_bytes)
    return NothingFits(replace(found, advised_bytes=request.headroom.over(refusal.needed_bytes)))
