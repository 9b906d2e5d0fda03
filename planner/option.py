"""One stage under one choice of strategies: its memory at every moment and its time, in numbers.

Everything that a plan costs is a sum over stages of what is here (`planner.memory` and
`planner.timing` do the sums), so the ILP, the bound and the final evaluation share one source.

Moments of a stage, in the notation of `planner.unit_memory`, i a unit, i-1 the unit before it in
execution order and i+1 the one after; `saved` are the activations that calls before keep:

    forward, unshard of i      U_i + AG_i + AG_(i-1) + incoming activation
    forward, a call of i       U_i + AG_i + forward peak of the call
    backward, tail of i        AG_i + RSI_(i+1) + backward peak of what follows its last module
    backward, unshard of i     U_i + AG_i + RSI_(i+1) + gradient of the output
    backward, a call of i      U_i + AG_(i-1) + RSI_(i+1) + G of i's calls already done + backward peak
    (units without differentiable inputs, embeddings, keep U and G and are reduced after all backward)
    reduction of i             AG_(i-1) + RSI_i + G_i + SG_i + gradient of the input (autograd may hold G on)
    recomputation              U of the block + AG below + RSI above + saved in the block + forward peak

plus everywhere: `saved`, U of kept units whose backward is to come (H of units with a secondary copy),
U and G of open spanning units.  At the reduction of a unit of strategy `owner`, U is still there.
The AG or RSI of a neighbouring stage is not known here: `Moment.above` and `.below` say that it
has to be added.  Source: closed forms measured on FSDP2, torch 2.13.0, on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from planner.stage import StagedModel, operators_of
from planner.strategy import COMPUTE_BYTES, Strategy, UnitTraffic, unit_traffic
from planner.unit_memory import UnitBytes, unit_bytes
from planner.units import join
from planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that a stage holds at one moment, beyond what rests and what other stages hold."""

    phase: str
    """`forward`, `recompute`, `backward` or `reduce`."""
    operator: int
    """Operator whose call or reduction it is."""
    unsharded: float
    gradients: float
    buffers: float
    activations: float
    above: bool = False
    """Whether the reduce-scatter input of the stage above is alive."""
    below: bool = False
    """Whether the all-gather output of the stage below is alive."""

    @property
    def total_bytes(self) -> float:
        """Sum of the categories."""
        return self.unsharded + self.gradients + self.buffers + self.activations

    @property
    def sees(self) -> tuple[bool, bool, bool]:
        """(in forward, above, below): moments with equal values differ only in their own bytes."""
        return self.phase == "forward", self.above, self.below


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive calls of one unit: what overlaps with its neighbours' communication."""

    forward_s: float
    backward_s: float
    """With recomputation where the block is recomputed."""
    recompute_s: float
    """The part of `backward_s` that is recomputation."""
    forward_gather_s: float
    """All-gather before its forward."""
    backward_gather_s: float
    """All-gather before its backward."""
    reduce_s: float
    """Reduce-scatter after its backward, in every micro-batch."""
    step_reduce_s: float
    """All-reduce after that, in the last micro-batch of a step."""
    forward_stall_s: float = 0.0
    """Communication before its forward that nothing overlaps with, on any backend."""
    backward_stall_s: float = 0.0
    """The same before and after its backward, in every micro-batch."""


@dataclass(frozen=True)
class Option:
    """A stage with strategies chosen."""

    strategies: tuple[Strategy, ...]
    """One per operator of the stage."""
    recompute: bool
    parameters: int
    """S, at rest."""
    optimizer: int
    """OPT, at rest."""
    gradients: int
    """SG, from its reduction (accumulating: always) to the end of the step."""
    late: int
    """U + G - SG (accumulating: U + G) of units that are reduced only when all backward is over."""
    kept: int
    """Unsharded parameters kept from forward to backward."""
    saved: float
    """Activations kept from forward to backward."""
    moments: tuple[Moment, ...]
    """The highest of those that see the same neighbours."""
    gather_output: int
    """AG of its last unit: alive while the stage above starts its forward."""
    prefetched: int
    """AG of its last unit in backward (0 if kept): alive while the stage above is in backward."""
    reduce_input: int
    """RSI of its first unit: alive while the stage below is in backward."""
    segments: tuple[Segment, ...]
    optimizer_s: float

    ambient_unsharded: int = 0
    """U of spanning operators that are open or kept while this stage runs."""
    ambient_gradients: int = 0
    """G of spanning operators that wait for their reduction while this stage is in backward."""

    @property
    def rest(self) -> int:
        """Bytes that it always holds."""
        return self.parameters + self.optimizer

    def bytes_at(self, moment: Moment) -> float:
        """Return what is held at one of its moments, spanning operators included."""
        ambient = self.ambient_unsharded + (0 if moment.phase == "forward" else self.ambient_gradients)
        return moment.total_bytes + ambient


