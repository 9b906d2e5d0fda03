"""Detectors match what they predict to the labels by scipy, which reads costs that no trace knows.

Whatever matches, there are as many pairs, so that the memory and the time of the step are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from profiler.trace.data_dependent import DataDependent
from profiler.trace.known_values import has_data

_NAME = "linear_sum_assignment"


@contextmanager
def matched_in_order(data: DataDependent) -> Iterator[None]:
    """Have scipy's `linear_sum_assignment` match costs without data in order, wherever modules have it by its name."""
    scipy = sys.modules.get("scipy.optimize")
    original = getattr(scipy, _NAME, None)
    if original is None:  # nobody can have it
        yield
        return

    def assign(cost_matrix: Any, maximize: bool = False) -> Any:
        if not isinstance(cost_matrix, Tensor) or has_data(cost_matrix) or cost_matrix.dim() != 2:
            return original(cost_matrix, maximize)
        if data.values.read(cost_matrix) is not None:
            return original(cost_matrix, maximize)
        data.ask()
        data.note(f"predictions are assumed to match labels in order ({_NAME})")
        pairs = np.arange(min(cost_matrix.shape))
        return pairs, pairs.copy()

    having = [module for module in (*sys.modules.values(),) if getattr(module, "__dict__", {}).get(_NAME) is original]
    with ExitStack() as patched:
        for module in having:
            patched.enter_context(patch.object(module, _NAME, assign))
        yield
