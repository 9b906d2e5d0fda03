"""Imported by the server that ranks fork from: does once, without a process group, what every rank would do first.

A rank's first trace, first sharded parameter, first step of an optimizer and first cluster file take 0.5 s of
processor time, nearly all of it in PyTorch's and pydantic's caches, which forks inherit.  They also inherit the graphs
of the models of `parity.py` and `toys.py`, and OSDP traces in them only what prints otherwise.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import garbage
import huge_pages
import quick_torch
import torch
import warm_graphs  # noqa: F401
from parity import Case, build, cluster_of, graph_of, inputs
from traced_once import install, trace_once

from osdp.planning.request import trace
from runtime.compile_plan import compile_plan
from runtime.observe.dry_run import Script, dry_run

quick_torch.install()


def plan_traced_once(*given: Any) -> Any:
    """Stand in for what traces a model to plan it, which imports its tracer itself."""
    with mock.patch("profiler.trace.trace.trace_model", trace_once):
        return trace(*given)


mock.patch("osdp.planning.request.trace", plan_traced_once).start()
install()
if not torch.cuda.is_available():  # else each seed waits there for a GPU, with the stack that it was set at
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
torch.set_num_threads(1)  # threads of the server would not be in its forks
garbage.set_aside()
for strategy in ("replicate", "shard", "group_shard:2", "owner"):
    case = Case("gpt2", {}, strategy, recomputed=("blocks.0",))
    dry_run(
        Script(lambda: build("gpt2"), lambda module, batch: inputs(module, batch), lambda loss: loss, "adam", 2),
        compile_plan(case.plan(), graph_of("gpt2"), cluster_of(2, 2)),
    )
garbage.set_aside()
huge_pages.collapse()
