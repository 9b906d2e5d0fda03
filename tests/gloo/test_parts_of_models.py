"""Parts of a wrapped model that a script writes to, loads and resets, and checkpoints around it: as in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import Toy, batch_of, plan_of, refusal, seeded


class Critic(Toy):
    """An embedding with padding, a body and a head of one row, which one of two ranks has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> (batch, 5, 1)."""
        y: Tensor = self.head(torch.tanh(self.body(x + self.table(torch.arange(5)))))
        return y


def train(model: Any, ranks: list[int], *, outside: bool, start: int = 0) -> None:
    """Take two steps of two micro-batches each; `outside`: a checkpoint runs the model again in backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(start, start + 4):
        batches = [batch_of(SAMPLE, rank, number)[0][0] for rank in ranks]
        outputs = [checkpoint(model, x, use_reentrant=False) if outside else model(x) for x in batches]
        (torch.stack([y.pow(2).mean() for y in outputs]).mean() / 2).backward()
        if number % 2:
            with torch.no_grad():
                model.table.weight[0] = 0.5
            optimizer.step()
            optimizer.zero_grad()


SAMPLE = Critic()


def change(model: Any, ranks: list[int]) -> list[float]:
    """Train, load parts, reset layers and write to them; return numbers of its weights."""
    train(model, ranks, outside=True)
    other = seeded(Critic, 5)
    getattr(model, "module", model).head.load_state_dict(other.head.state_dict())
    train(model, ranks, outside=False, start=4)
    getattr(model, "module", model).load_state_dict(other.state_dict())
    torch.manual_seed(8)
    model.body.reset_parameters()
    model.table.weight.data[1].normal_()
    train(model, ranks, outside=True, start=8)
    return [number for one in model.parameters() for number in (one.max().item(), one.min().item(), one.mean().item())]


def change_on_ranks(rank: int, wanted: tuple[list[float], dict[str, Tensor]]) -> list[str]:
    """Change models of each strategy; return what is refused."""
    from osdp import OSDP

    said = []
    for name in ("replicate", "shard", "shard_grad", "owner", "odc:2"):
        model = OSDP(seeded(Critic), plan_of(SAMPLE, name, ranks=(1, 2), accumulation=2))
        numbers = change(model, [rank])
        torch.testing.assert_close(numbers, wanted[0], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
        torch.testing.assert_close(model.full_state_dict(rank0_only=False), wanted[1], rtol=1e-4, atol=1e-5)
        state = dict(seeded(Critic).head.state_dict())
        said.append(refusal(lambda: model.head.load_state_dict(state, assign=True)))  # noqa: B023
        prefixed = {f"module.{key}": value for key, value in wanted[1].items()}
        said.append(refusal(lambda: model.load_state_dict(prefixed)))  # noqa: B023
        if name == "owner":
            said.append(refusal(lambda: model.state_dict()["head.weight"].mul_(0.9)))  # noqa: B023
            said.append(refusal(lambda: 0.9 * model.state_dict()["head.weight"]))  # noqa: B023
            assert not hasattr(model.state_dict()["head.weight"], "full_tensor")
            said.append(refusal(lambda: model.head.weight[0].sum()))  # noqa: B023
    dist.barrier()
    return said


def test_parts_of_a_model_are_written_and_loaded_as_in_one_process() -> None:
    alone = seeded(Critic)
    numbers = change(alone, [0, 1])
    by_rank = run_ranks(change_on_ranks, 2, (numbers, dict(alone.state_dict())))
    for said in by_rank:
        assert sum("leave assign out" in text for text in said) == 5
        assert sum("removeprefix('module.')" in text for text in said) == 5
        assert sum("full_state_dict(rank0_only=False)" in text for text in said) == 2
        assert sum("read it under torch.no_grad()" in text for text in said) == 1
