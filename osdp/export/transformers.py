"""A plan as the JSON file that `TrainingArguments(fsdp=True, fsdp_config=FILE)` reads (transformers 5.23)."""

import json
from typing import Any

from osdp.export.accelerate import BF16
from osdp.export.uniform import Library, uniform
from planner.analysis.explain import OpenPlan
from profiler.model_graph import Recompute

LIBRARY = Library("transformers' Trainer", frozenset({"shard", "shard_grad"}))


def transformers_config(view: OpenPlan, *, nearest: bool) -> tuple[str, tuple[str, ...]]:
    """Return the file, and lines for the user. Raises OsdpError for what it cannot do."""
    found = uniform(view, LIBRARY, nearest=nearest)
    config: dict[str, Any] = {"version": 2, "reshard_after_forward": not found.strategy.keeps_unsharded}
    config["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP" if found.block_classes else "NO_WRAP"
    if found.block_classes:
        config["transformer_layer_cls_to_wrap"] = found.block_classes
    config["activation_checkpointing"] = found.recompute is Recompute.EVERYTHING
    config["cpu_offload"] = found.strategy.offload
    arguments = f"per_device_train_batch_size={view.plan.micro_batch}"
    arguments += f", gradient_accumulation_steps={view.plan.accumulation}, bf16={view.plan.model.precision == 'bf16'}"
    line = f"TrainingArguments(fsdp=True, fsdp_config=FILE, {arguments}) on {found.world_size} ranks"
    more = (BF16, line) if view.plan.model.precision == "bf16" else (line,)
    return json.dumps(config, indent=2) + "\n", (*found.remarks, *more)
