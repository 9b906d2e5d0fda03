"""A new strategy is one file for the planner and one for the runtime: it is planned, verified and trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from parity import BATCH, TOLERANCE, Case, Trained, compare, graph_of, initial, inputs, reference, train
from ranks import run_ranks

import planner.strategies
import runtime.strategies
from osdp.planning.clusters import load_cluster
from osdp.planning.request import Request, plan_model
from osdp.planning.verify import verify
from osdp.zoo import load_model
from planner.analysis.explain import open_plan
from planner.pins import Pin
from planner.strategies import registry
from planner.strategies.spec import SPECS
from runtime.compile_plan import compile_plan
from runtime.observe.collective_log import record_collectives

FOLDER = Path(__file__).resolve().parents[1] / "made_up_strategy"
NAME = "every_second"
CASES = (
    Case("gpt2", {}, NAME, accumulation=2),
    Case("gpt2", {graph_of("gpt2").operators[0].name: "shard"}, NAME, precision="bf16"),
)


def add_strategy() -> None:
    """Put the two files beside those of the packages."""
    planner.strategies.__path__.append(str(FOLDER / "planner"))
    runtime.strategies.__path__.append(str(FOLDER / "runtime"))
    registry.find()


@pytest.fixture
def added() -> Iterator[None]:
    add_strategy()
    yield
    del planner.strategies.__path__[-1], runtime.strategies.__path__[-1], SPECS[NAME]
    for package in ("planner", "runtime"):
        sys.modules.pop(f"{package}.strategies.{NAME}", None)


def test_it_is_planned_and_verified(added: None) -> None:
    machine, source = load_cluster("cpu-gloo", 2, 2), load_model("gpt2-tiny")
    planned = plan_model(source, machine, Request(1 << 40, micro_batch=2, pins=(Pin("*", NAME),)))
    assert set(planned.plan.choices.values()) == {NAME}
    sent = compile_plan(planned.plan, planned.graph, machine).collectives()
    assert {(c.operation, c.ranks, c.stride) for c in sent} == {
        ("all_gather", 2, 2),
        ("reduce_scatter", 2, 2),
        ("all_reduce", 2, 1),
    }
    verified = verify(open_plan(planned.plan, planned.graph, machine), on_gpus=False)
    assert verified.how == "rehearsal"
    assert verified.holds, verified.error


def _trains(rank: int) -> tuple[list[Trained | None], set[tuple[str, tuple[int, ...]]]]:
    """Return what training went through, and among whom a micro-batch communicates."""
    from osdp import OSDP

    add_strategy()
    model = OSDP(initial("gpt2"), Case("gpt2", {}, NAME).plan())
    args, kwargs = inputs(model.module, BATCH)
    with record_collectives() as sent:
        model(*args, **kwargs).backward()
    return [train(rank, case) for case in CASES], {(one.operation, one.ranks) for one in sent}


def test_it_trains_over_every_second_rank() -> None:
    results = run_ranks(_trains, 4, ranks_per_node=2)
    for rank, (_, sent) in enumerate(results):
        shards, replicas = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        expected = {("all_gather", shards), ("reduce_scatter", shards), ("all_reduce", replicas)}
        assert sent == expected
    for case, trained in zip(CASES, results[0][0], strict=True):
        assert trained is not None
        compare(
            trained,
            reference(case.family, case.world_size, case.accumulation, case.precision),
            *TOLERANCE[case.precision],
        )
