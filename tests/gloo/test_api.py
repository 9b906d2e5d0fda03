"""`OSDP(...)` with everything that it takes, what it refuses, and a model's life around training."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import FAMILIES, Case, build, cluster_of, graph_of, initial
from ranks import run_ranks
from thoroughness import STEPS, THOROUGH, some
from torch import Tensor, nn
from toys import (
    EVERY_RANK,
    GROUP,
    STRATEGIES,
    WITH_OFFLOAD,
    Blocks,
    InPlace,
    Irregular,
    Toy,
    batch_of,
    loss_of,
    plan_of,
    refusal,
    run_everywhere,
    seeded,
)

from osdp.models.config import GPT2Config
from planner.pins import Pin
from planner.plan import Plan
from profiler.yaml_files import write_yaml

EACH = 2 if THOROUGH else 1
"""Ranks of each of two nodes that take every description."""
SMALL = GPT2Config(vocabulary_size=29, maximum_positions=8, hidden_size=12, layers=1, heads=2)


def mixed(family: str) -> Case:
    """Return a plan with every strategy, offload and a split in it."""
    graph = graph_of(family)
    rest = iter(range(100))
    choices = {operator.name: WITH_OFFLOAD[next(rest) % len(WITH_OFFLOAD)] for operator in graph.operators}
    linear = next(op for op in graph.operators if op.kind == "Linear" and len(op.modules) == 1)
    choices[linear.name] = "split(shard, owner, group_shard:2)"
    return Case(family, choices)


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that two state dicts are bitwise equal and in one order."""
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


# --- what is given ---------------------------------------------------------------------------


def start_as_the_constructor(rank: int, family: str) -> None:
    """A factory, and a live module that differs by rank, under all strategies at once and under DDP."""
    from osdp import OSDP

    wanted = seeded(lambda: build(family), seed=11).state_dict()
    cases = [mixed(family), Case(family, {}, "replicate")]
    for case in cases:
        torch.manual_seed(11)
        made = OSDP(lambda: build(family), case.plan())
        assert_equal(made.full_state_dict(rank0_only=False), wanted)
        drawn = torch.rand(1)
        seeded(lambda: build(family), seed=11)
        assert torch.equal(drawn, torch.rand(1)), "the generator stands where the constructor leaves it"
    live = OSDP(seeded(lambda: build(family), seed=11 + rank), mixed(family).plan())
    assert_equal(live.full_state_dict(rank0_only=False), wanted)
    buffers = dict(build(family).named_buffers())
    for name, value in live.named_buffers():
        assert torch.equal(value, buffers[name]), name


@pytest.mark.parametrize("family", some(FAMILIES, 4, 1))
def test_starts_as_the_constructor_leaves_it(family: str) -> None:
    run_ranks(start_as_the_constructor, 4, family, ranks_per_node=2)


def start_with_buffers(rank: int) -> None:
    """Buffers, persistent or not, of a live, a meta and a recorded model; frozen parameters stay frozen."""
    from osdp import OSDP

    reference = seeded(Blocks)
    for name in ("replicate", "shard", "owner", "shard_grad+offload"):
        plan = plan_of(Blocks(), name)
        for made in (OSDP(seeded(Blocks, seed=3 + rank), plan), (torch.manual_seed(3), OSDP(Blocks, plan))[1]):
            assert_equal(made.full_state_dict(rank0_only=False), reference.state_dict())
            got = dict(made.named_buffers())
            assert list(got) == ["mask", "offset"]
            assert torch.equal(got["offset"], reference.offset)
            frozen = [name for name, parameter in made.named_parameters() if not parameter.requires_grad]
            assert frozen == ["blocks.0.down.weight", "blocks.0.down.bias"]
            assert list(made.state_dict()) == list(reference.state_dict())
    plan = plan_of(layers(), "shard", {"0": "split(2*owner)"})
    with torch.device("meta"):
        hollow = layers()
    torch.manual_seed(5)
    assert_equal(OSDP(hollow, plan).full_state_dict(rank0_only=False), seeded(layers, seed=5).state_dict())


