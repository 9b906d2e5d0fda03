"""The tracer as a whole: shortcuts, losses, what it leaves alone, what repeats."""

from __future__ import annotations

import gc
import io
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trace_models import MEMORY_CASES, MLP, LanguageModel, language_model, source

import profiler.trace.trace
from profiler.affine import Affine
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.trace.dataless_device import FakeCpu
from profiler.trace.trace import trace_model
from profiler.trace.trace_errors import ModelError

TWO_LAYERS = language_model(width=64, heads=4, length=64, words=256, tie="use", layers=2)
"""A case with a layer less."""


@pytest.mark.parametrize(
    ("case", "precision", "device_type"),
    [
        (case, *setting)
        for number, case in enumerate(("tied in use", "dropout", "encoder-decoder with dropout", "rotary"), 1)
        for place, setting in enumerate((("fp32", "cpu"), ("bf16", "cuda")))
        if THOROUGH or number % 4 == place
    ]
    # In bf16 a CPU keeps batch statistics in bf16, the meta device like CUDA in fp32.
    + [("convolutions", "fp32", "cpu")],
)
def test_shortcuts_change_nothing(case: str, precision: str, device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph as with every op run by torch's FakeTensorMode; unless thorough, of two cases."""
    model = TWO_LAYERS if case == "tied in use" and not THOROUGH else MEMORY_CASES[case]
    quick = trace_model(model, precision, device_type)
    monkeypatch.setattr(profiler.trace.trace, "MetaDevice", FakeCpu)
    assert trace_model(model, precision, device_type) == quick


def test_a_model_that_wants_a_real_device_is_traced_on_fakes() -> None:
    class Model(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x)

    plain, wrapped = (
        trace_model(source(lambda: MLP(8, 16), (4, 8))),
        trace_model(source(lambda: Model(8, 16), (4, 8))),
    )
    assert wrapped == plain


class Truncated(MLP):
    """Draws its weights until they lie within bounds, of either width: torch draws those in two ways."""

    def __init__(self, *sizes: int, std: float = 0.02) -> None:
        super().__init__(*sizes)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=std)


@pytest.mark.parametrize("std", [0.02, 50.0])
def test_weights_drawn_within_bounds_are_drawn_on_fakes(std: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trace_model(source(lambda: MLP(8, 16), (4, 8)))
    monkeypatch.setattr(profiler.trace.trace, "MetaDevice", FakeCpu)
    assert trace_model(source(lambda: Truncated(8, 16, std=std), (4, 8))) == plain


def test_what_their_forward_raises_is_what_is_said() -> None:
    class Refusing(Truncated):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"an image of {x.shape[-1]} pixels")

    with pytest.raises(ModelError, match="an image of 8 pixels"):
        trace_model(source(lambda: Refusing(8, 16), (4, 8)))


def test_constants_in_the_model_do_not_count() -> None:
    class Model(MLP):
        buffer: Tensor

        def __init__(self) -> None:
            super().__init__(64, 64, 64)
            self.plain = torch.ones(64)
            with torch.device("cpu"):
                self.real = torch.ones(64)
            self.register_buffer("buffer", torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.plain * self.real * self.buffer)

    class Bare(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 * 3 * 4)

    graph, bare = trace_model(source(Model, (64,))), trace_model(source(lambda: Bare(64, 64, 64), (64,)))
    assert [call.saved_bytes for call in graph.calls] == [call.saved_bytes for call in bare.calls]
    assert [call.backward_peak_bytes for call in graph.calls] == [call.backward_peak_bytes for call in bare.calls]


def test_what_the_first_step_makes_and_keeps_is_live_at_every_moment() -> None:
    class Model(MLP):
        cached: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cached is None:
                self.cached = torch.ones(64, 64).tril()
            return super().forward(x @ self.cached)

    class Bare(MLP):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__(64, 64, 64)
            self.register_buffer("mask", torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.mask)

    graph, bare = trace_model(source(lambda: Model(64, 64, 64), (8, 64))), trace_model(source(Bare, (8, 64)))
    assert (graph.left_bytes, bare.left_bytes) == (Affine(4 * 64 * 64), Affine())
    for call, other in zip(graph.calls, bare.calls, strict=True):
        for name in ("forward_peak_bytes", "backward_peak_bytes"):
            assert getattr(call, name) == getattr(other, name)
        assert (call.forward, call.backward, call.saved_bytes) == (other.forward, other.backward, other.saved_bytes)


