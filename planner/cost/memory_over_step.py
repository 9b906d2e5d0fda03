"""Memory over a step: all its moments with what each stage holds, and the highest moment of each stage.

The highest of them is the peak of `planner.cost.peak_memory`, which says what is held at a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.cost.peak_memory import (
    HeldMoment,
    Holding,
    MemoryPeak,
    Runs,
    held_moments,
    holdings_at,
    optimizer_holdings,
    optimizer_moment,
    peak_at,
)
from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload


@dataclass(frozen=True)
class StepMoment:
    """A moment of a step, with all that is held but the reserve."""

    phase: str
    """As in `MemoryPeak`, and so are `stage` and `operator`."""
    stage: int | None
    operator: int | None
    holdings: tuple[Holding, ...]
    """None of zero bytes, each of one stage; those of a category sum to that of `MemoryPeak.categories`."""

    @property
    def total_bytes(self) -> float:
        """Bytes without the reserve."""
        return sum(holding.size_bytes for holding in self.holdings)


def moments_of_step(options: Sequence[StageCandidate], load: Workload) -> Iterator[StepMoment]:
    """Yield the highest moments of every stage: one micro-batch's forward and backward, then the optimizer step.

    Their highest is `peak_memory` less the reserve.  All micro-batches are alike.
    """
    runs = _alone(options)
    for held in _in_order(held_moments(runs, load)):
        _, stage, moment, *_ = held
        yield StepMoment(moment.phase, stage, moment.operator, _some(holdings_at(runs, held, load)))
    yield StepMoment("optimizer", None, None, _some(optimizer_holdings(runs, load)))


def highest_of_stages(options: Sequence[StageCandidate], load: Workload) -> tuple[MemoryPeak, ...]:
    """Return the highest moment of each stage's forward and of its backward, then the optimizer step, in that order.

    A recomputed block's second forward is part of its backward.
    """
    runs, highest = _alone(options), dict[tuple[bool, int], HeldMoment]()
    for held in _in_order(held_moments(runs, load)):
        size_bytes, stage, moment, *_ = held
        key = moment.phase == "forward", stage
        if key not in highest or size_bytes > highest[key][0]:
            highest[key] = held
    return (*(peak_at(runs, held, load) for held in highest.values()), optimizer_moment(options, load))


def _alone(options: Sequence[StageCandidate]) -> Runs:
    """Return every stage as a run of its own."""
    return [(option, 1) for option in options]


def _in_order(moments: Iterable[HeldMoment]) -> Iterator[HeldMoment]:
    """Yield moments as they come in a step: forward by growing stage, then backward by falling stage."""
    found = list(moments)
    yield from (held for held in found if held[2].phase == "forward")
    yield from sorted((held for held in found if held[2].phase != "forward"), key=lambda held: -held[1])


def _some(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    return tuple(holding for holding in holdings if holding.size_bytes)
