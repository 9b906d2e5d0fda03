"""Says which use of a parameter found it sharded, where PyTorch only says that it got a DTensor."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from profiler.errors import OsdpError, first_line
from runtime.dtensor_beside import in_model

_TRANSFORMED = ("it must override the setup_context staticmethod", "that would mutate a captured Tensor")
"""In the words of torch.func, of hooks of inputs and of what gathers parameters in a transform."""


@contextmanager
def naming_sharded_parameters(module: nn.Module | None = None, *, in_backward: bool = False) -> Iterator[None]:
    """Raise OsdpError where a forward, a backward or another method computes with a parameter that is not gathered.

    Parameters of the `module` that every rank has whole may be changed by those that are sharded.
    """
    try:
        with in_model(module):
            yield
    except RuntimeError as error:
        if any(words in str(error) for words in _TRANSFORMED):
            what = "a layer that is sharded by itself runs under vmap or another transform of torch.func"
            expected = "a layer of a block that is sharded whole"
            advice = "pin the layers of its block to one strategy, as in blocks.*=shard, or all to *=replicate"
            raise OsdpError(what, got=first_line(error), expected=expected, advice=advice) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        what, expected = "outside of the forward of the module that owns it", "parameters used in forward"
        advice = "call the module that owns it, or the model itself; or plan with the pin *=replicate in fp32"
        if in_backward:  # of a reversible layer, or the adjoint of an ODE
            what = "by a backward of the model's own that computes with it"
            expected = "backwards that compute with what forward has saved, or was handed"
            advice = f"hand all parameters that backward computes with to Function.apply, and plan again; or {advice}"
        advice += ", or, where frozen parameters follow trained ones, with *=shard"
        what = f"a parameter is used where it is not gathered: {what}"
        raise OsdpError(what, got=first_line(error), expected=expected, advice=advice) from error
