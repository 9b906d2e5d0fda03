"""Modules that are registered at several places, or lie outside of blocks that run them, train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from exported import parallelize_of, source_of
from parity import cluster_of
from shared_modules import Handed, InAll, InOne
from thoroughness import some
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from toys import EVERY_RANK, RANKS, STRATEGIES, graph_of, plan_of, run_everywhere, seeded, train_on

MODELS = [InAll, partial(InAll, has_gain=True), InOne, partial(InOne, has_gain=True), Handed]


def train_shared(rank: int, build: Callable[[], nn.Module]) -> None:
    """Train under one strategy and under several, with blocks that run again."""
    from osdp import OSDP

    reference = seeded(build)
    train_on(EVERY_RANK, reference, InAll())
    graph = graph_of(build())
    names, blocks = [operator.name for operator in graph.operators], tuple(block.name for block in graph.blocks)
    mixed = {name: ("shard", "owner", "replicate")[index % 3] for index, name in enumerate(names)}
    for name, choices in (*((one, {}) for one in some(["shard", *STRATEGIES], 2)), ("shard", mixed)):
        plan = plan_of(build(), name, choices, recomputed=blocks[:1], selective=blocks[1:2], graph=graph)
        model = OSDP(seeded(build), plan)
        train_on((rank,), model, InAll())
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", MODELS)
def test_shared_modules_train_as_in_one_process(build: Callable[[], nn.Module]) -> None:
    run_everywhere(train_shared, build)


def train_exported(rank: int, build: Callable[[], nn.Module], source: str) -> None:
    """Train an exported module."""
    reference = seeded(build)
    train_on(EVERY_RANK, reference, InAll())
    model = parallelize_of(source)(seeded(build), init_device_mesh("cpu", (len(EVERY_RANK),)))
    train_on((rank,), model, InAll())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name).data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [InAll, Handed])
def test_exported_modules_wrap_shared_ones_first(build: Callable[[], nn.Module]) -> None:
    source = source_of(plan_of(build(), "shard"), graph_of(build()), cluster_of(*RANKS))
    run_everywhere(train_exported, build, source)
