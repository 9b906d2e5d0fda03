"""Parts that the zoo's models share.

Every module that owns parameters fills them in its own `reset_parameters`, so that a model built on
the meta device can be materialised shard by shard with the same distribution.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

IGNORED = -100
"""Label that adds nothing to the loss; PyTorch's default."""


class Linear(nn.Linear):
    """A linear layer whose weight starts as N(0, std) and whose bias starts at zero."""

    __call__: Callable[..., Tensor]

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = 0.02) -> None:
        self.std = std  # first, because nn.Linear's constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding whose rows start as N(0, 0.02)."""

    __call__: Callable[..., Tensor]

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, sequence, heads * size) -> (batch, heads, sequence, size)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(batch, heads, sequence, size) -> (batch, sequence, heads * size)."""
    return x.transpose(1, 2).flatten(2)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in fp32, over the labels that are not IGNORED.

    `logits` is (batch, sequence, vocabulary), `labels` (batch, sequence).
    """
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return `token_loss` of predicting each label from what comes before it."""
    return token_loss(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED))


def random_tokens(module: nn.Module, vocabulary_size: int, batch: int, length: int) -> Tensor:
    """Return (batch, length) random token numbers on the module's device."""
    device = next(module.parameters()).device
    return torch.randint(vocabulary_size, (batch, length), device=device)
