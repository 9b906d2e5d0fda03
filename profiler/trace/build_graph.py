"""Builds a `ModelGraph` from passes at several micro-batches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn

from profiler.affine import Affine
from profiler.byte_sizes import allocated_bytes, format_bytes
from profiler.errors import OsdpError
from profiler.mixed_precision import RestingDtype
from profiler.model_graph import (
    Block,
    Call,
    CallMemories,
    CallMemory,
    ModelCollective,
    ModelGraph,
    Operator,
    OwnRerun,
    Recompute,
    Rerun,
    Work,
)
from profiler.model_source import ModelSource
from profiler.opaque_parameters import is_opaque, tensors_of
from profiler.trace.affine_fit import SINGLE, Sizes, envelope, exact_line, line
from profiler.trace.call_records import CallRecord, Ending, Opening, Tally
from profiler.trace.find_operators import Group
from profiler.trace.graph_parameters import buffers_of, outside_of, parameter_of
from profiler.trace.live_storage import NOBODY, Charge
from profiler.trace.metered_pass import Pass, trains
from profiler.trace.module_rounds import with_rounds
from profiler.trace.occasional_calls import with_occasional
from profiler.trace.runs import Runs
from profiler.trace.unlike_passes import check_alike, order_of
from profiler.trace.waiting_gradients import less, waiting_bytes, without_waiting

_WORK = ("flops", "matmul_bytes", "other_bytes")
"""What a tally counts of the device's work, in the order of `Work`."""
_KINDS = Recompute.NOTHING, Recompute.EVERYTHING, Recompute.SELECTIVE
"""What is recomputed in the passes of a graph, in the order of the fields that hold what was measured."""
_NONE, _SELECTIVE = frozenset[Recompute](), frozenset({Recompute.SELECTIVE})
_EVERY = frozenset(Recompute)
_ALL = _EVERY - {Recompute.NOTHING}


