"""Whether one-sided communication can be tested on a GPU here."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from profiler.errors import install_advice


def missing() -> str:
    """Return why nothing can be run here; empty if it can."""
    if not torch.cuda.is_available():
        return "no GPU (torch.cuda.is_available() is False)"
    return "" if find_spec("cupy") else f"CuPy is not installed: {install_advice('cuda13')}, or cuda12"
