"""Exponential moving averages of a sharded model's parameters, each rank of what it holds.

    mean <- decay * mean + (1 - decay) * parameter

`torch.optim.swa_utils.AveragedModel` copies the model, which a sharded model cannot be.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from osdp.api import OSDP
from profiler.errors import OsdpError


class AveragedParameters:
    """The means of a model's parameters; in fp32 or wider, where the parameters rest."""

    def __init__(self, model: OSDP, decay: float = 0.999) -> None:
        """Begin with the parameters as they are. Raises OsdpError for a decay outside of [0, 1)."""
        if not 0 <= decay < 1:
            raise OsdpError("the decay of an average is out of range", got=str(decay), expected="0 <= decay < 1")
        self.model, self.decay = model, decay
        self.means = [
            shard.local(shard.parameter).to(torch.promote_types(shard.parameter.dtype, torch.float32), copy=True)
            for shard in model.sharded.local_shards
        ]

    def update(self) -> None:
        """Take the parameters in. To be called after each step of the optimizer."""
        for mean, shard in zip(self.means, self.model.sharded.local_shards, strict=True):
            mean.lerp_(shard.local(shard.parameter).to(mean.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the means: to evaluate, or to export by `full_state_dict` or `save_pretrained`."""
        self.model.sharded.reshard()
        kept = [shard.local(shard.parameter).clone() for shard in self.model.sharded.local_shards]
        try:
            self._load(self.means)
            yield
        finally:
            self._load(kept)

    def _load(self, values: list[torch.Tensor]) -> None:
        self.model.sharded.reshard()
        for value, shard in zip(values, self.model.sharded.local_shards, strict=True):
            shard.local(shard.parameter).copy_(value)
        self.model.sharded.expire()
