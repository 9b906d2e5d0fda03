"""Habits of scripts around a model: each trains as in one process, or is refused with what to do instead.

What a loop puts into `.data` or reads by `.item()`, calls of parts of a model, attributes and layers that it sets on
it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from gradient_habits import (
    SAMPLE,
    Coder,
    Train,
    by_adversaries,
    by_autograd,
    by_gradients_of_ones_own,
    by_kept_gradients,
    by_vmap,
    each_step,
    finish,
    mean_of,
    sgd,
)
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from toys import Blocks, batch_of, plan_of, refusal, seeded

KNOWS_VMAP = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP2 gathers for a backward of what ran under vmap, as it does from torch 2.13 on."""
STRATEGIES = ("replicate", "shard", "shard_grad", "owner", "odc:2")
"""What two ranks of one node can run."""


def by_data(model: Any, ranks: Sequence[int]) -> list[float]:
    """Perturb and restore parameters by `.data =` between two backwards (SAM), and shrink them after each step."""
    optimizer, seen = sgd(model), []
    for number in range(STEPS):
        mean_of(ranks, lambda x: model(x).pow(2).mean(), number).backward()
        finish(model)
        before = [parameter.data.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.05 * parameter.grad
            parameter.grad.data = 0.5 * parameter.grad.data
        model.zero_grad()
        mean_of(ranks, lambda x: model(x).pow(2).mean(), number).backward()
        for parameter, kept in zip(model.parameters(), before, strict=True):
            parameter.data = kept
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data = 0.9 * parameter.data
        with torch.no_grad():
            seen.append(mean_of([0, 1], lambda x: model(x).pow(2).mean(), 90).item())
    return seen


def by_items(model: Any, ranks: Sequence[int]) -> list[float]:
    """Clip by hand, by numbers that Python has of gradients, and note numbers of weights."""
    optimizer, seen = sgd(model), []
    for number in range(STEPS):
        mean_of(ranks, lambda x: model(x).pow(2).mean(), number).backward()
        finish(model)
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = sum(gradient.data.norm(2).item() ** 2 for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(0.1 / norm)
        seen += [norm, *(float(parameter.detach().norm(1)) for parameter in model.parameters())]
        assert not any(torch.isnan(gradient).any() for gradient in gradients)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def by_teacher(model: Any, ranks: Sequence[int]) -> list[float]:
    """Train against a teacher that follows by `.data`, itself a frozen model of the same plan."""
    frozen = copy.deepcopy(seeded(Coder)).requires_grad_(False)
    teacher = type(model)(frozen, model.plan) if hasattr(model, "plan") else frozen
    optimizer, seen = sgd(model), []
    for number in range(STEPS):
        mean_of(ranks, lambda x: (model(x + 1) - teacher(x)).pow(2).mean(), number).backward()
        optimizer.step()
        optimizer.zero_grad()
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.data.mul_(0.5).add_(new.data, alpha=0.5)
        seen.append(mean_of([0, 1], lambda x: teacher(x).pow(2).mean(), 90).item())
    return seen


def by_parts(model: Any, ranks: Sequence[int]) -> list[float]:
    """Call parts of the model in place of the model."""
    return each_step(model, ranks, lambda x: model.decoder(model.block(model.encoder(x))).pow(2).mean())


def by_method(model: Any, ranks: Sequence[int]) -> list[float]:
    """Call a method with gradients."""
    return each_step(model, ranks, model.loss)


def by_hooks(model: Any, ranks: Sequence[int]) -> list[float]:
    """Train by what a hook has seen, of which the model's output knows nothing, without the output and with it."""
    seen: list[Tensor] = []
    handle = model.block.register_forward_hook(lambda module, args, output: seen.append(output))
    for with_output in (0, 1):
        each_step(model, ranks, lambda x: with_output * model(x).mean() + seen.pop().pow(2).mean())  # noqa: B023
    each_step(model, ranks, lambda x: (model(x), seen.pop().pow(2).mean())[1])
    handle.remove()
    return []


def by_attributes(model: Any, ranks: Sequence[int]) -> list[float]:
    """Set attributes of the model."""
    model.temperature = 0.5
    each_step(model, ranks, lambda x: model(x).pow(2).mean())
    model.boxed = True
    each_step(model, ranks, lambda x: model(x).y.pow(2).mean())
    model.boxed = False
    return [model.temperature]


def by_best(model: Any, ranks: Sequence[int]) -> list[float]:
    """Keep copies of a state dict, train on, and go back to it."""
    each_step(model, ranks, lambda x: model(x).pow(2).mean())
    best = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    each_step(model, ranks, lambda x: model(x).pow(2).mean())
    model.load_state_dict(best)
    return []


def by_operations(model: Any, ranks: Sequence[int]) -> list[float]:
    """Change weights by operations that take the whole of them, and by random numbers that functions draw."""
    seen = []
    for number, weight in enumerate((model.encoder.weight, model.block.up.weight)):
        torch.manual_seed(number)
        for change in CHANGES:
            with torch.no_grad():
                weight.copy_(change(weight))
                weight.add_(0.1 * torch.rand_like(weight) + 0.1)
            seen.append(float(f"{weight.norm():.6f}"))
        whole = getattr(weight, "full_tensor", lambda weight=weight: weight)()  # with its history
        seen.append(float(whole.detach().sum()))
        nn.init.eye_(weight)
        nn.init.orthogonal_(model.decoder.weight)  # with more columns than rows
        seen += torch.stack([one.norm() for one in model.parameters()]).tolist()
        each_step(model, ranks, lambda x: model(x).pow(2).mean())
    return seen


def by_plain(model: Any, ranks: Sequence[int]) -> list[float]:
    """Noise and averages that are plain tensors of the whole, beside parameters, and products written into these."""
    torch.manual_seed(3)
    seen = []
    with torch.no_grad():
        for parameter in model.parameters():
            noise, average = torch.rand(parameter.shape), torch.rand(parameter.shape)
            parameter.data = 0.9 * parameter.data + 0.1 * noise
            parameter.copy_(torch.where(noise > 0.5, parameter, 0.5 * average))
            torch._foreach_add_([parameter], [0.1 * noise])
            torch.sub(parameter, 0.05 * noise, out=parameter)
            average.lerp_(parameter, 0.1).add_(parameter.data)
            torch._foreach_lerp_([average], [parameter], 0.3)
            numbers = ((noise - parameter).norm(), average.sum(), nn.functional.mse_loss(parameter, noise))
            seen += [*map(float, numbers), float(torch.allclose(parameter, noise))]
            seen += [float(torch.equal(noise, parameter)), float(torch.equal(parameter, parameter.clone()))]
        weight, other = model.encoder.weight, torch.rand(6, 6)
        torch.mm(0.3 * other, other, out=weight.data)
        weight.copy_(torch.cat([weight[:2], (other @ weight)[2:]]) + torch.stack([weight, other]).mean(0))
        weight.div_(torch.dist(weight, other))
    optimizer = sgd(model)
    mean_of(ranks, lambda x: model(x).pow(2).mean(), 0).backward()
    finish(model)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():  # of which one is on every rank
        parameter.grad = parameter.grad / (norm + 1.0)
    optimizer.step()
    model.zero_grad()
    each_step(model, ranks, lambda x: model(x).pow(2).mean())
    return seen


def by_pairs(model: Any, ranks: Sequence[int]) -> list[float]:
    """Parameters of one shape combined."""
    one, other = model.encoder.bias, model.block.norm.weight
    with torch.no_grad():
        one.copy_(torch.lerp(one, other, 0.3) + torch.maximum(one, other))
        torch._foreach_mul_([other], [one])
        other.add_(other * one, alpha=0.5)
        norms = torch.stack([parameter.norm() for parameter in model.parameters()])  # on several meshes
        model.decoder.weight.div_(norms.norm()).add_(model.decoder.weight * one * model.block.norm.weight)
    each_step(model, ranks, lambda x: model(x).pow(2).mean())
    return [float(nn.functional.mse_loss(one.detach(), other.detach())), float((one - other).detach().norm())]


def by_file(model: Any, ranks: Sequence[int]) -> list[float]:
    """Go on from what one process has saved of its model and its optimizer."""
    alone = seeded(Coder)
    trained, optimizer = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (alone, model))
    mean_of([0, 1], lambda x: alone(x).pow(2).mean(), 0).backward()
    trained.step()
    model.load_state_dict(alone.state_dict())
    optimizer.load_state_dict(trained.state_dict())
    mean_of(ranks, lambda x: model(x).pow(2).mean(), 1).backward()
    optimizer.step()
    model.zero_grad()
    return []


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda weight: torch.linalg.qr(weight)[0] @ torch.linalg.qr(weight)[1],
    lambda weight: torch.linalg.svd(weight, full_matrices=False)[0].abs().sum(1, keepdim=True) * weight.sign(),
    lambda weight: weight / torch.linalg.matrix_norm(weight, 2),
    lambda weight: weight.cumsum(0),
    lambda weight: weight.softmax(0),
    lambda weight: nn.functional.normalize(weight, dim=0),
    lambda weight: nn.functional.normalize(weight, dim=1),
    lambda weight: torch.einsum("ij,kj,kl->il", weight, weight, weight),
    lambda weight: weight * torch.bernoulli(torch.full_like(weight, 0.5)),
    lambda weight: nn.functional.dropout(weight, 0.5),
    lambda weight: weight * torch.randint_like(weight, 1, 3),
)
"""What each returns is as large as the weight."""


