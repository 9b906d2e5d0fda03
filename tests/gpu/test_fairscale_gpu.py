"""scripts/bench/fairscale_fsdp.py on a GPU: fairscale's own FSDP and OSDP's train alike, which it checks itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU (torch.cuda.is_available() is False), which fairscale's FSDP needs"
)


def test_both_train_alike_and_are_measured() -> None:
    sizes = ("--model", "bert-tiny", "--seq", "32", "--large", "4000", "--batch", "4", "--rounds", "3", "--ranks", "1")
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "scripts" / "bench" / "fairscale_fsdp.py"), *sizes],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("fairscale  ", "OSDP, "))]
    assert [row.split("  ")[0] for row in rows] == ["fairscale", "OSDP, none"]
