"""What does `odc` gain where lengths are uneven?  `python scripts/bench/odc.py [--sigmas 0 0.5 1] [--output FOLDER]`

N ranks on this machine, GPUs or its CPU (`--device`), train a GPT-2 in fp32 with AdamW, M micro-batches of one sample a
step, with lengths that are log-normal with the median and the sigmas given, cut off at a maximum; sigma 0 is the
balanced control.
For each sigma

    FSDP         every operator `shard`: FSDP2 over gloo
    FSDP, ring   the same with rings in place of gloo's reduce-scatter, if they were measured to be faster
    ODC          every operator `odc`

take steps in turn on the same samples, in the same processes.  A round is one step of each, every step from a barrier
to the end on the slowest rank; every second round goes backwards.  Ratios are of one round's times.  The losses
of a round must be equal to 1e-4, or the benchmark fails.

Each step is predicted: the machine is measured first, as by `osdp profile`, and how a sample's seconds depend on its
length by passes of the whole model at some lengths.  `predicted` is for the distribution, before
any length is drawn; `of these` is the same cost model's answer for the lengths that were drawn.  The planner is also
asked for a plan in hardly more memory than `odc` needs with every block recomputed: copies of everything do not fit.
"""

import argparse
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import _shared as bench

SCRIPT = Path(__file__).resolve()
FSDP, RING, ODC = "FSDP", "FSDP, ring", "ODC"
LOSS_TOLERANCE = 1e-4
COST_LENGTHS = 8
"""At which a sample's seconds are measured, in equal steps up to the longest."""
DRAWS = 20_000
"""Lengths that the planner is given."""
HEADROOM = 1.03
"""Memory that the planner is given, over what `odc` needs with every block recomputed."""


@dataclass(frozen=True)
class Contestant:
    """One plan at one sigma."""

    name: str
    predicted_s: float
    """What the planner predicts of the distribution."""
    of_these_s: float
    """What the same cost model predicts of the lengths that were drawn."""
    terms: dict[str, float]
    """Of `predicted_s`."""
    seconds: list[float]
    """Of every round, on the slowest rank."""


@dataclass(frozen=True)
class Case:
    """One sigma."""

    sigma: float
    mean_length: float
    """Of the lengths drawn."""
    waits: dict[str, Any]
    """Of the distribution: `planner.cost.stragglers.Waits`."""
    contestants: list[Contestant]
    loss_difference: float
    """Largest relative difference between losses of one round."""
    limit_bytes: float
    """Memory that the planner was given, without the reserve."""
    picked: dict[str, int]
    """Strategies of the plan that it found, and how many operators have each."""

    def of(self, name: str) -> Contestant:
        """Return a contestant; FSDP itself where rings are no faster."""
        found = {one.name: one for one in self.contestants}
        return found.get(name, found[FSDP])

    def ratios(self, over: str) -> list[float]:
        """Return how many times as fast ODC is, round by round."""
        return [b / a for a, b in zip(self.of(ODC).seconds, self.of(over).seconds, strict=True)]

    def predicted(self, over: str) -> tuple[float, float]:
        """Return the same as predicted: of the distribution, and of the lengths drawn."""
        other, odc = self.of(over), self.of(ODC)
        return other.predicted_s / odc.predicted_s, other.of_these_s / odc.of_these_s


# --- on the ranks ----------------------------------------------------------------------------


