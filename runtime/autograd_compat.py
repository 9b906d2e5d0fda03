"""What the runtime asks of autograd, functorch and the compiler that is not documented; checked on torch 2.13."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor


def around_backward(context: Callable[[Sequence[Any], Sequence[Any]], AbstractContextManager[None]]) -> None:
    """Have every backward of this process, by `backward` or `torch.autograd.grad`, run in a context.

    It is given the tensors that are differentiated, and `inputs`, those whose gradients alone are wanted.
    """
    autograd = cast(Any, torch.autograd)
    run = autograd._engine_run_backward

    def within(*args: Any, **kwargs: Any) -> Any:
        with context(args[0], args[4]):
            return run(*args, **kwargs)

    autograd._engine_run_backward = within


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_exporting() -> bool:
    """Whether torch.export runs; `torch.compiler.is_exporting` says so of every compilation before torch 2.13."""
    return cast(Any, torch.compiler)._is_exporting_flag  # type: ignore[no-any-return]


def unchanged(tensor: Tensor) -> AbstractContextManager[None]:
    """Count nothing that happens to a tensor within as a change of it."""
    context: AbstractContextManager[None] = cast(Any, torch.autograd)._unsafe_preserve_version_counter(tensor)
    return context


def without_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that transforms of torch.func have wrapped: those of vmap say that they need no gradient."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_differentiated() -> bool:
    """Whether a transform of torch.func runs that takes derivatives."""
    kinds = torch._C._functorch.TransformType
    return _runs_in(kinds.Grad, kinds.Jvp)


def is_vmapped() -> bool:
    """Whether vmap runs."""
    return _runs_in(torch._C._functorch.TransformType.Vmap)


def _runs_in(*kinds: Any) -> bool:
    return any(one.key() in kinds for one in torch._C._functorch.get_interpreter_stack() or ())
