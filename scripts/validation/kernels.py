"""The kernels of `cuda/` against PyTorch, bit by bit: odd sizes and places, numbers that are none, adds at once.

`python -m validation.kernels cuda` runs the small cases alone, for tools that watch a program's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.odc.kernels import ALL_NEAR, THREADS, WHOLE_GPU, gather_grid, grid_for
from validation.check import Finding, Place

SIZES = (1, 7, 999, (1 << 20) + 3)
DRY_SIZES = (1, 7, 999, (1 << 17) + 3)
"""On CPU threads, of which a large gather starts many thousands."""
HUGE = (1 << 31) + 5
"""Elements that no 32-bit index reaches."""
HUGE_FREE_BYTES = 40 << 30
"""What they need."""
SKIPS = (0, 1, 3)
"""Elements from a boundary of 16 bytes to where an array begins."""
PEERS = 3
POISON = float("nan")
QUIET_NAN = 0x7FC0
"""Bits of what every NaN becomes in bf16."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Kernels:
    """A device, and how to launch on streams of it."""

    device: Any
    """`CupyDevice`, or what stands for it in dry runs."""
    streams: Sequence[AbstractContextManager[None]]
    """Contexts in which launches go to streams of their own; each may be entered many times."""

    @property
    def where(self) -> torch.device:
        """Where tensors must be."""
        found: torch.device = self.device.torch_device
        return found

    def pack(self, parts: Sequence[Tensor], window: Tensor) -> None:
        """Copy parts one behind the other into a window of its dtype."""
        counts = [part.numel() for part in parts]
        offsets = [sum(counts[:index]) for index in range(len(counts))]
        table = torch.tensor([[part.data_ptr() for part in parts], offsets, counts], device=self.where)
        grid = grid_for(max(counts), 4 * THREADS, 1, self.device.room)[0], len(counts)
        arguments = (*(row.data_ptr() for row in table), len(counts), window.data_ptr())
        self._run(f"pack_cast_{NAMES[window.dtype]}", grid, arguments)

    def gather(self, windows: Sequence[Tensor], out: Tensor, rank: int) -> None:
        """Copy all windows into one tensor."""
        size_bytes = out.numel() * out.itemsize // len(windows)
        grid = gather_grid(size_bytes, len(windows), WHOLE_GPU)
        table = self._table(windows)
        self._run("gather", grid, (table.data_ptr(), 0, size_bytes, len(windows), rank, out.data_ptr()))

    def push(
        self, gradient: Tensor, accumulators: Sequence[Tensor], rank: int, table: Tensor, *, alone: bool = False
    ) -> None:
        """Add the parts of a gradient to the accumulators, which nobody else adds to if `alone`; does not wait."""
        count = gradient.numel() // len(accumulators)
        grid = grid_for(count, 4 * THREADS, len(accumulators), WHOLE_GPU)
        kernel = f"scatter_accumulate_{'alone_' if alone else ''}{NAMES[gradient.dtype]}"
        arguments = gradient.data_ptr(), table.data_ptr(), 0, count, len(accumulators), rank, ALL_NEAR
        self.device.launch(kernel, grid, THREADS, arguments)

    def take(self, slots: Tensor, stride: int, number: int, gradient: Tensor) -> None:
        """Sum slots in order and clear them."""
        grid = grid_for(gradient.numel(), 4 * THREADS, 1, self.device.room)
        self._run("take_gradient", grid, (slots.data_ptr(), stride, number, gradient.numel(), gradient.data_ptr()))

    def _table(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.tensor([one.data_ptr() for one in tensors], device=self.where)

    def _run(self, kernel: str, grid: tuple[int, int], arguments: tuple[int, ...]) -> None:
        self.device.launch(kernel, grid, THREADS, arguments)
        self.wait()

    def wait(self) -> None:
        """Wait for all launches."""
        self.device.synchronise()
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)


def open_kernels(place: Place, folder: Path) -> Kernels:
    """Return the kernels of this machine's GPU, or those on CPU threads."""
    if place.is_dry:
        from host_device import HostDevice, HostStream, build_kernels

        host = HostDevice(build_kernels(folder), "unused")
        lagging = [HostStream(number) for number in range(PEERS)]
        return Kernels(host, [_Reopened(lambda stream=stream: host.on(stream)) for stream in lagging])
    from runtime.odc.cupy_device import CupyDevice

    streams: list[Any] = [torch.cuda.Stream() for _ in range(PEERS)]  # type: ignore[no-untyped-call]
    return Kernels(CupyDevice(), [_Reopened(lambda stream=stream: torch.cuda.stream(stream)) for stream in streams])


