"""The what-if analysis that `osdp plan --what-if` and `osdp explain` print: a plan's bottlenecks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from osdp.cli.reports.figures import format_count
from osdp.cli.terminal import make_table, print_section
from planner.analysis.what_if import MATERIAL, WhatIf

if TYPE_CHECKING:
    from rich.console import Console

HEADLINE = "What if: predicted by a new search for each change"


def print_what_if(console: Console, more: WhatIf, plan_samples_per_s: float | None = None) -> None:
    """Print the answers and what binds; `plan_samples_per_s` is a plan's that was made before."""
    table = make_table("change", ">samples/s", ">speed-up", ">gap", "")
    for answer in more.answers:
        if answer.samples_per_s is None or answer.ratio is None or answer.gap is None:
            table.add_row(answer.change, "", "", "", answer.why_not)
            continue
        figures = (format_count(answer.samples_per_s), f"{answer.ratio:.3f} x", f"{answer.gap:.2%}")
        table.add_row(answer.change, *figures, "bottleneck" if answer.resource in more.binds else "")
    told = [what_binds(more)]
    if plan_samples_per_s is not None and more.samples_per_s > plan_samples_per_s * (1 + MATERIAL):
        told.append(
            f"This starts from the plan that a new search finds now; the plan file's has "
            f"{format_count(plan_samples_per_s)} samples/s."
        )
    print_section(console, HEADLINE, table, *told)


def what_binds(more: WhatIf) -> str:
    """Return the bottlenecks in words."""
    now = f"{format_count(more.samples_per_s)} samples/s now, at most {format_count(more.bound_samples_per_s)}"
    if not more.binds:
        return f"None of these is a bottleneck: no change alone gives more than is possible without it ({now})."
    first, *others = more.binds
    then = f", then {', '.join(others)}" if others else ""
    return f"The main bottleneck is {first}{then}: more of it alone gives more than is possible without ({now})."
