"""Optimizers that step on local tensors, fused: they train as torch's own do, and keep states as those do."""

from __future__ import annotations

from typing import Any

import torch
from thoroughness import STEPS
from torch.distributed.tensor import DTensor
from toys import EVERY_RANK, GROUP, Blocks, batch_of, loss_of, plan_of, run_everywhere, seeded

from runtime.optimizers import OPTIMIZERS, as_priced

CHOICES = {"head": "replicate", "blocks.1.up": GROUP, "blocks.1.down": "owner"}
"""On several meshes, and one whole on a rank."""


def _trains(rank: int, name: str) -> list[str]:
    """Train with an optimizer in each of its forms, from the same start; return whether each state is a DTensor."""
    from osdp import OSDP

    forms: list[Any] = [OPTIMIZERS[name], OPTIMIZERS[f"fused_{name}"], as_priced(name)]
    trained, layouts = [], []
    for make in forms:
        model = OSDP(seeded(Blocks), plan_of(Blocks(), "shard", CHOICES))
        optimizer = make(model.parameters(), lr=0.05, weight_decay=0.01)
        for step in range(STEPS):
            args, kwargs = batch_of(Blocks(), rank, step)
            loss_of(model(*args, **kwargs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        trained.append(model.full_state_dict(rank0_only=False))
        layouts.append(
            [
                [(key, isinstance(state, DTensor), tuple(state.shape)) for key, state in optimizer.state[one].items()]
                for one in model.parameters()
            ]
        )
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=1e-5, atol=1e-6)
    assert layouts[1] == layouts[2] == layouts[0]
    return [type(make([torch.ones(1, requires_grad=True)])).__name__ for make in forms]


def _trains_all(rank: int) -> dict[str, list[str]]:
    return {name: _trains(rank, name) for name in ("adam", "adamw", "sgd")}


def test_every_form_trains_the_same() -> None:
    """Checkpoints name the class, and load whichever form saved them."""
    wanted = {"adam": ["Adam"] * 3, "adamw": ["AdamW"] * 3, "sgd": ["SGD"] * 3}
    assert run_everywhere(_trains_all) == [wanted] * len(EVERY_RANK)
