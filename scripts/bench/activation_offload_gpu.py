"""Does offloading inputs gain on this GPU what is predicted?  `python scripts/bench/activation_offload_gpu.py`

The fastest plans without and with offloaded inputs of models and limits of `activation_offload.py`, each as rank 0 of 8
within its limit on one GPU: their steps in turn, with a process group that sends nothing, beside what is predicted for
this device and host, a free network and the allocator's retries.  First the rates of copies between pinned memory and
the GPU, in both directions alone and at once.
`--json FILE` writes all figures.  Exits with 2 where there is no GPU.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from _shared import GIB, ROOT, machine
from allocator import Case
from selective import without_offload

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import torch  # noqa: E402
from validation.allocator import retries, start_over  # noqa: E402
from validation.check import Place  # noqa: E402
from validation.memory import script_of  # noqa: E402
from validation.steps import WARM_UP_STEPS, seconds_of  # noqa: E402
from validation.within_a_limit import counted_retries_s, of_this_device  # noqa: E402

from osdp.planning.allocator_headroom import default_headroom, roomier_headroom  # noqa: E402
from osdp.planning.clusters import allocatable_bytes, workspaces_bytes  # noqa: E402
from osdp.planning.request import BEST, Planned, Request, plan_graph  # noqa: E402
from osdp.zoo import load_cluster, load_model  # noqa: E402
from planner.analysis.explain import open_plan  # noqa: E402
from profiler.cluster.cluster import Cluster  # noqa: E402
from profiler.cluster.figure import Figure  # noqa: E402
from profiler.model_graph import ModelGraph  # noqa: E402
from profiler.model_source import ModelSource  # noqa: E402
from profiler.trace.trace import trace_model  # noqa: E402
from runtime.compile_plan import compile_plan  # noqa: E402
from runtime.observe.one_rank import one_rank  # noqa: E402

CASES = (
    Case("gpt2-1.5b", "bf16", "h100-8", 8),
    Case("gpt2-1.5b", "bf16", "h100-8", 6),
    Case("llama-1b", "bf16", "h100-8", 12),
)
STEPS = 4
COPIED_BYTES = 256 << 20


def copy_rates(device: torch.device) -> dict[str, float]:
    """Return bytes per second of copies to the host and to the device, alone and of each while both run."""
    host = [torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    own = [torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copied_s(directions: tuple[int, ...]) -> float:
        def copies() -> None:
            for direction in directions:
                target, source = (host, own) if direction == 0 else (own, host)
                with torch.cuda.stream(streams[direction]):
                    target[direction].copy_(source[direction], non_blocking=True)

        return median(seconds_of(copies, device) for _ in range(5))

    rates = {"to_host": (0,), "to_device": (1,), "each_of_both": (0, 1)}
    return {name: COPIED_BYTES / copied_s(directions) for name, directions in rates.items()}


@dataclass
class Contestant:
    """A plan, and what its steps took."""

    planned: Planned
    times_s: list[float] = field(default_factory=list)
    retries: int = 0
    """Of all steps that were timed."""
    peak_bytes: int = 0
    """Allocated at most in these."""

    def run(self, source: ModelSource, cluster: Cluster) -> None:
        """Time a few steps within the plan's limit, with the model built anew."""
        device, plan = start_over(allocatable_bytes(cluster, self.planned.plan.limit_bytes)), self.planned.plan
        view = open_plan(plan, self.planned.graph, cluster)
        with one_rank(script_of(view, source), compile_plan(plan, view.space.graph, cluster), device) as step:
            for _ in range(WARM_UP_STEPS):
                step()
            torch.cuda.reset_peak_memory_stats(device)
            before = retries()
            self.times_s += [seconds_of(step, device) for _ in range(STEPS)]
            self.retries += retries() - before
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(device))

    def figures(self, cluster: Cluster) -> dict[str, Any]:
        """Return what was measured, and what is predicted for a cluster with the times of this device."""
        plan = self.planned.plan
        low_s, step_s, high_s = quantiles(self.times_s, n=4, method="inclusive")
        view = open_plan(plan, self.planned.graph, cluster)
        predicted_s = view.step_with_host_ahead_s + counted_retries_s(self.planned)
        samples = plan.micro_batch * plan.accumulation
        return {
            "micro_batch": plan.micro_batch,
            "blocks": len(self.planned.graph.blocks),
            "offloaded": len(plan.offloaded_blocks),
            "step_s": step_s,
            "quartiles_s": [low_s, high_s],
            "predicted_s": predicted_s,
            "samples_per_s": samples / step_s,
            "predicted_samples_per_s": samples / predicted_s,
            "allocated_bytes": self.peak_bytes,
            "predicted_bytes": view.prediction.tensors_bytes + sum(workspaces_bytes(cluster)),
            "retries_per_step": self.retries / len(self.times_s),
        }


