"""BERT sharded with groups by fairscale's auto_wrap: torchrun --nproc_per_node 4 examples/bert_auto_wrap.py"""

import argparse
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist

from osdp.fairscale import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args
from osdp.models.bert import Bert
from osdp.models.config import BertConfig
from osdp.tracing import TRACE_STEP, Tracer

LENGTH, HIDDEN = 32, 0  # bytes of a sentence; the token in place of a masked one
parser = argparse.ArgumentParser()
parser.add_argument(
    "--fsdp_args", default="group_sharding", choices=("group_sharding", "communication_with_groups", "none")
)
parser.add_argument("--nnodes", type=int, help="machines; the ranks of one may stand for several, by default for 2")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--trace", help="folder for each rank's memory over a step, and a Chrome trace of another")
options = parser.parse_args()
ranks, machines = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
nnodes = (machines if machines > 1 else 2) if options.nnodes is None else options.nnodes
if nnodes < 1 or ranks % nnodes:
    parser.error(f"{ranks} ranks do not divide evenly into {nnodes} machines: torchrun --nproc_per_node, or --nnodes")
if options.trace and options.steps < TRACE_STEP:
    parser.error(f"--trace needs --steps {TRACE_STEP} or more")

backend, device = "gloo", torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
dist.init_process_group(backend)

torch.manual_seed(0)
config = BertConfig(256, 2 * LENGTH, hidden_size=64, layers=2, heads=4, token_types=2, intermediate_size=256)
model = Bert(config).to(device)
fsdp_args = gen_fsdp_args(nnodes, ranks // nnodes, gsdp_type=options.fsdp_args, model_type="my-bert")
with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
    my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=4000)
    model = auto_wrap(model, auto_wrap_policy=my_auto_wrap_policy)
optim = torch.optim.Adam(model.parameters(), lr=0.001)

text = torch.tensor(list(Path(__file__).read_bytes()))
tracer = Tracer(options.trace, model, optim)
draw = torch.Generator().manual_seed(dist.get_rank())  # every rank its own samples
types = torch.tensor([0] * LENGTH + [1] * LENGTH).expand(8, -1)
for step in range(1, options.steps + 1):
    first, other = torch.randint(len(text) - 2 * LENGTH, (2, 8), generator=draw)
    is_random = torch.randint(2, (8,), generator=draw)
    second = torch.where(is_random.bool(), other, first + LENGTH)
    pairs = torch.cat([text.unfold(0, LENGTH, 1)[starts] for starts in (first, second)], dim=1)
    masked = torch.rand(pairs.shape, generator=draw) < 0.15
    inputs = {
        "input_ids": pairs.masked_fill(masked, HIDDEN),
        "labels": pairs.masked_fill(~masked, -100),
        "token_type_ids": types,
        "next_sentence_labels": is_random,
    }
    with tracer.step():
        loss = model(**{name: tensor.to(device) for name, tensor in inputs.items()})
        loss.backward()
        optim.step()
        optim.zero_grad()
    if dist.get_rank() == 0 and (step % 20 == 0 or step == options.steps):
        print(f"step {step}: loss {loss.item():.3f}")

dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
dist.destroy_process_group()