class UnitCosts:
    """Bytes and traffic of units on one cluster, remembered."""

    def __init__(self, model: StagedModel, load: Workload) -> None:
        self.graph, self.load = model.graph, load
        self.known: dict[tuple[tuple[int, ...], Strategy, bool], tuple[UnitBytes, UnitTraffic]] = {}

    def __call__(self, operators: tuple[int, ...], strategy: Strategy,
                 elsewhere: bool = False) -> tuple[UnitBytes, UnitTraffic]:  # fmt: skip
        key = (operators, strategy, elsewhere)
        if key not in self.known:
            load = self.load
            parameters = [p for operator in operators_of(self.graph, operators) for p in operator.parameters]
            self.known[key] = (
                unit_bytes(parameters, strategy, load.precision, load.optimizer, elsewhere),
                unit_traffic(parameters, strategy, load.precision, load.cluster),
            )
        return self.known[key]


class StageCosts:
    """A stage's calls at one micro-batch, in numbers; shared by all its options."""

    def __init__(self, model: StagedModel, index: int, load: Workload) -> None:
        stage, batch, graph = model.stages[index], load.micro_batch, model.graph
        self.model, self.stage, self.load = model, stage, load
        self.saved = [0.0]
        for call in stage.calls:
            self.saved.append(self.saved[-1] + call.saved_bytes(batch))
        self.incoming = [
            graph.calls[before].output_bytes(batch) if before >= 0 else 0.0 for before in stage.input_bytes_of_calls
        ]
        self.output = [call.output_bytes(batch) for call in stage.calls]
        self.forward_peak = [call.forward_peak_bytes(batch) for call in stage.calls]
        self.backward_peak = [call.backward_peak_bytes(batch) for call in stage.calls]
        # A block is wrapped whole, so nothing follows its operators' modules outside of what is gathered.
        self.module_peak = self.backward_peak
        if stage.block is None:
            self.module_peak = [call.module_backward_peak_bytes(batch) for call in stage.calls]
        self.is_bottom = index == 0
        self.is_top = index == len(model.stages) - 1
        self.forward_s = [load.compute_s(call.forward) for call in stage.calls]
        self.backward_s = [load.compute_s(call.backward) for call in stage.calls]
        self.block_input = 0.0 if stage.block is None else graph.blocks[stage.block].input_bytes(batch)
        compute = COMPUTE_BYTES[load.precision]
        self.full_gradients = {
            call.operator: compute * sum(p.numel for p in graph.operators[call.operator].parameters if p.trainable)
            for call in stage.calls
        }


@dataclass(frozen=True)
class _Unit:
    """A unit as one stage sees it; calls are numbered within the stage."""

    operators: tuple[int, ...]
    strategy: Strategy
    bytes: UnitBytes
    traffic: UnitTraffic
    first: int
    last: int
    opens: bool
    """Whether its first call of all is in this stage (always, unless spanning)."""
    closes: bool
    """Whether its last call of all is in this stage."""
    late: bool
    """Whether no input of it needs a gradient, so that FSDP2 reduces it when all backward is over."""
    own: bool
    """Whether it belongs to the stage (is not spanning)."""
    kept: int
    """U or H, whichever it keeps from forward to backward."""
    freed: int
    """What goes before its gradients are reduced."""
    stalls: bool
    """Whether its communication is on the stream that computes."""

    @property
    def prefetched(self) -> int:
        return 0 if self.strategy.keeps_unsharded else self.bytes.gathered


def _is_late(costs: StageCosts, operator: int) -> bool:
    # Token ids have no gradient, and neither has what goes into the first call of all (or its slices);
    # FSDP2 hangs a unit's reduction on the gradients of its first module's inputs.
    graph = costs.model.graph
    this, bottom = graph.operators[operator], graph.operators[graph.calls[0].operator]
    return "Embedding" in this.kind or this is bottom or this.modules == bottom.modules


