"""A plan as the JSON file that DeepSpeed reads: the nearest ZeRO stage.

replicate            stage 0
shard_grad           stage 2, which keeps parameters whole between steps where OSDP shards them
shard                stage 3
group_shard:G        stage 3 with mics_shard_size G (MiCS)
secondary_shard:K    stage 3 with zero_hpz_partition_size K (ZeRO++)
+offload             optimizer states on the host, and in stage 3 parameters too
"""

import json
from typing import Any

from osdp.export.uniform import Library, Uniform, uniform
from planner.analysis.explain import OpenPlan
from profiler.byte_sizes import format_bytes
from profiler.model_graph import Recompute

STAGES = {"replicate": 0, "shard_grad": 2, "shard": 3, "group_shard": 3, "secondary_shard": 3}
LIBRARY = Library("DeepSpeed", frozenset(STAGES))


def deepspeed_config(view: OpenPlan, *, nearest: bool) -> tuple[str, tuple[str, ...]]:
    """Return the file, and lines for the user. Raises OsdpError for what it cannot do."""
    found = uniform(view, LIBRARY, nearest=nearest)
    strategy, plan = found.strategy, view.plan
    zero: dict[str, Any] = {"stage": STAGES[strategy.name]}
    if strategy.name == "group_shard":
        zero["mics_shard_size"] = strategy.group
    if strategy.secondary:
        zero["zero_hpz_partition_size"] = strategy.secondary
    if strategy.offload:
        host = {"device": "cpu", "pin_memory": True}
        zero |= {"offload_optimizer": host} | ({"offload_param": host} if zero["stage"] == 3 else {})
    config = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "bf16": {"enabled": plan.model.precision == "bf16"},
        "zero_optimization": zero,
    }
    return json.dumps(config, indent=2) + "\n", (*found.remarks, *_differences(found))


def _differences(found: Uniform) -> list[str]:
    """Return what a stage does otherwise than the strategy."""
    lines, model, ranks = [], found.view.plan.model, found.world_size
    if STAGES[found.strategy.name] == 2:
        whole = model.parameters * (2 if model.precision == "bf16" else 4) * (ranks - 1) // ranks
        lines.append(
            f"Stage 2 keeps parameters whole between steps: {format_bytes(whole)} more at rest than shard_grad."
        )
    if found.recompute is not Recompute.NOTHING:
        lines.append("Recompute all blocks in the model: a file for DeepSpeed cannot switch it on.")
    return lines
