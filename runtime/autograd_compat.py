"""What the runtime asks of autograd and functorch beyond what PyTorch documents; checked on torch 2.13."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch


def before_backward(check: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """Have a function called before every backward of this process, by `backward` or `torch.autograd.grad`.

    With the tensors that are differentiated, and `inputs`, those whose gradients alone are wanted.
    """
    autograd = cast(Any, torch.autograd)
    run = autograd._engine_run_backward

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args[0], args[4])
        return run(*args, **kwargs)

    autograd._engine_run_backward = checked


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_differentiated() -> bool:
    """Whether a transform of torch.func runs that takes derivatives."""
    functorch = torch._C._functorch
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(one.key() in kinds for one in functorch.get_interpreter_stack() or ())
