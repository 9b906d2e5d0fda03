"""Memory of models some of whose parameters no gradient reaches, in a dry run: neither gradients nor states of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from rehearsals import compare, plan_of
from synthetic import cluster
from thoroughness import some
from torch import Tensor, nn
from torch.nn import functional

from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

WIDTH, TOKENS, LENGTH = 64, 96, 24


class Part(nn.Module):
    """A layer of a norm and two products, which may have more that its output does not depend on."""

    def __init__(self, extra: str, hidden: int) -> None:
        super().__init__()
        self.extra = extra
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        if extra == "a head":
            self.head = nn.Linear(hidden, 2 * WIDTH)
        elif extra == "a shift":
            self.shift = nn.Parameter(torch.zeros(40, WIDTH))
        elif extra == "a detached product":
            self.aside = nn.Linear(WIDTH, WIDTH)
        elif extra == "an unread bias":
            self.down = Unread(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, LENGTH, WIDTH) -> the same."""
        hidden = functional.gelu(self.up(self.norm(x)))
        if self.extra == "a head":
            self.head(hidden).tanh()
        elif self.extra == "a detached product":
            hidden = hidden * self.aside(x).sigmoid().detach().mean()
        return x + self.down(hidden)


class Unread(nn.Linear):
    """A layer with a second weight, which it never reads."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__(features, out)
        self.second = nn.Parameter(torch.zeros(out, features))

    def forward(self, x: Tensor) -> Tensor:
        """As of a plain layer."""
        return functional.linear(x, self.weight, self.bias)


EXTRAS = ("", "a head", "a shift", "a detached product", "an unread bias")


class Drawn(nn.Module):
    """A stack of such layers, maybe with a teacher whose output is detached, and a pooler."""

    def __init__(self, number: int) -> None:
        super().__init__()
        draw = Random(number)
        extra, hidden = draw.choice(EXTRAS), draw.choice((128, 512))
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Part(extra, hidden) for _ in range(draw.choice((2, 3))))
        if draw.random() < 0.3:
            self.layers[0] = Part(draw.choice(EXTRAS), hidden)
        self.teacher = nn.ModuleList(Part("", hidden) for _ in range(draw.choice((0, 0, 2))))
        self.is_above = draw.random() < 0.5
        self.pooler = nn.Linear(WIDTH, 256) if draw.random() < 0.5 else None
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, LENGTH) -> a loss."""
        x = wanted = self.embed(tokens)
        for layer in () if self.is_above else self.teacher:
            wanted = layer(wanted)
        for layer in self.layers:
            x = layer(x)
        for layer in self.teacher if self.is_above else ():
            wanted = layer(wanted)
        if self.pooler is not None:
            self.pooler(x[:, 0]).tanh()
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        return loss + (x - wanted.detach()).square().mean() if len(self.teacher) else loss


@cache
def drawn(number: int) -> tuple[ModelSource, ModelGraph]:
    def inputs(module: nn.Module, batch: int) -> Any:
        return (torch.randint(TOKENS, (batch, LENGTH)),), {}

    source = ModelSource(f"unused {number}", lambda: Drawn(number), inputs, LENGTH)
    return source, trace_model(source)


CASES = [
    *product(
        (2, 11, 13, 17, 19, 22, 25, 28), ("shard", "shard_grad", "hierarchical", "secondary_shard:2"), (True, False)
    ),
    *product((13, 16, 22, 25), ("replicate", "shard+offload", "odc:2"), (True, False)),
]
"""Numbers of models, strategies, and whether blocks are recomputed."""


@pytest.mark.parametrize(("number", "strategy", "recomputes"), some(CASES, 11), ids=str)
def test_what_gets_no_gradient_has_none_and_no_states(number: int, strategy: str, recomputes: bool) -> None:
    """Counted, they would be up to three quarters of what the model holds."""
    _check(number, strategy, recomputes, highest=0.02)


