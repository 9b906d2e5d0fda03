"""The options of one class of stages at one workload, as arrays over options.

Bounds and comparisons look at all options, and a plan has one for each stage: so `StageCandidate`s are made only when
they are asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import overload

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_memory import Sees
from planner.cost.stage_option import NO_AMBIENT, Ambient, StageCandidate
from planner.cost.workload import Workload
from planner.options.overlap_terms import overlap_terms

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class OptionColumns:
    """The numbers of the options of one class that a plan's cost depends on: see the fields of `StageCandidate`."""

    rest: Array
    gradients: Array
    stepping: Array
    """`stepped` and `updates`."""
    stepped: Array
    largest: Array
    second: Array
    """Of all stages the two largest count."""
    late: Array
    """`reduced_after_backward`."""
    saved: Array
    """`saved` and `kept`."""
    held: Array
    shared: Array
    gather_output: Array
    prefetched: Array
    prefetch_temporary: Array
    reduce_input: Array
    gathers: Array
    prefetches: Array
    reduces: Array
    takes: Array
    """Whether it takes what other blocks share."""
    terms: Array
    """`planner.options.overlap_terms.OverlapTerms`, shape (options, terms)."""
    highest: Mapping[Sees, Array]
    """Bytes of its highest moment of those that see the same, spanning operators included; -inf: it has none."""

    @classmethod
    def of(cls, options: Sequence[StageCandidate], load: Workload, syncs: bool = True) -> OptionColumns:
        """Return the numbers of some options; `syncs` as in `overlap_terms`."""
        rows = [
            (
                *(o.rest, o.gradients, o.stepped + o.updates, o.stepped, o.largest, o.second, o.reduced_after_backward),
                *(o.saved + o.kept, o.held, o.shared),
                *(o.gather_output, o.prefetched, o.prefetch_temporary, o.reduce_input),
                *(o.gathers, o.prefetches, o.reduces, bool(o.takes)),
            )
            for o in options
        ]
        highest = dict[Sees, Array]()
        for k, option in enumerate(options):
            for moment in option.moments:
                found = highest.setdefault(moment.sees, np.full(len(options), -np.inf))
                found[k] = max(found[k], option.bytes_at(moment))
        names = [name for name in _ARRAYS if name != "terms"]
        numbers = np.array(rows, dtype=np.float64).reshape(len(options), len(names)).T
        terms = overlap_terms(options, load, syncs)
        return cls(**dict(zip(names, numbers, strict=True)), terms=terms, highest=highest)

    @classmethod
    def joined(cls, parts: Sequence[OptionColumns]) -> OptionColumns:
        """Return the numbers of several lists of options, one after the other."""
        if len(parts) == 1:
            return parts[0]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        every = dict.fromkeys(sees for part in parts for sees in part.highest)
        absent = [np.full(len(part), -np.inf) for part in parts]
        highest = {
            sees: np.concatenate([p.highest.get(sees, none) for p, none in zip(parts, absent, strict=True)])
            for sees in every
        }
        return cls(**arrays, highest=highest)

    def __len__(self) -> int:
        return len(self.rest)

    def some(self, rows: Sequence[int]) -> OptionColumns:
        """Return the numbers of some of the options."""
        which = np.array(rows, dtype=np.intp)
        arrays = {name: getattr(self, name)[which] for name in _ARRAYS}
        return OptionColumns(**arrays, highest={sees: held[which] for sees, held in self.highest.items()})

    def around(self, ambient: Ambient) -> OptionColumns:
        """Return the numbers with the memory of spanning operators that have no call in the stage."""
        highest = {sees: held + ambient.bytes_in(sees[0]) for sees, held in self.highest.items()}
        return replace(self, highest=highest)


_ARRAYS = tuple(field.name for field in fields(OptionColumns) if field.name != "highest")


class OptionList(Sequence[StageCandidate]):
    """Options that are made when they are asked for, and their numbers."""

    def __init__(self, columns: OptionColumns, make: Callable[[int], StageCandidate]) -> None:
        self.columns, self._make = columns, make
        self._made: dict[int, StageCandidate] = {}

    @classmethod
    def joined(cls, parts: Sequence[OptionList]) -> OptionList:
        """Return several lists, one after the other."""
        ends = [*accumulate(map(len, parts))]

        def make(k: int) -> StageCandidate:
            part = bisect_right(ends, k)
            return parts[part][k - ends[part] + len(parts[part])]

        return cls(OptionColumns.joined([part.columns for part in parts]), make) if len(parts) > 1 else parts[0]

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, k: int) -> StageCandidate: ...
    @overload
    def __getitem__(self, k: slice) -> tuple[StageCandidate, ...]: ...
    def __getitem__(self, k: int | slice) -> StageCandidate | tuple[StageCandidate, ...]:
        """Return one option, always the same object, or some."""
        if isinstance(k, slice):
            return tuple(self[i] for i in range(*k.indices(len(self))))
        if not 0 <= k < len(self):
            raise IndexError(k)
        if k not in self._made:
            self._made[k] = self._make(k)
        return self._made[k]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def some(self, rows: Sequence[int]) -> OptionList:
        """Return some of the options."""
        return OptionList(self.columns.some(rows), lambda k: self[rows[k]])

    def unshared(self) -> OptionList:
        """Return the options without what they save only for other blocks."""
        saved, shared = self.columns.saved, self.columns.shared
        columns = replace(self.columns, saved=saved - shared, shared=np.zeros_like(shared))
        return OptionList(columns, lambda k: replace(self[k], saved=self[k].saved - self[k].shared, shared=0.0))

    def around(self, ambient: Ambient) -> OptionList:
        """Return the options with the memory of spanning operators that have no call in the stage."""
        if ambient == NO_AMBIENT:
            return self
        return OptionList(
            self.columns.around(ambient), lambda k: replace(self[k], ambient=self[k].ambient.plus(ambient))
        )
