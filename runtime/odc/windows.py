"""Windows: memory in which ranks of one machine publish shards and accumulate gradients for each other.

With n ranks and a window of s elements per rank, rank r keeps

    published[r]     (s,)  its shard in compute dtype
    accumulator[r]   (s,)  its part of the gradient, in fp32

which every rank has mapped, so that none has to wait for the others inside a step:

    publish      published[r] <- shard                           on the rank itself
    pull         out (n s,)   <- published[0], published[1], ..  from any rank, any number of times
    push         accumulator[p] += full[p s : (p + 1) s]         for all p, any number of times
    take         gradient <- accumulator[r], accumulator[r] <- 0 on the rank itself
    barrier      returns when all ranks have called it; whatever was done before is seen after it

A step is: publish, barrier, pulls and pushes, barrier, take, and the optimizer.  So what a rank does to
its own memory and what all do to everybody's are kept apart by barriers, which windows check on each rank:
there is one between the last publish and the next pull, between the last pull and the next publish,
and likewise for push and take.

An accumulator adds pushes in the order in which they arrive.  An *ordered*
transport keeps an accumulator for every rank's pushes and adds them up in the order of ranks, which
gives the same bits in every run for n - 1 times more fp32 shards of memory.

In a rank's memory windows lie one behind the other, and every part at a multiple of 256 bytes (`Region`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.errors import OsdpError
from runtime.failures.peer_faults import PeerLost
from runtime.failures.peer_lost import format_ranks
from runtime.failures.rank_agreement import Agreement
from runtime.odc.rendezvous import Rendezvous

ALIGNMENT_BYTES = 256
"""Of every part of the memory, as of what CUDA allocates: more than any vector access needs."""
FP32_BYTES = torch.float32.itemsize
FORMAT = 1
"""Of the shared memory; ranks must have the same."""
PUBLISHED_DTYPES = (torch.float32, torch.bfloat16)
OPPOSITE = {"publish": "pull", "pull": "publish", "push": "take_gradient", "take_gradient": "push"}
"""Actions that must not happen between the same two barriers: other ranks would see one half done."""


@dataclass(frozen=True)
class WindowSpec:
    """One communication group's window."""

    name: str
    """For messages: the unit's name."""
    shard_numel: int
    """Elements of a rank's shard, the same on all ranks (padded)."""
    dtype: torch.dtype
    """In which shards are published: fp32 or bf16."""
    frozen_numel: int = 0
    """Elements of the shard that get no gradient; pushes leave them out."""

    @property
    def gradient_numel(self) -> int:
        """Elements of a rank's part of the gradient."""
        return self.shard_numel - self.frozen_numel

    def __post_init__(self) -> None:
        if self.dtype not in PUBLISHED_DTYPES:
            what = f"window {self.name!r} cannot publish this dtype"
            advice = "set param_dtype of the unit to one of these"
            raise OsdpError(what, got=str(self.dtype), expected="torch.float32 or torch.bfloat16", advice=advice)
        if self.shard_numel < 1:
            what = f"window {self.name!r} is empty"
            got = f"shards of {self.shard_numel} elements"
            raise OsdpError(what, got=got, expected="at least one element", advice="leave out units without parameters")
        if not 0 <= self.frozen_numel <= self.shard_numel:
            what = f"window {self.name!r} cannot have so many frozen elements"
            raise OsdpError(what, got=str(self.frozen_numel), expected=f"0 to {self.shard_numel}")

    def __str__(self) -> str:
        frozen = f", {self.frozen_numel} of them frozen" if self.frozen_numel else ""
        return f"{self.name!r}: shards of {self.shard_numel} x {self.dtype}{frozen}"


