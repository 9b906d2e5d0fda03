"""osdp/integrations/lightning.py: Trainer and Fabric train as one process does by hand."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import runpy
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from one_process import (
    ACCUMULATION,
    BATCH,
    HALF,
    MAX_NORM,
    MAX_VALUE,
    STEPS,
    build,
    compare,
    optimizer_of,
    plan,
    reference,
    samples,
    schedule_of,
)
from ranks import run_ranks
from thoroughness import THOROUGH
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from toys import refusal

from osdp.models.config import GPT2Config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs Lightning: pip install -e '.[lightning]'"
)
EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


@dataclass(frozen=True)
class Seen:
    """What a run saw on rank 0."""

    losses: list[float]
    evaluated: list[float]
    parameters: dict[str, Tensor]
    file: Path
    """What it saved last."""


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return those of the training and of the evaluation, dealt in order: Trainer's own sampler shuffles."""
    everything = samples()
    split = len(everything) - 2 * BATCH
    parts: Any = (Subset(everything, range(split)), Subset(everything, range(split, len(everything))))
    dealt = [DistributedSampler(part, shuffle=False) for part in parts]
    return DataLoader(parts[0], BATCH, sampler=dealt[0]), DataLoader(parts[1], BATCH, sampler=dealt[1])


def mean(loss: Tensor) -> float:
    """Return the mean over ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def module_of(model: nn.Module) -> Any:
    """Return a LightningModule around a model, which remembers its losses."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []
            self.evaluated: list[float] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(batch)
            self.losses.append(mean(loss))
            if not self.automatic_optimization:
                self.step_by_hand(loss, index)
            return loss

        def step_by_hand(self, loss: Tensor, index: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss / ACCUMULATION)
            if (index + 1) % ACCUMULATION == 0:
                self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.evaluated.append(mean(self.model(batch)))
            self.log("held_out", self.evaluated[-1], sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.parameters())
            schedule = {"scheduler": schedule_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Module()


def by_trainer(folder: Path, parts: bool) -> Seen:
    """Train half, save, and go on from there with another model."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from osdp.integrations.lightning import OSDPStrategy

    losses, evaluated, last = [], [], None
    by_norm = {"gradient_clip_val": MAX_NORM}
    by_value = {"gradient_clip_val": MAX_VALUE, "gradient_clip_algorithm": "value"}
    for epochs, clipping in ((1, by_norm), (2, by_value)):
        keeps = ModelCheckpoint(folder, "{epoch}", monitor="held_out", save_top_k=-1)
        options: Any = {"max_epochs": epochs, "accumulate_grad_batches": ACCUMULATION, "callbacks": [keeps]}
        strategy = OSDPStrategy(plan(), save_distributed_checkpoint=parts)
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET, **options, **clipping)
        module = module_of(build())
        trainer.fit(module, *loaders(), ckpt_path=last)
        last = folder / f"epoch={epochs - 1}.ckpt"
        losses += module.losses
        evaluated += module.evaluated
    module.evaluated.clear()
    trainer.validate(module, loaders()[1], verbose=False)
    assert module.evaluated == evaluated[-1:]
    assert module.model is strategy.sharded
    return Seen(losses, evaluated, module.model.full_state_dict(), folder / "epoch=1.ckpt")


def in_mixed_precision() -> list[tuple[list[float], dict[str, Tensor]]]:
    """Return losses and parameters of Trainer under autocast, by Lightning's own strategy and by OSDP's."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from osdp.integrations.lightning import OSDPStrategy

    found = []
    for strategy in (DDPStrategy(process_group_backend="gloo"), OSDPStrategy(plan())):
        options: Any = {"max_epochs": 1, "accumulate_grad_batches": ACCUMULATION, "precision": "bf16-mixed"}
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET, **options)
        module = module_of(build())
        trainer.fit(module, *loaders())
        by_osdp = isinstance(strategy, OSDPStrategy)
        state = module.model.full_state_dict(rank0_only=False) if by_osdp else module.model.state_dict()
        found.append((module.losses, state))
    return found


