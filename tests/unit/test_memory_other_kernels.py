"""Memory of operations that are not PyTorch's own: with kernels by device, or compiled by TorchScript."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn

from profiler.early_stops import is_early_stop
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, STEPS = 16, 32


def plainly(x: Tensor, rate: float) -> Tensor:
    """Return a state after some steps; for backward that keeps what each of them makes."""
    state = x
    for _ in range(3):
        state = torch.tanh(state * rate) + x.sigmoid()
    return state


@pytest.fixture
def leak() -> Iterator[Callable[[Tensor, float], Tensor]]:
    """An operation that has one kernel with one for its backward, but is made of others on a CPU."""
    with torch.library._scoped_library("osdp_test", "FRAGMENT") as library:
        library.define("leak(Tensor x, float rate) -> Tensor")
        library.define("leak_back(Tensor grad, Tensor out) -> Tensor")
        for name in ("leak", "leak_back"):
            library.impl(name, lambda x, _: torch.empty_like(x), "Meta")

        class Leak(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
                with torch._C._AutoDispatchBelowAutograd():
                    out: Tensor = torch.ops.osdp_test.leak(x, rate)
                ctx.save_for_backward(out)
                return out

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                return torch.ops.osdp_test.leak_back(grad, *ctx.saved_tensors), None

        library.impl("leak", lambda x, rate: Leak.apply(x, rate), "Autograd")
        library.impl("leak", plainly, "AutogradCPU")
        yield torch.ops.osdp_test.leak


class Between(nn.Module):
    """Something between two layers, several times."""

    def __init__(self, run: Callable[..., Tensor], *arguments: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.run, self.arguments = run, arguments

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer(x), *self.arguments)
        return x.square().mean()


def source(run: Callable[..., Tensor], *arguments: float) -> ModelSource:
    def inputs(_: nn.Module, batch: int) -> Any:
        return (torch.randn(batch, STEPS, WIDTH),), {}

    return ModelSource("between", lambda: Between(run, *arguments), inputs, STEPS)


def error_of(model: ModelSource, micro_batch: int) -> float:
    """Return how far the memory of a plan is from what a dry run of it holds."""
    graph, machine = trace_model(model), cluster(1, 2)
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=micro_batch)
    return compare(plan, model, graph, machine).error


def test_an_operation_is_traced_as_the_device_runs_it(leak: Callable[..., Tensor]) -> None:
    """What is made of others on a CPU keeps all that they keep; one kernel of a GPU keeps its output alone."""
    model = source(leak, 0.5)
    assert 0 <= error_of(model, 3) < 0.01
    as_one = trace_model(model, device_type="cuda").calls[1].saved_bytes(3)
    assert as_one == 3 * 4 * STEPS * WIDTH
    assert trace_model(model).calls[1].saved_bytes(3) >= 5 * as_one


@torch.jit.script
def smooth(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def gated(x: Tensor) -> Tensor:
    gate, other = x.chunk(2, -1)
    mixed = torch.sigmoid(gate) * torch.tanh(other)
    return torch.cat([mixed.exp() * mixed / (1 + mixed.abs()), gate], -1)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("run", [smooth, gated])
def test_what_torchscript_compiles_is_traced_as_it_runs_when_it_has_been_compiled(run: Any) -> None:
    """What it saves as it first runs, to be watched, is not what it saves from then on."""
    model = source(run)
    assert 0 <= error_of(model, 2) < 0.01


class Scripted(nn.Module):
    """A block that ends in TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = smooth(self.layer(x))
        return y


class Stack(nn.Module):
    """Such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Scripted() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_blocks_that_end_in_torchscript_can_be_recomputed() -> None:
    """Checkpoints end a forward that runs again early by an exception, of which TorchScript makes another."""
    inputs = lambda _, batch: ((torch.randn(batch, STEPS, WIDTH),), {})  # noqa: E731
    model, machine = ModelSource("stack", Stack, inputs, STEPS), cluster(1, 2)
    graph = trace_model(model)
    choices = {one.name: "shard" for one in graph.operators}
    plan = plan_of(graph, machine, choices, [block.name for block in graph.blocks], micro_batch=8)
    assert 0 <= compare(plan, model, graph, machine).error < 0.01


def test_other_errors_are_no_early_stops() -> None:
    @torch.jit.script
    def failing(x: Tensor) -> Tensor:
        return x.view(7, -1)

    with pytest.raises(RuntimeError) as raised:
        failing(torch.ones(3))
    assert not is_early_stop(raised.value)
    assert not is_early_stop(None)
