"""State dicts under the original names, whatever the plan, and gradient norms over mixed meshes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import torch
from parity import Case, build, graph_of, initial, inputs
from ranks import run_ranks
from test_api import assert_equal, mixed
from thoroughness import some
from torch import nn
from toys import (
    EVERY_RANK,
    STRATEGIES,
    WITH_OFFLOAD,
    Blocks,
    InPlace,
    batch_of,
    plan_of,
    refusal,
    run_everywhere,
    seeded,
)

from runtime.local_shards import local_shard, whole
from runtime.state import state_dict


def sharded_as(name: str) -> Case:
    """Return a plan of GPT-2 by a strategy's name, "split" or "mixed"."""
    if name == "mixed":
        return mixed("gpt2")
    if name == "split":
        linear = [op.name for op in graph_of("gpt2").operators if op.kind == "Linear" and len(op.modules) == 1]
        return Case("gpt2", dict.fromkeys(linear, "split(2*shard, owner)"), "shard_grad")
    return Case("gpt2", {}, name)


def round_trips(rank: int) -> None:
    """Whole and sharded dicts go out and come back; whole ones fit the unsharded model and any other plan.

    By default every second of these plans, of which the mixed one has the strategies of the others, and a split.
    """
    from osdp import OSDP

    wanted = initial("gpt2").state_dict()
    previous: Any = None
    for name in some(("replicate", "shard_grad", "owner+offload", "group_shard:2", "mixed", "split"), 2):
        model = OSDP(initial("gpt2"), sharded_as(name).plan())
        full = model.full_state_dict()
        assert bool(full) == (rank == 0)
        with mock.patch.object(state_dict, "BUCKET_BYTES", 1000):  # several messages, and parameters larger than one
            full = model.full_state_dict(rank0_only=False)
        assert_equal(full, wanted)
        assert full["wte.weight"] is full["lm_head.weight"], "tied parameters are one"
        build("gpt2").load_state_dict(full, strict=True)

        sharded = model.state_dict()
        assert list(sharded) == list(wanted)
        assert {key: tuple(value.shape) for key, value in sharded.items()} == {
            key: tuple(value.shape) for key, value in wanted.items()
        }
        held = {key: clone(value) for key, value in sharded.items()}
        other = seeded(lambda: build("gpt2"), seed=50)
        assert tuple(model.load_state_dict(other.state_dict())) == ([], [])
        assert_equal(model.full_state_dict(rank0_only=False), other.state_dict())
        if previous is not None:
            previous.load_state_dict(model.full_state_dict(rank0_only=False))
            assert_equal(previous.full_state_dict(rank0_only=False), other.state_dict())
        model.load_state_dict(held)
        assert_equal(model.full_state_dict(rank0_only=False), wanted)
        # What is loaded is what computes, also where a forward has gathered parameters before.
        args, kwargs = inputs(other, 2)
        model(*args, **kwargs)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(*args, **kwargs), other(*args, **kwargs), rtol=1e-5, atol=1e-6)
        previous = model


def clone(value: Any) -> Any:
    """Return a copy of an entry of a sharded state dict."""
    from runtime.state.dcp_tensor import GlobalTensor

    return value.copy_to_cpu() if isinstance(value, GlobalTensor) else value.clone()


def test_round_trips_under_every_strategy() -> None:
    run_ranks(round_trips, 4, ranks_per_node=2)


def test_parameters_of_one_dtype_at_a_time_are_sent_together() -> None:
    sizes = [(4, torch.float32), (5, torch.float32), (9, torch.float32), (1, torch.float32), (1, torch.bfloat16)]
    tensors = [nn.Parameter(torch.zeros(count, dtype=dtype)) for count, dtype in sizes]
    shards = [[local_shard(whole(str(number), tensor.shape), tensor, 1)] for number, tensor in enumerate(tensors)]
    with mock.patch.object(state_dict, "BUCKET_BYTES", 36):
        buckets = [[each[0].name for each in bucket] for bucket in state_dict._buckets(shards)]
    assert buckets == [["0", "1"], ["2"], ["3"], ["4"]]


