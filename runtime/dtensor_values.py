"""Makes DTensors do what loops expect of any tensor by habit, and what torch (2.13) leaves out without a word.

    parameter.data = values        the DTensor keeps what it holds on this rank: the values are lost
    gradient.data = values         the same
    teacher.data.mul_(0.9)         counts as no change of a frozen parameter, so that nobody publishes it anew (`odc`)
    torch.randn_like(gradient)     on CPU ranks with one seed the same rows on each

Here the first two let the DTensor hold what `values` hold, memory included, as of plain tensors; where FSDP2 has kept
the memory from before, `FullyShardedUnit.reshard` has it take the new.  The third counts as `teacher.detach().mul_`
does; of what is trained, ranks find out when they step, also if one of them made the change alone.  Random numbers are
those that one process draws.  Norms and other numbers are in `dtensor_numbers`, writes to parts in `dtensor_writes`.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError
from runtime.dtensor_numbers import numbers
from runtime.dtensor_rows import is_whole, own_rows, write_whole
from runtime.dtensor_writes import follow_writes
from runtime.torch_compat import held_tensor, placed

aten = torch.ops.aten


@cache
def follow_values(device_type: str) -> None:
    """Let every DTensor of this process do so. `device_type` is that of the meshes, such as "cpu"."""
    follow_writes()
    handlers = cast(Any, DTensor)._op_dispatcher._custom_op_handlers
    handlers |= numbers()
    if device_type == "cpu":  # on accelerators torch draws for the whole
        handlers |= {aten.randn_like.default: _draw, aten.rand_like.default: _draw}
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
    fits = (values.shape, values.dtype) == (tensor.shape, tensor.dtype)
    if fits and isinstance(values, DTensor) and is_whole(values) and not is_whole(tensor):
        write_whole(tensor, held_tensor(values))
        return
    if isinstance(values, DTensor) and values.device_mesh == tensor.device_mesh:
        values = values.redistribute(placements=tensor.placements)
    new, old = held_tensor(values), held_tensor(tensor)
    is_alike = isinstance(values, DTensor) and values.shape == tensor.shape
    if not (is_alike and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)):
        raise OsdpError(
            "these values cannot be the .data of a sharded parameter, gradient or state",
            got=f"a {type(values).__name__} of {values.dtype} {tuple(values.shape)} on {new.device}",
            expected=f"a DTensor of {tensor.dtype} {tuple(tensor.shape)} on {old.device}, laid out as this one",
            advice="compute them from the parameter itself, as p.data = 0.9 * p.data, or copy a whole one, "
            "as p.data.copy_(values)",
        )
    tensor._local_tensor = new.detach().contiguous()  # FSDP2 gathers it as a row
    cast(Any, tensor)._holds_another = True  # for `take_held`


def _draw(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    """Draw random numbers in the layout of a tensor, for the whole."""
    like = args[0]
    whole = op(torch.empty(like.shape, dtype=like.dtype, device=like.device), **kwargs)
    rows = own_rows(like, whole).reshape(held_tensor(like).shape).contiguous()
    return placed(rows, like.device_mesh, like.placements, like.shape)
