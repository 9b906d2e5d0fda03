"""Do plans keep what they promise?  `python scripts/bench/cluster.py [--rates 200mbit 1gbit] [--output FOLDER]`

On an emulated cluster of 2 nodes x 2 CPU ranks (needs root; see docs/emulated-cluster.md), for each rate of the
link between nodes: the machine is measured as by `osdp profile`, and with that

    FSDP, ZeRO-2, HSDP, hierarchical, DDP   one strategy for everything
    OSDP capped                             the plan of the search under a memory cap that HSDP exceeds
    OSDP                                    the same with all the memory

are predicted and then trained, each with gloo's own reduce-scatter and, where it was measured to be faster, with
rings.  All contestants live in the same processes and see the same batches.  A round is one step of each, every
step from a barrier to the end on the slowest rank; every second round goes backwards.  Ratios are of one round's
times.  Losses of a round must be equal to 1e-4, or the benchmark fails.

Memory is the peak of live tensors of one step on the fullest rank, which is what the cap is enforced on: a
contestant that goes beyond the cap does not count as one that fits, whatever was predicted.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import _shared as bench

SCRIPT = Path(__file__).resolve()
UNIFORM = {
    "FSDP": "shard",
    "ZeRO-2": "shard_grad",
    "HSDP": "group_shard:2",
    "hierarchical": "hierarchical",
    "DDP": "replicate",
}
"""Strategy of every operator, by the name that people know it by."""
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Contestant:
    """One plan, predicted and measured."""

    name: str
    ring: bool
    """Whether reduce-scatters may go round rings."""
    predicted_s: float
    predicted_bytes: float
    """Peak without the reserve."""
    tracked_bytes: float
    """The same, of live tensors."""
    seconds: list[float]
    """Of every round, on the slowest rank."""
    choices: dict[str, int]
    """How many operators have which strategy."""
    terms: dict[str, float]
    """Predicted seconds by term."""

    @property
    def step_s(self) -> float:
        """Median."""
        return median(self.seconds)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.step_s - 1.0


# --- on the ranks ----------------------------------------------------------------------------


def run_ranks(options: argparse.Namespace) -> None:
    """Be one rank: measure the machine, plan, train; rank 0 writes the results."""
    from osdp.training.process_group import joined
    from osdp.zoo import load_model
    from profiler.yaml_files import write_yaml
    from runtime.failures.rank_agreement import from_rank_0

    source = load_model(options.model)
    with joined("cpu", timeout_s=600) as ranks:
        machine = bench.measured_machine(options, ranks.device)
        cluster = bench.measured_cluster(machine, source, f"emulated-{options.rates[0]}")
        plans = from_rank_0("plan", lambda: make_plans(options, cluster))
        results = train_all(options, source, cluster, plans)
        if ranks.rank == 0:
            folder = Path(options.output)
            write_yaml(folder / f"profile-{options.rates[0]}.yaml", cluster)
            cap_bytes = plans["cap_bytes"]
            text = json.dumps({"cap_bytes": cap_bytes, "contestants": [asdict(one) for one in results]}, indent=1)
            (folder / f"results-{options.rates[0]}.json").write_text(text)


def make_plans(options: argparse.Namespace, cluster: Any) -> dict[str, Any]:
    """Return the cap, and the plans by (name, whether rings are allowed)."""
    from osdp.planning.request import BEST, Request, plan_model
    from osdp.training.choose_plan import uniform_plan
    from osdp.zoo import load_model
    from planner.cost.workload import Workload
    from profiler.trace.trace import trace_model

    source, plans = load_model(options.model), {}
    graph = trace_model(source, "fp32", "cpu")
    everything = Request(int(cluster.device.memory_bytes.value), "fp32", "adamw", micro_batch=1, style=BEST)
    cap_bytes = int(options.cap_mib * bench.MIB + cluster.reserve_bytes)
    for ring in (False, True) if cluster.ring else (False,):
        machine = cluster if ring else replace(cluster, ring=())
        load = Workload.of(graph, machine, "adamw", 1)
        for name, strategy in UNIFORM.items():
            plans[name, ring] = uniform_plan(graph, load, everything, strategy)
        plans["OSDP capped", ring] = plan_model(source, machine, replace(everything, limit_bytes=cap_bytes)).plan
        plans["OSDP", ring] = plan_model(source, machine, everything).plan
    # Copies reduce no shards: with and without rings they are one plan.
    plans = {key: plan for key, plan in plans.items() if not (key[1] and set(plan.choices.values()) == {"replicate"})}
    return {"cap_bytes": cap_bytes - cluster.reserve_bytes, "reserve_bytes": cluster.reserve_bytes, "plans": plans}


def train_all(options: argparse.Namespace, source: Any, cluster: Any, made: dict[str, Any]) -> list[Contestant]:
    """Train every contestant, interleaved; a collective call."""
    from collections import Counter

    import torch
    import torch.distributed as dist

    plans, without_data = made["plans"], source.build()
    runners = [bench.osdp_training(source, without_data, plan, cluster) for plan in plans.values()]
    torch.manual_seed(1 + dist.get_rank())

    def inputs(number: int) -> tuple[Any, bool]:
        # Tracked in the last round that warms up, so that the optimizer's states are there.
        return source.example_inputs(without_data, 1), number == -1

    found, _ = bench.train_in_turns(options, runners, inputs, LOSS_TOLERANCE, timed_step, progress=True)
    seconds, peaks = found[options.warm_up :, :, 0], found[:, :, 3].amax(0)
    return [
        Contestant(
            name=name,
            ring=ring,
            predicted_s=plan.predicted.step_time_s,
            predicted_bytes=plan.predicted.peak_memory_bytes - made["reserve_bytes"],
            tracked_bytes=float(peaks[index]),
            seconds=seconds[:, index].tolist(),
            choices=dict(Counter(plan.choices.values())),
            terms=plan.predicted.time_by_term,
        )
        for index, ((name, ring), plan) in enumerate(plans.items())
    ]


def timed_step(runner: bench.Training, inputs: Any, track: bool) -> tuple[float, float, float, int]:
    """Return what `Training.timed_step` does, and where tracked the peak of live bytes."""
    from osdp.training.measure import held_tensors
    from runtime.observe.live_bytes import LiveBytes

    if not track:
        return *runner.timed_step([inputs]), 0
    with LiveBytes() as live:
        live.hold(held_tensors(runner.model, runner.optimizer))
        return *runner.timed_step([inputs]), live.peak_bytes


# --- around them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The results at one rate."""

    rate: str
    cap_bytes: float
    contestants: tuple[Contestant, ...]

    def of(self, name: str, ring: bool) -> Contestant:
        """Return a contestant; one that reduces no shards is the same with rings as without."""
        found = {one.ring: one for one in self.contestants if one.name == name}
        return found.get(ring, found[False])

    def ratio(self, one: Contestant, over: Contestant) -> str:
        """Return how many times as fast `one` is, and the quartiles of the rounds' ratios."""
        return bench.with_quartiles([b / a for a, b in zip(one.seconds, over.seconds, strict=True)])

    def best_uniform(self, ring: bool, cap_bytes: float) -> Contestant | None:
        """Return the fastest of those with one strategy for everything that stay under a cap."""
        found = [self.of(name, ring) for name in {c.name for c in self.contestants} & UNIFORM.keys()]
        found = [one for one in found if one.tracked_bytes <= cap_bytes]
        return min(found, key=lambda one: one.step_s, default=None)


