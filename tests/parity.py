"""Training of a plan on ranks against the same training in one process, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from thoroughness import STEPS
from torch import Tensor, nn
from traced_once import trace_once

from osdp.models.config import BertConfig, GPT2Config, LlamaConfig, UnevenConfig
from osdp.planning.clusters import load_cluster
from planner.plan import ClusterRef, Plan, Prediction, cluster_fingerprint, model_ref
from planner.strategies.registry import known_strategies
from profiler.affine import Affine
from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import RingRule
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from runtime.optimizers import OPTIMIZERS

LENGTH = 8
BATCH = 2
MAX_NORM = 0.05
"""Low enough that every step is clipped (checked)."""
TOLERANCE = {"fp32": (1e-5, 2e-6), "bf16": (2e-3, 2e-4)}
"""Relative and absolute; of bf16 a mantissa has 8 bits, so that 2e-3 is half a unit in the last place."""


def build(family: str) -> nn.Module:
    """Return a small model of a family; sizes do not divide by the number of ranks."""
    from osdp.models.bert import Bert
    from osdp.models.gpt2 import GPT2
    from osdp.models.llama import Llama
    from osdp.models.uneven import Uneven

    match family:
        case "gpt2":
            return GPT2(GPT2Config(vocabulary_size=29, maximum_positions=LENGTH, hidden_size=12, layers=2, heads=2))
        case "bert":
            return Bert(
                BertConfig(
                    vocabulary_size=29,
                    maximum_positions=LENGTH,
                    token_types=2,
                    hidden_size=12,
                    layers=2,
                    heads=2,
                    intermediate_size=20,
                )
            )
        case "llama":
            return Llama(
                LlamaConfig(
                    vocabulary_size=29,
                    maximum_positions=LENGTH,
                    hidden_size=12,
                    layers=2,
                    heads=2,
                    key_value_heads=1,
                    intermediate_size=20,
                    rope_base=1e4,
                    tied_head=True,
                )
            )
        case "uneven":
            return Uneven(
                UnevenConfig(
                    vocabulary_size=29,
                    maximum_positions=LENGTH,
                    head_size=4,
                    encoder_widths=(8, 12),
                    decoder_widths=(8,),
                )
            )
    raise ValueError(family)


FAMILIES = ("gpt2", "bert", "llama", "uneven")


def inputs(module: nn.Module, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of forward."""
    made: tuple[tuple[Any, ...], dict[str, Any]] = module.example_inputs(batch, LENGTH)  # type: ignore[operator]
    return made


@cache
def graph_of(family: str, precision: str = "fp32") -> ModelGraph:
    """Return the traced model; OSDP finds it traced."""
    return trace_once(ModelSource(family, lambda: build(family), inputs, LENGTH), precision, "cpu")


@cache
def cluster_of(nodes: int, ranks_per_node: int) -> Cluster:
    """Return a cluster of CPU ranks."""
    return load_cluster("cpu-gloo", nodes, ranks_per_node)


@dataclass(frozen=True)
class Case:
    """A model and what is done to it."""

    family: str
    choices: Mapping[str, str]
    """By operator; others take `default`."""
    default: str = "shard"
    recomputed: tuple[str, ...] = ()
    precision: str = "fp32"
    accumulation: int = 1
    nodes: int = 2
    ranks_per_node: int = 2
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of OSDP."""
    ring: tuple[RingRule, ...] = ()
    """Where reduce-scatters go round a ring."""
    selective: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def plan(self) -> Plan:
        """Return the plan."""
        graph, cluster = graph_of(self.family, self.precision), cluster_of(self.nodes, self.ranks_per_node)
        nothing = Prediction(0, {}, "", 1.0, {}, 1.0)
        return Plan(
            schema=Plan.SCHEMA,
            model=model_ref(graph),
            cluster=ClusterRef(
                cluster.name, cluster_fingerprint(cluster), cluster.nodes, cluster.gpus_per_node, self.ring
            ),
            optimizer="adam",
            limit_bytes=1 << 40,
            micro_batch=BATCH,
            accumulation=self.accumulation,
            predicted=nothing,
            gap=0.0,
            choices={operator.name: self.choices.get(operator.name, self.default) for operator in graph.operators},
            recomputed_blocks=list(self.recomputed),
            selectively_recomputed_blocks=list(self.selective),
            offloaded_blocks=list(self.offloaded),
        )


@dataclass(frozen=True)
class Trained:
    """What a training run went through."""

    losses: list[float]
    """Mean over ranks of every micro-batch's loss."""
    norms: list[float]
    """Gradient norm of every step, before clipping."""
    parameters: dict[str, Tensor]
    """At the end."""


def batches(family: str, world_size: int, accumulation: int, steps: int = STEPS) -> list[list[list[Any]]]:
    """Return arguments of forward by step, micro-batch and rank."""
    module = build(family)
    torch.manual_seed(7)
    return [[[inputs(module, BATCH) for _ in range(world_size)] for _ in range(accumulation)] for _ in range(steps)]


def initial(family: str) -> nn.Module:
    """Return the model that every run starts from; not small at all, so that rounding of zeros does not matter."""
    torch.manual_seed(3)
    module = build(family)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every run."""
    return OPTIMIZERS["fused_adam"](parameters, lr=1e-2, eps=1e-3)


@cache
def reference(family: str, world_size: int, accumulation: int, precision: str = "fp32", steps: int = STEPS) -> Trained:
    """Train in one process what all ranks together train.

    In bf16 every rank's share is computed by itself from rounded parameters, as a device would.
    """
    module = initial(family)
    optimizer, losses, norms = optimizer_of(module.parameters()), [], []
    for step in batches(family, world_size, accumulation, steps):
        for micro_batch in step:
            mean = torch.stack([compute(module, precision, args, kwargs) for args, kwargs in micro_batch]).mean()
            (mean / accumulation).backward()
            losses.append(mean.item())
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: value.detach() for name, value in module.state_dict().items()})


def compute(module: nn.Module, precision: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the loss of a module whose parameters rest in fp32."""
    if precision == "fp32":
        return module(*args, **kwargs)
    rounded = {name: parameter.to(torch.bfloat16) for name, parameter in module.named_parameters()}
    return torch.func.functional_call(module, rounded, args, kwargs)


