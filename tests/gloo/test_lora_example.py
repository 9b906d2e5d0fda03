"""examples/train_lora.py: adapters of peft on a decoder of transformers in bf16."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks
from thoroughness import THOROUGH

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lora.py"
STEPS = 40 if THOROUGH else 10
TIGHT = STEPS
"""Steps that are made again, and lose the same, where less memory is."""


def run_example(rank: int, *options: list[str]) -> list[str]:
    """Run the script on a rank with these options, then with those; return what it prints each time.

    Ranks import transformers and peft once, which takes as long as the training, and have one process group.
    """
    told = []
    for given, left_out in zip(options, ("destroy_process_group", "init_process_group"), strict=True):
        printed = io.StringIO()
        arguments = mock.patch.object(sys, "argv", [str(EXAMPLE), *given])
        with arguments, mock.patch.object(dist, left_out), contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        told.append(printed.getvalue())
    return told


def test_adapters_learn_and_the_backbone_is_whole_where_it_fits() -> None:
    pytest.importorskip("peft")
    runs = ["--steps", f"{STEPS}"], ["--mem", "257MB", "--steps", f"{TIGHT}"]
    (roomy, tight), silent = run_ranks(run_example, 2, *runs, joins=False, timeout_s=240)
    assert silent == ["", ""]
    assert re.search(r"frozen: \{'replicate': \d+\}", roomy)
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", roomy)]
    assert losses[-1] < losses[0] - 0.3  # from about ln 256 = 5.55, of what a random decoder can learn
    # 3.0 MiB of backbone and 0.3 of adapters with their states, beside the 256 MiB that a CPU rank takes for itself.
    assert "shard" in tight.splitlines()[0]
    assert re.findall(r"step \d+: loss ([\d.]+)", tight) == [f"{loss:.3f}" for loss in losses[: 1 + TIGHT // 10]]
