"""Memory and time of whole plans: on the rank that holds most, and under DistributedDataParallel where that can run it.

A plan is priced in the model with all its operators split as the plan splits them, so the result does not depend on
where it comes from: the search, a plan file or the user.  Ranks differ by the units that each of them owns whole.

It stands on `planner.options` and the search stands on it: the search compares the predictions that plan files contain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

from planner.cost.ddp import can_replicate
from planner.cost.peak_memory import MemoryPeak, peak_memory
from planner.cost.simulator import simulated_s
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.model.fsdp_units import Unit, owners_of
from planner.model.operator_split import slice_starts
from planner.model.stages import Stage, agreed
from planner.options.candidate_set import Spanning
from planner.options.candidates import StageDecision
from planner.options.search_space import NOWHERE, Space
from planner.plan import NOTHING_ASKED, Asked, Plan, Prediction, cluster_ref, model_ref, read_choices
from planner.strategies.notation import format_choice
from planner.strategies.spec import Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute

Options = tuple[StageCandidate, ...]
"""One per stage in execution order."""
Idle = Sequence[Strategy] | None
"""Strategies of operators that are never called; None: what the search gives them, which is the least memory."""

# --- options ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PricedPlan:
    """A whole plan, priced as a plan that is read from a file is."""

    load: Workload
    space: Space
    """With the plan's operators split."""
    spanning: Spanning
    options: Options
    """On the rank that holds most."""

    @cached_property
    def samples_per_s(self) -> float:
        """Predicted samples per second of all ranks."""
        return self.load.samples_per_step / step_time(self.options, self.load).total_s

    @cached_property
    def peak(self) -> MemoryPeak:
        """Predicted peak memory."""
        return peak_memory(self.options, self.load)

    def as_run(self, limit_bytes: float) -> PricedPlan:
        """Return the plan as the runtime executes it within a limit: `as_run`."""
        return replace(self, options=as_run(self.options, self.spanning, None, self.space, self.load, limit_bytes))


def priced(
    space: Space,
    load: Workload,
    choices: Sequence[StageDecision],
    spanning: Spanning,
    limit_bytes: float = float("inf"),
) -> PricedPlan:
    """Return a plan of the search, priced as its plan file will be; `limit_bytes` as in `fullest`."""
    split = [pair for pair in zip(space.model.stages, choices, strict=True) if pair[1].counts]
    counts = [pair for stage, choice in split for pair in zip(stage.operators, choice.counts, strict=True)]
    sliced = space.with_slices(tuple(sorted((o, count) for o, count in counts if count > 1))) if counts else space
    flat = tuple(replace(choice, counts=()) for choice in choices)
    idle = space.idle_strategies(load.cluster)
    return PricedPlan(load, sliced, spanning, fullest(sliced, load, flat, spanning, idle, limit_bytes)[1])


def fixed(
    space: Space, load: Workload, choices: Sequence[StageDecision], spanning: Spanning, idle: Idle = None
) -> Options:
    """Return the options of a whole plan on the rank that holds most; see `fullest`."""
    return fullest(space, load, choices, spanning, idle)[1]


def fullest(
    space: Space,
    load: Workload,
    choices: Sequence[StageDecision],
    spanning: Spanning,
    idle: Idle = None,
    limit_bytes: float = float("inf"),
) -> tuple[int, Options]:
    """Return the rank that holds most under a whole plan, one choice per stage, and its options; the optimizer's step
    takes as long as on the rank where it takes longest.

    If some hold more than `limit_bytes`, it is any of those.  What a step that leaves out calls holds more at its peak
    is counted throughout, as if it rested.
    """
    again = agreed(space.model.stages, [choice.recompute for choice in choices])
    choices = [c if c.recompute == a else replace(c, recompute=a) for c, a in zip(choices, again, strict=True)]
    resting = space.idle_strategies(load.cluster) if idle is None else idle
    others = space.spanning_choices(spanning) | dict(zip(space.model.idle, resting, strict=True))
    owners = _owners(space, choices, others, load.cluster)
    rank, options = _fullest(space, load, choices, spanning, resting, owners, limit_bytes)
    if (least := space.of_least_step) is None:
        return rank, options
    decided = _decided_for(least, space, choices, others)
    held_bytes = peak_memory(_fullest(least, load, *decided, owners, limit_bytes)[1], load).total_bytes
    more_bytes = math.ceil(held_bytes - peak_memory(options, load).total_bytes)
    return rank, (replace(options[0], window=options[0].window + max(0, more_bytes)), *options[1:])


