"""What `odc` is predicted to hold, against dry runs of the runtime."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rehearsals import compare, graph_of, plan_of, source
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from trace_models import source as source_of

from profiler.cluster.cluster import Cluster
from profiler.trace.trace import trace_model


def ranks_on_cpu(nodes: int, ranks_per_node: int) -> Cluster:
    """Return ranks that can share memory."""
    machine = cluster(nodes, ranks_per_node)
    return replace(machine, device=replace(machine.device, kind="cpu"))


@pytest.mark.parametrize(
    ("choice", "shape", "precision", "accumulation", "recompute"),
    some(
        [
            ("odc:8", (1, 8), "fp32", 1, False),
            ("odc:8", (1, 8), "bf16", 2, False),
            ("odc:4", (2, 4), "fp32", 2, True),
            ("odc:2", (2, 4), "bf16", 1, True),
            ("odc_ordered:4", (2, 4), "bf16", 2, False),
        ],
        2,
    ),
)
def test_windows_are_held_as_predicted(
    choice: str, shape: tuple[int, int], precision: str, accumulation: int, recompute: bool
) -> None:
    graph, machine = graph_of("gpt2", 512, 128, precision), ranks_on_cpu(*shape)
    again = [block.name for block in graph.blocks] if recompute else []
    choices = {operator.name: choice for operator in graph.operators}
    plan = plan_of(graph, machine, choices, again, accumulation=accumulation)
    found = compare(plan, source("gpt2", 512, 128), graph, machine)
    assert -0.01 <= found.error <= 0.03
    # The windows themselves, by hand: without them it holds what the same groups of FSDP2 hold.
    name, _, size = choice.partition(":")
    group = int(size)
    plain = dict.fromkeys(choices, "shard" if group == 8 else f"group_shard:{group}")
    other = compare(plan_of(graph, machine, plain, again), source("gpt2", 512, 128), graph, machine)
    numel = sum(parameter.numel for operator in graph.operators for parameter in operator.parameters)
    accumulators = group if name == "odc_ordered" else 1
    window = (4 * accumulators + (4 if precision == "fp32" else 2)) * numel / group
    assert found.rest_bytes - other.rest_bytes == pytest.approx(window, rel=0.05)


class Headless(nn.Module):
    """A layer that runs, and a larger one that never does, as heads of encoders that a decoder follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(256, 256), nn.Linear(256, 2048)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 256) -> a loss."""
        return self.layer(x).sum()


@pytest.mark.parametrize("choice", ["odc:4", "odc_ordered:2"])
def test_layers_that_never_run_have_windows(choice: str) -> None:
    model, machine = source_of(Headless, (256,)), ranks_on_cpu(1, 4)
    graph = trace_model(model)
    plan = plan_of(graph, machine, {operator.name: choice for operator in graph.operators})
    assert -0.002 <= compare(plan, model, graph, machine).error <= 0.01
