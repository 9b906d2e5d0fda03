"""Checkouts whose environment counts as installed, for the tests of shell scripts and of documented commands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import programs

ROOT = Path(__file__).resolve().parents[1]


def working_checkout(folder: Path) -> Path:
    """Return a copy in which the commands of the documents run if its `.venv/bin` is first on `PATH`.

    They run on the Python and the installed OSDP of the tests, as forks (see `programs.py`), and see no GPU.
    """
    python = programs.python()
    root = _checkout(folder, python, f'exec "{python}" -m osdp "$@"')
    for name, command in (("torchrun", f'exec "{python}" -m torch.distributed.run "$@"'), ("nvidia-smi", "exit 9")):
        _program(root / ".venv" / "bin" / name, command)
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "profiles"))
    shutil.copy(ROOT / "LICENSE", root)
    return root


def stub_checkout(folder: Path) -> Path:
    """Return a copy of the scripts, with an `osdp` that says what it was called with; its Python is this one."""
    return _checkout(folder, sys.executable, 'printf "%s\\n" "$@"')


def _checkout(folder: Path, python: str, osdp: str) -> Path:
    root = folder / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    binaries = root / ".venv" / "bin"
    binaries.mkdir(parents=True)
    _program(binaries / "python", f'exec "{python}" "$@"')
    _program(binaries / "osdp", osdp)
    version = ".".join(map(str, sys.version_info[:3]))
    stamp = subprocess.run(
        [
            "sh",
            "-c",
            f'root=$1; . "$root/scripts/_environment.sh"; find_cupy; stamp_for {version} "$cupy"',
            "sh",
            str(root),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (root / ".venv" / "osdp-stamp").write_text(stamp.stdout)
    return root


def _program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
