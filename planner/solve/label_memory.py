"""Memory of the upper part of a chain, as the stages below will move it: the resources of a label.

With stages placed from the top down to j, every moment seen so far grows by the same amount for each stage below: what
rests there, is saved there and is kept there, R + saved + kept.  So a few columns are all that the rest of the chain
can tell of the memory above (`planner.cost.peak_memory` has the equations; R is what rests, with M > 1 the gradients
too; what a model's forward holds of `saved` is counted in forward too here, from above, as HIGHEST is of both)

    HIGHEST     the highest moment so far of those for which nothing is missing
    BELOW, GATHERING, FORWARD_BELOW
                the highest moments for which the gather of a stage below is missing: in backward, in backward as it
                runs, in forward
    BACKWARD    sum of R + gradients + L, which a moment in backward of a stage below adds to its own bytes
    FORWARD     sum of R, which a moment in forward does
    OPTIMIZER   what the optimizer's step holds
    REDUCTION   the input of the last reduction, which lives on until a stage below reduces

`StageMemory.extended` gives the columns with one more stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.workload import Workload
from planner.options.option_columns import OptionColumns

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

COLUMNS = 8
HIGHEST, BELOW, GATHERING, FORWARD_BELOW, BACKWARD, FORWARD, OPTIMIZER, REDUCTION = range(COLUMNS)
PEAKS = slice(HIGHEST, FORWARD_BELOW + 1)
PENDING = slice(BELOW, FORWARD_BELOW + 1)
NOTHING_PLACED = np.array([[-np.inf, -np.inf, -np.inf, -np.inf, 0.0, 0.0, 0.0, 0.0]])


class StageMemory:
    """Columns of the options of one class of stages."""

    def __init__(self, options: OptionColumns, load: Workload) -> None:
        accumulates = load.accumulation > 1
        self.resting = options.rest + options.gradients if accumulates else options.rest
        """R."""
        self.passing = self.resting + options.saved
        """What every moment above grows by."""
        self.backward = self.resting + options.late + (0.0 if accumulates else options.gradients)
        self.optimizer = options.rest + options.stepping
        below = options.prefetches * options.prefetched
        running = options.prefetches * (options.prefetched + options.prefetch_temporary)
        self.gathers = np.stack([below, running, options.gathers * options.gather_output], axis=1)
        """What pending moments above lack, shape (options, 3)."""
        self.has_gather = np.stack([options.prefetches, options.prefetches, options.gathers], axis=1) > 0
        """Whether it is this stage's; else they wait for one further down."""
        self.reduce_input = np.where(options.reduces > 0, options.reduce_input, -1.0)
        """The input of its last reduction; -1: it reduces nothing, and that of a stage above lives on."""
        self.moments = np.full((5, 2, len(options)), -np.inf)
        """The highest own moments: alone, BELOW, GATHERING in backward, alone and FORWARD_BELOW in forward; without and
        with the reduce-scatter input of the stage above."""
        for (in_forward, sees), highest in options.highest.items():
            row = 3 + sees.below if in_forward else sees.below + sees.gathers_below
            own = self.moments[row, int(sees.above)]
            np.maximum(own, highest, out=own)
        self._see_input = np.atleast_1d(np.isfinite(self.moments[:, 1]).any(axis=1))
        self._always_gathers = np.atleast_1d(self.has_gather.all(axis=0))
        self.backward_peak = self.resting + self.moments[:3].max(axis=(0, 1))
        """The highest own moment in backward, on top of BACKWARD, without what other stages hold beside."""
        self.forward_peak = self.resting + self.moments[3:].max(axis=(0, 1))

    def summed(self, held: Array, labels: Indices, options: Indices) -> dict[int, Array]:
        """Return what `resources` are at least of labels with one more stage each below, without inputs and gathers of
        others, for a part of the time of `extended`.

        `held` is of all labels; each of `labels` gets one of `options`.
        """
        reduce_input = self.reduce_input.take(options)
        highest = peaks(held).take(labels) + self.passing.take(options)
        np.maximum(highest, held[:, BACKWARD].take(labels) + self.backward_peak.take(options), out=highest)
        np.maximum(highest, held[:, FORWARD].take(labels) + self.forward_peak.take(options), out=highest)
        return {
            HIGHEST: highest,
            BACKWARD: held[:, BACKWARD].take(labels) + self.backward.take(options),
            OPTIMIZER: held[:, OPTIMIZER].take(labels) + self.optimizer.take(options),
            REDUCTION: np.where(reduce_input < 0, held[:, REDUCTION].take(labels), reduce_input),
        }

    def extended(self, held: Array, options: Indices) -> Array:
        """Return the columns of labels with one more stage each below, shape (labels, COLUMNS)."""
        reduction, passing = held[:, REDUCTION], self.passing.take(options)

        def own(row: int, base: Array) -> Array:
            alone, with_input = self.moments[row]
            highest: Array = alone.take(options)
            if self._see_input[row]:
                np.maximum(highest, with_input.take(options) + reduction, out=highest)
            return np.add(base, highest, out=highest)

        found = np.empty((len(options), COLUMNS))
        resting = self.resting.take(options)
        backward, forward = held[:, BACKWARD] + resting, held[:, FORWARD] + resting
        above = held[:, HIGHEST] + passing
        np.maximum(above, own(0, backward), out=above)
        np.maximum(above, own(3, forward), out=above)
        pending = zip((BELOW, GATHERING, FORWARD_BELOW), (1, 2, 4), (backward, backward, forward), strict=True)
        for place, (column, row, base) in enumerate(pending):
            seen = held[:, column] + passing
            gathered = seen + self.gathers[:, place].take(options)
            if self._always_gathers[place]:
                found[:, column] = own(row, base)
            else:
                has_gather = self.has_gather[:, place].take(options)
                gathered[~has_gather] = seen[has_gather] = -np.inf
                found[:, column] = np.maximum(seen, own(row, base), out=seen)
            np.maximum(above, gathered, out=above)
        reduce_input = self.reduce_input.take(options)
        found[:, HIGHEST], found[:, FORWARD] = above, forward
        found[:, BACKWARD] = held[:, BACKWARD] + self.backward.take(options)
        found[:, OPTIMIZER] = held[:, OPTIMIZER] + self.optimizer.take(options)
        found[:, REDUCTION] = np.where(reduce_input < 0, reduction, reduce_input)
        return found


