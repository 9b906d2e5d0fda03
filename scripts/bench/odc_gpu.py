"""How fast are the kernels of ODC on this GPU?  `python scripts/bench/odc_gpu.py [--peers 4] [--megabytes 1 8 64]`

For shards of each size, the windows of all peers in this GPU's memory:

    gather      the kernel of `cuda/gather.cu`, all shards in one launch
    copies      a loop of `Tensor.copy_`, one for each shard
    copy        one `Tensor.copy_` of as many bytes: the memory's bandwidth

    push        the kernel of `cuda/scatter_accumulate.cu`, all parts of a gradient in one launch
    adds        a loop of `Tensor.add_`, one for each part; not atomic, so fit for one rank at a time only
    add         one `Tensor.add_` of as many bytes

    pack        the kernel of `cuda/pack_cast.cu`, all shards as fp32
    cast        the same, to bf16
    take        the kernel that copies an accumulator out and clears it

A round times a few calls of each by CUDA events, every second round backwards.  Buffers take turns from round to
round, more of them than fit into any cache.  GB/s count the bytes of the shards once.  Shares are of the rate at which
bytes are read and written, over that of the copy, and of pushes over that of `add`, which move as many: of one round's
times, the median of all rounds and the quartiles.  `scripts/validation/one_sided.py` has the targets.  Exits
with 2 where there is no GPU or no CuPy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

import torch
from _shared import take_turns
from torch import Tensor

from profiler.errors import OsdpError
from runtime.odc.cupy_device import CupyDevice
from runtime.odc.kernels import ALL_NEAR, THREADS, WHOLE_GPU, gather_grid, grid_for

FP32_BYTES = 4
BASIS = {"gather": "copy", "copies": "copy", "copy": "copy", "push": "add", "adds": "add", "add": "add"}
BASIS |= {"pack": "copy", "cast": "copy", "take": "copy"}
"""What each contestant's shares are of, in one call of torch."""
MOVED_BYTES = {"gather": 8, "copies": 8, "copy": 8, "push": 12, "adds": 12, "add": 12, "pack": 8, "cast": 6, "take": 12}
"""Read and written for each fp32 element."""
CALLS = 10
"""Of a contestant in a round."""
SLEEP_CYCLES = 10_000_000
"""How long the GPU waits before the calls of a round: some milliseconds."""
Contestant = Callable[[int], None]
"""Does its work on one of the sets of buffers."""


@dataclass(frozen=True)
class Buffers:
    """What one call works on; `peers` windows of `shard` elements each."""

    windows: Tensor
    """(peers, shard) fp32, of which gathers read and to which pushes add."""
    full: Tensor
    """(peers, shard): what was gathered, or a gradient."""
    table: Tensor
    """Addresses of the windows."""
    segments: Tensor
    """(3, peers): addresses, offsets and lengths of the shards of `full`, as they are packed."""

    @classmethod
    def make(cls, peers: int, shard: int, device: torch.device) -> Buffers:
        """Return buffers with numbers in them."""
        windows = torch.randn(peers, shard, device=device)
        full = torch.randn(peers, shard, device=device)
        table = torch.tensor([window.data_ptr() for window in windows], device=device)
        rows = [[part.data_ptr() for part in full], [shard * peer for peer in range(peers)], [shard] * peers]
        return cls(windows, full, table, torch.tensor(rows, device=device))


@dataclass(frozen=True)
class Result:
    """One contestant at one size."""

    contestant: str
    shard_bytes: int
    peers: int
    gb_per_s: float
    """Median over rounds, 1e9 bytes of shards in a second."""
    share: tuple[float, float, float]
    """Quartiles of its rate over that of its `BASIS`, bytes read and written in a second, round by round."""


