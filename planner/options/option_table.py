"""The options of one class of stages at any micro-batch, as arrays of what is the same at all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.stage_costs import Live, StageCosts
from planner.cost.stage_option import COMMUNICATION, Segment, StageOption, launched
from planner.cost.workload import Workload
from planner.options.candidates import StageDecision
from planner.options.option_columns import OptionColumns, OptionList
from planner.options.overlap_terms import OverlapTerms, by_count, terms_of
from planner.options.pareto import option_numbers, undominated
from profiler.model_graph import Recompute

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Counts = tuple[int, ...]
"""Into how many slices the operators of a stage are cut: stages that are cut differently have other calls."""
Form = tuple[Counts, Recompute, bool]
"""What the activations of an option depend on: its slices, what of it is recomputed, and whether it is one unit."""


class OptionTable:
    """The options of one class of stages."""

    def __init__(self, options: Sequence[tuple[StageDecision, StageOption]]) -> None:
        """Take them with their choices."""
        self.options = options
        forms: list[Form] = [(choice.counts, option.recompute, option.is_whole) for choice, option in options]
        self._forms = list(dict.fromkeys(forms))
        self._counts = list(dict.fromkeys(counts for counts, *_ in forms))
        self._form_of = np.array([self._forms.index(form) for form in forms], dtype=np.intp)
        self._constants = {name: np.array([o.constants[name] for _, o in options], float) for name in _CONSTANTS}
        self._takes = np.array([bool(option.constants["takes"]) for _, option in options], dtype=float)
        self._segments = by_count(len(option.runs) for _, option in options)
        self._note_moments(forms)
        self._note_calls()

    def _note_moments(self, forms: Sequence[Form]) -> None:
        sees = sorted({seen for _, option in self.options for seen in option.notes})
        self._places: list[dict[Live, int]] = [{} for _ in self._forms]
        """Where the activations of each form are, by name."""
        fixed, found = list[float](), list[tuple[int, int]]()
        starts, rows, columns = list[int](), list[int](), list[int]()
        for row, (form, (_, option)) in enumerate(zip(forms, self.options, strict=True)):
            places = self._places[self._forms.index(form)]
            for column, seen in enumerate(sees):
                if notes := option.notes.get(seen, ()):
                    starts.append(len(fixed))
                    rows.append(row)
                    columns.append(column)
                    fixed += [note.fixed_bytes for note in notes]
                    found += [(self._form_of[row], places.setdefault(note.live, len(places))) for note in notes]
        offsets = np.cumsum([0, *map(len, self._places)])
        self._fixed, self._starts = np.array(fixed), np.array(starts)
        self._live = np.array([offsets[form] + place for form, place in found])
        self._at, self._sees = (columns, rows), sees

    def _note_calls(self) -> None:
        """Note which calls each segment has, of options of one number of segments after the other."""
        calls, starts, offsets = list[int](), list[int](), dict[Counts, int]()
        for choice, option in self.options:
            last = max(max(run.calls) for run in option.runs)
            offsets.setdefault(choice.counts, 0)
            offsets[choice.counts] = max(offsets[choice.counts], last + 1)
        firsts = dict(zip(offsets, np.cumsum([0, *offsets.values()]).tolist(), strict=False))
        for _, members in self._segments:
            for choice, option in (self.options[k] for k in members):
                for run in option.runs:
                    starts.append(len(calls))
                    calls += [firsts[choice.counts] + call for call in run.calls]
        self._calls, self._call_starts = np.array(calls), np.array(starts)
        communication = [
            np.array([[run.communication for run in self.options[k][1].runs] for k in members]).transpose(1, 2, 0)
            for _, members in self._segments
        ]
        self._communication: list[Array] = communication
        """By number of segments, shape (segments, numbers, options)."""
        self._unit_launches: list[Array] = [
            np.array([[run.unit_launch_s for run in self.options[k][1].runs] for k in members]).transpose(2, 0, 1)
            for _, members in self._segments
        ]
        """By number of segments, shape (directions, options, segments)."""

    def worthwhile(
        self,
        costs_of: Callable[[Counts], StageCosts],
        load: Workload,
        syncs: bool,
        others: Sequence[OptionTable] = (),
        rows: Sequence[int] | None = None,
    ) -> tuple[tuple[StageDecision, ...], tuple[OptionList, ...]]:
        """Return the undominated choices at one workload, and their options on this table's rank and on others.

        `costs_of` gives the costs of the stage with its operators cut; `syncs` as in `overlap_terms`, without which
        options that make ranks wait in every micro-batch are left out.  `others` have the same choices: one that is
        dominated is so on all ranks.  Given `rows`, other options are left out too.
        """
        costs = {counts: costs_of(counts) for counts in self._counts}
        rows = list(range(len(self.options))) if rows is None else rows
        if not syncs:
            rows = [row for row in rows if not self._constants["syncs_each_microbatch"][row]]
        tables = [self, *others]
        columns = [table._columns(costs, load, syncs).some(rows) for table in tables]
        kept = undominated(np.column_stack([option_numbers(own) for own in columns]))
        lists = tuple(table._listed(own, rows, kept, costs) for table, own in zip(tables, columns, strict=True))
        return tuple(self.options[rows[k]][0] for k in kept), lists

    def _listed(
        self, columns: OptionColumns, rows: Sequence[int], kept: Sequence[int], costs: Mapping[Counts, StageCosts]
    ) -> OptionList:
        """Return the options that are kept of some rows of the table."""
        found = [self.options[rows[k]] for k in kept]
        return OptionList(columns.some(kept), lambda k: found[k][1].at(costs[found[k][0].counts]))

    def _columns(self, costs: Mapping[Counts, StageCosts], load: Workload, syncs: bool) -> OptionColumns:
        saved, by_forward, shared, live = [], [], [], list[float]()
        for (counts, recompute, is_whole), places in zip(self._forms, self._places, strict=True):
            activations = costs[counts].activations(recompute, is_whole)
            saved.append(costs[counts].saved_bytes(recompute))
            by_forward.append(costs[counts].memory(recompute).held[-1])
            shared.append(costs[counts].memory(recompute).shared)
            live += [activations[name] for name in places]
        held = np.full((len(self._sees), len(self.options)), -np.inf)
        held[self._at] = np.maximum.reduceat(self._fixed + np.array(live)[self._live], self._starts)
        known = self._constants
        return OptionColumns(
            rest=known["parameters"] + known["optimizer"] + known["window"],
            stepping=known["stepped"] + known["updates"],
            late=known["reduced_after_backward"],
            saved=np.array(saved)[self._form_of] + known["kept"],
            held=np.array(by_forward)[self._form_of],
            shared=np.array(shared)[self._form_of],
            takes=self._takes,
            terms=self._terms(costs, load, syncs),
            highest=dict(zip(self._sees, held, strict=True)),
            **{name: known[name] for name in _AS_THEY_ARE},
        )

    def _terms(self, costs: Mapping[Counts, StageCosts], load: Workload, syncs: bool) -> Array:
        of_counts = [costs[counts] for counts in self._counts]
        seconds = (np.concatenate([getattr(one, name) for one in of_counts]) for name in _OF_CALLS)
        sums = np.array([np.add.reduceat(each[self._calls], self._call_starts) for each in seconds])
        again = np.array(
            [
                (costs[counts].again_s(recompute, is_whole), *costs[counts].launch_again_s(recompute))
                for counts, recompute, is_whole in self._forms
            ]
        )
        waits = np.array([costs[counts].copy_waits_s(recompute, whole) for counts, recompute, whole in self._forms]).T
        found, start = np.empty((len(self.options), len(OverlapTerms._fields))), 0
        for (count, members), communication, units_s in zip(
            self._segments, self._communication, self._unit_launches, strict=True
        ):
            shape = len(_OF_CALLS), len(members), count
            forward_s, backward_s, first_s, second_s = sums[:, start : start + count * len(members)].reshape(shape)
            start += count * len(members)
            again_s = np.zeros((3, len(members), count))
            again_s[:, :, -1] = again[self._form_of[members]].T
            first_s, second_s = first_s + again_s[1] + units_s[0], second_s + again_s[2] + units_s[1]
            computing = launched(forward_s, backward_s + again_s[0], first_s, second_s, np.maximum)
            if waits.any():
                communication = communication.copy()
                communication[-1, _STALLS] += waits[:, self._form_of[members]]
            own = zip(*(each.T for each in (*computing[:2], again_s[0], computing[2])), communication, strict=True)
            segments = [Segment(*seconds_of, *others) for *seconds_of, others in own]
            found[members] = terms_of(segments, self._constants["optimizer_s"][members], load, syncs)
        return found


_STALLS = [COMMUNICATION.index("forward_stall_s"), COMMUNICATION.index("backward_stall_s")]
"""Where `Run.communication` has what never overlaps."""
_OF_CALLS = ("forward_s", "backward_s", "forward_launch_s", "backward_launch_s")
_AS_THEY_ARE = (
    *("gradients", "stepped", "largest", "second"),
    *("gather_output", "prefetched", "prefetch_temporary", "reduce_input"),
    *("gathers", "prefetches", "reduces"),
)
_CONSTANTS = (
    *("parameters", "optimizer", "window", "updates", "reduced_after_backward", "kept", *_AS_THEY_ARE),
    *("optimizer_s", "syncs_each_microbatch"),
)
"""Fields of `StageCandidate` that do not depend on the micro-batch, and are numbers."""
