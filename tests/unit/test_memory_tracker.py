"""Predicted peak memory against what PyTorch's own FSDP2 code holds, on fake tensors.

`tracker_harness` wraps a model as the plan says, runs two training steps of rank 0 under a fake
process group and adds up live storages.  Seen with torch 2.13.0: from -0.012 % to +0.14 % (the most
with recomputation, whose block inputs are counted beside what the blocks save again).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from synthetic import cluster
from tracker_harness import track

from osdp.models.config import FAMILIES
from planner.memory import peak_memory
from planner.space import Choice, Space
from planner.strategy import strategies_on
from planner.workload import Workload
from profiler.graph import ModelGraph
from profiler.source import ModelSource
from profiler.trace import trace_model

SIZES = {
    "gpt2": {"maximum_positions": 256, "hidden_size": 256, "layers": 4, "heads": 4},
    "llama": {"maximum_positions": 256, "hidden_size": 256, "layers": 3, "heads": 4, "key_value_heads": 2,
              "intermediate_size": 640, "tied_head": False, "rope_base": 10000.0},
    "bert": {"maximum_positions": 256, "token_types": 2, "hidden_size": 256, "layers": 3, "heads": 4,
             "intermediate_size": 1024},
    "uneven": {"maximum_positions": 256, "head_size": 64, "encoder_widths": (128, 256, 192),
               "decoder_widths": (256, 128)},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, where it runs, and the strategies of its stages in turn."""

    strategies: tuple[str, ...]
    family: str = "gpt2"
    vocabulary: int = 512
    precision: str = "fp32"
    ranks: int = 8
    micro_batch: int = 2
    accumulation: int = 1
    recompute: int = 0
    """Every how many blocks are recomputed; 0: none."""
    length: int = 256
    """Tokens per sample."""
    split: str = ""
    """Strategy of the second half of each block's operators, if it differs."""


@cache
def source(family: str, vocabulary: int, length: int) -> ModelSource:
    module, name = FAMILIES[family].module.split(":")
    sizes = FAMILIES[family].config(vocabulary_size=vocabulary, **SIZES[family])

    def inputs(model: Any, batch: int) -> Any:
        return model.example_inputs(batch, length)

    return ModelSource(family, lambda: getattr(import_module(module), name)(sizes), inputs, length)


@cache
def graph_of(family: str, vocabulary: int, length: int, precision: str) -> ModelGraph:
    return trace_model(source(family, vocabulary, length), precision)


def relative_error(case: Case) -> float:
    """Return (predicted - tracked) / tracked."""
    space = Space(graph_of(case.family, case.vocabulary, case.length, case.precision))
    machine = cluster(1, case.ranks)
    load = Workload(machine, "adam", case.precision, case.micro_batch, case.accumulation)
    named = {str(strategy): strategy for strategy in strategies_on(machine)}
    choices = []
    for index, stage in enumerate(space.model.stages):
        strategy = named[case.strategies[index % len(case.strategies)]]
        taken = [strategy] * len(stage.operators)
        if case.split and stage.block is not None:
            taken[len(taken) // 2 :] = [named[case.split]] * (len(taken) - len(taken) // 2)
        again = bool(case.recompute) and stage.block is not None and stage.block % case.recompute == 0
        choices.append(Choice(tuple(taken), again))
    spanning = named[case.strategies[0]] if space.model.spanning else None
    options = space.fixed(load, tuple(choices), spanning)
    model = source(case.family, case.vocabulary, case.length)
    tracked = track(model, space.model, choices, spanning, load).peak.total_bytes
    return (peak_memory(options, load).total_bytes - tracked) / tracked


@pytest.mark.parametrize(
    "case",
    [
        Case(("shard",)),
        Case(("shard_grad",)),
        Case(("group_shard:4",)),
        Case(("replicate",)),
        Case(("shard",), vocabulary=50257),
        Case(("group_shard:2",), vocabulary=50257, precision="bf16"),
        Case(("shard", "replicate", "shard_grad"), vocabulary=8192),
        Case(("shard", "replicate", "shard_grad"), precision="bf16", ranks=4),
        Case(("shard",), recompute=1, micro_batch=4),
        Case(("shard_grad",), recompute=2, micro_batch=4, precision="bf16"),
        Case(("group_shard:2",), split="shard_grad"),
        Case(("shard",), accumulation=2),
        Case(("group_shard:4",), accumulation=2, ranks=64),
        Case(("shard",), ranks=64, micro_batch=1),
        Case(("shard",), family="llama", vocabulary=8192),
        Case(("shard_grad", "shard"), family="llama", vocabulary=8192, precision="bf16", recompute=1),
        Case(("shard",), family="bert", vocabulary=8192),
        Case(("shard", "replicate"), family="uneven"),
        # Where the end of backward is the peak: embeddings wait there with parameters and gradients.
        Case(("shard",), vocabulary=50257, ranks=3, micro_batch=1, recompute=1, length=64),
        Case(("shard",), family="uneven", vocabulary=50257, micro_batch=1, recompute=1, length=64),
    ],
    ids=str,
)
def test_prediction_is_what_fsdp2_holds(case: Case) -> None:
    assert -0.001 <= relative_error(case) <= 0.005
