"""What `osdp strategies` and `osdp partition` print."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from osdp.cli.terminal import make_table, print_section
from osdp.compat.zero3_partition import Balance
from osdp.planning.strategy_footprint import KEPT, MOMENTS, STEPS, Footprint, Uniform
from profiler.byte_sizes import format_bytes
from profiler.cluster.cluster import Cluster

SCHEMA = "osdp.strategies/1"
PARTITION_SCHEMA = "osdp.partition/1"

Balances = Mapping[tuple[int, float], Balance]
"""By number of ranks and priority."""


def strategies_object(found: Sequence[Uniform], cluster: Cluster) -> dict[str, Any]:
    """Return the tables as plain data, in bytes."""
    plan = found[0].plan
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "cluster": cluster.name,
        "ranks": cluster.world_size,
        "precision": plan.model.precision,
        "optimizer": plan.optimizer,
        "micro_batch": plan.micro_batch,
        "strategies": [
            {"strategy": one.strategy, "predicted": _object(one.predicted), "measured": _object(one.counted)}
            for one in found
        ],
    }


def _object(found: Footprint | None) -> dict[str, Any] | None:
    if found is None:
        return None
    kept = {f"{name}_bytes": found.kept_bytes[name] for name in KEPT}
    return {**kept, "peak_bytes": found.peak_bytes, "sent_bytes": found.sent}


def print_strategies(console: Console, found: Sequence[Uniform], cluster: Cluster) -> None:
    """Print what a rank keeps, and what it sends, predicted and counted."""
    plan = found[0].plan
    whole = 4 * plan.model.parameters
    where = f"{plan.model.name} on {cluster.nodes} x {cluster.gpus_per_node} ranks of {cluster.name}"
    how = f"{plan.model.precision}, {plan.optimizer}, micro-batch {plan.micro_batch}"
    print_section(console, f"{where}: {plan.model.parameters:,} parameters, {how}")
    headline = "Memory of the fullest rank between backward and the optimizer step, and its peak"
    print_section(console, headline, _kept_table(found, whole))
    print_section(console, "Communication per step, in bytes of whole (unsharded) tensors", _sent_table(found))
    console.print(
        f"P: all parameters in fp32, {format_bytes(whole)}. Peaks count tensors only. Backward includes its "
        "all-gathers and the reduction of gradients."
    )
    if found[0].counted is not None:
        console.print(f"Measured: collectives and live tensors of training step {STEPS} on these ranks.")


def _rows(found: Sequence[Uniform]) -> list[tuple[str, str, Footprint]]:
    """Return the name, where the figures are from, and the figures."""
    both = [((one.strategy, "predicted", one.predicted), ("", "measured", one.counted)) for one in found]
    return [(name, how, figures) for rows in both for name, how, figures in rows if figures is not None]


def _kept_table(found: Sequence[Uniform], whole_bytes: int) -> Table:
    table = make_table("strategy", "", ">parameters", ">gradients", ">optimizer states", ">peak")
    for name, how, footprint in _rows(found):
        sizes = (footprint.kept_bytes[category] for category in KEPT)
        kept = [f"{format_bytes(size)} ({size / whole_bytes:.2f} P)" for size in sizes]
        table.add_row(name, how, *kept, format_bytes(footprint.peak_bytes))
    return table


def _sent_table(found: Sequence[Uniform]) -> Table:
    table = make_table("strategy", "", "forward", "backward", "optimizer step")
    for name, how, footprint in _rows(found):
        table.add_row(name, how, *(_sizes(footprint.sent[moment]) for moment in MOMENTS))
    return table


def _sizes(sent: Mapping[str, int]) -> str:
    return ", ".join(f"{operation.replace('_', '-')} {format_bytes(size)}" for operation, size in sent.items()) or "-"


# --- partition -------------------------------------------------------------------------------


def partition_object(model: str, found: Balances) -> dict[str, Any]:
    """Return the table as plain data."""
    figures = ("bytes_by_rank", "max_over_mean", "neighbours_parted")
    partitions = [
        {"ranks": ranks, "evenness_priority": priority} | {name: getattr(balance, name) for name in figures}
        for (ranks, priority), balance in found.items()
    ]
    return {"schema": PARTITION_SCHEMA, "model": model, "partitions": partitions}


def print_partition(console: Console, model: str, found: Balances) -> None:
    """Print how even each partition is: a row for each number of ranks, a column for each priority."""
    priorities = [f">{priority:g}" for priority in dict.fromkeys(priority for _, priority in found)]
    table = make_table(">ranks", ">even share", *priorities)
    for count in dict.fromkeys(ranks for ranks, _ in found):
        row = [balance for (ranks, _), balance in found.items() if ranks == count]
        cells = [f"{balance.max_over_mean:.4f} ({balance.neighbours_parted})" for balance in row]
        table.add_row(str(count), format_bytes(sum(row[0].bytes_by_rank) // count), *cells)
    print_section(console, f"{model}: whole tensors over ranks, by evenness_priority", table)
    console.print(
        "Bytes of the fullest rank over an even share; in brackets, how often neighbouring tensors of the model "
        "are on different ranks. Tied tensors count once."
    )
