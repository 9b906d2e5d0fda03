"""One run: data, model, wrapping, warm-up, timed steps, and a few steps under torch's profiler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from linear_example import fsdp
from linear_example.flags import Options
from linear_example.memory import Peak, memory_at
from linear_example.model import LinearStack, learning_rate, make_data, make_model
from osdp import OSDP
from osdp.tracing import TRACE_STEP, Tracer, let_gloo_end
from osdp.training.process_group import Ranks
from planner.plan import Plan

PROFILED_STEPS = 2
"""Steps in a trace; the profiler warms up in one more before them."""
Tell = Callable[[object], None]
"""Prints something, on the rank that calls it."""


@dataclass(frozen=True)
class Result:
    """What a run measured, of the slowest and the fullest rank."""

    data_parallel: str
    peak_bytes: int
    step_s: float
    """Median of the timed steps."""
    losses: tuple[float, ...]
    """Mean over ranks, of every step until the profiled ones."""
    traces: Path
    """Folder of the traces."""
    plan: Plan | None
    """OSDP's."""


def wrap(model: LinearStack, options: Options, device: torch.device) -> nn.Module:
    """Return the model as the ranks train it."""
    match options.data_parallel:
        case "ddp":
            return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        case "fsdp":
            return fsdp.shard(model, options, device)
        case _:
            return OSDP(model, {"optimizer": "sgd", "micro_batch": options.batch_size}, options.mem)


def run(options: Options, ranks: Ranks, tell: Tell) -> Result:
    """Train as the options say; tell the memory at every stage. A collective call; raises OsdpError."""
    device, losses = ranks.device, list[Tensor]()
    data = make_data(options.batch_size, options.hidden, ranks.rank, device)
    tell(memory_at("after data creation", ranks.rank, device))
    model = make_model(options.layers, options.hidden, device)
    tell(memory_at("after model creation", ranks.rank, device))
    wrapped = wrap(model, options, device)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=learning_rate(options.hidden))
    step = _step_of(wrapped, optimizer, data, losses)
    peak = Peak(device)
    with peak.warm_up([*data, *wrapped.parameters()]):
        for _ in range(options.warmup_steps):
            # To its end: NCCL keeps the buckets that DDP replaces in the second step until a collective is called after
            # those of the first step are over (ProcessGroupNCCL: shelvesToUnstash_), and the host is far ahead.
            _timed(step, device)
    tell(memory_at("after warmup", ranks.rank, device))
    peak.restart()
    seconds = [_timed(step, device) for _ in range(options.steps)]
    peak_bytes, told = peak.read_bytes(), losses[:]
    folder = options.profile_dir / options.configuration
    _profile(step, device, folder, ranks.rank)
    if options.trace is not None:
        tracer = Tracer(options.trace / options.configuration, wrapped, optimizer)
        for _ in range(TRACE_STEP):
            with tracer.step():
                step()
    fullest_bytes, slowest_ns = ranks.maximum([peak_bytes, round(1e9 * median(seconds))])
    means = tuple(ranks.mean(loss) for loss in told)
    plan = wrapped.plan if isinstance(wrapped, OSDP) else None
    return Result(options.data_parallel, fullest_bytes, slowest_ns / 1e9, means, folder, plan)


def _step_of(
    model: nn.Module, optimizer: Optimizer, data: tuple[Tensor, Tensor], losses: list[Tensor]
) -> Callable[[], None]:
    """Return a step of training, which adds its loss to `losses`.

    Gradients stay until the next step: the tutorial's figures after the warm-up have them.
    """

    def step() -> None:
        optimizer.zero_grad()
        loss = model(*data)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())  # on a CPU the loss of torch's mse_loss keeps (batch, hidden) alive

    return step


def _timed(step: Callable[[], None], device: torch.device) -> float:
    """Run a step; return its seconds."""
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _profile(step: Callable[[], None], device: torch.device, folder: Path, rank: int) -> None:
    """Run a few steps and leave their trace in the folder, in the form that TensorBoard's plugin reads."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler says on every rank when it starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=PROFILED_STEPS),
        on_trace_ready=tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}"),
        acc_events=True,  # else it warns that it drops those of earlier cycles, of which there are none
    ) as profiler:
        for _ in range(1 + PROFILED_STEPS):
            step()
            let_gloo_end()
            profiler.step()
