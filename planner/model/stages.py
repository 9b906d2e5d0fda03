"""Stages: consecutive parts of the model, in execution order, for each of which the search makes one decision.

A stage is a block, or one operator outside every block (small ones are joined until they hold
`JOIN_NUMEL` parameters, because a collective of its own would cost them more latency than
transfer).  Operators that run in several stages (a tied embedding and head) belong to none: they
are the *spanning* operators, wrapped as one unit that lives from its first call to its last.  So is
one that runs in a block and lies outside, which is not wrapped where the block is.

Stages with equal `stage_class` are interchangeable: the search only counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from planner.model.least_step import of_least_step
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster
from profiler.model_graph import Call, ModelGraph, Parameter, Recompute

_NAMELESS = attrgetter(*(one.name for one in fields(Parameter) if one.name != "name"))
"""Returns what a parameter is but for its name."""

JOIN_NUMEL = 1 << 20
"""Parameters that a stage outside blocks gathers before it is closed (4 MiB in fp32, where the
transfer outweighs the latency of a ring on every published cluster)."""
MOST_SHARING = 2
"""Blocks that keep what several take: so many are told apart, as a search has a point for each set of them."""


@dataclass(frozen=True)
class Stage:
    """A contiguous range of calls whose operators are decided on together."""

    name: str
    """Name of the block, or of the first operator."""
    stage_class: int
    """Stages with equal numbers are interchangeable."""
    block: int | None
    """Index of the block, or None."""
    calls: tuple[Call, ...]
    """The calls, in execution order."""
    operators: tuple[int, ...]
    """Indices of the operators that belong to it, in order of first call; without spanning ones."""
    start: int
    """Index in the graph of its first call."""
    spanning: tuple[int, ...]
    """Spanning operators with a call here."""
    opens: tuple[int, ...]
    """Spanning operators whose first call is here."""
    closes: tuple[int, ...]
    """Spanning operators whose last call is here."""
    waits: tuple[int, ...] = ()
    """Spanning operators that later stages compute with, so that gradients of them wait while this one runs back."""
    left_unsharded: tuple[int, ...] = ()
    """Spanning operators that a call of a later stage leaves unsharded in backward: it is handed nothing that needs a
    gradient, on which FSDP2 would hang its post-backward."""
    reopened: tuple[int, ...] = ()
    """Spanning operators of which a later stage begins a round (`Call.reopens`), so that they are sharded here."""
    takes: tuple[int, ...] = ()
    """Blocks that keep something for it if it is recomputed, as several take it (`Call.shared_bytes`)."""
    without_backward: tuple[int, ...] = ()
    """Calls, by place, of trained operators that no backward comes to, as the loss reads nothing of them."""
    under_no_grad: tuple[int, ...] = ()
    """Calls, by place, that no backward comes to, as they run under `torch.no_grad()`, of operators whose other calls
    have one."""
    reduced: tuple[int, ...] = ()
    """Spanning operators of which the first call with a backward is here, after which they are reduced."""
    prefetched_without_backward: tuple[int, ...] = ()
    """Those of which one comes to what follows: FSDP2 gathers their unit for it."""
    is_nested: bool = False
    """Whether any of its operators is inside of another, so that forwards of units begin in those of others."""
    can_offload: bool = False
    """Whether there is anything to offload if it is recomputed (`Block.offloadable_bytes`)."""

    @cached_property
    def repeats(self) -> bool:
        """Whether any of its own operators runs several times."""
        own = [call.operator for call in self.calls if call.operator in self.operators]
        return len(own) > len(self.operators)

    @cached_property
    def recomputations(self) -> tuple[Recompute, ...]:
        """What of it can run again in backward: more than nothing of a block that was seen to."""
        modes: Iterable[Recompute] = Recompute if self.block is not None else (Recompute.NOTHING,)
        seen = (mode for mode in modes if all(call.memory(mode) is not None for call in self.calls))
        return tuple(mode for mode in seen if mode is not Recompute.OFFLOADED or self.can_offload)

    def offered(self, cluster: Cluster) -> tuple[Recompute, ...]:
        """Return those that a search offers on a cluster: input is offloaded where the host's figures are known, and
        where nothing else takes the link to it.
        """
        offloads = cluster.host is not None and cluster.leaves_host_link
        return tuple(mode for mode in self.recomputations if mode is not Recompute.OFFLOADED or offloads)

    def allowed(self, recompute: Recompute) -> Recompute:
        """Return what is recomputed of it where that is wanted of all stages: nothing, if it cannot be, and all of it
        where there is nothing to offload.
        """
        if recompute is Recompute.OFFLOADED and not self.can_offload:
            recompute = Recompute.EVERYTHING
        return recompute if recompute in self.recomputations else Recompute.NOTHING


def agreed(stages: Sequence[Stage], recompute: Sequence[Recompute]) -> tuple[Recompute, ...]:
    """Return what is recomputed of each stage, alike for all calls of one block: of what was chosen, the most.

    A plan names blocks, and the runtime recomputes modules: it cannot tell one call from another.
    """
    most: dict[str, Recompute] = {}
    for stage, again in zip(stages, recompute, strict=True):
        if stage.block is not None:
            most[stage.name] = max(again, most.get(stage.name, again))
    return tuple(
        again if most.get(stage.name, again) == again or stage.block is None else stage.allowed(most[stage.name])
        for stage, again in zip(stages, recompute, strict=True)
    )


@dataclass(frozen=True)
class StagedModel:
    """A model graph cut into stages."""

    graph: ModelGraph
    stages: tuple[Stage, ...]
    spans: dict[int, tuple[int, int]]
    """For operators that are called in several stages, the first and the last of these."""
    idle: tuple[int, ...]
    """Operators that are never called: counted at rest with the first stage."""
    slices: frozenset[int] = frozenset()
    """Operators that are slices of one that was split (`planner.model.operator_split`): each is a unit of its own."""
    idle_now: frozenset[int] = frozenset()
    """Those of `idle` that are called in other steps, so that they have optimizer states."""

    @cached_property
    def by_first_call(self) -> tuple[int, ...]:
        """All operators, those that are never called at the end."""
        return (*dict.fromkeys(call.operator for call in self.graph.calls), *self.idle)

    @cached_property
    def registered(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Operators of each block in the order in which FSDP2 has their parameters, if the block is one unit: as they
        are registered.  Those of several modules it has as these are listed.
        """
        orders = [operator.order for operator in self.graph.operators]
        blocks = (stage.operators for stage in self.stages if stage.block is not None)
        return {operators: tuple(sorted(operators, key=orders.__getitem__)) for operators in blocks}

    @cached_property
    def staying(self) -> frozenset[int]:
        """Operators that nothing shards after their last call in forward (`Call.stays`)."""
        return frozenset(call.operator for call in self.graph.calls if call.stays)

    @cached_property
    def unused(self) -> frozenset[int]:
        """Operators with trained parameters that the loss does not depend on."""
        return frozenset([o for o, one in enumerate(self.graph.operators) for p in one.parameters if not p.used])

    @property
    def spanning(self) -> tuple[int, ...]:
        """Operators that are called in several stages."""
        return tuple(self.spans)


