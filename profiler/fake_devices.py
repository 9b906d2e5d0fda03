"""The device of a fake tensor, which by itself only knows that it has no data.

Whoever asks it, as `is_meta` and most functions of torch do, asks one dispatch mode after the other (`prim.device`):
such questions are two of three calls of a mode, so the first answers at once.
"""

from __future__ import annotations

from typing import Any

import torch

DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")


def device_of(tensor: Any) -> torch.device:
    """Return what `DEVICE` does, for a dispatch mode."""
    # These attributes are private; written for torch 2.11 to 2.13.
    mode = getattr(tensor, "fake_mode", None)
    if mode is None:
        device: torch.device = DEVICE(tensor)
    else:
        device = _META if mode.in_kernel_invocation else tensor.fake_device
    return device
