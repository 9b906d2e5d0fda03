"""Blocks that run again are handed lists as they were, whoever has changed them since."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lists import Build, Lists
from toys import EVERY_RANK, graph_of, plan_of, run_everywhere, seeded, train_on


def train_lists(rank: int, build: Build) -> None:
    """Train with blocks recomputed, whole and selectively, that are several units each, and without sharding."""
    from osdp import OSDP

    reference = seeded(build)
    train_on(EVERY_RANK, reference, Lists())
    graph = graph_of(build())
    blocks = tuple(block.name for block in graph.blocks)
    apart = {one.name: "owner" if "first" in one.name else "shard" for one in graph.operators}
    for name, choices in (("shard", apart), ("replicate", {})):
        for again in ({"recomputed": blocks}, {"selective": blocks}):
            model = OSDP(seeded(build), plan_of(build(), name, choices, **again, graph=graph))
            train_on((rank,), model, Lists())
            got = model.full_state_dict(rank0_only=False)
            torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


KINDS = [Lists, partial(Lists, in_dict=True), partial(Lists, kind="adds"), partial(Lists, kind="takes", in_dict=True)]


@pytest.mark.parametrize("build", KINDS)
def test_lists_are_as_they_were_when_blocks_run_again(build: Build) -> None:
    run_everywhere(train_lists, build)
