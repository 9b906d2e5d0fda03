"""Who holds a parameter that a model had before it was sharded, and what becomes of it.

Sharding puts another tensor in its place.  Lists and other plain attributes of modules get the new one, so that an
optimizer that is made from them has what rests here, and the old one's memory is free.  Any other holder, a closure
say, would read, or change, what no longer trains: that raises OsdpError.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from profiler.errors import OsdpError
from profiler.plain_attributes import Replaced, holding_parameters, reads_values, replaced


def check_gradient_hooks(model: nn.Module, *, replicated: bool) -> None:
    """Raise OsdpError if a parameter that will be replaced has hooks of its gradient, which would be lost.

    DistributedDataParallel (`replicated`) keeps the parameters that have data.
    """
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        and (parameter.is_meta or not replicated)
    ]
    if hooked:
        what = "hooks of gradients that parameters had before OSDP(...) would never be called"
        advice = (
            "register them afterwards, on model.parameters(), by register_post_accumulate_grad_hook, which sees the "
        )
        advice += "reduced gradient of this rank's part in .grad"
        raise OsdpError(what, got=", ".join(hooked[:3]), expected="no hooks of gradients", advice=advice)


class ReplacedParameter(nn.Parameter):
    """A parameter that is no longer a model's."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_values(func):
            raise OsdpError(
                "a computation reads a parameter that the model no longer trains",
                got=f"{getattr(func, '__name__', func)} of a parameter from before OSDP(...), held by other code",
                expected="parameters read from the modules that own them, as layer.weight",
                advice="read it where it is used, in the forward, instead of keeping the tensor",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def replace_references(model: nn.Module, names: Mapping[int, str]) -> None:
    """Put the parameters that a model has now into the plain attributes of its modules.

    `names`: by identity of a parameter that it had before, the name.  Those of which there is no longer one by that
    name, as of a layer that was split, are left there.
    """
    now = dict(model.named_parameters(remove_duplicate=False))

    def current(parameter: nn.Parameter) -> nn.Parameter:
        return now.get(names.get(id(parameter), ""), parameter)

    containers: Replaced = {}
    for module in model.modules():
        for key, value in list(holding_parameters(module)):
            vars(module)[key] = replaced(value, nn.Parameter, current, containers)


def refuse_reads(replaced: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """Have whoever reads what is still held of these get an OsdpError."""
    for reference in replaced:
        parameter = reference()
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter


def refuse_assigning(model: nn.Module) -> None:
    """Have parts of a model refuse `load_state_dict(state, assign=True)`, as the model does."""
    for module in model.modules():
        if module._parameters:
            module.register_load_state_dict_pre_hook(_refuse_assigning)  # type: ignore[no-untyped-call]


def _refuse_assigning(
    module: nn.Module, state: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    given = [name for name in module._parameters if prefix + name in state]
    if given and local_metadata.get("assign_to_params_buffers"):
        what, advice = "load_state_dict cannot assign to a sharded model", "leave assign out: values are copied"
        raise OsdpError(what, got=f"assign=True for {prefix}{given[0]}", advice=advice)
