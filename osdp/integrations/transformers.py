"""The Trainer of transformers for a model that OSDP has sharded.

    args = TrainingArguments(...)                       # first: it starts the process group, if nobody has
    model = OSDP(model, description)
    OsdpTrainer(model, args, ...).train()               # and all else that a Trainer is given and does

Of another trainer than `Trainer`: `class Mine(OsdpTrainer, Seq2SeqTrainer): pass`; so too of trainers of trl.

A checkpoint has, beside what the Trainer saves, a folder `osdp` with the model and its optimizer, which resumes under
any plan and number of ranks.  So it has the model twice: the other one is for `from_pretrained`.  Of a model with
adapters of peft both have only what is trained, as without OSDP.

`REPLACED` is what is used of the Trainer beside what it documents, checked on transformers 5.23.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from osdp.api import OSDP
from osdp.integrations.accelerate import OsdpAccelerator, own_optimizer
from osdp.wrapped_once import PAGE
from profiler.errors import OsdpError
from runtime.local_shards import LocalShard
from runtime.state import checkpoint

FOLDER, SCHEDULER = "osdp", "scheduler.pt"
"""Parts of a checkpoint."""
REPLACED = (
    "create_accelerator_and_postprocess",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
    "_get_num_items_in_batch",
    "_has_mixed_mesh_grads",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_move_model_to_device",
    "_save",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_set_signature_columns_if_needed",
)
_OURS = "leave it out: OSDP shards the model, as its plan says"
_EVALUATES = "leave it out: the model evaluates in the precision of its plan"
_REFUSED = {
    "fsdp": _OURS,
    "deepspeed": _OURS,
    "parallelism_config": _OURS,
    "activation_checkpointing": "set gradient_checkpointing=False: the plan recomputes blocks, all under the pin "
    "*=recompute",
    "torch_compile": 'leave it out: OSDP(model, ..., compile_backend="inductor") compiles blocks',
    "use_liger_kernel": "leave it out, and apply the kernels to the model before OSDP(...)",
    "auto_find_batch_size": "leave it out: model.plan.micro_batch is the batch that fits",
    "fp16_full_eval": _EVALUATES,
    "bf16_full_eval": _EVALUATES,
    "save_on_each_node": "leave it out, and give all ranks a folder that they share",
}
"""Arguments of a Trainer that cannot work, and what to do."""


class OsdpTrainer(Trainer):
    """`transformers.Trainer`, right for a model that OSDP has sharded."""

    model: Any
    """The sharded one, for all that looks at it while it trains."""
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    label_smoother: Any

    def __init__(self, model: OSDP, *others: Any, **options: Any) -> None:
        """Take what the Trainer takes. Raises OsdpError for what cannot work with a sharded model."""
        if not isinstance(model, OSDP):
            what, got = "OsdpTrainer trains a model that OSDP has sharded", f"a {type(model).__name__}"
            raise OsdpError(what, got=got, expected="OSDP(model, ...)", advice=f"see {PAGE}")
        if unknown := [name for name in REPLACED if not hasattr(Trainer, name)]:
            what, got = "this release of transformers has another Trainer", f"none with {', '.join(unknown)}"
            raise OsdpError(what, got=got, expected="that of transformers 5.23", advice="install this one")
        # The Trainer looks at classes and signatures, which the wrapper hides.
        super().__init__(model.module, *others, **options)
        self.accelerator.check(model)
        self._set_signature_columns_if_needed()
        if self.label_smoother is not None and _predicts_next_token(model.module):
            self.label_smoother = partial(self.label_smoother, shift_labels=True)
        self.model = self.model_wrapped = self.callback_handler.model = model

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, one that leaves the model alone."""
        _check(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = OsdpAccelerator  # which adds methods alone; the Trainer names the class itself

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is."""

    def get_decay_parameter_names(self, model: nn.Module) -> Any:
        """Return the names of the parameters that weight decay applies to."""
        return super().get_decay_parameter_names(model.module if isinstance(model, OSDP) else model)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer, whose parameter groups are the same under every plan.

        The Trainer makes one for each mesh, and what schedulers save is a list with a number for each group.
        """
        if self.optimizer is not None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        optimizer.param_groups = _joined(optimizer.param_groups)
        return optimizer

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch; the last of a step reduces, whatever the plan's accumulation is."""
        if self.accelerator.sync_gradients:
            self.model.sync()
        return super().training_step(model, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number of tokens that a step's loss is averaged over, as an integer.

        The Trainer makes it fp32, and what is computed in bf16 gets such arguments in bf16: 1025 would be 1024.
        """
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return count.round().to(torch.int64) if isinstance(count, Tensor) else count

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Have the accelerator clip gradients, and take their norm, whatever their meshes."""
        return False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model for `from_pretrained`, and what goes with it. A collective call."""
        state = self.model.full_state_dict() if state_dict is None else state_dict
        if self.args.should_save:
            model, self.model = self.model, self.model.module  # whose class says how to save it
            try:
                super()._save(output_dir, state)
            finally:
                self.model = model

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save all that a training resumes from; it is whole when any rank goes on."""
        super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        checkpoint.save(folder / FOLDER, self.model.module, self._shards(), own_optimizer(self.optimizer))
        if self.args.should_save:
            partial_file = folder / f".{SCHEDULER}.partial"
            torch.save(self.lr_scheduler.state_dict(), partial_file)
            partial_file.replace(folder / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load(checkpoint, own_optimizer(self.optimizer))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load(str(self.state.best_model_checkpoint))

    def _load(self, folder: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load the model, and its optimizer if one is given. A collective call; raises OsdpError."""
        if not Path(folder, FOLDER).is_dir():
            what, expected = f"{folder} is no checkpoint of OsdpTrainer", f"a folder {FOLDER} in it"
            advice = (
                "begin with a model that another Trainer has saved, or save_only_model: model.load_pretrained(folder)"
            )
            raise OsdpError(what, got="none there", expected=expected, advice=advice)
        checkpoint.load(Path(folder, FOLDER), self.model.module, self._shards(), optimizer)
        self.model.sharded.expire()

    def _shards(self) -> list[LocalShard]:
        """Return what checkpoints hold of this rank: of a model with adapters what is trained."""
        has_adapters = bool(getattr(self.model, "peft_config", None))
        shards = self.model.sharded.local_shards
        return [shard for shard in shards if shard.parameter.requires_grad or not has_adapters]


def _check(args: TrainingArguments) -> None:
    """Raise OsdpError for arguments that cannot work with a sharded model."""
    for name, advice in _REFUSED.items():
        if value := getattr(args, name, None):
            what, expected = f"{name} does not work with a model that OSDP has sharded", f"no {name}"
            raise OsdpError(what, got=f"{name}={value!r}", expected=expected, advice=advice)
    if args.n_gpu > 1:
        what, got = "one process cannot train on several GPUs", f"{args.n_gpu} GPUs"
        raise OsdpError(what, got=got, expected="1 for each process", advice="start the script with torchrun")
    if args.save_only_model and args.load_best_model_at_end:
        what, got = "the best model cannot be loaded from what save_only_model saves", "load_best_model_at_end=True"
        raise OsdpError(what, got=got, expected="one of the two", advice="leave save_only_model out")


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups of which no two have the same options."""
    joined: list[dict[str, Any]] = []
    for group in groups:
        options = {option: value for option, value in group.items() if option != "params"}
        alike = next((other for other in joined if options.items() <= other.items()), None)
        if alike is None:
            joined.append(group)
        else:
            alike["params"] += group["params"]
    return joined


def _predicts_next_token(model: Any) -> bool:
    """Whether the logits of a model, or of what it adapts, are of the next token. Its class may have been renamed."""
    adapted = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = {base.__name__ for base in type(adapted).__mro__}
    return not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
