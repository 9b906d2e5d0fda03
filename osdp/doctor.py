"""What this machine has of what OSDP uses: each check looks at one thing and says how to get it where it is missing."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from osdp.training.loopback import GLOO_INTERFACE, INTERFACE
from profiler.byte_sizes import format_bytes
from profiler.errors import first_line, install_advice

ALL_REDUCE_TIMEOUT_S = 60.0
"""After which ranks that do not meet are ended."""
SHARED_MEMORY = Path("/dev/shm")
_EXTRAS = (("hf", "transformers", "models of Hugging Face"), ("plot", "matplotlib", "pictures"))
"""Extras of setup.cfg, the module of each, and what it is for; CuPy is apart, since it depends on the driver."""
_ALL_REDUCE = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
backend, file, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
limit = timedelta(seconds=float(sys.argv[5]))
dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=limit)
total = torch.full((1024,), rank + 1.0, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(total)
assert total.eq(ranks * (ranks + 1) / 2).all(), total
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Check:
    """What was found of one thing."""

    name: str
    is_well: bool
    found: str
    """A version, a size, or what went wrong."""
    advice: str = ""
    """What to do where it is not well."""
    is_needed: bool = False
    """Whether planning, or training on CPUs, does not work without it."""


def checks() -> Iterator[Check]:
    """Yield every check as it is made; those of ranks and of planning take some seconds."""
    yield Check("Python", sys.version_info >= (3, 11), platform.python_version(), "Python 3.11 or newer", True)
    yield _package("torch", "PyTorch", "pip install 'torch>=2.11,<2.14'")
    yield _plans()
    yield all_reduce("gloo", 2)
    yield _shared_memory()
    yield _compiler()
    yield from _gpus()
    for extra, module, use in _EXTRAS:
        found = find_spec(module) is not None
        yield Check(module, found, "installed" if found else f"not installed, for {use}", install_advice(extra))


def _package(name: str, title: str, advice: str) -> Check:
    try:
        return Check(title, True, version(name), is_needed=True)
    except PackageNotFoundError:
        return Check(title, False, "not installed", advice, True)


def _plans() -> Check:
    """Plan a model of one layer."""
    try:
        from osdp.models.config import GPT2Config
        from osdp.models.gpt2 import GPT2
        from osdp.models.user_factory import source_of
        from osdp.planning.clusters import load_cluster
        from osdp.planning.request import Request, plan_model

        config = GPT2Config(32, 8, hidden_size=16, layers=1, heads=2)
        source = source_of(lambda: GPT2(config), "a model of one layer", None, None)
        plan_model(source, load_cluster("cpu-gloo", 1, 2), Request(1 << 30, micro_batch=1), lambda what, share: None)
    except Exception as error:  # whatever it is: a broken solver raises errors of its own
        return Check("planner", False, f"{type(error).__name__}: {first_line(error)}", "install OSDP again", True)
    return Check("planner", True, "plans a model of one layer", is_needed=True)


def all_reduce(backend: str, ranks: int, timeout_s: float = ALL_REDUCE_TIMEOUT_S) -> Check:
    """Check that `ranks` processes of this machine all-reduce with a backend, `gloo` or `nccl`, over loopback."""
    environment = {GLOO_INTERFACE: INTERFACE, **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-c", _ALL_REDUCE, backend, f"{folder}/store"]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(timeout_s)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            why = [one.communicate(timeout=timeout_s)[1] for one in started]
        except subprocess.TimeoutExpired:
            why = [f"no answer within {timeout_s:g} s"]
        finally:
            for one in started:
                one.kill()
                one.wait()
    is_needed = backend == "gloo"
    failed = any(one.returncode for one in started)
    if not failed:
        return Check(backend, True, f"{ranks} rank{'s' * (ranks > 1)} all-reduced", is_needed=is_needed)
    last = next((lines[-1] for lines in map(str.splitlines, why) if lines), "a rank failed")
    advice = f"check {GLOO_INTERFACE} and the firewall of the loopback interface" if is_needed else "check nvidia-smi"
    return Check(backend, False, last, advice, is_needed)


def _shared_memory() -> Check:
    try:
        size = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return Check(str(SHARED_MEMORY), False, error.strerror or str(error), "mount a tmpfs there, for strategy odc")
    found = f"{format_bytes(size.total)}, {format_bytes(size.free)} free"
    # Docker's default of 64 MiB holds the windows of toy models only.
    is_well = size.total > 64 << 20
    return Check(str(SHARED_MEMORY), is_well, found, "docker run --shm-size=8g, for strategy odc")


def _compiler() -> Check:
    found = next(
        (path for name in (os.environ.get("CXX") or "c++", "g++", "clang++") if (path := shutil.which(name))), ""
    )
    return Check("C++ compiler", bool(found), found or "none, for torch.compile", "apt-get install g++")


def _gpus() -> Iterator[Check]:
    """Yield what is about GPUs."""
    try:
        import torch
    except ImportError:
        return
    yield Check(
        "CUDA of PyTorch", torch.version.cuda is not None, torch.version.cuda or "a build for CPUs", _CUDA_BUILD
    )
    yield _driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield Check("GPUs", count > 0, f"{count}: {names}" if count else "none visible", "check nvidia-smi")
    if not count:
        yield Check("CuPy", find_spec("cupy") is not None, _cupy_version() or "not installed", _cupy_advice())
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    reached = f"not between {', '.join(apart)}" if apart else "between all GPUs"
    yield Check(
        "peer access", not apart, reached if pairs else "one GPU", "strategy odc needs it; nvidia-smi topo -p2p r"
    )
    yield all_reduce("nccl", 1)
    yield _cupy_compiles()


_CUDA_BUILD = "for GPUs: pip install torch from the index of its CUDA build"


def _driver() -> Check:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return Check("NVIDIA driver", bool(found), found[0] if found else "none", "for GPUs: install NVIDIA's driver")


def _cupy_version() -> str:
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _cupy_advice() -> str:
    import torch

    major = (torch.version.cuda or "12").split(".")[0]
    return install_advice(f"cuda{major}")


def _cupy_compiles() -> Check:
    """Compile a kernel and run it."""
    try:
        import cupy

        source = 'extern "C" __global__ void one(float* out) { out[threadIdx.x] = 1.0f; }'
        out = cupy.zeros(32, dtype=cupy.float32)
        cupy.RawKernel(source, "one")((1,), (32,), (out,))
        is_well = bool((out == 1).all())
    except Exception as error:  # CuPy's errors have no common class but this
        return Check("CuPy", False, f"{type(error).__name__}: {first_line(error)}", _cupy_advice())
    return Check("CuPy", is_well, f"{_cupy_version()}, compiles" if is_well else "a wrong result", _cupy_advice())
