"""Operations on DTensors that are those on whole tensors, whatever they are, for what optimizers of others compute.

    rows.mul_(0.9).add_(update.mean(-1))       torch (2.13) refuses plain tensors and DTensors together
    torch.linalg.svd(gradient)                 has no rule for it, as for `torch._foreach_copy_`
    (gradient @ gradient.T), quantiles, sorts  are other numbers, fail or hang where one rank owns a tensor
    norm.sqrt_(), torch._foreach_norm(...)     cannot be changed in place, as they are not added up yet

While `AsWhole` is entered a plain tensor is a whole one, equal on all ranks.  What is computed element by element is
computed of the rows that a rank holds (`_elementwise`); all else of gathered tensors, on every rank, which keeps its
rows of what is written to (`_whole`).  So each result is that of one process, and all ranks make the same collective
calls.  Whole results stay whole: what an optimizer keeps of them every rank keeps.

Element by element is what torch tags as pointwise, and `ELEMENTWISE`; of lists, what is in `LISTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.errors import OsdpError
from runtime.dtensor_internals import held_alike, held_tensors, layouts_of, same_rows
from runtime.dtensor_numbers import added_up, numbers
from runtime.dtensor_rows import (
    gathered,
    has_padding,
    holds_other_rows,
    is_any_spread,
    is_spread,
    is_whole,
    laid_out_as,
    may_be_uneven,
    own_rows,
    replicated,
    shared_dim,
    spread,
    whole_of,
    write_whole,
)
from runtime.dtensor_writes import Part, count_write, left_to_mode, part_of, renew, write_back
from runtime.torch_compat import held_tensor

aten = torch.ops.aten
Op = Callable[..., Any]

ELEMENTWISE = frozenset(
    (
        *("copy_", "_to_copy", "fill_", "zero_", "masked_fill", "masked_fill_", "copysign_"),
        *("zeros_like", "ones_like", "full_like", "empty_like"),
    )
)
"""Names of operations that are computed so too."""
OF_EACH: dict[str, Op] = {"_foreach_max": lambda one: one.max()}
"""Those on lists that return a number of each tensor."""
LISTS = frozenset(
    (
        *("abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone"),
        *("copy", "cos", "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log"),
        *("log10", "log1p", "log2", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "round", "rsqrt"),
        *("sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh", "trunc", "zero"),
    )
)
"""What goes element by element of the tensors in lists: `torch._foreach_*`, in place or not."""
FUSED = frozenset(("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"))
"""Other operations on lists that do."""
NEW = frozenset(("new_zeros", "new_ones", "new_empty", "new_full"))
"""Those that take of a tensor its dtype and device, and a shape."""
PASSED = frozenset(("alias", "detach_", "t", "transpose", "permute", "unsqueeze", "is_same_size"))
"""Those that torch's DTensors do right, whatever rows ranks hold."""
OF_RANKS = ("c10d", "_c10d", "_dtensor", "prim")
"""Namespaces of operations that are about ranks and layouts."""
VIEWS_OF_ROWS = frozenset(("view", "_unsafe_view", "reshape", "flatten", "unflatten"))
"""Views that DTensors do right where all ranks have equally many rows, as they do others where none is empty."""


class AsWhole(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with DTensors as one process does with whole tensors."""

    def __init__(self, slices: int = 0) -> None:
        """`slices`: of how many tensors there are slices, which whole ones cannot be made of."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.slices = slices

    def __enter__(self) -> AsWhole:
        """Let it see each operation that needs whole tensors, also those of methods, if there are slices."""
        left_to_mode.extend([self] * bool(self.slices))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Undo that."""
        left_to_mode.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute an operation. Raises OsdpError if it needs whole tensors of which there are slices."""
        kwargs = kwargs or {}
        if DTensor in types or Part in types:
            if not _are_known(types):  # gradients that are not complete have words of their own
                return func(*args, **kwargs)
            if Part in types:
                for one in tree_leaves((args, kwargs)):
                    if type(one) is Part:
                        renew(one)
            way = _ways.get(func) or _way_of(func)
            if self.slices and way not in OF_ELEMENTS:
                _check_numbers(func, args, kwargs, self.slices)
            found = way(func, args, kwargs)
            if func._schema.is_mutable and type(found) is not Part:  # of that `write_back` has counted it
                count_write()
            return found
        return func(*args, **kwargs)


def _check_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slices: int) -> None:
    """Raise OsdpError unless an operation is of numbers, or a view of the same shape."""
    if func in VIEWS_OF_ALL and func(torch.empty(args[0].shape, device="meta"), *args[1:]).shape == args[0].shape:
        return
    if any(isinstance(one, DTensor) and one.dim() for one in tree_leaves((args, kwargs))):
        raise OsdpError(
            "the optimizer computes with whole parameters, of which this plan trains slices",
            got=f"{func}, and {slices} slices of parameters",
            expected="steps that go element by element",
            advice="plan without split, as with the pin *=shard, or take an optimizer such as AdamW",
        )


