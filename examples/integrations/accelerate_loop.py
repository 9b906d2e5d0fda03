"""accelerate's loop on a model that OSDP shards: torchrun --nproc_per_node 2 examples/integrations/accelerate_loop.py

A small network learns to add digits (accelerate; the extra `hf` for the last line).  Go on from step 5: --resume 5.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from osdp import OSDP
from osdp.integrations.accelerate import OsdpAccelerator

WIDTH, MICRO_BATCH, ACCUMULATION = 24, 2, 2
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--mem", default="1GB", help="memory limit per device")
parser.add_argument("--pins", nargs="*", default=[], help="strategies to begin with, as osdp plan --pin takes them")
parser.add_argument("--output", default="trained", help="where states go")
parser.add_argument("--resume", type=int, default=0, help="step to go on from, whose state is there")
parser.add_argument("--seed", type=int, default=0, help="of the parameters")
options = parser.parse_args()


class Adder(nn.Module):
    """Says which sum two digits have."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 19)

    def forward(self, digits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """(batch, 2) and (batch) -> the loss, and logits of shape (batch, 19)."""
        hidden = self.digits(digits).sum(1)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def example_inputs(self, batch: int) -> dict[str, Tensor]:
        """Return arguments of forward."""
        return {"digits": torch.randint(10, (batch, 2)), "labels": torch.randint(19, (batch,))}


def build() -> Adder:
    """Return the model, with parameters of the seed."""
    torch.manual_seed(options.seed)
    return Adder()


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Return pairs of digits, with their sums."""
    pairs = torch.randint(10, (count, 2), generator=torch.Generator().manual_seed(seed))
    return [{"digits": pair, "labels": pair.sum()} for pair in pairs]


if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
accelerator = OsdpAccelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATION)
description = {"optimizer": "adamw", "micro_batch": MICRO_BATCH, "pins": options.pins}
model: Any = OSDP(build(), description, options.mem)
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-2)
schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + 0.1 * count))
count = options.steps * ACCUMULATION * MICRO_BATCH * accelerator.num_processes
loader: Any = DataLoader(samples(count, seed=1), batch_size=MICRO_BATCH)
held_out: Any = DataLoader(samples(8, seed=2), batch_size=MICRO_BATCH)
model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)


def evaluate() -> float:
    """Return the loss over what was held out."""
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather(model(**batch)["loss"]) for batch in held_out]
    model.train()
    return float(torch.cat(losses).mean())


if options.resume:
    accelerator.load_state(f"{options.output}/state-{options.resume}")
losses, norms, evaluated, step, summed = [], [], {}, options.resume, torch.zeros(())
for batch in accelerator.skip_first_batches(loader, options.resume * ACCUMULATION):
    with accelerator.accumulate(model):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    summed = summed + accelerator.gather(loss.detach()).mean().cpu() / ACCUMULATION
    if accelerator.sync_gradients:
        losses.append(float(summed))
        step, summed = step + 1, torch.zeros(())
        accelerator.print(f"step {step}: loss {losses[-1]:.4f}")
        if step % 5 == 0:
            evaluated[step] = evaluate()
            accelerator.save_state(f"{options.output}/state-{step}")
accelerator.save_model(model, options.output)
accelerator.wait_for_everyone()
accelerator.end_training()
