"""Models that cannot be traced: the error names module, op and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from torch import Tensor, nn
from trace_models import MLP, source

from osdp.models.user_factory import source_of
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.trace import questions
from profiler.trace.trace import trace_model


class Wrapped(nn.Module):
    """Two blocks; the second applies `strange` between its layers."""

    def __init__(self, strange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Strange(lambda x: x), Strange(strange)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Strange(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.then = Then(then)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self.layer(x))
        return out


class Then(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def error_of(model: ModelSource) -> OsdpError:
    with pytest.raises(OsdpError) as caught:
        trace_model(model)
    return caught.value


@torch.library.custom_op("osdp_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    """An op that works on data alone."""
    return x.clone()


class Inverting(torch.autograd.Function):
    """Looks at data in its backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * int(x.sum().long())


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    """Branch on data where no Python is."""
    if bool(x.sum() > 0):
        x = -x
    return x


@pytest.mark.parametrize(
    ("strange", "op", "advice"),
    [
        (lambda x: x[: int(x.sum().long())], "aten._local_scalar_dense", "example_inputs"),
        (lambda x: x if x.sum().item() > 0 else -x, "", "torch.where"),
        (lambda x: x[: int(x.sum().item())], "", "torch.where"),
        (lambda x: x if x.sum() > 0 else -x, "aten._local_scalar_dense", "torch.where"),
        (lambda x: x.repeat_interleave(x[:, 0].long(), 0), "aten.repeat_interleave", "example_inputs"),
        (lambda x: x if torch.equal(x > 0, x < 0) else -x, "aten.equal", "torch.where"),
        (lambda x: torch.ops.osdp_test.opaque(x), "osdp_test.opaque", "register_fake"),
        (lambda x: x @ torch.ones(3, 8), "aten.mm", "example inputs"),
        (lambda x: torch.func.grad(lambda y: y.pow(2).sum())(x), "", "torch.autograd.grad(..., create_graph=True)"),
        (lambda x: torch.func.vmap(torch.func.jacrev(torch.tanh))(x).sum(1), "", "torch.autograd.grad("),
        (scripted, "", "torch.jit.script"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "", "torch.where in place of torch.cond"),
        (lambda x: torch.nested.nested_tensor([x[:1], x]).sum(), "", "pad sequences"),
    ],
    ids=[
        *("number", "branch on a number", "whole number", "branch", "repeats", "equal", "custom op", "shape"),
        *("torch.func", "torch.func of samples", "TorchScript", "cond", "nested"),
    ],
)
def test_the_error_names_module_op_and_remedy(strange: Callable[[Tensor], Tensor], op: str, advice: str) -> None:
    error = error_of(source(lambda: Wrapped(strange), (8,)))
    assert "`blocks.1.then`" in error.what
    assert op in error.what
    assert advice in error.advice
    assert error.got
    assert " at 0x" not in error.got


def test_an_error_in_torchscript_shows_its_line() -> None:
    assert "`if bool(x.sum() > 0):`" in error_of(source(lambda: Wrapped(scripted), (8,))).got


def test_gradients_in_a_forward_are_traced_as_advised() -> None:
    def slopes(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.tanh().sum(), x, create_graph=True)[0]

    assert len(trace_model(source(lambda: Wrapped(slopes), (8,))).operators) == 2


def _to_raise(x: Tensor) -> Tensor:
    try:
        while True:
            x = x * 2
            if x.sum() > 3:
                raise RuntimeError
    except Exception:
        return x


def _to_return(x: Tensor) -> Tensor:
    with suppress(ZeroDivisionError):
        while True:
            x = x * 2
            if x.sum().item() > 3:
                raise ZeroDivisionError
    return x