def run_case(options: argparse.Namespace, rate: str, folder: Path) -> Case:
    """Run one rate in a cluster of its own."""
    ranks = bench.rank_command(SCRIPT, options, "--nproc_per_node=2", rates=[rate], output=folder)
    tool = SCRIPT.parents[1] / "emulated_cluster.py"
    cluster = [sys.executable, str(tool), "run", "--nodes", "2", "--rate", rate]
    # The agent of a node that is not first complains when the first is gone, which is how a run ends.
    subprocess.run([*cluster, "--", *ranks], check=True, cwd=bench.ROOT, env=os.environ | {"LOGLEVEL": "ERROR"})
    data = json.loads((folder / f"results-{rate}.json").read_text())
    return Case(rate, data["cap_bytes"], tuple(Contestant(**one) for one in data["contestants"]))


def report(case: Case) -> Iterator[str]:
    """Yield the lines of one rate."""
    rings = sorted({one.ring for one in case.contestants})
    yield f"\n== {case.rate} between nodes; cap {case.cap_bytes / bench.MIB:.1f} MiB of live tensors"
    yield (
        f"{'plan':13s} {'reduces':7s} {'predicted':>9s} {'measured (quartiles)':>24s} {'error':>7s} "
        f"{'compute':>7s} {'comm.':>6s} {'optim.':>6s} {'pred. MiB':>9s} {'tracked':>7s}  {'x FSDP, native':18s} "
        f"{'x FSDP, same':18s}"
    )
    for one in case.contestants:
        mark = " " if one.tracked_bytes <= case.cap_bytes else "*"
        yield (
            f"{one.name:13s} {'ring' if one.ring else 'native':7s} {one.predicted_s:9.3f} "
            f"{bench.with_quartiles(one.seconds, 3):>23s} {one.error:+7.1%} {one.terms['compute_s']:7.3f} "
            f"{one.terms['exposed_communication_s']:6.3f} {one.terms['optimizer_s']:6.3f} "
            f"{one.predicted_bytes / bench.MIB:9.1f} {one.tracked_bytes / bench.MIB:6.1f}{mark}  "
            f"{case.ratio(one, case.of('FSDP', False)):18s} "
            f"{case.ratio(one, case.of('FSDP', one.ring)):18s}"
        )
    yield "* beyond the cap; compute, communication and optimizer are seconds of the prediction"
    for ring in rings:
        for name, cap_bytes in (("OSDP capped", case.cap_bytes), ("OSDP", float("inf"))):
            best, ours = case.best_uniform(ring, cap_bytes), case.of(name, ring)
            if best is not None:
                yield (
                    f"{name}, {'ring' if ring else 'native'}: {case.ratio(ours, best)} times as fast as the best "
                    f"uniform one that fits, {best.name}; its operators: {ours.choices}"
                )


