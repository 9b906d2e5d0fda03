"""Every strategy, alone and mixed, trains what one process trains, and sends what the planner charges for."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mixtures import mixtures
from parity import FAMILIES, Case, Trained, alone, blocks_of, compare, reference, train_all
from ranks import run_ranks

TOLERANCE = {"fp32": (1e-5, 2e-6), "bf16": (2e-3, 2e-4)}
"""Relative and absolute; of bf16 a mantissa has 8 bits, so that 2e-3 is half a unit in the last place."""


def check(cases: list[Case]) -> None:
    """Train the cases, all for as many ranks, and compare each with the single process."""
    first = cases[0]
    results: list[Trained] = run_ranks(
        train_all, first.world_size, cases, ranks_per_node=first.ranks_per_node, timeout_s=60 + 10 * len(cases)
    )[0]
    for case, result in zip(cases, results, strict=True):
        wanted = reference(case.family, case.world_size, case.accumulation, case.precision)
        try:
            compare(result, wanted, *TOLERANCE[case.precision])
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}") from error


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
