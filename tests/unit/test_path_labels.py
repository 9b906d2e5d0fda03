"""The operator of what a model owns itself, whose path is empty, has words in every report."""

from __future__ import annotations

import sys
from pathlib import Path

import command_line
import pytest
from command_line import Cli

cli = command_line.cli

MODEL = """
import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(512, 512)), nn.Linear(512, 512)

    def forward(self, x):
        return (self.layer(x) @ self.table).pow(2).mean()

    def example_inputs(self, batch):
        return (torch.randn(batch, 512),), {}
"""


def test_no_report_leaves_out_its_name(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was blank: "in backward of", "These change together: .", and a refusal that spoke of the optimizer."""
    (tmp_path / "owns_a_table.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    model = ("--model", "owns_a_table:Mixed", "--cluster", "cpu-gloo", "--gpus-per-node", "2", "--batch", "9000")
    said = [
        cli.done("plan", *model, "--mem", "2GB", "--pin", "*=shard", "-o", "plan.yaml"),
        cli.done("explain", "plan.yaml"),
        cli.refused("plan", *model, "--mem", "260MB"),
    ]
    sys.modules.pop("owns_a_table", None)
    planned, explained, refused = (" ".join(text.split()) for text in said)
    assert "ward of the model itself" in planned
    assert "ward of the model itself" in explained
    assert "the model itself" in explained.partition("alternatives")[2]
    assert "ward of the model itself" in refused
    assert "the largest operators are layer and the model itself" in refused
