"""A plan as sections of the TOML file that torchtitan reads (0.2)."""

from osdp.export.uniform import Library, uniform
from planner.analysis.explain import OpenPlan
from profiler.model_graph import Recompute

LIBRARY = Library("torchtitan", frozenset({"replicate", "shard", "shard_grad", "group_shard"}), frozenset(Recompute))
MODES = {Recompute.NOTHING: "none", Recompute.SELECTIVE: "selective", Recompute.EVERYTHING: "full"}


def torchtitan_config(view: OpenPlan, *, nearest: bool) -> str:
    """Return the sections. Raises OsdpError for what it cannot do."""
    found = uniform(view, LIBRARY, nearest=nearest)
    plan, ranks, group = view.plan, found.world_size, found.strategy.group
    lines = [
        *(f"# {line}".rstrip() for line in found.remarks),
        "",
        "[training]",
        f"local_batch_size = {plan.micro_batch}",
        f"global_batch_size = {plan.micro_batch * plan.accumulation * ranks}",
        f"seq_len = {plan.model.sequence_length}",
        f'mixed_precision_param = "{"bfloat16" if plan.model.precision == "bf16" else "float32"}"',
        'mixed_precision_reduce = "float32"',
        f"enable_cpu_offload = {str(found.strategy.offload).lower()}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {ranks // group}",
        f"data_parallel_shard_degree = {group}",
        f'fsdp_reshard_after_forward = "{"never" if found.strategy.keeps_unsharded else "always"}"',
        "",
        "[activation_checkpoint]",
        f'mode = "{MODES[found.recompute]}"',
        *(['selective_ac_option = "op"'] if found.recompute is Recompute.SELECTIVE else []),
    ]
    return "\n".join(lines) + "\n"
