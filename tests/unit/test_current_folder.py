"""What lies in the current folder never takes the place of a library, in the command or in its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from osdp.training.launch import PROGRAM

CHECKOUT = Path(__file__).resolve().parents[2]


def run_beside(
    shadows: tuple[str, ...], folder: Path, *command: str, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with modules of these names, which would say that they run."""
    for name in shadows:
        (folder / f"{name}.py").write_text(f"print('ran {name}.py')\nraise SystemExit(77)\n")
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "ran " not in done.stdout + done.stderr
    return done


def test_ranks_run_no_modules_beside_the_user_but_his_model(tmp_path: Path) -> None:
    """Without PYTHONPATH: they find the OSDP that they are of."""
    (tmp_path / "mine.py").write_text("import torch\nprint(torch.nn)\n")
    shadows = ("yaml", "torch", "pathlib", "runpy")
    done = run_beside(shadows, tmp_path, *PROGRAM, "partition", "--model", "mine:nothing")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-3].endswith("mine.py has no `nothing`")


def test_python_m_osdp_runs_no_modules_beside_the_user(tmp_path: Path) -> None:
    """Python itself has imported pathlib, and more, from there before the first line of ours."""
    done = run_beside(("yaml", "rich"), tmp_path, "-m", "osdp", "clusters", "cpu-gloo", path=str(CHECKOUT))
    assert (done.returncode, done.stderr) == (0, "")
