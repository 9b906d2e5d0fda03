"""Memory and communication of a model under one strategy: predicted, and measured in training.

    keeps   parameters, gradients, optimizer states between backward and step, on the rank that has most
    sends   bytes of whole tensors by collective: in forward, in backward (gradients included), in the
            optimizer's step

Predicted comes from the cost model (`planner`) and the schedule that the runtime would run.  Counted is
the last of `STEPS` steps of a real training: collectives as `torch.distributed` issues them, and live tensors.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from osdp.api import OSDP
from osdp.planning.request import Request
from osdp.training.choose_plan import uniform_plan
from osdp.training.measure import held_tensors
from osdp.training.process_group import Ranks
from planner.analysis.explain import open_plan
from planner.cost.peak_memory import optimizer_moment
from planner.cost.workload import Workload
from planner.plan import Plan
from planner.strategies.notation import parse_strategy
from planner.strategies.spec import Collective
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.metered_pass import find_loss, trains
from runtime.compile_plan import compile_plan
from runtime.observe.collective_log import record_collectives
from runtime.observe.live_bytes import LiveBytes
from runtime.optimizers import optimizer_of

KEPT = ("parameters", "gradients", "optimizer")
"""Categories of what a rank keeps."""
MOMENTS = ("forward", "backward", "step")
"""When something is sent."""
NO_LIMIT_BYTES = 1 << 62
"""So that no plan is recomputed to fit: tables compare strategies, not what else would make them fit."""

STEPS = 3
"""In the first, optimizers make their states; in the second, DistributedDataParallel arranges its buckets anew."""

Sent = dict[str, dict[str, int]]
"""Bytes of whole tensors by moment and collective."""


@dataclass(frozen=True)
class Footprint:
    """What one rank keeps and sends in a step of one micro-batch."""

    kept_bytes: Mapping[str, int]
    """By category; of the rank that keeps most."""
    peak_bytes: int
    """Most that is live at once, without what is no tensor; of the fullest rank."""
    sent: Sent


@dataclass(frozen=True)
class Uniform:
    """A model under one strategy."""

    strategy: str
    plan: Plan
    predicted: Footprint
    counted: Footprint | None = None
    """None if it was not trained."""


def predict(graph: ModelGraph, cluster: Cluster, strategy: str, request: Request) -> Uniform:
    """Return a model under one strategy, on all ranks of a cluster; raises OsdpError if it is not known there.

    `request` gives precision, optimizer and micro-batch; its limit is not looked at.
    """
    parse_strategy(strategy, cluster)
    load = Workload.of(graph, cluster, request.optimizer, request.micro_batch or 1)
    plan = uniform_plan(graph, load, request, strategy)
    view = open_plan(plan, graph, cluster)
    options = view.decided.fullest(view.space, load)[1]
    ends = optimizer_moment(options, load).categories
    kept = {name: round(ends[name]) for name in KEPT}
    sent = _scheduled(compile_plan(plan, graph, cluster).collectives())
    return Uniform(strategy, plan, Footprint(kept, plan.predicted.tensors_bytes, sent))


def _scheduled(collectives: Mapping[Collective, int]) -> Sent:
    """Return what a schedule sends, by when: what is reduced once per step is so in the last backward."""
    sent: dict[str, Counter[str]] = {moment: Counter() for moment in MOMENTS}
    for one, count in collectives.items():
        is_of_step = one.operation in ("barrier", "publish")
        moment = "forward" if one.phase == "forward" else "step" if is_of_step else "backward"
        sent[moment][one.operation] += one.size_bytes * count
    return _plain(sent)


def _plain(sent: Mapping[str, Counter[str]]) -> Sent:
    return {moment: {name: size for name, size in sorted(sizes.items()) if size} for moment, sizes in sent.items()}


# --- counted ---------------------------------------------------------------------------------


def count(source: ModelSource, found: Uniform, cluster: Cluster, ranks: Ranks) -> Footprint:
    """Train on the ranks of the process group and return what the last step did. A collective call."""
    plan = found.plan
    if found.predicted.sent["step"]:
        what = f"the communication of {found.strategy} cannot be measured"
        expected = "a strategy that communicates by collectives"
        raise OsdpError(what, got="one-sided communication", expected=expected, advice="leave --measure out")
    with torch.device("meta"):
        without_data = source.build()
    torch.manual_seed(0)
    model = OSDP(source.build, plan, cluster, example_inputs=lambda batch: source.example_inputs(without_data, batch))
    optimizer = optimizer_of(plan.optimizer)(model.parameters())
    sent: dict[str, Counter[str]] = {}
    for _ in range(STEPS):
        inputs = source.example_inputs(model.module, plan.micro_batch)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(ranks.device), inputs)
        with LiveBytes() as live:
            live.hold(held_tensors(model, optimizer))
            with _recorded(sent, "forward"):
                output = model(*args, **kwargs)
                loss = find_loss(output)[0] if trains(model) else None
                del output
            with _recorded(sent, "backward"):
                if loss is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
            del loss
            with _recorded(sent, "step"):
                optimizer.step()
        kept = _kept(model, optimizer)
        optimizer.zero_grad()
    every: list[tuple[dict[str, int], int]] = [(kept, live.peak_bytes)] * ranks.world_size
    dist.all_gather_object(every, (kept, live.peak_bytes))
    fullest = max((kept for kept, _ in every), key=lambda kept: sum(kept.values()))
    return Footprint(fullest, max(peak for _, peak in every), _plain(sent))


@contextmanager
def _recorded(sent: dict[str, Counter[str]], moment: str) -> Iterator[None]:
    """Put the bytes that are sent inside under a moment."""
    sent[moment] = Counter()
    with record_collectives() as record:
        yield
    for one in record:
        if len(one.ranks) > 1:  # groups of one rank send nothing
            sent[moment][one.operation] += one.size_bytes


def _kept(model: OSDP, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return what this rank keeps after a backward, by category, each storage once."""
    live = LiveBytes()
    parameters = list(model.parameters())
    live.hold(parameters, "parameters")
    live.hold((p.grad for p in parameters if p.grad is not None), "gradients")
    live.hold((v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)), "optimizer")
    live.reset_peak()
    return {name: live.peak.categories.get(name, 0) for name in KEPT}