def assemble(
    source: ModelSource, precision: str, module: nn.Module, dtypes: Mapping[str, RestingDtype], run: Runs
) -> ModelGraph:
    """Return the graph of the passes, by their micro-batches (`affine_fit.Sizes`); that at `SINGLE` is optional."""
    groups, passes = run.groups, run.passes
    first = next(iter(passes.values()))
    if first.calls[0].operator == NOBODY:
        raise OsdpError(f"{source.name} reads none of its parameters", expected="a forward that uses them")
    if SINGLE in passes and order_of(passes[SINGLE]) != order_of(first):
        passes = {size: one for size, one in passes.items() if size != SINGLE}
    check_alike(source.name, groups, passes)
    recomputed, selective, *apart_passes = (
        {size: one for size, one in runs.items() if size in passes and order_of(one) == order_of(first)}
        for runs in (run.recomputed, run.selective, *(run.apart.get(how, {}) for how in _KINDS))
    )
    if [*map(len, apart_passes)] != [*map(len, (passes, recomputed, selective))]:
        apart_passes = [{}, {}, {}]
    sizes = tuple(passes)
    order = list(dict.fromkeys(call.operator for call in first.calls))
    unused = sorted(set(range(len(groups))) - set(order))
    position = {group: index for index, group in enumerate(order + unused)}
    executions = sorted({call.block for call in first.calls if call.block is not None})
    block_of = {execution: index for index, execution in enumerate(executions)}
    paths = [first.executions[execution].path for execution in executions]
    ways = [_ALL if path in run.rerun else _SELECTIVE if path in run.partly else _NONE for path in paths]
    never = dict(zip(executions, ways, strict=True))
    kinds = list(zip((*_KINDS[1:], *_KINDS), (recomputed, selective, *apart_passes), strict=True))
    found, fitted = list[Call](), dict[tuple[int, ...], Call]()
    for index, (record, *others) in enumerate(zip(*(one.calls for one in passes.values()), strict=True)):
        block = None if record.block is None else block_of[record.block]
        barred = _EVERY if record.block is None else never[record.block]
        again, selected, *apart_runs = (
            {size: one.calls[index] for size, one in runs.items() if how not in barred} for how, runs in kinds
        )
        records = [record, *others, *(one for runs in (again, selected, *apart_runs) for one in runs.values())]
        same = tuple(id(one.forward) for one in records)  # replayed calls share it
        if same not in fitted:
            call = _call([record, *others], sizes, groups[record.operator].modules[0])
            inputs = {size: one.calls[index].recomputed for size, one in passes.items()}
            call = replace(call, recomputed=_rerun(again, inputs), selective=_rerun(selected, inputs))
            fitted[same] = replace(call, apart=_apart(call, apart_runs, inputs))
        found.append(_placed(fitted[same], [record, *others], block, block_of, position, sizes))
    uncalled = tuple(_uncalled(first, {index: groups[index] for index in order}))
    found = with_rounds(_all_read(found), first.calls, groups, uncalled)
    found = with_occasional(found, first.calls, run.least)
    operators = _operators(module, dtypes, [groups[index] for index in order + unused], found, paths, run.unused)
    waiting = waiting_bytes(module, operators, found, [one.calls for one in passes.values()])
    calls = tuple(map(without_waiting, found, waiting, [0, *waiting]))
    blocks = _blocks(module, operators, calls, passes, [one for one in kinds if one[0]], never, waiting, run.let_go)
    return ModelGraph(
        name=source.name,
        precision=precision,
        sequence_length=source.sequence_length,
        operators=operators,
        calls=calls,
        blocks=blocks,
        edges=tuple(sorted(first.edges)),
        fingerprint=_fingerprint(operators, calls, blocks, precision, source.sequence_length),
        outside=outside_of(module, groups, dtypes),
        buffers=buffers_of(module),
        notes=(*source.notes, *_notes(module, passes, [groups[i] for i in unused], groups, blocks)),
        uncalled=uncalled,
        left_bytes=_charged([one.left for one in passes.values()], sizes),
        cycle_bytes=_charged([_most_in_cycles(size, passes, recomputed, selective) for size in sizes], sizes),
    )


def _placed(
    call: Call,
    records: Sequence[CallRecord],
    block: int | None,
    blocks: Mapping[int, int],
    position: Mapping[int, int],
    sizes: Sizes,
) -> Call:
    """Return a call that may be like others with what is its own: where it is, and what runs again beside it."""
    first = records[0]
    sharers = tuple(sorted(blocks[one] for one in first.sharers))
    reruns = _reruns(records, block, blocks, position, sizes) if first.reruns else ()
    return replace(call, operator=position[first.operator], block=block, sharers=sharers, reruns=reruns)


def _reruns(
    records: Sequence[CallRecord], own: int | None, blocks: Mapping[int, int], position: Mapping[int, int], sizes: Sizes
) -> tuple[OwnRerun, ...]:
    """Return what the model runs again itself as a call runs back, where all sizes have it."""
    backward, found = [record.backward for record in records], []
    for part in records[0].reruns:
        if all(part in record.reruns for record in records):
            back = None if part[0] is None else (own or 0) - blocks[part[0]]
            peak = _peak(backward, [record.reruns[part] for record in records], sizes)
            found.append(OwnRerun(back, position[part[1]] if back is None else None, peak))
    return tuple(found)


def _all_read(calls: Sequence[Call]) -> list[Call]:
    """Return calls of which some read each operator's parameters: if only others' do, all of its own."""
    readers = {call.operator for call in calls if call.reads_parameters}
    return [call if call.operator in readers else replace(call, reads_parameters=True) for call in calls]


def _uncalled(one: Pass, groups: Mapping[int, Group]) -> Iterator[str]:
    """Yield the modules of groups that did not run in a pass, and whose parameters nobody read either."""
    for index, group in groups.items():
        if index not in one.read_outside:
            yield from (path for path in group.modules if path not in one.ran)


