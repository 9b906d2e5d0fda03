"""What `--mem` means: one limit, several, or a range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp.planning.memory_options import MOST_LIMITS, Limits, parse_limits
from profiler.byte_sizes import GIB, MIB
from profiler.errors import OsdpError


def test_one_several_and_a_range() -> None:
    assert parse_limits("8GB") == Limits((8 * GIB,), several=False)
    assert parse_limits("8GB,6GB, 8192MB") == Limits((6 * GIB, 8 * GIB), several=True)
    assert parse_limits("6GB:12GB:2GB").limits_bytes == (6 * GIB, 8 * GIB, 10 * GIB, 12 * GIB)
    assert parse_limits("6GB:11GB:2GB").limits_bytes == (6 * GIB, 8 * GIB, 10 * GIB)
    assert parse_limits("6GB:8GB:1GB,24GB").limits_bytes == (6 * GIB, 7 * GIB, 8 * GIB, 24 * GIB)
    assert parse_limits("6GB:6GB:1GB") == Limits((6 * GIB,), several=True)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not memory limits"),
        ("6GB,", "not memory limits"),
        ("6GB:8GB", "not a range"),
        ("6GB:8GB:1GB:1GB", "not a range"),
        ("8GB:6GB:1GB", "ends below its start"),
        ("6GB:8GB:lots", "not an amount of memory"),
        ("6GB:8GB:0GB", "from 1 byte"),
        ("1MB:900GB:1MB", "too many memory limits"),
        ("-6GB,8GB", "not an amount of memory"),
    ],
)
def test_what_is_no_limit_is_told(text: str, part: str) -> None:
    with pytest.raises(OsdpError, match=part):
        parse_limits(text)


amounts = st.integers(1, 1 << 20)


@given(st.lists(amounts, min_size=1, max_size=20))
def test_a_list_is_its_distinct_members(sizes: list[int]) -> None:
    found = parse_limits(",".join(f"{size}MB" for size in sizes))
    assert found.limits_bytes == tuple(sorted({size * MIB for size in sizes}))
    assert found.several == (len(sizes) > 1)


@given(amounts, st.integers(0, MOST_LIMITS - 1), amounts, st.integers(0, 1 << 20))
def test_a_range_has_every_step_up_to_its_stop(start: int, steps: int, step: int, beyond: int) -> None:
    stop = start + steps * step + min(beyond, step - 1)
    found = parse_limits(f"{start}MB:{stop}MB:{step}MB")
    assert found.limits_bytes == tuple((start + index * step) * MIB for index in range(steps + 1))


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_limits(text)
    except OsdpError:
        return
    assert 1 <= len(found.limits_bytes) <= MOST_LIMITS
    assert list(found.limits_bytes) == sorted(set(found.limits_bytes))
    assert found.limits_bytes[0] >= 1
