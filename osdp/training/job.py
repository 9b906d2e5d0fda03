"""What can be checked before any rank is started: model, data, files, folders, and whether they fit together.

A task fits a model if what it feeds is what the model's forward takes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp.planning.plan_file import read_plan
from osdp.planning.viewer_paths import check_viewer_paths
from osdp.resources import make_folder
from osdp.training.config import CHOICES, TrainConfig
from osdp.training.devices import check_gpus, chosen_device
from osdp.training.launch import CPU_RANKS
from osdp.training.sentence_pairs import MadeUp, SentencePairs, TextFile
from osdp.training.tasks import Addition, Bytes, Task
from osdp.training.trackers import check_installed
from osdp.zoo import load_model
from planner.optimizers import fused_name, plain_name
from planner.plan import Plan
from profiler.errors import OsdpError
from profiler.model_source import Inputs, ModelSource

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Job:
    """A configuration with what it names."""

    config: TrainConfig
    source: ModelSource
    """The model, fed with as many tokens as a sample has."""
    without_data: nn.Module
    """The model on the meta device."""
    task: Task
    plan: Plan | None
    """The plan of the plan file; None: to be planned."""
    device: str
    resume: Path | None
    """Checkpoint to continue from; None: from the start."""

    @property
    def optimizer(self) -> str:
        """The configured optimizer in the form that is stepped with: fused where it can be."""
        from runtime.optimizers import can_fuse

        name = self.config.optimizer
        return fused_name(name) if can_fuse(self.without_data.parameters()) else name


def prepare(config: TrainConfig) -> Job:
    """Load what a configuration names and check that it fits together; raises OsdpError."""
    plan = None if config.plan is None else _plan(config, Path(config.plan))
    source, task, without_data = model_and_task(config)
    if plan is not None and (length := plan.model.sequence_length) != task.sequence_length:
        what = "the plan is for samples of another length"
        expected = f"{task.sequence_length}, as the task {task.name} has"
        raise OsdpError(what, got=f"{length} tokens", expected=expected, advice=f"--seq {length}, or another plan")
    resume = _checkpoint(config)
    if config.html is not None:
        from osdp.report.render import check_html

        check_html(Path(config.html))
    if config.trace is not None:
        from osdp.training.trace_step import ready_folder

        ready_folder(config.trace)
    check_viewer_paths(config.memory_snapshot, config.timeline)
    if config.tensorboard is not None:
        make_folder(Path(config.tensorboard))
        if importlib.util.find_spec("tensorboard") is None:
            advice = ".venv/bin/pip install tensorboard, or no --tensorboard"
            raise OsdpError("TensorBoard is not installed", advice=advice)
    if config.tracker is not None:
        check_installed(config.tracker)
    return Job(config, source, without_data, task, plan, chosen_device(config.device), resume)


def ranks_to_start(config: TrainConfig) -> int:
    """Return how many ranks this machine gets, for all nodes that it stands for.

    Raises OsdpError for more than it has GPUs, or GPUs that do not divide evenly.
    """
    import torch

    nodes = config.emulated_nodes
    if chosen_device(config.device) == "cpu":
        return (config.ranks_per_node or CPU_RANKS) * nodes
    available = torch.cuda.device_count()
    if config.ranks_per_node is None and available % nodes:
        what, expected = "the GPUs do not divide evenly into nodes", f"a multiple of {nodes}, the emulated nodes"
        advice = "--ranks-per-node says how many each node gets"
        raise OsdpError(what, got=f"{available} GPUs", expected=expected, advice=advice)
    ranks = available if config.ranks_per_node is None else config.ranks_per_node * nodes
    check_gpus(ranks, available)
    return ranks


def check_restarts(config: TrainConfig, restarts: int, least_nodes: int | None) -> None:
    """Raise OsdpError if a run cannot be started again, or cannot be run on a number of nodes that changes."""
    if restarts and config.checkpoint is None:
        what = "a restart continues from a checkpoint, and none are written"
        raise OsdpError(what, got=f"--restarts {restarts}", expected="--checkpoint FOLDER too")
    if least_nodes is not None and config.plan is not None:
        what, advice = "a plan file is for one number of ranks", "--nnodes N, or no --plan: each start plans anew"
        raise OsdpError(what, got=f"--nodes with --plan {config.plan}", advice=advice)


def check_ranks(plan: Plan, nodes: int, ranks_per_node: int) -> None:
    """Raise OsdpError if a plan is for another number of ranks."""
    wanted = plan.cluster
    if (wanted.nodes, wanted.gpus_per_node) != (nodes, ranks_per_node):
        got = f"{nodes} nodes with {ranks_per_node} ranks each"
        expected = f"{wanted.nodes} with {wanted.gpus_per_node} each"
        advice = f"--ranks-per-node {wanted.gpus_per_node} on {wanted.nodes} nodes, or plan for what is there"
        raise OsdpError("the plan is for another number of ranks", got=got, expected=expected, advice=advice)


def _plan(config: TrainConfig, path: Path) -> Plan:
    """Read a plan file and check it against the configuration."""
    plan = read_plan(path)
    samples = plan.micro_batch * plan.accumulation * plan.cluster.nodes * plan.cluster.gpus_per_node
    of_model = {"precision": plan.model.precision, "master_weights": plan.model.master_weights or "none"}
    fixed = {"optimizer": plain_name(plan.optimizer), **of_model, "batch": plan.micro_batch}
    for name, planned in (fixed | {"global_batch": samples}).items():
        wanted = getattr(config, name)
        if wanted is not None and wanted != planned:
            what = f"the plan {path} is for another {name.replace('_', ' ')}"
            advice = f"--{name.replace('_', '-')} {planned}, or plan again"
            if planned not in CHOICES.get(name, (planned,)):
                advice = "plan again as the configuration says, or run the plan by osdp.OSDP in your own loop"
            raise OsdpError(what, got=str(planned), expected=f"{wanted}, as the configuration says", advice=advice)
    return plan


def _checkpoint(config: TrainConfig) -> Path | None:
    """Return the checkpoint to continue from; raises OsdpError for a folder that cannot be used."""
    from runtime.state.checkpoint import latest

    newest = None if config.checkpoint is None else latest(make_folder(Path(config.checkpoint)))
    if config.resume not in ("auto", "never"):
        path = Path(config.resume)
        if not path.is_dir():
            advice = "a folder such as checkpoints/step-000100, or --resume auto for the newest whole one"
            raise OsdpError(f"there is no checkpoint {path}", advice=advice)
        return path
    if newest is not None and config.resume == "never":
        what = f"{config.checkpoint} holds checkpoints of another run"
        advice = "--resume auto, or another --checkpoint"
        raise OsdpError(what, got=str(newest), expected="an empty folder where nothing is resumed", advice=advice)
    return newest


def model_and_task(config: TrainConfig) -> tuple[ModelSource, Task, nn.Module]:
    """Return the model fed as the task feeds it, the task, and the model without data on the meta device.

    Raises OsdpError if there is no such model or data, or the one cannot learn the other.
    """
    import torch

    source, task = _source_and_task(config)
    with torch.device("meta"):
        module = source.build()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        what = f"{config.model} has no parameter to train"
        advice = "parameter.requires_grad_(True); osdp.OSDP runs the forwards of a frozen model"
        raise OsdpError(what, expected="at least one with requires_grad", advice=advice)
    forward = inspect.signature(module.forward).parameters
    takes_tokens = any(parameter.kind is not parameter.KEYWORD_ONLY for parameter in forward.values())
    if config.task == "sentences":
        needed: Mapping[str, Any] = task.sample(0)[1]
        is_fitting, advice = set(needed) <= set(forward), "a BERT such as bert-large, or another --task"
        source = _fed_by(task, source)
    else:
        needed, (args, kwargs) = {"labels": None}, source.example_inputs(module, 1)
        one_label_per_token = len({tensor.shape for tensor in (*args, *kwargs.values())}) == 1
        is_fitting = set(kwargs) in ({"labels"}, {"input_ids", "labels"}) and one_label_per_token
        advice = "--task sentences for a BERT, or osdp.OSDP(your model) in your own loop"
    if not takes_tokens or not is_fitting:
        what = f"{config.model} cannot learn the task {task.name}"
        expected = f"forward(tokens, {', '.join(f'{name}=...' for name in needed)}) that returns the loss"
        raise OsdpError(what, got=f"forward({', '.join(forward)})", expected=expected, advice=advice)
    size = _vocabulary(module)
    if size is not None and size < task.vocabulary_size:
        what = f"{config.model} knows too few tokens for the task {task.name}"
        raise OsdpError(what, got=f"{size}", expected=f"at least {task.vocabulary_size}")
    return source, task, module


def _source_and_task(config: TrainConfig) -> tuple[ModelSource, Task]:
    if config.task == "addition":
        of_one_sum = 3 * config.digits + 1
        length = config.seq or of_one_sum
        if length < of_one_sum:
            expected = f"at least {of_one_sum} for numbers of {config.digits} digits"
            advice = "a larger --seq, or fewer --digits"
            raise OsdpError("a sum does not go into a sample", got=f"{length} tokens", expected=expected, advice=advice)
        return load_model(config.model, sequence_length=length), Addition(config.digits, length, config.seed)
    source = load_model(config.model, sequence_length=config.seq)
    length = source.sequence_length
    if config.task == "sentences":
        corpus = MadeUp() if config.data is None else TextFile(Path(config.data))
        return source, SentencePairs(corpus, length, config.seed)
    if length < 2:
        what = "a sample needs two tokens at least: one to predict the next from"
        raise OsdpError(what, got=f"{length}", advice="a larger --seq")
    assert config.data is not None, "the configuration is checked"
    return source, Bytes(Path(config.data), length, config.seed)


def _fed_by(task: Task, source: ModelSource) -> ModelSource:
    """Return a model with inputs of the shapes that a task has: ones, which every table has a row for."""
    import torch

    tokens, keywords = task.sample(0)

    def example_inputs(module: nn.Module, batch: int) -> Inputs:
        ones = partial(torch.ones, dtype=torch.int64, device=next(module.parameters()).device)
        return (ones((batch, *tokens.shape)),), {name: ones((batch, *keywords[name].shape)) for name in keywords}

    return dataclasses.replace(source, example_inputs=example_inputs)


def _vocabulary(module: nn.Module) -> int | None:
    """Return how many tokens a model knows, or None if it is not known."""
    from torch import nn

    config = getattr(module, "config", None)
    for name in ("vocabulary_size", "vocab_size"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return next((table.num_embeddings for table in tables), None)
