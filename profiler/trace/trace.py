"""From a model to its `ModelGraph`: the pipeline of the tracer.

    build (dataless_device) -> operators, blocks (find_operators) -> a pass per micro-batch (metered_pass, op_meter)
      -> lines, or parabolas, through the passes (affine_fit) -> ModelGraph (build_graph)

No tensor has data, nothing is computed, no device is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

from torch import nn

from profiler.errors import OsdpError
from profiler.mixed_precision import COMPUTE_DTYPE, MASTER_WEIGHTS, RestingDtype, inputs_cast, resting_dtypes
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

DEVICE_TYPES = ("cpu", "cuda")


def trace_model(
    source: ModelSource,
    precision: str = "fp32",
    device_type: str = "cpu",
    micro_batch: int | None = None,
    master_weights: str = "",
) -> ModelGraph:
    """Measure a model's operators, calls and blocks without data and without a device.

    `precision` (`fp32`, `bf16`) is that of `profiler.mixed_precision`, as is `master_weights` (`fp32`, or empty).
    `device_type` (`cpu`, `cuda`) is the type of the device whose attention and dropout kernels are
    assumed.  `micro_batch` is the only one that is of interest, if it is fixed: where costs step with
    it, they are measured there.  Raises OsdpError for a model that cannot be traced, naming module and op.
    """
    asked = (
        ("precision", precision, COMPUTE_DTYPE),
        ("device_type", device_type, DEVICE_TYPES),
        ("master_weights", master_weights, MASTER_WEIGHTS),
    )
    for what, got, choices in asked:
        if got not in choices:
            raise OsdpError(f"unknown {what}", got=got, expected=" or ".join(choice for choice in choices if choice))
    dtypes = precision, master_weights
    try:
        return _trace(source, dtypes, device_type, SIZES)
    except StepsError:
        if micro_batch is None:
            raise
        return _trace(source, dtypes, device_type, (micro_batch,))


def _trace(source: ModelSource, dtypes: tuple[str, str], device_type: str, sizes: Sequence[int]) -> ModelGraph:
    """Return the graph; `dtypes`: precision and master weights."""
    with _no_garbage_collection():
        try:
            found = _survey(source, dtypes, MetaDevice(), device_type, sizes)
        except ModelError as error:
            try:
                found = _survey(source, dtypes, FakeCpu(), device_type, sizes)
            except ModelError:
                raise
            except OsdpError:  # what the builder says of fake tensors; without them it had no complaint
                raise error from None
    return replace(assemble(source, dtypes[0], *found), master_weights=dtypes[1])


def _survey(
    source: ModelSource, dtypes: tuple[str, str], device: DatalessDevice, device_type: str, sizes: Sequence[int]
) -> tuple[nn.Module, Mapping[str, RestingDtype], Sequence[Group], Mapping[int, Pass]]:
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
            rested = resting_dtypes(module, *dtypes)
            module = adapt(module, device, {name: one.compute for name, one in rested.items()})
        mode = training(module) if trains(module) else nullcontext()  # what is only run is in the mode it is run in
        with mode, inputs_cast(module, dtypes[0]):
            groups = find_groups(module, {name: one.rest for name, one in rested.items()})
            return module, rested, *_run_sizes(module, source, groups, device, sizes)


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
    module: nn.Module, source: ModelSource, groups: Sequence[Group], device: DatalessDevice, sizes: Sequence[int]
) -> tuple[Sequence[Group], Mapping[int, Pass]]:
    blocks, memo = find_blocks(module), Memo()

    def run(size: int) -> Pass:
        with explained_inputs(source.name):
            inputs = feed(lambda: source.example_inputs(module, size), device)
        return run_pass(source, module, groups, blocks, inputs, device, memo)

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
