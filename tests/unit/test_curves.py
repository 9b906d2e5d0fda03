"""Fits against times that were made up from known pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import draws

from profiler.cluster.measurements import CollectiveTimes, FitSegment
from profiler.cluster.piecewise_fit import BAD_RESIDUAL, describe, fit, is_bad
from profiler.errors import OsdpError

SIZES = [4096.0 * 2**power for power in range(14)]
LATENCIES_S = st.floats(1e-7, 1e-2)
SLOPES = st.floats(1e-12, 1e-6)


def points(time_s: Callable[[float], float], sizes: Sequence[float] = SIZES) -> list[tuple[float, float]]:
    return [(size, time_s(size)) for size in sizes]


def curve(pieces: tuple[FitSegment, ...]) -> Callable[[float], float]:
    return CollectiveTimes("all_gather", "native", 2, 1, pieces, 0.0, ()).time_s


@given(latency_s=LATENCIES_S, s_per_byte=SLOPES, count=st.integers(3, 14))
def test_exact_lines_are_recovered(latency_s: float, s_per_byte: float, count: int) -> None:
    pieces, residual = fit(points(lambda size: latency_s + s_per_byte * size, SIZES[:count]))
    assert residual < 1e-9
    (piece,) = pieces
    assert piece.from_bytes == 0
    for size in (SIZES[0], 77777.0, SIZES[-1], 1e9):
        assert curve(pieces)(size) == pytest.approx(latency_s + s_per_byte * size, rel=1e-9)


def test_coefficients_of_a_line_that_both_matter_are_recovered() -> None:
    (piece,), _ = fit(points(lambda size: 2e-5 + size / 1e9))
    assert (piece.latency_s, piece.s_per_byte) == (pytest.approx(2e-5, rel=1e-9), pytest.approx(1e-9, rel=1e-9))


@pytest.mark.parametrize("knot", SIZES[2:-2])
@pytest.mark.parametrize("rates", [(1e-9, 1e-7), (1e-7, 2e-9)])
def test_a_break_is_found(knot: float, rates: tuple[float, float]) -> None:
    def time_s(size: float) -> float:
        return 1e-5 + rates[0] * min(size, knot) + rates[1] * max(0.0, size - knot)

    pieces, residual = fit(points(time_s))
    assert [piece.from_bytes for piece in pieces] in ([0.0], [0.0, knot])
    if len(pieces) == 2:
        assert residual < 1e-9
        assert [piece.s_per_byte for piece in pieces] == pytest.approx(rates, rel=1e-6)
    else:
        assert residual <= 0.1  # close enough for one line


def test_a_break_that_a_line_cannot_take_is_found_where_it_is() -> None:
    def time_s(size: float) -> float:
        return 1e-5 + 1e-7 * min(size, 65536.0) + 2e-9 * max(0.0, size - 65536.0)

    pieces, residual = fit(points(time_s))
    assert [piece.from_bytes for piece in pieces] == [0.0, 65536.0]
    assert residual < 1e-9
    assert fit(points(time_s), max_pieces=1)[1] > 0.1


def test_a_jump_takes_three_pieces() -> None:
    """Another protocol above 1 MB."""

    def time_s(size: float) -> float:
        return (1e-5 if size < 1e6 else 5e-3) + size / 1e9

    pieces, residual = fit(points(time_s))
    assert [piece.from_bytes for piece in pieces] == [0.0, 2.0**19, 2.0**20]
    assert residual < 1e-9


def test_a_last_point_may_be_steep_but_not_flat() -> None:
    line = points(lambda size: 1e-5 + size / 1e9)
    steep, _ = fit([*line[:-1], (SIZES[-1], 10 * line[-1][1])])
    assert steep[-1].from_bytes == SIZES[-2]
    assert steep[-1].s_per_byte > 1e-8
    flat, _ = fit([*line[:-1], (SIZES[-1], line[-2][1])])
    assert curve(flat)(4 * SIZES[-1]) > 2 * line[-2][1]


@given(
    noise=st.floats(0.001, 0.08),
    signs=st.lists(st.floats(-1, 1), min_size=14, max_size=14),
    latency_s=LATENCIES_S,
    s_per_byte=SLOPES,
)
def test_noise_gives_a_residual_of_its_order(
    noise: float, signs: list[float], latency_s: float, s_per_byte: float
) -> None:
    """The true line has residuals up to noise / (1 - noise), so the best fit has no larger sum of squares."""
    noisy = [
        (size, (latency_s + s_per_byte * size) * (1 + noise * sign)) for size, sign in zip(SIZES, signs, strict=True)
    ]
    pieces, residual = fit(noisy)
    worst = noise / (1 - noise)
    assert residual <= worst * len(SIZES) ** 0.5
    found = [curve(pieces)(size) / measured - 1 for size, measured in noisy]
    assert residual == pytest.approx(max(abs(one) for one in found), rel=1e-6, abs=1e-12)
    if len(pieces) == 1:
        assert sum(one**2 for one in found) <= len(SIZES) * worst**2 * (1 + 1e-9)


@settings(max_examples=draws(30))
@given(seconds=st.lists(st.floats(1e-6, 10.0), min_size=3, max_size=9))
def test_whatever_is_measured_the_fit_never_falls_and_is_positive(seconds: list[float]) -> None:
    pieces, residual = fit(list(zip(SIZES, seconds, strict=False)))
    assert residual >= 0
    assert all(piece.s_per_byte >= 0 for piece in pieces)
    assert [piece.from_bytes for piece in pieces] == sorted({piece.from_bytes for piece in pieces})
    knots = [piece.from_bytes for piece in pieces[1:]]
    sizes = sorted({1.0, *SIZES, *knots, *(knot * (1 - 1e-12) for knot in knots), 1e12})
    times = [curve(pieces)(size) for size in sizes]
    assert times[0] > 0
    assert all(later >= earlier * (1 - 1e-6) for earlier, later in pairwise(times))


def test_order_does_not_matter() -> None:
    given = points(lambda size: 1e-5 + size / 1e9)
    assert fit(given) == fit(given[::-1])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "too few sizes"),
        ([(4096.0, 1e-3)], "too few sizes"),
        ([(4096.0, 1e-3), (8192.0, 2e-3)], "any two lie on a line"),
        ([(4096.0, 1e-3), (4096.0, 2e-3), (8192.0, 2e-3)], "a size was given twice"),
        ([(4096.0, 0.0), (8192.0, 1e-3), (16384.0, 2e-3)], "0 s at 4096 bytes"),
        ([(4096.0, float("nan")), (8192.0, 1e-3), (16384.0, 2e-3)], "must be positive and finite"),
        ([(-1.0, 1e-3), (8192.0, 1e-3), (16384.0, 2e-3)], "must be positive and finite"),
    ],
)
def test_what_cannot_be_fitted_is_refused(given: list[tuple[float, float]], told: str) -> None:
    with pytest.raises(OsdpError, match=told):
        fit(given)


def test_bad_fits_are_called_so() -> None:
    assert not is_bad(BAD_RESIDUAL)
    assert is_bad(BAD_RESIDUAL + 0.001)
    assert describe(0.314).startswith("bad: within 31.4 %")
    assert describe(0.15).startswith("fair")
    assert describe(0.02).startswith("good")
