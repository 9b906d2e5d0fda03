"""Strategies of Lightning that train a model as planned: one for `Trainer`, one for `Fabric`.

    Trainer(strategy=OSDPStrategy(description, device_info))
    Fabric(strategy=OSDPFabricStrategy(description, device_info))

Checkpoints are single files with whole tensors, as those of Lightning's DDP and of one device, which load each other's:
ranks gather them on rank 0 and read no more of a local file than their parts.  With `save_distributed_checkpoint`, as
Lightning calls it, they are folders, to which each rank writes its parts, and which load under any plan too.

Names with an underscore are Lightning's private ones, checked on 2.6.6.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import strategies as fabric_strategies
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from osdp.api import OSDP
from osdp.autocast_room import refuse_fp16
from osdp.description import Described
from osdp.integrations.early_optimizers import names_of, take_over
from osdp.integrations.lightning_checkpoints import (
    LoadedByParts,
    MappedCheckpointIO,
    load_into,
    load_parts,
    save_parts,
    save_state,
    whole_state,
)
from osdp.planning.rank_grid import DeviceInfo
from profiler.errors import OsdpError
from runtime.apply_schedule import default_device
from runtime.parameter_places import is_inside

PRECISIONS = ("32-true", "bf16-true", "64-true", "bf16-mixed")
"""Those that say in which dtype parameters rest, and that of autocast which scales no losses."""


class _JoinsRanks:
    """What both strategies do to join the process group."""

    root_device: torch.device
    _process_group_backend: str | None

    def setup_environment(self) -> None:
        """Join the process group."""
        _tell_ranks(self)
        super().setup_environment()  # type: ignore[misc]  # of Lightning's strategy

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or _backend(self.root_device)


class OSDPStrategy(_JoinsRanks, trainer_strategies.DDPStrategy):
    """Has `Trainer` train the model within a LightningModule as planned."""

    def __init__(
        self,
        description: Described = None,
        device_info: DeviceInfo = None,
        *,
        module: str | None = None,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **options: Any,
    ) -> None:
        """Take what `OSDP` takes.

        module: name of the model in the LightningModule; by default its one part with trained parameters.
        save_distributed_checkpoint: save folders, each rank its parts.
        process_group_backend: default "cpu:gloo,cuda:nccl" on GPUs, "gloo" without.
        options: further arguments of `OSDP`, such as `example_inputs`.

        A LightningModule whose `configure_model` has made an OSDP model keeps that.
        """
        files = MappedCheckpointIO()
        super().__init__(checkpoint_io=files, process_group_backend=process_group_backend, timeout=timeout)
        self._arguments = (description, device_info), options
        self._named, self._path = module, ""
        self._saves_parts = save_distributed_checkpoint
        self._sharded: OSDP | None = None

    @property
    def sharded(self) -> OSDP:
        """The model. Raises OsdpError before Trainer has set it up."""
        if self._sharded is None:
            raise OsdpError("Trainer has not set up the model yet", advice="ask after trainer.fit() has begun")
        return self._sharded

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded into the sharded model."""
        return True

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Have a model made on the host, or on the meta device, from where `OSDP` takes it part by part."""
        with _made_for_osdp(empty_init), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the model unless it is, and have the optimizers made. Raises OsdpError for what cannot work."""
        self.accelerator.setup(trainer)
        _check_precision(self.precision_plugin.precision)
        if self._layer_sync is not None:
            raise OsdpError("sync_batchnorm is not supported", advice="leave sync_batchnorm=True out of Trainer")
        self._shard(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            _check_steps(self.optimizers)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> None:
        made = next((path for path, one in module.named_modules() if isinstance(one, OSDP)), None)
        path = made or _path_of_model(module, self._named)
        parent, leaf = module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if made is None:
            self.precision_plugin.convert_module(module)
            _check_device(self.root_device)
            (description, device_info), options = self._arguments
            with self.precision_plugin.tensor_init_context():  # of example inputs too
                model = OSDP(getattr(parent, leaf), description, device_info, **options)
            setattr(parent, leaf, model)
        model = getattr(parent, leaf)
        refuse_fp16(model.plan, "Lightning")
        setattr(parent, leaf, None)
        module.to(self.root_device)  # metrics and the like; what OSDP has is where it belongs
        setattr(parent, leaf, model)
        outside = [name for name, one in module.named_parameters() if one.requires_grad and not is_inside(name, path)]
        if outside:
            what = "the LightningModule has trained parameters outside of the model that OSDP shards"
            got = f"{outside[0]}{f' and {len(outside) - 1} more' if outside[1:] else ''}, not in `{path}`"
            advice = "have one module with all of them, and name it: OSDPStrategy(..., module=NAME)"
            raise OsdpError(what, got=got, expected="gradients of all of them reduced", advice=advice)
        self._sharded, self._path = model, path

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run forward and backward, complete and clip gradients, then step: not all in the optimizer's step.

        That completes gradients when it begins, as in any other loop.
        """
        module = model or self.lightning_module
        if module.automatic_optimization:
            self.sharded.sync()
        result = closure()
        self.sharded.finish_gradients()
        self.precision_plugin._after_closure(module, optimizer)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave reductions of gradients to a later micro-batch."""
        with self.sharded.no_sync():
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the LightningModule with whole tensors, on rank 0. A collective call.

        Without the model if each rank saves its parts.
        """
        if self._saves_parts:
            state = self.lightning_module.state_dict()
            return {name: one for name, one in state.items() if not is_inside(name, self._path)}
        whole = {f"{self._path}.{name}": one for name, one in self.sharded.full_state_dict().items()}
        state = self.lightning_module.state_dict()
        return {name: whole.get(name, one) for name, one in state.items()} if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that the optimizer would have in one process, on rank 0. A collective call.

        Nothing if each rank saves its parts.
        """
        return {} if self._saves_parts else whole_state(optimizer, self.sharded)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers, each rank its parts."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                LoadedByParts(optimizer, self.sharded).load_state_dict(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, whole on rank 0 or each rank its parts. A collective call."""
        if self._saves_parts:
            optimizers = self.optimizers if "optimizer_states" in checkpoint else []
            save_parts(self.broadcast(filepath), self.sharded, optimizers, checkpoint)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what a checkpoint holds; of a folder, model and optimizer are loaded then."""
        if not Path(checkpoint_path).is_dir():
            whole: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return whole
        trains = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        rest = load_parts(checkpoint_path, self.sharded, self.optimizers if trains else [], weights_only)
        loaded = {f"{self._path}.{name}": one for name, one in self.sharded.state_dict().items()}
        return rest | {"state_dict": loaded | rest["state_dict"]}

    def teardown(self) -> None:
        """Give back what Lightning holds; the model stays where it is, sharded."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class OSDPFabricStrategy(_JoinsRanks, fabric_strategies.DDPStrategy):
    """Has `Fabric` train models as planned."""

    def __init__(
        self,
        description: Described = None,
        device_info: DeviceInfo = None,
        *,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        **options: Any,
    ) -> None:
        """Take what `OSDP` takes; `options` are its further arguments, such as `example_inputs`.

        save_distributed_checkpoint: save folders, each rank its parts.
        process_group_backend: default "cpu:gloo,cuda:nccl" on GPUs, "gloo" without.
        """
        files = MappedCheckpointIO()
        super().__init__(checkpoint_io=files, process_group_backend=process_group_backend, timeout=timeout)
        self._arguments = (description, device_info), options
        self._backward_sync_control = _SyncControl()
        self._models: list[OSDP] = []
        self._saves_parts = save_distributed_checkpoint

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Have a model made on the host, or on the meta device, from where `OSDP` takes it part by part."""
        with _made_for_osdp(empty_init), self.precision.module_init_context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is: `OSDP` moves each rank's part."""

    def setup_module(self, module: nn.Module) -> OSDP:
        """Shard a model. Raises OsdpError for what cannot work."""
        _check_precision(self.precision.precision)
        _check_device(self.root_device)
        (description, device_info), options = self._arguments
        with self.precision.tensor_init_context():  # of example inputs too
            model = OSDP(module, description, device_info, **options)
        self._models.append(model)
        return model

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[OSDP, list[Optimizer], Any]:
        """Shard a model, and give the optimizers its parameters in place of those before. Raises OsdpError."""
        before = names_of(module, optimizers)
        model = self.setup_module(module)
        take_over(optimizers, before, model)
        return model, optimizers, scheduler

    def clip_gradients_norm(self, module: nn.Module, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
        """Clip by the norm over all ranks; return that before."""
        self._finish(module)
        norm: Tensor = super().clip_gradients_norm(module, optimizer, *args, **kwargs)
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every element."""
        self._finish(module)
        super().clip_gradients_value(module, optimizer, clip_val)

    @staticmethod
    def _finish(module: nn.Module) -> None:
        if isinstance(module, OSDP):
            module.finish_gradients()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole tensors under the names of the model, on rank 0. A collective call."""
        state: dict[str, Any] = module.full_state_dict() if isinstance(module, OSDP) else module.state_dict()
        return state

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that the optimizer would have in one process, on rank 0. A collective call."""
        model = self._model_of(optimizer)
        return optimizer.state_dict() if model is None else whole_state(optimizer, model)

    def _model_of(self, optimizer: Optimizer) -> OSDP | None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        shards = ((model, shard) for model in self._models for shard in model.sharded.local_shards)
        return next((model for model, shard in shards if id(shard.parameter) in own), None)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Save models, optimizers and the like, whole on rank 0 or each rank its parts. A collective call."""
        if self._saves_parts:
            save_state(self.broadcast(path), state, filter)
        else:
            super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into what `state` holds, each rank its parts; return the rest."""
        if isinstance(state, Optimizer) and (model := self._model_of(state)) is not None:
            LoadedByParts(state, model).load_state_dict(self.checkpoint_io.load_checkpoint(path, None, weights_only))
            return {}
        if isinstance(state, dict) and Path(path).is_dir():
            return load_into(path, state, strict, weights_only)
        if not isinstance(state, dict):
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return rest
        optimizers = {name: one for name, one in state.items() if isinstance(one, Optimizer)}
        models = {name: self._model_of(one) for name, one in optimizers.items()}
        by_parts = {name: LoadedByParts(optimizers[name], one) for name, one in models.items() if one is not None}
        given = state | by_parts
        rest = super().load_checkpoint(path, given, strict, weights_only)
        state.update({name: one for name, one in given.items() if name not in by_parts})
        return rest


class _SyncControl(_BackwardSyncControl):
    """Fabric's `no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, OSDP):
            return nullcontext()
        if enabled:
            return module.no_sync()
        module.sync()
        return nullcontext()


def _path_of_model(module: nn.Module, named: str | None) -> str:
    """Return where the model is in a LightningModule. Raises OsdpError if it is not there, or cannot be told."""
    parts = dict(module.named_children())
    if named is not None:
        if named not in dict(module.named_modules()):
            what, got = f"the LightningModule has no module `{named}`", ", ".join(parts) or "no modules"
            raise OsdpError(what, got=got, expected="the name of the model in it")
        return named
    trained = [name for name, one in parts.items() if any(each.requires_grad for each in one.parameters())]
    found = trained or [name for name, one in parts.items() if any(True for _ in one.parameters())]
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if len(found) != 1 or own:
        what = "OSDP shards one module, and cannot tell which of the LightningModule is the model"
        got = f"parameters in {', '.join([*found, *own])}" if found or own else "no parameters"
        advice = "put its layers into one module, or name it: OSDPStrategy(..., module=NAME)"
        raise OsdpError(what, got=got, expected="one part with all trained parameters", advice=advice)
    return found[0]


def _tell_ranks(strategy: Any) -> None:
    """Say how many ranks a node has, as torchrun does: OSDP plans for that, and Lightning's launchers do not tell."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(strategy.num_processes))
    os.environ.setdefault("LOCAL_RANK", str(strategy.local_rank))


def _backend(device: torch.device) -> str:
    """Return the backend of ranks on such devices: OSDP exchanges sizes and messages on the CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _made_for_osdp(is_empty: bool | None) -> AbstractContextManager[Any]:
    return torch.device("meta") if is_empty else nullcontext()


def _check_device(chosen: torch.device) -> None:
    if chosen != (own := default_device()):
        what = "Lightning has chosen another device for this rank than OSDP takes"
        advice = "devices=N; which GPUs these are is for CUDA_VISIBLE_DEVICES to say"
        raise OsdpError(what, got=str(chosen), expected=str(own), advice=advice)


def _check_steps(optimizers: Sequence[Optimizer]) -> None:
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        what, advice = "LBFGS runs forwards and backwards amid its step", "step it in a loop of your own, on a plan of"
        raise OsdpError(f"{what}, which OSDPStrategy runs before", advice=f"{advice} the pin *=replicate")


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        what = "OSDP does not train in this precision of Lightning"
        advice = (
            'precision="bf16-mixed" and description={"precision": "amp-bf16"}, or "32-true" and {"precision": "bf16"}'
        )
        raise OsdpError(what, got=str(precision), expected=", ".join(PRECISIONS), advice=advice)
