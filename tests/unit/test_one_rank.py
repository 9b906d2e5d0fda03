"""Steps of one rank on a device, under a process group that sends nothing: it trains, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from rehearsals import graph_of, plan_of, source
from synthetic import cluster
from torch import nn

from profiler.trace.metered_pass import find_loss
from runtime.compile_plan import compile_plan
from runtime.observe import one_rank as module
from runtime.observe.dry_run import Script
from runtime.observe.one_rank import one_rank
from runtime.odc.dry_run_windows import DryRunTransport

MODEL = ("gpt2", 64, 16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("strategy", ["odc:2", "owner+offload"])
def test_steps_train_what_rests_on_the_rank(strategy: str) -> None:
    """In a process of its own, since what is left behind is looked for."""
    run_ranks(_trains, 1, strategy, joins=False)


def _trains(_: int, strategy: str) -> None:
    graph, machine, model = graph_of(*MODEL, "bf16"), cluster(2, 4), source(*MODEL)
    plan = plan_of(graph, machine, {operator.name: strategy for operator in graph.operators}, accumulation=2)
    script = Script(model.build, model.example_inputs, lambda output: find_loss(output)[0], "adam", 1)
    models: list[nn.Module] = []
    windows: list[weakref.ref[DryRunTransport]] = []
    opened = DryRunTransport.__init__

    def opening(self: DryRunTransport, *args: object) -> None:
        windows.append(weakref.ref(self))
        opened(self, *args)  # type: ignore[arg-type]

    apply = module.apply_schedule
    with (
        patch.object(module, "apply_schedule", lambda made, *rest: models.append(made) or apply(made, *rest)),
        patch.object(DryRunTransport, "__init__", opening),
        one_rank(script, compile_plan(plan, graph, machine), CPU, rank=0) as step,
    ):
        assert (dist.get_backend(), dist.get_world_size()) == ("fake", 8)
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
        step()
        step()
        after = list(models[0].parameters())
        changes = any(not torch.equal(_local(one), _local(two)) for one, two in zip(before, after, strict=True))
        assert changes is (strategy != "odc:2")  # in whose windows no rank pushes a gradient
        assert len(windows) == (strategy == "odc:2")
        del before, after
    assert not dist.is_initialized()
    gone = weakref.ref(models.pop())
    gc.collect()
    assert gone() is None
    assert not any(left.accumulated or left.published for window in windows if (left := window()) is not None)
    assert step is not None  # it holds nothing


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return module.held_tensor(tensor.detach())
