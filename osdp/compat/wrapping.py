"""From modules that a user chose to a schedule. Nothing is traced, so any model will do.

    chosen modules --schedule_of--> Schedule --apply_schedule--> the model, sharded in place

A parameter is in the unit of the innermost chosen module around it, and in that of the model itself
where there is none.  Modules that share parameters (tied weights) form one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from osdp.planning.clusters import load_cluster
from osdp.planning.rank_grid import CPU_CLUSTER
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import unit_collectives
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import Parameter
from runtime.apply_schedule import ShardedModel, apply_schedule, default_device
from runtime.deferred_init.deferred_init import is_meta
from runtime.deferred_init.initialise import fill, share_rank_0
from runtime.parameter_places import Registration, registered_parameters
from runtime.schedule import Schedule, ScheduledParameter, ScheduledUnit
from runtime.state.local_shards import whole

Registered = Registration[nn.Parameter]

ROOT = ""
"""Path of the model itself."""


@dataclass(frozen=True)
class Wish:
    """How a module is to be wrapped."""

    nodes: int
    ranks_per_node: int
    strategy: Strategy
    precision: str = "fp32"
    """Compute dtype, `fp32` or `bf16`."""
    model: str = "the model"
    """What messages call the model."""


def shard_chosen(model: nn.Module, chosen: Mapping[nn.Module, Wish]) -> ShardedModel:
    """Shard a model in place over the default process group. A collective call; see `schedule_of`."""
    schedule, device = schedule_of(model, chosen), default_device()
    if is_meta(model):
        return fill(model, lambda made: apply_schedule(made, schedule, device))
    share_rank_0(model, device)
    return apply_schedule(model, schedule, device)


def schedule_of(model: nn.Module, chosen: Mapping[nn.Module, Wish]) -> Schedule:
    """Return the schedule in which the chosen modules, `model` among them, are units, in their order in the model.

    Raises OsdpError if they are for different ranks or precisions, or tied ones have different strategies.
    """
    root = chosen[model]
    for path, module in model.named_modules():
        wish = chosen.get(module, root)
        if (wish.nodes, wish.ranks_per_node, wish.precision) != (root.nodes, root.ranks_per_node, root.precision):
            raise OsdpError(
                f"{path} is wrapped for other ranks or another precision than {root.model}",
                got=_format(wish),
                expected=_format(root),
            )
    # Of a cluster only its size matters here, none of its figures.
    cluster = load_cluster(CPU_CLUSTER, root.nodes, root.ranks_per_node)
    members = _units(model, chosen)
    units = tuple(
        _unit(modules, parameters, _strategy(model, modules, chosen), root.precision, cluster, root.model)
        for modules, parameters in members.items()
    )
    return Schedule(
        root.nodes,
        root.ranks_per_node,
        root.precision,
        accumulation=1,
        units=units,
        splits=(),
        recomputed=(),
        by_ddp=False,
    )


def _format(wish: Wish) -> str:
    return f"{wish.nodes} x {wish.ranks_per_node} ranks, {wish.precision}"


def _units(model: nn.Module, chosen: Mapping[nn.Module, Wish]) -> dict[tuple[str, ...], list[Registered]]:
    """Return the parameters of each unit by the paths of its modules."""
    first: dict[nn.Module, str] = {}
    paths = {
        path: first.setdefault(module, path)
        for path, module in model.named_modules(remove_duplicate=False)
        if module in chosen
    }
    joined = {path: {path} for path in paths.values()}
    registered = registered_parameters(model).values()
    for registration in registered:
        holders = {_innermost(name, paths) for name in registration.names}
        together = set().union(*(joined[holder] for holder in holders))
        joined |= dict.fromkeys(together, together)
    units: dict[tuple[str, ...], list[Registered]] = {}
    for registration in registered:
        key = _outermost(joined[_innermost(registration.names[0], paths)])
        units.setdefault(key, []).append(registration)
    return units


def _innermost(name: str, paths: Mapping[str, str]) -> str:
    """Return the chosen module around the tensor `name`; the model itself is one."""
    path = name.rpartition(".")[0]
    while path not in paths:
        path = path.rpartition(".")[0]
    return paths[path]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that lie in none of the others, sorted; wrapping a module wraps what is in it."""
    paths = sorted(paths)
    if ROOT in paths:
        return (ROOT,)
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _strategy(model: nn.Module, modules: Sequence[str], chosen: Mapping[nn.Module, Wish]) -> Strategy:
    strategies = {chosen[model.get_submodule(path)].strategy for path in modules}
    if len(strategies) > 1:
        raise OsdpError(
            "modules that share parameters are wrapped in different ways",
            got=", ".join(modules),
            expected="one strategy for all of them",
        )
    return strategies.pop()


def _unit(
    modules: tuple[str, ...],
    registered: Sequence[Registered],
    strategy: Strategy,
    precision: str,
    cluster: Cluster,
    name: str,
) -> ScheduledUnit:
    parameters = [Parameter(r.names[0], tuple(r.tensor.shape), r.tensor.requires_grad) for r in registered]
    return ScheduledUnit(
        name=modules[0] or name,
        operators=modules,
        modules=modules,
        parameters=tuple(ScheduledParameter(p.name, whole(p.name, p.shape), p.trainable) for p in parameters),
        strategy=strategy,
        collectives=unit_collectives(parameters, strategy, precision, cluster),
    )
