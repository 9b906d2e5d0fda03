"""What scripts do to the wrapper as to any module: compile it, register things, set attributes, write to `.data`."""

from __future__ import annotations

from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from toys import plan_of, seeded

from osdp.api import OSDP

WIDTH = 8


class Plain(nn.Module):
    """Two layers, an activation of TorchScript between them and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.scale = torch.jit.script(nn.GELU()), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.act(self.first(x))) * self.scale
        return y

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, WIDTH),), {}


class Normed(Plain):
    """With batch norm over ranks, which GPUs only run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH))  # type: ignore[assignment]


class Shown(nn.Module):
    """Returns a part of a table beside its loss, and the table of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH)), Table()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, weight = self.layer(x @ self.table)
        return y.pow(2).mean(), self.table[:2], weight

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, WIDTH),), {}


class Table(nn.Module):
    """Returns its parameter beside a product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


def wrapped(build: type[Plain] = Plain, strategy: str = "shard") -> OSDP:
    return OSDP(seeded(build), plan_of(build(), strategy, ranks=(1, 2)))


def habits(rank: int) -> None:
    torch.manual_seed(0)
    x, alone = torch.randn(4, WIDTH), seeded(Plain)
    compiled = torch.compile(wrapped(), backend="eager")
    torch.testing.assert_close(compiled(x), alone(x))
    compiled(x).sum().backward()

    model = wrapped()
    model.register_buffer("temperature", torch.ones(1))
    model.temperature = torch.zeros(1)
    assert model.temperature.item() == 0
    model.add_module("extra", nn.Linear(2, 2))
    model.extra = nn.Linear(3, 3)
    assert model.extra.in_features == 3

    model, optimizer = wrapped(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        y = model(x + rank)
    (y * model.scale).pow(2).mean().backward()  # the model has no backward, but a parameter of it has
    optimizer.step()
    scales = [torch.zeros(()) for _ in range(2)]
    torch.distributed.all_gather(scales, model.scale.detach())
    assert scales[0] == scales[1]

    weight = model.first.weight
    weight.data = weight.data.clone().t().contiguous().t()  # in columns
    model(x).sum().backward()
    assert isinstance(wrapped(Normed, "replicate"), OSDP)


def test_a_wrapped_model_is_used_as_any_module() -> None:
    run_ranks(habits, 2)


def train_shown(rank: int) -> None:
    torch.manual_seed(0)
    x, alone = torch.randn(4, WIDTH), seeded(Shown)
    models = [OSDP(seeded(Shown), plan_of(Shown(), one, ranks=(1, 2))) for one in ("shard", "replicate", "owner")]
    for model in (alone, *models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss, part, weight = model(x)
            (loss + part.sin().sum() + weight.pow(2).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for model in models:
        torch.testing.assert_close(model.full_state_dict(rank0_only=False), dict(alone.state_dict()))


def test_parameters_that_a_forward_returns_have_their_gradients() -> None:
    """Once what they returned was in memory that is freed."""
    run_ranks(train_shown, 2)


class Fails(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError


def skip_a_batch(rank: int) -> list[Tensor]:
    """Call a layer of the model, once in vain; return what its weights are."""
    model = wrapped(strategy="replicate")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for number in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = model.first(Fails.apply(x) if number == 0 else x)  # type: ignore[no-untyped-call]
        try:
            y.pow(2).mean().backward()
        except MemoryError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.first.parameters()]


def test_gradients_are_averaged_after_a_backward_that_failed() -> None:
    """Also where a script calls layers in place of the model, whose forward would tell that it has."""
    torch.testing.assert_close(*run_ranks(skip_a_batch, 2))
