"""Models train through windows in GPUs' memory as one process does; the GPU is the CPU here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from host_device import FOLDER, HostDevice, build_kernels
from parity import TOLERANCE, Case, Trained, compare, reference, train
from ranks import run_ranks

from runtime.odc import step_protocol
from runtime.odc.gpu_windows import DeviceTransport
from runtime.odc.windows import Transport

CASES = (
    Case("uneven", {}, "odc:2", nodes=1, precision="bf16"),
    Case("llama", {}, "odc_ordered:2", nodes=1, accumulation=2),
)


def _trains(rank: int, library: Path, prefix: str) -> list[tuple[Trained | None, int]]:
    """Train all cases; return the results, and how many gathers the kernels did."""

    def open_on_device(
        group: dist.ProcessGroup, specs: Any, device_type: str, timeout_s: float, ordered: bool
    ) -> Transport:
        return DeviceTransport(group, specs, device, timeout_s, ordered)

    vars(step_protocol)["open_transport"] = open_on_device
    HostDevice.most = (1, 1)
    done = []
    for case in CASES:
        device = HostDevice(library, prefix)
        done.append((train(rank, case), device.launched["gather"]))
    return done


def test_models_train_through_the_kernels(tmp_path: Path) -> None:
    prefix = f"osdp-test-{os.getpid()}-training"
    try:
        results = run_ranks(_trains, 2, build_kernels(tmp_path), prefix)[0]
    finally:
        for left in FOLDER.glob(f"{prefix}*"):  # ranks of tests end without their exit handlers
            left.unlink()
    for case, (result, gathers) in zip(CASES, results, strict=True):
        compare(result, reference(case.family, 2, case.accumulation, case.precision), *TOLERANCE[case.precision])
        assert gathers > 10
