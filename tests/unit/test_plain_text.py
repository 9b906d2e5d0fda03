"""What others wrote is text on a terminal, never a command for it; and reports fit whatever COLUMNS says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli

from osdp.cli.terminal import make_console, make_table, print_json, progress_bar, say
from osdp.plain_text import plain

EVIL = "a\x1b[31m\x1b]0;title\x07\r\x9b1A\u202eb"
SHOWN = r"a\x1b[31m\x1b]0;title\x07\r\x9b1A\u202eb"


def test_only_line_ends_and_tabs_stay() -> None:
    every = "".join(map(chr, range(0xA0)))
    assert [one for one in plain(every) if not one.isprintable()] == ["\t", "\n"]
    assert plain(EVIL) == SHOWN
    assert plain("half \udc9b, ä, 漢字, ─") == r"half \udc9b, ä, 漢字, ─"


def test_messages_and_reports_are_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # so that no line is broken
    say(f"{EVIL}\nline")
    table = make_table(EVIL, "=other")
    table.add_row(EVIL, EVIL)
    make_console().print(table, EVIL)
    with progress_bar() as progress:
        progress(EVIL, 0.5)
    out, err = capsys.readouterr()
    assert err == f"osdp: {SHOWN}\nline\n"
    assert out.count(SHOWN) == 4
    assert all(one.isprintable() or one == "\n" for one in out)


def test_json_escapes_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": EVIL})
    out = capsys.readouterr().out
    assert json.loads(out) == {"name": EVIL}
    assert all(one.isprintable() or one == "\n" for one in out)


@pytest.mark.parametrize(
    "arguments",
    [
        (EVIL,),
        ("plan", f"--{EVIL}"),
        ("plan", "--model", EVIL),
        ("plan", "--model", f"{EVIL}.yaml"),
        ("plan", "--model", "x", "--batch", EVIL),
        ("explain", EVIL),
        ("train", EVIL),
        ("profile", "--batch", EVIL, "--device", "cpu"),
        ("clusters", EVIL),
    ],
)
def test_arguments_are_repeated_as_plain_text(cli: Cli, arguments: tuple[str, ...]) -> None:
    outcome = cli(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert all(one.isprintable() or one == "\n" for one in outcome.err)


def test_files_are_repeated_as_plain_text(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('schema: osdp.train/1\nmodel: x\nsteps: 1\n"\\e[31m": "\\e[32m"\ntask: "\\e[2J"\n')
    outcome = cli("train", str(path))
    assert outcome.status == 2
    assert r"\x1b[31m" in outcome.err
    assert all(one.isprintable() or one == "\n" for one in outcome.err)


@pytest.mark.parametrize("columns", ["0", "1", "-5", "text", "1000000000", ""])
def test_any_width(cli: Cli, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    told = cli.done("clusters")
    assert "a100-2x8" in told
    assert max(map(len, told.splitlines())) <= 1000
