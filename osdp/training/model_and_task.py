"""The model and the task of a run, and whether they fit: what the task feeds is what the model's forward takes."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp.training.config import TrainConfig
from osdp.training.sentence_pairs import Corpus, MadeUp, SentencePairs, TextFile
from osdp.training.tasks import Addition, Bytes, Task
from osdp.zoo import load_model
from profiler.errors import OsdpError
from profiler.model_source import Inputs, ModelSource

if TYPE_CHECKING:
    from torch import nn


def model_and_task(config: TrainConfig) -> tuple[ModelSource, Task, nn.Module]:
    """Return the model fed as the task feeds it, the task, and the model without data on the meta device.

    Raises OsdpError if there is no such model or data, or the one cannot learn the other.
    """
    if config.task == "sentences":
        return _sentences(config)
    source, task = _addition(config) if config.task == "addition" else _bytes(config)
    module = _hollow(source)
    _, keywords = source.example_inputs(module, 1)
    if not _takes_tokens(module) or set(keywords) not in ({"labels"}, {"input_ids", "labels"}):
        raise OsdpError(
            f"{config.model} is no language model that this command can train",
            got=f"forward({', '.join(_parameters(module))})",
            expected="forward(tokens, labels=...) that returns the loss of the next token",
            advice="--task sentences for a BERT, or osdp.OSDP(your model) in your own loop",
        )
    _check_vocabulary(config.model, module, task)
    return source, task, module


def _addition(config: TrainConfig) -> tuple[ModelSource, Task]:
    of_one_sum = 3 * config.digits + 1
    length = config.seq or of_one_sum
    if length < of_one_sum:
        raise OsdpError(
            "a sum does not go into a sample",
            got=f"{length} tokens",
            expected=f"at least {of_one_sum} for numbers of {config.digits} digits",
            advice="a larger --seq, or fewer --digits",
        )
    return load_model(config.model, sequence_length=length), Addition(config.digits, length, config.seed)


def _bytes(config: TrainConfig) -> tuple[ModelSource, Task]:
    assert config.data is not None, "the configuration is checked"
    source = load_model(config.model, sequence_length=config.seq)
    if source.sequence_length < 2:
        raise OsdpError(
            "a sample needs two tokens at least: one to predict the next from",
            got=f"{source.sequence_length}",
            advice="a larger --seq",
        )
    return source, Bytes(Path(config.data), source.sequence_length, config.seed)


def _sentences(config: TrainConfig) -> tuple[ModelSource, Task, nn.Module]:
    source = load_model(config.model, sequence_length=config.seq)
    corpus: Corpus = MadeUp() if config.data is None else TextFile(Path(config.data))
    task = SentencePairs(corpus, source.sequence_length, config.seed)
    module = _hollow(source)
    _, keywords = task.sample(0)
    if not _takes_tokens(module) or not set(keywords) <= set(_parameters(module)):
        raise OsdpError(
            f"{config.model} cannot learn the task sentences",
            got=f"forward({', '.join(_parameters(module))})",
            expected=f"forward(tokens, {', '.join(f'{name}=...' for name in keywords)}) that returns the loss",
            advice="a BERT such as bert-large, or another --task",
        )
    _check_vocabulary(config.model, module, task)
    return _fed_by(task, source), task, module


def _fed_by(task: Task, source: ModelSource) -> ModelSource:
    """Return a model with inputs of the shapes that a task has: ones, which every table has a row for."""
    import torch

    tokens, keywords = task.sample(0)

    def example_inputs(module: nn.Module, batch: int) -> Inputs:
        device = next(module.parameters()).device

        def ones(array: Any) -> torch.Tensor:
            return torch.ones((batch, *array.shape), dtype=torch.int64, device=device)

        return (ones(tokens),), {name: ones(array) for name, array in keywords.items()}

    return dataclasses.replace(source, example_inputs=example_inputs)


def _hollow(source: ModelSource) -> nn.Module:
    import torch

    with torch.device("meta"):
        return source.build()


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)


def _takes_tokens(module: nn.Module) -> bool:
    """Whether forward takes anything by position."""
    return any(parameter.kind is not parameter.KEYWORD_ONLY for parameter in _parameters(module).values())


def _check_vocabulary(spec: str, module: nn.Module, task: Task) -> None:
    size = _vocabulary(module)
    if size is not None and size < task.vocabulary_size:
        raise OsdpError(
            f"{spec} knows too few tokens for the task {task.name}",
            got=f"{size}",
            expected=f"at least {task.vocabulary_size}",
        )


def _vocabulary(module: nn.Module) -> int | None:
    """Return how many tokens a model knows, or None if it does not say."""
    from torch import nn

    config = getattr(module, "config", None)
    for name in ("vocabulary_size", "vocab_size"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return next((table.num_embeddings for table in tables), None)
