"""A linear layer cut into slices along its input features, which run one after another.

    y = x W^T + b = sum_i x_i W_i^T + b,    W = (W_1 ... W_k), x = (x_1 ... x_k)

Each slice is a module of its own, so each can be sharded by a strategy of its own and only one is
gathered at a time.  The bias is added once, by slice 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from planner.model.fsdp_units import split_bounds
from profiler.errors import OsdpError
from profiler.linear_layers import whole_linears


class SplitLinear(nn.Module):
    """A linear layer in slices, (..., in_features) -> (..., out_features)."""

    def __init__(self, linear: nn.Linear, count: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bounds = split_bounds(linear.in_features, count)
        self.slices = nn.ModuleList()
        for index in range(count):
            start, stop = self.bounds[index], self.bounds[index + 1]
            part = nn.Linear(stop - start, linear.out_features, bias=False, device="meta")
            weight = linear.weight.detach()[:, start:stop].clone()
            part.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
            if index == 0:
                part.bias = linear.bias
            self.slices.append(part)

    def forward(self, x: Tensor) -> Tensor:
        """Add up what the slices make of their features."""
        parts = torch.split(x, [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)], dim=-1)
        out: Tensor = self.slices[0](parts[0])
        for part, features in zip(self.slices[1:], parts[1:], strict=True):
            out = out + part(features)
        return out

    @property
    def weight(self) -> Tensor:
        """What code around the layer may ask of its weight: shape, dtype and device, but no values."""
        part: Any = self.slices[0].weight
        one = torch.empty(1, dtype=part.dtype, device=part.device)
        return one.expand(self.out_features, self.in_features).as_subclass(_Described)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, which slice 0 has."""
        bias: Any = self.slices[0].bias
        return bias  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Say how large it is."""
        return f"in_features={self.in_features}, out_features={self.out_features}, slices={len(self.slices)}"


class _Described(Tensor):
    """A tensor of which all is known but its values."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Raise OsdpError for what computes."""
        if func.__name__ != "__get__" and func not in _DESCRIBING:
            what = "the weight of a split layer is used outside of the layer's forward"
            advice = "call the layer, or pin it to a strategy without split"
            raise OsdpError(what, got=func.__name__, expected="its shape, dtype or device", advice=advice)
        return super().__torch_function__(func, *given, **options)  # type: ignore[no-untyped-call]


_DESCRIBING = (Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.is_floating_point, Tensor.__len__)


def split_linear(model: nn.Module, path: str, count: int) -> None:
    """Replace the linear layer at `path` by its slices.

    Raises OsdpError for what is no plain linear layer, or has fewer input features than slices.
    """
    linear = model.get_submodule(path)
    whole = whole_linears(model, named=type(linear).__name__)
    if path in whole:
        expected = "a torch.nn.Linear in one place and without hooks, or a subclass with its forward"
        raise OsdpError(f"{path} cannot be split", got=f"a {whole[path]}", expected=expected)
    assert isinstance(linear, nn.Linear)
    if linear.in_features < count:
        raise OsdpError(f"{path} cannot be split into {count} slices", got=f"{linear.in_features} input features")
    if sum(p is linear.weight for _, p in model.named_parameters(remove_duplicate=False)) > 1:
        raise OsdpError(f"{path} cannot be split", got="a layer whose weight is tied to others")
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent).register_module(name, SplitLinear(linear, count))
