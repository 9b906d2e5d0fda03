"""FSDP2 with on-demand communication, ranks with uneven work: torchrun --nproc_per_node 2 examples/odc_fsdp2.py"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from osdp import odc
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.odc.fsdp import fsdp2
from osdp.tracing import Tracer

parser = argparse.ArgumentParser()
parser.add_argument("--trace", help="folder for each rank's memory over a step, and a Chrome trace of another")
options = parser.parse_args()

MICRO_BATCHES = 2  # of a step on average; a rank may do fewer or more

backend, device = "gloo", torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
dist.init_process_group(backend)
odc.init(accumulation=MICRO_BATCHES)  # 1. gradients become the mean over all micro-batches

torch.manual_seed(0)
model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=2, heads=4)).to(device)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
fsdp2.patch_lazy_init(model)  # 2. after fully_shard
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

text = torch.tensor(list(Path(__file__).read_bytes()))
tracer = Tracer(options.trace, model, optimizer)
draw = torch.Generator().manual_seed(dist.get_rank())  # every rank its own samples, and as many as it draws
for step in range(1, 41):
    with tracer.step():
        fsdp2.pre_minibatch_start(model)  # 3. publishes the parameters
        for _ in range(int(torch.randint(1, 4, (), generator=draw))):
            starts = torch.randint(len(text) - 64, (8,), generator=draw)
            tokens = torch.stack([text[start : start + 64] for start in starts]).to(device)
            loss = model(tokens, labels=tokens)
            (loss / MICRO_BATCHES).backward()
        fsdp2.pre_optimizer_step(model)  # 4. ranks meet here and nowhere else; gradients are complete
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

fsdp2.stop()  # 5. closes the windows; the model is FSDP2's own again
dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
dist.destroy_process_group()
