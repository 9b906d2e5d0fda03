"""What optimizers that nobody knows compute in their steps: of sharded parameters as of plain ones.

Unless thorough, steps have a layout in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from layouts import layouts_of_four
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from toys import Blocks, batch_of, plan_of, refusal, seeded

from profiler.errors import OsdpError
from runtime.dtensor_operations import LISTS, AsWhole, way_of
from runtime.dtensor_rows import gathered
from runtime.dtensor_values import follow_values
from runtime.torch_compat import uneven_dtensor


def build() -> nn.Module:
    """Return the model that is trained."""
    return Blocks(frozen=False)


SAMPLE = build()
"""What batches and plans are made for."""

PREPARED = """
def newton_schulz(x):
    x = x / x.norm()
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x

def plain(name, shape):
    return s.setdefault(name, torch.zeros(shape))

def kept(name, like):
    return s.setdefault(name, torch.zeros_like(like))
"""
"""What the steps below use."""

STEPS = (
    # states that are plain tensors, of the whole or of rows and columns, beside sharded gradients
    "m = plain('m', p.shape); m.lerp_(g, 0.1); p.sub_(m)",
    "m = plain('m', p.shape); m.mul_(0.9).add_(g); p.sub_(m.sign(), alpha=0.01)",
    "m = plain('m', p.shape); torch.add(m, g, out=m); p.data.add_(-0.1 * m)",
    "r = plain('r', 5); r.mul_(0.9).add_(g.square().mean(-1), alpha=0.1); p.sub_(g / (r.sqrt() + 1)[:, None])",
    "c = plain('c', 6); c.mul_(0.9).add_(g.square().mean(-2)); p.sub_(g * c.rsqrt().unsqueeze(-2))",
    "r = g.square().mean(-1); c = g.square().mean(0); p.sub_(g / torch.outer(r, c).sqrt())",
    "r, c = g.square().mean(-1), g.square().mean(0); u = torch.empty_like(p); "
    "torch.mul((r / r.mean()).rsqrt_().unsqueeze(-1), c.unsqueeze(0).rsqrt(), out=u); p.sub_(u.mul_(g))",
    "r = kept('r', g[:, 0]); r.copy_(g.amax(1)); p.sub_(g / r.unsqueeze(1))",
    "t = plain('t', ()); t.add_(g.abs().sum()); p.sub_(g / t)",
    "t = plain('t', 1); t += g.norm(); p.sub_(g / t)",
    "p.sub_(torch.where(torch.arange(5)[:, None] % 2 == 0, g, 0.5 * g))",
    "p.add_(g.mul(torch.arange(6.0)), alpha=-0.01); p.div_(1 + torch.ones(5, 1))",
    "m = g.new_zeros(g.shape); m.add_(g); n = g.new_full((6,), 0.5); p.sub_(m * n)",
    # numbers that are changed in place, and what is computed of them
    "n = g.square().mean().sqrt_().add_(1e-3); p.sub_(g / n)",
    "n = g.square().sum(); n.mul_(2).sqrt_().clamp_(min=1); p.sub_(g / n)",
    "n = g.norm(); n.pow_(2); t = kept('t', n); t.lerp_(n, 0.5); p.sub_(g / t.sqrt())",
    "n = g.mean(1, keepdim=True); n.mul_(0.5); g.sub_(n); p.sub_(g)",
    "n = g.mean(0, keepdim=True); n.abs_().add_(1); p.sub_(g / n)",
    "p.sub_(g * (p.norm() / g.norm()).clamp_(max=10) * 0.01)",
    "p.sub_(g * torch.where(p.norm() > 0, torch.where(g.norm() > 0, p.norm() / g.norm(), 1.0), 1.0), alpha=0.01)",
    "n = torch.maximum(p.norm(dim=1, keepdim=True), torch.tensor(1e-3)); p.sub_(g / g.norm(dim=1, keepdim=True) * n)",
    "if float(g.abs().max()) > 3 and bool(g.isfinite().all()): p.sub_(g, alpha=0.1)",
    "p.sub_(g * torch.nn.functional.cosine_similarity(p.view(1, -1), g.view(1, -1), eps=1e-8))",
    "p.sub_(torch.nn.functional.normalize(g, dim=0)); p.sub_(torch.softmax(g, 0))",
    "p.sub_(g - (p * g).sum() / (p * p).sum() * p)",
    # products, decompositions, sorts
    "p.sub_(newton_schulz(g))",
    "l = plain('l', (5, 5)); l.mul_(0.9).add_(g @ g.T); p.sub_(torch.linalg.solve(l + torch.eye(5), g))",
    "r = plain('r', (6, 6)); r.addmm_(g.T, g, beta=0.9, alpha=0.1); p.sub_(g @ torch.linalg.inv(r + torch.eye(6)))",
    "l = plain('l', (1, 5, 5)); l.baddbmm_(g[None], g[None].mT); p.sub_(torch.linalg.inv(l[0] + torch.eye(5)) @ g)",
    "l, v = torch.linalg.eigh(g @ g.T + torch.eye(5)); p.sub_(v @ (l.rsqrt()[:, None] * (v.T @ g)))",
    "u, z, v = torch.linalg.svd(g, full_matrices=False); p.sub_(u[:, :2] * z[:2] @ v[:2])",
    "q, r = torch.linalg.qr(g.T); p.sub_((q @ r).T)",
    "p.sub_(torch.einsum('ij,kj,kl->il', g, g, g) / g.norm() ** 2)",
    "p.sub_(torch.linalg.multi_dot([g, g.T, g]) / torch.linalg.matrix_norm(g, 2))",
    "p.sub_(g * (g.abs() >= g.abs().flatten().kthvalue(9).values))",
    "p.sub_(g.clamp(max=torch.quantile(g.flatten(), 0.5))); p.sub_(0.1 * g.cumsum(0).flip(0).roll(1, 0))",
    "p.sub_(g.sort(0).values + g.sort(1, descending=True).values)",
    "p[g > 0] = 0.; p.sub_(torch.zeros_like(g).masked_scatter_(g > 1, g[g > 1]))",
    "p.index_add_(0, torch.tensor([0, 4]), g[[1, 2]]); p.sub_(g.index_select(0, torch.tensor([4, 3, 2, 1, 0])))",
    "p.sub_(torch.stack([g, 2 * g]).mean(0) + torch.cat([g[:2], g[2:]]))",
    # lists
    "torch._foreach_copy_([kept('b', p)], [g]); torch._foreach_sub_([p], [s['b']])",
    "d = torch._foreach_sqrt(torch._foreach_abs([g, p])); torch._foreach_maximum_(d, 0.5); p.sub_(g / d[0] + d[1])",
    "n = torch._foreach_norm([g, p]); torch._foreach_div_(n, [2., 3.]); p.sub_(g * n[1] / n[0])",
    "m = plain('m', p.shape); torch._foreach_lerp_([m, kept('k', p)], [g, g], 0.5); "
    "torch._foreach_sub_([p, p], [m, s['k']])",
    "torch._foreach_addcmul_([p], [g], [plain('m', p.shape) + 2], value=-0.1); "
    "torch._foreach_mul_([p, g], torch.tensor(0.5))",
    "r = torch._foreach_mul([g], [g])[0].mean(-1); torch._foreach_add_([plain('r', 5)], [r]); "
    "p.sub_(g / s['r'][:, None])",
    "torch._foreach_mul_(list(p.unbind(0)), 0.5); torch._foreach_add_([p[0], p[:, 1]], [g[1], g[:, 2]])",
    "torch._foreach_sub_([p], torch._foreach_mul([g], [g.norm()])); torch._foreach_clamp_max_([p], 9.)",
    *(
        (
            "p.sub_(g / torch._foreach_powsum([g, p], 2)[0])",
            "p.sub_(g / torch._foreach_powsum([p, g], 3)[1])",
            "p.sub_(torch._foreach_mm([g, p], [g.T.contiguous(), g.T])[0] @ g)",
            "p.sub_(torch._foreach_clone([g, p])[0])",
        )
        if hasattr(torch, "_foreach_mm")
        else ()
    ),
    "p.sub_(g / torch._foreach_max([g.abs(), p])[0])",
    # several results, and results into what has another shape
    "m, e = torch.frexp(g); p.sub_(m).add_(e)",
    "x = torch.empty(0); torch.mul(g, g, out=x); p.sub_(x); torch.sort(g, 0, out=(x, y := torch.empty(0).long())); "
    "p.sub_(x)",
    # numbers that are parts
    "x = g * 2; x.mul_(p[0, 0]); k = kept('k', p).add_(p[4, 1]).sub_(x); k.addcmul_(g, p[1, 1]); p.data[2, 2].zero_()",
    # views by functions, and what is written to them
    "torch.flatten(g).mul_(2); p.sub_(torch.reshape(g, (6, 5)).mT.contiguous().view(5, 6))",
    "torch.clamp_(p[0], max=1); torch.mul(p[1:3], 2, out=p[1:3]); torch.neg_(torch.select(p, 1, 2))",
    "a, b = torch.chunk(g, 2); a.zero_(); torch.narrow(g, 1, 0, 2).neg_(); p.sub_(g)",
    "x = g.reshape(-1, 3); x.div_(x.abs().amax(1, keepdim=True)); p.sub_(x.view(5, 6))",
    "p.T.sub_(g.T); p.mT[0].zero_(); p.squeeze().add_(1); p.expand(2, -1, -1)[0].mul_(1.)",
    # parts that are read after what they are parts of has changed
    "v = g.view(-1); g.add_(p); p.sub_(v.view(5, 6)); p.sub_(g / v.norm())",
    "v = p.view(-1); p.data.mul_(0.5); kept('k', p).copy_(v.view(5, 6)); w = v.view(5, 6); p.zero_(); s['k'].add_(w)",
    "x = g.split(2); g.mul_(3); p.sub_(torch.cat(x)); torch._foreach_add_([g], 1.); p.sub_(torch.cat(x))",
    "a, b = p[0], p[:2]; a.zero_(); kept('k', p).add_(b.sum()); torch.add(b, 1, out=b); s['k'].mul_(a.sum())",
    "d, e = torch.diagonal(p), p.diagonal(1); p.add_(1); kept('k', p).add_(d.sum() - e.mean()); e.zero_(); d.add_(1)",
    "v = p.view(-1); p.data = p.data * 2; p.sub_(v.view(5, 6), alpha=0.1); u = p.view(-1); p.add_(1); p.mul_(u.norm())",
    "x = g.flatten(); g.mul_(2); x.mul_(3); g.sub_(1); k = kept('k', p); "
    "torch._foreach_add_([k, k], [x.view(5, 6), g])",
    # numbers drawn, by what a rank gets of the whole, and in what it keeps
    "p.sub_(g @ torch.randn(6, 2) @ torch.ones(2, 6)); p.add_(torch.bernoulli(torch.full_like(g, 0.5)))",
    "p.sub_(g[:, torch.randperm(6)]); p.add_(torch.randint_like(g, 3)); p.mul_(torch.rand_like(g))",
    # layouts by hand
    "w = g.full_tensor() if isinstance(g, DTensor) else g; p.copy_(w @ w.T @ w)",
    "p.sub_(redistributed(g, newton_schulz)); u = redistributed(g, newton_schulz).view(5, 6) * 2; "
    "kept('v', p).addcmul_(u, u); p.sub_(s['v'])",
    "x, y = (one.to_local() if isinstance(one, DTensor) else one for one in (p, g)); x.sub_(y)",
    "p.data = p.data - 0.1 * g; p.data = torch.lerp(p.data, g, 0.1); p.data.copy_(2 * gathered(p))",
)
"""Steps of a parameter p of five rows of six numbers, by its gradient g, with what is kept from step to step in s."""


def redistributed(gradient: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute of a whole gradient, and lay that out, by the methods that DTensors have for it."""
    if not isinstance(gradient, DTensor):
        return function(gradient)
    whole = DTensor.from_local(function(gradient.full_tensor()), device_mesh=gradient.device_mesh)
    return whole.redistribute(placements=gradient.placements)


