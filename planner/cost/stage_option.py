"""Memory at every moment, and time, of one stage under one choice of strategies.

Most of it is the same at every micro-batch: `StageOption`, of which each micro-batch makes a `StageCandidate`.

Everything that a plan costs is a sum over stages of these numbers (`planner.cost.peak_memory` and
`planner.cost.step_time` do the sums), so the ILP, the bound and the final evaluation share one source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from planner.cost.shared_collectives import Parts, added
from planner.cost.stage_costs import StageCosts, StageFrame, UnitCosts
from planner.cost.stage_memory import Moment, Notes, StageMemoryWalk, highest_moments
from planner.cost.staged_unit import StagedUnit, make_unit, never_runs_back, runs_often
from planner.cost.unit_memory import two_largest
from planner.model.fsdp_units import stage_units
from planner.model.stages import StagedModel
from planner.strategies.spec import Strategy
from profiler.model_graph import Recompute


class Launches(NamedTuple):
    """What the device computes in a segment, and what the host takes to launch it."""

    forward_computing_s: float
    backward_computing_s: float
    forward_launch_s: float
    backward_launch_s: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls of one unit: what overlaps with its neighbours' communication."""

    forward_s: float
    """As long as the device computes, or as the host launches that, whichever is longer."""
    backward_s: float
    """The same, with recomputation where the block is recomputed."""
    recompute_s: float
    """The part of `backward_s` that is recomputation."""
    launch_wait_s: float = 0.0
    """The part of both in which the device waits for a host that is not ahead of it."""
    forward_gather_s: float = 0.0
    """All-gather before its forward."""
    backward_gather_s: float = 0.0
    """All-gather before its backward."""
    reduce_s: float = 0.0
    """Reduce-scatter after its backward, in every micro-batch."""
    step_reduce_s: float = 0.0
    """All-reduce after that on a stream of its own, in the last micro-batch of a step."""
    forward_stall_s: float = 0.0
    """Communication before its forward on the compute stream, which never overlaps: copies out of the gather."""
    backward_stall_s: float = 0.0
    """The same before and after its backward, in every micro-batch."""
    copy_in_s: float = 0.0
    """The end of that, which waits for the reduction of the segment above: copies into its own."""
    interference_s: float = 0.0
    """Slow-down of computation by concurrent communication, in every micro-batch (`apart`)."""
    step_exposed_s: float = 0.0
    """The same once per step, and communication between backward and optimizer, which nothing hides."""
    launches: Launches | None = field(default=None, kw_only=True)
    """What both are the longer of; None: as long as the device computes."""

    @property
    def forward_computing_s(self) -> float:
        """The part of `forward_s` in which the device computes."""
        return self.launches.forward_computing_s if self.launches else self.forward_s

    @property
    def backward_computing_s(self) -> float:
        """The part of `backward_s` in which the device computes."""
        return self.launches.backward_computing_s if self.launches else self.backward_s

    def apart(self, interference: float) -> Segment:
        """Return the segment with that fraction of its communication counted as if it did not overlap.

        While communication runs, computation takes sigma times as long, and with interference = 1 - 1/sigma

            max(computation + interference * communication, communication)
                = interference * communication + max(computation, (1 - interference) * communication)

        so that overlap stays a maximum of two numbers.
        """
        if not interference:
            return self
        gathers_s = self.forward_gather_s + self.backward_gather_s
        return replace(
            self,
            forward_gather_s=(1.0 - interference) * self.forward_gather_s,
            backward_gather_s=(1.0 - interference) * self.backward_gather_s,
            reduce_s=(1.0 - interference) * self.reduce_s,
            step_reduce_s=(1.0 - interference) * self.step_reduce_s,
            interference_s=interference * (gathers_s + self.reduce_s),
            step_exposed_s=self.step_exposed_s + interference * self.step_reduce_s,
        )


class Ambient(NamedTuple):
    """What spanning operators hold while a stage runs that does not call them.  A tuple, as searches make many."""

    forward: int = 0
    """U of those that are open or kept in forward."""
    backward: int = 0
    """The same in backward."""
    gradients: int = 0
    """G of those that wait for their reduction, in backward."""

    def bytes_in(self, is_forward: bool) -> int:
        """Return the sum in forward or backward."""
        return self.forward if is_forward else self.backward + self.gradients

    def plus(self, other: Ambient) -> Ambient:
        """Return what both hold."""
        return Ambient(*(one + two for one, two in zip(self, other, strict=True)))


NO_AMBIENT = Ambient()