def contestants(device: CupyDevice, sets: Sequence[Buffers]) -> dict[str, Contestant]:
    """Return what is compared."""
    peers, shard = sets[0].full.shape

    def gather(index: int) -> None:
        one = sets[index]
        grid = gather_grid(FP32_BYTES * shard, peers, WHOLE_GPU)
        arguments = one.table.data_ptr(), 0, FP32_BYTES * shard, peers, 0, one.full.data_ptr()
        device.launch("gather", grid, THREADS, arguments)

    def push(index: int) -> None:
        one = sets[index]
        grid = grid_for(shard, 4 * THREADS, peers, WHOLE_GPU)
        arguments = one.full.data_ptr(), one.table.data_ptr(), 0, shard, peers, 0, ALL_NEAR
        device.launch("scatter_accumulate_fp32", grid, THREADS, arguments)

    def copies(index: int) -> None:
        for part, window in zip(sets[index].full, sets[index].windows, strict=True):
            part.copy_(window)

    def adds(index: int) -> None:
        for part, window in zip(sets[index].full, sets[index].windows, strict=True):
            window.add_(part)

    def copy(index: int) -> None:
        sets[index].full.copy_(sets[index].windows)

    def add(index: int) -> None:
        sets[index].windows.add_(sets[index].full)

    def packing(kernel: str, index: int) -> None:
        one = sets[index]
        grid = grid_for(shard, 4 * THREADS, 1, device.room)[0], peers
        arguments = (*(row.data_ptr() for row in one.segments), peers, one.windows.data_ptr())
        device.launch(kernel, grid, THREADS, arguments)

    def pack(index: int) -> None:
        packing("pack_cast_fp32", index)

    def cast(index: int) -> None:
        packing("pack_cast_bf16", index)

    def take(index: int) -> None:
        one, count = sets[index], peers * shard
        grid = grid_for(count, 4 * THREADS, 1, device.room)
        device.launch("take_gradient", grid, THREADS, (one.windows.data_ptr(), 0, 1, count, one.full.data_ptr()))

    return {one.__name__: one for one in (gather, copies, copy, push, adds, add, pack, cast, take)}


def seconds_of(run: Contestant, first: int, sets: int, device_type: str) -> float:
    """Return how long a call takes, the mean of a few, on buffers from set `first` on."""
    if device_type == "cpu":  # kernels on CPU threads: no speed that means anything
        started = time.perf_counter()
        run(first % sets)
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SLEEP_CYCLES)  # so that all calls are queued before the first begins, and none waits for Python
    begin.record()
    for call in range(first, first + CALLS):
        run(call % sets)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / CALLS


def measure(device: CupyDevice, peers: int, shard_bytes: int, rounds: int, cache_bytes: int) -> list[Result]:
    """Time all contestants at one size."""
    size_bytes = peers * shard_bytes
    count, shard = max(2, -(-2 * cache_bytes // size_bytes)), shard_bytes // FP32_BYTES
    sets = [Buffers.make(peers, shard, device.torch_device) for _ in range(count)]
    running = contestants(device, sets)
    runs = list(running.values())
    more = len(sets), device.torch_device.type
    took_s = [take_turns(n, runs, seconds_of, (n + 2) * CALLS, *more) for n in range(-2, rounds)]  # two to warm up
    taken = dict(zip(running, zip(*took_s[2:], strict=True), strict=True))
    results = []
    for name, times in taken.items():
        weight = MOVED_BYTES[name] / MOVED_BYTES[BASIS[name]]
        shares = [weight * basis / own for basis, own in zip(taken[BASIS[name]], times, strict=True)]
        low, middle, high = quantiles(shares, n=4)
        results.append(Result(name, shard_bytes, peers, size_bytes / median(times) / 1e9, (low, middle, high)))
    return results


def main() -> int:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, default=4, help="windows (default 4)")
    sizes, text = [1, 2, 4, 8, 16, 32, 64], "sizes of a shard, 1e6 bytes (default 1 2 4 8 16 32 64)"
    parser.add_argument("--megabytes", type=int, nargs="+", default=sizes, metavar="MB", help=text)
    parser.add_argument("--rounds", type=int, default=50, help="measured rounds (default 50)")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    options = parser.parse_args()
    if min(options.peers, *options.megabytes) < 1 or options.rounds < 2:
        parser.error("one peer, one MB and two rounds is the least")
    try:
        device = CupyDevice()
    except OsdpError as error:
        print(error, file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(device.torch_device)
    results = []
    for size in options.megabytes:
        results += measure(device, options.peers, size * 10**6, options.rounds, properties.L2_cache_size)
    if options.json:
        data = {"gpu": properties.name, "torch": torch.__version__, "rounds": options.rounds}
        print(json.dumps(data | {"results": [asdict(result) for result in results]}, indent=2))
        return 0
    rounds = f"{options.peers} peers, {options.rounds} rounds of {CALLS} calls"
    print(f"{properties.name}, torch {torch.__version__}, {rounds}")
    print(f"{'shard':>8}  {'':<8}{'GB/s':>8}   share of a copy, or of add_ (quartiles)")
    for one in results:
        low, middle, high = one.share
        share = f"{middle:.1%} ({low:.1%} to {high:.1%})"
        print(f"{one.shard_bytes / 1e6:>5.0f} MB  {one.contestant:<8}{one.gb_per_s:>8.0f}   {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
