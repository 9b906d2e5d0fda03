"""Recomputation of blocks (activation checkpointing), and their compilation.

A block that is one unit is gathered around all that happens here: its forward is replaced, and
`fully_shard`'s hooks stay outside.  Where a block has several units, they are gathered again when
its forward runs again, and kept from there to their backward, so that each is gathered twice per
micro-batch and not three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from runtime.sharded_model import ShardedModel

Forward = Callable[..., Any]


def recompute(sharded: ShardedModel, compile_backend: str | None) -> None:
    """Let blocks run again in backward as scheduled, and compile those that are one unit each."""
    model, schedule = sharded.module, sharded.schedule
    units = {path for unit in schedule.units for path in unit.modules if len(unit.modules) == 1}
    if compile_backend is not None:
        for path in sorted(units):
            block = model.get_submodule(path)
            if path and next(block.children(), None) is not None:
                vars(block)["forward"] = torch.compile(block.forward, backend=compile_backend)
    for name in schedule.recomputed:
        block = model.get_submodule(name)
        vars(block)["forward"] = _checkpointed(block, sharded, is_unit=name in units)


def _checkpointed(block: nn.Module, sharded: ShardedModel, is_unit: bool) -> Forward:
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), nullcontext() if is_unit else _kept_inside(block, sharded)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Stopped early, the last unit's forward would not reach the hook that ends it.
        with set_checkpoint_early_stop(is_unit):
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


@contextmanager
def _kept_inside(block: nn.Module, sharded: ShardedModel) -> Iterator[None]:
    """Keep what is gathered in this block: its backward comes next."""
    inside = set(block.modules())
    with ExitStack() as stack:
        for unit in sharded.units:
            if not inside.isdisjoint(unit.modules):
                stack.enter_context(unit.keep_after_forward())
        yield
