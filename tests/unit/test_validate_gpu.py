"""`scripts/validate_gpu.py`: its report, its limits of time, and its checks of kernels, which can fail."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from thoroughness import THOROUGH

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import validate_gpu  # noqa: E402
from validation import kernels, memory, one_sided, processes  # noqa: E402
from validation.check import Check, Finding, Place, skipped  # noqa: E402
from validation.checks import CHECKS  # noqa: E402
from validation.processes import command_output, run_check, run_tests, write_finding  # noqa: E402
from validation.report import write_report  # noqa: E402


def check(number: int, **more: Any) -> Check:
    return Check(number, f"check {number}", "always", lambda place: skipped(""), **more)


# --- the report


def test_the_report_has_what_was_found_so_far(tmp_path: Path) -> None:
    found = {1: Finding(True, "fine", {"bytes": 7, "share": 0.123456}, 1.5), 2: Finding(False, "bad | worse\nwhy")}
    write_report(tmp_path, "a machine", [check(1), check(2), check(3)], found)
    data = json.loads((tmp_path / "validate-gpu.json").read_text())
    assert data["machine"] == "a machine"
    assert [(one["number"], one["outcome"], one["figures"]) for one in data["checks"]] == [
        (1, "passed", {"bytes": 7, "share": 0.123456}),
        (2, "FAILED", {}),
    ]
    assert data["missing"] == [3]
    lines = (tmp_path / "validate-gpu.md").read_text().splitlines()
    assert "| 1 | check 1 | always | passed | 1.5 | fine |" in lines
    assert r"| 2 | check 2 | always | FAILED | 0.0 | bad \| worse |" in lines
    assert "- share: 0.1235" in lines
    assert lines[lines.index("## 2. check 2") + 3 :] == ["```", "why", "```"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["validate-gpu.json", "validate-gpu.md"]


def test_numbers_are_there_once() -> None:
    numbers = [one.number for one in CHECKS]
    assert numbers == sorted(set(numbers))
    assert set(range(1, 8)) <= set(numbers)


# --- without a GPU


@pytest.mark.parametrize("numbers", [[one.number for one in CHECKS] if THOROUGH else [10]], ids=str)
def test_checks_run_without_a_gpu(numbers: list[int], tmp_path: Path) -> None:
    """In processes that import all anew if thorough."""
    python = sys.executable if THOROUGH else programs.python()
    command = [python, str(SCRIPTS / "validate_gpu.py"), "--cpu", "--output", str(tmp_path)]
    ended = subprocess.run([*command, "--only", *map(str, numbers)], capture_output=True, text=True, timeout=1800)
    assert (ended.returncode, ended.stderr) == (0, "")
    report = json.loads((tmp_path / "validate-gpu.json").read_text())
    skips = {14: "compute-sanitizer watches a GPU"}
    assert {one["number"]: one["told"] for one in report["checks"] if not one["passed"]} == {
        number: skips[number] for number in numbers if number in skips
    }
    assert [one["number"] for one in report["checks"]] == numbers
    assert report["missing"] == []


# --- processes


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("cpu", False, tmp_path)


def test_a_command_that_takes_too_long_is_killed_with_what_it_started() -> None:
    code = "import subprocess, sys; print('here', flush=True); subprocess.run(['sleep', '60'])"
    status, output = command_output([sys.executable, "-c", code], 1.5)
    assert (status, output) == (124, "here\n")


@pytest.mark.parametrize("ignores", [False, True], ids=["ends", "has to be killed"])
def test_a_check_that_takes_too_long_ends_the_command_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    """That has a session of its own, and went on beside the checks after it."""
    number, started = tmp_path / "number", tmp_path / "started"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignores else ""
    inner = f"import os, signal, time; {ignore} open({str(started)!r}, 'w').write(str(os.getpid()));"
    inner += f"os.rename({str(started)!r}, {str(number)!r}); time.sleep(60)"
    code = "from validation import processes; processes.end_when_asked();"
    code += f"processes.captured([{sys.executable!r}, '-c', {inner!r}], 50.0, None, 0.5)"
    process = subprocess.Popen([sys.executable, "-c", code], env=processes.own_environment(), start_new_session=True)
    while not number.exists():
        assert process.poll() is None
        time.sleep(0.05)
    processes._ended(process, 20.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_all_checks_end_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to end, it ends those that run at once, in other threads, and kills the one that does not end."""
    numbers = [tmp_path / "1", tmp_path / "2"]

    def run(one: Check, place: Place, log: Path) -> Finding:
        path = numbers[one.number - 1]
        code = "import os, signal, time; " + (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if one.number == 2 else ""
        )
        code += f"open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        return Finding(processes.captured([sys.executable, "-c", code], 600.0)[0] == 0, "told")

    def ask(place: Place) -> str:
        threading.Thread(target=interrupt, daemon=True).start()
        return "a machine"

    def interrupt() -> None:
        while not all(path.exists() and path.read_text() for path in numbers):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(validate_gpu, "has_room", lambda place: True)
    monkeypatch.setattr(validate_gpu, "run_check", run)
    monkeypatch.setattr(validate_gpu, "describe", ask)
    monkeypatch.setattr(processes, "END_WITHIN_S", 0.5)
    before = {what: signal.getsignal(what) for what in (signal.SIGTERM, signal.SIGHUP)}
    processes.end_when_asked()
    both = [check(1, times_nothing=True), check(2, times_nothing=True)]
    try:
        with pytest.raises(SystemExit):
            validate_gpu.run_all(both, Place("cpu", False, tmp_path), tmp_path)
    finally:
        for what, handler in before.items():
            signal.signal(what, handler)
    for path in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_what_a_command_prints_is_in_the_log_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert command_output([sys.executable, "-c", "print('said')"], 30.0) == (0, "said\n")
    assert "said" in capfd.readouterr().out.splitlines()