class Doubling:
    """Yields a tensor doubled again and again, until its sum is large."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        self.x = self.x * 2
        if not self.x.sum() < 3:
            raise StopIteration
        return self.x


def _to_converge(x: Tensor) -> Tensor:
    while float(x.norm()) > 1e-3:
        x = x / 2
    return x


def _to_overflow(x: Tensor) -> Tensor:
    while not x.isinf().any():
        x = x * 2
    return x


def _to_choose(x: Tensor) -> Tensor:
    while x.argmax(-1).tolist()[0] != 99:
        x = x * 2
    return x


def _to_draw(x: Tensor) -> Tensor:
    while torch.rand(()) < 0.9:
        x = x * 2
    return x


def _to_empty(x: Tensor) -> Tensor:
    while len(x[x > 0]):
        x = x - 1
    return x


ENDLESS = (
    _to_raise,
    _to_return,
    lambda x: sum(Doubling(x)),
    _to_converge,
    _to_overflow,
    _to_choose,
    _to_draw,
    _to_empty,
)


@pytest.mark.parametrize("strange", ENDLESS)
def test_a_loop_that_only_data_ends_is_no_endless_trace(
    strange: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "MOST_QUESTIONS", 50)
    error = error_of(source(lambda: Wrapped(strange), (8,)))
    assert "`blocks.1.then`" in error.what
    assert re.search("50 questions .* line [0-9]+ of test_trace_errors.py", error.got)
    assert "for _ in range(rounds)" in error.advice


def test_questions_of_several_modules_and_passes_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(x: Tensor) -> Tensor:
        for _ in range(40):
            assert x.isfinite().all()
        return x

    monkeypatch.setattr(questions, "MOST_QUESTIONS", 50)
    model = source(lambda: nn.Sequential(Wrapped(checked).blocks[1], Wrapped(checked).blocks[1]), (8,))
    assert len(trace_model(model).operators) == 2


class Sparse(nn.Module):
    """A layer, and something sparse."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)
        if how == "buffer":
            self.register_buffer("matrix", torch.eye(4).to_sparse())
        elif how in ("Embedding", "EmbeddingBag"):
            self.words = getattr(nn, how)(9, 4, sparse=True)

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        if hasattr(self, "words"):
            x = self.words(x)
        elif self.how == "made":
            places = torch.arange(4).expand(2, 4)
            matrix = torch.sparse_coo_tensor(places, torch.ones(4), (4, 4))
        elif self.how == "buffer":
            matrix = self.matrix
        y = self.layer(x)
        return (y if matrix is None else torch.sparse.mm(matrix, y.mT).mT).pow(2).mean()


