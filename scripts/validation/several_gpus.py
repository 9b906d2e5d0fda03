"""What takes two GPUs: pulls from the other, steps of plans that communicate, and other people's FSDP beside ours."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from osdp.planning.plan_file import write_plan
from osdp.training.config import TrainConfig
from osdp.zoo import load_model
from profiler.trace.trace import trace_model
from validation.bounds import judged, outside
from validation.check import Finding, Place, skipped
from validation.processes import ROOT, command_output
from validation.profile_and_step import profiled
from validation.ranks import torchrun
from validation.steps import uniform_view

RANKS = 2
LEAST_OF_COPIES, MOST_SLOWER, MOST_OFF = 0.85, 1.10, 0.15
BATCH = 1
"""One of those that are profiled."""
TIMEOUT_S = 150.0


def pulls(place: Place) -> Finding:
    """Pull shards from the other GPU, alone and beside matrix products."""
    result = place.scratch / "pulls.json"
    sizes = ("1", "3") if place.is_dry else ("256", "20")
    status, output = command_output(
        torchrun(RANKS, "-m", "validation.pulls", place.device, str(result), *sizes), TIMEOUT_S
    )
    if status or not result.exists():
        return Finding(False, f"pulls.py ended with {status}\n{output[-2000:]}")
    return judged_pulls(json.loads(result.read_text()), place.is_dry)


def judged_pulls(found: dict[str, Any], is_dry: bool) -> Finding:
    """Compare a pull with copies of the same shards, the other's and the own, and products with those alone."""
    share = (found["copy_s"] + found["own_copy_s"]) / found["pull_s"]
    slower = found["gemm_beside_pulls_s"] / found["gemm_s"]
    complaints = [] if found["is_right"] else ["a pull returned other values than were published"]
    if not is_dry:
        complaints += outside("pulls / copies", share, LEAST_OF_COPIES, float("inf"))
        complaints += outside("matrix products beside pulls / alone", slower, 0, MOST_SLOWER)
    speed = found["shard_bytes"] / found["pull_s"] / 1e9
    return judged(
        f"{speed:.1f} GB/s, {share:.0%} of copies; products take {slower:.2f} times as long", complaints, found
    )


def plans(place: Place) -> Finding:
    """Profile two ranks, and train under plans that are priced by that."""
    model = "gpt2-tiny" if place.is_dry else "gpt2-medium"
    # Dry, a cluster as any: check 12 profiles.
    path = "cpu-gloo" if place.is_dry else profiled(place, RANKS, model, "bf16")
    if isinstance(path, Finding):
        return path
    graph = trace_model(load_model(model), "bf16", place.device)
    complaints, figures, told = list[str](), dict[str, Any](), list[str]()
    for strategy in ("shard",) if place.is_dry else ("replicate", "shard", f"odc:{RANKS}"):
        view = uniform_view(graph, path, RANKS, strategy, BATCH, "fused_adam")
        plan_path = place.scratch / f"{strategy.replace(':', '-')}.yaml"
        write_plan(plan_path, replace(view.plan, predicted=view.prediction))
        command = [sys.executable, "-m", "osdp", "train", _config(place, plan_path, model, graph.sequence_length)]
        status, output = command_output(command, TIMEOUT_S)
        if status:
            complaints.append(f"{strategy}: osdp train ended with {status}: {output[-1000:]}")
            continue
        measured, predicted = throughputs(output)
        figures[strategy] = {"samples_per_s": measured, "predicted_samples_per_s": predicted}
        told.append(f"{strategy} {measured / predicted - 1:+.0%}")
        if not place.is_dry:  # seconds of a step are the other way round
            complaints += outside(
                f"{strategy}: measured / predicted step", predicted / measured, 1 - MOST_OFF, 1 + MOST_OFF
            )
    return judged(f"samples/s over prediction: {', '.join(told)}", complaints, figures)


def _config(place: Place, plan: Path, model: str, length: int) -> str:
    """Write a configuration without what is not priced, such as clipping."""
    steps = 4 if place.is_dry else 15
    config = TrainConfig(TrainConfig.SCHEMA, model, steps, "bytes", data=str(ROOT / "README.md"), seq=length)
    config = replace(
        config, precision="bf16", optimizer="adam", plan=str(plan), device=place.device, ranks_per_node=RANKS
    )
    path = plan.with_suffix(".train.yaml")
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in asdict(config).items()))
    return str(path)


def throughputs(output: str) -> tuple[float, float]:
    """Return the samples per second that `osdp train` has measured and those that were predicted."""
    found = re.search(r"throughput: ([0-9.]+) seq/sec .*predicted ([0-9.]+) seq/sec", output)
    return (float(found[1]), float(found[2])) if found else (float("nan"), float("nan"))


def uneven_lengths(place: Place) -> Finding:
    """Train a Llama on samples of uneven length by FSDP and by ODC; their losses are the same."""
    command = [sys.executable, str(ROOT / "examples" / "train_llm_odc.py"), "--json", "--nproc", str(RANKS)]
    if place.is_dry:
        command += ["--model", "tiny", "--steps", "3", "--samples", "4", "--max-length", "64"]
    else:
        command += ["--device", place.device, "--model", "llama-1b", "--max-length", "8192", "--steps", "8"]
    status, output = command_output(command, TIMEOUT_S)
    if status:
        return Finding(False, f"train_llm_odc.py ended with {status}\n{output[-2000:]}")
    found = json.loads(output[output.index("{") : output.rindex("}") + 1])
    figures = {name: found[name] for name in ("speed_up", "speed_up_by_cost", "loss_difference")}
    return judged(f"ODC is {found['speed_up']['median']:.2f} times as fast as FSDP", [], figures)


def fairscale(place: Place) -> Finding:
    """Run fairscale's FSDP and ours in turn on a BERT; their losses are the same."""
    if find_spec("fairscale") is None:
        return skipped("fairscale is not installed")
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "fairscale_fsdp.py"), "--device", place.device]
    command += ["--ranks", str(RANKS), "--rounds", "2" if place.is_dry else "20"]
    if place.is_dry:
        command += ["--model", "bert-tiny", "--batch", "2", "--seq", "32", "--large", "50000", "--warm-up", "1"]
    status, output = command_output(command, TIMEOUT_S)
    if status:
        return Finding(False, f"fairscale_fsdp.py ended with {status}\n{output[-2000:]}")
    rows = [line for line in output.splitlines() if line.startswith(("fairscale ", "OSDP, "))]
    return judged(rows[-1] if rows else "no row was printed", [] if rows else [output[-500:]], {"rows": rows})
