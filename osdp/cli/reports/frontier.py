"""What `osdp plan` prints for several memory limits."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from osdp.cli.reports.figures import assumed_of, bar, format_count, rates
from osdp.cli.reports.plan import Circumstances, baseline_name, trace_time
from osdp.cli.reports.rows import choice_name
from osdp.cli.terminal import make_table, print_section
from osdp.planning.clusters import is_derived
from osdp.planning.plan_questions import FrontierRow
from osdp.planning.request import Planned
from planner.analysis.plan_diff import compare
from planner.plan import Plan
from planner.search.baselines import Baseline
from profiler.byte_sizes import format_bytes

BAR = 16
SHOWN_CHANGES = 3


def print_frontier(console: Console, rows: Sequence[FrontierRow], around: Circumstances) -> None:
    """Print what each limit allows; at least one has a plan."""
    plans = [row.planned for row in rows if row.planned is not None]
    note = f" ({around.cluster_note})" if around.cluster_note else ""
    plan, cluster = plans[0].plan, plans[0].cluster
    console.print(
        f"Frontier of {plan.model.name} on {cluster.name}, {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.device.name}{note}; {plan.model.precision}, {plan.optimizer}. All figures are predicted; "
        f"{rates(cluster, plan.model)}."
    )
    if is_derived(cluster):
        console.print(f"Assumed: {', '.join(assumed_of(cluster))}.")
    console.print()
    print_section(console, "Predicted samples per second at each memory limit", _table(rows), *_taken_over(rows))
    changes = make_table("=limit", "change")
    for limit, text in _changes(rows):
        changes.add_row(limit, text)
    print_section(console, "What changes from one limit to the next", changes)
    trace, searches_s = trace_time(plans[0]), sum(planned.search_s for planned in plans)
    console.print(f"{trace}, the searches {searches_s:.2f} s, the command {around.total_s:.2f} s.")
    if around.written_to:
        console.print(f"Written to {around.written_to}")


def _table(rows: Sequence[FrontierRow]) -> Table:
    table = make_table(">limit", ">used", ">samples/s", ">gap", ">micro-batch", "", "best uniform", ">the plan is")
    top = max(row.planned.plan.predicted.samples_per_s for row in rows if row.planned)
    for row in rows:
        limit = format_bytes(row.request.limit_bytes)
        if row.planned is None:
            table.add_row(limit, "", "does not fit", "", "", "", "", "")
            continue
        plan, best = row.planned.plan, row.planned.best_baseline
        speed = plan.predicted.samples_per_s
        rival = ("none fits", "") if best is None else (_name(best), f"{speed / best.samples_per_s:.3f} x")
        used = f"{plan.predicted.peak_memory_bytes / plan.limit_bytes:.1%}"
        figures = (used, format_count(speed), f"{plan.gap:.2%}", str(plan.micro_batch), bar(speed / top, BAR))
        table.add_row(limit, *figures, *rival)
    return table


def _name(baseline: Baseline) -> str:
    return choice_name(baseline_name(baseline), baseline.recompute)


def _taken_over(rows: Sequence[FrontierRow]) -> Iterator[str]:
    """Say where the plan of a smaller limit was faster than what the search found."""
    for row in rows:
        if row.taken_from_bytes is not None:
            yield (
                f"The plan for {format_bytes(row.request.limit_bytes)} is the one found for "
                f"{format_bytes(row.taken_from_bytes)}: the search found none that is faster."
            )


def _changes(rows: Sequence[FrontierRow]) -> Iterator[tuple[str, str]]:
    """Yield (limit, what changes from the limit before, or why nothing fits)."""
    for before, row in zip((None, *rows[:-1]), rows, strict=True):
        limit = format_bytes(row.request.limit_bytes)
        if row.planned is None:
            assert row.refusal is not None, "set where no plan fits"
            yield limit, f"does not fit: needs {row.refusal.expected}"
        elif before is None or before.planned is None:
            yield limit, _summary(row.planned)
        else:
            yield limit, _difference(before.planned.plan, row.planned.plan)


def _summary(planned: Planned) -> str:
    """Return a plan in a few words."""
    counts = Counter(planned.plan.choices.values())
    taken = ", ".join(f"{strategy} {count}" for strategy, count in counts.most_common(SHOWN_CHANGES))
    more = f" and {len(counts) - SHOWN_CHANGES} more" if len(counts) > SHOWN_CHANGES else ""
    blocks, recomputed = len(planned.graph.blocks), len(planned.plan.recomputations)
    return f"operators: {taken}{more}; {recomputed} of {blocks} blocks recomputed"


def _difference(before: Plan, after: Plan) -> str:
    """Return what changes from one plan to the next, in a few words."""
    parts = []
    if before.micro_batch != after.micro_batch:
        parts.append(f"micro-batch {before.micro_batch} to {after.micro_batch}")
    again = len(after.recomputations) - len(before.recomputations)
    if again:
        blocks = "block" if abs(again) == 1 else "blocks"
        parts.append(f"{abs(again)} {blocks} {'more' if again > 0 else 'fewer'} recomputed")
    moved = Counter((before.choices[name], new) for name, new in after.choices.items() if before.choices[name] != new)
    parts += [f"{count} operators from {old} to {new}" for (old, new), count in moved.most_common(SHOWN_CHANGES)]
    if len(moved) > SHOWN_CHANGES:
        parts.append(f"and {len(moved) - SHOWN_CHANGES} more")
    same = "other blocks recomputed" if compare(before, after).choices else "the same plan"
    return "; ".join(parts) or same
