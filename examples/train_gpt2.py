"""A small GPT-2 learns this file: torchrun --nproc_per_node 2 examples/train_gpt2.py"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from osdp import OSDP
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.tracing import Tracer

parser = argparse.ArgumentParser()
parser.add_argument("--trace", help="folder for each rank's memory over a step, and a Chrome trace of another")
options = parser.parse_args()

backend, device = "gloo", torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
dist.init_process_group(backend)  # 1. before the model is wrapped

torch.manual_seed(0)
model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=4, heads=4))
model = OSDP(model, {"optimizer": "adamw", "micro_batch": 8}, "4GB")  # 2. plans for 4 GiB a device, and shards
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

text = torch.tensor(list(Path(__file__).read_bytes()))
tracer = Tracer(options.trace, model, optimizer)
draw = torch.Generator().manual_seed(dist.get_rank())  # every rank its own samples
for step in range(1, 61):
    with tracer.step():
        starts = torch.randint(len(text) - 64, (8,), generator=draw)
        tokens = torch.stack([text[start : start + 64] for start in starts]).to(device)
        loss = model(tokens, labels=tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)  # 3. in place of torch.nn.utils.clip_grad_norm_
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

weights = model.full_state_dict()  # whole tensors under the names of GPT2, on rank 0
dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
dist.destroy_process_group()