def _decided_for(
    other: Space, space: Space, choices: Sequence[StageDecision], others: Mapping[int, Strategy]
) -> tuple[list[StageDecision], tuple[Strategy, ...], tuple[Strategy, ...]]:
    """Return what a plan decides in a space with the same operators and fewer calls: of stages, of operators that run
    in several and of those that never run; `others` are the strategies of the latter two in `space`."""
    taken, again = dict(others), dict[str, Recompute]()
    for stage, choice in zip(space.model.stages, choices, strict=True):
        taken |= zip(stage.operators, choice.strategies, strict=True)
        again[stage.name] = choice.recompute
    stages, more = other.model.stages, (other.model.spanning, other.model.idle)
    decided = [
        StageDecision(tuple(taken[o] for o in stage.operators), again.get(stage.name, Recompute.NOTHING))
        for stage in stages
    ]
    in_several, never = (tuple(taken[o] for o in operators) for operators in more)
    return decided, in_several, never


def _fullest(
    space: Space,
    load: Workload,
    choices: Sequence[StageDecision],
    spanning: Spanning,
    idle: Sequence[Strategy],
    owners: Mapping[int, int],
    limit_bytes: float,
) -> tuple[int, Options]:
    """Return the same in the step of a space, of choices that agree on each block."""
    least = dict(zip(space.model.idle, space.idle_strategies(load.cluster), strict=True))
    resting = dict(zip(space.model.idle, idle, strict=True))
    if isinstance(spanning, tuple) and len(set(spanning)) == 1:
        spanning = spanning[0]  # as most plans say it, so that what is known of their stages is found

    # Options are made for one example of each class of stages; spanning operators are everywhere the same.
    owned = []
    for stage_class, stage in zip(space.stage_classes, space.model.stages, strict=True) if owners else ():
        alike = zip(stage.operators, space.model.stages[space.examples[stage_class]].operators, strict=True)
        pairs = [(operator, mine) for operator, mine in alike if operator in owners]
        owned.append(pairs + [(operator, operator) for operator in stage.spanning if operator in owners])

    def on_rank(rank: int) -> Options:
        options, before, known = list[StageCandidate](), None, None
        for index, (stage_class, choice) in enumerate(zip(space.stage_classes, choices, strict=True)):
            others = (
                frozenset(mine for operator, mine in owned[index] if owners[operator] != rank) if owned else NOWHERE
            )
            # Most stages are like the one below: comparing them takes less than looking up what is known.
            if known is None or before != (stage_class, choice, others):
                known, before = space.option(stage_class, choice, spanning, load, others), (stage_class, choice, others)
            options.append(known)
        if resting:
            elsewhere = frozenset(operator for operator in owners if owners[operator] != rank)
            more = space.resting_bytes(resting, load, elsewhere) - space.resting_bytes(least, load)
            options[0] = replace(options[0], parameters=options[0].parameters + more)
        return tuple(options)

    ranks = sorted(set(owners.values()))
    if len(ranks) < 2:
        rank = ranks[0] if ranks else 0
        return rank, on_rank(rank)
    best, most_bytes, longest = None, 0.0, (0.0, 0.0)
    for rank in ranks:
        options = on_rank(rank)
        longest = max(longest, _optimizer_s(options))
        held_bytes = peak_memory(options, load).total_bytes
        if best is None or held_bytes > most_bytes:
            best, most_bytes = (rank, options), held_bytes
        if most_bytes > limit_bytes:
            break
    assert best is not None, "there are several ranks"
    rank, (first, *others) = best
    # All wait for the rank whose optimizer steps longest, which may be another, say one that owns what is offloaded.
    more_s, more_wait_s = (theirs - own for theirs, own in zip(longest, _optimizer_s(best[1]), strict=True))
    if not more_s:
        return best
    step_s, wait_s = first.optimizer_s + more_s, first.optimizer_wait_s + more_wait_s
    return rank, (replace(first, optimizer_s=step_s, optimizer_wait_s=wait_s), *others)


def _optimizer_s(options: Options) -> tuple[float, float]:
    """Return the seconds of a rank's optimizer, and the part of them in which the device waits for the host."""
    return sum(option.optimizer_s for option in options), sum(option.optimizer_wait_s for option in options)


def _owners(
    space: Space, choices: Sequence[StageDecision], others: Mapping[int, Strategy], cluster: Cluster
) -> dict[int, int]:
    """Return the owning rank of every operator that one rank holds whole."""
    kinds = {id(strategy): strategy for choice in choices for strategy in choice.strategies}
    if not any(strategy.spec.has_owner for strategy in (*kinds.values(), *others.values())):
        return {}
    taken = dict(others)
    for stage, choice in zip(space.model.stages, choices, strict=True):
        taken |= zip(stage.operators, choice.strategies, strict=True)
    # What one rank holds whole is a unit of its own, so other units need not be known.
    owned = [Unit((o,), taken[o]) for o in space.model.by_first_call if taken[o].spec.has_owner]
    owners = owners_of(owned, space.model.graph, cluster.world_size)
    return {owned[position].operators[0]: rank for position, rank in owners.items()}