def _wholes(graph: ModelGraph, slices: frozenset[int]) -> dict[int, int]:
    """Return, for every operator, the first slice of the operator that it is a slice of, or itself."""
    first: dict[tuple[str, ...], int] = {}
    return {o: first.setdefault(op.modules, o) if o in slices else o for o, op in enumerate(graph.operators)}


def _ranges(graph: ModelGraph, spanning: set[int], wholes: dict[int, int]) -> list[tuple[int, int, int | None]]:
    """Return (first call, last call + 1, block) of every stage; an operator's slices count as that operator."""
    numel: dict[int, int] = {}
    for index, whole in wholes.items():
        numel[whole] = numel.get(whole, 0) + graph.operators[index].numel
    ranges: list[tuple[int, int, int | None]] = []
    joined: set[int] = set()
    for index, call in enumerate(graph.calls):
        small = sum(numel[o] for o in joined) < JOIN_NUMEL
        own = {wholes[call.operator]} - {wholes[o] for o in spanning}
        if ranges and ranges[-1][2] == call.block and (call.block is not None or small or own <= joined):
            ranges[-1] = (ranges[-1][0], index + 1, call.block)
        else:
            ranges.append((index, index + 1, call.block))
            joined = set()
        joined |= own
    return ranges


def _spanning(graph: ModelGraph, wholes: dict[int, int]) -> set[int]:
    """Return operators with calls in different blocks, in a block that they do not lie in, or apart outside blocks."""
    seen: dict[int, list[int]] = {}
    for index, call in enumerate(graph.calls):
        seen.setdefault(wholes[call.operator], []).append(index)
    spanning = set()
    for operator, calls in seen.items():
        blocks = {graph.calls[index].block for index in calls}
        apart = None in blocks and calls[-1] - calls[0] >= len(calls)
        if len(blocks) > 1 or graph.operators[operator].block not in blocks or apart:
            spanning.add(operator)
    return {operator for operator, whole in wholes.items() if whole in spanning}


