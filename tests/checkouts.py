"""A checkout whose environment counts as installed, for the tests of shell scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def stub_checkout(folder: Path) -> Path:
    """Return a copy of the scripts, with an `osdp` that says what it was called with; its Python is this one."""
    root = folder / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    programs = root / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "osdp").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / "osdp").chmod(0o755)
    version = ".".join(map(str, sys.version_info[:3]))
    stamp = subprocess.run(
        ["sh", "-c", f'root=$1; . "$root/scripts/_environment.sh"; stamp_for {version} ""', "sh", str(root)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (root / ".venv" / "osdp-stamp").write_text(stamp.stdout)
    return root
