"""A model on a real device that is never held whole: equal operators share one storage for their parameters.

Its constructor runs on the device, so that buffers and constants get their values, but every parameter
moves to the meta device as soon as a module registers it.  `shared_weights` then puts in its place a
parameter over storage that all modules of the same class with the same shapes have in common.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map_only

from profiler.mixed_precision import computing_in, resting_dtypes
from profiler.model_source import Inputs, ModelSource
from profiler.trace.trace_errors import explained, explained_inputs

STD = 0.02
"""Standard deviation of the values that stand in for weights, as GPT-2 starts."""
SEED = 0


def build(source: ModelSource, device: torch.device) -> nn.Module:
    """Return the model with real buffers on the device; at no time has more than one parameter data.

    (A source that returns a module made before keeps it as it is.)  Raises OsdpError.
    """
    hook = register_module_parameter_registration_hook(_without_data)  # type: ignore[arg-type]
    what = f"cannot build {source.name} on {device} with its parameters on the meta device"
    expected = "a constructor that does not read the values of its parameters"
    try:
        with explained(what, expected, "compute parameters from shapes alone, or in reset_parameters()"), device:
            return source.build()
    finally:
        hook.remove()


def _without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return what is registered instead of a parameter with data; None leaves it as it is."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


@contextmanager
def shared_weights(
    module: nn.Module, device: torch.device, precision: str, master_weights: str = ""
) -> Iterator[list[Tensor]]:
    """Give the module parameters and buffers with data on the device, and its own ones back at the end.

    Parameters are of the dtypes that they compute in (`profiler.mixed_precision`).  Yields the parameters' storages,
    as tensors.  Tied parameters share storage as they did, but become parameters of their own, so that each gets a
    gradient of its own.
    """
    before = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()]
    named = dict(module.named_parameters())
    dtypes = resting_dtypes(module, precision, master_weights)
    storages = _Storages(device, {id(named[name]): dtype.compute for name, dtype in dtypes.items()})
    buffers = dict[int, Tensor]()
    try:
        for owner, parameters, registered in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    data = storages.of(owner, name, parameter)
                    owner._parameters[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            for name, buffer in registered.items():
                if buffer is not None:
                    if id(buffer) not in buffers:
                        buffers[id(buffer)] = _copy(buffer, device)
                    owner._buffers[name] = buffers[id(buffer)]
        with computing_in(module, precision, device.type):
            yield storages.made
    finally:
        for owner, parameters, registered in before:
            owner._parameters.clear()
            owner._parameters.update(parameters)
            owner._buffers.clear()
            owner._buffers.update(registered)


class _Storages:
    """Data for parameters: one tensor for each parameter name of equal modules."""

    def __init__(self, device: torch.device, dtypes: Mapping[int, torch.dtype]) -> None:
        """Take the dtypes of parameters by identity."""
        self.made: list[Tensor] = []
        self._device, self._dtypes = device, dtypes
        self._generator = torch.Generator(device).manual_seed(SEED)
        self._by_place: dict[tuple[Any, ...], Tensor] = {}
        self._by_parameter: dict[int, Tensor] = {}

    def of(self, owner: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
        """Return the data of a module's parameter; tied ones have that of the first."""
        shapes = [(key, tuple(other.shape)) for key, other in owner._parameters.items() if other is not None]
        place = (type(owner), *shapes, name, parameter.dtype, self._dtypes[id(parameter)])
        data = self._by_parameter.get(id(parameter), self._by_place.get(place))
        if data is None:
            data = self._fill(name, parameter)
            self.made.append(data)
        self._by_parameter[id(parameter)] = data
        # Also for a tied parameter: later modules like its owner share its data.
        self._by_place.setdefault(place, data)
        return data

    def _fill(self, name: str, parameter: nn.Parameter) -> Tensor:
        data = torch.zeros(parameter.shape, dtype=self._dtypes[id(parameter)], device=self._device)
        if not data.is_floating_point():
            return data
        if data.dim() == 1 and name == "weight":  # a norm's
            return data.fill_(1.0)
        return data.normal_(std=STD, generator=self._generator)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a buffer or an input: a pass may change it.  One without data becomes zeros."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def real_inputs(module: nn.Module, source: ModelSource, micro_batch: int, device: torch.device) -> Inputs:
    """Make the arguments of one forward on the device; raises OsdpError."""
    with explained_inputs(source.name), device:
        inputs = source.example_inputs(module, micro_batch)
    return tree_map_only(Tensor, lambda tensor: _copy(tensor, device), inputs)  # type: ignore[no-any-return]
