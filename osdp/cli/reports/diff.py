"""What `osdp diff` prints: how two plans differ, from their files alone."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from osdp.cli.reports.figures import format_count, format_seconds
from osdp.cli.reports.plan import TERMS
from osdp.cli.reports.rows import short_names
from osdp.cli.terminal import make_table, print_section
from planner.analysis.plan_diff import ChoiceChange, Comparison, Delta, SettingChange
from profiler.byte_sizes import format_bytes

SCHEMA = "osdp.plan_diff/1"


def diff_object(found: Comparison, before: str, after: str) -> dict[str, Any]:
    """Return the comparison of two files as plain data; numbers in bytes and seconds."""
    return {
        "schema": SCHEMA,
        "before": before,
        "after": after,
        "same": found.is_empty,
        "same_operators": found.same_operators,
        "settings": {change.setting: {"before": change.before, "after": change.after} for change in found.settings},
        "changed_operators": found.changed_operators,
        "choices": [asdict(change) for change in found.choices],
        "predicted": {
            "peak_memory_bytes": _figures(found.peak_bytes),
            "memory_by_category": {delta.name: _figures(delta) for delta in found.memory},
            "step_time_s": _figures(found.step_time_s),
            "time_by_term": {delta.name: _figures(delta) for delta in found.time},
            "samples_per_s": _figures(found.samples_per_s),
        },
    }


def _figures(delta: Delta) -> dict[str, Any]:
    return {"before": delta.before, "after": delta.after, "change": delta.change}


def print_diff(console: Console, found: Comparison, before: str, after: str) -> None:
    console.print(f"From {before} to {after}; all figures are predictions from the files.")
    console.print()
    if found.is_empty:
        console.print("The plans are equal: the same choices for the same model, cluster and limit.")
        console.print()
    if found.settings:
        print_section(console, "Model, cluster, limit and batch", _settings(found.settings))
    if not found.same_operators:
        console.print("The models have different operators, so the choices are not compared.")
        console.print()
    elif found.choices:
        print_section(console, f"Choices: {found.changed_operators} operators differ", _choices(found.choices))
    elif not found.is_empty:
        console.print("Every operator and block has the same choice in both.")
        console.print()
    print_section(console, *_memory(found))
    print_section(console, *_time(found))


def _settings(changes: tuple[SettingChange, ...]) -> Table:
    table = make_table("", "before", "after")
    for change in changes:
        values = [setting_text(change.setting, value) for value in (change.before, change.after)]
        table.add_row(setting_name(change.setting), *values)
    return table


def setting_name(name: str) -> str:
    """Return a setting in words."""
    return name.removesuffix("_bytes").replace("_", " ")


def setting_text(name: str, value: str | int) -> str:
    """Return the value of a setting, sizes in their unit."""
    if isinstance(value, str):
        return value
    return format_bytes(value) if name.endswith("_bytes") else f"{value:,}"


def _choices(changes: tuple[ChoiceChange, ...]) -> Table:
    table = make_table(">count", "=before", "=after", "which")
    for change in changes:
        table.add_row(str(len(change.names)), change.before, change.after, changed_names(change))
    return table


def changed_names(change: ChoiceChange) -> str:
    """Return the blocks or operators that changed, and which operators inside blocks."""
    inside = f": {', '.join(name or 'itself' for name in change.operators)}" if change.operators else ""
    return short_names(change.names) + inside


def _memory(found: Comparison) -> tuple[str, Table]:
    peak = found.peak_bytes
    table = make_table("", ">before", ">after", ">change")
    for delta in (*found.memory, peak):
        if delta.before or delta.after:
            table.add_row(delta.name.replace("_", " "), *bytes_texts(delta))
    return f"Memory at the peak: {format_bytes(peak.before)} to {format_bytes(peak.after)}", table


def bytes_texts(delta: Delta) -> tuple[str, str, str]:
    """Return sizes before and after, and the change with its sign."""
    sign = "+" if delta.change > 0 else ""
    return format_bytes(delta.before), format_bytes(delta.after), sign + format_bytes(delta.change)


def _time(found: Comparison) -> tuple[str, Table]:
    speed = found.samples_per_s
    before, after = format_count(speed.before), format_count(speed.after)
    table = make_table("per step", ">before", ">after", ">change")
    for delta in (*found.time, found.step_time_s):
        if delta.before or delta.after:
            table.add_row(term_name(delta.name), *seconds_texts(delta))
    return f"Time: {before} to {after} samples/s, {speed.after / speed.before:.3f} x as fast", table


def term_name(term: str) -> str:
    """Return a term of the step time, or the whole, in words."""
    return TERMS.get(term, term)


def seconds_texts(delta: Delta) -> tuple[str, str, str]:
    """Return times before and after, and the change with its sign."""
    return format_seconds(delta.before), format_seconds(delta.after), format_seconds(delta.change, signed=True)
