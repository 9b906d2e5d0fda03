"""Ranks that are about to train different things say so before the first step; all start with rank 0's values."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from collected import Collected
from ranks import run_ranks
from torch import Tensor, nn

from osdp.training.agreement import check_alike
from osdp.training.config import load_config
from osdp.training.evaluate import held_out_accuracies
from osdp.training.job import prepare
from osdp.training.rank_main import run_rank
from profiler.errors import OsdpError
from runtime.deferred_init import initialise
from runtime.state.folder_lease import leased

DIFFERENT: list[dict[str, Any]] = [
    {"seed": 1},
    {"lr": 0.5},
    {"weight_decay": 0.5},
    {"optimizer": "sgd"},
    {"clip": 3.0},
    {"schedule": "constant"},
    {"precision": "bf16"},
    {"fsdp_type": "FSDP"},
    {"batch": 2},
    {"steps": 7},
    {"checkpoint_every": 1},
    {"model": "bert-tiny", "task": "sentences", "seq": 16},
]


def told(rank: int) -> list[str]:
    """Compare jobs of which rank 1 has another setting each time; return what this rank is told."""
    found = []
    for given in DIFFERENT:
        config = load_config("gpt2", {"steps": 2, "device": "cpu"} | (given if rank == 1 else {}))
        try:
            check_alike(prepare(config))
            found.append("nothing")
        except OsdpError as error:
            found.append(str(error))
    return found


def test_what_differs_is_named_with_its_values() -> None:
    zero, one = run_ranks(told, 2)
    assert zero == one
    for text, given in zip(zero, DIFFERENT, strict=True):
        assert text.startswith("ranks are about to train different things\n  got: ")
        for name, value in given.items():
            if name != "model":
                assert f"{name}: " in text
                assert f"{value} on rank 1" in text
    assert "model: " in zero[-1]


def where_they_lie(rank: int, folder: str) -> int:
    """Run with files under names of each rank's own."""
    fixed = {"steps": 1, "device": "cpu", "timeout_s": 30.0 + rank, "trace": None, "log_every": 1 + rank}
    fixed |= {"tensorboard": f"{folder}/board-{rank}", "global_batch": 8}
    collected = Collected()
    with patch("osdp.training.rank_main.held_out_accuracies", partial(held_out_accuracies, count=8)):
        run_rank(prepare(load_config("gpt2", fixed)), collected)
    return len(collected.steps)


def test_names_of_folders_may_differ(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert run_ranks(where_they_lie, 2, str(tmp_path), joins=False) == [1, 0]  # rank 0 reports


def refused(rank: int, folder: str) -> str:
    config = load_config("gpt2", {"steps": 1, "device": "cpu", "timeout_s": 30.0, "checkpoint": folder})
    with pytest.raises(OsdpError) as caught:
        run_rank(prepare(config), Collected())
    return str(caught.value)


def test_a_folder_of_checkpoints_has_one_job(tmp_path: Path) -> None:
    """Two would publish a mixture of their weights, or remove what the other writes."""
    with leased(tmp_path, "trains another model"):
        zero, one = run_ranks(refused, 2, str(tmp_path), joins=False)
    assert zero == one
    assert f"another process writes to {tmp_path}" in zero
    assert f"process {os.getpid()} on " in zero
    assert "trains another model" in zero
    assert list(tmp_path.iterdir()) == []


class OddTensors(nn.Module):
    """Tensors of many dtypes and forms, small and beyond a bucket."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = [torch.randn(3, 5), torch.randn(()), torch.randn(0, 4), torch.randn(40), torch.randn(4, 6).t()]
        made += [torch.randn(3, dtype=torch.bfloat16), torch.randn(2, dtype=torch.complex64), torch.randn(7)]
        self.tensors = nn.ParameterList(nn.Parameter(one) for one in made)
        self.register_buffer("counts", torch.randint(9, (5,)))
        self.register_buffer("mask", torch.rand(6) > 0.5)


def _share(rank: int, bucket_bytes: int) -> dict[str, Tensor]:
    module = OddTensors(rank)
    with patch.object(initialise, "BUCKET_BYTES", bucket_bytes):
        initialise.share_rank_0(module, torch.device("cpu"))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("bucket_bytes", [0, 64, 25 << 20])
def test_all_have_the_values_of_rank_0(bucket_bytes: int) -> None:
    wanted = {name: tensor.detach() for name, tensor in OddTensors(0).state_dict().items()}
    for found in run_ranks(_share, 2, bucket_bytes):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
