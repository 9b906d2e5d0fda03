"""Gradients that a loop has put in the places of those that are averaged: whole tensors, each of a rank's own batch.

    parameter.grad = torch.autograd.grad(loss, parameter)[0]    where everything is replicated
    parameter.grad = noise * reward                             whatever is computed by hand

They are averaged in place, before an optimizer steps or they are clipped.  What is equal on all ranks stays as it is.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.dtensor_rows import laid_out_as, own_rows
from runtime.local_shards import local_data
from runtime.sharded_model import ShardedModel
from runtime.torch_compat import is_fake


@torch.no_grad()
def average_replaced(model: ShardedModel) -> None:
    """Average them over ranks, of which each keeps its rows. A collective call if there are any, as all ranks have."""
    alike: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(model.resting.values()):
        gradient = parameter.grad
        if gradient is None or isinstance(gradient, DTensor) or is_fake(gradient):
            continue
        if not any(unit.averages(gradient) for unit in model.units):
            alike.setdefault(torch.promote_types(gradient.dtype, torch.float32), []).append(parameter)
    for dtype, parameters in alike.items():
        total = torch.cat([_gradient(one).to(dtype).reshape(-1) for one in parameters])
        dist.all_reduce(torch.view_as_real(total) if dtype.is_complex else total)
        total /= dist.get_world_size()
        for one, part in zip(parameters, torch.split(total, [one.numel() for one in parameters]), strict=True):
            mean = _gradient(one).copy_(part.view(one.shape))
            if isinstance(one, DTensor):
                rows = own_rows(one, mean).reshape(local_data(one).shape)
                one.grad = laid_out_as(rows.clone(), one)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
