"""OSDP's runtime under fairscale's `enable_wrap` and `auto_wrap`, with groups; for any model.

    from osdp.fairscale import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args

    fsdp_args = gen_fsdp_args(nnodes=2, nproc_per_node=2, gsdp_type="group_sharding", model_type="bert-large")
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=1e6)
        model = auto_wrap(model, auto_wrap_policy=my_auto_wrap_policy)

`enable_wrap` and `default_auto_wrap_policy` are fairscale's own.  fairscale's `auto_wrap` leaves out
what is left of a model when its large modules are wrapped, and wraps tied weights twice; the one here
chooses by it and then shards the whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist
from fairscale.nn.wrap import auto_wrap as wrap_chosen
from fairscale.nn.wrap import default_auto_wrap_policy, enable_wrap, wrap
from fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from osdp.api import shard
from osdp.compat.seed_groups import grouped_strategy
from osdp.planning.clusters import load_cluster
from osdp.planning.rank_grid import CPU_CLUSTER
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import unit_collectives
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.mixed_precision import COMPUTE_DTYPE, keeps_dtype
from profiler.model_graph import Parameter
from runtime.local_shards import whole
from runtime.meshes import check_process_group, check_world
from runtime.parameter_places import Registration, outermost, registered_parameters
from runtime.schedule import Schedule, ScheduledParameter, ScheduledUnit

__all__ = ["FSDP", "Groups", "auto_wrap", "default_auto_wrap_policy", "enable_wrap", "gen_fsdp_args", "wrap"]

Registered = Registration[nn.Parameter]


@dataclass(frozen=True)
class Groups:
    """Ranks in groups of a node each, and what is done with them."""

    nodes: int
    ranks_per_node: int
    strategy: Strategy
    model: str = "the model"
    """What messages call the model."""
    precision: str = "fp32"
    """Compute dtype, `fp32` or `bf16`; `FSDP` sets it."""


def gen_fsdp_args(nnodes: int, nproc_per_node: int, gsdp_type: str, model_type: str = "the model") -> dict[str, Any]:
    """Return the arguments of `FSDP` for `nnodes` nodes of `nproc_per_node` ranks.

    gsdp_type: `group_sharding`, `communication_with_groups` or `none` (see `osdp.compat.seed_groups`).  For `none`
        there are no arguments, so that fairscale's own FSDP takes them too; it knows none of the others.
    model_type: what messages call the model, any text; nothing is looked up by it, as which modules are wrapped
        is for the policy to say.

    Raises OsdpError if the type is not known or the process group, where there is one, has another size.
    """
    for name, value in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise OsdpError(f"{name} is no whole number", got=repr(value), expected="1 or more")
    strategy = grouped_strategy(gsdp_type, nnodes, nproc_per_node)
    if dist.is_initialized():
        check_world(nnodes, nproc_per_node)
    return {} if gsdp_type == "none" else {"groups": Groups(nnodes, nproc_per_node, strategy, str(model_type))}


_marks: WeakKeyDictionary[nn.Module, tuple[Groups, RemovableHandle]] = WeakKeyDictionary()
"""Modules that are to be wrapped, how, and the hook that refuses their forward until then."""


class FSDP:
    """Wraps a module: PyTorch's `fully_shard` in place, with groups; what is returned is the module itself.

    Within `enable_wrap` the module is only marked, as its model is not known yet; `auto_wrap` of this module, or
    `FSDP(model, **fsdp_args)` after it, shards the model with all marked modules in it. All ranks get the parameters
    and buffers of rank 0. Names stay those of the model; parameters and gradients are DTensors, which
    `torch.nn.utils.clip_grad_norm_` and `torch.distributed.checkpoint` take.
    """

    def __new__(  # type: ignore[misc]  # fairscale wants a class, and the module stays what it is
        cls, module: nn.Module, groups: Groups | None = None, precision: str = "fp32", **unknown: Any
    ) -> nn.Module:
        """Return `module`. A collective call outside of `enable_wrap`.

        groups: what `gen_fsdp_args` gives; without them everything is sharded over all ranks.
        precision: `fp32`, or `bf16` to compute in it.

        Raises OsdpError for other options, a module that is wrapped already, or no process group.
        """
        chosen = _checked(groups, precision, **unknown)
        if not isinstance(module, nn.Module):
            raise OsdpError("FSDP wraps modules", got=type(module).__name__, expected="an nn.Module")
        if isinstance(module, FSDPModule) or module in _marks:
            raise OsdpError("the module is wrapped already", got=type(module).__name__)
        if not ConfigAutoWrap.in_autowrap_context:
            return _shard(module, chosen)
        _marks[module] = chosen, module.register_forward_pre_hook(_refuse)
        return module


def auto_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool] | None = None, **overrides: Any) -> nn.Module:
    """Wrap what the policy chooses, as fairscale's function of this name does, and shard the model.

    What the policy leaves out is sharded with the model itself. Outside of `enable_wrap` nothing is done, and for other
    classes than `FSDP` what fairscale does. A collective call; raises OsdpError as `FSDP` does.
    """
    wrapped: nn.Module = wrap_chosen(module, auto_wrap_policy=auto_wrap_policy, **overrides)
    if not ConfigAutoWrap.in_autowrap_context or ConfigAutoWrap.wrapper_cls is not FSDP:
        return wrapped
    if wrapped in _marks:
        return _shard(wrapped, _marks[wrapped][0])
    return _shard(wrapped, _checked(**(ConfigAutoWrap.kwargs | overrides)))


def _checked(groups: Groups | None = None, precision: str = "fp32", **unknown: Any) -> Groups:
    """Return how a module is to be wrapped; raises OsdpError."""
    if unknown or not isinstance(groups, Groups | None):
        got = ", ".join(f"{name}={value!r}" for name, value in unknown.items()) or f"groups={groups!r}"
        what = "FSDP does not take these options"
        advice = "fairscale's own options have no counterpart here: leave them out"
        raise OsdpError(what, got=got, expected="groups, as gen_fsdp_args gives them, and precision", advice=advice)
    if precision not in COMPUTE_DTYPE:
        raise OsdpError("FSDP does not know this precision", got=repr(precision), expected=", ".join(COMPUTE_DTYPE))
    check_process_group()
    if groups is None:
        ranks = dist.get_world_size()
        return Groups(1, ranks, grouped_strategy("none", 1, ranks), precision=precision)
    check_world(groups.nodes, groups.ranks_per_node)
    return replace(groups, precision=precision)


def _shard(model: nn.Module, groups: Groups) -> nn.Module:
    """Shard a model in place with the marked modules in it, each as it was marked. A collective call."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        expected = "parts that are only marked: wrapped within enable_wrap"
        raise OsdpError("a part of the model is sharded already", got=type(model).__name__, expected=expected)
    marked = [module for module in model.modules() if module in _marks]
    schedule = schedule_of(model, {module: _marks[module][0] for module in marked} | {model: groups})
    shard(model, schedule)
    for module in marked:  # not before: what was refused must go on refusing to run
        _marks.pop(module)[1].remove()
    return model


