"""What dealing samples by cost buys, and what `odc` does: searches of the changed task, side by side."""

from __future__ import annotations

from dataclasses import replace

from synthetic import cluster, transformer

from planner.analysis.dealing import Dealing, compare_dealing
from planner.cost.stragglers import Imbalance
from planner.options.search_space import Space
from planner.problem import Task
from planner.search.search import Found, search
from profiler.byte_sizes import MIB
from profiler.errors import OsdpError

UNEVEN = Imbalance(1.0, source="a test")


def find(task: Task, space: Space) -> Found:
    return search(task, space=space)


def task_of(limit_mib: int = 200, **more: int) -> Task:
    return Task(transformer(2, 512), cluster(1, 4), limit_mib * MIB, imbalance=UNEVEN, **more)


def compared(task: Task) -> tuple[Dealing, list[Task]]:
    """Return the comparison, and the tasks that were searched for it."""
    asked: list[Task] = []

    def noting(then: Task, space: Space) -> Found:
        asked.append(then)
        return find(then, space)

    return compare_dealing(task, search(task), noting), asked


def test_rows_are_searches_of_the_changed_task() -> None:
    task = task_of(global_batch=32)
    dealing, asked = compared(task)
    assert dealing.names == ("odc",)
    assert [(row.for_uneven, row.balanced) for row in dealing.rows] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert len(asked) == 3
    balanced = replace(UNEVEN, balanced=True)
    for row, changed in zip(
        dealing.rows,
        ({"for_uneven": False}, {"for_uneven": False, "imbalance": balanced}, {}, {"imbalance": balanced}),
        strict=True,
    ):
        wanted = search(replace(task, **changed))
        assert row.samples_per_s is not None
        assert abs(row.samples_per_s / wanted.samples_per_s - 1) < 1e-3
        waits = replace(task, **changed).waits(row.micro_batch, row.accumulation)
        assert row.waits == waits
    speeds = [row.samples_per_s for row in dealing.rows]
    # Each buys something here, and both together no less than either.
    assert speeds[1] > 1.02 * speeds[0]
    assert speeds[2] > 1.02 * speeds[0]
    assert speeds[3] >= max(speeds[1:3])
    assert dealing.over(dealing.rows[3]) == speeds[3] / speeds[0]


def test_without_accumulation_strategies_for_uneven_batches_are_not_searched_again() -> None:
    """Per step and per micro-batch are the same, so that `odc` is not offered anyway."""
    dealing, asked = compared(task_of())
    assert [then.imbalance.balanced for then in asked] == [True]
    assert dealing.rows[2].samples_per_s == dealing.rows[0].samples_per_s


def test_what_fits_nowhere_else_has_no_figures() -> None:
    def refuse(then: Task, space: Space) -> Found:
        raise OsdpError("nothing fits")

    task = task_of(global_batch=64)
    dealing = compare_dealing(task, search(task), refuse)
    assert [row.samples_per_s is None for row in dealing.rows] == [True, True, False, False]
    assert dealing.over(dealing.rows[2]) is None


def test_a_search_that_finds_less_takes_the_others_plan() -> None:
    task = task_of(global_batch=64)
    found = search(task)

    def slower(then: Task, space: Space) -> Found:
        return replace(found, samples_per_s=found.samples_per_s / (3 if then.for_uneven else 2))

    speeds = [row.samples_per_s for row in compare_dealing(task, found, slower).rows]
    assert speeds == [found.samples_per_s / 2, found.samples_per_s / 2, found.samples_per_s, found.samples_per_s]
