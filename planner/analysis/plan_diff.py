"""How two plans differ, from their files alone: settings, choices, and what each is predicted to cost.

Choices are compared by operator.  Operators of one block are known by the first number in their path
(`h.3.attn.qkv` is `attn.qkv` of `h.3`), and blocks that change alike are one row (`ChoiceChange`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.plan import Plan
from profiler.model_graph import Recompute

HIDDEN = "hidden_communication_s"
"""Overlapped with computation, so not a term of the step time."""


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs."""

    setting: str
    """E.g. `micro_batch`."""
    before: str | int
    after: str | int


@dataclass(frozen=True)
class ChoiceChange:
    """Blocks or operators that went from one choice to another."""

    operators: tuple[str, ...]
    """Within a block: their paths without the block's. Empty: all operators of the block, or no block."""
    names: tuple[str, ...]
    """Blocks, or operators outside blocks."""
    before: str
    """Strategy, or `kept`, `recomputed selectively`, `recomputed` or `recomputed, input offloaded`."""
    after: str


@dataclass(frozen=True)
class Delta:
    """One predicted figure of both plans."""

    name: str
    """Category of memory, term of time, or a total."""
    before: float
    after: float

    @property
    def change(self) -> float:
        """By how much the second plan has more."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """What differs between two plans."""

    settings: tuple[SettingChange, ...]
    same_operators: bool
    """Whether the plans are for models of the same operators; if not, choices are not compared."""
    choices: tuple[ChoiceChange, ...]
    """Strategies first, then recomputation."""
    changed_operators: int
    """Operators whose strategy differs."""
    memory: tuple[Delta, ...]
    """Bytes at the peak by category; they sum to the peak."""
    time: tuple[Delta, ...]
    """Seconds by term; they sum to the step."""
    peak_bytes: Delta
    step_time_s: Delta
    samples_per_s: Delta

    @property
    def is_empty(self) -> bool:
        """Whether the plans have equal choices and were made for the same task."""
        return self.same_operators and not self.settings and not self.choices


def compare(before: Plan, after: Plan) -> Comparison:
    """Return what differs between two plans."""
    same = before.choices.keys() == after.choices.keys()
    changed = {name for name in before.choices if same and before.choices[name] != after.choices[name]}
    old, new = before.predicted, after.predicted
    was, now = _made_for(before), _made_for(after)
    return Comparison(
        settings=tuple(SettingChange(name, was[name], now[name]) for name in was if was[name] != now[name]),
        same_operators=same,
        choices=(*_strategies(before, after, changed), *_recomputation(before, after)) if same else (),
        changed_operators=len(changed),
        memory=_deltas(old.memory_by_category, new.memory_by_category),
        time=_deltas(old.time_by_term, new.time_by_term),
        peak_bytes=Delta("peak", old.peak_memory_bytes, new.peak_memory_bytes),
        step_time_s=Delta("step", old.step_time_s, new.step_time_s),
        samples_per_s=Delta("samples/s", old.samples_per_s, new.samples_per_s),
    )


def _made_for(plan: Plan) -> dict[str, str | int]:
    """Return the settings that a plan was made for, and its batch size."""
    model, cluster = plan.model, plan.cluster
    return {
        "model": model.name,
        "parameters": model.parameters,
        "sequence_length": model.sequence_length,
        "precision": model.precision,
        "model_fingerprint": model.fingerprint,
        "cluster": cluster.name,
        "ranks": f"{cluster.nodes} x {cluster.gpus_per_node}",
        "cluster_fingerprint": cluster.fingerprint,
        "optimizer": plan.optimizer,
        "limit_bytes": plan.limit_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "imbalance": plan.waits.source or "none",
        "pins": ", ".join(plan.asked.pins) or "none",
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
    }


def _block_and_rest(path: str) -> tuple[str, str]:
    """Return the path up to its first number, and the rest; the whole and nothing if it has none."""
    found = re.fullmatch(r"((?:[^.]*\.)*?\d+)(?:\.(.*))?", path)
    return (found[1], found[2] or "") if found else (path, "")


def _strategies(before: Plan, after: Plan, changed: set[str]) -> Iterator[ChoiceChange]:
    """Yield the changes of strategies, blocks that change alike together."""
    alike: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
    blocks: dict[str, list[str]] = {}
    for name in before.choices:
        blocks.setdefault(_block_and_rest(name)[0], []).append(name)
    for block, inside in blocks.items():
        pairs: dict[tuple[str, str], list[str]] = {}
        for name in inside:
            if name in changed:
                pairs.setdefault((before.choices[name], after.choices[name]), []).append(_block_and_rest(name)[1])
        for (old, new), rests in pairs.items():
            whole = len(rests) == len(inside)
            alike.setdefault((() if whole else tuple(rests), old, new), []).append(block)
    for (operators, old, new), names in alike.items():
        yield ChoiceChange(operators, tuple(names), old, new)


_RECOMPUTED = {
    Recompute.NOTHING: "kept",
    Recompute.SELECTIVE: "recomputed selectively",
    Recompute.EVERYTHING: "recomputed",
    Recompute.OFFLOADED: "recomputed, input offloaded",
}


def _recomputation(before: Plan, after: Plan) -> Iterator[ChoiceChange]:
    """Yield the blocks that one plan recomputes in another way than the other."""
    old, new = before.recomputations, after.recomputations
    changed: dict[tuple[Recompute, Recompute], list[str]] = {}
    for name in dict.fromkeys((*new, *old)):
        pair = old.get(name, Recompute.NOTHING), new.get(name, Recompute.NOTHING)
        if pair[0] is not pair[1]:
            changed.setdefault(pair, []).append(name)
    for (was, now), names in changed.items():
        yield ChoiceChange((), tuple(names), _RECOMPUTED[was], _RECOMPUTED[now])


def _deltas(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Delta, ...]:
    """Return the figures of both; 0 where one has none."""
    names = [name for name in dict.fromkeys((*before, *after)) if name != HIDDEN]
    return tuple(Delta(name, before.get(name, 0), after.get(name, 0)) for name in names)