def as_run(
    options: Options, spanning: Spanning, idle: Idle, space: Space, load: Workload, limit_bytes: float
) -> Options:
    """Return a plan's options as the runtime runs it: by DistributedDataParallel if it can and that fits."""
    others = space.spanning_choices(spanning).values(), space.idle_strategies(load.cluster) if idle is None else idle
    taken = chain((strategy for option in options for strategy in option.strategies), *others)
    if space.counts or not can_replicate(space.graph, taken, load.precision):
        return options
    replicated = space.replica(load).options([option.recompute for option in options])
    return replicated if peak_memory(replicated, load).total_bytes <= limit_bytes else options


# --- plans -----------------------------------------------------------------------------------


def predict(options: Sequence[StageCandidate], space: Space, load: Workload) -> Prediction:
    """Predict a plan, one option per stage: step time by the simulator, its terms by the closed form.

    Exposed communication absorbs the rounding by which the two differ.
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
    asked: Asked = NOTHING_ASKED,
) -> Plan:
    """Return a search result as a plan, priced as it will run within the limit less the headroom."""
    options = as_run(tuple(options), spanning, None, space, load, limit_bytes - headroom_bytes)
    idle = zip(space.model.idle, space.idle_strategies(load.cluster), strict=True)
    choices = space.spanning_choices(spanning) | dict(idle)
    stages = list(zip(space.model.stages, options, strict=True))
    for stage, option in stages:
        choices |= zip(stage.operators, option.strategies, strict=True)
    slices = zip(space.graph.operators, pairwise(slice_starts(space.graph, space.counts)), strict=True)
    return Plan(
        schema=Plan.SCHEMA,
        model=model_ref(space.graph),
        cluster=cluster_ref(load.cluster),
        optimizer=load.optimizer_name,
        limit_bytes=limit_bytes,
        micro_batch=load.micro_batch,
        accumulation=load.accumulation,
        predicted=predict(options, space, load),
        gap=gap,
        choices={operator.name: format_choice([choices[o] for o in range(*ends)]) for operator, ends in slices},
        recomputed_blocks=_blocks(stages, Recompute.EVERYTHING),
        headroom_bytes=headroom_bytes,
        asked=asked,
        waits=load.waits,
        selectively_recomputed_blocks=_blocks(stages, Recompute.SELECTIVE),
        offloaded_blocks=_blocks(stages, Recompute.OFFLOADED),
    )


def _blocks(stages: Iterable[tuple[Stage, StageCandidate]], recompute: Recompute) -> list[str]:
    return list(dict.fromkeys(stage.name for stage, option in stages if option.recompute is recompute))


def space_of(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Space:
    """Return the space in which a plan is evaluated: the model with the plan's operators split.

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

    def fullest(self, space: Space, load: Workload) -> tuple[int, Options]:
        """Return the rank that holds most and the options on it, one per stage, run as FSDP2 units."""
        return fullest(space, load, self.choices, self.spanning, self.idle)

    def options(self, space: Space, load: Workload, limit_bytes: float) -> Options:
        """Return the options as the runtime executes them within a limit, one per stage."""
        return as_run(self.fullest(space, load)[1], self.spanning, self.idle, space, load, limit_bytes)


def decisions_of(plan: Plan, space: Space, cluster: Cluster) -> Decisions:
    """Return what a plan decides; `space` is as `space_of` makes it.

    Raises `OsdpError` as `read_choices` does, and if the space splits other operators than the plan.
    """
    slices = read_choices(plan, space.graph, cluster)
    counts = {index: len(found) for index, found in enumerate(slices) if len(found) > 1}
    if counts != space.counts:
        names = (space.graph.operators[index].name for index in sorted(counts.keys() | space.counts.keys()))
        what, advice = "the plan splits other operators than this space", "planner.pricing.space_of"
        raise OsdpError(what, got=", ".join(names), expected="a space made for the plan", advice=advice)
    strategies = [strategy for found in slices for strategy in found]

    def taken(operators: Iterable[int]) -> tuple[Strategy, ...]:
        return tuple(strategies[operator] for operator in operators)

    stages, recomputed = space.model.stages, plan.recomputations
    choices = tuple(
        StageDecision(taken(stage.operators), recomputed.get(stage.name, Recompute.NOTHING)) for stage in stages
    )
    return Decisions(choices, taken(space.model.spanning), taken(space.model.idle))


def runs_by_ddp(plan: Plan, graph: ModelGraph, cluster: Cluster) -> bool:
    """Return whether DistributedDataParallel runs a plan: it can, and the plan fits so on the cluster.

    This is derived from the plan's choices, not from its stored prediction.  Raises `OsdpError` as `decisions_of` does.
    """
    slices = read_choices(plan, graph, cluster)
    taken = [strategy for found in slices for strategy in found]
    if len(taken) > len(slices) or not can_replicate(graph, taken, plan.model.precision):
        return False
    space = Space(graph)
    load = Workload.of(graph, cluster, plan.optimizer, plan.micro_batch, plan.accumulation)
    recomputed = [choice.recompute for choice in decisions_of(plan, space, cluster).choices]
    return peak_memory(space.replica(load).options(recomputed), load).total_bytes <= plan.usable_bytes
