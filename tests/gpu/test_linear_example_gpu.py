"""The linear example on one GPU: the memory that the tutorial shows, and what offload takes off the GPU."""

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


def stages(folder: Path, *flags: str) -> list[dict[str, float]]:
    """Run the example on one rank; return what it tells after data, model and warm-up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [str(EXAMPLES / "linear_example" / "train.py"), *flags, "--warmup_steps", "2", "--steps", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (EXAMPLES, EXAMPLES.parent)))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_offload_keeps_parameters_and_gradients_off_the_gpu(tmp_path: Path) -> None:
    """Eight layers of 2048 x 2048 and 2048 in fp32, and as many gradients."""
    flags = ("--data_parallel", "fsdp", "--hidden", "2048", "--batch_size", "256")
    kept, offloaded = (stages(tmp_path, *flags, *more)[-1] for more in ((), ("--cpu_offload",)))
    difference = kept["cuda_memory_allocated_GB"] - offloaded["cuda_memory_allocated_GB"]
    assert difference == pytest.approx(2 * 8 * (2048 + 1) * 2048 * 4 / 2**30, rel=0.05)


def test_ddp_takes_what_the_tutorial_shows(tmp_path: Path) -> None:
    """Its figures do not depend on the number of ranks.

    After the warm-up there are parameters, gradients and DDP's buckets of 8 GiB + 512 KiB each, 1 GiB of data,
    and cuBLAS's workspaces: 16.25 MiB where the tutorial ran, at most 32 MiB for each handle on other GPUs.
    """
    data, model, warm = stages(tmp_path, "--data_parallel", "ddp", "--batch_size", "8192")
    assert data["cuda_memory_allocated_GB"] == 1.0
    assert model["cuda_memory_allocated_GB"] == model["cuda_max_memory_allocated_GB"] == 9.00048828125
    assert 25.0014 < warm["cuda_memory_allocated_GB"] < 25.0015 + 3 * 32 / 1024
