"""Units of several modules of which some are frozen, skipped or not in the loss, and models inside other modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thoroughness import STEPS, THOROUGH, some
from torch import Tensor, nn
from toys import EVERY_RANK, STRATEGIES, Blocks, Toy, batch_of, loss_of, plan_of, run_everywhere, seeded


class FrozenLast(nn.Module):
    """A block whose module that runs last is a frozen embedding, whose output gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.positions = nn.Embedding(5, 6)
        self.positions.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        y = self.first(torch.tanh(self.other(x)))
        return x + y + self.positions(torch.arange(5))


class Aside(nn.Module):
    """A block with a head that runs last and whose output only a part of the calls uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        y = x + self.first(torch.tanh(self.other(x)))
        self.seen = self.head(y).detach()
        return y


class Stack(Toy):
    """Two blocks of a class."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def train_odd_blocks(rank: int, block: type[nn.Module]) -> int:
    """Train with units of several modules under every strategy; return how many such units there were.

    With recomputation and without: unless thorough, strategies in turn, each with one of the two.
    """
    from osdp import OSDP

    reference = seeded(lambda: Stack(block))
    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        (sum(reference(*batch_of(reference, each, step)[0]) for each in EVERY_RANK) / len(EVERY_RANK)).backward()
        optimizer.step()
        optimizer.zero_grad()
    joined = 0
    for number, name in some(list(enumerate(STRATEGIES, block is Aside)), 3, 1 + (block is Aside)):
        other = "shard" if name == "owner" else "owner"
        for recomputed in ((), ("blocks.0",)) if THOROUGH else ((("blocks.0",),) if number % 2 else ((),)):
            plan = plan_of(Stack(block), name, {f"blocks.{i}.other": other for i in (0, 1)}, recomputed=recomputed)
            model = OSDP(seeded(lambda: Stack(block)), plan)
            joined += sum(len(unit.modules) > 1 for unit in model.schedule.units)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for step in range(STEPS):
                model(*batch_of(reference, rank, step)[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
            got = model.full_state_dict(rank0_only=False)
            torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)
    return joined


@pytest.mark.parametrize("block", [FrozenLast, Aside])
def test_a_unit_trains_whichever_of_its_modules_runs_last(block: type[nn.Module]) -> None:
    assert all(count > 0 for count in run_everywhere(train_odd_blocks, block))


class Both(nn.Module):
    """A layer of two inputs that are one, as those of `nn.MultiheadAttention` may be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """(batch, 5, 6) -> the same."""
        assert x is y
        return x @ self.weight + y


class Self(nn.Module):
    """A block around it."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.more = Both(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        x = torch.tanh(self.more(x))
        made: Tensor = self.both(x, y=x)
        return made


def give_one_input_twice(rank: int) -> None:
    """Compare gradients with those of one process, under every strategy and with the second block recomputed."""
    from osdp import OSDP

    reference = seeded(lambda: Stack(Self))
    (sum(reference(*batch_of(reference, each)[0]) for each in EVERY_RANK) / len(EVERY_RANK)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for name in some(STRATEGIES, 2):
        model = OSDP(seeded(lambda: Stack(Self)), plan_of(Stack(Self), name, recomputed=("blocks.1",)))
        model(*batch_of(reference, rank)[0]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        got = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(got, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


def test_an_input_that_is_given_twice_is_one_in_forward() -> None:
    run_everywhere(give_one_input_twice)


class Outer(nn.Module):
    """A module around a sharded model, with a layer of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Linear(1, 1)


def nest(rank: int) -> None:
    """State dicts of a module around it have its parameters under their names, and are loaded back."""
    from osdp import OSDP

    for name in (*some(STRATEGIES, 3, 1), "mixed"):
        names = plan_of(Blocks()).choices
        choices = {one: STRATEGIES[i % len(STRATEGIES)] for i, one in enumerate(names)} if name == "mixed" else {}
        plan = plan_of(Blocks(), "shard" if name == "mixed" else name, choices)
        outer = Outer(OSDP(seeded(Blocks), plan))
        plain = Outer(seeded(Blocks))
        state = outer.state_dict()
        assert list(state) == list(plain.state_dict())
        assert outer.inner.state_dict(prefix="x.").keys() == {f"x.{key}" for key in Blocks().state_dict()}
        resting = {id(parameter) for parameter in outer.inner.parameters()}
        kept = outer.inner.state_dict(keep_vars=True)
        is_whole = [isinstance(value, Tensor) for value in outer.inner.state_dict().values()]
        assert [id(value) in resting for value in kept.values()] == [
            one and key != "mask" for key, one in zip(kept, is_whole, strict=True)
        ]
        saved = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        args, kwargs = batch_of(Blocks(), rank)
        loss_of(outer.inner(*args, **kwargs)).backward()
        torch.optim.SGD(outer.inner.parameters(), lr=1.0).step()
        changed = outer.inner.full_state_dict(rank0_only=False)
        assert not torch.equal(changed["head.weight"], plain.inner.head.weight)
        # Whole tensors, as another process has saved them; then what this rank had.
        for source in (plain.state_dict(), saved if name not in ("owner", "mixed") else plain.state_dict()):
            result = outer.load_state_dict(source)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            loaded = outer.inner.full_state_dict(rank0_only=False)
            torch.testing.assert_close(loaded, dict(plain.inner.state_dict()), rtol=0, atol=0)
        with pytest.raises(RuntimeError, match=r"inner\.head\.weight"):
            outer.load_state_dict({key: value for key, value in plain.state_dict().items() if "head.w" not in key})
        with pytest.raises(RuntimeError, match=r"inner\.nothing"):
            outer.load_state_dict({**plain.state_dict(), "inner.nothing": torch.ones(1)})
        partial = outer.load_state_dict({"inner.head.weight": plain.inner.head.weight}, strict=False)
        assert "inner.head.bias" in partial.missing_keys
        assert not any(key.startswith("inner.module.") for key in partial.missing_keys)


def test_a_sharded_model_is_a_part_of_another_module() -> None:
    run_everywhere(nest)


class Scaled(nn.Module):
    """A block with a temperature, and a scale that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        return x + self.scale * self.other(torch.tanh(self.layer(x) * self.temperature))


class Scalars(Stack):
    """Two such blocks, and a scalar of the model itself as CLIP has it."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.logit_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        return super().forward(x) * self.logit_scale.exp()


def train_scalars(rank: int, folder: Path) -> None:
    """Train parameters without dimensions under every strategy, saved under one plan and loaded under another."""
    from osdp import OSDP

    reference = seeded(Scalars)
    optimizer = torch.optim.Adam([p for p in reference.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, fused=True)
    for step in range(STEPS):
        for micro_batch in range(2):
            batches = [batch_of(reference, each, 10 * step + micro_batch)[0] for each in EVERY_RANK]
            (sum(reference(*args) for args in batches) / len(batches) / 2).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    last: Any = None
    for number, name in some(list(enumerate(STRATEGIES)), 3):
        # From a live model, and made shard by shard.
        plan = plan_of(Scalars(), name, accumulation=2)
        made = seeded(Scalars) if number % 2 else Scalars
        torch.manual_seed(3)
        model = OSDP(made, plan)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, fused=True)
        for step in range(STEPS):
            if step == 1 and last is not None:
                model.load_checkpoint(folder / last, optimizer)
            for micro_batch in range(2):
                args, _ = batch_of(reference, rank, 10 * step + micro_batch)
                (model(*args) / 2).backward()
            got = model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                model.save_checkpoint(folder / name.replace(":", "-"), optimizer)
        last = name.replace(":", "-")
        torch.testing.assert_close(got, norm, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        whole = model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(whole, dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


def test_parameters_without_dimensions_are_replicated(tmp_path: Path) -> None:
    run_everywhere(train_scalars, tmp_path)
