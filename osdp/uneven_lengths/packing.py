"""Which rank trains which samples of a step, and in which micro-batches.

A *pack* is the samples of one micro-batch.  They stand in one sequence, without padding, and do not see each
other (`osdp.models.packed_llama`), so a sample of l tokens costs the same in any pack:

    cost(l) = a l + b l^2                                                           `Cost`

with a from the layers that take each token alone, and b from causal attention.  A step deals N ranks packs:

    none    a pack for every sample, dealt in turn
    ffd     first-fit decreasing: the longest sample first, each into the first pack of at most the given
            number of tokens in which there is room (Johnson 1973); dealt in turn      `first_fit_decreasing`
    kk      largest differencing (Karmarkar and Karp 1982) of the samples by cost into N k packs, k the
            least with which no pack has too many tokens; dealt from the costliest on, back and forth,
            so that both the packs that run side by side and the sums of ranks are alike
            (`planner.cost.balanced_sets`)

Communication that synchronizes ranks in every micro-batch needs equally many on each: what is missing are empty
packs.  If the cost of computing is all that counts, a step takes

    sum over j of max over r of c_rj    if ranks synchronize in every micro-batch       `Deal.cost_in_step`
    max over r of sum over j of c_rj    if they synchronize once per step               `Deal.cost_alone`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from osdp.models.config import LlamaConfig
from planner.cost.balanced_sets import karmarkar_karp
from profiler.errors import OsdpError

Pack = tuple[int, ...]
"""Numbers of samples."""
METHODS = ("none", "ffd", "kk")


@dataclass(frozen=True)
class Cost:
    """What samples cost by their length."""

    per_token: float
    """Cost of a token in layers that take each one alone, in any unit."""
    per_square: float
    """Cost of attention over the square of the length, in the same unit."""

    def __call__(self, length: int) -> float:
        return self.per_token * length + self.per_square * length**2

    @classmethod
    def of_llama(cls, config: LlamaConfig) -> Cost:
        """Return the FLOPs of a forward: two for each weight and token, four h for each pair of a query and a key.

        The embedding is looked up and not multiplied; of the pairs, causal attention needs half.
        """
        hidden = config.hidden_size
        attention = 2 * hidden**2 * (1 + config.key_value_heads / config.heads)
        block = attention + 3 * hidden * config.intermediate_size
        weights = config.layers * block + config.vocabulary_size * hidden
        return cls(2 * weights, config.layers * 4 * hidden / 2)


@dataclass(frozen=True)
class Deal:
    """The packs of one step."""

    ranks: tuple[tuple[Pack, ...], ...]
    """Of each rank, in the order in which it runs them; none is empty."""
    costs: tuple[tuple[float, ...], ...]
    """Of each of these packs."""

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(packs) for packs in self.ranks)

    @property
    def cost_in_step(self) -> float:
        """Cost of a step in which ranks synchronize in every micro-batch."""
        return sum(max(costs) for costs in zip_longest(*self.costs, fillvalue=0.0))

    @property
    def cost_alone(self) -> float:
        """Cost of a step in which ranks synchronize at its end only."""
        return max(sum(costs) for costs in self.costs)


def deal(method: str, lengths: Sequence[int], ranks: int, capacity: int, cost: Callable[[int], float]) -> Deal:
    """Deal the samples of a step, given by their lengths, to ranks; `capacity` is in tokens.

    A rank gets none if there are too few. Raises OsdpError for an unknown method, no samples, or one that is longer
    than a pack may be.
    """
    if method not in METHODS:
        raise OsdpError("there is no such packing", got=method, expected=", ".join(METHODS))
    if not lengths:
        raise OsdpError("a step has no samples", expected="at least one")
    if (longest := max(lengths)) > capacity:
        expected = f"at most {capacity}"
        raise OsdpError("a sample is longer than a pack may be", got=f"{longest} tokens", expected=expected)
    if method == "kk":
        dealt = _balanced(lengths, ranks, capacity, cost)
    else:
        packs = [(i,) for i in range(len(lengths))] if method == "none" else first_fit_decreasing(lengths, capacity)
        dealt = tuple(tuple(packs[rank::ranks]) for rank in range(ranks))
    costs = tuple(tuple(sum(cost(lengths[i]) for i in pack) for pack in packs) for packs in dealt)
    return Deal(dealt, costs)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Pack]:
    """Return packs of at most `capacity` tokens; no sample may be longer than that."""
    packs: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((p for p, left in enumerate(room) if lengths[sample] <= left), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(capacity)
        packs[place].append(sample)
        room[place] -= lengths[sample]
    return [tuple(pack) for pack in packs]


def weights(counts: Sequence[int], targets: int) -> tuple[float, float]:
    """Return by what FSDP and ODC multiply a micro-batch's *summed* loss, so that a step trains its mean per target.

    `counts` are the micro-batches of each rank and `targets` the tokens that are learned, both of all ranks.  FSDP
    takes the mean over ranks of what each has summed up.  ODC does so too if all counts are equal, and else the
    mean over all micro-batches (`runtime.odc.step_protocol`, under a plan of one micro-batch).
    """
    is_even = len(set(counts)) == 1
    return len(counts) / targets, (len(counts) if is_even else sum(counts)) / targets


def _balanced(
    lengths: Sequence[int], ranks: int, capacity: int, cost: Callable[[int], float]
) -> tuple[tuple[Pack, ...], ...]:
    costs = [cost(length) for length in lengths]
    packs_per_rank = -(-sum(lengths) // (capacity * ranks))
    # This ends: among as many sets as samples, each sample has its own.
    while True:
        packs = karmarkar_karp(costs, ranks * packs_per_rank)
        if all(sum(lengths[i] for i in pack) <= capacity for pack in packs):
            break
        packs_per_rank += 1
    rows = [packs[start : start + ranks] for start in range(0, len(packs), ranks)]
    back_and_forth = [row[::-1] if number % 2 else row for number, row in enumerate(rows)]
    return tuple(tuple(row[rank] for row in back_and_forth if row[rank]) for rank in range(ranks))
