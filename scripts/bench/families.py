"""Models as people write them, whose memory fidelity.py compares; each is `families:NAME` as a model of `osdp plan`.

Code of the model's own around its blocks, aliases that never run, batch norm in bf16, several losses, masks that all
layers share, long sequences, and models of transformers.  Sizes are such that activations are most of what is held.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

LENGTH = 512


class _Stack(nn.Module):
    """Tokens through blocks of two layers and what is around them, to a loss."""

    width, layers, vocabulary = 512, 8, 8192

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, self.width)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.layers))
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def block(self) -> nn.Module:
        width = self.width
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def around(self, x: Tensor) -> Tensor:
        """Hidden states (batch, LENGTH, width) through the blocks."""
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x

    def forward(self, tokens: Tensor) -> Any:
        """Tokens (batch, LENGTH) -> the loss."""
        logits = self.head(self.around(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randint(self.vocabulary, (batch, LENGTH)),), {}


class _Scaled(_Stack):
    def around(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = F.dropout(block(x), 0.1)
            x = F.layer_norm(0.5 * x + y * torch.sigmoid(y), (self.width,))
        return x


class _Aliased(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(self.vocabulary, self.width)  # as T5 has it: it never runs
        self.shared.weight = self.head.weight = self.embed.weight


class _TwoLosses(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x + F.silu(block(x))
            if index == self.layers // 2:
                early = F.cross_entropy(self.middle(x).flatten(0, 1), tokens.flatten())
        late = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        return late + 0.3 * early


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2) + bias.to(q.dtype)).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class _SharedMask(_Stack):
    """A bias of trained distances that the first layer's forward makes and all of them add."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(2 * LENGTH, 8)

    def block(self) -> nn.Module:
        return _Attention(self.width)

    def around(self, x: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=x.device)
        bias = self.distances(places[:, None] - places + LENGTH).permute(2, 0, 1)[None]
        for block in self.blocks:
            x = block(x, bias)
        return x


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 128, 7, stride=4, padding=3)
        self.blocks = nn.ModuleList(_Residual(128) for _ in range(6))
        self.head = nn.Linear(128, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 3, 128, 128) -> the loss."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.int64, device=logits.device))

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, 3, 128, 128),), {}


def _of_transformers(config: str, model: str, length: int, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a model of transformers with random weights, and the function that makes its inputs."""
    import transformers

    module = getattr(transformers, model)._from_config(getattr(transformers, config)(use_cache=False, **settings))
    vocabulary = settings["vocab_size"]

    def example_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = torch.randint(vocabulary, (batch, length))
        return (), {"input_ids": tokens, "labels": tokens}

    return module, example_inputs


_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
_LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}

user_code, scaled_sums, tied_alias, two_losses, shared_mask = _Stack, _Scaled, _Aliased, _TwoLosses, _SharedMask
batch_norm = _Convolutions
hf_llama = partial(
    _of_transformers, "LlamaConfig", "LlamaForCausalLM", 1024, num_hidden_layers=8, vocab_size=32000, **_LLAMA
)
hf_llama_8k = partial(
    _of_transformers, "LlamaConfig", "LlamaForCausalLM", 8192, num_hidden_layers=22, vocab_size=32000, **_LLAMA_1B
)
hf_gpt2 = partial(_of_transformers, "GPT2Config", "GPT2LMHeadModel", 1024, vocab_size=50257)
hf_t5 = partial(
    _of_transformers, "T5Config", "T5ForConditionalGeneration", 1024, vocab_size=32128, decoder_start_token_id=0
)
