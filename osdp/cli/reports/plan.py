"""What `osdp plan` prints for people."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from osdp.cli.reports import dealing
from osdp.cli.reports.figures import (
    assumed_of,
    bar,
    format_count,
    format_parameters,
    format_seconds,
    name_phase,
    rates,
    sources_of,
)
from osdp.cli.reports.rows import RECOMPUTED, plan_rows, short_names
from osdp.cli.reports.verdict import verdict
from osdp.cli.terminal import make_table, print_section
from osdp.planning.allocator_headroom import RETRY_S, ROOMY, TIGHT
from osdp.planning.clusters import is_derived, reserve_use
from osdp.planning.request import Planned, samples_with_retries_per_s
from planner.analysis.dealing import Dealing
from planner.analysis.plan_diff import HIDDEN
from planner.analysis.what_if import MATERIAL, WhatIf
from planner.cost.stragglers import Waits
from planner.options.candidates import DIVERSE_STRATEGIES, LIGHT, MIXED_STRATEGIES, SPLIT_STRATEGIES
from planner.search.baselines import Baseline
from profiler.byte_sizes import MIB, format_bytes
from profiler.model_graph import Recompute

WAITING = "waiting_s"
"""The term of uneven micro-batches."""
LAUNCH_WAIT = "launch_wait_s"
"""The term of devices that wait for their host."""
HOST_BOUND = 0.05
"""Part of a step from which on that waiting is explained."""
TERMS = {
    "compute_s": "compute",
    "recompute_s": "recompute",
    LAUNCH_WAIT: "wait for the host",
    "exposed_communication_s": "exposed communication",
    WAITING: "straggler wait",
    "optimizer_s": "optimizer",
}
"""Terms that sum to the step time, as printed."""
HEADLINE = "Plan: all times and memory figures below are predicted, none was measured in a run"
BASELINES_HEADLINE = "Compared with one strategy for the whole model, each at its best micro-batch size"
WHAT_IF_HEADLINE = "What if: predicted by a new search for each change"
PINNED = ", pinned"


@dataclass(frozen=True)
class Circumstances:
    """What the report prints beside the plan."""

    total_s: float
    """Seconds since the command started."""
    cluster_note: str = ""
    """Why this cluster, if the user named none."""
    written_to: str = ""
    """File that the plan was written to, or folder of several."""
    more: WhatIf | None = None
    """What binds and what more would buy, if that was asked."""
    dealing: Dealing | None = None
    """What dealing samples by their cost would buy, if micro-batches are uneven."""


def print_plan(console: Console, planned: Planned, around: Circumstances) -> None:
    console.print(f"{verdict(planned)}\n")
    print_section(console, HEADLINE, _header(planned, around))
    print_section(console, *_choices(planned))
    print_section(console, *_memory(planned))
    print_section(console, *_time(planned))
    print_section(console, BASELINES_HEADLINE, baseline_table(planned))
    if around.dealing is not None:
        print_section(console, dealing.HEADLINE, dealing.dealing_table(around.dealing), dealing.HOW)
    if around.more is not None:
        print_what_if(console, around.more)
    console.print(_footer(planned, around))


def _header(planned: Planned, around: Circumstances) -> Table:
    """Say what was planned for what, and what the figures rest on."""
    plan, graph, cluster = planned.plan, planned.graph, planned.cluster
    device = cluster.device
    tokens = f", {graph.sequence_length} tokens per sample" if graph.sequence_length > 1 else ""
    ranks = f"{cluster.nodes} x {cluster.gpus_per_node} {device.name}, {format_bytes(device.memory_bytes.value)} each"
    note = f" ({around.cluster_note})" if around.cluster_note else ""
    table = make_table("", "")
    table.show_header = False
    size = f"{graph.numel:,} parameters in {len(graph.operators)} operators, {len(graph.blocks)} blocks"
    table.add_row("model", f"{plan.model.name}: {size}; {plan.model.precision}, {plan.optimizer}{tokens}")
    table.add_row("cluster", f"{cluster.name}: {ranks}{note}")
    free = f"{format_bytes(plan.headroom_bytes)} are headroom and " if plan.headroom_bytes else ""
    limit = f"{format_bytes(plan.limit_bytes)} ({plan.limit_bytes / MIB:,.0f} MiB) per device"
    reserved = f"{free}{format_bytes(cluster.reserve_bytes)} are reserved for {reserve_use(device)}"
    table.add_row("limit", f"{limit}, of which {reserved}")
    if planned.tighter is not None:
        table.add_row("headroom", f"{format_bytes(plan.headroom_bytes)}, {why_more_headroom(planned, planned.tighter)}")
    if plan.waits.source:
        table.add_row("imbalance", _waits(plan.waits))
    if plan.asked.pins:
        table.add_row("pinned", ", ".join(plan.asked.pins))
    table.add_row("rates", rates(cluster, plan.model))
    table.add_row("sources", f"cluster: {sources_of(cluster)}; model: counted while tracing it")
    if cluster.launch is None and device.kind == "cuda":
        table.add_row("not counted", "what the host takes to launch kernels: the cluster file has no `launch` figures")
    if is_derived(cluster):
        table.add_row("assumed", ", ".join(assumed_of(cluster)))
    return table


def why_more_headroom(planned: Planned, tighter: Planned) -> str:
    """Say what the plan gains by having more headroom than another."""
    own, other = samples_with_retries_per_s(planned.found, ROOMY), samples_with_retries_per_s(tighter.found, TIGHT)
    return (
        f"because with {format_bytes(tighter.plan.headroom_bytes)} CUDA's "
        f"caching allocator gives memory back about {TIGHT.retries:.0f} times a step, {format_seconds(RETRY_S)} each "
        f"(as measured on an H200).  Predictions leave that out; with it, {format_count(own)} samples/s against "
        f"{format_count(other)}.  --headroom sets another"
    )


def _waits(waits: Waits) -> str:
    """Say how uneven micro-batches are, and what the slowest rank then takes."""
    each, once = (f"{waits.factor(per_micro_batch) - 1:.1%}" for per_micro_batch in (True, False))
    fill = f"the mean sample is {waits.fill:.0%} as long as the longest, " if waits.fill < 1 else ""
    slowest = f"the slowest rank computes {each} longer than the mean per micro-batch, {once} per step"
    return f"{waits.source}: {fill}{slowest}"


def _choices(planned: Planned) -> tuple[str, Table]:
    """Return the choices, by class of blocks and operators, under a headline."""
    plan, world = planned.plan, planned.cluster.world_size
    samples = world * plan.micro_batch * plan.accumulation
    factors = f"Micro-batch {plan.micro_batch} x {world} ranks x accumulation {plan.accumulation}"
    table = make_table("part", ">count", "=strategy", "recompute", ">parameters", "which")
    for row in plan_rows(plan, planned.graph, planned.pins):
        strategy = row.strategy + PINNED * row.pinned
        recompute = RECOMPUTED[row.recompute] + PINNED * row.pinned_recompute
        size, names = format_parameters(row.parameters), short_names(row.names)
        table.add_row(row.part, str(len(row.names)), strategy, recompute, size, names)
    return f"{factors} = {samples:,} samples per step", table


def _memory(planned: Planned) -> tuple[str, Table]:
    """Return the peak by category, as shares of the limit, under a headline."""
    predicted, limit_bytes = planned.plan.predicted, planned.plan.limit_bytes
    table = make_table("at the peak", ">bytes", ">of limit", "")
    for category, size_bytes in sorted(predicted.memory_by_category.items(), key=lambda item: -item[1]):
        share = size_bytes / limit_bytes
        table.add_row(category.replace("_", " "), format_bytes(size_bytes), f"{share:.1%}", bar(share))
    peak_bytes, where = predicted.peak_memory_bytes, name_phase(predicted.peak_phase)
    used = f"{format_bytes(peak_bytes)} of {format_bytes(limit_bytes)}, {peak_bytes / limit_bytes:.1%} used"
    return f"Memory: peak {used}, in {where}", table


def _time(planned: Planned) -> tuple[str, Table, str]:
    """Return the step time by term, under a headline, and what is not part of it or needs an explanation."""
    predicted, length = planned.plan.predicted, planned.graph.sequence_length
    table = make_table("per step", ">time", ">share", "")
    for term, label in TERMS.items():
        seconds = predicted.time_by_term.get(term, 0.0)  # older plan files have fewer
        if term in (WAITING, LAUNCH_WAIT) and not seconds:
            continue
        share = seconds / predicted.step_time_s
        table.add_row(label, format_seconds(seconds), f"{share:.1%}", bar(share))
    tokens = f", {format_count(predicted.samples_per_s * length)} tokens/s" if length > 1 else ""
    speed = f"{format_count(predicted.samples_per_s)} samples/s{tokens}"
    hidden = format_seconds(predicted.time_by_term[HIDDEN])
    overlapped = f"Another {hidden} of communication overlaps with computation and is not part of the sum."
    share = predicted.time_by_term.get(LAUNCH_WAIT, 0.0) / predicted.step_time_s
    host = f" The step is host-bound: for {share:.0%} of it devices wait for Python and the driver to launch kernels."
    told = overlapped + host * (share >= HOST_BOUND)
    return f"Time: {format_seconds(predicted.step_time_s)} per step, {speed}", table, told


def baseline_table(planned: Planned) -> Table:
    """Return the uniform configurations under the same limit, and how many times as fast the plan is."""
    speed = planned.plan.predicted.samples_per_s
    table = make_table("baseline", "recompute", ">micro-batch", ">peak memory", ">samples/s", ">the plan is")
    for baseline in planned.found.baselines:
        needs = format_bytes(baseline.peak_memory_bytes)
        row = (baseline_name(baseline), RECOMPUTED[baseline.recompute])
        if baseline.feasible:
            ratio = speed / baseline.samples_per_s
            batch = str(baseline.load.micro_batch)
            table.add_row(*row, batch, needs, format_count(baseline.samples_per_s), f"{ratio:.3f} x as fast")
        else:
            table.add_row(*row, "", f"needs {needs}", "", "does not fit")
    return table


def baseline_name(baseline: Baseline) -> str:
    """Return a uniform configuration's name, with the group size where it has one."""
    sized = ":" in str(baseline.strategy)
    return f"{baseline.name}, groups of {baseline.strategy.group}" if sized else baseline.name