def _fingerprint(
    operators: Sequence[Operator], calls: Sequence[Call], blocks: Sequence[Block], precision: str, length: int
) -> str:
    """Return a hash of what a model is and computes, in which nothing is estimated."""
    work = [(call.operator, call.block, call.forward, call.backward, call.output_bytes) for call in calls]
    extents = [(block.name, block.kind, block.first_call, block.last_call) for block in blocks]
    return hashlib.sha256(repr((operators, work, extents, precision, length)).encode()).hexdigest()[:16]


def _call(records: Sequence[CallRecord], sizes: Sizes, name: str) -> Call:
    """Return a call of an operator and a block that are to be filled in."""
    saved = [record.saved for record in records]
    # Raises for what has no line, which the lines of `_memory` bound.
    exact_line([one.bytes for one in saved], f"what `{name}` saves for backward", sizes)
    memory = _memory(records, saved, sizes)
    return Call(
        **_fields(memory),
        operator=NOBODY,
        block=None,
        forward=_work([record.forward for record in records], f"the forward of `{name}`", sizes),
        backward=_work([record.backward for record in records], f"the backward of `{name}`", sizes),
        output_bytes=line([record.output for record in records], sizes),
        reads_parameters=any(record.reads_parameters for record in records),
        late=records[0].late,
        without_backward=all(one.module_end.number is not None and one.module_end.arrived is None for one in records),
        retaken_bytes=_left_out([record.retaken.bytes for record in records], sizes),
        shared_bytes=line(
            [record.shared.bytes for record in records], sizes, add_bytes=max(one.shared.waste for one in records)
        ),
    )


def _apart(call: Call, runs: Sequence[Mapping[int, CallRecord]], inputs: Mapping[int, Charge]) -> CallMemories | None:
    """Return a call's activations if gradients leave its block one by one, None if they are those of the call.

    The runs are in the order of `_KINDS`.
    """
    kept, again, selected = runs
    if not kept:
        return None
    memory = _memory([*kept.values()], [one.saved for one in kept.values()], tuple(kept))
    found = CallMemories(**_fields(memory), recomputed=_rerun(again, inputs), selective=_rerun(selected, inputs))
    return None if all(getattr(call, name) == one for name, one in _fields(found).items()) else found


def _fields(one: CallMemory) -> dict[str, Any]:
    """Return the fields of a call's activations, those of one that is more among them."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _rerun(records: Mapping[int, CallRecord], inputs: Mapping[int, Charge]) -> CallMemory | None:
    """Return the activations of a call whose block runs again, given what is charged for the inputs of blocks."""
    charges = [inputs[size] + one.kept for size, one in records.items()]
    return _memory([*records.values()], charges, tuple(records)) if records else None


def _memory(records: Sequence[CallRecord], charges: Sequence[Charge], sizes: Sizes) -> CallMemory:
    """Return a call's activations, given what is charged to it at each size."""
    saved = _charged(charges, sizes)
    held_bytes = _left_out([one.held for one in charges], sizes)
    always = [slice(None) for _ in records]
    ends = [(record.module_end, record.block_end) for record in records]
    forward, backward = [record.forward for record in records], [record.backward for record in records]
    ran_back = any(tally.events for tally in backward)
    ended = _instant([record.ended for record in records], backward, sizes) or Affine()
    passed = saved if ran_back or saved != Affine() else ended  # some calls only hand on a gradient

    def start(values: Sequence[int | None], tallies: Sequence[Tally]) -> Affine:
        return _instant(values, tallies, sizes) or passed

    return CallMemory(
        **_opening([record.opening for record in records if record.opening], sizes),
        saved_bytes=saved,
        held_bytes=held_bytes,
        forward_start_bytes=_instant([tally.events[0] if tally.events else None for tally in forward], forward, sizes)
        or Affine(),
        forward_peak_bytes=_peak(forward, always, sizes),
        module_forward_peak_bytes=_peak(forward, [slice(module.inside) for module, _ in ends], sizes),
        rest_forward_peak_bytes=_peak(forward, [_between(module, block) for module, block in ends], sizes),
        tail_forward_peak_bytes=_peak(forward, [_between(block) for _, block in ends], sizes),
        backward_peak_bytes=_peak(backward, always, sizes) if ran_back else passed,
        module_backward_peak_bytes=_peak(backward, [slice(module.reached, None) for module, _ in ends], sizes)
        if ran_back
        else passed,
        rest_backward_peak_bytes=_peak(
            backward, [slice(block.reached, module.reached) for module, block in ends], sizes
        ),
        tail_backward_peak_bytes=_peak(backward, [slice(block.reached) for _, block in ends], sizes),
        backward_start_bytes=start([tally.events[0] if tally.events else None for tally in backward], backward),
        rest_backward_start_bytes=start([block.arrived for _, block in ends], backward),
        module_backward_start_bytes=start([module.arrived for module, _ in ends], backward),
        backward_end_bytes=ended,
        module_backward_end_bytes=_instant([record.module_ended for record in records], backward, sizes) or Affine(),
    )


