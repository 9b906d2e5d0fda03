"""A `parallelize_fn` for models of torchtitan, which shards them as planned in place of torchtitan's FSDP.

    ModelSpec(..., parallelize_fn=parallelize(description, device_info))

torchtitan makes a model on the meta device, and calls `to_empty` and `init_weights` of what the function returns.  Here
it has its values already: those that `init_weights` gives in one process after the same seed, each rank its parts.  It
divides a sum of losses by the tokens of all ranks, so that gradients have to be sums over ranks; OSDP takes means,
and the gradient of what the model returns is multiplied by the number of ranks.

Nothing of torchtitan is imported; what it calls was read from 0.2.2 and 0.3.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from osdp.api import OSDP
from osdp.description import Described, Description, read_description
from osdp.planning.rank_grid import DeviceInfo
from planner.plan import Plan
from profiler.errors import OsdpError
from profiler.module_copies import copied
from profiler.nested_tensors import tensors_in
from runtime.deferred_init.deferred_init import is_meta
from runtime.state.dcp_tensor import GlobalTensor

PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
"""Of `training.mixed_precision_param`."""


def parallelize(
    description: Described = None, device_info: DeviceInfo = None, *, example_inputs: Callable[[int], Any] | None = None
) -> Callable[..., TitanModel]:
    """Return the function, which takes what either version of torchtitan gives.

    description: as `OSDP` takes it.  Precision, micro-batch, global batch and sequence length are those of the section
        `training` of torchtitan's configuration, with which a plan has to agree.
    example_inputs: function of a batch size that returns arguments of forward; by default tokens, (batch, seq_len).

    What is recomputed is for the plan to say: the section of activation checkpointing is not read.  The function raises
    OsdpError for what it cannot do.
    """

    def parallelize_fn(
        model: nn.Module,
        parallel_dims: Any,
        job_config: Any = None,
        *,
        training: Any = None,
        compile_config: Any = None,
        **others: Any,
    ) -> TitanModel:
        """Shard a model: 0.2 gives all of its configuration as `job_config`, 0.3 its sections."""
        training = training if job_config is None else job_config.training
        compiling = compile_config if job_config is None else job_config.compile
        _check(parallel_dims, training)
        ranks = parallel_dims.world_size
        accumulation = max(1, training.global_batch_size // (training.local_batch_size * ranks))
        wanted = _described(read_description(description), training, accumulation * training.local_batch_size * ranks)

        def tokens(batch: int) -> Tensor:
            return torch.zeros(batch, training.seq_len, dtype=torch.long)

        backend = compiling.backend if compiling and compiling.enable and "model" in compiling.components else None
        arguments: dict[str, Any] = {"example_inputs": example_inputs or tokens, "compile_backend": backend}
        made = TitanModel(_initialised(model) if is_meta(model) else model, wanted, device_info, **arguments)
        made.accumulate(accumulation)
        return made

    return parallelize_fn


class TitanModel(OSDP):
    """A sharded model as torchtitan's trainer uses one."""

    def accumulate(self, micro_batches: int) -> None:
        """Note how many micro-batches a step has. Raises OsdpError if gradients are not complete at its end."""
        if self.sharded.finishes_in_optimizer_step:
            what = "torchtitan clips gradients that this plan completes in the optimizer's step"
            got = ", ".join(sorted(set(self.plan.choices.values())))
            advice = "plan without odc, for a model whose parameters all have dimensions"
            raise OsdpError(what, got=got, expected="gradients that are reduced in backward", advice=advice)
        self._accumulation.micro_batches = micro_batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, of which gradients are summed over ranks."""
        output = super().forward(*args, **kwargs)
        for tensor in {id(one): one for one in tensors_in(output) if one.requires_grad}.values():
            tensor.register_hook(self._summed)  # type: ignore[no-untyped-call]
        return output

    def _summed(self, gradient: Tensor) -> Tensor:
        return gradient * self.schedule.world_size

    def to_empty(self, *, device: Any, recurse: bool = True) -> TitanModel:
        """Return the model as it is: it has its values."""
        return self

    def init_weights(self, **options: Any) -> None:
        """Leave the values as they are."""

    init_states = init_weights

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return what this rank holds. Raises OsdpError for what torchtitan's checkpoints cannot hold."""
        state = super().state_dict(**options)
        apart = [name for name, one in state.items() if isinstance(one, GlobalTensor)]
        if apart:
            what = "torchtitan's checkpoints cannot hold parameters that one rank owns or that are split"
            advice = "pin them to another strategy, as in description={'pins': ['output=shard']}"
            more = f" and {len(apart) - 1} more" if apart[1:] else ""
            raise OsdpError(what, got=f"{apart[0]}{more}", expected="parameters that ranks share evenly", advice=advice)
        return state

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_skip_lm_head":  # written by the trainer of 0.3
            what = "torchtitan's chunked loss runs the head outside of the model's forward, where it is sharded"
            expected = "a loss of what the model returns"
            raise OsdpError(what, got="ChunkedLossWrapper", expected=expected, advice="loss=CrossEntropyLoss.Config()")
        super().__setattr__(name, value)