def layers() -> nn.Module:
    """Return a model whose layers can all reset themselves."""
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5))


def test_starts_with_buffers_and_frozen_parameters() -> None:
    run_everywhere(start_with_buffers)


def quickly(make: Callable[[], Any], pins: tuple[Pin, ...] = (Pin("*", "shard"),)) -> Any:
    """Make a model by a plan that is searched for one micro-batch, and by default with nothing to choose."""
    from osdp.planning.request import plan_graph

    def planned(graph: Any, cluster: Any, request: Any) -> Any:
        return plan_graph(graph, cluster, replace(request, micro_batch=2, pins=pins))

    with mock.patch("osdp.prepare.plan_graph", planned):
        return make()


def take_everything(rank: int, folder: Path) -> None:
    """Every form of description and device_info; a plan that is made is the same on all ranks."""
    from osdp import OSDP, OptimalShardedDataParallel
    from osdp.models.gpt2 import GPT2

    assert OptimalShardedDataParallel is OSDP
    plan, cluster = Case("gpt2", {}, ranks_per_node=EACH).plan(), cluster_of(2, EACH)
    pins = {"pins": ["*=shard"]}  # which leave nothing to search
    given: list[Callable[[], Any]] = [
        lambda: quickly(lambda: OSDP(GPT2, [1, 12, SMALL], 2048)),
        lambda: quickly(lambda: OSDP(GPT2, (1, 12, SMALL), "2GB")),
        lambda: quickly(lambda: OSDP(GPT2(SMALL), None, None), pins=()),
        lambda: OSDP(build("gpt2"), {"micro_batch": 3, "precision": "bf16", "optimizer": "sgd"} | pins, "cpu-gloo"),
        lambda: OSDP(build("gpt2"), str(folder / "description.yaml"), cluster),
        lambda: OSDP(build("gpt2"), folder / "description.yaml", folder / "cluster.yaml"),
        lambda: OSDP(build("gpt2"), plan, None),
        lambda: OSDP(build("gpt2"), folder / "plan.yaml", cluster),
    ]
    plans: list[Plan] = []
    for make in given:
        model = make()
        everyones: list[Any] = [None] * 2 * EACH
        dist.all_gather_object(everyones, (model.plan, str(model.schedule)))
        assert all(one == everyones[0] for one in everyones)
        assert f"{2 * EACH} ranks (2 x {EACH})" in str(model.schedule)
        args, kwargs = build("gpt2").example_inputs(2)
        model(*args, **kwargs).backward()
        plans.append(model.plan)
    assert [one.limit_bytes for one in plans[:2]] == [2048 << 20] * 2
    assert (plans[3].micro_batch, plans[3].model.precision, plans[3].optimizer) == (3, "bf16", "sgd")
    assert [one.micro_batch for one in plans[4:6]] == [5, 5]
    assert plans[6] == plan == plans[7]


def test_takes_every_description_and_device(tmp_path: Path) -> None:
    (tmp_path / "description.yaml").write_text('schema: osdp.description/1\nmicro_batch: 5\npins: ["*=shard"]\n')
    (tmp_path / "cluster.yaml").write_bytes(Path("configs/clusters/cpu-gloo.yaml").read_bytes())
    write_yaml(tmp_path / "plan.yaml", Case("gpt2", {}, ranks_per_node=EACH).plan(), "")
    run_ranks(take_everything, 2 * EACH, tmp_path, ranks_per_node=EACH)


# --- what is refused -------------------------------------------------------------------------


class Looking(Toy):
    """Looks at its values, which a trace has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> the same."""
        return self.layer(x) * (1 if x.sum().item() > 0 else 2)


