"""A plan as the YAML file that `accelerate launch --config_file` reads (keys as of accelerate 1.15)."""

from typing import Any

import yaml

from osdp.export.uniform import Library, Uniform, uniform
from planner.analysis.explain import OpenPlan
from profiler.model_graph import Recompute

BF16 = "In bf16 accelerate reduces gradients in bf16, and OSDP in fp32: half the bytes that were priced, fewer bits."
"""What accelerate does otherwise, and what stands on it."""
LIBRARY = Library("accelerate", frozenset({"replicate", "shard", "shard_grad", "group_shard"}))


def accelerate_config(view: OpenPlan, *, nearest: bool) -> str:
    """Return the file. Raises OsdpError for what it cannot do."""
    found = uniform(view, LIBRARY, nearest=nearest)
    cluster, precision = view.load.cluster, view.plan.model.precision
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16" if precision == "bf16" else "no",
        "num_machines": cluster.nodes,
        "num_processes": cluster.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if cluster.nodes == 1 else "c10d",
        "use_cpu": cluster.device.kind == "cpu",
    }
    if found.strategy.name == "replicate":
        config["distributed_type"] = "MULTI_CPU" if cluster.device.kind == "cpu" else "MULTI_GPU"
    else:
        config["fsdp_config"] = _fsdp(found)
    if found.strategy.name == "group_shard":
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": cluster.world_size // found.strategy.group,
            "parallelism_config_dp_shard_size": found.strategy.group,
        }
    steps = f"Accelerator(gradient_accumulation_steps={view.plan.accumulation})"
    more = [f"In the script: micro-batches of {view.plan.micro_batch} samples a rank, {steps}."]
    if "fsdp_config" in config and precision == "bf16":
        more.append(BF16)
    if cluster.nodes > 1:
        more.append("On each node: its machine_rank, and main_process_ip and main_process_port of the first.")
    if found.strategy.name == "replicate" and found.recompute is not Recompute.NOTHING:
        more.append("In the script: recompute all blocks, which accelerate does under FSDP only.")
    head = (*found.remarks, *more)
    text = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return text + yaml.safe_dump(config, sort_keys=False)


def _fsdp(found: Uniform) -> dict[str, Any]:
    classes = found.block_classes
    wrap = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if classes:
        wrap = {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(classes),
        }
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": not found.strategy.keeps_unsharded,
        **wrap,
        "fsdp_activation_checkpointing": found.recompute is Recompute.EVERYTHING,
        "fsdp_offload_params": found.strategy.offload,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
