"""One rank's part of `osdp profile`: everything is measured in turn, kept as it goes, and put together.

    memory -> communication -> rates -> overlap -> units -> the model's calls and optimizers -> memory
                                                                                            -> a cluster file

Rank 0 keeps the state and decides what is still to be done; parts that are there already are taken as they are.
Times are those of the slowest rank, except of calls, where the ranks' medians are averaged: a collective waits for
whoever is slowest at that moment, which is another rank each time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from osdp.planning.rank_grid import grid
from osdp.profile.findings import collective_times, middle_size_bytes
from osdp.profile.fsdp_overhead import UnitTimes, measure_units
from osdp.profile.lines import CommunicationState, rounds_done
from osdp.profile.state import State
from osdp.profile.time_collectives import SIZES_BYTES, measure_rounds
from osdp.profile.time_collectives import Request as CommunicationRequest
from planner.strategies.unit_collectives import padded_rows
from profiler.cluster.measurements import CallTimes, CollectiveTimes, OptimizerTimes, call_key
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.timing.device_rates import DeviceMemory, DeviceRates, device_memory, measure_rates
from profiler.timing.operator_times import ComputeTimes, measure_calls
from profiler.timing.optimizer_times import optimizer_times
from profiler.timing.overlap import Overlap, measure_overlap, meet
from profiler.trace.trace import trace_model
from profiler.yaml_files import validate
from runtime.failures.rank_agreement import Agreement
from runtime.optimizers import OPTIMIZERS

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done, which never falls."""

COMMUNICATION_SHARE = 0.6
"""Part of the budget that communication may take."""
DONE = {
    "memory": 0.0,
    "communication": 0.0,
    "rates": COMMUNICATION_SHARE,
    "overlap": 0.65,
    "units": 0.7,
    "tracing": 0.75,
    "model": 0.8,
    "optimizers": 0.95,
    "memory at the end": 1.0,
}
"""Fraction done when a part begins, about; parts come in this order."""
UNIT_REPETITIONS = 4
"""Steps of small units for each repetition of other timings: they are short, and so is what is looked for."""


@dataclass(frozen=True)
class Wanted:
    """What to measure."""

    model: ModelSource | None
    """None: no calls are measured."""
    precision: str
    micro_batches: tuple[int, ...]
    repetitions: int
    budget_s: float
    device: str
    """`cpu` or `cuda`."""
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    """Of collectives."""


@dataclass(frozen=True)
class ModelTimes:
    """What was measured of a model."""

    calls: tuple[CallTimes, ...] = ()
    optimizers: tuple[OptimizerTimes, ...] = ()
    disagreement: float = 0.0
    """(sum of calls - whole pass) / whole pass, the worst of all micro-batches."""
    cut: bool = True
    """Whether passes were cut at the blocks; otherwise all activations lived."""
    graph_key: str = ""
    """`graph_key` of the graph that was measured."""


@dataclass(frozen=True)
class Findings:
    """Everything that was measured."""

    kind: str
    """`cpu` or `cuda`."""
    nodes: int
    ranks_per_node: int
    versions: str
    repetitions: int
    memory: DeviceMemory
    rates: DeviceRates
    communication: CommunicationState
    times: tuple[CollectiveTimes, ...]
    """The fits of that."""
    overlap: Overlap
    unit: UnitTimes
    graph: ModelGraph | None
    """Of the model whose calls were measured."""
    model: ModelTimes


def question(wanted: Wanted) -> dict[str, Any]:
    """Return what a state is for: options, ranks, versions and machine."""
    nodes, ranks_per_node = grid()
    model = wanted.model
    asked = asdict(replace(wanted, model=None))
    asked["model"] = [model.name, model.sequence_length] if model else None
    return asked | {
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "versions": versions(wanted.device),
        "host": platform.node(),
    }


def versions(device: str) -> str:
    """Return what the measurements were made with."""
    backend = "NCCL" if device == "cuda" else "gloo"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {backend}"


