"""What lives at most while each part of a model runs, against sizes by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.observe.part_peaks import PartPeak, PartPeaks

KIB = 1024
WIDTH = 512
"""A weight is 512 x 512 fp32, 1 MiB; a batch of 128 rows is 256 KiB."""
WEIGHT, ROWS = 1024 * KIB, 256 * KIB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.recomputes = Block(), Block(), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return 2 * checkpoint(self.second, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]
        return 2 * self.second(self.first(x))  # type: ignore[no-any-return]


def parts_of(model: nn.Module) -> list[PartPeak]:
    x = torch.zeros(128, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with PartPeaks() as live:
        live.hold([x, *model.parameters()])
        live.follow(model, ("first", "second", "second", "third"))
        live.follow_optimizer(optimizer)
        output = model(x)
        gradient = torch.ones_like(output)
        output.backward(gradient)
        optimizer.step()
        live.unwatch()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    return live.parts


def test_each_part_is_its_own_highest_moment() -> None:
    found = parts_of(Model())
    assert [(part.phase, part.name) for part in found] == [
        ("forward", ""),
        ("forward", "first"),
        ("forward", "second"),
        ("backward", ""),
        ("backward", "second"),
        ("backward", "first"),
        ("optimizer", ""),
    ]
    sizes = [part.total_bytes for part in found]
    rest = 2 * WEIGHT + ROWS
    # Outputs of both blocks and of the model; then the second block's is gone, and its gradient and the model's come.
    assert sizes[:4] == [rest, rest + ROWS, rest + 3 * ROWS, rest + 4 * ROWS]
    # The gradients of a weight and of a block's input; at the end those of both weights.
    assert sizes[4] == rest + 5 * ROWS + WEIGHT
    assert sizes[6] == rest + 2 * ROWS + 2 * WEIGHT


def test_a_forward_that_runs_again_is_backward() -> None:
    names = [(part.phase, part.name) for part in parts_of(Model(recomputes=True))]
    wanted = [
        ("backward", ""),
        ("backward", "second"),
        ("backward", "second"),
        ("backward", "first"),
        ("optimizer", ""),
    ]
    assert names[3:] == wanted
