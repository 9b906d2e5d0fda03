"""Models that pack sequences, and hand them from block to block, train as in one process."""

from __future__ import annotations

from typing import Any

import torch
from thoroughness import some
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from toys import EVERY_RANK, STRATEGIES, Toy, graph_of, plan_of, run_everywhere, seeded, train_on

STEPS, WIDTH = 5, 6


class Block(nn.Module):
    """A recurrent layer and a branch beside it."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.out = kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=packed.data + self.out(self.layer(packed)[0].data))


class Packed(Toy):
    """Blocks of packed sequences, a layer of padded ones after them, and the last state of one more."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(nn.GRU), Block(nn.LSTM), Block(nn.LSTM)])
        self.end, self.last = nn.Linear(WIDTH, 2), nn.GRU(WIDTH, WIDTH, bidirectional=True)

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, STEPS, WIDTH), torch.randint(1, STEPS + 1, (batch,))), {}

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(batch, STEPS, WIDTH), (batch) -> a loss."""
        packed = pack_padded_sequence(self.begin(x), lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            packed = block(packed)
        padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=STEPS)
        return self.end(padded).pow(2).mean() + self.last(packed)[1].sin().mean()


def train_packed(rank: int) -> None:
    from osdp import OSDP

    reference = seeded(Packed)
    losses = train_on(EVERY_RANK, reference, Packed())
    graph = graph_of(Packed())
    names, blocks = [operator.name for operator in graph.operators], tuple(block.name for block in graph.blocks)
    mixed = {name: ("shard", "owner", "replicate")[index % 3] for index, name in enumerate(names)}
    for name, choices in (*((one, {}) for one in some(["shard", *STRATEGIES], 4)), ("shard", mixed)):
        plan = plan_of(Packed(), name, choices, recomputed=blocks[:1], selective=blocks[1:2], graph=graph)
        model = OSDP(seeded(Packed), plan)
        found = train_on((rank,), model, Packed())
        torch.testing.assert_close(found, losses[rank :: len(EVERY_RANK)], rtol=1e-5, atol=1e-6)
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-6)


def test_packed_sequences_train_as_in_one_process() -> None:
    run_everywhere(train_packed)
