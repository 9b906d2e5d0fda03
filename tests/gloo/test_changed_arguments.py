"""What blocks change in lists, dicts and dataclasses that they are handed, the code around sees under every plan."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from lists import Changes
from thoroughness import THOROUGH
from torch import Tensor, nn
from toys import EVERY_RANK, STRATEGIES, graph_of, plan_of, run_everywhere, seeded, train_on

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
