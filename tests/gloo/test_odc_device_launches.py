"""What windows in GPUs' memory launch: how much of a GPU, which kernels, and what is made again in every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from host_device import FOLDER, HostDevice, open_windows
from ranks import run_ranks
from torch import Tensor
from windows import integers

from runtime.host_copies import on_device
from runtime.odc import gpu_windows
from runtime.odc.gpu_windows import COPIED_BYTES
from runtime.odc.windows import WindowSpec

RANKS = 7
"""So many that rows for all of them would need more than the multiprocessors that there are for other GPUs."""
SMALL = WindowSpec("small", COPIED_BYTES // 4 - 1, torch.float32)
"""Four bytes less than what copy engines fetch."""
LARGE = WindowSpec("large", 200_000, torch.float32)


class Launch(NamedTuple):
    """What a device was asked for."""

    kernel: str
    grid: tuple[int, int]
    arguments: tuple[int, ...]
    subject: int | None


class Noting(HostDevice):
    """Notes launches. It has as many multiprocessors as an H100, of which the threads of the CPU show little."""

    room = 132 * 8
    most = (1, 1)

    def __init__(self, library: Path, prefix: str, identity: str = "gpu 0") -> None:
        super().__init__(library, prefix, identity)
        self.noted: list[Launch] = []

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, arguments: Sequence[int], subject: int | None = None
    ) -> None:
        self.noted.append(Launch(kernel, grid, tuple(arguments), subject))
        super().launch(kernel, grid, threads, arguments, subject)


# --- how much of a GPU


def _grids(rank: int, library: Path, prefix: str, gpus: int) -> tuple[bool, list[tuple[int, int]]]:
    """Pull and push a small window and push a large one, on some of as many GPUs; return whether all sums were right,
    and the grids."""
    device = Noting(library, prefix, f"gpu {rank % gpus}")
    with open_windows(device, (SMALL, LARGE)) as transport:
        small, large = transport.windows
        small.publish(integers(SMALL.shard_numel, rank))
        transport.barrier()
        out = torch.empty(RANKS * SMALL.shard_numel)
        small.pull(out)
        small.push(out)
        large.push(torch.full((RANKS * LARGE.shard_numel,), rank + 1.0))
        transport.barrier()
        right = torch.equal(out, torch.cat([integers(SMALL.shard_numel, other) for other in range(RANKS)]))
        right &= torch.equal(small.take_gradient(), RANKS * integers(SMALL.shard_numel, rank))
        right &= bool((large.take_gradient() == 28.0).all())  # 1 + 2 + .. + 7
    assert device.launched["copy"] == 0
    return right, [one.grid for one in device.noted if one.kernel in ("gather", "scatter_accumulate_fp32")]


@pytest.mark.parametrize(
    ("gpus", "grids"),
    [
        (1, [(16, RANKS), (64, RANKS), (196, RANKS)]),
        (2, [(16, 6), (64, 3), (192, 1)]),
        (RANKS, [(16, 6), (64, 3), (192, 1)]),
    ],
)
def test_few_multiprocessors_serve_other_gpus(
    gpus: int, grids: list[tuple[int, int]], library: Path, prefix: str
) -> None:
    """A small shard is 16 blocks' worth of a gather, of 16 KiB each, and 64 of a push, of 1024 elements each.

    24 multiprocessors run 24 x 2048 threads of a push at once, which are 192 blocks of 256, and half as many of a
    gather, whose threads have twice the registers: 16 x 6.  Where all ranks share a GPU, each part of each shard has a
    block.
    """
    assert run_ranks(_grids, RANKS, library, prefix, gpus) == [(True, grids)] * RANKS
    assert list(FOLDER.glob(f"{prefix}*")) == []


def _pulls_large(rank: int, library: Path, prefix: str, ranks_per_gpu: int) -> tuple[bool, int, int]:
    """Pull a window that copy engines would fetch; return whether that was right, and the copies and gathers."""
    device, numel = Noting(library, prefix, f"gpu {rank // ranks_per_gpu}"), COPIED_BYTES // 4
    with open_windows(device, (WindowSpec("copied", numel, torch.float32),)) as transport:
        transport.windows[0].publish(integers(numel, rank))
        transport.barrier()
        out = torch.empty(3 * numel)
        transport.windows[0].pull(out)
        transport.barrier()
    right = torch.equal(out, torch.cat([integers(numel, other) for other in range(3)]))
    return right, device.launched["copy"], device.launched["gather"]


@pytest.mark.parametrize(("ranks_per_gpu", "copies", "gathers"), [(3, 0, 1), (2, 3, 0)])
def test_shards_of_this_gpu_are_copied_with_those_of_others(
    ranks_per_gpu: int, copies: int, gathers: int, library: Path, prefix: str
) -> None:
    """But where all ranks share a GPU, one gather fetches all."""
    assert run_ranks(_pulls_large, 3, library, prefix, ranks_per_gpu) == [(True, copies, gathers)] * 3


# --- which kernels


def _push_of_the_second_window(rank: int, library: Path, prefix: str, ordered: bool) -> list[tuple[str, int | None]]:
    device = Noting(library, prefix)
    specs = tuple(WindowSpec(name, 300, torch.float32) for name in "ab")
    with open_windows(device, specs, ordered=ordered) as transport:
        for dtype in (torch.float32, torch.bfloat16):
            transport.windows[1].push(torch.ones(300, dtype=dtype))
    return [(one.kernel, one.subject) for one in device.noted if one.kernel.startswith("scatter")]


def test_pushes_are_atomic_or_follow_each_other(library: Path, prefix: str) -> None:
    """Those into a slot of one writer find what the last one of the same window has stored; others wait for nobody."""
    kernel = "scatter_accumulate_alone"
    (found,) = run_ranks(_push_of_the_second_window, 1, library, prefix, True)
    assert found == [(f"{kernel}_fp32", 1), (f"{kernel}_bf16", 1)]
    (found,) = run_ranks(_push_of_the_second_window, 1, library, prefix, False)
    assert found == [("scatter_accumulate_fp32", None), ("scatter_accumulate_bf16", None)]


# --- what is made again


def _three_steps(rank: int, library: Path, prefix: str) -> tuple[list[list[Launch]], list[list[list[int]]]]:
    """Return the launches of each step but for barriers and taking, and the pointer tables that were made.

    Weights and what is pulled and pushed stay where they are; those of the first window move before the last step.
    """
    device, tables = Noting(library, prefix), list[list[list[int]]]()
    specs = tuple(WindowSpec(f"of {numel}", numel, torch.float32) for numel in (301, 40))
    weights = [[integers(spec.shard_numel - 7, number), integers(7, number)] for number, spec in enumerate(specs)]
    full = [torch.empty(spec.shard_numel) for spec in specs]
    steps = []

    def noting(table: Tensor, there: torch.device) -> Tensor:
        tables.append(table.tolist())
        return on_device(table, there)

    with patch.object(gpu_windows, "on_device", noting), open_windows(device, specs) as transport:
        for step in range(3):
            if step == 2:
                weights[0] = [weight.clone() for weight in weights[0]]
            device.noted.clear()
            for window, shards in zip(transport.windows, weights, strict=True):
                for shard in shards:
                    shard.add_(step)
                window.publish(*shards)
            transport.barrier()
            for window, shards, out in zip(transport.windows, weights, full, strict=True):
                window.pull(out)
                window.push(out)
                assert torch.equal(out, torch.cat(shards))
            transport.barrier()
            for window, out in zip(transport.windows, full, strict=True):
                assert torch.equal(window.take_gradient(), out)
            steps.append([one for one in device.noted if one.kernel not in ("barrier", "take_gradient")])
    places: list[Any] = [[shard.data_ptr() for shard in weights[number]] for number in (0, 1)]
    assert [table[0] for table in tables[1:]] == [places[1], places[0]]
    return steps, tables


def test_a_step_launches_what_the_last_one_did(library: Path, prefix: str) -> None:
    """Tables of where weights are go to the device once, so that arguments are the same; other weights have another."""
    ((first, second, third), tables) = run_ranks(_three_steps, 1, library, prefix)[0]
    assert [one.kernel for one in first] == 2 * ["pack_cast_fp32"] + 2 * ["gather", "scatter_accumulate_fp32"]
    assert second == first
    assert [table[1:] for table in tables] == [[[0, 294], [294, 7]], [[0, 33], [33, 7]], [[0, 294], [294, 7]]]
    assert third[0] != first[0]
    assert third[1:] == first[1:]
