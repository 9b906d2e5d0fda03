"""Llama (Touvron et al., 2023): RMS normalisation, rotary positions, SwiGLU, grouped queries."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from osdp.models.config import LlamaConfig
from osdp.models.layers import Embedding, Linear, merge_heads, next_token_loss, random_tokens, split_heads
from profiler.model_source import Inputs


def rotary_angles(length: int, head_size: int, base: float, device: torch.device) -> Tensor:
    """Return the angles (length, head_size / 2) by which position p turns pair i: p * base^(-2i/size)."""
    pairs = torch.arange(0, head_size, 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    return torch.outer(positions, base ** (-pairs / head_size))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + size/2]) of (batch, heads, sequence, size) by the given angles."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.key_value_heads = config.key_value_heads
        key_value_size = config.hidden_size // config.heads * config.key_value_heads
        self.query = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = Linear(config.hidden_size, key_value_size, bias=False)
        self.value = Linear(config.hidden_size, key_value_size, bias=False)
        self.output = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, *of_blocks: Any) -> Tensor:
        """(batch, sequence, hidden) -> the same shape; angles are (sequence, head size / 2)."""
        query = rotate(split_heads(self.query(x), self.heads), cosine, sine)
        key = rotate(split_heads(self.key(x), self.key_value_heads), cosine, sine)
        value = split_heads(self.value(x), self.key_value_heads)
        # Repeated here, because not every attention kernel takes fewer key heads than query heads.
        if (shared := self.heads // self.key_value_heads) > 1:
            key = key.repeat_interleave(shared, dim=1)
            value = value.repeat_interleave(shared, dim=1)
        return self.output(merge_heads(self.mix(query, key, value, *of_blocks)))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(batch, heads, sequence, head size) three times -> the same shape."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.epsilon)
        self.attention = attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, *of_blocks: Any) -> Tensor:
        """(batch, sequence, hidden) -> the same shape; `of_blocks` are for the attention."""
        x = x + self.attention(self.attention_norm(x), cosine, sine, *of_blocks)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: LlamaConfig, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.epsilon)
        self.lm_head = Linear(config.hidden_size, config.vocabulary_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter, if the config says so; again after `to_empty`."""
        if self.config.tied_head:
            self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """(batch, sequence) -> the scalar loss of the next token, or logits without `labels`.

        `labels` are the tokens themselves, unshifted; -100 is left out.
        """
        logits = self._logits(input_ids)
        return logits if labels is None else next_token_loss(logits, labels)

    def _logits(self, input_ids: Tensor, *of_blocks: Any) -> Tensor:
        """(batch, sequence) -> (batch, sequence, vocabulary); `of_blocks` are more arguments of every block."""
        config = self.config
        head_size = config.hidden_size // config.heads
        # Made anew in each forward: a buffer would have to be filled again after `to_empty`.
        angles = rotary_angles(input_ids.shape[1], head_size, config.rope_base, input_ids.device)
        cosine, sine = angles.cos(), angles.sin()
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cosine, sine, *of_blocks)
        return self.lm_head(self.norm(x))

    def example_inputs(self, batch: int, sequence_length: int | None = None) -> Inputs:
        """Return random arguments of `forward`, labels included."""
        length = sequence_length or self.config.maximum_positions
        tokens = random_tokens(self, self.config.vocabulary_size, batch, length)
        return (tokens,), {"labels": tokens.clone()}
