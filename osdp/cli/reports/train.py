"""What `osdp train` prints on rank 0: the plan, lines of progress (a bar on a terminal), and what was measured."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from osdp.cli.reports.figures import format_count, format_seconds
from osdp.cli.terminal import columns, note
from osdp.plain_text import plain
from osdp.training.reporters import Event, Saved, Skipped, Start, Step, Summary
from profiler.byte_sizes import MIB, format_bytes
from profiler.yaml_files import to_yaml

if TYPE_CHECKING:
    from rich.progress import Progress


TOLERANCE = 0.1
"""How far measured throughput may be from the predicted, relative, before a profile is advised."""
MOST_RANKS = 4
"""Ranks whose waiting is printed one by one."""


class TrainReport:
    """Prints events as they come."""

    def __init__(self) -> None:
        self._steps = 0
        self._bar: Progress | None = None

    def report(self, event: Event) -> None:
        match event:
            case Start():
                self._start(event)
            case Step():
                self._print(step_line(event, self._steps))
                if self._bar is not None:
                    self._bar.update(self._bar.task_ids[0], completed=event.number)
            case Skipped():
                self._print(f"step {event.number} is left out: its gradients are not finite")
            case Saved():
                self._print(f"checkpoint {event.path}")
            case Summary():
                if self._bar is not None:
                    self._bar.stop()
                for line in summary_lines(event):
                    _say(line)

    def _start(self, start: Start) -> None:
        """Print the plan and what it is predicted to do."""
        self._steps = start.config.steps
        for line in start_lines(start):
            _say(line)
        if not start.fits:
            predicted, limit = start.plan.predicted.peak_memory_bytes, format_bytes(start.plan.limit_bytes)
            needs = f"this is predicted to need {format_bytes(predicted)} per rank, more than the limit of {limit}"
            note(f"{needs}; running {start.config.sharding} anyway")
        if sys.stdout.isatty():
            self._bar = _make_bar()
            self._bar.add_task("training", total=start.config.steps, completed=start.first_step)
            self._bar.start()

    def _print(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is None:
            _say(line)
        else:
            self._bar.console.print(plain(line))


def start_lines(start: Start) -> list[str]:
    config, plan, predicted = start.config, start.plan, start.plan.predicted
    if start.restarts:
        return [_restart_line(start)]
    device = f"{start.device} ({'NCCL' if start.device == 'cuda' else 'gloo'})"
    ranks = plan.cluster.nodes * plan.cluster.gpus_per_node
    counts = Counter(plan.choices.values())
    taken = ", ".join(f"{strategy} {count}" for strategy, count in counts.most_common())
    how = f"planned in {format_seconds(start.planned_s)}" if start.planned_s else "read from a file"
    lines = [
        f"{config.sharding} trains {plan.model.name} ({plan.model.parameters:,} parameters) on {ranks} ranks "
        f"({plan.cluster.nodes} x {plan.cluster.gpus_per_node}), {device}: {config.task}, "
        f"{plan.model.sequence_length} tokens per sample, {plan.model.precision}, {plan.optimizer}",
        f"plan       {how}; operators: {taken}; {len(plan.recomputations)} blocks recomputed",
        f"step       micro-batch {plan.micro_batch} x {ranks} ranks x accumulation {plan.accumulation} = "
        f"{ranks * plan.micro_batch * plan.accumulation} samples",
        f"predicted  peak {format_bytes(predicted.peak_memory_bytes)} of {format_bytes(plan.limit_bytes)} per rank, "
        f"including {format_bytes(plan.predicted.reserve_bytes)} reserved; "
        f"{format_count(predicted.samples_per_s)} samples/s on {plan.cluster.name}",
    ]
    if start.resumed is not None:
        lines.append(f"resumed    {start.resumed}: {start.first_step} of {config.steps} steps are done")
    if config.html is not None:
        lines.append(f"report     {config.html}")
    return lines


def plan_text(start: Start) -> str:
    """Return the plan for a tracker: what is printed at the start of a run, then the plan's file."""
    return "\n".join([*start_lines(start), "", to_yaml(start.plan)])


def _restart_line(start: Start) -> str:
    plan, cluster = start.plan, start.plan.cluster
    ranks = cluster.nodes * cluster.gpus_per_node
    taken = ", ".join(f"{strategy} {count}" for strategy, count in Counter(plan.choices.values()).most_common())
    how = f"planned in {format_seconds(start.planned_s)}" if start.planned_s else "the plan of the file"
    origin = f"after step {start.first_step}" if start.resumed else "from the beginning"
    return (
        f"restart {start.restarts}: continues {origin} on {ranks} ranks ({cluster.nodes} x {cluster.gpus_per_node}); "
        f"{how}: {taken}; micro-batch {plan.micro_batch} x {ranks} ranks x accumulation {plan.accumulation} = "
        f"{ranks * plan.micro_batch * plan.accumulation} samples"
    )