def _opening(found: Sequence[Opening], sizes: Sizes) -> dict[str, Affine]:
    """Return the activations of what a block runs before its first call."""
    if len(found) < len(sizes):
        return {}
    always, backward = [slice(None)] * len(found), [one.backward for one in found]
    return {
        "opening_forward_peak_bytes": _peak([one.forward for one in found], always, sizes),
        "opening_backward_peak_bytes": _peak(backward, always, sizes),
        "opening_backward_end_bytes": _instant([one.ended for one in found], backward, sizes) or Affine(),
    }


def _most_in_cycles(size: int, *kinds: Mapping[int, Pass]) -> Charge:
    """Return the most that reference cycles hold after passes of a size: what runs again is in them twice."""
    return max((kind[size].in_cycles for kind in kinds if size in kind), key=lambda one: one.bytes)


def _charged(charges: Sequence[Charge], sizes: Sizes) -> Affine:
    """Return a line over what is charged, with its rounding."""
    return line([one.bytes for one in charges], sizes, add_bytes=max(one.waste for one in charges))


def _left_out(values: Sequence[int], sizes: Sizes) -> Affine:
    """Return a line of what others leave out, which must not be bounded from above.

    Where there is none, nothing is left out, and what is added (values below 0) is on a line that bounds it.
    """
    found = line(values, sizes)
    if any(found(size) != value for size, value in zip(sizes, values, strict=True)):
        return line([max(0, -value) for value in values], sizes).times(-1)
    return found


def _between(end: Ending, other: Ending | None = None) -> slice:
    """Return the events of the forward from one ending to the other, or to the last; none if it did not end."""
    return slice(0) if end.inside is None else slice(end.inside, other and other.inside)


def _work(tallies: Sequence[Tally], what: str, sizes: Sizes) -> Work:
    return Work(
        matmul_flops=exact_line([tally.flops for tally in tallies], f"the number of FLOPs in {what}", sizes),
        matmul_bytes=line([tally.matmul_bytes for tally in tallies], sizes),
        other_bytes=line([tally.other_bytes for tally in tallies], sizes),
        launches=max(tally.launches for tally in tallies),
        collectives=_collectives(tallies, sizes),
    )


def _collectives(tallies: Sequence[Tally], sizes: Sizes) -> tuple[ModelCollective, ...]:
    """Return the collectives that passes of some sizes sent."""
    found = list[ModelCollective]()
    for kind in dict.fromkeys(kind for tally in tallies for kind, _ in tally.sent):
        sent = [[size for other, size in tally.sent if other == kind] for tally in tallies]
        found.append(ModelCollective(*kind, max(map(len, sent)), line([*map(sum, sent)], sizes)))
    return tuple(found)


