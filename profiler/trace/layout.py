"""Layouts of tensors: what `torch.empty_strided` needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """What `torch.empty_strided` needs to make a tensor."""

    shape: tuple[int, ...]
    """Sizes."""
    strides: tuple[int, ...]
    """Strides, in elements."""
    dtype: torch.dtype
    """Element type."""


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """Return the row-major layout of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return Layout(tuple(shape), tuple(reversed(strides)), dtype)
