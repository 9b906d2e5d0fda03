"""The linear example at full size on one GPU: the memory that the tutorial shows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples_path import EXAMPLES

NEEDED_BYTES = 32 * 2**30


def missing() -> str:
    """Return why nothing can be measured here; empty if it can."""
    if not torch.cuda.is_available():
        return "no GPU (torch.cuda.is_available() is False)"
    free_bytes, _ = torch.cuda.mem_get_info()
    return "" if free_bytes >= NEEDED_BYTES else f"the GPU has {free_bytes} bytes free of the {NEEDED_BYTES} needed"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_ddp_takes_what_the_tutorial_shows(tmp_path: Path) -> None:
    """Its figures do not depend on the number of ranks.

    After the warm-up there are parameters, gradients and DDP's buckets of 8 GiB + 512 KiB each, 1 GiB of data,
    and cuBLAS's workspaces: 16.25 MiB where the tutorial ran, at most 32 MiB for each handle on other GPUs.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [str(EXAMPLES / "linear_example" / "train.py"), "--data_parallel", "ddp", "--batch_size", "8192"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run([*command, "--warmup_steps", "2", "--steps", "1"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    data, model, warm = (ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert data["cuda_memory_allocated_GB"] == 1.0
    assert model["cuda_memory_allocated_GB"] == model["cuda_max_memory_allocated_GB"] == 9.00048828125
    assert 25.0014 < warm["cuda_memory_allocated_GB"] < 25.0015 + 3 * 32 / 1024
