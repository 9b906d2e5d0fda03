"""A unit as one stage sees it: where it is gathered, kept and reduced, and what that takes.

Source: FSDP2 of torch 2.13.0 on fake tensors, see docs/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.stage_costs import StageFrame, UnitCosts
from planner.cost.unit_communication import UnitTraffic
from planner.cost.unit_memory import UnitBytes
from planner.model.stages import runs_back
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import as_reduced, is_plain
from profiler.model_graph import ModelGraph


@dataclass(frozen=True, eq=False)
class StagedUnit:
    """A unit as one stage sees it; calls are numbered within the stage.  Compared by identity."""

    operators: tuple[int, ...]
    strategy: Strategy
    bytes: UnitBytes
    traffic: UnitTraffic
    first: int
    last: int
    opens: bool
    """Whether it is gathered in this stage (always, unless it is open from a stage before)."""
    closes: bool
    """Whether it is sharded again in this stage."""
    reduces_here: bool
    """Whether its first call of all that has a backward is in this stage: it is reduced after that, and what rests of
    it counts here."""
    begins: bool
    """Whether its first call of all is in this stage."""
    ends: bool
    """Whether its last call of all is in this stage."""
    reduced_after_backward: bool
    """Whether no input of it needs a gradient, so that FSDP2 reduces it when all backward is over."""
    is_left_unsharded: bool
    """Whether the backward of a call of a later stage has left it unsharded (`Stage.left_unsharded`)."""
    leaves_unsharded: bool
    """Whether the backward of its calls here does."""
    own: bool
    """Whether it is sharded again after each backward of it: it is not spanning, or runs several times."""
    kept: int
    """U or H, whichever it keeps from forward to backward: to that of its last call."""
    freed: int
    """What goes before its gradients are reduced."""
    stalls: bool
    """Whether FSDP2's streams and buffers do not know it: its communication is on the stream that computes, or there
    is none."""
    reduction_s: float
    """After its backward, in every micro-batch."""
    reduction_stalls: bool
    """Whether the backward of what is below waits for that."""
    launch_s: float
    """What each gather and each reduction costs the host."""
    is_reduced: bool
    """Whether it has gradients."""
    has_backward: bool
    """Whether any backward comes to it."""
    is_filled: bool
    """Whether it makes zeros in the place of gradients that some of its parameters have not."""
    left_over: int
    """What stays of it until all backward is over, if none comes to it, trained or frozen: what it has kept, and what
    FSDP2 has gathered for it in vain."""
    left_by_rerun: int
    """What stays beside that where its block runs again: what an owner's broadcast fills then."""
    gathers_each_call: bool
    """Whether it is one module that runs several times, and is gathered and sharded again each time."""
    is_prefetched: bool
    """Whether what runs back before it prefetches it: not what stalls or stays, nor that of whose forwards no backward
    comes, as they return nothing that needs a gradient, which `runtime.followed_forwards` skips."""
    reopens: int | None
    """A call after its first here before which it is gathered again; None: there is none."""
    stays: bool
    """Whether nothing shards it in forward after its last call, which is here."""

    @property
    def is_still_there(self) -> bool:
        """Whether it has stayed unsharded to its backward in this stage."""
        return self.is_left_unsharded or ((self.strategy.keeps_unsharded or self.stays) and self.ends)

    @property
    def still_kept(self) -> int:
        """What is there of it before its backward in this stage."""
        if self.is_left_unsharded:
            return self.bytes.unsharded
        return self.kept if self.ends else self.left_over  # no backward has come to its later calls either

    @property
    def prefetched(self) -> int:
        return 0 if self.is_still_there else self.bytes.gathered

    @property
    def replaces_reduction(self) -> bool:
        """Whether its backward frees the buffer of the last reduction, and leaves its own if it is reduced."""
        return (
            (self.own or self.reduces_here)
            and not self.reduced_after_backward
            and not self.stalls
            and self.has_backward
        )

    @property
    def late_reduction(self) -> int:
        """What its reduction takes beside U and G that wait for it, where that is after all backward."""
        own = self.bytes
        copied = own.reduce_input - self.freed
        left = own.gradients + (0 if self.stalls else own.last_gradient) - own.full_gradients
        reduced = copied + own.reduce_temporary + left - (own.unsharded if self.stalls else 0)
        return max(0, copied, reduced)

    @property
    def left_reduce_input(self) -> int:
        """The buffer that it leaves: a run of several, before the last to run back, reduces nothing."""
        return self.bytes.reduce_input if self.reduces_here else 0

    @property
    def prefetch_temporary(self) -> int:
        return 0 if self.is_still_there else self.bytes.regather_temporary

    @property
    def unshard_temporary(self) -> int:
        """What unsharding it for its backward holds beside U."""
        return 0 if self.is_still_there else self.bytes.unshard_temporary


def runs_often(graph: ModelGraph, operator: int) -> bool:
    """Return whether an operator that is a unit is gathered and sharded again for each of its calls, if its strategy
    does not keep it.

    It is if it is one module, which runs several times; modules that share parameters are wrapped together, and stay
    gathered from the first to the last.  Of a module with others inside, calls may be of one run.  What is kept is so
    until the backward of the last call; those before gather it anew.
    """
    one = graph.operators[operator]
    (module, *others) = [path for path in one.modules if path not in graph.uncalled] or [""]
    inside = (path.startswith(f"{module}.") or not module for each in graph.operators for path in each.modules)
    return not others and not any(inside)


