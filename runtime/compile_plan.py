"""From a plan to a schedule, and the checks that a schedule must pass before it is applied.

`planner.model.fsdp_units.units_of` forms the units, so that the planner charges for what the runtime does.  Here
they get module paths, parameters, owners and collectives.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from planner.model.fsdp_units import Unit, owners_of, split_bounds, unit_parameters, units_of
from planner.model.stages import cut
from planner.plan import Plan, read_choices
from planner.pricing import runs_by_ddp
from planner.strategies.spec import Collective
from planner.strategies.unit_collectives import all_used, is_plain, unit_collectives
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Operator, Parameter
from profiler.path_labels import path_label
from runtime.local_shards import Origin, whole
from runtime.parameter_places import is_inside, outermost
from runtime.schedule import Schedule, ScheduledParameter, ScheduledUnit, Split


def compile_plan(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Schedule:
    """Return the schedule of a plan for a traced model on a cluster; verified.

    Raises `OsdpError` if the plan's operators, blocks or strategies are not the model's or the cluster's.
    """
    choices = dict(enumerate(read_choices(plan, graph, cluster)))
    precision, units = plan.model.precision, units_of(cut(graph), choices)
    owners = owners_of(units, graph, cluster.world_size)
    called = {call.operator for call in graph.calls}
    scheduled = []
    for index, unit in enumerate(units):
        # A later step's loss may depend on what that of the trace does not.
        parameters = all_used(unit_parameters(unit, graph))
        collectives = unit_collectives(parameters, unit.strategy, precision, cluster, trains=graph.trains)
        made = _scheduled(unit, graph, collectives, owners.get(index), not called.intersection(unit.operators))
        scheduled.append(replace(made, is_plain=is_plain(parameters, unit.strategy, precision)))
    splits = tuple(
        Split(graph.operators[index].modules[0], len(slices)) for index, slices in choices.items() if len(slices) > 1
    )
    recomputed = plan.recomputations
    schedule = Schedule(
        nodes=cluster.nodes,
        ranks_per_node=cluster.gpus_per_node,
        precision=precision,
        accumulation=plan.accumulation,
        units=tuple(scheduled),
        splits=splits,
        # Once each, however often it runs: wrapped again it would run again as often for every call.
        recomputed=tuple(dict.fromkeys(block.name for block in graph.blocks if block.name in recomputed)),
        selective=frozenset(plan.selectively_recomputed_blocks),
        offloaded={name: _below(name, plan, graph) for name in plan.offloaded_blocks},
        by_ddp=runs_by_ddp(plan, graph, cluster),
        master_weights=plan.model.master_weights,
    )
    verify(schedule, graph)
    return schedule


def _below(name: str, plan: Plan, graph: ModelGraph) -> str | None:
    """Return the block whose backward follows that of another, if its input is offloaded too and nothing is between."""
    index = next(index for index, block in enumerate(graph.blocks) if block.name == name)
    below = graph.blocks[index - 1] if index else None
    is_next = below is not None and below.last_call == graph.blocks[index].first_call
    return below.name if below and is_next and below.name in plan.offloaded_blocks else None


def _scheduled(
    unit: Unit, graph: ModelGraph, collectives: tuple[Collective, ...], owner: int | None, idle: bool
) -> ScheduledUnit:
    """Return one of the planner's units with the modules to wrap and their parameters."""
    operators = [graph.operators[index] for index in unit.operators]
    if unit.slice is not None:
        index, count = unit.slice
        paths: tuple[str, ...] = (Split(operators[0].modules[0], count).slice_path(index),)
        name = f"{operators[0].name} slice {index + 1} of {count}"
    else:
        block = None if unit.whole_block is None else graph.blocks[unit.whole_block].name
        name = block or path_label(operators[0].name)
        every = tuple(dict.fromkeys(path for operator in operators for path in operator.modules))
        paths = outermost(every) if block is None else (block,)
    parameters = tuple(_parameter(parameter, unit, operators, paths[0]) for parameter in unit_parameters(unit, graph))
    names = tuple(operator.name for operator in operators)
    made = ScheduledUnit(name, names, paths, parameters, unit.strategy, collectives, owner, idle)
    return replace(made, uncalled=tuple(path for path in paths if path in graph.uncalled))


