"""What lies in the current folder never takes the place of a library, in the command or in its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from osdp.training.launch import PROGRAM

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("program", "shadows"),
    # Python itself has imported pathlib, and more, from the current folder before `-m osdp` comes to its first line.
    [(PROGRAM, ("yaml", "torch", "pathlib", "runpy")), (("-m", "osdp"), ("yaml", "torch"))],
    ids=["rank", "command"],
)
def test_modules_beside_the_user_are_not_run(
    tmp_path: Path, program: tuple[str, ...], shadows: tuple[str, ...]
) -> None:
    for name in shadows:
        (tmp_path / f"{name}.py").write_text(f"print('ran {name}.py')\nraise SystemExit(77)\n")
    (tmp_path / "mine.py").write_text("import torch\nprint('mine', torch.nn)\n")
    # No PYTHONPATH for a rank: it finds the OSDP that it is of.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if program is not PROGRAM:
        environment["PYTHONPATH"] = str(CHECKOUT)
    command = [sys.executable, *program, "partition", "--model", "mine:nothing"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "ran " not in done.stdout + done.stderr
    assert done.returncode == 2
    assert done.stderr.splitlines()[-3].endswith("mine.py has no `nothing`")
