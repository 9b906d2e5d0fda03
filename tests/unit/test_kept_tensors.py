"""Tensors that a model keeps from step to step: predicted against steps that compute."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from trace_models import source

from profiler.trace.trace import trace_model

WIDTH = 64
MICRO_BATCH = 8
CACHES, CHANGED = ("once", "for each size", "for the last size"), ("replaced", "averaged")


class Keeper(nn.Module):
    """Blocks between two layers, of which one is wide; what it keeps is no parameter and no buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept: dict[object, Tensor] = {}
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        self.wide = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "once":  # like a mask that depends on the length
            if "mask" not in self.kept:
                self.kept["mask"] = torch.rand(x.shape[1], WIDTH)
            x = x * self.kept["mask"]
        elif self.how in ("for each size", "for the last size"):
            if x.shape not in self.kept:
                if "last" in self.how:
                    self.kept.clear()
                self.kept[x.shape] = torch.rand(x.shape)
            x = x * self.kept[x.shape]
        elif self.how in ("once, unread", "for each size, unread", "for the last size, unread"):
            # Like positions of an image, cached by its shape, of which another head than this one's makes use.
            shape = x.shape[1:] if self.how.startswith("once") else x.shape
            if shape not in self.kept:
                if "last" in self.how:
                    self.kept.clear()
                self.kept[shape] = torch.rand(*shape, 4)
        for block in self.blocks:
            x = block(x)
        wide = torch.relu(self.wide(x))
        if self.how == "replaced":  # like a cache of one entry
            self.kept["last"] = wide.detach() + 1
        elif self.how == "averaged":  # in place, outside buffers
            self.kept.setdefault("mean", torch.zeros(wide.shape[1:])).lerp_(wide.detach().mean(0), 0.1)
        elif self.how == "growing":
            self.kept[len(self.kept)] = wide.detach() + 1
        return wide.sum()


@pytest.mark.parametrize(
    ("recomputes", "how"),
    some(
        [
            *product(
                [False, True], ["nothing", *(f"{how}{read}" for how in CACHES for read in ("", ", unread")), *CHANGED]
            )
        ],
        2,
    ),
)
def test_what_a_model_keeps_is_counted(how: str, recomputes: bool) -> None:
    model = source(lambda: Keeper(how), (16, WIDTH))
    graph = trace_model(model)
    again = [block.name for block in graph.blocks] if recomputes else []
    plan = plan_of(graph, cluster(1, 4), {one.name: "shard" for one in graph.operators}, again, micro_batch=MICRO_BATCH)
    assert -0.001 <= compare(plan, model, graph, cluster(1, 4), with_data=True).error <= 0.01
    assert not any("not counted" in note for note in graph.notes)


def test_what_grows_is_said() -> None:
    notes = trace_model(source(lambda: Keeper("growing"), (16, WIDTH))).notes
    (note,) = (one for one in notes if one.startswith("not counted"))
    got_bytes = int(note.split()[2])
    assert got_bytes > 0
    assert got_bytes % (16 * 8 * WIDTH * 4) == 0
    assert "more that the model keeps after each step" in note
