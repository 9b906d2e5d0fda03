"""Loops that do not go as planned: failed backwards, steps given up, values that change behind a forward's back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from toys import Blocks, Irregular, Toy, batch_of, loss_of, plan_of, refusal, seeded

build = partial(Blocks, frozen=False)


def step_of(model: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> float:
    """Run a step of the mean loss of some batches; return the loss."""
    loss = torch.stack([loss_of(model(*args, **kwargs)) for args, kwargs in batches]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose every step is plain to see."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def trained(steps: list[int]) -> dict[str, Tensor]:
    """Return the parameters after steps over the batches of both ranks, in one process."""
    model = seeded(build)
    optimizer = sgd(model)
    for step in steps:
        step_of(model, optimizer, [batch_of(build(), rank, step) for rank in range(2)])
    return model.state_dict()


def fails_in_backward(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Raise in the middle of a backward, on all ranks, and go on."""
    args, kwargs = batch_of(build(), rank, 5)
    handle = model.module.blocks[1].register_full_backward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model(*args, **kwargs)).backward()
    handle.remove()
    model.zero_grad()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def is_given_up(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Begin a step and give it up."""
    args, kwargs = batch_of(build(), rank, 5)
    with model.no_sync():
        loss_of(model(*args, **kwargs)).backward()
    model.zero_grad()


def runs_forward_alone(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Run a forward between backward and step, then another step."""
    args, kwargs = batch_of(build(), rank, 1)
    loss_of(model(*args, **kwargs)).backward()
    model(*args, **kwargs)
    with torch.inference_mode():
        model.predict(*args, **kwargs)
    optimizer.step()
    optimizer.zero_grad()


class Predicting(Blocks):
    """Has a method that is no forward."""

    def predict(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        return loss_of(self(x))


LOOPS: dict[Callable[..., None], list[int]] = {
    fails_in_backward: [0, 2],
    is_given_up: [0, 2],
    runs_forward_alone: [0, 1, 2],
}
"""Odd things to do between two steps, and the steps that count."""
UNIFORM = ("replicate", "shard", "shard_grad", "group_shard:2", "owner")
PLANS = {"mixed": "shard_grad"} | {name: name for name in UNIFORM}


def odd_loops(rank: int, loop: Callable[..., None]) -> dict[str, dict[str, Tensor]]:
    """Return the parameters after a step, an odd thing and another step, by plan."""
    from osdp import OSDP

    found = {}
    for name, strategy in some(list(PLANS.items()), 3, list(LOOPS).index(loop)):
        model = seeded(partial(Predicting, frozen=False))
        choices = {"blocks.0.up": "owner", "head": "replicate"} if name == "mixed" else {}
        model = OSDP(model, plan_of(model, strategy, choices, ranks=(2, 2)))
        optimizer = sgd(model)
        step_of(model, optimizer, [batch_of(build(), rank % 2, 0)])
        loop(model, optimizer, rank % 2)
        step_of(model, optimizer, [batch_of(build(), rank % 2, 2)])
        found[name] = model.full_state_dict(rank0_only=False)
    return found


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_next_step_is_as_if_nothing_had_happened(loop: Callable[..., None]) -> None:
    wanted = trained(LOOPS[loop])
    for result in run_ranks(odd_loops, 4, loop, ranks_per_node=2):
        for name in result:
            for key, value in wanted.items():
                torch.testing.assert_close(result[name][key], value, rtol=1e-5, atol=1e-6, msg=f"{name} {key}")


def short_step(rank: int, gives_up: bool) -> dict[str, Tensor]:
    """Run a step with one micro-batch under a plan of three, or give it up and run another that is marked."""
    from osdp import OSDP

    model = OSDP(seeded(build), plan_of(build(), "group_shard:2", accumulation=3, ranks=(2, 2)))
    optimizer = sgd(model)
    args, kwargs = batch_of(build(), rank % 2, 0)
    loss_of(model(*args, **kwargs)).backward()
    if gives_up:
        model.zero_grad()
        model.sync()
        step_of(model, optimizer, [batch_of(build(), rank % 2, 0)])
    else:
        optimizer.step()
    return model.full_state_dict(rank0_only=False)


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_step_with_fewer_micro_batches_than_planned(gives_up: bool) -> None:
    wanted = trained([0])
    for parameters in run_ranks(short_step, 4, gives_up, ranks_per_node=2):
        torch.testing.assert_close(parameters, dict(wanted), rtol=1e-5, atol=1e-6)


class Sharing(Toy):
    """Two modules share a buffer, and so do two names of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        shared = torch.rand(6) + 1
        self.first.register_buffer("scale", shared)
        self.second.register_buffer("scale", shared)
        self.register_buffer("late", shared, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        x = torch.tanh(self.first(x) * self.first.scale)
        return (self.second(x) * self.second.scale * self.late).pow(2).mean()


def shared_buffers(rank: int) -> list[tuple[list[float], bool]]:
    """Return the buffers of a model made on the ranks, and whether they still are one."""
    from osdp import OSDP

    found = []
    for strategy in ("replicate", "shard", "owner"):
        plan = plan_of(Sharing(), strategy, ranks=(1, 2))
        torch.manual_seed(3)
        model = OSDP(Sharing, plan)
        first, second, late = model.module.first.scale, model.module.second.scale, model.module.late
        found.append((second.tolist(), first is second is late))
    return found


def test_shared_buffers_stay_one() -> None:
    wanted = seeded(Sharing).second.scale.tolist()
    for found in run_ranks(shared_buffers, 2):
        assert found == [(wanted, True)] * 3


def refusals(rank: int, folder: str) -> list[str]:
    """Return how odd requests are refused."""
    from osdp import OSDP

    path = Path(folder) / ("there.yaml" if rank == 0 else "missing.yaml")
    path.parent.mkdir(exist_ok=True)
    if rank == 0:
        path.write_text("schema: osdp.description/1\nprecision: fp32\n")
    found = [refusal(lambda: OSDP(build(), path, "2GB"))]
    for strategy in ("shard", "shard_grad", "owner"):
        model = OSDP(seeded(build), plan_of(build(), strategy, ranks=(1, 2)))
        args, kwargs = batch_of(build(), rank)
        loss = loss_of(model(*args, **kwargs))
        found.append(refusal(lambda loss=loss: loss.backward(create_graph=True)))
        found.append(refusal(partial(_differentiate_inside, model, args, kwargs)))
    return found


def _differentiate_inside(model: Any, args: Any, kwargs: Any) -> None:
    """Ask for gradients of gradients between the outputs of two blocks, not of the model's own."""
    hidden = list[Tensor]()
    handles = [block.register_forward_hook(lambda *seen: hidden.append(seen[-1])) for block in model.module.blocks[:2]]
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    torch.autograd.grad(hidden[1].sum(), hidden[0], create_graph=True)


def test_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run_ranks(refusals, 2, str(tmp_path), timeout_s=60)
    assert "missing.yaml" in first[0]
    assert first[0] == second[0]
    assert all("gradients of gradients" in message for message in [*first[1:], *second[1:]])


def skips_layers(rank: int) -> list[dict[str, Tensor]]:
    """Train a model whose steps leave out a layer now and then."""
    from osdp import OSDP

    found = []
    for strategy in ("replicate", "shard", "owner"):
        model = OSDP(seeded(Irregular), plan_of(Irregular(), strategy, ranks=(1, 2)), find_unused_parameters=True)
        optimizer = sgd(model)
        for step, third in enumerate((True, False, True)):
            (args, _) = batch_of(Irregular(), rank, step)
            step_of(model, optimizer, [(args, {"third": third})])
        found.append(model.full_state_dict(rank0_only=False))
    return found


def test_layers_that_a_step_leaves_out() -> None:
    model = seeded(Irregular)
    optimizer = sgd(model)
    for step, third in enumerate((True, False, True)):
        step_of(model, optimizer, [(batch_of(Irregular(), rank, step)[0], {"third": third}) for rank in range(2)])
    for found in run_ranks(skips_layers, 2):
        for parameters in found:
            torch.testing.assert_close(parameters, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def thaw(model: nn.Module) -> None:
    """Let what the model froze train."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def thaws(rank: int) -> list[dict[str, Tensor]]:
    """Train a model with a frozen layer, and then that layer too; under all of these with --thorough."""
    from osdp import OSDP

    found = []
    for strategy in some(("shard", "replicate", "owner", "shard_grad"), 2):
        model = OSDP(seeded(Blocks), plan_of(Blocks(), strategy, ranks=(1, 2)))
        optimizer = sgd(model)
        for step in range(3):
            step_of(model, optimizer, [batch_of(Blocks(), rank, step)])
            if step == 0:
                thaw(model)
        found.append(model.full_state_dict(rank0_only=False))
    return found


def test_a_frozen_layer_that_is_thawed_trains() -> None:
    model = seeded(Blocks)
    optimizer = sgd(model)
    for step in range(3):
        step_of(model, optimizer, [batch_of(Blocks(), rank, step) for rank in range(2)])
        if step == 0:
            thaw(model)
    for found in run_ranks(thaws, 2):
        for parameters in found:
            torch.testing.assert_close(parameters, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
