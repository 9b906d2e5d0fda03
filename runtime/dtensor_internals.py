"""The private parts of DTensors (torch 2.11 to 2.13) that operations on many of them need: how they are dispatched.

handle                operations that DTensors compute otherwise than by their rules
by_torch              those by their rules all the same
let_numbers_change    what fails after an operation in place on a plain number
name_refusals         what torch has no rule for
compute_if_laid_out   operations of which torch lays out arguments anew
placed_like           `DTensor.from_local` computes a layout anew
layouts_of            a DTensor's specification has a hash that it keeps
held_alike            both at once, of arguments
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError, first_line


class ShardedOperationError(OsdpError, RuntimeError):
    """Says which operation on a sharded tensor torch has refused: a RuntimeError too, as torch's own is."""


def handle(handlers: Mapping[Any, Any]) -> None:
    """Let DTensors compute these operations so."""
    cast(Any, DTensor)._op_dispatcher._custom_op_handlers |= handlers


def by_torch(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what torch computes by its rules, within what `handle` was given for an operation."""
    handlers = cast(Any, DTensor)._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def let_numbers_change() -> None:
    """Let plain tensors of one element be changed in place by DTensors of one.

    torch computes that, as it takes them for equal on all ranks, and then fails, as they are none of its own.
    """
    dispatcher = cast(Any, DTensor)._op_dispatcher
    by_torch = dispatcher._dispatch_fast_path_python_tail

    def finish(op: Any, args: Any, kwargs: Any, *others: Any) -> Any:
        is_in_place = others[-2]
        if is_in_place and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
            return args[0]
        return by_torch(op, args, kwargs, *others)

    dispatcher._dispatch_fast_path_python_tail = finish


def name_refusals() -> None:
    """Let operations for which torch has no rule, or that its rule refuses, say what to do instead.

    On all ranks, before anything is sent.
    """
    dispatcher = cast(Any, DTensor)._op_dispatcher
    by_torch = dispatcher._propagate_op_sharding_dispatch_slow_path

    @wraps(by_torch)
    def propagate(*args: Any, **kwargs: Any) -> Any:
        try:
            return by_torch(*args, **kwargs)
        except RuntimeError as error:
            raise ShardedOperationError(
                "an operation does not take sharded parameters, gradients or states as they are",
                got=first_line(error),
                expected="whole tensors, or parts of a rank",
                advice="give it tensor.full_tensor(), a collective call on all ranks, or tensor.to_local(), what this "
                "rank has; then copy what is whole back, as parameter.data.copy_(whole)",
            ) from error

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate


def compute_if_laid_out(compute: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], Any]) -> None:
    """Let `compute(op, args, kwargs, layout)` return what operations hold on this rank, or NotImplemented.

    Of those only for which torch would lay out arguments anew; `layout`: the specifications of what is returned.
    """
    dispatcher = cast(Any, DTensor)._op_dispatcher
    by_torch = dispatcher._dispatch_get_local_results_slow_path

    @wraps(by_torch)
    def results(op: Any, args: tuple[Any, ...], info: Any) -> Any:
        if info.output_sharding.needs_redistribute:
            found = compute(op, args, info.local_kwargs, info.output_sharding.output_spec)
            if found is not NotImplemented:
                return found
        return by_torch(op, args, info)

    dispatcher._dispatch_get_local_results_slow_path = results


def placed_like(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of which this rank holds `local`, in the shape, layout and dtype of another."""
    return cast(Any, DTensor)(local, like._spec, requires_grad=False)  # type: ignore[no-any-return]


def layouts_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return of DTensors, if all are, what those of one mesh, layout, shape and dtype share; nothing if one is not."""
    if {*map(type, tensors)} != {DTensor}:
        return []
    return [hash(one._spec) for one in tensors]  # type: ignore[attr-defined]


def held_alike(args: Sequence[Any]) -> tuple[int, list[Any]]:
    """Return what this rank holds of arguments that are DTensors, and of them what `layouts_of` says, 0 if they differ.

    Others are numbers, if of tensors then without dimensions, or they differ too.
    """
    layout, held = 0, []
    for one in args:
        if type(one) is DTensor:
            number = hash(one._spec)
            if number != layout and layout:
                return 0, []
            layout = number
            held.append(one._local_tensor)
        elif isinstance(one, DTensor) or (isinstance(one, Tensor) and one.dim()):  # of a class derived from it too
            return 0, []
        else:
            held.append(one)
    return layout, held


def held_tensors(tensors: Sequence[Any], first: Sequence[Any]) -> list[Tensor]:
    """Return what each DTensor holds on this rank, in the rows of those that are `first`."""
    return [same_rows(one, like) for one, like in zip(tensors, first, strict=True)]


def same_rows(tensor: Any, like: Any) -> Tensor:
    """Return what this rank holds of a DTensor; raises OsdpError unless that is as many rows as of one laid out alike.

    Their specifications do not tell which rank owns a tensor.
    """
    local: Tensor = tensor._local_tensor
    if local.shape != like._local_tensor.shape:
        raise OsdpError(
            "tensors are computed with together that different ranks own",
            got=f"{tuple(local.shape)} beside {tuple(like._local_tensor.shape)} on this rank, of {tuple(tensor.shape)}",
            expected="what belongs to one parameter",
            advice="plan with another pin than owner, such as *=shard, or give one of them as other.full_tensor(), a "
            "collective call on all ranks",
        )
    return local
