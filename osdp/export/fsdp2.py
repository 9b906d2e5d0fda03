"""A plan as a Python module that imports torch alone: `parallelize(model, mesh)`.

The module does what `runtime.apply_schedule` does to a model, in the same order, with PyTorch's public API:

    recompute blocks -> fully_shard units, from the inside out -> fully_shard the model -> cast inputs
    or, where all is replicated, recompute blocks -> DistributedDataParallel

It is laid out as `ruff format` lays it out: what takes more than a line ends in a comma.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from osdp.export import fsdp2_helpers as helpers
from osdp.export.nearest import Expressible, remarks
from osdp.plain_text import plain
from planner.model.stages import cut
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from runtime.apply_schedule import inside_out
from runtime.schedule import Schedule, ScheduledUnit
from runtime.strategies.wrap_context import mixed_precision

INDENT = "    "


def fsdp2_code(found: Expressible) -> str:
    """Return the source of a module that defines `parallelize(model, mesh)`.

    Raises OsdpError if the model has trained parameters that no unit can hold, or parametrized modules in bf16.
    """
    schedule, graph = found.schedule, found.view.space.graph
    _check(schedule, graph)
    body = _by_ddp(schedule) if schedule.by_ddp else _by_fully_shard(schedule, graph)
    blocks = _recomputation(schedule)
    used = helpers.needed("\n".join([*blocks, *body]), has_buffers=bool(graph.buffers))
    lines = [
        f'"""{helpers.DOCSTRING}"""',
        "",
        *(f"# {line}".rstrip() for line in _head(found)),
        "",
        *helpers.imports("\n".join([*blocks, *body, *used])),
        "",
        "",
        "def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:",
        f'{INDENT}"""Return the model, parallelized in place over `mesh`, of one dimension and all ranks."""',
        f"{INDENT}if mesh.ndim != 1 or mesh.size() != {schedule.world_size}:",
        f'{INDENT * 2}expected = "a mesh of one dimension with {schedule.world_size} ranks"',
        f'{INDENT * 2}raise ValueError(f"the plan is for {{expected}}, not for {{mesh}}")',
        *(INDENT + line if line else "" for line in [*blocks, *body]),
        *(f"\n\n{helper}" for helper in used),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _check(schedule: Schedule, graph: ModelGraph) -> None:
    trained = [parameter.name for parameter in graph.outside if parameter.trainable]
    if trained and not schedule.by_ddp:
        what = "fully_shard cannot hold trained parameters without dimensions or elements, or of another dtype than"
        advice = "give them one dimension, freeze those without elements, or plan with *=replicate"
        raise OsdpError(f"{what} their module's", got=", ".join(trained[:5]), advice=advice)
    odd = [operator.name for operator in graph.operators if "parametrizations" in operator.name.split(".")]
    if odd and schedule.precision == "bf16":
        what = "parametrized modules compute in the dtype that they have, which plain FSDP2 in bf16 does not know"
        raise OsdpError(what, got=", ".join(odd[:5]), advice="plan with --precision fp32")
    if not schedule.by_ddp and (taken := _taken_by_others(schedule)):
        what = "plain FSDP2 would gather these with a module inside the one that reads them"
        raise OsdpError(what, got=", ".join(taken[:5]), advice="run the plan by OSDP(...), or plan with *=replicate")


def _taken_by_others(schedule: Schedule) -> list[str]:
    """Return the parameters that `fully_shard`, from the inside out, takes into another unit than the schedule has."""
    homes = {path: unit for unit in schedule.units if not unit.is_plain for path in unit.modules}
    found = []
    for unit in {id(unit): unit for unit in homes.values()}.values():
        for parameter in unit.parameters:
            around = parameter.path
            while around and around not in homes:
                around = around.rpartition(".")[0]
            if homes.get(around, unit) is not unit:
                found.append(parameter.path)
    return found


def _head(found: Expressible) -> list[str]:
    """Return what is said of the plan at the head: its own words may hold anything, so they are quoted."""
    plan, view, schedule = found.view.plan, found.view, found.schedule
    lines = [
        f"Exported by `osdp export --to fsdp2` from a plan for {quoted(plain(plan.model.name))} "
        f"on {schedule.nodes} x {schedule.ranks_per_node} ranks",
        f"of {quoted(plain(plan.cluster.name))}, {plan.model.precision}, with {plan.optimizer}.",
        f"Micro-batch of a rank: {plan.micro_batch}; micro-batches per step: {plan.accumulation}.",
        *remarks("Plain FSDP2", view, found.planned, found.replaced),
    ]
    return [*lines, *_loop(schedule)]


def _loop(schedule: Schedule) -> list[str]:
    """Return what the training loop has to do."""
    if schedule.accumulation == 1:
        return []
    if schedule.by_ddp:
        return ["", "Run all but the last micro-batch of a step in `with model.no_sync():`, backward included."]
    if not any(unit.reduces_once_per_step for unit in schedule.units):
        return []
    return [
        "",
        "Some units all-reduce gradients once per step: before each micro-batch call",
        "`model.set_requires_all_reduce(is_last)`, where is_last says whether it is the last of its step.",
    ]


def quoted(text: str) -> str:
    """Return a string literal of Python, with the quotes that `ruff format` prefers."""
    literal = repr(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in text and "\\'" not in literal else literal


def _paths(paths: Sequence[str], opening: str, closing: str) -> list[str]:
    """Return lines of a list of module paths."""
    return [f"{opening}[", *(f"{INDENT}{quoted(path)}," for path in paths), f"]{closing}"]


# --- recomputation ---------------------------------------------------------------------------


def _recomputation(schedule: Schedule) -> list[str]:
    """Return the statements that let blocks run again in backward."""
    whole = {unit.modules[0] for unit in schedule.units if len(unit.modules) == 1}
    lines: list[str] = []
    for selective in (False, True):
        for is_unit in (True, False):
            blocks = [
                name
                for name in schedule.recomputed
                if (name in schedule.selective) == selective and (name in whole or schedule.by_ddp) == is_unit
            ]
            if not blocks:
                continue
            lines += ["", *_recomputation_reason(selective, is_unit)]
            lines += _paths(blocks, "for path in ", ":")
            call = "recompute_selectively" if selective else "recompute"
            arguments = "" if is_unit else ", early_stop=False"
            lines.append(f"{INDENT}{call}(get_module(model, path){arguments})")
    return lines


def _recomputation_reason(selective: bool, is_unit: bool) -> list[str]:
    if selective:
        return ["# Recomputed but for matrix products and attention: a part of the memory at a part of the time."]
    lines = ["# Recomputed whole: activations of these blocks did not fit, or cost more than a second forward."]
    if not is_unit:
        lines.append("# Units inside them are gathered by hooks, which a forward that stops early would not reach.")
    return lines


# --- DistributedDataParallel -----------------------------------------------------------------


def _by_ddp(schedule: Schedule) -> list[str]:
    return [
        "",
        "# Replicated everywhere, and it fits: gradients are all-reduced in buckets during backward.",
        *_master_weights(schedule),
        "model.to(mesh.device_type)",
        "return DistributedDataParallel(",
        f"{INDENT}model,",
        f"{INDENT}process_group=mesh.get_group(),",
        f"{INDENT}broadcast_buffers=False,",
        f"{INDENT}gradient_as_bucket_view=True,",
        ")",
    ]


# --- fully_shard -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One call of `fully_shard`."""

    modules: tuple[str, ...]
    reason: str
    keywords: tuple[str, ...]


