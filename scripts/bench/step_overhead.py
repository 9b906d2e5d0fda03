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

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _shared import Training, add_integers, machine, spawn_ranks, train_in_turns, with_interval
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
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

Wrap = Callable[[GPT2], nn.Module]


def build(options: Namespace) -> GPT2:
    """Return the model, with the same parameters every time."""
    torch.manual_seed(0)
    return GPT2(GPT2Config(512, options.tokens, options.hidden, options.layers, heads=4))


# --- contestants -----------------------------------------------------------------------------


def by_plan(options: Namespace, strategy: str) -> Wrap:
    """Return how OSDP wraps a model under a plan with one strategy for everything."""
    inputs: Any = GPT2.example_inputs
    source = ModelSource("gpt2", partial(build, options), inputs, options.tokens)
    graph = trace_model(source)
    load = Workload.of(graph, cluster_of_ranks(None)[0], "adam", options.batch)
    plan = uniform_plan(graph, load, Request(limit_bytes=2**40), strategy)
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


def contestants(case: str, options: Namespace) -> dict[str, Wrap]:
    """Return who takes part, OSDP first."""
    if case == "shard":
        return {"OSDP": by_plan(options, "shard"), "fully_shard by hand": by_hand}
    return {
        "OSDP": by_plan(options, "replicate"),
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard on (N, 1)": on_column_mesh,
        "composable replicate": replicate,
    }


# --- measurement -----------------------------------------------------------------------------


def run_case(case: str, options: Namespace) -> None:
    """Run one case on this rank; rank 0 prints it."""
    wraps = contestants(case, options)
    models = [wrap(build(options)) for wrap in wraps.values()]
    runners = [Training(model, torch.optim.Adam(model.parameters(), lr=1e-3)) for model in models]
    generator = torch.Generator().manual_seed(dist.get_rank() + 1)

    def inputs(number: int) -> tuple[Any]:
        tokens = torch.randint(512, (options.batch, options.tokens), generator=generator)
        return ([((tokens,), {"labels": tokens})],)

    found, _ = train_in_turns(options, runners, inputs, 1e-5)
    if dist.get_rank() == 0:
        report(case, list(wraps), found[options.warm_up :], options)


def report(case: str, names: list[str], found: Tensor, options: Namespace) -> None:
    """Print times and ratios; `found` (rounds, contestants, wall and CPU seconds and loss), of the slowest rank."""
    print(f"\nall-{case} plan, {options.ranks} ranks, {options.rounds} rounds")
    print(f"{'':23s}  s a step  samples/s  {'samples/s, OSDP over it':39s}  CPU s a step, it over OSDP")
    for index, name in enumerate(names):
        step_s = median(found[:, index, 0].tolist())
        speed = options.ranks * options.batch / step_s
        over = found[:, index] / found[:, 0]
        ratios = [with_interval(over[:, kind].tolist()) if index else "" for kind in (0, 1)]
        print(f"{name:23s}  {step_s:8.4f}  {speed:9.1f}  {ratios[0]:39s}  {ratios[1]}".rstrip(), flush=True)


def rank_main(rank: int, options: Namespace) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    for case in options.cases:
        run_case(case, options)


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
    options = parser.parse_args()
    known = ["shard", "replicate"]
    if unknown := set(options.cases) - set(known):
        parser.error(f"unknown case: got {', '.join(sorted(unknown))}, expected {', '.join(known)}")
    options.cases = options.cases or known
    parameters = sum(parameter.numel() for parameter in build(options).parameters())
    print(f"{machine()}, gloo")
    batch = f"{options.batch} x {options.tokens} tokens a rank"
    print(f"GPT-2 of {parameters:,} parameters, fp32, Adam, {batch}", flush=True)
    spawn_ranks(rank_main, options.ranks, options)


if __name__ == "__main__":
    main()
