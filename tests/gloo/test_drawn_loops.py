"""Random models under random plans, in random loops, against one process.

`pytest tests/gloo/test_drawn_loops.py --thorough` makes thousands of draws, `--draw N` repeats one.
"""

from __future__ import annotations

import pytest
from drawn_actions import any_actions
from drawn_loops import check_draws
from thoroughness import drawn_numbers


@pytest.mark.parametrize(("ranks", "first", "count", "thorough"), [((1, 2), 0, 5, 4320), ((2, 2), 100_000, 1, 720)])
def test_any_loop_trains_as_in_one_process(ranks: tuple[int, int], first: int, count: int, thorough: int) -> None:
    check_draws(drawn_numbers(first, count, thorough), ranks, any_actions)
