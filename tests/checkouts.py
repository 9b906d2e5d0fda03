"""Checkouts whose environment counts as installed, for the tests of shell scripts and of documented commands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def working_checkout(folder: Path) -> Path:
    """Return a copy in which the commands of the documents run if its `.venv/bin` is first on `PATH`.

    They run on the Python and the installed OSDP of the tests, and see no GPU.
    """
    root = _checkout(folder, f'exec "{sys.executable}" -m osdp "$@"')
    for name, command in (
        ("torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"'),
        ("nvidia-smi", "exit 9"),
    ):
        _program(root / ".venv" / "bin" / name, command)
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "profiles"))
    shutil.copy(ROOT / "LICENSE", root)
    return root


def stub_checkout(folder: Path) -> Path:
    """Return a copy of the scripts, with an `osdp` that says what it was called with; its Python is this one."""
    return _checkout(folder, 'printf "%s\\n" "$@"')


def _checkout(folder: Path, osdp: str) -> Path:
    root = folder / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    programs = root / ".venv" / "bin"
    programs.mkdir(parents=True)
    _program(programs / "python", f'exec "{sys.executable}" "$@"')
    _program(programs / "osdp", osdp)
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
