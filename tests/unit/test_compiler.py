"""Plans become schedules: units, order, wrapping, printing; and schedules that are wrong are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from parity import Case, cluster_of, graph_of

from planner.strategies.spec import Collective, Strategy
from profiler.errors import OsdpError
from runtime.apply_schedule import inside_out
from runtime.compile_plan import compile_plan, verify
from runtime.local_shards import Origin
from runtime.schedule import Schedule, ScheduledParameter, ScheduledUnit

# GPT-2 of 2 blocks, hidden 12, 29 tokens, 8 positions; head and embedding are tied.
OPERATORS = [operator.name for operator in graph_of("gpt2").operators]
BLOCKS = [block.name for block in graph_of("gpt2").blocks]
INSIDE = [name.removeprefix(BLOCKS[0] + ".") for name in OPERATORS if name.startswith(BLOCKS[0] + ".")]
TIED = next(operator.name for operator in graph_of("gpt2").operators if len(operator.modules) == 2)
LINEAR = next(op.name for op in graph_of("gpt2").operators if op.name.startswith(BLOCKS[0]) and op.kind == "Linear")


def schedule_of(choices: dict[str, str] | None = None, default: str = "shard", **options: object) -> Schedule:
    """Return the schedule of GPT-2 on 2 x 2 ranks."""
    case = Case("gpt2", choices or {}, default, **options)  # type: ignore[arg-type]
    return compile_plan(case.plan(), graph_of("gpt2"), cluster_of(2, 2))


def test_a_block_of_one_strategy_is_one_unit() -> None:
    schedule = schedule_of()
    whole = [unit for unit in schedule.units if unit.name in BLOCKS]
    assert [unit.modules for unit in whole] == [(name,) for name in BLOCKS]
    assert [unit.operators for unit in whole] == [tuple(f"{name}.{op}" for op in INSIDE) for name in BLOCKS]
    tied = next(unit for unit in schedule.units if TIED in unit.operators)
    assert set(tied.modules) == {"wte", "lm_head"}
    assert schedule.world_size == 4
    assert not schedule.by_ddp


def test_another_strategy_inside_cuts_a_block() -> None:
    units = [unit for unit in schedule_of({LINEAR: "replicate"}).units if unit.operators[0].startswith(BLOCKS[0])]
    position = INSIDE.index(LINEAR.removeprefix(BLOCKS[0] + "."))
    assert [len(unit.operators) for unit in units] == [position, 1, len(INSIDE) - position - 1]
    assert [unit.strategy.name for unit in units] == ["shard", "replicate", "shard"]
    assert units[1].modules == (LINEAR,)
    assert all(unit.name not in BLOCKS for unit in units)


def test_owners_are_balanced_and_alone() -> None:
    schedule = schedule_of(default="owner")
    assert [unit.operators for unit in schedule.units] == [(name,) for name in order(schedule)]
    loads = [0] * 4
    for unit in schedule.units:
        assert unit.owner is not None
        loads[unit.owner] += sum(rows(parameter) for parameter in unit.parameters)
    # The largest, 12 x 48 + 48 of an MLP's first layer, is more than the spread that its rule can leave.
    assert max(loads) - min(loads) <= 12 * 48 + 48
    assert all(unit.owner is None for unit in schedule_of().units)


def order(schedule: Schedule) -> list[str]:
    """Return the operators by first call, as traced."""
    graph = graph_of("gpt2")
    called = dict.fromkeys(graph.operators[call.operator].name for call in graph.calls)
    assert sorted(called) == sorted(name for unit in schedule.units for name in unit.operators)
    return list(called)


def rows(parameter: ScheduledParameter) -> int:
    """Return the number of elements."""
    count = 1
    for size in parameter.origin.sizes:
        count *= size
    return count


def test_slices_know_where_they_were() -> None:
    graph = graph_of("gpt2")
    weight = next(op for op in graph.operators if op.name == LINEAR).parameters[0]
    schedule = schedule_of({LINEAR: "split(2*shard, owner, replicate, shard)"})
    (split,) = schedule.splits
    assert (split.module, split.count) == (LINEAR, 5)
    slices = [unit for unit in schedule.units if unit.operators == (LINEAR,)]
    assert [unit.modules for unit in slices] == [(f"{LINEAR}.slices.{index}",) for index in range(5)]
    # 12 input features in 5 slices: 3, 3, 2, 2, 2.
    offsets = [unit.parameters[0].origin.offsets for unit in slices]
    assert offsets == [(0, 0), (0, 3), (0, 6), (0, 8), (0, 10)]
    assert [unit.parameters[0].origin.sizes[1] for unit in slices] == [3, 3, 2, 2, 2]
    assert {unit.parameters[0].origin.shape for unit in slices} == {weight.shape}
    assert [len(unit.parameters) for unit in slices] == [2, 1, 1, 1, 1], "the bias is with the first"
    assert slices[0].parameters[1].path == f"{LINEAR}.slices.0.bias"
    assert slices[0].parameters[1].origin.name == f"{LINEAR}.bias"
    assert [unit.strategy.name for unit in slices] == ["shard", "shard", "owner", "replicate", "shard"]


def test_counts_collectives_of_a_step() -> None:
    counts = schedule_of(default="group_shard:2", accumulation=3).collectives()
    norm = 2 * 12  # the last norm: its own unit, weight and bias of 12, sharded in groups of 2
    by_phase = {
        one.phase: (one.operation, one.ranks, one.stride, count)
        for one, count in counts.items()
        if one.size_bytes in (4 * norm, 4 * norm // 2)
    }
    assert by_phase == {
        "forward": ("all_gather", 2, 1, 3),
        "backward": ("all_gather", 2, 1, 3),
        "reduce": ("reduce_scatter", 2, 1, 3),
        "step": ("all_reduce", 2, 2, 1),
    }


def test_prints_a_table() -> None:
    schedule = schedule_of({TIED: "owner", LINEAR: "split(shard_grad, secondary_shard:2)"}, recomputed=(BLOCKS[1],))
    head, titles, *lines = str(schedule).splitlines()
    assert head == f"4 ranks (2 x 2), fp32, {len(schedule.units)} units, 1 blocks recomputed"
    assert re.split(r"  +", titles) == [
        "unit",
        "operators",
        "strategy",
        "mesh",
        "bytes",
        "after forward",
        "gathered under",
        "then under",
    ]
    assert len(lines) == len(schedule.units)
    cells = [re.split(r"  +", line) for line in lines]
    by_name = {cell[0]: cell[1:] for cell in cells}
    assert by_name[f"{BLOCKS[1]} (recomputed)"][:2] == [str(len(INSIDE)), "shard"]
    assert re.fullmatch(r"owner on rank [0-3]", by_name[TIED][1])
    assert by_name[f"{LINEAR} slice 1 of 2"][2:5:2] == ["1 x 4", "kept"]
    assert by_name[f"{LINEAR} slice 2 of 2"][4] == "kept by 2"
    assert by_name[f"{LINEAR} slice 2 of 2"][5] == f"{LINEAR} slice 1 of 2"
    assert cells[0][5:7] == ["resharded", "nothing"]
    assert "DistributedDataParallel" in str(schedule_of(default="replicate"))


@pytest.mark.parametrize(
    ("case", "by_ddp"),
    [
        (Case("gpt2", {}, "replicate"), True),
        (Case("gpt2", {}, "replicate+offload"), False),
        (Case("gpt2", {LINEAR: "shard"}, "replicate"), False),
        (Case("gpt2", {LINEAR: "split(2*replicate)"}, "replicate"), False),
        (Case("gpt2", {}, "replicate", precision="bf16"), False),
    ],
)
def test_only_plain_replication_is_left_to_ddp(case: Case, by_ddp: bool) -> None:
    assert compile_plan(case.plan(), graph_of("gpt2", case.precision), cluster_of(2, 2)).by_ddp is by_ddp


def test_refuses_plans_of_other_models() -> None:
    plan = Case("gpt2", {}).plan()
    lacking = {name: choice for name, choice in plan.choices.items() if name != LINEAR}
    for wrong in (
        replace(plan, choices=lacking),
        replace(plan, choices=plan.choices | {"tail": "shard"}),
        replace(plan, recomputed_blocks=["blocks.7"]),
    ):
        with pytest.raises(OsdpError, match=r"not the model's(.|\n)*again"):
            compile_plan(wrong, graph_of("gpt2"), cluster_of(2, 2))
    with pytest.raises(OsdpError, match="no such strategy"):
        schedule_of({LINEAR: "group_shard:3"})
    with pytest.raises(OsdpError, match="cannot be split"):
        schedule_of({TIED: "split(2*shard)"})
    with pytest.raises(OsdpError, match="12 input features"):
        schedule_of({LINEAR: "split(13*shard)"})


# --- schedules broken by hand ----------------------------------------------------------------


def broken(units: list[ScheduledUnit]) -> Schedule:
    """Return the schedule with other units."""
    return replace(schedule_of(), units=tuple(units))


def test_verify_takes_what_compile_makes() -> None:
    verify(schedule_of({LINEAR: "split(2*owner)"}, "shard_grad"), graph_of("gpt2"))


def test_verify_refuses_a_missing_or_doubled_parameter() -> None:
    units = list(schedule_of().units)
    with pytest.raises(OsdpError, match=r"does not cover every parameter once(.|\n)*: 0 elements"):
        verify(broken(units[:-1]), graph_of("gpt2"))
    thin = [replace(one, parameters=one.parameters[:-1]) if one.name == BLOCKS[0] else one for one in units]
    with pytest.raises(OsdpError, match="cover"):
        verify(broken(thin), graph_of("gpt2"))
    with pytest.raises(OsdpError, match="cover"):
        verify(broken([*units, units[-1]]), graph_of("gpt2"))
    origin = Origin("nowhere", (1,), (0,), (1,))
    strange = replace(units[0], parameters=(*units[0].parameters, ScheduledParameter("nowhere", origin, True)))
    with pytest.raises(OsdpError, match="nowhere: 1 elements"):
        verify(broken([strange, *units[1:]]), graph_of("gpt2"))


def test_verify_refuses_empty_units_wrapped_twice_tied_apart_or_out_of_order() -> None:
    units = list(schedule_of().units)
    first, second = (next(i for i, unit in enumerate(units) if unit.name == name) for name in BLOCKS)
    with pytest.raises(OsdpError, match="is empty"):
        verify(broken([replace(units[0], modules=()), *units[1:]]), graph_of("gpt2"))
    twice = [*units]
    twice[second] = replace(units[second], modules=(BLOCKS[0],))
    with pytest.raises(OsdpError, match="wraps a module twice"):
        verify(broken(twice), graph_of("gpt2"))
    apart = [replace(unit, modules=("wte",)) if TIED in unit.operators else unit for unit in units]
    with pytest.raises(OsdpError, match=r"tied modules(.|\n)*lm_head"):
        verify(broken(apart), graph_of("gpt2"))
    swapped = [*units]
    swapped[first], swapped[second] = units[second], units[first]
    with pytest.raises(OsdpError, match=rf"not in the order(.|\n)*{BLOCKS[0]} after {BLOCKS[1]}"):
        verify(broken(swapped), graph_of("gpt2"))


def unit(name: str, *modules: str) -> ScheduledUnit:
    """Return a unit that wraps these modules."""
    return ScheduledUnit(name, (), modules, (), Strategy("shard", 4), ())


def test_units_are_wrapped_from_the_inside_out() -> None:
    units = [unit("root", ""), unit("a", "a"), unit("deep", "a.b.c"), unit("other", "ab")]
    names = [one.name for one in inside_out(units)]
    assert sorted(names) == ["a", "deep", "other", "root"]
    assert names.index("deep") < names.index("a") < names.index("root")
    assert names.index("other") < names.index("root")
    with pytest.raises(OsdpError, match=r"lie in each other(.|\n)*one, two"):
        list(inside_out([unit("one", "a", "b.x"), unit("two", "b", "a.x")]))


def test_every_unit_says_what_it_sends() -> None:
    by_name = {one.name: one for one in schedule_of({LINEAR: "replicate"}).units}
    numel = {op.name: op.numel for op in graph_of("gpt2").operators}
    assert by_name[LINEAR].collectives == (Collective("all_reduce", 4, 1, 4 * numel[LINEAR], "step"),)