@dataclass(frozen=True)
class StageCandidate:
    """A stage with strategies chosen."""

    strategies: tuple[Strategy, ...]
    """One per operator of the stage."""
    recompute: Recompute
    parameters: int
    """S, at rest."""
    optimizer: int
    """OPT, at rest."""
    gradients: int
    """What holds gradients from their reduction (accumulating: always) to the end of backward."""
    stepped: int
    """SG, in the optimizer's step."""
    updates: int
    """TMP, what that makes of all tensors together."""
    largest: int
    """The largest tensor that may be stepped apart."""
    second: int
    """The next largest."""
    saved: float
    """Activations kept from forward to backward."""
    moments: tuple[Moment, ...]
    """The highest of those that see the same neighbours."""
    segments: tuple[Segment, ...]
    optimizer_s: float
    optimizer_wait_s: float = field(default=0.0, kw_only=True)
    """The part of it in which the device waits for a host that is not ahead of it."""

    held: float = 0.0
    """The part of `saved` that moments of the forward of stages above have, as the model's forward holds it."""
    shared: float = 0.0
    """The part of `saved` that is not there if no stage is recomputed that takes from `block`."""
    block: int | None = None
    """Index of the block that it is."""
    takes: tuple[int, ...] = ()
    """Blocks that keep their `shared` if it is recomputed."""
    reduced_after_backward: int = 0
    """U + G - SG (accumulating: U + G) of units that are reduced only when all backward is over, what the largest of
    those reductions takes beside that, and gradients beside `gradients` that are there from the reduction to the end of
    backward.  Stages below have all that throughout their backward: an upper bound, as the end of backward is no moment
    of its own."""
    kept: int = 0
    """Unsharded parameters kept from forward to backward."""
    gather_output: int = 0
    """AG of its last unit: alive until another unit's takes its place in the forward of a stage above."""
    prefetched: int = 0
    """AG of its last unit in backward (0 if kept): alive while the stage above that prefetches it is in backward."""
    prefetch_temporary: int = 0
    """AGH of its last unit: alive when the backward of the stage above begins."""
    reduce_input: int = 0
    """RSI of the unit that it reduces last in backward: alive until another unit's takes its place."""
    reduces: bool = False
    """Whether there is such a unit."""
    ambient: Ambient = NO_AMBIENT
    """Of spanning operators without a call here."""
    gathers: bool = True
    """Whether there is a unit for `gather_output`; above a stage of `owner` alone that of one further down lives."""
    prefetches: bool = True
    """Whether there is a unit for `prefetched`; FSDP2 prefetches past a stage without."""
    window: int = 0
    """W, at rest."""
    syncs_each_microbatch: bool = False
    """Whether a unit of it makes ranks wait for each other in every micro-batch."""
    parts: Parts = ()
    """What its units share with others, and their part of that."""

    @property
    def rest(self) -> int:
        """Bytes that it holds throughout."""
        return self.parameters + self.optimizer + self.window

    def kept_for(self, in_forward: bool) -> float:
        """Return what it keeps until its backward, as moments in forward or backward of stages above count it."""
        return self.saved + self.kept - (self.held if in_forward else 0.0)

    def with_fields(self, **changes: Any) -> StageCandidate:
        """Return what `dataclasses.replace` does, in a third of its time: a search makes ten thousands."""
        return StageCandidate(**{**vars(self), **changes})

    def around(self, spanning: Ambient) -> StageCandidate:
        """Return it with the memory of spanning operators that have no call in its stage."""
        return self if spanning == NO_AMBIENT else self.with_fields(ambient=spanning)

    def bytes_at(self, moment: Moment) -> float:
        """Return what is held at one of its moments, spanning operators included."""
        return moment.total_bytes + self.ambient.bytes_in(moment.phase == "forward")


