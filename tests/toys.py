"""Small models with one odd trait each, plans for them, and what tests on ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from parity import cluster_of
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH
from torch import Tensor, nn
from traced_once import graph_once

from osdp.models.user_factory import source_of
from planner.plan import ClusterRef, Plan, Prediction, cluster_fingerprint, model_ref
from planner.strategies.registry import known_strategies
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model

RANKS = (2, 2) if THOROUGH else (1, 2)
"""Nodes, and ranks on each, of tests of models and loops: those of parity and of drawn loops have four every time."""
EVERY_RANK = range(prod(RANKS))
STRATEGIES = [str(s) for s in known_strategies(cluster_of(*RANKS)) if not s.offload]
GROUP = "group_shard:2" if THOROUGH else "shard"
"""Two ranks are one group."""
WITH_OFFLOAD = [*STRATEGIES, "shard+offload", "owner+offload", "replicate+offload"]


class Toy(nn.Module):
    """A model of 6 features that infers nothing about its inputs."""

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, 5, 6),), {}


class InPlace(Toy):
    """Changes what its layers return, views and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        y = self.first(x)
        y *= 2
        z = self.second(torch.tanh(y))
        z += x
        w = self.norm(z)
        w *= 3
        return w.pow(3).mean()


class Irregular(Toy):
    """Runs its layers a number of times that the caller says, and a layer only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, times: int = 2, third: bool = True) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        for _ in range(times):
            x = x + torch.tanh(self.second(self.first(x) * self.scale))
        return (self.third(x) if third else x).pow(2).mean()


@dataclass
class Result:
    """What no pytree knows."""

    loss: Tensor
    hidden: Tensor


class Block(nn.Module):
    """A residual branch with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same shape."""
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Blocks(Toy):
    """Two blocks, buffers, a frozen layer, and outputs of every form."""

    def __init__(self, output: str = "tensor", dropout: float = 0.0, frozen: bool = True) -> None:
        super().__init__()
        self.output = output
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(6, 3)
        self.blocks[0].down.requires_grad_(not frozen)
        self.register_buffer("mask", torch.rand(6) + 0.5)
        self.register_buffer("offset", torch.rand(5, 1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        """(batch, 5, 6) -> a loss, alone or among others."""
        x = x * self.mask + self.offset
        for block in self.blocks:
            x = block(x)
        y = self.head(x)
        loss = y.pow(2).mean()
        forms = {"tensor": loss, "tuple": (loss, [y]), "dict": {"loss": loss, "y": y}, "dataclass": Result(loss, y)}
        return forms[self.output]


def loss_of(output: Any) -> Tensor:
    """Return the loss out of any form of output."""
    match output:
        case Tensor():
            return output
        case tuple():
            return output[0] + output[1][0].mean()
        case dict():
            return output["loss"] + output["y"].mean()
        case Result():
            return output.loss + output.hidden.mean()
    raise TypeError(output)


def plan_of(
    model: nn.Module,
    default: str = "shard",
    choices: Mapping[str, str] | None = None,
    *,
    accumulation: int = 1,
    recomputed: tuple[str, ...] = (),
    selective: tuple[str, ...] = (),
    offloaded: tuple[str, ...] = (),
    ranks: tuple[int, int] = RANKS,
    precision: str = "fp32",
    master_weights: str = "",
    graph: ModelGraph | None = None,
) -> Plan:
    """Return a plan for a model, traced if need be, on so many nodes and ranks per node."""
    traced, cluster = graph or graph_of(model, precision, master_weights), cluster_of(*ranks)
    return Plan(
        schema=Plan.SCHEMA,
        model=model_ref(traced),
        cluster=ClusterRef(cluster.name, cluster_fingerprint(cluster), *ranks),
        optimizer="adam",
        limit_bytes=1 << 40,
        micro_batch=2,
        accumulation=accumulation,
        predicted=Prediction(0, {}, "", 1.0, {}, 1.0),
        gap=0.0,
        choices={operator.name: (choices or {}).get(operator.name, default) for operator in traced.operators},
        recomputed_blocks=list(recomputed),
        selectively_recomputed_blocks=list(selective),
        offloaded_blocks=list(offloaded),
    )


def run_everywhere(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(rank, *args)` returns on `RANKS`."""
    return run_ranks(function, len(EVERY_RANK), *args, ranks_per_node=RANKS[1])


def graph_of(model: nn.Module, precision: str = "fp32", master_weights: str = "") -> ModelGraph:
    """Return the traced model; OSDP, given a plan of it, finds it traced, whatever length its inputs have."""
    settings = precision, "cpu", None, master_weights, 1.0
    graph = graph_once(
        model, "toy", (*settings, 1), lambda: trace_model(source_of(model, "toy", None, None), *settings)
    )
    return graph_once(model, "toy", (*settings, graph.sequence_length), lambda: graph)


def seeded(build: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """Return what a factory makes under a seed."""
    torch.manual_seed(seed)
    return build()


def batch_of(model: nn.Module, rank: int, step: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of forward that every rank and step has others of."""
    torch.manual_seed(1000 * step + rank)
    made: tuple[tuple[Any, ...], dict[str, Any]] = model.example_inputs(2)  # type: ignore[operator]
    return made


def train_on(ranks: Iterable[int], model: nn.Module, like: nn.Module) -> list[Tensor]:
    """Train a model on the batches that one `like` it makes for some ranks; return their losses."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for step in range(STEPS):
        losses = [model(*batch_of(like, rank, step)[0]) for rank in ranks]
        torch.stack(losses).mean().backward()
        found += [one.detach() for one in losses]
        optimizer.step()
        optimizer.zero_grad()
    return found


def refusal(function: Callable[[], Any]) -> str:
    """Return the words of the OsdpError that a call raises; fails if it raises none."""
    try:
        function()
    except OsdpError as error:
        return str(error)
    raise AssertionError("nothing was refused")
