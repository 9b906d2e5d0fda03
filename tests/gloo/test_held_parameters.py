"""Parameters that more than their modules hold, change or hook, and those whose memory is not row-major.

They train as in one process, or are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn

from osdp.api import OSDP
from profiler.errors import OsdpError

CASES = (
    ("shard", "module"),
    ("shard", "factory"),
    *some([("replicate", "factory"), ("replicate", "module"), ("owner", "module"), ("owner", "factory")], 2),
    *some([("odc:2", "factory"), ("odc:2", "module")], 2),
)


class Images(nn.Module):
    """Convolutions, a weight that is a transpose, and two halves of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, 16)
        self.head.weight = nn.Parameter(torch.randn(8, 16).t())
        flat = torch.randn(2 * 16 * 8) / 4
        self.up, self.down = (nn.Parameter(half.view(16, 8)) for half in flat.chunk(2))

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(-1, 1, 4, 4).expand(-1, 3, 4, 4)
        return self.head(self.convolutions(images).mean((2, 3))) @ self.up @ self.down.t()  # type: ignore[no-any-return]

    def groups(self) -> Iterable[Any]:
        return self.parameters()


class Listed(nn.Module):
    """Lists its parameters for an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.decayed = [self.layers[0].weight, self.layers[2].weight]
        self.others = {"biases": (self.layers[0].bias, self.layers[2].bias)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def groups(self) -> Iterable[Any]:
        return [{"params": self.decayed, "weight_decay": 0.1}, {"params": list(self.others["biases"])}]


class Closed(Listed):
    """Has a function that holds a weight."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.layers[0].weight
        self.penalty = lambda: weight.square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.penalty()  # type: ignore[no-any-return]


class Penalised(Listed):
    """Reads its list in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + sum(weight.square().sum() for weight in self.decayed)  # type: ignore[no-any-return]


class Transposed(Listed):
    """Has a layer with the transpose of another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = nn.Parameter(self.layers[0].weight.t())
        self.decayed = [self.layers[0].weight, self.layers[2].weight]


def channels_last() -> nn.Module:
    return Images().to(memory_format=torch.channels_last)


