"""Whole tensors over ranks: who keeps which, neighbours together or evenly (ZeRO-3 by tensors, as in Tiny-FSDP).

Tensors of s_1 .. s_n bytes, in the order of the model, go to m ranks.  An even share is S = sum(s) / m.

    priority 0   neighbours stay together: m parts, one after another, such that the largest is as small
                 as can be, and among such the sum of squares                            `_neighbours`
    priority 1   every tensor for itself, largest first to the rank with least: the fullest rank has at
                 most 4/3 - 1/(3m) of the best that can be (Graham, SIAM J. Appl. Math. 1969)
                                                                          `planner.strategies.owner_assignment`
    between, p   tensors are packed, in order, into runs of at most c bytes (one that is larger is a run
                 by itself), and runs go to ranks largest first; of c = S - S/32, S - 2 S/32, ... down to
                 (1 - p) S, and of the parts of priority 0, the most even is taken              `_runs`

Most even: the smallest maximum, then the smallest sum of squares, then the longest runs.  More priority
tries all that less does and shorter runs too, so the fullest rank never gets fuller with it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from planner.pins import ITSELF
from planner.strategies.owner_assignment import assign_owners
from profiler.errors import OsdpError

STEPS = 32
"""Lengths of runs that are tried on the way from priority 0 to 1."""


@dataclass(frozen=True)
class Balance:
    """How even a partition is."""

    ranks: tuple[str, ...]
    """Names of the ranks, as given."""
    bytes_by_rank: tuple[int, ...]
    neighbours_parted: int
    """How often the next tensor is on another rank."""

    @property
    def max_over_mean(self) -> float:
        """What the fullest rank keeps over an even share; 1 is even, and so is nothing at all."""
        return max(self.bytes_by_rank) * len(self.ranks) / (sum(self.bytes_by_rank) or 1) or 1.0


def zero3_partition_tensors(
    named_parameters: Mapping[str, Tensor],
    ranks_map: Sequence[str],
    evenness_priority: float = 0.0,
    *,
    by_module: bool = False,
) -> tuple[dict[str, int], Balance]:
    """Return the rank that keeps each tensor, by name, and how even that is.

    named_parameters: tensors in the order of the model, of any shape, on the meta device too.
    ranks_map: the device of each rank; rank i has the i-th.
    evenness_priority: from 0, neighbours stay together, to 1, all ranks keep equally much.
    by_module: parameters of one module stay on one rank, as the runtime's owners need it (`owner_pins`).

    Parts are numbered by their first tensor, so rank 0 keeps the first.  Raises OsdpError for no rank, and
    for a priority outside [0, 1].
    """
    if not ranks_map:
        raise OsdpError("there is no rank to keep tensors", got="an empty ranks_map", expected="a device of each rank")
    if not 0 <= evenness_priority <= 1:
        expected = "from 0 (neighbours together) to 1 (even)"
        raise OsdpError("evenness_priority is out of range", got=str(evenness_priority), expected=expected)
    items: dict[str, list[str]] = {}
    for name in named_parameters:
        items.setdefault(module_of(name) if by_module else name, []).append(name)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in named_parameters.items()}
    ranks = assign([sum(map(sizes.__getitem__, names)) for names in items.values()], len(ranks_map), evenness_priority)
    rank_of = {name: rank for names, rank in zip(items.values(), ranks, strict=True) for name in names}
    parts = {name: rank_of[name] for name in named_parameters}
    owners = list(parts.values())
    parted = sum(before != after for before, after in pairwise(owners))
    loads = _loads(owners, list(sizes.values()), len(ranks_map))
    return parts, Balance(tuple(map(str, ranks_map)), tuple(loads), parted)


def module_of(name: str) -> str:
    """Return the path of the module that a parameter belongs to; empty for the model's own."""
    return name.rpartition(".")[0]


