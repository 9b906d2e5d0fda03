"""Frozen models, which are only run, and frozen parts of models that are trained: trace, memory, plans."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from test_memory_skips import Skips
from test_trace_memory import predicted_peaks
from thoroughness import THOROUGH, some
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from trace_models import MEMORY_CASES, MLP, language_model, source

from osdp.planning import Request, plan_model
from osdp.training.config import TrainConfig
from osdp.training.job import model_and_task
from planner.strategies.registry import known_strategies
from profiler.affine import Affine
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

MACHINE = cluster(1, 8)


def frozen(model: ModelSource) -> ModelSource:
    """Return the same model without a parameter to train, in the mode in which it is run."""
    return ModelSource("frozen", lambda: model.build().requires_grad_(False).eval(), model.example_inputs, 1)


def tracked_peak(model: ModelSource, batch: int) -> int:
    """Return the bytes beyond parameters and buffers at the peak of a plain forward under no_grad.

    Its parameters may be trainable: under no_grad that makes no difference, and the tracker takes no others.
    """
    module = model.build().eval()
    args, kwargs = model.example_inputs(module, batch)
    own = sum(t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers()))
    tracker = MemTracker()
    tracker.track_external(module, *args)
    with tracker, torch.no_grad():
        module(*args, **kwargs)
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) - own


@pytest.mark.parametrize("case", some([*MEMORY_CASES], 2))
def test_the_peak_of_a_forward_agrees_with_torchs_memory_tracker(case: str) -> None:
    model = frozen(MEMORY_CASES[case])
    graph = trace_model(model)
    assert not graph.trains
    assert "no parameter is trained (requires_grad), so a step is a forward" in graph.notes
    fused = 0.07 if "encoder" in case else 0  # torch's fused encoder layer, which does not run without data
    for batch, tolerance in ((1, 0.1 + fused), (12, 0.01 + fused)):
        traced, tracked = predicted_peaks(graph, batch)[0], tracked_peak(MEMORY_CASES[case], batch)
        assert tracked <= traced <= (1 + tolerance) * tracked


def test_nothing_is_kept_for_a_backward_and_there_is_none() -> None:
    graph = trace_model(frozen(source(lambda: MLP(8, 128, 8), (64, 8))))
    for call in graph.calls:
        assert call.saved_bytes == call.backward.matmul_flops == call.backward_peak_bytes == Affine()
    assert graph.calls[0].forward.matmul_flops == Affine(0, 2 * 64 * 8 * 128)
    assert graph.calls[0].output_bytes == Affine(0, 4 * 64 * (8 + 128))  # the input, and what the first layer made


SKIPS = ModelSource("skips", lambda: Skips((96, 64, 48, 32)).requires_grad_(False), Skips.example_inputs, 1)


ALL = [str(strategy) for strategy in known_strategies(MACHINE)]
FEW = ["replicate", "shard", "shard_grad", "group_shard:2", "secondary_shard:4", "owner", "odc:8", "shard+offload"]


MODELS = {"tied and alike": frozen(language_model(width=64, heads=4, words=256)), "skips": SKIPS}


@cache
def graph_of(model: str) -> ModelGraph:
    """Return what the tracer makes of one of them."""
    return trace_model(MODELS[model])


@pytest.mark.parametrize("strategy", ALL if THOROUGH else FEW)
@pytest.mark.parametrize("name", MODELS)
def test_memory_of_a_frozen_model_against_dry_runs(strategy: str, name: str) -> None:
    model, graph = MODELS[name], graph_of(name)
    plan = plan_of(graph, MACHINE, {operator.name: strategy for operator in graph.operators})
    found = compare(plan, model, graph, MACHINE)
    assert found.tracked_phase == "forward"
    assert found.predicted_phase.startswith("forward of")
    assert not found.predicted["gradients"]
    assert not found.predicted["optimizer"]
    assert -0.01 <= found.error <= 0.03


def test_a_plan_of_a_frozen_model_counts_forwards_alone() -> None:
    """Once everything fits as copies, a step is the forward's FLOPs; where it does not, each part is gathered once."""
    model = frozen(language_model(width=64, heads=4, words=256, layers=4))
    graph = trace_model(model)
    machine = cluster(1, 2)
    load = Request(limit_bytes=2**40, micro_batch=4)
    plan = plan_model(model, machine, load).plan
    assert set(plan.choices.values()) == {"replicate"}
    assert plan.predicted.peak_phase.startswith("forward")
    device = machine.device
    work = [call.forward for call in graph.calls]
    rate, bandwidth = (
        device.matmul_flops_per_s["fp32"].value * device.matmul_efficiency.value,
        device.memory_bytes_per_s.value,
    )
    seconds = sum(
        max(w.matmul_flops(4) / rate, w.matmul_bytes(4) / bandwidth) + w.other_bytes(4) / bandwidth for w in work
    )
    assert plan.predicted.step_time_s == pytest.approx(seconds)


class Headed(nn.Module):
    """A language model that is frozen, and a head that is trained on what it makes."""

    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.backbone = MLP(48, 96, 96, 32).requires_grad_(False)
        self.gradients = gradients
        self.up, self.head = nn.Linear(48, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, 48) -> a loss."""
        with torch.set_grad_enabled(self.gradients):
            scale = self.backbone(x)
        loss: Tensor = (scale * self.head(torch.relu(self.up(x)))).pow(2).mean()
        return loss


@pytest.mark.parametrize("strategy", ["shard", "replicate", "shard_grad", "owner"])
@pytest.mark.parametrize("gradients", [True, False], ids=["grad mode", "no_grad"])
def test_a_frozen_backbone_with_a_trained_head(strategy: str, gradients: bool) -> None:
    model = source(lambda: Headed(gradients), (64, 48))
    graph = trace_model(model)
    trained = {p.name for operator in graph.operators for p in operator.parameters if p.trainable}
    assert trained == {"up.weight", "up.bias", "head.weight", "head.bias"}
    for call in graph.calls:
        if graph.operators[call.operator].name.startswith("backbone"):
            assert call.saved_bytes == call.backward.matmul_flops == Affine()
    plan = plan_of(graph, MACHINE, {operator.name: strategy for operator in graph.operators})
    assert -0.01 <= compare(plan, model, graph, MACHINE).error <= 0.05


def frozen_factory() -> nn.Module:
    return language_model(words=256).build().requires_grad_(False)


def test_a_frozen_model_cannot_be_trained_by_the_command() -> None:
    config = TrainConfig(TrainConfig.SCHEMA, model=f"{__name__}:frozen_factory", steps=1)
    with pytest.raises(OsdpError, match="has no parameter to train"):
        model_and_task(config)
