"""How much memory it takes to shard a model that no rank could hold whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from toys import plan_of

from runtime.observe.live_bytes import LiveBytes

LAYERS, WIDTH = 16, 64
STRATEGIES = ("shard", "group_shard:2", "owner")
LAYER_BYTES = 2 * 4 * (WIDTH * WIDTH + WIDTH)


class Layer(nn.Module):
    """A block, and so a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> the same shape."""
        return x + self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    """Many layers, which the constructor initialises twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)

    def example_inputs(self, batch: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        """Return arguments of forward."""
        return (torch.randn(batch, WIDTH),), {}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) -> a loss."""
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def on_meta() -> nn.Module:
    """Return the model without data."""
    with torch.device("meta"):
        return Deep()


def peak_bytes(strategy: str, prepare: Callable[[], object]) -> int:
    """Return the most that tensors took while the model was sharded and filled."""
    from osdp import OSDP

    plan, model = plan_of(on_meta(), strategy, ranks=(2, 2)), prepare()
    with RealBytes() as live:
        OSDP(model, plan)
    return live.peak_bytes


def peaks(rank: int) -> list[int]:
    """Return that of every case."""
    return [peak_bytes(*case) for case in CASES]


class RealBytes(LiveBytes):
    """Leaves out tensors on the meta device, which take nothing."""

    def _count(self, storage: torch.UntypedStorage, op: str) -> None:
        if storage.device.type != "meta":
            super()._count(storage, op)


def as_factory() -> type[nn.Module]:
    """Return what makes the model."""
    return Deep


CASES = [(name, one) for name in STRATEGIES for one in some((as_factory, on_meta), 2, len(name))]


@pytest.fixture(scope="module")
def by_rank() -> list[list[int]]:
    return run_ranks(peaks, 4, ranks_per_node=2)


@pytest.mark.parametrize(("strategy", "prepare"), CASES)
def test_no_rank_ever_holds_the_whole(strategy: str, prepare: Callable[[], object], by_rank: list[list[int]]) -> None:
    whole = LAYERS * LAYER_BYTES
    share = {"shard": whole / 4, "group_shard:2": whole / 2, "owner": whole / 4}[strategy]
    for of_rank in by_rank:
        peak = of_rank[CASES.index((strategy, prepare))]
        # Its share, and few layers at a time: one whole, its shard before and after, and rounding to 512 bytes.
        assert share <= peak <= share * 1.1 + 5 * LAYER_BYTES < whole
