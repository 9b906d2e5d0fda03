"""Ranks that cannot have windows train the same by collectives, and are told so once."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from parity import TOLERANCE, Case, compare, graph_of, reference, train
from ranks import run_ranks
from toys import Blocks, batch_of, loss_of, plan_of, seeded

from runtime.odc import shared_memory

CASES = (
    Case("gpt2", {}, "odc:4", nodes=1, ranks_per_node=4),
    Case("gpt2", {}, "odc_ordered:2", accumulation=2),
    Case("gpt2", {graph_of("gpt2").operators[0].name: "shard"}, "odc:2", precision="bf16"),
)


def lacks_memory(rank: int) -> None:
    """Let the last rank have no shared memory."""
    if rank == 3:
        shared_memory._shared_place = lambda: ((), "has no /dev/shm that it may write to")


def _trains(rank: int) -> list[tuple[str, ...]]:
    """Train all cases; compare with a single process, and return the warnings of each."""
    lacks_memory(rank)
    told = []
    for case in CASES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train(rank, case)
        told.append(tuple(str(one.message) for one in caught if "micro-batches" in str(one.message)))
        if result is not None:
            wanted = reference(case.family, case.world_size, case.accumulation, case.precision)
            compare(result, wanted, *TOLERANCE[case.precision])
    return told


def test_collectives_in_place_of_windows_train_the_same() -> None:
    told, *others = run_ranks(_trains, 4, ranks_per_node=2)
    assert others == [[(), (), ()]] * 3
    assert [len(warned) for warned in told] == [1, 1, 1]
    reason = "because rank 3 has no /dev/shm that it may write to. Results are the same, but all ranks must run equally"
    for (warned,), words in zip(
        told, ("odc:4 runs as shard", "odc_ordered:2 runs as group_shard:2", "odc:2 runs as group_shard:2"), strict=True
    ):
        assert warned.startswith(f"{words}, {reason}")


def _schedules(rank: int, choice: str, other: str) -> bool:
    """Return whether a model falls back to just what a plan with the other strategy does."""
    from osdp import OSDP

    lacks_memory(rank)
    build = partial(Blocks, frozen=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = OSDP(seeded(build), plan_of(build(), choice, ranks=(2, 2)))
    planned = OSDP(seeded(build), plan_of(build(), other, ranks=(2, 2)))
    assert not model.sharded.finishes_in_optimizer_step
    args, kwargs = batch_of(build(), rank)
    for one in (model, planned):
        loss_of(one(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
        one.clip_grad_norm_(0.1)
        torch.optim.SGD(one.parameters(), lr=0.5).step()
    torch.testing.assert_close(model.full_state_dict(False), planned.full_state_dict(False), rtol=0, atol=0)
    return model.schedule == planned.schedule


def test_the_schedule_is_that_of_the_other_strategy() -> None:
    assert run_ranks(_schedules, 4, "odc:2", "group_shard:2", ranks_per_node=2) == [True] * 4


def _in_one_node(rank: int) -> None:
    from osdp import OSDP

    lacks_memory(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = OSDP(seeded(Blocks), plan_of(Blocks(), "odc:4+offload", ranks=(1, 4)))
    assert {str(unit.strategy) for unit in model.schedule.units} == {"shard+offload"}


def test_a_plan_for_one_node_becomes_shard() -> None:
    run_ranks(_in_one_node, 4)