def _refuse(module: nn.Module, _: tuple[Any, ...]) -> NoReturn:
    """Stop the forward of a model that fairscale's own `auto_wrap` left half wrapped."""
    what = "the model is marked to be sharded, but is not sharded yet"
    expected = "FSDP(model, **fsdp_args) after the `with` block, before the optimizer is made"
    advice = "import auto_wrap from osdp.fairscale, which does that"
    raise OsdpError(what, got=type(module).__name__, expected=expected, advice=advice)


def schedule_of(model: nn.Module, chosen: Mapping[nn.Module, Groups]) -> Schedule:
    """Return the schedule in which the chosen modules, `model` among them, are units, in their order in the model.

    Nothing is traced, so any model will do.  A parameter is in the unit of the innermost chosen module around it, and
    in that of the model itself where there is none.  Modules that share parameters (tied weights) form one unit.

    Raises OsdpError if they are for different ranks or precisions, or tied ones have different strategies.
    """
    root = chosen[model]
    for path, module in model.named_modules():
        groups = chosen.get(module, root)
        if (groups.nodes, groups.ranks_per_node, groups.precision) != (root.nodes, root.ranks_per_node, root.precision):
            what = f"{path} is wrapped for other ranks or another precision than {root.model}"
            got = f"{groups.nodes} x {groups.ranks_per_node} ranks, {groups.precision}"
            raise OsdpError(what, got=got, expected=f"{root.nodes} x {root.ranks_per_node} ranks, {root.precision}")
    # Of a cluster only its size matters here, none of its figures.
    cluster = load_cluster(CPU_CLUSTER, root.nodes, root.ranks_per_node)
    units = tuple(
        _unit(modules, held, [chosen[model.get_submodule(path)] for path in modules], cluster)
        for modules, held in _units(model, chosen, root.precision).items()
    )
    return Schedule(root.nodes, root.ranks_per_node, root.precision, 1, units, splits=(), recomputed=(), by_ddp=False)


def _units(
    model: nn.Module, chosen: Mapping[nn.Module, Groups], precision: str
) -> dict[tuple[str, ...], list[Registered]]:
    """Return the parameters of each unit by the paths of its modules, but for those that mixed precision leaves."""
    first: dict[nn.Module, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    paths = {path: first.setdefault(module, path) for path, module in modules if module in chosen}
    joined = {path: {path} for path in paths.values()}
    kept = keeps_dtype(model) if COMPUTE_DTYPE[precision] else ()
    registered = [one for name, one in registered_parameters(model).items() if name not in kept]
    for registration in registered:
        holders = {_innermost(name, paths) for name in registration.names}
        together = set().union(*(joined[holder] for holder in holders))
        joined |= dict.fromkeys(together, together)
    units: dict[tuple[str, ...], list[Registered]] = {}
    for registration in registered:
        key = outermost(sorted(joined[_innermost(registration.names[0], paths)]))
        units.setdefault(key, []).append(registration)
    return units


def _innermost(name: str, paths: Mapping[str, str]) -> str:
    """Return the chosen module around the tensor `name`; the model itself is one."""
    path = name.rpartition(".")[0]
    while path not in paths:
        path = path.rpartition(".")[0]
    return paths[path]


def _unit(
    modules: tuple[str, ...], held: Sequence[Registered], ways: Sequence[Groups], cluster: Cluster
) -> ScheduledUnit:
    """Return the unit of some modules, each to be wrapped in its way."""
    groups, strategy = ways[0], ways[0].strategy
    if any(one.strategy != strategy for one in ways):
        what = "modules that share parameters are wrapped in different ways"
        raise OsdpError(what, got=", ".join(modules), expected="one strategy for all of them")
    parameters = [
        Parameter(r.names[0], tuple(r.tensor.shape), r.tensor.requires_grad, str(r.tensor.dtype).removeprefix("torch."))
        for r in held
    ]
    scheduled = tuple(
        ScheduledParameter(p.name, whole(p.name, p.shape), p.trainable, p.element_bytes) for p in parameters
    )
    collectives = unit_collectives(parameters, strategy, groups.precision, cluster)
    return ScheduledUnit(modules[0] or groups.model, modules, modules, scheduled, strategy, collectives)