def _check(parallel_dims: Any, training: Any) -> None:
    """Raise OsdpError for parts of the configuration that contradict data parallelism as planned."""
    on = [name for name in ("tp", "cp", "pp", "ep") if getattr(parallel_dims, f"{name}_enabled")]
    if on:
        what = "OSDP plans data parallelism, and torchtitan is told to do more"
        raise OsdpError(
            what, got=", ".join(f"{name} enabled" for name in on), expected="a degree of 1 for each of these"
        )
    if parallel_dims.dp_replicate_enabled:
        what, advice = "torchtitan is told which ranks replicate, which is for the plan to say", "leave it out"
        raise OsdpError(what, got="data_parallel_replicate_degree", expected="1", advice=advice)
    if training.enable_cpu_offload:
        advice = "leave it out, and pin what shall be offloaded: description={'pins': ['*=shard+offload']}"
        raise OsdpError("what is offloaded is for the plan to say", got="training.enable_cpu_offload", advice=advice)
    if torch.cuda.is_available() and not getattr(training, "disable_cuda_graphs", True):
        what = "a sharded model's step cannot be captured as a CUDA graph"
        raise OsdpError(what, got="CUDA graphs", expected="training.disable_cuda_graphs")


def _described(given: Plan | Description, training: Any, global_batch: int) -> Plan | dict[str, Any]:
    """Return what to plan for, or the plan. Raises OsdpError for a plan of another training."""
    precision = PRECISIONS[training.mixed_precision_param]
    if isinstance(given, Plan):
        planned = given.model.precision, given.micro_batch
        if planned != (precision, training.local_batch_size):
            what = "the plan is of another training than torchtitan's configuration"
            got = f"{planned[0]}, micro-batch {planned[1]}"
            expected = f"{precision}, micro-batch {training.local_batch_size}"
            raise OsdpError(what, got=got, expected=expected, advice="plan again, or change the section training")
        return given
    own = {name: value for name, value in asdict(given).items() if value is not None}
    sizes = {"micro_batch": training.local_batch_size, "global_batch": global_batch}
    return own | sizes | {"sequence_length": training.seq_len, "precision": precision}


def _initialised(model: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that makes a model with its values out of one on the meta device."""

    def make() -> nn.Module:
        empty: dict[int, Any] = {
            id(one): nn.Parameter(torch.empty(one.shape, dtype=one.dtype), one.requires_grad)
            for one in model.parameters()
        }
        empty |= {id(one): torch.empty(one.shape, dtype=one.dtype) for one in model.buffers()}
        made: Any = copied(model, empty)
        with torch.no_grad():
            made.init_weights(buffer_device=None)
        return made  # type: ignore[no-any-return]

    return make
