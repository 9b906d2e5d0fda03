"""Optimizers of `torch.optim` step as in one process, in every form, in one group over all strategies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import some
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from toys import plan_of, seeded

from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.dtensor_rows import whole_of

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {"t0": 1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
}
"""By class: settings that make all of its states."""
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


class Mixed(nn.Module):
    """Layers under several strategies, beside parameters without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 1)
        self.scale, self.none = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) -> a loss."""
        y = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return (y * self.scale + self.none.sum()).pow(2).mean()


STRATEGIES = {"first": "shard", "second": "owner", "last": "replicate"}


def inputs(batch: int) -> tuple[tuple[Tensor], dict[str, Any]]:
    return (torch.randn(batch, 6),), {}


def forms() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield classes and settings."""
    for name, settings in KINDS.items():
        for how in ("foreach", "fused") if name in FUSED else ("foreach",):
            yield name, settings | {how: True}
        yield name, settings | {"foreach": False}


def train(rank: int) -> list[str]:
    """Return what trained otherwise than in one process."""
    from osdp import OSDP

    graph = trace_model(ModelSource("mixed", Mixed, lambda _, batch: inputs(batch), 1))
    wrong = []
    for name, settings in forms():
        plan = plan_of(Mixed(), "shard", STRATEGIES, ranks=(1, 2), graph=graph)
        model, alone = OSDP(seeded(Mixed), plan, example_inputs=inputs), seeded(Mixed)
        optimizers = [getattr(torch.optim, name)(one.parameters(), **settings) for one in (model, alone)]
        for step in range(STEPS):
            torch.manual_seed(step)
            (x,), _ = inputs(4)
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                one(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        own, whole = optimizers[0].state, optimizers[1].state
        for (path, held), kept in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            layouts = {key: type(value) for key, value in own[held].items() if value is not None and value.dim()}
            if own[held].keys() != whole[kept].keys() or not set(layouts.values()) <= {type(held.data)}:
                wrong.append(f"{name} {settings}: {path} has states {layouts}")
        state = model.full_state_dict(rank0_only=False)
        wrong += [
            f"{name} {settings}: {path}"
            for path, value in alone.state_dict().items()
            if not torch.allclose(state[path], value, rtol=1e-5, atol=1e-6)
        ]
        before = seeded(Mixed).state_dict()
        assert all(not torch.equal(value, before[path]) for path, value in state.items() if value.numel())
    return wrong


def test_every_form_steps_as_in_one_process() -> None:
    assert run_ranks(train, 2) == [[], []]


def relay(rank: int) -> list[str]:
    """Step with gradients and states that are laid out otherwise than their parameters; return what was wrong."""
    from osdp import OSDP

    graph = trace_model(ModelSource("mixed", Mixed, lambda _, batch: inputs(batch), 1))
    wrong = []
    for how, form in some([*product(("whole", "replicated", "columns"), ("foreach", "fused", ""))], 4):
        plan = plan_of(Mixed(), "shard", STRATEGIES, ranks=(1, 2), graph=graph)
        model, alone = OSDP(seeded(Mixed), plan, example_inputs=inputs), seeded(Mixed)
        settings = {"lr": 0.01, form: True} if form else {"lr": 0.01, "foreach": False}
        kinds = [
            [kind(one.parameters(), **settings) for one in (model, alone)]
            for kind in (partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW)
        ]
        said: list[Any] = []
        kinds[0][0].register_step_post_hook(lambda one, args, kwargs, said=said: said.append(one.state_dict()))
        for step, optimizers in enumerate(kinds * 2):
            torch.manual_seed(step)
            (x,), _ = inputs(4)
            for one in (model, alone):
                one(x).backward()
            for parameter in model.parameters():
                if isinstance(parameter, DTensor):
                    parameter.grad = laid_out(parameter.grad, how)
                    for name, value in optimizers[0].state.get(parameter, {}).items():
                        if value.dim():
                            optimizers[0].state[parameter][name] = laid_out(value, how)
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                optimizer.step()
                one.zero_grad()
        state = model.full_state_dict(rank0_only=False)
        wrong += [
            f"{how} {form}: {path}"
            for path, value in alone.state_dict().items()
            if not torch.allclose(state[path], value, rtol=1e-5, atol=1e-6)
        ]
        assert [len(one["state"]) for one in said] == [8, 8]
    return wrong


def laid_out(tensor: Any, how: str) -> Tensor:
    whole: Tensor = whole_of(tensor).clone()
    if how == "whole":
        return whole
    return DTensor.from_local(whole, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim).redistribute(
        placements=[Replicate() if how == "replicated" or whole.dim() < 2 else Shard(1)] * tensor.device_mesh.ndim
    )


def test_gradients_and_states_may_be_laid_out_otherwise() -> None:
    assert run_ranks(relay, 2) == [[], []]


def read_anew(rank: int) -> list[float]:
    """Return sums of a row that was taken before steps."""
    from osdp import OSDP

    graph = trace_model(ModelSource("mixed", Mixed, lambda _, batch: inputs(batch), 1))
    model = OSDP(seeded(Mixed), plan_of(Mixed(), "shard", ranks=(1, 2), graph=graph), example_inputs=inputs)
    return sums_of(model, model.module.first.weight.detach()[1])


def sums_of(model: nn.Module, row: Tensor) -> list[float]:
    optimizer, sums = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        torch.manual_seed(step)
        model(inputs(4)[0][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(float(row.sum()))
    return sums


def test_rows_from_before_a_step_are_read_anew() -> None:
    alone = seeded(Mixed)
    wanted = sums_of(alone, alone.first.weight.detach()[1])
    assert len({round(one, 4) for one in wanted}) == STEPS
    assert run_ranks(read_anew, 2) == [pytest.approx(wanted, rel=1e-5)] * 2


def fail(rank: int) -> list[dict[int, list[str]]]:
    """Let a step under a plan raise."""
    from osdp import OSDP

    graph = trace_model(ModelSource("mixed", Mixed, lambda _, batch: inputs(batch), 1))
    return states_of(OSDP(seeded(Mixed), plan_of(Mixed(), "shard", ranks=(1, 2), graph=graph), example_inputs=inputs))


def states_of(model: nn.Module) -> list[dict[int, list[str]]]:
    """Return the names of states after a step that raises in its second group, and after the next."""
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": others}, {"params": [first]}], lr=0.1, momentum=0.9)
    model(inputs(4)[0][0]).backward()
    found = []
    for rate in ("none", 0.1):
        optimizer.param_groups[1]["lr"] = rate
        with pytest.raises(TypeError) if rate == "none" else nullcontext():
            optimizer.step()
        found.append({number: [*state] for number, state in optimizer.state_dict()["state"].items()})
    return found


def test_a_step_that_raises_leaves_the_states_of_plain_tensors() -> None:
    assert run_ranks(fail, 2) == [states_of(seeded(Mixed))] * 2
