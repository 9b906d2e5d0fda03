"""Random tensors of a trace: each share of a micro-batch draws alike, so that what graphs hold grows linearly."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from profiler.model_source import ModelSource
from profiler.trace.even_draws import EvenDraws
from profiler.trace.trace import trace_model

NODES, EDGES = 8, 24


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data(), st.integers(1, 4), st.booleans())
def test_shares_draw_alike(shape: list[int], data: st.DataObject, repeats: int, grows: bool) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    larger = [size * (repeats if at == dim else 1) for at, size in enumerate(shape)]
    draws = EvenDraws()
    draws.begin(1)
    _, make = draws.next(tuple(shape), 1, 11)
    draws.begin(repeats)
    _, make_all = draws.next(tuple(larger), 1, 1 + 10 * (repeats if grows else 1))
    one, shares = make(), make_all().chunk(repeats, dim)
    assert one.shape == torch.Size(shape)
    assert ((one >= 1) & (one < 11)).all()
    for number, share in enumerate(shares):
        torch.testing.assert_close(share, one + (10 * number if grows else 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "low", "high"), [((3, 5), 0, 7), ((6,), 0, 7), ((2, 3), 0, 8), ((2, 3), 1, 7), ((0, 3), 0, 7), ((), 0, 7)]
)
def test_what_did_not_grow_with_the_micro_batch_is_spread_over_its_range(
    shape: tuple[int, ...], low: int, high: int
) -> None:
    draws = EvenDraws()
    draws.begin(1)
    draws.next((1, 3), 0, 7)
    draws.begin(2)
    _, make = draws.next(shape, low, high)
    assert make().shape == torch.Size(shape)
    assert ((low <= make()) & (make() < high)).all()


def test_without_a_smaller_pass_all_is_spread() -> None:
    draws = EvenDraws()
    draws.begin(8)
    _, make = draws.next((2, 16), 0, 16)
    source, target = make().floor()
    assert not torch.equal(source, target)


class Graphs(nn.Module):
    """Convolutions over the edges of graphs in a batch, but for loops at a node, and with one loop for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 32), nn.Linear(32, 32), nn.Linear(32, 3)])

    def forward(self, x: Tensor, edges: Tensor, wanted: Tensor) -> Tensor:
        """(nodes, 9), (2, edges), (nodes,) -> a loss."""
        edges = edges[:, edges[0] != edges[1]]
        source, target = torch.cat([edges, torch.arange(x.shape[0], device=x.device).expand(2, -1)], 1)
        weight = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0])).rsqrt()
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(
                y.new_zeros(y.shape).index_add(0, target, y[source] * (weight[source] * weight[target])[:, None])
            )
        return F.cross_entropy(x, wanted)


def graphs(_: nn.Module, batch: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    nodes = NODES * batch
    return (torch.randn(nodes, 9), torch.randint(nodes, (2, EDGES * batch)), torch.randint(3, (nodes,))), {}


def test_edges_that_are_drawn_in_the_batch_are_planned() -> None:
    graph = trace_model(ModelSource("graphs", Graphs, graphs, 1))
    plan = plan_of(graph, cluster(2, 2), {one.name: "shard" for one in graph.operators}, micro_batch=16)
    torch.manual_seed(random.Random("edges").randrange(1 << 30))
    found = compare(plan, ModelSource("graphs", Graphs, graphs, 1), graph, cluster(2, 2), with_data=True)
    assert -0.005 <= found.error <= 0.1, found  # fewer of the edges are loops in larger graphs
