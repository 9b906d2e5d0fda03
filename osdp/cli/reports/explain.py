"""What `osdp explain` prints: why a plan is as it is, and what every other choice would cost."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from osdp.cli.reports.figures import format_count, format_seconds, name_phase
from osdp.cli.reports.plan import LAUNCH_WAIT, WAITING, print_what_if
from osdp.cli.reports.rows import choice_name, short_names
from osdp.cli.terminal import make_table, print_section
from planner.analysis.explain import TIED, Alternative, OpenPlan, Target, alternatives, best_of, parts
from planner.analysis.sent_collectives import Sent, sent_collectives
from planner.analysis.what_if import WhatIf
from planner.cost.ddp import is_plain, why_not_copies
from profiler.byte_sizes import format_bytes

COLUMNS = {
    "recompute_s": ">recompute",
    LAUNCH_WAIT: ">host wait",
    "exposed_communication_s": ">exposed",
    WAITING: ">stragglers",
    "optimizer_s": ">optimizer",
}
"""Terms that a choice can change, and their columns; computing takes the same under every strategy."""
MATERIAL_LEAD = 0.01
"""Of a step, by which it is shorter where the host gets ahead of the device."""
SAME = 1e-6
"""Relative difference up to which a file's figure is the one made anew (YAML keeps all digits)."""
SAME_BYTES = 50_000
"""Less than this much memory is printed as 0.0 MiB."""


def print_plan_reasons(console: Console, view: OpenPlan, more: WhatIf | None = None, why_not: str = "") -> None:
    """Print what keeps each part of a plan from being faster, and what more would buy, if that was asked."""
    console.print(_summary(view))
    if view.load.cluster.world_size > 1 and (reason := _why_units(view)):
        console.print(reason)
    console.print()
    table = make_table("part", ">count", "=choice", "limited by", "alternatives")
    for part in parts(view):
        choice = choice_name(" and ".join(part.strategies), part.recompute) + (" (pinned)" if part.pinned else "")
        why = _why(part.tempting, part.better, part.cheapest)
        label = short_names(_tied_modules(view)) if part.label == TIED else part.label
        table.add_row(label, str(len(part.stages) or 1), choice, part.binds, why)
    print_section(console, "Each part of the model, and what one instance of it could take instead", table)
    if view.load.cluster.nccl is not None and (sent := sent_collectives(view)):
        print_section(console, "Collectives, and NCCL's algorithm and protocol that each is priced as", _sent(sent))
    if more is not None:
        print_what_if(console, more, view.prediction.samples_per_s)
    elif why_not:
        console.print(f"No what-if analysis: {why_not}.")
    console.print("`osdp explain PLAN OPERATOR` lists every alternative for one operator, block or pattern.")


def _why_units(view: OpenPlan) -> str:
    """Return why a plan that replicates all does not run as DistributedDataParallel; empty if that is no question."""
    taken = [strategy for choice in view.decided.choices for strategy in choice.strategies]
    reason = why_not_copies(view.space.graph, view.load.precision)
    if not reason or not is_plain([*taken, *view.decided.spanning, *view.decided.idle]):
        return ""
    return f"Every device has a copy of all, run as units of FSDP2 that copy and reduce one by one: {reason}."


def _sent(sent: list[Sent]) -> Table:
    table = make_table("collective", ">ranks", ">apart", ">count", ">largest", "=priced as", ">takes")
    for one in sent:
        sizes = str(one.ranks), str(one.stride), str(one.count), format_bytes(one.largest_bytes)
        table.add_row(one.operation.replace("_", "-"), *sizes, one.priced_as, format_seconds(one.largest_s))
    return table


def print_target_reasons(console: Console, view: OpenPlan, name: str, target: Target) -> None:
    """Print every alternative of one operator or block, the fastest first, and the reason."""
    console.print(_summary(view))
    console.print()
    changes = alternatives(view, target)
    why = _why(*best_of(changes)) if changes else "On one rank there are no alternatives."
    print_section(console, f"{name}: {_current(view, target)}", _together(view, target), why)
    if changes:
        headline = "All alternatives, fastest first, as changes to the whole plan (exposed: exposed communication)"
        print_section(console, headline, _table(changes), _elsewhere(view, changes))


