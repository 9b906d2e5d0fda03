"""The arithmetic of `scripts/bench/cluster.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "cluster.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("bench_cluster", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_cluster"] = module
    spec.loader.exec_module(module)
    return module


def test_ratios_are_of_one_rounds_times(bench: ModuleType) -> None:
    def contestant(name: str, seconds: list[float], tracked: float, predicted: float = 1.0) -> object:
        return bench.Contestant(
            name,
            False,
            predicted,
            0.0,
            tracked,
            seconds,
            {},
            {"compute_s": 0.0, "exposed_communication_s": 0.0, "optimizer_s": 0.0},
        )

    # Every round is twice as slow as the one before, for all; ours is 2, 2 and 4 times as fast as FSDP.
    fsdp = contestant("FSDP", [4.0, 8.0, 16.0], 10.0, predicted=10.0)
    ours = contestant("OSDP", [2.0, 4.0, 4.0], 30.0, predicted=3.0)
    large = contestant("DDP", [1.0, 2.0, 4.0], 90.0, predicted=2.0)
    capped = contestant("OSDP capped", [2.0, 4.0, 4.0], 30.0, predicted=4.0)
    case = bench.Case("1gbit", 50.0, (fsdp, ours, large, capped))
    assert case.ratio(ours, fsdp) == "2.00 (2.00-3.00)"
    assert (fsdp.step_s, fsdp.error) == (8.0, pytest.approx(0.25))
    # Of those with one strategy for everything, DDP is the fastest, and beyond the cap.
    assert case.best_uniform(False, case.cap_bytes) is fsdp
    assert case.best_uniform(False, float("inf")) is large
    # With rings they are the same: these were not trained with any.
    assert case.best_uniform(True, case.cap_bytes) is fsdp
    text = "\n".join(bench.report(case))
    assert text.count("*") == 2  # DDP, and the legend
    # Errors: +25 %, -25 %, 0 %, 0 %; the ranks 4, 2, 1, 3 and 4, 2.5, 1, 2.5: 4.5 / sqrt(5 x 4.5).
    assert "mean absolute error 12.5%, from -25.0% to +25.0%; rank correlation 0.949 of all" in bench.accuracy([case])


def test_rank_correlation(bench: ModuleType) -> None:
    assert bench.rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 40.0, 30.0]) == pytest.approx(0.8)
    assert bench.rank_correlation([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert bench.rank_correlation([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / 22.5**0.5)
