"""GPT-2 (Radford et al., 2019): learned positions, normalisation before each branch, tied head."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from osdp.models.config import GPT2Config
from osdp.models.layers import Embedding, Linear, merge_heads, next_token_loss, random_tokens, split_heads
from profiler.model_source import Inputs


class Attention(nn.Module):
    """Causal self-attention, (batch, sequence, hidden) -> the same shape."""

    def __init__(self, config: GPT2Config, residual_std: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = Linear(config.hidden_size, config.hidden_size, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every position to itself and to those before it."""
        query, key, value = (split_heads(part, self.heads) for part in self.query_key_value(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(merge_heads(mixed))


class MLP(nn.Module):
    """Feed-forward network, four times as wide inside."""

    def __init__(self, config: GPT2Config, residual_std: float) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = Linear(4 * config.hidden_size, config.hidden_size, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same shape."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        # Two branches a layer add to the residual stream: keep its variance at the start.
        residual_std = 0.02 / (2 * config.layers) ** 0.5
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config, residual_std)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config, residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class GPT2(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocabulary_size, config.hidden_size)
        self.wpe = Embedding(config.maximum_positions, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocabulary_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter; again after `to_empty`, which separates them."""
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """(batch, sequence) -> the scalar loss of the next token, or logits without `labels`.

        `labels` are the tokens themselves, unshifted; -100 is left out.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.wte(input_ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)

    def example_inputs(self, batch: int, sequence_length: int | None = None) -> Inputs:
        """Return random arguments of `forward`, labels included."""
        length = sequence_length or self.config.maximum_positions
        tokens = random_tokens(self, self.config.vocabulary_size, batch, length)
        return (tokens,), {"labels": tokens.clone()}
