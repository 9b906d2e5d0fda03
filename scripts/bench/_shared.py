"""What the benchmarks have in common: contestants that take turns, medians with quartiles, processes, pictures."""

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from math import ceil, floor
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
GIB, MIB = 1 << 30, 1 << 20
sys.path.insert(0, str(ROOT))  # so that they run from a clone that is not installed
T = TypeVar("T")
R = TypeVar("R")

# --- rounds ----------------------------------------------------------------------------------


def take_turns(number: int, contestants: Sequence[T], step: Callable[..., R], *args: Any) -> list[R]:
    """Return each contestant's `step(contestant, *args)`; every second round goes backwards: none is always first."""
    order = range(len(contestants))
    results = {index: step(contestants[index], *args) for index in (order if number % 2 else reversed(order))}
    return [results[index] for index in order]


class Training:
    """A wrapped model in training on this rank."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def timed_step(self, micro_batches: Sequence[tuple[Sequence[Any], dict[str, Any]]]) -> tuple[float, float, float]:
        """Train on (args, kwargs) of each micro-batch; return wall and CPU seconds from a barrier, and mean loss."""
        from runtime.apply_schedule import default_device
        from runtime.own_gpu import barrier

        barrier(default_device())
        started, started_cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        total: Any = 0.0
        for args, kwargs in micro_batches:
            loss = self.model(*args, **kwargs) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        total = float(total)  # waits for the device
        return time.perf_counter() - started, time.process_time() - started_cpu, total


def osdp_training(source: Any, module: Any, plan: Any, cluster: Any) -> Training:
    """Return the model of `source` under a plan, with AdamW; `module` is one for which it makes example inputs."""
    import torch

    from osdp import OSDP
    from runtime.optimizers import OPTIMIZERS

    torch.manual_seed(0)
    model = OSDP(source.build, plan, cluster, example_inputs=partial(source.example_inputs, module))
    return Training(model, OPTIMIZERS["adamw"](model.parameters(), lr=1e-3, weight_decay=0.0))


def train_in_turns(
    options: Any,
    runners: Sequence[Training],
    inputs: Callable[[int], tuple[Any, ...]],
    tolerance: float,
    step: Callable[..., tuple[float, ...]] = Training.timed_step,
    *,
    checked: slice = slice(None),
    progress: bool = False,
) -> tuple[Any, float]:
    """Train all by `step(runner, *inputs(round))`; rounds that warm up are below 0.  A collective call.

    Returns what the steps returned, (rounds, contestants, figures), the highest of all ranks, and the largest relative
    difference of losses (the third figure) in one of the rounds `checked`.  Raises ValueError if that is above
    `tolerance`.
    """
    import torch
    import torch.distributed as dist

    rounds = []
    for number in range(-options.warm_up, options.rounds):
        rounds.append(take_turns(number, runners, step, *inputs(number)))
        if progress and dist.get_rank() == 0:
            took = ", ".join(f"{figures[0]:.2f} s" for figures in rounds[-1])
            print(f"round {number + 1} of {options.rounds}: {took}", file=sys.stderr, flush=True)
    figures = torch.tensor(rounds, dtype=torch.float64)
    losses = figures[checked, :, 2]
    difference = (losses / losses[:, :1] - 1.0).abs().max()
    if not difference <= tolerance:
        raise ValueError(f"the contestants do not compute the same: losses {losses.tolist()}")
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return figures, float(difference)


def measured_machine(options: argparse.Namespace, device: Any) -> Any:
    """Measure the ranks' machine, as `osdp profile` does, and return (wanted, device, found); a collective call."""
    from osdp.profile.session import Wanted, measure

    wanted = Wanted(None, "fp32", (1,), options.repetitions, options.budget_s, device.type)
    return wanted, device, measure(wanted, device, lambda what, fraction: None)


