"""Habits of training loops: an optimizer made at any moment, steps of any number of micro-batches, torch's clipping."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH, some
from torch import nn
from torch.distributed.tensor import DTensor
from toys import (
    EVERY_RANK,
    GROUP,
    RANKS,
    STRATEGIES,
    Blocks,
    Toy,
    batch_of,
    loss_of,
    plan_of,
    refusal,
    run_everywhere,
    seeded,
)

build = partial(Blocks, frozen=False)
SAMPLE = build()
"""What batches and plans are made for."""
MIXED = "mixed"
"""Strategies in turn, operator by operator."""


def plan(name: str, accumulation: int = 1, ranks: tuple[int, int] = RANKS) -> Any:
    """Return a plan of one strategy, or of all in turn."""
    if name != MIXED:
        return plan_of(SAMPLE, name, accumulation=accumulation, ranks=ranks)
    names = plan_of(SAMPLE).choices
    choices = {one: STRATEGIES[-1 - index % len(STRATEGIES)] for index, one in enumerate(names)}
    return plan_of(SAMPLE, choices=choices, accumulation=accumulation, ranks=ranks)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every run."""
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int], number: int) -> None:
    """Train on the batches of these ranks."""
    batches = [batch_of(SAMPLE, rank, number) for rank in ranks]
    (sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def reference(steps: int) -> dict[str, torch.Tensor]:
    """Train in one process; return what it has learnt."""
    model = seeded(build)
    optimizer = adam(model.parameters())
    for number in range(steps):
        step(model, optimizer, EVERY_RANK, number)
    return dict(model.state_dict())


def forward(model: Any) -> None:
    """Run a forward with gradients, of which nothing comes."""
    args, kwargs = batch_of(SAMPLE, 0, 99)
    model(*args, **kwargs)


def make_optimizers_at_any_moment(rank: int, wanted: dict[str, torch.Tensor]) -> None:
    """After a forward, amid a step, and groups that are added later."""
    from osdp import OSDP

    for name in (*some(STRATEGIES, 3), MIXED):
        model = OSDP(seeded(build), plan(name))
        before = [id(parameter) for parameter in model.parameters()]
        forward(model)
        assert [id(parameter) for parameter in model.parameters()] == before, name
        first, *others = model.parameters()
        optimizer = adam([first])
        for number in range(STEPS):
            args, kwargs = batch_of(SAMPLE, rank, number)
            loss = loss_of(model(*args, **kwargs))
            if others:
                optimizer.add_param_group({"params": list(model.parameters())[1:]})
                others = []
            loss.backward()
            assert all(parameter.grad is not None or not parameter.requires_grad for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_an_optimizer_may_be_made_at_any_moment() -> None:
    run_everywhere(make_optimizers_at_any_moment, reference(STEPS))


def refuse_steps(rank: int) -> dict[str, str]:
    """Return what is said to optimizers of other parameters than those that rest; the parameters must not change."""
    from osdp import OSDP

    said = {}
    for name in (*some(STRATEGIES[1:], 3), "shard_grad", MIXED):
        made = seeded(build)
        early = adam(made.parameters())
        model = OSDP(made, plan(name))
        forward(model)
        gathered = adam(model.module.blocks[0].parameters())  # what a submodule has registered now
        args, kwargs = batch_of(SAMPLE, rank, 0)
        loss_of(model(*args, **kwargs)).backward()
        said[f"{name} early"] = refusal(early.step)
        is_resting = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in is_resting for parameter in gathered.param_groups[0]["params"]):
            said[f"{name} gathered"] = refusal(gathered.step)
        model.module.blocks[0].register_parameter("late", nn.Parameter(torch.ones(3)))
        said[f"{name} gathered later"] = refusal(adam(model.module.blocks[0].late for _ in range(1)).step)
        del model.module.blocks[0].late
        model.zero_grad()
        torch.testing.assert_close(model.full_state_dict(rank0_only=False), dict(seeded(build).state_dict()))
    return said


def test_an_optimizer_of_other_parameters_is_refused_at_its_first_step() -> None:
    by_rank = run_everywhere(refuse_steps)
    said = by_rank[0]
    assert by_rank[1:] == [said] * (len(by_rank) - 1)
    assert "shard early" in said
    assert "shard_grad gathered" in said
    for name, text in said.items():
        assert "make the optimizer after OSDP(...)" in text, name
        assert (
            "before OSDP(...)" if name.endswith("early") else "gathered for one step only, or were added later"
        ) in text, (name, text)


def reference_of_counts(counts: tuple[int, ...], max_norm: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process with so many micro-batches in each step; return what it has learnt and the norms."""
    model, norms = seeded(build), []
    optimizer = adam(model.parameters())
    for number, count in enumerate(counts):
        for micro_batch in range(count):
            batches = [batch_of(SAMPLE, rank, 10 * number + micro_batch) for rank in EVERY_RANK]
            (sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches) / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), norms


def train_any_count(
    rank: int, counts: tuple[int, ...], is_marked: bool, wanted: dict[str, torch.Tensor], norms: list[float]
) -> None:
    """Run other numbers of micro-batches than planned, marked by `no_sync` as the documents show, or not at all."""
    from osdp import OSDP

    for name in (*some(STRATEGIES, 3, first=1 + is_marked), MIXED):
        model = OSDP(seeded(build), plan(name, accumulation=3))
        optimizer = adam(model.parameters())
        for number, count in enumerate(counts):
            for micro_batch in range(count):
                args, kwargs = batch_of(SAMPLE, rank, 10 * number + micro_batch)
                with nullcontext() if micro_batch == count - 1 or not is_marked else model.no_sync():
                    (loss_of(model(*args, **kwargs)) / count).backward()
            assert model.clip_grad_norm_(0.05).item() == pytest.approx(norms[number], rel=1e-4), (name, number)
            optimizer.step()
            optimizer.zero_grad()
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("counts", "is_marked"),
    # Of three that are planned.  Unmarked, a fourth micro-batch would be the first of another step.
    [((1, 4, 2), True), ((1, 3, 2), False)],
)
def test_steps_may_have_any_number_of_micro_batches(counts: tuple[int, ...], is_marked: bool) -> None:
    run_everywhere(train_any_count, counts, is_marked, *reference_of_counts(counts, max_norm=0.05))


def clip_by_habit(rank: int) -> list[str]:
    """Clip by torch's function as it was imported before OSDP was; return what was said where that cannot be right."""
    from osdp import OSDP

    said = []
    for turn, norm_type in enumerate((2.0, float("inf"))):
        alone = seeded(build)
        batches = [batch_of(SAMPLE, each, 0) for each in EVERY_RANK]
        (sum(loss_of(alone(*args, **kwargs)) for args, kwargs in batches) / len(batches)).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type)
        wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
        for name in (*some(STRATEGIES, 2, turn), MIXED):
            model = OSDP(seeded(build), plan(name))
            args, kwargs = batch_of(SAMPLE, rank, 0)
            loss_of(model(*args, **kwargs)).backward()
            if model.sharded.finishes_in_optimizer_step:
                said.append(refusal(lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
                model.finish_gradients()
            got = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            assert got.item() == pytest.approx(norm.item(), rel=1e-4), (name, norm_type)
            for shard in model.sharded.local_shards:
                if shard.numel:
                    part = wanted[shard.name][shard.slices]
                    torch.testing.assert_close(shard.local(shard.parameter.grad), part, rtol=1e-4, atol=1e-6)
    return said


def test_torch_clips_what_osdp_shards() -> None:
    for said in run_everywhere(clip_by_habit):
        # odc, odc_ordered and the mixture, for each of two norms; unless thorough, the first two for one of them
        assert len(said) == (6 if THOROUGH else 4)
        assert all("model.clip_grad_norm_(max_norm)" in text for text in said)


class ThirdParty(torch.optim.Optimizer):
    """An optimizer of nobody's that goes from parameter to parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.update(parameter, self.state[parameter])

    def update(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Subtract half of the gradient."""
        parameter.data.sub_(0.5 * parameter.grad)


class Lion(ThirdParty):
    """Chen et al., "Symbolic discovery of optimization algorithms", 2023: one moment, and steps of its sign."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        moment = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.sub_(1e-2 * (0.9 * moment + 0.1 * parameter.grad).sign())
        moment.lerp_(parameter.grad, 0.01)


class EightBits(ThirdParty):
    """Momentum in blocks of eight bits, each with its scale, of the memory that this rank has."""

    BLOCK = 4
    CODES = 0.1 * (0.9 + 0.9 + 0.81)
    """What two runs of three steps may differ by, in codes: the rounding of the first step reaches the second and the
    third, that of the second the third, each by half a code in either run, if a rank's blocks begin elsewhere."""

    def update(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        values, gradient = (
            (one.to_local() if isinstance(one, DTensor) else one).view(-1) for one in (parameter, parameter.grad)
        )
        if not state:
            state["codes"] = torch.zeros(-(-values.numel() // self.BLOCK), self.BLOCK, dtype=torch.int8)
            state["scales"] = torch.zeros(len(state["codes"]), 1)
        moment = (state["codes"] * state["scales"]).view(-1)
        moment[: len(gradient)].mul_(0.9).add_(gradient)
        values.sub_(moment[: len(gradient)], alpha=0.1)
        blocks = moment.view(-1, self.BLOCK)
        state["scales"] = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        state["codes"] = (blocks / state["scales"]).round().to(torch.int8)


class Derived(torch.optim.Adafactor):
    """What somebody made of another's."""


def optimizers_of_others(model: nn.Module) -> dict[str, list[torch.optim.Optimizer]]:
    """Return optimizers of all kinds: of whole tensors, with others for what they do not take, and of third parties."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    rest = [parameter for parameter in parameters if parameter.dim() != 2]
    return {
        "Adafactor": [torch.optim.Adafactor(parameters, lr=1e-2)],
        "Derived": [Derived(parameters, lr=1e-2)],
        "Muon": [torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(rest, lr=1e-2)],
        "LBFGS": [torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)],
        "ThirdParty": [ThirdParty(parameters)],
        "Lion": [Lion(parameters)],
        "EightBits": [EightBits(parameters)],
    }


WHOLE, PARTS = ("replicate", "owner"), tuple(dict.fromkeys(("shard", GROUP, "odc:2")))
RUNS = {
    "Adafactor": (WHOLE, PARTS),
    "Derived": ((), ("shard",)),
    "Muon": (WHOLE, PARTS),
    "LBFGS": (("replicate",), (*PARTS, "owner")),
    "ThirdParty": ((*WHOLE, *PARTS), ()),
    "Lion": ((*WHOLE, "shard"), ()),
    "EightBits": ((*WHOLE, "shard"), ()),
}
"""Under what each trains as in one process, and under what it is refused."""


def step_optimizers_of_others(rank: int) -> dict[str, str]:
    """Step where tensors are whole as one process does, unless thorough in turn; return what is said elsewhere."""
    from osdp import OSDP

    def advance(model: nn.Module, optimizers: list[torch.optim.Optimizer], ranks: Sequence[int], number: int) -> None:
        batches = [batch_of(SAMPLE, each, number) for each in ranks]

        def closure() -> Any:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches)
            loss.backward()
            return loss

        closure()
        for optimizer in optimizers:
            optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()

    said = {}
    for name, (trains, _) in RUNS.items():
        alone = seeded(build)
        optimizers_alone = optimizers_of_others(alone)[name]
        for number in range(STEPS):
            advance(alone, optimizers_alone, EVERY_RANK, number)
        for strategy in some(trains, 2):
            model = OSDP(seeded(build), plan(strategy))
            optimizers = optimizers_of_others(model)[name]
            for number in range(STEPS):
                advance(model, optimizers, [rank], number)
            got = model.full_state_dict(rank0_only=False)
            for key, parameter in alone.named_parameters():
                scales = optimizers_alone[0].state[parameter].get("scales", torch.zeros(1))
                atol = 1e-5 + EightBits.CODES * float(scales.max())
                torch.testing.assert_close(got[key], parameter.data, rtol=1e-4, atol=atol)
    for strategy in dict.fromkeys(one for _, refuses in RUNS.values() for one in refuses):
        model = OSDP(seeded(build), plan(strategy))
        for name in (name for name, (_, refuses) in RUNS.items() if strategy in refuses):
            optimizers = optimizers_of_others(model)[name]
            said[f"{name} {strategy}"] = refusal(lambda: advance(model, optimizers, [rank], 0))  # noqa: B023
            model.zero_grad()
            torch.testing.assert_close(model.full_state_dict(rank0_only=False), dict(seeded(build).state_dict()))
    return said


def test_optimizers_of_whole_tensors_are_refused_where_there_are_parts() -> None:
    by_rank = run_everywhere(step_optimizers_of_others)
    assert len({str(said.keys()) for said in by_rank}) == 1
    assert len(by_rank[0]) == (11 if THOROUGH else 8)
    for said in by_rank:
        for name, text in said.items():
            known = name.split()[0].replace("Derived", "Adafactor")
            assert f"{known} computes with whole tensors" in text, text


def clear_and_step(model: Any, optimizer: Any, ranks: Sequence[int], clears: str, zeros: bool) -> None:
    """Clear gradients amid steps, and step after that."""
    for number in range(3):
        for micro in range(3):
            with model.no_sync() if micro < 2 and hasattr(model, "no_sync") else nullcontext():
                batches = [batch_of(SAMPLE, each, 10 * number + micro) for each in ranks]
                (sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches)).backward()
            if micro == 1:
                {"optimizer": optimizer, "model": model}[clears].zero_grad(set_to_none=not zeros)
                if number == 1:
                    break  # Adam steps on zeros too
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeros)


def give_up_steps(rank: int, wanted: dict[bool, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Clear gradients amid steps as one process does, and step after that; return what is refused.

    Unless thorough, two of the plans each way, and one of them by the optimizer as well as by the model.
    """
    from osdp import OSDP

    said = {}
    for zeros in (True, False):
        for name in some(("replicate", "group_shard:2", "odc:2", MIXED), 2, zeros):
            either = THOROUGH or name in ("odc:2", MIXED)
            model = None
            for clears in ("optimizer", "model") if either else ("optimizer" if zeros else "model",):
                if model is None or name not in ("odc:2", MIXED):
                    model = OSDP(seeded(build), plan(name, ranks=(2, 2)))
                    optimizer = adam(model.parameters())
                if clears == "optimizer" and name in ("odc:2", MIXED):
                    said[f"{name} {zeros}"] = refusal(lambda: clear_and_step(model, optimizer, [rank], clears, zeros))  # noqa: B023
                    model.zero_grad()  # as it says: then the model is as it was
                    continue
                clear_and_step(model, optimizer, [rank], clears, zeros)
                got = model.full_state_dict(rank0_only=False)
                where = f"{name}, {clears}, zeros {zeros}: "
                torch.testing.assert_close(
                    got, wanted[zeros], rtol=1e-4, atol=2e-5, msg=lambda text, where=where: where + text
                )
    model = OSDP(seeded(build), plan("group_shard:2", accumulation=2, ranks=(2, 2)))
    step_of_a_part = adam(list(model.parameters())[:1])
    args, kwargs = batch_of(SAMPLE, rank, 0)
    loss_of(model(*args, **kwargs)).backward()
    said["part"] = refusal(step_of_a_part.zero_grad)
    return said


def test_gradients_that_wait_are_cleared_or_refused() -> None:
    wanted = {}
    for zeros in (True, False):
        alone = seeded(build)
        clear_and_step(alone, adam(alone.parameters()), range(4), "model", zeros)
        wanted[zeros] = dict(alone.state_dict())
    for said in run_ranks(give_up_steps, 4, wanted, ranks_per_node=2):
        assert len(said) == (5 if THOROUGH else 3)
        assert all("cannot clear gradients that wait" in text and "model.zero_grad()" in text for text in said.values())
        assert "13 of 14 parameters of another optimizer" in said["part"]


class Scaled(Toy):
    """A layer and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Any) -> Any:
        """(batch, 5, 6) -> a loss."""
        return (self.layer(x) * self.scale).pow(2).mean()


def step_by_closure(rank: int) -> None:
    """Train by closures, also beside such a parameter, with fewer micro-batches than planned, and by whole tensors."""
    from osdp import OSDP

    def advance(model: nn.Module, ranks: list[int], kind: Any) -> None:
        optimizer = kind(model.parameters(), lr=0.1)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(model(*batch_of(sample, each)[0]) for each in ranks) / len(ranks)
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)

    sample = Scaled()
    for kind in (torch.optim.SGD, torch.optim.Adafactor):
        alone = seeded(Scaled)
        advance(alone, [0, 1], kind)
        for name in ("shard", "owner", "replicate") if kind is torch.optim.SGD else ("owner",):
            for accumulation in (1, 2):
                plan = plan_of(sample, name, ranks=(1, 2), accumulation=accumulation)
                model = OSDP(seeded(Scaled), plan)
                advance(model, [rank], kind)
                torch.testing.assert_close(model.full_state_dict(rank0_only=False), dict(alone.state_dict()))


def test_closures_train_as_in_one_process() -> None:
    run_ranks(step_by_closure, 2)
