"""The report of all checks so far, as JSON and as markdown: written anew after each, so that none is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from validation.check import Check, Finding

SCHEMA = "osdp.validate-gpu/1"
OUTCOMES = {True: "passed", False: "FAILED", None: "skipped"}


def outcome(found: Finding) -> str:
    """Return one of `OUTCOMES`."""
    return OUTCOMES[found.passed]


def write_report(folder: Path, machine: str, checks: Sequence[Check], found: Mapping[int, Finding]) -> None:
    """Write `validate-gpu.json` and `validate-gpu.md`."""
    today = datetime.now().astimezone().isoformat(timespec="seconds")
    done = [check for check in checks if check.number in found]
    data = {
        "schema": SCHEMA,
        "date": today,
        "machine": machine,
        "checks": [
            {"number": check.number, "title": check.title, "outcome": outcome(found[check.number])}
            | asdict(found[check.number])
            for check in done
        ],
        "missing": [check.number for check in checks if check.number not in found],
    }
    _write(folder / "validate-gpu.json", json.dumps(data, indent=1) + "\n")
    _write(folder / "validate-gpu.md", "\n".join(markdown(machine, today, done, found)) + "\n")


def markdown(machine: str, today: str, done: Sequence[Check], found: Mapping[int, Finding]) -> list[str]:
    """Return the lines of the report."""
    lines = ["# OSDP on this machine", "", f"{machine}; {today}", ""]
    lines += ["| # | check | passes when | outcome | seconds | |", "|---|---|---|---|---|---|"]
    for check in done:
        one = found[check.number]
        told = _cell(one.told.splitlines()[0] if one.told else "")
        row = [str(check.number), check.title, check.passes_when, outcome(one), f"{one.seconds:.1f}", told]
        lines.append(f"| {' | '.join(row)} |")
    for check in done:
        one = found[check.number]
        more = one.told.splitlines()[1:]
        if one.figures or more:
            lines += ["", f"## {check.number}. {check.title}", ""]
            lines += [f"- {name}: {_figure(value)}" for name, value in one.figures.items()]
            lines += ["", "```", *more, "```"] if more else []
    return lines


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.partial")
    part.write_text(text)
    part.replace(path)