LOOPS: tuple[Train, ...] = (
    by_data,
    by_items,
    by_best,
    by_parts,
    by_method,
    by_hooks,
    by_attributes,
    by_teacher,
    by_operations,
    by_plain,
    by_pairs,
    by_file,
    by_gradients_of_ones_own,
    by_autograd,
    by_kept_gradients,
    by_vmap,
    by_adversaries,
)
PLANS: dict[Train, tuple[str, ...]] = {
    by_pairs: ("owner", "shard"),
    by_gradients_of_ones_own: ("replicate", "shard"),
    by_autograd: ("replicate",),
    by_kept_gradients: ("replicate", "owner"),
    by_adversaries: ("odc:2",),
    by_vmap: ("owner", "shard") if KNOWS_VMAP else ("owner",),
}
"""Under what some are run, where not under replicate, odc and another."""


def train(rank: int, wanted: Sequence[tuple[list[float], dict[str, Tensor]]]) -> None:
    """Train by every habit under replicate and odc, and under one of the others unless thorough."""
    from osdp import OSDP

    for index, (habit, (numbers, values)) in enumerate(zip(LOOPS, wanted, strict=True)):
        others = STRATEGIES[1:] if THOROUGH else (STRATEGIES[1 + index % 3], "odc:2")
        for name in PLANS.get(habit, ("replicate", *others)):
            for accumulation in (1, 2) if THOROUGH else (1 + index % 2 if name == "replicate" else 1,):
                mixed = {"encoder": "owner" if name == "shard" else "shard", "decoder": "replicate"}
                is_mixed = habit is by_pairs or (habit is by_vmap and KNOWS_VMAP)
                choices = mixed if is_mixed else {}
                plan = plan_of(SAMPLE, name, choices, ranks=(1, 2), accumulation=accumulation)
                model = OSDP(seeded(Coder), plan)
                got = habit(model, [rank])
                message = f"{habit.__name__} under {name}, accumulation {accumulation}: "
                torch.testing.assert_close(got, numbers, rtol=1e-4, atol=1e-5, msg=lambda text, m=message: m + text)
                whole = model.full_state_dict(rank0_only=False)
                torch.testing.assert_close(whole, values, rtol=1e-4, atol=1e-5, msg=lambda text, m=message: m + text)


