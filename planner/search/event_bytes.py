"""What the options of one class of stages hold at a moment of another stage, as arrays over options.

See `planner.cost.peak_memory` for the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.peak_memory import beside, neighbour_bytes
from planner.cost.stage_memory import Moment, Sees
from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload

Array = NDArray[np.float64]

OPTIMIZER = 9
"""In place of how far away a stage is: in the optimizer step, which is the same for all."""


class EventBytes:
    """Bytes of the options of one class."""

    def __init__(self, options: Sequence[StageCandidate], load: Workload) -> None:
        self._options = options
        rows = [
            (o.rest, o.gradients, o.reduced_after_backward, o.saved + o.kept, o.stepped + o.updates) for o in options
        ]
        rest, gradients, late, kept, stepping = np.array(rows, dtype=np.float64).T
        always = rest + gradients if load.accumulation > 1 else rest
        self._far = {1: rest + gradients + late, 0: always, -1: always + kept}
        self._optimizer: Array = rest + stepping
        self._highest: dict[Sees, Array] = {}

    def at(self, relation: int, moment: Moment | None) -> Array:
        """Return what each option adds at a moment of a stage so many stages below (negative: above) its own.

        The moment is None if the stage is not a neighbour, `relation` is `OPTIMIZER` in the optimizer step.
        """
        if relation == OPTIMIZER:
            return self._optimizer
        held: Array = self._far[(relation > 0) - (relation < 0)]
        if moment is None:
            return held
        if relation == 0:
            return np.add(held, self._highest_of(moment.sees))
        # Above a stage that reduces nothing there may be the buffer of another: counted as zero in a lower bound.
        found = [neighbour_bytes(moment, *beside(option, relation > 0)) for option in self._options]
        return np.add(held, np.array(found, dtype=np.float64))

    def _highest_of(self, sees: Sees) -> Array:
        if sees not in self._highest:
            highest = [max((o.bytes_at(m) for m in o.moments if m.sees == sees), default=0.0) for o in self._options]
            self._highest[sees] = np.array(highest, dtype=np.float64)
        return self._highest[sees]
