"""The memory of one stage at every moment of a step, given its units.

Only activations depend on the micro-batch.  So one walk through a stage notes what else is held at every moment, and
which activations; at each micro-batch, that is added up, and of alike moments the highest is kept (`highest_moments`).

Moments of a stage, in the notation of `planner.cost.unit_memory`, i a unit, i-1 the unit before it in
execution order and i+1 the one after; `saved` are the activations that calls before keep:

    forward, gather of i       AG_i + AGX_i + AG_(i-1) + incoming activation
    forward, unshard of i      U_i + UX_i + AG_i + AG_(i-1) + incoming activation
    forward, a call of i       U_i + AG_i + forward peak of the call
    forward, tail of i         AG_i + forward peak of what follows its last module
    backward, tail of i        AG_i + RSI + backward peak of what follows its last module
    backward, gather of m      AG_m + AGH_m + what is alive then; m runs back first, nothing has prefetched it
    backward, unshard of i     U_i + UX_i + H_i + AG_i + RSI + what is alive as the backward gets there
    backward, gather of i-1    U_i + AG_(i-1) + AGH_(i-1) + RSI + the same
    backward, a call of i      U_i + AG_(i-1) + RSI + G of i's calls already done + backward peak of the call
    reduction of i, copied     AG_(i-1) + RSI_i + G_i + gradients of activations that are left
    reduction of i, reduced    AG_(i-1) + RSI_i + RSX_i + SG_i + G1_i + the same
    sum, after the reduction   AG_(i-1) + RSI_i + SG_i + the gradient of its input, those it is added to, and the sum
    recomputation              U of the block + AG below + RSI + saved in the block + forward peak
    (a block of several units: each is gathered as in forward, AG_i until it ends, and stays to its backward)
    the model runs k again     U_i + AG_(i-1) + RSI + U_k + AG_k + what is alive then, in a backward of i's calls: a
                               checkpoint of its own is around both (`planner.cost.own_reruns`)

(a unit that is not a whole block is reduced before the gradient of its input is added to others: both are left)

plus everywhere: `saved`, U of kept units whose backward is to come (H of units with a secondary copy),
U and G of open spanning units.  RSI is the input of the last reduction, of whichever unit that was.

- A block that is one unit is wrapped whole, and its tail is code around blocks; recomputed, it is unsharded before it
  runs again, with nothing but its input saved, and its forward keeps no more than what is still to be read.
- A unit that runs several times is gathered for each, and what it keeps is there to the backward of the last; G waits
  for the first.  The backward of each frees RSI.
- A recomputed block of several units is gathered when what follows the block has run back.
- A unit of several stages may lie in a block that is wrapped whole.  It is gathered as the block runs again, and its AG
  is there until the block has; after that it stays, as do all units in a recomputed block, to its own backward.
- Units without differentiable inputs (embeddings) keep U and G and are reduced after all backward.
- `owner`: U is there until its gradients are copied and no gradient is after that; it leaves the AG and RSI
  of others alone and frees its own; nothing of it is prefetched, and FSDP2 prefetches past it.

The AG or RSI of another stage is not known here: `Moment.neighbours` says which of them have to be added.
Source: FSDP2 of torch 2.13.0 on fake tensors, see docs/cost-model.md for how far off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.own_reruns import gathered_again
from planner.cost.stage_costs import Live, StageFrame, UnitCosts
from planner.cost.staged_unit import StagedUnit
from planner.model.stages import computes_back
from profiler.affine import Affine


class Neighbours(NamedTuple):
    """Buffers of other stages that are alive at a moment.  A tuple, because searches compare millions of them."""

    above: bool = False
    """The reduce-scatter input of the stage above."""
    below: bool = False
    """The all-gather output of the stage below."""
    gathers_below: bool = False
    """What only its all-gather holds, which is just running."""


ALONE = Neighbours()
Sees = tuple[bool, Neighbours]
"""(in forward, neighbours): moments with equal values differ only in their own bytes."""


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
    neighbours: Neighbours = ALONE

    @property
    def total_bytes(self) -> float:
        """Sum of the categories."""
        return self.unsharded + self.gradients + self.buffers + self.activations

    @property
    def sees(self) -> Sees:
        """What of other stages it depends on."""
        return self.phase == "forward", self.neighbours


class Note(NamedTuple):
    """A moment before the micro-batch is known."""

    fixed_bytes: float
    """Sum of the categories but activations."""
    live: Live
    """The activations: a key of `StageCosts.activations`."""
    phase: str
    operator: int
    unsharded: float
    gradients: float
    buffers: float


Notes = Mapping[Sees, Iterable[Note]]
"""The notes of a stage, in order, by what they see."""


def highest_moments(notes: Notes, activations: Mapping[Live, float]) -> tuple[Moment, ...]:
    """Return the highest moment, the first of equals, of those that see the same neighbours."""
    found = []
    for (_, neighbours), alike in notes.items():
        highest, at = -1.0, None
        for note in alike:  # A large search looks at millions, so objects are made of the highest only.
            total = note[0] + activations[note[1]]
            if total > highest:
                highest, at = total, note
        if at is not None:
            held = at.unsharded, at.gradients, at.buffers, activations[at.live]
            found.append(Moment(at.phase, at.operator, *held, neighbours))
    return tuple(found)


class StageMemoryWalk:
    """Goes through a stage's calls, forward and backward, and records the bytes of every moment.

    Spanning units with a call here are included; what others hold is `StageCandidate.ambient_*`.
    """

    def __init__(
        self,
        frame: StageFrame,
        own: list[StagedUnit],
        spanning: list[StagedUnit],
        again: bool,
        in_tail: bool,
        costs: UnitCosts | None = None,
    ) -> None:
        """`again` is whether the block is recomputed, and `in_tail` whether it is then before the backward of what
        follows its modules is over (`BlockRerun.in_tail`); what of it makes no difference.  `costs` are of units
        that the model may run again itself."""
        self.frame, self.units, self.again, self.in_tail = frame, own + spanning, again, in_tail
        self.costs = costs
        self.own = [unit for unit in self.units if unit.own]
        # A block of one unit is wrapped whole: no computation of it runs while it is sharded.
        self.whole = own[0] if frame.stage.block is not None and len(own) == 1 else None
        self.accumulates = frame.load.accumulation > 1
        self.inside = [unit for unit in self.units if unit.closes and not unit.stays and unit is not self.whole]
        """Units that are gathered for a backward in here, beside the block itself where it is wrapped whole."""
        self.spanning_unsharded = sum(unit.bytes.unsharded for unit in spanning if unit.stays or not unit.closes)
        self.waiting = [unit for unit in self.units if unit.operators[0] in frame.stage.waits and not unit.ends]
        self.noted: dict[Sees, dict[Live, Note]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether the stage is a block that is wrapped as one unit."""
        return self.whole is not None

    def unsharded_at(self, j: int, backward: bool) -> float:
        """Return U of open units, and of kept ones that are past (forward) or to come (backward)."""
        total = 0.0
        for unit in self.units:
            is_over, opens = unit.closes and unit.last < j, unit.opens or (backward and unit.own)
            if is_over and not (backward and self.again):
                total += unit.still_kept if backward else unit.kept
            elif not opens or unit.first <= j:
                total += unit.bytes.unsharded
            elif not (backward or unit.begins):
                total += unit.kept
            elif unit.leaves_unsharded:
                total += unit.bytes.unsharded
        return total

    def forward(self) -> None:
        """Note the moments of the forward."""
        gathered, seen = 0, Neighbours(below=True)
        if self.frame.has_opening and not self.is_whole:
            self.note_opening()
        for j, call in enumerate(self.frame.stage.calls):
            unsharded = self.unsharded_at(j, backward=False)
            for unit in self.units:
                for_each = unit.gathers_each_call and call.operator in unit.operators
                if (unit.opens and unit.first == j) or unit.reopens == j or for_each:
                    buffers, live = gathered + unit.bytes.gathered, ("gather", j)
                    copying = buffers + unit.bytes.unshard_temporary
                    self.note("forward", call.operator, unsharded, 0, copying, live, seen)
                    buffers += unit.bytes.gather_temporary
                    self.note("forward", call.operator, unsharded - unit.bytes.unsharded, 0, buffers, live, seen)
                    if not unit.stalls:
                        gathered, seen = unit.bytes.gathered, ALONE
            if self.frame.has_opening and self.is_whole and not j:
                self.note("forward", call.operator, unsharded, 0, gathered, ("opening", 0), seen)
            self.forward_call(j, unsharded, gathered, seen)

    def note_opening(self) -> None:
        """Note what a block of several units runs before the first of them is gathered."""
        unsharded = self.unsharded_at(0, backward=False)
        unsharded -= sum(unit.bytes.unsharded for unit in self.units if unit.opens and unit.first == 0)
        operator = self.frame.stage.calls[0].operator
        self.note("forward", operator, unsharded, 0, 0, ("opening", 0), Neighbours(below=True))

    def forward_call(self, j: int, unsharded: float, gathered: int, seen: Neighbours) -> None:
        """Note a call, and what follows its module when the units that end with it are sharded again."""
        operator = self.frame.stage.calls[j].operator
        ending = [unit for unit in self.units if unit.closes and unit.last == j]
        self.note("forward", operator, unsharded, 0, gathered, ("module" if ending else "call", j), seen)
        if ending:
            copied = max(unit.bytes.secondary for unit in ending)  # H is a copy of a part of U, which is there yet
            if copied:
                self.note("forward", operator, unsharded + copied, 0, gathered, ("module", j), seen)
            left = unsharded - sum(unit.bytes.unsharded - unit.kept for unit in ending)
            self.note("forward", operator, left, 0, gathered, ("tail", j), seen)

    def recomputation(self) -> None:
        """Note the moments of running the block's forward again."""
        calls, last, held = self.frame.stage.calls, len(self.frame.stage.calls) - 1, self.held(set())
        if self.is_whole or not self.inside:
            buffers = self.gathered_inside() if self.inside else 0
            unsharded, seen = self.unsharded_at(last, backward=True), Neighbours(above=True, below=not self.inside)
            self.note("recompute", calls[last].operator, unsharded, held, buffers, ("call again", last), seen)
            return
        units = sorted(self.inside, key=lambda unit: unit.last)
        # It has been gathered for its backward, unless what follows its modules needs the block before that begins, be
        # it a unit that a stage above has left gathered.
        top = None if self.in_tail or units[-1].last < last else units[-1]
        target = next((unit for unit in reversed(units) if unit is not top and not unit.stalls), None)
        unsharded = self.spanning_unsharded + sum(unit.still_kept for unit in units)
        if top is not None:
            self.note_before_recomputation(unsharded - top.still_kept, top, target, held)
            unsharded += top.bytes.unsharded - top.still_kept
        # The others come with their forward; what has been prefetched is there until then.  Where the forward of a unit
        # begins in that of another, or goes on in other stages, FSDP2 frees the buffer of a gather only when the next
        # has been copied out.
        prefetched, last_gathered = target.prefetched if target and not (self.in_tail and self.frame.is_top) else 0, 0
        seen = Neighbours(above=True, below=target is None)
        if self.frame.has_opening:
            self.note("recompute", calls[0].operator, unsharded, held, prefetched, ("opening again", 0), seen)
        linger = self.frame.stage.is_nested
        for unit in units:
            if unit is target:
                prefetched = 0
            gathered = 0 if unit is top else unit.prefetched
            buffers = prefetched + last_gathered + gathered
            if unit is not top:
                operator, entering = unit.operators[0], ("gather again", unit.first)
                with_temporary = buffers + unit.prefetch_temporary
                self.note("recompute", operator, unsharded, held, with_temporary, entering, seen)
                unsharded += unit.bytes.unsharded - unit.still_kept
                copying = buffers + unit.unshard_temporary
                self.note("recompute", operator, unsharded + unit.bytes.secondary, held, copying, entering, seen)
            linger |= unit is not top and not unit.own
            if gathered and not unit.stalls and linger:
                buffers, last_gathered = prefetched + gathered, gathered
            for j in range(unit.first, unit.last + 1):
                self.note("recompute", calls[j].operator, unsharded, held, buffers, ("call again", j), seen)

    def gathered_inside(self) -> int:
        """Return the buffers of units inside of a block that is wrapped whole, as it runs again.

        The last has been prefetched, and its buffer is there until the block has run.  That of one before is freed when
        the next has been gathered: as the last has, which is unsharded then.
        """
        *others, last = sorted(self.inside, key=lambda unit: unit.last)
        to_come = last.bytes.unsharded - last.still_kept
        return last.prefetched + max(0, 0, *(unit.prefetched + unit.bytes.secondary - to_come for unit in others))

    def note_before_recomputation(self, kept: float, top: StagedUnit, target: StagedUnit | None, held: float) -> None:
        """Note the gather of a block's last unit, after which the block runs again, and what is prefetched then.

        `kept` is what others have kept unsharded.
        """
        live, unsharded = ("before again", top.last), kept + top.bytes.unsharded
        operator, gathered = self.frame.stage.calls[top.last].operator, top.prefetched + top.unshard_temporary
        self.note("recompute", operator, unsharded + top.bytes.secondary, held, gathered, live, Neighbours(above=True))
        buffers = target.prefetched + target.prefetch_temporary if target else 0
        seen = Neighbours(above=True, below=target is None, gathers_below=target is None)
        self.note("recompute", operator, unsharded, held, buffers, live, seen)

    def backward(self) -> None:
        """Note the moments of the backward."""
        calls = self.frame.stage.calls
        # What has stayed gathered is so from the loss on, and has prefetched what comes next.
        is_first = self.frame.is_top and not self.frame.model.staying
        prefetched, below, _ = (0, False, 0) if is_first else self.next_prefetch(len(calls))
        reduce_input, above, reduced, waiting_unsharded = 0, True, 0, 0
        done: set[int] = set()
        reduced_after: list[StagedUnit] = []
        for j in reversed(range(len(calls))):
            call = calls[j]
            unsharded = self.unsharded_at(j, backward=True) + waiting_unsharded
            gradients, at, sums = reduced + self.held(done), "backward of call", False
            if j == len(calls) - 1 and self.again and self.inside and not self.is_whole:
                # What follows the block: it has not run again yet.
                around = self.spanning_unsharded + sum(unit.still_kept for unit in self.inside)
                tail = "backward of tail", j
                self.note("backward", call.operator, around, gradients, prefetched, tail, Neighbours(above, below))
                at, prefetched = "backward of module", 0
            for unit in self.units:
                if unit.closes and unit.last == j and self.again and unit is not self.whole:
                    # It has been gathered to run again, and so has what would be prefetched now.
                    if not unit.stalls:
                        prefetched, below, _ = self.next_prefetch(j)
                        gathering = Neighbours(above, below, below)
                        live = "unshard" if self.whole is None else "unshard inside", j
                        self.note("backward", call.operator, unsharded, gradients, reduce_input, live, gathering)
                elif unit.closes and unit.last == j:
                    # What follows its last module: the unit is not unsharded again yet, nor is any inside of it.
                    before = unsharded - self.to_gather(j) if self.inside and unit is self.whole else unsharded
                    sharded, buffers = before - (unit.bytes.unsharded - unit.still_kept), prefetched + reduce_input
                    seen, tail = Neighbours(above, below), ("backward of tail", j)
                    self.note("backward", call.operator, sharded, gradients, buffers, tail, seen)
                    at = "backward of module"
                    if unit.is_prefetched:
                        if is_first and not (prefetched or below):
                            self.note_first_gather(unit, j, before, gradients, reduce_input)
                        self.note_gather(unit, j, before, gradients, reduce_input, above)
                        prefetched, below, _ = self.next_prefetch(j)
            seen, buffers = Neighbours(above, below), prefetched + reduce_input
            self.note("backward", call.operator, unsharded, gradients, buffers, (at, j), seen)
            self.note_own_reruns(j, unsharded, gradients, buffers, seen)
            if call.reads_parameters and j not in self.frame.stage.under_no_grad:
                done.add(call.operator)
            if self.frame.has_opening and self.is_whole and not j:
                gradients, live = reduced + self.held(done), ("backward of opening", 0)
                self.note("backward", call.operator, unsharded, gradients, buffers, live, seen)
            for unit in reversed(self.units):  # those in a block before itself
                if unit.reduces_here and unit.first == j and unit.reduced_after_backward:
                    reduced_after.append(unit)
                    waiting_unsharded += unit.bytes.unsharded
                elif unit.reduces_here and unit.first == j:
                    done -= set(unit.operators)
                    self.waiting = [other for other in self.waiting if other is not unit]
                    waiting, gradients = reduced + self.held(done), unit.bytes.full_gradients
                    if unit.is_filled:  # before anything of the unit is freed
                        filled, seen = waiting + gradients, Neighbours(above, below)
                        self.note("reduce", call.operator, unsharded, filled, buffers, ("reduction", j), seen)
                    unsharded -= unit.freed
                    around = prefetched + (reduce_input if unit.stalls else 0)
                    seen = Neighbours(above and unit.stalls, below)
                    self.note_reduction(unit, call.operator, unsharded, waiting, around, ("reduction", j), seen)
                    reduced += unit.bytes.beside_sums if self.accumulates else unit.bytes.gradients
                    unsharded -= unit.bytes.unsharded - unit.freed
                    sums = j in self.frame.sums
                if unit.first == j:
                    waiting_unsharded += unit.left_over + (unit.left_by_rerun if self.again else 0)
                if unit.first == j and unit.replaces_reduction:
                    reduce_input, above = unit.left_reduce_input, False
            if sums and not self.is_whole:
                gradients, seen = reduced + self.held(done), Neighbours(above, below)
                self.note("backward", call.operator, unsharded, gradients, prefetched + reduce_input, ("sum", j), seen)
            if self.frame.has_opening and not self.is_whole and not j:
                gradients, seen = reduced + self.held(done), Neighbours(above, below)
                around, live = prefetched + reduce_input, ("backward of opening", 0)
                self.note("backward", call.operator, unsharded, gradients, around, live, seen)

        if self.frame.is_bottom:
            self.note_reductions_after(reduced_after, done, reduced, waiting_unsharded)

    @property
    def runs_back(self) -> bool:
        """Whether the backward comes to any call."""
        return any(unit.has_backward for unit in self.units) or any(map(computes_back, self.frame.stage.calls))

    def note_without_backward(self) -> None:
        """Note what is there as the backward of others is over: what was kept, or gathered, in vain."""
        left = sum(max(unit.kept, unit.left_over) for unit in self.units)
        gathering = sum(unit.prefetch_temporary for unit in self.units if unit.is_prefetched)
        for j, call in enumerate(self.frame.stage.calls):
            self.note("backward", call.operator, left, 0, gathering, ("backward of call", j), Neighbours(above=True))

    def note_own_reruns(self, j: int, unsharded: float, gradients: float, buffers: float, seen: Neighbours) -> None:
        """Note what is gathered as a part of the model that a call is in runs again by the model's own checkpoint."""
        call = self.frame.stage.calls[j]
        if not call.reruns or not self.costs or self.again:
            return
        found = gathered_again(self.frame, self.costs, self.own, j, sees_below=seen.below)
        for number, (more, around) in enumerate(found):
            live = f"own rerun {number}", j
            self.note("recompute", call.operator, unsharded + more, gradients, buffers + around, live, seen)

    def note_first_gather(
        self, unit: StagedUnit, j: int, unsharded: float, gradients: float, reduce_input: int
    ) -> None:
        """Note the gather of the unit that runs back first, which nothing has prefetched."""
        buffers = unit.prefetched + unit.prefetch_temporary + reduce_input
        sharded = unsharded - unit.bytes.unsharded + unit.still_kept
        self.note("backward", self.frame.stage.calls[j].operator, sharded, gradients, buffers, ("unshard", j), ALONE)

    def note_gather(
        self, unit: StagedUnit, j: int, unsharded: float, gradients: float, reduce_input: int, above: bool
    ) -> None:
        """Note that a unit is gathered for its backward, and then what is prefetched."""
        operator, held = self.frame.stage.calls[j].operator, unsharded + unit.bytes.secondary
        # As the backward gets to the block itself, or to a unit in it.
        entered = "unshard" if self.whole is None or unit is self.whole else "unshard inside"
        live, buffers = (entered, j), unit.prefetched + unit.unshard_temporary + reduce_input
        self.note("backward", operator, held, gradients, buffers, live, Neighbours(above))
        within = unit is self.whole and bool(self.inside)
        if within:
            self.note_gather_inside(unit, j, unsharded, gradients, buffers, above)
        prefetched, below, temporary = self.next_prefetch(j, within=within)
        buffers, seen = prefetched + temporary + reduce_input, Neighbours(above, below, below)
        self.note("backward", operator, unsharded, gradients, buffers, live, seen)

    def note_gather_inside(
        self, block: StagedUnit, j: int, unsharded: float, gradients: float, buffers: int, above: bool
    ) -> None:
        """Note that a unit inside of a block is gathered first, and prefetches, where both return the same."""
        call = self.frame.stage.calls[j]
        is_last = any(unit.last == j and not unit.stalls for unit in self.inside)
        if not is_last or call.rest_forward_peak_bytes != Affine():
            return
        prefetched, below, temporary = self.next_prefetch(j - 1, within=True)
        around, inside, live = buffers + prefetched, unsharded + self.to_gather(j), ("unshard", j)
        sharded, seen = inside - block.bytes.unsharded + block.still_kept, Neighbours(above, below, below)
        self.note("backward", call.operator, sharded, gradients, around + temporary, live, seen)
        both, seen = inside + block.bytes.secondary, Neighbours(above, below)
        self.note("backward", call.operator, both, gradients, around, live, seen)

    def note_reduction(
        self, unit: StagedUnit, operator: int, unsharded: float, held: float, around: int, live: Live, seen: Neighbours
    ) -> None:
        """Note what is held when a unit's gradients have been copied, and when they are reduced.

        `around` are buffers of other units.  FSDP2 frees the one of the reduction before; an owner does not.
        """
        buffers, own = around + unit.bytes.reduce_input, unit.bytes
        self.note("reduce", operator, unsharded, held + own.full_gradients, buffers, live, seen)
        if unit.stalls:  # An owner's operator has given up its parameters and gradients by now.
            unsharded -= own.unsharded
        gradients = held + own.gradients + (0 if unit.stalls else own.last_gradient)
        self.note("reduce", operator, unsharded, gradients, buffers + own.reduce_temporary, live, seen)

    def note_reductions_after(self, units: list[StagedUnit], done: set[int], reduced: float, unsharded: float) -> None:
        """Note the reductions that wait for the end of backward."""
        for unit in reversed(units):  # in the order of modules
            done -= set(unit.operators)
            self.waiting = [other for other in self.waiting if other is not unit]
            waiting = reduced + self.held(done)
            live = "end", 0  # what is fed and what is returned
            self.note_reduction(unit, unit.operators[0], unsharded - unit.freed, waiting, 0, live, ALONE)
            unsharded -= unit.bytes.unsharded
            reduced += unit.bytes.beside_sums if self.accumulates else unit.bytes.gradients

    def to_gather(self, j: int) -> int:
        """Return what `unsharded_at` counts at a block's last call j of units inside of it, before it is gathered."""
        return sum(unit.bytes.unsharded - unit.still_kept for unit in self.inside if self.again or unit.last == j)

    def next_prefetch(self, j: int, *, within: bool = False) -> tuple[int, bool, int]:
        """Return AG and AGH of FSDP2's unit whose backward comes next below call j, or that it is another stage's.

        `within`: the block itself has just been gathered, and has not run again.
        """
        units = self.inside if within else self.units
        later = [unit for unit in units if unit.closes and unit.last < j + within and unit.is_prefetched]
        if not later:
            return 0, True, 0
        if self.again and j < len(self.frame.stage.calls) and not within:
            return 0, False, 0  # What ran again has stayed gathered.
        unit = max(later, key=lambda unit: unit.last)
        return unit.prefetched, False, unit.prefetch_temporary

    def held(self, done: set[int]) -> float:
        """Return G of operators whose backward is done, here or in a later stage, but not reduced."""
        full = self.frame.full_gradients
        if not self.waiting:
            return sum(full[o] for o in done)
        waiting = {unit.operators[0] for unit in self.waiting}
        return sum(full[o] for o in done - waiting) + sum(unit.bytes.full_gradients for unit in self.waiting)

    def note(
        self,
        phase: str,
        operator: int,
        unsharded: float,
        gradients: float,
        buffers: float,
        live: Live,
        neighbours: Neighbours,
    ) -> None:
        """Note a moment, unless one noted before it with the same activations and neighbours is as high."""
        alike = self.noted.setdefault((phase == "forward", neighbours), {})
        fixed = unsharded + gradients + buffers
        if live not in alike or fixed > alike[live].fixed_bytes:
            alike.pop(live, None)  # They stay in order: of equally high moments the first counts.
            alike[live] = Note(fixed, live, phase, operator, unsharded, gradients, buffers)

    def notes(self) -> Notes:
        """Return what has been noted."""
        return {sees: tuple(alike.values()) for sees, alike in self.noted.items()}
