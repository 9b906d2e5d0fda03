"""What the wrappings of a model's units share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from runtime.meshes import Meshes
from runtime.parameter_places import ParameterSite, Registration, registered_parameters
from runtime.schedule import Schedule, ScheduledUnit

COMPUTE_DTYPE = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class WrapContext:
    """A model that is being wrapped, and how."""

    model: nn.Module
    schedule: Schedule
    meshes: Meshes
    device: torch.device
    """Where it computes."""
    find_unused_parameters: bool = False
    """As DistributedDataParallel takes it."""
    ignored: set[nn.Parameter] = field(default_factory=set)
    """Parameters that `fully_shard` must leave alone."""
    _unwrapped: dict[str, Registration[nn.Parameter]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_unwrapped", registered_parameters(self.model))

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What parameters and floating-point inputs are cast to; None: left as they are."""
        return COMPUTE_DTYPE[self.schedule.precision]

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """What `fully_shard` takes as `mp_policy`."""
        dtype = self.compute_dtype
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)

    def modules(self, unit: ScheduledUnit) -> list[nn.Module]:
        """Return the modules to wrap."""
        return [self.model.get_submodule(path) for path in unit.modules]

    def scalars(self) -> dict[str, Registration[nn.Parameter]]:
        """Return the parameters without dimensions, by name; `fully_shard` does not take them. To be called once."""
        paths = [path for path, registration in self._unwrapped.items() if not registration.tensor.dim()]
        return {path: self._unwrapped.pop(path) for path in paths}

    def materialise(self, unit: ScheduledUnit) -> dict[nn.Parameter, list[ParameterSite]]:
        """Return the unit's parameters and where they are registered; those on meta get uninitialised memory.

        To be called once: what is about to be sharded is not held here any longer.
        """
        home = torch.device("cpu") if unit.strategy.offload else self.device
        found = {}
        for scheduled in unit.parameters:
            registration = self._unwrapped.pop(scheduled.path)
            parameter = registration.tensor
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device=home), parameter.requires_grad)
                for module, name in registration.places:
                    module.register_parameter(name, parameter)
            found[parameter] = registration.places
        return found