def by_fabric(folder: Path, parts: bool) -> Seen:
    """Train half, save, and go on from there with another model."""
    import lightning

    from osdp.integrations.lightning import OSDPFabricStrategy

    losses, evaluated = [], []
    strategy = OSDPFabricStrategy(plan(accumulation=1), save_distributed_checkpoint=parts)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    train, held_out = loaders()
    for first in (0, HALF):
        model = build()
        made = optimizer_of(model.parameters())
        model, optimizer = fabric.setup(model, made)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule_of(made), "step": 0}
        if first:
            assert fabric.load(folder / f"{first}.ckpt", state) == {}
            assert state["step"] == first
        micro_batches = iter(train)
        for step in range(first, first + HALF):
            for index in range(ACCUMULATION):
                with fabric.no_backward_sync(model, enabled=index + 1 < ACCUMULATION):
                    loss = model(next(micro_batches))
                    fabric.backward(loss / ACCUMULATION)
                losses.append(mean(loss))
            if first:
                fabric.clip_gradients(model, optimizer, clip_val=MAX_VALUE)
            else:
                assert fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM) > MAX_NORM
            optimizer.step()
            optimizer.zero_grad()
            state["schedule"].step()
            state["step"] = step + 1
        with torch.no_grad():
            evaluated.append(mean(model(next(iter(held_out)))))
        fabric.save(folder / f"{step + 1}.ckpt", state)
    return Seen(
        losses, evaluated, fabric.strategy.get_module_state_dict(model._forward_module), folder / f"{STEPS}.ckpt"
    )


RUNS = {
    "Trainer": (by_trainer, False),
    "Fabric": (by_fabric, False),
    "Trainer, each rank its parts": (by_trainer, True),
    "Fabric, each rank its parts": (by_fabric, True),
}


def otherwise() -> list[tuple[list[float], dict[str, Tensor]]]:
    """Train the first half in other ways: optimization by hand, a model that is sharded by the user, or made empty."""
    import lightning

    from osdp import OSDP
    from osdp.integrations.lightning import OSDPFabricStrategy, OSDPStrategy

    by_hand = module_of(build())
    by_hand.automatic_optimization = False
    by_user = module_of(build())
    by_user.configure_model = lambda: setattr(by_user, "model", OSDP(by_user.model, plan(accumulation=3)))
    automatic: Any = {"accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": MAX_NORM}
    found = []
    for strategy, module, options in ((OSDPStrategy(plan()), by_hand, {}), (OSDPStrategy(), by_user, automatic)):
        options = {"max_epochs": 1, "enable_checkpointing": False, **QUIET, **options}
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)
        trainer.fit(module, loaders()[0])
        found.append((module.losses, module.model.full_state_dict()))

    strategy = OSDPFabricStrategy({"pins": ["*=shard"]}, example_inputs=lambda batch: torch.randn(batch, 6))
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        empty: Any = nn.Linear(6, 8)
    assert empty.weight.is_meta
    torch.manual_seed(4)
    empty = fabric.setup_module(empty)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(empty.parameters(), lr=0.5))
    loss = empty(torch.ones(2, 6)).sum()
    fabric.backward(loss)
    optimizer.step()
    return [*found, ([mean(loss)], fabric.strategy.get_module_state_dict(empty._forward_module))]


def refused() -> list[str]:
    """Return what is said of what cannot work."""
    import lightning

    from osdp.integrations.lightning import OSDPFabricStrategy, OSDPStrategy

    class Apart(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = build(), nn.Linear(2, 2)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

    def fit(strategy: OSDPStrategy, module: Any, **options: Any) -> str:
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **QUIET, **options)
        return refusal(lambda: trainer.fit(module, *loaders()))

    others = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    stepped_model = build()
    stepped = torch.optim.SGD(stepped_model.parameters(), momentum=0.9)
    stepped_model(samples()[:1]).backward()
    stepped.step()
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=OSDPFabricStrategy(plan()))
    fabric.launch()
    parts = OSDPFabricStrategy(save_distributed_checkpoint=True)
    whole = module_of(build())
    whole.configure_optimizers = lambda: torch.optim.LBFGS(whole.parameters())
    return [
        refusal(lambda: OSDPStrategy().sharded),
        fit(OSDPStrategy(plan()), Apart()),
        fit(OSDPStrategy(plan(), module="model"), Apart()),
        fit(OSDPStrategy(plan(), module="decoder"), Apart()),
        fit(OSDPStrategy(plan()), module_of(build()), precision="16-true"),
        fit(OSDPStrategy(plan()), module_of(build()), sync_batchnorm=True),
        fit(OSDPStrategy(plan()), whole),
        refusal(lambda: fabric.setup(build(), others)),
        refusal(lambda: fabric.setup(stepped_model, stepped)),
        refusal(lambda: parts.save_checkpoint("nowhere", {})),
        refusal(lambda: parts.save_checkpoint("nowhere", {}, filter={"model": bool})),
    ]


SAID = (
    "has not set up the model yet",
    "cannot tell which of the LightningModule is the model",
    "trained parameters outside of the model",
    "has no module `decoder`",
    'description={"precision": "amp-bf16"}',
    "sync_batchnorm is not supported",
    "*=replicate",
    "parameters that are not the model's",
    "has stepped before its model was sharded",
    "hold one model",
    "got: filter",
)