def resources(held: Array) -> dict[int, Array]:
    """Return what stages below need to know of the memory of labels: columns, and at HIGHEST the highest moment."""
    return {HIGHEST: peaks(held), **{column: held[:, column] for column in (BACKWARD, OPTIMIZER, REDUCTION)}}


def peaks(held: Array) -> Array:
    """Return the highest moment of each label; column by column, as numpy takes far longer over rows of four."""
    first, *others = range(*PEAKS.indices(COLUMNS))
    highest = held[:, first].copy()
    for column in others:
        np.maximum(highest, held[:, column], out=highest)
    return highest


def most_gathered(stages: Sequence[StageMemory]) -> list[Array]:
    """Return, for each stage, the most that pending moments above it can lack, in its gather or in one further down."""
    found: list[Array] = []
    for stage in stages:
        own = stage.gathers.max(axis=0)
        further = found[-1] if found else np.zeros(3)
        found.append(np.where(stage.has_gather.all(axis=0), own, np.maximum(own, further)))
    return found


def raise_pending(held: Array, most: Array) -> None:
    """Raise pending moments that cannot become the highest, in place: labels that differ in no more are then equal.

    `most` is what such moments can lack.
    """
    np.maximum(held[:, PENDING], held[:, HIGHEST, None] - most, out=held[:, PENDING])
