"""fairscale's own FSDP against OSDP's runtime under the same `auto_wrap`: `python scripts/bench/fairscale_fsdp.py`.

    fairscale    its FullyShardedDataParallel, the model itself wrapped as well
    none, ...    osdp.compat.fairscale.FSDP with what gen_fsdp_args gives for it

One rank for each GPU of this machine; `--nodes 2` lets them stand for two nodes, which tells the settings apart.
All train the same model, with tied weights untied because fairscale's wrapper takes them apart, in fp32 by
Adam on the same random batches.  First each is alone, for its peak memory (what torch's allocator handed out, on the
fullest rank).  Then all live in the same processes; a round is one step of each, every second round in reverse order,
and a time is from a barrier to the end on the slowest rank.  Ratios are of one round's times: the median, (its
quartiles) and [what holds the true median with 95 %].  Losses of the first step must be equal to 1e-4.

With `--device cpu` the program can be tried on gloo ranks, without fairscale's own, which needs CUDA's streams.
"""

import functools
import gc
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from _shared import MIB, Training, add_integers, spawn_ranks, train_in_turns, with_interval
from torch import Tensor, nn

from osdp.cli.exits import status_of
from osdp.compat.fairscale import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, gen_fsdp_args
from osdp.compat.seed_groups import SETTINGS
from osdp.training.config import load_config
from osdp.training.job import model_and_task
from osdp.training.process_group import Ranks
from osdp.training.sentence_pairs import MadeUp, SentencePairs
from osdp.training.tasks import batch
from osdp.zoo import load_model
from profiler.errors import OsdpError
from runtime.parameter_places import registered_parameters

Wrap = Callable[[nn.Module], nn.Module]


def policy(options: Namespace) -> Callable[..., bool]:
    """Return which modules are wrapped."""
    return functools.partial(default_auto_wrap_policy, min_num_params=options.large)


def fairscale_own(model: nn.Module, options: Namespace) -> nn.Module:
    """Wrap as fairscale's documentation does; what is left of the model is wrapped with the model itself."""
    from fairscale.nn import FullyShardedDataParallel

    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        wrapped: nn.Module = auto_wrap(model.cuda(), auto_wrap_policy=policy(options))
    own = isinstance(wrapped, FullyShardedDataParallel)
    return wrapped if own else FullyShardedDataParallel(wrapped)


def by_osdp(setting: str, model: nn.Module, options: Namespace) -> nn.Module:
    """Wrap by OSDP's runtime."""
    fsdp_args = gen_fsdp_args(options.nodes, options.ranks // options.nodes, setting, options.model)
    with enable_wrap(wrapper_cls=FSDP, **fsdp_args):
        return auto_wrap(model, auto_wrap_policy=policy(options))


def contestants(options: Namespace) -> dict[str, Wrap]:
    """Return who takes part; ratios are over the first."""
    settings = SETTINGS if options.nodes > 1 and options.ranks > options.nodes else ("none",)
    found = {f"OSDP, {setting}": functools.partial(by_osdp, setting, options=options) for setting in settings[::-1]}
    own: dict[str, Wrap] = {"fairscale": functools.partial(fairscale_own, options=options)}
    return own | found if options.device == "cuda" else dict(found)


def training(wrap: Wrap, options: Namespace) -> Training:
    """Return the model, wrapped, in training."""
    torch.manual_seed(0)
    model = wrap(untied(load_model(options.model, sequence_length=options.seq).build()))
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-4))


def untied(model: nn.Module) -> nn.Module:
    """Give every place of a tied weight its own copy."""
    for registration in registered_parameters(model).values():
        for module, name in registration.places[1:]:
            setattr(module, name, nn.Parameter(registration.tensor.detach().clone()))
    return model


# --- measurement -----------------------------------------------------------------------------


def measure(ranks: Ranks, options: Namespace) -> None:
    """Measure on this rank; rank 0 prints."""
    task = SentencePairs(MadeUp(), options.seq, 0)

    def inputs(number: int) -> tuple[Any]:
        first = ((number + options.warm_up) * ranks.world_size + ranks.rank) * options.batch
        tokens, keywords = ranks.tensors(batch(task, range(first, first + options.batch)))
        return ([((tokens,), keywords)],)

    wraps = contestants(options)
    peaks_bytes = [peak_bytes(wrap, inputs, ranks, options) for wrap in wraps.values()]
    runners = [training(wrap, options) for wrap in wraps.values()]
    found, _ = train_in_turns(options, runners, inputs, 1e-4, checked=slice(1))
    if ranks.rank == 0:
        report(list(wraps), peaks_bytes, found[options.warm_up :, :, 0], options)


