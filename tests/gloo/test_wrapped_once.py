"""A model is wrapped once: whoever wraps it again is told by whom, and where to read on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from toys import Blocks, batch_of, loss_of, plan_of, refusal, seeded

from osdp import OSDP

WRAPPERS = ("DistributedDataParallel", "FSDP", "FSDP")


def build() -> nn.Module:
    return seeded(Blocks)


def _wrapped_again(rank: int, choice: str) -> list[str]:
    """Return what each wrapper is told of an OSDP model, which still trains afterwards."""
    model = OSDP(build(), plan_of(build(), choice, ranks=(1, 2)))
    told = [
        refusal(lambda: DistributedDataParallel(model)),
        refusal(lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu"))),
        refusal(lambda: OSDP(model, model.plan)),
        refusal(lambda: OSDP(nn.Sequential(model), model.plan)),
    ]
    args, kwargs = batch_of(build(), rank)
    traced = [refusal(lambda: torch.jit.script(model)), refusal(lambda: torch.jit.trace(model, args))]
    if choice != "replicate":
        other = OSDP(build(), model.plan)  # as torch.export leaves a mark on it
        traced.append(refusal(lambda: torch.export.export(other, args, kwargs)))
    assert all("takes no" in one and "model.full_state_dict()" in one for one in traced), traced
    loss_of(model(*args, **kwargs)).backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
    # Last: it has hooks in place before it is refused.
    return [*told, refusal(lambda: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))]


@pytest.mark.parametrize("choice", ["replicate", "shard"])
def test_an_osdp_model_is_wrapped_by_nobody_else(choice: str) -> None:
    for told in run_ranks(_wrapped_again, 2, choice, ranks_per_node=2):
        for message, wrapper in zip(told[:2] + told[4:], WRAPPERS, strict=True):
            assert message.startswith(f"{wrapper} cannot wrap a model that OSDP has sharded\n")
            assert "docs/integrations.md" in message
        for message in told[2:4]:
            assert message.startswith("the model is sharded already, or replicated\n")
            assert "OSDP" in message
            assert "docs/integrations.md" in message


def _wrapped_before(rank: int) -> list[str]:
    plan = plan_of(build(), ranks=(1, 2))
    sharded = build()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    split = parallelize_module(build(), init_device_mesh("cpu", (2,)), {"head": ColwiseParallel()})
    dist.barrier()
    given = DistributedDataParallel(build()), sharded, split
    return [refusal(lambda: OSDP(one, plan)) for one in given]  # noqa: B023


def test_osdp_wraps_nothing_that_is_wrapped() -> None:
    for told in run_ranks(_wrapped_before, 2, ranks_per_node=2):
        assert [message.splitlines()[1] for message in told] == [
            "  got: a DistributedDataParallel",
            "  got: a FSDPBlocks",
            "  got: `head.weight` is a DTensor",
        ]


def _beside_another(rank: int) -> list[torch.Tensor]:
    """Return the parameters of a model that FSDP2 alone trains for a step, beside one of OSDP's on an equal mesh."""
    args, kwargs = batch_of(build(), rank)
    ours = OSDP(build(), plan_of(build(), "secondary_shard:2", ranks=(2, 2)))
    loss_of(ours(*args, **kwargs)).backward()
    theirs = build()
    fully_shard(theirs, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    loss_of(theirs(*args, **kwargs)).backward()
    optimizer.step()
    return [one.full_tensor().detach() for one in theirs.parameters()]


def test_a_model_of_another_wrapper_trains_beside_one_of_osdp() -> None:
    alone = build()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for rank in range(4):
        args, kwargs = batch_of(build(), rank)
        (loss_of(alone(*args, **kwargs)) / 4).backward()
    optimizer.step()
    for told in run_ranks(_beside_another, 4, ranks_per_node=2):
        for got, wanted in zip(told, alone.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.detach())
