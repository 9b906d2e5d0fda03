"""Options as arrays hold the numbers of the options that are made of them, and times add up to those of plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain, cluster, transformer
from thoroughness import draws

from planner.cost.stage_option import Ambient
from planner.cost.step_time import step_time
from planner.cost.stragglers import Waits
from planner.cost.workload import Workload
from planner.options.option_columns import OptionColumns, OptionList
from planner.options.overlap_terms import OverlapTerms, overlap_terms
from planner.options.search_space import Space

graphs = st.sampled_from(
    [
        transformer(2, 512),
        transformer(1, 256, tied=False),
        chain([(2048, 1024), (1024, 1024)], [10.0, 20.0], [30.0, 5.0]),
    ]
)
loads = st.builds(
    lambda nodes, overlaps, launch_s, batch, accumulation, uneven: Workload(
        cluster(nodes, 2, overlaps=overlaps, launch_s=launch_s),
        "adam",
        "fp32",
        batch,
        accumulation,
        Waits(1.5, 1.2, "a test") if uneven else Waits(),
    ),
    *(st.sampled_from([1, 2]), st.booleans(), st.sampled_from([0.0, 1e-4, 1e-2])),
    *(st.integers(1, 9), st.integers(1, 3), st.booleans()),
)


def assert_same(one: OptionColumns, other: OptionColumns) -> None:
    arrays = set(vars(one)) - {"highest"}
    for name in arrays:
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-12, atol=0.0, err_msg=name)
    for sees in {*one.highest, *other.highest}:
        absent = np.full(len(one), -np.inf)
        np.testing.assert_array_equal(one.highest.get(sees, absent), other.highest.get(sees, absent))


@settings(max_examples=draws(6, 120), deadline=None)
@given(graphs, loads, st.booleans())
def test_columns_are_the_numbers_of_the_options(graph: object, load: Workload, syncs: bool) -> None:
    space = Space(graph)  # type: ignore[arg-type]
    for spanning in space.spanning_offered(load)[:2]:
        for options in space.candidates(load, spanning, syncs).options:
            assert isinstance(options, OptionList)
            assert_same(options.columns, OptionColumns.of(tuple(options), load, syncs))
            assert [options[k].strategies for k in range(len(options))] == [option.strategies for option in options]


@settings(max_examples=draws(6, 120), deadline=None)
@given(graphs, loads, st.integers(0, 10**6))
def test_lists_that_are_cut_and_joined_keep_options_and_columns_together(
    graph: object, load: Workload, seed: int
) -> None:
    random, space = np.random.default_rng(seed), Space(graph)  # type: ignore[arg-type]
    options = max(space.candidates(load, space.spanning_offered(load)[0]).options, key=len)
    assert isinstance(options, OptionList)
    rows = random.permutation(len(options))[:5].tolist()
    some, ambient = options.some(rows), options.around(Ambient(1000, 900, 70))
    joined = OptionList.joined([some, ambient, some])
    expected = [
        *(options[k] for k in rows),
        *(
            replace(o, ambient=Ambient(a.forward + 1000, a.backward + 900, a.gradients + 70))
            for o, a in ((o, o.ambient) for o in options)
        ),
        *(options[k] for k in rows),
    ]
    assert list(joined) == expected
    assert_same(joined.columns, OptionColumns.of(expected, load))


@settings(max_examples=draws(6, 120), deadline=None)
@given(graphs, loads, st.integers(0, 10**6))
def test_a_stage_alone_takes_what_its_terms_add_up_to(graph: object, load: Workload, seed: int) -> None:
    random, space = np.random.default_rng(seed), Space(graph)  # type: ignore[arg-type]
    options = max(space.candidates(load, space.spanning_offered(load)[0]).options, key=len)
    option = options[int(random.integers(len(options)))]
    t = OverlapTerms(*overlap_terms([option], load, option.syncs_each_microbatch)[0])
    each_s = t.first_gather_s + max(t.forward_s, t.last_gather_s) + t.reduce_s
    if t.single:
        each_s += max(t.top_s, t.top_copy_s)
        last_s = 0.0
    else:
        top_s, bottom_s = max(t.top_s, t.top_gather_s, t.top_copy_s), t.bottom_reduce_s + t.bottom_copy_s
        each_s += top_s + max(t.bottom_s, bottom_s)
        last_s = max(0.0, t.bottom_all_reduce_s - max(t.bottom_s, bottom_s))
    total_s = t.inner_s + (load.accumulation * each_s + t.all_reduce_s + last_s if load.cluster.overlaps else 0.0)
    assert total_s == pytest.approx(step_time([option], load).total_s, rel=1e-12)


def test_an_option_out_of_range_is_refused() -> None:
    space = Space(transformer(1, 256))
    load = Workload(cluster(1, 2), "adam", "fp32", 1)
    options = space.candidates(load, space.spanning_offered(load)[0]).options[1]
    with pytest.raises(IndexError):
        options[len(options)]
    assert options[:2] == (options[0], options[1])
