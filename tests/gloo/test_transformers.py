"""Models and optimizers of transformers as their users have them: what is saved is read back by `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import nn
from toys import refusal, seeded

TINY = {"vocab_size": 32, "tie_word_embeddings": True, "use_cache": False}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}


def llama() -> Any:
    """Return a decoder whose head is its embedding."""
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, **LLAMA))


def t5() -> Any:
    """Return an encoder and a decoder that share an embedding, which is the head too."""
    import transformers

    return transformers.T5ForConditionalGeneration(transformers.T5Config(**TINY, **T5))


def batch_of(size: int, seed: int = 0) -> tuple[tuple[()], dict[str, Any]]:
    """Return arguments of forward: tokens, and what each predicts."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (size, 6), generator=made)
    return (), {"input_ids": tokens, "labels": tokens.clone()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], steps: int = 2) -> None:
    """Train on the batches of these ranks."""
    for step in range(steps):
        sum(model(**batch_of(2, 10 * step + rank)[1]).loss / len(ranks) for rank in ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """Return transformers' own Adafactor."""
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=True)


def save_and_step(rank: int, folder: Path) -> list[str]:
    """Save models that were trained a little under several strategies; return how Adafactor is refused."""
    from osdp import OSDP

    said = []
    for build in (llama, t5):
        alone = seeded(build)
        train(alone, adafactor(alone), [0, 1])
        for pins in (["*=owner"], ["*=replicate"], ["*=shard", "*.1.*=owner"]):
            if len(pins) == 1 and (build is t5 or ("owner" not in pins[0] and not THOROUGH)):
                continue
            description = {"pins": pins, "micro_batch": 2, "sequence_length": 6}
            model = OSDP(seeded(build), description, example_inputs=batch_of)
            if pins in (["*=owner"], ["*=replicate"]):
                train(model, adafactor(model), [rank])
                wanted = {name: value.detach() for name, value in alone.state_dict().items()}
                got = model.full_state_dict(rank0_only=False)
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
            else:
                said.append(refusal(lambda: train(model, adafactor(model), [rank], 1)))  # noqa: B023
                model.zero_grad()
                train(model, torch.optim.SGD(model.parameters(), lr=0.1), [rank], 1)
            there = folder / f"{build.__name__}-{len(pins)}-{pins[0][2:]}"
            model.save_pretrained(there, max_shard_bytes=3000 if len(pins) == 2 else 1 << 30)
            trained = model.full_state_dict(rank0_only=False)
            torch.distributed.barrier()
            read, told = type(alone).from_pretrained(there, output_loading_info=True)
            assert not any(told.values()), told
            state = read.state_dict()
            assert state.keys() == trained.keys() == alone.state_dict().keys()
            for name, value in state.items():
                torch.testing.assert_close(value, trained[name], rtol=0, atol=0)
            assert read.get_output_embeddings().weight is read.get_input_embeddings().weight
            args = batch_of(2, 5)[1]
            torch.testing.assert_close(read(**args).loss, model(**args).loss, rtol=1e-5, atol=1e-6)
    return said


def test_from_pretrained_reads_what_was_saved_and_adafactor_gets_whole_matrices(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for said in run_ranks(save_and_step, 2, tmp_path):
        assert len(said) == 2
        assert all("Adafactor computes with whole tensors" in text for text in said)
