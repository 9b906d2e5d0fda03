"""What running a plan costs over PyTorch by hand: `python scripts/bench/step_overhead.py [shard] [replicate]`.

    shard       an all-`shard` plan run by OSDP, against `fully_shard` called by hand on the same modules
    replicate   an all-`replicate` plan run by OSDP, against DistributedDataParallel with its defaults,
                and against what composes: `fully_shard` on an (N, 1) mesh, and `replicate`

N ranks on this machine's CPU train a small GPT-2 in fp32 with Adam.  All contestants of a case live in
the same processes, start from the same parameters and see the same batches.  A round is one step of
each, every step from a barrier to the end on the slowest rank; every second round goes backwards, so that
nobody is always first.  Ratios are of one round's times, so that a slow moment of the machine hits all of
them: the median of all rounds, (its quartiles) and [what holds the true median with 95 %].  CPU seconds
of a rank's process are given too: other programs on the machine hardly change them.  Losses must be
equal to 1e-5, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from _shared import add_integers, check_losses, machine, spawn_ranks, take_turns, with_interval
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate  # not public; run on torch 2.13
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from osdp import OSDP
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2
from osdp.planning.rank_grid import cluster_of_ranks
from osdp.planning.request import Request
from osdp.training.choose_plan import uniform_plan
from planner.cost.workload import Workload
from profiler.model_source import Inputs, ModelSource
from profiler.trace.trace import trace_model

Wrap = Callable[[GPT2], nn.Module]


@dataclass(frozen=True)
class Options:
    """What is run; see `--help`."""

    cases: list[str]
    ranks: int
    rounds: int
    warm_up: int
    hidden: int
    layers: int
    tokens: int
    batch: int

    def model(self) -> GPT2:
        """Return the model, with the same parameters every time."""
        torch.manual_seed(0)
        return GPT2(GPT2Config(512, self.tokens, self.hidden, self.layers, heads=4))


# --- contestants -----------------------------------------------------------------------------


def example_inputs(model: nn.Module, batch: int) -> Inputs:
    """Return arguments of forward."""
    assert isinstance(model, GPT2)
    return model.example_inputs(batch)


def by_plan(options: Options, strategy: str) -> Wrap:
    """Return how OSDP wraps a model under a plan with one strategy for everything."""
    source = ModelSource("gpt2", options.model, example_inputs, options.tokens)
    load = Workload(cluster_of_ranks(None)[0], "adam", "fp32", options.batch)
    plan = uniform_plan(trace_model(source), load, Request(limit_bytes=2**40), strategy)
    return lambda model: OSDP(model, plan)


def on_column_mesh(model: GPT2) -> nn.Module:
    """Call FSDP2 on an (N, 1) mesh: every shard is whole, gradients are all-reduced."""
    return by_hand(model, init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")))


def by_hand(model: GPT2, mesh: DeviceMesh | None = None) -> nn.Module:
    """Call FSDP2 as a user would to get the units of an all-`shard` plan: same modules, same groups."""
    fully_shard([model.wte, model.lm_head], mesh=mesh)
    for module in (model.wpe, *model.blocks, model.norm, model):
        fully_shard(module, mesh=mesh)
    return model


def contestants(case: str, options: Options) -> dict[str, Wrap]:
    """Return who takes part, OSDP first."""
    if case == "shard":
        return {"OSDP": by_plan(options, "shard"), "fully_shard by hand": by_hand}
    return {
        "OSDP": by_plan(options, "replicate"),
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard on (N, 1)": on_column_mesh,
        "composable replicate": replicate,
    }


class Contestant:
    """A wrapped model in training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(self, tokens: Tensor) -> tuple[float, float, float]:
        """Train on (batch, sequence) tokens; return wall and CPU seconds on this rank, and the loss."""
        dist.barrier()
        started, started_cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        loss = self.model(tokens, labels=tokens)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - started, time.process_time() - started_cpu, loss.item()


# --- measurement -----------------------------------------------------------------------------


def run_case(case: str, options: Options) -> None:
    """Run one case on this rank; rank 0 prints it."""
    runners = {name: Contestant(wrap(options.model())) for name, wrap in contestants(case, options).items()}
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)
    seconds = torch.zeros(2, options.rounds, len(runners), dtype=torch.float64)
    for number in range(-options.warm_up, options.rounds):
        tokens = torch.randint(512, (options.batch, options.tokens), generator=generator)
        results = torch.tensor(take_turns(number, list(runners.values()), Contestant.step, tokens))
        check_losses(results[:, 2], 1e-5)
        if number >= 0:
            seconds[:, number] = results[:, :2].T
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        report(case, list(runners), seconds, options)


def report(case: str, names: list[str], seconds: Tensor, options: Options) -> None:
    """Print times and ratios; `seconds` (wall and CPU, rounds, contestants), of the slowest rank."""
    print(f"\nall-{case} plan, {options.ranks} ranks, {options.rounds} rounds")
    print(f"{'':23s}  s a step  samples/s  {'samples/s, OSDP over it':39s}  CPU s a step, it over OSDP")
    for index, name in enumerate(names):
        step_s = median(seconds[0, :, index].tolist())
        speed = options.ranks * options.batch / step_s
        ratios = [with_interval((kind[:, index] / kind[:, 0]).tolist()) if index else "" for kind in seconds]
        print(f"{name:23s}  {step_s:8.4f}  {speed:9.1f}  {ratios[0]:39s}  {ratios[1]}".rstrip(), flush=True)


def rank_main(rank: int, options: Options) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    for case in options.cases:
        run_case(case, options)


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="shard, replicate (default both)")
    add_integers(
        parser,
        (
            ("ranks", 2, "processes, one thread each"),
            ("rounds", 60, "measured steps of each contestant"),
            ("warm-up", 5, "steps of each before those"),
            ("hidden", 256, "width of the GPT-2"),
            ("layers", 4, "blocks of the GPT-2"),
            ("tokens", 64, "tokens a sample"),
            ("batch", 8, "samples of a rank in a step"),
        ),
    )
    options = Options(**vars(parser.parse_args()))
    known = ["shard", "replicate"]
    if unknown := set(options.cases) - set(known):
        parser.error(f"unknown case: got {', '.join(sorted(unknown))}, expected {', '.join(known)}")
    options = replace(options, cases=options.cases or known)
    parameters = sum(parameter.numel() for parameter in options.model().parameters())
    print(f"{machine()}, gloo")
    batch = f"{options.batch} x {options.tokens} tokens a rank"
    print(f"GPT-2 of {parameters:,} parameters, fp32, Adam, {batch}", flush=True)
    spawn_ranks(rank_main, options.ranks, options)


if __name__ == "__main__":
    main()
