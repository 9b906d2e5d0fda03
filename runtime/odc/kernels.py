"""The kernels of `cuda/`: in which source each is, and how many blocks it is worth."""

from collections.abc import Sequence
from pathlib import Path

from profiler.errors import OsdpError

SOURCES = {
    "pack_cast_bf16": "pack_cast.cu",
    "pack_cast_fp32": "pack_cast.cu",
    "gather": "gather.cu",
    "scatter_accumulate_bf16": "scatter_accumulate.cu",
    "scatter_accumulate_fp32": "scatter_accumulate.cu",
    "scatter_accumulate_alone_bf16": "scatter_accumulate.cu",
    "scatter_accumulate_alone_fp32": "scatter_accumulate.cu",
    "take_gradient": "scatter_accumulate.cu",
    "barrier": "barrier.cu",
}
"""File of each kernel."""
FOLDERS = tuple(Path(__file__).resolve().parents[2] / folder for folder in ("cuda", "osdp/cuda"))
"""Of a checkout, and of an installation."""
THREADS = 256
"""Of a block, as the launch notes of the sources have it."""
BLOCKS_AT_ONCE = 8
"""Of that size, on a multiprocessor of an A100, H100 or B200, which have room for 2048 threads."""
MOST_BLOCKS = 65535
"""Along y."""
WHOLE_GPU = 2**31 - 1
"""Room of a launch that leaves multiprocessors to no other: with a block for each part rather than as many as run at
once, gathers and pushes are 5 % faster (measured on an H200)."""

ALL_NEAR = 2**64 - 1
"""Of pushes all of whose windows are in this GPU's memory."""


def near(are_here: Sequence[bool]) -> int:
    """Return, for pushes, a bit of each peer whose window is in this GPU's memory; of the first 64, as kernels have."""
    return sum(1 << peer for peer, is_here in enumerate(are_here[:64]) if is_here)


def source_of(file: str) -> str:
    """Return a CUDA source. Raises OsdpError if it was not installed."""
    for folder in FOLDERS:
        if (folder / file).is_file():
            return (folder / file).read_text()
    what = f"the CUDA source {file} is missing"
    raise OsdpError(what, expected=f"it in {' or '.join(map(str, FOLDERS))}", advice="install osdp again")


def grid_for(numel: int, per_block: int, rows: int, room: int) -> tuple[int, int]:
    """Return a grid (x, y) for rows of equal length, as the launch notes of the sources advise.

    Args:
        numel: of a row.
        per_block: how much of a row a block does at once.
        rows: peers or segments.
        room: blocks that there may be.
    """
    blocks = max(1, min(-(-numel // per_block), room))
    return blocks, max(1, min(rows, room // blocks))


def gather_grid(size_bytes: int, peers: int, room: int) -> tuple[int, int]:
    """Return the grid of a gather: its threads have four accesses of 16 bytes at once, and twice the registers of
    others, so that half as many blocks run at once."""
    return grid_for(size_bytes, 4 * 16 * THREADS, peers, max(1, room // 2))
