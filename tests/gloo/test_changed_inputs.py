"""Modules that change in place what they are handed: trained under every strategy as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from thoroughness import THOROUGH
from torch import Tensor, nn
from toys import EVERY_RANK, STRATEGIES, Toy, graph_of, plan_of, run_everywhere, seeded, train_on

from osdp import OSDP


class Positions(nn.Module):
    """Adds its parameter to what it is handed, and returns that or nothing."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.table, self.returns = nn.Parameter(torch.randn(5, 6)), returns

    def forward(self, x: Tensor) -> Tensor | None:
        x += self.table.tanh()
        return x * 2 if self.returns else None


class Scaled(nn.Module):
    """Multiplies one of two inputs, which it is handed by name, by its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
        return x * 0.5 + other.mul_(self.scale)


class Activated(nn.Module):
    """A block that begins with an activation in place, which keeps what it returns for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(F.relu(x, inplace=True))))
        return y


class Changes(Toy):
    """(batch, 5, 6) -> a loss, also of what layers have changed, which is a view, a leaf's or another's output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(6, 6), nn.Linear(6, 2)
        made: Callable[[], nn.Module] = {
            "returned": partial(Positions, returns=True),
            "dropped": partial(Positions, returns=False),
            "part": partial(Positions, returns=False),
            "named": Scaled,
            "block": Activated,
            "data first": partial(Positions, returns=True),
        }[kind]
        self.layers = nn.ModuleList(made() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "data first":
            y = self.layers[0](x * 1) + x
            return self.last(self.layers[0](self.first(x)) + torch.tanh(y)).pow(2).mean()
        x = torch.tanh(self.first(x)) * 1.5  # what changes must not be what tanh keeps
        for layer in self.layers:
            if self.kind == "returned":
                x = torch.sin(layer(x)) + x
            elif self.kind == "named":
                y = torch.sin(x)
                x = layer(x, other=y) + y.sum(-1, keepdim=True)
            elif self.kind == "part":
                y = torch.cat([x, x.sin()], 1) * 1
                layer(y[:, 5:])
                x = torch.cos(y[:, 5:] + y[:, :5])
            else:
                y = layer(x)
                x = torch.sin(x) if y is None else torch.sin(y) + x
        return self.last(x).pow(2).mean()


KINDS = ("returned", "dropped", "part", "named", "block", "data first")


def train_changed(rank: int, expected: dict[str, tuple[list[Tensor], dict[str, Tensor]]]) -> None:
    for number, (kind, (losses, state)) in enumerate(expected.items()):
        build, graph = partial(Changes, kind), graph_of(Changes(kind))
        others = STRATEGIES if THOROUGH else [["owner", "shard"][number % 2]]
        for strategy in dict.fromkeys(["owner" if kind == "part" else "shard", *others]):
            model = OSDP(seeded(build), plan_of(build(), strategy, graph=graph))
            got = train_on((rank,), model, build()), model.full_state_dict(rank0_only=False)
            wanted = losses[rank :: len(EVERY_RANK)], state
            message = f"{kind} {strategy} "
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, said=message: said + text)


def test_what_modules_change_in_place_trains_as_in_one_process() -> None:
    expected = {}
    for kind in KINDS:
        alone = seeded(partial(Changes, kind))
        expected[kind] = train_on(EVERY_RANK, alone, Changes(kind)), dict(alone.state_dict())
    run_everywhere(train_changed, expected)
