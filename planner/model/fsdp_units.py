"""How operators form units: what is wrapped, gathered and reduced together.

    consecutive operators of a stage with equal strategy     one unit of each kind (see `_Kind`)
    of those, what would stay gathered after a stage         a unit for each operator (see `_stays_gathered`)
    of those, an operator that some steps leave out          a unit of its own
    an operator that one rank holds whole (`owner`)          a unit of its own: it has one owner
    a split operator                                         one unit per slice
    a spanning operator, an operator that is never called    a unit of its own

The planner charges for these units and the runtime wraps them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.model.stages import Stage, StagedModel
from planner.strategies.owner_assignment import assign_owners
from planner.strategies.spec import Strategy
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Operator, Parameter


@dataclass(frozen=True)
class Unit:
    """Operators, or one slice of an operator, that are wrapped together."""

    operators: tuple[int, ...]
    """Indices of its operators, in order of first call."""
    strategy: Strategy
    slice: tuple[int, int] | None = None
    """(index, count) of the slice that it is of its only operator."""
    whole_block: int | None = None
    """Index of the block, if the unit is all of a block's own operators."""


_Kind = tuple[bool, bool, str, frozenset[str]]
"""What operators of one unit have in common, as FSDP2 has one policy for each unit: whether mixed precision leaves
them as they are, whether all are frozen (of copies: then no gradient is reduced), the dtype of what is trained
(empty: any), and where windows hold them, all dtypes."""


def _kind(operator: Operator, strategy: Strategy) -> _Kind:
    trained = [parameter.dtype for parameter in operator.parameters if parameter.trainable]
    is_frozen_copy = strategy.group == 1 and not trained
    dtypes = frozenset(parameter.dtype for parameter in operator.parameters) if strategy.spec.one_sided else frozenset()
    keeps = any(parameter.keeps_dtype for parameter in operator.parameters)
    return keeps, is_frozen_copy, trained[0] if trained else "", dtypes


def _fitting(kind: _Kind, among: Iterable[_Kind]) -> _Kind | None:
    """Return the first kind of a unit that an operator can join."""
    *rest, trained, dtypes = kind
    for other in among:
        *its, one, every = other
        if its == rest and dtypes == every and (one == trained or not one or not trained):
            return other
    return None


def join(
    graph: ModelGraph,
    operators: Iterable[int],
    choices: Iterable[tuple[Strategy, ...]],
    alone: frozenset[int] = frozenset(),
    between: frozenset[int] = frozenset(),
) -> tuple[Unit, ...]:
    """Return the units of one stage's operators, given the strategies of each one's slices.

    Operators in `alone` are not joined with others, and those `between` neither, but what is around them is.
    """
    units: list[tuple[list[int], Strategy, tuple[int, int] | None]] = []
    joinable: Strategy | None = None
    open_units: dict[_Kind, list[int]] = {}
    for operator, slices in zip(operators, choices, strict=True):
        count = len(slices)
        if operator in between and count == 1:
            units.append(([operator], slices[0], None))
            continue
        for index, strategy in enumerate(slices):
            joins = count == 1 and strategy.spec.joins and operator not in alone
            if not (joins and strategy == joinable):
                open_units, joinable = {}, strategy if joins else None
            kind = _kind(graph.operators[operator], strategy)
            if joins and (fitting := _fitting(kind, open_units)) is not None:
                members = open_units.pop(fitting)
                members.append(operator)
                open_units[(*kind[:2], kind[2] or fitting[2], kind[3])] = members
                continue
            units.append(([operator], strategy, (index, count) if count > 1 else None))
            open_units[kind] = units[-1][0]
    return tuple(Unit(tuple(members), strategy, part) for members, strategy, part in units)


def stage_units(model: StagedModel, stage: Stage, choices: Iterable[tuple[Strategy, ...]]) -> tuple[Unit, ...]:
    """Return the units of a stage's own operators, given the strategies of each one's slices."""
    choices = [*choices]
    units = join(model.graph, stage.operators, choices, model.slices)
    if len(units) == 1 and units[0].slice is None and stage.block is not None:
        return (replace(units[0], whole_block=stage.block),)
    if occasional := _occasional(stage):
        units = join(model.graph, stage.operators, choices, model.slices, occasional)
    if not stage.repeats:
        return units
    apart = list[Unit]()
    for unit in units:
        splits = len(unit.operators) > 1 and _stays_gathered(unit.operators, stage)
        apart += [replace(unit, operators=(one,)) for one in unit.operators] if splits else [unit]
    return tuple(apart)


def _occasional(stage: Stage) -> frozenset[int]:
    """Return the operators that some steps leave out: FSDP2 would keep all that is wrapped together with one of them
    gathered there, as it shards modules when all of them have run."""
    if not any(call.occasional for call in stage.calls):
        return frozenset()
    return frozenset(stage.operators) - {call.operator for call in stage.calls if not call.occasional}


def _stays_gathered(operators: Collection[int], stage: Stage) -> bool:
    """Return whether modules that are wrapped together would stay gathered to the end of the model's forward.

    FSDP2 shards them when all of them have run.  What runs of them after that it shards when the forward is over.
    """
    to_run = set[int]()
    for call in stage.calls:
        if call.operator in operators:
            to_run = (to_run or set(operators)) - {call.operator}
    return bool(to_run)


