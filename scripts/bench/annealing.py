"""Whether simulated annealing finds a faster plan than the search: `python scripts/bench/annealing.py [--help]`.

It moves in the candidate sets of the search, those of the found plan's micro-batch and of the ones before and after it,
with every strategy of the spanning operators; it starts at the plan that was found where that is one of the set, and
elsewhere at the plan of least memory.  A move gives a run of stages another option, or what a neighbour has, or changes
two stages with each other.  Time and memory are `step_time` and `peak_memory` of the whole sequence, which the search
never calls on parts of plans; the best sequences are priced as plan files are.  Problems are those of
`search_quality.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator

import numpy as np
from _shared import machine
from numpy.typing import NDArray
from search_quality import NAMED, Problem, asked, zoo

from planner.cost.peak_memory import peak_memory
from planner.cost.step_time import step_time
from planner.cost.workload import Workload
from planner.options.candidate_set import CandidateSet
from planner.options.option_columns import OptionColumns
from planner.options.search_space import Space
from planner.pricing import priced
from planner.problem import Task
from planner.search.search import Found, loads_of, search
from planner.solve.counting_ilp import CountingProgram
from profiler.errors import OsdpError

Picks = list[int]
HOT, COLD = 3e-3, 3e-6
"""Temperatures at the start and at the end, in the time of a step."""
KEPT = 5
"""So many of the best sequences of a walk are priced as whole plans."""
TARGET = 5e-4
"""A plan that is faster by more than this share beats the search."""


def neighbours(found: Found, loads: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """Return the workload of the plan and those beside it in the sweep."""
    sizes = [(load.micro_batch, load.accumulation) for load in loads]
    at = sizes.index((found.load.micro_batch, found.load.accumulation))
    return loads[max(0, at - 1) : at + 2]


def numbers_of(columns: OptionColumns) -> NDArray[np.float64]:
    """Return what options are compared by, shape (options, numbers)."""
    return np.column_stack([columns.rest, columns.gradients, columns.saved, columns.terms])


def nearest(found: Found, candidates: CandidateSet) -> Picks:
    """Return, for each stage, the option that is most like the plan's."""
    own, picks = numbers_of(OptionColumns.of(found.options, candidates.load)), []
    numbers = [numbers_of(columns) for columns in candidates.columns]
    for stage, stage_class in enumerate(candidates.stage_classes):
        scale = np.abs(own[stage]) + 1e-12
        picks.append(int(np.argmin((np.abs(numbers[stage_class] - own[stage]) / scale).sum(axis=1))))
    return picks


def moved(picks: Picks, candidates: CandidateSet, rng: random.Random) -> Picks:
    """Return a sequence with one change."""
    classes, changed = candidates.stage_classes, list(picks)
    i = rng.randrange(len(classes))
    kind = rng.random()
    if kind < 0.3:
        alike = [j for j, stage_class in enumerate(classes) if stage_class == classes[i]]
        j = rng.choice(alike)
        changed[i], changed[j] = changed[j], changed[i]
        return changed
    j = min(len(classes), i + 1 + int(rng.expovariate(0.5)))
    beside = [s for s in (i - 1, j) if 0 <= s < len(classes) and classes[s] == classes[i]]
    pick = picks[rng.choice(beside)] if beside and kind < 0.5 else rng.randrange(len(candidates.options[classes[i]]))
    for s in range(i, j):
        if classes[s] == classes[i]:
            changed[s] = pick
    return changed


def walk(
    candidates: CandidateSet, start: Picks, limit_bytes: int, moves: int, rng: random.Random
) -> Iterator[tuple[float, Picks]]:
    """Yield the best sequences of one walk, with their seconds, fastest first."""

    def seconds(picks: Picks) -> float:
        options = candidates.picked(picks)
        fits = peak_memory(options, candidates.load).total_bytes <= limit_bytes
        return step_time(options, candidates.load).total_s if fits else math.inf

    at, at_s = start, seconds(start)
    best = {tuple(at): at_s}
    for move in range(moves):
        heat = at_s * HOT * (COLD / HOT) ** (move / moves)
        changed = moved(at, candidates, rng)
        changed_s = seconds(changed)
        if changed_s <= at_s or (at_s < math.inf and rng.random() < math.exp((at_s - changed_s) / heat)):
            at, at_s = changed, changed_s
            best[tuple(at)] = at_s
            if len(best) > 10 * KEPT:
                best = dict(sorted(best.items(), key=lambda pair: pair[1])[:KEPT])
    yield from ((s, list(picks)) for picks, s in sorted(best.items(), key=lambda pair: pair[1])[:KEPT] if s < math.inf)


def annealed(task: Task, found: Found, seconds: float, moves: int, seed: int) -> tuple[float, int]:
    """Return the most samples per second of the plans that annealing finds in a time, and the walks that it made."""
    space, rng, best, walks = Space(task.graph, pins=task.pins), random.Random(seed), 0.0, 0
    sets = [
        space.candidates(load, spanning)
        for load in neighbours(found, loads_of(task, space))
        for spanning in space.spanning_offered(load)
    ]
    sets = [candidates for candidates in sets if all(candidates.options)]
    sets.sort(key=lambda candidates: candidates.load.micro_batch != found.load.micro_batch)
    end = time.process_time() + seconds
    while time.process_time() < end:
        candidates = sets[walks % len(sets)]
        same = candidates.load.micro_batch == found.load.micro_batch
        is_like = same and len(found.options) == len(candidates.stage_classes)
        start = nearest(found, candidates) if is_like else list(CountingProgram.smallest(candidates).picks)
        for _, picks in walk(candidates, start, task.limit_bytes, moves, rng):
            plan = priced(space, candidates.load, candidates.chosen(picks), candidates.spanning, task.limit_bytes)
            if plan.peak.total_bytes <= task.limit_bytes:
                best = max(best, plan.as_run(task.limit_bytes).samples_per_s)
        walks += 1
    return best, walks


def main() -> None:
    """Anneal the problems that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--named", action="store_true", help="the difficult problems alone")
    parser.add_argument("--every", type=int, default=1, help="only every so many-th problem of the zoo")
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds of annealing for each problem")
    parser.add_argument("--moves", type=int, default=2000, help="moves of one walk")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    problems: list[Problem] = list(NAMED) if options.named else list(zoo())[:: options.every]
    print(machine())
    print(f"{'annealed':>9}  {'gap':>7}  {'walks':>5}  problem")
    gains = []
    for problem in problems:
        try:
            task = asked(problem)
        except OsdpError:
            continue
        if task is None:
            continue
        found = search(task)
        speed, walks = annealed(task, found, options.seconds, options.moves, options.seed)
        gains.append(speed / found.samples_per_s - 1)
        print(f"{gains[-1]:+9.3%}  {found.gap:7.3%}  {walks:5d}  {problem.name}", flush=True)
    beaten = sum(gain > TARGET for gain in gains)
    print(f"{len(gains)} problems: {beaten} beaten by more than {TARGET:.2%} (target none), at most {max(gains):+.3%}")


if __name__ == "__main__":
    main()