def _make_unit(costs: StageCosts, operators: tuple[int, ...], strategy: Strategy, units: UnitCosts,
               own: bool, elsewhere: bool) -> _Unit:  # fmt: skip
    unit, traffic = units(operators, strategy, elsewhere)
    calls = [j for j, call in enumerate(costs.stage.calls) if call.operator in operators]
    is_owned = strategy.kind.wrapping == "owner"
    return _Unit(
        operators=operators,
        strategy=strategy,
        bytes=unit,
        traffic=traffic,
        first=min(calls),
        last=max(calls),
        opens=own or operators[0] in costs.stage.opens,
        closes=own or operators[0] in costs.stage.closes,
        late=_is_late(costs, operators[0]),
        own=own,
        kept=unit.unsharded if strategy.keeps_unsharded else unit.secondary,
        freed=unit.unsharded if own and not is_owned else 0,
        stalls=is_owned,
    )


class _Clock:
    """Walks a stage's calls forward and backward and notes every moment's bytes.

    Spanning units that have a call here are walked as units; what others hold is `Option.ambient_*`.
    """

    def __init__(self, costs: StageCosts, own: list[_Unit], spanning: list[_Unit], recompute: bool) -> None:
        self.costs, self.own, self.units, self.recompute = costs, own, own + spanning, recompute
        self.accumulates = costs.load.accumulation > 1
        self.spanning_unsharded = sum(unit.bytes.unsharded for unit in spanning)
        self.waiting = [unit for unit in spanning if not unit.closes]
        self.highest: dict[tuple[bool, bool, bool], tuple[Any, ...]] = {}

    def unsharded_at(self, j: int, backward: bool) -> float:
        """Return U of open units, and of kept ones that are past (forward) or to come (backward)."""
        total = float(self.spanning_unsharded)
        for unit in self.own:
            if unit.first <= j and (j <= unit.last or (backward and self.recompute)):
                total += unit.bytes.unsharded
            elif unit.last < j:
                total += unit.kept
        return total

    def forward(self) -> None:
        """Note the moments of the forward."""
        costs = self.costs
        gathered, from_below = 0, True
        for j, call in enumerate(costs.stage.calls):
            unsharded = self.unsharded_at(j, backward=False)
            for unit in self.units:
                if unit.opens and unit.first == j:
                    buffers, live = gathered + unit.bytes.gathered, costs.saved[j] + costs.incoming[j]
                    self.note("forward", call.operator, unsharded, 0, buffers, live, below=from_below)
                    gathered, from_below = unit.bytes.gathered, False
            live = costs.saved[j] + costs.forward_peak[j]
            self.note("forward", call.operator, unsharded, 0, gathered, live, below=from_below)

    def recomputation(self) -> None:
        """Note the moments of running the block's forward again."""
        costs, last = self.costs, len(self.costs.stage.calls) - 1
        unsharded, held = self.unsharded_at(last, backward=True), self.held(set())
        for j, call in enumerate(costs.stage.calls):
            live = costs.block_input + costs.output[last] + costs.saved[j] + costs.forward_peak[j]
            self.note("recompute", call.operator, unsharded, held, 0, live, above=True, below=True)

    def backward(self) -> None:
        """Note the moments of the backward."""
        costs, calls = self.costs, self.costs.stage.calls
        # The block's input is both what recomputation keeps and what the first call saves again.
        extra = max(0.0, costs.block_input - costs.saved[1]) if self.recompute else 0.0
        prefetched, below = self.next_prefetch(len(calls))
        reduce_input, above, reduced, waiting_unsharded = 0, True, 0, 0
        done: set[int] = set()
        late: list[_Unit] = []
        for j in reversed(range(len(calls))):
            call = calls[j]
            unsharded = self.unsharded_at(j, backward=True) + waiting_unsharded
            gradients, peak = reduced + self.held(done), costs.backward_peak[j]
            for unit in self.units:
                if unit.closes and unit.last == j:
                    if costs.stage.block is None:
                        self.note_tail(unit, j, unsharded, gradients, reduce_input, above)
                    peak = costs.module_peak[j]
                    live = extra + costs.saved[j + 1] + costs.output[j]
                    buffers = unit.prefetched + reduce_input
                    self.note("backward", call.operator, unsharded, gradients, buffers, live, above=above)
                    prefetched, below = self.next_prefetch(j)
            live = extra + costs.saved[j] + peak
            self.note("backward", call.operator, unsharded, gradients, prefetched + reduce_input, live,
                      above=above, below=below)  # fmt: skip
            done.add(call.operator)
            for unit in self.units:
                if unit.opens and unit.first == j and unit.late:
                    late.append(unit)
                    waiting_unsharded += unit.bytes.unsharded if unit.own else 0
                elif unit.opens and unit.first == j:
                    done -= set(unit.operators)
                    self.waiting = [other for other in self.waiting if other is not unit]
                    gradients = reduced + self.held(done) + unit.bytes.full_gradients + unit.bytes.gradients
                    unsharded -= unit.freed
                    reduce_input, above = unit.bytes.reduce_input, False
                    live = extra + costs.saved[j] + costs.incoming[j]
                    self.note("reduce", call.operator, unsharded, gradients, prefetched + reduce_input, live,
                              below=below)  # fmt: skip
                    reduced += 0 if self.accumulates else unit.bytes.gradients

        if costs.is_bottom:
            self.note_late(late, done, reduced, waiting_unsharded)

    def note_late(self, late: list[_Unit], done: set[int], reduced: float, unsharded: float) -> None:
        """Note the reductions that wait for the end of backward."""
        for unit in late:
            done -= set(unit.operators)
            self.waiting = [other for other in self.waiting if other is not unit]
            unsharded -= unit.bytes.unsharded if unit.own else 0
            gradients = reduced + self.held(done) + unit.bytes.full_gradients + unit.bytes.gradients
            self.note("reduce", unit.operators[0], unsharded + self.spanning_unsharded, gradients,
                      unit.bytes.reduce_input, 0.0)  # fmt: skip
            reduced += 0 if self.accumulates else unit.bytes.gradients

    def note_tail(self, unit: _Unit, j: int, unsharded: float, gradients: float, reduce_input: int,
                  above: bool) -> None:  # fmt: skip
        """Note the backward of what follows a unit's last module: the unit is not unsharded again yet."""
        costs, top = self.costs, self.costs.is_top and j == len(self.costs.stage.calls) - 1
        unsharded -= unit.bytes.unsharded - unit.kept
        buffers = reduce_input + (0 if top else unit.prefetched)
        live = costs.saved[j] + costs.backward_peak[j]
        self.note("backward", costs.stage.calls[j].operator, unsharded, gradients, buffers, live, above=above)

    def next_prefetch(self, j: int) -> tuple[int, bool]:
        """Return AG of the unit whose backward comes next below call j, or that it is another stage's."""
        later = [unit for unit in self.units if unit.closes and unit.last < j]
        if not later:
            return 0, True
        return max(later, key=lambda unit: unit.last).prefetched, False

    def held(self, done: set[int]) -> float:
        """Return G of operators whose backward is done, here or in a later stage, but not reduced."""
        full = self.costs.full_gradients
        if not self.waiting:
            return sum(full[o] for o in done)
        waiting = {unit.operators[0] for unit in self.waiting}
        return sum(full[o] for o in done - waiting) + sum(unit.bytes.full_gradients for unit in self.waiting)

    def note(self, phase: str, operator: int, unsharded: float, gradients: float, buffers: float, activations: float,
             above: bool = False, below: bool = False) -> None:  # fmt: skip
        """Keep a moment if it is the highest yet of those that see the same neighbours."""
        # Most moments are not: a large search makes millions, so objects are made of the rest only.
        total, sees = unsharded + gradients + buffers + activations, (phase == "forward", above, below)
        if total > self.highest.get(sees, (-1.0,))[0]:
            self.highest[sees] = (total, phase, operator, unsharded, gradients, buffers, activations, above, below)

    def moments(self) -> tuple[Moment, ...]:
        """Return the moments that were kept."""
        return tuple(Moment(*found[1:]) for found in self.highest.values())


