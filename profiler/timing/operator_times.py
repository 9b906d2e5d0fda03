"""Measures the compute time of a model's calls on a device, without ever holding the whole model.

    build (shared_weights) -> passes block by block (blockwise_pass, stopwatch) -> medians per kind of call (here)

With t_c,r the seconds of call c in repetition r, the time of a kind of call k is

    t_k = median over r of (mean over the calls c of kind k of t_c,r)                (`_medians`)

The host's seconds of calls are such medians too, times what makes them add up to an unwatched pass (`unwatched`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
from statistics import fmean, median

import torch
from torch import nn

from profiler.cluster.measurements import CallTimes, call_key
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.timing.blockwise_pass import PassError, PassTimes, run_blockwise
from profiler.timing.device_queue import clock_of
from profiler.timing.host_launches import host_launches_s, mean_s
from profiler.timing.shared_weights import build, real_inputs, shared_weights
from profiler.timing.stopwatch import Clock
from profiler.trace.dataless_device import training
from profiler.trace.trace_errors import explain

HOST_S = 1.5
"""For which the host is timed at once: within a second it may change its speed by a third."""


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """The measurements of one model."""

    calls: tuple[CallTimes, ...]
    """One for each kind of call, in order of first execution."""
    disagreement: tuple[float, ...]
    """(sum of all calls' medians - t) / t at each micro-batch, t the median seconds of a whole forward and backward.

    Far below zero where the device is shared: medians of short calls exclude interruptions, a whole pass does not.
    """
    cut: bool
    """Whether passes were cut at the blocks; where a model does not allow it, all its activations lived."""
    is_host_bound: bool = False
    """Whether a device may have waited for the host in one of the passes (`profiler.timing.device_queue`)."""


def measure_calls(
    source: ModelSource,
    graph: ModelGraph,
    device: torch.device,
    micro_batches: Sequence[int],
    *,
    repetitions: int = 5,
    warm_up: int = 2,
    barrier: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, passes: None,
    clock: Clock | None = None,
) -> ComputeTimes:
    """Time forward and backward of every kind of call in `graph`, the trace of `source`, on a device.

    Runs `1 + warm_up + repetitions` training passes per micro-batch (ascending); the first counts what
    is kept for backward.  `barrier` is called before each, so that all ranks compute at once, `progress`
    after each with the passes done and all of them; `clock` is the device's unless given.  Raises
    OsdpError, naming the operator, for a model that does not run, and for a graph of another model.
    """
    sizes = tuple(sorted(set(micro_batches)))
    if not sizes or sizes[0] < 1 or repetitions < 1 or warm_up < 0:
        got = f"micro-batches {list(micro_batches)}, {repetitions} repetitions, warm-up {warm_up}"
        raise OsdpError("nothing to measure", got=got, expected="at least one of each, and a warm-up of 0 or more")
    module = build(source, device)
    random_numbers = torch.random.fork_rng([device] if device.type == "cuda" else [])
    weights = shared_weights(module, device, graph.precision, graph.master_weights)
    with weights, training(module), random_numbers:
        bench = _Bench(module, source, graph, device, clock or clock_of(device))
        done, passes, points, is_host_bound = 0, len(sizes) * (1 + warm_up + repetitions), [], False
        launched_s: list[float] = []  # at several times, as a host changes its speed within seconds
        for size in sizes:
            launched_s += bench.launched_s(sizes[0], repetitions)
            bench.feed(size)
            runs: list[PassTimes] = []
            for _ in range(1 + warm_up + repetitions):
                barrier()
                runs.append(bench.run(not runs))
                done += 1
                progress(done, passes)
            points.append(_point(graph, size, runs[0], runs[1 + warm_up :]))
            is_host_bound = is_host_bound or any(run.is_host_bound for run in runs[1 + warm_up :])
        launched_s += bench.launched_s(sizes[0], repetitions)
    names: dict[str, str] = {}
    for call in graph.calls:
        names.setdefault(call_key(graph, call), f"{graph.name} {graph.operators[call.operator].name}")
    calls = []
    for key, name in names.items():
        forward_s, backward_s, saved_bytes, *launches_s = zip(*(figures[key] for figures, _ in points), strict=True)
        # The host's time does not depend on the micro-batch; the least is what it took while nothing held it up.
        calls.append(CallTimes(key, name, sizes, forward_s, backward_s, saved_bytes, *map(min, launches_s)))
    calls = unwatched(
        calls, [call_key(graph, call) for call in graph.calls], mean_s(launched_s) if launched_s else None
    )
    disagreement = tuple(one for _, one in points)
    return ComputeTimes(tuple(calls), disagreement, bool(bench.blocks) or not graph.blocks, is_host_bound)


def unwatched(calls: Sequence[CallTimes], keys: Iterable[str], launched_s: float | None) -> list[CallTimes]:
    """Return calls with the host's seconds that add up to those of a whole pass, which makes the calls `keys`.

    Watching makes them longer and nothing makes them shorter, so that a pass in which the host waited for the device
    changes nothing; nor does None.
    """
    taken_s = {call.key: call.forward_launch_s + call.backward_launch_s for call in calls}
    watched_s = sum(taken_s[key] for key in keys)
    if launched_s is None or launched_s >= watched_s:
        return list(calls)
    share = launched_s / watched_s
    return [
        replace(call, forward_launch_s=share * call.forward_launch_s, backward_launch_s=share * call.backward_launch_s)
        for call in calls
    ]


class _Bench:
    """The model and its inputs on the device."""

    def __init__(
        self, module: nn.Module, source: ModelSource, graph: ModelGraph, device: torch.device, clock: Clock
    ) -> None:
        self.blocks: set[str] = {block.name for block in graph.blocks}
        self._module, self._source, self._graph, self._device, self._clock = module, source, graph, device, clock
        self._operators = {path: index for index, one in enumerate(graph.operators) for path in one.modules}
        if missing := sorted(set(self._operators) - {path for path, _ in module.named_modules()}):
            got, expected = f"no module {missing[0]}", "the trace of the same model"
            raise OsdpError(f"the graph is not of {source.name}", got=got, expected=expected)

    def feed(self, micro_batch: int) -> None:
        """Make the inputs of the passes that follow."""
        self._inputs = real_inputs(self._module, self._source, micro_batch, self._device)

    def run(self, count_saved: bool) -> PassTimes:
        """Run a pass; a model that cannot be cut at its blocks runs uncut from then on."""
        try:
            return run_blockwise(self._module, self._operators, self.blocks, self._inputs, self._clock, count_saved)
        except PassError as failure:
            if not self.blocks:
                raise self._explain(failure) from failure.__cause__
        self.blocks = set()
        return self.run(count_saved)

    def launched_s(self, micro_batch: int, repetitions: int) -> list[float]:
        """Return the seconds in which the host launches whole passes; none: it computes itself, or there is no room."""
        if not self._clock.is_behind_host:
            return []
        self.feed(micro_batch)
        return host_launches_s(self._module, self._inputs, self._device, repetitions, HOST_S)

    def _explain(self, failure: PassError) -> OsdpError:
        error = failure.__cause__ or failure
        named = "the model's own forward"
        if failure.operator is not None:
            named = f"the {failure.direction} of `{self._graph.operators[failure.operator].name}`, or what follows it,"
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        advice = "a smaller micro-batch" if is_memory else "run the model once on its example inputs"
        what = f"cannot run {self._source.name} on {self._device}: {named} raised"
        return explain(what, error, "a forward and backward that run in training mode", advice)


def _point(
    graph: ModelGraph, micro_batch: int, first: PassTimes, runs: Sequence[PassTimes]
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Return, at one micro-batch and by key, seconds of forward and of backward, saved bytes, and seconds in which the
    host launched both; and the disagreement.
    """
    keys = [call_key(graph, call) for call in graph.calls]
    order = [call.operator for call in graph.calls]
    works = [call.forward for call in graph.calls]
    moved = [work.matmul_bytes(micro_batch) + work.other_bytes(micro_batch) for work in works]
    kept = [call.saved_bytes(micro_batch) for call in graph.calls]
    forward_s = _medians(keys, (spread(run.entries, order, run.forward_s, moved) for run in runs))
    backward_s = _medians(keys, (spread(run.entries, order, run.backward_s, moved) for run in runs))
    saved_bytes = _medians(keys, [spread(first.entries, order, first.saved_bytes, kept)])
    forward_launch_s = _medians(keys, (spread(run.entries, order, run.forward_launch_s, moved) for run in runs))
    backward_launch_s = _medians(keys, (spread(run.entries, order, run.backward_launch_s, moved) for run in runs))
    pass_s = median(run.total_s for run in runs)
    disagreement = sum(forward_s[key] + backward_s[key] for key in keys) / pass_s - 1.0
    figures = forward_s, backward_s, saved_bytes, forward_launch_s, backward_launch_s
    return {key: tuple(one[key] for one in figures) for key in keys}, disagreement


def _medians(keys: Sequence[str], runs: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return each key's median over runs of the mean of the calls that have it."""
    means: dict[str, list[float]] = defaultdict(list)
    for values in runs:
        alike: dict[str, list[float]] = defaultdict(list)
        for key, value in zip(keys, values, strict=True):
            alike[key].append(value)
        for key, found in alike.items():
            means[key].append(fmean(found))
    return {key: median(found) for key, found in means.items()}


def spread(
    entries: Sequence[int], calls: Sequence[int], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the values of calls from those of entries, both given by their operators; the sum is the same.

    Usually there is one entry for each call.  A call that begins without its operator's module (a
    parameter read from outside) shares the value of the entry that it lies in, by `weights` (one per
    call); an entry that began no call adds to the one before.
    """
    blocks = SequenceMatcher(None, entries, calls, autojunk=False).get_matching_blocks()
    matched = [(one.a + step, one.b + step) for one in blocks for step in range(one.size)][1:]
    starts = [(0, 0), *matched, (len(entries), len(calls))]
    result: list[float] = []
    for (entry, call), (next_entry, next_call) in pairwise(starts):
        total, parts = sum(values[entry:next_entry]), weights[call:next_call]
        whole = sum(parts)
        result += [total * part / whole if whole else total / len(parts) for part in parts]
    return result
