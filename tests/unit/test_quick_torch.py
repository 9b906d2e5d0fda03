"""Kernels that tests put in place of PyTorch's: what a CPU computes in bf16 is what it should be."""

from __future__ import annotations

import pytest
import quick_torch
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

quick_torch.install()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


A, B, BIAS = drawn(5, 33), drawn(33, 7), drawn(7)
PRODUCTS = {
    "mm": lambda a, b, bias: a @ b,
    "addmm": lambda a, b, bias: torch.addmm(bias, a, b),
    "bmm": lambda a, b, bias: torch.bmm(a[None], b[None]),
    "baddbmm": lambda a, b, bias: torch.baddbmm(bias, a[None], b[None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_sums_in_more_than_bf16_rounded_once(name: str) -> None:
    found = PRODUCTS[name](A, B, BIAS)
    assert found.dtype is torch.bfloat16
    exact = PRODUCTS[name](A.double(), B.double(), BIAS.double())
    # Half a unit in the last of 8 bits, and what sums of fp32 are off by.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_mixed_dtypes_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        PRODUCTS[name](A, B.float(), BIAS)


def test_attention_keeps_its_dtypes_and_differs_by_rounding() -> None:
    query, key, value = (drawn(2, 3, 16, size)[..., :8].requires_grad_() for size in (8, 9, 10))
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    assert (out.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
    exact_inputs = [one.detach().double().requires_grad_() for one in (query, key, value)]
    exact = F.scaled_dot_product_attention(*exact_inputs)
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert {one.dtype for one in gradients} == {torch.bfloat16}
    for found, wanted in zip(gradients, torch.autograd.grad(exact.sum(), exact_inputs), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.05)
