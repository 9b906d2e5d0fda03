"""Converts exceptions of a model that is traced into errors with advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import walk_tb

import torch

from profiler.errors import OsdpError, first_line
from profiler.model_source import ModelSource
from profiler.trace.data_dependent import DATA_TAGS, UnknownValueError
from profiler.trace.questions import AskedForeverError
from profiler.trace.same_dtypes import UnlikeDtypesError

_UNLIKE_DTYPES = "expected scalar type|(same|one) dtype|type .* should be the same"
"""In what torch's own kernels say of tensors of two dtypes."""
_OF_SPARSE = (
    "in place of a sparse matrix take the indices of its elements, `y.index_add(0, rows, values * x[columns])`, and "
    "make gradients dense, as in nn.Embedding(..., sparse=False): sharded ones are reduced as dense tensors"
)
"""For what has no memory of its own, and is traced nowhere."""
_IN_TORCHSCRIPT = "operation failed in the TorchScript interpreter"
_FOR_WORDS = (
    (
        "saved tensor hooks",
        "take gradients within a forward by torch.autograd.grad(..., create_graph=True): torch.func.grad, vjp, jacrev "
        "and hessian refuse the hooks by which traces, and checkpoints of blocks, see what autograd saves",
    ),
    (
        "HigherOrderOperator",
        "write what runs whatever the data is: torch.where in place of torch.cond, `for _ in range(rounds)` of "
        "while_loop and scan, torch.func.vmap of map",
    ),
    ("FlexAttention", "call scaled_dot_product_attention, with a mask: flex_attention is not traced"),
    (
        "shape_env|NestedTensor|nested_(tensor|view)",
        "pad sequences to one length and mask what was added: nested tensors are not traced",
    ),
    (
        _IN_TORCHSCRIPT,
        "give OSDP functions and modules as they were before torch.jit.script (the environment variable PYTORCH_JIT=0 "
        "leaves all so), of which a trace says what depends on data",
    ),
)
"""In what torch says of what has no trace, or the op's name, and what to write in its place."""
_DATA_NAMES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


_OWN = ("torch", "profiler", "runtime", "osdp", "planner", "contextlib")
"""Packages whose frames nobody looks for who looks for the line that raised; models of the zoo have no errors."""


class ModelError(OsdpError):
    """What the model's own code raised; it may run on another dataless device."""


def explain(what: str, error: BaseException, expected: str, advice: str) -> ModelError:
    """Return the error to show for what the model's code raised."""
    advice = _OF_SPARSE if re.search("Sparse(Csr)?TensorImpl", str(error)) else advice
    got = f"{type(error).__name__}: {_words(error)}{_place(error)}"
    return ModelError(what, got=got, expected=expected, advice=advice)


def _place(error: BaseException) -> str:
    """Return the line of the model's, or of a library's that it calls, that raised; nothing if there is none."""
    lines = [(frame.f_globals.get("__name__", ""), frame, number) for frame, number in walk_tb(error.__traceback__)]
    others = [one for one in lines if one[0].split(".")[0] not in _OWN]
    if not others:
        return ""
    _, frame, number = others[-1]
    return f" (line {number} of {Path(frame.f_code.co_filename).name})"


def _words(error: BaseException) -> str:
    """Return what to show of an exception's message."""
    if _IN_TORCHSCRIPT not in str(error):
        return re.sub(" and mode <.*", "", first_line(error))
    here = re.search(r"(.*)\n *~+ <--- HERE", str(error))
    return f"an {_IN_TORCHSCRIPT}" + (f": `{here[1].strip()}`" if here else "")


@contextmanager
def explained(what: str, expected: str, advice: str) -> Iterator[None]:
    """Raise `explain` of any exception but an OsdpError."""
    try:
        yield
    except OsdpError:
        raise
    except Exception as error:
        raise explain(what, error, expected, advice) from error


def more_telling(on_meta: OsdpError, on_fake: OsdpError) -> OsdpError:
    """Return the error to show for a model that runs on neither dataless device.

    What is said of unknown values has advice; what names meta or fake tensors is of the device, not of the model.
    """

    def rank(error: OsdpError) -> tuple[bool, bool]:
        cause = error.__cause__ or error
        return isinstance(cause, UnknownValueError), not re.search("meta|fake", first_line(cause), re.IGNORECASE)

    return on_meta if rank(on_meta) > rank(on_fake) else on_fake


def explained_inputs(model: str) -> AbstractContextManager[None]:
    """Explain that example inputs could not be made."""
    expected = "(args, kwargs) of the model's forward for a given micro-batch"
    advice = "build them from shapes alone, e.g. with torch.randint or torch.zeros"
    return explained(f"cannot make example inputs for {model}", expected, advice)


def explain_trace(
    source: ModelSource, where: str, op: torch._ops.OpOverload | None, error: BaseException
) -> ModelError:
    """Return the error to show for a forward or backward that could not be traced."""
    what = f"cannot trace {source.name}: {where} raised" + (f" at op {op}" if op is not None else "")
    advice = _advice(error, op) or source.inputs_advice
    return explain(what, error, "a forward and backward that run on shapes alone", advice)


def _advice(error: BaseException, op: torch._ops.OpOverload | None) -> str:
    if isinstance(error, AskedForeverError):
        return (
            "let a number that is known end the loop, as in `for _ in range(rounds)`, and do in it what depends on "
            "data by torch.where"
        )
    if isinstance(error, UnknownValueError):
        return (
            "pass what decides as a Python number, or as an input that example_inputs makes of known values "
            "(torch.tensor, torch.full, torch.arange), or replace the branch by torch.where"
        )
    if isinstance(error, UnlikeDtypesError) or re.search(_UNLIKE_DTYPES, str(error)):
        return (
            "cast one to the dtype of the other, as in `buffer.to(x.dtype)`: under bf16 parameters and inputs of "
            "modules are cast, and buffers stay as they are"
        )
    if op is not None and "sparse" in op._opname:
        return _OF_SPARSE
    if known := next((advice for words, advice in _FOR_WORDS if re.search(words, f"{error} {op}")), ""):
        return known
    shown = f"`{op.namespace}::{op._opname}`" if op is not None else "the op"
    looks_at_data = type(error).__name__.startswith(_DATA_NAMES) or (op is not None and DATA_TAGS & set(op.tags))
    if looks_at_data or "cannot be called on meta tensors" in str(error):
        return (
            "the result depends on the data: replace .item(), boolean masks and nonzero by ops of fixed "
            "shape (torch.where, multiplication by a mask, a fixed capacity)"
        )
    if isinstance(error, NotImplementedError) or type(error).__name__ == "UnsupportedOperatorException":
        return f"{shown} has no kernel for tensors without data: give it one with torch.library.register_fake"
    if op is not None and op.namespace not in ("aten", "prim", "prims"):
        return f"check the fake kernel of {shown} (torch.library.register_fake, torch.library.opcheck)"
    return ""
