"""Exported FSDP2 modules train as OSDP's runtime does, and send the same collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import toys
from drawn_models import Drawn, outputs_of
from exported import ACCUMULATION, as_expressible, drawn_choices, drawn_recomputation, parallelize_of, source_of
from parity import FAMILIES, TOLERANCE, Case, Sent, batches, cluster_of, compute, graph_of, initial, total
from ranks import run_ranks
from real_training import BATCH, STEPS, batch, built, train_alone
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from planner.plan import Plan
from profiler.errors import OsdpError
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

PLANS = range(40) if THOROUGH else (1, 2, 3)
"""Some are one strategy and some many of them, one is DistributedDataParallel's; whole and selective recomputation."""


def steps_of(plan: Plan) -> int:
    """Return how many steps are trained: in the second, DistributedDataParallel agrees on other buckets."""
    return 3 if THOROUGH or set(plan.choices.values()) == {"replicate"} else 2


def drawn(number: int) -> tuple[Case, Plan]:
    """Return a case and its plan, one that FSDP2 can run."""
    draw = Random(f"case {number}")
    family, precision = FAMILIES[number % len(FAMILIES)], draw.choice(["fp32", "bf16"])
    graph, cluster = graph_of(family, precision), cluster_of(2, 2)
    whole, selective = drawn_recomputation(number, graph)
    choices, accumulation = drawn_choices(number, graph, cluster), draw.choice(ACCUMULATION)
    case = Case(family, choices, "shard", whole, precision, accumulation, selective=selective)
    return case, as_expressible(case.plan(), graph, cluster)


def last_of_step(model: nn.Module, is_last: bool) -> Any:
    """Do what the head of an exported module tells a training loop to do."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    model.set_requires_all_reduce(is_last)  # type: ignore[operator]
    return nullcontext()


def train(model: nn.Module, case: Case, rank: int, steps: int, plain: bool) -> tuple[list[float], Sent]:
    """Return the mean losses of all micro-batches, and what this rank sends in the last step."""
    from runtime.observe.collective_log import record_collectives

    optimizer = optimizer_of(model)
    losses = []
    for number, step in enumerate(batches(case.family, case.world_size, case.accumulation, steps), 1):
        own = []
        with record_collectives() if number == steps else nullcontext(()) as recorded:
            for index, micro_batch in enumerate(step):
                args, kwargs = micro_batch[rank]
                with last_of_step(model, index + 1 == len(step)) if plain else nullcontext():
                    own.append(model(*args, **kwargs))
                    (own[-1] / case.accumulation).backward()
        means = torch.stack(own).detach().float()
        dist.all_reduce(means, op=dist.ReduceOp.AVG)
        losses += means.tolist()
        optimizer.step()
        optimizer.zero_grad()
    sent = Counter(
        (one.operation, len(one.ranks), one.ranks[1] - one.ranks[0], one.size_bytes)
        for one in recorded
        if len(one.ranks) > 1
    )
    return losses, sent


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every run; meshes of parameters differ, so they are stepped one by one."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def alone(case: Case, steps: int) -> list[float]:
    """Return the losses, the same on all ranks, of the same training in one process, with PyTorch alone."""
    model, losses = initial(case.family), []
    optimizer = optimizer_of(model)
    for step in batches(case.family, case.world_size, case.accumulation, steps):
        for micro_batch in step:
            mean = torch.stack([compute(model, case.precision, args, kwargs) for args, kwargs in micro_batch]).mean()
            (mean / case.accumulation).backward()
            losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


Run = tuple[list[float], Sent, bool]
"""Losses, collectives and whether DDP runs it."""


def train_all(rank: int, cases: Sequence[tuple[Case, Plan, str]]) -> list[tuple[Run, Run]]:
    """Return, of every case, the run of OSDP's runtime and that of the exported module."""
    return [(train_one(rank, *case, plain=False), train_one(rank, *case, plain=True)) for case in cases]


