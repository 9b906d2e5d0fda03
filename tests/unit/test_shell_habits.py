"""What shells and pipes expect of commands: completion, no trailing blanks, colours, --quiet; and `osdp doctor`."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import programs
import pytest
from command_line import Cli
from typer.main import get_command

from osdp.cli.app import app
from osdp.cli.terminal import make_console, make_table, note, say, set_quiet
from osdp.doctor import all_reduce

CHECKOUT = Path(__file__).resolve().parents[2]
TINY = ("--model", "gpt2-tiny", "--cluster", "cpu-gloo", "--batch", "2")
PINNED = (*TINY, "--pin", "*=shard")
PLAN = "plan.yaml"
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": ((*PINNED, "--what-if", "-o", PLAN), (*PINNED, "--mem", "1GB,2GB"), (*PINNED, "--json")),
    "explain": ((PLAN,), (PLAN, "blocks.0")),
    "diff": ((PLAN, PLAN), (PLAN, PLAN, "--json")),
    "schedule": ((PLAN,),),
    "verify": ((PLAN,),),
    "export": ((PLAN, "--to", "fsdp2"), (PLAN, "--to", "accelerate", "--nearest")),
    "profile": (("--compare", str(CHECKOUT / "configs/clusters/h100-8.yaml"), "a.yaml"),),
    "train": (("--steps", "1", "--model", "gpt2-tiny", "--task", "addition", "--ranks-per-node", "1"),),
    "strategies": (TINY[:4],),
    "partition": (("--model", "gpt2-tiny"),),
    "doctor": ((),),
    "models": ((),),
    "clusters": ((), ("--sources",)),
}
"""Arguments for every command; `PLAN` is made by the first."""


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests and `osdp doctor` start are forks of a process that holds torch."""
    monkeypatch.setattr(sys, "executable", programs.python())


def test_every_command_is_here() -> None:
    assert set(COMMANDS) == set(get_command(app).commands)  # type: ignore[attr-defined]


def trained(*arguments: str) -> str:
    """Return what a program of several processes prints."""
    command = [sys.executable, "-m", "osdp", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_command_prints_trailing_blanks(cli: Cli, tmp_path: Path) -> None:
    a100 = (CHECKOUT / "configs/clusters/a100-80g-8.yaml").read_text()
    (tmp_path / "a.yaml").write_text(a100)
    commands = [(name, *arguments) for name, runs in COMMANDS.items() for arguments in (*runs, ("--help",))]
    for command in commands:
        # The ranks of a training run print for themselves.
        out = trained(*command) if "--steps" in command else cli(*command).out
        assert out, command
        assert not [line for line in out.splitlines() if line != line.rstrip()], command


def test_a_tables_last_column_is_filled_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("left", "right")
    table.add_row("a", "long text")
    table.add_row("b", "")
    make_console().print(table)
    assert capsys.readouterr().out.splitlines()[-1] == "b"


def on_terminal(*arguments: str, **environment: str) -> str:
    """Return what a command prints on a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "osdp", *arguments]
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    there = {**inherited, "TERM": "xterm-256color", **environment}
    subprocess.run(command, cwd=CHECKOUT, stdout=follower, stderr=follower, env=there, timeout=60, check=True)
    os.close(follower)
    found = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the end, on Linux
            break
        if not part:
            break
        found += part
    os.close(leader)
    return found.decode()


def test_styles_are_for_terminals_and_no_color_leaves_no_colour(cli: Cli) -> None:
    assert "\x1b[" in on_terminal("models")
    colours = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
    assert not colours.search(on_terminal("models", NO_COLOR="1"))
    assert "\x1b" not in cli.done("models")


def test_quiet_leaves_out_notes_but_no_errors(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", *TINY, "--mem", "1GB")
    loud, quiet = cli(*arguments), cli(*arguments, "--quiet")
    assert quiet.out.splitlines()[0] == loud.out.splitlines()[0]
    set_quiet(True)
    note("a note")
    say("error: an error")
    assert capsys.readouterr().err == "osdp: error: an error\n"
    set_quiet(False)
    note("a note")
    assert capsys.readouterr().err == "osdp: note: a note\n"
    cli(*arguments, "-q")
    cli(*arguments)  # a command without it is not quiet because the one before was
    note("a note")
    assert capsys.readouterr().err == "osdp: note: a note\n"


@pytest.mark.parametrize(
    "command",
    ["plan", "explain", "diff", "schedule", "export", "verify", "profile", "train", "strategies", "partition"],
)
def test_every_command_that_takes_time_can_be_quiet(cli: Cli, command: str) -> None:
    assert "-q, --quiet" in cli.done(command, "--help")


def completed(*words: str) -> list[str]:
    """Return what bash is told that the last word may become."""
    environment = {**os.environ, "_OSDP_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
    environment["COMP_WORDS"] = " ".join(("osdp", *words))
    command = [sys.executable, "-m", "osdp"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


def test_words_are_completed() -> None:
    assert completed("pl") == ["plan"]
    assert completed("plan", "--model", "gpt2-l") == ["gpt2-large"]
    assert completed("clusters", "titan") == ["titan-rtx-8"]
    assert "--memory-snapshot" not in completed("clusters", "--")


@pytest.mark.parametrize(("shell", "sign"), [("bash", "complete -o"), ("zsh", "#compdef osdp"), ("fish", "complete ")])
def test_each_shell_has_its_script(shell: str, sign: str) -> None:
    environment = {**os.environ, "_OSDP_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-m", "osdp"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=60)
    assert sign in done.stdout


def test_plan_without_a_model_shows_three_examples(cli: Cli) -> None:
    said = cli.refused("plan")
    assert said.count("osdp plan --model") == 3
    assert not [line for line in said.splitlines() if line != line.rstrip()]


def test_doctor_says_what_is_there(cli: Cli) -> None:
    found = cli.json("doctor")
    by_name = {check["name"]: check for check in found["checks"]}
    assert found["works"] is True
    assert by_name["PyTorch"]["found"] == version("torch")
    assert by_name["gloo"]["found"] == "2 ranks all-reduced"
    assert all(check["is_well"] or check["advice"] for check in found["checks"])


def test_doctor_exits_with_1_if_what_is_needed_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    outcome = cli("doctor", "--json")
    found = {check["name"]: check["is_well"] for check in json.loads(outcome.out)["checks"]}
    assert (outcome.status, found["gloo"], found["planner"]) == (1, False, True)


def test_ranks_that_never_meet_are_ended() -> None:
    found = all_reduce("gloo", 2, timeout_s=0.01)
    assert not found.is_well
    assert found.is_needed