def _summary(view: OpenPlan) -> str:
    """Return the predictions of the plan, and whether its file has the same."""
    plan, made = view.plan, view.prediction
    free = f" ({format_bytes(plan.headroom_bytes)} of it headroom)" if plan.headroom_bytes else ""
    text = (
        f"{plan.model.name} on {view.load.cluster.name}, micro-batch {plan.micro_batch}, predicted: "
        f"{format_seconds(made.step_time_s)} per step, {format_count(made.samples_per_s)} samples/s, peak "
        f"{format_bytes(made.peak_memory_bytes)} of {format_bytes(plan.limit_bytes)}{free} in "
        f"{name_phase(made.peak_phase)}."
    )
    if view.step_with_host_ahead_s < (1 - MATERIAL_LEAD) * made.step_time_s:
        text += (
            "\nThe host launches ahead of the device where that is busy, which this leaves out: simulated with it, a "
            f"step takes {format_seconds(view.step_with_host_ahead_s)}."
        )
    file = plan.predicted
    pairs = ((file.step_time_s, made.step_time_s), (file.peak_memory_bytes, made.peak_memory_bytes))
    if any(abs(old - new) > SAME * new for old, new in pairs):
        text += (
            f"\nThe plan file predicts {format_seconds(file.step_time_s)} and {format_bytes(file.peak_memory_bytes)}: "
            "its choices, the cluster or the cost model have changed since."
        )
    return text


def _current(view: OpenPlan, target: Target) -> str:
    """Return what a target takes now."""
    choices = [view.decided.choices[index] for index in sorted(target.stages)]
    taken = Counter(
        choice_name(" and ".join(dict.fromkeys(map(str, one.strategies))), one.recompute) for one in choices
    )
    if target.spanning:
        taken[str(view.spanning)] += 1
    if sum(taken.values()) == 1:
        return next(iter(taken))
    return ", ".join(f"{count} x {choice}" for choice, count in taken.items())


def _together(view: OpenPlan, target: Target) -> str:
    """Return which operators change with a target."""
    model = view.space.model
    stages = [(index, model.stages[index]) for index in sorted(target.stages)]
    names = [view.label_of(index) if stage.block is None else stage.name for index, stage in stages]
    names += _tied_modules(view) if target.spanning else []
    return f"These change together: {short_names(names)}."


def _tied_modules(view: OpenPlan) -> list[str]:
    model = view.space.model
    return [module for index in model.spanning for module in model.graph.operators[index].modules]


def _name(change: Alternative) -> str:
    return choice_name(change.strategy, change.recompute)


def _why(tempting: Alternative | None, better: Alternative | None, cheapest: Alternative | None) -> str:
    """Return the reason in words; the three are those of `planner.analysis.explain.best_of`."""
    sentences = []
    if better:
        sentences.append(f"{_name(better)} would save {format_seconds(-better.delta_s)} per step and fits.")
    if tempting:
        sentences.append(
            f"{_name(tempting)} would save {format_seconds(-tempting.delta_s)} per step, but exceeds the limit by "
            f"{format_bytes(tempting.excess_bytes)} in {name_phase(tempting.phase)}."
        )
    if not sentences:
        sentences.append("Nothing is faster.")
    if cheapest:
        sentences.append(f"The cheapest alternative that fits is {_name(cheapest)}, {_cost(cheapest)}.")
    return " ".join(sentences)


def _cost(change: Alternative) -> str:
    """Return what a change that is not faster costs: time, and memory either way."""
    time = "as fast" if change.as_fast else f"{format_seconds(change.delta_s)} per step slower"
    if abs(change.delta_bytes) < SAME_BYTES:
        return f"{time}, with the same peak"
    more = "more" if change.delta_bytes > 0 else "less"
    return f"{time}, with {format_bytes(abs(change.delta_bytes))} {more} at the peak"


def _table(changes: list[Alternative]) -> Table:
    rare = [term for term in (WAITING, LAUNCH_WAIT) if not any(change.delta_by_term_s[term] for change in changes)]
    columns = {term: name for term, name in COLUMNS.items() if term not in rare}
    table = make_table("alternative", ">step time", *columns.values(), ">peak", ">over limit")
    for change in changes:
        terms = [format_seconds(change.delta_by_term_s[term], signed=True) for term in columns]
        peak = ("+" if change.delta_bytes > 0 else "") + format_bytes(change.delta_bytes)
        over = "fits" if change.fits else format_bytes(change.excess_bytes)
        table.add_row(_name(change), format_seconds(change.delta_s, signed=True), *terms, peak, over)
    return table


def _elsewhere(view: OpenPlan, changes: list[Alternative]) -> str:
    """Return in which phases the plan and the alternatives have their peaks."""
    here = view.prediction.peak_phase
    moved = [f"{_name(change)}, in {name_phase(change.phase)}" for change in changes if change.phase != here]
    return f"The plan's peak is in {name_phase(here)}" + (f"; with {'; with '.join(moved)}." if moved else ".")
