"""The Trainer on a model that OSDP shards: torchrun --nproc_per_node 2 examples/integrations/transformers_trainer.py

A small decoder learns this file (the extra `hf`, accelerate).  Go on from a checkpoint: --resume trained/checkpoint-5.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from osdp import OSDP
from osdp.integrations.transformers import OsdpTrainer

LENGTH = 32
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--mem", default="1GB", help="memory limit per device")
parser.add_argument("--pins", nargs="*", default=[], help="strategies to begin with, as osdp plan --pin takes them")
parser.add_argument("--output", default="trained", help="where checkpoints go")
parser.add_argument("--resume", help="checkpoint to go on from")
parser.add_argument("--seed", type=int, default=0, help="of the parameters")
options = parser.parse_args()


def build() -> LlamaForCausalLM:
    """Return the model, with parameters of the seed."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(options.seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, **sizes))


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Return pieces of this file; of each the beginning, of another length each time, is not to be learnt."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = [text[8 * index : 8 * index + LENGTH] for index in range(count)]
    positions = torch.arange(LENGTH)
    labels = [piece.where(positions >= 5 * index % 23, -100) for index, piece in enumerate(pieces)]
    return [{"input_ids": piece, "labels": label} for piece, label in zip(pieces, labels, strict=True)]


def example_inputs(batch: int) -> dict[str, torch.Tensor]:
    """Return arguments of forward."""
    tokens = torch.randint(128, (batch, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
arguments = TrainingArguments(
    options.output,
    use_cpu=not torch.cuda.is_available(),
    max_steps=options.steps,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    train_sampling_strategy="sequential",
    learning_rate=1e-2,
    weight_decay=0.1,
    max_grad_norm=0.5,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    report_to="none",
    disable_tqdm=True,
)
description = {"optimizer": "adamw", "micro_batch": 2, "pins": options.pins}
model = OSDP(build(), description, options.mem, example_inputs=example_inputs)
trainer = OsdpTrainer(model, arguments, train_dataset=samples(32), eval_dataset=samples(8))
trainer.train(resume_from_checkpoint=options.resume)
trainer.end()
