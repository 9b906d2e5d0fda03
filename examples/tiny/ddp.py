"""A copy on every rank, gradients all-reduced: torchrun --nproc_per_node 2 examples/tiny/ddp.py"""

from tiny_gpt2 import build, described, parse_options, start, train

from osdp import OSDP

options = parse_options("Trains a small GPT-2 that every rank has a copy of.")
device = start()
model = OSDP(build(options), described(options, ["*=replicate"]))
train("ddp", model, options, device)
