"""Whether a model checkpoints parts of itself with `use_reentrant=True`, whose backward runs apart from the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils.checkpoint import CheckpointFunction

NOTE = (
    "checkpoints with use_reentrant=True run parts of the model back by themselves, so that the memory of plans that "
    "shard is only roughly known; with use_reentrant=False it is known"
)


@contextmanager
def reentrant_checkpoints() -> Iterator[Callable[[], bool]]:
    """Yield what tells whether one has run within."""
    run, seen = CheckpointFunction.forward, list[bool]()

    def forward(*args: Any) -> Any:
        seen.append(True)
        return run(*args)  # type: ignore[no-untyped-call]

    with patch.object(CheckpointFunction, "forward", staticmethod(forward)):
        yield lambda: bool(seen)
