"""The model and its data: y = x W_1' W_2' ... W_L' (and biases), and the mean squared distance to a target.

At full size, 8 layers of 16384 features and 8192 samples, in fp32:

    parameters     8 x (16384^2 + 16384) x 4 B = 8 GiB + 512 KiB
    x and target   2 x 8192 x 16384 x 4 B      = 1 GiB

which is, to the byte, the 9.00048828125 GiB that the tutorial prints after model creation.  That these are
its sizes is inferred from that figure.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LinearStack(nn.Module):
    """`layers` linear layers of `hidden` features in and out."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        made = [nn.Linear(hidden, hidden) for _ in range(layers)]
        for layer in made:
            # Each layer keeps the size of what goes in, so that every gradient counts.
            nn.init.normal_(layer.weight, std=hidden**-0.5)
        self.layers = nn.Sequential(*made)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """(batch, hidden), (batch, hidden) -> a loss."""
        return nn.functional.mse_loss(self.layers(x), target)

    def example_inputs(self, batch: int) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Return arguments of forward, from which OSDP traces the model."""
        return (torch.randn(batch, self.hidden), torch.randn(batch, self.hidden)), {}


def make_model(layers: int, hidden: int, device: torch.device) -> LinearStack:
    """Return the model, on every rank with the same values."""
    torch.manual_seed(0)
    with device:
        return LinearStack(layers, hidden)


def make_data(batch: int, hidden: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x and target, (batch, hidden) each, of which every rank has its own."""
    draw = torch.Generator(device).manual_seed(rank)
    x, target = (torch.randn(batch, hidden, generator=draw, device=device) for _ in range(2))
    return x, target


def learning_rate(hidden: int) -> float:
    """Return a step that the loss goes down by: it is a mean over features, and so are its gradients."""
    return 0.005 * hidden
