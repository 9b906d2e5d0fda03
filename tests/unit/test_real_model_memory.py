"""Predicted memory of small models as people have them (`small_models.py`), against steps that compute.

With data: nothing is taken from PyTorch's word for what kernels leave.  Models are of one or two MiB, of which the
rounding of tensors to 512 bytes, priced from above, is half a per cent.
"""

from __future__ import annotations

from functools import cache

import pytest
from rehearsals import compare, plan_of
from small_models import MODELS, model
from synthetic import cluster
from thoroughness import some

from profiler.model_graph import ModelGraph
from profiler.trace.trace import trace_model


@cache
def graph_of(name: str) -> ModelGraph:
    return trace_model(model(name))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("strategy", some(["shard", "replicate"], 2))
@pytest.mark.parametrize("name", some([*MODELS], 20, 5))
def test_no_step_holds_more_than_is_predicted(name: str, strategy: str, recomputes: bool) -> None:
    source, graph = model(name), graph_of(name)
    again = [block.name for block in graph.blocks] if recomputes else []
    choices = {operator.name: strategy for operator in graph.operators}
    plan = plan_of(graph, cluster(1, 4), choices, again, micro_batch=16)
    assert compare(plan, source, graph, cluster(1, 4), with_data=True).error >= -0.005
