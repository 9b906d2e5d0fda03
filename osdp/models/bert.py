"""BERT (Devlin et al., 2018): normalisation after each branch, masked tokens and next sentence."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from osdp.models.config import BertConfig
from osdp.models.layers import IGNORED, Embedding, Linear, merge_heads, random_tokens, split_heads, token_loss
from profiler.model_source import Inputs

EPSILON = 1e-12
MASKED_EVERY = 7
"""Example inputs mask one token in seven: close to the paper's 15 %, and never none."""


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocabulary_size, config.hidden_size)
        self.positions = Embedding(config.maximum_positions, config.hidden_size)
        self.token_types = Embedding(config.token_types, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """(batch, sequence) twice -> (batch, sequence, hidden)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        summed = self.tokens(input_ids) + self.positions(positions) + self.token_types(token_type_ids)
        out: Tensor = self.dropout(self.norm(summed))
        return out


class Layer(nn.Module):
    """norm(x + attention(x)), then norm(x + feed-forward(x))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_dropout = config.dropout
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)
        self.output = Linear(config.hidden_size, config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=EPSILON)
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, sequence, hidden) -> the same shape; `mask` (batch, 1, 1, sequence) is True to see."""
        query, key, value = (split_heads(part(x), self.heads) for part in (self.query, self.key, self.value))
        dropout = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        x = self.attention_norm(x + self.dropout(self.output(merge_heads(mixed))))
        out: Tensor = self.mlp_norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return out


class TokenHead(nn.Module):
    """Predicts the masked tokens; its last weight is the token embedding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=EPSILON)
        self.decoder = Linear(config.hidden_size, config.vocabulary_size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, vocabulary)."""
        return self.decoder(self.norm(F.gelu(self.dense(x))))


class Bert(nn.Module):
    """An encoder with both heads of BERT's pretraining."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.token_head = TokenHead(config)
        self.pooler = Linear(config.hidden_size, config.hidden_size)
        self.next_sentence_head = Linear(config.hidden_size, 2)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make decoder and embedding one parameter; again after `to_empty`, which separates them."""
        self.token_head.decoder.weight = self.embeddings.tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
        both_heads: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(batch, sequence) -> the scalar loss, or the token logits without `labels`.

        `labels` (batch, sequence) hold the token where it was masked and -100 elsewhere;
        `attention_mask` (batch, sequence) is not 0 where there is a token;
        `next_sentence_labels` (batch,), if given, adds the loss of the second head.  With `both_heads`
        its logits (batch, 2) come beside the token logits.
        """
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input_ids, types)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.token_head(x)
        if labels is None:
            return (logits, self._is_next(x)) if both_heads else logits
        loss = token_loss(logits, labels)
        if next_sentence_labels is None:
            return loss
        return loss + F.cross_entropy(self._is_next(x).float(), next_sentence_labels)

    def _is_next(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, 2), from the first token."""
        return self.next_sentence_head(torch.tanh(self.pooler(x[:, 0])))

    def example_inputs(self, batch: int, sequence_length: int | None = None) -> Inputs:
        """Return random arguments of `forward` that use both heads."""
        length = sequence_length or self.config.maximum_positions
        tokens = random_tokens(self, self.config.vocabulary_size, batch, length)
        is_masked = torch.arange(length, device=tokens.device) % MASKED_EVERY == 0
        return (tokens,), {
            "labels": torch.where(is_masked, tokens, IGNORED),
            "token_type_ids": random_tokens(self, self.config.token_types, batch, length),
            "next_sentence_labels": random_tokens(self, 2, batch, 1)[:, 0],
        }
