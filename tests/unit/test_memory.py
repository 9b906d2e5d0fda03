"""Peak memory of a step, phase by phase, as arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import MB, chain, cluster, transformer

from planner.cost.peak_memory import peak_memory
from planner.cost.stage_costs import StageFrame
from planner.cost.stage_memory import Moment
from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.search_space import Space
from planner.pricing import fixed
from planner.strategies.spec import Strategy
from profiler.cluster.figure import Figure
from profiler.model_graph import ModelGraph, Recompute

# Two operators of 8 MB each in fp32 (2 M parameters), 8 ranks: a shard is 1 MB.
SIZE, SHARD = 8 * MB, 1 * MB
STEP = 512  # Adam's step counter
GRAPH = chain([(2048, 1024), (2048, 1024)], gflops=[1, 1], saved_mb=[20, 30])
# Of `synthetic.call`: output 1 MB, forward peak = saved + 1 MB, backward peak = saved + 2 MB.


def plan(
    *strategies: Strategy, batch: int = 1, accumulation: int = 1, precision: str = "fp32", optimizer: str = "adam"
) -> tuple[tuple[StageCandidate, ...], Workload]:
    load = Workload(cluster(1, 8), optimizer, precision, batch, accumulation)
    space = Space(GRAPH)
    return fixed(space, load, tuple(StageDecision((s,)) for s in strategies), None), load


SHARDED = Strategy("shard", 8)
KEPT = Strategy("shard_grad", 8)
COPIED = Strategy("replicate", 1)


def test_fully_sharded_peak_is_the_upper_operators_backward() -> None:
    options, load = plan(SHARDED, SHARDED)
    peak = peak_memory(options, load)
    # At rest: parameters and two moments of both operators, and two step counters.
    rest = 2 * (3 * SHARD + STEP)
    # Backward of operator 1: what operator 0 saved, its own backward peak (30 + 2 MB), its unsharded
    # parameters, and the prefetched all-gather of operator 0; no reduction is under way.
    assert peak.total_bytes == rest + 20 * MB + 32 * MB + SIZE + SIZE
    assert (peak.phase, peak.operator) == ("backward", 1)
    assert peak.categories["activations"] == 52 * MB
    assert peak.categories["communication_buffers"] == SIZE
    assert peak.categories["unsharded_parameters"] == SIZE


def test_every_moment_of_the_lower_operator() -> None:
    options, _load = plan(SHARDED, SHARDED)
    low = options[0]
    by_phase = {(m.phase, m.neighbours.above, m.neighbours.below): m for m in low.moments}
    # Forward: its own all-gather output and unsharded parameters; the call's peak is 20 + 1 MB.
    forward = max((m for m in low.moments if m.phase == "forward"), key=lambda m: m.total_bytes)
    assert forward.total_bytes == SIZE + SIZE + 21 * MB
    # Backward: unsharded parameters, backward peak 22 MB; the reduce-scatter input of operator 1 (above).
    assert by_phase["backward", True, True].total_bytes == SIZE + 22 * MB
    # Nothing goes into it that needs a gradient, so it is reduced when all backward is over: its own
    # reduce-scatter input, its gradients before they are scattered, and the output.
    assert by_phase["reduce", False, False].total_bytes == SIZE + SIZE + SHARD
    assert options[1].reduce_input == SIZE


def test_kept_parameters_count_until_their_backward() -> None:
    options, load = plan(KEPT, SHARDED)
    rest = 2 * (3 * SHARD + STEP)
    # Backward of operator 1 holds both unsharded (16 MB) and no prefetch: 52 + 16 MB.  Its forward holds
    # both, and its own all-gather output until something else is gathered: 20 + 31 + 24 MB, which is more.
    peak = peak_memory(options, load)
    assert peak.total_bytes == rest + (20 + 31) * MB + 3 * SIZE
    assert peak.phase == "forward"
    assert options[0].kept == SIZE
    assert options[0].prefetched == 0


def test_replicated_operators_rest_whole() -> None:
    options, load = plan(COPIED, COPIED)
    rest = 2 * (3 * SIZE + STEP)
    # No gather buffers at all, but the unsharded copy that FSDP2's unshard makes.
    assert peak_memory(options, load).total_bytes == rest + (20 + 32) * MB + SIZE


def test_gradient_accumulation_keeps_all_sharded_gradients() -> None:
    once, load = plan(SHARDED, SHARDED)
    often, loads = plan(SHARDED, SHARDED, accumulation=4)
    # From the second micro-batch on the sharded gradients of both operators rest.
    assert peak_memory(often, loads).total_bytes == peak_memory(once, load).total_bytes + 2 * SHARD


def test_the_optimizer_step_can_be_the_peak() -> None:
    graph = chain([(2048, 1024)] * 3, gflops=[1] * 3, saved_mb=[1] * 3)
    load = Workload(cluster(1, 8), "adam", "fp32", 1)
    options = fixed(Space(graph), load, (StageDecision((COPIED,)),) * 3, None)
    peak = peak_memory(options, load)
    # Parameters, gradients, two moments and foreach Adam's temporary: five times 8 MB, for each operator.
    # The last reduction holds less: 9 x 8 MB at rest, two gradients, and input, gradient and output.
    assert peak.phase == "optimizer"
    assert peak.total_bytes == 3 * (5 * SIZE + STEP)


def test_bf16_halves_what_is_gathered_but_not_what_rests() -> None:
    options, _load = plan(SHARDED, SHARDED, precision="bf16")
    assert options[0].prefetched == SIZE // 2
    assert options[0].parameters == SHARD
    # Gradients are reduced in fp32.  The bottom's wait for the end of backward, and leave no one a buffer.
    assert (options[1].reduce_input, options[0].reduce_input) == (SIZE, 0)


def test_sgd_has_no_moments() -> None:
    options, _ = plan(SHARDED, SHARDED, optimizer="sgd")
    assert options[0].rest == SHARD


def test_recomputation_keeps_the_input_and_runs_forward_again() -> None:
    graph = transformer(layers=3, hidden=256)
    space = Space(graph)
    load = Workload(cluster(1, 8), "adam", "fp32", 2)
    block = next(stage for stage in space.model.stages if stage.block == 0)
    kind = space.stage_classes[space.model.stages.index(block)]
    choice = (SHARDED,) * len(block.operators)
    plain = space.option(kind, StageDecision(choice), SHARDED, load)
    again = space.option(kind, StageDecision(choice, recompute=Recompute.EVERYTHING), SHARDED, load)
    unit = 4 * 1024 * 256  # 1 MB per sample: tokens x hidden x 4 bytes
    assert plain.saved == 2 * 16 * unit
    assert again.saved == 2 * unit
    assert {m.phase for m in again.moments} > {"recompute"}
    forward_s = sum(segment.forward_s for segment in plain.segments)
    assert again.segments[-1].backward_s == pytest.approx(plain.segments[-1].backward_s + forward_s)


def test_tied_embedding_is_open_all_the_way() -> None:
    graph = transformer(layers=3, hidden=256, vocabulary=4096, tied=True)
    space = Space(graph)
    load = Workload(cluster(1, 8), "adam", "fp32", 1)
    table = 4 * 4096 * 256
    choices = tuple(StageDecision((SHARDED,) * len(s.operators)) for s in space.model.stages)
    options = fixed(space, load, choices, SHARDED)
    middle = options[2]
    assert space.model.spans == {0: (0, len(options) - 1)}
    # In every block: the unsharded table, and in backward its gradient of the head's use.
    assert middle.ambient == (table, table, table)
    # It rests once, with the first stage.
    assert options[0].parameters == table // 8
    assert options[-1].parameters == 4 * 256 // 8 + (512 - 128)  # the norm alone, rounded to 512


def test_gradients_that_wait_are_rounded_one_by_one() -> None:
    model, load = Space(transformer(layers=1, hidden=100, tied=False)).model, Workload(cluster(1, 8), "adam", "bf16", 1)
    index, block = next((index, stage) for index, stage in enumerate(model.stages) if stage.block is not None)
    held = StageFrame(model, index, load).full_gradients
    # In bf16 norms have 200 bytes each; 60,000 of the projection -> 118 x 512; 20,000 -> 40 x 512; 80,000 -> 157 x 512.
    expected = {"norm1": 512, "qkv": 60_416, "out": 20_480, "norm2": 512, "up": 80_384, "down": 80_384}
    names = {o: model.graph.operators[o].name.rpartition(".")[2] for o in block.operators}
    assert {names[operator]: size for operator, size in held.items()} == expected


def test_reserve_is_added_openly() -> None:
    options, load = plan(SHARDED, SHARDED)
    device = replace(load.cluster.device, reserve_bytes={"context": Figure(300.0 * MB, "assumed: test")})
    reserved = Workload(replace(load.cluster, device=device), "adam", "fp32", 1)
    with_reserve, without = peak_memory(options, reserved), peak_memory(options, load)
    assert with_reserve.categories["reserve"] == 300 * MB
    assert with_reserve.total_bytes == without.total_bytes + 300 * MB


def test_a_secondary_copy_is_kept_until_backward() -> None:
    copied = Strategy("secondary_shard", 8, secondary=4)
    options, load = plan(copied, copied)
    # A quarter of 8 MB each; gathered once more in backward, and not needed beside what was gathered then.
    assert [option.kept for option in options] == [2 * MB, 2 * MB]
    assert options[0].prefetched == SIZE
    rest = 2 * (3 * SHARD + STEP)
    # As operator 1 is gathered for its backward, of whose 32 MB all are there but its input's gradient (1 MB), the
    # gathered parameters are copied out while both copies are alive.
    gathering = 20 * MB + 31 * MB + SIZE + SIZE + 2 * (2 * MB)
    # When it computes, its own copy has gone, and operator 0 is gathered.
    computing = 20 * MB + 32 * MB + SIZE + SIZE + 2 * MB
    # As much is there when its forward has ended, 30 MB saved and an output of 1 MB: its copy is made of what was
    # gathered.
    copying = 20 * MB + 31 * MB + SIZE + SIZE + 2 * (2 * MB)
    peak = peak_memory(options, load)
    assert peak.total_bytes == rest + max(gathering, computing) == rest + gathering == rest + copying
    assert (peak.phase, peak.operator) == ("forward", 1)
    assert peak.categories["unsharded_parameters"] == SIZE + 2 * (2 * MB)


def test_nothing_rests_of_what_is_offloaded() -> None:
    offloaded = replace(SHARDED, offload=True)
    options, load = plan(offloaded, offloaded, batch=2)
    assert [(option.rest, option.gradients) for option in options] == [(0, 0), (0, 0)]
    # Backward of operator 1: as when it rests on the device, less that.
    assert peak_memory(options, load).total_bytes == 2 * 52 * MB + SIZE + SIZE


def test_offloaded_shards_pass_the_device_while_they_are_gathered() -> None:
    halved = Strategy("shard", 2, offload=True)
    load = Workload(cluster(1, 2), "adam", "fp32", 1)
    options = fixed(Space(GRAPH), load, (StageDecision((halved,)), StageDecision((halved,))), None)
    # Half of operator 0, 4 MB, is on the device as it is gathered before the backward of operator 1 makes a
    # gradient; 52 MB and no such copy come after.
    peak = peak_memory(options, load)
    assert peak.total_bytes == max(51 * MB + SIZE + SIZE + SIZE // 2, 52 * MB + SIZE + SIZE)
    assert peak.categories["communication_buffers"] == SIZE + SIZE // 2


def test_the_fullest_rank_of_owned_operators() -> None:
    owner = Strategy("owner", 8)
    options, load = plan(owner, owner)
    # Rank 0 owns operator 0, rank 1 operator 1.  Either holds its own three times and both step counters, and
    # in the backward of operator 1 one broadcast buffer.
    rest = 3 * SIZE + 2 * STEP
    # At the reduction of operator 0 rank 0 also has its parameters, its gradient, and that on its way; then
    # parameters and gradient have gone, and the reduced one is there.
    last = rest + SIZE + SIZE + SIZE
    backward = rest + 20 * MB + 32 * MB + SIZE
    assert peak_memory(options, load).total_bytes == max(last, backward)
    assert sorted(option.parameters for option in options) == [0, SIZE]
    # Time is the same on all ranks, and nothing hides it.
    assert all(segment.forward_gather_s == 0 for option in options for segment in option.segments)
    # The owner reads what rests and writes what it sends, or its gradient, at 600 GB/s.
    sent_s = 7 * 20e-6 + SIZE / 10e9 + 2 * SIZE / 600e9
    assert options[0].segments[0].forward_stall_s == pytest.approx(sent_s)
    assert options[0].segments[0].backward_stall_s == pytest.approx(2 * sent_s)


def test_with_more_owners_than_ranks_the_fullest_owns_several() -> None:
    owner = Strategy("owner", 2)
    graph = chain([(2048, 1024)] * 3, gflops=[1] * 3, saved_mb=[1] * 3)
    load = Workload(cluster(1, 2), "adam", "fp32", 1)
    options = fixed(Space(graph), load, (StageDecision((owner,)),) * 3, None)
    assert [option.parameters for option in options] == [SIZE, 0, SIZE]


def spanned_twice() -> ModelGraph:
    """Operators 0 and 1 run again after operator 2: both are open while it runs."""
    graph = chain([(2048, 1024)] * 3, gflops=[1] * 3, saved_mb=[1] * 3)
    calls = (*graph.calls, graph.calls[0], graph.calls[1])
    return replace(graph, calls=calls)


def test_spanning_operators_may_differ() -> None:
    space = Space(spanned_twice())
    load = Workload(cluster(1, 8), "adam", "fp32", 1)
    choices = tuple(StageDecision((SHARDED,) * len(stage.operators)) for stage in space.model.stages)
    assert space.model.spanning == (0, 1)
    mixed = fixed(space, load, choices, (SHARDED, COPIED))
    rested = sum(option.parameters for option in mixed)
    assert rested == SHARD + SIZE + SHARD
    assert fixed(space, load, choices, (SHARDED, SHARDED)) == fixed(space, load, choices, SHARDED)
    # Kept or not, both are unsharded while operator 2 runs.
    (here,) = [index for index, stage in enumerate(space.model.stages) if 2 in stage.operators]
    around = mixed[here].ambient.backward + max(m.unsharded for m in mixed[here].moments)
    assert around == 3 * SIZE


def test_what_operators_that_are_never_called_take_is_counted() -> None:
    graph = replace(GRAPH, calls=GRAPH.calls[:1])
    space, load = Space(graph), Workload(cluster(1, 8), "adam", "fp32", 1)
    choices = (StageDecision((SHARDED,)),)
    assert space.model.idle == (1,)
    assert fixed(space, load, choices, None) == fixed(space, load, choices, None, (SHARDED,))
    kept = {
        str(strategy): fixed(space, load, choices, None, (strategy,))[0].parameters
        for strategy in (SHARDED, COPIED, Strategy("owner", 8), replace(SHARDED, offload=True))
    }
    assert kept == {"shard": 2 * SHARD, "replicate": SHARD + SIZE, "owner": SHARD + SIZE, "shard+offload": SHARD}


def moments_of_a_block(strategies: tuple[Strategy, ...], recompute: Recompute) -> dict[int, list[Moment]]:
    """Return those of the first block of `transformer(3, 256)` by operator: norm1, qkv, out, norm2, up and down."""
    space = Space(transformer(layers=3, hidden=256))
    stage = next(index for index, stage in enumerate(space.model.stages) if stage.block == 0)
    load = Workload(cluster(1, 8), "adam", "fp32", 1)
    found: dict[int, list[Moment]] = {}
    for moment in space.option(space.stage_classes[stage], StageDecision(strategies, recompute), SHARDED, load).moments:
        if moment.phase != "forward":
            found.setdefault(moment.operator - 1, []).append(moment)
    return found


# norm1, qkv, out and norm2 as one unit; up and down have as many parameters each.
LOWER, UP = 4 * (256 + 3 * 256 * 256 + 256 * 256 + 256), 4 * 4 * 256 * 256


def test_what_lies_below_an_owner_has_been_gathered() -> None:
    found = moments_of_a_block((SHARDED,) * 4 + (Strategy("owner", 8), SHARDED), recompute=Recompute.NOTHING)
    # Before it, the backward of down has prefetched the lower unit, past up, and left its reduce-scatter input.
    (up,) = found[4]
    assert (up.buffers, up.unsharded, up.gradients) == (LOWER + UP, UP, UP // 8)
    # Saved below it 1 + 4 + 1 + 1 MB, and 5 + 2 in its own backward.
    assert up.activations == 14 * MB


def test_a_block_that_runs_again_unit_by_unit() -> None:
    secondary = Strategy("secondary_shard", 8, secondary=4)
    found = moments_of_a_block((SHARDED,) * 4 + (secondary, secondary), recompute=Recompute.EVERYTHING)
    # At the end both units are there, no copy and nothing on its way: the gradient of the block's output, 1 + 4 + 1 +
    # 1 + 5 MB saved below down, of which the first is the block's input, and 4 + 1 in its forward.
    (down,) = found[5]
    assert (down.phase, down.unsharded, down.buffers) == ("recompute", LOWER + 2 * UP, 0)
    assert down.activations == (1 + 12 + 5) * MB
    # Its gradients are reduced while the lower unit stays: 7 MB saved below, and the gradient of up's input.
    (reduction,) = found[4]
    assert (reduction.phase, reduction.unsharded, reduction.buffers) == ("reduce", LOWER, 2 * UP)
    assert (reduction.gradients, reduction.activations) == (2 * UP, 8 * MB)
