"""A small GPT-2 learns this file on the workers of Ray Train: python examples/cluster/ray_train.py --workers 2

Ray places the workers, sets RANK, WORLD_SIZE and the like, and joins them in a process group; inside, OSDP runs as
under torchrun. If a worker is lost, Ray starts all anew, once, and they go on from the checkpoint that was reported
last. On a cluster, with a folder that all nodes share:

    ray job submit --working-dir . -- python examples/cluster/ray_train.py --workers 16 --gpu --storage /shared/ray
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict[str, Any]) -> None:
    """Be one of the workers."""
    import torch

    from osdp.integrations.ray import prepare_model, report, resume
    from osdp.models.config import GPT2Config
    from osdp.models.gpt2 import GPT2

    device, rank = ray.train.torch.get_device(), ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=4, heads=4))
    model = prepare_model(model, {"optimizer": "adamw", "micro_batch": 8}, "4GB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = torch.tensor(list(settings["text"].encode()))
    done = (resume(model, optimizer) or {"step": 0})["step"]
    for step in range(done + 1, settings["steps"] + 1):
        draw = torch.Generator().manual_seed(1000 * step + rank)  # every rank and step its own samples
        starts = torch.randint(len(text) - 64, (8,), generator=draw)
        tokens = torch.stack([text[start : start + 64] for start in starts]).to(device)
        loss = model(tokens, labels=tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"step": step, "loss": loss.item()}
        if step % 10 == 0 or step == settings["steps"]:
            report(metrics, model, optimizer, {"step": step})  # with a checkpoint
        else:
            ray.train.report(metrics)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for every worker")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--storage", help="folder of Ray's results, which all nodes share; default: ~/ray_results")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "text": Path(__file__).read_text()},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        # OSDP exchanges sizes and messages on the CPU: gloo beside NCCL.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.gpu else "gloo"),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=1)),
    )
    found = trainer.fit()
    assert found.metrics is not None
    assert found.checkpoint is not None
    print(f"step {found.metrics['step']}: loss {found.metrics['loss']:.3f}; {found.checkpoint.path}")


if __name__ == "__main__":
    main()
