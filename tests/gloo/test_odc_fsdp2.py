"""Units that pull and push against PyTorch's own FSDP2 on the same model, policy and data; and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH, some
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from toys import Blocks, Toy, batch_of, graph_of, loss_of, plan_of, refusal, seeded

from osdp import OSDP
from planner.plan import Plan
from runtime.odc.one_sided_unit import OneSidedUnit

RANKS = 4 if THOROUGH else 2
MICRO_BATCHES = 2


class Adapted(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it, as LoRA has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(.., inputs) -> (.., outputs)."""
        return self.base(x) + self.up(self.down(x))


class Adapters(Toy):
    """Frozen layers, adapters, a frozen embedding-like layer alone, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(Adapted(6, 10), nn.ReLU(), Adapted(10, 6)) for _ in range(2))
        self.tied = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.tied[1].weight = self.tied[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.tied[1](torch.tanh(self.tied[0](x))).pow(2).mean()


SAMPLE = Adapters()
"""What batches are made for: all models have such inputs."""


def plan_in(model: nn.Module, choice: str, precision: str, recomputes: bool = False) -> Plan:
    """Return a plan for one node that gives all operators the same."""
    graph = graph_of(model, precision)
    blocks = tuple(block.name for block in graph.blocks) if recomputes else ()
    return plan_of(model, choice, accumulation=MICRO_BATCHES, recomputed=blocks, ranks=(1, RANKS), graph=graph)


def sharded_by_torch(model: nn.Module, precision: str) -> nn.Module:
    """Return the model under FSDP2, without anything of ours."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if precision == "bf16" else {}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by name."""
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in named.items() if gradient is not None}  # type: ignore[attr-defined]


def run(model: nn.Module, rank: int, complete: Callable[[], None]) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Train; return the gradients of every step, and all losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    gradients, losses = [], []
    for step in range(STEPS):
        for k in range(MICRO_BATCHES):
            args, kwargs = batch_of(SAMPLE, rank, 10 * step + k)
            loss = loss_of(model(*args, **kwargs))
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        complete()
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return gradients, losses


def blocks_in_bf16() -> nn.Module:
    """Return blocks with buffers in bf16: on others OSDP leaves fp32 what FSDP2 casts where a unit begins."""
    model = Blocks()
    model.mask, model.offset = model.mask.to(torch.bfloat16), model.offset.to(torch.bfloat16)
    return model


MODELS: list[tuple[Callable[[], nn.Module], str]] = [(Adapters, "fp32"), (Adapters, "bf16"), (blocks_in_bf16, "bf16")]


def _both(rank: int) -> list[str]:
    """Train models under FSDP2 and under ours; return what was compared.

    Unless thorough, of models in bf16 each has one of the two strategies.
    """
    compared = []
    ways = [(f"odc:{RANKS}", False), (f"odc_ordered:{RANKS}", True)]
    for number, (build, precision) in enumerate(MODELS):
        wanted = run(sharded_by_torch(seeded(build), precision), rank, lambda: None)
        for choice, recomputes in ways if precision == "fp32" else some(ways, 2, number):
            model = OSDP(seeded(build), plan_in(build(), choice, precision, recomputes))
            windows = [unit.spec.dtype for group in model.sharded.units[-1].groups for unit in group.units]
            assert set(windows) == {torch.bfloat16 if precision == "bf16" else torch.float32}
            got = run(model, rank, model.finish_gradients)
            # Of the first step, gradients differ by the order of additions in fp32; later, weights may be
            # rounded to another bf16, which has 8 bits of mantissa.
            assert list(got[0][0]) == list(wanted[0][0])
            torch.testing.assert_close(got[0][0], wanted[0][0], rtol=2e-6, atol=1e-7)
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-4}
            torch.testing.assert_close(got, wanted, **tolerance)
            compared.append(f"{build.__name__} {precision} {choice}")
    return compared


def test_the_same_as_fsdp2_under_the_same_policy() -> None:
    assert [len(set(names)) for names in run_ranks(_both, RANKS)] == [6 if THOROUGH else 4] * RANKS


def _refused(rank: int) -> list[str]:
    """Return what is said to parameters that are trained late, and to several dtypes in a unit."""
    said = []
    model = OSDP(seeded(Blocks), plan_of(Blocks(), "odc:2", ranks=(1, 2)))
    model.module.blocks[0].down.weight.requires_grad_(True)
    model.module.blocks[0].up.requires_grad_(False)  # so that as many or fewer gradients come as before
    args, kwargs = batch_of(Blocks(), rank)
    said.append(refusal(lambda: loss_of(model(*args, **kwargs)).backward()))
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    fully_shard(mixed)
    said.append(refusal(lambda: OneSidedUnit("mixed", mixed, None)))  # type: ignore[arg-type]
    assert OneSidedUnit("mixed", mixed, torch.bfloat16).spec.dtype is torch.bfloat16  # type: ignore[arg-type]
    return said


def test_refusals() -> None:
    for thawed, mixed in run_ranks(_refused, 2):
        assert "trains parameters that were frozen when it was wrapped\n  got: 1 that now require gradients" in thawed
        assert "unit mixed has parameters of several dtypes" in mixed
        assert "torch.bfloat16, torch.float32" in mixed
