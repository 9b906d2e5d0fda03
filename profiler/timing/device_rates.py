"""The rates and memory of one rank's device while all ranks compute.

    matmul rate    2 n^3 / t of products of n x n matrices
    memory rate    geometric mean of an addition (two read, one written) and a GELU (one read, one written),
                   which are as far apart on CPUs as kernels other than matrix products get

Medians of interleaved repetitions, all ranks at once.  A CPU rank's memory is its share of the machine's.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from profiler.timing.device_queue import clock_of, time_work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MATRIX = {"cpu": 768, "cuda": 8192}
"""Rows of the matrices by type of device."""
ELEMENTS = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Elements of the vectors: beyond every cache."""


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one rank."""

    matmul_flops_per_s: dict[str, float]
    """By precision."""
    memory_bytes_per_s: float


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one rank."""

    name: str
    """Of the device."""
    total_bytes: int
    """What the driver, or the operating system, has for one rank."""
    taken_bytes: int
    """Memory in use besides tensors: on GPUs all but PyTorch's allocator, on CPUs the process at its start."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has done something, the host's included."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def measure_rates(device: torch.device, repetitions: int, barrier: Callable[[], None]) -> DeviceRates:
    """Return this rank's rates; a collective call."""
    rows, count = MATRIX[device.type], ELEMENTS[device.type]
    works: dict[str, Callable[[], object]] = {}
    for name, dtype in DTYPES.items():
        matrix = torch.randn(rows, rows, device=device).to(dtype)
        works[name] = partial(torch.matmul, matrix, matrix)
    vector = torch.randn(count, device=device)
    other, out = torch.randn_like(vector), torch.empty_like(vector)
    works["add"] = lambda: torch.add(vector, other, out=out)
    works["gelu"] = lambda: torch.nn.functional.gelu(vector)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    clock = clock_of(device)
    for _ in range(repetitions + 1):
        for name, work in works.items():
            barrier()
            seconds[name].append(time_work(work, clock).seconds)
    middle = {name: median(found[1:]) for name, found in seconds.items()}  # The first one allocates.
    add, gelu = 12 * count / middle["add"], 8 * count / middle["gelu"]
    return DeviceRates({name: 2.0 * rows**3 / middle[name] for name in DTYPES}, (add * gelu) ** 0.5)


def device_memory(device: torch.device, ranks_per_node: int) -> DeviceMemory:
    """Return the memory of this rank; on a CPU to be called before it makes tensors."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken_bytes = total - free - torch.cuda.memory_reserved(device)
        return DeviceMemory(torch.cuda.get_device_name(device), total, taken_bytes)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = f"1/{ranks_per_node} of a CPU machine ({platform.machine()}, {os.cpu_count()} cores)"
    return DeviceMemory(name, total // ranks_per_node, resident_bytes())


def resident_bytes() -> int:
    """Return what this process holds of the machine's memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
