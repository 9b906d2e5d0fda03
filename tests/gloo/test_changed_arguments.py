"""What blocks change in lists, dicts and dataclasses that they are handed, the code around sees under every plan."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from lists import Changes
from thoroughness import THOROUGH
from torch import Tensor, nn
from toys import EVERY_RANK, STRATEGIES, Toy, graph_of, plan_of, run_everywhere, seeded, train_on

DRAWS = range(100 if THOROUGH else 3)
CLOSE = {"fp32": {"rtol": 1e-4, "atol": 1e-5}, "bf16": {"rtol": 2e-2, "atol": 2e-3}}


def train_changes(rank: int, draw: int, precision: str) -> None:
    """Train with blocks that are one unit each, kept and recomputed, and with a mixture, as without sharding."""
    from osdp import OSDP

    def build() -> nn.Module:
        return Changes(draw)

    def run(name: str, choices: dict[str, str] | None = None, **again: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        plan = plan_of(build(), name, choices, precision=precision, graph=graph, **again)
        model = OSDP(seeded(build), plan)
        return train_on((rank,), model, Changes(0)), model.full_state_dict(rank0_only=False)

    drawn, graph = Random(draw), graph_of(build(), precision)
    blocks = tuple(block.name for block in graph.blocks)
    if precision == "fp32":
        reference = seeded(build)
        losses = train_on(EVERY_RANK, reference, Changes(0))
        expected = losses[rank :: len(EVERY_RANK)], dict(reference.state_dict())
    else:
        expected = run("replicate")
    mixed = {one.name: drawn.choice(STRATEGIES) for one in graph.operators}
    for got in (
        run(STRATEGIES[draw % len(STRATEGIES)]),
        run("shard"),
        run("shard", recomputed=blocks[:1], selective=blocks[1:]),
        run("shard", mixed, recomputed=tuple(drawn.sample(blocks, 2))),
    ):
        torch.testing.assert_close(got, expected, **CLOSE[precision])


@pytest.mark.parametrize("draw", DRAWS)
def test_changes_of_what_blocks_are_handed_are_seen(draw: int) -> None:
    run_everywhere(train_changes, draw, "bf16" if draw % 3 == 2 else "fp32")


@dataclass(frozen=True)
class State:
    """What blocks hand on."""

    value: Tensor
    parts: tuple[Tensor, ...] = ()
    name: str = ""


class Stateful(nn.Module):
    """A block that is handed a dataclass and returns another, with views in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state: State) -> State:
        """Of (batch, 6) -> the same."""
        value = self.first(torch.tanh(state.value))
        return State(
            self.second(torch.tanh(value)).view(-1, 6), (*state.parts, value.mean(1).detach()), state.name + "x"
        )


class Dataclasses(Toy):
    """Three such blocks, the value of each changed in place by the code around."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful() for _ in range(3))

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, 6),), {}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> a loss."""
        state = State(x)
        for block in self.blocks:
            state = block(state)
            state.value.mul_(2).add_(1)
        assert state.name == "xxx"
        return state.value.pow(2).mean() * torch.stack(state.parts).exp().mean()


def train_dataclasses(rank: int) -> None:
    """Train under every strategy, and recomputed, as without sharding."""
    from osdp import OSDP

    graph, reference = graph_of(Dataclasses()), seeded(Dataclasses)
    blocks = tuple(block.name for block in graph.blocks)
    losses = train_on(EVERY_RANK, reference, Dataclasses())
    expected = losses[rank :: len(EVERY_RANK)], dict(reference.state_dict())
    for strategy, again in (*((one, {}) for one in STRATEGIES), ("shard", {"recomputed": blocks})):
        model = OSDP(seeded(Dataclasses), plan_of(Dataclasses(), strategy, graph=graph, **again))
        got = train_on((rank,), model, Dataclasses()), model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, expected, **CLOSE["fp32"])


def test_blocks_hand_on_dataclasses() -> None:
    run_everywhere(train_dataclasses)
