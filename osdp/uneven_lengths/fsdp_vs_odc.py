"""FSDP against ODC on the same uneven samples, step by step in turn, in the same processes.

    FSDP    every unit `shard`: ranks synchronize in each all-gather and reduce-scatter, so all run equally many
            micro-batches; a rank with fewer packs runs empty ones, of one token and no loss
    ODC     every unit `odc`: each rank runs the packs that it has, and all synchronize once per step

Both start from the same parameters and train the mean loss per token over all samples of a step, so their losses
are equal to rounding.  A step is timed from a barrier to the end on the slowest rank; which of the two goes first
changes from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.api import OSDP
from osdp.models.config import LlamaConfig
from osdp.models.packed_llama import PackedLlama
from osdp.planning.rank_grid import cluster_of_ranks
from osdp.planning.request import Request
from osdp.planning.strategy_footprint import NO_LIMIT_BYTES
from osdp.training.choose_plan import uniform_plan
from osdp.training.tasks import Tokens, generator
from osdp.training.trace_step import Tracer
from osdp.uneven_lengths.lengths import LogNormal, draw_lengths
from osdp.uneven_lengths.packing import Cost, Deal, Pack, deal, weights
from osdp.uneven_lengths.timeline import Timeline, gather_recordings, record_step, timelines
from planner.cost.workload import Workload
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.apply_schedule import default_device
from runtime.host_copies import on_device
from runtime.own_gpu import barrier

CONTESTANTS = ("FSDP", "ODC")
EMPTY: Pack = ()


@dataclass(frozen=True)
class Setting:
    """What is run."""

    model: LlamaConfig
    lengths: LogNormal | tuple[int, ...]
    """Distribution of samples' lengths, or lengths of which each sample takes one at random; in tokens."""
    capacity: int
    """Most tokens of a pack."""
    samples: int
    """Of all ranks, in a step."""
    steps: int
    packing: str = "none"
    """One of `osdp.uneven_lengths.packing.METHODS`."""
    contestants: tuple[str, ...] = CONTESTANTS
    seed: int = 0
    learning_rate: float = 3e-3
    trace: Path | None = None
    """Folder for traces, one in it for each contestant (`osdp.training.trace_step`)."""


@dataclass(frozen=True)
class Outcome:
    """A step of one contestant."""

    loss: float
    """Mean per learned token, over all samples."""
    step_s: float
    """On the slowest rank."""
    timelines: tuple[Timeline, ...]
    """Of each rank."""
    is_slowed: bool
    """Whether the step was traced, which takes time."""


@dataclass(frozen=True)
class Round:
    """A step of every contestant on the same samples."""

    number: int
    """From 1."""
    lengths: tuple[int, ...]
    """Of the samples, in tokens."""
    dealt: Deal
    outcomes: Mapping[str, Outcome]
    """By contestant."""

    @property
    def is_slowed(self) -> bool:
        """Whether its times mean nothing."""
        return any(outcome.is_slowed for outcome in self.outcomes.values())

    @property
    def loss_difference(self) -> float:
        """Largest difference of losses, over the first one; infinite if a loss is no number."""
        losses = [outcome.loss for outcome in self.outcomes.values()]
        if not all(map(math.isfinite, losses)):
            return math.inf
        return max(abs(loss - losses[0]) for loss in losses) / abs(losses[0])


def compare(setting: Setting) -> Iterator[Round]:
    """Train, and yield each round as it is over. A collective call.

    Raises OsdpError for samples that do not fit the packing or have no next token, or ranks that cannot run `odc`.
    """
    ranks = dist.get_world_size()
    contestants = make_contestants(setting)
    cost = Cost.of_llama(setting.model)
    for number in range(1, setting.steps + 1):
        lengths = lengths_of(setting, number)
        if max(lengths) < 2:
            got, expected = "samples of one token each", "one that has a next token"
            raise OsdpError("a step has nothing to learn", got=got, expected=expected, advice="longer samples, or more")
        dealt = deal(setting.packing, lengths, ranks, setting.capacity, cost)
        names = list(contestants) if number % 2 else list(contestants)[::-1]
        found = {name: contestants[name].step(number, lengths, dealt) for name in names}
        yield Round(number, tuple(lengths), dealt, {name: found[name] for name in contestants})


