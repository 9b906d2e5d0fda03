"""Drops dominated options: those for which another option is no worse in any number that a plan's cost depends on.

Write x <= y if every number of x is at most that of y.  The peak of a plan (`planner.cost.peak_memory`) is a
maximum of sums, with factors of at least zero, of

    rest, SG, SG + TMP, tensors stepped apart, SG + L, saved + kept, AG and AG in backward of the last unit, RSI of the
    first, whether there is no such AG (then one further down is seen), and its moments, by the neighbours that they see

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

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from planner.cost.unit_communication import UnitTraffic
from planner.cost.unit_memory import UnitBytes
from planner.options.dominance import undominated_rows
from planner.options.option_columns import OptionColumns
from planner.strategies.spec import Strategy

Array = NDArray[np.float64]

SUMMED = frozenset({"parameters", "optimizer", "window", "secondary"})
"""Fields of `UnitBytes` that count only in sums with others."""


def undominated(numbers: Array) -> list[int]:
    """Return the rows that no other row is at most in every column; of equal rows the first."""
    return sorted(undominated_rows(numbers).tolist()) if len(numbers) else []


def option_numbers(options: OptionColumns) -> Array:
    """Return the numbers of the options of one stage, shape (options, numbers)."""
    same = options.terms[:, -1] + 2.0 * options.reduces
    # Both signs: only options that agree in it are compared.
    return np.column_stack([_memory(options), options.terms[:, :-1], same, -same])


def lightest(options: OptionColumns) -> list[int]:
    """Return the undominated options if only memory counts."""
    return undominated(_memory(options))


def _memory(options: OptionColumns) -> Array:
    """Return the numbers that a plan's peak depends on."""
    return np.column_stack(
        [
            options.rest,
            options.gradients,
            options.stepping,
            options.stepped,
            options.largest,
            options.second,
            options.gradients + options.late,
            options.saved,
            options.saved - options.held,
            options.gather_output,
            options.prefetched,
            options.prefetched + options.prefetch_temporary,
            options.reduce_input,
            -options.gathers,
            -options.prefetches,
            options.takes,
            *options.highest.values(),
        ]
    )


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
