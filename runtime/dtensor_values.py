"""Makes DTensors do what loops expect of any tensor by habit, and what torch (2.13) leaves out without a word.

    parameter.data = values        the DTensor keeps what it holds on this rank: the values are lost
    gradient.data = values         the same
    target.data.mul_(0.9)          counts as no change, so that nobody publishes it anew (`odc`)
    torch.randn_like(gradient)     on CPU ranks with one seed the same rows on each

Here the first two let the DTensor hold what `values` hold, memory included, as of plain tensors; where FSDP2 has kept
the memory from before, `FullyShardedUnit.reshard` has it take the new.  The third counts as `target.detach().mul_`
does, of what is frozen or published.  Random numbers are those that one process draws.  Norms and other numbers are in
`dtensor_numbers`, writes to parts in `dtensor_writes`.
"""

from collections.abc import Callable
from functools import cache, partialmethod, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from profiler.errors import OsdpError
from runtime.dtensor_beside import compute, operations
from runtime.dtensor_internals import compute_if_laid_out, handle, let_numbers_change, name_refusals
from runtime.dtensor_layouts import compute_uneven
from runtime.dtensor_numbers import added_up, numbers
from runtime.dtensor_rows import (
    gathered,
    is_whole,
    laid_out_as,
    may_be_uneven,
    own_rows,
    replicated,
    spread,
    whole_of,
    write_whole,
)
from runtime.dtensor_writes import follow_writes
from runtime.torch_compat import held_tensor, placed

aten, c10d = torch.ops.aten, torch.ops.c10d
COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "allgather_coalesced_", "gather_"),
    *("_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "scatter_"),
    *("reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"),
)
"""What calls of torch.distributed become."""


@cache
def follow_values(device_type: str) -> None:
    """Let every DTensor of this process do so. `device_type` is that of the meshes, such as "cpu"."""
    _follow_values()
    if device_type == "cpu":  # on accelerators torch draws for the whole
        handle({aten.randn_like.default: _draw, aten.rand_like.default: _draw})
        handle({**dict.fromkeys(DRAWN_OF, _draw_of), **dict.fromkeys(DRAWN_INTO, _draw_into)})


@cache
def _follow_values() -> None:
    follow_writes()
    collectives = (getattr(c10d, name).default for name in COLLECTIVES if hasattr(c10d, name))
    handle(dict.fromkeys(operations(), compute))
    handle({**numbers(), **dict.fromkeys(collectives, _refuse_collective)})
    handle({aten.eye.m_out: _fill, aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale})
    if not hasattr(FSDPModule, "reset_iter_state"):  # before 2.13 there is no rule; autograd has done it
        handle({aten.detach_.default: lambda op, args, kwargs: args[0]})
    let_numbers_change()
    name_refusals()
    compute_if_laid_out(compute_uneven)
    by_torch = torch.Tensor.data

    def read(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and (not tensor.requires_grad or hasattr(tensor, "is_published")):
            return tensor.detach()
        found: Tensor = by_torch.__get__(tensor)  # type: ignore[attr-defined]
        return found

    DTensor.data = property(read, _write)  # type: ignore[assignment]
    for name in ("numpy", "tolist"):
        setattr(DTensor, name, partialmethod(_read, name))
    DTensor.__format__ = _format  # type: ignore[method-assign,assignment]
    DTensor.redistribute = _redistributing(DTensor.redistribute)  # type: ignore[method-assign]
    DTensor.full_tensor = _full_tensor(DTensor.full_tensor)  # type: ignore[method-assign]


def _refuse_collective(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise OsdpError for a collective call by hand, as scripts make of gradients under DistributedDataParallel."""
    raise OsdpError(
        "a sharded parameter, gradient or state was given to a collective call of torch.distributed",
        got=str(op),
        expected="plain tensors: each rank has other rows of these",
        advice="leave it out, as gradients are means over ranks already, or give it .to_local() or .full_tensor()",
    )


def _read(tensor: DTensor, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return what a method reads off memory; raise OsdpError where that has only a part, as in histograms of rank 0."""
    if is_whole(tensor):
        return getattr(held_tensor(tensor), name)(*args, **kwargs)
    raise OsdpError(
        "a sharded parameter, gradient or state has no memory that holds the whole of it",
        got=f".{name}() of one of {tuple(tensor.shape)}",
        expected="plain tensors",
        advice=f"call tensor.full_tensor().{name}(), on all ranks, as that is a collective call",
    )


def _format(tensor: DTensor, spec: str) -> str:
    """Return a number as Python formats it, as of plain tensors."""
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


@torch.no_grad()
def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Write what an operation makes of no tensor; torch lets each rank hold the whole of it in place of its rows."""
    out: DTensor = kwargs.pop("out")
    whole = torch.empty(out.shape, dtype=out.dtype, device=held_tensor(out).device)
    write_whole(out, op(*args, **kwargs, out=whole))
    return out


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients, and say whether any rank has one that is not finite: torch asks those of one mesh, or layout.

    A rank alone that skips its step, as `torch.amp.GradScaler` does then, would have other parameters.
    """
    gradients, found, scale = args
    op([held_tensor(one) for one in gradients], found, scale, **kwargs)
    for mesh in dict.fromkeys(one.device_mesh for one in gradients if isinstance(one, DTensor)):
        for dim in range(mesh.ndim):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))


