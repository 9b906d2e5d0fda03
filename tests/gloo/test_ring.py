"""The ring sums what the backend's reduce-scatter sums, with half the bytes, and trains what one process trains."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from parity import Case, Trained, compare, graph_of, reference, train
from ranks import run_ranks
from thoroughness import some
from torch import Tensor

from profiler.cluster.measurements import RingRule
from profiler.errors import OsdpError
from runtime.strategies.hierarchical import TwoPhaseReduceScatter
from runtime.strategies.ring_reduce_scatter import ring_reduce_scatter
from runtime.torch_compat import reduce_scatter

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
SIZES = (1, 7, 1001)
"""Elements of a chunk."""
GROUPS = ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (0, 2, 3))
"""Of 4 ranks: all, neighbours, strided, irregular."""


def small_integers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank gives: sums of these are exact in bf16 too."""
    return ((torch.arange(size) * (rank + 3) + rank) % 17 - 8).to(dtype)


def reals(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank gives: sums depend on the order of additions."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _exact(rank: int, groups: tuple[tuple[int, ...], ...]) -> int:
    """Compare with the backend and with a sum of integers; return how often."""
    compared = 0
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) < dist.get_world_size() else dist.group.WORLD
        if rank not in ranks:
            continue
        assert group is not None
        mine, n = ranks.index(rank), len(ranks)
        for dtype in (torch.float32, torch.bfloat16):
            for chunk in SIZES:
                full = small_integers(rank, n * chunk, dtype)
                total = sum(small_integers(r, n * chunk, torch.int64) for r in ranks)
                assert isinstance(total, Tensor)
                wanted = total[mine * chunk : (mine + 1) * chunk]
                for op in (SUM, AVG, dist.ReduceOp(AVG)):
                    by_backend, by_ring = torch.empty(2, chunk, dtype=dtype)
                    reduce_scatter(by_backend, full.clone(), op, group)
                    ring_reduce_scatter(by_ring, full.clone(), op, group)
                    exact = wanted if op == SUM else wanted.double() / n
                    torch.testing.assert_close(by_ring, exact.to(dtype), rtol=0, atol=0)
                    torch.testing.assert_close(by_ring, by_backend)
                    compared += 1
    return compared


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_of_a_world(world_size: int) -> None:
    assert run_ranks(_exact, world_size, (tuple(range(world_size)),)) == [18] * world_size


def test_groups_of_any_ranks() -> None:
    assert run_ranks(_exact, 4, GROUPS) == [18 * sum(rank in ranks for ranks in GROUPS) for rank in range(4)]


def _in_order(rank: int, world_size: int) -> None:
    """Compare with additions in the order that the module states, bit by bit."""
    for dtype in (torch.float32, torch.bfloat16):
        size = 5 * world_size
        given = [reals(r, size, dtype).view(world_size, 5) for r in range(world_size)]
        wanted = given[(rank + 1) % world_size][rank].clone()
        for hop in range(2, world_size + 1):
            wanted = wanted + given[(rank + hop) % world_size][rank]
        full, output = given[rank].clone().view(-1), torch.empty(5, dtype=dtype)
        ring_reduce_scatter(output, full, SUM, dist.group.WORLD)  # type: ignore[arg-type]
        assert torch.equal(output, wanted)
        kept = [c for c in range(world_size) if c != (rank - 1) % world_size]
        assert torch.equal(full.view(world_size, 5)[kept], given[rank][kept])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_order_of_additions_and_what_is_overwritten(world_size: int) -> None:
    run_ranks(_in_order, world_size, world_size)


