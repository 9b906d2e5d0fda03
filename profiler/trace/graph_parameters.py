"""Parameters and buffers as a `ModelGraph` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from profiler.mixed_precision import RestingDtype
from profiler.model_graph import Parameter
from profiler.opaque_parameters import is_opaque, tensors_of
from profiler.trace.find_operators import Group, held_whole


def parameter_of(name: str, parameter: nn.Parameter, dtype: RestingDtype, *, used: bool = True) -> Parameter:
    rest = str(dtype.rest).removeprefix("torch.")
    return Parameter(name, tuple(parameter.shape), parameter.requires_grad, rest, dtype.keeps, used)


def outside_of(module: nn.Module, groups: Sequence[Group], dtypes: Mapping[str, RestingDtype]) -> tuple[Parameter, ...]:
    """Return the parameters that are in no operator."""
    names = held_whole(module, groups)
    return tuple(one for name in names for one in _parts(name, module.get_parameter(name), dtypes[name]))


def buffers_of(module: nn.Module) -> tuple[Parameter, ...]:
    """Return the storages of a module's buffers, each once, under the name of a buffer that has it."""
    storages = {buffer.untyped_storage()._cdata: (name, buffer) for name, buffer in module.named_buffers()}
    return tuple(buffer_of(name, buffer) for name, buffer in storages.values())


def buffer_of(name: str, tensor: Tensor) -> Parameter:
    """Return the storage of a tensor that every rank holds whole, as a parameter that is not trained."""
    return Parameter(
        name,
        (tensor.untyped_storage().nbytes() // tensor.element_size(),),
        trainable=False,
        dtype=str(tensor.dtype).removeprefix("torch."),
        keeps_dtype=True,
    )


def _parts(name: str, parameter: nn.Parameter, dtype: RestingDtype) -> list[Parameter]:
    """Return a parameter, or what an opaque one holds."""
    if not is_opaque(parameter):
        return [parameter_of(name, parameter, dtype)]
    own = [nn.Parameter(tensor, requires_grad=False) for tensor in tensors_of(name, parameter)]
    return [parameter_of(name, one, RestingDtype(one.dtype, one.dtype, keeps=True)) for one in own]
