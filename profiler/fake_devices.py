"""The device of a fake tensor, which by itself only knows that it has no data.

Whoever asks it, as `is_meta` and most functions of torch do, asks one dispatch mode after the other (`prim.device`):
such questions are two of three calls of a mode, so the first answers at once.
"""

from __future__ import annotations

from typing import Any

import torch

DEVICE = torch.ops.prim.device.default


def device_of(tensor: Any) -> torch.device:
    """Return what `DEVICE` does, for a dispatch mode."""
    # `fake_mode` is private; checked on torch 2.11 and 2.13, where a fake tensor's `device` is a property in Python.
    found: torch.device = DEVICE(tensor) if getattr(tensor, "fake_mode", None) is None else tensor.device
    return found
