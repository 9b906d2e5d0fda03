"""A ring under a fake process group and on fake tensors: it allocates nothing, so that one step stands for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rehearsals import Case, graph_of, source
from synthetic import cluster
from thoroughness import THOROUGH
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from profiler.cluster.measurements import RingRule
from profiler.trace.metered_pass import find_loss
from runtime.compile_plan import compile_plan
from runtime.observe.collective_log import record_collectives
from runtime.observe.dry_run import DryRun, Script, dry_run
from runtime.observe.live_bytes import LiveBytes
from runtime.strategies.ring_reduce_scatter import ring_reduce_scatter


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_nothing_is_allocated(world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world_size)
    try:
        with FakeTensorMode(), LiveBytes() as live:
            full, output = torch.empty(world_size * 1024), torch.empty(1024)
            with record_collectives() as recorded:
                ring_reduce_scatter(output, full, dist.ReduceOp.AVG, dist.group.WORLD)  # type: ignore[arg-type]
            assert live.peak_bytes == live.total_bytes == (world_size + 1) * 4096
            assert sum(one.size_bytes for one in recorded if one.operation == "send") == (world_size - 1) * 4096
    finally:
        dist.destroy_process_group()


def run_dry(case: Case, in_rings: bool) -> DryRun:
    """Run a case dry, with all reduce-scatters in rings or by the backend; with data unless thorough."""
    graph = graph_of(case.family, case.vocabulary, case.length, case.precision)
    model = source(case.family, case.vocabulary, case.length)
    script = Script(model.build, model.example_inputs, lambda out: find_loss(out)[0], case.optimizer, case.micro_batch)
    ranks = case.shape[0] * case.shape[1]
    rules = tuple(RingRule(n, 1, 0.0) for n in range(2, ranks + 1)) if in_rings else ()
    schedule = compile_plan(case.plan(), graph, replace(cluster(*case.shape), ring=rules))
    return dry_run(script, schedule, with_data=not THOROUGH)


@pytest.mark.parametrize(
    "case",
    [
        Case("shard", shape=(1, 3), length=32),
        Case("shard", shape=(1, 4), length=32, precision="bf16", accumulation=2),
        Case("group_shard:4", shape=(2, 4), length=32),
    ],
    ids=str,
)
def test_a_dry_run_in_rings_holds_what_one_by_the_backend_holds(case: Case) -> None:
    with record_collectives() as recorded:
        found = run_dry(case, in_rings=True)
    assert any(one.operation == "send" for one in recorded)
    assert not any(one.operation == "reduce_scatter" for one in recorded)
    assert found == run_dry(case, in_rings=False)


def test_a_thousand_ranks_take_one_step() -> None:
    case = Case("shard", shape=(128, 8), length=32)
    with record_collectives() as by_backend:
        wanted = run_dry(case, in_rings=False)
    with record_collectives() as by_rings:
        assert run_dry(case, in_rings=True) == wanted
    reduced_bytes = [one.size_bytes for one in by_backend if one.operation == "reduce_scatter"]
    sent_bytes = [one.size_bytes for one in by_rings if one.operation == "send"]
    assert sent_bytes == [size_bytes // 1024 for size_bytes in reduced_bytes] != []
