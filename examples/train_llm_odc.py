"""FSDP against ODC on samples of uneven length: `sh scripts/script_llm_odc_training.sh`, or `--help`.

A small Llama on ranks of this machine, GPUs or the CPU. Lengths are long-tailed like LongAlign's, or those in a file,
and scaled down to --max-length. Both train on the same samples in the same packs, step by step in turn. See
docs/llm-odc.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from osdp.cli.exits import FAULT, guarded
from osdp.cli.rank_process import end_of_rank, start_ranks
from osdp.models.config import LlamaConfig
from osdp.plots import check_picture, plot_timelines
from osdp.training.devices import chosen_device
from osdp.training.launch import Nodes, is_rank
from osdp.uneven_lengths.lengths import LONGALIGN, LogNormal, read_lengths, scale_lengths
from osdp.uneven_lengths.packing import METHODS
from osdp.zoo import model_card, read_model_card
from profiler.errors import OsdpError

ALIKE: dict[str, Any] = {"heads": 4, "key_value_heads": 2, "rope_base": 1e4, "tied_head": False}
MODELS = {
    "tiny": LlamaConfig(256, 65536, hidden_size=32, layers=2, intermediate_size=96, **ALIKE),
    "small": LlamaConfig(512, 65536, hidden_size=128, layers=4, intermediate_size=384, **ALIKE),
}
CONTESTANTS = {"both": ("FSDP", "ODC"), "fsdp": ("FSDP",), "odc": ("ODC",)}
LOSS_TOLERANCE = 1e-4
"""Relative; over some steps Adam makes more of a difference in the last bit."""
TIMEOUT_S = 300.0


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number that is no smaller."""

    def read(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least {least}")
        return int(text)

    return read


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="script_llm_odc_training.sh", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="small", help=f"{', '.join(MODELS)}, or a Llama of the zoo or of a file (default small)")
    add("--nproc", type=at_least(2), default=2, help="ranks on this machine, one process each (default 2)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: GPUs if each rank has one")
    add("--steps", type=at_least(1), default=12, help="steps of each, of which the first is not timed (default 12)")
    add("--samples", type=at_least(1), default=16, help="samples of all ranks in a step (default 16)")
    add("--max-length", type=at_least(2), default=512, help="tokens of the longest sample and of a pack (default 512)")
    add("--sigma", type=float, help=f"of the log-normal; 0: no spread (default {LONGALIGN.sigma:.2f}, the fit)")
    add("--lengths", type=Path, metavar="FILE", help="one length in each line, instead of the log-normal")
    add("--packing", choices=METHODS, default="none", help="how samples become micro-batches (default none)")
    add("--only", choices=("fsdp", "odc"), default="both", help="train one of the two")
    add("--seed", type=at_least(0), default=0, help="of parameters, lengths and tokens (default 0)")
    add("--trace", type=Path, metavar="FOLDER", help="of each rank, its memory over step 3 and a trace of step 4")
    add("--timeline", type=Path, metavar="PICTURE", help="draw the last step: .png, .svg or .pdf")
    add("--json", action="store_true", help="print the result as JSON on stdout, progress on stderr")
    return parser.parse_args()


def sizes(spec: str) -> LlamaConfig:
    """Return the sizes of a model; raises OsdpError if it is none, or no Llama."""
    if spec in MODELS:
        return MODELS[spec]
    card = read_model_card(Path(spec)) if spec.endswith((".yaml", ".yml")) else model_card(spec)
    found = card.sizes()
    if not isinstance(found, LlamaConfig):
        got, expected = f"{spec}, of family {card.family}", f"{', '.join(MODELS)}, or a model of family llama"
        raise OsdpError("this example trains Llamas", got=got, expected=expected)
    return found


def lengths(options: argparse.Namespace) -> LogNormal | tuple[int, ...]:
    """Return where lengths come from, scaled down; raises OsdpError."""
    if options.lengths is not None and options.sigma is not None:
        raise OsdpError("--sigma has no effect on the lengths of a file", advice="leave out one of the two")
    if options.lengths is not None:
        return tuple(scale_lengths(read_lengths(options.lengths), options.max_length))
    fit = LONGALIGN.scaled(options.max_length)
    return fit if options.sigma is None else replace(fit, sigma=options.sigma)


def main() -> None:
    """Check what the user gave and start the ranks, or be one of them."""
    options = parse()
    if is_rank():
        with end_of_rank():
            train(options)
        return
    sizes(options.model)
    lengths(options)
    if options.timeline is not None:
        check_picture(options.timeline, "--timeline")
    if options.trace is not None:
        check_trace(options)
    device = chosen_device(options.device, options.nproc)
    start_ranks(options.nproc, Nodes(), device, TIMEOUT_S, program=(str(Path(__file__).resolve()),))


def check_trace(options: argparse.Namespace) -> None:
    """Raise OsdpError if traces cannot be made."""
    from osdp.tracing import TRACE_STEP, ready_folder

    if options.steps <= TRACE_STEP:
        what, expected = "too few steps for a trace, which are not timed", f"at least {TRACE_STEP + 1}"
        raise OsdpError(what, got=f"--steps {options.steps}", expected=expected)
    ready_folder(options.trace)