def _instant(values: Sequence[int | None], tallies: Sequence[Tally], sizes: Sizes) -> Affine | None:
    """Return a line over bytes at one instant, None where not every pass came there."""
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return None
    return line(found, sizes, add_bytes=max(tally.waste for tally in tallies))


def _peak(tallies: Sequence[Tally], instants: Sequence[slice], sizes: Sizes) -> Affine:
    """Return a line over some instants of each size; nothing where there are none."""
    events = [tally.events[part] for tally, part in zip(tallies, instants, strict=True)]
    return envelope(events, sizes, add_bytes=max(tally.waste for tally in tallies)) if any(events) else Affine()


def _operators(
    module: nn.Module,
    dtypes: Mapping[str, RestingDtype],
    groups: Sequence[Group],
    calls: Sequence[Call],
    block_paths: Sequence[str],
    unused: Container[str],
) -> tuple[Operator, ...]:
    named = dict(module.named_parameters())
    orders = {name: place for place, name in enumerate(named)}
    inside = [{*module.get_submodule(path).modules()} for path in block_paths]
    own = [{module.get_submodule(path) for path in group.modules} for group in groups]
    blocks: list[set[int | None]] = [set() for _ in groups]
    for call in calls:
        lies_inside = call.block is not None and own[call.operator] <= inside[call.block]
        blocks[call.operator].add(call.block if lies_inside else None)
    return tuple(
        Operator(
            name=group.modules[0],
            kind=type(module.get_submodule(group.modules[0])).__name__,
            parameters=tuple(
                parameter_of(name, named[name], dtypes[name], used=name not in unused) for name in group.parameters
            ),
            modules=group.modules,
            block=next(iter(blocks[index])) if len(blocks[index]) == 1 else None,
            order=min((orders[name] for name in group.parameters), default=0),
        )
        for index, group in enumerate(groups)
    )


def _blocks(
    module: nn.Module,
    operators: Sequence[Operator],
    calls: Sequence[Call],
    passes: Mapping[int, Pass],
    reruns: Sequence[tuple[Recompute, Mapping[int, Pass]]],
    never: Mapping[int, Container[Recompute]],
    waiting: Sequence[int],
    let_go: Sequence[bool],
) -> tuple[Block, ...]:
    """Return the blocks that ran at least one call; equal ones get the same `block_class`.

    `never` says of all executions that ran one how they are not recomputed.
    """
    blocks: list[Block] = []
    members: list[list[int]] = [[] for _ in never]
    for position, call in enumerate(calls):
        if call.block is not None:
            members[call.block].append(position)
    classes: dict[Any, int] = {}
    often = Counter(one.path for one in next(iter(passes.values())).executions)
    for inside, execution in zip(members, never, strict=True):
        runs, sizes = [one.executions[execution] for one in passes.values()], tuple(passes)
        path = runs[0].path
        waste = max(sum(storage.waste for storage in run.inputs) for run in runs)
        inputs = line([sum(storage.bytes for storage in run.inputs) for run in runs], sizes, add_bytes=waste)
        rerun, selective, *apart = [
            _block_rerun({} if how in never[execution] else one, execution, waiting[inside[-1]]) for how, one in reruns
        ]
        apart = [None if one == other else one for one, other in zip(apart, (rerun, selective), strict=True)]
        again = rerun, selective, apart[0], apart[1]
        module_class = type(module.get_submodule(path)).__name__
        alike = tuple(_likeness(calls[index], operators, path) for index in inside)
        opening = line([run.opening for run in runs], sizes)
        is_free = any(let_go) and let_go[execution] and often[path] == 1
        lone = _left_out([one.lone.lone_bytes if one.lone and is_free else 0 for one in runs], sizes)
        likeness = (module_class, inputs, *again, alike, runs[0].late, opening, lone)
        number = classes.setdefault(likeness, len(classes))
        ends = inside[0], inside[-1] + 1
        blocks.append(Block(path, module_class, *ends, inputs, number, *again, runs[0].late, opening, lone))
    return tuple(blocks)


