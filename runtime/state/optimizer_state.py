"""The state of a torch optimizer, taken apart for a checkpoint and put together again.

State is kept under the original parameter's name: tensors laid out as the parameter, scalars in
tensors (`step`), and plain values.  So it fits an optimizer over any sharding of the same model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from profiler.errors import OsdpError
from profiler.opaque_parameters import is_wrapper
from runtime.local_shards import LocalShard, local_data
from runtime.state.checkpoint_manifest import Manifest, OptimizerRecord, StoredTensor
from runtime.state.dcp_tensor import GlobalTensor
from runtime.state.model_state import NAMES_SHOWN, assemble, everywhere

HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of how a step is computed, not what: the optimizer that loads keeps its own."""
_NAMES = frozenset({"params", "param_names"})
PLAIN = bool | int | float | str | None
"""What JSON gives back as it was."""


def optimizer_tensors(
    optimizer: Optimizer, shards: Sequence[LocalShard]
) -> tuple[dict[str, GlobalTensor], OptimizerRecord]:
    """Return the optimizer's tensors by key, sharing its memory, and what else it holds.

    Raises OsdpError for parameters that are not the model's, and for state that is neither laid out
    as the parameter nor a scalar.
    """
    moments: dict[str, list[tuple[LocalShard, Tensor]]] = {}
    scalars: dict[str, GlobalTensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for shard, _ in held_shards(optimizer, shards):
        for state, value in optimizer.state.get(shard.parameter, {}).items():
            key = _key(optimizer, shard, state)
            if isinstance(value, Tensor) and value.dim() == 0 and (shard.parameter.dim() > 0 or state == "step"):
                if shard.numel:
                    scalars.setdefault(key, everywhere(local_data(value)))
            elif isinstance(value, Tensor) and is_laid_out_as(value, shard.parameter):
                moments.setdefault(key, []).append((shard, value))
            elif isinstance(value, PLAIN):
                values.setdefault(shard.name, {})[state] = value
            else:
                what = f"{type(optimizer).__name__} keeps `{state}` for {shard.name} in a layout that"
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                expected = f"tensors of the parameter's shape {shard.shape}, and numbers"
                advice = "save without the optimizer, or use another one"
                raise OsdpError(f"{what} checkpoints do not support", got=got, expected=expected, advice=advice)
    groups = tuple(_record_group(group, original_names(group, shards)) for group in optimizer.param_groups)
    tensors = {key: assemble(parts) for key, parts in moments.items() if prod(parts[0][0].shape)}
    return tensors | scalars, OptimizerRecord(type(optimizer).__name__, groups, values)


NOT_NEGATIVE = ("lr", "eps", "weight_decay")
"""Options that no optimizer of torch takes below zero."""


def check_optimizer(manifest: Manifest, optimizer: Optimizer, shards: Sequence[LocalShard]) -> None:
    """Check that the checkpoint's optimizer is of this kind, with the same parameters; raises OsdpError."""
    record, optimizer_class = manifest.optimizer, type(optimizer).__name__
    if record is None:
        raise OsdpError("it holds no optimizer's state", expected=f"the state of {optimizer_class}")
    if record.kind != optimizer_class:
        raise OsdpError("it is of another optimizer", got=record.kind, expected=optimizer_class)
    saved = {name: index for index, group in enumerate(record.groups) for name in group["params"]}
    here = {shard.name for shard, _ in held_shards(optimizer, shards)}
    differing = sorted(here ^ saved.keys())
    if differing:
        what = "its optimizer has other parameters"
        raise OsdpError(what, got=", ".join(differing[:NAMES_SHOWN]), expected="the same parameters being trained")
    for group in optimizer.param_groups:
        names = original_names(group, shards)
        if len({saved[name] for name in names}) > 1:
            what = "its optimizer has other parameter groups"
            raise OsdpError(what, expected="parameters of a group that were in one group when saved")
        for name in names[:1]:
            _check_options(group, record.groups[saved[name]])
        _check_states(manifest, names)


def _check_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Check that options that are numbers here were numbers when saved, and can be; raises OsdpError."""
    for option, value in saved.items():
        here = group.get(option)
        if option in _NAMES or isinstance(here, bool) or not isinstance(here, int | float | Tensor):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (option in NOT_NEGATIVE and value < 0):
            expected = "a finite number, not negative" if option in NOT_NEGATIVE else "a finite number"
            raise OsdpError(f"the option `{option}` of its optimizer cannot be", got=repr(value), expected=expected)


def _check_states(manifest: Manifest, names: Sequence[str]) -> None:
    """Check that parameters of a group have states of the same names, matrices and vectors apart; raises OsdpError."""
    record, stored = manifest.optimizer, _stored_states(manifest)
    assert record is not None
    found: dict[bool, tuple[str, set[str]]] = {}
    for name in names:
        states = stored.get(name, {}).keys() | record.values.get(name, {}).keys()
        if not states:
            continue  # It never had a gradient.
        shape = manifest.tensors[f"model.{name}"].shape if f"model.{name}" in manifest.tensors else ()
        other, known = found.setdefault(len(shape) > 1, (name, set(states)))
        if states != known:
            missing = sorted(states ^ known)
            what = f"it does not have the same states of all parameters: {', '.join(missing[:NAMES_SHOWN])}"
            raise OsdpError(what, got=f"{name} and {other} differ", expected="the same ones")


class Restoration:
    """An optimizer's state on its way in: `targets` are filled, then `finish` hands all over."""

    def __init__(self, optimizer: Optimizer, shards: Sequence[LocalShard], manifest: Manifest) -> None:
        """Find or make the tensors to load into; the optimizer is not changed yet, but for their contents."""
        assert manifest.optimizer is not None
        self.optimizer, self.shards, self.record = optimizer, shards, manifest.optimizer
        self.targets: dict[str, GlobalTensor] = {}
        """What to load, by key."""
        self.states: dict[nn.Parameter, dict[str, Any]] = {}
        """The optimizer's future state; tensors laid out as the parameter are parts of `targets`."""
        self.scalars: list[tuple[nn.Parameter, dict[str, Any], str, str]] = []
        """Parameter, its group, state and key of the others, of which `targets` has one for all slices."""
        stored = _stored_states(manifest)
        moments: dict[str, list[tuple[LocalShard, Tensor]]] = {}
        for shard, group in held_shards(optimizer, shards):
            state = self.states.setdefault(shard.parameter, dict(self.record.values.get(shard.name, {})))
            for name, tensor in stored.get(shard.name, {}).items():
                key = _key(optimizer, shard, name)
                if not tensor.shape and (shard.shape or name == "step"):
                    self.targets[key] = everywhere(torch.zeros((), dtype=tensor.torch_dtype))
                    self.scalars.append((shard.parameter, group, name, key))
                else:
                    old, dtype = optimizer.state.get(shard.parameter, {}).get(name), tensor.torch_dtype
                    if not (isinstance(old, Tensor) and old.dtype == dtype and is_laid_out_as(old, shard.parameter)):
                        old = torch.zeros_like(shard.parameter, dtype=dtype)
                    state[name] = old
                    moments.setdefault(key, []).append((shard, old))
        self.targets |= {key: assemble(parts) for key, parts in moments.items()}

    def finish(self) -> None:
        """Give the optimizer its state, and its groups their options."""
        for parameter, group, name, key in self.scalars:
            self.states[parameter][name] = self.targets[key].parts[0][1].to(scalar_home(parameter, group), copy=True)
        for parameter, state in self.states.items():
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state
        saved = {name: group for group in self.record.groups for name in group["params"]}
        for group in self.optimizer.param_groups:
            for name in original_names(group, self.shards)[:1]:
                restore_group(group, saved[name])


def scalar_home(parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    """Return where torch's optimizers want scalars: on the host, unless the step runs on the device."""
    return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def is_laid_out_as(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Whether this rank's data of the tensor has the extent of the parameter's."""
    return local_data(tensor).shape == local_data(parameter).shape


def _stored_states(manifest: Manifest) -> dict[str, dict[str, StoredTensor]]:
    """Return the optimizer's tensors, by original name and state."""
    states: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in manifest.tensors.items():
        if key.startswith("optimizer."):
            name, _, state = key.removeprefix("optimizer.").rpartition(".")
            states.setdefault(name, {})[state] = tensor
    return states


def held_shards(optimizer: Optimizer, shards: Sequence[LocalShard]) -> Iterator[tuple[LocalShard, dict[str, Any]]]:
    """Yield the shards whose parameters the optimizer has, each with its group; raises OsdpError."""
    of = {shard.parameter: shard for shard in shards}
    for group in optimizer.param_groups:
        for parameter in _with_data(group):
            if parameter not in of:
                what = f"{type(optimizer).__name__} has a parameter that is not the model's"
                got = f"one of shape {tuple(parameter.shape)}"
                raise OsdpError(what, got=got, advice="make the optimizer after OSDP(...), from its parameters()")
            yield of[parameter], group


def original_names(group: dict[str, Any], shards: Sequence[LocalShard]) -> list[str]:
    """Return the original names of a group's parameters, each once, in order."""
    of = {shard.parameter: shard.name for shard in shards}
    return list(dict.fromkeys(of[parameter] for parameter in _with_data(group)))


def _with_data(group: dict[str, Any]) -> list[nn.Parameter]:
    """Return a group's parameters without frozen ones that hold other tensors: nothing is kept for those."""
    return [parameter for parameter in group["params"] if not is_wrapper(parameter)]


def _key(optimizer: Optimizer, shard: LocalShard, state: object) -> str:
    if not isinstance(state, str) or "." in state:
        what = f"{type(optimizer).__name__} has a state of {shard.name} whose name cannot be saved"
        raise OsdpError(what, got=repr(state), expected="text without a dot")
    return f"optimizer.{shard.name}.{state}"


def _record_group(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"params": names}
    for option, value in group.items():
        if option in _NAMES:
            continue
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        plain = [float(v) if isinstance(v, Tensor) else v for v in plain] if isinstance(plain, tuple | list) else plain
        values = plain if isinstance(plain, list) else [plain]
        if not all(isinstance(v, PLAIN) for v in values):
            what, got = f"the optimizer's option `{option}` cannot be saved", f"a {type(value).__name__}"
            raise OsdpError(what, got=got, expected="a number, text, true, false, none or a list of these")
        record[option] = plain
    return record


def restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for option, value in saved.items():
        here = group.get(option)
        if option in _NAMES or (option in HOW and option in group):
            continue
        if isinstance(here, Tensor):
            here.fill_(value)
        else:
            group[option] = tuple(value) if isinstance(value, list) and not isinstance(here, list) else value