@pytest.mark.parametrize(
    "output",
    [
        lambda loss, logits: loss,
        lambda loss, logits: (logits, loss),
        lambda loss, logits: {"logits": logits, "loss": loss},
        lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    ],
    ids=["scalar", "tuple", "dict", "attribute"],
)
def test_the_loss_is_found(output: Callable[[Tensor, Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            logits = self.layer(x)
            return output(logits.square().mean(), logits)

    graph = trace_model(source(Model, (8,)))
    assert graph.notes == ()
    assert graph.calls[0].output_bytes == Affine(4, 0)


def test_without_a_scalar_the_outputs_are_summed_and_it_is_said() -> None:
    graph = trace_model(source(lambda: nn.Linear(8, 8), (8,)))
    assert any("sum" in note for note in graph.notes)


def test_the_users_module_is_left_alone() -> None:
    module = LanguageModel(dropout=0.1).eval()
    before = {name: (p, p.clone()) for name, p in module.named_parameters()}
    keys = [set(child.__dict__) for child in module.modules()]
    trace_model(source(lambda: module, (32,), classes=64), "bf16")
    assert not any(child.training for child in module.modules())
    assert [set(child.__dict__) for child in module.modules()] == keys
    for name, parameter in module.named_parameters():
        same, value = before[name]
        assert parameter is same
        assert parameter.grad is None
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, value)
    assert module.head.weight is module.words.weight


class Holding(nn.Module):
    """A layer, and something that cannot be copied."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), held

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


@pytest.mark.parametrize("held", [math, threading.Lock(), iter(()), (one for one in ()), [threading.local()]])
def test_what_cannot_be_copied_is_shared(held: Any) -> None:
    def of(held: Any) -> ModelSource:
        return ModelSource("holding", lambda: Holding(held), lambda _, batch: ((torch.randn(batch, 4),), {}), 1)

    assert trace_model(of(held), "bf16") == trace_model(of(None), "bf16")


def test_nothing_stays_behind() -> None:
    """No mode, no kernel, no hook: torch computes as before, with and without an error."""
    x = torch.ones(2, 2, 4, 8)
    for model in (language_model(), source(lambda: nn.Bilinear(2, 2, 2), (3,))):
        with suppress(OsdpError):
            trace_model(model, device_type="cuda")
        assert gc.isenabled()
        assert torch.ones(2).device.type == "cpu"
        assert F.scaled_dot_product_attention(x, x, x).sum().item() == x.numel()
        with _Names() as seen:
            leaf = torch.ones(8, requires_grad=True)
            F.dropout(leaf, 0.5)
        assert "aten::native_dropout" not in seen.names
        assert "aten::bernoulli_" in seen.names


class _Names(TorchDispatchMode):
    """Collects the names of the ops that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_the_fingerprint_depends_on_the_model_alone() -> None:
    graph = trace_model(language_model(layers=2))
    assert len(graph.fingerprint) == 16
    int(graph.fingerprint, 16)
    assert trace_model(language_model(layers=2)).fingerprint == graph.fingerprint
    for other in (
        language_model(hidden=(128, 129)),
        language_model(layers=2, length=16),
        language_model(layers=2, tie="no"),
        language_model(layers=1),
    ):
        assert trace_model(other).fingerprint != graph.fingerprint


SCRIPT = """
import torch
from trace_models import LanguageModel, language_model, source
from profiler.trace.trace import trace_model
from profiler.trace.trace_errors import ModelError

class Model(LanguageModel):
    # cumsum has no layout rule: torch's own kernel runs, and imports sympy in the very first pass.
    def forward(self, tokens):
        return super().forward(tokens) * self.words(tokens).cumsum(1).logsumexp(2).mean()

for _ in range(2):
    print(trace_model(source(lambda: Model(layers=1), (32,), classes=64)).fingerprint)
"""


def test_the_fingerprint_is_the_same_in_every_process_and_at_every_time() -> None:
    """In this process, which has traced before and hashes otherwise, and in a new one."""
    here = Path(__file__).parent
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(SCRIPT, {"__name__": "__main__"})
    prints = printed.getvalue().split()
    for seed in ("1", "2") if THOROUGH else ("1",):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        prints += done.stdout.split()
    assert len(prints) == (6 if THOROUGH else 4)
    assert len(set(prints)) == 1


def test_a_deep_model_takes_under_two_seconds() -> None:
    model = language_model(width=1600, heads=25, layers=48, words=50257, length=1024)
    start = time.process_time()
    graph = trace_model(model)
    assert time.process_time() - start < 2.0
    assert graph.numel == 50257 * 1600 + 1024 * 1600 + 48 * (12 * 1600 * 1600 + 13 * 1600) + 2 * 1600