Sent = Counter[tuple[str, int, int, int]]
"""How often: operation, ranks, stride between them, bytes of the whole tensor."""


@dataclass(frozen=True)
class Sending:
    """What a rank sends in a step, apart from one-sided units (tests/gloo/test_odc.py)."""

    sent: Sent
    """What was seen."""
    charged: Sent
    """What the planner charges for."""
    by_ddp: bool
    """Whether DDP sends it."""

    def check(self) -> None:
        """Assert that what was sent is what is charged for."""
        if self.by_ddp:
            # Its buckets join units, so that only operation, group and sum of bytes can agree.
            assert total(self.sent) == total(self.charged)
        else:
            assert self.sent == self.charged


def total(sent: Sent) -> Counter[tuple[str, int, int]]:
    """Return the bytes by operation and group."""
    sums: Counter[tuple[str, int, int]] = Counter()
    for (operation, ranks, stride, size_bytes), count in sent.items():
        sums[operation, ranks, stride] += size_bytes * count
    return sums


def train_all(rank: int, cases: Sequence[Case], plans: Sequence[Plan]) -> list[tuple[Trained | None, Sending]]:
    """Train several cases by their plans one after the other, which saves starting the ranks."""
    return [train_and_record(rank, case, plan) for case, plan in zip(cases, plans, strict=True)]


def train(rank: int, case: Case, steps: int = STEPS) -> Trained | None:
    """Train on a rank; the result is on rank 0."""
    return train_and_record(rank, case, case.plan(), steps, recorded_steps=0)[0]


def train_and_record(
    rank: int, case: Case, plan: Plan, steps: int = STEPS, recorded_steps: int = 1
) -> tuple[Trained | None, Sending]:
    """Train on a rank, and record what it sends in the first step, or in none."""
    from osdp import OSDP
    from runtime.observe.collective_log import record_collectives

    model = OSDP(initial(case.family), plan, example_inputs=None, **case.keywords)
    optimizer, losses, norms, sent = optimizer_of(model.parameters()), [], [], Sent()
    # In the first step, ranks of a model that is replicated whole compare which parameters have gradients.
    first = int(model.schedule.by_ddp)
    for number, step in enumerate(batches(case.family, case.world_size, case.accumulation, steps)):
        own: list[Tensor] = []
        with record_collectives() if 0 <= number - first < recorded_steps else nullcontext(()) as recorded:
            for micro_batch in step:
                args, kwargs = micro_batch[rank]
                own.append(model(*args, **kwargs))
                (own[-1] / case.accumulation).backward()
        for one in recorded:
            if len(one.ranks) > 1:  # groups of one rank send nothing
                sent[one.operation, len(one.ranks), one.ranks[1] - one.ranks[0], one.size_bytes] += 1
        means = torch.stack(own).detach()
        dist.all_reduce(means, op=dist.ReduceOp.AVG)
        losses += means.tolist()
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    charged, schedule = Sent(), model.schedule
    waiting = tuple(unit for unit in schedule.units if not unit.strategy.spec.one_sided)
    for collective, count in replace(schedule, units=waiting).collectives().items():
        charged[collective.operation, collective.ranks, collective.stride, collective.size_bytes] += count
    parameters = model.full_state_dict()
    trained = Trained(losses, norms, parameters) if rank == 0 else None
    return trained, Sending(sent, charged, schedule.by_ddp)


def compare(got: Trained, wanted: Trained, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    """Assert that two runs went the same way."""
    assert min(wanted.norms) > MAX_NORM
    torch.testing.assert_close(got.losses, wanted.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(got.norms, wanted.norms, rtol=10 * rtol, atol=atol)
    assert list(got.parameters) == list(wanted.parameters)
    torch.testing.assert_close(got.parameters, wanted.parameters, rtol=rtol, atol=10 * atol)


def check(cases: Sequence[Case]) -> None:
    """Train the cases, all for as many ranks; compare each with the single process, and what every rank sends."""
    first = cases[0]
    by_rank: list[list[tuple[Trained, Sending]]] = run_ranks(
        train_all,
        first.world_size,
        cases,
        [case.plan() for case in cases],
        ranks_per_node=first.ranks_per_node,
        timeout_s=120 + 20 * len(cases),
    )
    for number, case in enumerate(cases):
        wanted = reference(case.family, case.world_size, case.accumulation, case.precision)
        try:
            compare(by_rank[0][number][0], wanted, *TOLERANCE[case.precision])
            for results in by_rank:
                results[number][1].check()
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}") from error


def blocks_of(family: str) -> Sequence[str]:
    """Return the names of a model's blocks."""
    return [block.name for block in graph_of(family).blocks]


def offloadable_of(family: str) -> Sequence[str]:
    """Return the names of those whose input can be offloaded."""
    return [block.name for block in graph_of(family).blocks if block.offloadable_bytes != Affine()]


def alone(offloaded: bool = False) -> list[str]:
    """Return every strategy of 2 x 2 ranks that runs, all with or all without offload."""
    known = known_strategies(cluster_of(2, 2))
    return [str(strategy) for strategy in known if strategy.offload == offloaded]
