"""Makes DTensors do what loops expect of any tensor by habit, and what torch (2.13) leaves out without a word.

    parameter.data = values        the DTensor keeps what it holds on this rank: the values are lost
    gradient.data = values         the same
    teacher.data.mul_(0.9)         counts as no change of a frozen parameter, so that nobody publishes it anew (`odc`)
    gradient.norm().item()         the norm of this rank's part

Here the first two let the DTensor hold what `values` hold, memory included, as of plain tensors; where FSDP2 has kept
the memory from before, `FullyShardedUnit.reshard` has it take the new.  The third counts as `teacher.detach().mul_`
does; of what is trained, ranks find out when they step, also if one of them made the change alone.  The fourth is the
norm of the whole, a collective call.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from profiler.errors import OsdpError
from runtime.torch_compat import held_tensor


@cache
def follow_values() -> None:
    """Let every DTensor of this process do so."""
    _reduce_before_item()
    by_torch = torch.Tensor.data

    def read(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            return tensor.detach()
        found: Tensor = by_torch.__get__(tensor)  # type: ignore[attr-defined]
        return found

    DTensor.data = property(read, _write)  # type: ignore[assignment]


@torch.no_grad()
def _write(tensor: DTensor, values: Tensor) -> None:
    """Let a DTensor hold what others hold. Raises OsdpError unless they are laid out alike."""
    if isinstance(values, DTensor) and values.device_mesh == tensor.device_mesh:
        values = values.redistribute(placements=tensor.placements)
    new, old = held_tensor(values), held_tensor(tensor)
    is_alike = isinstance(values, DTensor) and values.shape == tensor.shape
    if not (is_alike and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)):
        raise OsdpError(
            "these values cannot be the .data of a sharded parameter, gradient or state",
            got=f"a {type(values).__name__} of {values.dtype} {tuple(values.shape)} on {new.device}",
            expected=f"a DTensor of {tensor.dtype} {tuple(tensor.shape)} on {old.device}, laid out as this one",
            advice="compute them from the parameter itself, as p.data = 0.9 * p.data, or give whole tensors to "
            "model.load_state_dict(state, strict=False)",
        )
    tensor._local_tensor = new.detach().contiguous()  # FSDP2 gathers it as a row
    cast(Any, tensor)._holds_another = True  # for `take_held`


def _reduce_before_item() -> None:
    """Have `item()`, `float()` and `bool()` of DTensors reduce what is a part on each rank, such as a sum."""

    def item(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> object:
        tensor = args[0]
        if any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return op(tensor._local_tensor)

    cast(Any, DTensor)._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = item
