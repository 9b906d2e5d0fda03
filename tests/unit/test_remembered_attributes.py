"""Plain attributes of a block that runs again."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from profiler.remembered_attributes import RememberedAttributes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(2, 2)
        self.step, self.sizes = 3, (1, 2)
        self.state: dict[str, Any] = {"step": 3, "kept": torch.zeros(2)}
        self.kept = torch.zeros(2)

    def advance(self) -> None:
        self.step, self.sizes, self.inner.calls = self.step + 1, (1, 3), 1
        self.state["step"] += 1
        self.kept = self.state["kept"] = torch.ones(2)

    @property
    def now(self) -> tuple[Any, ...]:
        return self.step, self.sizes, self.state["step"], self.kept.sum().item()


def test_numbers_go_back_also_those_in_dicts() -> None:
    """A forward that counted in a dict counted twice where it ran again, and so did something else."""
    block = Block()
    remembered = RememberedAttributes(block)
    block.advance()
    remembered.end()
    assert block.now == (4, (1, 3), 4, 2)
    with remembered.restored():
        assert block.now == (3, (1, 2), 3, 2)
        block.advance()
    assert block.now == (4, (1, 3), 4, 2)


def test_tensors_are_not_held() -> None:
    """What a forward replaced lived until it had ended."""
    block = Block()
    kept = weakref.ref(block.kept)
    remembered = RememberedAttributes(block)
    block.advance()
    assert kept() is None
    remembered.end()
