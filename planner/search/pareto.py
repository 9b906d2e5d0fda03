"""Drops dominated options: those for which another option is no worse in any number that a plan's cost depends on.

Write x <= y if every number of x is at most that of y.  The peak of a plan (`planner.cost.peak_memory`) is a
maximum of sums, with factors of at least zero, of

    rest, SG, SG + L, saved + kept, AG and AG in backward of the last unit, RSI of the first,
    whether there is no such AG (then one further down is seen), and its moments, by the neighbours that they see

and its step time (`planner.cost.step_time`) is a sum of maxima of sums of the numbers there.  Both are
monotone: in any plan that fits, y can be replaced by x, and the plan still fits and is no slower.  So an optimum
remains if y is left out, as long as x stays; <= is transitive, and of equals the first stays, so every option left out
has one no worse that stays.  (L = U + G - SG, of units that are reduced after all backward, is not in the list alone:
it is only ever added to SG, of a stage whose backward is over.)  Options of one segment and of several are never
compared, because their overlap terms differ in form, nor are those that reduce something in backward with those that do
not, which leave what stages above have left.

The same holds for one unit of a stage before its options are made: the options' numbers are monotone
in the unit's bytes and seconds, which do not depend on the micro-batch (`unit_numbers`), as long as both
units communicate on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_memory import Neighbours
from planner.cost.stage_option import StageCandidate
from planner.cost.step_time import overlap_terms
from planner.cost.unit_communication import UnitTraffic
from planner.cost.unit_memory import UnitBytes
from planner.cost.workload import Workload
from planner.strategies.spec import Strategy

Sees = tuple[bool, Neighbours]

SUMMED = frozenset({"parameters", "optimizer", "window", "secondary"})
"""Fields of `UnitBytes` that count only in sums with others."""


def undominated(numbers: NDArray[np.float64]) -> list[int]:
    """Return the rows that no other row is at most in every column; of equal rows the first."""
    if not len(numbers):
        return []
    rows: list[int] = []
    # By rising sum, whatever dominates a row comes before it.
    for index in np.argsort(numbers.sum(axis=1), kind="stable"):
        if not rows or not (numbers[rows] <= numbers[index]).all(axis=1).any():
            rows.append(int(index))
    return sorted(rows)


def option_numbers(options: Sequence[StageCandidate], load: Workload, syncs: bool = True) -> NDArray[np.float64]:
    """Return the numbers of the options of one stage, shape (options, numbers); `syncs` as in `overlap_terms`."""
    sees = sorted({moment.sees for option in options for moment in option.moments})
    rows = []
    for option in options:
        *seconds, single = overlap_terms(option, load, syncs)
        same = float(single) + 2.0 * option.reduces
        # Both signs: only options that agree in it are compared.
        rows.append([*memory_numbers(option, sees), *seconds, same, -same])
    return np.array(rows)


def lightest(options: Sequence[StageCandidate]) -> list[int]:
    """Return the undominated options if only memory counts."""
    sees = sorted({moment.sees for option in options for moment in option.moments})
    return undominated(np.array([memory_numbers(option, sees) for option in options]))


def memory_numbers(option: StageCandidate, sees: Sequence[Sees]) -> list[float]:
    """Return the numbers that a plan's peak depends on; `sees` are those of the moments that the stage can have."""
    held = dict.fromkeys(sees, 0.0)
    for moment in option.moments:
        held[moment.sees] = max(held[moment.sees], option.bytes_at(moment))
    return [
        option.rest,
        option.gradients,
        option.stepped + option.updates,
        option.gradients + option.reduced_after_backward,
        option.saved + option.kept,
        option.gather_output,
        option.prefetched,
        option.prefetched + option.prefetch_temporary,
        option.reduce_input,
        float(not option.gathers),
        float(not option.prefetches),
        float(bool(option.takes)),
        *held.values(),
    ]


def unit_numbers(unit: UnitBytes, traffic: UnitTraffic, strategy: Strategy) -> list[float]:
    """Return the numbers of one unit that an option's numbers depend on."""
    kept = unit.unsharded if strategy.keeps_unsharded else unit.secondary
    in_backward = 0 if strategy.keeps_unsharded else 1
    seconds = [getattr(traffic, field.name) for field in fields(traffic) if field.name.endswith("_s")]
    own = [getattr(unit, field.name) for field in fields(unit) if field.name not in SUMMED]
    return [
        unit.parameters + unit.optimizer + unit.window,
        kept,
        in_backward * unit.gathered,
        in_backward * unit.gather_temporary,
        *own,
        *seconds,
        float(traffic.syncs_each_microbatch),
    ]