def refuse(rank: int) -> dict[str, str]:
    """Return what is said of every mistake."""
    from osdp import OSDP

    def gpt2(plan: Any, device_info: Any = None) -> Callable[[], Any]:
        return lambda: OSDP(build("gpt2"), plan, device_info)

    shard = Case("gpt2", {})
    linear = next(op.name for op in graph_of("gpt2").operators if op.kind == "Linear")
    mistakes = {
        "ranks": gpt2(Case("gpt2", {}, ranks_per_node=1).plan()),
        "other model": gpt2(Case("bert", {}).plan()),
        "other size": lambda: OSDP(Blocks(), plan_of(nn.Linear(6, 6), ranks=(2, 2))),
        "group": gpt2(Case("gpt2", {}, "group_shard:3").plan()),
        "strategy": gpt2(Case("gpt2", {}, "shards").plan()),
        "differ": gpt2(Case("gpt2", {linear: "owner" if rank == 2 else "shard"}).plan()),
        "trace": lambda: OSDP(Looking(), None, "2GB"),
        "keys": gpt2({"micro_batches": 3}),
        "value": gpt2({"precision": "fp8", "micro_batch": 0}),
        "split norm": gpt2(replace(shard.plan(), choices=shard.plan().choices | {"norm": "split(2*shard)"})),
        "split thin": gpt2(replace(shard.plan(), choices=shard.plan().choices | {linear: "split(13*shard)"})),
        "blocks": gpt2(replace(shard.plan(), recomputed_blocks=["blocks.7"])),
        "memory": lambda: OSDP(layers(), None, "100MB"),
        "device": gpt2(None, 3.5),
        "cluster": gpt2(None, "cpu-glue"),
        "description": gpt2(7),
        "file": gpt2("/nowhere/plan.yaml"),
        "list": lambda: OSDP(build, [2, 12], "2GB"),
    }
    return {name: refusal(mistake) for name, mistake in mistakes.items()}


def test_refuses_on_all_ranks_with_useful_words() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_rank = run_ranks(refuse, 4, ranks_per_node=2)
    said = by_rank[0]
    assert by_rank[1:] == [said] * 3
    words = {
        "ranks": ("another number of ranks", "4 in the process group", "2: 2 x 1"),
        "other model": ("made for another model", "bert"),
        "other size": ("made for another model", "42 parameters"),
        "group": ("no such strategy on 2 x 2 ranks", "group_shard:3", "group_shard:2"),
        "strategy": ("shards", "shard_grad"),
        "differ": ("schedule is not the same on all ranks", "ranks 2 differ"),
        "trace": ("Looking",),
        "keys": ("micro_batches", "micro_batch, global_batch"),
        "value": ("precision", "fp8", "micro_batch"),
        "split norm": ("norm cannot be split", "LayerNorm"),
        "split thin": ("12 input features",),
        "blocks": ("blocks.7",),
        "memory": ("100",),
        "device": ("3.5", "8GB"),
        "cluster": ("cpu-glue", "cpu-gloo"),
        "description": ("int", "YAML"),
        "file": ("/nowhere/plan.yaml",),
        "list": ("three entries", "config"),
    }
    for name, parts in words.items():
        assert all(part in said[name] for part in parts), f"{name}: {said[name]}"


def refuse_without_group(rank: int) -> str:
    """Return what is said where init_process_group was not called."""
    from osdp import OSDP

    return refusal(lambda: OSDP(build("gpt2"), None))


def test_refuses_to_run_without_a_process_group() -> None:
    (said,) = run_ranks(refuse_without_group, 1, joins=False)
    assert "no process group" in said
    assert "torchrun" in said


# --- a model's life --------------------------------------------------------------------------


