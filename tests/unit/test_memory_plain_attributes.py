"""Memory of tensors that a constructor puts into plain attributes, neither as parameters nor as buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from osdp.models.user_factory import source_of
from profiler.trace.trace import trace_model

WIDTH, LENGTH = 32, 128
TABLE = LENGTH * WIDTH


class Positioned(nn.Module):
    """Adds a table of positions, as image models do that train at one size."""

    def __init__(self, hold: Callable[[nn.Module], None], table: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.table = table
        hold(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.table(self).to(x.device, x.dtype)
        return self.head(x.relu()).square().mean()


def positions() -> Tensor:
    return torch.ones(LENGTH, WIDTH)


def as_attribute(model: Any) -> None:
    model.positions = positions()


def in_a_list(model: Any) -> None:
    model.tables = {"all": [positions(), positions()]}


def in_two_places(model: Any) -> None:
    model.positions = model.embed.positions = positions()
    model.rows = model.positions[:8]


def never_read(model: Any) -> None:
    model.positions, model.spare = positions(), positions()


def of_a_buffer(model: Any) -> None:
    model.register_buffer("table_", positions())
    model.positions = model.table_.view(LENGTH, WIDTH)


def replaced(model: Any) -> Tensor:
    """A forward leaves another table of the same size."""
    model.positions = model.positions + 1
    return model.positions  # type: ignore[no-any-return]


HELD: dict[str, tuple[Callable[[Any], None], Callable[[Any], Tensor], int]] = {
    "an attribute": (as_attribute, lambda model: model.positions, 1),
    "a list in a dict": (in_a_list, lambda model: model.tables["all"][1], 2),
    "two places, and a view": (in_two_places, lambda model: model.positions, 1),
    "one more, never read": (never_read, lambda model: model.positions, 2),
    "a view of a buffer": (of_a_buffer, lambda model: model.positions, 1),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["shard", "replicate"])
@pytest.mark.parametrize("held", HELD)
def test_what_attributes_hold_is_there_throughout(held: str, strategy: str, precision: str) -> None:
    hold, table, number = HELD[held]
    source = source_of(lambda: Positioned(hold, table), held, None, lambda n: torch.randn(n, LENGTH, WIDTH))
    graph, machine = trace_model(source, precision), cluster(1, 4)
    plan = plan_of(graph, machine, dict.fromkeys((one.name for one in graph.operators), strategy))
    found = compare(plan, source, graph, machine)
    assert sum(one.numel for one in graph.buffers) == number * TABLE
    assert found.error == pytest.approx(0, abs=5e-3)
    assert found.rest_bytes >= 4 * number * TABLE


def test_what_a_forward_puts_in_its_place_counts_once() -> None:
    source = source_of(lambda: Positioned(as_attribute, replaced), "m", None, lambda n: torch.randn(n, LENGTH, WIDTH))
    graph, machine = trace_model(source), cluster(1, 4)
    found = compare(
        plan_of(graph, machine, dict.fromkeys([o.name for o in graph.operators], "shard")), source, graph, machine
    )
    assert graph.buffers == ()
    assert found.error == pytest.approx(0, abs=5e-3)
