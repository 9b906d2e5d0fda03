"""Writes to parts of DTensors, and of whole tensors to them, and numbers of DTensors: as of plain tensors."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from runtime.dtensor_rows import gathered
from runtime.dtensor_values import follow_values
from runtime.torch_compat import uneven_dtensor

WRITES = (
    *("p[0].zero_()", "p[0] = 0.", "p[-1] = q[0]", "p[0] *= 2", "p[1:3] = 0.", "p[1:3].zero_()", "p[:2] = q[:2]"),
    *("p[1:] -= 1", "p[p > 5] = 0.", "p[w > 50] = q[w > 50]", "p[m] = q[m]", "p[m] = w[m]", "p[[0, 0]] = 1."),
    *("p[:, 1] = 0.", "p[:, 1].zero_()", "p[0, 1] = 0.", "p[0, 1].add_(5)", "p[0][2] = 7.", "p[:2][0].fill_(3.)"),
    *("p[0].detach().zero_()", "p.data[0].data.zero_()", "r = p[0]; r += 1; r.sub_(3)", "p[...] = w", "p[:] = 0."),
    *("p.masked_fill_(w > 50, 0.)", "p.chunk(2)[0].zero_()", "p.split(2)[0].mul_(2)", "p.unbind(0)[0].zero_()"),
    *("p.view(-1)[:3].zero_()", "p.flatten()[:2].zero_()", "p.reshape(-1).mul_(3)", "p.t()[0].zero_()"),
    *("p.t()[:, 0].zero_()", "p.narrow(0, 0, 1).zero_()", "p.select(0, 0).zero_()", "p.diagonal().zero_()"),
    *("p.unsqueeze(0)[0, 0].zero_()", "p.fill_diagonal_(0.)", "p.tril_()", "p.index_fill_(0, torch.tensor([0]), 0.)"),
    *("p.copy_(w)", "p.data.copy_(w)", "p.add_(w, alpha=2)", "p.mul_(w[0])", "p.lerp_(w, 0.5)", "p += w"),
    *("p[0].copy_(w[-1])", "p.addcmul_(q, w, value=2.)", "p.clamp_(max=w)", "p.mul_(p.max())"),
    *("p.sub_(p.min())", "p.div_(p.abs().max())", "p.sub_(p.mean())", "nn.init.zeros_(p[0])"),
    *("p.div_(p.norm(dim=0, keepdim=True))", "p.div_(p.norm(dim=1, keepdim=True))", "p[:1].copy_(q[-1:])"),
    *("p.normal_()", "p.add_(torch.randn_like(p))", "p.uniform_(-1, 1); p[0].normal_()", "p.bernoulli_(0.5)"),
    *("nn.init.trunc_normal_(p)", "p.mul_(torch.rand_like(p))", "nn.init.kaiming_uniform_(p)"),
    "nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector([p, q]), [p, q])",
)
"""Statements on parameters p and q of some rows, a plain tensor w of their shape and a mask m of rows."""

NUMBERS = (
    *("p.norm()", "p.norm() + q.norm()", "torch.stack([p.norm(), q.norm()]).sum()", "p.norm(dim=0).sum()", "p.norm(1)"),
    *("torch.cat([p.norm().view(1), q.norm().view(1)]).sum()", "torch.linalg.vector_norm(p, dim=0).max()", "p.norm(3)"),
    *("p.norm(math.inf)", "p.norm(-math.inf)", "p.norm(0)", "p.norm(math.inf, dim=0).sum()", "p.norm(dim=1).sum()"),
    *("p.norm(dim=1, keepdim=True).sum()", "p.norm(dim=(0, 1), keepdim=True).sum()", "p.norm(dim=-2).norm()"),
    *("(p > 15).any().float()", "(p > 99).any().float()", "(p > 0).all().float()", "(p > 9).all().float()"),
    *("p.max()", "p.min() + 1", "-p.max()", "p.max() - p.min()", "torch.stack([p.max(), q.max()]).sum()"),
    *("p.mean()", "p.mean() + q.mean()", "p.sum() * 2", "(p > 3).sum()", "(p > 3).float().mean()", "p.isnan().any()"),
    *("p.norm().clamp(max=3)", "p.norm().mul_(2)", "max(p.norm(), q.norm())", "p[0].norm()", "p[-1].mean()"),
    *("p.mean(0).norm()", "p.mean(1).norm()", "p.sum(0).max()", "p.sum((0, 1))", "p.mean((0, 1), keepdim=True).sum()"),
    *("p.std()", "p.var(0).sum()", "(p / 9).prod()", "p.median()", "p.argmax()", "p.amax(0).sum()", "p.amin(1).sum()"),
    *(
        "p.max(dim=0).values.sum()",
        "p.max(dim=1).indices.sum()",
        "torch.histc(p, 5).max()",
        "p.view(-1).topk(3)[0].sum()",
    ),
    *("sum(row.norm() for row in p)", "torch.count_nonzero(p > 9)"),
)
"""Numbers of parameters p and q."""


def written(code: str, p: Tensor, q: Tensor, w: Tensor) -> None:
    """Run a statement."""
    torch.manual_seed(3)
    with torch.no_grad():
        exec(code, {"torch": torch, "nn": nn}, {"p": p, "q": q, "w": w, "m": torch.arange(len(w)) % 2 == 0})


def number(code: str, p: Tensor, q: Tensor) -> float:
    """Return a number of parameters."""
    with torch.no_grad():
        return float(eval(code, {"torch": torch, "math": math}, {"p": p, "q": q}))


def write(rank: int) -> list[str]:
    """Return which statements and numbers are others of DTensors than of plain tensors."""
    follow_values()
    mesh, groups, wrong = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2)), list[str]()

    def sharded(whole: Tensor) -> Tensor:
        return distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)

    def sharded_in_groups(whole: Tensor) -> Tensor:
        return distribute_tensor(whole.clone(), groups, [Replicate(), Shard(0)], src_data_rank=None)

    def owned(whole: Tensor) -> Tensor:
        return uneven_dtensor(whole.clone() if rank == 2 else whole[:0].clone(), mesh, whole.shape)

    def replicated(whole: Tensor) -> Tensor:
        return distribute_tensor(whole.clone(), mesh, [Replicate()], src_data_rank=None)

    layouts = (5, sharded), (1, sharded), (5, owned), (4, sharded_in_groups)
    more = (4, sharded), (1, sharded_in_groups), (1, owned), (4, replicated)
    for rows, lay_out in (*layouts, *(more if THOROUGH else ())):  # rank 3 has none of five rows
        whole = torch.arange(1.0, 6 * rows + 1).view(rows, 6)
        for code in WRITES:
            p, other = whole.clone(), lay_out(whole)
            written(code, p, 10 * whole, 7 * whole)
            written(code, other, lay_out(10 * whole), 7 * whole)
            if not torch.allclose(gathered(other), p, rtol=1e-6):
                wrong.append(f"{code} of {rows} rows, {lay_out.__name__}")
        for code in NUMBERS:
            found = number(code, lay_out(whole), lay_out(5 - whole))
            if found != pytest.approx(number(code, whole, 5 - whole), rel=1e-6, nan_ok=True):
                wrong.append(f"{code} of {rows} rows, {lay_out.__name__}")
    return wrong


def test_parts_and_numbers_of_dtensors_are_those_of_plain_tensors() -> None:
    assert run_ranks(write, 4) == 4 * [[]]
