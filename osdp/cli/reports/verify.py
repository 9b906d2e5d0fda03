"""What `osdp verify` prints."""

from dataclasses import asdict
from typing import Any

from rich.console import Console

from osdp.cli.reports.figures import name_phase
from osdp.cli.terminal import make_table, print_section
from osdp.planning.verify import EXPANDABLE, MOST_TOO_HIGH, MOST_TOO_LOW, ROUNDING_BYTES, Verified
from planner.plan import Plan
from profiler.byte_sizes import MIB, format_bytes

SCHEMA = "osdp.verification/1"
FIGURES = (
    *("how", "world_size", "rank", "predicted", "tracked", "predicted_peak_bytes", "tracked_peak_bytes"),
    *("error", "reserved_bytes", "allocatable_bytes", "holds", "seconds"),
)
"""Of `Verified`, in the order of the JSON object."""


def verified_object(found: Verified, plan: Plan) -> dict[str, Any]:
    """Return the comparison as plain data, in bytes and seconds."""
    head = {"schema": SCHEMA, "model": plan.model.name, "cluster": plan.cluster.name}
    allocators = {name: asdict(allocator) for name, allocator in found.allocators.items()}
    return head | {name: getattr(found, name) for name in FIGURES} | {"allocators": allocators}


def print_verified(console: Console, found: Verified, plan: Plan) -> None:
    """Print predicted against tracked, category by category."""
    print_section(console, _headline(found, plan))
    measured = found.how == "cuda"
    table = make_table("at the peak", ">predicted", ">measured" if measured else ">tracked", ">difference")
    for category in dict.fromkeys((*found.predicted, *found.tracked)):
        before, after = found.predicted.get(category), found.tracked.get(category)
        difference = "" if measured else _difference((before or 0) - (after or 0))
        if before or after:
            name = category.replace("_", " ")
            table.add_row(name, _bytes(before, measured), _bytes(after, measured), difference)
    gap = found.predicted_peak_bytes - found.tracked_peak_bytes
    peaks = format_bytes(found.predicted_peak_bytes), format_bytes(found.tracked_peak_bytes)
    table.add_row("peak", *peaks, _difference(gap))
    phases = f"Peak predicted in {name_phase(found.predicted_phase)}; found in {name_phase(found.tracked_phase)}."
    print_section(console, "Memory of tensors (without CUDA context, NCCL and cuBLAS)", table, phases)
    if found.allocators:
        _print_allocators(console, found)
    console.print(verdict(found))


def _print_allocators(console: Console, found: Verified) -> None:
    table = make_table("settings", ">allocated", ">reserved", ">released", ">none from", "within the limit")
    for name, allocator in found.allocators.items():
        sizes = format_bytes(allocator.allocated_bytes), format_bytes(allocator.reserved_bytes)
        fits = "yes" if allocator.fits else "no: needs what is reserved here"
        released = f"{allocator.retries} x a step", format_bytes(allocator.without_retries_bytes)
        table.add_row(name.replace("_", " "), *sizes, *released, fits)
    note = (
        "Predicted: the dry run's allocations, and cuBLAS workspaces, replayed through a model of the allocator.  What "
        "it releases is cached memory, for a request that would not fit otherwise; the device waits meanwhile.  It "
        "releases none if it may reserve as much as `none from` says; planned with a larger --headroom, a plan needs "
        "less."
    )
    print_section(console, f"PyTorch's allocator, of {format_bytes(found.allocatable_bytes)}", table, note)


def _headline(found: Verified, plan: Plan) -> str:
    how = "steps on GPUs" if found.how == "cuda" else "one step on fake tensors, without computing"
    return (
        f"{plan.model.name} on {plan.cluster.name}, {plan.model.precision}, {plan.optimizer}, micro-batch "
        f"{plan.micro_batch} x {plan.accumulation}: rank {found.rank} of {found.world_size}, the fullest; {how} "
        f"({found.seconds:.1f} s)"
    )


def _bytes(size_bytes: int | None, measured: bool) -> str:
    return "" if measured and size_bytes is None else format_bytes(size_bytes or 0)


def _difference(size_bytes: int) -> str:
    return f"{size_bytes / MIB:+,.2f} MiB" if size_bytes else "0"


def verdict(found: Verified) -> str:
    """Return whether the prediction holds, by which bounds, and whether the allocator fits."""
    bounds = f"between {-MOST_TOO_LOW:.0%} and +{MOST_TOO_HIGH:.0%}"
    if not -MOST_TOO_LOW <= found.error <= MOST_TOO_HIGH:
        bounds += f", or {format_bytes(ROUNDING_BYTES)} either way,"
    word = "holds" if found.is_close else "does not hold"
    text = f"The prediction {word}: its error is {found.error:+.3%}, and {bounds} is allowed."
    if found.reserved_bytes is None:
        return text + _allocator_verdict(found)
    room = f"of the {format_bytes(found.allocatable_bytes)} that the limit leaves it"
    word = "within" if found.fits else "beyond"
    return f"{text}\nThe allocator is {word} the limit: it reserved {format_bytes(found.reserved_bytes)} {room}."


def _allocator_verdict(found: Verified) -> str:
    allocator = found.allocators.get(EXPANDABLE)
    if allocator is None:
        return ""
    room = f"of the {format_bytes(found.allocatable_bytes)} that the limit leaves it"
    if allocator.fits:
        peak = f"is predicted to reserve {format_bytes(allocator.reserved_bytes)} {room}"
        return f"\nThe allocator fits with expandable_segments:True, as osdp train sets it: it {peak}."
    return (
        f"\nThe allocator does not fit, even with expandable_segments:True: it is predicted to need "
        f"{format_bytes(allocator.reserved_bytes)} {room}.  Plan with more --headroom."
    )
