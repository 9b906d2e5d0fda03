"""What `osdp plan --imbalance` says of samples that are dealt to ranks by their cost."""

from typing import Any

from rich.table import Table

from osdp.cli.reports.figures import format_count
from osdp.cli.terminal import make_table
from planner.analysis.dealing import Dealing, Dealt

HEADLINE = "Samples dealt by cost: all derived from the cost model, by a search for each row"
SOURCE = "derived from the cost model, not measured in a run"
HOW = (
    "Batches of osdp.uneven_lengths.balanced_batches are dealt so, whatever the strategy (docs/balanced-batches.md). "
    "Waits are what the slowest rank computes longer than the mean."
)


def dealing_table(dealing: Dealing) -> Table:
    """Return the rows with their speed and their waits."""
    columns = ("samples dealt", "strategies", ">samples/s", ">times as fast", ">micro-batch")
    table = make_table(*columns, ">wait per micro-batch", ">per step")
    for row in _rows(dealing):
        names = ("by cost" if row.balanced else "as drawn", _strategies(dealing, row))
        if row.samples_per_s is None:
            table.add_row(*names, "no plan fits")
            continue
        ratio, size = dealing.over(row), f"{row.micro_batch} x {row.accumulation}"
        speed, over = format_count(row.samples_per_s), "" if ratio is None else f"{ratio:.3f} x"
        waits = [f"{row.waits.factor(each) - 1:.1%}" for each in (True, False)]
        table.add_row(*names, speed, over, size, *waits)
    return table


def dealing_object(dealing: Dealing) -> dict[str, Any]:
    """Return the rows as plain data; without a plan, figures are null."""
    return {
        "source": SOURCE,
        "strategies_for_uneven": dealing.names,
        "rows": [_row(dealing, r) for r in _rows(dealing)],
    }


def _rows(dealing: Dealing) -> list[Dealt]:
    """Return the rows that say something: without such strategies on a cluster there are two."""
    return [row for row in dealing.rows if dealing.names or not row.for_uneven]


def _strategies(dealing: Dealing, row: Dealt) -> str:
    return f"{'with' if row.for_uneven else 'without'} {' and '.join(dealing.names)}" if dealing.names else "any"


def _row(dealing: Dealing, row: Dealt) -> dict[str, Any]:
    fits = row.samples_per_s is not None
    return {
        "balanced": row.balanced,
        "for_uneven": row.for_uneven,
        "samples_per_s": row.samples_per_s,
        "ratio": dealing.over(row),
        "micro_batch": row.micro_batch if fits else None,
        "accumulation": row.accumulation if fits else None,
        "slowest_per_micro_batch": row.waits.per_micro_batch if fits else None,
        "slowest_per_step": row.waits.per_step if fits else None,
    }
