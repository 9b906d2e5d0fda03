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

from runtime.dtensor_rows import laid_out_as
from runtime.torch_compat import held_tensor


def step_on_local_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step so from now on; its states are laid out as its parameters, as before.

    Nothing else than `torch.optim`'s own steps is changed.  Checked on 2.11 and 2.13: `_init_group` lists a group's
    parameters, gradients and states for the step, parameters first.
    """
    kind = type(optimizer)
    own = (getattr(kind, name, None) for name in ("step", "_init_group"))
    if "_init_group" in vars(optimizer) or not all(_is_of_torch(method) for method in own):
        return
    stepped: dict[Tensor, DTensor] = {}
    vars(optimizer)["_init_group"] = partial(_list_local, weakref.ref(optimizer), stepped)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: _lay_out(optimizer, stepped))


def _is_of_torch(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.optim.")


def _list_local(
    reference: "weakref.ref[torch.optim.Optimizer]", stepped: dict[Tensor, DTensor], group: Any, *lists: list[Any]
) -> Any:
    optimizer: Any = reference()
    found = type(optimizer)._init_group(optimizer, group, *lists)
    parameters = lists[0]
    stepped.update((held_tensor(one), one) for one in parameters if isinstance(one, DTensor))
    for tensors in lists:
        tensors[:] = [held_tensor(tensor) for tensor in tensors]
    return found


def _lay_out(optimizer: torch.optim.Optimizer, stepped: dict[Tensor, DTensor]) -> None:
    """Give parameters the states that a step has left under what they hold, as the momentum of SGD."""
    for local, parameter in stepped.items():
        if local in optimizer.state:
            states = optimizer.state[parameter]
            for name, value in optimizer.state.pop(local).items():
                if isinstance(value, Tensor) and held_tensor(states.get(name)) is not value:
                    states[name] = laid_out_as(value, parameter)
    stepped.clear()