def fastest(graph: ModelGraph, cluster: Cluster, case: Case) -> Planned:
    """Return the fastest plan, with the headroom that plans have by default."""
    room: dict[str, Any] = {"headroom": default_headroom(cluster), "roomier": roomier_headroom(cluster)}
    return plan_graph(graph, cluster, Request(round(case.limit_gib * GIB), case.precision, style=BEST, **room))


def compare(case: Case, rounds: int, rates: dict[str, float], scratch: Path) -> list[dict[str, Any]]:
    """Return the figures of both plans of a case; the copies' rates are known before they are chosen."""
    known = load_cluster(case.cluster)
    assert known.host is not None
    link = Figure(rates["each_of_both"], "measured: copies in both directions at once")
    known = replace(known, host=replace(known.host, link_bytes_per_s=link))
    source = load_model(case.model)
    graph = trace_model(source, case.precision, "cuda")
    plans = {"without": fastest(without_offload(graph), known, case), "with": fastest(graph, known, case)}
    made = {name: Contestant(planned) for name, planned in plans.items()}
    place, micro_batches = Place("cuda", False, scratch), sorted({one.plan.micro_batch for one in plans.values()})
    measured = of_this_device(known, case.model, case.precision, micro_batches, start_over(), place)
    for number in range(rounds):
        for name in made if number % 2 else reversed(made):
            made[name].run(source, known)
    told = {"model": case.model, "precision": case.precision, "limit_gib": case.limit_gib}
    return [{**told, "plan": name, **one.figures(measured)} for name, one in made.items()]


def row(one: dict[str, Any], without: dict[str, Any]) -> str:
    """Return a row of the table."""
    gains = [one[key] / without[key] - 1 for key in ("samples_per_s", "predicted_samples_per_s")]
    cells = [f"{one['model']}, {one['precision']}", f"{one['limit_gib']:g} GiB", one["plan"], one["micro_batch"]]
    cells += [f"{one['offloaded']} of {one['blocks']}", f"{one['step_s']:.3f}"]
    cells += [f"{one['predicted_s']:.3f} ({one['predicted_s'] / one['step_s'] - 1:+.1%})"]
    cells += [f"{one['samples_per_s']:.2f}", f"{gains[0]:+.1%}, predicted {gains[1]:+.1%}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("osdp: PyTorch finds no GPU", file=sys.stderr)
        return 2
    print(machine(), torch.cuda.get_device_name())
    rates = copy_rates(start_over())
    print("copies, GB/s:", {name: round(rate / 1e9, 1) for name, rate in rates.items()}, flush=True)
    print(
        "| model | limit | plan | micro-batch | inputs offloaded | step, s | predicted | samples/s of one rank | gain |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = list[dict[str, Any]]()
    for case in CASES:
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = compare(case, options.rounds, rates, Path(folder))
        except torch.OutOfMemoryError as error:
            print(f"{case.model} within {case.limit_gib:g} GiB: {str(error).partition('. ')[0]}", flush=True)
            continue
        rows += found
        for one in found:
            print(row(one, found[0]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"copies_bytes_per_s": rates, "plans": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
