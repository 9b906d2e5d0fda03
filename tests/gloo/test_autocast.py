"""Loops and models with `torch.autocast`: trained as in one process, and refused where its copies have no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from toys import STRATEGIES, Blocks, batch_of, plan_of, seeded

from planner.plan import Prediction
from profiler.errors import OsdpError

autocast = partial(torch.autocast, "cpu", torch.bfloat16)
build = partial(Blocks, frozen=False)
SAMPLE = build()


class Inside(Blocks):
    """Enters autocast itself."""

    def forward(self, x: Tensor) -> Any:
        """(batch, 5, 6) -> a loss."""
        with autocast():
            return super().forward(x)


def each_forward(
    losses: Iterator[Callable[[], Tensor]], context: Callable[[], AbstractContextManager[Any]] = autocast
) -> None:
    """As PyTorch's documentation has it."""
    for loss_of in losses:
        with context():
            loss = loss_of()
        loss.backward()


def all_micro_batches(losses: Iterator[Callable[[], Tensor]]) -> None:
    """One context around several backwards: all share copies of the weights."""
    with autocast():
        for loss_of in losses:
            loss_of().backward()


def forwards_first(losses: Iterator[Callable[[], Tensor]]) -> None:
    """All forwards in one context, and a backward for each."""
    with autocast():
        found = [loss_of() for loss_of in losses]
    for loss in found:
        loss.backward()


def by_the_model(losses: Iterator[Callable[[], Tensor]]) -> None:
    for loss_of in losses:
        loss_of().backward()


HABITS: dict[Callable[[Iterator[Callable[[], Tensor]]], None], Callable[[], nn.Module]] = {
    each_forward: build,
    all_micro_batches: build,
    forwards_first: build,
    by_the_model: partial(Inside, frozen=False),
}


def train(habit: Callable[[Iterator[Callable[[], Tensor]]], None], model: nn.Module, ranks: list[int]) -> None:
    """Train two steps of two micro-batches on these ranks' data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(rank: int, number: int) -> Tensor:
        loss: Tensor = model(*batch_of(SAMPLE, rank, number)[0]) / len(ranks) / 2
        return loss

    for step in range(2):
        habit(partial(loss_of, rank, 2 * step + number) for number in range(2) for rank in ranks)
        optimizer.step()
        optimizer.zero_grad()


def compare(rank: int) -> list[str]:
    """Return what is trained otherwise than in one process."""
    from osdp import OSDP

    wrong = []
    for number, (habit, make) in enumerate(HABITS.items()):
        alone = seeded(make)
        train(habit, alone, [0, 1])
        wanted, start = alone.state_dict(), seeded(make).state_dict()
        for strategy in dict.fromkeys(["shard", *some(STRATEGIES, 6, number + 1)]):
            plan = plan_of(make(), strategy, accumulation=2, recomputed=("blocks.1",), ranks=(1, 2))
            model = OSDP(seeded(make), plan)
            train(habit, model, [rank])
            for name, found in model.full_state_dict(rank0_only=False).items():
                moved = max(1e-2, float((wanted[name] - start[name]).abs().max()))
                far = (found - wanted[name]).abs().max() > 2e-3 * moved
                wrong += [f"{habit.__name__}, {strategy}: {name}"] if far else []
    return wrong


def compare_planned(rank: int) -> list[str]:
    """Return what is trained otherwise than in one process where the plan has autocast and the loop has none."""
    from osdp import OSDP

    wrong = []
    for number, (precision, dtype) in enumerate((("amp-bf16", torch.bfloat16), ("amp-fp16", torch.float16))):
        alone, entered = seeded(build), partial(torch.autocast, "cpu", dtype)
        train(partial(each_forward, context=entered), alone, [0, 1])
        wanted, start = alone.state_dict(), seeded(build).state_dict()
        for strategy in dict.fromkeys(["shard", "replicate", *some(STRATEGIES, 6, number + 2)]):
            plan = plan_of(
                build(), strategy, accumulation=2, recomputed=("blocks.1",), ranks=(1, 2), precision=precision
            )
            model = OSDP(seeded(build), plan)
            train(by_the_model, model, [rank])
            with torch.no_grad():
                wrong += [strategy] if torch.is_autocast_enabled("cpu") else []
            for name, found in model.full_state_dict(rank0_only=False).items():
                moved = max(1e-2, float((wanted[name] - start[name]).abs().max()))
                far = (found - wanted[name]).abs().max() > 2e-3 * moved
                wrong += [f"{precision}, {strategy}: {name}"] if far else []
    return wrong


def refuse(rank: int) -> list[str]:
    """Return what is said where a plan leaves less than the copies take, and just as much."""
    from osdp import OSDP

    said = []
    for left_bytes, context in ((515, autocast), (515, nullcontext), (516, autocast)):
        plan = plan_of(SAMPLE, "shard", recomputed=("blocks.1",), ranks=(1, 2))
        predicted = Prediction(1000, {}, "", 1.0, {}, 1.0)
        model = OSDP(seeded(build), replace(plan, predicted=predicted, limit_bytes=1000 + left_bytes))
        said.append(_said(model, rank, context))
    return said


def _said(model: Any, rank: int, context: Callable[[], AbstractContextManager[Any]]) -> str:
    try:
        with context():
            model(*batch_of(SAMPLE, rank)[0]).backward()
    except OsdpError as error:
        return str(error)
    return ""


def test_they_train_as_in_one_process() -> None:
    """Micro-batches that shared copies of weights lost gradients once, under `shard` and `odc`."""
    assert run_ranks(compare, 2) == [[], []]


def test_plans_that_have_it_train_as_in_one_process() -> None:
    assert run_ranks(compare_planned, 2) == [[], []]


def test_copies_without_room_are_refused() -> None:
    """Of a block of 120 weights and a head of 18, and while it runs again of another block: 258 elements of bf16."""
    for short, without, enough in run_ranks(refuse, 2):
        assert "keeps copies of the weights" in short
        assert "precision" in short
        assert (without, enough) == ("", "")
