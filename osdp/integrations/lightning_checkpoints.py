"""Checkpoints of Lightning: one file with whole tensors, or a folder to which each rank writes its parts.

The folder is one of `runtime/state/checkpoint.py`, with what else Lightning saves in its manifest: a path holds all of
a checkpoint, or none.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch.optim import Optimizer

from osdp.api import OSDP
from profiler.errors import OsdpError
from runtime.state.full_optimizer_state import full_optimizer_state, load_full_optimizer_state

REST = "lightning"
"""What a folder has in its manifest besides model and optimizer: a file of `torch.save`, in base64."""
WHOLE = "save_distributed_checkpoint=False"


@dataclass(frozen=True)
class LoadedByParts:
    """An optimizer as Fabric sees it while a checkpoint is loaded."""

    optimizer: Optimizer
    model: OSDP

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors, on rank 0. A collective call."""
        return whole_state(self.optimizer, self.model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's parts of whole tensors."""
        load_full_optimizer_state(self.optimizer, self.model.sharded.local_shards, state)


class MappedCheckpointIO(TorchCheckpointIO):
    """Reads no more of a file on this machine than is used: of a sharded model a rank's parts."""

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Return what a checkpoint holds; it may run code only if `weights_only` is False."""
        only = weights_only is not False
        held: dict[str, Any]
        if Path(path).is_file():
            held = torch.load(path, "cpu", mmap=True, weights_only=only)
        else:
            held = super().load_checkpoint(path, map_location, only)
        return held


def save_parts(path: Any, model: OSDP, optimizers: Sequence[Optimizer], rest: dict[str, Any]) -> None:
    """Save a folder, and in its manifest the rest: one that is there holds all, or is replaced by one that does."""
    if len(optimizers) > 1:
        what = "folders to which each rank writes its parts hold one optimizer"
        raise OsdpError(what, got=f"{len(optimizers)} optimizers", advice=WHOLE)
    file = io.BytesIO()
    torch.save(rest, file)
    optimizer = optimizers[0] if optimizers else None
    model.save_checkpoint(path, optimizer, {REST: base64.b64encode(file.getvalue()).decode()})


def load_parts(path: Any, model: OSDP, optimizers: Sequence[Optimizer], weights_only: bool | None) -> dict[str, Any]:
    """Load model and optimizer from a folder, each rank its parts; return the rest. Raises OsdpError."""
    extra = model.load_checkpoint(path, optimizers[0] if optimizers else None)
    if REST not in extra:
        raise OsdpError(f"{path} is not a checkpoint of Lightning", expected="one that these strategies saved")
    file = io.BytesIO(base64.b64decode(extra[REST]))
    rest: dict[str, Any] = torch.load(file, "cpu", weights_only=weights_only is not False)
    return rest


def save_state(path: Any, state: Mapping[str, Any], filter: Mapping[str, Any] | None) -> None:
    """Save a folder of what Fabric's `state` holds. Raises OsdpError for what it cannot hold."""
    if filter:
        raise OsdpError("folders to which each rank writes its parts hold all of them", got="filter", advice=WHOLE)
    model, optimizers, others = _sorted(state)
    rest = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in others.items()}
    save_parts(path, model, optimizers, rest)


def load_into(path: Any, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load a folder into what Fabric's `state` holds; return the rest."""
    model, optimizers, others = _sorted(state)
    rest = load_parts(path, model, optimizers, weights_only)
    if strict and (missing := sorted(others.keys() - rest.keys())):
        raise OsdpError(f"{path} lacks what shall be loaded", got=", ".join(rest), expected=", ".join(missing))
    for name in others.keys() & rest.keys():
        value = rest.pop(name)
        if hasattr(others[name], "load_state_dict"):
            others[name].load_state_dict(value)
        else:
            state[name] = value
    return rest


def _sorted(state: Mapping[str, Any]) -> tuple[OSDP, list[Optimizer], dict[str, Any]]:
    """Return the model, the optimizers and the others of what Fabric saves. Raises OsdpError for several models."""
    models = [one for one in state.values() if isinstance(one, OSDP)]
    if len(models) != 1:
        what, got = "folders to which each rank writes its parts hold one model", f"{len(models)} models of OSDP"
        raise OsdpError(what, got=got, advice=f"save each by itself, or {WHOLE}")
    optimizers = [one for one in state.values() if isinstance(one, Optimizer)]
    others = {name: one for name, one in state.items() if not isinstance(one, OSDP | Optimizer)}
    return models[0], optimizers, others


def whole_state(optimizer: Optimizer, model: OSDP) -> dict[str, Any]:
    """Return the state dict that an optimizer would have in one process, on rank 0. A collective call."""
    return full_optimizer_state(optimizer, model.sharded.local_shards, model.sharded.device)