class _Reopened(AbstractContextManager[None]):
    """A context that is made anew each time that it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._open = self._make()
        self._open.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def values(numel: int, seed: int) -> Tensor:
    """Return fp32 numbers (numel,) of all kinds: normal ones, subnormal ones, zeros, infinities, and none at all."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 7, (numel,), generator=generator)
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3.4e38, 1.00390625])
    where = torch.randint(0, max(1, numel), (numel // 3,), generator=generator)
    made[where] = odd[torch.randint(0, len(odd), (numel // 3,), generator=generator)]
    return made


def whole_numbers(numel: int, seed: int) -> Tensor:
    """Return whole numbers (numel,) whose sums are exact in fp32, and which bf16 holds too."""
    return torch.randint(-100, 100, (numel,), generator=torch.Generator().manual_seed(seed)).float()


def apart(numel: int, skip: int, dtype: torch.dtype, device: torch.device, fill: float = POISON) -> Tensor:
    """Return a tensor (numel,), poisoned unless told otherwise, that begins `skip` elements after a boundary."""
    return torch.full((numel + skip + 8,), fill, dtype=dtype, device=device)[skip : skip + numel]


def same_bits(got: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(got.cpu().view(BITS[got.dtype]), wanted.cpu().view(BITS[wanted.dtype]))


def normal_or_none(numbers: Tensor) -> Tensor:
    """Return numbers with zeros for those that are subnormal, which sums on a GPU take for zeros."""
    return torch.where(numbers.abs() < torch.finfo(torch.float32).tiny, 0.0, numbers)


def same_numbers(got: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors have the same bits, or none where the other has none: of these, sums may have any bits."""
    is_none = wanted.isnan()
    return torch.equal(got.cpu().isnan(), is_none) and same_bits(got.cpu()[~is_none], wanted[~is_none])


def packs(run: Kernels, numel: int, skip: int, dtype: torch.dtype) -> bool:
    """Whether shards are packed and rounded as PyTorch on the CPU does."""
    given = values(numel, skip)
    source = apart(numel, skip, torch.float32, run.where)
    source.copy_(given)
    window = apart(numel, (skip + 1) % 4, dtype, run.where)
    run.pack(torch.split(source, max(1, numel // 3)), window)
    wanted = given.to(dtype)
    if dtype == torch.bfloat16:
        wanted.view(torch.int16)[given.isnan()] = QUIET_NAN  # PyTorch's has other bits on each kind of processor
    return same_bits(window, wanted)


def gathers(run: Kernels, numel: int, skip: int, dtype: torch.dtype) -> bool:
    """Whether shards arrive bit by bit, from each rank's point of view."""
    shards = [values(numel, peer).to(dtype) for peer in range(PEERS)]
    windows = [apart(numel, skip, dtype, run.where) for _ in shards]
    for window, shard in zip(windows, shards, strict=True):
        window.copy_(shard)
    for rank in range(PEERS):
        out = apart(PEERS * numel, (skip + rank) % 4, dtype, run.where)
        run.gather(windows, out, rank)
        if not same_bits(out, torch.cat(shards)):
            return False
    return True


def adds(run: Kernels, numel: int, skip: int, dtype: torch.dtype) -> bool:
    """Whether no add is lost where several streams add to the same places at once."""
    given = [whole_numbers(PEERS * numel, rank).to(dtype) for rank in range(PEERS)]
    gradients = [one.to(run.where) for one in given]
    owned = [apart(numel, skip, torch.float32, run.where, fill=0.0) for _ in range(PEERS)]
    table = torch.tensor([one.data_ptr() for one in owned], device=run.where)
    run.wait()
    for _ in range(2):
        for rank, (gradient, stream) in enumerate(zip(gradients, run.streams, strict=True)):
            with stream:
                run.push(gradient, owned, rank, table)
    run.wait()
    wanted = 2 * torch.stack([one.float() for one in given]).sum(0).view(PEERS, numel)
    return all(torch.equal(got.cpu(), want) for got, want in zip(owned, wanted, strict=True))


def adds_alone(run: Kernels, numel: int, skip: int, dtype: torch.dtype) -> bool:
    """Whether each of several streams at once adds numbers of all kinds, twice, to places that it alone writes to."""
    given = [normal_or_none(values(PEERS * numel, rank)).to(dtype) for rank in range(PEERS)]
    gradients = [one.to(run.where) for one in given]
    slots = [[apart(numel, skip, torch.float32, run.where, fill=0.0) for _ in range(PEERS)] for _ in range(PEERS)]
    tables = [torch.tensor([one.data_ptr() for one in of_rank], device=run.where) for of_rank in slots]
    run.wait()
    for _ in range(2):
        for rank, (gradient, stream) in enumerate(zip(gradients, run.streams, strict=True)):
            with stream:
                run.push(gradient, slots[rank], rank, tables[rank], alone=True)
    run.wait()
    wanted = [(0.0 + one.float() + one.float()).view(PEERS, numel) for one in given]
    return all(
        same_numbers(got, want)
        for of_rank, wants in zip(slots, wanted, strict=True)
        for got, want in zip(of_rank, wants, strict=True)
    )


def takes(run: Kernels, numel: int, skip: int, dtype: torch.dtype) -> bool:
    """Whether slots are summed in order and cleared; one of them, or as many as there are ranks."""
    number = 1 if dtype == torch.float32 else PEERS
    stride = numel + skip
    given = normal_or_none(values(number * stride, numel))
    slots = given.clone().to(run.where)
    gradient = apart(numel, skip, torch.float32, run.where)
    run.take(slots, stride, number, gradient)
    wanted, *others = (given.view(number, stride)[slot, :numel] for slot in range(number))
    for other in others:
        wanted = wanted + other
    cleared = not slots.view(number, stride)[:, :numel].any()
    return cleared and same_numbers(gradient, wanted)


KINDS = (packs, gathers, adds, adds_alone, takes)


def failures(run: Kernels, sizes: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield each case and whether it went wrong."""
    for kind, numel, skip, dtype in product(KINDS, sizes, SKIPS, BITS):
        yield f"{kind.__name__} {numel} x {NAMES[dtype]}, {skip} from a boundary", not kind(run, numel, skip, dtype)


def huge_failures(run: Kernels) -> Iterator[tuple[str, bool]]:
    """Yield cases of more elements than 32 bits count, compared on the GPU itself."""
    source = torch.arange(HUGE, device=run.where, dtype=torch.float32).remainder_(251.0)
    window = torch.full((HUGE,), POISON, dtype=torch.bfloat16, device=run.where)
    run.pack([source], window)
    yield f"packs {HUGE} x bf16", not torch.equal(window, source.bfloat16())
    out = torch.full((HUGE,), POISON, dtype=torch.bfloat16, device=run.where)
    run.gather([window], out, 0)
    yield f"gathers {HUGE} x bf16", not torch.equal(out, window)
    run.push(out, [source], 0, torch.tensor([source.data_ptr()], device=run.where))
    run.wait()
    yield f"adds {HUGE} x bf16", not torch.equal(source, out.float().mul_(2))
    run.push(out, [source], 0, torch.tensor([source.data_ptr()], device=run.where), alone=True)
    run.wait()
    yield f"adds alone {HUGE} x bf16", not torch.equal(source, out.float().mul_(3))
    gradient = torch.full((HUGE,), POISON, device=run.where)
    run.take(source, HUGE, 1, gradient)
    yield f"takes {HUGE} x fp32", bool(source.any()) or not torch.equal(gradient, out.float().mul_(3))


def check(place: Place) -> Finding:
    """Compare all kernels with PyTorch."""
    run = open_kernels(place, place.scratch)
    found = list(failures(run, DRY_SIZES if place.is_dry else SIZES))
    has_room = not place.is_dry and torch.cuda.mem_get_info()[0] >= HUGE_FREE_BYTES
    if has_room:
        found += huge_failures(run)
    wrong = [case for case, is_wrong in found if is_wrong]
    told = f"{len(found) - len(wrong)} of {len(found)} cases have PyTorch's bits"
    told += "" if has_room or place.is_dry else f"; no room for more than 2^31 elements ({HUGE_FREE_BYTES >> 30} GiB)"
    return Finding(not wrong, "\n".join([told, *wrong]), {"cases": len(found), "wrong": len(wrong)})


if __name__ == "__main__":
    kernels = open_kernels(Place(sys.argv[1], False, Path(".")), Path("."))
    sys.exit(1 if any(is_wrong for _, is_wrong in failures(kernels, SIZES[:3])) else 0)