def _is_recorded(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and tensor.requires_grad)


class _Gathered(torch.autograd.Function):
    """Gathers what ranks may share unevenly; of the gradient, as torch has it, each rank takes its own rows."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.like = tensor.detach()
        return gathered(ctx.like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return laid_out_as(own_rows(ctx.like, gradient).contiguous(), ctx.like)


def _full_tensor(by_torch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a method that gathers, also what one rank owns."""

    @wraps(by_torch)
    def full_tensor(self: DTensor, **kwargs: Any) -> Tensor:
        if type(self) is not DTensor or torch.compiler.is_compiling() or not may_be_uneven(self):
            return by_torch(self, **kwargs)
        return _Gathered.apply(self) if _is_recorded(self) else gathered(self)  # type: ignore[no-untyped-call]

    return full_tensor


def _redistributing(by_torch: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Return a method that lays out what one rank owns too."""

    @wraps(by_torch)
    def redistribute(self: DTensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        stays = device_mesh in (None, self.device_mesh) and placements in (None, self.placements, [*self.placements])
        if stays or type(self) is not DTensor or _is_recorded(self):
            return by_torch(self, device_mesh, placements, **kwargs)
        whole = replicated(gathered(self), self) if may_be_uneven(self) else self
        found = by_torch(whole, device_mesh, placements, **kwargs)
        if not is_whole(found):
            spread(found)
        return found

    return redistribute


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


DRAWN_OF = (aten.bernoulli.default, aten.randint_like.default, aten.randint_like.low_dtype, aten.native_dropout.default)
"""What draws random numbers of a tensor."""
DRAWN_INTO = (aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default, aten.exponential_.default)
"""What draws them into one, as functions such as dropout do; methods are in `dtensor_writes`."""


def _draw_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers of a tensor as one process does, and keep this rank's rows."""
    like = added_up(args[0])
    found = op(whole_of(like), *args[1:], **kwargs)

    def rows(whole: Tensor) -> DTensor:
        own = own_rows(like, whole).reshape(held_tensor(like).shape).contiguous()
        return placed(own, like.device_mesh, like.placements, like.shape)

    return tree_map_only(Tensor, rows, found)


def _draw_into(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Draw random numbers for the whole of a tensor, and let it have its rows of them."""
    like: DTensor = args[0]
    write_whole(like, op(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs))
    return like


def _draw(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> DTensor:
    """Draw random numbers in the layout of a tensor, for the whole."""
    like = args[0]
    whole = op(torch.empty(like.shape, dtype=like.dtype, device=like.device), **kwargs)
    rows = own_rows(like, whole).reshape(held_tensor(like).shape).contiguous()
    return placed(rows, like.device_mesh, like.placements, like.shape)
