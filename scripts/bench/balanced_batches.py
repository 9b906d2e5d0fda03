"""What do batches that are balanced by cost gain?  `python scripts/bench/balanced_batches.py [--sigma 0.7]`

N ranks on this machine's CPU train a small GPT-2 in fp32 with AdamW over gloo, M micro-batches of one sample a step,
with log-normal lengths, cut off at a maximum.  Four contestants train the same samples of each step, in the same
processes:

    FSDP, as drawn      every operator `shard`, samples dealt to ranks in turn, as DistributedSampler does
    FSDP, balanced      the same, samples dealt by `BalancedBatchSampler` with costs that were measured
    ODC, as drawn       every operator `odc`
    ODC, balanced       both

A round is one step of each, every step from a barrier to the end on the slowest rank; every second round goes
backwards.  Ratios are of one round's times: the median of all rounds, (its quartiles) and [what holds the true median
with 95 %].  `by cost` is what the ratio would be if the measured costs of the samples were all that takes time.  Mean
losses over all samples of a step must be equal to 1e-4, or the benchmark fails.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _shared import Training, add_integers, machine, osdp_training, spawn_ranks, train_in_turns, with_interval
from torch import Tensor

from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.planning.rank_grid import cluster_of_ranks
from osdp.planning.request import Request
from osdp.training.choose_plan import uniform_plan
from osdp.uneven_lengths.balanced_batches import BalancedBatchSampler
from osdp.uneven_lengths.length_cost import parabola
from osdp.uneven_lengths.lengths import LogNormal, draw_lengths
from osdp.uneven_lengths.packing import Cost
from planner.cost.workload import Workload
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model
from runtime.failures.rank_agreement import from_rank_0

VOCABULARY = 512
REPETITIONS = 7
"""Passes at each length that is measured; the first two warm up."""
LOSS_TOLERANCE = 1e-4

Batches = dict[bool, list[list[int]]]
"""Samples of each micro-batch of this rank, in all rounds: as drawn, and balanced."""


@dataclass(frozen=True)
class Contestant:
    """A model in training, and how its samples are dealt."""

    name: str
    training: Training
    balanced: bool

    def step(self, batches: Batches, lengths: Sequence[int]) -> tuple[float, float, float]:
        """Train on this rank's samples; return wall and CPU seconds, and the mean loss over all ranks."""
        samples = [tokens_of(index, lengths[index]) for batch in batches[self.balanced] for index in batch]
        wall_s, cpu_s, loss = self.training.timed_step([((tokens,), {"labels": tokens}) for tokens in samples])
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return wall_s, cpu_s, float(total) / dist.get_world_size()


def tokens_of(index: int, length: int) -> Tensor:
    """Return a sample's tokens, (1, length)."""
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(index))


def build(options: Namespace) -> GPT2:
    """Return the model, with the same parameters every time."""
    torch.manual_seed(0)
    return GPT2(GPT2Config(VOCABULARY, options.maximum, options.hidden, options.layers, heads=4))


