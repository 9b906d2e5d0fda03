"""What can be checked before any rank is started: files, folders, names, and whether they fit together."""

from __future__ import annotations

import importlib.util
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from osdp.planning import read_plan
from osdp.training.config import TrainConfig
from osdp.training.tasks import Addition, Bytes, Task
from osdp.zoo import load_model
from planner.plan import Plan
from profiler.errors import OsdpError
from profiler.source import ModelSource

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
    source, task = _model_and_task(config)
    hollow = _build_hollow(config.model, source, task)
    if plan is not None and plan.model.sequence_length != task.sequence_length:
        raise OsdpError("the plan is for samples of another length", got=f"{plan.model.sequence_length} tokens",
                        expected=f"{task.sequence_length}, as the task {task.name} has",
                        advice=f"--seq {plan.model.sequence_length}, or another plan")  # fmt: skip
    resume = _checkpoints(config)
    if config.tensorboard is not None:
        _check_folder(Path(config.tensorboard))
        if importlib.util.find_spec("tensorboard") is None:
            raise OsdpError("TensorBoard is not installed", advice="pip install tensorboard, or no --tensorboard")
    return Job(config, source, hollow, task, plan, _device(config), resume)


def ranks_to_start(config: TrainConfig) -> int:
    """Return how many ranks this node gets; raises OsdpError for more than it has GPUs."""
    import torch

    if _device(config) == "cpu":
        return config.ranks_per_node or CPU_RANKS
    available = torch.cuda.device_count()
    if config.ranks_per_node is not None and config.ranks_per_node > available:
        raise OsdpError("there are fewer GPUs than ranks", got=f"{config.ranks_per_node} ranks",
                        expected=f"at most {available}, one for each GPU", advice="--device cpu")  # fmt: skip
    return config.ranks_per_node or available


def check_ranks(plan: Plan, nodes: int, ranks_per_node: int) -> None:
    """Raise OsdpError if a plan is for another number of ranks."""
    wanted = plan.cluster
    if (wanted.nodes, wanted.gpus_per_node) != (nodes, ranks_per_node):
        raise OsdpError("the plan is for another number of ranks",
                        got=f"{nodes} nodes with {ranks_per_node} ranks each",
                        expected=f"{wanted.nodes} with {wanted.gpus_per_node} each",
                        advice=f"--ranks-per-node {wanted.gpus_per_node} on {wanted.nodes} nodes, or plan for what "
                               "is there")  # fmt: skip


def _device(config: TrainConfig) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise OsdpError("torch sees no GPU", got="device cuda", advice="--device cpu, or check nvidia-smi")
    return config.device if config.device != "auto" else "cuda" if has_gpu else "cpu"


def _model_and_task(config: TrainConfig) -> tuple[ModelSource, Task]:
    if config.task == "addition":
        of_one_sum = 3 * config.digits + 1
        length = config.seq or of_one_sum
        if length < of_one_sum:
            raise OsdpError("a sum does not go into a sample", got=f"{length} tokens",
                            expected=f"at least {of_one_sum} for numbers of {config.digits} digits",
                            advice="a larger --seq, or fewer --digits")  # fmt: skip
        return load_model(config.model, sequence_length=length), Addition(config.digits, length, config.seed)
    assert config.data is not None, "the configuration is checked"
    source = load_model(config.model, sequence_length=config.seq)
    if source.sequence_length < 2:
        raise OsdpError("a sample needs two tokens at least: one to predict the next from",
                        got=f"{source.sequence_length}", advice="a larger --seq")  # fmt: skip
    return source, Bytes(Path(config.data), source.sequence_length, config.seed)


def _build_hollow(spec: str, source: ModelSource, task: Task) -> nn.Module:
    """Build the model without data; raises OsdpError if it does not predict tokens, or lacks some of them."""
    import torch

    with torch.device("meta"):
        module = source.build()
    known = inspect.signature(module.forward).parameters
    positional = [name for name, parameter in known.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    _, keywords = source.example_inputs(module, 1)
    if not positional or set(keywords) not in ({"labels"}, {"input_ids", "labels"}):
        raise OsdpError(f"{spec} is no language model that this command can train",
                        got=f"forward({', '.join(known)})",
                        expected="forward(tokens, labels=...) that returns the loss of the next token",
                        advice="another model, or osdp.OSDP(your model) in a loop of your own")  # fmt: skip
    size = _vocabulary(module)
    if size is not None and size < task.vocabulary_size:
        raise OsdpError(f"{spec} knows too few tokens for the task {task.name}", got=f"{size}",
                        expected=f"at least {task.vocabulary_size}")  # fmt: skip
    return module


def _vocabulary(module: nn.Module) -> int | None:
    """Return how many tokens a model knows, or None if it does not say."""
    from torch import nn

    config = getattr(module, "config", None)
    for name in ("vocabulary_size", "vocab_size"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return next((table.num_embeddings for table in tables), None)


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
            raise OsdpError(f"the plan {path} is for another {name.replace('_', ' ')}", got=str(planned),
                            expected=f"{wanted}, as the configuration says",
                            advice=f"--{name.replace('_', '-')} {planned}, or plan again")  # fmt: skip
    return plan


def _checkpoints(config: TrainConfig) -> Path | None:
    """Return the checkpoint to continue from; raises OsdpError for a folder that cannot be used."""
    from runtime.checkpoint import latest

    if config.checkpoint is not None:
        _check_folder(Path(config.checkpoint))
    if config.resume not in ("auto", "never"):
        path = Path(config.resume)
        if not path.is_dir():
            raise OsdpError(f"there is no checkpoint {path}", expected="a folder such as checkpoints/step-000100",
                            advice="--resume auto takes the newest whole one")  # fmt: skip
        return path
    newest = latest(Path(config.checkpoint)) if config.checkpoint is not None else None
    if newest is not None and config.resume == "never":
        raise OsdpError(f"{config.checkpoint} holds checkpoints of another run", got=str(newest),
                        expected="an empty folder where nothing is resumed",
                        advice="--resume auto, or another --checkpoint")  # fmt: skip
    return newest


def _check_folder(path: Path) -> None:
    """Make a folder unless it is there; raises OsdpError if nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OsdpError(f"the folder {path} cannot be made", got=error.strerror or str(error),
                        advice="another folder") from None  # fmt: skip
    if not os.access(path, os.W_OK | os.X_OK):
        raise OsdpError(f"nothing can be written into {path}", got="no permission", advice="another folder")
