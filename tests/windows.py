"""Windows over all ranks, and numbers to put into them, for the tests of ODC."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.odc import shared_memory
from runtime.odc.shared_memory import SharedMemoryTransport
from runtime.odc.windows import WindowSpec

CHUNK_NUMEL = 1000
"""In place of the real one, so that small windows have many chunks to quarrel about."""
SIZES = (1, 7, 999, 1000, 1001, 20011)
"""Elements of a shard."""
SPECS = tuple(
    WindowSpec(f"layer {size} {dtype}", size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)
)


def open_transport(
    specs: tuple[WindowSpec, ...] = SPECS, timeout_s: float = 60.0, ordered: bool = False
) -> SharedMemoryTransport:
    """Open windows over all ranks."""
    shared_memory.CHUNK_NUMEL = CHUNK_NUMEL
    group = dist.group.WORLD
    assert group is not None
    return SharedMemoryTransport(group, specs, timeout_s, ordered)


def integers(numel: int, *seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random integers whose sums are exact in fp32, whatever their order, and which bf16 holds too."""
    generator = torch.Generator().manual_seed(hash(seed) % (1 << 31))
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def sums_large_windows(rank: int) -> bool:
    """Use the real chunk, and a window of two and a half of them."""
    numel = int(2.5 * (1 << 18))
    transport = open_transport((WindowSpec("large", numel, torch.float32),))
    shared_memory.CHUNK_NUMEL = 1 << 18
    with transport:
        for _ in range(4):
            transport.windows[0].push(integers(2 * numel, rank))
        transport.barrier()
        wanted = 4 * (integers(2 * numel, 0) + integers(2 * numel, 1)).view(2, -1)[rank]
        return torch.equal(transport.windows[0].take_gradient(), wanted)
