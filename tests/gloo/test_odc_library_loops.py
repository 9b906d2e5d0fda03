"""On-demand communication under FSDP1 and FSDP2: loops that go otherwise, refused calls, lost ranks."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odc_library import CPU, build, face_of, micro_batch, parameters_of, patched, sgd, step, wrapped
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from toys import Irregular, batch_of, loss_of, refusal, seeded

from osdp import odc
from osdp.odc.fsdp import fsdp1, fsdp2
from runtime.failures.peer_faults import PeerLost
from runtime.odc import choose_transport, shared_segment

BOTH = ("fsdp2", "fsdp1, original")


def started(way: str, **options: Any) -> Any:
    """Return a model whose windows are open."""
    odc.init(**options)
    model = patched(way)
    face_of(way).pre_minibatch_start(model)
    return model


def assert_as(model: Any, reference: nn.Module) -> None:
    """Compare with one process."""
    wanted = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(parameters_of(model), wanted, rtol=1e-5, atol=1e-6)


def mapped() -> int:
    """Return how many windows' files are part of this process' memory."""
    return Path("/proc/self/maps").read_text().count(f"{shared_segment.FOLDER}/{shared_segment.PREFIX}")


# --- loops


def _nobody_waits(rank: int) -> None:
    """Finish three micro-batches on rank 0 before rank 1 begins its first: nothing in between may wait for it."""
    for way in BOTH:
        model = started(way)
        if rank == 1:
            dist.barrier()
        for k in range(3):
            micro_batch(model, rank, k)
        if rank == 0:
            dist.barrier()
        face_of(way).pre_optimizer_step(model)
        face_of(way).stop()


def test_nobody_waits_inside_a_step() -> None:
    run_ranks(_nobody_waits, 2)


def _changes(rank: int) -> None:
    """Give steps up, change parameters by hand, evaluate in between, have two optimizers."""
    for way in BOTH:
        face, model, reference = face_of(way), started(way), seeded(build)
        optimizer, other = sgd(model), sgd(reference)
        if rank == 1:  # a step that is given up, pending on one rank only
            micro_batch(model, rank, 7)
        optimizer.zero_grad()
        face.pre_minibatch_start(model)
        micro_batch(model, rank, 1)
        face.pre_optimizer_step(model)
        with torch.no_grad():  # a forward that leaves something gathered, whose values the step changes
            model(*batch_of(build(), rank)[0])
        step(optimizer)
        _reference_step(reference, other, 1)
        assert_as(model, reference)
        with torch.no_grad():
            for each in (model, reference):
                for parameter in each.parameters():
                    parameter.mul_(0.5)
        face.pre_minibatch_start(model)
        args, kwargs = batch_of(build(), rank, 5)
        with torch.no_grad():
            got, wanted = (loss_of(each(*args, **kwargs)).item() for each in (model, reference))
        assert got == pytest.approx(wanted, rel=1e-5)
        micro_batch(model, rank, 2)
        face.pre_optimizer_step(model)
        face.pre_optimizer_step(model)  # twice: nothing was pushed in between
        halves: list[Any] = [list(each.parameters()) for each in (model, reference)]
        for parameters in halves:
            parameters[:] = [torch.optim.SGD(parameters[:5], lr=0.1), torch.optim.SGD(parameters[5:], lr=0.1)]
        for half in halves[0]:
            step(half)
        for at in range(2):
            micro_batch(reference, at, 2, 2)
        for half in halves[1]:
            step(half)
        assert_as(model, reference)
        face.stop()


def _reference_step(reference: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for rank in range(2):
        micro_batch(reference, rank, number, 2)
    step(optimizer)


def test_loops_that_go_otherwise() -> None:
    run_ranks(_changes, 2)


def _again(rank: int) -> None:
    """Stop, train on by FSDP itself, and begin anew with the same model; leave nothing behind."""
    for way in BOTH:
        face, reference = face_of(way), seeded(build)
        other, files = sgd(reference), 0
        model = patched(way)
        optimizer = sgd(model)
        for number in range(4):
            uses_windows = number != 1
            if uses_windows:
                odc.init()
                face.pre_minibatch_start(model)
                assert mapped() == 2
            micro_batch(model, rank, number)
            if uses_windows:
                face.pre_optimizer_step(getattr(model, "module", model))  # also the module that FSDP1 wraps
            step(optimizer)
            _reference_step(reference, other, number)
            assert_as(model, reference)
            face.stop()
            face.stop()
            assert mapped() == 0
            files = files or len(os.listdir("/proc/self/fd"))
            assert len(os.listdir("/proc/self/fd")) == files
        hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
        assert not any(hooks), "of windows that are closed"
        odc.init()
        face.pre_minibatch_start(model)
        del model, optimizer
        gc.collect()
        assert mapped() == 0
        face.stop()


def test_a_model_stops_and_begins_anew() -> None:
    run_ranks(_again, 2)


def _falls_back(rank: int) -> None:
    """Have FSDP's own collectives where ranks cannot have windows, with one warning."""
    choose_transport.why_none = lambda group, device_type, ordered: "rank 1 is on another machine than rank 0"
    for way in BOTH:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = started(way)
        told = [str(warning.message) for warning in caught if "on-demand" in str(warning.message)]
        assert len(told) == (1 if rank == 0 else 0)
        assert all("rank 1 is on another machine" in each for each in told)
        face, optimizer, reference = face_of(way), sgd(model), seeded(build)
        other = sgd(reference)
        for number in range(2):
            face.pre_minibatch_start(model)
            micro_batch(model, rank, number)
            face.pre_optimizer_step(model)
            step(optimizer)
            _reference_step(reference, other, number)
        assert mapped() == 0
        assert_as(model, reference)
        face.stop()