@dataclass(frozen=True)
class Run:
    """Consecutive calls of one unit before the micro-batch is known."""

    calls: tuple[int, ...]
    """Their numbers in the stage."""
    recompute: Recompute
    """What of the block runs again as part of its backward."""
    is_whole: bool
    """Whether the block is one unit."""
    communication: tuple[float, ...]
    """The fields of `Segment` that do not depend on the micro-batch."""
    unit_launch_s: tuple[float, float] = (0.0, 0.0)
    """What the unit's gather in forward, and its gather and reduction in backward, cost the host."""

    def at(self, costs: StageCosts) -> Segment:
        """Return the segment at one micro-batch."""
        again_s = costs.again_s(self.recompute, self.is_whole)
        (forward_again_s, backward_again_s), units_s = costs.launch_again_s(self.recompute), self.unit_launch_s
        forward_s, backward_s, forward_launch_s, backward_launch_s = costs.of_calls(self.calls)
        own = Launches(
            forward_s,
            backward_s + again_s,
            forward_launch_s + (forward_again_s + units_s[0]),
            backward_launch_s + (backward_again_s + units_s[1]),
        )
        forward_s, backward_s, wait_s = launched(*own)
        is_launched = own.forward_launch_s or own.backward_launch_s
        found = Segment(
            forward_s, backward_s, again_s, wait_s, *self.communication, launches=own if is_launched else None
        )
        if self.recompute is not Recompute.OFFLOADED:
            return found
        out_s, back_s = costs.copy_waits_s(self.recompute, self.is_whole)
        stalls_s = found.forward_stall_s + out_s, found.backward_stall_s + back_s
        return replace(found, forward_stall_s=stalls_s[0], backward_stall_s=stalls_s[1])


def launched(
    forward_s: Any, backward_s: Any, forward_launch_s: Any, backward_launch_s: Any, highest: Callable[..., Any] = max
) -> tuple[Any, Any, Any]:
    """Return the seconds of forward and backward, waiting for the host included, and what of them is that.

    The host is not ahead of the device when a segment begins: an upper bound, as a segment that keeps the device busy
    for longer than the host gives the next a lead (`planner.cost.simulator`).  The numbers may be arrays, if `highest`
    is their elementwise maximum.
    """
    forward, backward = highest(forward_s, forward_launch_s), highest(backward_s, backward_launch_s)
    return forward, backward, forward - forward_s + backward - backward_s


COMMUNICATION = tuple(field.name for field in fields(Segment)[4:-1])
"""The fields of `Segment` that do not depend on the micro-batch, but for the wait for what is offloaded."""
_communication = attrgetter(*COMMUNICATION)


class StageParts:
    """The units of a stage and their runs of calls, which its options share: most differ in one unit of several."""

    def __init__(self, frame: StageFrame, units: UnitCosts) -> None:
        self.frame, self.costs = frame, units
        self.unit = cache(partial(make_unit, frame, units))
        self._run = cache(self._make_run)

    def runs(self, units: Sequence[StagedUnit], is_whole: bool) -> tuple[Run, ...]:
        """Return the runs of calls of one unit, with the communication of each; nothing is recomputed."""
        unit_of = {operator: unit for unit in units for operator in unit.operators}
        by_call = [unit_of[call.operator] for call in self.frame.stage.calls]
        alike = groupby(range(len(by_call)), key=lambda j: id(by_call[j]))
        return tuple(self._run(by_call[run[0]], run, is_whole) for run in (tuple(members) for _, members in alike))

    def _make_run(self, unit: StagedUnit, members: tuple[int, ...], is_whole: bool) -> Run:
        first, last = unit.opens and members[0] == unit.first, unit.closes and members[-1] == unit.last
        reduces = unit.reduces_here and members[0] == unit.first
        each = len(members) if unit.gathers_each_call else 0
        starts, ends = each or int(first), each or int(last)
        before_s, again_before_s = starts * unit.traffic.forward_gather_s, ends * unit.traffic.backward_gather_s
        after_s = unit.reduction_s if reduces else 0.0
        stalled_s = again_before_s if unit.stalls else 0.0
        stalled_s += ends * unit.traffic.copy_out_again_s + (unit.traffic.copy_in_s if reduces else 0.0)
        launch_s = unit.launch_s
        launches_s = launch_s * starts, launch_s * (ends + (reduces and unit.is_reduced))
        at_end_s, in_step = unit.traffic.step_reduce_s if reduces else 0.0, unit.strategy.spec.one_sided
        segment = Segment(
            forward_s=0.0,
            backward_s=0.0,
            recompute_s=0.0,
            forward_gather_s=0.0 if unit.stalls else before_s,
            backward_gather_s=0.0 if unit.stalls else again_before_s,
            reduce_s=0.0 if unit.reduction_stalls else after_s,
            step_reduce_s=0.0 if in_step else at_end_s,
            forward_stall_s=(before_s if unit.stalls else 0.0) + starts * unit.traffic.copy_out_s,
            backward_stall_s=stalled_s + (after_s if unit.reduction_stalls else 0.0),
            copy_in_s=unit.traffic.copy_in_s if reduces else 0.0,
            step_exposed_s=at_end_s if in_step else 0.0,
        )
        communication = _communication(segment.apart(self.frame.load.cluster.interference))
        return Run(members, Recompute.NOTHING, is_whole, communication, launches_s)


