"""accelerate's loop for a model that OSDP has sharded.

    accelerator = OsdpAccelerator(...)                          # in place of accelerate.Accelerator
    model = OSDP(model, description)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`prepare` leaves the model alone: it shards, casts and reduces by itself.  `save_state` has OSDP write the model and its
optimizer to `osdp_0`, beside what accelerate writes, so that `load_state` works under any plan and number of ranks.

Used of accelerate beside what it documents, checked on 1.15: the lists `_models` and `_optimizers`, and the attribute
`_is_accelerate_prepared`.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp.api import OSDP
from osdp.autocast_room import refuse_fp16
from osdp.wrapped_once import PAGE
from profiler.errors import OsdpError
from runtime.failures.gloo_threads import let_gloo_end

FOLDER = "osdp_{}"
"""What `save_state` calls the checkpoint of a sharded model, by its number."""
_SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""What accelerate is told by a plugin, or by `accelerate launch`; it notes both in environment variables."""


class OsdpAccelerator(Accelerator):
    """`accelerate.Accelerator`, right for models that OSDP has sharded; others are left to accelerate."""

    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    def check(self, model: OSDP) -> None:
        """Raise OsdpError if accelerate was told to do what the plan decides, or sees other ranks than the model."""
        ranks, precision = model.schedule.world_size, model.plan.model.precision
        asked = [name for name in _SHARDING if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
        asked += ["parallelism_config"] if self.parallelism_config is not None else []
        if asked:
            what, expected = "accelerate cannot shard a model that OSDP has sharded", "OSDP alone"
            advice = f"leave its plugin out, also of the configuration that accelerate launch reads; {PAGE}"
            raise OsdpError(what, got=", ".join(asked), expected=expected, advice=advice)
        if self.num_processes != ranks:
            what, got = "accelerate does not see the ranks of the model", f"{self.num_processes} processes"
            advice = "on CPUs give cpu=True (TrainingArguments: use_cpu=True); start all ranks with torchrun"
            raise OsdpError(what, got=got, expected=f"{ranks} ranks", advice=advice)
        if (compiler := self.state.dynamo_plugin.backend) != DynamoBackend.NO:
            what = "accelerate cannot compile a model that OSDP has sharded"
            advice = 'OSDP(model, ..., compile_backend="inductor") compiles blocks'
            raise OsdpError(what, got=compiler.value, expected="no dynamo_backend", advice=advice)
        refuse_fp16(model.plan, "accelerate")
        if self.mixed_precision not in ("no", precision.removeprefix("amp-")):
            what = "accelerate is asked for another precision than the plan's"
            advice = (
                'plan for it: OSDP(model, {"precision": "amp-bf16"}) runs forwards under autocast, as accelerate does'
            )
            expected = "no" if precision == "fp32" else "no, or bf16"
            raise OsdpError(what, got=self.mixed_precision, expected=expected, advice=advice)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare all that is given; sharded models are returned as they are. Raises OsdpError as `check` does."""
        for one in args:
            if isinstance(one, OSDP):
                self.check(one)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model; a sharded one is returned as it is, however often."""
        if isinstance(model, OSDP):
            self.check(model)
            model._is_accelerate_prepared = True  # so that it is noted and left alone
        return super().prepare_model(model, device_placement, evaluation_mode)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run a micro-batch; a sharded model reduces in the last of a step, whatever its plan's accumulation is."""
        with super().accumulate(*models):
            for model in models:
                if isinstance(model, OSDP) and self.sync_gradients:
                    model.sync()
            yield

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Scale gradients so that their norm over all ranks is at most `max_norm`; return the norm before."""
        given = list(parameters)
        if self._finish_gradients(given):
            return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Limit each element of the gradients."""
        given = list(parameters)
        if self._finish_gradients(given):  # and limit them one by one: they may be on several meshes
            torch.nn.utils.clip_grad_value_(given, clip_value, foreach=False)
        else:
            super().clip_grad_value_(given, clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the state dict; of a sharded model whole tensors on rank 0, elsewhere nothing. A collective call."""
        return model.full_state_dict() if isinstance(model, OSDP) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save what was prepared and registered to a folder that all ranks share. A collective call."""
        with self._apart() as sharded:
            handle = self.register_save_state_pre_hook(lambda _, weights, folder: _save(sharded, Path(folder)))
            try:
                location = super().save_state(output_dir, safe_serialization, **options)
            finally:
                handle.remove()
        self.wait_for_everyone()  # for what rank 0 alone writes
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load what `save_state` saved, of a sharded model under any plan. A collective call; raises OsdpError."""
        with self._apart() as sharded:
            handle = self.register_load_state_pre_hook(lambda _, folder: _load(sharded, Path(folder)))
            try:
                super().load_state(input_dir, load_kwargs, **options)
            finally:
                handle.remove()

    def end_training(self) -> None:
        """End trackers and the process group, when threads of gloo hold nothing: else a rank may be aborted."""
        let_gloo_end()
        super().end_training()

    def _finish_gradients(self, parameters: list[Tensor]) -> bool:
        """Complete the gradients of the sharded models that have any of these; return whether there are such models."""
        given = set(map(id, parameters))
        models = [model for model in self._models if isinstance(model, OSDP) and _owns(model, given)]
        for model in models:
            model.finish_gradients()
        return bool(models)

    @contextmanager
    def _apart(self) -> Iterator[list[tuple[OSDP, torch.optim.Optimizer | None]]]:
        """Yield the sharded models, each with its optimizer, and meanwhile show accelerate only the others."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if isinstance(model, OSDP)]
        of_model = [[one for one in optimizers if _owns(model, _identities(one))] for model in sharded]
        several = next((found for found in of_model if len(found) > 1), None)
        if several:
            what, got = "a sharded model is saved with one optimizer", f"{len(several)} optimizers of one model"
            raise OsdpError(what, got=got, expected="1", advice="give one optimizer all parameters, in groups")
        theirs = {id(one) for found in of_model for one in found}
        others = [one for one in optimizers if id(one) not in theirs]
        _check_whole(others)
        self._models = [model for model in models if not isinstance(model, OSDP)]
        self._optimizers = others
        try:
            pairs = zip(sharded, of_model, strict=True)
            yield [(model, own_optimizer(found[0]) if found else None) for model, found in pairs]
        finally:
            self._models, self._optimizers = models, optimizers


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _check_whole(optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise OsdpError if accelerate would save rank 0's part of an optimizer for the whole."""
    for optimizer in map(own_optimizer, optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if sharded := sum(isinstance(parameter, DTensor) for parameter in parameters):
            what = f"{type(optimizer).__name__} has sharded parameters of a model that was not prepared"
            got, advice = f"{sharded} of {len(parameters)} parameters", "accelerator.prepare(model, optimizer)"
            raise OsdpError(what, got=got, expected="those of a prepared model", advice=advice)


def _identities(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _owns(model: OSDP, identities: set[int]) -> bool:
    """Whether any of these parameters is the model's."""
    return any(id(parameter) in identities for parameter in model.parameters())


def _save(sharded: list[tuple[OSDP, torch.optim.Optimizer | None]], folder: Path) -> None:
    for number, (model, optimizer) in enumerate(sharded):
        model.save_checkpoint(folder / FOLDER.format(number), optimizer)


def _load(sharded: list[tuple[OSDP, torch.optim.Optimizer | None]], folder: Path) -> None:
    for number, (model, optimizer) in enumerate(sharded):
        model.load_checkpoint(folder / FOLDER.format(number), optimizer)
