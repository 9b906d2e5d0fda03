"""What torchrun starts: `-m validation.first_steps DEVICE MODEL RESULT STRATEGY ...` trains two steps under each.

Rank 0 writes the losses to RESULT as JSON, and on a GPU what is left of it when this process has a context, and what
the communicator takes with its first collective, beside what PyTorch's allocator has; these before it trains already.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rehearsals import plan_of

from osdp import OSDP
from osdp.training.process_group import Ranks, joined
from osdp.zoo import load_cluster, load_model
from profiler.trace.metered_pass import find_loss
from profiler.trace.trace import trace_model
from runtime.optimizers import OPTIMIZERS
from runtime.own_gpu import own_gpu

CLUSTER = "h100-8"
TIMEOUT_S = 60.0


def main() -> None:
    """Be one rank."""
    device_type, model, result, *strategies = sys.argv[1:]
    found: dict[str, Any] = {}
    if device_type == "cuda":
        torch.zeros(1, device=own_gpu())
        found["free_with_context_bytes"] = free_bytes()
    with joined(device_type, TIMEOUT_S) as ranks:
        one = torch.ones(1, device=ranks.device)
        before = free_bytes() if device_type == "cuda" else 0
        dist.all_reduce(one)
        if device_type == "cuda":
            torch.cuda.synchronize()
            found["communicator_bytes"] = before - free_bytes()
        if ranks.rank == 0:
            Path(result).write_text(json.dumps(found))
        found["losses"] = {strategy: train(strategy, model, ranks) for strategy in strategies}
        gc.collect()
    if ranks.rank == 0:
        Path(result).write_text(json.dumps(found))


def train(strategy: str, model_name: str, ranks: Ranks) -> list[float]:
    """Return the losses of two steps on the same samples."""
    source, machine = load_model(model_name), load_cluster(CLUSTER, 1, ranks.world_size)
    graph = trace_model(source, "fp32", ranks.device.type)
    plan = plan_of(graph, machine, {operator.name: strategy for operator in graph.operators}, micro_batch=1)
    torch.manual_seed(0)
    with torch.device("meta"):
        without_data = source.build()
    inputs_of = partial(source.example_inputs, without_data)
    model = OSDP(source.build, plan, machine, example_inputs=inputs_of)
    optimizer = OPTIMIZERS["fused_adam"](model.parameters(), lr=1e-4)
    tokens = torch.arange(graph.sequence_length, device=ranks.device)[None] % 256
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = find_loss(model(tokens, labels=tokens))[0]
        loss.backward()
        optimizer.step()
        losses.append(ranks.mean(loss))
    return losses


def free_bytes() -> int:
    """Return what is free of this process's GPU, and what PyTorch's allocator has of it: what others leave."""
    gpu = own_gpu()
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)


if __name__ == "__main__":
    main()
