"""Makes `torch.nn.utils.clip_grad_norm_` right for sharded models: loops and frameworks call it by habit.

By itself it fails on gradients of different meshes and for some norms of empty shards, and takes gradients that are
still to be reduced for complete.  It looks up two functions of its module when it is called (checked on torch 2.13),
and these are replaced, so that it is right wherever it was imported from; and so they are in `torch.nn.utils`, where
they are public, for who calls them from there.  Other models are left to PyTorch.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from profiler.errors import OsdpError
from runtime.local_shards import LocalShard
from runtime.sharded_model import ShardedModel
from runtime.step.grad_norm import scale_to, total_norm
from runtime.step.replaced_gradients import average_replaced


class ShardedGradients(Protocol):
    """A sharded model, as far as its gradients go."""

    @property
    def local_shards(self) -> Sequence[LocalShard]:
        """What this rank holds."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients of the step so far are complete."""

    @property
    def sharded(self) -> ShardedModel:
        """The model itself."""


COMPLETED = (
    "call model.clip_grad_norm_(max_norm), which completes them first, or model.finish_gradients() on all ranks before"
)
_models: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
"""In the order in which they were made, which is that of all ranks."""


def watch_clipping(model: ShardedGradients) -> None:
    """Make PyTorch's clipping right for a model, until it is collected."""
    _models[model] = None
    _replace()


def _is_sharded(shards: Sequence[LocalShard]) -> bool:
    """Whether PyTorch cannot add up these gradients: meshes may differ, and it has no maximum of an empty shard."""
    return any(isinstance(shard.parameter, DTensor) for shard in shards)


@cache
def _replace() -> None:
    norm_by_torch, scale_by_torch = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_

    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        others, norms = {id(one): one for one in tensors}, list[Tensor]()
        for model in list(_models):
            shards = [shard for shard in model.local_shards if id(shard.parameter.grad) in others]
            if not model.is_reduced and (shards or not tensors):
                what = "torch.nn.utils.clip_grad_norm_ was called before gradients are reduced over all ranks"
                raise OsdpError(what, advice=COMPLETED)
            if _is_sharded(shards):
                for shard in shards:
                    others.pop(id(shard.parameter.grad))
            if shards:
                average_replaced(model.sharded)
            if _is_sharded(shards):
                norms.append(total_norm(shards, norm_type, model.device))
        if norms and others:
            if any(isinstance(one, DTensor) for one in others.values()):
                what = "gradients of a sharded model and others that are sharded have no common norm"
                got = f"{len(tensors)} gradients, of which {len(tensors) - len(others)} are the model's"
                advice = "clip the others by themselves, and the model's by model.clip_grad_norm_(max_norm)"
                raise OsdpError(what, got=got, advice=advice)
            norms.append(norm_by_torch(list(others.values()), norm_type, False, foreach))
        if norms:
            device = norms[0].device
            norm: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device) for one in norms]), norm_type)
            if error_if_nonfinite and not torch.isfinite(norm):
                raise OsdpError("the gradient norm is not finite", got=str(norm.item()))
            return norm
        return norm_by_torch(tensors, norm_type, error_if_nonfinite, foreach)

    def clip_grads_with_norm_(
        parameters: Iterable[Tensor] | Tensor, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        others = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in list(_models):
            given = set(map(id, others))
            shards = [shard for shard in model.local_shards if id(shard.parameter) in given]
            if _is_sharded(shards):
                scale_to(shards, max_norm, total_norm)
                own = {id(shard.parameter) for shard in shards}
                others = [parameter for parameter in others if id(parameter) not in own]
        if others:
            scale_by_torch(others, max_norm, total_norm, foreach)

    clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = get_total_norm, clip_grads_with_norm_
    utils.get_total_norm, utils.clip_grads_with_norm_ = get_total_norm, clip_grads_with_norm_