def accuracy(cases: list[Case]) -> str:
    """Return how far off predictions were, over all rates."""

    def correlation(found: Sequence[Contestant]) -> str:
        return f"{rank_correlation([one.predicted_s for one in found], [one.step_s for one in found]):.3f}"

    found = [one for case in cases for one in case.contestants]
    errors = [one.error for one in found]
    within = ", ".join(correlation(case.contestants) for case in cases)
    return (
        f"\n{len(found)} plans: mean absolute error {fmean(map(abs, errors)):.1%}, from {min(errors):+.1%} to "
        f"{max(errors):+.1%}; rank correlation {correlation(found)} of all, {within} within each rate"
    )


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's coefficient; equal values share the mean of their ranks."""
    import numpy as np

    ranks = []
    for values in map(np.asarray, (one, other)):
        below, upto = (values[:, None] > values).sum(1), (values[:, None] >= values).sum(1)
        ranks.append((below + upto) / 2)
    return float(np.corrcoef(*ranks)[0, 1])


def draw(cases: list[Case], path: Path) -> None:
    """Draw measured steps as bars and predicted ones as marks, one panel for each rate."""
    figure, axes = bench.panels(len(cases), (6.5 * len(cases), 5.5))
    for panel, case in zip(axes, cases, strict=True):
        found = sorted(case.contestants, key=lambda one: one.step_s)
        names = [f"{one.name}{', ring' if one.ring else ''}" for one in found]
        colours = ["tab:green" if one.name.startswith("OSDP") else "tab:blue" for one in found]
        fits = [1.0 if one.tracked_bytes <= case.cap_bytes else 0.35 for one in found]
        bars = panel.barh(names, [one.step_s for one in found], color=colours)
        for bar, alpha in zip(bars, fits, strict=True):
            bar.set_alpha(alpha)
        spread = [[one.step_s - min(one.seconds) for one in found], [max(one.seconds) - one.step_s for one in found]]
        middle, label = [one.step_s for one in found], "slowest and fastest round"
        panel.errorbar(middle, names, xerr=spread, fmt="none", ecolor="black", capsize=2, label=label)
        panel.plot([one.predicted_s for one in found], names, "D", color="tab:orange", label="predicted")
        panel.set_xlabel("seconds a step (bars: median measured; pale: beyond the memory cap)")
        panel.set_title(f"{case.rate} between nodes, cap {case.cap_bytes / bench.MIB:.0f} MiB")
        panel.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse the command line, run every rate, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"], help="of the link between nodes")
    parser.add_argument("--model", default="gpt2-mini", help="as `osdp plan --model`")
    parser.add_argument("--cap-mib", type=float, default=64.0, help="cap on live tensors of a rank")
    bench.add_run_options(parser, rounds=7, warm_up=3, budget_s=150.0)
    options = parser.parse_args()
    if options.as_rank:
        run_ranks(options)
        return
    with bench.output_folder(parser, options.output) as folder:
        cases = [run_case(options, rate, folder) for rate in options.rates]
        print(f"{bench.machine()}, 2 nodes x 2 ranks, gloo; {options.model}, 1 sample a rank, AdamW, fp32")
        for case in cases:
            print("\n".join(report(case)))
        print(accuracy(cases))
        if options.output:
            draw(cases, folder / "cluster.png")
            print(f"picture: {folder / 'cluster.png'}")


if __name__ == "__main__":
    main()