class Pair:
    """A sharded model and the single process that it must agree with, which sees all ranks' batches."""

    def __init__(self, rank: int, build_model: Callable[[], nn.Module], plan: Plan, make: Callable[..., Any]) -> None:
        from osdp import OSDP

        self.rank = rank
        self.reference = seeded(build_model)
        self.model = OSDP(seeded(build_model), plan)
        self.optimizers = make(self.model), make(self.reference)

    def both(self, step: int, how: Callable[[nn.Module, Any], None]) -> None:
        """Do to the reference with every rank's batch what is done to the model with this rank's."""
        how(self.model, [batch_of(self.reference, self.rank, step)])
        how(self.reference, [batch_of(self.reference, rank, step) for rank in EVERY_RANK])

    def train(self, step: int, **keywords: Any) -> None:
        """Make a step."""
        self.both(step, partial(backward, **keywords))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self) -> None:
        """Assert that inference gives what the reference gives, and leaves no trace."""
        self.model.eval()
        names = [name for name, _ in self.model.named_parameters()]
        args, kwargs = batch_of(self.reference, self.rank, 77)
        with torch.no_grad():
            wanted = loss_of(self.reference(*args, **kwargs))
        for context in (torch.inference_mode, torch.no_grad):
            with context():
                got = loss_of(self.model(*args, **kwargs))
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        self.model.train()
        assert [name for name, _ in self.model.named_parameters()] == names

    def compare(self) -> None:
        """Assert that both have the same parameters."""
        full = self.model.full_state_dict(rank0_only=False)
        torch.testing.assert_close(full, dict(self.reference.state_dict()), rtol=1e-4, atol=2e-5)


def backward(model: nn.Module, batches: list[Any], **keywords: Any) -> None:
    """Run backward of the mean loss."""
    (sum(loss_of(model(*args, **kwargs, **keywords)) for args, kwargs in batches) / len(batches)).backward()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that notices everything but tiny gradients."""
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3, fused=True)


def infer_anywhere(rank: int) -> None:
    """Inference before, between and amid training steps, and training in eval mode, under every strategy."""
    model = partial(Blocks, "dataclass")
    for name in (*some(STRATEGIES, 3), "owner+offload", "split"):
        choices = {"blocks.1.up": "split(shard_grad, owner)"} if name == "split" else {}
        plan = plan_of(model(), "shard_grad" if name == "split" else name, choices)
        pair = Pair(rank, model, plan, adam)
        pair.evaluate()
        pair.both(0, backward)
        pair.evaluate()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.evaluate()

        def amid(model: nn.Module, batches: list[Any], pair: Pair = pair) -> None:
            loss = sum(loss_of(model(*args, **kwargs)) for args, kwargs in batches) / len(batches)
            if model is pair.model:
                pair.model.state_dict()
                pair.evaluate()
            loss.backward()

        pair.both(1, amid)
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.model.eval()
        pair.train(2)
        pair.evaluate()
        pair.compare()


def test_inference_gives_the_models_output_at_any_time() -> None:
    run_everywhere(infer_anywhere)


def train_oddities(rank: int) -> None:
    """Changes in place of what wrapped layers return, outputs of every form, layers run often or never."""
    for name in (*some(STRATEGIES, 3, 1), "owner+offload"):
        other = "owner" if name == "shard" else "shard"
        # A unit per layer: neighbours have different strategies.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*returned a view tensor")
            pair = Pair(rank, InPlace, plan_of(InPlace(), name, {"second": other}), adam)
            for step in range(STEPS):
                pair.train(step)
            pair.compare()
    for output in ("tuple", "dict"):
        pair = Pair(rank, partial(Blocks, output), plan_of(Blocks(output), GROUP, accumulation=1), adam)
        for step in range(2):
            pair.train(step)
        pair.compare()
    for name in some(STRATEGIES[1:], 3, 1):
        pair = Pair(rank, Irregular, plan_of(Irregular(), name, {"second": "owner"}), adam)
        for step, keywords in enumerate(({}, {"times": 3, "third": False}, {"times": 1})):
            pair.train(step, **keywords)
        with contextlib.suppress(RuntimeError):
            pair.model(torch.randn(2, 5, 7))  # a mistake that a notebook survives
        pair.train(3)
        pair.compare()
    assert "sharded already" in refusal(lambda: type(pair.model)(pair.model.module, pair.model.plan))


def look_like_the_model(rank: int) -> None:
    """Attributes and modes are the model's."""
    from osdp import OSDP

    model = OSDP(Blocks("dict"), plan_of(Blocks("dict"), GROUP))
    assert model.output == "dict"
    assert model.blocks is model.module.blocks
    assert not hasattr(model, "nothing_of_this_name")
    assert not model.eval().module.blocks[0].training
    assert model.train().module.blocks[0].training
    assert f"{len(EVERY_RANK)} ranks" in repr(model)


