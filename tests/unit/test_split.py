"""Linear layers in slices compute what they did in one piece."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trace_models import source

from planner.model.fsdp_units import check_split
from profiler.errors import OsdpError
from profiler.trace.trace import trace_model
from runtime.strategies.split_linear import SplitLinear, split_linear


@given(st.integers(1, 17), st.integers(1, 17), st.booleans(), st.sampled_from([(), (3,), (2, 3)]))
def test_computes_what_the_layer_does(features: int, slices: int, bias: bool, shape: tuple[int, ...]) -> None:
    count = min(slices, features)
    torch.manual_seed(features)
    linear = nn.Linear(features, 5, bias=bias, dtype=torch.float64)
    x = torch.randn(*shape, features, dtype=torch.float64, requires_grad=True)
    wanted = linear(x)
    gradients = torch.autograd.grad(wanted.pow(2).sum(), [x, *linear.parameters()])
    split = SplitLinear(linear, count)
    got = split(x)
    torch.testing.assert_close(got, wanted)
    layers = list(split.slices)
    parts = torch.autograd.grad(got.pow(2).sum(), [x, *(part.weight for part in layers)])
    torch.testing.assert_close(parts[0], gradients[0])
    torch.testing.assert_close(torch.cat(parts[1:], dim=1), gradients[1])
    assert torch.equal(torch.cat([part.weight for part in layers], dim=1), linear.weight)
    assert [part.bias is not None for part in layers] == [bias] + [False] * (count - 1)


def test_replaces_the_layer_in_its_model() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(7, 3)))
    linear = model[1][0]
    linear.weight.requires_grad_(False)
    split_linear(model, "1.0", 3)
    assert list(dict(model.named_parameters())) == [
        "1.0.slices.0.weight",
        "1.0.slices.0.bias",
        "1.0.slices.1.weight",
        "1.0.slices.2.weight",
    ]
    assert [part.weight.shape for part in model[1][0].slices] == [(3, 3), (3, 2), (3, 2)]
    assert [part.weight.requires_grad for part in model[1][0].slices] == [False] * 3
    assert model[1][0].slices[0].bias is linear.bias
    assert "in_features=7, out_features=3, slices=3" in repr(model)
    part = model[1][0].slices[1].weight
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == 4 * 3 * 2, "no slice keeps the whole weight alive"


def test_others_may_ask_what_the_weight_is_but_not_compute_with_it() -> None:
    linear = nn.Linear(7, 3).bfloat16()
    split = SplitLinear(linear, 2)
    for asked in ("shape", "dtype", "device", "ndim", "is_cuda"):
        assert getattr(split.weight, asked) == getattr(linear.weight, asked)
    assert isinstance(split.weight, torch.Tensor)
    assert split.weight.size(1) == split.weight.data.size()[1] == 7
    assert split.bias is linear.bias
    assert SplitLinear(nn.Linear(7, 3, bias=False), 2).bias is None
    assert [name for name, _ in split.named_parameters()] == ["slices.0.weight", "slices.0.bias", "slices.1.weight"]
    for compute in (lambda x: x @ split.weight.T, lambda x: x + split.weight.sum(), lambda x: split.weight.float()):
        with pytest.raises(OsdpError, match="outside of the layer's forward"):
            compute(torch.ones(7).bfloat16())


def test_slices_on_the_meta_device_need_no_data() -> None:
    model = nn.Sequential(nn.Linear(4, 2, device="meta"))
    split_linear(model, "0", 2)
    assert all(parameter.is_meta for parameter in model.parameters())


class Odd(nn.Linear):
    """A linear layer that does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice as much."""
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A linear layer under another name."""


def tied() -> nn.Module:
    """Return two layers with one weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def reused() -> nn.Module:
    """Return one layer in two places."""
    linear = nn.Linear(4, 4)
    return nn.Sequential(linear, nn.ReLU(), linear)


def hooked() -> nn.Module:
    """Return a layer of which a hook doubles the output."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda layer, args, output: 2 * output)
    return model


class Linear(nn.Module):
    """A layer that is only named so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> the same."""
        return x * self.weight.mean()


def doubled() -> nn.Linear:
    """Return a layer whose own forward is not that of its class."""
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


class Layers(nn.Module):
    """One plain linear layer, and others that cannot be split, one inside of a module that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.inner, self.hooked, self.own = (
            nn.Linear(4, 4),
            nn.Sequential(nn.Linear(4, 4)),
            hooked(),
            Linear(),
        )
        self.others = nn.ModuleDict({"inner": self.inner})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> a loss."""
        return self.own(self.hooked(self.inner(self.plain(x)))).square().mean()


def test_the_search_knows_what_cannot_be_split() -> None:
    """It once proposed plans that the runtime refused, and such that lost a layer's hooks."""
    operators = {one.name: one for one in trace_model(source(Layers, (4,))).operators}
    check_split(operators.pop("plain"), 2)
    assert {name: one.kind.partition("Linear")[2] for name, one in operators.items()} == {
        "inner.0": " in several places",
        "hooked.0": " with hooks",
        "own": f" of {__name__}",
    }
    for one in operators.values():
        with pytest.raises(OsdpError, match="cannot be split"):
            check_split(one, 2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(Odd(4, 4)), "Odd"),
        (nn.Sequential(nn.LayerNorm(4)), "LayerNorm"),
        (nn.Sequential(nn.Linear(1, 4)), "1 input features"),
        (tied(), "tied"),
        (reused(), "in several places"),
        (hooked(), "with hooks"),
        (nn.Sequential(doubled()), "with a forward of its own"),
    ],
)
def test_refuses_other_layers(model: nn.Module, words: str) -> None:
    before = repr(model)
    with pytest.raises(OsdpError, match=rf"cannot be split(.|\n)*{words}"):
        split_linear(model, "0", 2)
    assert repr(model) == before


def test_takes_subclasses_that_only_have_another_name() -> None:
    model = nn.Sequential(Named(4, 4))
    split_linear(model, "0", 2)
    assert isinstance(model[0], SplitLinear)
