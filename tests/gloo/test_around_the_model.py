"""What people do to a model besides training it: penalties, hooks, averages, copies, and state dicts of PyTorch."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import torch
from thoroughness import STEPS, some
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from toys import EVERY_RANK, STRATEGIES, Blocks, batch_of, loss_of, plan_of, refusal, run_everywhere, seeded

build = partial(Blocks, frozen=False)
ASKED = some(STRATEGIES, 3)
"""Those whose gradients are looked at: unless thorough, the three things of this file have strategies in turn."""


def sharded(name: str, accumulation: int = 1) -> Any:
    """Return a model under a strategy, or under all in turn."""
    from osdp import OSDP

    names = plan_of(build()).choices
    choices = {one: STRATEGIES[i % len(STRATEGIES)] for i, one in enumerate(names)} if name == "mixed" else {}
    default = "shard" if name == "mixed" else name
    return OSDP(seeded(build), plan_of(build(), default, choices, accumulation=accumulation))


def loss_on(model: nn.Module, rank: int, number: int = 0) -> Tensor:
    """Return the loss of a rank's batch."""
    args, kwargs = batch_of(build(), rank, number)
    return loss_of(model(*args, **kwargs))


def penalty(model: nn.Module) -> Tensor:
    """Return the part of an L2 penalty that is of what this rank holds."""
    held = (one.to_local() if isinstance(one, DTensor) else one for one in model.parameters())
    return 0.01 * sum((one.pow(2).sum() for one in held), torch.zeros(()))


def ask_for_gradients(rank: int) -> list[str]:
    """Penalize parameters as one process does, and return what is said of what cannot be."""
    said = []
    for name in (*ASKED, "mixed"):
        alone, model = seeded(build), sharded(name, accumulation=2)
        for number in range(2):
            each = sum(loss_on(alone, one, number) for one in EVERY_RANK) / len(EVERY_RANK)
            ((each + penalty(alone)) / 2).backward()
            ((loss_on(model, rank, number) + penalty(model)) / 2).backward()
        model.finish_gradients()
        for shard in model.sharded.local_shards:
            if shard.numel:
                wanted = alone.get_parameter(shard.name).grad[shard.slices]
                torch.testing.assert_close(shard.local(shard.parameter.grad), wanted, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        if name == "replicate":
            continue
        seen: list[int] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda one, seen=seen: seen.append(id(one)))
        model.sync()
        loss = loss_on(model, rank)
        for unused in (False, True):
            said.append(refusal(lambda: torch.autograd.grad(loss, [*model.parameters()], allow_unused=unused)))  # noqa: B023
        if name != "mixed":
            wrong = sum(one.pow(2).sum() for one in model.parameters())
            said.append(refusal((loss + wrong).backward))
        loss.backward()
        assert sorted(set(seen)) == sorted(id(parameter) for parameter in model.parameters())
        model.zero_grad()
        handle = next(iter(model.parameters())).register_hook(print)
        said.append(refusal(lambda: loss_on(model, rank)))  # noqa: B023
        handle.remove()
        loss_on(model, rank)
    return said


def test_gradients_are_right_or_refused() -> None:
    by_rank = run_everywhere(ask_for_gradients)
    assert by_rank[1:] == by_rank[:1] * (len(by_rank) - 1)
    for text in by_rank[0]:
        known = ("parameters alone", "register_post_accumulate_grad_hook", "parameter.to_local()")
        assert any(part in text for part in known), text
    assert len(by_rank[0]) == 4 * len(ASKED) - 1


def average(rank: int) -> None:
    """Average as AveragedModel does in one process, evaluate with that, export it whole, and go on."""
    from osdp.averaging import AveragedParameters

    alone = seeded(build)
    wanted = AveragedModel(alone, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    wanted.update_parameters(alone)  # the first is a copy
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(STEPS):
        (sum(loss_on(alone, one, number) for one in EVERY_RANK) / len(EVERY_RANK)).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.update_parameters(alone)
    for name in (*some(STRATEGIES, 3, 1), "mixed"):
        model = sharded(name)
        mean = AveragedParameters(model, decay=0.8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(STEPS):
            loss_on(model, rank, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update()
        with mean.applied(), torch.no_grad():
            got = loss_on(model, rank, 7)
            whole = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, loss_on(wanted.module, rank, 7).detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole, dict(wanted.module.state_dict()), rtol=1e-4, atol=1e-5)
        whole = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(whole, dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
        assert "osdp.averaging.AveragedParameters" in refusal(lambda: AveragedModel(model))  # noqa: B023
        assert "cannot be copied" in refusal(lambda: copy.deepcopy(nn.ModuleDict({"inner": model})))  # noqa: B023


def test_averages_are_those_of_one_process() -> None:
    run_everywhere(average)


def round_trip(rank: int) -> None:
    """State dicts by PyTorch's functions and by `torch.save` come back, of a model and of one around it."""
    for name in (*some(STRATEGIES, 3, 2), "mixed"):
        model = sharded(name)
        outer = nn.ModuleDict({"inner": model})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss_on(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        for module in (model, outer):
            state, moments = get_model_state_dict(module), get_optimizer_state_dict(module, optimizer)
            named = [key for key in (*state, *moments["state"]) if "module." in key]
            assert not named, (name, named)
            before = model.full_state_dict(rank0_only=False)
            file = io.BytesIO()
            torch.save(outer.state_dict(), file)
            state, moments = copy.deepcopy(state), copy.deepcopy(moments)
            loss_on(model, rank, 1).backward()
            optimizer.step()
            after = model.full_state_dict(rank0_only=False)
            set_model_state_dict(module, state)
            set_optimizer_state_dict(module, optimizer, moments)
            torch.testing.assert_close(model.full_state_dict(rank0_only=False), before, rtol=0, atol=0)
            optimizer.zero_grad()
            loss_on(model, rank, 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(model.full_state_dict(rank0_only=False), after, rtol=1e-5, atol=1e-6)
            file.seek(0)
            outer.load_state_dict(torch.load(file, weights_only=False))
            torch.testing.assert_close(model.full_state_dict(rank0_only=False), before, rtol=0, atol=0)


def test_state_dicts_of_pytorch_come_back() -> None:
    run_everywhere(round_trip)