def _by_fully_shard(schedule: Schedule, graph: ModelGraph) -> list[str]:
    # Spanning operators first: other units may hold their modules under other names.
    spanning = {graph.operators[index].name for index in cut(graph).spanning}
    units = list(inside_out(sorted(schedule.units, key=lambda unit: spanning.isdisjoint(unit.operators))))
    ignored = [p.path for unit in units if unit.is_plain for p in unit.parameters]
    ignored += [parameter.name for parameter in graph.outside]
    sharded = [unit for unit in units if not unit.is_plain]
    lines = [*_master_weights(schedule), *_ignored(ignored), *_meshes(sharded, schedule)]
    policies = {policy: _name(i) for i, policy in enumerate(dict.fromkeys(_policy(u, schedule) for u in sharded))}
    if schedule.precision == "bf16":
        lines += ["", "# Parameters are gathered in bf16 and gradients are added up in fp32; inputs are cast below."]
    elif any(policies):
        lines += ["", "# Gradients of parameters of few bits are added up in fp32."]
    for policy, name in policies.items():
        if policy:
            lines += [f"{name} = MixedPrecisionPolicy(", *(f"{INDENT}{one}," for one in policy), ")"]
    calls = [_call(unit, schedule, policies[_policy(unit, schedule)], bool(ignored)) for unit in sharded]
    for _, same in groupby(calls, key=lambda call: (call.reason, call.keywords, len(call.modules) == 1)):
        lines += ["", *_statements(list(same))]
    if not any(unit.modules == ("",) for unit in sharded):
        keywords = ["mesh=mesh"] + (["ignored_params=ignored"] if ignored else [])
        lines += ["", "# The model itself holds nothing more: it begins and ends forwards and backwards of all units."]
        lines.append(f"fully_shard(model, {', '.join(keywords)})")
    if schedule.precision == "bf16":
        lines += ["", "# Every module that has parameters computes in bf16, whatever it is given."]
        lines.append("cast_inputs(model, torch.bfloat16)")
    return [*lines, "return model"]