def refuse(rank: int) -> dict[str, str]:
    """Return what is said of state dicts that do not fit, and check that nothing was loaded."""
    from osdp import OSDP

    wanted = seeded(Blocks).state_dict()
    model = OSDP(seeded(Blocks), plan_of(Blocks(), "shard", {"head": "owner"}))
    other = seeded(Blocks, seed=9).state_dict()
    shape = other | {"head.weight": torch.zeros(3, 7)}
    lacking = {name: value for name, value in other.items() if name != "head.bias"}
    said = {
        "shape": refusal(lambda: model.load_state_dict(shape)),
        "lacking": refusal(lambda: model.load_state_dict(lacking)),
        "unknown": refusal(lambda: model.load_state_dict(other | {"tail.weight": torch.zeros(1)})),
        "assign": refusal(lambda: model.load_state_dict(other, assign=True)),
    }
    assert_equal(model.full_state_dict(rank0_only=False), wanted)
    missing = model.load_state_dict(lacking | {"tail.weight": torch.zeros(1)}, strict=False)
    assert tuple(missing) == (["head.bias"], ["tail.weight"])
    assert_equal(model.full_state_dict(rank0_only=False), other | {"head.bias": wanted["head.bias"]})
    return said


def test_refuses_other_models() -> None:
    said = run_everywhere(refuse)[0]
    for name, parts in {
        "shape": ("head.weight", "(3, 7)", "(3, 6)"),
        "lacking": ("head.bias",),
        "unknown": ("tail.weight",),
        "assign": ("assign",),
    }.items():
        assert all(part in said[name] for part in parts), said[name]


def clip_everywhere(rank: int) -> None:
    """Norms of every type and what clipping leaves, against torch on the unsharded model."""
    from osdp import OSDP

    model = partial(Blocks, frozen=False)
    names = list(plan_of(model()).choices)
    turns = {name: WITH_OFFLOAD[index % len(WITH_OFFLOAD)] for index, name in enumerate(names)}
    plans = [plan_of(model(), name) for name in (*some(STRATEGIES, 2), "shard+offload", "owner+offload")]
    plans += [plan_of(model(), choices=turns | {"blocks.1.up": "split(shard, owner, replicate)"})]
    for plan in plans:
        reference, sharded = seeded(model), OSDP(seeded(model), plan)
        sum(reference(*batch_of(reference, peer)[0]) / len(EVERY_RANK) for peer in EVERY_RANK).backward()
        sharded(*batch_of(reference, rank)[0]).backward()
        gradients = [parameter.grad.clone() for parameter in reference.parameters()]
        for norm_type in (1.0, 2.0, 3.5, math.inf):
            for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), math.inf, norm_type)
            torch.testing.assert_close(sharded.clip_grad_norm_(math.inf, norm_type), wanted, rtol=1e-5, atol=0.0)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        norm = sharded.clip_grad_norm_(0.01)
        assert norm.shape == ()
        assert norm > 0.02
        torch.testing.assert_close(sharded.clip_grad_norm_(1.0).item(), 0.01, rtol=1e-3, atol=0.0)
        for optimizer in (torch.optim.SGD(m.parameters(), lr=10.0) for m in (reference, sharded)):
            optimizer.step()
        torch.testing.assert_close(
            sharded.full_state_dict(rank0_only=False), dict(reference.state_dict()), rtol=1e-5, atol=1e-5
        )
        if rank == EVERY_RANK[-1]:
            next(shard for shard in sharded.sharded.local_shards if shard.numel).parameter.grad.mul_(math.nan)
        assert "not finite" in refusal(lambda model=sharded: model.clip_grad_norm_(1.0, error_if_nonfinite=True))
        assert "positive" in refusal(lambda model=sharded: model.clip_grad_norm_(1.0, 0.0))


def test_clips_as_torch_does_unsharded() -> None:
    run_everywhere(clip_everywhere)


def one_rank(rank: int) -> None:
    """A single rank is an ordinary model."""
    from osdp import OSDP

    model = OSDP(seeded(InPlace), plan_of(InPlace(), "replicate", ranks=(1, 1)))
    assert_equal(model.full_state_dict(), seeded(InPlace).state_dict())
    args, _ = batch_of(InPlace(), 0)
    model(*args).backward()
    reference = seeded(InPlace)
    reference(*args).backward()
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), wanted)


def test_one_rank_alone() -> None:
    run_ranks(one_rank, 1)
