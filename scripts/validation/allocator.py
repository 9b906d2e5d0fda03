"""PyTorch's CUDA allocator: set up anew for each case, and filled until it refuses; and what closed windows leave."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from osdp.training.allocator_settings import SETTINGS
from profiler.byte_sizes import GIB, MIB
from runtime.observe.caching_allocator import CachingAllocator, OutOfMemoryError
from runtime.own_gpu import keep_within, own_gpu
from validation.bounds import judged, outside
from validation.check import Finding, Place
from validation.one_sided import left_behind

MOST_UNUSED = 0.02
"""Of a limit, when a request of a small part of it fails."""
LIMIT_BYTES = 2 * GIB
REQUEST_BYTES = 16 * MIB


def start_over(limit_bytes: int | None = None, *, expandable: bool = True) -> torch.device:
    """Return this process's GPU, its allocator without anything, set as `osdp train` sets it, and within a limit."""
    torch.cuda.init()
    gpu = own_gpu()
    torch.cuda.set_device(gpu)
    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 has another name for it, and 2.11 has not
        torch.cuda.memory._set_allocator_settings(SETTINGS if expandable else SETTINGS.replace("True", "False"))
    keep_within(limit_bytes or torch.cuda.get_device_properties(gpu).total_memory, gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    return gpu


def clear_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for as long as the process runs, which the next case would not make."""
    torch._C._cuda_clearCublasWorkspaces()


def retries() -> int:
    """Return how often a request has made the allocator give cached memory back."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"])


def check(place: Place) -> Finding:
    """Fill the allocator, and see what closed windows leave behind."""
    filled = fill(place)
    if place.is_dry:
        return filled
    left = left_behind(place)
    told = f"{filled.told}; closed windows: {left.told}"
    passed = filled.passed and left.passed is not False  # without CuPy there are no windows
    return replace(filled, passed=passed, told=told, figures={**filled.figures, "windows": left.figures})


def fill(place: Place) -> Finding:
    """Allocate until it fails, with segments of both kinds: what is reserved then is the limit, or little less."""
    complaints, figures = list[str](), dict[str, Any](limit_bytes=LIMIT_BYTES)
    for name, expandable in (("fixed_segments", False), ("expandable_segments", True)):
        reserved = modelled = _until_refused(CachingAllocator(LIMIT_BYTES, expandable=expandable))
        if not place.is_dry:
            reserved = _until_gpu_refuses(expandable)
        figures |= {f"{name}_reserved_bytes": reserved, f"{name}_modelled_bytes": modelled}
        complaints += outside(
            f"with {name.replace('_', ' ')} reserved / limit", reserved / LIMIT_BYTES, 1 - MOST_UNUSED, 1
        )
    whose = "the model of the allocator" if place.is_dry else "the GPU's allocator"
    return judged(
        f"{whose} refuses at {figures['expandable_segments_reserved_bytes'] / LIMIT_BYTES:.1%} of the limit",
        complaints,
        figures,
    )


def _until_refused(allocator: CachingAllocator) -> int:
    def allocate() -> object:
        return allocator.allocate(REQUEST_BYTES)

    _repeat(allocate, OutOfMemoryError)
    return allocator.reserved_bytes


def _until_gpu_refuses(expandable: bool) -> int:
    gpu = start_over(LIMIT_BYTES, expandable=expandable)

    def allocate() -> object:
        return torch.empty(REQUEST_BYTES, dtype=torch.uint8, device=gpu)

    held = _repeat(allocate, torch.OutOfMemoryError)
    found = torch.cuda.memory_reserved(gpu)
    del held
    return found


def _repeat(allocate: Callable[[], object], refusal: type[Exception]) -> list[object]:
    """Allocate until that is refused, well beyond the limit if it is not; return what was allocated."""
    held: list[object] = []
    for _ in range(2 * LIMIT_BYTES // REQUEST_BYTES):
        try:
            held.append(allocate())
        except refusal:
            break
    return held
