"""Has optimizers of `torch.optim` step on what DTensors hold on this rank, all at once.

They go element by element, but for those that `optimizer_hooks` refuses.  Handed DTensors, they step them one by one on
CPU ranks, whose dispatch takes longer than the step; in lists, as by default on GPUs, PyTorch has no rule for some
operations (`SGD(fused=True)`, `Rprop`), and none for tensors of several meshes or plain ones among them.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.dtensor_numbers import added_up
from runtime.dtensor_operations import has_same_places
from runtime.dtensor_rows import laid_out_as, own_rows, whole_of
from runtime.dtensor_writes import count_write
from runtime.torch_compat import held_tensor, register_first_post_hook

_stepped: "weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Tensor, DTensor]]" = weakref.WeakKeyDictionary()
"""Of optimizers that step so: by what is listed, the parameters that hold it; none between steps."""


def step_on_local_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step so from now on; its states are laid out as its parameters, as before.

    Nothing else than `torch.optim`'s own steps is changed.  Checked on 2.11 and 2.13: `_init_group` lists a group's
    parameters, gradients and states for the step, in this order.
    """
    kind = type(optimizer)
    own = (getattr(kind, name, None) for name in ("step", "_init_group"))
    if optimizer in _stepped or not all(_is_of_torch(method) for method in own):
        return
    _stepped[optimizer] = {}
    vars(optimizer)["_init_group"] = partial(_list_local, weakref.ref(optimizer))
    register_first_post_hook(optimizer, lambda optimizer, args, kwargs: end_local_step(optimizer))


def end_local_step(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters the states that a step has left under what they hold, as the momentum of SGD; note the writes."""
    stepped = _stepped.get(optimizer)
    if not stepped:
        return
    count_write()
    torch.autograd.graph.increment_version([*stepped.values()])
    for local, parameter in stepped.items():
        if local in optimizer.state:
            states = optimizer.state[parameter]
            for name, value in optimizer.state.pop(local).items():
                if isinstance(value, Tensor) and held_tensor(states.get(name)) is not value:
                    states[name] = laid_out_as(value, parameter)
    stepped.clear()


def _is_of_torch(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.optim.")


def _list_local(reference: "weakref.ref[torch.optim.Optimizer]", group: Any, *lists: list[Any]) -> Any:
    optimizer: Any = reference()
    for parameter in group["params"]:
        for name, value in optimizer.state.get(parameter, {}).items() if isinstance(parameter, DTensor) else ():
            if isinstance(value, Tensor) and value.shape == parameter.shape and not _is_alike(value, parameter):
                optimizer.state[parameter][name] = laid_out_as(_rows(value, parameter).clone(), parameter)
    found = type(optimizer)._init_group(optimizer, group, *lists)
    parameters, gradients, *states = lists
    gradients[:] = [_rows(one, parameter) for one, parameter in zip(gradients, parameters, strict=True)]
    _stepped[optimizer].update((held_tensor(one), one) for one in parameters if isinstance(one, DTensor))
    for tensors in (parameters, *states):
        tensors[:] = [held_tensor(tensor) for tensor in tensors]
    return found


def _is_alike(one: Tensor, parameter: DTensor) -> bool:
    return isinstance(one, DTensor) and has_same_places(one, parameter)


def _rows(one: Tensor, parameter: Tensor) -> Tensor:
    """Return of a gradient or state, however it is laid out, what is in the places that a parameter holds here."""
    if not isinstance(parameter, DTensor) or _is_alike(one, parameter):
        return held_tensor(one)
    whole = whole_of(added_up(one)) if isinstance(one, DTensor) else one
    return own_rows(parameter, whole).reshape(held_tensor(parameter).shape)
