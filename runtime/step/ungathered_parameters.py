"""Says which use of a parameter found it sharded, where PyTorch only says that it got a DTensor."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from profiler.errors import OsdpError, first_line
from runtime.dtensor_beside import in_model


@contextmanager
def naming_sharded_parameters(*, in_backward: bool = False, has_samples: bool = True) -> Iterator[None]:
    """Raise OsdpError where a forward, a backward or another method computes with a parameter that is not gathered.

    Without samples, which are other ones on each rank, it may compute with them as code outside of the model may.
    """
    try:
        with in_model() if has_samples else nullcontext():
            yield
    except RuntimeError as error:
        if "it must override the setup_context staticmethod" in str(error):  # FSDP2's and our hooks of inputs
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
