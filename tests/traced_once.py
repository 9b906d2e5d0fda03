"""Graphs of small models that ranks and programs train, of which each is traced once in a test run.

To trace takes most of the time of such a rank.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from graph_files import traced_by_any
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from osdp.models.user_factory import source_of
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.trace import trace_model

GRAPHS: dict[str, ModelGraph] = {}
"""By what `graph_once` tells them apart."""
HOW_MADE = {"_is_hf_initialized", "name_or_path"}
"""What transformers notes on a module of how it was made, such as a temporary file that each rank has another of."""
UNTOLD = "", 1.0
"""Master weights and imbalance of experts of a trace that is told neither."""
BY_EACH = "is_traced_by_each_rank"
"""Attribute of models that run collectives, so that their graphs depend on the number of ranks, and on the rank."""
FAILED, TRACE_TIMEOUT = b"failed", timedelta(seconds=60)
"""What ranks find in place of a graph where the rank that traced it failed, and how long they wait for either."""


def graph_once(module: nn.Module, name: str, settings: Sequence[Any], trace: Callable[[], ModelGraph]) -> ModelGraph:
    """Return the graph of a model for CPUs; of models that print alike, and have alike parameters, one is traced."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    known = [(path, type(one), one.dtype, one.shape, one.stride(), one.requires_grad) for path, one in tensors]
    classes = [(type(part).__module__, type(part).__qualname__, _told(part)) for part in module.modules()]
    key = f"{name} {tuple(settings)} {module} {known} {classes}"
    if key not in GRAPHS:
        texts = {_text_of(one.__module__) for part in module.modules() for one in type(part).__mro__}
        test_file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]  # others may give it other inputs
        shared = None if None in texts else f"{test_file} {key} {sorted(filter(None, texts))}"
        GRAPHS[key] = _traced_by_one(key, trace if shared is None else lambda: traced_by_any(shared, trace))
    return GRAPHS[key]


def _text_of(name: str) -> str | None:
    """Return what tells the text of a Python module from other programs' modules of that name; None: it has none.

    Programs and files that tests write have modules of the same names.  Empty for installed packages.
    """
    if name in sys.builtin_module_names:
        return ""
    file = getattr(sys.modules.get(name), "__file__", None)
    try:
        return "" if "site-packages" in file else sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):  # it has no file, or that is gone
        return None


def _traced_by_one(key: str, trace: Callable[[], ModelGraph]) -> ModelGraph:
    """Trace on the rank that asks first; others wait for its graph, and trace themselves where that fails."""
    if not dist.is_initialized():
        return trace()
    store, name = _get_default_store(), f"graph {sha256(key.encode()).hexdigest()}"
    if store.add(f"{name} asked", 1) > 1:
        store.wait([name], TRACE_TIMEOUT)
        pickled = store.get(name)
        return pickle.loads(pickled) if pickled != FAILED else trace()
    pickled = FAILED
    try:
        graph = trace()
        pickled = pickle.dumps(graph)
    finally:
        store.set(name, pickled)
    return graph


def _told(module: nn.Module) -> list[tuple[str, Any]]:
    """Return what a module was told that it need not print."""
    told = ((name, value) for name, value in vars(module).items() if isinstance(value, (str, int, float, tuple)))
    return [(name, value) for name, value in told if name not in HOW_MADE]


def trace_once(
    source: ModelSource,
    precision: str = "fp32",
    device_type: str = "cpu",
    micro_batch: int | None = None,
    *others: Any,
    world_size: int | None = None,
) -> ModelGraph:
    """Stand in for `trace_model`, which takes most of the time of a small model."""
    trace = partial(trace_model, world_size=world_size)
    if device_type != "cpu" or (isinstance(source, Known) and hasattr(source.live, BY_EACH)):
        source = source.copied() if isinstance(source, Known) else source
        return trace(source, precision, device_type, micro_batch, *others)
    settings = precision, device_type, None, *others, *UNTOLD[len(others) :], source.sequence_length
    given = precision, device_type, micro_batch, *others
    if isinstance(source, Known):
        copied = source.copied
        return graph_once(source.live, source.name, settings, lambda: trace(copied(), *given))
    try:
        with torch.device("meta"):
            module = source.build()
    except OsdpError:  # of a model that cannot be built so
        return trace(source, *given)
    return graph_once(module, source.name, settings, lambda: trace(source, *given))


@dataclass(frozen=True)
class Known(ModelSource):
    """A live model, which OSDP copies without data, twice, only if its graph is not known."""

    live: nn.Module = field(kw_only=True)
    copied: Callable[[], ModelSource] = field(kw_only=True)


def source_once(model: Any, name: str, sequence_length: int | None, example_inputs: Any) -> ModelSource:
    """Stand in for `source_of`, whose copies take most of what is left where a small model is traced once."""
    copied = partial(source_of, model, name, sequence_length, example_inputs)
    if not isinstance(model, nn.Module) or example_inputs or any(part._forward_pre_hooks for part in model.modules()):
        return copied()  # what is wrapped already has hooks
    return Known(name, lambda: model, lambda module, batch: ((), {}), sequence_length or 0, live=model, copied=copied)


def install() -> None:
    """Have OSDP trace so in this process and its forks, where a model is wrapped or a training chooses its plan."""
    for place in ("osdp.prepare", "osdp.training.choose_plan", "osdp.uneven_lengths.fsdp_vs_odc"):
        mock.patch(f"{place}.trace_model", trace_once).start()
    mock.patch("osdp.prepare.source_of", source_once).start()