def peak_bytes(wrap: Wrap, inputs: Callable[[int], tuple[Any]], ranks: Ranks, options: Namespace) -> int:
    """Return the peak of two steps of a contestant that is alone, on the fullest rank; 0 on a CPU."""
    if options.device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    runner = training(wrap, options)
    for number in range(2):
        runner.timed_step(*inputs(number))
    found: int = ranks.maximum([torch.cuda.max_memory_allocated()])[0]
    del runner
    gc.collect()
    return found


def report(names: list[str], peaks_bytes: list[int], seconds: Tensor, options: Namespace) -> None:
    """Print the table; `seconds` (rounds, contestants) are of the slowest rank."""
    print(f"{'':37s}  s a step  samples/s  peak MiB  samples/s, it over {names[0]}")
    for index, name in enumerate(names):
        step_s = median(seconds[:, index].tolist())
        peak = f"{peaks_bytes[index] / MIB:8.0f}" if peaks_bytes[index] else f"{'-':>8s}"
        ratio = with_interval((seconds[:, 0] / seconds[:, index]).tolist()) if index else ""
        speed = options.ranks * options.batch / step_s
        print(f"{name:37s}  {step_s:8.4f}  {speed:9.1f}  {peak}  {ratio}".rstrip(), flush=True)


def rank_main(rank: int, options: Namespace) -> None:
    """Be one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    measure(Ranks(rank, options.ranks, device), options)
    gc.collect()


def read_options() -> Namespace:
    """Parse the command line; raises OsdpError where there are no GPUs for it."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="bert-large", help="a BERT: its name or file (default bert-large)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    add_integers(
        parser,
        (
            ("nodes", 1, "nodes that the ranks stand for"),
            ("ranks", 0, "ranks (default one for each GPU; 4 on a CPU)"),
            ("batch", 8, "samples of a rank in a step"),
            ("seq", 128, "tokens a sample"),
            ("large", 1_000_000, "parameters from which a module is wrapped"),
            ("rounds", 60, "measured steps of each contestant"),
            ("warm-up", 5, "steps of each before those"),
        ),
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        what = "fairscale's own FSDP needs GPUs, and torch sees none"
        advice = "--device cpu tries the program without fairscale's own"
        raise OsdpError(what, expected="one GPU or more", advice=advice)
    ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 4)
    if options.device == "cuda" and ranks > torch.cuda.device_count():
        expected = f"{torch.cuda.device_count()} at most"
        raise OsdpError("there are fewer GPUs than ranks", got=f"{ranks} ranks", expected=expected)
    for name, least in (("nodes", 1), ("ranks", 0), ("batch", 1), ("large", 1), ("rounds", 2), ("warm_up", 1)):
        if getattr(options, name) < least:
            what = f"--{name.replace('_', '-')} is too small"
            raise OsdpError(what, got=str(getattr(options, name)), expected=f"{least} or more")
    if ranks % options.nodes:
        raise OsdpError("the ranks do not divide evenly into nodes", got=f"{ranks} ranks, {options.nodes} nodes")
    options.ranks = ranks
    return options


def main() -> None:
    """Check what is asked for and start the ranks. Raises OsdpError."""
    options = read_options()
    model_and_task(load_config("bert", {"model": options.model, "seq": options.seq}))
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU with {os.cpu_count()} cores"
    print(f"{date.today()}, torch {torch.__version__}, fairscale {version('fairscale')}; {device}")
    size = f"{options.ranks} ranks as {options.nodes} nodes, {options.batch} x {options.seq} tokens a rank"
    wrapped = f"modules from {options.large:,} parameters"
    print(f"{options.model}, {size}, fp32, Adam; {wrapped}; {options.rounds} rounds", flush=True)
    spawn_ranks(rank_main, options.ranks, options, "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")


if __name__ == "__main__":
    sys.exit(status_of(main))