def _offer(planned: Planned) -> str:
    """Say which strategies the search could give to the stages of a model."""
    space = planned.found.space
    if space.is_diverse:
        first = f"one of the {DIVERSE_STRATEGIES} preferred strategies or the one that needs least memory"
        return f"{first} (few blocks are alike, so that a larger space would take too long)"
    text = f"any strategy, two of the {MIXED_STRATEGIES} preferred strategies for different parts of the block, or "
    text += f"its large linear layers split into slices with two of the {SPLIT_STRATEGIES} preferred strategies"
    few = f" (parts with less than 1/{1 / LIGHT:.0f} of the parameters: replicate, shard or what needs least memory)"
    return text + (few if space.light else "")


def trace_time(planned: Planned) -> str:
    """Say how long tracing took."""
    return "The model was traced before" if planned.trace_s is None else f"Tracing took {planned.trace_s:.2f} s"


def _footer(planned: Planned, around: Circumstances) -> str:
    """Return what is proven, how long it took, and what the tracer had to assume."""
    plan, found = planned.plan, planned.found
    bound = format_count(found.bound_samples_per_s)
    within = " with these pins" if plan.asked.pins else ""
    within += " with this headroom" if planned.tighter is not None else ""
    kinds = [found.space.modes(stage_class, found.load) for stage_class in range(len(found.space.examples))]
    offloads = [modes for modes in kinds if Recompute.OFFLOADED in modes]
    again = "selective, whole or offloaded recomputation" if offloads else "selective or whole recomputation"
    instead = any(Recompute.EVERYTHING not in modes for modes in offloads)
    hidden = " (offloaded, not whole, where many are alike and copies are hidden)" if instead else ""
    lines = [
        f"Certified gap {plan.gap:.2%}: no plan of the search space has more than {bound} samples/s in this cost "
        f"model{within}. The search space has, for each block and each operator "
        f"outside blocks, {_offer(planned)}; one strategy for all tied operators; no, {again} "
        f"of each block{hidden}; "
        f"and {found.points} combinations of micro-batch size and accumulation. Plans outside it may be faster.",
        f"{trace_time(planned)}, the search {planned.search_s:.2f} s, the command {around.total_s:.2f} s.",
    ]
    if found.simple is not None:
        gain = found.samples_per_s / found.simple.samples_per_s - 1.0
        lines.append(
            f"It has {gain:.1%} more samples/s than one strategy for all blocks and one for the rest: --simple."
            if gain > 0
            else "This is a simple plan; --best gives the fastest."
        )
    lines += [f"Note: {note}" for note in planned.graph.notes]
    if around.written_to:
        lines.append(f"Written to {around.written_to}")
    return "\n".join(lines)