def measured_cluster(machine: Any, source: Any, name: str) -> Any:
    """Measure a model on the machine that `measured_machine` measured, and return both as a cluster."""
    from osdp.profile.cluster_from_timings import assemble
    from osdp.profile.session import measure_model
    from runtime.failures.rank_agreement import from_rank_0

    wanted, device, found = machine
    graph, model = measure_model(wanted, source, device, lambda what, fraction: None)
    return from_rank_0("assemble", lambda: assemble(replace(found, graph=graph, model=model), name))


# --- numbers ---------------------------------------------------------------------------------


def with_quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def with_interval(values: Sequence[float]) -> str:
    """Return the median, the quartiles, and what holds the true median with 95 % (order statistics of n / 2)."""
    low, middle, high = quantiles(values, n=4)
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    first = ordered[max(0, floor(len(values) / 2 - reach))]
    last = ordered[min(len(values) - 1, ceil(len(values) / 2 + reach))]
    return f"{middle:.3f} ({low:.3f}-{high:.3f}) [{first:.3f}-{last:.3f}]"


def with_range(values: Sequence[float]) -> str:
    """Return the median and the range."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


# --- processes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one child process cost and printed."""

    cpu_s: float
    """User and system time."""
    wall_s: float
    rss_bytes: int
    """Peak resident memory."""
    output: str


def run(arguments: Sequence[str]) -> Run:
    """Run a command and return its costs; a failure ends the benchmark with its message."""
    started = time.perf_counter()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed with status {process.returncode}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Run(cpu_s, time.perf_counter() - started, usage.ru_maxrss * 1024, output)


def plan_command(*arguments: str) -> list[str]:
    """Return the `osdp plan` command of this environment."""
    return [sys.executable, "-m", "osdp", "plan", *arguments, "--json"]


def rank_command(script: Path, options: argparse.Namespace, *torchrun: str, **changed: object) -> list[str]:
    """Return the torchrun command that runs `script --as-rank` with its options, some of them changed."""
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, str(script), "--as-rank"]
    for name, value in (vars(options) | changed).items():
        if name != "as_rank":
            values = value if isinstance(value, list) else [value]
            command += [f"--{name.replace('_', '-')}", *map(str, values)]
    return command


def spawn_ranks(body: Callable[[int, Any], None], ranks: int, options: Any, backend: str = "gloo") -> None:
    """Run `body(rank, options)` in a process for each rank, inside a process group."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder, 'store')}"
        spawn(_rank_main, (body, ranks, options, backend, store), nprocs=ranks)  # type: ignore[no-untyped-call]


def _rank_main(rank: int, body: Callable[[int, Any], None], ranks: int, options: Any, backend: str, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    body(rank, options)
    dist.barrier()
    dist.destroy_process_group()


# --- command line and output -----------------------------------------------------------------


def add_integers(parser: argparse.ArgumentParser, rows: Iterable[tuple[str, int, str]]) -> None:
    """Add options that take a whole number: (name, default, help)."""
    for name, default, what in rows:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")


def add_run_options(parser: argparse.ArgumentParser, rounds: int, warm_up: int, budget_s: float) -> None:
    """Add the options of a benchmark that profiles, then trains on ranks that torchrun starts."""
    parser.add_argument("--rounds", type=int, default=rounds, help="measured steps of each contestant")
    parser.add_argument("--warm-up", type=int, default=warm_up, help="steps of each before those")
    parser.add_argument("--repetitions", type=int, default=5, help="timings of each point of the profile")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="about how long the profile may take")
    parser.add_argument("--output", help="folder for results and the picture")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)


def machine() -> str:
    """Return date, versions and cores, for the first line of a report."""
    import torch

    return f"{date.today()}, python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPU cores"


@contextlib.contextmanager
def output_folder(parser: argparse.ArgumentParser, output: str | None) -> Iterator[Path]:
    """Make the folder that was asked for, or a temporary one; pictures are only drawn into the former."""
    if output and find_spec("matplotlib") is None:
        from profiler.errors import install_advice

        parser.error(f"the picture needs matplotlib: {install_advice('plot')}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(output or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def panels(count: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    """Return a figure of matplotlib that needs no display, and its panels side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    return figure, axes[0]
