"""Parts of a profile: the mean over ranks, the file, and two profiles side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import cluster

from osdp.profile.fsdp_overhead import UNITS, exposed_communication_s
from osdp.profile.profile_diff import compare_profiles
from osdp.profile.session import mean_calls
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, CollectiveTimes, FitSegment, Measured, OptimizerTimes, RingRule
from profiler.cluster.read_cluster import read_cluster
from profiler.errors import OsdpError
from profiler.timing.operator_times import ComputeTimes
from profiler.yaml_files import write_yaml


def times(forward: float, backward: float, pass_s: float) -> ComputeTimes:
    """One call that runs once, at micro-batch 1."""
    call = CallTimes("k", "call", (1,), (forward,), (backward,), (512.0,))
    return ComputeTimes((call,), ((forward + backward) / pass_s - 1.0,), True)


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0)), min_size=1, max_size=6), st.floats(0.1, 3.0))
def test_calls_add_up_to_whole_passes(seconds: list[tuple[float, float]], longer: float) -> None:
    # All ranks' passes take `longer` times what their calls' medians add up to.
    (call,) = mean_calls([times(forward, backward, longer * (forward + backward)) for forward, backward in seconds])
    total = sum(forward + backward for forward, backward in seconds) / len(seconds)
    assert call.forward_s[0] + call.backward_s[0] == pytest.approx(longer * total)
    shares = [sum(one[i] for one in seconds) for i in (0, 1)]
    assert call.forward_s[0] * shares[1] == pytest.approx(call.backward_s[0] * shares[0])
    assert call.saved_bytes == (512.0,)


# --- the file --------------------------------------------------------------------------------

MEASURED = Measured(
    date="2026-01-02",
    versions="none",
    repetitions=3,
    collectives=(
        CollectiveTimes(
            "all_gather",
            "native",
            4,
            1,
            (FitSegment(0.0, 1e-3, 1e-9), FitSegment(1e6, 2e-3, 2e-9)),
            0.05,
            ((4096.0, 1e-3), (1e6, 3e-3)),
        ),
    ),
    calls=(CallTimes("k", "gpt2 wte", (1, 2), (1e-3, 2e-3), (3e-3, 4e-3), (512.0, 1024.0)),),
    optimizers=(OptimizerTimes("adam", Figure(1e-5, "measured: a test"), Figure(2e-9, "measured: a test")),),
    overlapped_slowdown=1.25,
    asynchronous=True,
    unit_overhead_s=1e-4,
    notes=("a note: with a colon",),
)


SAME_LINE = """
  - {operation: all_gather, algorithm: native, ranks: 4, stride: 1, residual: 0.0, points: [[1, 1]],
     pieces: [{from_bytes: 0, latency_s: 1, s_per_byte: 1}]}
""".lstrip("\n")


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = replace(cluster(2, 2), measured=MEASURED, ring=(RingRule(4, 1, 65536.0),))
    write_yaml(tmp_path / "mine.yaml", written)
    assert read_cluster(tmp_path / "mine.yaml") == written
    assert read_cluster(tmp_path / "mine.yaml").measured == MEASURED


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("repetitions: 3", "repetitions: many", "repetitions"),
        ("residual: 0.05", "residul: 0.05", "residul"),
        ("operation: all_gather", "operation: 7", "operation"),
        ("overlapped_slowdown: 1.25", "overlapped_slowdown: 0.5", "overlapped_slowdown"),
        ("s_per_byte: 1.0e-09", "s_per_byte: -1.0", "s_per_byte"),
        (
            "points:\n    - - 4096.0\n      - 0.001\n    - - 1000000.0\n      - 0.003",
            "points: []",
            "collectives.0.points",
        ),
        ("- - 4096.0", "- - 4096000.0", "collectives.0.points"),
        ("forward_s:\n    - 0.001", "forward_s:\n    - -0.001", "calls.0.forward_s.0"),
        ("- 0.004", "- -0.004", "calls.0.backward_s.1"),
        ("- 512.0", "- -512.0", "calls.0.saved_bytes.0"),
        ("unit_overhead_s: 0.0001", "unit_overhead_s: -0.0001", "unit_overhead_s"),
        ("  collectives:\n", f"  collectives:\n{SAME_LINE}", "`measured.collectives.1` is given twice"),
        ("algorithm: native\n    ranks: 4", "algorithm: native\n    ranks: 1", "collectives.0.ranks"),
        ("ring:\n- ranks: 4", "ring:\n- ranks: 1", "ring.0.ranks"),
        ("ranks: 4\n  stride: 1", "ranks: 4\n  stride: 0", "ring.0.stride"),
        ("from_bytes: 65536.0", "from_bytes: -1.0", "ring.0.from_bytes"),
    ],
)
def test_a_broken_profile_is_refused_with_the_place(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "mine.yaml"
    write_yaml(path, replace(cluster(2, 2), measured=MEASURED, ring=(RingRule(4, 1, 65536.0),)))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(OsdpError) as caught:
        read_cluster(path)
    assert told in str(caught.value)
    assert "line " in str(caught.value)


def test_rows_of_two_profiles() -> None:
    one = replace(cluster(2, 2, inter=1e9), measured=MEASURED)
    slower = replace(MEASURED.collectives[0], pieces=(FitSegment(0.0, 2e-3, 4e-9),))
    other = replace(cluster(2, 2, inter=2e9), measured=replace(MEASURED, collectives=(slower,), calls=()))
    rows = {row.what: row for row in compare_profiles(one, other)}
    assert rows["bandwidth between nodes"].ratio == pytest.approx(2.0)
    assert rows["all-gather over 4 ranks, 64 KiB"].ratio == pytest.approx((2e-3 + 4e-9 * 65536) / (1e-3 + 65536e-9))
    # 1 MiB is beyond the largest size that was measured, 1,000,000 bytes.
    assert not any("1024 KiB" in what for what in rows)
    gone = rows["gpt2 wte, forward, micro-batch 2"]
    assert (gone.before, gone.after, gone.ratio) == (2e-3, None, None)
    assert rows["adam, 100 tensors, 1 GB"].before == pytest.approx(2.0 + 1e-3)


def test_on_streams_two_collectives_of_a_step_are_exposed() -> None:
    assert exposed_communication_s(2.0, 5.0, on_streams=True) == 7.0
    assert exposed_communication_s(2.0, 5.0, on_streams=False) == UNITS * 9.0
