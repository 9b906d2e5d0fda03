"""Weights that hooks compute before each forward train as in one process, under plans that keep no whole parameters."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from itertools import product
from typing import Any

import computed_weights
import pytest
import torch
from computed_weights import WIDTH, build
from ranks import run_ranks
from thoroughness import STEPS, some
from torch import Tensor, nn

from osdp.api import OSDP
from profiler.errors import OsdpError

STRATEGIES = ("replicate", "shard", "shard_grad", "owner", "odc:2", "shard recompute", "owner recompute")
BATCH = 4


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def trained_alone(kind: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Return the losses of both ranks' batches and the state after each step of one process."""
    torch.manual_seed(0)
    model, found = build(kind), []
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(STEPS):
        outputs = model(torch.cat([batch(rank, step) for rank in range(2)])).chunk(2)  # one step of spectral norms
        losses = [(output - 1).square().mean() for output in outputs]
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append(([loss.item() for loss in losses], state))
    return found


def whole_tensors(model: nn.Module) -> dict[str, weakref.ref[Any]]:
    """Return references to the memory of what a model holds in parameters that are sharded, and computed weights."""
    found = dict[str, Tensor](model.named_parameters())
    for path, part in model.named_modules():
        found |= {f"{path}.{key}": value for key, value in vars(part).items() if isinstance(value, Tensor)}
    return {name: weakref.ref(tensor.untyped_storage()) for name, tensor in found.items() if tensor.dim()}


def train(rank: int, kind: str, strategy: str, how: str) -> list[tuple[float, dict[str, Tensor]]]:
    torch.manual_seed(0)
    pins = [f"*={strategy.split()[0]}", *(["blocks.*=recompute"] if "recompute" in strategy else [])]
    given: Any = build(kind) if how == "module" else lambda: build(kind)
    if how == "module":
        given(batch(rank, 9)).sum().backward()  # a model that has run
        given.zero_grad()
    before = whole_tensors(given) if how == "module" else {}
    if how == "module" and kind == "spectral_normed":
        torch.manual_seed(0)
        given.load_state_dict(build(kind).state_dict())  # its vectors are as new
    model = OSDP(given, {"pins": pins, "micro_batch": BATCH}, example_inputs=lambda count: torch.randn(count, WIDTH))
    gc.collect()
    if strategy.startswith(("shard", "odc")):
        assert not [name for name, one in before.items() if one() is not None], (kind, strategy)
    optimizer, found = torch.optim.Adam(model.parameters(), 0.01), []
    for step in range(STEPS):
        loss = (model(batch(rank, step)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), model.full_state_dict(rank0_only=False)))
    return found


CASES = [(kind, strategy, how) for (kind, how), strategy in product(computed_weights.CASES, STRATEGIES)]
random.Random(0).shuffle(CASES)


def train_each(rank: int, cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case: train(rank, *case) for case in cases}


def test_they_train_as_in_one_process() -> None:
    cases = some(CASES, 29)
    by_rank = run_ranks(train_each, 2, cases, timeout_s=300)
    for case in cases:
        for step, (losses, state) in enumerate(trained_alone(case[0])):
            for rank, found in enumerate(by_rank):
                loss, sharded = found[case][step]
                assert loss == pytest.approx(losses[rank], rel=1e-4), (case, step)
                for name, value in state.items():
                    assert torch.allclose(sharded[name], value, rtol=1e-3, atol=1e-5), (case, step, name)


def read_before_computed(rank: int) -> None:
    model = OSDP(
        build("weight_normed"),
        {"pins": ["*=shard"], "micro_batch": BATCH},
        example_inputs=lambda count: torch.randn(count, WIDTH),
    )
    weight = model.module.blocks[0].up.weight
    assert weight.shape == (2 * WIDTH, WIDTH)
    with pytest.raises(OsdpError, match=r"`blocks\.0\.up\.weight` is read before"):
        weight.square().sum()
    model(batch(rank, 0))
    assert torch.isfinite(model.module.blocks[0].up.weight).all()


def test_what_was_computed_before_is_not_read() -> None:
    run_ranks(read_before_computed, 2)
