"""Every strategy, alone and mixed, trains what one process trains, and sends what the planner charges for."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from mixtures import mixtures
from parity import FAMILIES, Case, alone, blocks_of, check
from thoroughness import THOROUGH, draws, some


@pytest.mark.parametrize("families", [(family,) for family in FAMILIES] if THOROUGH else [FAMILIES])
def test_every_strategy(families: tuple[str, ...]) -> None:
    """Alone: each micro-batch its own step, and with two a step and every block recomputed.

    Unless thorough, in turn: every strategy has one of the two, with one of the families.
    """
    cases = []
    for family in families:
        recomputed = tuple(blocks_of(family))
        for number, name in enumerate(alone(), FAMILIES.index(family)):
            if THOROUGH or number % 8 == 0:
                cases.append(Case(family, {}, name))
            if THOROUGH or number % 8 == 4:
                cases.append(Case(family, {}, name, recomputed=recomputed, accumulation=2))
    check(cases)


def test_every_strategy_offloaded() -> None:
    """Unless thorough, some of them; all with --thorough."""
    check([Case("gpt2", {}, name, accumulation=2) for name in some(alone(offloaded=True), 4)])


# Unless thorough, one in bf16: in fp32 tests/gloo/test_drawn_loops.py and test_drawn_models.py mix strategies, and
# test_checkpoint_plans.py those of the encoder-decoder.
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        (name, precision)
        for name in FAMILIES
        for precision in ("fp32", "bf16")
        if THOROUGH or (name, precision) == ("llama", "bf16")
    ],
)
def test_random_mixtures(family: str, precision: str) -> None:
    cases: list[Case] = []

    @settings(max_examples=draws(1), deadline=None, derandomize=True, phases=[Phase.generate], database=None)
    @given(mixtures(family, precision))
    def draw(drawn: Case) -> None:
        cases.append(drawn)

    draw()
    assert len(cases) == draws(1)
    check(cases)
