"""Windows in the memory of GPUs of one machine, which every rank's kernels reach by its address.

Every rank has one allocation for all windows, laid out alike, and opens those of its peers (CUDA IPC):

    flags | published 0 | published 1 | .. | accumulators 0 | accumulators 1 | ..

So one table of n addresses and an offset is all that the
kernels of `cuda/` take, and a window costs no handles of its own.  An ordered transport has an accumulator
for each rank in every window, a multiple of 256 bytes apart.

Everything goes to the current stream, and nobody waits for it but in a barrier.  That has two halves.  The
processes synchronize as on the CPU, by a page of shared memory each (`runtime.odc.rendezvous`), which carries their
notes and shows at once who died.  Then a kernel synchronizes the GPUs after all that was launched before; it waits
only for what GPUs have still to do, in slices, so that ranks that share a GPU get their turns and one that dies is
seen.  The host waits for its outcome: what is launched later, on any stream, comes after the barrier.

Shards of other GPUs are fetched by copy engines if they are large, and by few multiprocessors if they are small: a
kernel on all of them would keep the matrix multiplications of the layer before from running.  For the same reason
pushes into other GPUs take few of them.  That some 20 keep a link busy was not measured yet.

Memory is freed when no peer has it open any more.  A peer that neither closes nor dies within `LEAVE_S` keeps it
until this process ends.  If a process crashes, the driver frees what it had.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.host_copies import on_device
from runtime.odc.cupy_device import CupyDevice
from runtime.odc.kernels import BLOCKS_AT_ONCE, MOST_BLOCKS, THREADS, WHOLE_GPU, gather_grid, grid_for, near
from runtime.odc.rendezvous import Rendezvous
from runtime.odc.windows import FP32_BYTES, Transport, WindowSpec

FLAG_BYTES = 8
SLICE_S = 0.2
"""How long a barrier waits on the GPU before the host looks whether all ranks live."""
LEAVE_S = 2.0
"""How long a rank that closes waits for the others to close its memory."""
COPIED_BYTES = 256 << 10
"""From this size on, shards of other GPUs are fetched by copy engines; starting one takes some microseconds."""
REMOTE_MULTIPROCESSORS = 24
"""Of a GPU, at most, which pull from others or push into them."""
KERNEL_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Parts of kernels' names."""


