"""Lets writes into DTensors reach them, as they reach plain tensors, where torch (2.13) loses or refuses them.

    weight[0] = 0, weight[:n] *= 2        a part along the sharded dimension is a copy: what is written to it is lost
    weight.data[padding].zero_()          the same
    weight[mask] = other[mask]            refused, as is `weight[:, 0] = 0`
    weight.copy_(whole)                   refused, though every rank has the whole of the other
    weight.normal_()                      on CPU ranks with one seed all draw the same rows
    whole.data = weight * 0.9             leaves a parameter that is no DTensor without memory

A part that is a copy is also copied anew when it is read after its root has changed, but for changes by `.data`
outside of steps, which leave no trace.  Here in-place methods take plain tensors for whole ones, of which each rank
writes its rows; a part that is a copy writes what it gets back into what it is a part of, a collective call; and
random numbers are drawn for the whole, as one process draws them.  Only where no gradient is recorded: autograd itself
refuses such writes to parameters.

Random numbers on GPUs are left to torch, whose DTensors draw them for the whole there.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from profiler.errors import OsdpError
from runtime.dtensor_rows import (
    gathered,
    has_padding,
    is_uneven,
    is_whole,
    laid_out_as,
    leaves_some_empty,
    may_be_uneven,
    own_rows,
    replicated,
    write_whole,
)
from runtime.torch_compat import held_tensor, placed

Method = Callable[..., Any]

IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
"""Operators of Python that have a form in place."""
VIEWS = (
    *("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "diagonal"),
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "t", "transpose", "permute"),
)
"""Methods that return views of plain tensors."""
ELEMENTWISE = (
    *("copy_", "add_", "sub_", "mul_", "div_", "pow_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_"),
    *("clamp_", "clamp_min_", "clamp_max_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"),
    *("subtract_", "multiply_", "divide_", "true_divide_", "clip_"),
)
"""Methods that write each element by those of others in its place."""
WHOLE = (
    *("__setitem__", "fill_diagonal_", "tril_", "triu_", "index_fill_", "index_copy_", "index_add_", "index_put_"),
    *("scatter_", "scatter_add_", "masked_scatter_", "renorm_"),
)
"""Methods that write by an element's place, or by other elements."""
ABOUT = (
    *("requires_grad_", "detach_", "rename_", "share_memory_", "resize_", "resize_as_", "set_", "apply_", "map_"),
    *("map2_", "resize_as_sparse_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
    *("as_strided_", "sparse_resize_", "sparse_resize_and_clear_"),
)
"""Methods that write no element, or change the shape."""
TURNED = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_")
"""Methods that change the shape, of which torch refuses some."""
RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")


class Part(DTensor):
    """A copy of a part of a DTensor, `root`, which has what is written to this: `view` finds it in the whole root."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """Itself."""
        return self

    @data.setter
    def data(self, values: Tensor) -> None:
        self.__class__ = DTensor  # type: ignore[assignment]  # as of plain tensors: from now on a part of nothing
        self.data = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute an operation of what the root has now."""
        for one in tree_leaves((args, kwargs)):
            if type(one) is Part:
                renew(one)
        parts = dict[int, Part]()

        def plainly(part: Part) -> DTensor:
            alone = laid_out_as(held_tensor(part), part)
            parts[id(alone)] = part
            return alone

        args, kwargs = tree_map_only(Part, plainly, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return tree_map_only(DTensor, lambda one: parts.get(id(one), one), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy that is a part of nothing."""
        return deepcopy(_alone(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe it for `torch.save` as a part of nothing."""
        return cast(Any, _alone(self)).__reduce_ex__(protocol)


def _alone(part: DTensor) -> Tensor:
    """Return a DTensor in the memory of a part, a parameter if that is one."""
    alone = placed(held_tensor(part).detach(), part.device_mesh, part.placements, part.shape)
    return nn.Parameter(alone, part.requires_grad) if isinstance(part, nn.Parameter) else alone


@cache
def follow_writes() -> None:
    """Let every DTensor of this process do so."""
    methods = {name: getattr(Tensor, name) for name in (*VIEWS, *ELEMENTWISE, *WHOLE, *RANDOM)}
    for name in VIEWS:
        setattr(DTensor, name, _viewing(methods[name], name))
    for names, writing in ((ELEMENTWISE, _writing_rows), (WHOLE, _writing_whole), (RANDOM, _drawing)):
        for name in names:
            setattr(DTensor, name, writing(methods[name]))
    in_place = {name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")} - {*ABOUT}
    in_place |= {f"__i{name}__" for name in IN_PLACE if hasattr(Tensor, f"__i{name}__")} | {"__setitem__"}
    for name in in_place:
        setattr(Part, name, _writing_back(getattr(Tensor, name)))
    for name in TURNED:
        setattr(DTensor, name, _turning(getattr(Tensor, name), getattr(Tensor, name[:-1])))
    setattr(DTensor, "view_as", _view_as)  # noqa: B010
    setattr(Part, "detach", _viewing(Tensor.detach, "detach"))  # noqa: B010
    # Not of all tensors: modes look for the functions of `Tensor.data`, which those would then not be.
    setattr(nn.Parameter, "data", property(Tensor.data.__get__, _set_data))  # type: ignore[attr-defined]  # noqa: B010


def _set_data(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the data of a parameter that is no DTensor: of a DTensor to the whole of it, which is a collective call."""
    whole = _gathered(values).to(parameter.device) if isinstance(values, DTensor) else values
    Tensor.data.__set__(parameter, whole)  # type: ignore[attr-defined]


def _is_of_others(*arguments: Any) -> bool:
    """Return whether an argument is of a class derived from DTensor, such as gradients that are not complete."""
    return any(isinstance(one, DTensor) and type(one) not in (DTensor, Part) for one in tree_leaves(arguments))


left_to_mode: list[object] = []
"""The mode, if one is entered, that sees to views and writes itself."""


def _is_left(tensor: DTensor, *others: Any) -> bool:
    """Return whether a call is left to torch: of a derived class, to a mode, compiled, or differentiated."""
    return (
        type(tensor) is not DTensor
        or _is_of_others(*others)
        or bool(left_to_mode)
        or torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any(one.requires_grad for one in (tensor, *others) if isinstance(one, Tensor)))
    )


def _viewing(by_torch: Method, name: str) -> Method:
    """Return a method of DTensors for one that returns views: where torch makes copies, parts."""

    @wraps(by_torch)
    def view(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not Part and _is_left(self):
            if type(self) is DTensor and not left_to_mode and is_uneven(self) and _needs_others(name, self, args):
                what = "a part of a parameter that one rank owns has no gradient"
                advice = "read it under torch.no_grad(), or plan with another pin than owner, such as *=shard"
                raise OsdpError(what, got=name, expected="parameters used in forward", advice=advice)
            return by_torch(self, *args, **kwargs)
        if _needs_others(name, self, args):
            args = tree_map_only(DTensor, _gathered, args)
            whole = by_torch(_gathered(self), *args, **kwargs)
            found = tree_map_only(Tensor, partial(replicated, like=self), whole)
        else:
            found = by_torch(self, *args, **kwargs)
        if isinstance(found, Tensor):
            return part_of(self, found, lambda whole: by_torch(whole, *args, **kwargs))

        def view_of(index: int) -> Callable[[Tensor], Tensor]:
            return lambda whole: by_torch(whole, *args, **kwargs)[index]

        return type(found)(part_of(self, one, view_of(index)) for index, one in enumerate(found))

    return view


def _turning(by_torch: Method, copied: Method) -> Method:
    """Return a method of DTensors for one that changes the shape: it becomes a copy; not of parameters."""

    @wraps(by_torch)
    def turn(self: DTensor, *args: Any) -> Any:
        if _is_left(self) or isinstance(self, nn.Parameter):
            return by_torch(self, *args)
        torch.utils.swap_tensors(self, copied(self, *args).clone())  # type: ignore[no-untyped-call]
        return self

    return turn


def _view_as(self: DTensor, other: Tensor) -> Tensor:
    """Return a view of another's shape: a plain one, for a plain tensor, as the `.data` of that cannot be a DTensor."""
    found = self.view(other.shape)
    return found if isinstance(other, DTensor) or not is_whole(self) else held_tensor(found)


def _needs_others(name: str, tensor: DTensor, args: tuple[Any, ...]) -> bool:
    """Return whether a view needs rows of other ranks that torch does not get."""
    if name in ("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "diagonal"):
        index = args[0] if args and isinstance(args[0], tuple) else args
        return may_be_uneven(tensor) or any(isinstance(one, Tensor | list) for one in index)
    if name in ("view", "reshape", "flatten", "unflatten"):
        return may_be_uneven(tensor) or has_padding(tensor)
    return name == "unbind" and not is_whole(tensor)


def part_of(parent: DTensor, found: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """Make a part of what torch has returned for a view, unless it is one."""
    is_part = type(parent) is Part
    if type(found) is not DTensor or not (is_part or _is_copy(found, parent)):
        return found
    made, of_parent = cast(Any, found), cast(Any, parent)
    made.__class__ = Part
    made.root = of_parent.root if is_part else parent
    made.view_of = (lambda whole: view(of_parent.view_of(whole))) if is_part else view
    made.memory = of_parent.memory if is_part else held_tensor(parent).untyped_storage()
    _note(made)
    return found


_writes = [0]
"""How often `count_write` was called, equally often on all ranks."""


def count_write() -> None:
    """Note that some DTensor is written to: what parts are copies of may change, also where its version stays."""
    _writes[0] += 1


def _state_of_root(part: Any) -> tuple[int, int]:
    """Return what changes when what a part is a part of does: the same on all ranks, without asking."""
    return _writes[0], 0 if part.root.is_inference() else part.root._version


def _note(part: Any) -> None:
    """Note that a part has what is in its place now."""
    part.noted = _state_of_root(part)


def renew(part: Any) -> None:
    """Let a part have what is in its place now, if that may have changed. A collective call then, of all ranks."""
    if part.noted != _state_of_root(part):
        if part.memory._cdata == held_tensor(part.root).untyped_storage()._cdata:  # else its `.data` were replaced
            refresh(part)
        _note(part)


def _gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, of a part what is in its place now; a plain tensor itself. A collective call."""
    if type(tensor) is Part:
        renew(tensor)
    return gathered(tensor)


@torch.no_grad()
def refresh(part: Any) -> None:
    """Let a part have what is in its place now in what it is a part of. A collective call."""
    whole = gathered(part.root)
    values = part.view_of(whole)
    if values.untyped_storage()._cdata == whole.untyped_storage()._cdata:  # else a copy in PyTorch too
        write_whole(part, values)


@torch.no_grad()
def write_back(part: Any) -> None:
    """Let what a part is a part of have the part's values. A collective call."""
    whole = gathered(part.root)
    values = part.view_of(whole)
    if values.untyped_storage()._cdata == whole.untyped_storage()._cdata:
        values.copy_(gathered(part))
        write_whole(part.root, whole)
    count_write()
    _note(part)


def _is_copy(found: DTensor, parent: DTensor) -> bool:
    memory = held_tensor(found).untyped_storage()
    return bool(memory._cdata != held_tensor(parent).untyped_storage()._cdata)


def _writing_rows(by_torch: Method) -> Method:
    """Return a method that writes element by element, also by plain tensors, of which it takes this rank's rows."""

    @wraps(by_torch)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        others = (*args, *kwargs.values())
        if not any(_is_whole_beside(self, one) for one in others) or _is_left(self, *others):
            return by_torch(self, *args, **kwargs)

        def rows(one: Tensor) -> Tensor:
            if isinstance(one, DTensor):
                if type(one) is Part:
                    renew(one)
                alike = one.placements == self.placements and one.device_mesh == self.device_mesh
                if alike and one.shape == self.shape and not _has_other_rows(self, one):
                    return held_tensor(one)
                one = _gathered(one)
            local = held_tensor(self)
            one = own_rows(self, one.expand(self.shape)).reshape(local.shape) if one.dim() else one
            return one.to(local.device)

        by_torch(held_tensor(self), *tree_map_only(Tensor, rows, args), **tree_map_only(Tensor, rows, kwargs))
        torch.autograd.graph.increment_version(self)
        return self

    return write


def _is_whole_beside(tensor: DTensor, other: Any) -> bool:
    """Return whether an argument is whole, other than a number, or in other parts than what it is to be written to."""
    if isinstance(other, DTensor):  # as in each operation of an optimizer, mostly laid out alike
        if other.placements == tensor.placements:
            return _has_other_rows(tensor, other)
        return other.dim() > 0 and is_whole(other) and not is_whole(tensor)
    return isinstance(other, Tensor) and other.dim() > 0


def _has_other_rows(tensor: DTensor, other: DTensor) -> bool:
    """Return whether one of two tensors that seem laid out alike may be in equal parts while one rank has the other.

    The same on all ranks, without asking: where all should have a part, all see whether one rank has everything.
    """
    may_differ = tensor is not other and tensor.shape == other.shape
    return may_differ and (leaves_some_empty(tensor) or is_uneven(tensor) != is_uneven(other))


def _writing_whole(by_torch: Method) -> Method:
    """Return a method that writes to the whole, and keeps this rank's rows of it."""

    @wraps(by_torch)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if _is_left(self, *tree_leaves((args, kwargs))):
            return by_torch(self, *args, **kwargs)
        values = gathered(self)
        by_torch(values, *tree_map_only(Tensor, _gathered, args), **tree_map_only(Tensor, _gathered, kwargs))
        write_whole(self, values)
        return self

    return write


def _drawing(by_torch: Method) -> Method:
    """Return a method that draws random numbers for the whole."""

    @wraps(by_torch)
    def draw(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if _is_left(self) or held_tensor(self).device.type != "cpu":  # on GPUs torch draws for the whole
            return by_torch(self, *args, **kwargs)
        whole = torch.empty(self.shape, dtype=self.dtype)
        by_torch(whole, *tree_map_only(Tensor, _gathered, args), **kwargs)
        write_whole(self, whole)
        return self

    return draw


def _writing_back(by_torch: Method) -> Method:
    """Return a method of a part that writes to it and to what it is a part of."""

    @wraps(by_torch)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_of_others(args, kwargs):
            return by_torch(self, *args, **kwargs)
        leaves = (self, *tree_leaves((args, kwargs)))
        if type(self) is Part:
            renew(self)
        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in leaves):
            what = "gradients are not recorded through what is written to a part of a sharded parameter"
            advice = "write under torch.no_grad(), or compute a new tensor, as torch.cat of parts"
            raise OsdpError(what, got=by_torch.__name__, expected="values that need no gradient", advice=advice)
        args, kwargs = tree_map_only(Tensor, _gathered, args), tree_map_only(Tensor, _gathered, kwargs)
        whole = gathered(self.root)  # which has changed, maybe, since this was copied
        values = self.view_of(whole)
        if values.untyped_storage()._cdata != whole.untyped_storage()._cdata:  # as of `p[mask]`: a copy in PyTorch too
            values = gathered(self)
            by_torch(values, *args, **kwargs)
        else:
            by_torch(values, *args, **kwargs)
            write_whole(self.root, whole)
        write_whole(self, values)
        count_write()
        _note(self)
        return self

    return write