def _master_weights(schedule: Schedule) -> list[str]:
    if not schedule.master_weights:
        return []
    return ["", "# Trained parameters of few bits, and their optimizer states, rest in fp32.", "keep_in_fp32(model)"]


def _ignored(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    why = "# Not trained and not sharded: every rank holds these whole, without any communication."
    return ["", why, *_paths(paths, "ignored = hold_whole(model, mesh, ", ")")]


def _meshes(units: Iterable[ScheduledUnit], schedule: Schedule) -> list[str]:
    lines: list[str] = []
    for group in sorted({unit.strategy.group for unit in units} - {schedule.world_size}):
        copies = schedule.world_size // group
        what = f"split over {group} neighbouring ranks" if group > 1 else "whole on every rank"
        lines += [
            "",
            f"# {copies} copies, each {what}.",
            f"{_mesh(group, schedule)} = init_device_mesh(",
            f"{INDENT}mesh.device_type,",
            f"{INDENT}({copies}, {group}),",
            f'{INDENT}mesh_dim_names=("replicate", "shard"),',
            ")",
        ]
    return lines


def _mesh(group: int, schedule: Schedule) -> str:
    if group == schedule.world_size:
        return "mesh"
    return "replicas" if group == 1 else f"groups_of_{group}"


def _name(index: int) -> str:
    return "mixed_precision" if index == 0 else f"mixed_precision_{index + 1}"


def _policy(unit: ScheduledUnit, schedule: Schedule) -> tuple[str, ...]:
    """Return the arguments of a unit's mixed precision policy; none for FSDP2's default."""
    policy = mixed_precision(unit, schedule.precision)
    dtypes = [("param_dtype", policy.param_dtype), ("reduce_dtype", policy.reduce_dtype)]
    given = [f"{name}={dtype}" for name, dtype in dtypes if dtype is not None]
    return (*given, "cast_forward_inputs=False") if given else ()


def _call(unit: ScheduledUnit, schedule: Schedule, policy: str, ignores: bool) -> _Call:
    strategy = unit.strategy
    keywords = [f"mesh={_mesh(strategy.group, schedule)}", f"reshard_after_forward={strategy.reshard_after_forward}"]
    if _policy(unit, schedule):
        keywords.append(f"mp_policy={policy}")
    if strategy.offload:
        keywords.append('offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")')
    if ignores:
        keywords.append("ignored_params=ignored")
    return _Call(unit.modules, _reason(strategy), tuple(keywords))


def _reason(strategy: Strategy) -> str:
    offloaded = "; parameters, gradients and optimizer states rest on the host" if strategy.offload else ""
    return f"# {strategy}: {strategy.spec.summary}{offloaded}."


def _statements(calls: Sequence[_Call]) -> list[str]:
    """Return calls that differ in their modules only."""
    first = calls[0]
    keywords = [f"{INDENT}{one}," for one in first.keywords]
    if len(first.modules) == 1 and len(calls) > 1:
        loop = _paths([call.modules[0] for call in calls], "for path in ", ":")
        inner = ["fully_shard(", f"{INDENT}get_module(model, path),", *keywords, ")"]
        return [first.reason, *loop, *(INDENT + line for line in inner)]
    lines = [first.reason]
    for call in calls:
        if len(call.modules) == 1:
            modules = [f"get_module(model, {quoted(call.modules[0])}),"]
        else:
            modules = ["[", *(f"{INDENT}get_module(model, {quoted(path)})," for path in call.modules), "],"]
        name = "fully_shard" if len(call.modules) == 1 else "shard_together"
        lines += [f"{name}(", *(INDENT + line for line in modules), *keywords, ")"]
    return lines
