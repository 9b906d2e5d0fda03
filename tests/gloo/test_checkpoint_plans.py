"""A run saved under plan A on 4 ranks continues under plan B on 2 ranks as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import (
    MAX_NORM,
    Case,
    Trained,
    batches,
    blocks_of,
    cluster_of,
    compare,
    graph_of,
    initial,
    optimizer_of,
    reference,
)
from ranks import run_ranks
from thoroughness import some

from planner.strategies.notation import format_choice
from planner.strategies.registry import known_strategies

SAVED_AFTER, STEPS, SHARES = 2, 4, 4
"""Every step's data is in 4 shares: one a rank, or two a rank one after the other."""


def mixture(family: str, nodes: int, ranks_per_node: int, seed: int) -> Case:
    """Return a random strategy for every operator, some in slices."""
    draw = random.Random(seed)
    known = known_strategies(cluster_of(nodes, ranks_per_node))
    choices = {}
    for operator in graph_of(family).operators:
        cut = operator.kind == "Linear" and len(operator.modules) == 1 and draw.random() < 0.5
        choices[operator.name] = format_choice([draw.choice(known) for _ in range(draw.randint(2, 3) if cut else 1)])
    recomputed = tuple(block for block in blocks_of(family) if draw.random() < 0.5)
    accumulation = SHARES // (nodes * ranks_per_node)
    return Case(family, choices, "shard", recomputed, "fp32", accumulation, nodes, ranks_per_node)


def run(rank: int, case: Case, folder: str, first: int, last: int) -> Trained | None:
    """Train the steps from `first` to `last`; continue from, or leave, a checkpoint."""
    from osdp import OSDP
    from runtime.state.checkpoint import load, save

    model = OSDP(initial(case.family), case.plan())
    optimizer = optimizer_of(model.parameters())
    shards, norms = model.sharded.local_shards, []
    if first:
        with torch.no_grad():  # so that nothing but the checkpoint can be what it goes on from
            for parameter in model.parameters():
                parameter.zero_()
        assert load(f"{folder}/step-{first}", model.module, shards, optimizer) == {"step": first}
    for step in batches(case.family, SHARES, 1, STEPS)[first:last]:
        for index in range(case.accumulation):
            args, kwargs = step[0][index * case.world_size + rank]
            loss = model(*args, **kwargs)
            (loss / case.accumulation).backward()
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    if last < STEPS:
        save(f"{folder}/step-{last}", model.module, shards, optimizer, {"step": last}, asynchronous=True).wait()
    parameters = model.full_state_dict()
    return Trained([], norms, parameters) if rank == 0 else None


# Unless thorough, onto fewer ranks; below, and in test_checkpoint_layouts.py, onto more too.
@pytest.mark.parametrize(
    ("family", "before", "after"),
    some([("uneven", 4, 2), ("gpt2", 4, 2), ("bert", 4, 2), ("gpt2", 2, 4), ("llama", 4, 2)], 5),
)
def test_a_run_continues_under_another_plan_on_other_ranks(
    family: str, before: int, after: int, tmp_path: Path
) -> None:
    saving, resuming = (mixture(family, ranks // 2, 2, seed=ranks) for ranks in (before, after))
    run_ranks(run, before, saving, str(tmp_path), 0, SAVED_AFTER, ranks_per_node=2)
    got: Trained = run_ranks(run, after, resuming, str(tmp_path), SAVED_AFTER, STEPS, ranks_per_node=2)[0]
    wanted = reference(family, SHARES, 1, steps=STEPS)
    compare(got, Trained([], wanted.norms[SAVED_AFTER:], wanted.parameters))


def test_a_run_under_odc_continues_under_shard_on_other_ranks_and_back(tmp_path: Path) -> None:
    """Optimizer states too: Adam's moments decide the later steps."""
    plans = (("odc:2", 2, 2, 0, 2), ("shard", 1, 2, 2, 3), ("odc_ordered:4", 1, 4, 3, STEPS))
    norms: list[float] = []
    for choice, nodes, ranks_per_node, first, last in plans:
        ranks = nodes * ranks_per_node
        case = Case("gpt2", {}, choice, (), "fp32", SHARES // ranks, nodes, ranks_per_node)
        got: Trained = run_ranks(run, ranks, case, str(tmp_path), first, last, ranks_per_node=ranks_per_node)[0]
        norms += got.norms
    compare(Trained([], norms, got.parameters), replace(reference("gpt2", SHARES, 1, steps=STEPS), losses=[]))