def measure(wanted: Wanted, device: torch.device, state: State, progress: Progress) -> Findings:
    """Measure what rank 0's state does not have yet. A collective call; raises OsdpError."""
    if dist.get_world_size() < 2:
        raise OsdpError("a profile needs two ranks or more", got="1", expected="for instance --ranks-per-node 2")
    return _Session(wanted, device, state, progress).run()


class _Session:
    """Measures on this rank, with all others. Every method is a collective call."""

    def __init__(self, wanted: Wanted, device: torch.device, state: State, progress: Progress) -> None:
        self.wanted, self.device, self.state, self.progress = wanted, device, state, progress
        self.ranks = Agreement.all()
        self.nodes, self.ranks_per_node = grid()

    def run(self) -> Findings:
        wanted, repetitions = self.wanted, self.wanted.repetitions
        memory = self.part("memory", DeviceMemory, self.least_memory)
        communication = self.communication()
        times = collective_times(communication)
        rates = self.part("rates", DeviceRates, self.mean_rates)
        size_bytes = middle_size_bytes(times, dist.get_world_size())
        overlap = self.part("overlap", Overlap, lambda: measure_overlap(size_bytes, repetitions, self.device))
        unit = self.part("units", UnitTimes, lambda: self.unit_times(times))
        graph, model = self.model()
        return Findings(
            kind=wanted.device,
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            versions=versions(wanted.device),
            repetitions=repetitions,
            memory=self.memory_at_the_end(memory),
            rates=rates,
            communication=communication,
            times=times,
            overlap=overlap,
            unit=unit,
            graph=graph,
            model=model,
        )

    def part(
        self,
        name: str,
        type_: type[T],
        measure_it: Callable[[], T],
        is_of_this: Callable[[T], bool] = lambda known: True,
    ) -> T:
        """Return a part of rank 0's state; measured now unless it is there, whole and `is_of_this` question."""

        def kept() -> T | None:
            found, _ = validate(self.state.parts.get(name), type_)
            return found if found is not None and is_of_this(found) else None

        known = self.from_rank_0(kept)
        if known is not None:
            return known
        self.progress(f"measuring {name}", DONE[name])
        mine = measure_it()
        found = self.from_rank_0(lambda: mine)
        self.state.put(name, asdict(found))  # type: ignore[call-overload]
        return found

    def from_rank_0(self, make: Callable[[], T]) -> T:
        return self.ranks.gather("profile", make)[0]

    def meet(self) -> None:
        meet(self.device)

    # --- the parts ---

    def least_memory(self) -> DeviceMemory:
        """Return the memory of the rank that has least left."""
        found = self.ranks.gather("look at its memory", lambda: device_memory(self.device, self.ranks_per_node))
        return min(found, key=lambda one: one.total_bytes - one.taken_bytes)

    def memory_at_the_end(self, before: DeviceMemory) -> DeviceMemory:
        """Return the memory with what is taken now, if that is more: libraries and communicators came later."""
        if self.device.type == "cpu":
            return before  # By now a process is as large as its tensors made it.
        after = self.part("memory at the end", DeviceMemory, self.least_memory)
        return replace(before, taken_bytes=max(before.taken_bytes, after.taken_bytes))

    def communication(self) -> CommunicationState:
        wanted = self.wanted
        budget_s, repetitions = COMMUNICATION_SHARE * wanted.budget_s, wanted.repetitions
        request = CommunicationRequest(self.nodes, self.ranks_per_node, wanted.sizes_bytes, repetitions, budget_s)
        self.progress("measuring communication: a first pass", DONE["communication"])
        known: CommunicationState | None = self.state.parts.get("communication")
        for found in measure_rounds(request, self.device, known):
            self.state.put("communication", found)
            what = f"measuring communication: round {rounds_done(found)} of {repetitions}"
            self.progress(what, COMMUNICATION_SHARE * (rounds_done(found) + 1) / (repetitions + 1))
            known = found
        assert known is not None, "there is a state before the first round"
        return known

    def mean_rates(self) -> DeviceRates:
        """Return the mean rates of all ranks."""
        mine = measure_rates(self.device, self.wanted.repetitions, self.meet)
        found = self.ranks.gather("measure rates", lambda: mine)
        flops = {name: fmean(one.matmul_flops_per_s[name] for one in found) for name in mine.matmul_flops_per_s}
        return DeviceRates(flops, fmean(one.memory_bytes_per_s for one in found))

    def unit_times(self, times: tuple[CollectiveTimes, ...]) -> UnitTimes:
        """Return what units cost beside their collectives."""
        repetitions = UNIT_REPETITIONS * self.wanted.repetitions
        return measure_units(times, self.nodes, self.ranks_per_node, repetitions, self.device, self.meet)

    def model(self) -> tuple[ModelGraph | None, ModelTimes]:
        """Return the trace of the model and its times; those that were kept only if they are of the same trace."""
        source = self.wanted.model
        if source is None:
            return None, ModelTimes()
        self.progress(f"tracing {source.name}", DONE["tracing"])
        graph = trace_model(source, self.wanted.precision, self.wanted.device)
        key = graph_key(graph)
        return graph, self.part(
            "model", ModelTimes, partial(self.model_times, source, graph), lambda known: known.graph_key == key
        )

    def model_times(self, source: ModelSource, graph: ModelGraph) -> ModelTimes:
        """Return the mean times of calls, and the optimizer steps of the slowest rank over a shard of the world."""
        start, end, repetitions = DONE["model"], DONE["optimizers"], self.wanted.repetitions

        def progress(done: int, passes: int) -> None:
            self.progress(f"measuring calls: pass {done} of {passes}", start + (end - start) * done / passes)

        mine = measure_calls(
            source,
            graph,
            self.device,
            self.wanted.micro_batches,
            repetitions=repetitions,
            barrier=self.meet,
            progress=progress,
        )
        self.progress("measuring optimizers", end)
        shapes = [
            padded_rows(parameter, dist.get_world_size())
            for operator in graph.operators
            for parameter in operator.parameters
            if parameter.trainable
        ]
        size_bytes = sum(4 * rows * rest for rows, rest in shapes)
        steps = optimizer_times(shapes, OPTIMIZERS, self.device, repetitions, self.meet)
        everyone = self.ranks.gather("measure the model", lambda: (mine, steps))
        slowest = [
            max(of_ranks, key=lambda one: one.step_s(len(shapes), size_bytes))
            for of_ranks in zip(*(steps for _, steps in everyone), strict=True)
        ]
        calls = [of_calls for of_calls, _ in everyone]
        return ModelTimes(
            calls=mean_calls(calls),
            optimizers=tuple(slowest),
            disagreement=max((one for of_rank in calls for one in of_rank.disagreement), key=abs),
            cut=all(of_rank.cut for of_rank in calls),
            graph_key=graph_key(graph),
        )


