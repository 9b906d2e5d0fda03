"""Packing and dealing: every sample once, within the limit, balanced as the literature says."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osdp.models.config import LlamaConfig
from osdp.uneven_lengths.packing import METHODS, Cost, Deal, deal, first_fit_decreasing, weights
from profiler.errors import OsdpError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)
COST = Cost(3.0, 0.5)


def sums(packs: list[tuple[int, ...]], values: list[int]) -> list[int]:
    """Return what each pack holds."""
    return [sum(values[i] for i in pack) for pack in packs]


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """Return the least number of bins, by trying everything."""

    def fits(rest: list[int], room: list[int]) -> bool:
        if not rest:
            return True
        return any(
            fits(rest[1:], [*room[:b], left - rest[0], *room[b + 1 :]])
            for b, left in enumerate(room)
            if rest[0] <= left
        )

    return next(bins for bins in range(1, len(lengths) + 1) if fits(sorted(lengths)[::-1], [capacity] * bins))


# --- first-fit decreasing


def test_first_fit_decreasing_by_hand() -> None:
    # 8 | 7 | 6 4 | 5 with room for 10: 4 fits behind 6, the first with room is 8 only for 2; then 5, then 2 to 8.
    lengths = [5, 2, 8, 4, 6, 7]
    assert first_fit_decreasing(lengths, 10) == [(2, 1), (5,), (4, 3), (0,)]


@given(LENGTHS, st.integers(40, 90))
def test_first_fit_decreasing_keeps_every_sample_within_the_limit(lengths: list[int], capacity: int) -> None:
    packs = first_fit_decreasing(lengths, capacity)
    assert sorted(chain(*packs)) == list(range(len(lengths)))
    assert max(sums(packs, lengths)) <= capacity


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=7))
def test_first_fit_decreasing_is_near_the_least(lengths: list[int]) -> None:
    """At most 11/9 of the least plus 6/9 (Dosa 2007)."""
    assert len(first_fit_decreasing(lengths, 10)) <= 11 / 9 * fewest_bins(lengths, 10) + 6 / 9


# --- dealing


@pytest.mark.parametrize("method", METHODS)
@given(lengths=LENGTHS, ranks=st.integers(1, 4), capacity=st.integers(40, 90))
def test_every_sample_is_trained_once(method: str, lengths: list[int], ranks: int, capacity: int) -> None:
    dealt = deal(method, lengths, ranks, capacity, COST)
    packs = list(chain(*dealt.ranks))
    assert len(dealt.ranks) == ranks
    assert all(packs)
    assert sorted(chain(*packs)) == list(range(len(lengths)))
    assert max(sums(packs, lengths)) <= capacity
    for packs_of_rank, costs in zip(dealt.ranks, dealt.costs, strict=True):
        assert list(costs) == [sum(3 * lengths[i] + lengths[i] ** 2 / 2 for i in pack) for pack in packs_of_rank]


def test_dealing_by_hand() -> None:
    lengths = [5, 2, 8, 4, 6]
    linear = Cost(1.0, 0.0)
    assert deal("none", lengths, 2, 10, linear).ranks == (((0,), (2,), (4,)), ((1,), (3,)))
    assert deal("ffd", lengths, 2, 10, linear).ranks == (((2, 1), (0,)), ((4, 3),))
    # 25 tokens need more than two packs of 10. Four: 8 | 6 | 5 | 4, then 2 to the 4; dealt back and forth.
    assert deal("kk", lengths, 2, 10, linear).ranks == (((2,), (0,)), ((4,), (1, 3)))


def test_what_a_step_costs() -> None:
    """Ranks that meet wait for 6 and then for 5; alone the first takes 6 + 1 + 2."""
    dealt = Deal((((0,), (1,), (2,)), ((3,), (4,))), ((6.0, 1.0, 2.0), (3.0, 5.0)))
    assert dealt.counts == (3, 2)
    assert dealt.cost_in_step == 6 + 5 + 2
    assert dealt.cost_alone == 9


def test_the_cost_of_a_llama() -> None:
    config = LlamaConfig(
        vocabulary_size=10,
        maximum_positions=64,
        hidden_size=8,
        layers=3,
        heads=4,
        key_value_heads=2,
        intermediate_size=16,
        rope_base=1e4,
        tied_head=False,
    )
    # Per block 8x8 query and output, 8x4 key and value, three 8x16; the head is 8x10. Scores and their use: 2 x 2 x 8.
    weights_of_block = 64 + 64 + 32 + 32 + 3 * 128
    cost = Cost.of_llama(config)
    assert cost(1) == 2 * (3 * weights_of_block + 80) + 3 * 32 / 2
    assert cost(10) == 10 * 2 * (3 * weights_of_block + 80) + 3 * 32 * 100 / 2


def test_weights_make_the_mean_per_target() -> None:
    """FSDP divides what ranks sum up by their number; ODC by all micro-batches where counts differ."""
    for_fsdp, for_odc = weights([2, 2], 10)
    assert (for_fsdp / 2, for_odc / 2) == (1 / 10, 1 / 10)
    for_fsdp, for_odc = weights([3, 1], 10)
    assert for_fsdp / 2 == pytest.approx(1 / 10)
    assert for_odc / 4 == pytest.approx(1 / 10)


def test_refusals() -> None:
    for method, lengths, said in (("lpt", [1], "no such packing"), ("ffd", [11], "longer"), ("kk", [], "no samples")):
        with pytest.raises(OsdpError, match=said):
            deal(method, lengths, 2, 10, COST)