def owner_pins(parts: Mapping[str, int]) -> list[str]:
    """Return the `pins` of a description that give modules of a model to the ranks that keep their parameters.

    Raises OsdpError if parameters of one module are on different ranks: the runtime broadcasts modules.
    """
    owners: dict[str, int] = {}
    for name, rank in parts.items():
        module = module_of(name)
        if owners.setdefault(module, rank) != rank:
            what = f"parameters of {module or 'the model itself'} are on different ranks"
            got = f"{name} on rank {rank}, another on rank {owners[module]}"
            advice = "zero3_partition_tensors(..., by_module=True)"
            raise OsdpError(what, got=got, expected="whole modules", advice=advice)
    return [f"{module or ITSELF}=owner@{rank}" for module, rank in owners.items()]


def assign(sizes: Sequence[int], ranks: int, evenness_priority: float) -> tuple[int, ...]:
    """Return the rank of each of some neighbours of so many bytes; see the top of this module."""
    share = sum(sizes) / ranks
    steps = range(1, int(evenness_priority * STEPS) + 1)
    candidates = [_neighbours(sizes, ranks), *(_runs(sizes, share * (1 - step / STEPS)) for step in steps)]

    def keepers(lengths: Sequence[int]) -> tuple[int, ...]:
        starts = [0, *accumulate(lengths)]
        loads = [sum(sizes[start:stop]) for start, stop in pairwise(starts)]
        owners = range(len(loads)) if len(loads) <= ranks else assign_owners(loads, ranks)
        return tuple(rank for rank, length in zip(owners, lengths, strict=True) for _ in range(length))

    def evenness(found: Sequence[int]) -> tuple[int, int]:
        loads = _loads(found, sizes, ranks)
        return max(loads), sum(load * load for load in loads)

    best = min(map(keepers, candidates), key=evenness)
    number = {rank: position for position, rank in enumerate(dict.fromkeys(best))}  # in the order in which they begin
    return tuple(number[rank] for rank in best)


def _loads(ranks: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    loads = [0] * count
    for rank, size in zip(ranks, sizes, strict=True):
        loads[rank] += size
    return loads


def _runs(sizes: Sequence[int], most: float) -> list[int]:
    """Return the lengths of runs that are filled, in order, up to so many bytes."""
    lengths: list[int] = []
    held = 0
    for size in sizes:
        if lengths and held + size <= most:
            lengths[-1], held = lengths[-1] + 1, held + size
        else:
            lengths.append(1)
            held = size
    return lengths


def _neighbours(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the lengths of at most `ranks` runs with the smallest maximum, then the smallest sum of squares.

    With q(k, j) the least sum of squares of the first j in k runs none of which exceeds the smallest
    maximum M:  q(k, j) = min over i with s_(i+1) + .. + s_j <= M of q(k - 1, i) + (s_(i+1) + .. + s_j)^2.
    """
    upto = [0, *accumulate(sizes)]
    most = _least_maximum(upto, ranks)
    first = [bisect_left(upto, end - most) for end in upto]  # where the last run of the first j can begin
    squares: list[float] = [0.0, *[float("inf")] * len(sizes)]
    cuts: list[list[int]] = []
    for _ in range(min(ranks, len(sizes))):
        found = [
            min((squares[i] + (upto[j] - upto[i]) ** 2, i) for i in range(first[j], j)) for j in range(1, len(upto))
        ]
        squares = [squares[0], *(square for square, _ in found)]
        cuts.append([0, *(i for _, i in found)])
    lengths, stop = [], len(sizes)
    for cut in reversed(cuts):
        lengths.append(stop - cut[stop])
        stop = cut[stop]
    return [length for length in reversed(lengths) if length]


def _least_maximum(upto: Sequence[int], runs: int) -> int:
    """Return the smallest M such that so many runs of at most M bytes hold everything; `upto` are sums from the start.

    Found by bisection on M: filling each run as far as it goes takes the fewest runs.
    """
    low, high = max((after - before for before, after in pairwise(upto)), default=0), upto[-1]
    while low < high:
        middle = (low + high) // 2
        start = 0
        for _ in range(runs):
            start = bisect_right(upto, upto[start] + middle) - 1
        low, high = (low, middle) if start == len(upto) - 1 else (middle + 1, high)
    return low
