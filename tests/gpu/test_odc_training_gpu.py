"""Models train through windows on a GPU that ranks share as one process does; gloo is the control plane."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_gpu import missing
from parity import MAX_NORM, Case, Trained, batches, cluster_of, compare, graph_of, initial, optimizer_of, reference
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from toys import Block, Blocks, batch_of, loss_of, seeded

from osdp import odc
from osdp.odc.fsdp import fsdp1, fsdp2
from runtime.apply_schedule import apply_schedule
from runtime.compile_plan import compile_plan
from runtime.step.grad_norm import clip
from runtime.step.gradient_accumulation import Accumulation

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


# --- under a plan


def _trains(rank: int, case: Case, kind: str) -> Trained | None:
    """Train through windows on ranks that NCCL would not let share a GPU."""
    graph, cluster = graph_of(case.family, case.precision), cluster_of(case.nodes, case.ranks_per_node)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    sharded = apply_schedule(initial(case.family), compile_plan(case.plan(), graph, cluster), device)
    assert sharded.finishes_in_optimizer_step
    run, losses, norms = Accumulation(sharded, case.accumulation), [], []
    optimizer = optimizer_of(sharded.module.parameters())
    for step in batches(case.family, case.world_size, case.accumulation):
        for micro_batch in step:
            args, kwargs = micro_batch[rank]
            loss = run.run(*(arg.to(device) for arg in args), **{name: kwargs[name].to(device) for name in kwargs})
            (loss / case.accumulation).backward()
            mean = loss.detach().cpu()
            dist.all_reduce(mean)
            losses.append(mean.item() / case.world_size)
        run.finish_gradients()
        norms.append(clip(sharded.local_shards, MAX_NORM, 2.0, device, False).item())
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: _whole(tensor, case.world_size) for name, tensor in sharded.module.state_dict().items()}
    return Trained(losses, norms, whole) if rank == 0 else None


def _whole(tensor: Tensor, ranks: int) -> Tensor:
    """Return a sharded tensor whole, on the CPU."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    parts: list[Tensor] = [torch.empty(0)] * ranks
    dist.all_gather_object(parts, tensor.to_local().cpu())
    return torch.cat(parts)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", {}, "odc:2", nodes=1),
        Case("gpt2", {}, "odc_ordered:2", nodes=1, accumulation=2),
        Case("llama", {}, "odc:4", nodes=1, ranks_per_node=4, recomputed=("blocks.0", "blocks.1")),
        Case("gpt2", {}, "odc:2", nodes=1, precision="bf16", recomputed=("blocks.1",)),
        Case("llama", {}, "odc:4", nodes=1, ranks_per_node=4, precision="bf16"),
        Case("uneven", {}, "odc_ordered:2", nodes=1, precision="bf16"),
    ],
    ids=["fp32", "ordered", "four ranks, recomputed", "bf16, recomputed", "four ranks, bf16", "ordered, bf16"],
)
def test_a_model_trains_as_in_one_process(case: Case) -> None:
    result = run_ranks(_trains, case.world_size, case, "cuda")[0]
    tolerance = (2e-2, 2e-3) if case.precision == "bf16" else (1e-4, 2e-5)
    compare(result, reference(case.family, case.world_size, case.accumulation, case.precision), *tolerance)


def _same_bits(rank: int, case: Case) -> list[bytes]:
    trained = _trains(rank, case, "cuda")
    return [] if trained is None else [tensor.numpy().tobytes() for _, tensor in sorted(trained.parameters.items())]


def test_ordered_windows_train_to_the_same_bits() -> None:
    case = Case("gpt2", {}, "odc_ordered:2", nodes=1, accumulation=2)
    first, second = (run_ranks(_same_bits, 2, case)[0] for _ in range(2))
    assert first == second


# --- under FSDP's own wrappers


def _wrapped(way: str, kind: str, frozen: bool, precision: str) -> Any:
    model: Any = seeded(lambda: Blocks(frozen=frozen)).to(kind)
    dtype = torch.bfloat16 if precision == "bf16" else None
    if way == "fsdp1":
        return FullyShardedDataParallel(
            model,
            device_id=torch.device(kind, 0) if kind == "cuda" else torch.device(kind),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(dtype, torch.float32, buffer_dtype=dtype) if dtype else None,
            use_orig_params=frozen,
        )
    mesh, policy = init_device_mesh(kind, (dist.get_world_size(),)), MixedPrecisionPolicy(dtype, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp2.patch_lazy_init(fully_shard(model, mesh=mesh, mp_policy=policy))
    return model


def _weights(model: Any) -> dict[str, Tensor]:
    """Return a wrapped model's parameters whole. A collective call."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): one.detach().cpu().clone()
                for name, one in model.named_parameters()
            }
    return {name: _whole(one.detach(), dist.get_world_size()) for name, one in model.named_parameters()}


def _trains_by_library(
    rank: int, way: str, frozen: bool, precision: str, kind: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with two micro-batches a step on rank 0 and one on rank 1; return this rank's losses, and the weights."""
    face = fsdp1 if way == "fsdp1" else fsdp2
    odc.init()
    model, losses = _wrapped(way, kind, frozen, precision), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    for number in range(3):
        face.pre_minibatch_start(model)
        for k in range(2 - rank):
            args, kwargs = batch_of(seeded(lambda: Blocks(frozen=frozen)), rank, 10 * number + k)
            loss = loss_of(model(*(one.to(kind) for one in args), **{name: kwargs[name].to(kind) for name in kwargs}))
            (loss / 2).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        face.pre_optimizer_step(model)
        optimizer.step()
        optimizer.zero_grad()
    face.stop()
    return losses, _weights(model)


def _trains_alone(frozen: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Do the same in one process and in fp32; return the losses of each rank, and the weights."""
    model, losses = seeded(lambda: Blocks(frozen=frozen)), [[], []]  # type: tuple[nn.Module, list[list[float]]]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    for number in range(3):
        for rank in range(2):
            for k in range(2 - rank):
                args, kwargs = batch_of(model, rank, 10 * number + k)
                loss = loss_of(model(*args, **kwargs))
                (loss / 2 / 2).backward()  # type: ignore[no-untyped-call]  # the mean over ranks
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize(
    ("way", "frozen", "precision"),
    [(way, frozen, "fp32") for way in ("fsdp2", "fsdp1") for frozen in (False, True)]
    + [("fsdp2", False, "bf16"), ("fsdp1", False, "bf16")],
)
def test_fsdps_own_models_train_as_in_one_process(way: str, frozen: bool, precision: str) -> None:
    losses, weights = _trains_alone(frozen)
    tolerance = 1e-4 if precision == "fp32" else 2**-5  # four roundings, as losses are squares of outputs
    for (got, trained), wanted in zip(
        run_ranks(_trains_by_library, 2, way, frozen, precision, "cuda"), losses, strict=True
    ):
        assert got == pytest.approx(wanted, rel=tolerance)
        assert trained.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=tolerance, atol=tolerance)
