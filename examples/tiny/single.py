"""One device, plain PyTorch, as the others should train too: python examples/tiny/single.py"""

from functools import partial

import torch
from tiny_gpt2 import build, parse_options, train
from torch.utils.checkpoint import checkpoint

options = parse_options("Trains a small GPT-2 on one device.")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = build(options).to(device)
if options.recompute:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
if options.half:
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
train("single", model, options, device)