class Bench:
    """One rank of the benchmark. Every method is a collective call."""

    def __init__(self, options: argparse.Namespace, device: Any) -> None:
        import torch.distributed as dist

        self.options, self.device = options, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.machine = bench.measured_machine(options, device)
        """What was measured of the machine, so that it is measured once."""

    def source(self, length: int) -> Any:
        """Return the model, fed with samples of a length."""
        import torch

        from osdp.models.config import GPT2Config
        from osdp.models.gpt2 import GPT2
        from profiler.model_source import ModelSource

        options = self.options
        sizes = GPT2Config(512, options.maximum, options.hidden, options.layers, heads=max(1, options.hidden // 64))

        def build() -> Any:
            torch.manual_seed(0)
            return GPT2(sizes)

        def inputs(model: Any, batch: int) -> Any:
            return model.example_inputs(batch, length)

        return ModelSource("gpt2", build, inputs, length)

    @cached_property
    def costs(self) -> tuple[list[int], list[float]]:
        """Lengths, and the seconds of forward and backward of a sample: median of rounds, mean of ranks."""
        import torch
        import torch.distributed as dist

        from profiler.timing.device_rates import elapsed_s
        from runtime.own_gpu import barrier

        lengths = [self.options.maximum * (index + 1) // COST_LENGTHS for index in range(COST_LENGTHS)]
        model: Any = self.source(self.options.maximum).build().to(self.device)
        seconds = torch.zeros(2 + self.options.repetitions, COST_LENGTHS, dtype=torch.float64)
        for row in seconds:
            for index, length in enumerate(lengths):
                (tokens,), labels = model.example_inputs(1, length)

                def run(tokens: Any = tokens, labels: Any = labels) -> None:
                    model(tokens, **labels).backward()

                barrier(self.device)
                row[index] = elapsed_s(run, self.device)
        found = seconds[2:].median(dim=0).values  # the first two warm up
        dist.all_reduce(found)
        return lengths, (found / self.ranks).tolist()

    def cost(self, lengths: Any) -> Any:
        """Return the costs of samples over that of the longest: linear between the lengths measured, and to 0."""
        import numpy as np

        known, seconds = self.costs
        return np.interp(lengths, [0, *known], [0.0, *(one / seconds[-1] for one in seconds)])

    def case(self, sigma: float) -> Case:
        """Predict and measure one sigma."""
        import numpy as np

        from osdp.uneven_lengths.lengths import LogNormal, draw_lengths
        from planner.cost.stragglers import BALANCED, Imbalance, Waits, histogram
        from profiler.trace.trace import trace_model
        from runtime.failures.rank_agreement import from_rank_0

        options = self.options
        distribution = LogNormal(options.median, sigma, options.maximum)
        longest = options.maximum if sigma else math.ceil(options.median)
        cluster = bench.measured_cluster(self.machine, self.source(longest), "this machine")
        count = options.rounds + options.warm_up
        rng = np.random.default_rng(options.seed)
        drawn = np.array(draw_lengths(distribution, count * self.ranks * options.micro_batches, rng))
        drawn = drawn.reshape(count, self.ranks, options.micro_batches)
        imbalance = BALANCED
        if sigma:
            given = self.cost(draw_lengths(distribution, DRAWS, np.random.default_rng(options.seed + 1)))
            imbalance = Imbalance(lengths=histogram([*given, 1.0]), source=f"log-normal, sigma {sigma:g}")
        waits = imbalance.waits(self.ranks, 1, options.micro_batches)
        scale = self.cost(longest)
        of_these = waits_of(self.cost(drawn[options.warm_up :]) / scale) if sigma else Waits()
        graph = trace_model(self.source(longest), "fp32", self.device.type)

        def plans() -> Any:
            made = {}
            for name, choice in ((FSDP, "shard"), (RING, "shard"), (ODC, f"odc:{self.ranks}")):
                machine = cluster if name == RING else replace(cluster, ring=())
                made[name] = [self.plan(graph, machine, choice, one) for one in (waits, of_these)]
            if not cluster.ring:
                del made[RING]
            return made, *self.pick(cluster, graph, longest, imbalance)

        made, limit_bytes, picked = from_rank_0("plan", plans)
        seconds, difference = self.train(cluster, {name: both[0] for name, both in made.items()}, drawn)
        contestants = []
        for (name, plans_of), taken in zip(made.items(), seconds, strict=True):
            first, second = (plan.predicted for plan in plans_of)
            contestants.append(Contestant(name, first.step_time_s, second.step_time_s, first.time_by_term, taken))
        mean_length = float(drawn[options.warm_up :].mean())
        return Case(sigma, mean_length, asdict(waits), contestants, difference, limit_bytes, picked)

    def plan(self, graph: Any, cluster: Any, choice: str, waits: Any) -> Any:
        """Return the plan with one strategy everywhere."""
        from osdp.planning.request import Request
        from osdp.training.choose_plan import uniform_plan
        from planner.cost.workload import Workload

        load = Workload.of(graph, cluster, "adamw", 1, self.options.micro_batches, waits)
        return uniform_plan(graph, load, Request(1 << 40, "fp32", "adamw"), choice)

    def pick(self, cluster: Any, graph: Any, length: int, imbalance: Any) -> tuple[float, dict[str, int]]:
        """Return the memory that the planner gets, without the reserve, and the strategies that it takes then."""
        from osdp.planning.request import BEST, Request, plan_model
        from planner.cost.peak_memory import peak_memory
        from planner.cost.workload import Workload
        from planner.options.search_space import Space
        from planner.search.baselines import uniform
        from planner.strategies.spec import Strategy
        from profiler.model_graph import Recompute

        load = Workload.of(graph, cluster, "adamw", 1, self.options.micro_batches)
        options = uniform(Space(graph), load, Strategy("odc", self.ranks), Recompute.EVERYTHING)
        smallest = peak_memory(options, load)
        limit_bytes = int(HEADROOM * (smallest.total_bytes - cluster.reserve_bytes) + cluster.reserve_bytes)
        batches = 1, self.ranks * self.options.micro_batches
        request = Request(limit_bytes, "fp32", "adamw", *batches, imbalance=imbalance, style=BEST)
        plan = plan_model(self.source(length), cluster, request).plan
        return limit_bytes - cluster.reserve_bytes, dict(Counter(plan.choices.values()))

    def train(self, cluster: Any, plans: dict[str, Any], drawn: Any) -> tuple[list[list[float]], float]:
        """Train all, interleaved; return their seconds per round, and the largest difference of losses."""
        import torch

        source = self.source(self.options.maximum)
        module = source.build()
        runners = [bench.osdp_training(source, module, plan, cluster) for plan in plans.values()]
        rng, warm_up = torch.Generator().manual_seed(1 + self.rank), self.options.warm_up

        def inputs(number: int) -> tuple[Any]:
            lengths = drawn[number + warm_up, self.rank]
            samples = [torch.randint(512, (1, int(length)), generator=rng).to(self.device) for length in lengths]
            return ([((tokens,), {"labels": tokens}) for tokens in samples],)

        found, difference = bench.train_in_turns(self.options, runners, inputs, LOSS_TOLERANCE, progress=True)
        return found[warm_up:, :, 0].T.tolist(), difference


def waits_of(costs: Any) -> Any:
    """Return the waits of samples drawn; costs (rounds, ranks, micro-batches) over that of the longest."""
    from planner.cost.stragglers import Waits

    mean, micro_batches = costs.mean(), costs.shape[2]
    each, once = costs.max(axis=1).mean() / mean, costs.sum(axis=2).max(axis=1).mean() / (mean * micro_batches)
    return Waits(float(each), float(once), "drawn", float(mean))


def run_ranks(options: argparse.Namespace) -> None:
    """Be one rank: all sigmas in turn; rank 0 writes the results."""
    from osdp.training.devices import chosen_device
    from osdp.training.process_group import joined

    with joined(chosen_device(options.device, options.ranks), timeout_s=600) as ranks:
        run_here = Bench(options, ranks.device)
        cases = [run_here.case(sigma) for sigma in options.sigmas]
        lengths, seconds = run_here.costs
        if ranks.rank == 0:
            data = {"cases": [asdict(case) for case in cases], "costs": list(zip(lengths, seconds, strict=True))}
            (Path(options.output) / "odc.json").write_text(json.dumps(data, indent=1))


# --- around them -----------------------------------------------------------------------------


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Case], list[tuple[int, float]]]:
    """Run the ranks; return their cases, and the seconds of samples by length."""
    command = bench.rank_command(SCRIPT, options, "--standalone", f"--nproc_per_node={options.ranks}", output=folder)
    threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
    subprocess.run(command, check=True, cwd=bench.ROOT, env={"OMP_NUM_THREADS": threads} | os.environ)
    data = json.loads((folder / "odc.json").read_text())
    cases = [
        Case(**{**case, "contestants": [Contestant(**one) for one in case["contestants"]]}) for case in data["cases"]
    ]
    return cases, [tuple(one) for one in data["costs"]]


def report(case: Case) -> Iterator[str]:
    """Yield the lines of one sigma."""
    each, once = case.waits["per_micro_batch"], case.waits["per_step"]
    yield (
        f"\n== sigma {case.sigma:g}: samples of {case.mean_length:.0f} tokens in the mean; the slowest rank "
        f"computes {each:.2f} times the mean of a micro-batch, {once:.2f} of a step"
    )
    yield (
        f"{'plan':11s} {'measured s (quartiles)':>23s} {'predicted':>9s} {'of these':>8s} {'error':>7s} "
        f"{'compute':>8s} {'comm.':>6s} {'waiting':>7s} {'optim.':>6s}"
    )
    for one in case.contestants:
        terms, error = one.terms, one.of_these_s / fmean(one.seconds) - 1
        yield (
            f"{one.name:11s} {bench.with_quartiles(one.seconds):>23s} {one.predicted_s:9.2f} {one.of_these_s:8.2f} "
            f"{error:+7.1%} {terms['compute_s']:8.2f} {terms['exposed_communication_s']:6.2f} "
            f"{terms['waiting_s']:7.2f} {terms['optimizer_s']:6.2f}"
        )
    for over in dict.fromkeys((FSDP, case.of(RING).name)):
        predicted, of_these = case.predicted(over)
        whole = sum(case.of(over).seconds) / sum(case.of(ODC).seconds)
        yield (
            f"ODC is {bench.with_quartiles(case.ratios(over))} times as fast as {over}, over all rounds {whole:.2f}; "
            f"predicted {predicted:.2f} ({whole / predicted - 1:+.1%}), of these lengths {of_these:.2f} "
            f"({whole / of_these - 1:+.1%})"
        )
    yield f"losses of a round differ by {case.loss_difference:.1e} at most"
    yield f"in {case.limit_bytes / bench.MIB:.0f} MiB the planner takes {case.picked}"


def draw(cases: Sequence[Case], path: Path) -> None:
    """Draw the speed-up against sigma: measured with its quartiles, and predicted."""
    figure, (panel,) = bench.panels(1, (7.5, 5))
    sigmas = [case.sigma for case in cases]
    for over, colour in ((FSDP, "tab:blue"), (RING, "tab:green")):
        if all(case.of(over).name == FSDP for case in cases) and over != FSDP:
            continue
        found = [quantiles(case.ratios(over), n=4, method="inclusive") for case in cases]
        middle = [one[1] for one in found]
        bars = [[one[1] - one[0] for one in found], [one[2] - one[1] for one in found]]
        label = f"over {over}: measured, with quartiles of the rounds"
        panel.errorbar(sigmas, middle, yerr=bars, marker="o", capsize=3, color=colour, label=label)
        predicted = [case.predicted(over)[0] for case in cases]
        panel.plot(sigmas, predicted, "--D", color=colour, alpha=0.6, label=f"over {over}: predicted")
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xlabel("sigma of the log-normal lengths (0: balanced)")
    panel.set_ylabel("times as fast: ODC")
    panel.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.0, 0.5, 1.0], help="of the log-normal lengths")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if each has one")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, one sample each")
    parser.add_argument("--median", type=float, default=148.0, help="of the lengths, in tokens")
    parser.add_argument("--maximum", type=int, default=1024, help="longest sample, in tokens")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of lengths")
    bench.add_run_options(parser, rounds=10, warm_up=2, budget_s=60.0)
    options = parser.parse_args()
    if options.as_rank:
        run_ranks(options)
        return
    from osdp.training.devices import chosen_device

    device = chosen_device(options.device, options.ranks)
    with bench.output_folder(parser, options.output) as folder:
        cases, costs = run(options, folder)
        print(
            f"{bench.machine()}, {options.ranks} ranks on {device}; "
            f"GPT-2 with {options.layers} blocks of {options.hidden}, {options.micro_batches} micro-batches of one "
            "sample a step, AdamW, fp32"
        )
        shown = ", ".join(f"{length}: {1e3 * seconds:.0f}" for length, seconds in costs)
        print(f"forward and backward of a sample by its length, in ms: {shown}")
        for case in cases:
            print("\n".join(report(case)))
        if options.output:
            draw(cases, folder / "odc.png")
            print(f"picture: {folder / 'odc.png'}")


if __name__ == "__main__":
    main()
