"""Units that one rank owns, in backwards that are out of the ordinary: against PyTorch on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from toys import Toy, plan_of, refusal, seeded

RANKS = 2
Use = Callable[[nn.Module, Tensor], Tensor]
"""Runs a model's forward on inputs (2, 6, 6) and returns the loss."""


class Layers(Toy):
    """A stack of linear layers; frozen ones by number."""

    def __init__(self, frozen: tuple[int, ...] = (), count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(count)])
        for index in frozen:
            self.layers[index].requires_grad_(False)
        self.note: Callable[[Tensor], Any] | None = None
        """Called with every gradient between layers."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> a loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.note is not None and x.requires_grad:
                x.register_hook(self.note)
        return x.pow(2).mean()


class Affine(nn.Module):
    """Has a parameter that it may not use, takes a dict, and runs only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, inputs: dict[str, list[Tensor]], biased: bool = False) -> Tensor:
        """The dict's `x` is a list of one tensor (batch, n, 6)."""
        (x,) = inputs["x"]
        return x * self.weight + (self.bias if biased else 0)


class Sparing(Toy):
    """Does not use all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.affine, self.last = nn.Linear(6, 6), Affine(), nn.Linear(6, 6)
        self.note: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> a loss."""
        x = torch.tanh(self.first(x))
        if self.note is not None:
            x.register_hook(self.note)
        return self.last(self.affine(inputs={"x": [x]})).pow(2).mean()


class Stopped(nn.Module):
    """Uses its weight once more where no gradient goes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> the same shape."""
        return torch.tanh(x @ self.weight.detach()) @ self.weight


class StopGradient(Toy):
    """Its second layer's gradient is there before the last use of the weight in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), Stopped(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> a loss."""
        return self.last(self.second(self.first(x))).pow(2).mean()


class Chunked(Toy):
    """A tied head that runs on one part of the sequence after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> a loss."""
        parts = torch.tanh(self.embedding(x)).split(2, 1)
        return torch.stack([self.head(part).pow(2).mean() for part in parts]).sum()


class Checkpointed(Layers):
    """Runs its layers again in backward, by its own doing."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> a loss."""
        middle: Tensor = checkpoint(
            lambda y: torch.tanh(self.layers[1](torch.tanh(self.layers[0](y)))), x, use_reentrant=False
        )
        return self.layers[2](middle).pow(2).mean()


class Failing(nn.Linear):
    """Raises at the end of its backward if told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> the same shape."""
        x = x * 1
        x.register_hook(self._fail)
        return super().forward(x)

    def _fail(self, gradient: Tensor) -> None:
        if self.fails:
            raise ZeroDivisionError


class Fragile(Toy):
    """Fails in the middle of a backward, amid a unit's, if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), Failing(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, 6) -> a loss."""
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).pow(2).mean()


def owned(build: Callable[[], nn.Module]) -> Any:
    """Return a model all of whose units are owned."""
    from osdp import OSDP

    return OSDP(seeded(build), plan_of(build(), "owner", ranks=(1, RANKS)))


def batch(rank: int) -> Tensor:
    """Return a rank's inputs."""
    return torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(rank))


