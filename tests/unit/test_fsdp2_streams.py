"""The closed form of a step's time against a replay of FSDP2's streams, on presets."""

from __future__ import annotations

from functools import cache
from itertools import groupby

import pytest
from fsdp2_streams import Unit, replay_s
from thoroughness import some

from osdp.planning.clusters import load_cluster
from osdp.planning.zoo_graphs import zoo_graph
from osdp.zoo import load_model
from planner.collectives import collective_s
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.model.fsdp_units import join
from planner.options.search_space import Space
from planner.search.baselines import uniform
from planner.strategies.notation import parse_strategy
from profiler.model_graph import Recompute
from profiler.trace.trace import trace_model

PRESETS = ("h100-8", "h100-4x8", "a100-80g-8", "a100-2x8", "titan-rtx-8", "rtx4090-2")
GRAPHS = [(model, precision) for model in ("llama-1b", "gpt2-1.5b", "bert-large") for precision in ("fp32", "bf16")]
CASES = [
    (*graph, cluster, strategy, micro_batch, accumulation)
    for graph in some(GRAPHS, 3, 1)
    for cluster in PRESETS
    for strategy in ("shard", "shard_grad", "group_shard:8", "group_shard:4", "replicate")
    for micro_batch, accumulation in ((1, 1), (2, 1), (4, 1), (16, 1), (1, 4))
    if (graph[1], cluster) != ("bf16", "titan-rtx-8") and ("x8" in cluster or "group" not in strategy)
]


@cache
def space_of(model: str, precision: str) -> Space:
    """Of the graph that comes with OSDP, unless it is out of date."""
    return Space(zoo_graph(model, None, precision) or trace_model(load_model(model), precision, "cuda"))


def times(
    model: str, precision: str, cluster_name: str, strategy_name: str, micro_batch: int, accumulation: int
) -> tuple[float, float]:
    """Return the seconds of a step by the closed form and by the replay, one strategy everywhere."""
    space, cluster = space_of(model, precision), load_cluster(cluster_name)
    load = Workload(cluster, "adam", precision, micro_batch, accumulation)
    strategy = parse_strategy(strategy_name, cluster)
    options = uniform(space, load, strategy, recompute=Recompute.NOTHING)
    closed, memory = step_time(options, load), cluster.device.memory_bytes_per_s.value
    runs = []
    for stage, option in zip(space.model.stages, options, strict=True):
        joined = join(space.graph, stage.operators, ((one,) for one in option.strategies), space.model.slices)
        unit_of = {operator: unit.operators for unit in joined for operator in unit.operators}
        called = groupby(unit_of.get(call.operator, (call.operator,)) for call in stage.calls)
        runs += [(operators, segment) for (operators, _), segment in zip(called, option.segments, strict=True)]
    group, bf16, units = strategy.group, precision == "bf16", []
    for index, (operators, segment) in enumerate(runs):
        numel = sum(p.numel for operator in operators for p in space.graph.operators[operator].parameters)
        computed, reduced = numel * (2 if bf16 else 4), 4 * numel
        gather = collective_s("all_gather", computed, cluster, group)
        # A tied operator is gathered at its first call, again at its last in backward, and reduced at its first.
        opens = operators not in [others for others, _ in runs[:index]]
        again = operators not in [others for others, _ in runs[index + 1 :]] and not strategy.keeps_unsharded
        copy_out = ((reduced if group == 1 else computed) + computed) / memory
        # In a group of one rank: shards in whole from the host, on the compute stream, and gradients back on that of
        # reductions.
        host_s = 4 * numel / cluster.host.link_bytes_per_s.value if strategy.offload and cluster.host else 0.0
        assert not (strategy.offload and group > 1), "copied on another stream, which is not replayed"
        across = collective_s("all_reduce", reduced / group, cluster, cluster.world_size // group, group)
        units.append(
            Unit(
                segment.forward_s,
                segment.backward_s,
                gather if opens else 0.0,
                gather if again else None,
                collective_s("reduce_scatter", reduced, cluster, group) + host_s if opens else 0.0,
                across if opens else 0.0,
                (2 * computed + (reduced + computed if bf16 else 0)) / group / memory if group > 1 else 0.0,
                copy_out if opens else 0.0,
                copy_out,
                (computed + reduced) / memory if opens else 0.0,
                host_s if opens else 0.0,
                host_s,
            )
        )
    return closed.total_s, replay_s(units, accumulation) + closed.optimizer_s


def test_the_closed_form_is_near_the_replay() -> None:
    off = [closed_s / replayed_s - 1 for closed_s, replayed_s in (times(*case) for case in CASES)]
    assert min(off) > -0.008
    assert max(off) < 0.025
    assert sum(map(abs, off)) / len(off) < 0.005


@pytest.mark.parametrize("micro_batch", [1, 4, 16, 64])
def test_offloaded_copies_of_one_rank_hide_under_nothing(micro_batch: int) -> None:
    """Where they were priced as hidden under computation, the step was up to 7 % too short."""
    closed_s, replayed_s = times("bert-large", "fp32", "h200-1", "replicate+offload", micro_batch, 1)
    assert abs(closed_s / replayed_s - 1) < 0.001


def test_an_all_reduce_between_nodes_is_hidden() -> None:
    # It was up to 53 % too slow when backward waited for the all-reduce.
    for micro_batch, accumulation in ((1, 1), (2, 1), (8, 1), (1, 4)):
        closed_s, replayed_s = times("gpt2-1.5b", "bf16", "h100-4x8", "group_shard:8", micro_batch, accumulation)
        assert abs(closed_s / replayed_s - 1) < 0.016


def test_a_replay_by_hand() -> None:
    one = Unit(forward=4, backward=8, gather=3, gather_again=3, scatter=5, copy_out=1, copy_out_again=1, chunk_cat=2)
    two = Unit(2, 6, gather=7, gather_again=1, scatter=9, all_reduce=20, copy_out=1, copy_out_again=1, chunk_cat=2)
    # Forward: gathers until 3 and 10, copies and forwards until 8 and 13.  The gather of the backward is free to begin
    # at 11, when the copy of the second unit is over.
    # Backward: copy 14, gather of the first unit 14 to 17, backward until 20, copy until 22, reduce-scatter until 31
    # and all-reduce until 51.  The first unit: copy 23, backward 31, its copy 33, reduce-scatter 38.
    assert replay_s([one, two]) == 51
    # Two micro-batches: the first has no all-reduce, and ends at 38.
    assert replay_s([one, two], 2) == 38 + 51


def test_forward_gathers_two_ahead() -> None:
    quick, large = Unit(1, 0, gather=1), Unit(1, 0, gather=9)
    # Gathers end at 1, 2, 3 and 12: the last begins when the copy before the second forward is over, at 2 or 3.
    assert replay_s([quick, quick, quick, large]) == 13
