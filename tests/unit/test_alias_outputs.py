"""Modules that return aliases in place of views: trained as without, and refused where autograd would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.alias_outputs import outputs_aliased


class Keeping(nn.Module):
    """Returns a view of what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.flatten(0, 1) @ self.weight
        return self.kept.view(x.shape)


class Twice(nn.Module):
    """Returns the same view twice, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        product = x @ self.weight
        view = product.view(-1)
        return {"both": (view, view), "product": product, "number": 3}


def gradients(module: nn.Module, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the gradients of the square of a changed output."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    change(module(x)).square().sum().backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return found


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False), Keeping])
def test_changes_in_place_train_as_others(build: Callable[[], nn.Module]) -> None:
    module = build()
    wanted = gradients(module, lambda out: 3 * out)
    with outputs_aliased(module):
        assert not module(torch.randn(2, 3, 4))._is_view()
        found = gradients(module, lambda out: out.mul_(3))
    assert len(found) == len(wanted) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_linear_layers_need_no_python_in_their_backward() -> None:
    module = nn.Linear(4, 4)
    with outputs_aliased(module):
        node = module(torch.randn(2, 3, 4)).grad_fn
    names = []
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert names[-1] == "torch::autograd::AccumulateGrad"
    assert all(name.endswith("Backward0") for name in names[:-1]), "a function of Python has no number"


class Strict(Tensor):
    """A tensor without what no model calls itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._unsafe_view.default
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_of_tensors_stay_what_they_are() -> None:
    module = nn.Linear(4, 4)
    with outputs_aliased(module):
        found = module(torch.randn(2, 3, 4).as_subclass(Strict))
    assert type(found) is Strict
    found.sum().backward()
    assert module.weight.grad is not None


def test_what_others_hold_is_not_changed_unseen() -> None:
    """A view that its module keeps, and the output of a linear layer that another hook keeps."""
    keeping, linear, kept = Keeping(), nn.Linear(4, 4), list[Tensor]()
    linear.register_forward_hook(lambda module, args, output: kept.append(output))
    for module in (keeping, linear):
        with outputs_aliased(module):
            loss = module(torch.randn(2, 3, 4)).square().sum()
        with torch.no_grad():
            (keeping.kept if module is keeping else kept[-1]).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_is_returned_twice_stays_one() -> None:
    module = Twice()
    with outputs_aliased(module):
        found = module(torch.randn(2, 4))
    first, second = found["both"]
    assert first is second
    assert not first._is_view()
    assert found["product"].grad_fn.name().startswith("Mm")
    assert found["number"] == 3


def test_nothing_is_done_where_nothing_is_differentiated() -> None:
    module = nn.Linear(4, 4)
    with outputs_aliased(module), torch.no_grad():
        assert module(torch.randn(2, 3, 4)).grad_fn is None
