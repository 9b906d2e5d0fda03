"""`OSDP(model, description, device_info)`: plans if need be, and shards the model as planned.

    model, description, device_info --> Plan --> Schedule --> ShardedModel

The result is a module whose forward, parameters and state dict are those of the model given.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from osdp.autocast_room import check_room
from osdp.description import Described, factory_of
from osdp.models.user_factory import Model
from osdp.planning.rank_grid import DeviceInfo
from osdp.prepare import prepare
from osdp.wrapped_once import WRITTEN, WrappedOnce, check_unwrapped
from planner.plan import Plan
from profiler.errors import OsdpError
from runtime.apply_schedule import apply_schedule, default_device
from runtime.deferred_init.deferred_init import is_meta, record
from runtime.deferred_init.initialise import fill, share_rank_0
from runtime.failures.gloo_threads import let_gloo_end_at_exit
from runtime.schedule import Schedule
from runtime.sharded_model import ShardedModel
from runtime.state import checkpoint, pretrained
from runtime.state.state_dict import full_state_dict, load_state_dict, sharded_state_dict
from runtime.state.torch_state_dict import watch_full_state_dicts
from runtime.step.grad_norm import clip, total_norm
from runtime.step.gradient_accumulation import Accumulation
from runtime.step.ungathered_parameters import naming_sharded_parameters


class OSDP(WrappedOnce):
    """A model that trains as planned.

    Attributes: `module`, the model given, sharded in place; `plan`; `schedule`, which prints as a
    table; `sharded`, what this rank holds.
    """

    _loaded_prefix = ""
    """Of the names in the module, where it was loaded as a part of another last."""

    def __init__(
        self,
        model: nn.Module | Callable[..., Any],
        description: Described = None,
        device_info: DeviceInfo = None,
        *,
        example_inputs: Callable[..., Any] | None = None,
        compile_backend: str | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        """Shard `model` over the default process group. A collective call: all ranks give the same.

        model: a module (every rank's becomes that of rank 0), a module on the meta device, or a
            function that makes one.  The latter two are made shard by shard, with the values that the
            constructor gives after `torch.manual_seed`, and no rank ever holds the whole.
        description: a `Plan` or the file of one, or what to plan for (`osdp.description.Description`
            as a dict or YAML file), or None.
        device_info: what to plan for, see `DeviceInfo`; None: the machine at hand.
        example_inputs: function of a batch size that returns arguments of forward, where the model
            has no method of that name and they cannot be inferred.
        compile_backend: compile blocks by `torch.compile`, for instance "inductor".
        find_unused_parameters: as DistributedDataParallel has it: under a plan that replicates everything,
            some ranks may leave out layers that others run.

        Raises OsdpError if there is no process group or one of another size than the plan's, the
        plan is not the model's, the model cannot be traced, or nothing fits.
        """
        super().__init__()
        self.plan: Plan
        self.schedule: Schedule
        built = model if isinstance(model, nn.Module) else factory_of(model, description)
        if isinstance(built, nn.Module):
            check_unwrapped(built)
        with torch.random.fork_rng(devices=[]):
            self.plan, self.schedule = prepare(built, description, device_info, example_inputs, find_unused_parameters)
        self.sharded: ShardedModel = shard(built, self.schedule, compile_backend, find_unused_parameters)
        self.schedule = self.sharded.schedule
        self.sharded.autocast.check = functools.partial(_check_autocast, weakref.ref(self))
        self._accumulation = Accumulation(self.sharded, self.plan.accumulation)
        self.module: nn.Module = self.sharded.module
        self.register_load_state_dict_post_hook(self._forget_missing)  # type: ignore[no-untyped-call]
        let_gloo_end_at_exit()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns for these arguments."""
        return self._accumulation.run(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave what is reduced once per step to a later micro-batch: for all micro-batches of a step but the last.

        Not needed where the loop runs as many micro-batches per step as the plan has.
        """
        return self._accumulation.no_sync()

    def sync(self) -> None:
        """Make the next micro-batch the last of its step, where a step has fewer than the plan."""
        self._accumulation.sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those of a step that is given up, which wait to be reduced.

        An optimizer's `zero_grad` does the same where it has all parameters, but under `odc` amid a step.
        """
        self._accumulation.discard(set_to_none)
        super().zero_grad(set_to_none)  # of what rests, whatever a forward has gathered

    def finish_gradients(self) -> None:
        """Complete this step's gradients, to read `.grad` before the optimizer steps. A collective call.

        Needed under `odc` only, whose ranks synchronize in the optimizer's step; `clip_grad_norm_` does it by itself.
        """
        self._accumulation.finish_gradients()

    settle_gradients = finish_gradients  # its name before, in scripts of users

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`; return the norm before.

        A collective call. `torch.nn.utils.clip_grad_norm_` does the same where gradients are reduced already.
        """
        self._accumulation.finish_gradients()
        return clip(self.sharded.local_shards, max_norm, norm_type, self.sharded.device, error_if_nonfinite)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients over all ranks, infinite or NaN if one of them is. A collective call."""
        self._accumulation.finish_gradients()
        return total_norm(self.sharded.local_shards, norm_type, self.sharded.device)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what rests on this rank under the names of the model; slices of a split operator under their own.

        The same at any time, also where a forward has gathered other tensors.
        """
        return self.sharded.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers under the names of the model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the names of the model, so that a module around it names its parameters so too."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return what this rank holds, under the original names; see `full_state_dict` for whole tensors.

        As `nn.Module.state_dict`, so also as a part of another module's.
        """
        destination = OrderedDict() if destination is None else destination
        own = sharded_state_dict(self.sharded, keep_vars)
        destination.update({prefix + name: value for name, value in own.items()})
        return cast(dict[str, Any], destination)

    def full_state_dict(self, rank0_only: bool = True) -> dict[str, Tensor]:
        """Return the state dict of the unsharded model on the CPU of rank 0, or of every rank. A collective call.

        Buffers that differ by rank, such as statistics of BatchNorm, are those of rank 0.
        """
        return full_state_dict(self.sharded, rank0_only)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors, or what `state_dict` returned under the same plan; return missing and unexpected keys.

        Raises OsdpError for other names, if `strict`, or shapes; `assign` is not supported.
        """
        if assign:
            raise OsdpError("load_state_dict cannot assign here", advice="leave assign out: values are copied")
        return nn.modules.module._IncompatibleKeys(*load_state_dict(self.sharded, state_dict, strict))

    def load_pretrained(
        self, folder: str | Path, *, rename: pretrained.Rename = None, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load a folder of Hugging Face (safetensors), each rank its part; return missing and unexpected names.

        folder: of `save_pretrained`, theirs or ours.
        rename: function or mapping from a name of the model to the one in the files.

        See `runtime.state.pretrained.load`. Raises OsdpError.
        """
        return pretrained.load(self.sharded, Path(folder), rename, strict)

    def save_pretrained(
        self, folder: str | Path, *, max_shard_bytes: int = 5 << 30, rename: pretrained.Rename = None
    ) -> None:
        """Save for Hugging Face's `from_pretrained`: safetensors files with an index, and `config` if there is one.

        max_shard_bytes: largest file, which one rank holds while it writes it.

        A collective call. See `runtime.state.pretrained.save`. Raises OsdpError.
        """
        pretrained.save(self.sharded, Path(folder), max_shard_bytes, rename)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Load as a part of another module; `lists`: of missing keys, of unexpected keys, and of errors."""
        missing, unexpected, errors = lists
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            found = load_state_dict(self.sharded, own, strict=False)
        except OsdpError as error:
            errors.append(str(error))
        else:
            for names, keys in zip(found, (missing, unexpected), strict=True):
                keys.extend(prefix + name for name in names)
        self._loaded_prefix = f"{prefix}module."

    @staticmethod
    def _forget_missing(model: OSDP, incompatible: Any) -> None:
        """Take back what the modules within miss: `_load_from_state_dict` has loaded them."""
        inside = model._loaded_prefix
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not key.startswith(inside)]

    def save_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        asynchronous: bool = False,
    ) -> checkpoint.Saving:
        """Save model, optimizer and `extra` (what JSON can hold) to the folder `path`, whole or not at all. Collective.

        Can be loaded under any plan and number of ranks. See `runtime.state.checkpoint.save`.
        """
        shards = self.sharded.local_shards
        return checkpoint.save(path, self.module, shards, optimizer, extra, asynchronous=asynchronous)

    def load_checkpoint(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Load what `save_checkpoint` saved under any plan; return `extra`. Collective; see `checkpoint.load`."""
        extra = checkpoint.load(path, self.module, self.sharded.local_shards, optimizer)
        self.sharded.expire()
        return extra

    def __deepcopy__(self, memo: dict[int, Any]) -> OSDP:
        """Raise OsdpError: a copy would have no part in what its ranks have agreed on."""
        what = "a sharded model cannot be copied"
        advice = "copy the model before OSDP(...); instead of AveragedModel, osdp.averaging.AveragedParameters(model)"
        raise OsdpError(what, got="copy.deepcopy", advice=advice)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise OsdpError: a file would have this rank's part of the parameters, and process groups."""
        what, advice = (
            "a sharded model cannot be pickled",
            "save model.full_state_dict(), or call model.save_checkpoint",
        )
        raise OsdpError(what, got="pickle, torch.save(model)", advice=advice)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OSDP:
        """Convert nothing, as `to(device)` where it is there already. Raises OsdpError for another dtype or device."""
        for dtype, device in {(one.dtype, one.device) for one in (*self.parameters(), *self.buffers())}:
            made = fn(torch.empty(0, dtype=dtype, device=device))
            if made.dtype != dtype or made.device.type not in (device.type, self.sharded.device.type):
                what, advice = "a sharded model cannot be converted", "convert the model before OSDP(...)"
                raise OsdpError(what, got=f"{dtype} to {made.dtype} on {made.device}", advice=advice)
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` that names leave `module` out."""
        return {"": "module"}

    def extra_repr(self) -> str:
        """Say how it is sharded."""
        return f"{self.plan.model.name} on {self.schedule.world_size} ranks, {len(self.schedule.units)} units"

    def __getattr__(self, name: str) -> Any:
        """Look up in the model what this wrapper does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            found = getattr(self.module, name)
            is_method = inspect.ismethod(found) and found.__self__ is self.module
            return self._guarded(found) if is_method else found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where it is looked up: the model's on the model, as `model.temperature = 0.5`."""
        if not self._is_of_model(name):
            super().__setattr__(name, value)
        elif name in self.module._parameters and isinstance(value, Tensor):
            # torch.func.functional_call gives plain tensors.
            cast(dict[str, Any], self.module._parameters)[name] = value
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where it is looked up."""
        delattr(self.module, name) if self._is_of_model(name) else super().__delattr__(name)

    def _is_of_model(self, name: str) -> bool:
        """Whether an attribute is the model's, or a new public one, which the model's forward may look for."""
        registered = [one for table in ("_parameters", "_buffers", "_modules") for one in vars(self).get(table, ())]
        is_own = name in (*vars(self), *registered, *WRITTEN, "module") or hasattr(type(self), name)
        inner = vars(self).get("_modules", {}).get("module")
        return not is_own and inner is not None and (not name.startswith("_") or hasattr(inner, name))

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the model that runs as a forward of it does where no backward follows."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                with naming_sharded_parameters(self.module):
                    return method(*args, **kwargs)
            return self._accumulation.infer(method, *args, **kwargs)

        return run


def _check_autocast(model: weakref.ref[OSDP], dtype: torch.dtype) -> None:
    if (found := model()) is not None:
        check_room(found.plan, found.sharded, dtype)


OptimalShardedDataParallel = OSDP


def shard(
    model: Model, schedule: Schedule, compile_backend: str | None = None, find_unused_parameters: bool = False
) -> ShardedModel:
    """Shard a model and give it its values. A collective call."""
    device = default_device()
    watch_full_state_dicts(device)
    options = schedule, device, compile_backend, find_unused_parameters
    if isinstance(model, nn.Module) and not is_meta(model):
        share_rank_0(model, device)
        return apply_schedule(model, *options)
    made = model if isinstance(model, nn.Module) else record(model)
    return fill(made, lambda made: apply_schedule(made, *options))
