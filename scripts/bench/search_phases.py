"""What each phase of the search contributes: `python scripts/bench/search_phases.py [--every N] [--phases NAME ...]`

Problems of `search_quality.py`, the difficult ones and every so many-th of the zoo, are solved with all phases and with
one left out each time.  A table in Markdown: plans that are slower and by how much at most, gaps, CPU seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import search_quality
from _shared import machine
from search_quality import GAPS, NAMED, SLOWER, Problem, zoo

from planner.options.search_space import Space
from planner.pricing import PricedPlan
from planner.search import search
from planner.solve.labels import LabelSetting, Run
from profiler.errors import OsdpError

Rows = dict[str, dict[str, Any]]
NEVER = property(lambda self: False, lambda self, value: None)
"""In place of an attribute that switches a phase on."""


def nothing(*given: Any) -> None:
    """Stand in for what looks for a plan."""


def as_it_is(first: Any, *others: Any) -> Any:
    """Stand in for what leaves out options."""
    return first


def narrowly(labels: LabelSetting, cut_s: float, grain_bytes: float, most_made: int, *, unevenly: bool) -> Run:
    """Run as if no stage might make more labels than others."""
    return RUN(labels, cut_s, grain_bytes, most_made)


def without_core(sweep: search._Sweep, space: Space, incumbent: PricedPlan | None) -> PricedPlan | None:
    """Search as if that had been done among few options, and had found nothing better."""
    sweep.had_core = True
    return incumbent


RUN = LabelSetting.run
ALL = "all phases"
NO_LABELS = search.Effort(labels=0)
in_search, in_point = partial(mock.patch.object, search), partial(mock.patch.object, search._Point)
PHASES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    ALL: nullcontext,
    "integer program": lambda: in_search("programmed", nothing),
    "labels": lambda: mock.patch.object(search_quality, "search", partial(search.search, effort=NO_LABELS)),
    "beam search": lambda: mock.patch.object(search.Widening, "is_searching", NEVER, create=True),
    "misfits": lambda: in_search("without_misfits", as_it_is),
    "tighter bounds, memory that is left": lambda: mock.patch.object(search.Widening, "is_hard", NEVER, create=True),
    "few stages that make most labels": lambda: mock.patch.object(LabelSetting, "run", narrowly),
    "core": lambda: mock.patch.object(search._Sweep, "of_core", without_core),
    "ranges of what ranks own": lambda: both(in_point("exceeds_on_owner", NEVER), in_point("waits_for_owner", NEVER)),
    "plan of least memory": lambda: in_search("smallest_of", refused),
}
"""How each is left out."""


def both(*patches: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context of several patches."""
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def refused(*given: Any) -> PricedPlan:
    """Stand in for the search of the plan that needs least memory, where no other was found."""
    raise OsdpError("no plan was found")


def solved(problems: Sequence[Problem], phase: str) -> Rows:
    """Return the rows of the problems, without a phase; of those that are not solved there is none."""
    found: Rows = {}
    for problem in problems:
        try:
            if search_quality.asked(problem) is None:
                continue
            with PHASES[phase]():
                row = search_quality.solved(problem)
        except OsdpError:
            continue
        if row is not None:
            found[problem.name] = row
    return found


def told(phase: str, rows: Rows, whole: Rows) -> str:
    """Return a line of the table."""
    gaps = [row["gap"] for row in rows.values()]
    ratios = [rows[name]["samples_per_s"] / row["samples_per_s"] for name, row in whole.items() if name in rows]
    slower = sum(ratio < 1 - SLOWER for ratio in ratios)
    cells = [
        phase if phase == ALL else f"without {phase}",
        f"{sum(row['cpu_s'] for row in rows.values()):.1f}",
        f"{len(whole) - len(rows)}",
        f"{slower}",
        f"{1 - min(ratios):.3%}" if slower else "",
        *(f"{sum(gap > most for gap in gaps)}" for most in GAPS),
        f"{max(gaps, default=0.0):.2%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=int, default=60, help="of the zoo only every so many-th problem")
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=[*PHASES], help="those that are left out")
    parser.add_argument("--only", nargs="*", help="in place of those, problems of the zoo whose names begin so")
    options = parser.parse_args()
    problems = [*NAMED, *list(zoo())[:: options.every]]
    if options.only:
        problems = [one for one in zoo() if one.name.startswith(tuple(options.only))]
    whole = solved(problems, ALL)
    print(machine())
    print(f"{len(whole)} problems")
    print("| | CPU s | no plan | slower plans | by at most | gaps above 0.2 % | above 1 % | largest |")
    print("|---|---|---|---|---|---|---|---|")
    for phase in options.phases:
        print(told(phase, whole if phase == ALL else solved(problems, phase), whole), flush=True)


if __name__ == "__main__":
    main()
