"""The FSDP tutorial's linear layers under DDP, FSDP2 or OSDP, by torchrun; docs/tutorial.md has the commands."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import torch

from linear_example.flags import DATA_PARALLEL, FULL_HIDDEN, Options, parse, without_effect
from linear_example.steps import Result, run
from linear_example.table import table
from osdp.cli.exits import status_of
from osdp.training.launch import is_rank
from osdp.training.process_group import Ranks, joined
from profiler.errors import OsdpError

TIMEOUT_S = 600


def main(arguments: list[str]) -> None:
    """Run what the flags say on this rank. Raises OsdpError."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device_type)
    if not is_rank():
        advice = "torchrun --nproc_per_node 2 linear_example/train.py"
        raise OsdpError("this is one rank of several", got="no RANK in the environment", advice=advice)
    with joined(device_type, TIMEOUT_S) as ranks:
        if ranks.rank == 0:
            say_first(options, ranks)
        kinds = DATA_PARALLEL if options.compare else (options.data_parallel,)
        results = [run_one(replace(options, data_parallel=kind), ranks) for kind in kinds]
        if ranks.rank == 0:
            tell(table(results, options))


def run_one(options: Options, ranks: Ranks) -> Result:
    """Run and tell; what the run held is free afterwards. A collective call."""
    if ranks.rank == 0:
        tell(f"--- {options.data_parallel}")
    result = run(options, ranks, tell)
    if ranks.rank == 0:
        losses = " ".join(f"{loss:.6f}" for loss in result.losses)
        tell(f"losses {losses}\ntraces of {options.data_parallel} in {result.traces}")
        if result.plan is not None:
            tell("plan   " + ", ".join(f"{name}: {choice}" for name, choice in result.plan.choices.items()))
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return result


def tell(told: object) -> None:
    """Print a line from any rank; in one piece, so that lines of several ranks do not mix."""
    sys.stdout.write(f"{told}\n")
    sys.stdout.flush()


def say_first(options: Options, ranks: Ranks) -> None:
    """Print what is run, and warn of flags that change nothing."""
    size = f"{options.layers} layers of {options.hidden} features, {options.batch_size} samples a rank"
    scaled = "" if options.hidden == FULL_HIDDEN else f"; scaled down: the tutorial's have {FULL_HIDDEN} features"
    tell(f"ranks: {ranks.world_size} on {ranks.device.type}: {size}{scaled}")
    for sentence in without_effect(options, ranks.device.type, ranks.world_size):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(status_of(lambda: main(sys.argv[1:])))
