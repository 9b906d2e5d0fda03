"""The command line of the linear example, and which of its flags have no effect in a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler.byte_sizes import parse_bytes
from profiler.errors import OsdpError

FULL_HIDDEN, CPU_HIDDEN = 16384, 256
"""Features of a layer: as in the tutorial on GPUs, and scaled down on CPU ranks."""
FULL_MIN_NUM_PARAMS = 100_000_000
"""Default of --min_num_params, for layers of `FULL_HIDDEN` features."""
DATA_PARALLEL = ("ddp", "fsdp", "osdp")
AUTO_WRAP_POLICIES = ("module_wrap", "size_based", "none")
BACKWARD_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NONE")
DEFAULT_PREFETCH = BACKWARD_PREFETCH[0]
"""What FSDP2 does by itself."""


@dataclass(frozen=True)
class Options:
    """What is run; sizes are filled in."""

    data_parallel: str
    """One of `DATA_PARALLEL`."""
    compare: bool
    """Whether all three are run in turn."""
    batch_size: int
    """Samples of a rank in a step."""
    cpu_offload: bool
    forward_prefetch: bool
    backward_prefetch: str
    """One of `BACKWARD_PREFETCH`."""
    auto_wrap_policy: str
    """One of `AUTO_WRAP_POLICIES`."""
    min_num_params: int
    """Parameters of a unit, at least, under `size_based`."""
    sizes_units: bool
    """Whether that was given."""
    hidden: int
    """Features in and out of a layer."""
    layers: int
    warmup_steps: int
    """Steps before the memory is told."""
    steps: int
    """Steps that are timed, after those."""
    profile_dir: Path
    """Where every configuration gets a folder of traces."""
    trace: Path | None
    """Folder for the memory of a step and a trace, of every rank."""
    mem: str | None
    """Memory limit of a device that OSDP plans for."""

    @property
    def configuration(self) -> str:
        """Name of the folder of traces: strategy, batch, and what FSDP was told."""
        parts = [self.data_parallel, f"batch{self.batch_size}", f"{self.layers}x{self.hidden}"]
        if self.data_parallel == "osdp" and self.mem:
            parts.append(self.mem)
        if self.data_parallel == "fsdp":
            sized = str(self.min_num_params) if self.auto_wrap_policy == "size_based" else ""
            parts += [self.auto_wrap_policy + sized, self.backward_prefetch]
            parts += [name for name in ("forward_prefetch", "cpu_offload") if getattr(self, name)]
        return "-".join(parts)


def parse(arguments: Sequence[str], device_type: str) -> Options:
    """Return the options of a run on `cpu` or `cuda` ranks. Exits with 2 for what is wrong."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    hidden = given["hidden"] or (FULL_HIDDEN if device_type == "cuda" else CPU_HIDDEN)
    least = given["min_num_params"] or max(1, FULL_MIN_NUM_PARAMS * hidden**2 // FULL_HIDDEN**2)
    if given["warmup_steps"] < 2:
        parser.error("argument --warmup_steps: at least 2: DDP makes its final buckets in the second step")
    try:
        parse_bytes(given["mem"] or "1GB")
    except OsdpError as error:
        parser.error(f"argument --mem: {error}")
    found = given | {"hidden": hidden, "min_num_params": least, "sizes_units": given["min_num_params"] is not None}
    return Options(**found)


def without_effect(options: Options, device_type: str, ranks: int) -> Iterator[str]:
    """Yield a sentence for each flag that was given and changes nothing."""
    kind, names_backward = options.data_parallel, options.backward_prefetch != DEFAULT_PREFETCH
    if kind == "fsdp" or options.compare:
        if options.cpu_offload and device_type == "cpu":
            yield "--cpu_offload has no effect on CPU ranks: parameters and gradients are on the host already"
        if options.sizes_units and options.auto_wrap_policy != "size_based":
            yield f"--min_num_params has no effect with --auto_wrap_policy {options.auto_wrap_policy}"
        if options.auto_wrap_policy == "none" and (options.forward_prefetch or names_backward):
            yield "prefetch flags have no effect with --auto_wrap_policy none: one unit has no next one"
        elif ranks == 1 and (options.forward_prefetch or names_backward):
            yield "prefetch flags have no effect on one rank: nothing is gathered"
    else:
        given = {
            "--cpu_offload": options.cpu_offload,
            "--forward_prefetch": options.forward_prefetch,
            "--backward_prefetch": names_backward,
            "--auto_wrap_policy": options.auto_wrap_policy != AUTO_WRAP_POLICIES[0],
            "--min_num_params": options.sizes_units,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            why = "DDP does not shard" if kind == "ddp" else "OSDP plans that by itself"
            yield f"{flag} has no effect with --data_parallel {kind}: {why}"
    if options.mem and kind != "osdp" and not options.compare:
        yield f"--mem has no effect with --data_parallel {kind}: it is what OSDP plans for"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="linear_example/train.py", description="Trains a stack of linear layers on every rank of torchrun."
    )
    run = parser.add_mutually_exclusive_group()
    run.add_argument("--data_parallel", choices=DATA_PARALLEL, default="fsdp", help="default: fsdp")
    run.add_argument("--compare", action="store_true", help="run ddp, fsdp and osdp in turn and print a table")
    size = parser.add_argument_group("size")
    size.add_argument("--batch_size", type=_count, default=8192, help="samples of a rank in a step; default: 8192")
    features = f"features of a layer; default: {FULL_HIDDEN} on GPUs, {CPU_HIDDEN} on CPU ranks"
    size.add_argument("--hidden", type=_count, help=features)
    size.add_argument("--layers", type=_count, default=8, help="default: 8")
    _add_fsdp(parser.add_argument_group("fsdp"))
    osdp = parser.add_argument_group("osdp")
    osdp.add_argument("--mem", help="memory limit of a device, such as 12GB; default: all that it has")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--warmup_steps", type=_count, default=3, help="at least 2; default: 3")
    steps.add_argument("--steps", type=_count, default=10, help="steps that are timed; default: 10")
    looked = "folder for a picture of each rank's memory over a step, and a trace of another step"
    steps.add_argument("--trace", type=Path, metavar="FOLDER", help=looked)
    folder = "where each configuration gets a folder of traces; default: profiles"
    steps.add_argument("--profile_dir", type=Path, default=Path("profiles"), help=folder)
    return parser


def _add_fsdp(group: argparse._ArgumentGroup) -> None:
    policy = "a unit for each layer, for layers up to a size together, or for all; default: module_wrap"
    group.add_argument("--auto_wrap_policy", choices=AUTO_WRAP_POLICIES, default="module_wrap", help=policy)
    least = f"parameters of a unit, at least, under size_based; default: {FULL_MIN_NUM_PARAMS}, "
    least += f"in proportion for layers of other than {FULL_HIDDEN} features"
    group.add_argument("--min_num_params", type=_count, help=least)
    forward = "gather the next unit before this one computes"
    group.add_argument("--forward_prefetch", action="store_true", help=forward)
    backward = "gather the next unit before this one computes its gradients, after it but before they are reduced, "
    backward += "or when it is needed; default: BACKWARD_PRE"
    group.add_argument("--backward_prefetch", choices=BACKWARD_PREFETCH, default="BACKWARD_PRE", help=backward)
    offload = "keep parameters and gradients on the host"
    group.add_argument("--cpu_offload", action="store_true", help=offload)


def _count(text: str) -> int:
    """Return a number of things, of which there is at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
