"""osdp/integrations/ray.py: workers train as one process does, with Ray Train, and with a stand-in for it on ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from one_process import (
    ACCUMULATION,
    HALF,
    MAX_NORM,
    MAX_VALUE,
    RANKS,
    STEPS,
    batches,
    build,
    compare,
    optimizer_of,
    plan,
    reference,
    schedule_of,
)
from ranks import run_ranks
from torch import Tensor, nn
from toys import refusal


def mean(loss: Tensor) -> float:
    """Return the mean over ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()


def train(settings: dict[str, Any]) -> None:
    """Be a worker: train half of the steps, or where there is a checkpoint the other half, and report."""
    from osdp.integrations.ray import prepare_model, report, resume

    model = prepare_model(build(), plan())
    optimizer = optimizer_of(model.parameters())
    schedule = schedule_of(optimizer)
    done = resume(model, optimizer) or {"step": 0, "losses": [], "evaluated": []}
    if done["step"]:
        schedule.load_state_dict(done["schedule"])
    losses, evaluated, (*trained, held_out) = done["losses"], done["evaluated"], batches()
    for step in range(done["step"], done["step"] + HALF):
        for index in range(ACCUMULATION):
            loss = model(trained[(step * ACCUMULATION + index) % len(trained)][dist.get_rank()])
            (loss / ACCUMULATION).backward()
            losses.append(mean(loss))
        if step < HALF:
            model.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        evaluated.append(mean(model(held_out[dist.get_rank()])))
    extra = {"step": step + 1, "losses": losses, "evaluated": evaluated, "schedule": schedule.state_dict()}
    report({"step": step + 1}, model, optimizer, extra)


def check(file: Path) -> None:
    """Assert that a checkpoint holds what one process comes to, and loads there."""
    wanted, saved = reference(), torch.load(file, weights_only=True)
    seen = saved["extra"]
    compare((seen["losses"], seen["evaluated"]), (wanted.losses, wanted.evaluated))
    model = build()
    optimizer = optimizer_of(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    moments = {name: optimizer.state[one]["exp_avg_sq"] for name, one in model.named_parameters()}
    compare((dict(model.state_dict()), moments), (wanted.parameters, wanted.moments))


class StandIn(ModuleType):
    """`ray.train` as far as it is called: a checkpoint is a folder, and what is reported is kept."""

    def __init__(self, kept: Path) -> None:
        super().__init__("ray.train")
        self.kept, self.reported = kept, False
        self.torch = ModuleType("ray.train.torch")
        self.torch.get_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]

    class Checkpoint:
        """A folder."""

        def __init__(self, folder: Path) -> None:
            self.folder = folder

        @classmethod
        def from_directory(cls, folder: str) -> Any:
            return cls(Path(folder))

        @contextmanager
        def as_directory(self) -> Iterator[str]:
            yield str(self.folder)

    def get_checkpoint(self) -> Any:
        return self.Checkpoint(self.kept) if self.kept.is_dir() else None

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        if checkpoint is not None:
            shutil.copytree(checkpoint.folder, self.kept, dirs_exist_ok=True)
            Path(self.kept, "metrics.json").write_text(json.dumps(metrics))
        dist.barrier()


def train_twice(rank: int, folder: Path) -> list[str]:
    """Train half, and the other half as another run; return what is refused."""
    stand_in = StandIn(folder)
    package = ModuleType("ray")
    package.train = stand_in  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"ray": package, "ray.train": stand_in, "ray.train.torch": stand_in.torch}):
        train({})
        train({})
        from osdp.integrations.ray import prepare_model, report, resume

        model = prepare_model(build(), plan())
        stand_in.kept = folder / "without"
        report({}, model)
        said = [refusal(lambda: resume(model, optimizer_of(model.parameters())))]
        assert resume(model) == {}
        dist.barrier()
        if rank == 0:
            (folder / "without" / "state.pt").unlink()
        dist.barrier()
        said.append(refusal(lambda: resume(model)))
        stand_in.torch.get_device = lambda: torch.device("cuda", 1)  # type: ignore[attr-defined]
        return [*said, refusal(lambda: prepare_model(build(), plan()))]


def test_workers_train_as_one_process_does(tmp_path: Path) -> None:
    by_rank = run_ranks(train_twice, RANKS, tmp_path / "kept", timeout_s=120)
    check(tmp_path / "kept" / "state.pt")
    assert json.loads((tmp_path / "kept" / "metrics.json").read_text()) == {"step": STEPS}
    parts = ("holds no optimizer's state", "it has no state.pt", "got: cuda:1")
    for said in by_rank:
        for text, part in zip(said, parts, strict=True):
            assert part in text


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")
def test_workers_of_ray_train_as_one_process_does(tmp_path: Path) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    ray.init(num_cpus=RANKS, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        for _ in range(2):  # a run of the same name goes on from the last checkpoint
            trainer = TorchTrainer(
                train,
                train_loop_config={},
                scaling_config=ScalingConfig(num_workers=RANKS),
                torch_config=TorchConfig(backend="gloo"),
                run_config=RunConfig(name="halves", storage_path=str(tmp_path)),
            )
            found = trainer.fit()
        with found.checkpoint.as_directory() as folder:
            check(Path(folder, "state.pt"))
    finally:
        ray.shutdown()
