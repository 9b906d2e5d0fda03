"""The options of every stage, for one workload and one strategy of the spanning operators."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.cost.stage_option import StageCandidate
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.option_columns import OptionColumns, OptionList
from planner.options.pareto import option_numbers, undominated
from planner.strategies.spec import Strategy

Spanning = Strategy | tuple[Strategy, ...] | None
"""Strategies of the spanning operators: one for all, one for each, or None if there are none."""


class Owned(NamedTuple):
    """Plans by the most that the option of a stage gives to one rank, of what ranks own (`Space.owning`)."""

    in_seconds: bool
    """Whether that is seconds in which the rank's host steps it; else bytes at rest."""
    least: float
    most: float


ALIKE_OWNED, LITTLE_OWNED = 1.25, 1 / 8
"""Of seconds that a rank steps what it owns: those up to so many times the least of a range are in it, and up to this
part of the largest."""


def owned_ranges(in_seconds: bool, given: Iterable[float]) -> Iterator[Owned]:
    """Yield the ranges of what options give to one rank."""
    every = sorted(given)
    while every:
        # What hardly differs, or is next to nothing, is one range: a set of candidates and labels for each.
        most = max(every[0] * ALIKE_OWNED, every[-1] * LITTLE_OWNED) if in_seconds else every[0]
        alike = bisect_right(every, most)
        yield Owned(in_seconds, every[0], every[alike - 1])
        del every[:alike]


@dataclass(frozen=True)
class CandidateSet:
    """The options of every stage, for one workload and one strategy of the spanning operators."""

    load: Workload
    spanning: Spanning
    """Strategies of the spanning operators; None if there are none, or if all strategies are candidates."""
    stage_classes: tuple[int, ...]
    """For each stage in execution order, its index into `options`."""
    options: tuple[Sequence[StageCandidate], ...]
    """The options of each class of stages."""
    choices: tuple[tuple[StageDecision, ...], ...]
    """The choice behind each option."""
    syncs_each_microbatch: bool = True
    """Whether its plans are charged for waiting in every micro-batch (`planner.cost.step_time`)."""
    on_owners: tuple[CandidateSet, ...] = ()
    """The same options on a rank that owns the largest spanning operator and no other, if one is owned, and on one that
    owns some of another stage."""
    owned_bytes: float = 0.0
    """What that rank owns, as no option says."""
    owned_s: float = 0.0
    """Seconds in which its host steps that."""

    @property
    def fixed_bytes(self) -> float:
        """What its rank holds whatever the options are."""
        return self.load.fixed_bytes + self.owned_bytes

    def sharing(self, blocks: Collection[int]) -> CandidateSet:
        """Return it with the options that recompute what takes from these blocks alone.

        What other blocks keep only for such options (`StageCandidate.shared`) is then not there.
        """
        others = {*self.shared_by}.difference(blocks)
        if not others:
            return self
        found = self.only([self._independent(c, others) for c in range(len(self.options))])
        owners = tuple(owner._unshared(others) for owner in found.on_owners)
        return replace(found._unshared(others), on_owners=owners)

    def _unshared(self, others: Collection[int]) -> CandidateSet:
        """Return it without what these blocks keep only for others."""
        alone = []
        for options, columns in zip(self.options, self.columns, strict=True):
            shares = columns.shared.any() and options[0].block in others
            alone.append(OptionList(columns, options.__getitem__).unshared() if shares else options)
        return replace(self, options=tuple(alone))

    def _independent(self, stage_class: int, others: Collection[int]) -> list[int]:
        """Return the options of a class that take nothing that these blocks share: all that take something take the
        same."""
        takes = self.columns[stage_class].takes
        if takes.any() and not set(self.options[stage_class][int(np.argmax(takes))].takes).isdisjoint(others):
            return np.flatnonzero(takes == 0.0).tolist()
        return list(range(len(takes)))

    @property
    def shared_by(self) -> tuple[int, ...]:
        """The blocks that keep something only if another is recomputed; options of a class are of the same block."""
        sharing = [pair for pair in zip(self.options, self.columns, strict=True) if pair[1].shared.any()]
        found = {options[int(np.argmax(columns.shared > 0))].block for options, columns in sharing}
        return tuple(sorted(block for block in found if block is not None))

    @cached_property
    def columns(self) -> tuple[OptionColumns, ...]:
        """The options of each class of stages as arrays."""
        syncs = self.syncs_each_microbatch
        return tuple(
            options.columns if isinstance(options, OptionList) else OptionColumns.of(options, self.load, syncs)
            for options in self.options
        )

    def only(self, kept: Sequence[Sequence[int]]) -> CandidateSet:
        """Return it with only these options of each class of stages."""
        options = tuple(
            some.some(rows) if isinstance(some, OptionList) else tuple(some[k] for k in rows)
            for some, rows in zip(self.options, kept, strict=True)
        )
        choices = tuple(tuple(self.choices[stage_class][k] for k in rows) for stage_class, rows in enumerate(kept))
        on_owners = tuple(owner.only(kept) for owner in self.on_owners)
        return replace(self, options=options, choices=choices, on_owners=on_owners)

    def without_dominated(self) -> CandidateSet:
        """Return it without the options that no plan needs."""
        on_ranks = zip(self.columns, *(owner.columns for owner in self.on_owners), strict=True)
        return self.only([undominated(np.column_stack([*map(option_numbers, of_class)])) for of_class in on_ranks])

    def picked(self, picks: Sequence[int]) -> tuple[StageCandidate, ...]:
        """Return the options of a plan, given the index of every stage's option."""
        return tuple(self.options[c][k] for c, k in zip(self.stage_classes, picks, strict=True))

    def chosen(self, picks: Sequence[int]) -> tuple[StageDecision, ...]:
        """Return the choices of a plan, given the index of every stage's option."""
        return tuple(self.choices[c][k] for c, k in zip(self.stage_classes, picks, strict=True))
