"""What a dry run holds, against PyTorch's own `FSDPMemTracker` over the same sharded model.

Only where that tracker is right (torch 2.13.0).  It takes `fully_shard([a, b])` for two units, so here every
unit is one module; it does not know an owner, custom communication or DistributedDataParallel; it keeps the
last gradient of a unit alive until it is reduced, a per cent or more where a unit is much of a model; it sees
CUDA's rounding up to 512 bytes only on CUDA, so tensors here are multiples of that but for a few scalars.
Each tracker sees a step of its own; unless thorough, one that computes.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from rehearsals import Case, graph_of, source
from synthetic import cluster
from thoroughness import THOROUGH, some
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.apply_schedule import apply_schedule
from runtime.compile_plan import compile_plan
from runtime.meshes import Meshes
from runtime.optimizers import as_priced
from runtime.torch_compat import forget_meshes

LENGTH = 128 if THOROUGH else 32


def tracked_by_torch(case: Case) -> dict[str, int]:
    """Return the bytes at the peak of the second step by torch's own names of kinds, and in total."""
    graph = graph_of(case.family, case.vocabulary, case.length, case.precision)
    model_source = source(case.family, case.vocabulary, case.length)
    schedule = compile_plan(case.plan(), graph, cluster(*case.shape))
    assert all(len(unit.modules) == 1 for unit in schedule.units)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=schedule.world_size)
    forget_meshes()
    try:
        Meshes("cpu", schedule.nodes, schedule.ranks_per_node).mesh(schedule.world_size)
        with FakeTensorMode(allow_non_fake_inputs=True) if THOROUGH else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = model_source.build()
            apply_schedule(model, schedule, torch.device("cpu"))
            assert isinstance(model, FSDPModule)
            optimizer = as_priced("adam")(model.parameters())  # of fake DTensors torch 2.11 makes whole tensors
            tracker = FSDPMemTracker(model, optimizer)
            for _ in range(2):  # The peak is forgotten on entering.
                gc.collect()
                with tracker:
                    args, kwargs = model_source.example_inputs(model, case.micro_batch)
                    loss = model(*args, **kwargs)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    del loss, args, kwargs
            found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        dist.destroy_process_group()
        forget_meshes()
    return {str(kind).rpartition(".")[2]: size for kind, size in found.items()}


@pytest.mark.parametrize(
    "case",
    some(
        [
            # llama's last norm and head would be one unit if they took the same.
            Case("shard", (("norm", "shard_grad"),), family="llama"),
            Case("shard_grad", (("norm", "shard"),), family="llama"),
            Case("shard", (("norm", "shard_grad"),), family="llama", vocabulary=8192, shape=(8, 8)),
            Case("shard", (("norm", "shard_grad"),), family="llama", micro_batch=4, precision="bf16", length=LENGTH),
            Case("shard", (("norm", "shard_grad"),), family="llama", micro_batch=4, recompute=1),
        ],
        3,
    ),
    ids=str,
)
def test_both_trackers_see_the_same(case: Case) -> None:
    theirs, ours = tracked_by_torch(case), case.compare(rank=0).tracked
    assert sum(ours.values()) == pytest.approx(theirs["Total"], rel=0.002)
    assert ours.get("unsharded_parameters", 0) == theirs["UNSHARDED_PARAM"]
    assert ours.get("communication_buffers", 0) == theirs["ALL_GATHER"] + theirs["REDUCE_SCATTER"]
    graph = graph_of(case.family, case.vocabulary, case.length, case.precision)
    rounding = 512 * sum(len(operator.parameters) for operator in graph.operators)
    assert 0 <= ours["parameters"] - theirs["SHARDED_PARAM"] <= rounding
    assert 0 <= ours["optimizer"] - theirs["OPT"] <= 3 * rounding
    # Torch takes the gradient of a weight for an activation until it is added up.
    computed = theirs["ACT"] + theirs["TEMP"] + theirs["SHARDED_GRAD"] + theirs["UNSHARDED_GRAD"]
    assert ours["activations"] + ours.get("gradients", 0) == pytest.approx(computed, rel=0.002)
