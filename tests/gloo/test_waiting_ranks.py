"""How long ranks wait for a slow one is measured without a clock in common: against a rank that sleeps."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from collected import Collected
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import nn

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.planning.clusters import load_cluster
from osdp.planning.plan_file import write_plan
from osdp.planning.request import Request, plan_model
from osdp.training.config import load_config
from osdp.training.evaluate import held_out_accuracies
from osdp.training.job import prepare
from osdp.training.rank_main import run_rank
from osdp.zoo import load_model
from planner.pins import parse_pin
from profiler.byte_sizes import GIB

SLEEP_S = 0.4
SLOW_RANK = 1
FEW = 16
"""Sums that are asked for at the end: nobody looks at how many are right."""


def sleeper() -> nn.Module:
    """Return a model whose first block takes longer on one rank."""
    model = GPT2(GPT2Config(vocabulary_size=16, maximum_positions=32, hidden_size=32, layers=1, heads=2))
    if os.environ.get("RANK") == str(SLOW_RANK):
        first: Any = model.blocks[0]
        first.register_forward_pre_hook(lambda block, _: time.sleep(SLEEP_S if block.training else 0))
    return model


def trained(rank: int, options: dict[str, Any]) -> Collected:
    """Be one rank of a run."""
    collected = Collected()
    fixed = {"model": "test_waiting_ranks:sleeper", "steps": 5, "log_every": 5, "device": "cpu", "timeout_s": 30.0}
    with mock.patch("osdp.training.rank_main.held_out_accuracies", partial(held_out_accuracies, count=FEW)):
        run_rank(prepare(load_config("gpt2", fixed | options)), collected)
    return collected


def odc_plan(folder: Path) -> dict[str, str | int]:
    request = Request(GIB, micro_batch=4, pins=(parse_pin("*=odc:2"),), optimizer="fused_adamw")
    source = load_model("test_waiting_ranks:sleeper", sequence_length=7)
    write_plan(folder / "plan.yaml", plan_model(source, load_cluster("cpu-gloo", 1, 2), request).plan)
    return {"plan": str(folder / "plan.yaml"), "global_batch": 8}


@pytest.mark.parametrize("how", ["FSDP", *(["odc", "DDP"] if THOROUGH else [])])
def test_the_others_wait_as_long_as_one_is_slower(how: str, tmp_path: Path) -> None:
    options = odc_plan(tmp_path) if how == "odc" else {"fsdp_type": how, "batch": 4, "global_batch": 8}
    found: Collected = run_ranks(trained, 2, options, joins=False)[0]
    for waits_s in (found.summaries[0].waits_s, found.steps[-1].waits_s):
        assert waits_s[SLOW_RANK] == 0
        # Ranks share processors, so that one computes longer or shorter meanwhile.
        assert 0.5 * SLEEP_S < waits_s[1 - SLOW_RANK] < 1.5 * SLEEP_S
