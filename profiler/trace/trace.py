"""From a model to its `ModelGraph`: the pipeline of the tracer.

    build (dataless_device) -> operators, blocks (find_operators) -> a pass per micro-batch (metered_pass, op_meter)
      -> lines through the passes (affine_fit) -> ModelGraph (build_graph)

No tensor has data, nothing is computed, no device is needed.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from profiler.errors import OsdpError
from profiler.model_graph import Affine, ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.affine_fit import SINGLE, SIZES
from profiler.trace.build_graph import assemble
from profiler.trace.dataless_device import (
    DatalessDevice,
    FakeCpu,
    MetaDevice,
    adapt,
    feed,
    making,
    training,
    without_logs,
)
from profiler.trace.device_kernels import device_kernels
from profiler.trace.find_operators import Group, find_blocks, find_groups, merge_unrun
from profiler.trace.metered_pass import Pass, run_pass
from profiler.trace.op_meter import Memo
from profiler.trace.trace_errors import ModelError, explained, explained_inputs

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE_TYPES = ("cpu", "cuda")


def trace_model(
    source: ModelSource, precision: str = "fp32", device_type: str = "cpu", expert_imbalance: float = 1.0
) -> ModelGraph:
    """Measure a model's operators, calls and blocks without data and without a device.

    `precision` (`fp32`, `bf16`) is the dtype of parameters, floating buffers and floating inputs.
    `device_type` (`cpu`, `cuda`) is the type of the device whose attention and dropout kernels are
    assumed.  `expert_imbalance` is the largest load over the mean of what a router chooses from
    (`profiler.trace.data_dependent`).  Raises OsdpError for a model that cannot be traced, naming module and op.
    """
    for what, got, choices in (("precision", precision, PRECISIONS), ("device_type", device_type, DEVICE_TYPES)):
        if got not in choices:
            raise OsdpError(f"unknown {what}", got=got, expected=" or ".join(choices))
    with _no_garbage_collection(), without_logs():
        try:
            return _traced(source, precision, MetaDevice(expert_imbalance), device_type)
        except ModelError:
            return _traced(source, precision, FakeCpu(expert_imbalance), device_type)


def _traced(source: ModelSource, precision: str, device: DatalessDevice, device_type: str) -> ModelGraph:
    """Build the model on the device, run a pass per micro-batch and return the graph."""
    dtype = PRECISIONS[precision]
    what, expected = f"cannot build {source.name} without data", "build() to return an nn.Module on the meta device"
    advice = (
        "if it computes with tensor values (x.item(), loading weights), do that in Python numbers "
        'or in `with torch.device("cpu")`, or after OSDP has wrapped the module'
    )
    with device_kernels(device_type, device.torch_device.type):
        with explained(what, expected, advice):
            with making(device):
                module = source.build()
            _check_module(source.name, module)
            module = adapt(module, device, dtype)
        with training(module):
            groups, passes, samples, left_out = _run_sizes(module, source, dtype, device)
    graph: ModelGraph = _per_sample(assemble(source, precision, module, groups, passes), samples)
    skipped = tuple(operator.name for operator in graph.operators if operator.name in left_out)
    notes = list(device.data.assumptions)
    if skipped:
        names = ", ".join(dict.fromkeys(re.sub(r"\b[0-9]+\b", "*", name) for name in skipped))
        notes.append(
            f"left out of the forward of a rank on which nothing chooses them, so that several ranks cannot run "
            f"this model: {names}; run each on no rows there instead"
        )
    return replace(graph, notes=(*graph.notes, *notes), left_out=skipped)


def _per_sample(part: Any, samples: int) -> Any:
    """Return a part of a graph whose lines count `samples` as one, with lines that count one."""
    if samples == 1:
        return part
    if isinstance(part, Affine):
        return replace(part, per_sample=part.per_sample / samples)
    if isinstance(part, tuple):
        return tuple(_per_sample(item, samples) for item in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _per_sample(getattr(part, field.name), samples) for field in fields(part)})
    return part


def _check_module(name: str, module: nn.Module) -> None:
    """Raise OsdpError for what is not a module, is lazy, or has no trainable parameters."""
    if not isinstance(module, nn.Module):
        raise OsdpError(f"{name}: build() did not return a module", got=type(module).__name__, expected="an nn.Module")
    parameters = dict(module.named_parameters())
    for path, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            advice = "give the input sizes explicitly, as in nn.Linear instead of nn.LazyLinear"
            raise OsdpError(
                f"{name} is lazy: the shape of `{path}` is not known before its first forward", advice=advice
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        got = f"{len(parameters)} parameters, none with requires_grad"
        advice = "unfreeze what is to be trained with parameter.requires_grad_(True)"
        raise OsdpError(f"{name} has no trainable parameters", got=got, expected="at least one", advice=advice)


def _run_sizes(
    module: nn.Module, source: ModelSource, dtype: torch.dtype, device: DatalessDevice
) -> tuple[Sequence[Group], Sequence[Pass], int, set[str]]:
    """Return the operators, a pass per micro-batch, how many samples each of those counts as one.

    Last, the operators that are left out if all rows choose alike.
    """
    groups, blocks = find_groups(module), find_blocks(module)
    memo: Memo = {}

    def run(size: int, finer: int = 1, *, alike: bool = False) -> Pass:
        device.data.begin(max(1, size // SIZES[0]), alike=alike)
        with explained_inputs(source.name):
            inputs = feed(lambda: source.example_inputs(module, size * finer), device, dtype)
        return run_pass(source.name, module, groups, blocks, inputs, device, memo)

    trial = run(SIZES[0])
    if (finer := device.data.finer) > 1:
        trial = run(SIZES[0], finer)
    merged = merge_unrun(groups, {call.operator for call in trial.calls}, trial.ran)
    if trial.settled and merged == groups:
        passes = [trial]
    else:
        groups = merged
        passes = [run(SIZES[0], finer)]
        passes[0].kept_bytes = max(passes[0].kept_bytes, trial.kept_bytes)
    passes += [run(size, finer) for size in SIZES[1:]]
    with suppress(ModelError):
        passes.append(run(SINGLE, finer))
    left_out: set[str] = set()
    if device.data.assumptions:
        with suppress(ModelError):
            left_out = _names(groups, passes[0]) - _names(groups, run(SIZES[0], alike=True))
    return groups, passes, finer, left_out


def _names(groups: Sequence[Group], one: Pass) -> set[str]:
    """Return the names of the operators that a pass ran."""
    return {groups[call.operator].modules[0] for call in one.calls}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: freeing cycles at arbitrary times would make live memory irreproducible."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
