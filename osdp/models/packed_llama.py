"""A Llama whose sequences may be packs: several samples one after another, none of which sees another.

Every sample attends to itself, as if it stood alone; all other layers take the whole pack at once.  Where a sample
begins makes no difference, as rotary positions count relative to each other.  Attention runs sample by sample,
so that a pack costs what its samples cost: a block-diagonal mask over the whole pack would compute what it then
masks.  Parameters have Llama's names.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from osdp.models.config import LlamaConfig
from osdp.models.layers import IGNORED
from osdp.models.llama import Attention, Llama


class PackedAttention(Attention):
    """Causal self-attention of each sample to itself."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """As there; `lengths` are those of the samples in the sequence."""
        parts = (torch.split(part, list(lengths), dim=2) for part in (query, key, value))
        return torch.cat([Attention.mix(self, *sample) for sample in zip(*parts, strict=True)], dim=2)


class PackedLlama(Llama):
    """A Llama whose forward takes the lengths of the samples in a sequence."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, PackedAttention)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, lengths: Sequence[int] | None = None) -> Tensor:
        """(batch, sequence) -> the summed loss of the next token in each sample, or logits without `labels`.

        `lengths` are those of the samples in every sequence, one after another; None: each is one sample.
        The last token of a sample has no next one, so that a sample of one token has a loss of 0.
        """
        of_samples = list(lengths or input_ids.shape[1:2])
        logits = self._logits(input_ids, of_samples)
        return logits if labels is None else summed_loss(logits, labels, of_samples)


def summed_loss(logits: Tensor, labels: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the cross-entropy, summed in fp32, of each sample's labels given what comes before them in it.

    `logits` are (batch, sequence, vocabulary), `labels` (batch, sequence) and unshifted.
    """
    targets = labels.clone()
    for start in accumulate(lengths[:-1], initial=0):  # a list of them would be copied to the device, and waited for
        targets[:, start].fill_(IGNORED)
    predicted = logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(predicted, targets[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
