"""The README's training example: it is the file, it runs under torchrun, and it trains what one process trains."""

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
EXAMPLE = ROOT / "examples" / "train_gpt2.py"
RANKS = 2


def reference(text: torch.Tensor) -> list[float]:
    """Train in plain PyTorch on the samples of all ranks; return rank 0's loss every 20 steps."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=4, heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    found = []
    for step in range(1, 61):
        losses = []
        for generator in generators:
            starts = torch.randint(len(text) - 64, (8,), generator=generator)
            tokens = torch.stack([text[start : start + 64] for start in starts])
            losses.append(model(tokens, labels=tokens))
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            found.append(losses[0].item())
    return found


def test_the_readme_shows_the_file() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert EXAMPLE.read_text() in blocks


def test_the_example_trains_what_one_process_trains() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, str(EXAMPLE)], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    wanted = reference(torch.tensor(list(EXAMPLE.read_bytes())))
    assert losses == pytest.approx(wanted, abs=0.01)
    assert losses[-1] < losses[0] - 0.5
