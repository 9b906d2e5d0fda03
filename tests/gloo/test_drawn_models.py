"""Random models under random plans, in a loop as everyone writes it, against one process."""

from __future__ import annotations

import pytest
from drawn_actions import plain_actions
from drawn_loops import check_draws
from thoroughness import drawn_numbers


@pytest.mark.parametrize(("ranks", "first", "count"), [((1, 2), 0, 5), ((2, 2), 100_000, 1)])
def test_drawn_models_train_as_in_one_process(ranks: tuple[int, int], first: int, count: int) -> None:
    """A draw takes half of the time of one of `test_drawn_loops.py`, which runs the same in other loops."""
    check_draws(drawn_numbers(first, count, thorough=1440 if ranks == (1, 2) else 360), ranks, plain_actions)
