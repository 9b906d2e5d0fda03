"""Training of `small_models.py` on ranks under several kinds of plans, against the same training in one process.

The one process has plain PyTorch.  Per rank there is a copy of the model, which computes in the precision asked for;
gradients are averaged over the copies in fp32 and step the parameters that they are copied from.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from parity import cluster_of
from ranks import RankError, run_ranks
from small_models import model
from thoroughness import STEPS
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only
from toys import plan_of
from traced_once import trace_once

from osdp.models.user_factory import source_of
from osdp.planning.request import Request, plan_graph
from planner.model.fsdp_units import can_hold
from planner.plan import Plan
from planner.strategies.registry import known_strategies
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.metered_pass import find_loss
from runtime.failures.rank_agreement import from_rank_0
from runtime.optimizers import OPTIMIZERS

BATCH, SEED = 2, 3
GRIDS = {2: (1, 2), 4: (2, 2)}
"""By number of ranks: nodes, and ranks of each."""


def batch(source: ModelSource, module: nn.Module, step: int, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of forward, others for every step and rank."""
    torch.manual_seed(1000 * step + rank)
    return source.example_inputs(module, BATCH)


def built(source: ModelSource) -> nn.Module:
    """Return the model that every training starts from."""
    torch.manual_seed(SEED)
    return source.build()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every training; gradients of nothing but rounding do not move a parameter far."""
    return OPTIMIZERS["fused_adam"]([one for one in module.parameters() if one.requires_grad], lr=1e-2, eps=1e-3)


# --- in one process ---------------------------------------------------------------------------


def train_alone(source: ModelSource, world_size: int, precision: str) -> dict[str, Tensor]:
    """Return the state dict after the steps; buffers are those of rank 0."""
    module = built(source)
    copies = [
        lowered(copy.deepcopy(module)) if precision == "bf16" else copy.deepcopy(module) for _ in range(world_size)
    ]
    optimizer, parameters = optimizer_of(module), list(module.parameters())
    for step in range(STEPS):
        for rank, one in enumerate(copies):
            for own, parameter in zip(one.parameters(), parameters, strict=True):
                own.data.copy_(parameter.data)
                own.grad = None
            args, kwargs = batch(source, module, step, rank)
            find_loss(one(*args, **kwargs))[0].backward()
        for parameter, *owns in zip(parameters, *(one.parameters() for one in copies), strict=True):
            grads = [own.grad.to(torch.promote_types(own.dtype, torch.float32)) for own in owns if own.grad is not None]
            parameter.grad = None
            if grads:  # in the parameter's strides, by which fused optimizers go
                parameter.grad = torch.empty_like(parameter).copy_(torch.stack(grads).sum(0).div(world_size))
        optimizer.step()
    state: dict[str, Tensor] = copies[0].state_dict()
    return {**state, **{name: one.detach() for name, one in module.named_parameters(remove_duplicate=False)}}


def lowered(module: nn.Module) -> nn.Module:
    """Have a module compute in bf16, as docs/runtime.md says of `precision: bf16`."""

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)

    def cast_inputs(one: nn.Module, dtype: torch.dtype) -> None:
        one.register_forward_pre_hook(lambda _, *given: cast(given, dtype), with_kwargs=True)

    inside: list[str] = []
    for path, one in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        own = list(one.parameters(recurse=False))
        if is_parametrized(one):
            inside.append(path)
            cast_inputs(one, next(one.parameters()).dtype)
            one.register_forward_hook(lambda _, given, output: cast(output, torch.bfloat16))
        elif not isinstance(one, nn.modules.batchnorm._NormBase):
            for parameter in (parameter for parameter in own if parameter.dim()):
                parameter.data = cast(parameter.data, torch.bfloat16)
            if own or not path:
                cast_inputs(one, torch.bfloat16)
    return module


# --- on ranks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model that is trained on a number of ranks."""

    name: str
    source: ModelSource
    module: nn.Module
    """One that makes example inputs."""
    ranks: int

    def example_inputs(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return self.source.example_inputs(self.module, size)

    def graph(self, precision: str = "fp32") -> ModelGraph:
        """Return the traced model; OSDP finds it traced."""
        named = source_of(self.source.build, self.name, None, self.example_inputs)
        return trace_once(named, precision, "cpu", BATCH, "", 1.0)

    def plan(self, choices: dict[str, str], precision: str = "fp32", *, recomputes: bool = False) -> Plan:
        """Return a plan with these strategies, and `shard` for the rest."""
        graph = self.graph(precision)
        blocks = tuple({block.name: block for block in graph.blocks}.values()) if recomputes else ()
        split = {
            graph.operators[i].block for i, one in enumerate(graph.operators) if "split" in choices.get(one.name, "")
        }
        split_names = {graph.blocks[block].name for block in split if block is not None}
        selective = tuple(b.name for b in blocks[1::2] if b.selective_rerun and b.name not in split_names)
        others = [block for block in blocks if block.name not in selective]
        offloaded = tuple(b.name for b in others if precision == "bf16" and b.offloadable_bytes(1))
        recomputed = tuple(block.name for block in others if block.name not in offloaded)
        return plan_of(
            self.module, "shard", choices, recomputed=recomputed, selective=selective, offloaded=offloaded,
            ranks=GRIDS[self.ranks],
            graph=graph,
        )  # fmt: skip

    def mixture(self, kind: str, *, splits: bool = True) -> dict[str, str]:
        """Return a random strategy for every operator, some linear layers cut in two: none in bf16.

        There the sums of slices are rounded otherwise.
        """
        draw, choices = Random(f"{self.name} {self.ranks} {kind}"), {}
        known = [one for one in known_strategies(cluster_of(*GRIDS[self.ranks])) if not one.offload]
        for operator in self.graph().operators:
            fitting = [str(one) for one in known if can_hold(operator, one)]
            is_cut = splits and operator.kind == "Linear" and len(operator.modules) == 1 and draw.random() < 0.3
            is_cut &= all(parameter.element_bytes >= 4 for parameter in operator.parameters)
            slices = draw.choices(fitting, k=2 if is_cut else 1)
            choices[operator.name] = f"split({', '.join(slices)})" if is_cut else slices[0]
        return choices

    def tight(self) -> Plan:
        """Return the plan that is found where there is as much memory as a uniform plan needs at least."""
        graph, cluster = self.graph(), cluster_of(*GRIDS[self.ranks])
        asked = Request(1 << 40, micro_batch=BATCH)
        least = min(one.peak_memory_bytes for one in plan_graph(graph, cluster, asked).found.baselines)
        return plan_graph(graph, cluster, replace(asked, limit_bytes=least)).plan


KINDS: dict[str, Callable[[Subject], Plan]] = {
    "plan": lambda on: from_rank_0("plan", on.tight),
    "shard": lambda on: on.plan({}),
    "mixture": lambda on: on.plan(on.mixture("mixture")),
    "recompute": lambda on: on.plan(on.mixture("recompute"), recomputes=True),
    "bf16": lambda on: on.plan(on.mixture("bf16", splits=False), "bf16", recomputes=True),
}
"""Plans: the first is the search's, for a model that is made shard by shard; the last three have random
strategies, the last two recompute all blocks, every second of them selectively; of the others the input is offloaded
where the last computes in bf16."""


@dataclass(frozen=True)
class Row:
    """What came of a model under a kind of plan."""

    model: str
    kind: str
    difference: float = 0.0
    """Largest, of any parameter or buffer, from one process."""
    moved: float = 0.0
    """How far the training moved the parameter that moved most."""
    rounding: float = 0.0
    """How far one process that computes in bf16 is from one in fp32; 0 in fp32."""
    refused: str = ""
    """What OSDP says in place of sharding the model."""
    failed: str = ""
    """What went wrong otherwise."""


def train(on: Subject, kind: str, wanted: Callable[[str], dict[str, Tensor]]) -> Row:
    """Train a model under a kind of plan, and compare it on rank 0 with what is wanted in a precision.  Collective."""
    from osdp import OSDP

    try:
        plan = KINDS[kind](on)
        torch.manual_seed(SEED)
        given = on.source.build if kind == "plan" else on.source.build()
        model = OSDP(given, plan, example_inputs=on.example_inputs)
    except OsdpError as error:
        return Row(on.name, kind, refused=str(error))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        args, kwargs = batch(on.source, on.module, step, dist.get_rank())
        find_loss(model(*args, **kwargs))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    got = model.full_state_dict()
    if dist.get_rank():
        return Row(on.name, kind)
    alone, exact = wanted(model.plan.model.precision), wanted("fp32")
    assert got.keys() == alone.keys()
    moved = distance(got, dict(on.module.named_parameters()))
    return Row(on.name, kind, distance(got, alone), moved, distance(alone, exact))


def distance(those: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """Return the largest difference of any tensor of the others."""
    far = [(those[name].double() - one.double()).abs().max() for name, one in others.items() if one.numel()]
    return torch.stack(far).max().item()  # nan if any is


def train_all(rank: int, jobs: Sequence[tuple[str, str]], results: Path) -> None:
    """Train models under kinds of plans one after the other; rank 0 writes a line for each."""
    ranks = dist.get_world_size()
    for name, of_model in itertools.groupby(jobs, key=lambda job: job[0]):
        on = Subject(name, model(name), built(model(name)), ranks)
        wanted = cache(partial(train_alone, on.source, ranks))
        for row in (train(on, kind, wanted) for _, kind in of_model):
            if rank == 0:
                with results.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


def train_on_ranks(ranks: int, jobs: Sequence[tuple[str, str]], folder: Path) -> list[Row]:
    """Train on so many ranks, which go on with the next job where one fails."""
    results, nodes = folder / f"{ranks}.json", GRIDS[ranks][0]
    rows: list[Row] = []
    while todo := jobs[len(rows) :]:
        results.write_text("")
        failed = ""
        try:
            run_ranks(train_all, ranks, todo, results, ranks_per_node=ranks // nodes, timeout_s=60 + 20 * len(todo))
        except RankError as error:
            failed = str(error)
        rows += [Row(**json.loads(line)) for line in results.read_text().splitlines()]
        if failed:
            rows.append(Row(*jobs[len(rows)], failed=failed))
    return rows