@cache
def _are_known(types: Any) -> bool:
    return all(kind in (DTensor, Part) or not issubclass(kind, DTensor) for kind in types)


_ways: dict[Any, Op] = {}
"""How operations are computed, those that were computed so far."""


def _way_of(func: Any) -> Op:
    way = _ways[func] = way_of(func)
    return way


def way_of(func: Any) -> Op:
    """Return how an operation is computed."""
    name = func._schema.name.removeprefix("aten::")
    if func in numbers():
        return _number
    if name in OF_EACH:
        return partial(_number_of_each, OF_EACH[name])
    if name.startswith("_foreach_"):
        is_known = name.removeprefix("_foreach_").removesuffix("_") in LISTS
        return _of_lists if is_known and not func._overloadname.endswith("out") else _whole_lists
    if name in FUSED:
        return _of_lists
    if (
        name in PASSED
        or func._schema.name.startswith(OF_RANKS)
        or func in (aten.randn_like.default, aten.rand_like.default)
    ):
        return _pass
    if name == "detach":
        return _detached
    if func._schema._is_view_op():
        return _view
    if name in NEW:
        return _new
    is_of_elements = torch.Tag.pointwise in func.tags or name in ELEMENTWISE
    return _elementwise if is_of_elements and [str(one.type) for one in func._schema.returns] == ["Tensor"] else _whole


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns as in an optimizer's step."""
    return (_ways.get(func) or _way_of(func))(func, args, kwargs)


def computed_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation outside of steps returns that writes to nothing; NotImplemented if it is of ranks."""
    way = _ways.get(func) or _way_of(func)
    if way is _elementwise:
        return _elementwise(func, args, kwargs)
    return _gathering(func, (), args, kwargs) if way in (_view, _whole) else NotImplemented


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return which arguments an operation writes to: by place and by name."""
    schema = func._schema.arguments
    return tuple(
        (place, one.name) for place, one in enumerate(schema) if one.alias_info is not None and one.alias_info.is_write
    )


def written_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return those of the arguments that an operation writes to."""
    return [args[place] if place < len(args) else kwargs[name] for place, name in _written(func)]


def _pass(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _noted(args[0], func(*args, **kwargs))


def _detached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args) if type(args[0]) is Part else laid_out_as(func(held_tensor(args[0])), args[0])


def _noted(like: Any, found: Any) -> Any:
    """Return what was computed of a tensor, noted as spread if that is."""
    if isinstance(like, DTensor) and is_spread(like):
        for one in tree_leaves(found):
            if isinstance(one, DTensor) and not is_whole(one):
                spread(one)
    return found


def _number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `dtensor_numbers` computes."""
    return _noted(args[0], func(*tree_map_only(DTensor, added_up, args), **kwargs))


