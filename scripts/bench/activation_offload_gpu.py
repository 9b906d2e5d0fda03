"""Does offloading inputs gain on this GPU what is predicted?  `python scripts/bench/activation_offload_gpu.py`

The fastest plans without and with offloaded inputs of models and limits of `activation_offload.py`, each as rank 0 of 8
within its limit on one GPU: their steps in turn, with a process group that sends nothing, beside what is predicted for
this device and host and a free network.  First the rates of copies between pinned memory and the GPU, in both
directions alone and at once.
`--json FILE` writes all figures.  Exits with 2 where there is no GPU.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
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
from validation.within_a_limit import of_this_device  # noqa: E402

from osdp.planning.allocator_headroom import default_headroom  # noqa: E402
from osdp.planning.clusters import allocatable_bytes  # noqa: E402
from osdp.planning.request import BEST, Request, plan_graph  # noqa: E402
from osdp.zoo import load_cluster, load_model  # noqa: E402
from planner.analysis.explain import open_plan  # noqa: E402
from planner.plan import Plan  # noqa: E402
from profiler.cluster.cluster import Cluster  # noqa: E402
from profiler.cluster.figure import Figure  # noqa: E402
from profiler.model_graph import ModelGraph  # noqa: E402
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

    rates = {"to_host": (0,), "to_device": (1,), "of_both": (0, 1)}
    return {name: COPIED_BYTES / copied_s(directions) for name, directions in rates.items()}


def fastest(graph: ModelGraph, cluster: Cluster, case: Case) -> Plan:
    """Return the fastest plan, with the headroom that plans have by default: the allocator has fragments."""
    limit_bytes = round(case.limit_gib * GIB)
    return plan_graph(
        graph, cluster, Request(limit_bytes, case.precision, headroom=default_headroom(cluster), style=BEST)
    ).plan


def run(case: Case, rounds: int, rates: dict[str, float], scratch: Path) -> list[dict[str, Any]]:
    """Return what each plan of a case takes, and what is predicted."""
    known = load_cluster(case.cluster)
    assert known.host is not None
    link = Figure(rates["of_both"], "measured: copies in both directions")
    known = replace(known, host=replace(known.host, link_bytes_per_s=link))
    source = load_model(case.model)
    graph = trace_model(source, case.precision, "cuda")
    made = {"without": fastest(without_offload(graph), known, case), "with": fastest(graph, known, case)}
    device = start_over()
    place = Place(device.type, False, scratch)
    micro_batches = sorted({one.micro_batch for one in made.values()})
    measured: Cluster = of_this_device(known, case.model, case.precision, micro_batches, device, place)
    times: dict[str, list[float]] = {name: [] for name in made}
    given_back, peaks = dict[str, float](), dict[str, int]()
    for number in range(rounds):
        for name in made if number % 2 else reversed(made):
            device = start_over(allocatable_bytes(known, made[name].limit_bytes))
            view = open_plan(made[name], graph, measured)
            with one_rank(script_of(view, source), compile_plan(made[name], graph, known), device) as step:
                for _ in range(WARM_UP_STEPS):
                    step()
                before = retries()
                times[name] += [seconds_of(step, device) for _ in range(STEPS)]
                given_back[name] = (retries() - before) / STEPS
                peaks[name] = torch.cuda.max_memory_allocated(device)
    found = []
    for name, one in made.items():
        view, seconds = open_plan(one, graph, measured), sorted(times[name])
        samples = one.micro_batch * one.accumulation
        found.append(
            {
                "model": case.model,
                "limit_gib": case.limit_gib,
                "plan": name,
                "micro_batch": one.micro_batch,
                "recomputed": len(one.recomputations),
                "offloaded": len(one.offloaded_blocks),
                "step_s": median(seconds),
                "quartiles_s": [seconds[len(seconds) // 4], seconds[3 * len(seconds) // 4]],
                "predicted_s": view.step_with_host_ahead_s,
                "samples_per_s": samples / median(seconds),
                "predicted_samples_per_s": samples / view.step_with_host_ahead_s,
                "allocated_bytes": peaks[name],
                "predicted_bytes": view.prediction.tensors_bytes,
                "retries": given_back[name],
            }
        )
    return found


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
        with tempfile.TemporaryDirectory() as folder:
            found = run(case, options.rounds, rates, Path(folder))
        rows += found
        for one in found:
            off = f"{one['predicted_s'] / one['step_s'] - 1:+.1%}"
            told = [f"{case.model}, {case.precision}", f"{case.limit_gib:g} GiB", one["plan"], one["micro_batch"]]
            told += [f"{one['offloaded']} of {one['recomputed']}", f"{one['step_s']:.3f}"]
            told += [f"{one['predicted_s']:.3f} ({off})", f"{one['samples_per_s']:.2f}"]
            gains = [one[key] / found[0][key] - 1 for key in ("samples_per_s", "predicted_samples_per_s")]
            told.append(f"{gains[0]:+.1%}, predicted {gains[1]:+.1%}")
            print(f"| {' | '.join(map(str, told))} |", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"copies_bytes_per_s": rates, "plans": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
