"""Layers that run at once by vmap: gathered with their block they train as in one process."""

from __future__ import annotations

import torch
from ensembles import Between
from toys import EVERY_RANK, graph_of, plan_of, run_everywhere, seeded, train_on


def train_ensembles(rank: int) -> None:
    """Train under strategies for all, and others for the blocks, with the layer that others run as."""
    from osdp import OSDP

    like, reference = Between(), seeded(Between)
    graph = graph_of(like)
    train_on(EVERY_RANK, reference, like)
    for strategy, of_blocks in (("shard", "shard"), ("replicate", "replicate"), ("shard", "owner")):
        choices = {one.name: of_blocks for one in graph.operators if one.block is not None}
        model = OSDP(seeded(Between), plan_of(like, strategy, choices, graph=graph))
        train_on((rank,), model, like)
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


def test_ensembles_train_as_in_one_process() -> None:
    """Their own layer was refused once where a plan sharded it apart from those whose parameters it runs with."""
    run_everywhere(train_ensembles)
