"""A model on a device without its parameters, and what is left of that afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from trace_models import source

from profiler.errors import OsdpError
from profiler.timing.operator_times import measure_calls
from profiler.timing.shared_weights import build, shared_weights
from profiler.trace.trace import trace_model

CPU = torch.device("cpu")


class WithBuffers(nn.Module):
    """A buffer that is computed, one that forward changes, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.arange(16.0) + 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.frozen(self.up(x) * self.scale)).square().sum()
        return out


def test_buffers_are_computed_and_parameters_are_not() -> None:
    module = build(source(WithBuffers, (8,)), CPU)
    assert all(parameter.is_meta for parameter in module.parameters())
    with shared_weights(module, CPU, "bf16") as made:
        # Buffers, and batch norm, are not cast.
        assert torch.equal(module.get_buffer("scale"), torch.arange(16.0) + 1)
        dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"norm.weight", "norm.bias"}
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
        assert [parameter.requires_grad for parameter in module.parameters()] == [True, True, False, False, True, True]
        assert torch.equal(module.get_parameter("norm.weight").float(), torch.ones(16))
        assert len(made) == 6
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_module_that_the_user_holds_stays_as_it_is() -> None:
    module = WithBuffers().eval()
    model = source(lambda: module, (8,))
    graph = trace_model(source(WithBuffers, (8,)))
    before = {name: (id(tensor), tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    generator = torch.get_rng_state()
    measure_calls(model, graph, CPU, [4], repetitions=2)
    assert torch.equal(torch.get_rng_state(), generator)
    after = module.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == {name: known for name, (known, _) in before.items()}
    assert all(torch.equal(tensor, before[name][1]) for name, tensor in after.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not module.norm.training
    assert not any("forward" in part.__dict__ for part in module.modules())


def test_a_constructor_that_reads_its_parameters_is_refused() -> None:
    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.first = self.weight[0, 0].item()

    with pytest.raises(OsdpError, match="cannot build model"):
        build(source(Reads, (4,)), CPU)