def run_example(name: str, *arguments: object) -> str:
    """Return what a program of examples/integrations/ prints on this rank, which stays in its process group."""
    printed = io.StringIO()
    program = str(EXAMPLES / name)
    given = mock.patch.object(sys, "argv", [program, *map(str, arguments)])
    with given, mock.patch.object(dist, "destroy_process_group"), contextlib.redirect_stdout(printed):
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def shallow(**sizes: int) -> GPT2Config:
    """Stand in for the sizes in the examples: of their layers, two."""
    return GPT2Config(**{**sizes, "layers": 2})


def run_examples(folder: Path) -> list[str]:
    """Return what the examples print; that of Trainer goes on where it has stopped."""
    kept = ("--folder", folder / "example")
    with contextlib.nullcontext() if THOROUGH else mock.patch("osdp.models.config.GPT2Config", shallow):
        return [
            run_example("lightning_trainer.py", "--epochs", 1, *kept),
            run_example("lightning_trainer.py", "--epochs", 2, *kept, "--resume", folder / "example" / "epoch=0.ckpt"),
            run_example("lightning_fabric.py", "--epochs", 2, "--save", folder / "example.ckpt"),
        ]


def everything(rank: int, folder: Path) -> Any:
    """Return what the frameworks see, what they refuse and what the examples print; Lightning is imported once."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seen = [by(folder / name, parts) for name, (by, parts) in RUNS.items()]
    return seen, refused(), run_examples(folder), otherwise(), in_mixed_precision()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("lightning"), timeout_s=300)


@pytest.mark.parametrize("run", RUNS)
def test_a_framework_trains_as_one_process_does(by_rank: list[Any], run: str) -> None:
    wanted, number = reference(), list(RUNS).index(run)
    seen = by_rank[0][0][number]
    compare((seen.losses, seen.evaluated, seen.parameters), (wanted.losses, wanted.evaluated, wanted.parameters))
    assert by_rank[1][0][number].losses == seen.losses
    assert seen.file.is_dir() == RUNS[run][1]


@pytest.mark.parametrize("run", ["Trainer", "Fabric"])
def test_a_file_loads_in_one_process_without_lightning(by_rank: list[Any], run: str) -> None:
    wanted = reference()
    saved = torch.load(by_rank[0][0][list(RUNS).index(run)].file, weights_only=True)
    model = build()
    optimizer = optimizer_of(model.parameters())
    if run == "Trainer":
        model.load_state_dict({name.removeprefix("model."): one for name, one in saved["state_dict"].items()})
        optimizer.load_state_dict(saved["optimizer_states"][0])
    else:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    moments = {name: optimizer.state[one]["exp_avg_sq"] for name, one in model.named_parameters()}
    compare((dict(model.state_dict()), moments), (wanted.parameters, wanted.moments))
    assert {float(one["step"]) for one in optimizer.state.values()} == {STEPS}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-2 / (1 + STEPS))


def test_it_trains_in_mixed_precision_as_by_its_own_strategy(by_rank: list[Any]) -> None:
    """But for roundings to bf16: a layer of the plan is cut in two, whose products are each rounded."""
    for *_, (theirs, ours) in by_rank:
        assert len(theirs[0]) == HALF * ACCUMULATION
        assert ours[0] == [torch.tensor(loss).bfloat16().item() for loss in ours[0]]
        assert ours[0] == pytest.approx(theirs[0], rel=2**-7)
        far = {name: float((ours[1][name] - one).abs().max()) for name, one in theirs[1].items()}
        assert max(far.values()) < 5e-3, far  # a step's learning rate is 2e-2


def test_what_cannot_work_is_refused(by_rank: list[Any]) -> None:
    for _, refusals, *_ in by_rank:
        for text, part in zip(refusals, SAID, strict=True):
            assert part in text


def test_examples_learn(by_rank: list[Any]) -> None:
    (first, resumed, of_fabric), silent = (one[2] for one in by_rank)
    assert silent == ["", "", ""]
    held_out = [float(found) for text in (first, resumed) for found in re.findall(r"held out ([\d.]+)", text)]
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", of_fabric)]
    for values in (held_out, losses):
        assert len(values) == 2
        assert values[1] < values[0] < 5.55  # about ln 256, of an even distribution over bytes


def test_other_ways_train_alike(by_rank: list[Any]) -> None:
    by_hand, by_user, empty = by_rank[0][3]
    wanted = reference().losses[: HALF * ACCUMULATION]
    compare((by_hand[0], by_user[0]), (wanted, wanted))
    compare((by_hand[1],), (by_user[1],))
    torch.manual_seed(4)
    plain = nn.Linear(6, 8)
    loss = plain(torch.ones(2, 6)).sum()
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    compare(empty, ([loss.item()], dict(plain.state_dict())))