def _takes(graph: ModelGraph) -> dict[int, tuple[int, ...]]:
    """Return, for every block, those that keep what it takes, if it is recomputed.

    Where there are more than a search tells apart, any block that takes something takes from all.
    """
    sharers = {call.block: call.sharers for call in graph.calls if call.block is not None and call.sharers}
    takers = {block for blocks in sharers.values() for block in blocks}
    if len(sharers) > MOST_SHARING:
        return {block: tuple(sharers) for block in takers}
    return {block: tuple(one for one, blocks in sharers.items() if block in blocks) for block in takers}


def computes_back(call: Call) -> bool:
    """Return whether anything runs in the backward of a call."""
    work = call.backward
    return bool(work.collectives) or any(
        one != Affine() for one in (work.matmul_flops, work.matmul_bytes, work.other_bytes)
    )


def _without_backward(graph: ModelGraph) -> tuple[set[int], set[int]]:
    """Return the calls of operators that train parameters and that no backward comes to, as the loss reads nothing, and
    those of them after which not all calls of the block that follows are so.
    """
    unused = {o for o, one in enumerate(graph.operators) for p in one.parameters if p.trainable and not p.used}
    if not unused:
        return set(), set()
    unused = {o for o in unused if not any(p.trainable and p.used for p in graph.operators[o].parameters)}
    ended, after = set[int](), dict[int, int]()
    for index, call in reversed([*enumerate(graph.calls)]):
        # What is around others begins with a call in which it does not end.
        goes_on = call.operator in after and ended.issuperset(range(index + 1, after[call.operator] + 1))
        if call.operator in unused and (call.without_backward or (goes_on and not computes_back(call))):
            ended.add(index)
        after[call.operator] = index
    going_on = {call.block for index, call in enumerate(graph.calls) if index not in ended} | {None}
    return ended, {i for i in ended if i + 1 < len(graph.calls) and graph.calls[i + 1].block in going_on}


def _under_no_grad(graph: ModelGraph) -> set[int]:
    """Return the calls that no backward comes to, of operators of which one comes to others: cycles of refinement, say,
    of which all but the last are under `torch.no_grad()`.
    """
    ending = {i for i, call in enumerate(graph.calls) if call.without_backward}
    going_on = {call.operator for index, call in enumerate(graph.calls) if index not in ending} if ending else set()
    return {i for i in ending if graph.calls[i].operator in going_on}


def _frozen_in_vain(graph: ModelGraph) -> set[int]:
    """Return the calls of frozen operators that no backward comes to though they return what needs a gradient, after
    which one comes to what runs next: FSDP2 prefetches them for it.
    """
    calls = graph.calls
    found = {i for i, call in enumerate(calls) if call.without_backward and not call.late}
    blocks = {call.block for call in calls if not call.without_backward} - {None} if found else set()
    recorded = [i for i, call in enumerate(calls) if i in found or not call.without_backward or call.block in blocks]
    return {i for i, after in pairwise(recorded) if i in found and after not in found} if found else set()


def runs_back(graph: ModelGraph, operators: tuple[int, ...]) -> bool:
    """Return whether operators that are handed nothing with a gradient have a backward: they, or some inside, train."""
    paths = tuple(f"{path}." for operator in operators for path in graph.operators[operator].modules)
    return any(
        parameter.trainable
        for index, one in enumerate(graph.operators)
        if index in operators or any(path.startswith(paths) for path in one.modules)
        for parameter in one.parameters
    )


def _is_nested(graph: ModelGraph, operators: tuple[int, ...]) -> bool:
    paths = [path for operator in operators for path in graph.operators[operator].modules]
    around = tuple(f"{path}." for path in paths)
    return any(path.startswith(around) for path in paths)


