"""What uneven micro-batches cost: expected maxima against closed forms and Monte Carlo, and who pays for them."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, options_of
from thoroughness import draws

from osdp.planning.imbalance_option import read_imbalance
from planner.cost.simulator import simulate, simulated_s
from planner.cost.stage_option import Segment, StageCandidate
from planner.cost.step_time import plan_syncs, step_time, waiting_s
from planner.cost.stragglers import BALANCED, Imbalance, Waits, histogram, lengths_slowest, lognormal_slowest
from planner.cost.unit_communication import unit_traffic
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import fixed, make_plan, predict
from planner.strategies.registry import strategies_on
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError

VARIATIONS = st.floats(0.01, 3.0)


# --- expected maxima ---------------------------------------------------------------------------


@given(VARIATIONS)
def test_two_ranks_have_a_closed_form(variation: float) -> None:
    sigma = math.sqrt(math.log1p(variation**2))
    assert lognormal_slowest(variation, 2) == pytest.approx(2 * NormalDist().cdf(sigma / math.sqrt(2)), rel=1e-5)


@pytest.mark.parametrize(("variation", "ranks"), [(0.1, 8), (0.5, 3), (0.5, 64), (1.0, 16)])
def test_lognormal_ranks_against_monte_carlo(variation: float, ranks: int) -> None:
    sigma, rounds = math.sqrt(math.log1p(variation**2)), 40_000
    slowest = np.exp(sigma * np.random.default_rng(7).standard_normal((rounds, ranks)) - sigma**2 / 2).max(axis=1)
    error = slowest.std() / math.sqrt(rounds)
    assert lognormal_slowest(variation, ranks) == pytest.approx(slowest.mean(), abs=5 * error)


@given(VARIATIONS, st.integers(1, 512))
def test_more_ranks_and_more_variation_wait_longer(variation: float, ranks: int) -> None:
    here = lognormal_slowest(variation, ranks)
    assert 1 <= here <= lognormal_slowest(variation, 2 * ranks) + 1e-9
    assert here <= lognormal_slowest(1.1 * variation, ranks) + 1e-9
    assert here <= ranks * (1 + 1e-5)  # The slowest takes no more than all together.


def test_nobody_waits_alone_or_where_all_are_alike() -> None:
    assert lognormal_slowest(0.5, 1) == lognormal_slowest(0.0, 64) == 1.0
    assert lengths_slowest(histogram([3.0, 5.0]), 4, 1) == lengths_slowest(histogram([3.0] * 9), 4, 64) == 1.0
    assert BALANCED.waits(64, 2, 2) == Waits()


@pytest.mark.parametrize("ranks", [2, 5])
def test_two_lengths_by_hand(ranks: int) -> None:
    lengths = histogram([1.0, 1.0, 1.0, 3.0])  # mean 1.5
    # One draw is 3 unless all ranks draw 1.
    all_short = (3 / 4) ** ranks
    assert lengths_slowest(lengths, 1, ranks) == pytest.approx((all_short + 3 * (1 - all_short)) / 1.5, rel=1e-6)
    # Sums of two: 2, 4 or 6 with 9, 6 and 1 in 16.
    low, middle = (9 / 16) ** ranks, (15 / 16) ** ranks
    expected = 2 * low + 4 * (middle - low) + 6 * (1 - middle)
    assert lengths_slowest(lengths, 2, ranks) == pytest.approx(expected / 3, rel=1e-6)


@given(st.lists(st.floats(1.0, 4096.0), min_size=2, max_size=60), st.integers(2, 300))
def test_one_draw_is_the_order_statistic_of_the_file(lengths: list[float], ranks: int) -> None:
    ordered = np.sort(lengths)
    shares = np.arange(len(lengths) + 1) / len(lengths)
    expected = float((ordered * np.diff(shares**ranks)).sum() / ordered.mean())
    assert lengths_slowest(histogram(lengths), 1, ranks) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("count", "ranks"), [(2, 8), (7, 32), (64, 16), (1000, 8)])
def test_sums_of_lengths_against_monte_carlo(count: int, ranks: int) -> None:
    draw = np.random.default_rng(11)
    lengths = np.clip(draw.lognormal(6, 0.9, 3000).round(), 1, 8192)
    rounds = max(300, 2_000_000 // (count * ranks))
    slowest = draw.choice(lengths, (rounds, ranks, count)).sum(axis=2).max(axis=1) / (count * lengths.mean())
    error = slowest.std() / math.sqrt(rounds)
    assert lengths_slowest(histogram(lengths), count, ranks) == pytest.approx(slowest.mean(), abs=5 * error)


def test_many_lengths_are_put_into_cells() -> None:
    lengths = np.random.default_rng(3).lognormal(6, 0.5, 200_000)
    cells = histogram(lengths)
    assert len(cells) <= 4096
    assert sum(share for _, share in cells) == pytest.approx(1)
    assert sum(value * share for value, share in cells) == pytest.approx(lengths.mean())


def test_a_sweep_of_micro_batches_takes_little_time() -> None:
    uneven = Imbalance(lengths=histogram(np.random.default_rng(5).lognormal(6, 1, 100_000)))
    started = time.process_time()
    waits = [uneven.waits(64, size, 4) for size in range(1, 61)]
    assert time.process_time() - started < 2.0
    # Larger micro-batches are more alike, and a step of four is more alike than each.
    assert all(before.per_micro_batch > after.per_micro_batch for before, after in itertools.pairwise(waits))
    assert all(1 < wait.per_step < wait.per_micro_batch for wait in waits)


def test_steps_average_over_their_micro_batches() -> None:
    waits = Imbalance(0.6).waits(8, 3, 9)
    assert waits.per_micro_batch == pytest.approx(lognormal_slowest(0.6, 8), rel=1e-12)
    assert waits.per_step == pytest.approx(lognormal_slowest(0.2, 8), rel=1e-12)  # 0.6 / 3 is not quite 0.2


# --- who waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", strategies_on(cluster(2, 4), uneven=True), ids=str)
def test_who_meets_in_every_micro_batch(strategy: Strategy) -> None:
    graph = chain([(2048, 1024)], [1], [1])
    traffic = unit_traffic(graph.operators[0].parameters, strategy, "fp32", cluster(2, 4))
    assert traffic.syncs_each_microbatch is (strategy.name not in ("replicate", "odc"))


def test_nobody_meets_on_one_rank() -> None:
    graph, machine = chain([(2048, 1024)], [1], [1]), cluster(1, 1)
    assert not unit_traffic(
        graph.operators[0].parameters, Strategy("replicate", 1), "fp32", machine
    ).syncs_each_microbatch


UNEVEN = Waits(per_micro_batch=1.5, per_step=1.2)


def priced(
    names: tuple[str, ...], accumulation: int = 4, waits: Waits = UNEVEN
) -> tuple[tuple[StageCandidate, ...], Workload]:
    """Stages of one operator each, on one node of eight."""
    known = {str(strategy): strategy for strategy in strategies_on(cluster(1, 8), uneven=True)}
    space = Space(chain([(2048, 1024)] * len(names), [100] * len(names), [1] * len(names)))
    load = Workload(cluster(1, 8), "adam", "fp32", 1, accumulation, waits)
    return fixed(space, load, tuple(StageDecision((known[name],)) for name in names), None), load


@pytest.mark.parametrize(
    ("names", "factor"),
    [
        (("replicate", "replicate", "replicate"), 0.2),
        (("odc:8", "odc:4", "replicate"), 0.2),
        (("odc:8", "odc:8", "shard"), 0.5),
        (("owner", "odc:8", "odc:8"), 0.5),
        (("shard", "shard_grad", "group_shard:2"), 0.5),
    ],
)
def test_one_unit_that_meets_makes_the_whole_plan_wait(names: tuple[str, ...], factor: float) -> None:
    options, load = priced(names)
    balanced, _ = priced(names, waits=Waits())
    # Three stages of 100 GFLOP forward and twice that backward at 10 TFLOP/s, four times a step.
    computing_s = 4 * 3 * 0.03
    time, without = step_time(options, load), step_time(balanced, replace(load, waits=Waits()))
    assert time.waiting_s == pytest.approx(factor * computing_s, rel=1e-2)
    assert time.total_s == pytest.approx(without.total_s + time.waiting_s)
    assert without.waiting_s == 0
    assert plan_syncs(options) is (factor == 0.5)
    assert sum(waiting_s(option, load, plan_syncs(options)) for option in options) == pytest.approx(time.waiting_s)


def test_the_longest_sample_is_full_and_the_mean_one_computes_less() -> None:
    """Lengths 10, 10, 10 and 20 have a mean of 12.5, five eighths of the longest."""
    waits = Imbalance(lengths=histogram([10, 10, 10, 20])).waits(8, 1, 4)
    assert waits.fill == pytest.approx(0.625)
    options, load = priced(("shard", "shard"), waits=waits)
    full, balanced = priced(("shard", "shard"), waits=Waits())
    time, of_full = step_time(options, load), step_time(full, balanced)
    assert time.compute_s == pytest.approx(0.625 * of_full.compute_s)
    assert time.waiting_s == pytest.approx((waits.per_micro_batch - 1) * time.compute_s)
    assert time.exposed_communication_s >= of_full.exposed_communication_s * (1 - 1e-9)  # less of it is hidden
    # Memory must hold the longest.
    assert [option.saved for option in options] == [option.saved for option in full]


def test_recomputation_waits_too() -> None:
    segment = Segment(
        1.0, 3.0, recompute_s=1.0, forward_gather_s=0.1, backward_gather_s=0.1, reduce_s=0.1, step_reduce_s=0.0
    )
    (option, *_), load = priced(("shard",), accumulation=2)
    assert step_time([replace(option, segments=(segment,))], load).waiting_s == pytest.approx(0.5 * 2 * 4.0)


def test_the_simulator_waits_where_ranks_meet() -> None:
    options, load = priced(("shard", "odc:8"))
    waits = [event for event in simulate(options, load) if event.label == "waiting"]
    assert len(waits) == load.accumulation
    options, load = priced(("odc:8", "odc:8"))
    (wait,) = [event for event in simulate(options, load) if event.label == "waiting"]
    assert wait.end_s - wait.start_s == pytest.approx(step_time(options, load).waiting_s)


SECONDS = st.floats(0.0, 10.0)
SEGMENTS = st.builds(
    lambda forward, backward, again, wait, *others: Segment(forward + wait, backward + again, again, wait, *others),
    *[SECONDS] * 10,
)
STAGES = st.lists(st.tuples(st.lists(SEGMENTS, min_size=1, max_size=4), st.booleans(), SECONDS), min_size=1, max_size=5)
FACTORS = st.floats(1.0, 5.0)


@settings(max_examples=draws(30))
@given(STAGES, st.booleans(), st.integers(1, 3), FACTORS, FACTORS)
def test_simulator_and_closed_form_agree(
    stages: list[tuple[list[Segment], bool, float]], overlaps: bool, accumulation: int, each: float, once: float
) -> None:
    (like,), _ = priced(("shard",))
    plan = [
        replace(like, segments=tuple(parts), syncs_each_microbatch=syncs, optimizer_s=step)
        for parts, syncs, step in stages
    ]
    load = Workload(cluster(overlaps=overlaps), "adam", "fp32", 1, accumulation, Waits(each, once))
    time, events = step_time(plan, load), simulate(plan, load)
    assert simulated_s(plan, load) == pytest.approx(time.total_s, rel=1e-9, abs=1e-9)
    assert max(event.end_s for event in events) == pytest.approx(time.total_s, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("names", [("shard", "odc:8"), ("replicate", "replicate"), ("owner", "group_shard:2")])
def test_predictions_are_the_simulators(names: tuple[str, ...]) -> None:
    options, load = priced(names)
    space = Space(chain([(2048, 1024)] * 2, [100] * 2, [1] * 2))
    predicted = predict(options, space, load)
    assert predicted.step_time_s == simulated_s(options, load)
    terms = {name: value for name, value in predicted.time_by_term.items() if name != "hidden_communication_s"}
    assert sum(terms.values()) == pytest.approx(predicted.step_time_s, rel=1e-12)
    assert terms["waiting_s"] == step_time(options, load).waiting_s > 0
    assert predicted.samples_per_s == load.samples_per_step / predicted.step_time_s


def test_a_plan_remembers_its_waits() -> None:
    options, load = priced(("odc:8", "shard"))
    space = Space(chain([(2048, 1024)] * 2, [100] * 2, [1] * 2))
    plan = make_plan(options, None, space, load, limit_bytes=2**33, gap=0.0)
    assert plan.waits == UNEVEN
    again = Workload(
        load.cluster, plan.optimizer, plan.model.precision, plan.micro_batch, plan.accumulation, plan.waits
    )
    read, _ = options_of(plan, space, again)
    assert predict(read, space, again) == plan.predicted


# --- what the user gives -------------------------------------------------------------------------


def test_a_number_is_a_coefficient_of_variation() -> None:
    assert read_imbalance("0.5") == Imbalance(0.5, source="coefficient of variation 0.5, given")


def test_a_file_has_a_length_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10\n20\n\n 10 \n1e1\n")
    found = read_imbalance(str(path))
    assert found == Imbalance(lengths=((10.0, 0.75), (20.0, 0.25)), source=f"from 4 lengths in {path}")


@pytest.mark.parametrize("text", ["-0.1", "nan", "inf", "-inf"])
def test_numbers_that_cannot_be(text: str) -> None:
    with pytest.raises(OsdpError, match="imbalance is out of range"):
        read_imbalance(text)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no lengths"),
        ("\n \n", "no lengths"),
        ("10\nlong\n", "line 2 .* is not a length"),
        ("10\n0\n", "line 2"),
        ("-3\n", "line 1"),
        ("1\n2\nnan\n", "line 3"),
        ("inf\n", "line 1"),
        ("1 2\n", "line 1"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(OsdpError, match=reason):
        read_imbalance(str(path))


def test_neither_a_number_nor_a_file(tmp_path: Path) -> None:
    with pytest.raises(OsdpError, match="neither a number nor a file"):
        read_imbalance("uneven")
    with pytest.raises(OsdpError):
        read_imbalance(str(tmp_path))