def graph_key(graph: ModelGraph) -> str:
    """Return what graphs have in common whose calls are alike, in the same order."""
    return sha256(" ".join(call_key(graph, call) for call in graph.calls).encode()).hexdigest()[:16]


def mean_calls(found: Sequence[ComputeTimes]) -> tuple[CallTimes, ...]:
    """Return each kind of call with the means over ranks, in the proportion that makes whole passes of them.

    With more ranks than cores a rank is put aside now and then: the median of a short call does not see that,
    the median of a whole pass does.
    """

    def means(alike: Sequence[CallTimes], name: str, shares: Sequence[float]) -> tuple[float, ...]:
        values = zip(*(getattr(one, name) for one in alike), strict=True)
        return tuple(share * fmean(of_ranks) for share, of_ranks in zip(shares, values, strict=True))

    errors = [fmean(of_ranks) for of_ranks in zip(*(one.disagreement for one in found), strict=True)]
    whole, as_found = [1.0 / (1.0 + error) for error in errors], [1.0 for _ in errors]
    return tuple(
        replace(
            alike[0],
            forward_s=means(alike, "forward_s", whole),
            backward_s=means(alike, "backward_s", whole),
            saved_bytes=means(alike, "saved_bytes", as_found),
        )
        for alike in zip(*(one.calls for one in found), strict=True)
    )
