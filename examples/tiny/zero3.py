"""Every tensor whole on one rank: torchrun --nproc_per_node 2 examples/tiny/zero3.py"""

from collections import OrderedDict

import torch
import torch.distributed as dist
from tiny_gpt2 import build, described, parse_options, start, train

from osdp import OSDP
from osdp.partition import owner_pins, zero3_partition_tensors

options = parse_options(
    "Trains a small GPT-2 whose tensors have an owner each.",
    evenness_priority={"type": float, "default": 0.0, "help": "from 0 (neighbours together) to 1 (even)"},
)
device = start()
with torch.device("meta"):
    hollow = build(options)
parts, balance = zero3_partition_tensors(
    OrderedDict(hollow.named_parameters()),
    ranks_map=[f"{device.type}:{rank}" for rank in range(dist.get_world_size())],
    evenness_priority=options.evenness_priority,
    by_module=True,  # an owner broadcasts a module's parameters together
)
if dist.get_rank() == 0 and not options.json:
    kept = zip(balance.ranks, balance.bytes_by_rank, strict=True)
    told = ", ".join(f"{name} keeps {size / 2**20:.2f} MiB" for name, size in kept)
    print(f"{told}; the fullest rank has {balance.max_over_mean:.3f} of an even share")
model = OSDP(build(options), described(options, owner_pins(parts)))
train("zero3", model, options, device)