# --- what-if, also for `osdp explain` --------------------------------------------------------


def print_what_if(console: Console, more: WhatIf, plan_samples_per_s: float | None = None) -> None:
    """Print the answers and what binds; `plan_samples_per_s` is a plan's that was made before."""
    table = make_table("change", ">samples/s", ">speed-up", ">gap", "")
    for answer in more.answers:
        if answer.samples_per_s is None or answer.ratio is None or answer.gap is None:
            table.add_row(answer.change, "", "", "", answer.why_not)
            continue
        figures = (format_count(answer.samples_per_s), f"{answer.ratio:.3f} x", f"{answer.gap:.2%}")
        table.add_row(answer.change, *figures, "bottleneck" if answer.resource in more.binds else "")
    text = [_bottlenecks(more)]
    if plan_samples_per_s is not None and more.samples_per_s > plan_samples_per_s * (1 + MATERIAL):
        speed = format_count(plan_samples_per_s)
        text.append(f"This starts from the plan that a new search finds now; the plan file's has {speed} samples/s.")
    print_section(console, WHAT_IF_HEADLINE, table, *text)


def _bottlenecks(more: WhatIf) -> str:
    now = f"{format_count(more.samples_per_s)} samples/s now, at most {format_count(more.bound_samples_per_s)}"
    if not more.binds:
        return f"None of these is a bottleneck: no change alone gives more than is possible without it ({now})."
    first, *others = more.binds
    then = f", then {', '.join(others)}" if others else ""
    return f"The main bottleneck is {first}{then}: more of it alone gives more than is possible without ({now})."