def test_habits_train_as_in_one_process() -> None:
    wanted = []
    for habit in LOOPS:
        alone = seeded(Coder)
        numbers = habit(alone, [0, 1])
        wanted.append((numbers, dict(alone.state_dict())))
    run_ranks(train, 2, wanted)


def step(model: Any) -> None:
    """Train a step on a batch that all ranks have alike."""
    optimizer = sgd(model)
    model(batch_of(SAMPLE, 0)[0][0]).pow(2).mean().backward()
    optimizer.step()
    model.zero_grad()


def replace(model: Any, what: str) -> None:
    """Put something else into the place of a parameter."""
    match what:
        case "head":
            model.decoder = nn.Linear(6, 3)
        case "inner head":
            model.module.decoder = nn.Linear(6, 3)
        case "tied":
            model.encoder.bias = model.block.norm.bias
        case "removed":
            model.decoder.bias = None
        case "parametrized":
            nn.utils.parametrize.register_parametrization(model.block.up, "weight", nn.Tanh())


def refuse(rank: int) -> dict[str, str]:
    """Return what is said of habits that cannot work."""
    from osdp import OSDP

    x, said = batch_of(SAMPLE, 0)[0][0], {}
    for name in STRATEGIES:
        plan = plan_of(SAMPLE, name, ranks=(1, 2))
        for what in ("head", "inner head", "tied", "removed", "parametrized"):
            model = OSDP(seeded(Coder), plan)
            step(model)
            replace(model, what)
            said[f"replaced {what} {name}"] = refusal(lambda: step(model))  # noqa: B023
            said[f"replaced {what} {name}, saved"] = refusal(model.full_state_dict)
        model = OSDP(seeded(Coder), plan)
        said[f"pickled {name}"] = refusal(lambda: pickle.dumps(model))  # noqa: B023
        said[f"converted {name}"] = refusal(model.bfloat16)
        assert model.to("cpu") is model
        if name == "replicate":
            said[f"shared {name}"] = refusal(lambda: OSDP(nn.Sequential(model.encoder), plan))  # noqa: B023
            for parameter in model.parameters():
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
            tenth = {key: 0.1 * parameter.detach() for key, parameter in model.named_parameters()}
            alone = torch.func.functional_call(seeded(Coder), tenth, (x,))
            torch.testing.assert_close(torch.func.functional_call(model, tenth, (x,)), alone)
            said[f"amid {name}"] = refusal(lambda: model(x).pow(2).mean().backward())  # noqa: B023
            continue
        values = {key: 2 * parameter.detach() for key, parameter in model.named_parameters()}
        model(x)  # what it leaves gathered is not taken for what somebody has put there
        said[f"replaced by functional_call {name}"] = refusal(lambda: torch.func.functional_call(model, values, (x,)))  # noqa: B023
        own = {key: values[f"encoder.{key}"] for key in ("weight", "bias")}
        said[f"functional_call {name}"] = refusal(lambda: torch.func.functional_call(model.encoder, own, (x,)))  # noqa: B023
        said[f"differentiated {name}"] = refusal(lambda: torch.func.jacrev(model)(x))  # noqa: B023
        whole = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
        said[f"not allowed {name}"] = refusal(lambda: torch.unique(whole))  # noqa: B023
        if name == "owner":
            biases = [one.detach() for one in model.parameters() if one.shape == (6,)]
            assert "different ranks own" in refusal(lambda: sum(biases))  # noqa: B023
            recomputed = OSDP(seeded(Blocks), plan_of(Blocks(), name, recomputed=("blocks.0",), ranks=(1, 2)))
            said["vmapped"] = refusal(lambda: torch.func.vmap(recomputed)(x))  # noqa: B023
        for call in (dist.all_gather_into_tensor, dist.all_to_all_single):
            assert "collective call" in refusal(lambda: call(torch.empty(12, 6), whole.detach()))  # noqa: B023
        said[f"beside {name}"] = refusal(lambda: whole + torch.ones(whole.shape, requires_grad=True))  # noqa: B023
        whole._in_backward_optimizers = []  # as `_apply_optimizer_in_backward` does
        said[f"never stepped {name}"] = refusal(lambda: step(model))  # noqa: B023
        del whole._in_backward_optimizers
        said[f"read {name}"] = refusal(lambda: numpy.asarray(whole.detach()))  # noqa: B023
        said[f"laid out otherwise {name}"] = refusal(lambda: setattr(whole, "data", torch.zeros(whole.shape)))  # noqa: B023
        step(model)
    return said


def test_what_cannot_be_followed_is_refused() -> None:
    known = {
        "replaced": "modules have other parameters than those that were sharded",
        "functional_call": "called with other parameters than its own",
        "pickled": "save model.full_state_dict()",
        "converted": "convert the model before OSDP(...)",
        "shared": "another OSDP model has layers of this one",
        "amid": "step after loss.backward()",
        "vmapped": "blocks.0 is recomputed, and runs under torch.func.vmap",
        "never stepped": "register_post_accumulate_grad_hook",
        "differentiated": "torch.func.grad, vjp, jvp and jacrev",
        "laid out": "p.data = 0.9 * p.data",
        "not allowed": "tensor.full_tensor()",
        "beside": "no gradients through them",
        "read": "tensor.full_tensor().numpy()",
    }
    by_rank = run_ranks(refuse, 2)
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0]) == 12 * len(STRATEGIES) + 3 + 8 * (len(STRATEGIES) - 1)
    for name, text in by_rank[0].items():
        assert next(part for start, part in known.items() if name.startswith(start)) in text, (name, text)