@pytest.mark.parametrize("how", ["input", "buffer", "made", "Embedding", "EmbeddingBag"])
def test_sparse_tensors_are_refused_with_what_to_write(how: str) -> None:
    def inputs(_: nn.Module, batch: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        if how.startswith("Embedding"):
            return (torch.zeros(batch, 4, dtype=torch.int64),), {}
        return (torch.randn(batch, 4), *((torch.eye(4).to_sparse(),) if how == "input" else ())), {}

    with pytest.raises(OsdpError, match=r"try: in place of a sparse matrix .*index_add.* sparse=False"):
        trace_model(ModelSource("sparse", lambda: Sparse(how), inputs, 1))


def test_of_two_errors_the_one_with_advice_is_shown() -> None:
    def strange(x: Tensor) -> Tensor:
        if not x.is_meta:
            raise RuntimeError("found a FakeTensor")
        return x if x.sum() > 0 else -x

    assert "torch.where" in error_of(source(lambda: Wrapped(strange), (8,))).advice

    def stranger(x: Tensor) -> Tensor:
        torch.autocast(x.device.type)  # refuses the meta device
        return x if x.sum() > 0 else -x

    assert "torch.where" in error_of(source(lambda: Wrapped(stranger), (8,))).advice


def test_an_error_of_the_models_own_names_the_module() -> None:
    def strange(x: Tensor) -> Tensor:
        raise KeyError("mask\nsecond line")

    error = error_of(source(lambda: Wrapped(strange), (8,)))
    assert "`blocks.1.then`" in error.what
    assert "KeyError" in error.got
    assert "mask" in error.got


def test_wrong_inputs() -> None:
    error = error_of(source(lambda: Wrapped(lambda x: x), (8,), (8,)))
    assert "model" in error.what
    assert "TypeError" in error.got
    assert "positional argument" in error.got
    assert "inputs" in error.advice


def test_an_error_in_the_backward_names_the_operator() -> None:
    error = error_of(source(lambda: Wrapped(Inverting.apply), (8,)))
    assert "backward" in error.what
    assert "`blocks.1.layer`" in error.what
    assert "aten._local_scalar_dense" in error.what


def test_a_caught_exception_does_not_mislead() -> None:
    def tolerant(x: Tensor) -> Tensor:
        try:
            x = x * int(x.sum().long())
        except RuntimeError:
            x = x * 2
        return x

    graph = trace_model(source(lambda: Wrapped(tolerant), (8,)))
    assert len(graph.calls) == 2


def test_build_that_looks_at_values() -> None:
    def build() -> nn.Module:
        return MLP(8, int(torch.randn(3)[1].long()))

    error = error_of(source(build, (8,)))
    assert "cannot build model" in error.what
    assert "item" in error.advice


def test_build_that_compares_its_weights() -> None:
    def build() -> nn.Module:
        model = Wrapped(torch.relu)
        for layer in [part for part in model.modules() if isinstance(part, nn.Linear)]:
            nn.utils.parametrizations.orthogonal(layer)  # is the weight orthogonal already?
        return model

    graph = trace_model(source(build, (8,)))
    assert graph.numel == sum(parameter.numel() for parameter in build().parameters())
    assert "tensors of floating-point numbers that are compared are assumed to differ" in graph.notes


def test_build_that_computes_with_constants() -> None:
    graph = trace_model(source(lambda: MLP(8, int(torch.linspace(0, 16, 3)[1].item())), (8,)))
    assert graph.operators[0].parameters[0].shape == (8, 8)


def test_build_that_returns_something_else() -> None:
    error = error_of(source(lambda: 3, (8,)))  # type: ignore[arg-type, return-value]
    assert error.got == "int"


def test_inputs_that_cannot_be_made() -> None:
    def inputs(module: nn.Module, batch: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        raise FileNotFoundError("no corpus")

    error = error_of(ModelSource("model", lambda: MLP(8, 8), inputs, 1))
    assert "inputs for model" in error.what
    assert "no corpus" in error.got


def test_nothing_to_plan() -> None:
    assert "has no parameters" in error_of(source(lambda: nn.ReLU(), (8,))).what


@pytest.mark.parametrize(
    "strange",
    [lambda x: x.detach(), lambda x: x > 0, torch.no_grad()(lambda x: x * 2)],
    ids=["detach", "bool", "no_grad"],
)
def test_a_loss_without_gradient(strange: Callable[[Tensor], Tensor]) -> None:
    error = error_of(source(lambda: nn.Sequential(nn.Linear(8, 8), Then(strange)), (8,)))
    assert "does not depend on any trainable parameter" in error.what


def test_lazy_modules() -> None:
    error = error_of(source(lambda: nn.LazyLinear(4), (8,)))
    assert "lazy" in error.what
    assert "nn.Linear" in error.advice


@pytest.mark.parametrize("model", [nn.LazyLinear(4), nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d())])
def test_modules_that_were_lazy_before_they_are_given(model: nn.Module) -> None:
    with pytest.raises(OsdpError, match="the model is lazy") as refused:
        source_of(model, "a model", None, lambda batch: (torch.empty(batch, 8),))
    assert "run a forward" in refused.value.advice
    model(torch.zeros(2, 8))
    assert source_of(model, "a model", None, lambda batch: (torch.empty(batch, 8),)).build()


def test_samples_that_interact_in_threes_are_not_linear() -> None:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(8, 16)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            features = self.tower(x)
            similar: Tensor = self.scale * features @ features.t()
            return (similar[:, :, None] * similar).logsumexp(1).sum()

    error = error_of(source(Contrastive, (8,)))
    assert "linearly" in error.what
    assert "`" in error.what
    assert "2" in error.got
    assert "fix the micro-batch" in error.advice
    assert not trace_model(source(Contrastive, (8,)), micro_batch=5).calls[0].saved_bytes.per_sample


class SomeRows(nn.Module):
    """Blocks that run for some of the samples, as with stochastic depth by batch, or for some of their rows."""

    def __init__(self, chosen: Callable[[int], int], width: int = 8) -> None:
        super().__init__()
        self.chosen, self.blocks = chosen, nn.ModuleList(MLP(width, 4 * width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, rows, width) -> a loss."""
        for block in self.blocks:
            rows = self.chosen(len(x))
            x = torch.cat([x[:rows] + block(x[:rows]), x[rows:]])
        return x.pow(2).sum()


class SharesOfValues(nn.Module):
    """Shares of the samples in what multiplies no matrices."""

    def __init__(self, chosen: Callable[[int], int], width: int) -> None:
        super().__init__()
        self.chosen, self.below, self.above = chosen, nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, rows, width) -> a loss."""
        x, rows = self.below(x), self.chosen(len(x))
        return self.above(torch.cat([x[:rows].exp().tanh().sigmoid(), x[rows:]])).pow(2).sum()


SHARES: list[Callable[[int], int]] = [
    lambda n: max(1, int(0.6 * n)),
    lambda n: int(0.55 * n),
    lambda n: (n + 1) // 2,
    lambda n: max(1, n // 4),
    lambda n: max(1, int(0.1 * n)),
]


@pytest.mark.parametrize(
    "build",
    [
        *(partial(SomeRows, share, 64) for share in SHARES),
        *(partial(SharesOfValues, share, 64) for share in SHARES[:3]),
    ],
)
def test_steps_that_small_micro_batches_do_not_show(build: Callable[[], nn.Module]) -> None:
    """Of 2, 4 and 6 samples, the first are 1, 2 and 3, and of 21 12 or 11, where the line says 10 and a half."""
    model = source(build, (16, 64))
    with pytest.raises(OsdpError) as refused:
        trace_model(model)
    assert re.search("micro-batch 33|at 33$", f"{refused.value.what} {refused.value.got}")
    assert "fix the micro-batch" in refused.value.advice
    graph, machine = trace_model(model, micro_batch=21), cluster(1, 4)
    plan = plan_of(graph, machine, {one.name: "shard" for one in graph.operators}, micro_batch=21)
    assert -0.002 <= compare(plan, model, graph, machine).error <= 0.01


@pytest.mark.parametrize("chosen", [lambda n: n // 2, lambda n: max(1, n // 2)])
def test_shares_that_are_never_above_the_line_are_planned(chosen: Callable[[int], int]) -> None:
    graph = trace_model(source(lambda: SomeRows(chosen), (2, 8)))
    assert graph.calls[0].forward.matmul_flops(100) >= 50 * 2 * 2 * 8 * 32


def test_a_loop_over_the_batch() -> None:
    class Looping(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([super(Looping, self).forward(row) for row in x]).sum()

    error = error_of(source(lambda: Looping(8, 8, 8), (8,)))
    assert "micro-batch 4" in error.what
    assert error.got.startswith("8 calls against 4")


def test_an_unknown_choice() -> None:
    for options in ({"precision": "fp8"}, {"device_type": "tpu"}):
        with pytest.raises(OsdpError, match=next(iter(options))) as caught:
            trace_model(source(lambda: MLP(8, 8), (8,)), **options)
        assert next(iter(options.values())) in caught.value.got