def test_fsdp_goes_on_where_ranks_cannot_have_windows() -> None:
    run_ranks(_falls_back, 2)


# --- refusals


def test_init_needs_a_process_group() -> None:
    assert "init_process_group() before odc.init()" in refusal(odc.init)
    fsdp1.patch_fsdp1()
    fsdp2.patch_fsdp2()
    fsdp2.patch_fsdp2()


def _misused(rank: int) -> None:
    plain = wrapped("fsdp2")
    assert "not prepared" in refusal(partial(fsdp1.pre_minibatch_start, wrapped("fsdp1")))
    for wrong in ({"ordered": rank == 1}, {"timeout_s": 0.0}, {"accumulation": 0}):
        assert {"ordered": "not the same on all ranks", "timeout_s": "positive", "accumulation": "at least 1"}[
            next(iter(wrong))
        ] in refusal(partial(odc.init, **wrong))
    odc.init()
    odc.init()
    assert "other options" in refusal(partial(odc.init, ordered=True))
    assert "is not wrapped" in refusal(partial(fsdp2.patch_lazy_init, build()))
    assert "is not wrapped" in refusal(partial(fsdp2.pre_minibatch_start, build()))
    assert "is not wrapped" in refusal(partial(fsdp1.pre_minibatch_start, build()))
    inner = wrapped("fsdp1")
    inner.check_is_root()
    assert "part of a model" in refusal(partial(fsdp1.pre_minibatch_start, inner.module.blocks[0]))
    assert "not patched" in refusal(partial(fsdp2.pre_minibatch_start, plain))
    fsdp2.patch_lazy_init(plain.blocks[0])
    assert "not patched" in refusal(partial(fsdp2.pre_minibatch_start, plain))
    for face in (fsdp1, fsdp2):
        assert "no minibatch was started" in refusal(partial(face.pre_optimizer_step, plain))
    for block in plain.blocks:
        fsdp2.patch_lazy_init(block)
    fsdp2.pre_minibatch_start(plain.blocks[1])
    fsdp2.patch_lazy_init(plain)
    assert "a part of this model" in refusal(partial(fsdp2.pre_minibatch_start, plain))
    fsdp2.stop()
    for way in BOTH:
        _out_of_order(rank, way)


def _out_of_order(rank: int, way: str) -> None:
    model, face = started(way), face_of(way)
    optimizer = sgd(model)
    micro_batch(model, rank, 0)
    assert f"{face.__name__.split('.')[-1]}.pre_optimizer_step(model)" in refusal(optimizer.step)
    assert "micro_batches has no effect" in refusal(partial(face.pre_optimizer_step, model, 1))
    face.pre_optimizer_step(model)
    assert "closure" in refusal(partial(optimizer.step, lambda: 0.0))
    optimizer.step()
    face.stop()
    if way == "fsdp2":
        model = started(way)
        model.set_gradient_divide_factor(3.0)
        assert "set_gradient_divide_factor" in refusal(partial(micro_batch, model, rank, 0))
        face.stop()
    model = started(way, accumulation=2)
    assert "not known" in refusal(partial(face.pre_optimizer_step, model, -1))
    face.stop()


def test_misuse_is_refused() -> None:
    run_ranks(_misused, 2)