def _one_after_another(rank: int) -> None:
    """Reduce in two groups in turn, while ranks are early and late in turn; nothing is waited for in between."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    outputs = []
    for turn in range(24):
        if turn % 4 == rank:
            time.sleep(0.01)
        chunk = 1 + 37 * (turn % 5)
        group, ranks = (dist.group.WORLD, range(4)) if turn % 3 else (pairs[rank % 2], range(rank % 2, 4, 2))
        output = torch.empty(chunk)
        full = small_integers(rank + 7 * turn, len(ranks) * chunk, torch.float32)
        ring_reduce_scatter(output, full, SUM, group)  # type: ignore[arg-type]
        outputs.append((turn, ranks, chunk, output))
    for turn, ranks, chunk, output in outputs:
        start = ranks.index(rank) * chunk
        given = [small_integers(r + 7 * turn, len(ranks) * chunk, torch.float32) for r in ranks]
        assert torch.equal(output, torch.stack(given).sum(0)[start : start + chunk])


def test_calls_without_a_barrier_in_between() -> None:
    run_ranks(_one_after_another, 4)


def _bytes_sent(rank: int, world_size: int) -> tuple[Counter[str], int]:
    """Return how often what was called, and the bytes that this rank sent."""
    from runtime.observe.collective_log import record_collectives

    output = torch.empty(1000)
    with record_collectives() as recorded:
        ring_reduce_scatter(output, torch.ones(world_size * 1000), AVG, dist.group.WORLD)  # type: ignore[arg-type]
    assert torch.equal(output, torch.ones(1000))
    return Counter(one.operation for one in recorded), sum(
        one.size_bytes for one in recorded if one.operation == "send"
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_sent(world_size: int) -> None:
    steps = world_size - 1
    for kinds, sent_bytes in run_ranks(_bytes_sent, world_size, world_size):
        assert kinds == Counter({"send": steps, "recv": steps})
        assert sent_bytes == 4 * 1000 * world_size * steps / world_size


def _refused(rank: int) -> str:
    with pytest.raises(OsdpError) as caught:
        ring_reduce_scatter(torch.empty(1), torch.ones(2), dist.ReduceOp.MAX, dist.group.WORLD)  # type: ignore[arg-type]
    return str(caught.value)


def test_other_operations_are_refused() -> None:
    assert all("SUM or AVG" in message for message in run_ranks(_refused, 2))


def _two_phases(rank: int) -> None:
    """Compare two phases in rings with a sum; 2 nodes of 3 ranks, and a node or ranks that stand alone."""
    from runtime.meshes import Meshes

    for nodes, ranks_per_node in ((2, 3), (1, 6), (6, 1)):
        reduce = TwoPhaseReduceScatter(Meshes("cpu", nodes, ranks_per_node), nodes, ranks_per_node, (True, True))
        for op, divisor in ((SUM, 1), (AVG, 6)):
            output = torch.empty(5)
            reduce(output, small_integers(rank, 30, torch.float32), dist.group.WORLD, op)  # type: ignore[arg-type]
            total = torch.stack([small_integers(r, 30, torch.float32) for r in range(6)]).sum(0)
            torch.testing.assert_close(output, total[5 * rank : 5 * rank + 5] / divisor)


def test_two_phases_in_rings() -> None:
    run_ranks(_two_phases, 6, ranks_per_node=3)


def _train_in_rings(rank: int, cases: list[Case]) -> list[tuple[Trained | None, set[tuple[str, int, int]]]]:
    """Train; return also what was called, in groups of how many ranks, how far apart."""
    from runtime.observe.collective_log import record_collectives

    results = []
    for case in cases:
        with record_collectives() as recorded:
            trained = train(rank, case)
        results.append((trained, {(one.operation, len(one.ranks), one.ranks[1] - one.ranks[0]) for one in recorded}))
    return results


def check(given: list[tuple[Case, set[tuple[int, int]]]], rtol: float, atol: float) -> None:
    """Compare losses, norms and parameters with one process, and the (ranks, stride) of rings with those given."""
    cases = [case for case, _ in given]
    by_rank = run_ranks(_train_in_rings, 4, cases, ranks_per_node=2, timeout_s=60 + 10 * len(cases))
    for results in by_rank:
        for (_, calls), (_, rings) in zip(results, given, strict=True):
            assert not any(kind == "reduce_scatter" for kind, _, _ in calls)
            assert {(ranks, stride) for kind, ranks, stride in calls if kind == "send"} == rings
    for case, (trained, _) in zip(cases, by_rank[0], strict=True):
        assert trained is not None
        compare(trained, reference(case.family, case.world_size, case.accumulation, case.precision), rtol, atol)


RINGS = {"shard": {(4, 1)}, "group_shard:2": {(2, 1)}, "hierarchical": {(2, 1), (2, 2)}}
"""(ranks, stride): over all ranks, on a mesh of 2 x 2, inside nodes and across."""
EVERYWHERE = tuple(RingRule(ranks, stride, 0.0) for ranks, stride in ((4, 1), (2, 1), (2, 2)))


@pytest.mark.parametrize("family", some(["gpt2", "uneven"], 2))
def test_training_in_rings_is_training_in_one_process(family: str) -> None:
    """Over all ranks, and in two phases, of which the first is in groups; all of them with --thorough."""
    names = some(list(RINGS), 2)
    cases = [(Case(family, {}, name, accumulation=2, ring=EVERYWHERE), RINGS[name]) for name in names]
    check(cases, 1e-5, 2e-6)


def test_training_in_rings_in_bf16() -> None:
    """Those of a group of ranks; all of them with --thorough."""
    names = some(list(RINGS), 3, 1)
    cases = [(Case("gpt2", {}, name, precision="bf16", ring=EVERYWHERE), RINGS[name]) for name in names]
    check(cases, 2e-3, 2e-4)


def _kinds(rank: int, case: Case) -> Counter[str]:
    from runtime.observe.collective_log import record_collectives

    with record_collectives() as recorded:
        train(rank, case, steps=1)
    return Counter(one.operation for one in recorded if one.operation in ("send", "reduce_scatter"))


def test_a_ring_begins_at_the_size_that_the_plan_says() -> None:
    graph = graph_of("gpt2")
    blocks = [sum(o.numel for o in graph.operators if o.block == b) for b in range(len(graph.blocks))]
    # Blocks are alike, and larger than every other unit.
    assert len(set(blocks)) == 1
    assert all(operator.block is not None or operator.numel < blocks[0] for operator in graph.operators)
    case = Case("gpt2", {}, ring=(RingRule(4, 1, 4.0 * blocks[0]), RingRule(2, 1, 0.0)))
    for kinds in run_ranks(_kinds, 4, case, ranks_per_node=2):
        assert kinds["send"] == 3 * len(blocks)
        assert kinds["reduce_scatter"] > 0