@dataclass(frozen=True)
class StageOption:
    """A stage with strategies chosen, before the micro-batch is known."""

    recompute: Recompute
    notes: Notes
    runs: tuple[Run, ...]
    constants: Mapping[str, Any]
    """The fields of `StageCandidate` that do not depend on the micro-batch."""
    is_whole: bool
    """Whether it is a block of one unit."""

    @property
    def rest(self) -> int:
        """Bytes that it holds throughout."""
        rest: int = self.constants["parameters"] + self.constants["optimizer"] + self.constants["window"]
        return rest

    def highest_bytes(self, costs: StageCosts) -> float:
        """Return the bytes of its highest moment."""
        activations = costs.activations(self.recompute, self.is_whole)
        return max(note.fixed_bytes + activations[note.live] for alike in self.notes.values() for note in alike)

    def renumbered(self, numbers: Mapping[int, int]) -> StageOption:
        """Return the option with other numbers for the operators at which its moments are."""
        notes = {sees: [n._replace(operator=numbers[n.operator]) for n in alike] for sees, alike in self.notes.items()}
        return replace(self, notes=notes)

    def at(self, costs: StageCosts) -> StageCandidate:
        """Return the stage at one micro-batch."""
        return StageCandidate(
            recompute=self.recompute,
            saved=costs.saved_bytes(self.recompute),
            held=costs.memory(self.recompute).held[-1],
            shared=costs.memory(self.recompute).shared,
            moments=highest_moments(self.notes, costs.activations(self.recompute, self.is_whole)),
            segments=tuple(run.at(costs) for run in self.runs),
            **self.constants,
        )


