"""How PyTorch's CUDA allocator is set where OSDP starts the training.

Segments that grow waste far less of a limit than ones of fixed sizes (docs/benchmarks/allocator.md), and plans leave
room for that only.  Windows of one-sided communication, whose addresses other processes open, are not affected: they
are allocated beside PyTorch's allocator (`runtime/odc/cupy_device.py`).
"""

import os

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that PyTorch reads, the first before the second."""
SETTINGS = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Set this process and those that it starts, unless the user has set either variable; before torch is imported."""
    if not any(name in os.environ for name in NAMES):
        os.environ[NAMES[0]] = SETTINGS