def _parameter(parameter: Parameter, unit: Unit, operators: Sequence[Operator], path: str) -> ScheduledParameter:
    """Return a parameter with the place that it, or the slice of it in the module at `path`, has in the original."""
    dtype = parameter.element_bytes, parameter.keeps_dtype
    if unit.slice is None:
        return ScheduledParameter(parameter.name, whole(parameter.name, parameter.shape), parameter.trainable, *dtype)
    shape, offsets = parameter.shape, (0,) * len(parameter.shape)
    if len(shape) == 2:
        (weight,) = (p for operator in operators for p in operator.parameters if p.name == parameter.name)
        shape, offsets = weight.shape, (0, split_bounds(weight.shape[1], unit.slice[1])[unit.slice[0]])
    origin = Origin(parameter.name, shape, offsets, parameter.shape)
    return ScheduledParameter(f"{path}.{parameter.name.rpartition('.')[2]}", origin, parameter.trainable, *dtype)


def verify(schedule: Schedule, graph: ModelGraph) -> None:
    """Check a schedule against the model, whoever made it; raises `OsdpError`.

    Every parameter is in one unit, whole; tied modules are wrapped together; no unit is empty; units
    are in the order in which their operators first run; no path is wrapped twice.
    """
    covered: Counter[str] = Counter()
    for unit in schedule.units:
        if not unit.modules or not unit.parameters:
            raise OsdpError(f"unit {unit.name} of the schedule is empty", got=str(unit.operators))
        for parameter in unit.parameters:
            covered[parameter.origin.name] += parameter.origin.numel
    expected = Counter({p.name: p.numel for operator in graph.operators for p in operator.parameters})
    if wrong := sorted(name for name in covered | expected if covered[name] != expected[name]):
        what = "the schedule does not cover every parameter once"
        got = ", ".join(f"{name}: {covered[name]} elements" for name in wrong[:5])
        raise OsdpError(what, got=got, expected=", ".join(f"{name}: {expected[name]}" for name in wrong[:5]))
    _verify_wrapping(schedule, graph)
    _verify_order(schedule, graph)


def _verify_wrapping(schedule: Schedule, graph: ModelGraph) -> None:
    """Check that each path is wrapped once, and tied modules together."""
    wrapped = Counter(path for unit in schedule.units for path in unit.modules)
    if twice := sorted(path for path, count in wrapped.items() if count > 1):
        raise OsdpError("the schedule wraps a module twice", got=", ".join(twice[:5]), expected="each module once")
    for unit in schedule.units:
        for operator in graph.operators:
            if operator.name in unit.operators and len(operator.modules) > 1:
                apart = [path for path in operator.modules if not any(is_inside(path, each) for each in unit.modules)]
                if apart:
                    what = f"the tied modules of {operator.name} are not all in one unit"
                    raise OsdpError(what, got=", ".join(apart), expected=f"all in unit {unit.name}")


def _verify_order(schedule: Schedule, graph: ModelGraph) -> None:
    """Check that units stand in the order in which the traced model first runs them."""
    first: dict[str, int] = {}
    for index, call in enumerate(graph.calls):
        first.setdefault(graph.operators[call.operator].name, index)
    positions = [min(first.get(name, len(graph.calls)) for name in unit.operators) for unit in schedule.units]
    for index in range(1, len(positions)):
        if positions[index] < positions[index - 1]:
            what = "units of the schedule are not in the order in which they run"
            raise OsdpError(what, got=f"{schedule.units[index].name} after {schedule.units[index - 1].name}")