def reference(model: nn.Module, use: Use | None = None) -> dict[str, Tensor | None]:
    """Return the gradients of the mean loss of all ranks' inputs."""
    torch.stack([(use or _call)(model, batch(rank)) for rank in range(RANKS)]).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _call(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def assert_gradients(model: Any, wanted: dict[str, Tensor | None]) -> None:
    """Compare the gradients of what this rank owns; on others they are empty, but there."""
    for name, parameter in model.named_parameters():
        expected = wanted[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None and parameter.to_local().numel():
            torch.testing.assert_close(parameter.grad.to_local(), expected, rtol=1e-5, atol=1e-7)


def owned_units(model: Any) -> list[Any]:
    return [unit for unit in model.sharded.units if hasattr(unit, "is_gathered")]


def gathered(model: Any) -> int:
    """Return how many units are gathered."""
    return sum(unit.is_gathered for unit in owned_units(model))


def sent(run: Callable[[], Any]) -> Counter[tuple[str, int]]:
    """Return how often what kind of collective of how many bytes is issued."""
    from runtime.observe.collective_log import record_collectives

    with record_collectives() as recorded:
        run()
    return Counter((one.operation, one.size_bytes) for one in recorded)


def unfreeze(rank: int) -> None:
    model = owned(lambda: Layers(frozen=(1,)))
    model(batch(rank)).backward()
    assert_gradients(model, reference(seeded(lambda: Layers(frozen=(1,)))))
    model.zero_grad()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model(batch(rank)).backward()
    assert_gradients(model, reference(seeded(Layers)))
    model.zero_grad()
    for parameter in model.module.layers[2].parameters():
        parameter.requires_grad_(False)
    model(batch(rank)).backward()
    assert_gradients(model, reference(seeded(lambda: Layers(frozen=(2,)))))


def unused(rank: int) -> None:
    model, alone = owned(Sparing), seeded(Sparing)
    counted = sent(lambda: model(batch(rank)).backward())
    assert_gradients(model, reference(alone))
    # Two linear layers whole, and of the third unit the weight only.
    assert {key: count for key, count in counted.items() if key[0] == "reduce"} == {
        ("reduce", 4 * 42): 2,
        ("reduce", 4 * 6): 1,
    }
    for decayed in (model, alone):
        torch.optim.AdamW(decayed.parameters(), lr=0.1, weight_decay=1.0).step()
    torch.testing.assert_close(model.full_state_dict(False)["affine.bias"], alone.state_dict()["affine.bias"])


def gradient_of_input_only(rank: int) -> None:
    model, alone, x = owned(Layers), seeded(Layers), batch(rank).requires_grad_()
    loss = model(x)
    counted = sent(lambda: torch.testing.assert_close(*(torch.autograd.grad(of, x)[0] for of in (loss, alone(x)))))
    assert {kind for kind, _ in counted} == {"broadcast"}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert gathered(model) == 0


def freed_on_the_way(rank: int) -> None:
    # A gradient between layers is there when the layer above is through and the one below has not begun.
    for build in (lambda: Layers(frozen=(1, 2, 3, 4), count=5), lambda: Layers(count=5), Sparing):
        model, seen = owned(build), list[int]()
        model.module.note = lambda gradient, model=model, seen=seen: seen.append(gathered(model))
        model(batch(rank)).backward()
        assert set(seen) == {0}
        assert gathered(model) == 0


def stop_gradient(rank: int) -> None:
    model = owned(StopGradient)
    model(batch(rank)).backward()
    assert_gradients(model, reference(seeded(StopGradient)))


def chunked(rank: int) -> None:
    def nothing(model: Any) -> None:
        """Leave everything gathered."""

    def evaluate(model: Any) -> None:
        with torch.no_grad():
            model(batch(rank))

    for between in (nothing, evaluate, lambda model: model.state_dict()):
        model = owned(Chunked)
        loss = model(batch(rank))
        between(model)
        loss.backward()
        assert_gradients(model, reference(seeded(Chunked)))
        assert gathered(model) == 0


def called_twice(rank: int) -> None:
    def twice(model: nn.Module, x: Tensor) -> Tensor:
        return _call(model, x) + _call(model, 2 * x)

    model = owned(Layers)
    twice(model, batch(rank)).backward()
    assert_gradients(model, reference(seeded(Layers), twice))


def checkpointed_by_the_model(rank: int) -> None:
    model = owned(Checkpointed)
    model(batch(rank).requires_grad_()).backward()
    assert_gradients(model, reference(seeded(Checkpointed)))
    assert gathered(model) == 0


def fails_in_backward(rank: int) -> None:
    model, alone = owned(Fragile), seeded(Fragile)
    model.module.middle.fails = True
    with pytest.raises(ZeroDivisionError):
        (1000 * model(batch(rank))).backward()
    model.module.middle.fails = False
    model.zero_grad()
    for unit in owned_units(model):
        unit.reset()
    assert gathered(model) == 0
    for run, trained in ((lambda: model(batch(rank)).backward(), model), (lambda: reference(alone), alone)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            run()
            optimizer.step()
    assert_gradients(model, {name: parameter.grad for name, parameter in alone.named_parameters()})


def fails_in_forward(rank: int) -> None:
    model = owned(Layers)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, 7))
    assert gathered(model) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(2)
    model(batch(rank)).backward()
    alone = seeded(Layers)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.mul_(2)
    assert_gradients(model, reference(alone))


def inference_first(rank: int) -> None:
    model = owned(Layers)
    with torch.inference_mode():
        model.module(batch(rank))
    model(batch(rank)).backward()
    assert_gradients(model, reference(seeded(Layers)))


def double_backward(rank: int) -> None:
    model, x = owned(Layers), batch(rank).requires_grad_()
    loss = model.module(x)
    assert "gradients of gradients" in refusal(lambda: torch.autograd.grad(loss, x, create_graph=True))
    model(x).backward()
    assert_gradients(model, reference(seeded(Layers)))


@pytest.mark.parametrize(
    "check",
    [
        unfreeze,
        unused,
        gradient_of_input_only,
        freed_on_the_way,
        stop_gradient,
        chunked,
        called_twice,
        checkpointed_by_the_model,
        fails_in_backward,
        fails_in_forward,
        inference_first,
        double_backward,
    ],
)
def test_backward(check: Callable[[int], None]) -> None:
    run_ranks(check, RANKS, timeout_s=60, collective_timeout_s=20)


def stays_where_it_is(rank: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Make a DTensor off the mesh's device; only the first rank has rows."""
    from runtime.torch_compat import uneven_dtensor

    local = torch.empty(0 if rank else 3, 2, device="meta")
    tensor = uneven_dtensor(local, init_device_mesh("cpu", (RANKS,)), torch.Size((3, 2)))
    return tensor.to_local().device.type, tuple(tensor.to_local().shape), tuple(tensor.shape)


def test_uneven_dtensor_stays_off_the_mesh_device() -> None:
    assert run_ranks(stays_where_it_is, RANKS) == [("meta", (3, 2), (3, 2)), ("meta", (0, 2), (3, 2))]
