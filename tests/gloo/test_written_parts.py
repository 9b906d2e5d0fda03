"""Writes to parts of DTensors, and of whole tensors to them, and numbers of DTensors: as of plain tensors."""

from __future__ import annotations

import copy
import io
import math
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from layouts import layouts_of_four
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

from profiler.errors import OsdpError
from runtime.dtensor_rows import gathered
from runtime.dtensor_values import follow_values
from runtime.odc.pending_gradient import PendingGradient

READ_LATER = (
    *("r = p[:2]; p.mul_(2); p.copy_(r.sum() + p)", "r, t = p[0], p[:1]; r.zero_(); p.add_(t.sum())"),
    *("r = p.view(-1); p.mul_(2); q.add_(r.view_as(q)); p.copy_(q)", "r = p[0]; p.add_(1); p.mul_(p.new_ones(6) * r)"),
    *("r = p[:1]; p.mul_(2); q[:1] = r; q[1:] = r; p.copy_(q)", "r = p.view(-1); p.mul_(2); p.copy_(r[:6] + q)"),
)
"""Statements that read a part after its tensor has changed: before torch 2.13 only optimizers' steps see that."""
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
    *("r = p[0]; p.mul_(2); r.add_(1)", "r = p[:1]; p.zero_(); r.mul_(3)", "p[0].square_()", "r = p[0]; r **= 2"),
    *("a = p[:2]; b = p[1:3]; a.zero_(); b.add_(1)", "a = p[0]; b = p[0]; a.add_(1); b.mul_(2)", "p[0].clip_(max=3)"),
    *(
        "p[1:3].cumsum_(0)",
        "p[0].reciprocal_()",
        "p[m].zero_()",
        "p[[0, 0]].zero_()",
        "p.multiply_(w)",
        "p.clip_(max=w)",
    ),
    *("copy.deepcopy(p[0]).zero_()", "p[0].data = q[0]"),
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
    *("p.argmax(-1).sum()", "p.argmin(1, keepdim=True).sum()", "p.std(1).sum()", "p.topk(2)[0].sum()", "p.var((0, 1))"),
    *(
        "(p > 5).any(0).float().sum()",
        "(p > 9).all(1).float().sum()",
        "p.max(-1).values.max()",
        "p.kthvalue(2).values.sum()",
    ),
    *("(p * 0 + 60000).half().mean()", "(p * 0 + 1.5).bfloat16().mean()", "(p * 0 + 1.5).bfloat16().mean(0).sum()"),
    *(f"torch.where(p > 3, math.nan, p).{one}.isnan().float().sum()" for one in ("max()", "amin(0)", "norm(math.inf)")),
    *("torch.std_mean(p)[0]", "torch.var_mean(p, dim=0)[1].sum()", "p.logsumexp(0).sum()", "p.norm(-1)"),
    *("(p * 0 + 300).half().norm()", "p[0, :1].item()", "p[:1, 0] > 0", "float(p[:1, :1])"),
    *("sum(row.norm() for row in p)", "torch.count_nonzero(p > 9)"),
)
"""Numbers of parameters p and q."""
MODULES = {"torch": torch, "nn": nn, "copy": copy}


def written(code: str, p: Tensor, q: Tensor, w: Tensor) -> None:
    """Run a statement."""
    torch.manual_seed(3)
    with torch.no_grad():
        exec(code, MODULES, {"p": p, "q": q, "w": w, "m": torch.arange(len(w)) % 2 == 0})


def number(code: str, p: Tensor, q: Tensor) -> float:
    """Return a number of parameters."""
    with torch.no_grad():
        return float(eval(code, {"torch": torch, "math": math}, {"p": p, "q": q}))


