"""A slice of every tensor on every rank: torchrun --nproc_per_node 2 examples/tiny/fsdp.py"""

from tiny_gpt2 import build, described, parse_options, start, train

from osdp import OSDP

options = parse_options("Trains a small GPT-2 whose tensors are sliced over the ranks.")
device = start()
model = OSDP(build(options), described(options, ["*=shard"]))
train("fsdp", model, options, device)
