"""A buffer in fp32 that meets bf16 in an op of one dtype: refused when the model is traced, as its step would be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from profiler.mixed_precision import computing_in
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from profiler.trace.trace_errors import ModelError

FORMS = {
    "index_add": lambda held, x: held.index_add(0, torch.arange(len(x)), x),
    "index_copy": lambda held, x: held.index_copy(0, torch.arange(len(x)), x),
    "index_put": lambda held, x: held.index_put((torch.arange(len(x)),), x),
    "mm": lambda held, x: x @ held,
    "convolution": lambda held, x: F.conv1d(x[:, None], held[:1, None]),
    "addmm": lambda held, x: torch.addmm(held[: len(x)], x, x.new_ones(8, 8)),
}


class Meets(nn.Module):
    """A linear layer whose output meets a buffer."""

    def __init__(self, form: str, *, casts: bool) -> None:
        super().__init__()
        self.linear, self.form, self.casts = nn.Linear(8, 8), form, casts
        self.register_buffer("held", torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return {**FORMS, **OF_TORCH}[self.form](self.held.to(x.dtype) if self.casts else self.held, x).mean()


OF_TORCH = {
    "bmm": lambda held, x: (x[None] @ held[None]).sum(0),
    "einsum": lambda held, x: torch.einsum("ij,jk->ik", x, held),
    "attention": lambda held, x: F.scaled_dot_product_attention(x[None, None], held[None, None], held[None, None])[0],
}
"""Refused by torch itself, with or without data."""


def a_real_step(form: str, *, casts: bool) -> None:
    model = Meets(form, casts=casts)
    model.linear.to(torch.bfloat16)
    with computing_in(model, "bf16", "cpu"):
        model(torch.ones(2, 8)).backward()


@pytest.mark.parametrize("form", FORMS)
def test_what_a_step_refuses_is_refused_when_it_is_traced(form: str) -> None:
    source = ModelSource("meets", lambda: Meets(form, casts=False), lambda _, n: ((torch.ones(n, 8),), {}), 1)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type|type .* should be the same"):
        a_real_step(form, casts=False)
    with pytest.raises(ModelError) as refused:
        trace_model(source, "bf16")
    told = str(refused.value)
    assert f"at op aten.{form}" in told
    for part in ("one dtype", "float32", "bfloat16", "buffer.to(x.dtype)"):
        assert part in told


@pytest.mark.parametrize("form", OF_TORCH)
def test_what_torch_refuses_has_the_same_advice(form: str) -> None:
    source = ModelSource("meets", lambda: Meets(form, casts=False), lambda _, n: ((torch.ones(n, 8),), {}), 1)
    with pytest.raises(ModelError) as refused:
        trace_model(source, "bf16")
    assert "buffer.to(x.dtype)" in str(refused.value)


def test_what_is_cast_is_traced() -> None:
    a_real_step("index_add", casts=True)
    source = ModelSource("meets", lambda: Meets("index_add", casts=True), lambda _, n: ((torch.ones(n, 8),), {}), 1)
    assert trace_model(source, "bf16").calls
