"""What can be checked before any rank is started: files, folders, names, and whether they fit together."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osdp.folders import make_folder
from osdp.planning.request import read_plan
from osdp.training.config import TrainConfig
from osdp.training.model_and_task import model_and_task
from osdp.training.tasks import Task
from planner.plan import Plan
from profiler.errors import OsdpError
from profiler.model_source import ModelSource

if TYPE_CHECKING:
    from torch import nn

CPU_RANKS = 2
"""Ranks that are started where there are no GPUs and the user does not say how many."""


@dataclass(frozen=True)
class Job:
    """A configuration with what it names."""

    config: TrainConfig
    source: ModelSource
    """The model, fed with as many tokens as a sample has."""
    hollow: nn.Module
    """The model without data, on the meta device."""
    task: Task
    plan: Plan | None
    """The plan of the plan file; None: to be planned."""
    device: str
    """`cpu` or `cuda`."""
    resume: Path | None
    """Checkpoint to continue from; None: from the start."""


def prepare(config: TrainConfig) -> Job:
    """Load what a configuration names and check that it fits together; raises OsdpError."""
    plan = None if config.plan is None else _plan(config, Path(config.plan))
    source, task, hollow = model_and_task(config)
    if plan is not None and plan.model.sequence_length != task.sequence_length:
        raise OsdpError(
            "the plan is for samples of another length",
            got=f"{plan.model.sequence_length} tokens",
            expected=f"{task.sequence_length}, as the task {task.name} has",
            advice=f"--seq {plan.model.sequence_length}, or another plan",
        )
    resume = _checkpoints(config)
    if config.trace is not None:
        from osdp.training.trace_step import ready_folder

        ready_folder(config.trace)
    if config.tensorboard is not None:
        make_folder(Path(config.tensorboard))
        if importlib.util.find_spec("tensorboard") is None:
            raise OsdpError(
                "TensorBoard is not installed", advice=".venv/bin/pip install tensorboard, or no --tensorboard"
            )
    return Job(config, source, hollow, task, plan, _device(config), resume)


def ranks_to_start(config: TrainConfig) -> int:
    """Return how many ranks this machine gets, for all nodes that it stands for.

    Raises OsdpError for more than it has GPUs, or GPUs that do not divide evenly.
    """
    import torch

    if _device(config) == "cpu":
        return (config.ranks_per_node or CPU_RANKS) * config.emulated_nodes
    available = torch.cuda.device_count()
    if config.ranks_per_node is None and available % config.emulated_nodes:
        raise OsdpError(
            "the GPUs do not divide evenly into nodes",
            got=f"{available} GPUs",
            expected=f"a multiple of {config.emulated_nodes}, the emulated nodes",
            advice="--ranks-per-node says how many each node gets",
        )
    ranks = available if config.ranks_per_node is None else config.ranks_per_node * config.emulated_nodes
    if ranks > available:
        raise OsdpError(
            "there are fewer GPUs than ranks",
            got=f"{ranks} ranks",
            expected=f"at most {available}, one for each GPU",
            advice="--device cpu",
        )
    return ranks


def check_ranks(plan: Plan, nodes: int, ranks_per_node: int) -> None:
    """Raise OsdpError if a plan is for another number of ranks."""
    wanted = plan.cluster
    if (wanted.nodes, wanted.gpus_per_node) != (nodes, ranks_per_node):
        raise OsdpError(
            "the plan is for another number of ranks",
            got=f"{nodes} nodes with {ranks_per_node} ranks each",
            expected=f"{wanted.nodes} with {wanted.gpus_per_node} each",
            advice=f"--ranks-per-node {wanted.gpus_per_node} on {wanted.nodes} nodes, or plan for what is there",
        )


def _device(config: TrainConfig) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise OsdpError("torch sees no GPU", got="device cuda", advice="--device cpu, or check nvidia-smi")
    return config.device if config.device != "auto" else "cuda" if has_gpu else "cpu"


def _plan(config: TrainConfig, path: Path) -> Plan:
    """Read a plan file and check it against what the configuration says too."""
    plan = read_plan(path)
    pairs = {
        "optimizer": (config.optimizer, plan.optimizer),
        "precision": (config.precision, plan.model.precision),
        "batch": (config.batch, plan.micro_batch),
    }
    ranks = plan.cluster.nodes * plan.cluster.gpus_per_node
    pairs["global_batch"] = (config.global_batch, plan.micro_batch * plan.accumulation * ranks)
    for name, (wanted, planned) in pairs.items():
        if wanted is not None and wanted != planned:
            raise OsdpError(
                f"the plan {path} is for another {name.replace('_', ' ')}",
                got=str(planned),
                expected=f"{wanted}, as the configuration says",
                advice=f"--{name.replace('_', '-')} {planned}, or plan again",
            )
    return plan


def _checkpoints(config: TrainConfig) -> Path | None:
    """Return the checkpoint to continue from; raises OsdpError for a folder that cannot be used."""
    from runtime.state.checkpoint import latest

    if config.checkpoint is not None:
        make_folder(Path(config.checkpoint))
    if config.resume not in ("auto", "never"):
        path = Path(config.resume)
        if not path.is_dir():
            raise OsdpError(
                f"there is no checkpoint {path}",
                expected="a folder such as checkpoints/step-000100",
                advice="--resume auto takes the newest whole one",
            )
        return path
    newest = latest(Path(config.checkpoint)) if config.checkpoint is not None else None
    if newest is not None and config.resume == "never":
        raise OsdpError(
            f"{config.checkpoint} holds checkpoints of another run",
            got=str(newest),
            expected="an empty folder where nothing is resumed",
            advice="--resume auto, or another --checkpoint",
        )
    return newest
