"""Whether a plan leaves room for what `torch.autocast` keeps, which no plan counts."""

from __future__ import annotations

import torch

from planner.plan import Plan
from profiler.autocast import NAMES
from profiler.byte_sizes import format_bytes
from profiler.errors import OsdpError
from runtime.autocast_weights import bytes_of_copies
from runtime.sharded_model import ShardedModel


def refuse_fp16(plan: Plan, framework: str) -> None:
    """Raise OsdpError for a plan under autocast in fp16, whose losses a framework would have to scale."""
    if plan.model.precision == "amp-fp16":
        advice = 'plan with {"precision": "amp-bf16"}, or train in a loop of your own with a torch.amp.GradScaler'
        what = f"{framework} does not scale the losses of a model that OSDP has sharded"
        raise OsdpError(what, got="a plan in amp-fp16", expected="fp32, bf16 or amp-bf16", advice=advice)


def check_room(plan: Plan, sharded: ShardedModel, dtype: torch.dtype) -> None:
    """Raise OsdpError if copies of the weights in a dtype do not fit beside what is predicted, unless that has them."""
    if plan.model.autocast:
        return
    copies_bytes = bytes_of_copies(sharded.module, sharded.schedule, dtype)
    left_bytes = plan.limit_bytes - plan.predicted.peak_memory_bytes
    if copies_bytes <= left_bytes:
        return
    size = format_bytes(copies_bytes)
    raise OsdpError(
        "torch.autocast keeps copies of the weights from forward to backward, which no plan counts",
        got=f"up to {size} in {str(dtype).removeprefix('torch.')}; the plan leaves {format_bytes(left_bytes)} of "
        f"{format_bytes(plan.limit_bytes)}",
        expected="room for the copies, or no torch.autocast",
        advice=f'plan with {{"precision": "amp-{NAMES[dtype]}"}}, which counts them, or, in place of autocast, with '
        '{"precision": "bf16"}, which casts weights as it gathers them',
    )
