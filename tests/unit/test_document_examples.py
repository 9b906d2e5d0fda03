"""What the documents show of a console is what the commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from thoroughness import some

CHECKOUT = Path(__file__).resolve().parents[2]
NAMES = ("tutorials/nodes.md", "tutorials/fsdp2_code.md", "tutorials/gpt2.md", "planner.md", "planning.md")
"""Documents whose examples plan models of the zoo: predictions, which are the same on every machine."""
BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
LEFT_OUT = ("...", "[...]", "")
SLOW = "osdp verify"
PINNED = "torch==2.13"
"""Other versions trace models themselves, and may be off by some bytes."""


def examples(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every command of a document's consoles, and the lines that are shown of what it prints."""
    for block in BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *shown = part.splitlines()
            yield command, [line for line in shown if line not in LEFT_OUT]


def not_printed(command: str, shown: list[str], folder: Path) -> list[str]:
    """Run a command in a folder; return the lines that are shown of it, and that it does not print."""
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    around = {"PATH": scripts, "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | around, capture_output=True, text=True, timeout=300
    )
    printed = {*done.stdout.splitlines(), *done.stderr.splitlines()}
    return [line for line in shown if line not in printed]


@pytest.mark.skipif(not version("torch").startswith(PINNED.partition("==")[2]), reason=f"for {PINNED}")
@pytest.mark.parametrize("name", some(NAMES, len(NAMES)))
def test_what_documents_show_is_printed(name: str, tmp_path: Path) -> None:
    found = list(examples((CHECKOUT / "docs" / name).read_text()))
    assert found
    wrong = [
        (command, lines)
        for command, shown in found
        if SLOW not in command and (lines := not_printed(command, shown, tmp_path))
    ]
    assert wrong == []


def test_another_line_is_noticed(tmp_path: Path) -> None:
    text = "```console\n$ echo one; echo two\none\n...\nthree\n$ echo four\nfour\n```\n"
    assert [not_printed(*each, tmp_path) for each in examples(text)] == [["three"], []]
