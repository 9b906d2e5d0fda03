"""What `osdp doctor` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from osdp.cli.terminal import make_table, print_section, print_table
from osdp.doctor import Check


def doctor_object(found: Sequence[Check]) -> dict[str, Any]:
    """Return the checks as plain data."""
    return {
        "schema": "osdp.doctor/1",
        "works": all(check.is_well for check in found if check.is_needed),
        "checks": [asdict(check) for check in found],
    }


def print_doctor(console: Console, found: Sequence[Check]) -> None:
    """Print the checks, then how to get what is missing."""
    table = make_table("=check", "=", "found")
    for check in found:
        table.add_row(check.name, _word(check), check.found)
    print_table(console, table)
    advice = make_table("=for", "try")
    for check in found:
        if not check.is_well:
            advice.add_row(check.name, check.advice)
    if advice.row_count:
        console.print()
        print_section(console, "What is missing", advice)
    works = all(check.is_well for check in found if check.is_needed)
    console.print("Planning and training on CPUs work." if works else "Planning or training on CPUs does not work.")


def _word(check: Check) -> str:
    return "ok" if check.is_well else "FAILED" if check.is_needed else "missing"
