"""Checks in processes of their own, with a limit on their time: what one leaves behind, no other finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from validation.check import Check, Finding, Place, skipped

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 15
"""Of a check's output, shown where it failed."""
END_WITHIN_S = 5.0
"""A command that is asked to end has so long, and a check, which then ends one itself, three times that."""
_running = set[subprocess.Popen[str]]()


def command_output(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Do as `captured`, and print the output, which then is in the check's log."""
    status, output = captured(command, timeout_s, environment)
    print(*command, output, sep="\n", flush=True)
    return status, output


def own_environment() -> dict[str, str]:
    """Return the environment of programs of this clone, which add to what `PYTHONPATH` names."""
    own = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([*map(str, (ROOT, ROOT / "tests", ROOT / "scripts")), *own])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def captured(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    end_within_s: float = END_WITHIN_S,
) -> tuple[int, str]:
    """Run a command with all that it starts; return its exit status (124: it took too long) and its output.

    What takes too long is asked to end, and killed `end_within_s` later.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**own_environment(), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return 124, _ended(process, end_within_s)
    except BaseException:
        _ended(process, end_within_s)
        raise
    finally:
        _running.discard(process)


def _ended(process: subprocess.Popen[str], within_s: float) -> str:
    """End a process and its group; return what it has printed."""
    try:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    finally:
        _signal(process, signal.SIGKILL)
    try:
        return process.communicate(timeout=END_WITHIN_S)[0]
    except subprocess.TimeoutExpired:
        return "its output is not known: a process that it left holds it\n"


def _signal(process: subprocess.Popen[str], what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, what)


def end_commands() -> None:
    """End all commands that run, those of other threads: ask them, and kill those that do not end."""
    for process in [*_running]:
        _signal(process, signal.SIGTERM)
    until = time.monotonic() + 3 * END_WITHIN_S
    while _running and time.monotonic() < until:
        time.sleep(0.1)
    for process in [*_running]:
        _signal(process, signal.SIGKILL)


def end_when_asked() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, so that what this process runs in sessions of its own ends with it."""
    for what in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(what, lambda number, _: sys.exit(128 + number))


def run_check(check: Check, place: Place, log: Path) -> Finding:
    """Run a check in a process of its own, and write all that it prints to `log`."""
    path = place.scratch / f"check-{check.number}.json"
    command = [sys.executable, str(ROOT / "scripts" / "validate_gpu.py"), "--as-check", str(check.number)]
    command += [
        "--finding",
        str(path),
        "--scratch",
        str(place.scratch),
        *(["--cpu"] if place.is_dry else []),
        *(["--long"] if place.is_long else []),
    ]
    limit_s = check.timeout_s * (5 if place.is_long else 1)
    started = time.perf_counter()
    status, output = captured(command, limit_s, end_within_s=3 * END_WITHIN_S)
    seconds = time.perf_counter() - started
    log.write_text(output)
    if path.exists():
        return replace(Finding(**json.loads(path.read_text())), seconds=seconds)
    tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
    why = f"it took longer than {limit_s:.0f} s" if status == 124 else f"its process ended with {status}"
    return Finding(False, _with(why, tail), seconds=seconds)


def _with(told: str, tail: str) -> str:
    return f"{told}\n{tail}" if tail else told


def write_finding(found: Finding, path: Path) -> None:
    """Write what the process that runs a check has found."""
    part = path.with_suffix(".partial")
    part.write_text(json.dumps(asdict(found)))
    part.replace(path)


def run_tests(
    place: Place, files: Sequence[str], keyword: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Finding:
    """Run the tests of files of `tests/` whose names have a keyword (an expression of pytest's `-k`)."""
    report = place.scratch / "junit.xml"
    report.unlink(missing_ok=True)  # of tests before these
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [*(f"tests/{file}" for file in files), *(["-k", keyword] if keyword else [])]
    status, output = command_output(command, timeout_s, environment)
    if not report.exists():
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        return Finding(False, _with(f"pytest ended with {status}", tail))
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    ran, failed, left_out = (
        int(suite.get("tests", 0)),
        int(suite.get("failures", 0)) + int(suite.get("errors", 0)),
        int(suite.get("skipped", 0)),
    )
    figures: dict[str, Any] = {"tests": ran, "failed": failed, "skipped": left_out}
    if ran and ran == left_out:
        reason = suite.find(".//skipped")
        return skipped(reason.get("message", "") if reason is not None else "all tests were skipped")
    passed = status == 0 and ran > left_out
    told = f"{ran - failed - left_out} of {ran - left_out} tests passed" if ran else "no test has such a name"
    if status not in (0, 1):  # it ended by itself
        told = f"pytest ended with {status}; {told}"
    if not passed:
        told = _with(told, "\n".join(output.strip().splitlines()[-TAIL_LINES:]))
    return Finding(passed, told, figures)
