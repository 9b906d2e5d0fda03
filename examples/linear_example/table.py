"""Runs side by side: what was measured, beside what OSDP's cost model predicts.

Predicted memory has the data added, and not the reserve: so has measured memory.
Nothing is predicted where the cost model is of something else.  It knows no DistributedDataParallel with a second
copy of gradients beside its buckets, which its defaults have, so the memory of that is left out; and no fully_shard
but with units of one layer, or of as many as have 2^20 parameters together, which stay on the device, are
prefetched as FSDP2 does by itself and leave nothing to the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from linear_example.flags import DEFAULT_PREFETCH, Options
from linear_example.fsdp import group_layers
from linear_example.model import LinearStack
from linear_example.steps import Result
from osdp.models.user_factory import source_of
from osdp.planning import Request
from osdp.planning.rank_grid import cluster_of_ranks
from osdp.planning.strategy_footprint import NO_LIMIT_BYTES
from osdp.training.choose_plan import UNIFORM, uniform_plan
from planner.cost.workload import Workload
from planner.model.fsdp_units import units_of
from planner.model.stages import cut
from planner.plan import Plan, read_choices
from profiler.byte_sizes import format_bytes
from profiler.trace.trace import trace_model

COLUMNS = ("run", "peak memory", "predicted", "step", "predicted", "last loss")


def table(results: Sequence[Result], options: Options) -> str:
    """Return the runs' figures as text."""
    rows = [COLUMNS]
    for result in results:
        plan = predicted(result, options)
        has_memory = result.data_parallel != "ddp"
        rows.append(
            (
                result.data_parallel,
                format_bytes(result.peak_bytes),
                format_bytes(predicted_peak_bytes(plan, options)) if plan and has_memory else "-",
                f"{1e3 * result.step_s:.1f} ms",
                f"{1e3 * plan.predicted.step_time_s:.1f} ms" if plan else "-",
                f"{result.losses[-1]:.6f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    lines = ("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)
    return "\n".join(lines)


def predicted(result: Result, options: Options) -> Plan | None:
    """Return the plan that a run executes, with its predictions; None where the run is no plan's."""
    if result.plan is not None:
        return result.plan
    cluster, _ = cluster_of_ranks(None)
    model = LinearStack(options.layers, options.hidden)
    request = Request(NO_LIMIT_BYTES, optimizer="sgd", micro_batch=options.batch_size)
    graph = trace_model(source_of(model, "linear", None, None), request.precision, cluster.device.kind)
    load = Workload.of(graph, cluster, request.optimizer, options.batch_size)
    plan = uniform_plan(graph, load, request, UNIFORM[result.data_parallel.upper()])
    if result.data_parallel == "ddp":
        return plan
    wrapped = group_layers(model, options.auto_wrap_policy, options.min_num_params)
    planned = units_of(cut(graph), dict(enumerate(read_choices(plan, graph, cluster))))
    is_same = [len(unit) for unit in wrapped] == [len(unit.operators) for unit in planned]
    is_default = not (options.cpu_offload or options.forward_prefetch) and options.backward_prefetch == DEFAULT_PREFETCH
    return plan if is_same and is_default else None


def predicted_peak_bytes(plan: Plan, options: Options) -> int:
    """Return the predicted peak of PyTorch's memory, x and target included."""
    data_bytes = 2 * torch.float32.itemsize * options.batch_size * options.hidden
    return plan.predicted.tensors_bytes + data_bytes