def test_a_check_that_dies_or_hangs_fails(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "captured", lambda command, limit_s, end_within_s: (-11, "last words"))
    found = run_check(check(1), place, place.scratch / "log")
    assert (found.passed, found.told) == (False, "its process ended with -11\nlast words")
    monkeypatch.setattr(processes, "captured", lambda command, limit_s, end_within_s: (124, ""))
    assert run_check(check(1, timeout_s=7.0), place, place.scratch / "log").told == "it took longer than 7 s"


def test_what_a_check_found_is_read_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(command: list[str], limit_s: float, end_within_s: float) -> tuple[int, str]:
        assert command[command.index("--as-check") + 1] == "5"
        assert "--cpu" in command
        write_finding(Finding(True, "fine", {"bytes": 3}), Path(command[command.index("--finding") + 1]))
        return 0, "noise"

    monkeypatch.setattr(processes, "captured", runs)
    found = run_check(check(5), place, place.scratch / "log")
    assert (place.scratch / "log").read_text() == "noise"
    assert (found.passed, found.told, found.figures) == (True, "fine", {"bytes": 3})
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("attributes", "status", "passed"),
    [
        ({"tests": "3", "failures": "0", "errors": "0", "skipped": "1"}, 0, True),
        ({"tests": "3", "failures": "1", "errors": "0", "skipped": "0"}, 1, False),
        ({"tests": "2", "failures": "0", "errors": "0", "skipped": "2"}, 0, None),
        ({"tests": "0", "failures": "0", "errors": "0", "skipped": "0"}, 5, False),
    ],
)
def test_outcomes_of_tests(
    attributes: dict[str, str], status: int, passed: bool | None, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(command: list[str], limit_s: float, environment: object) -> tuple[int, str]:
        inside = " ".join(f'{name}="{value}"' for name, value in attributes.items())
        report = next(part for part in command if part.startswith("--junitxml=")).partition("=")[2]
        Path(report).write_text(
            f'<testsuites><testsuite {inside}><testcase><skipped message="no GPU"/></testcase></testsuite></testsuites>'
        )
        return status, "output"

    monkeypatch.setattr(processes, "command_output", runs)
    found = run_tests(place, ["unit/test_x.py"], "word", 5.0)
    assert found.passed is passed
    assert passed is not None or found.told == "no GPU"


def test_tests_that_are_killed_are_not_told_by_the_report_of_those_before(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.scratch / "junit.xml").write_text('<testsuites><testsuite tests="11"/></testsuites>')
    monkeypatch.setattr(processes, "command_output", lambda *_: (124, "the last line"))
    found = run_tests(place, ["unit/test_x.py"], "word", 5.0)
    assert found.passed is False
    assert "pytest ended with 124" in found.told
    assert "11" not in found.told


# --- checks


@pytest.mark.parametrize(
    ("halves", "passed"), [((True, True), True), ((True, False), False), ((False, True), False), ((None, None), None)]
)
def test_windows_are_checked_with_both_kinds_of_segments(
    place: Place, monkeypatch: pytest.MonkeyPatch, halves: tuple[bool | None, bool | None], passed: bool | None
) -> None:
    kinds = list[Any]()

    def run(place: Place, files: list[str], keyword: str, timeout_s: float, environment: dict[str, str]) -> Finding:
        kinds.append(environment)
        return Finding(halves[len(kinds) - 1], "told", {"tests": len(kinds)})

    monkeypatch.setattr(one_sided, "run_tests", run)
    found = one_sided.processes(replace(place, device="cuda"))
    assert kinds[0] == {}
    assert [*kinds[1].values()] == ["expandable_segments:True"]
    assert found == Finding(
        passed, "as is: told; expandable segments: told", {"as_is": {"tests": 1}, "expandable_segments": {"tests": 2}}
    )


def test_each_test_of_windows_on_a_gpu_is_in_one_check(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are chosen by words in their names: one with another name would silently be in none."""
    keywords = list[str]()

    def run(place: Place, files: list[str], keyword: str, timeout_s: float, *_: Any) -> Finding:
        if files == ["gpu/test_odc_gpu.py"] and keyword not in keywords:
            keywords.append(keyword)
        return Finding(True, "told")

    monkeypatch.setattr(one_sided, "run_tests", run)
    for one in (one_sided.compile_kernels, one_sided.streams, one_sided.processes, one_sided.left_behind):
        one(replace(place, device="cuda"))
    source = (SCRIPTS.parent / "tests" / "gpu" / "test_odc_gpu.py").read_text()
    names = [one.name for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)]
    tests = [name for name in names if name.startswith("test_")]

    def chosen(keyword: str, name: str) -> bool:
        return bool(eval(re.sub(r"(?!and\b|or\b|not\b)\b\w+", lambda word: str(word[0] in name), keyword)))

    assert len(keywords) == 4
    assert [(name, sum(chosen(keyword, name) for keyword in keywords)) for name in tests] == [(n, 1) for n in tests]


@pytest.mark.parametrize("late", ["that offload", "all"])
def test_cases_that_offload_parameters_are_left_out_when_time_is_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """But for the first two, which run before the others.  Those have to run, as long as what they find is not lost."""
    ran = list[memory.Case]()

    def held(view: memory.Case, *_: Any) -> memory.Held:
        ran.append(view)
        return memory.Held(100, 100, 100, 100, 0.0, 100, 0.0)

    monkeypatch.setattr(memory, "limits_of", lambda wanted: nullcontext({}))
    monkeypatch.setattr(memory, "opened", lambda case, source: case)
    monkeypatch.setattr(memory, "held", held)
    seconds = chain([0.0, 1.0, 2.0, 3.0, 4.0], repeat(150.0 if late == "that offload" else 250.0))
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=partial(next, seconds)))
    wanted = memory.cases(is_long=False)
    found = memory.check(replace(place, device="cuda"))
    assert 0 < len(ran) < len(wanted)
    assert f"{len(ran)} of {len(wanted)} cases ran" in found.told
    offloading = [case for case in wanted if memory.OFFLOAD in case.strategy]
    if late == "all":
        assert not found.passed
        assert ran == offloading[:2]
    else:
        assert found.passed
        assert set(ran) == {*offloading[:2], *(case for case in wanted if memory.OFFLOAD not in case.strategy)}


LESS = {
    "pack_cast_bf16": (3, 1),
    "gather": (2, 2),
    "scatter_accumulate_fp32": (3, 1),
    "scatter_accumulate_alone_bf16": (3, 1),
    "take_gradient": (3, 1),
}
"""By kernel, which argument to make smaller and by how much: one segment, element or 2 bytes are left out."""


class Wrong:
    """Kernels of which one loses an element."""

    def __init__(self, run: kernels.Kernels, kernel: str) -> None:
        self._device, self._kernel = run.device, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, kernel: str, grid: Any, threads: int, arguments: tuple[int, ...]) -> None:
        if kernel == self._kernel:
            place, by = LESS[kernel]
            arguments = (*arguments[:place], arguments[place] - by, *arguments[place + 1 :])
        self._device.launch(kernel, grid, threads, arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> kernels.Kernels:
    folder = tmp_path_factory.mktemp("kernels")
    return kernels.open_kernels(Place("cpu", False, folder), folder)


def test_kernels_have_pytorchs_bits(run: kernels.Kernels) -> None:
    found = dict(kernels.failures(run, (1, 7, 999)))
    assert len(found) == 5 * 3 * 3 * 2
    assert not any(found.values())


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("pack_cast_bf16", kernels.packs),
        ("gather", kernels.gathers),
        ("scatter_accumulate_fp32", kernels.adds),
        ("scatter_accumulate_alone_bf16", kernels.adds_alone),
        ("take_gradient", kernels.takes),
    ],
)
def test_a_kernel_that_leaves_something_out_is_found(kernel: str, kind: Any, run: kernels.Kernels) -> None:
    dtype = torch.bfloat16 if kernel.endswith("bf16") else torch.float32
    wrong = kernels.Kernels(Wrong(run, kernel), run.streams)
    assert kind(run, 99, 1, dtype)
    assert not kind(wrong, 99, 1, dtype)


def test_rates_are_judged_by_their_targets() -> None:
    def row(contestant: str, size_mb: int, share: float) -> dict[str, Any]:
        return {"contestant": contestant, "shard_bytes": size_mb * 10**6, "share": [0.1, share, 2.0], "gb_per_s": 1.0}

    good = [row("gather", 4, 0.91), row("gather", 16, 0.95), row("push", 16, 0.9), row("copies", 1, 0.2)]
    assert one_sided.judge(good).passed
    for bad in (row("gather", 4, 0.89), row("gather", 16, 0.94), row("push", 1, 0.89), row("take", 64, 0.5)):
        found = one_sided.judge([*good, bad])
        assert found.passed is False
        assert found.told.startswith("3 of 4 rates reach their targets\n" + bad["contestant"])


def test_checks_that_time_nothing_run_at_once_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before those that time."""
    all_of_them, ran = threading.Barrier(3, timeout=20), list[int]()

    def run_one(one: Check, place: Place, output: Path) -> Finding:
        if one.times_nothing:
            all_of_them.wait()
        ran.append(one.number)
        return Finding(True, "fine")

    monkeypatch.setattr(validate_gpu, "has_room", lambda place: True)
    monkeypatch.setattr(validate_gpu, "run_one", run_one)
    chosen = [check(1), *(check(number, times_nothing=True) for number in (4, 2, 3)), check(5)]
    found = validate_gpu.run_all(chosen, Place("cpu", False, tmp_path), tmp_path)
    assert set(found) == {1, 2, 3, 4, 5}
    assert ran[3:] == [1, 5]


def test_a_check_that_cannot_be_run_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(one: Check, place: Place, log: Path) -> Finding:
        if one.number == 2:
            raise OSError("no space left on device")
        return Finding(True, "fine")

    monkeypatch.setattr(validate_gpu, "has_room", lambda place: True)
    monkeypatch.setattr(validate_gpu, "run_check", run)
    chosen = [check(1), check(2, times_nothing=True), check(3, times_nothing=True)]
    found = validate_gpu.run_all(chosen, Place("cpu", False, tmp_path), tmp_path)
    assert {number: one.passed for number, one in found.items()} == {1: True, 2: False, 3: True}
    assert found[2].told == "it could not be run: OSError: no space left on device"
    assert (tmp_path / "validate-gpu.json").exists()


def test_a_report_that_cannot_be_written_keeps_no_check_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(validate_gpu, "write_report", write)
    monkeypatch.setattr(validate_gpu, "run_check", lambda *_: Finding(True, "fine"))
    assert len(validate_gpu.run_all([check(1), check(2)], Place("cpu", False, tmp_path), tmp_path)) == 2
    assert capsys.readouterr().err == 2 * "osdp: the report could not be written: no space left on device\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    command = [programs.python(), str(SCRIPTS / "validate_gpu.py"), "--only", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "osdp: PyTorch finds no GPU\n  try: --cpu, which runs the checks without one\n"
    assert done.stdout == ""


def test_without_the_tools_of_the_tests_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment that quickstart.sh made has no pytest: each check failed with a traceback of its own."""
    monkeypatch.setattr(validate_gpu, "find_spec", lambda name: None if name == "pytest" else object())
    monkeypatch.setattr(sys, "argv", ["validate_gpu.py", "--cpu", "--output", str(tmp_path / "report")])
    assert validate_gpu.main() == 2
    shown = capsys.readouterr()
    assert shown.err == (
        f"osdp: {sys.executable} has no pytest, which some checks run\n"
        "  try: pip install -e '.[test]', or sh scripts/test.sh, which makes .venv with it\n"
    )
    assert (shown.out, (tmp_path / "report").exists()) == ("", False)
