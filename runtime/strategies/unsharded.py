"""Parameters that every rank holds whole, outside of FSDP2.

Those that no unit can hold, whatever the plan says (without dimensions, or of another dtype than the others of their
module), and replicated units of which nothing is trained: these are neither copied nor gathered.

Gradients are averaged over ranks all at once, at the end of the backward of a step's last micro-batch, after which
loops read them, and where they have changed since, in the optimizer's step or before they are clipped.  Averaging twice
changes nothing.  What was frozen may be trained later.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from runtime.dtensor_rows import gathered
from runtime.gradient_means import means_over_ranks
from runtime.host_copies import on_device
from runtime.local_shards import LocalShard, Origin, local_shard
from runtime.schedule import ScheduledUnit
from runtime.sharded_model import WrappedUnit
from runtime.strategies.wrap_context import WrapContext
from runtime.torch_compat import is_fake


class UnshardedParameters(WrappedUnit):
    """Parameters of a model that every rank holds."""

    def __init__(self, parameters: Sequence[nn.Parameter], context: WrapContext) -> None:
        """Move them to the device, and keep `fully_shard` away from them."""
        self.replicas, self.device = context.schedule.world_size, context.device
        for parameter in parameters:
            if parameter.device != self.device:
                parameter.data = parameter.data.to(self.device)
        self.parameters = self.computing = parameters
        self.is_reduced_by_ddp = context.schedule.by_ddp
        context.ignored.update(parameters)
        self._averaged: list[tuple[TensorWeakRef, int]] = []
        """The gradients that were averaged last, and their versions."""

    @property
    def reduced(self) -> list[nn.Parameter]:
        """Those whose gradients it averages."""
        return [] if self.is_reduced_by_ddp else [one for one in self.parameters if one.requires_grad]

    @property
    def finishes_in_optimizer_step(self) -> bool:  # type: ignore[override]
        return bool(self.reduced)

    def local_shard(self, origin: Origin, parameter: nn.Parameter) -> LocalShard:
        return local_shard(origin, parameter, self.replicas)

    def averages(self, gradient: Tensor) -> bool:
        return any(known() is gradient for known, _ in self._averaged)

    def finish_gradients(self, micro_batches: int) -> float:
        """Average the gradients; a rank without one, of layers that it left out, counts as zero."""
        parameters = self.reduced
        if not parameters:
            return 1.0
        for one in parameters:
            if isinstance(one.grad, DTensor):  # as of plain gradients times a norm of sharded ones
                one.grad = gathered(one.grad)
        gradients = [one.grad for one in parameters if one.grad is not None]
        known = [(gradient(), version) for gradient, version in self._averaged]
        is_new = len(known) != len(gradients) or any(
            one is not other or one._version != version for one, (other, version) in zip(gradients, known, strict=True)
        )
        own = torch.tensor([is_new, *(one.grad is not None for one in parameters)], dtype=torch.int32)
        has_gradient = on_device(own, self.device)
        dist.all_reduce(has_gradient)
        any_new, *counts = [1] * len(own) if is_fake(has_gradient) else has_gradient.tolist()
        if not any_new:
            return 1.0
        members = [one for one, count in zip(parameters, counts, strict=True) if count]
        own_gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in members]
        for place, mean in means_over_ranks(own_gradients, self.device):
            members[place].grad = mean.detach()  # no view, for `detach_()`
        gradients = [one.grad for one in parameters if one.grad is not None]
        self._averaged = [(TensorWeakRef(one), one._version) for one in gradients]
        return 1.0


def wrap(unit: ScheduledUnit, context: WrapContext) -> UnshardedParameters:
    """Leave a unit's parameters as they are, on the device."""
    return UnshardedParameters(list(context.materialise(unit)), context)