def write(rank: int) -> list[str]:
    """Return which statements and numbers are others of DTensors than of plain tensors."""
    with patch("torch.accelerator.is_available", return_value=True):  # beside a GPU too, these ranks use the CPU
        follow_values("cpu")
    sharded, owned, sharded_in_groups, replicated = layouts_of_four(rank)
    wrong = list[str]()
    layouts = (5, sharded), (1, sharded), (5, owned), (4, sharded_in_groups)
    more = (4, sharded), (1, sharded_in_groups), (1, owned), (4, replicated)
    for rows, lay_out in (*layouts, *(more if THOROUGH else ())):  # rank 3 has none of five rows
        whole = torch.arange(1.0, 6 * rows + 1).view(rows, 6)
        for code in (*WRITES, *(READ_LATER if hasattr(FSDPModule, "reset_iter_state") else ())):
            p, other = whole.clone(), lay_out(whole)
            written(code, p, 10 * whole, 7 * whole)
            written(code, other, lay_out(10 * whole), 7 * whole)
            if not torch.allclose(gathered(other), p, rtol=1e-6):
                wrong.append(f"{code} of {rows} rows, {lay_out.__name__}")
        for code in NUMBERS:
            found = number(code, lay_out(whole), lay_out(5 - whole))
            if found != pytest.approx(number(code, whole, 5 - whole), rel=1e-6, nan_ok=True):
                wrong.append(f"{code} of {rows} rows, {lay_out.__name__}")
    return wrong + others(rank, init_device_mesh("cpu", (4,)))


def others(rank: int, mesh: DeviceMesh) -> list[str]:
    """Return what is wrong of layouts, of what is saved, and of gradients that are not complete."""
    whole, found = torch.arange(48.0).view(8, 6), dict[str, bool]()
    p = distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)
    rows = whole[2 * rank : 2 * rank + 2]
    for code in ("argmax(-1)", "max(1).values", "std(1)", "amin(1)", "any(1)", "norm(dim=1)", "mean(1)"):
        part = eval(f"p.{code}", {"p": p})
        is_in_parts = part.placements == (Shard(0),) and part.shape == (8,)
        found[f"{code} stays in parts"] = is_in_parts and torch.equal(part.to_local(), eval(f"p.{code}", {"p": rows}))
    found["topk stays in parts"] = p.topk(2).values.shape == (8, 2) and p.topk(2).values.to_local().shape == (2, 2)
    for code in ("argmax(-1)", "std(1)", "max()"):
        compiled = torch.compile(eval(f"lambda p: p.{code}"), backend="aot_eager", fullgraph=True)
        found[f"{code} compiled"] = torch.equal(gathered(compiled(p)), eval(f"p.{code}", {"p": whole}))
    file = io.BytesIO()
    torch.save(p[0], file)
    file.seek(0)
    kept = copy.deepcopy(nn.Parameter(p[:2]))
    found["a part may be a parameter"] = isinstance(kept, nn.Parameter) and kept.requires_grad
    try:
        p[0].add_(torch.ones(6, requires_grad=True))
        found["gradients of what is written are refused"] = False
    except OsdpError:
        found["gradients of what is written are refused"] = True
    with torch.inference_mode():
        p[0] = 0.0
    found["written in inference mode"] = float(p[0].abs().sum()) == 0.0
    p[0] = whole[0]
    found["a part is saved"] = torch.equal(gathered(torch.load(file, weights_only=False)), whole[0])
    pending = cast(Any, distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None))
    pending.__class__ = PendingGradient
    asks = hasattr(FSDPModule, "reset_iter_state")  # before 2.13 torch does not ask the class of a second operand
    for code in asks * ("p.addcmul_(g, p)", "p[0].add_(g[0])", "p[:] = g", "p.index_add_(0, torch.arange(8), g)"):
        try:
            with torch.no_grad():
                exec(code, {"torch": torch}, {"p": p, "g": pending})
            found[f"{code} is refused"] = False
        except OsdpError:
            found[f"{code} is refused"] = True
    return [what for what, is_right in found.items() if not is_right]


def test_parts_and_numbers_of_dtensors_are_those_of_plain_tensors() -> None:
    assert run_ranks(write, 4) == 4 * [[]]