def _unserved(rank: int) -> None:
    odc.init()
    mesh = init_device_mesh("cpu", (4,))
    ways: dict[str, dict[str, Any]] = {
        "a second mesh": {"reshard_after_forward": 2},
        "first dimension": {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
        "all ranks": {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]},
        "cannot publish this dtype": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
        "two or more": {"mesh": init_device_mesh("cpu", (4, 1), mesh_dim_names=("c", "d"))},
    }
    for words, options in ways.items():
        model = fully_shard(nn.Linear(8, 8), **{"mesh": mesh} | options)
        fsdp2.patch_lazy_init(model)
        assert words in refusal(partial(fsdp2.pre_minibatch_start, model)), words
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD):
        group = {} if strategy is ShardingStrategy.NO_SHARD else {"device_mesh": init_device_mesh("cpu", (2, 2))}
        flat = FullyShardedDataParallel(build(), device_id=CPU, sharding_strategy=strategy, **group)
        assert str(strategy) in refusal(partial(fsdp1.pre_minibatch_start, flat))
    flat = FullyShardedDataParallel(build(), device_id=CPU, cpu_offload=CPUOffload(offload_params=True))
    assert "offload" in refusal(partial(fsdp1.pre_minibatch_start, flat))
    half = MixedPrecision(param_dtype=torch.float16)
    flat = FullyShardedDataParallel(build(), device_id=CPU, mixed_precision=half)
    assert "cannot publish this dtype" in refusal(partial(fsdp1.pre_minibatch_start, flat))
    flat = FullyShardedDataParallel(build(), device_id=CPU)
    flat.register_comm_hook(None, lambda state, full, output: None)
    assert "hook" in refusal(partial(fsdp1.pre_minibatch_start, flat))


def test_other_ways_of_wrapping_are_refused() -> None:
    run_ranks(_unserved, 4)


# --- lost ranks


def _loses_one(rank: int, way: str, kind: signal.Signals) -> str:
    """Lose rank 1 inside a step."""
    model = started(way, timeout_s=1.0 if kind == signal.SIGSTOP else 30.0)
    micro_batch(model, rank, 0)
    if rank == 1:
        os.kill(os.getpid(), kind)
    micro_batch(model, rank, 1)
    with pytest.raises(PeerLost) as caught:
        face_of(way).pre_optimizer_step(model)
    face_of(way).stop()
    assert mapped() == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "kind", "told"),
    [("fsdp2", signal.SIGKILL, "rank 1 died"), ("fsdp1", signal.SIGSTOP, "rank 1 did not reach the barrier")],
)
def test_a_lost_rank_is_named(way: str, kind: signal.Signals, told: str) -> None:
    assert told in run_ranks(_loses_one, 2, way, kind, lost=(1,))[0]


# --- models with odd traits


def _odd(rank: int, way: str) -> None:
    """Run layers twice and not at all, recompute, accumulate without FSDP's reduction; compare with plain FSDP."""
    face = face_of(way)
    odc.init()
    models: list[Any] = []
    for _ in range(2):
        model: Any = seeded(Irregular)
        if way == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
        else:
            fully_shard(model)
        models.append(model)
    model, plain = models
    if way == "fsdp2":
        fsdp2.patch_lazy_init(model)
    optimizer, other = sgd(model), sgd(plain)
    face.pre_minibatch_start(model)
    for number in range(3):
        for k in range(2):
            for each in models:
                postpones = number == 1 and k == 0
                if way == "fsdp2":
                    each.set_requires_gradient_sync(not postpones)
                with each.no_sync() if postpones and way == "fsdp1" else nullcontext():
                    (x,), _ = batch_of(Irregular(), rank, 10 * number + k)
                    checkpoint(partial(each, third=number == 2), x, use_reentrant=False).backward()
        face.pre_optimizer_step(model)
        step(optimizer)
        step(other)
        torch.testing.assert_close(parameters_of(model), parameters_of(plain), rtol=1e-5, atol=1e-6)
    face.stop()


@pytest.mark.parametrize(("way", "ranks"), [("fsdp2", 2), ("fsdp1", 2), ("fsdp2", 1), ("fsdp1", 1)])
def test_models_with_odd_traits(way: str, ranks: int) -> None:
    run_ranks(_odd, ranks, way)


def _unclear(rank: int) -> None:
    """Leave a parameter out on a mesh with replicas, where FSDP2 does not tell which it was."""
    odc.init()
    model: Any = seeded(Irregular)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    fsdp2.patch_lazy_init(model)
    fsdp2.pre_minibatch_start(model)
    model(batch_of(Irregular(), rank)[0][0], third=False).backward()
    assert "hides which" in refusal(partial(fsdp2.pre_optimizer_step, model))
    fsdp2.stop()


def test_a_mesh_with_replicas_needs_all_gradients() -> None:
    run_ranks(_unclear, 4)
