"""What modules do with fake tensors otherwise than with others: where they are, and how they are converted.

A fake tensor by itself only knows that it has no data.  Whoever asks for its device, as `is_meta` and most functions of
torch do, asks one dispatch mode after the other (`prim.device`): such questions are two of three calls of a mode, so
the first answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

DEVICE = torch.ops.prim.device.default


def device_of(tensor: Any) -> torch.device:
    """Return what `DEVICE` does, for a dispatch mode."""
    # `fake_mode` is private; checked on torch 2.11 and 2.13, where a fake tensor's `device` is a property in Python.
    found: torch.device = DEVICE(tensor) if getattr(tensor, "fake_mode", None) is None else tensor.device
    return found


@contextmanager
def modules_converted(is_same: Callable[[Tensor, Tensor], bool] = lambda old, new: old is new) -> Iterator[None]:
    """Let modules with fake parameters be converted (`to`, `half`, `double`): they get new data, as others do.

    Torch would have each of them trade places with the result, which it refuses to anything that has weak references,
    and every fake tensor has one (2.11 to 2.13).  Where `is_same` of a parameter and the result nothing is done.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # imports sympy: only if needed

    trade = torch.utils.swap_tensors

    def take(old: Tensor, new: Tensor) -> None:
        if is_same(old, new):
            return
        if isinstance(old, FakeTensor) and torch._has_compatible_shallow_copy_type(old, new):
            old.data = new
        else:
            trade(old, new)  # type: ignore[no-untyped-call]

    with patch.object(torch.utils, "swap_tensors", take):
        yield