def units_of(model: StagedModel, choices: Mapping[int, tuple[Strategy, ...]]) -> tuple[Unit, ...]:
    """Return all units of a model in order of first call, those that are never called at the end.

    `choices` gives the strategies of every operator's slices, one for an operator that is not split.
    Raises `OsdpError` for an operator that cannot be split, or that its strategy cannot hold.
    """
    graph = model.graph
    for operator, slices in choices.items():
        check_split(graph.operators[operator], len(slices))
        check_dtypes(graph.operators[operator], slices)
    units: list[Unit] = []
    for stage in model.stages:
        own = stage_units(model, stage, (choices[operator] for operator in stage.operators))
        first = {call.operator: position for position, call in reversed(list(enumerate(stage.calls)))}
        own += join(graph, stage.opens, (choices[operator] for operator in stage.opens), frozenset(stage.opens))
        units += sorted(own, key=lambda unit: first[unit.operators[0]])
    return (*units, *join(graph, model.idle, (choices[operator] for operator in model.idle), frozenset(model.idle)))


def owners_of(units: Sequence[Unit], graph: ModelGraph, ranks: int) -> dict[int, int]:
    """Return the owning rank of each unit that one rank holds whole, by its position among the units."""
    owned = [position for position, unit in enumerate(units) if unit.strategy.spec.has_owner]
    sizes = [sum(p.element_bytes * p.numel for p in unit_parameters(units[i], graph)) for i in owned]
    asked = [units[position].strategy.owner for position in owned]
    given = {index: rank for index, rank in enumerate(asked) if rank is not None}
    return dict(zip(owned, assign_owners(sizes, ranks, given), strict=True))


def unit_parameters(unit: Unit, graph: ModelGraph) -> tuple[Parameter, ...]:
    """Return the parameters of a unit's operators, or of its slice of one, in order."""
    parameters = tuple(p for operator in unit.operators for p in graph.operators[operator].parameters)
    return parameters if unit.slice is None else split_parameters(parameters, *unit.slice)


def check_split(operator: Operator, slices: int) -> None:
    """Raise `OsdpError` if an operator cannot be split into this many slices."""
    if slices == 1:
        return
    shapes = [parameter.shape for parameter in operator.parameters]
    is_linear = bool(shapes) and len(shapes[0]) == 2 and shapes[1:] in ([], [shapes[0][:1]])
    if operator.kind != "Linear" or len(operator.modules) != 1 or not is_linear:
        tied = " that is tied to others" if len(operator.modules) > 1 else ""
        expected = "one linear layer with a weight (out, in) and optionally a bias (out,)"
        raise OsdpError(f"operator {operator.name} cannot be split", got=f"a {operator.kind}{tied}", expected=expected)
    if shapes[0][1] < slices:
        what = f"operator {operator.name} cannot be split into {slices} slices"
        raise OsdpError(what, got=f"{shapes[0][1]} input features", expected=f"at least {slices}")


def can_hold(operator: Operator, strategy: Strategy) -> bool:
    """Return whether a strategy can hold an operator's parameters: windows have one dtype."""
    if not strategy.spec.one_sided:
        return True
    dtypes = {parameter.dtype for parameter in operator.parameters}
    return len(dtypes) == 1 and dtypes <= {"float32", "bfloat16"}


def check_dtypes(operator: Operator, strategies: Iterable[Strategy]) -> None:
    """Raise `OsdpError` if one of the strategies cannot hold an operator's parameters."""
    for strategy in strategies:
        if not can_hold(operator, strategy):
            what = f"{strategy.name} cannot hold operator {operator.name}"
            got = f"parameters of {' and '.join(sorted({parameter.dtype for parameter in operator.parameters}))}"
            expected, advice = "parameters of one dtype, float32 or bfloat16", "pin it to another strategy"
            raise OsdpError(what, got=got, expected=expected, advice=advice)


def check_selective(graph: ModelGraph, slices: Mapping[int, int], blocks: Collection[int]) -> None:
    """Raise OsdpError if a block that is recomputed selectively has split operators: `slices` are their numbers."""
    for index, count in slices.items():
        operator = graph.operators[index]
        if count > 1 and operator.block is not None and operator.block in blocks:
            name = graph.blocks[operator.block].name
            what = f"{name} cannot be recomputed selectively: one of its operators is split"
            advice = "recompute the block whole, or do not split the operator"
            raise OsdpError(what, got=f"{operator.name} in {count} slices", expected="whole operators", advice=advice)


def split_bounds(features: int, slices: int) -> tuple[int, ...]:
    """Return the `slices` + 1 boundaries of the input features, as `torch.tensor_split` cuts them.

    The first features % slices slices have one feature more.
    """
    size, longer = divmod(features, slices)
    return tuple(index * size + min(index, longer) for index in range(slices + 1))


def split_parameters(parameters: Sequence[Parameter], index: int, count: int) -> tuple[Parameter, ...]:
    """Return one slice's parameters of a linear operator's weight (out, in) and bias (out,).

    The slice has the columns of its input features, and slice 0 has the bias.
    """
    weight, *bias = parameters
    start, stop = list(pairwise(split_bounds(weight.shape[1], count)))[index]
    part = replace(weight, shape=(weight.shape[0], stop - start))
    return (part, *(bias if index == 0 else ()))
