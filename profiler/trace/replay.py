"""Blocks that are alike are run once, and replayed.

A model of 126 equal blocks is traced at several micro-batches, with blocks kept and with blocks recomputed.  Of these
passes the first runs everything.  Executions of blocks that are of one structure (`likeness`), take and return
tensors of the same layouts (`handover`) and of which everything that was measured is equal make up a *class*; in the
passes that follow, its first two and its last run, and stand-ins hand on what the others would:

    passes                     run
    first micro-batch          all
    first micro-batch again    the first two and the last of each class; what is measured has to be as before
    others, and recomputed     the same; what is measured of the first two and the last has to be equal

A stand-in between the second and the last makes a difference to the second in backward and to the last in forward, if
it does to live memory what the block does not.  Whatever is not as it has to be, also an exception, ends that:
all blocks are run in that pass and those that follow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from profiler.trace.call_records import CallRecord, Ending, Execution, Opening, Tally
from profiler.trace.handover import Replayed, StandIns, UnlikeError
from profiler.trace.likeness import python_state, structures
from profiler.trace.live_storage import Charge
from profiler.trace.metered_pass import Pass

MOST_RUN = 3
"""Executions of a class that run in every pass: the first two and the last."""
LEAST_SHARE = 0.25
"""Of executions that are replayed: with fewer, the pass that confirms them costs what the others save."""


@dataclass(frozen=True)
class Replay:
    """Which executions of blocks are replayed."""

    whole: Pass
    """In which all ran."""
    classes: Sequence[Sequence[int]]
    """Executions that are alike, of more than `MOST_RUN`."""
    stand_ins: StandIns
    """For all but the first two and the last of each."""

    def charges(self, kept: Pass) -> list[Charge]:
        """Return what a pass with stand-ins is charged if blocks are recomputed, given the pass in which they are not.

        A stand-in has one call.
        """
        charges = list[Charge]()
        for block, calls in groupby(kept.calls, lambda call: call.block):
            of_block = [call.recomputed for call in calls]
            charges += [sum(of_block, Charge())] if block in self.stand_ins.executions else of_block
        return charges

    def expanded(self, short: Pass) -> Pass:
        """Return a pass with stand-ins as if all had run; raises UnlikeError."""
        calls, executions = _calls_by_block(short.calls), [*short.executions]
        paths = [execution.path for execution in executions]
        if paths != [execution.path for execution in self.whole.executions]:
            raise UnlikeError
        for members in self.classes:
            ran, replayed = [*members[: MOST_RUN - 1], members[-1]], members[MOST_RUN - 1 : -1]
            if any(len(calls.get(one, ())) != 1 for one in replayed):
                raise UnlikeError
            results = [(_run_again(executions[one]), tuple(map(_measured, calls.get(one, ())))) for one in ran]
            if any(result != results[0] for result in results):
                raise UnlikeError
            for one in replayed:  # what becomes of their input was seen of each
                executions[one] = replace(executions[members[0]], path=paths[one], lone=executions[one].lone)
        found = list[CallRecord]()
        for call in short.calls:
            stand_in = None if call.block is None else self.stand_ins.executions.get(call.block)
            if stand_in is None:
                found.append(call)
            else:
                found += [_moved(one, call.block) for one in calls.get(stand_in.first, ())]
        expected = self.whole.calls
        if [call.block for call in found] != [call.block for call in expected]:
            raise UnlikeError
        for call, other in zip(found, expected, strict=True):
            if call.block in self.stand_ins.executions:
                call.operator, call.module, call.reads = other.operator, other.module, other.reads
            elif call.operator != other.operator:
                raise UnlikeError
        return replace(short, calls=found, executions=executions)

    def let_go(self, short: Pass) -> list[bool]:
        """Return of which executions nothing else holds what would be offloaded, in a pass with stand-ins: these have
        no code that could, so it is as of the second and the last of a class.
        """
        found = [execution.lone is not None and execution.lone.is_let_go for execution in short.executions]
        for members in self.classes:
            ran = found[members[MOST_RUN - 2]] and found[members[-1]]
            for one in members[MOST_RUN - 1 : -1]:
                found[one] = found[one] and ran
        return found

    def confirm(self, short: Pass) -> Pass:
        """Return the whole pass, with the records of a class shared, if all that was measured is as in it.

        Given a pass with stand-ins at the same micro-batch.  Raises UnlikeError.
        """
        found = self.expanded(short)
        pairs = zip(found.calls, self.whole.calls, strict=True)
        if any(_measured(one) != _measured(other) for one, other in pairs):
            raise UnlikeError
        return replace(self.whole, calls=found.calls, executions=found.executions)


def state_of(module: nn.Module) -> Any:
    """Return what a forward must leave as it is for blocks to be left out of it."""
    return python_state(module), random.getstate(), bytes(torch.get_rng_state().tolist())


def find_replay(module: nn.Module, whole: Pass) -> Replay | None:
    """Return what need not run again after a pass in which all did, None where that is nothing."""
    if not whole.leaves_nothing:
        return None
    calls = _calls_by_block(whole.calls)
    structure = structures(module, dict.fromkeys(execution.path for execution in whole.executions))
    found: dict[Any, list[list[int]]] = {}
    for number, inside in calls.items():
        execution = whole.executions[number]
        if execution.handover.outputs is None:
            continue
        candidates = found.setdefault((structure[execution.path], tuple(map(_measured, inside))), [])
        alike = next((one for one in candidates if _interface(whole.executions[one[0]]) == _interface(execution)), None)
        if alike is None:
            candidates.append([number])
        else:
            alike.append(number)
    classes = [one for candidates in found.values() for one in candidates if len(one) > MOST_RUN]
    stand_ins = {
        number: Replayed(members[0], members[-1], calls[number][-1].operator, whole.executions[number].saves)
        for members in classes
        for number in members[MOST_RUN - 1 : -1]
    }
    if len(stand_ins) < max(1, LEAST_SHARE * len(whole.executions)):
        return None
    run = {execution.path for number, execution in enumerate(whole.executions) if number not in stand_ins}
    idle = frozenset(whole.executions[number].path for number in stand_ins) - run
    return Replay(whole, classes, StandIns(stand_ins, idle))


def _calls_by_block(calls: Sequence[CallRecord]) -> dict[int, list[CallRecord]]:
    found: dict[int, list[CallRecord]] = {}
    for call in calls:
        if call.block is not None:
            found.setdefault(call.block, []).append(call)
    return found


def _moved(call: CallRecord, block: int | None) -> CallRecord:
    """Return a call of a block as one of another that is like it: what is run again is as many blocks before it."""
    own, reruns = call.block, call.reruns
    if reruns and own is not None and block is not None:
        reruns = {(at if at is None else at + block - own, one): when for (at, one), when in reruns.items()}
    return replace(call, block=block, reruns=reruns)


def _measured(call: CallRecord) -> tuple[Any, ...]:
    """Return what was measured of a call."""
    charges = call.saved, call.recomputed, call.kept, call.retaken, call.shared, call.sharers
    instants = *_instants(call.module_end), *_instants(call.block_end), call.ended, call.module_ended
    tallies = _tallied(call.forward), _tallied(call.backward), _opened(call.opening)
    return *tallies, charges, instants, call.output, call.reads_parameters, _ran_again(call) if call.reruns else ()


def _ran_again(call: CallRecord) -> tuple[Any, ...]:
    """Return what the model ran again as a call ran back: of blocks, how many before its own."""
    own, found = call.block or 0, [*call.reruns.items()]
    return tuple((block if block is None else own - block, operator, at.stop) for (block, operator), at in found)


def _opened(opening: Opening | None) -> tuple[Any, ...]:
    return () if opening is None else (_tallied(opening.forward), _tallied(opening.backward), opening.ended)


def _instants(end: Ending) -> tuple[int | None, ...]:
    return end.inside, end.reached, end.arrived


def _tallied(tally: Tally) -> tuple[Any, ...]:
    work = tally.flops, tally.matmul_bytes, tally.other_bytes, tally.launches, tuple(tally.sent)
    return *work, tally.waste, *tally.events


def _interface(execution: Execution) -> tuple[Any, ...]:
    """Return what a block takes and returns."""
    handover = execution.handover
    sizes = [storage.charge for storage in execution.inputs]
    return execution.saves, sizes, handover.arguments, handover.outputs, handover.gradients, handover.are_dense


def _run_again(execution: Execution) -> tuple[Any, ...]:
    """Return what was measured of a block as a whole."""
    return _tallied(execution.again), execution.again_in_tail, _interface(execution)