@dataclass(frozen=True)
class Region:
    """Where a window lies in every rank's memory, in bytes from its start."""

    published: int
    """A shard in the window's dtype."""
    accumulators: int
    """Parts of the gradient in fp32: one, or one for each rank."""
    stride_numel: int
    """Elements from one accumulator to the next."""
    end: int
    """Start of the next window."""

    @classmethod
    def at(cls, start: int, spec: WindowSpec, accumulators: int) -> Region:
        """Lay out a window from `start` on."""
        first = start + _aligned(spec.shard_numel * spec.dtype.itemsize)
        stride_bytes = _aligned(spec.gradient_numel * FP32_BYTES)
        return cls(start, first, stride_bytes // FP32_BYTES, first + accumulators * stride_bytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Window:
    """One communication group's published shards and accumulators. Used by one thread at a time."""

    def __init__(self, transport: Transport, index: int, spec: WindowSpec) -> None:
        self.spec = spec
        self._transport, self._index = transport, index
        self._last: dict[str, int] = {}
        """After how many barriers each action was last done."""

    @property
    def device_type(self) -> str:
        """Device type of the tensors that it takes."""
        return self._transport.device_type

    def publish(self, *shards: Tensor) -> None:
        """Pack and cast this rank's tensors, s elements together, into its window; seen after the next barrier."""
        self._check("publish", sum(shard.numel() for shard in shards), self.spec.shard_numel, *shards)
        self._transport.publish(self._index, shards)

    def pull(self, out: Tensor) -> None:
        """Fill `out` (n s,), of the published dtype, with all shards in the order of ranks."""
        if "publish" not in self._last:
            raise OsdpError(f"window {self.spec.name!r} was never published", expected="publish() and barrier() before")
        if out.dtype != self.spec.dtype:
            what = f"the dtype of `out` is not that of window {self.spec.name!r}"
            raise OsdpError(what, got=str(out.dtype), expected=str(self.spec.dtype))
        self._check("pull", out.numel(), len(self._transport.ranks) * self.spec.shard_numel, out)
        self._transport.pull(self._index, out)

    def push(self, full: Tensor) -> None:
        """Add each rank's part of a gradient (n s,), of any floating-point dtype, to its accumulator."""
        self._check("push", full.numel(), len(self._transport.ranks) * self.spec.gradient_numel, full)
        self._transport.push(self._index, full)

    def take_gradient(self) -> Tensor:
        """Return this rank's sum of all pushes (s,), in fp32, and clear it for the next step."""
        self._check("take_gradient", 0, 0)
        return self._transport.take_gradient(self._index)

    def _check(self, action: str, got: int, expected: int, *tensors: Tensor) -> None:
        """Raise OsdpError for tensors that do not fit or a missing barrier; note the action."""
        self._transport.check_usable()
        device = self._transport.device_type
        if got != expected or not all(tensor.is_contiguous() and tensor.device.type == device for tensor in tensors):
            given = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
            what = f"window {self.spec.name!r} cannot {action} this"
            raise OsdpError(what, got=given, expected=f"{expected} contiguous elements on {device}")
        opposite = OPPOSITE[action]
        if self._last.get(opposite) == self._transport.barriers:
            what = f"window {self.spec.name!r}: {action} after {opposite} without a barrier"
            raise OsdpError(what, expected="a barrier of all ranks in between", advice="call barrier() first")
        self._last[action] = self._transport.barriers


class Transport(ABC):
    """The memory that a group's ranks share, and how it is reached. Making one and `barrier` are collective."""

    device_type: str
    """Device type of the tensors that it takes."""
    device_bytes: int = 0
    """What a rank has of a GPU's memory for it, beside PyTorch's allocator."""
    _place: Rendezvous | None = None
    """Where its ranks synchronize; nowhere in a dry run."""

    def __init__(self, group: dist.ProcessGroup, specs: Sequence[WindowSpec], timeout_s: float, ordered: bool) -> None:
        """Compare the windows of all ranks; raises OsdpError on every rank if they differ.

        Args:
            group: ranks of one machine.
            specs: the windows, in the same order on all ranks.
            timeout_s: how long a rank waits for another by default.
            ordered: whether sums are bitwise reproducible.
        """
        if not 0 < timeout_s < math.inf:
            raise OsdpError("a timeout must be positive and finite", got=f"{timeout_s} s")
        self.ranks = tuple(dist.get_process_group_ranks(group))
        """Global ranks, for messages."""
        self.rank, self.timeout_s, self.ordered, self.barriers = group.rank(), timeout_s, ordered, 0
        self.windows = tuple(Window(self, index, spec) for index, spec in enumerate(specs))
        self.agreement = Agreement(group, dist.get_rank(), group.size())
        self.accumulators = len(self.ranks) if ordered else 1
        """In each window of a rank."""
        self._unusable = ""
        self._check_same(specs)

    def _check_same(self, specs: Sequence[WindowSpec]) -> None:
        head = f"format {FORMAT}, {type(self).__name__}, {'' if self.ordered else 'not '}ordered, {len(specs)} windows"
        layouts = self.agreement.gather("compare windows", lambda: [head, *map(str, specs)])
        odd = [self.ranks[rank] for rank, layout in enumerate(layouts) if layout != layouts[0]]
        if odd:
            theirs = layouts[self.ranks.index(odd[0])]
            first = next(i for i in range(len(theirs)) if theirs[i : i + 1] != layouts[0][i : i + 1])
            what = f"the windows of {format_ranks(odd)} differ from those of rank {self.ranks[0]}"
            got, advice = f"{theirs[first]} on rank {odd[0]}", "the same model, plan and version of OSDP on every rank"
            raise OsdpError(what, got=got, expected=layouts[0][first], advice=advice)

    def _lay_out(self, header_bytes: int) -> int:
        """Set where windows lie in a rank's memory behind its first bytes; return its size."""
        self._regions: list[Region] = []
        size_bytes = _aligned(header_bytes)
        for window in self.windows:
            self._regions.append(Region.at(size_bytes, window.spec, self.accumulators))
            size_bytes = self._regions[-1].end
        return size_bytes

    def barrier(self, note: float = 0.0, timeout_s: float | None = None) -> tuple[float, ...]:
        """Wait for all ranks; return the notes of all (a weight, a number of micro-batches), in order of rank.

        Raises PeerLost, naming ranks, as soon as one is seen to be gone, or when one has not reached the barrier
        within `timeout_s`. The transport cannot be used after that.
        """
        self.check_usable()
        try:
            notes = self.wait_for_all(self.barriers + 1, note, self.timeout_s if timeout_s is None else timeout_s)
        except PeerLost:
            self.give_up()
            raise
        self.barriers += 1
        return notes

    def check_usable(self) -> None:
        """Raise OsdpError after `close` or a failed barrier."""
        if self._unusable:
            what = f"the windows cannot be used any more: they {self._unusable}"
            raise OsdpError(what, advice="see the first error, then start from the last checkpoint")

    def give_up(self) -> None:
        """Refuse all further use, and tell the others; to be called before PeerLost is raised."""
        self._unusable = "failed, as another rank is gone or did not reach a barrier"
        if self._place is not None:
            self._place.give_up(self.barriers + 1)

    def close(self) -> None:
        """Release the memory. Not collective: the others' next barrier raises PeerLost. May be called again."""
        self._unusable = self._unusable or "are closed"
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def publish(self, index: int, shards: Sequence[Tensor]) -> None:
        """Do what `Window.publish` says, for window `index`; arguments are checked, here and below."""

    @abstractmethod
    def pull(self, index: int, out: Tensor) -> None:
        """Do what `Window.pull` says."""

    @abstractmethod
    def push(self, index: int, full: Tensor) -> None:
        """Do what `Window.push` says. Raises PeerLost if a rank holds a lock for longer than the timeout."""

    @abstractmethod
    def take_gradient(self, index: int) -> Tensor:
        """Do what `Window.take_gradient` says."""

    @abstractmethod
    def wait_for_all(self, number: int, note: float, timeout_s: float) -> tuple[float, ...]:
        """Do what `barrier` says, for the barrier of this number (the first is 1)."""

    @abstractmethod
    def release(self) -> None:
        """Do what `close` says."""