def _number_of_each(of_each: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [of_each(one, *args[1:], **kwargs) for one in args[0]]


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute of each element, or of those in its place; soon where all are laid out alike, as in most steps."""
    like = args[0]
    if type(like) is DTensor and not (kwargs and any(isinstance(one, Tensor) for one in kwargs.values())):
        layout, rows = held_alike(args)
        if layout and (layout in _with_rows or _is_known(layout, like)) and not _differ(args):
            for one in args:
                if type(one) is DTensor:
                    same_rows(one, like)
            found = func(*rows, **kwargs)
            return like if _written(func) else laid_out_as(found, like)
    return _each_element(func, written_in(func, args, kwargs), args, kwargs)


def _differ(tensors: Iterable[Any]) -> bool:
    """Return whether ranks have other rows of some tensors than of others, or may, as some are known to be spread."""
    found = [one for one in tensors if isinstance(one, DTensor)]
    differ = any(holds_other_rows(one, found[0]) for one in found[1:])
    return differ or (is_any_spread() and len(set(map(is_spread, found))) > 1)


_with_rows: set[int] = set()
"""Layouts of which a rank has rows, or the whole, and no summand."""


def _is_known(layout: int, tensor: DTensor) -> bool:
    """Return whether a rank has rows, and note it."""
    if is_whole(tensor) or shared_dim(tensor) is not None:
        _with_rows.add(layout)
    return layout in _with_rows


def _each_element(op: Op, written: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `op(*args, **kwargs)` of the rows that this rank holds; `written`: those of the arguments that change."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    for one in tensors:  # those in lists may be parts of one another
        if type(one) is Part:
            renew(one)
    given = [one for one in tensors if not any(one is other for name, other in kwargs.items() if name == "out")]
    shape = torch.broadcast_shapes(*[one.shape for one in given])  # type: ignore[no-untyped-call]
    if any(one.shape != shape for one in written if not any(one is other for other in given)):  # it gets that shape
        return _gathering(op, written, args, kwargs)
    base = _base(tensors, written)
    if base is None:
        return _gathering(op, written, args, kwargs)

    def rows(one: Tensor) -> Tensor:
        return _rows(base, one)

    found = op(
        *_map(rows, args), **{name: rows(one) if isinstance(one, Tensor) else one for name, one in kwargs.items()}
    )
    if not written:
        return laid_out_as(found, base)
    for one in written:
        if type(one) is Part:
            write_back(one)
    return written[0]


def _map(rows: Callable[[Tensor], Tensor], args: Iterable[Any]) -> list[Any]:
    return [rows(one) if isinstance(one, Tensor) else one for one in args]


def _base(tensors: Sequence[Tensor], written: Sequence[Any]) -> DTensor | None:
    """Return the tensor in whose layout others are taken and results are; None where it takes the whole of each."""
    first = written[0] if written else None
    candidates = [one for one in (tensors if first is None else [first]) if isinstance(one, DTensor)]
    shape = torch.broadcast_shapes(*[one.shape for one in tensors])  # type: ignore[no-untyped-call]
    whole = None
    for one in candidates:
        if one.shape != shape:
            continue
        if shared_dim(one) is not None and not _has_partial(one):
            return one
        if is_whole(one):
            whole = one
    if whole is None or any(isinstance(one, DTensor) and not is_whole(one) for one in tensors):
        return None
    return whole


def _has_partial(tensor: DTensor) -> bool:
    return any(one.is_partial() for one in tensor.placements)


def _rows(base: DTensor, one: Tensor) -> Tensor:
    """Return of a tensor what is in the places of the rows that this rank holds of another, `base`."""
    if one is base:
        return held_tensor(one)
    if isinstance(one, DTensor):
        if has_same_places(one, base):
            return same_rows(one, base)
        one = whole_of(added_up(one))
    if one.numel() == 1 or is_whole(base):
        return one
    local = held_tensor(base)
    return own_rows(base, one.expand(base.shape)).reshape(local.shape)


def has_same_places(one: DTensor, base: DTensor) -> bool:
    """Return whether ranks hold the same places of two tensors: the same answer on all ranks."""
    is_alike = one.placements == base.placements and one.shape == base.shape and one.device_mesh == base.device_mesh
    if not is_alike or holds_other_rows(one, base):
        return False
    if is_spread(one) == is_spread(base):
        return True
    return not (may_be_uneven(one) or may_be_uneven(base))


def _of_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute of each element of the tensors in lists; soon where all are laid out alike."""
    rows = _rows_of_lists(args)
    is_written = bool(_written(func))
    if rows is None or any(isinstance(one, DTensor) for one in kwargs.values()):
        made = _one_by_one(func, args, kwargs)
        return None if is_written else made
    found = func(*rows, **kwargs)
    if is_written:
        return None
    first = next(one for one in args if _is_list(one))
    alike = zip(found, first, strict=True)
    return [laid_out_as(one, like) if isinstance(like, DTensor) else one for one, like in alike]


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and bool(argument) and isinstance(argument[0], Tensor)


def _rows_of_lists(args: tuple[Any, ...]) -> list[Any] | None:
    """Return what this rank has of tensors in lists, if those in one place are laid out alike, or plain numbers."""
    layouts, first, rows = list[int](), args[0], list[Any]()
    for argument in args:
        if not _is_list(argument):
            if isinstance(argument, DTensor):
                return None
            rows.append(argument)
        elif layouts and type(argument[0]) is Tensor:
            if any(isinstance(one, DTensor) or one.dim() for one in argument):
                return None
            rows.append(argument)
        else:
            found = layouts_of(argument)
            if not layouts:
                layouts, first = found, argument
                if not _with_rows.issuperset(found):
                    [_is_known(*each) for each in zip(found, argument, strict=True)]
                if not (found and _with_rows.issuperset(found)):
                    return None
            if found != layouts or any(map(_differ, zip(first, argument, strict=True))):
                return None
            rows.append(held_tensors(argument, first))
    return rows


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Compute of the tensors in each place of lists."""
    count, made = next(len(one) for one in args if _is_list(one)), []
    for index in range(count):
        alone = [_at(one, index, count) for one in args]
        places = [place for place, one in enumerate(alone) if _is_list(one)]

        def of_one(*tensors: Tensor, alone: list[Any] = alone, places: list[int] = places) -> Any:
            given = list(alone)
            for place, one in zip(places, tensors, strict=True):
                given[place] = [one]
            found = func(*given, **kwargs)
            return found[0] if found else None

        tensors = tuple(alone[place][0] for place in places)
        written = [alone[place][0] for place, _ in _written(func) if place in places]
        if any(isinstance(one, DTensor) for one in tensors):
            made.append(_each_element(of_one, written, tensors, {}))
        else:
            made.append(of_one(*tensors))
    return made


def _at(argument: Any, index: int, count: int) -> Any:
    """Return what an operation on lists of so many gets for one of them."""
    if isinstance(argument, list | tuple) and len(argument) == count:
        return [argument[index]]
    if isinstance(argument, Tensor) and argument.dim() == 1 and argument.numel() == count > 1:
        return whole_of(argument)[index : index + 1] if isinstance(argument, DTensor) else argument[index : index + 1]
    return whole_of(argument) if isinstance(argument, DTensor) else argument


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a new tensor, of which each rank has its rows if it has the shape of the old one."""
    like, size = args[0], tuple(args[1])
    local = held_tensor(like)
    if size == tuple(like.shape) and shared_dim(like) is not None:
        return laid_out_as(func(local, local.shape, *args[2:], **kwargs), like)
    return replicated(func(local, *args[1:], **kwargs), like)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view, or what is a part of a tensor of which it is a copy."""
    parent = args[0]
    name = func._schema.name.removeprefix("aten::")
    of_whole = may_be_uneven(parent) or (name in VIEWS_OF_ROWS and has_padding(parent)) or _has_one_row(parent)

    def view(whole: Tensor) -> Any:
        return func(whole, *args[1:], **kwargs)

    if of_whole:
        found = tree_map_only(Tensor, partial(replicated, like=parent), view(gathered(parent)))
    else:
        found = _noted(parent, func(*args, **kwargs))
    if isinstance(found, Tensor):
        return part_of(parent, found, view)

    def view_of(index: int) -> Callable[[Tensor], Tensor]:
        return lambda whole: view(whole)[index]

    return [part_of(parent, one, view_of(index)) for index, one in enumerate(found)]


def _has_one_row(tensor: DTensor) -> bool:
    dim = shared_dim(tensor)
    along: int = -1 if dim is None else tensor.placements[dim].dim  # type: ignore[attr-defined]
    return dim is not None and tensor.shape[along] == 1


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute of whole tensors."""
    written = written_in(func, args, kwargs)
    return _gathering(func, written, args, kwargs)


def _gathering(op: Op, written: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `op(*args, **kwargs)` of whole tensors, and keep this rank's rows of those that are `written`."""
    like = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, DTensor))
    changed = {id(one): gathered(added_up(one)) for one in tree_leaves(written) if isinstance(one, DTensor)}

    def whole(one: DTensor) -> Tensor:
        return changed[id(one)] if id(one) in changed else whole_of(added_up(one))

    whole_args, whole_kwargs = tree_map_only(DTensor, whole, (args, kwargs))
    found = op(*whole_args, **whole_kwargs)
    for one in tree_leaves(written):
        if isinstance(one, DTensor):
            if any(one is other for other in tree_leaves(kwargs)):
                _check_shape(op, one, changed[id(one)])
            write_whole(one, changed[id(one)])
            if type(one) is Part:
                write_back(one)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return tree_map_only(Tensor, partial(replicated, like=like), found)


def _check_shape(op: Op, tensor: DTensor, whole: Tensor) -> None:
    """Raise OsdpError if what an operation writes to a tensor has another shape than that had."""
    if whole.shape != tensor.shape:
        what, got = "a sharded tensor cannot change its shape", f"{op} into one of {tuple(tensor.shape)}"
        raise OsdpError(what, got=got, expected=f"out= a tensor of {tuple(whole.shape)}", advice="leave out= away")


def _whole_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute of the whole tensors in lists."""
    found = _whole(func, args, kwargs)
    return found if func._schema.returns else None


VIEWS_OF_ALL = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor)
)
"""Views that have all elements in their order where the shape stays."""
OF_ELEMENTS = frozenset((_elementwise, _of_lists, _pass, _detached, _new))
"""Ways that compute the same of slices as of whole tensors."""
