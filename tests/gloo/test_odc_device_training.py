"""Models train through windows in GPUs' memory as one process does; the GPU is the CPU here, with a second stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from host_device import FOLDER, HostDevice, HostStream, build_kernels
from parity import TOLERANCE, Case, Trained, compare, reference, train
from ranks import run_ranks

from runtime.odc import step_protocol
from runtime.odc.gpu_windows import DeviceTransport
from runtime.odc.windows import Transport

CASES = (
    Case("uneven", {}, "odc:2", nodes=1, precision="bf16"),
    Case("llama", {}, "odc_ordered:2", nodes=1, accumulation=2),
)


class Lagging(HostDevice):
    """Publishes and pushes on a stream that lags behind, as FSDP2 reduces on one of its own."""

    def __init__(self, library: Path, prefix: str) -> None:
        super().__init__(library, prefix)
        self.side = HostStream(0, longest_delay_s=1e-3)
        self.read: list[Any] = []
        """Copies of what was pushed."""

    def launch(
        self, kernel: str, grid: Any, threads: int, arguments: Sequence[int], subject: int | None = None
    ) -> None:
        if not kernel.startswith(("pack_cast", "scatter")):
            super().launch(kernel, grid, threads, arguments, subject)
            return
        if kernel.startswith("scatter"):
            # A GPU's memory is used again in the order of its streams, and so after it was read: here it is copied.
            gradient, _, _, count, ranks, *_ = arguments
            size_bytes = count * ranks * (2 if kernel.endswith("bf16") else 4)
            self.read.append(ctypes.create_string_buffer(ctypes.string_at(gradient, size_bytes), size_bytes))
            arguments = (ctypes.addressof(self.read[-1]), *arguments[1:])
        with self.on(self.side):
            super().launch(kernel, grid, threads, arguments, subject)


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
        device = Lagging(library, prefix)
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
