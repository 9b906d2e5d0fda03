"""Lets optimizers of others compute with sharded parameters as one process does, and names what cannot be computed.

`torch.optim` steps DTensors right, or is refused (`optimizer_hooks`).  Of others nobody knows what they compute: their
steps run in `AsWhole`, from after models were notified until they are again, or until the step raises.  A closure runs
outside of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from profiler.errors import OsdpError, first_line
from runtime.dtensor_operations import AsWhole
from runtime.dtensor_rows import has_padding, may_be_uneven
from runtime.step.local_steps import end_local_step

Step = Callable[..., Any]

OF_ITS_OWN = ("torch.", "runtime.")
"""Packages whose optimizers step DTensors right by themselves."""
COMPILED = ("torchao.",)
"""Packages whose optimizers compile their step: right where all ranks have equally many rows."""
_entered: list[tuple[torch.optim.Optimizer, Sequence[nn.Parameter], ExitStack]] = []
"""The optimizer that steps so, if one does, and the slices of its models; those within its step do too."""
_steps: list[int] = []
"""The optimizers whose steps run, by identity: one of them twice, where a step calls that of the class before."""


def enter(optimizer: torch.optim.Optimizer, slices: Sequence[nn.Parameter] = ()) -> None:
    """Let an optimizer compute with whole tensors until `leave`, if it may need to.

    `slices`: parameters of its models that are slices of the original ones.
    """
    module = str(type(optimizer).step.__module__)  # where its step is written, whoever derives a class from it
    if _entered or module.startswith(OF_ITS_OWN):
        return
    sharded = (one for group in optimizer.param_groups for one in group["params"] if isinstance(one, DTensor))
    if module.startswith(COMPILED):
        sharded = (one for one in sharded if has_padding(one) or may_be_uneven(one))
    if next(sharded, None) is not None:
        given = {id(one) for group in optimizer.param_groups for one in group["params"]} if slices else ()
        contexts = ExitStack()
        contexts.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code knows nothing of `AsWhole`
        contexts.enter_context(AsWhole(sum(id(one) in given for one in slices)))
        _entered.append((optimizer, slices, contexts))


def leave(optimizer: torch.optim.Optimizer) -> bool:
    """End that; return whether it was so."""
    if not (_entered and _entered[0][0] is optimizer):
        return False
    _entered.pop()[2].close()
    return True


def is_within_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step was called by its own, as `super().step()`: a part of that one."""
    return _steps.count(id(optimizer)) > 1


def outside(closure: Step, before: Callable[[], None], after: Callable[[], None]) -> Step:
    """Return a closure that runs outside of it, between two other functions: as a loop runs, between two steps."""

    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        with out_of_it():
            before()
            try:
                found = closure(*args, **kwargs)
            except Exception as error:
                _of_closures[:] = [error]
                raise
            after()
        return found

    return run


_of_closures: list[Exception] = []
"""What a closure has raised last, until the step that called it ends."""


@contextmanager
def out_of_it() -> Iterator[None]:
    """Let what runs within this run outside of it."""
    entered = _entered[:]
    for optimizer, _, _ in entered:
        leave(optimizer)
    try:
        yield
    finally:
        for optimizer, slices, _ in entered:
            enter(optimizer, slices)


@cache
def guard_steps() -> None:
    """Let every optimizer's step end that when it raises, and raise OsdpError where DTensors are what it fails on."""
    by_torch = torch.optim.Optimizer.profile_hook_step
    classes = [torch.optim.Optimizer]
    for kind in classes:
        classes += kind.__subclasses__()
        if getattr(kind.__dict__.get("step"), "hooked", False):
            kind.step = _guarded(kind.step)  # type: ignore[method-assign]
    torch.optim.Optimizer.profile_hook_step = staticmethod(lambda step: _guarded(by_torch(step)))  # type: ignore[method-assign,assignment]


def _guarded(step: Step) -> Step:
    @wraps(step)
    def guarded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _steps.append(id(optimizer))
        try:
            return step(optimizer, *args, **kwargs)
        except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
            if not is_within_itself(optimizer) and leave(optimizer) and error not in _of_closures:
                _name(optimizer, error)
            raise
        finally:
            _steps.pop()
            if id(optimizer) not in _steps:
                leave(optimizer)
                end_local_step(optimizer)
                _of_closures.clear()

    guarded.hooked = True  # type: ignore[attr-defined]  # for torch, which hooks a class once
    return guarded


def _name(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """Raise OsdpError if that is what an error is about: what torch has raised, not the optimizer itself."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__"))
    words = str(error)
    by_torch = module.startswith(("torch.", "runtime.dtensor_")) and ("DTensor" in words or "sharding" in words)
    lacks = isinstance(error, AttributeError) and isinstance(error.obj, DTensor)
    if not (module.startswith("torch.distributed.tensor") or by_torch or lacks):
        return
    raise OsdpError(
        f"{type(optimizer).__name__} computes in its step what cannot be computed of sharded parameters",
        got=first_line(error) or type(error).__name__,
        expected="operations on whole tensors",
        advice="plan with the pin *=replicate, or take an optimizer that steps element by element, such as AdamW",
    ) from error