def step_line(step: Step, steps: int) -> str:
    width = len(str(steps))
    norm = "" if step.gradient_norm is None else f"  norm {step.gradient_norm:<9.4g}"
    return (
        f"step {step.number:{width}}/{steps}  loss {step.loss:<9.4g}  lr {step.learning_rate:.2e}{norm}  "
        f"{format_count(step.samples_per_s)} samples/s  {format_count(step.tokens / step.step_s)} tokens/s"
        f"{'' if step.number == steps else f'  {_left(step.left_s)} left'}"
    )


def _left(seconds: float) -> str:
    """Return a duration as `12:05`, or `3:12:05` with hours, or `2 d 3:12:05`."""
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{whole_s:02}" if hours or days else f"{minutes}:{whole_s:02}"
    return f"{days} d {clock}" if days else clock


def summary_lines(summary: Summary) -> list[str]:
    """Return what is printed at the end. MB are 2^20 bytes, as in the limit."""
    plan, lines = summary.plan, [f"done: {summary.steps} steps in this run"]
    predicted_bytes = plan.predicted.tensors_bytes
    if (memory := summary.memory) is not None:
        taken = f", allocator reserved {_megabytes(memory.reserved_bytes)} MB" if memory.reserved_bytes else ""
        lines.append(
            f"device memory utilization: {_megabytes(memory.peak_bytes)} MB / {plan.limit_bytes / MIB:.0f} MB "
            f"(measured: {memory.how}{taken}; predicted {_megabytes(predicted_bytes)} MB, and "
            f"{_megabytes(plan.predicted.reserve_bytes)} MB reserved)"
        )
    if summary.restarts is not None:
        lines.append(str(summary.restarts))
    if summary.skipped:
        lines.append(f"skipped    {summary.skipped} steps whose gradients were not finite")
    if summary.timed_steps:
        lines.append(
            f"overall system throughput: {summary.samples_per_s:.1f} seq/sec (measured: median of "
            f"{summary.timed_steps} steps of {format_seconds(summary.step_s)}; {summary.tokens_per_s:,.0f} tokens/s; "
            f"predicted {plan.predicted.samples_per_s:.1f} seq/sec on {plan.cluster.name})"
        )
        lines.append(_compared(summary))
    if summary.waits_s:
        lines.append(waits_line(summary.waits_s, summary.step_s))
    for accuracy in summary.accuracies:
        right, total = accuracy.right, accuracy.total
        lines.append(f"{accuracy.what} held out of training: {right} of {total} right ({right / total:.1%})")
    return lines


def _compared(summary: Summary) -> str:
    """Return how measured and predicted throughput compare, and what to profile where they are apart."""
    plan = summary.plan
    ratio = summary.samples_per_s / plan.predicted.samples_per_s
    found = f"measured throughput is {ratio:.2f} x the predicted"
    if abs(ratio - 1) <= TOLERANCE:
        return f"{found}: the prediction holds"
    profile = f"osdp profile --model {plan.model.name} --batch {plan.micro_batch} -o mine.yaml"
    return f"{found}: {profile} measures this machine, and --trace FOLDER shows where the time of a step goes"


def waits_line(waits_s: Sequence[float], step_s: float) -> str:
    """Return how long ranks wait in a step, those that wait longest first."""
    slowest = min(range(len(waits_s)), key=waits_s.__getitem__)
    others = sorted((rank for rank in range(len(waits_s)) if rank != slowest), key=lambda rank: -waits_s[rank])
    shown = [
        f"rank {rank} {format_seconds(waits_s[rank])} ({waits_s[rank] / step_s:.1%})" for rank in others[:MOST_RANKS]
    ]
    if len(others) > MOST_RANKS:
        mean_s = sum(waits_s) / len(waits_s)
        shown.append(f"all ranks in the mean {format_seconds(mean_s)} ({mean_s / step_s:.1%})")
    return f"waiting for the slowest, rank {slowest}, in a step: {', '.join(shown)}"


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / MIB:.2f}"


def _say(line: str) -> None:
    """Print at once: the ranks' stdout may be a pipe."""
    print(plain(line), flush=True)


def _make_bar() -> Progress:
    """Return the bar. The cursor stays visible: a signal ends this process without cleaning up."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class PlainCursor(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    console = PlainCursor(width=columns(), markup=False, highlight=False, emoji=False)
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*parts, console=console, transient=True)
