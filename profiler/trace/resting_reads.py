"""What a forward reads of the dtype of parameters, outside of the modules that own them.

Under mixed precision a rank has a parameter in the dtype that it computes in while it is gathered, and else in that
which it rests in.  So `x.to(self.proj.weight.dtype)` in the model's own forward makes a copy in fp32, and `self.dtype`,
as models of transformers have it, is fp32.

    while the owner is called, hooks too     the dtype that it computes in
    in a backward, not in a forward again    the same: that is what autograd was handed, which it still holds
    elsewhere in its block                   the same: such a read counts as one of the parameter, which merges both
                                             into one operator (`profiler.trace.find_operators.merge_read_outside`)
    a parameter of several modules           the same: it stays gathered from the first to the last
    elsewhere                                the dtype that it rests in; where it is gathered all the same, as after its
                                             forward under `shard_grad`, what is cast so takes less than that
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.autograd.function
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from profiler.mixed_precision import RestingDtype
from profiler.trace.autograd_order import running_number
from profiler.trace.data_dependent import DataDependent
from profiler.trace.find_operators import Group

_DTYPE: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Resting:
    """A parameter that is cast when it is gathered."""

    dtype: torch.dtype
    """That it rests in."""
    operator: int
    owner: str
    """Path of the module that owns it."""
    block: str | None
    """Path of the block that has that inside."""


def reads_as_on_ranks(
    module: nn.Module,
    groups: Sequence[Group],
    blocks: Sequence[str],
    dtypes: Mapping[str, RestingDtype],
    data: DataDependent,
    readers: dict[int, set[str]],
) -> AbstractContextManager[Any]:
    """Return a context in which a step reads dtypes of parameters as on a rank.

    `groups` are the operators, `blocks` paths, `dtypes` those of parameters by name; `data` says which module runs.
    `readers` gets paths of modules, by operator, that read a parameter of their block outside of its owner.
    """
    casts = {name: one.rest for name, one in dtypes.items() if one.rest != one.compute}
    if not casts:
        return nullcontext()
    named, rests, owners = dict(module.named_parameters()), dict[int, _Resting](), dict[str, nn.Module]()
    for operator, group in enumerate(groups):
        owner, *others = group.modules
        if others:
            continue
        block = next((one for one in blocks if _is_inside(owner, one)), None)
        for name in group.parameters:
            if name in casts:
                owners[owner] = module.get_submodule(owner)
                rests[id(named[name])] = _Resting(casts[name], operator, owner, block)
    return _RestingReads(rests, owners, data, readers)


class _RestingReads(TorchFunctionMode):
    """Answers of parameters that are not gathered what they rest in."""

    def __init__(
        self,
        rests: Mapping[int, _Resting],
        owners: Mapping[str, nn.Module],
        data: DataDependent,
        readers: dict[int, set[str]],
    ) -> None:
        """`rests` are by `id` of the parameter, `owners` by path; the others as in `reads_as_on_ranks`."""
        super().__init__()
        self._rests, self._owners, self._data, self._readers = rests, owners, data, readers
        self._called: Counter[str] = Counter()
        """Calls of owners that are not over, by path."""
        self._handles = list[RemovableHandle]()

    def __enter__(self) -> _RestingReads:
        # The first and the last hooks of a call: those between find the parameter gathered, too.
        for path, module in self._owners.items():

            def begin(module: nn.Module, args: Any, path: str = path) -> None:
                self._called[path] += 1

            def end(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                self._called[path] -= 1

            self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        while self._handles:
            self._handles.pop().remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DTYPE and (dtype := self._resting(args[0])) is not None:
            return dtype
        if func in (Tensor.to, Tensor.type_as):
            other = args[1] if len(args) > 1 else kwargs.get("other")
            if (dtype := self._resting(other)) is not None:
                return args[0].to(dtype, *args[2:], **{name: one for name, one in kwargs.items() if name != "other"})
        return func(*args, **kwargs)

    def _resting(self, tensor: Any) -> torch.dtype | None:
        """Return the dtype that a parameter rests in; None if it is none, or is gathered."""
        found = self._rests.get(id(tensor))
        if found is None or self._called[found.owner]:
            return None
        if running_number() is not None and not torch.is_grad_enabled() and _is_of_autograd():
            return None
        reader = self._data.module
        if found.block is not None and _is_inside(reader, found.block):
            self._readers.setdefault(found.operator, set()).add(reader)
            return None
        return found.dtype


def _is_inside(path: str, other: str) -> bool:
    """Return whether a module is another, or inside of it."""
    return not other or path == other or path.startswith(f"{other}.")


_CHECKPOINT, _FUNCTION = torch.utils.checkpoint.__file__, torch.autograd.function.__file__


def _is_of_autograd() -> bool:
    """Return whether a backward reads, and not a forward that runs again in it, which may disable gradients itself.

    `checkpoint` looks at what it has saved, as do functions of the user's; all else that runs within it is the model's.
    """
    frame: FrameType | None = sys._getframe(3)
    is_caller = True
    while frame is not None:
        name = frame.f_code.co_filename
        if name in (_CHECKPOINT, _FUNCTION):
            return is_caller or name == _FUNCTION
        frame, is_caller = frame.f_back, False
    return True
