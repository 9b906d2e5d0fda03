"""Every strategy, alone and mixed, trains what one process trains, and sends what the planner charges for."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mixtures import mixtures
from parity import FAMILIES, Case, alone, blocks_of, check


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy(family: str) -> None:
    """Alone: each micro-batch its own step, and with two a step and every block recomputed."""
    recomputed = tuple(blocks_of(family))
    check(
        [Case(family, {}, name) for name in alone()]
        + [Case(family, {}, name, recomputed=recomputed, accumulation=2) for name in alone()]
    )


def test_every_strategy_offloaded() -> None:
    check([Case("gpt2", {}, name, accumulation=2) for name in alone(offloaded=True)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_mixtures(family: str, precision: str) -> None:
    cases: list[Case] = []

    @settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
    @given(st.lists(mixtures(family, precision), min_size=2, max_size=2))
    def draw(drawn: list[Case]) -> None:
        cases.extend(drawn)

    draw()
    assert len(cases) == 4
    check(cases)
