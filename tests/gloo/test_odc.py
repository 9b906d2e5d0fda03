"""Units that pull and push: they train what one process trains, whatever each rank does in between."""

from __future__ import annotations

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
from thoroughness import some


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_model_in_one_group(family: str) -> None:
    """Unless thorough, one of four ways, in turn."""
    cases = [
        Case(family, {}, "odc:4", nodes=1, ranks_per_node=4),
        Case(family, {}, "odc:4", nodes=1, ranks_per_node=4, accumulation=2, recomputed=tuple(blocks_of(family))),
        Case(family, {}, "odc:4", nodes=1, ranks_per_node=4, precision="bf16"),
        Case(family, {}, "odc_ordered:4", nodes=1, ranks_per_node=4, accumulation=2),
    ]
    check(some(cases, 4, FAMILIES.index(family)))


def test_groups_reduce_across_each_other() -> None:
    check(
        [
            Case("uneven", {}, "odc:2", accumulation=2, recomputed=tuple(blocks_of("uneven"))),
            Case("gpt2", {}, "odc:2", accumulation=2, precision="bf16", recomputed=tuple(blocks_of("gpt2"))),
            Case("llama", {}, "odc:2"),
        ]
    )


def test_beside_other_strategies() -> None:
    """Operators in turn, so that neighbours differ; the embedding is tied to the head."""
    others = (
        "odc:2",
        "shard",
        "replicate",
        "odc_ordered:2",
        "group_shard:2",
        "odc:2",
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


SAVED_AFTER, STEPS = 2, 5


def continues(rank: int, folder: Path, before: Case, after: Case) -> Trained | None:
    """Train a few steps under one plan, save, and train on under another from the checkpoint; train on with both."""
    from osdp import OSDP

    steps = batches(before.family, before.world_size, 1, STEPS)
    saved = OSDP(initial(before.family), before.plan())
    optimizer = optimizer_of(saved.parameters())
    for step in steps[:SAVED_AFTER]:
        advance(saved, optimizer, step[0][rank])
    saved.save_checkpoint(folder / "saved", optimizer, {"step": SAVED_AFTER})
    model = OSDP(initial(after.family), after.plan())
    other, norms = optimizer_of(model.parameters()), []
    advance(model, other, steps[-1][0][rank])  # so that windows are open already, and hold other values
    assert model.load_checkpoint(folder / "saved", other) == {"step": SAVED_AFTER}
    for step in steps[SAVED_AFTER:]:
        norms.append(advance(model, other, step[0][rank]))
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


@pytest.mark.parametrize(("before", "after"), [("shard", "odc:2"), ("odc:2", "owner")])
def test_a_run_continues_under_another_plan(before: str, after: str, tmp_path: Path) -> None:
    wanted = reference("gpt2", 4, 1, steps=STEPS)
    got = run_ranks(continues, 4, tmp_path, Case("gpt2", {}, before), Case("gpt2", {}, after), ranks_per_node=2)[0]
    torch.testing.assert_close(got.norms, wanted.norms[SAVED_AFTER:], rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(got.parameters, wanted.parameters, rtol=1e-5, atol=2e-5)