@pytest.mark.parametrize(
    ("number", "strategy", "recomputes"),
    some([*product((0, 1, 20, 21, 22, 25), ("owner", "group_shard:2"), (True, False))], 7),
    ids=str,
)
def test_what_owners_gather_and_zeros_that_are_filled_in_are_counted(
    number: int, strategy: str, recomputes: bool
) -> None:
    """An owner's layer stays gathered where a block runs again alone, and what is all-reduced once per step has zeros.

    Elsewhere, it was counted up to 24 % too high.
    """
    _check(number, strategy, recomputes, highest=0.02)


def _check(number: int, strategy: str, recomputes: bool, *, highest: float) -> None:
    source, graph = drawn(number)
    draw = Random(f"{number} {strategy} {recomputes}")
    again = [block.name for block in graph.blocks]
    choices = {operator.name: strategy for operator in graph.operators}
    plan = plan_of(
        graph,
        cluster(2, 2),
        choices,
        again if recomputes else [],
        micro_batch=draw.choice((1, 4)),
        accumulation=draw.choice((1, 1, 2, 3)),
        optimizer=draw.choice(("adam", "adam", "sgd")),
    )
    found = compare(plan, source, graph, cluster(2, 2), with_data=True)
    print(number, strategy, recomputes, f"{found.error:+.2%}", found.predicted_phase)
    assert -0.003 <= found.error <= highest


def test_a_parameter_that_a_hook_steps_at_once_gets_a_gradient() -> None:
    def step(parameter: nn.Parameter) -> None:
        parameter.grad = None

    def build() -> nn.Module:
        module = Drawn(2)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return module

    source, _ = drawn(2)
    graph = trace_model(ModelSource("stepped by hooks", build, source.example_inputs, LENGTH))
    assert all(one.used for operator in graph.operators for one in operator.parameters)


class Several(nn.Module):
    """Returns outputs of three heads as `returned` says, and computes what it does not return."""

    def __init__(self, returned: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.returned, self.layer = returned, nn.Linear(WIDTH, WIDTH)
        self.head, self.features, self.unread = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        """(batch, WIDTH) -> what `returned` makes of a loss, features and a scale."""
        x = self.layer(x)
        self.unread(x).tanh()
        return self.returned(self.head(x).square().mean(), self.features(x).tanh(), self.scale.exp().sum())


SEVERAL: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a named loss, and features": lambda loss, features, scale: {"features": features, "loss": loss * scale},
    "features, and an auxiliary loss": lambda loss, features, scale: (features, loss * scale),
    "two losses": lambda loss, features, scale: (loss * scale, features.mean()),
    "features of two, and a scale": lambda loss, features, scale: (features, loss[None], scale),
}


@pytest.mark.parametrize("returned", SEVERAL)
def test_of_what_is_returned_a_loop_may_make_a_loss(returned: str) -> None:
    """Only of a loss that has that name no other output is part; that they are not differentiated is told."""
    build = partial(Several, SEVERAL[returned])
    source = ModelSource("several", build, lambda module, batch: ((torch.randn(batch, WIDTH),), {}), 1)
    graph = trace_model(source)
    used = {one.name: one.used for operator in graph.operators for one in operator.parameters}
    assert {name.partition(".")[0] for name, is_used in used.items() if not is_used} == {"unread"}
    told = [note for note in graph.notes if "no backward of those outputs" in note]
    assert bool(told) == (returned == "a named loss, and features")
    assert any("the sum of all" in note for note in graph.notes) != bool(told)
    choices = {operator.name: "shard" for operator in graph.operators}
    plan = plan_of(graph, cluster(2, 2), choices, micro_batch=64)
    assert -0.003 <= compare(plan, source, graph, cluster(2, 2), with_data=True).error <= 0.06


def test_a_loss_beside_outputs_that_it_depends_on_is_the_loss() -> None:
    """As models return it, `return loss, logits`: their sum would be another model's."""

    def returned(loss: Tensor, features: Tensor, scale: Tensor) -> Any:
        return (loss + features.square().mean()) * scale, features, scale

    source = ModelSource("a tuple", partial(Several, returned), lambda _, batch: ((torch.randn(batch, WIDTH),), {}), 1)
    assert not any("the sum of all" in note for note in trace_model(source).notes)
