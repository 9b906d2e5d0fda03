"""Gradients that a loop has put in the places of those that are averaged: whole tensors, each of a rank's own batch.

    parameter.grad = torch.autograd.grad(loss, parameter)[0]    where everything is replicated
    parameter.grad = noise * reward                             whatever is computed by hand

They are averaged in place, before an optimizer steps or they are clipped.  What is equal on all ranks stays as it is.
"""

import torch
from torch.distributed.tensor import DTensor

from runtime.dtensor_rows import laid_out_as, own_rows
from runtime.gradient_means import means_over_ranks
from runtime.local_shards import local_data
from runtime.sharded_model import ShardedModel
from runtime.torch_compat import is_fake


@torch.no_grad()
def average_replaced(model: ShardedModel) -> None:
    """Average them over ranks, of which each keeps its rows. A collective call if there are any, as all ranks have."""
    replaced = [
        (parameter, gradient)
        for parameter in dict.fromkeys(model.resting.values())
        if (gradient := parameter.grad) is not None and not (isinstance(gradient, DTensor) or is_fake(gradient))
        if not any(unit.averages(gradient) for unit in model.units)
    ]
    for place, mean in means_over_ranks([gradient for _, gradient in replaced], model.device):
        parameter, gradient = replaced[place]
        gradient.copy_(mean)
        if isinstance(parameter, DTensor):
            rows = own_rows(parameter, gradient).reshape(local_data(parameter).shape)
            parameter.grad = laid_out_as(rows.clone(), parameter)
