"""Layers that run at once by vmap: inside of blocks that are sharded whole they train as in one process."""

from __future__ import annotations

import torch
from ensembles import Between
from toys import EVERY_RANK, graph_of, plan_of, refusal, run_everywhere, seeded, train_on


def train_ensembles(rank: int) -> str:
    """Train under strategies for all; return how a layer that is sharded by itself is refused."""
    from osdp import OSDP

    like, reference = Between(), seeded(Between)
    graph = graph_of(like)
    train_on(EVERY_RANK, reference, like)
    for strategy in ("shard", "replicate"):
        model = OSDP(seeded(Between), plan_of(like, strategy, graph=graph))
        train_on((rank,), model, like)
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)
    apart = {one.name: "replicate" for one in graph.operators if "base" not in one.name}
    model = OSDP(seeded(Between), plan_of(like, "shard", apart, graph=graph))
    return refusal(lambda: train_on((rank,), model, like))


def test_ensembles_train_as_in_one_process() -> None:
    for told in run_everywhere(train_ensembles):
        assert "under vmap" in told
        assert "blocks.*=shard" in told
