"""What loops change beside an optimizer: outputs, gradients and parameters, in place and by others; and zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH, some
from torch import nn
from toys import Blocks, Toy, batch_of, loss_of, plan_of, refusal, seeded

build = partial(Blocks, frozen=False)
SAMPLE = build()
"""What batches and plans are made for."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every run."""
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], number: int) -> None:
    """Train on the batches of these ranks."""
    batches = [batch_of(SAMPLE, rank, number) for rank in ranks]
    (sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


STRATEGIES_OF_TWO = ("replicate", "shard", "shard_grad", "owner", "odc:2")
"""What two ranks of one node can run."""


@dataclass
class Views:
    """What no pytree knows."""

    values: list[torch.Tensor]


class Returning(Toy):
    """Returns views, of which one is of what another module returned."""

    def __init__(self, boxed: bool) -> None:
        super().__init__()
        self.inner, self.last, self.boxed = nn.Linear(6, 6), nn.Linear(6, 1), boxed

    def forward(self, x: Any) -> Any:
        """(batch, 5, 6) -> views (batch, 5) and (batch, 3, 6)."""
        x = self.inner(x).tanh()
        values = [self.last(x).squeeze(-1), (x * 2.0)[:, :3]]
        return Views(values) if self.boxed else values


class Partly(Toy):
    """A layer that runs, one that runs in some forwards, and one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 6) for _ in range(3))
        self.runs = True

    def forward(self, x: Any) -> Any:
        """(batch, 5, 6) -> a loss."""
        x = self.always(x)
        return (self.sometimes(x) if self.runs else x).pow(2).mean()


class ScaledLoss(Blocks):
    """Has a parameter without dimensions, which every rank holds and whose gradient all average."""

    def __init__(self) -> None:
        super().__init__(frozen=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        """(batch, 5, 6) -> a loss."""
        return super().forward(x) * self.scale


def leave_zeros(rank: int) -> None:
    """Amid a step and after one without an optimizer: what has no gradient gets none, and is not decayed."""
    from osdp import OSDP

    sample = Partly()
    for name in some(STRATEGIES_OF_TWO, 2):
        for has_optimizer, micro_batches in ((True, 2), (False, 1), (False, 3)):
            alone = seeded(Partly)
            model = OSDP(
                seeded(Partly), plan_of(sample, name, ranks=(1, 2), accumulation=3), find_unused_parameters=True
            )
            for one, ranks in ((alone, [0, 1]), (model, [rank])):
                module = one if one is alone else one.module
                optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5) if has_optimizer else None
                module.runs = not has_optimizer
                for number in range(micro_batches):
                    (sum(one(*batch_of(sample, each, number)[0]) for each in ranks) / len(ranks)).backward()
                one.zero_grad(set_to_none=False)
                if optimizer:
                    optimizer.step()
            for shard in model.sharded.local_shards:
                wanted = alone.get_parameter(shard.name)
                if shard.numel:
                    assert (shard.parameter.grad is None) == (wanted.grad is None), (name, shard.name)
                    torch.testing.assert_close(shard.local(shard.parameter), wanted[shard.slices].detach())


def test_zeros_are_left_only_where_there_were_gradients() -> None:
    run_ranks(leave_zeros, 2)


def change_outputs(rank: int) -> None:
    """Change what the model returned in place, a view or not; give up a forward and clear gradients."""
    from osdp import OSDP

    for strategy in some(STRATEGIES_OF_TWO, 3):
        for accumulation, boxed in ((1, False), (2, False), (1, True), (2, True)):
            made = partial(Returning, boxed)
            alone, plan = seeded(made), plan_of(made(), strategy, ranks=(1, 2), accumulation=accumulation)
            model = OSDP(seeded(made), plan)
            for one, ranks in ((alone, [0, 1]), (model, [rank])):
                optimizer = adam(one.parameters())
                for number in range(3):
                    for micro in range(accumulation):
                        loss = 0
                        for each in ranks:
                            output = one(*batch_of(alone, each, 2 * number + micro)[0])
                            tensors = output.values if boxed else output
                            for tensor in tensors:
                                tensor.add_(1.0)
                                tensor.mul_(0.5)
                            loss += sum(tensor.pow(2).mean() for tensor in tensors) / len(ranks) / accumulation
                        loss.backward()
                    if number == 1:  # is given up, after a forward that leaves parameters gathered
                        one(*batch_of(alone, rank, 99)[0])
                        one.zero_grad()
                    else:
                        optimizer.step()
                        optimizer.zero_grad()
            torch.testing.assert_close(
                model.full_state_dict(rank0_only=False),
                dict(alone.state_dict()),
                rtol=1e-4,
                atol=2e-5,
                msg=lambda text, where=(strategy, accumulation, boxed): f"{where}: {text}",
            )


def test_outputs_may_be_changed_in_place() -> None:
    run_ranks(change_outputs, 2)


def change_values(rank: int) -> list[str]:
    """Clamp after steps, swap averages in for an evaluation, change what an evaluation has used, by `.data` or not.

    Return what is said under odc where one rank alone does.
    """
    from osdp import OSDP

    def swap(model: Any, values: dict[str, torch.Tensor], by_data: bool) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                kept = parameter.clone()
                (parameter.data if by_data else parameter).copy_(values[name])
                values[name] = kept

    def clamp(model: Any, by_data: bool) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.data if by_data else parameter).clamp_(-0.1, 0.1)

    for strategy in STRATEGIES_OF_TWO if THOROUGH else ("shard_grad", "owner", "odc:2"):
        alone, model = seeded(build), OSDP(seeded(build), plan_of(SAMPLE, strategy, ranks=(1, 2)))
        evaluated = []
        for one, ranks in ((alone, [0, 1]), (model, [rank])):
            optimizer = adam(one.parameters())
            means = {name: 0.5 * parameter.detach().clone() for name, parameter in one.named_parameters()}
            for number in range(4):
                step(one, optimizer, ranks, number)
                clamp(one, by_data=number % 2 == 0)
                swap(one, means, by_data=number < 2)
                with torch.no_grad():
                    args, kwargs = batch_of(SAMPLE, 0, 50 + number)
                    evaluated.append(one(*args, **kwargs))
                swap(one, means, by_data=number < 2)
                if number == 2:
                    args, kwargs = batch_of(SAMPLE, rank, 99)
                    one(*args, **kwargs)  # has no backward
                    clamp(one, by_data=False)
                    with torch.no_grad():  # of what no optimizer trains in between
                        for parameter in one.parameters():
                            parameter.data.mul_(0.9)
                        evaluated.append(one(*args, **kwargs))
        half = len(evaluated) // 2
        torch.testing.assert_close(evaluated[half:], evaluated[:half], rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(
            model.full_state_dict(rank0_only=False),
            dict(alone.state_dict()),
            rtol=1e-4,
            atol=2e-5,
            msg=lambda text, strategy=strategy: f"{strategy}: {text}",
        )
    said = []
    for made, by_data in ((build, True), (ScaledLoss, False)):
        model = OSDP(seeded(made), plan_of(made(), "odc:2", ranks=(1, 2)))
        optimizer = adam(model.parameters())
        step(model, optimizer, [rank], 0)
        if rank == 0:
            clamp(model, by_data)
        said.append(refusal(lambda: step(model, optimizer, [rank], 1)))  # noqa: B023
    return said


def test_values_may_be_changed_by_other_means_than_an_optimizer() -> None:
    for by_rank in run_ranks(change_values, 2):
        for said in by_rank:
            assert "changed through .data after ranks could pull them" in said
            assert "got: 1 of 2 ranks" in said


def clip_values(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Clip each number of the gradients."""
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def scale_in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Scale gradients by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def scale_through_data(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Scale gradients as old loops do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.5)


def scale_together(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Scale gradients by one of torch's functions on lists."""
    torch._foreach_mul_([parameter.grad for parameter in model.parameters() if parameter.grad is not None], 0.5)


def put_others(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make new gradients out of the old ones."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5 + 0.1 * parameter.detach()


def unscale(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Do what a `GradScaler` does before clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def decay(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Add to gradients."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach(), alpha=0.1)


HABITS: list[Callable[[Any, torch.optim.Optimizer], None]] = [
    clip_values,
    scale_in_place,
    scale_through_data,
    scale_together,
    put_others,
    unscale,
    decay,
]


def change_gradients(rank: int, habit: Callable[[Any, torch.optim.Optimizer], None]) -> str:
    """Train with gradients that are changed before the step, under all strategies; return what odc says at first.

    Adding is right at any time, as autograd does it too.  By default habits have strategies in turn, beside odc.
    """
    from osdp import OSDP

    said = ""

    def train(one: Any, ranks: list[int], before_habit: Callable[[torch.optim.Optimizer], None]) -> None:
        optimizer = adam(one.parameters())
        for number in range(STEPS):
            for micro_batch in range(2):
                batches = [batch_of(SAMPLE, each, 2 * number + micro_batch) for each in ranks]
                loss = sum(loss_of(one(*args, **kwargs)) for args, kwargs in batches) / len(batches)
                (loss / 2).backward()
            before_habit(optimizer)
            habit(one, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    alone = seeded(build)
    train(alone, [0, 1], lambda optimizer: None)
    *others, odc = STRATEGIES_OF_TWO
    for strategy in (*some(others, 2, HABITS.index(habit) // 3), odc):
        model = OSDP(seeded(build), plan_of(SAMPLE, strategy, ranks=(1, 2), accumulation=2))

        def complete(optimizer: torch.optim.Optimizer, model: Any = model, strategy: str = strategy) -> None:
            nonlocal said
            if habit is not decay:
                if "odc" in strategy:
                    said = refusal(lambda: habit(model, optimizer))
                model.finish_gradients()

        train(model, [rank], complete)
        torch.testing.assert_close(
            model.full_state_dict(rank0_only=False),
            dict(alone.state_dict()),
            rtol=1e-4,
            atol=2e-5,
            msg=lambda text, strategy=strategy: f"{strategy}: {text}",
        )
    return said


@pytest.mark.parametrize("habit", some(HABITS, 3))
def test_gradients_may_be_changed_once_they_are_complete(habit: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    for said in run_ranks(partial(change_gradients, habit=habit), 2):
        if habit is decay:
            assert not said
            continue
        assert "under odc a gradient is not complete" in said
        assert "model.finish_gradients() on all ranks" in said


def replace_gradients(rank: int) -> list[str]:
    """Return what is said where rank 1 puts others, or None, in the places of gradients that wait."""
    from osdp import OSDP

    said = list[str]()
    for put, goes_on in ((torch.zeros_like, False), (lambda _: None, False), (lambda _: None, True)):
        model = OSDP(seeded(build), plan_of(SAMPLE, "odc:2", ranks=(1, 2)))
        optimizer = adam(model.parameters())
        args, kwargs = batch_of(SAMPLE, rank)
        loss_of(model(*args, **kwargs)).backward()
        gradient = next(one.grad for one in model.parameters() if one.grad is not None)
        assert "PendingGradient" in repr(gradient)
        if rank == 1:
            for parameter in model.parameters():
                parameter.grad = put(parameter)
        if goes_on:
            loss_of(model(*args, **kwargs)).backward()
        said.append(refusal(optimizer.step))
        model.zero_grad()
        step(model, optimizer, [rank], 1)
    return said


def test_gradients_that_wait_are_not_replaced() -> None:
    for said in run_ranks(replace_gradients, 2):
        assert len(said) == 3
        assert all("gradients were replaced, or set to None" in text for text in said)
        assert all("1 of 2 ranks" in text and "model.zero_grad()" in text for text in said)


def scale_losses(rank: int) -> list[float]:
    """Train by a scaler where one rank alone has rows of a gradient that is not finite; return its scales."""
    from osdp import OSDP

    def train(model: Any, ranks: list[int]) -> list[float]:
        optimizer, scales = adam(model.parameters()), []
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for number in range(3):
            batches = [batch_of(sample, each, number) for each in ranks]
            scaler.scale(sum(model(*args).pow(2).mean() for args, _ in batches) / len(batches)).backward()
            if number == 1:
                model.layer.weight.grad[-1] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    sample, alone = Scaled(), seeded(Scaled)
    wanted = train(alone, [0, 1])
    for choices in ({"first": "replicate"}, {"first": "owner"}, {}):
        model = OSDP(seeded(Scaled), plan_of(sample, "shard", choices, ranks=(1, 2)))
        assert train(model, [rank]) == wanted, choices
        whole = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(whole, dict(alone.state_dict()), rtol=1e-4, atol=2e-5)
    return wanted


class Scaled(Toy):
    """Two layers and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        """(batch, 5, 6) -> the same shape."""
        return self.layer(self.first(x).tanh()) * self.scale


def test_no_rank_skips_a_step_alone() -> None:
    assert run_ranks(scale_losses, 2) == [[16.0, 8.0, 16.0]] * 2


class Strided(nn.Module):
    """Has a weight in the order of its columns, as `qr` returns it, and convolutions with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(6, 6))[0])
        self.to(memory_format=torch.channels_last)

    def example_inputs(self, batch: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
        """Return images."""
        return (torch.randn(batch, 3, 6, 6),), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 6, 6) -> a loss."""
        return (self.net(x).mean((2, 3)) @ self.weight).pow(2).mean()


def train_strided(rank: int, world_size: int) -> list[str]:
    """Return what fused optimizers, which on a CPU go by memory alone, make otherwise than in one process."""
    from osdp import OSDP

    def train(model: nn.Module, ranks: list[int]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
        for number in range(2):
            for one in ranks:
                torch.manual_seed(10 * number + one)
                (model(torch.randn(2, 3, 6, 6)) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    alone, wrong = seeded(Strided), []
    train(alone, [*range(world_size)])
    for strategy in ("replicate", "shard"):
        model = OSDP(seeded(Strided), plan_of(Strided(), strategy, ranks=(1, world_size)))
        train(model, [rank])
        found = model.full_state_dict(rank0_only=False)
        far = [name for name, one in alone.state_dict().items() if not torch.allclose(found[name], one, atol=1e-6)]
        wrong += [f"{strategy}: {name}" for name in far]
    return wrong


def test_gradients_are_laid_out_as_their_parameters() -> None:
    """They lay in buckets row by row once, and fused optimizers took columns for rows."""
    assert run_ranks(train_strided, 2, 2) == [[], []]


class Pair(Toy):
    """Two layers of three rows, which are too few for four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 5, 6) -> a loss."""
        return (self.one(x) + self.other(x)).pow(2).mean()


def copy_from_owner(rank: int) -> float:
    """Return how far a sharded weight is from an owned one that was copied to it, and mixed with it."""
    from osdp import OSDP

    plan = plan_of(Pair(), "shard", {"other": "owner"}, ranks=(1, 4))
    model = OSDP(seeded(Pair), plan)
    wanted = seeded(Pair).other.weight.detach()
    with torch.no_grad():
        model.module.one.weight.copy_(model.module.other.weight)
        model.module.one.weight.lerp_(model.module.other.weight, 0.5)
    return float((model.module.one.weight.detach().full_tensor() - wanted).abs().max())


def test_ranks_without_rows_take_part_in_copies() -> None:
    """The last rank saw two tensors without rows, which seemed alike, and the others waited for it."""
    assert run_ranks(copy_from_owner, 4, timeout_s=60) == pytest.approx([0.0] * 4, abs=1e-6)
