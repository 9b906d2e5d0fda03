"""Units that pull and push: they train what one process trains, whatever each rank does in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    FAMILIES,
    MAX_NORM,
    Case,
    Trained,
    batches,
    blocks_of,
    check,
    graph_of,
    initial,
    optimizer_of,
    reference,
)
from ranks import run_ranks
from thoroughness import THOROUGH, some

IN_TURN = {"gpt2": 0, "bert": 1, "llama": 2, "uneven": 3}
"""The way that a family has, unless thorough."""


@pytest.mark.parametrize("families", [(family,) for family in FAMILIES] if THOROUGH else [FAMILIES])
def test_all_of_a_model_in_one_group(families: tuple[str, ...]) -> None:
    """Unless thorough, a family each: alone, accumulated and recomputed, in bf16, and ordered."""
    cases = []
    for family in families:
        ways = [
            Case(family, {}, "odc:4", nodes=1, ranks_per_node=4),
            Case(family, {}, "odc:4", nodes=1, ranks_per_node=4, accumulation=2, recomputed=tuple(blocks_of(family))),
            Case(family, {}, "odc:4", nodes=1, ranks_per_node=4, precision="bf16"),
            Case(family, {}, "odc_ordered:4", nodes=1, ranks_per_node=4, accumulation=2),
        ]
        cases += ways if THOROUGH else [ways[IN_TURN[family]]]
    check(cases)


def test_groups_reduce_across_each_other() -> None:
    """Unless thorough, the one that accumulates, recomputes and computes in bf16."""
    cases = [
        Case("uneven", {}, "odc:2", accumulation=2, recomputed=tuple(blocks_of("uneven"))),
        Case("gpt2", {}, "odc:2", accumulation=2, precision="bf16", recomputed=tuple(blocks_of("gpt2"))),
        Case("llama", {}, "odc:2"),
    ]
    check(some(cases, 3, 1))


def test_beside_other_strategies() -> None:
    """Operators in turn, so that neighbours differ; the embedding is tied to the head."""
    others = (
        "odc:2",
        "shard",
        "replicate",
        "odc_ordered:2",
        "group_shard:2",
        "shard_grad",
        "owner",
        "hierarchical",
        "odc:2",
        "secondary_shard:2",
    )
    cases = []
    for shift, accumulation in some(((0, 1), (1, 2), (3, 2)), 3, 1):
        names = [operator.name for operator in graph_of("gpt2").operators]
        choices = {name: others[(index + shift) % len(others)] for index, name in enumerate(names)}
        choices["blocks.0.mlp.up"] = "split(odc:2, owner, odc:2, odc_ordered:2)"
        cases.append(Case("gpt2", choices, accumulation=accumulation, recomputed=("blocks.1",)))
    check(cases)


PER_PLAN = 1
"""Steps under each plan: moments that were loaded decide all but the first."""


def continues(rank: int, folder: Path, cases: Sequence[Case]) -> Trained | None:
    """Train a few steps under each plan, from the second on from the checkpoint of the one before."""
    from osdp import OSDP

    steps, norms = batches(cases[0].family, cases[0].world_size, 1, PER_PLAN * len(cases)), []
    for number, case in enumerate(cases):
        model, done = OSDP(initial(case.family), case.plan()), PER_PLAN * number
        optimizer = optimizer_of(model.parameters())
        if number:
            advance(model, optimizer, steps[-1][0][rank])  # so that windows are open already, and hold other values
            assert model.load_checkpoint(folder / str(done), optimizer) == {"step": done}
        for step in steps[done : done + PER_PLAN]:
            norms.append(advance(model, optimizer, step[0][rank]))
        model.save_checkpoint(folder / str(done + PER_PLAN), optimizer, {"step": done + PER_PLAN})
    parameters = model.full_state_dict()
    return Trained([], norms, parameters) if rank == 0 else None


def advance(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> float:
    """Run a step of one micro-batch; return the norm of its gradient."""
    args, kwargs = batch
    model(*args, **kwargs).backward()
    norm = float(model.clip_grad_norm_(MAX_NORM))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def test_a_run_continues_under_another_plan(tmp_path: Path) -> None:
    cases = [Case("gpt2", {}, choice) for choice in ("shard", "odc:2", "owner")]
    wanted = reference("gpt2", 4, 1, steps=PER_PLAN * len(cases))
    got = run_ranks(continues, 4, tmp_path, cases, ranks_per_node=2)[0]
    torch.testing.assert_close(got.norms, wanted.norms, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(got.parameters, wanted.parameters, rtol=1e-5, atol=2e-5)
