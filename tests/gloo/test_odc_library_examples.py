"""The examples of on-demand communication under FSDP: they run under torchrun, and train what one process trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


def reference(text: torch.Tensor) -> list[float]:
    """Train in plain PyTorch on the micro-batches of all ranks; return rank 0's last loss every 20 steps."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=2, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    found = []
    for step in range(1, 41):
        losses: list[list[torch.Tensor]] = []
        for generator in generators:
            losses.append([])
            for _ in range(int(torch.randint(1, 4, (), generator=generator))):
                starts = torch.randint(len(text) - 64, (8,), generator=generator)
                tokens = torch.stack([text[start : start + 64] for start in starts])
                losses[-1].append(model(tokens, labels=tokens))
        torch.stack([loss for of_rank in losses for loss in of_rank]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            found.append(losses[0][-1].item())
    return found


@pytest.mark.parametrize("name", ["odc_fsdp2.py", "odc_fsdp1.py"])
def test_an_example_trains_what_one_process_trains(name: str) -> None:
    example = ROOT / "examples" / name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, str(example)], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    wanted = reference(torch.tensor(list(example.read_bytes())))
    assert losses == pytest.approx(wanted, abs=0.01)
    assert losses[-1] < 4.0  # of ln 256 = 5.5 at the start
