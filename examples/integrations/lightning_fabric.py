"""A small GPT-2 learns this file with Lightning's Fabric: python examples/integrations/lightning_fabric.py

Fabric starts the ranks itself, or takes those of torchrun.
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from osdp.integrations.lightning import OSDPFabricStrategy
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2

ACCUMULATION = 2

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", default="lightning_fabric.ckpt")
options = parser.parse_args()

# What is new: plans for 4 GiB a device, and shards what fabric.setup is given.
strategy = OSDPFabricStrategy({"optimizer": "adamw", "micro_batch": 8}, "4GB")
fabric = lightning.Fabric(strategy=strategy, devices=options.devices)
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=4, heads=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = fabric.setup(model, optimizer)

text = torch.tensor(list(Path(__file__).read_bytes()))
windows = text.unfold(0, 64, 16)  # (samples, 64)
loader = fabric.setup_dataloaders(DataLoader(windows, 8, shuffle=True, drop_last=True))
for epoch in range(options.epochs):
    for index, tokens in enumerate(loader, 1):
        is_last = index % ACCUMULATION == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(tokens, labels=tokens)
            fabric.backward(loss / ACCUMULATION)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"epoch {epoch + 1}: loss {fabric.all_reduce(loss.detach()).item():.3f}")
fabric.save(options.save, {"model": model, "optimizer": optimizer})  # one file, for any plan and number of ranks
dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
dist.destroy_process_group()