def test_odd_models_train_as_one_process() -> None:
    run_everywhere(train_oddities)


def test_looks_like_the_model() -> None:
    run_everywhere(look_like_the_model)


def optimizers() -> Iterator[tuple[str, Callable[[nn.Module], torch.optim.Optimizer]]]:
    """Yield optimizers to try, by name."""

    def of(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: kind(model.parameters(), lr=1e-2, **options)

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        decayed = [p for name, p in named if name.endswith("weight") and "norm" not in name]
        rest = [p for name, p in named if not (name.endswith("weight") and "norm" not in name)]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, eps=1e-3
        )

    for how in ("foreach", "fused"):
        yield f"adam {how}", of(torch.optim.Adam, eps=1e-3, **{how: True})
    yield "adam one by one", of(torch.optim.Adam, eps=1e-3, foreach=False)
    yield "adamw in groups", grouped
    yield "sgd", of(torch.optim.SGD, momentum=0.9, nesterov=True)
    yield "sgd foreach", of(torch.optim.SGD, momentum=0.9, foreach=True)
    yield "rmsprop", of(torch.optim.RMSprop, eps=1e-3)


BY_DEFAULT = "adam fused", "adamw in groups", "sgd foreach"
"""One of each implementation, of which that in groups steps parameters one by one."""


def train_with_optimizers(rank: int) -> None:
    """Every optimizer, in one group over all strategies, with a scheduler. All of them with --thorough."""
    names = list(plan_of(Blocks()).choices)
    choices = {name: WITH_OFFLOAD[index % len(WITH_OFFLOAD)] for index, name in enumerate(names)}
    choices["blocks.1.up"] = "split(shard, replicate)"
    on_device = {name: choice.removesuffix("+offload") for name, choice in choices.items()}
    for name, make in optimizers():
        if not (THOROUGH or name in BY_DEFAULT):
            continue
        pair = Pair(rank, Blocks, plan_of(Blocks(), choices=on_device if "f" in name else choices), make)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in pair.optimizers]
        for step in range(STEPS):
            pair.train(step)
            for scheduler in schedulers:
                scheduler.step()
        try:
            pair.compare()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_any_optimizer_on_mixed_strategies() -> None:
    run_everywhere(train_with_optimizers)


def train_with_dropout(rank: int) -> None:
    """Dropout draws the same with recomputation as without, beside a layer under `owner`."""
    from osdp import OSDP

    model = partial(Blocks, dropout=0.5)
    for name in some(("replicate", "shard_grad", "shard", "owner"), 2):
        trained = []
        for recomputed in ((), ("blocks.0", "blocks.1")):
            sharded = OSDP(seeded(model), plan_of(model(), name, {"blocks.1.up": "owner"}, recomputed=recomputed))
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
            for step in range(STEPS):
                args, kwargs = batch_of(model(), rank, step)
                torch.manual_seed(100 * step + rank)
                loss_of(sharded(*args, **kwargs)).backward()
                optimizer.step()
                optimizer.zero_grad()
            trained.append(sharded.full_state_dict(rank0_only=False))
        assert not torch.equal(trained[0]["head.weight"], seeded(model).head.weight)
        torch.testing.assert_close(trained[1], trained[0], rtol=1e-6, atol=1e-7)


def test_dropout_is_the_same_where_blocks_run_again() -> None:
    run_everywhere(train_with_dropout)


def test_initial_is_not_what_a_seed_gives() -> None:
    """Guards the tests above: the models of a seed differ from those of another."""
    assert not torch.equal(initial("gpt2").wte.weight, seeded(lambda: build("gpt2"), seed=11).wte.weight)
