"""What the machine is: versions, GPUs, and how they reach each other."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from typing import Any

import torch

from profiler.byte_sizes import GIB
from validation.check import Finding, Place

CORES_AT_ONCE, BYTES_AT_ONCE = 12, 64 * GIB
"""What checks at once need of a machine and its first GPU, for ranks, plans of 10 GiB and arrays of 2^31 elements."""
PACKAGES = ("torch", "osdp-planner", "cupy-cuda13x", "cupy-cuda12x", "numpy", "highspy", "transformers")


def visible_gpus() -> int:
    """Return how many GPUs PyTorch finds."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def has_room(place: Place) -> bool:
    """Whether several checks can run at once."""
    if place.is_dry or (os.cpu_count() or 1) < CORES_AT_ONCE:
        return False
    return torch.cuda.get_device_properties(0).total_memory >= BYTES_AT_ONCE


def describe(place: Place) -> str:
    """Say in a line what machine this is."""
    gpus = f"{visible_gpus()} x {torch.cuda.get_device_name()}" if not place.is_dry else "dry run on the CPU"
    return f"{gpus}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs"


def record(place: Place) -> Finding:
    """Write down what results depend on."""
    figures: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    figures |= {"cpus": os.cpu_count(), "packages": _versions(), "cuda": torch.version.cuda}
    if place.is_dry:
        return Finding(True, describe(place), figures)
    count = visible_gpus()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    figures["driver"] = _driver()
    figures["gpus"] = [
        {
            "name": one.name,
            "capability": f"{one.major}.{one.minor}",
            "memory_bytes": one.total_memory,
            "multiprocessors": one.multi_processor_count,
            "l2_cache_bytes": one.L2_cache_size,
        }
        for one in properties
    ]
    figures["peer_access"] = {
        f"{here}-{there}": torch.cuda.can_device_access_peer(here, there)
        for here, there in permutations(range(count), 2)
    }
    figures["nvlink"] = re.sub(r"\x1b\[\d*m", "", _output("nvidia-smi", "topo", "-m"))  # it underlines its heads
    return Finding(True, describe(place), figures)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__})"