def losses(model: nn.Module, groups: Iterable[Any]) -> list[float]:
    optimizer, generator, found = torch.optim.SGD(groups, 0.1), torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = (model(torch.randn(4, 16, generator=generator)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train(rank: int, build: Callable[[], nn.Module]) -> dict[str, list[float]]:
    found = {}
    for strategy, how in CASES:
        torch.manual_seed(0)
        model = wrapped(build() if how == "module" else build, strategy)
        found[f"{strategy} {how}"] = losses(model, model.groups())
    return found


@pytest.mark.parametrize("build", [channels_last, Listed])
def test_they_train_as_in_one_process(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    alone = build()
    expected = losses(alone, alone.groups())
    for by_strategy in run_ranks(train, 2, build):
        for case, found in by_strategy.items():
            assert found == pytest.approx(expected, rel=1e-5), case


class Looking(Closed):
    """Its function looks at the weight without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.layers[0].weight
        self.penalty = lambda: weight.detach().square().sum()


def refused(rank: int) -> None:
    for build in (Closed, Looking):
        model = wrapped(build(), "shard")
        for _ in range(2):
            with pytest.raises(OsdpError, match="no longer trains"):
                model(torch.randn(4, 16))
        assert all(weight.grad is None for weight in model.decayed)


def test_reading_what_only_a_function_holds_is_refused() -> None:
    """It would train apart from what is sharded."""
    run_ranks(refused, 2)


class Clamped(Listed):
    """Clamps a weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.decayed[0].shape  # noqa: B018
            self.layers[0].weight.clamp_(-0.1, 0.1)
        return self.layers(x)  # type: ignore[no-any-return]


class Begun(Listed):
    """Scales a weight by its first inputs, as layers do whose first batch initialises them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("has_begun", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_begun:
            weight = self.layers[0].weight
            weight.data = (weight / (1 + x.std(0))).data
            self.has_begun.fill_(1)
        return self.layers(x)  # type: ignore[no-any-return]


def halved(gradient: Tensor) -> Tensor:
    return gradient / 2


class Hooked(Listed):
    """Halves the gradient of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.register_hook(halved)


KEPT: tuple[Callable[[], Any], ...] = (Begun, Clamped, Hooked, Penalised, Transposed)
"""Train right where the module's own parameters are replicated."""


def wrapped(build: Any, strategy: str) -> OSDP:
    """Return the model under one strategy; its plan has one size of micro-batch, which leaves nothing to search."""
    torch.manual_seed(0)
    planned = {"pins": [f"*={strategy}"], "micro_batch": 4}
    return OSDP(build, planned, example_inputs=lambda batch: torch.randn(batch, 16))


def only_replicated(rank: int) -> dict[str, list[float]]:
    """Changes and hooks are kept where modules compute with the parameters themselves, and else refused."""
    for strategy in ("shard", "owner"):
        for build in (Clamped(), Begun(), Begun):
            with pytest.raises(OsdpError, match="the model itself changes parameters"):
                wrapped(build, strategy)
        for build in (Hooked(), Hooked):
            with pytest.raises(OsdpError, match="hooks of gradients"):
                wrapped(build, strategy)
        for build in (Penalised(), Penalised, Transposed, Transposed()):  # graphs are shared: the factory has more
            with pytest.raises(OsdpError, match="what else reaches them"):
                wrapped(build, strategy)
        model = wrapped(Listed(), strategy)
        model.module.layers[0].weight.register_hook(halved)
        with pytest.raises(OsdpError, match="register_hook on a sharded parameter"):
            model(torch.randn(4, 16))
    for kind, message in ((Hooked, "hooks of gradients"), (Penalised, "what else"), (Transposed, "what else")):
        with pytest.raises(OsdpError, match=message):
            wrapped(kind, "replicate")
    found = {}
    for kind in KEPT:
        torch.manual_seed(0)
        model = wrapped(kind(), "replicate")
        found[str(kind)] = losses(model, model.groups())
    return found


def test_changes_and_hooks_are_kept_or_refused() -> None:
    expected = {}
    for kind in KEPT:
        torch.manual_seed(0)
        alone = kind()
        expected[str(kind)] = losses(alone, alone.groups())
    for found in run_ranks(only_replicated, 2):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-5), name


class Counted(nn.Module):
    """Keeps a buffer in a list, or under another name too, and changes it through one of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(16, 16)
        self.register_buffer("mean", torch.rand(16) if how == "random" else torch.zeros(16))
        self.held = {"statistics": [self.mean, 1]}
        self.alias = self.mean

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) -> a loss."""
        y = self.layer(x)
        listed: Any = self.held["statistics"][0]
        written, read = {"list": (listed, self.mean), "alias": (self.mean, self.alias)}.get(
            self.how, (self.mean, listed)
        )
        with torch.no_grad():
            written.lerp_(y.mean(0), 0.5)
        return (y - read).pow(2).sum()


COUNTED = ("list", "buffer", "alias", "random")


def losses_of(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(2, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def count(rank: int) -> dict[str, list[float]]:
    found = {}
    for how, strategy in product(COUNTED, some(("shard", "replicate"), 2)):
        found[f"{how} {strategy} made in shares"] = losses_of(wrapped(partial(Counted, how), strategy))
        torch.manual_seed(0)
        found[f"{how} {strategy}"] = losses_of(wrapped(Counted(how), strategy))
    return found


def test_buffers_that_are_held_otherwise_too_are_one_tensor() -> None:
    alone = {}
    for how in COUNTED:
        torch.manual_seed(0)
        alone[how] = losses_of(Counted(how))
    for found in run_ranks(count, 2):
        for name, losses in found.items():
            assert losses == pytest.approx(alone[name.split()[0]], rel=1e-5), name