def measured_cost(options: Namespace) -> Cost:
    """Return what a sample costs in seconds, from passes at three lengths."""
    model, lengths, medians = build(options), (options.maximum // 4, options.maximum // 2, options.maximum), []
    for length in lengths:
        tokens, seconds = tokens_of(0, length), []
        for _ in range(REPETITIONS):
            started = perf_counter()
            model(tokens, labels=tokens).backward()
            seconds.append(perf_counter() - started)
        medians.append(median(seconds[2:]))
    return Cost(*parabola(lengths, medians))


def contestants(options: Namespace) -> list[Contestant]:
    """Return the contestants. A collective call."""
    inputs: Any = GPT2.example_inputs
    source = ModelSource("gpt2", partial(build, options), inputs, options.maximum)
    graph, (cluster, _) = trace_model(source), cluster_of_ranks(None)
    load = Workload.of(graph, cluster, "adamw", 1, options.micro_batches)
    found = []
    for name, choice in (("FSDP", "shard"), ("ODC", f"odc:{options.ranks}")):
        plan = uniform_plan(graph, load, Request(limit_bytes=2**40), choice)
        for balanced in (False, True):
            training = osdp_training(source, build(options), plan, cluster)
            found.append(Contestant(f"{name}, {'balanced' if balanced else 'as drawn'}", training, balanced))
    return found


def dealt(options: Namespace, lengths: Sequence[int], cost: Cost) -> dict[bool, list[list[list[int]]]]:
    """Return the samples of each micro-batch of each rank, over all rounds."""
    ranks = range(options.ranks)
    samplers = [
        BalancedBatchSampler(
            lengths, 1, options.micro_batches, cost=cost, num_replicas=options.ranks, rank=rank, shuffle=False
        )
        for rank in ranks
    ]
    drawn = [[[index] for index in range(rank, len(lengths), options.ranks)] for rank in ranks]
    return {False: drawn, True: [list(sampler) for sampler in samplers]}


def ideal_s(options: Namespace, costs: Sequence[float], epochs: list[list[list[int]]], each: bool) -> list[float]:
    """Return what each round would take if costs were all; `each`: ranks synchronize in every micro-batch."""
    of = np.array([[sum(costs[i] for i in batch) for batch in epoch] for epoch in epochs])
    rounds = of.reshape(options.ranks, -1, options.micro_batches)[:, options.warm_up :]
    return (rounds.max(axis=0).sum(axis=1) if each else rounds.sum(axis=2).max(axis=0)).tolist()


def rank_main(rank: int, options: Namespace) -> None:
    """Be one rank; rank 0 prints."""
    torch.set_num_threads(1)
    cost = from_rank_0("measure the cost of lengths", lambda: measured_cost(options))
    distribution = LogNormal(options.median, options.sigma, options.maximum)
    in_step, rounds = options.ranks * options.micro_batches, options.warm_up + options.rounds
    # A sample of one token has nothing to predict.
    lengths = [max(2, one) for one in draw_lengths(distribution, in_step * rounds, np.random.default_rng(options.seed))]
    everyone, runners = dealt(options, lengths, cost), contestants(options)

    def inputs(number: int) -> tuple[Any, ...]:
        start = (number + options.warm_up) * options.micro_batches
        own = {kind: epochs[rank][start : start + options.micro_batches] for kind, epochs in everyone.items()}
        return own, lengths

    figures, difference = train_in_turns(options, runners, inputs, LOSS_TOLERANCE, Contestant.step)
    if rank == 0:
        print(f"a sample of l tokens: {cost.per_token * 1e3:.3g} l + {cost.per_square * 1e3:.3g} l^2 ms")
        costs = [cost(length) for length in lengths]
        first = ideal_s(options, costs, everyone[False], each=True)
        ideals = [ideal_s(options, costs, everyone[one.balanced], one.name.startswith("FSDP")) for one in runners]
        report([one.name for one in runners], figures[options.warm_up :, :, 0], [sum(first) / sum(i) for i in ideals])
        print(f"losses of a round differ by {difference:.1e} at most")


def report(names: Sequence[str], seconds: Tensor, by_cost: Sequence[float]) -> None:
    """Print times and ratios; `seconds` is (rounds, contestants), of the slowest rank."""
    print(f"{'':16s}  {'s a step':>8s}  {'times as fast as FSDP, as drawn':39s}  by cost")
    for index, name in enumerate(names):
        ratios = (seconds[:, 0] / seconds[:, index]).tolist()
        interval = with_interval(ratios) if index else "1"
        print(f"{name:16s}  {median(seconds[:, index].tolist()):8.4f}  {interval:39s}  {by_cost[index]:.3f}")


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_integers(
        parser,
        (
            ("ranks", 2, "processes, one thread each"),
            ("rounds", 14, "measured steps of each contestant"),
            ("warm-up", 2, "steps of each before those"),
            ("micro-batches", 4, "of each rank in a step, one sample each"),
            ("hidden", 256, "width of the GPT-2"),
            ("layers", 4, "blocks of the GPT-2"),
            ("median", 256, "tokens of the median sample"),
            ("maximum", 1024, "tokens of the longest sample"),
            ("seed", 0, "of the lengths"),
        ),
    )
    parser.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of lengths (default 0.7)")
    options = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in build(options).parameters())
    print(f"{machine()}, {options.ranks} ranks, gloo")
    what = f"{options.micro_batches} micro-batches of one sample a step, sigma {options.sigma:g}"
    print(f"GPT-2 of {parameters:,} parameters, fp32, AdamW, {what}, {options.rounds} rounds", flush=True)
    spawn_ranks(rank_main, options.ranks, options)


if __name__ == "__main__":
    main()