def stepped(code: str, lay_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Run a step twice, of parameters and gradients that are laid out; return what all was then, whole."""
    whole = torch.arange(1.0, 31).view(5, 6)
    p, state = lay_out(whole.cos()), dict[str, Any]()
    scope = {"torch": torch, "DTensor": DTensor, "gathered": gathered, "redistributed": redistributed, "s": state}
    exec(PREPARED, scope)
    for number in range(2):
        torch.manual_seed(number)
        g = lay_out((whole * (number + 1.3)).sin() * 4)
        exec(code, scope, {"p": p, "g": g, **{name: scope[name] for name in ("plain", "kept", "newton_schulz")}})
    return [gathered(one) for one in (p, g, *state.values())]


def step(rank: int) -> list[str]:
    """Return which steps are others of DTensors than of plain tensors."""
    follow_values("cpu")
    wrong, layouts = list[str](), layouts_of_four(rank)
    _, owned, *_ = layouts
    for number, code in enumerate(STEPS):
        wanted = stepped(code, Tensor.clone)
        for lay_out in layouts if THOROUGH else (layouts[number % 2],):
            try:
                with torch.no_grad(), AsWhole():
                    found = stepped(code, lay_out)
            except Exception as error:
                wrong.append(f"{code} of what is {lay_out.__name__} raises {type(error).__name__}: {error}")
                continue
            for one, other in zip(found, wanted, strict=True):
                if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                    wrong.append(f"{code} of what is {lay_out.__name__}")
    one_row = torch.ones(1, 6)
    mesh = init_device_mesh("cpu", (4,))
    of_another = uneven_dtensor(one_row if rank == 1 else one_row[:0], mesh, one_row.shape)
    for together in (lambda: owned(one_row) + of_another, lambda: torch._foreach_add([owned(one_row)], [of_another])):
        told = ""
        try:
            with torch.no_grad(), AsWhole():
                together()
        except OsdpError as error:
            told = str(error)
        if ("different ranks own" in told) != (rank in (1, 2)):
            wrong.append(f"what ranks 1 and 2 own was computed with together: {told}")
    return wrong


class Others(torch.optim.Optimizer):
    """What somebody wrote: `update(p, g, s)` of each parameter, by its gradient and what is kept."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p])

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        """Keep a moment and follow it, as far as the parameter is long."""
        moment = s.setdefault("moment", torch.zeros_like(p))
        moment.lerp_(g, 0.5)
        p.sub_(moment * (p.norm() / moment.norm().add_(1e-3)).clamp_(max=1), alpha=0.1)


class Moment(Others):
    """Follows the signs of a moment, that goes from element to element, so that it trains slices too."""

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        moment = s.setdefault("moment", torch.zeros(p.shape))
        p.mul_(0.99).add_(torch.add(0.9 * moment, g, alpha=0.1).tanh_(), alpha=-0.1)
        moment.lerp_(g, 0.5)


class Factored(Others):
    """Second moments by rows and columns, plain tensors, and updates as large as a running mean of the gradient's."""

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        if not s:
            s["rows"], s["columns"] = torch.zeros(p.shape[:-1]), torch.zeros(p.shape[-1:])
            s["size"] = torch.zeros(())
        square = g.square().add_(1e-6)
        s["rows"].lerp_(square.mean(-1), 0.5)
        s["columns"].add_(square.flatten(0, -2).mean(0) if square.dim() > 1 else square)
        s["size"].add_(g.abs().mean())
        update = g / s["rows"].sqrt().unsqueeze(-1) / s["columns"].sqrt().mean()
        p.data.sub_(update.mul_(0.1 * s["size"] / update.norm()))


class Sharp(Others):
    """Two gradients in a step, by a closure, the second where the first leads (SAM)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step by the gradient beside the parameters."""
        assert closure is not None
        twice = torch.enable_grad()(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        twice()
        norms = torch._foreach_norm([p.grad for p in parameters])
        up = [p.grad * (0.05 / torch.stack(norms).norm()) for p in parameters]
        torch._foreach_add_(parameters, up)
        twice()
        for p, more in zip(parameters, up, strict=True):
            p.sub_(more).sub_(p.grad, alpha=0.1)


class Lookahead(Others):
    """Every second step goes back half of the way."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups)
        self.inner, self.count = inner, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the inner one, and go back sometimes."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        self.count += 1
        for group in self.param_groups if self.count % 2 == 0 else ():
            for p in group["params"]:
                self.state[p]["slow"].lerp_(p, 0.5)
                p.copy_(self.state[p]["slow"])


class Derived(Others):
    """Calls the step that it is derived from, and computes with plain tensors, products and sorts after that."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step, and decay."""
        super().step(closure)
        decay(self)


class DerivedOfTorch(torch.optim.AdamW):
    """The same of an optimizer of PyTorch."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step, and decay."""
        super().step(closure)
        decay(self)


class OnlyNamed(torch.optim.AdamW):
    """Steps as the optimizer of PyTorch does, which needs nothing of others."""


def decay(optimizer: torch.optim.Optimizer) -> None:
    """Compute with whole parameters."""
    for p in optimizer.param_groups[0]["params"]:
        p.sub_(0.01 * torch.ones(p.shape) * p)
        p.sub_(0.01 * p.sort(0).values)
        if p.dim() == 2:
            p.sub_(0.01 * (p @ p.T) @ p)


OF_SLICES = (
    *("p[0].zero_()", "p[..., 1:] *= 2", "p.view(-1).mul_(2)", "p.flatten()[:2].zero_()", "g.reshape(1, -1).neg_()"),
    *("p.chunk(2)[0].zero_()", "p.split(2)[0].zero_()", "p.unbind()[0].zero_()", "p.narrow(0, 0, 1).zero_()"),
    *("torch._foreach_mul_(list(p), 2.)", "(p[None] if p.dim() == 1 else p).diagonal().zero_()", "p[[0]] = 0."),
    *("torch._foreach_norm([p])", "p.expand(2, *p.shape).sum()", "torch.frexp(p)"),
)
"""Steps that look at places or at the whole, which slices have none of."""
BY_ELEMENT = (
    *("p.view_as(g).mul_(0.9)", "p.data.view(p.shape).sub_(g.view(*g.shape))", "p.mT.mul_(0.9) if p.dim() > 1 else 0"),
    *("p.unsqueeze(0).mul_(0.9)", "p.detach().t().mul_(0.9)", "p[:].mul_(0.9)", "p[...].mul_(0.9)"),
    "torch._foreach_mul_([p], 0.9)",
)
"""Steps that do not."""


class Coded(Others):
    """Runs code for each parameter."""

    def __init__(self, parameters: Any, code: str) -> None:
        super().__init__(parameters)
        self.code = code

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        exec(self.code, {"torch": torch}, {"p": p, "g": g, "s": s})


class Failing(Others):
    """Raises amid a step."""

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        raise KeyError("of its own")


class Averaging(Others):
    """Averages gradients by itself, as under DistributedDataParallel."""

    def update(self, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        torch.distributed.all_reduce(g)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Derived, before its own base was made": Derived,
    "Derived of torch, before its base was made": lambda parameters: DerivedOfTorch(parameters, lr=1e-2),
    "Others": Others,
    "Derived, after its own base was made": Derived,
    "Moment": Moment,
    "Factored": Factored,
    "Sharp": Sharp,
    "Lookahead": lambda parameters: Lookahead(Factored(parameters)),
    "Lookahead of torch": lambda parameters: Lookahead(torch.optim.AdamW(parameters, lr=1e-2)),
    "Derived of torch, after its base was made": lambda parameters: DerivedOfTorch(parameters, lr=1e-2),
}


def train(model: nn.Module, ranks: Sequence[int], make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Train a model on the batches of ranks."""
    optimizer = make(list(model.parameters()))
    for number in range(2):
        batches = [batch_of(SAMPLE, rank, number)[0] for rank in ranks]

        def closure() -> Any:
            optimizer.zero_grad()
            torch.stack([model(*batch) for batch in batches]).mean().backward()  # noqa: B023

        if isinstance(optimizer, Sharp | Derived):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def train_everywhere(rank: int) -> dict[str, str]:
    """Train by each optimizer as one process does; return what is said of those that fail."""
    from osdp import OSDP

    choices = {"blocks.1.up": "replicate", "head": "owner"}
    plan = plan_of(SAMPLE, "shard", choices, ranks=(1, 2))
    sliced = plan_of(SAMPLE, "shard", {"blocks.1.down": "split(shard, replicate)"}, ranks=(1, 2))
    said = {}
    for name, make in OPTIMIZERS.items():
        alone, model = seeded(build), OSDP(seeded(build), sliced if name == "Moment" else plan)
        train(alone, range(2), make)
        train(model, [rank], make)
        found = model.full_state_dict(rank0_only=False)
        for key, wanted in alone.named_parameters():
            where = f"{name}, {key}: "
            torch.testing.assert_close(
                found[key], wanted.data, rtol=1e-4, atol=1e-5, msg=lambda text, where=where: where + text
            )
    with pytest.raises(KeyError, match="of its own"):
        train(model, [rank], Failing)

    def fail() -> None:
        raise RuntimeError("no sharding of the data, no DTensor")

    with pytest.raises(RuntimeError, match="of the data"):  # not an OsdpError
        Others(model.parameters()).step(fail)
    with patch("runtime.step.whole_steps.AsWhole", side_effect=AssertionError):
        train(model, [rank], lambda parameters: OnlyNamed(parameters, lr=1e-2))
    said["averaging"] = refusal(lambda: train(model, [rank], Averaging))
    of_slices = OSDP(seeded(build), sliced)
    said["of slices"] = refusal(lambda: train(of_slices, [rank], Factored))
    for code in OF_SLICES:
        with pytest.raises(OsdpError, match="of which this plan trains slices"):
            train(of_slices, [rank], lambda parameters, code=code: Coded(parameters, code))  # type: ignore[misc]
    train(of_slices, [rank], lambda parameters: Coded(parameters, "; ".join(BY_ELEMENT)))
    model.zero_grad()
    with pytest.raises(OsdpError, match="does not take sharded"):  # nothing of a step that failed is left
        torch.unique(next(iter(model.parameters())).detach())
    train(model, [rank], torch.optim.AdamW)
    return said


def test_optimizers_of_others_train_as_in_one_process() -> None:
    for said in run_ranks(train_everywhere, 2):
        assert "gradients are means over ranks already" in said["averaging"]
        assert "of which this plan trains slices" in said["of slices"]


def test_each_operation_on_lists_is_known_to_go_by_elements_or_not() -> None:
    names = {one.name.removeprefix("aten::") for one in torch._C._jit_get_all_schemas()}
    found = {one.removeprefix("_foreach_").removesuffix("_") for one in names if one.startswith("_foreach_")}
    assert found - LISTS <= {"max", "norm", "mm", "powsum"}
    assert found >= LISTS
    wrong = [one for one in LISTS - {"clone", "copy", "zero"} if not is_pointwise(one)]
    assert not wrong
    for name, way in (("mm", "_whole_lists"), ("powsum", "_whole_lists"), ("add", "_of_lists"), ("copy_", "_of_lists")):
        packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet else ():
            is_out = overload.endswith("out")
            assert way_of(getattr(packet, overload)).__name__ == ("_whole_lists" if is_out else way)
    assert way_of(torch.ops.aten._fused_rms_norm.default).__name__ == "_whole"


def is_pointwise(name: str) -> bool:
    """Return whether torch computes element by element what an operation on one tensor computes."""
    packet = getattr(torch.ops.aten, name)
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def test_steps_of_dtensors_are_those_of_plain_tensors() -> None:
    assert run_ranks(step, 4) == 4 * [[]]