def never_runs_back(graph: ModelGraph, operators: tuple[int, ...]) -> bool:
    """Return whether no backward comes to any call of operators that are frozen, with all that is inside."""
    calls = [call.without_backward for call in graph.calls if call.operator in operators]
    return all(calls) and not runs_back(graph, operators)


def make_unit(
    frame: StageFrame, units: UnitCosts, operators: tuple[int, ...], strategy: Strategy, own: bool, elsewhere: bool
) -> StagedUnit:
    unit, traffic = units(operators, strategy, elsewhere)
    stage, spec, repeats, graph = frame.stage, strategy.spec, frame.load.accumulation, frame.model.graph
    calls = [j for j, call in enumerate(stage.calls) if call.operator in operators]
    # FSDP2 hangs a unit's reduction on the gradients of its first module's inputs.  Token ids have none, and neither
    # has what goes into the first call of all (or its slices), or into another input's first layer.
    parameters = [parameter for operator in operators for parameter in graph.operators[operator].parameters]
    this, bottom = graph.operators[operators[0]], graph.operators[graph.calls[0].operator]
    block, is_whole = stage.block, own and operators == stage.operators
    with_backward = [j for j in calls if j not in stage.under_no_grad]
    first = stage.calls[(with_backward or calls)[0]]
    late = graph.blocks[block].late if is_whole and block is not None else first.late
    unused = own and stage.without_backward != () and {*calls} <= {*stage.without_backward}
    unused = unused and (not stage.is_nested or len(stage.without_backward) == len(stage.calls))
    trains = not unused and (not late or runs_back(graph, operators))
    # To some calls of what is frozen one may come: to those of a network that also runs on a target, say.
    ends_in_vain = not unused and stage.calls[calls[-1]].without_backward and never_runs_back(graph, operators)
    has_backward = bool(with_backward) and (trains or not (unused or all(stage.calls[j].late for j in calls)))
    has_backward = has_backward and not ends_in_vain
    stays_to_end = unused or ends_in_vain
    prefetched = stays_to_end and calls[-1] in stage.prefetched_without_backward
    late = late and trains
    reduces_here, ends = own or operators[0] in stage.reduced, own or operators[0] in stage.closes
    begins = own or operators[0] in stage.opens
    often = not own and runs_often(graph, operators[0])
    # Modules that share parameters are sharded when all of them have run, and gathered again for what runs after that.
    again, sharded = not own and stage.calls[calls[0]].reopens, operators[0] in stage.reopened
    reopens = None if own else next((j for j in calls[1:] if stage.calls[j].reopens), None)
    stays = not own and ends and operators[0] in frame.model.staying
    # Of a block that no backward comes to at all, nothing runs again.
    is_mixed = block is not None and len(stage.without_backward) < len(stage.calls)
    is_outside_fsdp = is_plain(parameters, strategy, frame.load.precision)
    return StagedUnit(
        operators=operators,
        strategy=strategy,
        bytes=unit,
        traffic=traffic,
        first=min(calls),
        last=max(calls),
        opens=begins or ((often or again) and not strategy.keeps_unsharded),
        closes=own or often or ends or sharded,
        reduces_here=reduces_here,
        begins=begins,
        ends=ends,
        reduced_after_backward=not stays_to_end and (late or this is bottom or this.modules == bottom.modules),
        is_left_unsharded=(often or sharded) and operators[0] in stage.left_unsharded,
        leaves_unsharded=(often or again) and late and bool(with_backward) and not reduces_here,
        own=own or often or again,
        kept=unit.unsharded if strategy.keeps_unsharded or stays else unit.secondary,
        freed=unit.unsharded if spec.frees_before_reduction else 0,
        stalls=spec.stalls or is_outside_fsdp,
        reduction_s=traffic.reduce_s + traffic.add_s * (repeats - 1) / repeats,
        reduction_stalls=spec.stalls or (repeats > 1 and traffic.add_s > 0),
        launch_s=0.0 if is_outside_fsdp else frame.load.unit_launch_s(len(parameters)),
        is_reduced=graph.trains and any(one.trainable and one.used for one in parameters),
        gathers_each_call=len(calls) > len(operators) == 1
        and not (strategy.keeps_unsharded or (is_whole and block is not None))
        and runs_often(graph, operators[0]),
        has_backward=has_backward,
        is_filled=frame.model.unused != frozenset()
        and as_reduced(parameters, strategy, frame.load.cluster.world_size, accumulates=repeats > 1) != (*parameters,),
        left_over=_left_over(unit, strategy, prefetched) if stays_to_end else 0,
        left_by_rerun=unit.unsharded if unused and spec.stalls and is_mixed and not strategy.keeps_unsharded else 0,
        is_prefetched=(has_backward or prefetched) and not (stays or spec.stalls or is_outside_fsdp),
        reopens=None if strategy.keeps_unsharded else reopens,
        stays=stays,
    )


def _left_over(unit: UnitBytes, strategy: Strategy, prefetched: bool) -> int:
    return unit.unsharded if strategy.keeps_unsharded else unit.secondary + (unit.gathered if prefetched else 0)
