"""Training on balanced batches: the losses of a single process on the same global batches, and the same batches
wherever they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import plan_of, seeded

from osdp.uneven_lengths.balanced_batches import BalancedBatchSampler
from osdp.uneven_lengths.packing import Cost

LENGTHS = [1 + (5 * i) % 13 for i in range(26)]
"""Two ranks, two micro-batches of three: two whole steps, and two samples that are left out."""
EPOCHS = 2


class Masked(nn.Module):
    """Learns from padded samples, of which each counts as much as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, 13, 6), torch.ones(batch, 13)), {}

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, length, 6), (batch, length) -> the mean over samples of their mean over what is not padding."""
        errors = (self.second(torch.tanh(self.first(x))) - x).pow(2).mean(-1) * mask
        return (errors.sum(-1) / mask.sum(-1)).mean()


class Samples:
    """Samples of `LENGTHS`."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(LENGTHS[index], 6, generator=torch.Generator().manual_seed(index))


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return samples (batch, length of the longest, 6) and where they are no padding."""
    x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return x, torch.stack([torch.arange(x.shape[1]) < len(sample) for sample in samples]).float()


def sampler_of(ranks: int | None = None, rank: int | None = None) -> BalancedBatchSampler:
    """Return the sampler of a rank, by default of this one."""
    cost = Cost(3.0, 1.0)
    return BalancedBatchSampler(LENGTHS, 3, 2, cost=cost, num_replicas=ranks, rank=rank, seed=7, drop_last=True)


def train(rank: int, strategy: str) -> tuple[list[float], list[list[int]]]:
    """Train on a rank's batches; return the loss of each step over all ranks, and the batches."""
    import torch.distributed as dist

    from osdp import OSDP

    model = seeded(Masked)
    model = OSDP(model, plan_of(model, strategy, accumulation=2, ranks=(1, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler, losses, batches = sampler_of(), [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        found = []
        for batch in DataLoader(Samples(), batch_sampler=sampler, collate_fn=padded):
            loss = model(*batch) / 2
            loss.backward()
            found.append(loss.detach())
            if len(found) == 2:
                optimizer.step()
                optimizer.zero_grad()
                total = torch.stack(found).sum()
                dist.all_reduce(total)
                losses.append(float(total) / dist.get_world_size())
                found = []
        batches += list(sampler)
    return losses, batches


@pytest.mark.parametrize("strategy", ["shard", "replicate"])
def test_losses_are_those_of_one_process(strategy: str) -> None:
    found = run_ranks(train, 2, strategy)
    reference = seeded(Masked)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    wanted, samples = [], Samples()
    for epoch in range(EPOCHS):
        everyone = [sampler_of(2, rank) for rank in range(2)]
        for sampler in everyone:
            sampler.set_epoch(epoch)
        epochs = [list(sampler) for sampler in everyone]
        for step in range(2):
            together = [index for own in epochs for batch in own[2 * step : 2 * step + 2] for index in batch]
            assert len(set(together)) == 12
            loss = reference(*padded([samples[index] for index in together]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(loss.item())
        # What ranks of a process group make of it is what anyone makes of their numbers.
        for (_, batches), own in zip(found, epochs, strict=True):
            assert batches[epoch * len(own) : (epoch + 1) * len(own)] == own
    assert wanted[-1] < wanted[0]
    for losses, _ in found:
        assert losses == pytest.approx(wanted, rel=1e-5)
