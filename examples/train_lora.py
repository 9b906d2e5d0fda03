"""Adapters of a bf16 decoder learn this file: torchrun --nproc_per_node 2 examples/train_lora.py (the extra `hf`, peft)

The frozen decoder has no gradients and no optimizer states.  Where it fits whole the plan replicates it, and nothing
gathers it; with less memory than that it is sharded: --mem 257MB, of which 256 are a CPU rank's own.
"""

import argparse
import os
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from osdp import OSDP

parser = argparse.ArgumentParser()
parser.add_argument("--mem", default="1GB", help="memory limit per device")
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()

backend, device = "gloo", torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
dist.init_process_group(backend)

sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=256, max_position_embeddings=64, use_cache=False, **sizes)
torch.manual_seed(0)
decoder = LlamaForCausalLM(config).to(torch.bfloat16)  # as LlamaForCausalLM.from_pretrained(folder) gives it
model = get_peft_model(decoder, LoraConfig(r=8, target_modules="all-linear"))  # the adapters are in fp32


def example_inputs(batch: int) -> dict[str, torch.Tensor]:
    """Return arguments of forward."""
    tokens = torch.randint(256, (batch, 64))
    return {"input_ids": tokens, "labels": tokens}


model = OSDP(model, {"optimizer": "adamw", "micro_batch": 4}, options.mem, example_inputs=example_inputs)
optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=1e-2)
if dist.get_rank() == 0:
    frozen = Counter(choice for name, choice in model.plan.choices.items() if "lora" not in name)
    print(f"frozen: {dict(frozen)}, predicted peak {model.plan.predicted.peak_memory_bytes / 2**20:.1f} MiB")

text = torch.tensor(list(Path(__file__).read_bytes()))
draw = torch.Generator().manual_seed(dist.get_rank())
for step in range(1, options.steps + 1):
    starts = torch.randint(len(text) - 64, (4,), generator=draw)
    tokens = torch.stack([text[start : start + 64] for start in starts]).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}: loss {loss.item():.3f}")

adapters = {name: tensor for name, tensor in model.full_state_dict().items() if "lora" in name}  # on rank 0
dist.barrier()
dist.destroy_process_group()
