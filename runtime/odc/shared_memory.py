"""Windows in POSIX shared memory, for ranks on the CPU of one machine.

Every rank has one file for all windows, each peer maps all of them (`runtime.odc.shared_segment`):

    header | published 0 | published 1 | .. | accumulators 0 | accumulators 1 | ..

A push adds chunk by chunk, each under a lock of its own, begins
with the rank after its own and leaves chunks that another rank has locked for later, so that ranks
hardly wait for each other.  An ordered transport has an accumulator per source, which only that one
writes, and needs no locks.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError
from runtime.failures.liveness import boot_id
from runtime.failures.rank_agreement import Agreement
from runtime.odc.rendezvous import Rendezvous
from runtime.odc.shared_segment import FOLDER, HEADER_BYTES, Patience
from runtime.odc.windows import FP32_BYTES, Transport, WindowSpec

CHUNK_NUMEL = 1 << 18
"""Elements that are added under one lock: 1 MiB of fp32, some twenty times the time of the lock itself."""


class SharedMemoryTransport(Transport):
    """Windows in the shared memory of one machine."""

    device_type = "cpu"
    _place: Rendezvous

    def __init__(
        self, group: dist.ProcessGroup, specs: Sequence[WindowSpec], timeout_s: float = 600.0, ordered: bool = False
    ) -> None:
        """Make this rank's segment and map those of the others. Collective.

        Raises OsdpError on every rank if windows differ between them, if they cannot share memory
        (`can_share`) or if there is too little of it.
        """
        super().__init__(group, specs, timeout_s, ordered)
        reason = can_share(group)
        if reason:
            what = f"these ranks cannot share memory: {reason}"
            raise OsdpError(what, advice="keep an ODC group inside one machine, or choose another strategy")
        size_bytes = self._lay_out(HEADER_BYTES)
        self._place = Rendezvous(self.agreement, self.ranks, self.rank, size_bytes)
        self._segments = self._place.segments
        self._published: list[list[Tensor]] = []
        self._sums: list[list[Tensor]] = []
        """(accumulators, s) of each window and rank."""
        for region, spec in zip(self._regions, specs, strict=True):
            shape, padded_numel = (self.accumulators, region.stride_numel), self.accumulators * region.stride_numel
            shards = [segment.tensor(region.published, spec.shard_numel, spec.dtype) for segment in self._segments]
            sums = [segment.tensor(region.accumulators, padded_numel, torch.float32) for segment in self._segments]
            self._published.append(shards)
            self._sums.append([padded.view(shape)[:, : spec.gradient_numel] for padded in sums])

    def publish(self, index: int, shards: Sequence[Tensor]) -> None:
        target = self._published[index][self.rank]
        parts = torch.split(target, [shard.numel() for shard in shards])
        for part, shard in zip(parts, shards, strict=True):
            part.copy_(shard.detach().view(-1))

    def pull(self, index: int, out: Tensor) -> None:
        parts = out.view(len(self.ranks), -1)
        for rank in self._place.others_first():
            parts[rank].copy_(self._published[index][rank])

    def push(self, index: int, full: Tensor) -> None:
        parts = full.detach().view(len(self.ranks), -1)
        sums = self._sums[index]
        if self.ordered:
            for rank in self._place.others_first():
                # In chunks, as a sum of different dtypes makes a copy first, which is to fit into the cache.
                chunks = torch.split(sums[rank][self.rank], CHUNK_NUMEL)
                for chunk, part in zip(chunks, torch.split(parts[rank], CHUNK_NUMEL), strict=True):
                    chunk.add_(part)
            return
        starts = range(0, parts.size(1), CHUNK_NUMEL)
        pending = [(rank, start) for rank in self._place.others_first() for start in starts]
        patience = Patience(self.timeout_s)
        while pending:
            busy = [(rank, start) for rank, start in pending if not self._add(index, rank, start, parts[rank])]
            if len(busy) < len(pending):
                patience = Patience(self.timeout_s)
            elif not patience.sleep():
                self.give_up()
                raise self._place.held(busy[0][0], self._range(index, *busy[0]), self.timeout_s)
            pending = busy

    def sums(self) -> Tensor:
        return self._segments[self.rank].tensor(self._layout.sums, self._layout.sums_numel, torch.float32)

    def take_gradient(self, index: int) -> Tensor:
        sums = self._sums[index][self.rank]
        gradient = sums[0].clone()
        for other in sums[1:]:
            gradient.add_(other)
        sums.zero_()
        return gradient

    def wait_for_all(self, number: int, note: float, timeout_s: float) -> tuple[float, ...]:
        return self._place.wait(number, note, timeout_s)

    def release(self) -> None:
        self._published.clear()
        self._sums.clear()
        self._place.release()

    def _range(self, index: int, rank: int, start: int) -> tuple[int, int]:
        """Return the bytes of a chunk in a rank's segment: offset and length."""
        numel = min(CHUNK_NUMEL, self._sums[index][rank].size(1) - start)
        return self._regions[index].accumulators + start * FP32_BYTES, numel * FP32_BYTES

    def _add(self, index: int, rank: int, start: int, part: Tensor) -> bool:
        """Add a chunk of a rank's part of a gradient, unless another rank has it locked."""
        segment, place = self._segments[rank], self._range(index, rank, start)
        if not segment.try_lock(*place):
            return False
        try:
            end = start + CHUNK_NUMEL
            self._sums[index][rank][0, start:end].add_(part[start:end])
        finally:
            segment.unlock(*place)
        return True


def can_share(group: dist.ProcessGroup) -> str:
    """Return why the ranks of a group cannot share memory; empty if they can. Collective."""
    ranks = dist.get_process_group_ranks(group)
    places = Agreement(group, dist.get_rank(), group.size()).gather("look for shared memory", _shared_place)
    for rank, (place, reason) in zip(ranks, places, strict=True):
        if reason:
            return f"rank {rank} {reason}"
        if place[0] != places[0][0][0]:
            return f"rank {rank} is on another machine than rank {ranks[0]}"
        if place != places[0][0]:
            return f"rank {rank} has another {FOLDER} than rank {ranks[0]} (another container?)"
    return ""


def _shared_place() -> tuple[tuple[str, ...], str]:
    """Return what identifies this process' shared memory (boot, file system, folder), or why there is none.

    The numbers of file systems in memory are unique in one kernel.
    """
    if not sys.platform.startswith("linux"):
        return (), f"runs on {sys.platform}, not Linux"
    with suppress(OSError):
        boot, found = boot_id(), FOLDER.stat()
        if os.access(FOLDER, os.R_OK | os.W_OK | os.X_OK):
            return (boot, str(found.st_dev), str(found.st_ino)), ""
    return (), f"has no {FOLDER} that it may write to"
