"""Parameters without dimensions, which no strategy shards: every rank holds them, whatever the plan says.

Their gradients are averaged over ranks all at once, in the optimizer's step or before they are clipped: one all-reduce
of a few numbers.  Averaging twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from runtime.local_shards import LocalShard, Origin, local_shard
from runtime.parameter_places import Registration
from runtime.sharded_model import WrappedUnit
from runtime.torch_compat import is_fake


class Scalars(WrappedUnit):
    """All parameters of a model that have no dimensions."""

    def __init__(self, found: Mapping[str, Registration[nn.Parameter]], device: torch.device, by_ddp: bool) -> None:
        """Move them to the device; those on meta get uninitialised memory. `by_ddp`: who reduces their gradients."""
        self.replicas, self.device = dist.get_world_size(), device
        for registration in found.values():
            parameter = registration.tensor
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty((), dtype=parameter.dtype, device=device), parameter.requires_grad)
                for module, name in registration.places:
                    module.register_parameter(name, parameter)
            parameter.data = parameter.data.to(device)
        self.parameters = [module.get_parameter(name) for module, name in (one.places[0] for one in found.values())]
        self.reduced = [] if by_ddp else [parameter for parameter in self.parameters if parameter.requires_grad]
        self.finishes_in_optimizer_step = bool(self.reduced)

    def local_shard(self, origin: Origin, parameter: nn.Parameter) -> LocalShard:
        return local_shard(origin, parameter, self.replicas)

    def finish_gradients(self, micro_batches: int) -> float:
        """Average the gradients; a rank without one, of layers that it left out, counts as zero."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        gradients = [zero if one.grad is None else one.grad.detach().to(torch.float64) for one in self.reduced]
        counts = [zero if one.grad is None else zero + 1 for one in self.reduced]
        if self.reduced:
            sums = torch.stack(gradients + counts)
            dist.all_reduce(sums)
            for parameter, total, count in zip(self.reduced, *sums.tensor_split(2), strict=True):
                if is_fake(count) or count > 0:
                    parameter.grad = (total / self.replicas).to(parameter.dtype)
        return 1.0