class StageUnits:
    """The units of a stage under one strategy per operator, whatever of it is recomputed."""

    def __init__(
        self,
        parts: StageParts,
        strategies: tuple[Strategy, ...],
        spanning: Mapping[int, Strategy],
        elsewhere: frozenset[int] = frozenset(),
    ) -> None:
        """`spanning` gives the strategies of operators that run in several stages, of which those with a call here are
        included; their memory at rest is in the first stage that calls them.  Operators in `elsewhere` are owned by
        another rank, if their strategy is `owner`.
        """
        frame, stage = parts.frame, parts.frame.stage
        found = stage_units(frame.model, stage, ((s,) for s in strategies))
        self.frame, self.strategies, self._costs = frame, strategies, parts.costs
        self.own = [parts.unit(u.operators, u.strategy, True, u.operators[0] in elsewhere) for u in found]
        self.here = [parts.unit((o,), spanning[o], False, o in elsewhere) for o in stage.spanning]
        self.is_whole = stage.block is not None and len(self.own) == 1
        """Whether it is a block of one unit: no computation of it runs while it is sharded."""
        self._runs = parts.runs([*self.own, *self.here], self.is_whole)
        ends = 0, len(stage.calls) - 1
        if self.is_whole and (self.own[0].first, self.own[0].last) != ends:  # others run in it before or after
            self.own = [replace(self.own[0], first=0, last=ends[1])]
        self._constants = self._without_micro_batch()
        self._backward_notes = cache(self._make_backward_notes)

    def option(self, recompute: Recompute) -> StageOption:
        """Return the stage with this much of it recomputed."""
        block, blocks = self.frame.stage.block, self.frame.model.graph.blocks
        in_tail = False
        if recompute and block is not None and not self.is_whole:
            in_tail = blocks[block].runs_again(recompute, is_whole=False).in_tail
        # Moments of the forward and of the backward never see the same.
        notes = {**self._forward_notes, **self._backward_notes(bool(recompute), in_tail)}
        runs = (*self._runs[:-1], replace(self._runs[-1], recompute=recompute)) if recompute else self._runs
        constants = {**self._constants, "takes": self.frame.stage.takes if recompute else ()}
        if recompute and self.frame.stage.without_backward:
            constants["reduced_after_backward"] += sum(unit.left_by_rerun for unit in self.own)
        return StageOption(recompute, notes, runs, constants, self.is_whole)

    @cached_property
    def _forward_notes(self) -> Notes:
        """The moments of its forward, whatever is recomputed."""
        walk = StageMemoryWalk(self.frame, self.own, self.here, again=False, in_tail=False)
        walk.forward()
        return walk.notes()

    def _make_backward_notes(self, again: bool, in_tail: bool) -> Notes:
        """Return the moments of its backward, and of what runs again in it."""
        block, graph = self.frame.stage.block, self.frame.model.graph
        if again and block is not None and graph.blocks[block].late:  # else what has no parameters may run again
            again = any(unit.has_backward for unit in (*self.own, *self.here))
        walk = StageMemoryWalk(self.frame, self.own, self.here, again, in_tail and again, self._costs)
        if graph.trains and not walk.runs_back:
            walk.note_without_backward()
        elif graph.trains:
            if again:
                walk.recomputation()
            walk.backward()
        return walk.notes()

    def _without_micro_batch(self) -> dict[str, Any]:
        """Return the fields of `StageCandidate` that depend on neither the micro-batch nor recomputation."""
        stage, graph, load = self.frame.stage, self.frame.model.graph, self.frame.load
        units, accumulates = [*self.own, *self.here], load.accumulation > 1
        opened = [unit for unit in units if unit.reduces_here]
        gathering = [unit for unit in units if not unit.stalls]
        entered = max((unit for unit in gathering if unit.opens), key=lambda unit: unit.first, default=None)
        closed = max(
            (unit for unit in units if unit.closes and unit.is_prefetched), key=lambda unit: unit.last, default=None
        )
        reducing = min((unit for unit in units if unit.replaces_reduction), key=lambda unit: unit.first, default=None)
        waiting = [unit for unit in opened if unit.reduced_after_backward]
        stepped = sum(unit.bytes.stepped for unit in opened)
        gradients = sum(unit.bytes.gradients for unit in opened)
        # Accumulating, sums in reduce dtype are there from the start, and SG in addition when they are all-reduced.
        held = sum(unit.bytes.beside_sums for unit in opened) if accumulates else 0
        on_device = (graph.operators[i] for unit in opened if not unit.bytes.offloaded for i in unit.operators)
        tensors = sum(one.trainable and one.used for operator in on_device for one in operator.parameters)
        largest, second = two_largest(
            [0, 0, *(size for unit in opened for size in (unit.bytes.largest, unit.bytes.second))]
        )
        return {
            "strategies": self.strategies,
            "parameters": sum(unit.bytes.parameters for unit in opened),
            "optimizer": sum(unit.bytes.optimizer for unit in opened),
            "gradients": gradients - held,
            "stepped": stepped,
            "updates": sum(unit.bytes.updates for unit in opened),
            "largest": largest,
            "second": second,
            "reduced_after_backward": sum(unit.left_over for unit in opened)
            + sum(unit.bytes.unsharded + unit.bytes.full_gradients for unit in waiting)
            + max((unit.late_reduction for unit in waiting), default=0)
            - (0 if accumulates else sum(unit.bytes.gradients for unit in waiting))
            + held,
            "kept": sum(unit.kept for unit in self.own),
            "gather_output": entered.bytes.gathered if entered else 0,
            "gathers": entered is not None,
            "prefetched": closed.prefetched if closed else 0,
            "prefetches": closed is not None,
            "prefetch_temporary": closed.prefetch_temporary if closed else 0,
            "reduce_input": reducing.left_reduce_input if reducing else 0,
            "reduces": reducing is not None,
            "optimizer_s": load.optimizer_s(stepped, sum(unit.bytes.offloaded for unit in opened), tensors),
            "optimizer_wait_s": load.optimizer_wait_s(stepped, tensors),
            "syncs_each_microbatch": any(unit.traffic.syncs_each_microbatch for unit in units),
            "parts": added((unit.traffic.parts, 1) for unit in opened),
            "window": sum(unit.bytes.window for unit in opened),
            "block": stage.block if any(call.sharers for call in stage.calls) else None,
        }


def ambient(model: StagedModel, index: int, spanning: Mapping[int, Strategy], units: UnitCosts) -> Ambient:
    """Return what spanning operators without a call in a stage hold while it runs."""
    forward = backward = gradients = 0
    for operator, (first, last) in model.spans.items():
        if operator in model.stages[index].spanning or index < first:
            continue
        unit, _ = units((operator,), spanning[operator])
        is_open = index < last
        often = runs_often(model.graph, operator) or operator in model.stages[index].reopened
        stays = spanning[operator].keeps_unsharded or (operator in model.staying and not is_open)
        kept = unit.unsharded if stays else unit.secondary
        forward += unit.unsharded if is_open and not often else kept
        if is_open and often and never_runs_back(model.graph, (operator,)):
            is_open = False  # what its calls before have kept stays
        is_sharded = often and operator not in model.stages[index].left_unsharded
        backward += kept if not is_open else 0 if is_sharded else unit.unsharded
        gradients += unit.full_gradients if operator in model.stages[index].waits else 0
    return Ambient(forward, backward, gradients)
