"""What the wrappings of a model's units share."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from profiler.errors import OsdpError
from profiler.mixed_precision import COMPUTE_DTYPE, master_dtype
from profiler.opaque_parameters import is_opaque, tensors_of
from runtime.meshes import Meshes
from runtime.parameter_places import ParameterSite, Registration, registered_parameters
from runtime.schedule import Schedule, ScheduledUnit


def compute_dtype(unit: ScheduledUnit, precision: str) -> torch.dtype | None:
    """What a unit's parameters are cast to under a precision; None: left as they are."""
    keeps = any(parameter.keeps_dtype for parameter in unit.parameters)
    return None if keeps else COMPUTE_DTYPE[precision]


def mixed_precision(unit: ScheduledUnit, precision: str) -> MixedPrecisionPolicy:
    """What `fully_shard` takes as `mp_policy` for a unit; inputs are cast by hooks of the modules themselves."""
    dtype, trained = compute_dtype(unit, precision), [one for one in unit.parameters if one.trainable]
    raises = dtype is not None or any(one.element_bytes < torch.float32.itemsize for one in trained)
    widest = torch.float64 if any(one.element_bytes > torch.float32.itemsize for one in trained) else torch.float32
    # One-sided accumulators are in fp32 whatever is pushed: gradients go there as they were computed.
    reduce_dtype = widest if raises and not unit.strategy.spec.one_sided else None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


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

    def compute_dtype(self, unit: ScheduledUnit) -> torch.dtype | None:
        """What a unit's parameters are cast to; None: left as they are."""
        return compute_dtype(unit, self.schedule.precision)

    def mixed_precision(self, unit: ScheduledUnit) -> MixedPrecisionPolicy:
        """What `fully_shard` takes as `mp_policy` for a unit."""
        return mixed_precision(unit, self.schedule.precision)

    def modules(self, unit: ScheduledUnit) -> list[nn.Module]:
        """Return the modules to wrap."""
        return [self.model.get_submodule(path) for path in unit.modules]

    def uncalled(self, unit: ScheduledUnit) -> set[nn.Module]:
        """Return those of its modules that a forward never runs."""
        return {self.model.get_submodule(path) for path in unit.uncalled}

    def outside_units(self) -> dict[str, nn.Parameter]:
        """Return the parameters that no unit holds, by name. To be called once."""
        held = {parameter.path for unit in self.schedule.units for parameter in unit.parameters}
        outside = [path for path in self._unwrapped if path not in held]
        return {path: self._take(path, self.device)[0] for path in outside}

    def materialise(self, unit: ScheduledUnit) -> dict[nn.Parameter, list[ParameterSite]]:
        """Return the unit's parameters and where they are registered; those on meta get uninitialised memory.

        To be called once: what is about to be sharded is not held here any longer.
        """
        home = torch.device("cpu") if unit.strategy.offload else self.device
        return dict(self._take(scheduled.path, home) for scheduled in unit.parameters)

    def _take(self, path: str, home: torch.device) -> tuple[nn.Parameter, list[ParameterSite]]:
        """Return a parameter, with data and in the dtype that it rests in, and where it is registered."""
        registration = self._unwrapped.pop(path)
        parameter = registration.tensor
        if is_opaque(parameter):
            return self._moved(path, registration, home), registration.places
        dtype = master_dtype(parameter, self.schedule.master_weights)
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, device=home, dtype=dtype)
            parameter = nn.Parameter(empty, parameter.requires_grad)
            for module, name in registration.places:
                module.register_parameter(name, parameter)
        elif parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
        if not (parameter.is_contiguous() or self.schedule.by_ddp):  # which copies nothing, so that views stay views
            parameter.data = parameter.data.contiguous()
        return parameter, registration.places

    def _moved(self, path: str, registration: Registration[nn.Parameter], home: torch.device) -> nn.Parameter:
        """Return an opaque parameter on a device: how it gets there its class knows. Raises OsdpError without data."""
        parameter = registration.tensor
        if any(tensor.is_meta for tensor in tensors_of(path, parameter)):
            what = f"`{path}` is of class {type(parameter).__name__}, whose values cannot be made shard by shard"
            advice = "give OSDP the module itself, with its values, instead of what makes one"
            raise OsdpError(what, got="a parameter without data", advice=advice)
        moved = parameter.to(home)
        if moved is parameter:
            return parameter
        made = moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved, requires_grad=False)
        for module, name in registration.places:
            module.register_parameter(name, made)
        return made
