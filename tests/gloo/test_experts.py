"""Mixtures of experts on ranks, of which each routes other tokens, against the same training in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import Experts
from huggingface_cases import DEEPSEEK_PARTS
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH
from torch import Tensor, nn
from toys import Toy, plan_of, refusal, seeded

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 6},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 12, "head_dim": 8},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **DEEPSEEK_PARTS, "moe_intermediate_size": 12},
}


class Language(nn.Module):
    """A model of transformers that returns its loss."""

    def __init__(self, config: Path) -> None:
        super().__init__()
        from osdp.models.huggingface import load_hf

        self.inner = load_hf(f"hf:{config}", 5).build()

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randint(32, (batch, 5)),), {}

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


class Written(Toy):
    """Two mixtures of experts of which most get no token of a sample."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(6, 8, 6, 1, style) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        x = x[:, :2]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batches(model: nn.Module, step: int) -> Iterator[tuple[Any, ...]]:
    """Yield what each of two ranks gets."""
    for rank in range(2):
        torch.manual_seed(1000 * step + rank)
        yield model.example_inputs(1)[0]  # type: ignore[operator]


def train_all(rank: int, build: Callable[..., nn.Module], arguments: list[Any]) -> None:
    """Train several models one after the other, which saves starting the ranks."""
    for turn, argument in enumerate(arguments):
        train(rank, build, argument, turn)


def train(rank: int, build: Callable[..., nn.Module], argument: Any, turn: int) -> None:
    """Train under several plans, with and without recomputation; unless thorough, under one of two, in turn."""
    from osdp import OSDP

    reference = seeded(lambda: build(argument))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        (sum(reference(*args) for args in batches(reference, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = plan_of(build(argument), ranks=(1, 2))
    blocks = [name for name in dict(reference.named_modules()) if name.endswith((".layers.0", "blocks.0"))]
    mixed = {name: ("shard", "owner", "replicate")[i % 3] for i, name in enumerate(plan.choices)}
    assert len(blocks) == 1
    again = tuple(blocks)
    cases: list[tuple[dict[str, str], tuple[str, ...]]] = [(mixed, ()), ({}, again), (mixed, again), ({}, ())]
    for choices, recomputed in cases if THOROUGH else cases[turn % 2 :][:1]:
        plan = plan_of(build(argument), "shard", choices, recomputed=recomputed, ranks=(1, 2))
        model = OSDP(seeded(lambda: build(argument)), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model(*list(batches(reference, step))[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


def test_mixtures_of_transformers_train(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    configs = [tmp_path / f"{architecture}.json" for architecture in MODELS]
    for config, (architecture, sizes) in zip(configs, MODELS.items(), strict=True):
        config.write_text(json.dumps({**SIZES, **sizes, "architectures": [architecture]}))
    run_ranks(train_all, 2, Language, configs)


def test_experts_without_tokens_on_a_rank_train() -> None:
    run_ranks(train_all, 2, Written, ["where", "counts"], timeout_s=60)


def leave_out(rank: int) -> str:
    """Train experts that are skipped where they have no tokens, as far as that can be."""
    from osdp import OSDP

    reference = seeded(lambda: Written("hit"))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    model = OSDP(
        seeded(lambda: Written("hit")), plan_of(Written("hit"), "replicate", ranks=(1, 2)), find_unused_parameters=True
    )
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        given = list(batches(reference, step))
        (sum(reference(*args) for args in given) / 2).backward()
        model(*given[rank]).backward()
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
    torch.testing.assert_close(model.full_state_dict(rank0_only=False), dict(reference.state_dict()))
    return refusal(lambda: OSDP(Written("hit"), plan_of(Written("hit"), "shard", ranks=(1, 2))))


def test_experts_that_a_rank_leaves_out_are_refused_before_ranks_wait_for_each_other() -> None:
    for message in run_ranks(leave_out, 2, timeout_s=60):
        assert "`blocks.0.experts.1.0`" in message
        assert "find_unused_parameters=True" in message