def make_contestants(setting: Setting) -> dict[str, Contestant]:
    """Return the contestants by name, all with the same parameters. A collective call."""
    longest = setting.capacity

    def inputs(model: nn.Module, batch: int) -> Any:
        return model.example_inputs(batch, longest)  # type: ignore[operator]

    source = ModelSource("llama", lambda: PackedLlama(setting.model), inputs, longest)
    graph = trace_model(source, device_type=default_device().type)
    return {name: Contestant(setting, name, graph) for name in setting.contestants}


class Contestant:
    """A model in training under one strategy."""

    def __init__(self, setting: Setting, name: str, graph: ModelGraph) -> None:
        """Shard the model. A collective call."""
        self.setting, self.name = setting, name
        torch.manual_seed(setting.seed)
        cluster, _ = cluster_of_ranks(None)
        choice = f"odc:{dist.get_world_size()}" if name == "ODC" else "shard"
        plan = uniform_plan(graph, Workload.of(graph, cluster, "adamw", 1), Request(NO_LIMIT_BYTES), choice)
        self.model = OSDP(PackedLlama(setting.model), plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.learning_rate)
        self.tracer = Tracer(setting.trace / name if setting.trace else None, self.model, self.optimizer)

    def step(self, number: int, lengths: Sequence[int], dealt: Deal) -> Outcome:
        """Train on the samples of a step. A collective call."""
        targets, packs = sum(length - 1 for length in lengths), dealt.ranks[dist.get_rank()]
        for_fsdp, for_odc = weights(dealt.counts, targets)
        weight = for_odc if self.name == "ODC" else for_fsdp
        if self.name != "ODC":
            packs += (EMPTY,) * (max(dealt.counts) - len(packs))
        batches = [self._batch(number, lengths, pack) for pack in packs]
        device = self.model.sharded.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        barrier(device)
        with record_step(self.model) as recorder, self.tracer.step():
            for tokens, of_samples in batches:
                loss = self.model(tokens, labels=tokens, lengths=of_samples)
                (loss * weight).backward()
                total += loss.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.all_reduce(total)
        recordings = gather_recordings(recorder)
        step_s = max(one.end_s for one in recordings) - min(one.start_s for one in recordings)
        return Outcome(float(total) / targets, step_s, timelines(recordings), self.tracer.slows)

    def _batch(self, number: int, lengths: Sequence[int], pack: Pack) -> tuple[Tensor, tuple[int, ...]]:
        """Return the tokens of a pack, (1, tokens), and the lengths of its samples."""
        vocabulary, seed = self.setting.model.vocabulary_size, self.setting.seed
        samples = [sample_tokens(seed, number, i, lengths[i], vocabulary) for i in pack]
        samples = samples or [np.zeros(1, dtype=np.int64)]
        tokens = torch.from_numpy(np.concatenate(samples))[None]
        return on_device(tokens, self.model.sharded.device), tuple(len(sample) for sample in samples)


def lengths_of(setting: Setting, number: int) -> list[int]:
    """Return the lengths of the samples of a step, which depend on the seed and its number alone."""
    rng = np.random.default_rng([setting.seed, number])
    if isinstance(setting.lengths, LogNormal):
        return draw_lengths(setting.lengths, setting.samples, rng)
    return [int(length) for length in rng.choice(setting.lengths, setting.samples)]


def sample_tokens(seed: int, number: int, index: int, length: int, vocabulary: int) -> Tokens:
    """Return the tokens (length,) of a sample: a number, and on in equal steps that are to be guessed."""
    start, stride = generator(seed, number, index).integers([vocabulary, 7])
    found: Tokens = (start + (1 + stride) * np.arange(length)) % vocabulary
    return found