def train(options: argparse.Namespace) -> None:
    """Be one rank; the first one prints."""
    from osdp.training.process_group import joined
    from osdp.uneven_lengths.fsdp_vs_odc import Setting, compare

    setting = Setting(
        sizes(options.model),
        lengths(options),
        options.max_length,
        options.samples,
        options.steps,
        options.packing,
        CONTESTANTS[options.only],
        options.seed,
        trace=options.trace,
    )
    with joined(chosen_device(options.device, options.nproc), TIMEOUT_S) as ranks:
        progress = sys.stderr if options.json else sys.stdout
        rounds = []
        if ranks.rank == 0:
            print(described(options), file=progress, flush=True)
        for one in compare(setting):
            rounds.append(one)
            if ranks.rank == 0:
                print(progress_line(one), file=progress, flush=True)
        if ranks.rank == 0:
            if options.timeline is not None:
                found = {name: outcome.timelines for name, outcome in rounds[-1].outcomes.items()}
                plot_timelines(options.timeline, found, f"step {len(rounds)}, packing {options.packing}")
            result = summary(options, ranks.device.type, rounds)
            print(json.dumps(result) if options.json else report(result))
    check_losses(max(one.loss_difference for one in rounds), ranks.rank)


def described(options: argparse.Namespace) -> str:
    """Say where lengths come from."""
    if options.lengths is not None:
        return f"lengths from {options.lengths}, scaled so that none has more than {options.max_length} tokens"
    fit = lengths(options)
    assert isinstance(fit, LogNormal)
    like = "like LongAlign's" if options.sigma is None else "median like LongAlign's, sigma given"
    return (
        f"log-normal lengths, median {fit.median:.0f} tokens, sigma {fit.sigma:.2f}: {like}, "
        f"scaled from at most {LONGALIGN.maximum} tokens to {fit.maximum}"
    )


def check_losses(difference: float, rank: int) -> None:
    """End with exit status 1 if losses that must be equal are not."""
    if not difference <= LOSS_TOLERANCE:
        if rank == 0:
            print(f"osdp: the losses of FSDP and ODC differ by {difference:.1e} of their value", file=sys.stderr)
        raise SystemExit(FAULT)


def progress_line(one: Any) -> str:
    """Say how a step went."""
    counts = "+".join(map(str, one.dealt.counts))
    told = [f"step {one.number:3d}: {sum(one.lengths):6d} tokens in {counts} micro-batches"]
    for name, found in one.outcomes.items():
        bubble = "/".join(f"{timeline.bubble_s:.3f}" for timeline in found.timelines)
        told.append(f"{name} loss {found.loss:.5f}, {found.step_s:.3f} s, waiting {bubble} s")
    return " | ".join(told)


def summary(options: argparse.Namespace, device: str, rounds: list[Any]) -> dict[str, Any]:
    """Return the result; times are of all steps but the first and those that were looked into."""
    timed = [one for one in rounds[1:] if not one.is_slowed] or rounds
    both = len(rounds[0].outcomes) == 2
    ratios = [one.outcomes["FSDP"].step_s / one.outcomes["ODC"].step_s for one in timed] if both else []
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (None, None, None)
    by_name = {
        name: {
            "step_s": median(one.outcomes[name].step_s for one in timed),
            "bubble_s": [
                fmean(one.outcomes[name].timelines[rank].bubble_s for one in timed) for rank in range(options.nproc)
            ],
            "losses": [one.outcomes[name].loss for one in rounds],
        }
        for name in rounds[0].outcomes
    }
    return {
        "schema": "osdp.llm-odc/1",
        "ranks": options.nproc,
        "device": device,
        "packing": options.packing,
        "steps": len(rounds),
        "lengths": [list(one.lengths) for one in rounds],
        "micro_batches": [list(one.dealt.counts) for one in rounds],
        "contestants": by_name,
        "speed_up": {"median": median(ratios), "low": low, "high": high} if both else None,
        "speed_up_by_cost": fmean(one.dealt.cost_in_step / one.dealt.cost_alone for one in timed),
        "loss_difference": max(one.loss_difference for one in rounds),
    }


def report(result: dict[str, Any]) -> str:
    """Return the result in words."""
    lines = [""]
    for name, found in result["contestants"].items():
        waits = ", ".join(f"rank {rank} {bubble_s:.3f} s" for rank, bubble_s in enumerate(found["bubble_s"]))
        lines.append(f"{name:5s} {found['step_s']:.3f} s a step (median); waiting a step (mean): {waits}")
    if speed := result["speed_up"]:
        spread = f" (quartiles {speed['low']:.2f} to {speed['high']:.2f})" if speed["low"] is not None else ""
        lines.append(f"ODC is {speed['median']:.2f} times as fast{spread}")
        lines.append(f"if the samples' FLOPs were all that takes time: {result['speed_up_by_cost']:.2f} times")
        lines.append(f"losses differ by at most {result['loss_difference']:.1e} of their value")
    return "\n".join(lines)


if __name__ == "__main__":
    guarded(main)()