def _segments(costs: StageCosts, units: list[_Unit], recompute: bool) -> tuple[Segment, ...]:
    """Return the runs of calls of one unit, with the compute and communication of each."""
    unit_of = {operator: unit for unit in units for operator in unit.operators}
    by_call = [unit_of[call.operator] for call in costs.stage.calls]
    positions = groupby(range(len(by_call)), key=lambda j: id(by_call[j]))
    runs = [(by_call[run[0]], run) for run in (list(members) for _, members in positions)]
    segments = []
    for position, (unit, members) in enumerate(runs):
        starts = unit.opens and members[0] == unit.first
        ends = unit.closes and members[-1] == unit.last
        before_s = unit.traffic.forward_gather_s if starts else 0.0
        again_before_s = unit.traffic.backward_gather_s if ends else 0.0
        after_s = unit.traffic.reduce_s if starts else 0.0
        again_s = sum(costs.forward_s) if recompute and position == len(runs) - 1 else 0.0
        segments.append(
            Segment(
                forward_s=sum(costs.forward_s[j] for j in members),
                backward_s=sum(costs.backward_s[j] for j in members) + again_s,
                recompute_s=again_s,
                forward_gather_s=0.0 if unit.stalls else before_s,
                backward_gather_s=0.0 if unit.stalls else again_before_s,
                reduce_s=0.0 if unit.stalls else after_s,
                step_reduce_s=unit.traffic.step_reduce_s if starts else 0.0,
                forward_stall_s=before_s if unit.stalls else 0.0,
                backward_stall_s=again_before_s + after_s if unit.stalls else 0.0,
            )
        )
    return tuple(segments)


