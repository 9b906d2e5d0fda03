"""One-sided communication: compiled kernels, their speed, streams, processes, models, and what a sanitizer sees."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from validation.check import Finding, Place, skipped
from validation.processes import ROOT, command_output, run_tests

SHARDS_MB = (1, 4, 16, 64, 256)
LONG_SHARDS_MB = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SMALL_MB = 4
"""Shards up to this size may be slower than larger ones."""
LEAST_SHARES = {"gather": 0.95, "push": 0.90, "pack": 0.90, "cast": 0.90, "take": 0.90}
"""Of the rate of a copy or, of pushes, of an addition in place."""
LEAST_SMALL_GATHER = 0.90
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def compile_kernels(place: Place) -> Finding:
    """CuPy compiles every kernel once; without a GPU, NVRTC does for three architectures."""
    if place.is_dry:
        return run_tests(place, ["unit/test_kernels.py"], "compiles", 120.0)
    return run_tests(place, ["gpu/test_odc_gpu.py"], "compiled", 120.0)


def bandwidth(place: Place) -> Finding:
    """Time the kernels beside copies and additions of PyTorch."""
    sizes = LONG_SHARDS_MB if place.is_long else SHARDS_MB
    if place.is_dry:
        return Finding(True, "recorded; on CPU threads no speed means anything", dict(_dry_rates(place)))
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "odc_gpu.py"), "--json", "--rounds"]
    command += ["200" if place.is_long else "30", "--megabytes", *map(str, sizes)]
    status, output = command_output(command, 240.0)
    if status:
        return Finding(False, f"the benchmark ended with {status}\n{output[-2000:]}")
    return judge(json.loads(output[output.index("{") :])["results"])


def judge(results: Sequence[dict[str, Any]]) -> Finding:
    """Compare shares with their targets."""
    slow, figures = [], {}
    for one in results:
        name, size_mb, share = one["contestant"], one["shard_bytes"] / 1e6, one["share"][1]
        least = LEAST_SHARES.get(name)
        if name == "gather" and size_mb <= SMALL_MB:
            least = LEAST_SMALL_GATHER
        figures[f"{name}, shards of {size_mb:.0f} MB"] = f"{one['gb_per_s']:.0f} GB/s, share {share:.3f}"
        if least is not None and share < least:
            slow.append(f"{name}, shards of {size_mb:.0f} MB: {share:.3f} of its basis, wanted {least}")
    judged = sum(one["contestant"] in LEAST_SHARES for one in results)
    return Finding(not slow, "\n".join([f"{judged - len(slow)} of {judged} rates reach their targets", *slow]), figures)


def _dry_rates(place: Place) -> dict[str, float]:
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    import odc_gpu
    from host_device import HostDevice, build_kernels

    device = HostDevice(build_kernels(place.scratch), "unused")
    found = odc_gpu.measure(device, 2, 4000, 2, 1)
    return {f"{one.contestant}_gb_per_s": one.gb_per_s for one in found}


def streams(place: Place) -> Finding:
    """Publish, push and take on streams that lag behind; and see it fail where barriers do not join them."""
    file = "gloo/test_odc_device_windows.py" if place.is_dry else "gpu/test_odc_gpu.py"
    return run_tests(place, [file], "streams", 200.0)


def processes(place: Place) -> Finding:
    """Windows among processes: uneven, dead, late and hung ranks."""
    if place.is_dry:
        return run_tests(place, ["gloo/test_odc_device_windows.py"], "not streams", 300.0)
    tests, keyword = ["gpu/test_odc_gpu.py"], "(windows or bits or lost) and not streams and not memory"
    found = [run_tests(place, tests, keyword, 150.0, how) for how in ({}, EXPANDABLE)]
    told = [f"{name}: {one.told}" for name, one in zip(("as is", "expandable segments"), found, strict=True)]
    passed = None if found[0].passed is None else all(one.passed for one in found)
    return Finding(passed, "; ".join(told), {"as_is": found[0].figures, "expandable_segments": found[1].figures})


def left_behind(place: Place) -> Finding:
    """Closed windows leave no memory behind: on a GPU that nothing else uses, as what is free there is compared."""
    return run_tests(place, ["gpu/test_odc_gpu.py"], "memory", 130.0)


def models(place: Place) -> Finding:
    """Models train through windows as in one process."""
    if place.is_dry:
        return run_tests(place, ["gloo/test_odc_device_training.py", "gloo/test_odc_library.py"], "", 300.0)
    return run_tests(place, ["gpu/test_odc_training_gpu.py"], "", 240.0)


def sanitize(place: Place) -> Finding:
    """Run small cases of the kernels under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if place.is_dry:
        return skipped("compute-sanitizer watches a GPU")
    if tool is None:
        return skipped("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    ends = {}
    for name in ("memcheck", "initcheck"):
        command = [tool, "--tool", name, "--error-exitcode", "9", sys.executable, "-m", "validation.kernels", "cuda"]
        status, output = command_output(command, 200.0)
        ends[name] = status
        if status:
            return Finding(False, f"{name} ended with {status}\n{output[-2000:]}", ends)
    return Finding(True, "no errors", ends)
