"""From a model to its `ModelGraph`: the pipeline of the tracer.

    build (dataless_device) -> operators, blocks (find_operators) -> a pass per micro-batch (metered_pass, op_meter)
      -> lines, or parabolas, through the passes (affine_fit) -> ModelGraph (build_graph)

No tensor has data, nothing is computed, no device is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import nn

from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.affine_fit import FOURTH, SINGLE, SIZES, StepsError
from profiler.trace.build_graph import assemble
from profiler.trace.dataless_device import DatalessDevice, FakeCpu, MetaDevice, adapt, construct, feed, training
from profiler.trace.device_kernels import device_kernels
from profiler.trace.find_operators import Group, find_blocks, find_groups, merge_unrun
from profiler.trace.metered_pass import Pass, run_pass, trains
from profiler.trace.op_meter import Memo
from profiler.trace.trace_errors import ModelError, explained, explained_inputs

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE_TYPES = ("cpu", "cuda")


def trace_model(
    source: ModelSource, precision: str = "fp32", device_type: str = "cpu", micro_batch: int | None = None
) -> ModelGraph:
    """Measure a model's operators, calls and blocks without data and without a device.

    `precision` (`fp32`, `bf16`) is the dtype of parameters and floating buffers; floating inputs are cast to it.
    `device_type` (`cpu`, `cuda`) is the type of the device whose attention and dropout kernels are
    assumed.  `micro_batch` is the only one that is of interest, if it is fixed: where costs step with
    it, they are measured there.  Raises OsdpError for a model that cannot be traced, naming module and op.
    """
    for what, got, choices in (("precision", precision, PRECISIONS), ("device_type", device_type, DEVICE_TYPES)):
        if got not in choices:
            raise OsdpError(f"unknown {what}", got=got, expected=" or ".join(choices))
    try:
        return _trace(source, precision, device_type, SIZES)
    except StepsError:
        if micro_batch is None:
            raise
        return _trace(source, precision, device_type, (micro_batch,))


def _trace(source: ModelSource, precision: str, device_type: str, sizes: Sequence[int]) -> ModelGraph:
    with _no_garbage_collection():
        try:
            found = _survey(source, PRECISIONS[precision], MetaDevice(), device_type, sizes)
        except ModelError as error:
            try:
                found = _survey(source, PRECISIONS[precision], FakeCpu(), device_type, sizes)
            except ModelError:
                raise
            except OsdpError:  # what the builder says of fake tensors; without them it had no complaint
                raise error from None
    return assemble(source, precision, *found)


def _survey(
    source: ModelSource, dtype: torch.dtype, device: DatalessDevice, device_type: str, sizes: Sequence[int]
) -> tuple[nn.Module, Sequence[Group], Mapping[int, Pass]]:
    """Build the model on the device and run a pass per micro-batch."""
    what, expected = f"cannot build {source.name} without data", "build() to return an nn.Module on the meta device"
    advice = (
        "if it computes with tensor values (x.item(), loading weights), do that in Python numbers "
        'or in `with torch.device("cpu")`, or after OSDP has wrapped the module'
    )
    with device_kernels(device_type, device.torch_device.type):
        with explained(what, expected, advice):
            module = construct(source.build, device)
            _check_module(source.name, module)
            module = adapt(module, device, dtype)
        with training(module) if trains(module) else nullcontext():  # what is only run is in the mode it is run in
            return module, *_run_sizes(module, source, dtype, device, sizes)


def _check_module(name: str, module: nn.Module) -> None:
    """Raise OsdpError for what is not a module, is lazy, or has no parameters."""
    if not isinstance(module, nn.Module):
        raise OsdpError(f"{name}: build() did not return a module", got=type(module).__name__, expected="an nn.Module")
    parameters = dict(module.named_parameters())
    for path, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            advice = "give the input sizes explicitly, as in nn.Linear instead of nn.LazyLinear"
            raise OsdpError(
                f"{name} is lazy: the shape of `{path}` is not known before its first forward", advice=advice
            )
    if not parameters:
        raise OsdpError(f"{name} has no parameters", expected="at least one: there is nothing to plan")


def _run_sizes(
    module: nn.Module, source: ModelSource, dtype: torch.dtype, device: DatalessDevice, sizes: Sequence[int]
) -> tuple[Sequence[Group], Mapping[int, Pass]]:
    groups, blocks = find_groups(module), find_blocks(module)
    memo: Memo = {}

    def run(size: int) -> Pass:
        with explained_inputs(source.name):
            inputs = feed(lambda: source.example_inputs(module, size), device)
        return run_pass(source, module, groups, blocks, inputs, dtype, device, memo)

    first, *others = sizes
    trial = run(first)
    merged = merge_unrun(groups, {call.operator for call in trial.calls}, trial.ran)
    passes = {first: trial}
    if not (trial.settled and merged == groups):
        groups = merged
        passes[first] = run(first)
        passes[first].kept_bytes = max(passes[first].kept_bytes, trial.kept_bytes)
    passes |= {size: run(size) for size in others}
    if others:
        sums = [one.sums for one in passes.values()]
        if any(one - 2 * two + three for one, two, three in zip(*sums, strict=False)):
            passes[FOURTH] = run(FOURTH)
        with suppress(ModelError):
            passes[SINGLE] = run(SINGLE)
    return groups, passes


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
