"""How long planning takes: `python scripts/bench/planning_time.py [CASE]...`, all cases without one.

    gpt2         `osdp plan --model gpt2-1.5b --mem 8GB` from process start, the first time and later, and with `--best`
    scaling      10, 100 and 1,000 layers, all alike and no two alike, traced and planned
    limits       gpt2-1.5b on the default cluster and on 2 x 8 A100, beside the best uniform baseline
    huggingface  four published configurations in bf16 on 4 x 8 H100, with the imports of torch and transformers
    large        Llama 3 of 70 and 405 billion parameters on 8, 128 and 2,048 nodes of 8 H100, the first time and later

Targets stand beside what was found, and by how much it misses them.
Each case runs in a process of its own; CPU seconds and peak resident memory are that process's, as
the kernel counts them (`getrusage`), so imports are included.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from _shared import GIB, Run, plan_command, run, with_range

from osdp.planning.named_model import FOLDER

REPEATS = 3
KEPT = ", the trace kept from an earlier run"
CONFIGURATIONS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("huggingface_models.json").read_text())
"""Sizes from the published config.json of each model."""
LARGE: dict[str, dict[str, Any]] = {
    name: {
        **CONFIGURATIONS["Llama-3-8B"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }
    for name, hidden, layers, heads, inner in (
        ("Llama-3-70B", 8192, 80, 64, 28672),
        ("Llama-3-405B", 16384, 126, 128, 53248),
    )
}
NODES = 8, 128, 2048
GPT2_TARGET_S, LARGE_TARGET_S, SCALING_TARGET_S = 2.5, 4.0, 20.0
"""CPU seconds of a whole command."""
GAP_TARGET, RESIDENT_TARGET_GIB = 0.001, 1.0


def bench_gpt2() -> None:
    """Time the command of the README, and the same once its trace is kept."""
    command = plan_command("--model", "gpt2-1.5b", "--mem", "8GB")
    with tempfile.TemporaryDirectory() as folder:
        for kept in (False, True):
            with patch.dict(os.environ, {FOLDER: folder if kept else ""}):
                runs = [run(command) for _ in range(REPEATS + kept)][kept:]  # the first one keeps it
            print(f"osdp plan --model gpt2-1.5b --mem 8GB, {REPEATS} runs, median (range){KEPT * kept}")
            told(runs)
    runs = [run([*command, "--best"]) for _ in range(REPEATS)]
    print(f"osdp plan --model gpt2-1.5b --mem 8GB --best, {REPEATS} runs, median (range)")
    told(runs)
    print(f"  CPU s {against(median(one.cpu_s for one in runs), GPT2_TARGET_S, '.2f')}", end="; ")
    print(f"gap {against(json.loads(runs[0].output)['gap'], GAP_TARGET, '.2%')}", flush=True)


def against(value: float, target: float, form: str) -> str:
    """Return a figure beside the most that it should be."""
    missed = "met" if value <= target else f"missed by {format(value - target, form)}"
    return f"{format(value, form)}, target {format(target, form)}: {missed}"


def told(runs: Sequence[Run]) -> None:
    """Print what runs of a command took."""
    seconds = [json.loads(r.output)["seconds"] for r in runs]
    print(f"  CPU, whole process  {with_range([r.cpu_s for r in runs])} s")
    print(f"  wall                {with_range([r.wall_s for r in runs])} s")
    print(f"  of which trace      {with_range([s['trace'] or 0.0 for s in seconds])} s")
    print(f"  of which search     {with_range([s['search'] for s in seconds])} s")
    print(f"  peak resident       {max(r.rss_bytes for r in runs) / GIB:.2f} GiB")
    print(f"  certified gap       {json.loads(runs[0].output)['gap']:.2%}", flush=True)


def bench_scaling() -> None:
    """Time models of growing depth."""
    print("layers  kind      operators  trace s  search s  CPU s  peak GiB  samples/s  gap      limit")
    for layers in (10, 100, 1000):
        for kind in ("alike", "distinct"):
            child = run([sys.executable, __file__, "--child", str(layers), kind])
            row: dict[str, Any] = json.loads(child.output)
            print(
                f"{layers:6d}  {kind:8s}  {row['operators']:9d}  {row['trace_s']:7.2f}  {row['search_s']:8.2f}"
                f"  {child.cpu_s:5.1f}  {child.rss_bytes / GIB:8.2f}  {row['samples_per_s']:9.2f}"
                f"  {row['gap']:.3%}  {row['limit_bytes'] / GIB:.1f} GiB",
                flush=True,
            )
            if layers == 1000:
                print(f"  CPU s {against(child.cpu_s, SCALING_TARGET_S, '.1f')}", end="; ")
                print(f"GiB {against(child.rss_bytes / GIB, RESIDENT_TARGET_GIB, '.2f')}", flush=True)


def child(layers: int, kind: str) -> None:
    """Trace and plan one model and print what it took."""
    from osdp.zoo import load_cluster
    from planner.problem import Task
    from planner.search.search import search
    from profiler.model_source import ModelSource
    from profiler.trace.trace import trace_model

    stack = layer_stack(layers, distinct=kind == "distinct")
    source = ModelSource(f"{layers}-{kind}", lambda: stack, lambda module, batch: module.inputs(batch), 128)
    started = time.perf_counter()
    graph = trace_model(source)
    traced = time.perf_counter()
    cluster = load_cluster("titan-rtx-8")
    # Between what full sharding with recomputation needs and what would need no planning at all.
    limit = int(cluster.reserve_bytes + 16 * graph.numel / cluster.world_size * 1.5 + layers * 2e6 + 2e8)
    found = search(Task(graph, cluster, limit))
    row = {"operators": len(graph.operators), "trace_s": traced - started, "search_s": time.perf_counter() - traced}
    print(json.dumps(row | {"gap": found.gap, "samples_per_s": found.samples_per_s, "limit_bytes": limit}))


def layer_stack(layers: int, distinct: bool) -> Any:
    """Return a stack of transformer layers of seven operators; no two widths alike if `distinct`."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    hidden, heads, tokens = 256, 4, 128

    class Layer(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.gate = nn.Linear(hidden, inner), nn.Linear(hidden, inner)
            self.down = nn.Linear(inner, hidden)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            y = self.norm2(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(512 + 4 * i if distinct else 1024) for i in range(layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

        def inputs(self, batch: int) -> tuple[tuple[Tensor], dict[str, Any]]:
            return (torch.randn(batch, tokens, hidden),), {}

    with torch.device("meta"):
        return Stack()


def bench_limits() -> None:
    """Print the fastest plan against the best uniform baseline over memory limits."""
    print("cluster        limit  samples/s  memory used  gap    best uniform baseline that fits")
    for cluster, limits in (("titan-rtx-8", (6, 8, 12, 24)), ("a100-2x8", (16, 40))):
        for limit in limits:
            command = plan_command("--model", "gpt2-1.5b", "--cluster", cluster, "--mem", f"{limit}GB", "--best")
            report = json.loads(run(command).output)
            fitting = [b for b in report["baselines"] if b["feasible"]]
            best = max(fitting, key=lambda b: b["samples_per_s"], default=None)
            predicted = report["predicted"]
            speed, used = predicted["samples_per_s"], predicted["peak_memory_bytes"] / report["limit_bytes"]
            rival = "none fits"
            if best:
                again = {"nothing": "", "selective": " + selective recompute", "everything": " + recompute"}
                name, theirs = best["name"] + again[best["recomputation"]], best["samples_per_s"]
                rival = f"{name} at {best['micro_batch']}: {theirs:.2f}, ours x{speed / theirs:.3f}"
            print(f"{cluster:13s}  {limit:2d} GB  {speed:9.2f}  {used:11.1%}  {report['gap']:.2%}  {rival}", flush=True)


def bench_huggingface() -> None:
    """Time published configurations; nothing is downloaded."""
    print("configuration  CPU s  trace s  search s  samples/s  gap")
    for name, config in CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            done = run(plan_command("--model", f"hf:{path}", "--cluster", "h100-4x8", "--precision", "bf16"))
        report = json.loads(done.output)
        seconds, speed = report["seconds"], report["predicted"]["samples_per_s"]
        times = f"{done.cpu_s:5.1f}  {seconds['trace']:7.2f}  {seconds['search']:8.2f}"
        print(f"{name:13s}  {times}  {speed:9.2f}  {report['gap']:.2%}", flush=True)


def bench_large() -> None:
    """Time large models on many nodes; nothing is downloaded."""
    print("model         nodes  style    gap    CPU s of the first command; of a later one")
    for (name, config), nodes, style in product(LARGE.items(), NODES, ((), ("--best",))):
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {FOLDER: str(Path(folder, "kept"))}):
            path = Path(folder, "config.json")
            path.write_text(json.dumps(config))
            options = "--cluster", "h100-4x8", "--nodes", str(nodes), "--precision", "bf16", "--seq", "8192"
            command = plan_command("--model", f"hf:{path}", *options, *style)
            runs = [run(command) for _ in range(2)]
        gap, how = json.loads(runs[0].output)["gap"], style[0] if style else "default"
        times = "; ".join(against(one.cpu_s, LARGE_TARGET_S, ".1f") for one in runs)
        print(f"{name:12s}  {nodes:5d}  {how:7s}  {gap:.2%}  {times}", flush=True)


def main() -> None:
    """Run the cases named on the command line, or all."""
    if sys.argv[1:2] == ["--child"]:
        return child(int(sys.argv[2]), sys.argv[3])
    cases = {
        "gpt2": bench_gpt2,
        "scaling": bench_scaling,
        "limits": bench_limits,
        "huggingface": bench_huggingface,
        "large": bench_large,
    }
    unknown = set(sys.argv[1:]) - set(cases)
    if unknown:
        raise SystemExit(f"unknown case: got {', '.join(unknown)}, expected {', '.join(cases)}")
    os.environ[FOLDER] = ""  # models are traced, but where a case says otherwise
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} CPU cores, {Path(__file__).name}")
    for name in sys.argv[1:] or cases:
        cases[name]()
    return None


if __name__ == "__main__":
    main()
