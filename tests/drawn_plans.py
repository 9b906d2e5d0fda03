"""Random models with random plans, each of which follows from a number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import torch
from drawn_models import Drawn
from parity import cluster_of
from torch import nn
from toys import plan_of

from planner.plan import Plan
from planner.strategies.registry import known_strategies
from profiler.model_graph import ModelGraph

DRAWS_PER_MODEL = 4
"""Draws in a row share a model, as its trace takes most of their time."""


@dataclass(frozen=True)
class Draw:
    """What follows from a number."""

    number: int
    ranks: tuple[int, int]
    """Nodes, and ranks of each."""
    graph: ModelGraph

    def build(self) -> nn.Module:
        """Return the model."""
        return Drawn(self.number // DRAWS_PER_MODEL, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters: where differences are none of rounding, or else the one that windows can publish."""
        return torch.float64 if self.number % DRAWS_PER_MODEL else torch.float32

    def plan(self, again: int = 0) -> Plan:
        """Return a random plan; of another `again`, another one."""
        draw = Random(f"plan {self.number} {again}")
        strategies = [str(one) for one in known_strategies(cluster_of(*self.ranks))]
        if self.dtype == torch.float64:
            strategies = [one for one in strategies if "odc" not in one]
        if draw.random() < 0.7:
            strategies = [one for one in strategies if "offload" not in one]
        default, choices = draw.choice(strategies), {}
        model = self.build()
        places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        for operator in self.graph.operators if draw.random() < 0.7 else ():
            can_split = operator.kind == "Linear" and len(operator.modules) == 1 and draw.random() < 0.3
            can_split = can_split and places[id(model.get_submodule(operator.name))] == 1
            slices = draw.choices(strategies, k=draw.randint(2, 3) if can_split else 1)
            choices[operator.name] = slices[0] if len(slices) == 1 else f"split({', '.join(slices)})"
        drawn = {block.name: draw.random() for block in self.graph.blocks}
        split = {one.block for one in self.graph.operators if choices.get(one.name, "").startswith("split")}
        whole = [block for index, block in enumerate(self.graph.blocks) if index not in split]
        selective = tuple(b.name for b in whole if b.selective_rerun and 0.3 <= drawn[b.name] < 0.55)
        offloaded = tuple(b.name for b in self.graph.blocks if b.offloadable_bytes(1) and drawn[b.name] < 0.15)
        recomputed = tuple(name for name, number in drawn.items() if number < 0.3 and name not in offloaded)
        micro_batches = draw.choice([1, 1, 2, 3])
        return plan_of(
            model, default, choices, accumulation=micro_batches, recomputed=recomputed, selective=selective,
            offloaded=offloaded,
            ranks=self.ranks,
            graph=self.graph,
        )  # fmt: skip
