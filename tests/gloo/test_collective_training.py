"""Models that run collectives themselves, trained as plain data parallelism on the same ranks trains them."""

from __future__ import annotations

import warnings
from itertools import cycle

import torch
import torch.distributed as dist
from collective_models import EXCHANGES, WIDTH, Compared, ExpertsOnRanks
from ranks import run_ranks
from thoroughness import THOROUGH
from toys import refusal

RANKS, STEPS, MICRO_BATCH, LR = 2, 2, 6, 0.5
PLANS = [
    ["*=shard", "blocks.0=replicate"],
    ["*=shard_grad", "blocks.1=recompute"],
    ["*=odc:2", "head=owner"],
    ["*=owner", "blocks.*=recompute"],
]


def batch(rank: int, step: int) -> torch.Tensor:
    """Return (MICRO_BATCH, WIDTH) samples of a rank."""
    return torch.randn(MICRO_BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def built(exchange: str, place: str) -> Compared:
    torch.manual_seed(0)
    return Compared(exchange, place, 2)


def by_hand(exchange: str, place: str, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and parameters of ranks that each have the whole model and average gradients."""
    model, losses = built(exchange, place), []
    for step in range(STEPS):
        loss = model(batch(rank, step))
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            with torch.no_grad():
                parameter -= LR * parameter.grad / RANKS
            parameter.grad = None
    return losses, dict(model.state_dict())


def compare(rank: int) -> list[str]:
    """Return where training differs."""
    from osdp import OSDP

    warnings.simplefilter("ignore", FutureWarning)
    wrong, plans = [], cycle(PLANS)
    for number, exchange in enumerate(EXCHANGES):
        for place in ("loss", "block") if THOROUGH else (("loss", "block")[number % 2],):
            description = {"micro_batch": MICRO_BATCH, "optimizer": "sgd", "pins": next(plans)}
            model = OSDP(built(exchange, place), description)
            optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
            for step in range(STEPS):
                loss = model(batch(rank, step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            wanted, parameters = by_hand(exchange, place, rank)
            found = model.full_state_dict(rank0_only=False)
            far = [name for name, one in parameters.items() if not torch.allclose(found[name], one, atol=1e-6)]
            told = [f"{exchange} in the {place}, {description['pins']}: {losses}, {wanted}, {far}"]
            wrong += told if far or not torch.allclose(torch.tensor(losses), torch.tensor(wanted), atol=1e-6) else []
    return wrong


def refuse(rank: int) -> str:
    """Return what is said of layers that run on some ranks only."""
    from osdp import OSDP

    return refusal(lambda: OSDP(ExpertsOnRanks(), {"micro_batch": MICRO_BATCH, "pins": ["*=shard"]}))


def test_they_train_as_by_hand() -> None:
    assert run_ranks(compare, RANKS) == [[], []]


def test_experts_that_lie_on_ranks_are_refused() -> None:
    """The ranks would wait for each other, each to gather another expert."""
    for said in run_ranks(refuse, RANKS):
        assert said.startswith("ranks would wait for each other where one of them leaves out `experts.")
        assert "the rank decide" in said
