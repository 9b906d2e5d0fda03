"""What optimizers keep between steps, hold while they step, and read and write.

A plan names its optimizer: one of `OPTIMIZERS`, or, for any other, how much it keeps, as in `states of 2.25 bytes per
parameter` (moments of eight bits, with a scale in fp32 for every 32 of them).
"""

import re
from dataclasses import dataclass
from math import ceil, isfinite

from profiler.byte_sizes import ALLOCATION_BYTES, allocated_bytes
from profiler.errors import OsdpError

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Optimizer:
    """State, temporaries and memory traffic of an optimizer per parameter."""

    moments: int
    """Tensors of the parameter's size and dtype kept between steps."""
    has_step_counter: bool
    """Whether it keeps one scalar tensor per parameter tensor."""
    temporaries: int
    """Tensors of the parameter's size that live while it steps all parameters together."""
    steps_apart: bool
    """Whether it makes two tensors of one parameter's size, beside one of the parameter before, where it steps one
    after the other: as `torch.optim` does with DTensors unless it is told to fuse."""
    touched: float
    """Tensors of the parameter's size that a step reads and writes."""
    other_bytes: float = 0.0
    """Bytes per parameter of what else it keeps, whatever the parameter's dtype."""

    def state_bytes(self, numel: int, element_bytes: int) -> int:
        """Return what is kept for a tensor of so many elements."""
        counter = ALLOCATION_BYTES if self.has_step_counter else 0
        other = allocated_bytes(ceil(self.other_bytes * numel))
        return self.moments * allocated_bytes(element_bytes * numel) + other + counter


_FUSED_ADAM = Optimizer(moments=2, has_step_counter=True, temporaries=0, steps_apart=False, touched=7)
OPTIMIZERS = {
    "adam": Optimizer(moments=2, has_step_counter=True, temporaries=1, steps_apart=True, touched=18),
    "adamw": Optimizer(moments=2, has_step_counter=True, temporaries=1, steps_apart=True, touched=20),
    "sgd": Optimizer(moments=0, has_step_counter=False, temporaries=0, steps_apart=False, touched=3),
    "fused_adam": _FUSED_ADAM,
    "fused_adamw": _FUSED_ADAM,
    "fused_sgd": Optimizer(moments=0, has_step_counter=False, temporaries=0, steps_apart=False, touched=3),
}
"""`torch.optim` with default arguments: SGD without momentum; Adam unfused, and with `fused=True`.
Unfused, its foreach form makes the square roots of all second moments; one by one there are two tensors of each, its
root and that over the correction of bias, beside what the tensor before has left.

`touched`, from `torch/optim/adam.py` of torch 2.13: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
addcdiv 4, and for AdamW's decay mul 2; SGD: add 3.  Fused: parameters and moments read and written, gradients read."""
_FUSED = "fused_"

_OTHER = re.compile(r"states of (\S+) bytes per parameter")


def optimizer_of(name: str) -> Optimizer:
    """Return what a plan's optimizer keeps. Raises OsdpError for an unknown one.

    Of one that is known by its bytes alone, temporaries are assumed: an update per parameter, or two of one,
    as Adam holds.  So is traffic: gradients, updates (written and read) and parameters (read and written) in fp32, and
    states both ways.
    """
    if (other := _OTHER.fullmatch(name)) is None:
        if name not in OPTIMIZERS:
            raise OsdpError("unknown optimizer", got=name, expected=", ".join(OPTIMIZERS), advice=BY_BYTES_ADVICE)
        return OPTIMIZERS[name]
    kept_bytes = _checked(other[1])
    return Optimizer(
        0, False, temporaries=1, steps_apart=True, touched=5 + 2 * kept_bytes / FP32_BYTES, other_bytes=kept_bytes
    )


def fused_name(name: str) -> str:
    """Return the name of an optimizer's form that steps with one kernel, or the name itself where none is known."""
    return _FUSED + name if _FUSED + name in OPTIMIZERS else name


def plain_name(name: str) -> str:
    """Return the name that an optimizer has in `torch.optim`, fused or not."""
    return name.removeprefix(_FUSED)


BY_BYTES_ADVICE = "of any other give what it keeps, as in --optimizer-bytes-per-parameter 8"


def optimizer_name(name: str | None, bytes_per_parameter: float | None) -> str:
    """Return how plans name an optimizer of which the user gave the name, or what it keeps, or neither: Adam.

    Raises OsdpError for both, and for bytes that cannot be.
    """
    if bytes_per_parameter is None:
        return name or "adam"
    if name is not None:
        what = "an optimizer is given by its name or by its bytes per parameter"
        got = f"{name} and {bytes_per_parameter:.12g} bytes per parameter"
        advice = f"leave out the name; what {', '.join(OPTIMIZERS)} keep is known"
        raise OsdpError(what, got=got, expected="one of them", advice=advice)
    return f"states of {_checked(bytes_per_parameter):.12g} bytes per parameter"


def _checked(bytes_per_parameter: float | str) -> float:
    try:
        found = float(bytes_per_parameter)
    except ValueError:
        found = -1.0
    if not (isfinite(found) and found >= 0):
        what = "the optimizer cannot keep so many bytes per parameter"
        expected = "a finite number from 0, such as 2.25"
        raise OsdpError(what, got=str(bytes_per_parameter), expected=expected)
    return found