def cut(graph: ModelGraph, slices: frozenset[int] = frozenset(), *, leaves_out: bool = False) -> StagedModel:
    """Cut a model into stages, the same ones however its operators are split; `slices` are slices of one.

    `leaves_out`: of the step that takes least (`of_least_step`), with what is left of the same stages.
    """
    wholes = _wholes(graph, slices)
    spanning = _spanning(graph, wholes)
    ranges, every = _ranges(graph, spanning, wholes), {call.operator for call in graph.calls}
    if leaves_out:
        graph, ranges = of_least_step(graph, ranges)
        spanning &= {call.operator for call in graph.calls}
    taken = _takes(graph)
    last = {call.operator: index for index, call in enumerate(graph.calls)}
    first = {call.operator: index for index, call in reversed(list(enumerate(graph.calls)))}
    under_no_grad = _under_no_grad(graph)
    with_backward = [(index, call) for index, call in enumerate(graph.calls) if index not in under_no_grad]
    first_back = {call.operator: index for index, call in reversed(with_backward)}
    last_read = {call.operator: index for index, call in with_backward if call.reads_parameters}
    idle = tuple(o for o in range(len(graph.operators)) if o not in first)
    without, prefetched = _without_backward(graph)
    prefetched |= _frozen_in_vain(graph)
    classes: dict[object, int] = {}
    stages = []
    for start, stop, block in ranges:
        calls = graph.calls[start:stop]
        operators = tuple(dict.fromkeys(c.operator for c in calls if c.operator not in spanning))
        # Whether each spanning operator is yet to come, open, or over: it holds memory accordingly.
        around = tuple((first[o] < stop, last[o] < start) for o in sorted(spanning))
        waits = tuple(o for o in sorted(spanning) if first_back[o] < stop <= last_read.get(o, -1))
        later = {call.operator: call for call in reversed(graph.calls[stop:]) if call.operator in spanning}
        next_back = {
            call.operator: call for index, call in reversed(with_backward) if index >= stop and call.operator in later
        }
        left_unsharded = tuple(o for o in sorted(next_back) if next_back[o].late and runs_back(graph, (o,)))
        reopened = tuple(o for o in sorted(later) if later[o].reopens and first[o] < stop)
        none = [index - start for index in range(start, stop) if index in without] if without else []
        unused_gathers = tuple([i - start for i in range(start, stop) if i in prefetched]) if prefetched else ()
        key: object = (start,)
        holds_idle = bool(idle) and start == 0
        takes = () if block is None else taken.get(block, ())
        if block is not None and not holds_idle and not any(c.operator in spanning for c in calls):
            shapes = tuple(tuple(map(_NAMELESS, graph.operators[o].parameters)) for o in operators)
            order = [graph.operators[o].order for o in operators]
            registered = tuple(sorted(range(len(order)), key=order.__getitem__))
            kind = graph.blocks[block].block_class, graph.blocks[block].late, (*none,), unused_gathers
            key = (*kind, shapes, registered, around, waits, left_unsharded, reopened, takes)
        name = graph.blocks[block].name if block is not None else graph.operators[calls[0].operator].name
        stages.append(
            Stage(
                name=name,
                stage_class=classes.setdefault(key, len(classes)),
                block=block,
                calls=calls,
                operators=operators,
                spanning=tuple(o for o in sorted(spanning) if any(c.operator == o for c in calls)),
                start=start,
                opens=tuple(o for o in sorted(spanning) if start <= first[o] < stop),
                closes=tuple(o for o in sorted(spanning) if start <= last[o] < stop),
                waits=waits,
                left_unsharded=left_unsharded,
                reopened=reopened,
                takes=takes,
                without_backward=tuple(none),
                under_no_grad=tuple(index - start for index in sorted(under_no_grad) if start <= index < stop),
                reduced=tuple(o for o in sorted(spanning) if start <= first_back[o] < stop),
                prefetched_without_backward=unused_gathers,
                is_nested=_is_nested(graph, operators),
                can_offload=block is not None and graph.blocks[block].offloadable_bytes != Affine(),
            )
        )
    stage_of = [index for index, stage in enumerate(stages) for _ in stage.calls]
    spans = {o: (stage_of[first[o]], stage_of[last[o]]) for o in sorted(spanning)}
    return StagedModel(graph, tuple(stages), spans, idle, slices, frozenset(idle) & every)
