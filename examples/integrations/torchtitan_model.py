"""A model of torchtitan's form learns this file: torchrun --nproc_per_node 2 examples/integrations/torchtitan_model.py

`Trainer` does, step by step, what torchtitan's does with a model, so that this runs without torchtitan: it makes the
model on the meta device, has it sharded by the `parallelize_fn` of its specification, fills it, and divides the sum of
losses by the tokens of all ranks.  docs/integrations.md says how torchtitan itself gets the function.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from osdp.integrations.torchtitan import parallelize

IGNORED = -100
"""Label of a token that does not count."""
WIDTH, HEADS, LAYERS, VOCABULARY = 32, 2, 4, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) -> the same shape."""
        heads = (
            one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        x = x + self.wo(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.w2(functional.silu(self.w1(self.ffn_norm(x))))

    def init_weights(self) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        for linear in (self.qkv, self.wo, self.w1, self.w2):
            nn.init.trunc_normal_(linear.weight, std=0.1)


class Decoder(nn.Module):
    """Has `init_weights`, and blocks in `layers` by number, as torchtitan wants it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", self.waves(), persistent=False)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def waves(self) -> Tensor:
        """(length, WIDTH): what tells places apart."""
        return torch.sin(torch.arange(self.length)[:, None] / 50 ** (torch.arange(WIDTH) / WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> logits, (batch, length, VOCABULARY)."""
        x = self.tok_embeddings(tokens) + self.positions
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        with torch.device(buffer_device or self.positions.device):
            self.positions = self.waves()
        nn.init.normal_(self.tok_embeddings.weight)
        for block in self.layers.values():
            block.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=0.1)


class Trainer:
    """Torchtitan's, as far as it has to do with the model."""

    def __init__(
        self, parallelize_fn: Callable[..., Any], make: Callable[[], nn.Module], training: Any, make_optimizer: Callable
    ) -> None:
        off = {f"{name}_enabled": False for name in ("tp", "cp", "pp", "ep", "dp_replicate")}
        parallel_dims = SimpleNamespace(world_size=dist.get_world_size(), **off)
        with torch.device("meta"):
            model = make()
        self.model = parallelize_fn(
            model, parallel_dims=parallel_dims, training=training, compile_config=SimpleNamespace(enable=False)
        )
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.model.train()
        self.max_norm, self.optimizer = training.max_norm, make_optimizer(self.model.parameters())

    def train_step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """Train on micro-batches of tokens and labels; return the loss per token over all ranks, and the norm."""
        self.optimizer.zero_grad()
        tokens = torch.stack([(labels != IGNORED).sum() for _, labels in micro_batches]).sum()
        dist.all_reduce(tokens)
        losses = []
        for inputs, labels in micro_batches:
            loss = summed_loss(self.model(inputs), labels) / tokens
            loss.backward()
            losses.append(loss.detach())
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        self.optimizer.step()
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        return total.item(), norm.item()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of the tokens that count."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )


def main() -> None:
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend)
    torch.manual_seed(0)
    training = SimpleNamespace(
        local_batch_size=8,
        global_batch_size=-1,
        seq_len=64,
        max_norm=1.0,
        mixed_precision_param="float32",
        enable_cpu_offload=False,
    )
    # What is new: plans for 4 GiB a device, and shards.
    parallelize_fn = parallelize({"optimizer": "adamw"}, "4GB")
    trainer = Trainer(parallelize_fn, lambda: Decoder(64), training, lambda own: torch.optim.AdamW(own, lr=3e-3))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 31):
        starts = torch.randint(len(text) - 65, (8,), generator=draw)
        windows = torch.stack([text[start : start + 65] for start in starts]).to(device)
        loss, _ = trainer.train_step([(windows[:, :-1], windows[:, 1:])])
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")
    dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
