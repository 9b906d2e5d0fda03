"""One rank's part of `osdp profile`: everything is measured in turn, and put together.

    memory -> communication -> rates -> overlap -> units -> what units take of the host
           -> the model's calls and optimizers -> what units take of the host, again -> memory -> Findings

One rank alone has no communication: overlap and units are not measured either, and its link is that of the cluster at
hand, as an assumption.  On a CPU nothing takes of the host but the computing.

Times are those of the slowest rank, except of calls, where the ranks' medians are averaged: a collective waits for
the rank that is slowest at that moment, which is another one each time.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from osdp.planning.clusters import DEFAULT_CLUSTER, load_cluster
from osdp.planning.rank_grid import cluster_at_hand, grid
from osdp.profile.fsdp_overhead import UnitLaunch, UnitTimes, mean_launch, measure_unit_launch, measure_units
from osdp.profile.time_collectives import SIZES_BYTES, Request, Timings, collective_times, measure_rounds
from planner.problem import Progress
from planner.strategies.unit_collectives import padded_rows
from profiler.cluster.cluster import Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, CollectiveTimes, OptimizerTimes
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.timing.device_rates import DeviceMemory, DeviceRates, device_memory, measure_rates
from profiler.timing.operator_times import ComputeTimes, measure_calls
from profiler.timing.optimizer_times import optimizer_times
from profiler.timing.overlap import Overlap, measure_overlap, meet
from profiler.trace.trace import trace_model
from runtime.failures.rank_agreement import Agreement
from runtime.meshes import Meshes
from runtime.odc.choose_transport import why_none_anywhere
from runtime.optimizers import OPTIMIZERS

COMMUNICATION_SHARE = 0.6
"""Part of the budget that communication may take, and of the progress that it makes."""
UNIT_REPETITIONS = 4
LAUNCH_REPETITIONS = 8
"""Steps of small units for each repetition of other timings: they are short, and so is what is looked for."""
OPTIMIZER_REPETITIONS = 4
"""Likewise steps of an optimizer: where ranks share cores, one in some is put aside for as long as a step takes."""


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
    is_host_bound: bool = False
    """Whether a device may have waited for the host in one of the passes."""


@dataclass(frozen=True)
class Findings:
    """Everything that was measured."""

    device_type: str
    precision: str
    nodes: int
    ranks_per_node: int
    versions: str
    repetitions: int
    memory: DeviceMemory
    rates: DeviceRates
    timings: tuple[Timings, ...]
    """Of collectives."""
    times: tuple[CollectiveTimes, ...]
    """The fits of these."""
    overlap: Overlap | None
    """None: one rank alone, which has nothing to overlap."""
    unit: UnitTimes
    graph: ModelGraph | None
    """Of the model whose calls were measured."""
    model: ModelTimes
    link: Link | None = None
    """Of one rank alone, which has none to measure."""
    no_windows: str = ""
    """Why pulls and pushes were not measured; empty: they were, or there is one rank on a node."""
    unit_launch: UnitLaunch | None = None
    """None: a CPU, which computes what it would launch."""


def measure(wanted: Wanted, device: torch.device, progress: Progress) -> Findings:
    """Measure the machine, and the model if there is one. A collective call; raises OsdpError."""
    nodes, ranks_per_node = grid()
    is_alone = dist.get_world_size() == 1
    repetitions, budget_s = wanted.repetitions, COMMUNICATION_SHARE * wanted.budget_s

    def round_begins(done: int) -> None:
        what = f"measuring communication: round {done} of {repetitions}"
        progress(what, COMMUNICATION_SHARE * (done + 1) / (repetitions + 1))

    progress("measuring memory", 0.0)
    memory = _least_memory(device, ranks_per_node)
    timings: list[Timings] = []
    no_windows = ""
    if not is_alone:
        progress("measuring communication: a first pass", 0.0)
        no_windows = _why_no_windows(nodes, ranks_per_node, device)
        request = Request(nodes, ranks_per_node, wanted.sizes_bytes, repetitions, budget_s, one_sided=not no_windows)
        timings = measure_rounds(request, device, round_begins)
    times = collective_times(timings)
    progress("measuring rates", COMMUNICATION_SHARE)
    rates = _mean_rates(device, repetitions)
    overlap, unit = None, UnitTimes(0.0)
    if not is_alone:
        progress("measuring overlap", 0.65)
        overlap = measure_overlap(middle_size_bytes(times, dist.get_world_size()), repetitions, device)
        progress("measuring units", 0.7)
        unit = measure_units(times, nodes, ranks_per_node, UNIT_REPETITIONS * repetitions, device)
    units_launched: list[UnitLaunch] = []  # before and after the rest, as a host changes its speed within seconds
    launched = partial(measure_unit_launch, nodes, ranks_per_node, LAUNCH_REPETITIONS * repetitions, device)
    if device.type == "cuda":
        progress("measuring the host", 0.74)
        units_launched.append(launched(wanted.precision))
    source = wanted.model
    graph, model = (None, ModelTimes()) if source is None else measure_model(wanted, source, device, progress)
    if device.type == "cuda":
        progress("measuring the host again", 0.97)
        units_launched.append(launched(wanted.precision))
    backend = "NCCL" if wanted.device == "cuda" else "gloo"
    return Findings(
        device_type=wanted.device,
        precision=wanted.precision,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, {backend}",
        repetitions=repetitions,
        memory=_memory_at_the_end(memory, device, ranks_per_node),
        rates=rates,
        timings=tuple(timings),
        times=times,
        overlap=overlap,
        unit=unit,
        unit_launch=mean_launch(units_launched) if units_launched else None,
        graph=graph,
        model=model,
        link=_assumed_link() if is_alone else None,
        no_windows=no_windows,
    )


def _why_no_windows(nodes: int, ranks_per_node: int, device: torch.device) -> str:
    """Return why the ranks of a node cannot have windows; empty if they can, or are alone on it. A collective call."""
    if ranks_per_node == 1:
        return ""
    group = Meshes(device.type, nodes, ranks_per_node).group(ranks_per_node)
    return why_none_anywhere([(group, False)], device.type)


def _assumed_link() -> Link:
    """Return the link that ranks of this machine are assumed to have, if there were several."""
    try:
        known = cluster_at_hand(1, 1)
    except OsdpError:  # GPUs of which nothing is known
        known = load_cluster(DEFAULT_CLUSTER)
    source = f"assumed: one rank alone has no link, so as of {known.name}"
    return Link(Figure(known.intra.latency_s.value, source), Figure(known.intra.bytes_per_s.value, source))


def _least_memory(device: torch.device, ranks_per_node: int) -> DeviceMemory:
    """Return the memory of the rank that has least left."""
    found = Agreement.all().gather("look at its memory", lambda: device_memory(device, ranks_per_node))
    return min(found, key=lambda one: one.total_bytes - one.taken_bytes)


def _memory_at_the_end(before: DeviceMemory, device: torch.device, ranks_per_node: int) -> DeviceMemory:
    """Return the memory with what is taken now, if that is more: libraries and communicators came later."""
    if device.type == "cpu":
        return before  # By now a process is as large as its tensors made it.
    after = _least_memory(device, ranks_per_node)
    return replace(before, taken_bytes=max(before.taken_bytes, after.taken_bytes))


def middle_size_bytes(times: Sequence[CollectiveTimes], ranks: int) -> int:
    """Return the middle one of the sizes at which an all-reduce over the world was measured."""
    points = next(one.points for one in times if (one.operation, one.ranks, one.stride) == ("all_reduce", ranks, 1))
    return int(points[len(points) // 2][0])


def _mean_rates(device: torch.device, repetitions: int) -> DeviceRates:
    mine = measure_rates(device, repetitions, lambda: meet(device))
    found = Agreement.all().gather("measure rates", lambda: mine)
    flops = {name: fmean(one.matmul_flops_per_s[name] for one in found) for name in mine.matmul_flops_per_s}
    return DeviceRates(flops, fmean(one.memory_bytes_per_s for one in found))


def measure_model(
    wanted: Wanted, source: ModelSource, device: torch.device, progress: Progress
) -> tuple[ModelGraph, ModelTimes]:
    """Return the trace of a model, the mean times of its calls, and the optimizer steps of the slowest rank over a
    shard of the world. A collective call; raises OsdpError."""
    start, end, repetitions = 0.8, 0.95, wanted.repetitions

    def pass_is_done(done: int, passes: int) -> None:
        progress(f"measuring calls: pass {done} of {passes}", start + (end - start) * done / passes)

    progress(f"tracing {source.name}", 0.75)
    graph = trace_model(source, wanted.precision, wanted.device)
    progress("measuring model", start)
    barrier, sizes = partial(meet, device), wanted.micro_batches
    mine = measure_calls(source, graph, device, sizes, repetitions=repetitions, barrier=barrier, progress=pass_is_done)
    progress("measuring optimizers", end)
    trained = [parameter for operator in graph.operators for parameter in operator.parameters if parameter.trainable]
    shapes = [padded_rows(parameter, dist.get_world_size()) for parameter in trained]
    size_bytes = sum(4 * rows * rest for rows, rest in shapes)
    # As FSDP2 holds them; optimizers that step on local tensors unwrap them.
    mesh = Meshes(device.type, *grid()).mesh(dist.get_world_size())
    held = partial(DTensor.from_local, device_mesh=mesh, placements=[Shard(0)], run_check=False)
    steps = optimizer_times(shapes, OPTIMIZERS, device, OPTIMIZER_REPETITIONS * repetitions, barrier, held=held)
    everyone = Agreement.all().gather("measure the model", lambda: (mine, steps))
    by_optimizer = zip(*(steps for _, steps in everyone), strict=True)
    slowest = [max(of_ranks, key=lambda one: one.step_s(len(shapes), size_bytes)) for of_ranks in by_optimizer]
    calls = [of_calls for of_calls, _ in everyone]
    disagreement = max((one for of_rank in calls for one in of_rank.disagreement), key=abs)
    cut = all(of_rank.cut for of_rank in calls)
    is_host_bound = any(of_rank.is_host_bound for of_rank in calls)
    return graph, ModelTimes(mean_calls(calls), tuple(slowest), disagreement, cut, is_host_bound)


def mean_calls(found: Sequence[ComputeTimes]) -> tuple[CallTimes, ...]:
    """Return each call with the means over ranks, in the proportion that makes whole passes of them.

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
            forward_launch_s=fmean(one.forward_launch_s for one in alike),
            backward_launch_s=fmean(one.backward_launch_s for one in alike),
        )
        for alike in zip(*(one.calls for one in found), strict=True)
    )