class DeviceTransport(Transport):
    """Windows in the memory of GPUs."""

    _place: Rendezvous

    def __init__(
        self,
        group: dist.ProcessGroup,
        specs: Sequence[WindowSpec],
        device: CupyDevice,
        timeout_s: float = 600.0,
        ordered: bool = False,
    ) -> None:
        """Allocate this rank's windows and open those of the others. Collective.

        Raises OsdpError on every rank if windows differ between them or one cannot be made or opened.
        """
        super().__init__(group, specs, timeout_s, ordered)
        self._device, self.device_type = device, device.torch_device.type
        size_bytes = self._lay_out(FLAG_BYTES * len(self.ranks))
        self._place = Rendezvous(self.agreement, self.ranks, self.rank)
        self._starts: list[int] = []
        """Addresses of all ranks' memory, in order of rank."""
        self._table: Tensor
        """Those on the device."""
        self._seen: Tensor
        """Barriers at which the GPUs of the others were seen, and the status of the last."""
        self._sources: dict[int, tuple[list[list[int]], Tensor]] = {}
        """By window, where the shards were that it published last, and that table on the device."""
        self._open_all(size_bytes)
        self.device_bytes = size_bytes

    def _open_all(self, size_bytes: int) -> None:
        """Fill `_starts`, or leave nothing behind."""
        mine: list[int] = []

        def make() -> tuple[bytes, str]:
            mine.append(self._device.allocate(size_bytes))
            return self._device.export(mine[0]), self._device.identity

        def attach() -> None:
            for rank, (handle, _) in enumerate(handles):
                self._starts.append(mine[0] if rank == self.rank else self._device.open(handle))
            self._table = torch.tensor(self._starts, device=self._device.torch_device)
            self._seen = torch.zeros(len(handles) + 1, dtype=torch.int64, device=self._device.torch_device)
            are_here = [identity == self._device.identity for _, identity in handles]
            self._is_remote, self._near = not all(are_here), near(are_here)
            remote_room = min(self._device.room, REMOTE_MULTIPROCESSORS * BLOCKS_AT_ONCE)
            self._room = remote_room if self._is_remote else WHOLE_GPU

        try:
            handles = self.agreement.gather("make windows on its GPU", make)
            self.agreement.together("open the windows of the others", attach)
        except BaseException:
            self._let_go(mine)
            raise

    def publish(self, index: int, shards: Sequence[Tensor]) -> None:
        # The kernels read fp32; from there to the window's dtype is what was meant, or nothing.
        sources = [shard.detach().float() for shard in shards]
        counts = [source.numel() for source in sources]
        offsets = [sum(counts[:position]) for position in range(len(counts))]
        rows = [[source.data_ptr() for source in sources], offsets, counts]
        table = self._on_device(index, rows)
        blocks, _ = grid_for(max(counts), 4 * THREADS, 1, self._device.room)
        kernel = f"pack_cast_{KERNEL_DTYPES[self.windows[index].spec.dtype]}"
        window = self._starts[self.rank] + self._regions[index].published
        grid = blocks, min(len(counts), MOST_BLOCKS)
        self._launch(kernel, grid, *(row.data_ptr() for row in table), len(counts), window)

    def _on_device(self, index: int, rows: list[list[int]]) -> Tensor:
        """Return a table on the device: that of the last time, as a rule, since shards stay where they are."""
        last, table = self._sources.get(index, ([], self._seen))
        if last != rows:
            table = on_device(torch.tensor(rows), self._device.torch_device)
            self._sources[index] = rows, table
        return table

    def pull(self, index: int, out: Tensor) -> None:
        ranks, size_bytes = len(self.ranks), out.numel() * out.itemsize // len(self.ranks)
        table, offset = self._table.data_ptr(), self._regions[index].published
        # Then those of this GPU as well: of large shards a gather is 0.96 as fast as a copy (on an H200).
        if self._is_remote and size_bytes >= COPIED_BYTES:
            for rank in self._place.others_first():
                self._device.copy(self._starts[rank] + offset, out.data_ptr() + rank * size_bytes, size_bytes)
            return
        grid = gather_grid(size_bytes, ranks, self._room)
        self._launch("gather", grid, table, offset, size_bytes, ranks, self.rank, out.data_ptr())

    def push(self, index: int, full: Tensor) -> None:
        full = full.detach()
        full = full if full.dtype in KERNEL_DTYPES else full.float()
        ranks, region = len(self.ranks), self._regions[index]
        count = full.numel() // ranks
        if not count:
            return
        offset = region.accumulators // FP32_BYTES + (self.rank * region.stride_numel if self.ordered else 0)
        grid = grid_for(count, 4 * THREADS, ranks, self._room)
        # A slot has one writer, so that adding into it need not be atomic, which not every link between GPUs can.
        how = "scatter_accumulate_alone" if self.ordered else "scatter_accumulate"
        kernel, table = f"{how}_{KERNEL_DTYPES[full.dtype]}", self._table.data_ptr()
        arguments = full.data_ptr(), table, offset, count, ranks, self.rank, self._near
        # Of pushes that are not atomic the next must find what the last has stored, whatever their streams.
        self._device.launch(kernel, grid, THREADS, arguments, subject=index if self.ordered else None)

    def sums(self) -> Tensor:
        return self._device.tensor(self._starts[self.rank] + self._layout.sums, self._layout.sums_numel)

    def take_gradient(self, index: int) -> Tensor:
        region, count = self._regions[index], self.windows[index].spec.gradient_numel
        gradient = torch.empty(count, device=self._device.torch_device)
        if count:
            slots = self._starts[self.rank] + region.accumulators
            grid, out = grid_for(count, 4 * THREADS, 1, self._device.room), gradient.data_ptr()
            self._launch("take_gradient", grid, slots, region.stride_numel, self.accumulators, count, out)
        return gradient

    def wait_for_all(self, number: int, note: float, timeout_s: float) -> tuple[float, ...]:
        end_s = time.monotonic() + timeout_s
        notes = self._place.wait(number, note, timeout_s)
        self._device.join()
        self._wait_for_gpus(number, timeout_s, end_s)
        return notes

    def _wait_for_gpus(self, number: int, timeout_s: float, end_s: float) -> None:
        """Return when all that ranks launched before the barrier is done. Raises PeerLost."""
        gone: dict[int, str] = {}
        while late := self._late(number, min(SLICE_S, timeout_s)):
            # One that reached it on the GPU and ended since is not lost, so the GPU is asked once more.
            lost = {rank: how for rank, how in gone.items() if rank in late}
            if not lost and time.monotonic() >= end_s:
                lost = dict.fromkeys(late, "reached the barrier, but its GPU did not")
            if lost:
                raise self._place.lost(lost, number, timeout_s)
            gone = {rank: how for rank in late if (how := self._place.gone(rank))}

    def _late(self, number: int, slice_s: float) -> list[int]:
        """Synchronize the GPUs; return the ranks whose GPU did not reach the barrier within a slice of time."""
        ranks, seen = len(self.ranks), self._seen.data_ptr()
        threads = min(1024, -(-ranks // 32) * 32)
        slice_ns, status, table = round(1e9 * slice_s), seen + FLAG_BYTES * ranks, self._table.data_ptr()
        self._launch("barrier", (1, 1), table, ranks, self.rank, number, slice_ns, seen, status, threads=threads)
        *seen_at, failed = self._seen.tolist()  # waits for the barrier
        return [rank for rank, barrier in enumerate(seen_at) if barrier < number] if failed else []

    def release(self) -> None:
        if self._starts:
            self._let_go([self._starts[self.rank]])

    def _let_go(self, mine: Sequence[int]) -> None:
        """Close what is open, free this rank's memory as soon as nobody uses it, and leave."""
        self._device.synchronise()
        for start in self._starts:
            if start not in mine:
                self._device.close(start)
        self._starts.clear()
        if self._place.leave(LEAVE_S):
            for start in mine:
                self._device.free(start)
        self._place.release()

    def _launch(self, kernel: str, grid: tuple[int, int], *arguments: int, threads: int = THREADS) -> None:
        self._device.launch(kernel, grid, threads, arguments)