def make_option(costs: StageCosts, units: UnitCosts, strategies: tuple[Strategy, ...], recompute: bool,
                spanning: Mapping[int, Strategy], elsewhere: frozenset[int] = frozenset()) -> Option:  # fmt: skip
    """Return a stage under one strategy per operator.

    `spanning` gives the strategies of operators that run in several stages, of which those with a
    call here are walked; their memory at rest is in the first stage that calls them.  Operators in
    `elsewhere` are owned by another rank, if their strategy is `owner`.
    """
    stage = costs.stage
    found = join(stage.operators, ((strategy,) for strategy in strategies), costs.model.slices)
    own = [
        _make_unit(costs, u.operators, u.strategy, units, own=True, elsewhere=u.operators[0] in elsewhere)
        for u in found
    ]
    here = [_make_unit(costs, (o,), spanning[o], units, own=False, elsewhere=o in elsewhere) for o in stage.spanning]
    clock = _Clock(costs, own, here, recompute)
    clock.forward()
    if recompute:
        clock.recomputation()
    clock.backward()
    opened = [unit for unit in clock.units if unit.opens]
    closed = [unit for unit in clock.units if unit.closes]
    late = [unit for unit in own if unit.late]
    gradients = sum(unit.bytes.gradients for unit in opened)
    return Option(
        strategies=strategies,
        recompute=recompute,
        parameters=sum(unit.bytes.parameters for unit in opened),
        optimizer=sum(unit.bytes.optimizer for unit in opened),
        gradients=gradients,
        late=sum(unit.bytes.unsharded + unit.bytes.full_gradients for unit in late)
        - (0 if clock.accumulates else sum(unit.bytes.gradients for unit in late)),
        kept=sum(unit.kept for unit in own),
        saved=costs.block_input if recompute else costs.saved[-1],
        moments=clock.moments(),
        gather_output=max(opened, key=lambda unit: unit.first).bytes.gathered if opened else 0,
        prefetched=max(closed, key=lambda unit: unit.last).prefetched if closed else 0,
        reduce_input=min(opened, key=lambda unit: unit.first).bytes.reduce_input if opened else 0,
        segments=_segments(costs, clock.units, recompute),
        optimizer_s=costs.load.optimizer_s(gradients),
    )


def ambient(model: StagedModel, index: int, spanning: Mapping[int, Strategy], units: UnitCosts) -> tuple[int, int]:
    """Return (U, G) that spanning operators without a call in a stage hold while it runs."""
    unsharded = gradients = 0
    for operator, (first, last) in model.spans.items():
        if operator in model.stages[index].spanning or index < first:
            continue
        unit, _ = units((operator,), spanning[operator])
        is_open = index < last
        kept = unit.unsharded if spanning[operator].keeps_unsharded else unit.secondary
        unsharded += unit.unsharded if is_open else kept
        gradients += unit.full_gradients if is_open else 0
    return unsharded, gradients
