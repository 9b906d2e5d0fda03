"""Gradient accumulation: what is reduced once per step is, at the right micro-batch, however a loop is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from toys import Blocks, batch_of, loss_of, plan_of, refusal, seeded

build = partial(Blocks, "dataclass", frozen=False)
SAMPLE = build()
"""What batches and plans are made for."""
MICRO_BATCHES, FOUR = 3, (2, 2)


def losses(model: nn.Module, ranks: Sequence[int], step: int) -> list[Tensor]:
    """Return the loss of every micro-batch of a step, a mean over the given ranks."""
    found = []
    for micro_batch in range(MICRO_BATCHES):
        batches = [batch_of(SAMPLE, rank, 10 * step + micro_batch) for rank in ranks]
        found.append(sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches) / MICRO_BATCHES)
    return found


def counted(model: Any, rank: int, step: int) -> None:
    """Leave it to the plan; evaluate in between, with and without gradients."""
    for micro_batch in range(MICRO_BATCHES):
        args, kwargs = batch_of(SAMPLE, rank, 10 * step + micro_batch)
        with torch.no_grad():
            model(*args, **kwargs)
        model(*args, **kwargs)  # nothing follows
        (loss_of(model(*args, **kwargs)) / MICRO_BATCHES).backward()
        model.eval()
        with torch.inference_mode():
            model(*args, **kwargs)
        model.train()


def by_hand(model: Any, rank: int, step: int) -> None:
    """Say it by no_sync; backward outside of it counts as its forward did."""
    for micro_batch in range(MICRO_BATCHES):
        args, kwargs = batch_of(SAMPLE, rank, 10 * step + micro_batch)
        with nullcontext() if micro_batch == MICRO_BATCHES - 1 else model.no_sync():
            loss = loss_of(model(*args, **kwargs)) / MICRO_BATCHES
        loss.backward()


def forwards_first(model: Any, rank: int, step: int) -> None:
    """Run all forwards, then each backward, last first."""
    for loss in reversed(losses(model, [rank], step)):
        loss.backward()


def all_at_once(model: Any, rank: int, step: int) -> None:
    """Run one backward of the sum."""
    torch.stack(losses(model, [rank], step)).sum().backward()


LOOPS: dict[str, tuple[Callable[..., None], int]] = {
    "counted": (counted, MICRO_BATCHES),
    "by hand": (by_hand, 1),
    "by hand as planned": (by_hand, MICRO_BATCHES),
    "forwards first": (forwards_first, MICRO_BATCHES),
    "all at once": (all_at_once, 1),
}


def train(rank: int, wanted: dict[str, Tensor]) -> None:
    """Compare every loop with a single process, over two steps, under all strategies, or under one in turn.

    What is replicated whole sends one bucket, once per step.
    """
    from osdp import OSDP
    from runtime.observe.collective_log import record_collectives

    for number, (name, (loop, accumulation)) in enumerate(LOOPS.items()):
        for strategy in some(("replicate", "shard_grad", "group_shard:2", "owner", "odc:2"), 5, number):
            if strategy == "replicate" and name == "forwards first":
                continue  # refused, see below
            choices = {"head": "split(owner, replicate)"} if strategy != "replicate" else {}
            model = OSDP(seeded(build), plan_of(SAMPLE, strategy, choices, accumulation=accumulation, ranks=FOUR))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            has_buckets = strategy == "replicate" and name in ("counted", "by hand")
            for step in range(2):  # in the second, DistributedDataParallel has other buckets
                with record_collectives() if has_buckets and step else nullcontext([]) as record:
                    loop(model, rank, step)
                optimizer.step()
                optimizer.zero_grad()
            if has_buckets:
                buckets = [one.size_bytes for one in record if one.operation == "all_reduce"]
                assert buckets == [4 * 317], f"{name}: one bucket of all parameters"
            got = model.full_state_dict(rank0_only=False)
            try:
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
            except AssertionError as error:
                raise AssertionError(f"{name}, {strategy}: {error}") from error


def test_every_loop_trains_as_one_process() -> None:
    alone = seeded(build)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(2):
        torch.stack(losses(alone, range(4), step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run_ranks(train, 4, dict(alone.state_dict()), ranks_per_node=2)


def count(rank: int) -> None:
    """Once-per-step collectives are sent once; the others in every micro-batch."""
    from osdp import OSDP
    from runtime.observe.collective_log import record_collectives

    for loop, accumulation in (LOOPS["counted"], LOOPS["by hand"], LOOPS["forwards first"]):
        plan = plan_of(SAMPLE, "group_shard:2", {"head": "shard"}, accumulation=accumulation, ranks=FOUR)
        model = OSDP(seeded(build), plan)
        for step in range(2):
            with record_collectives() if step else nullcontext([]) as record:
                loop(model, rank, step)
        sent = Counter(one.operation for one in record if len(one.ranks) > 1)
        units = [unit for unit in model.schedule.units if unit.strategy.name == "group_shard"]
        assert sent["all_reduce"] == len(units) == 2
        assert sent["reduce_scatter"] == MICRO_BATCHES * len(model.schedule.units)


def test_reduces_once_per_step() -> None:
    run_ranks(count, 4, ranks_per_node=2)


def refuse(rank: int) -> list[str]:
    """Return what is said of steps all of whose micro-batches ran in `no_sync`, by plan."""
    from osdp import OSDP

    said = []
    args, kwargs = batch_of(SAMPLE, rank)
    for strategy in ("replicate", "group_shard:2"):
        model = OSDP(seeded(build), plan_of(SAMPLE, strategy, accumulation=MICRO_BATCHES, ranks=FOUR))
        other = OSDP(seeded(build), plan_of(SAMPLE, strategy, ranks=FOUR))
        optimizer, others = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, other))
        with model.no_sync():
            loss_of(model(*args, **kwargs)).backward()
        loss_of(other(*args, **kwargs)).backward()
        others.step()  # another model's optimizer is free
        said.append(refusal(optimizer.step))
        said.append(refusal(lambda model=model: model.clip_grad_norm_(1.0)))
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
    # What reduces in every micro-batch may step at any.
    model = OSDP(seeded(build), plan_of(SAMPLE, "shard", accumulation=MICRO_BATCHES, ranks=FOUR))
    loss_of(model(*args, **kwargs)).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return said


def test_refuses_to_step_without_a_reduction() -> None:
    for said in run_ranks(refuse, 4, ranks_per_node=2):
        for words in said:
            assert "1 micro-batch" in words
            assert "all micro-batches of this step ran in no_sync()" in words
        assert len(said) == 4
