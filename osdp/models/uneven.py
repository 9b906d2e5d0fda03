"""An encoder-decoder in which no two neighbouring layers need to be equally wide.

Planners that take all layers as alike get it wrong; it is here so that ours cannot.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from osdp.models.config import UnevenConfig
from osdp.models.layers import Embedding, Linear, merge_heads, random_tokens, split_heads, token_loss
from profiler.model_source import Inputs


class Attention(nn.Module):
    """Attention from a stream of one width to a memory of another (or to itself)."""

    def __init__(self, width: int, memory_width: int, head_size: int) -> None:
        super().__init__()
        self.heads = width // head_size
        self.query = Linear(width, width)
        self.key_value = Linear(memory_width, 2 * width)
        self.output = Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, is_causal: bool) -> Tensor:
        """(batch, sequence, width), (batch, other sequence, memory width) -> (batch, sequence, width)."""
        query = split_heads(self.query(x), self.heads)
        key, value = (split_heads(part, self.heads) for part in self.key_value(memory).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return self.output(merge_heads(mixed))


class MLP(nn.Module):
    """Feed-forward network."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.up = Linear(width, expansion * width)
        self.down = Linear(expansion * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        return self.down(F.gelu(self.up(x)))


class EncoderLayer(nn.Module):
    """Brings the stream to this layer's width, then adds attention and feed-forward branches."""

    def __init__(self, input_width: int, width: int, config: UnevenConfig) -> None:
        super().__init__()
        self.bridge = Linear(input_width, width, bias=False) if input_width != width else nn.Identity()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, width, config.head_size)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, config.expansion)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, input width) -> (batch, sequence, width)."""
        x = self.bridge(x)
        normal = self.attention_norm(x)
        x = x + self.attention(normal, normal, is_causal=False)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class DecoderLayer(nn.Module):
    """Like EncoderLayer, causal, with a branch that attends to the encoder's output."""

    def __init__(self, input_width: int, width: int, memory_width: int, config: UnevenConfig) -> None:
        super().__init__()
        self.bridge = Linear(input_width, width, bias=False) if input_width != width else nn.Identity()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, width, config.head_size)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, memory_width, config.head_size)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, config.expansion)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """(batch, sequence, input width), (batch, source, memory width) -> (batch, sequence, width)."""
        x = self.bridge(x)
        normal = self.attention_norm(x)
        x = x + self.attention(normal, normal, is_causal=True)
        x = x + self.cross_attention(self.cross_norm(x), memory, is_causal=False)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Stem(nn.Module):
    """Token and position embeddings."""

    def __init__(self, config: UnevenConfig, width: int) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocabulary_size, width)
        self.positions = Embedding(config.maximum_positions, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, width)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.tokens(input_ids) + self.positions(positions)


class Uneven(nn.Module):
    """An encoder-decoder model with cross attention."""

    def __init__(self, config: UnevenConfig) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = config.encoder_widths, config.decoder_widths
        memory = encoder[-1]
        self.encoder_stem = Stem(config, encoder[0])
        self.encoder = nn.ModuleList(EncoderLayer(*pair, config) for pair in pairwise((encoder[0], *encoder)))
        self.encoder_norm = nn.LayerNorm(memory)
        self.decoder_stem = Stem(config, decoder[0])
        self.decoder = nn.ModuleList(DecoderLayer(*pair, memory, config) for pair in pairwise((decoder[0], *decoder)))
        self.decoder_norm = nn.LayerNorm(decoder[-1])
        self.lm_head = Linear(decoder[-1], config.vocabulary_size, bias=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        """(batch, source) -> the scalar loss of `labels` (batch, target), or logits without them.

        Without `decoder_input_ids` the decoder reads the labels, one place later, after a token 0;
        without labels too it reads the source in the same way.
        """
        if decoder_input_ids is None:
            target = input_ids if labels is None else labels.clamp(min=0)
            decoder_input_ids = F.pad(target[:, :-1], (1, 0))
        memory = self.encoder_stem(input_ids)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self.decoder_stem(decoder_input_ids)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = self.lm_head(self.decoder_norm(x))
        return logits if labels is None else token_loss(logits, labels)

    def example_inputs(self, batch: int, sequence_length: int | None = None) -> Inputs:
        """Return random arguments of `forward`: source and labels of the same length."""
        length = sequence_length or self.config.maximum_positions
        source = random_tokens(self, self.config.vocabulary_size, batch, length)
        return (source,), {"labels": random_tokens(self, self.config.vocabulary_size, batch, length)}
