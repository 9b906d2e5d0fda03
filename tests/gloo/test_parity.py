"""Every strategy, alone and mixed, trains what one process trains, and sends what the planner charges for."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mixtures import mixtures
from parity import FAMILIES, Case, alone, blocks_of, check


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_alone(family: str) -> None:
    check([Case(family, {}, name) for name in alone()])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_alone_recomputed_and_accumulated(family: str) -> None:
    check([Case(family, {}, name, recomputed=tuple(blocks_of(family)), accumulation=2) for name in alone()])


def test_every_strategy_offloaded() -> None:
    check([Case("gpt2", {}, name, accumulation=2) for name in alone(offloaded=True)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_random_mixtures(family: str, precision: str, data: st.DataObject) -> None:
    check(data.draw(st.lists(mixtures(family, precision), min_size=2, max_size=2)))
