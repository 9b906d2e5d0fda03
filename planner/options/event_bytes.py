"""What the options of one class of stages hold at a moment of another stage, as arrays over options.

See `planner.cost.peak_memory` for the sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_memory import Sees
from planner.cost.workload import Workload
from planner.options.option_columns import OptionColumns

Array = NDArray[np.float64]

OPTIMIZER = 9
"""In place of how far away a stage is: in the optimizer step, which is the same for all."""


class EventBytes:
    """Bytes of the options of one class."""

    def __init__(self, options: OptionColumns, load: Workload) -> None:
        always = options.rest + options.gradients if load.accumulation > 1 else options.rest
        self._far = {1: options.rest + options.gradients + options.late, 0: always, -1: always + options.saved}
        self.options = options

    def at(self, relation: int, sees: Sees | None, in_forward: bool = False) -> Array:
        """Return what each option adds at a moment of a stage so many stages below (negative: above) its own.

        `sees` is what the moment sees, None if the stage is not a neighbour; `relation` is `OPTIMIZER` in the optimizer
        step, `in_forward` whether it is one of a forward.
        """
        options = self.options
        if relation == OPTIMIZER:
            return options.rest + options.stepping
        held: Array = self._far[(relation > 0) - (relation < 0)]
        if in_forward and relation < 0:
            held = held - options.held
        if sees is None:
            return held
        in_forward, neighbours = sees
        if relation == 0:
            return held + np.maximum(options.highest[sees], 0.0) if sees in options.highest else held
        # Above a stage that reduces nothing there may be the buffer of another: counted as zero in a lower bound.
        if relation > 0:
            return held + options.reduces * options.reduce_input if neighbours.above else held
        below = options.gather_output if in_forward else options.prefetched
        held = held + neighbours.below * below + neighbours.gathers_below * options.prefetch_temporary
        return held
