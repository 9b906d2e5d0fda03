"""What kernels refuse, a trace refuses: shapes made up for tensors without data are asked what kernels ask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from trace_models import source

from profiler.errors import OsdpError
from profiler.trace.trace import trace_model

ones = torch.ones
REFUSED: dict[str, Callable[[], Tensor]] = {
    "channels of one dimension": lambda: F.conv1d(ones(2, 5, 8), ones(4, 3, 3)),
    "channels of two dimensions": lambda: F.conv2d(ones(2, 5, 8, 8), ones(4, 3, 3, 3)),
    "channels of three dimensions": lambda: F.conv3d(ones(2, 5, 4, 4, 4), ones(4, 3, 3, 3, 3)),
    "channels of groups": lambda: F.conv2d(ones(2, 6, 8, 8), ones(4, 3, 3, 3), groups=3),
    "more channels than groups have": lambda: F.conv2d(ones(2, 6, 8, 8), ones(6, 6, 3, 3), groups=3),
    "channels of a transposed convolution": lambda: F.conv_transpose2d(ones(2, 5, 8, 8), ones(3, 4, 3, 3)),
    "a bias of another size": lambda: F.conv2d(ones(2, 3, 8, 8), ones(4, 3, 3, 3), ones(5)),
    "images smaller than a kernel": lambda: F.conv2d(ones(2, 3, 2, 2), ones(4, 3, 3, 3)),
    "weights of another rank": lambda: F.conv2d(ones(2, 3, 8, 8), ones(4, 3, 3)),
    "channels of a batch norm": lambda: F.batch_norm(ones(2, 5, 8), ones(3), ones(3), training=True),
    "channels of a group norm": lambda: F.group_norm(ones(2, 6, 8), 3, ones(5), ones(5)),
    "rows of a layer norm": lambda: F.layer_norm(ones(2, 5), (4,)),
    "rows and columns of a layer norm": lambda: F.layer_norm(ones(2, 4, 5), (5, 5)),
    "weights of a layer norm": lambda: F.layer_norm(ones(2, 5), (5,), ones(4)),
    "rows of an RMS norm": lambda: F.rms_norm(ones(2, 5), (4,), ones(4)),
    "columns of a product": lambda: F.linear(ones(2, 5), ones(3, 4)),
    "a bias of a product": lambda: F.linear(ones(2, 5), ones(3, 5), ones(4)),
    "products in a batch": lambda: torch.bmm(ones(2, 3, 4), ones(2, 5, 6)),
    "sums of products": lambda: torch.baddbmm(ones(2, 3, 7), ones(2, 3, 4), ones(2, 4, 6)),
    "widths of attention": lambda: F.scaled_dot_product_attention(*(ones(2, 2, 5, width) for width in (8, 4, 8))),
    "indices that are no integers": lambda: F.embedding(ones(2, 5), ones(3, 5)),
    "what is joined": lambda: torch.cat([ones(2, 3), ones(2, 4)]),
    "what is joined from the end": lambda: torch.cat([ones(2, 3), ones(3, 3)], dim=-1),
    "what is joined along no dimension": lambda: torch.cat([ones(2, 2), ones(2, 2)], dim=-3),
    "what is stacked": lambda: torch.stack([ones(2, 3), ones(2, 4)]),
    "what is added": lambda: ones(2, 3) + ones(2, 4),
    "a mask": lambda: ones(2, 3).masked_fill(ones(2, 4) > 0, 0.0),
    "targets": lambda: F.nll_loss(ones(2, 5), ones(3, dtype=torch.long)),
    "channels of a PReLU": lambda: F.prelu(ones(2, 5, 3), ones(4)),
}
TAKEN: dict[str, Callable[[], Tensor]] = {
    "groups": lambda: F.conv2d(ones(2, 6, 8, 8), ones(9, 2, 3, 3), ones(9), groups=3),
    "transposed groups": lambda: F.conv_transpose2d(ones(2, 6, 8, 8), ones(6, 2, 3, 3), ones(6), groups=3),
    "no samples": lambda: F.conv2d(ones(0, 3, 8, 8), ones(4, 3, 3, 3)),
    "one image": lambda: F.conv2d(ones(3, 8, 8), ones(4, 3, 3, 3)),
    "an image of the kernel's size": lambda: F.conv2d(ones(2, 3, 3, 3), ones(4, 3, 3, 3)),
    "an image with its padding": lambda: F.conv2d(ones(2, 3, 1, 1), ones(4, 3, 3, 3), padding=1),
    "joined from the end": lambda: torch.cat([ones(2, 3, 1), ones(2, 3, 4)], dim=-1),
    "joined in the middle": lambda: torch.cat([ones(2, 3, 1), ones(2, 4, 1)], dim=-2),
    "joined with nothing": lambda: torch.cat([ones(0), ones(2, 3)]),
    "rows and columns": lambda: F.layer_norm(ones(2, 4, 5), (4, 5), ones(4, 5)),
    "indices of 32 bits": lambda: F.embedding(ones(2, 5).int().zero_(), ones(3, 5)),
}


class Step(nn.Module):
    """A layer, and an op on what depends on no input."""

    def __init__(self, op: Callable[[], Tensor]) -> None:
        super().__init__()
        self.op, self.layer = op, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean() + self.op().sum()


@pytest.mark.parametrize("what", REFUSED)
def test_what_kernels_refuse_is_refused(what: str) -> None:
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        Step(REFUSED[what])(ones(2, 4))
    with pytest.raises(OsdpError, match="cannot trace"):
        trace_model(source(lambda: Step(REFUSED[what]), (4,)))


@pytest.mark.parametrize("what", TAKEN)
def test_what_kernels_take_is_taken(what: str) -> None:
    Step(TAKEN[what])(ones(2, 4)).backward()
    trace_model(source(lambda: Step(TAKEN[what]), (4,)))
