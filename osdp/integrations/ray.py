"""Workers of Ray Train train a model as planned, and report checkpoints from which any number of workers go on.

    def train(settings):
        model = prepare_model(Model(), description, device_info)
        optimizer = torch.optim.AdamW(model.parameters())
        done = resume(model, optimizer) or {"step": 0}
        ...
        report({"loss": loss.item()}, model, optimizer, {"step": step})

A checkpoint has one file, `state.pt`, with whole tensors as one process would save them: rank 0 gathers them in host
memory, and each rank reads its parts.  For models that do not fit there, `OSDP.save_checkpoint` writes to a folder
that the workers share.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from osdp.api import OSDP
from osdp.description import Described
from osdp.planning.rank_grid import DeviceInfo
from profiler.errors import OsdpError
from runtime.apply_schedule import default_device
from runtime.state.full_optimizer_state import full_optimizer_state, load_full_optimizer_state

FILE = "state.pt"


def prepare_model(
    model: nn.Module, description: Described = None, device_info: DeviceInfo = None, **options: Any
) -> OSDP:
    """Shard a model, in place of `ray.train.torch.prepare_model`; takes what `OSDP` takes. A collective call.

    Raises OsdpError, also if Ray has given this worker another device than OSDP takes.
    """
    given, own = ray.train.torch.get_device(), default_device()
    if given != own:
        what = "Ray has given this worker another device than OSDP takes"
        backend = 'torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl")'
        advice = f"give TorchTrainer {backend} on GPUs, and every worker one GPU"
        raise OsdpError(what, got=str(given), expected=str(own), advice=advice)
    return OSDP(model, description, device_info, **options)


def report(
    metrics: Mapping[str, Any], model: OSDP, optimizer: Optimizer | None = None, extra: Mapping[str, Any] | None = None
) -> None:
    """Report metrics with a checkpoint; `ray.train.report` does without one. All workers call it.

    extra: what `resume` shall return beside; numbers, text, tensors, and lists and dicts of these.
    """
    state: dict[str, Any] = {"model": model.full_state_dict(), "extra": dict(extra or {})}
    if optimizer is not None:
        state["optimizer"] = full_optimizer_state(optimizer, model.sharded.local_shards, model.sharded.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            torch.save(state, Path(folder, FILE))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def resume(model: OSDP, optimizer: Optimizer | None = None) -> dict[str, Any] | None:
    """Load the checkpoint from which Ray goes on, if there is one, and return its `extra`. All workers call it.

    Raises OsdpError for a checkpoint of other contents.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        path = Path(folder, FILE)
        if not path.is_file():
            what, expected = f"{folder} cannot be loaded: it has no {FILE}", "a checkpoint of report(...)"
            raise OsdpError(what, got=", ".join(sorted(one.name for one in path.parent.iterdir())), expected=expected)
        state = torch.load(path, "cpu", mmap=True, weights_only=True)
        if optimizer is not None and "optimizer" not in state:
            advice = "resume(model) without the optimizer, or report(metrics, model, optimizer)"
            raise OsdpError("the checkpoint holds no optimizer's state", got=", ".join(state), advice=advice)
        model.load_state_dict(state["model"])
        if optimizer is not None:
            load_full_optimizer_state(optimizer, model.sharded.local_shards, state["optimizer"])
    extra: dict[str, Any] = state["extra"]
    return extra
