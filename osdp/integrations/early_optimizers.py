"""Optimizers that were made before `OSDP(...)`, as frameworks want them, take over its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from osdp.api import OSDP
from profiler.errors import OsdpError

Names = Mapping[nn.Parameter, str]


def names_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Names:
    """Return the names of a model's parameters before it is sharded.

    Raises OsdpError if an optimizer has other parameters or has stepped already.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        _check(optimizer, names)
    return names


def take_over(optimizers: Sequence[torch.optim.Optimizer], before: Names, model: OSDP) -> None:
    """Give optimizers the parameters that rest in place of those that the model had before, group by group."""
    now: dict[str, list[nn.Parameter]] = {}
    for shard in model.sharded.local_shards:  # of split layers several
        now.setdefault(shard.name, []).append(shard.parameter)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # In place, as LBFGS has the list too.  What holds other tensors, such as packed weights, stays.
            group["params"][:] = [new for old in group["params"] for new in now.get(before[old], [old])]


def _check(optimizer: torch.optim.Optimizer, before: Names) -> None:
    kind = type(optimizer).__name__
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in parameters if parameter not in before]
    if foreign:
        got = f"{kind} with {len(foreign)} other parameters, the first of shape {tuple(foreign[0].shape)}"
        advice = "make it from the parameters() of the model that is set up with it"
        raise OsdpError("an optimizer has parameters that are not the model's", got=got, advice=advice)
    if optimizer.state:
        what, advice = "an optimizer has stepped before its model was sharded", "load its state after that"
        raise OsdpError(what, got=f"{kind} with states", expected="an optimizer without states", advice=advice)
