"""What a forward reads of the dtype of parameters, outside of the modules that own them.

Under mixed precision a rank has a parameter in the dtype that it computes in while it is gathered, and else in that
which it rests in.  So `x.to(self.proj.weight.dtype)` in the model's own forward makes a copy in fp32, and `self.dtype`,
as models of transformers have it, is fp32.  Inside of a block it would depend on the plan which layers are gathered:
there a module that asks for the dtype of another's parameter reads it, so that both become one operator
(`profiler.trace.find_operators.merge_read_outside`), and finds it gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from profiler.mixed_precision import RestingDtype
from profiler.trace.data_dependent import DataDependent
from profiler.trace.find_operators import Group

_DTYPE: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Resting:
    """A parameter that is cast when it is gathered."""

    dtype: torch.dtype
    """That it rests in."""
    operator: int
    modules: tuple[str, ...]
    """Paths of the modules that own it."""
    block: str | None
    """Path of the block that has all of them inside."""


def reads_as_on_ranks(
    module: nn.Module,
    groups: Sequence[Group],
    blocks: Sequence[str],
    dtypes: Mapping[str, RestingDtype],
    data: DataDependent,
    readers: dict[int, set[str]],
) -> AbstractContextManager[Any]:
    """Return a context in which a forward reads dtypes of parameters as on a rank.

    `groups` are the operators, `blocks` paths, `dtypes` those of parameters by name; `data` says which module runs.
    `readers` is where modules are noted, by operator, that read of a parameter of their block what depends on the plan.
    """
    casts = {name: one.rest for name, one in dtypes.items() if one.rest != one.compute}
    if not casts:
        return nullcontext()
    named, rests, owners = dict(module.named_parameters()), dict[int, _Resting](), dict[int, str]()
    for operator, group in enumerate(groups):
        owners |= {id(module.get_submodule(path)): path for path in group.modules}
        block = next((one for one in blocks if all(_is_inside(path, one) for path in group.modules)), None)
        for name in group.parameters:
            if name in casts:
                rests[id(named[name])] = _Resting(casts[name], operator, group.modules, block)
    return _RestingReads(rests, owners, data, readers)


class _RestingReads(TorchFunctionMode):
    """Answers of parameters that are not gathered what they rest in."""

    def __init__(
        self,
        rests: Mapping[int, _Resting],
        owners: Mapping[int, str],
        data: DataDependent,
        readers: dict[int, set[str]],
    ) -> None:
        """`rests` are by `id` of the parameter, `owners` paths of modules by theirs; the others as in
        `reads_as_on_ranks`."""
        super().__init__()
        self._rests, self._owners, self._data, self._readers = rests, owners, data, readers
        self._called: str | None = None
        """Path of the operator's module whose hooks run before its forward: they, too, find it gathered."""
        self._handles = list[RemovableHandle]()

    def __enter__(self) -> _RestingReads:
        self._handles += [
            register_module_forward_pre_hook(self._note_call),
            register_module_forward_hook(lambda module, args, output: self._forget_call()),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for _ in range(2):
            self._handles.pop().remove()

    def _note_call(self, module: nn.Module, args: Any) -> None:
        self._called = self._owners.get(id(module))

    def _forget_call(self) -> None:
        self._called = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DTYPE and (dtype := self._resting(args[0])) is not None:
            return dtype
        if func in (Tensor.to, Tensor.type_as) and len(args) > 1 and (dtype := self._resting(args[1])) is not None:
            return args[0].to(dtype, *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _resting(self, tensor: Any) -> torch.dtype | None:
        """Return the dtype that a parameter rests in; None if it is none, or is gathered."""
        found = self._rests.get(id(tensor))
        reader = self._data.module
        if found is None or any(path == self._called or _is_inside(reader, path) for path in found.modules):
            return None
        if found.block is not None and _is_inside(reader, found.block):
            self._readers.setdefault(found.operator, set()).add(reader)
            return None
        return found.dtype


def _is_inside(path: str, other: str) -> bool:
    """Return whether a module is another, or inside of it."""
    return not other or path == other or path.startswith(f"{other}.")
