"""Exported FSDP2 modules hold as much at the peak of a step as OSDP's runtime does; thorough, on fake tensors."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from exported import as_expressible, drawn_choices, drawn_recomputation, parallelize_of, source_of
from rehearsals import graph_of, plan_of, source
from synthetic import cluster
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init

from profiler.trace.metered_pass import find_loss
from runtime.compile_plan import compile_plan
from runtime.observe import dry_run as runs
from runtime.schedule import Schedule
from runtime.sharded_model import ShardedModel, WrappedUnit
from runtime.torch_compat import no_modes

FAMILIES = ("gpt2", "llama", "bert", "uneven")
PLANS = range(40) if THOROUGH else (0, 5)
VOCABULARY, LENGTH = 512, 32


class Exported(WrappedUnit):
    """A whole model that an exported module has parallelized."""

    reduces_in_last_backward = True

    def __init__(self, model: Any) -> None:
        self.model = model

    def set_requires_all_reduce(self, required: bool) -> None:
        self.model.set_requires_all_reduce(required)


def mesh_of(device_type: str, shape: tuple[int, ...], **names: Any) -> Any:
    """Make a mesh outside of fake tensors."""
    with no_modes():
        return init_device_mesh(device_type, shape, **names)


def secondary_mesh(device_type: str, ranks: Tensor) -> DeviceMesh:
    """Make the mesh of `reshard_after_forward=K`, as FSDP2 does, outside of fake tensors."""
    with no_modes():
        return DeviceMesh(device_type, torch.arange(ranks.numel()).view(ranks.shape))


def parallelized(code: str) -> Any:
    """Return what stands in for `apply_schedule`: the exported module, and nothing of OSDP's."""

    def apply(model: nn.Module, schedule: Schedule, device: torch.device) -> ShardedModel:
        parallelize = parallelize_of(code)
        ours = patch.dict(parallelize.__globals__, {"init_device_mesh": mesh_of})  # type: ignore[attr-defined]
        with ours, patch.object(_fsdp_init, "DeviceMesh", secondary_mesh):
            parallelize(model, mesh_of("cpu", (schedule.world_size,)))
        resting = dict(model.named_parameters(remove_duplicate=False))
        return ShardedModel(model, schedule, device, [Exported(model)], resting=resting)

    return apply


@pytest.mark.parametrize("number", PLANS)
def test_peak_is_that_of_the_runtime(number: int) -> None:
    family, precision = FAMILIES[number % len(FAMILIES)], ("fp32", "bf16")[number // 4 % 2]
    graph, machine = graph_of(family, VOCABULARY, LENGTH, precision), cluster(2, 4)
    choices, again = drawn_choices(number, graph, machine), drawn_recomputation(number, graph)
    plan = as_expressible(plan_of(graph, machine, choices, *again, accumulation=1 + number % 2), graph, machine)
    schedule, model = compile_plan(plan, graph, machine), source(family, VOCABULARY, LENGTH)
    if schedule.by_ddp:
        pytest.skip("DistributedDataParallel's reducer takes no fake tensors")
    code = source_of(plan, graph, machine)
    script = runs.Script(model.build, model.example_inputs, lambda out: find_loss(out)[0], plan.optimizer, 2)
    wanted = runs.dry_run(script, schedule, with_data=not THOROUGH)
    with patch.object(runs, "apply_schedule", parallelized(code)):
        got = runs.dry_run(script, schedule, with_data=not THOROUGH)
    assert got.rest_bytes == wanted.rest_bytes
    assert got.peak.total_bytes == wanted.peak.total_bytes, (got.peak, wanted.peak, choices, again)
