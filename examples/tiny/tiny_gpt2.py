"""What the programs of this folder share: options, a small GPT-2, text to learn, and the training loop."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.tracing import TRACE_STEP, Tracer
from osdp.zoo import load_model

SAMPLES = 8
"""Of a step, on all ranks together: so all programs train the same."""


def parse_options(description: str, **extra: dict[str, Any]) -> argparse.Namespace:
    """Return the options; `extra` are further ones, as `add_argument` takes them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="gpt2-tiny", help="a GPT-2 of `osdp models` (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default %(default)s)")
    parser.add_argument("--half", action="store_true", help="compute in bf16; parameters stay in fp32")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--trace", help="folder for each rank's memory over step 3 and a trace of step 4")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    for name, keywords in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    options = parser.parse_args()
    if options.trace and options.steps < TRACE_STEP:
        parser.error(f"--trace needs --steps {TRACE_STEP} or more")
    return options


def start() -> torch.device:
    """Join the ranks that torchrun started; return this one's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def build(options: argparse.Namespace) -> nn.Module:
    """Return the model, with the same parameters on every rank and in every program."""
    torch.manual_seed(0)
    return load_model(options.model).build()


def described(options: argparse.Namespace, pins: list[str]) -> dict[str, Any]:
    """Return what OSDP is told: the choice for every part of the model, and what else the options say."""
    return {
        "optimizer": "adamw",
        "precision": "bf16" if options.half else "fp32",
        "global_batch": SAMPLES,
        "micro_batch": max(1, SAMPLES // dist.get_world_size()),
        "pins": [*pins, "blocks.*=recompute" if options.recompute else "blocks.*=keep"],
    }


def batch(step: int, length: int) -> Tensor:
    """Return the tokens (samples, length) of a step: pieces of the licence of OSDP, byte by byte."""
    text = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()))
    starts = torch.randint(len(text) - length, (SAMPLES,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def train(name: str, model: nn.Module, options: argparse.Namespace, device: torch.device) -> None:
    """Train this rank's part of every batch; rank 0 prints the mean loss of each step."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tracer, losses = Tracer(options.trace, model, optimizer), []
    for step in range(1, options.steps + 1):
        tokens = batch(step, 64)[rank::ranks].to(device)
        with tracer.step():
            loss = model(tokens, labels=tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().float() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0 and not options.json:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if rank == 0 and options.json:
        print(json.dumps({"program": name, "ranks": ranks, "losses": losses}))
    if dist.is_initialized():
        dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
        dist.destroy_process_group()
