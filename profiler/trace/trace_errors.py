"""Converts exceptions of a model that is traced into errors with advice."""

from __future__ import annotations

import torch

from profiler.errors import OsdpError, first_line
from profiler.trace.metered_pass import TraceFailure

_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_DATA_NAMES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


def explain(failure: TraceFailure, model: str) -> OsdpError:
    """Return the error to show for a forward or backward that could not be traced."""
    error = failure.__cause__ or failure
    op = failure.op
    at = f" at op {op}" if op is not None else ""
    return OsdpError(
        f"cannot trace {model}: {failure.where} raised{at}",
        got=f"{type(error).__name__}: {first_line(error)}",
        expected="a forward and backward that run on shapes alone",
        advice=_advice(error, op),
    )


def explain_build(error: Exception, model: str) -> OsdpError:
    """Return the error to show for a module that could not be built."""
    if isinstance(error, OsdpError):
        return error
    return OsdpError(
        f"cannot build {model} without data",
        got=f"{type(error).__name__}: {first_line(error)}",
        expected="build() to return an nn.Module on the meta device",
        advice="if it computes with tensor values (x.item(), loading weights), do that in Python numbers "
        'or in `with torch.device("cpu")`, or after OSDP has wrapped the module',
    )


def explain_inputs(error: Exception, model: str) -> OsdpError:
    """Return the error to show for example inputs that could not be made."""
    if isinstance(error, OsdpError):
        return error
    return OsdpError(
        f"cannot make example inputs for {model}",
        got=f"{type(error).__name__}: {first_line(error)}",
        expected="(args, kwargs) of the model's forward for a given micro-batch",
        advice="build them from shapes alone, e.g. with torch.randint or torch.zeros",
    )


def _advice(error: BaseException, op: torch._ops.OpOverload | None) -> str:
    shown = f"`{op.namespace}::{op._opname}`" if op is not None else "the op"
    message = str(error)
    looks_at_data = type(error).__name__.startswith(_DATA_NAMES) or (op is not None and _DATA & set(op.tags))
    if looks_at_data or "cannot be called on meta tensors" in message:
        return (
            "the result depends on the data: replace .item(), boolean masks and nonzero by ops of fixed "
            "shape (torch.where, multiplication by a mask, a fixed capacity)"
        )
    if isinstance(error, NotImplementedError) or type(error).__name__ == "UnsupportedOperatorException":
        return f"{shown} has no kernel for tensors without data: give it one with torch.library.register_fake"
    if op is not None and op.namespace not in ("aten", "prim", "prims"):
        return f"check the fake kernel of {shown} (torch.library.register_fake, torch.library.opcheck)"
    return "check that the example inputs fit the model's forward, by running it once on real tensors"