def train_one(rank: int, case: Case, plan: Plan, source: str, *, plain: bool) -> Run:
    """Train the exported module if `plain`, or else under OSDP's runtime."""
    from osdp import OSDP

    if plain:
        model = parallelize_of(source)(initial(case.family), init_device_mesh("cpu", (case.world_size,)))
        by_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    else:
        model = OSDP(initial(case.family), plan, example_inputs=None)
        by_ddp = model.schedule.by_ddp
    return *train(model, case, rank, steps_of(plan), plain), by_ddp


def test_exported_modules_train_and_send_as_the_runtime_does() -> None:
    cases = []
    for number in PLANS:
        case, plan = drawn(number)
        cases.append((case, plan, source_of(plan, graph_of(case.family, case.precision), cluster_of(2, 2))))
    expected = [alone(case, steps_of(plan)) for case, plan, _ in cases]
    for runs in run_ranks(train_all, 4, cases, ranks_per_node=2, timeout_s=60 + 20 * len(cases)):
        for (case, plan, _), by_one, (wanted, got) in zip(cases, expected, runs, strict=True):
            check(case, plan, by_one, wanted, got)


def check(case: Case, plan: Plan, by_one: list[float], wanted: Run, got: Run) -> None:
    """Assert that two runs went the same way, that of losses in one process."""
    (losses, sent, by_ddp), (exported, exported_sent, exported_by_ddp) = wanted, got
    torch.testing.assert_close(exported, losses, rtol=1e-6, atol=1e-6, msg=lambda text: f"{text}\n{case}")
    torch.testing.assert_close(exported, by_one, rtol=TOLERANCE[case.precision][0], atol=1e-5)
    assert exported_by_ddp == by_ddp
    if by_ddp:  # buckets are cut where gradients come, so that only their sum can agree
        assert total(exported_sent) == total(sent)
    else:
        assert exported_sent == sent, (case, plan)


MODELS = range(20) if THOROUGH else (0, 3, 12)
"""Numbers of drawn models: the first and last change buffers as they run again, the second has a module unused."""


class WithLoss(Drawn):
    """Returns the sum of the mean squares of all outputs."""

    def forward(self, x: Any) -> Any:
        """As of `Drawn` -> a loss."""
        return torch.stack([one.pow(2).mean() for one in outputs_of(super().forward(x))]).sum()


def of_number(number: int) -> ModelSource:
    return ModelSource(
        f"drawn {number}", partial(WithLoss, number), lambda module, size: module.example_inputs(size), 1
    )


def train_drawn(rank: int, exports: Mapping[int, str]) -> dict[int, dict[str, Tensor]]:
    """Return the trained parameters of exported modules, and rank 0's buffers."""
    found = {}
    for number, text in exports.items():
        source = of_number(number)
        model = parallelize_of(text)(built(source), init_device_mesh("cpu", (2,)))
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-2, eps=1e-3, foreach=False)
        for step in range(STEPS):
            args, kwargs = batch(source, source.build(), step, rank)
            model(*args, **kwargs).backward()
            optimizer.step()
            optimizer.zero_grad()
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        named = (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False))
        found[number] = {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in named
        }
    return found


def test_exported_drawn_models_train_as_in_one_process() -> None:
    exports, cluster = {}, cluster_of(1, 2)
    for number in MODELS:
        source = of_number(number)
        graph = trace_model(source, "fp32", "cpu", BATCH)
        again = [name for names in drawn_recomputation(number, graph) for name in names]
        choices = drawn_choices(number, graph, cluster)
        plan = toys.plan_of(built(source), "shard", choices, recomputed=tuple(again), ranks=(1, 2), graph=graph)
        with suppress(OsdpError):  # what plain FSDP2 cannot hold
            exports[number] = source_of(as_expressible(plan, graph, cluster), graph, cluster)
    assert len(exports) >= len(MODELS) / 2
    (got, _) = run_ranks(train_drawn, 2, exports, timeout_s=60 + 10 * len(exports))
    for number in exports:
        wanted = train_alone(of_number(number), 2, "fp32")
        of_names = {name: wanted[name] for name in got[number] if name in wanted}
        got[number] = {name: got[number][name] for name in of_names}
        torch.testing.assert_close(got[number], of_names, rtol=1e-4, atol=3e-5, msg=partial("{}: {}".format, number))