def _block_rerun(passes: Mapping[int, Pass], execution: int, waiting_bytes: int) -> Rerun | None:
    """Return a block's forward as it ran again in these passes, None if there are none."""
    if not passes:
        return None
    sizes, runs = tuple(passes), [one.executions[execution] for one in passes.values()]
    again = [run.again for run in runs]
    start = _instant([tally.events[0] if tally.events else None for tally in again], again, sizes) or Affine()
    peak = _peak(again, [slice(None) for _ in again], sizes)
    flops, matmul_bytes, other_bytes = (line([getattr(tally, name) for tally in again], sizes) for name in _WORK)
    work = Work(flops, matmul_bytes, other_bytes, max(tally.launches for tally in again), _collectives(again, sizes))
    in_tail = any(run.again_in_tail for run in runs)
    return Rerun(less(start, waiting_bytes), less(peak, waiting_bytes), in_tail, work)


def _likeness(call: Call, operators: Sequence[Operator], path: str) -> tuple[Any, ...]:
    """Return what a call in the block at `path` has in common with the equal calls of other blocks."""
    operator = operators[call.operator]
    parameters = tuple(
        replace(parameter, name=parameter.name.removeprefix(f"{path}.")) for parameter in operator.parameters
    )
    return (operator.kind, parameters, replace(call, operator=0, block=None))


def _notes(
    module: nn.Module,
    passes: Mapping[int, Pass],
    unused: Sequence[Group],
    groups: Sequence[Group],
    blocks: Sequence[Block],
) -> list[str]:
    first = next(iter(passes.values()))
    notes = []
    if not trains(module):
        notes.append("no parameter is trained (requires_grad), so a step is a forward")
    if len(passes) == 1:
        (size,) = passes
        notes.append(f"measured at micro-batch {size} alone, as other sizes cost more or less in steps")
    elif SINGLE not in passes:
        notes.append(f"micro-batch {SINGLE} could not be traced; its costs come from larger ones")
    if first.summed_outputs:
        notes.append(
            "the model returns no scalar loss of all that its outputs depend on; the sum of all its floating-point "
            "outputs is used as the loss"
        )
    if unused:
        names = ", ".join(group.modules[0] for group in unused)
        notes.append(f"never used in the forward, so they have no calls and no gradients: {names}")
    if first.read_outside:
        names = ", ".join(groups[index].modules[0] for index in sorted(first.read_outside))
        notes.append(f"parameters read outside their own module's forward: {names}")
    if first.growth_bytes > 0:
        notes.append(f"not counted: {first.growth_bytes} bytes of tensors more that the model keeps after each step")
    if first.in_cycles.bytes:
        notes.append(
            f"only reference cycles hold {format_bytes(first.in_cycles.bytes)} of each micro-batch (of "
            f"{next(iter(passes))}), until Python's garbage collector runs: those of all micro-batches of a step are "
            "counted; break the cycles (a list or closure that holds itself), or gc.collect() after each backward"
        )
    opaque = {name: tensors_of(name, one) for name, one in module.named_parameters() if is_opaque(one)}
    if opaque:
        size_bytes = sum(allocated_bytes(tensor.nbytes) for tensors in opaque.values() for tensor in tensors)
        classes = ", ".join(dict.fromkeys(type(module.get_parameter(name)).__name__ for name in opaque))
        more = f" and {len(opaque) - 1} more" if len(opaque) > 1 else ""
        notes.append(
            f"kept whole on every rank, as they are: {next(iter(opaque))}{more} of class {classes}, "
            f"{format_bytes(size_bytes)}; what they hold while they compute is not counted"
        )
    runs = Counter(block.name for block in blocks)
    if repeated := ", ".join(name for name, count in runs.items() if count > 1):
        notes.append(f"blocks that run several times per forward, with the same parameters: {repeated}")
    return notes
