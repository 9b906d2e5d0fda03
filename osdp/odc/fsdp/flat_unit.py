"""A unit of FSDP1, its flat parameter, whose ranks pull it and push its gradient.

With N ranks and s elements of a rank's shard, padded,

    gather    out (N s,)   <- all published shards     in forward, and again in backward if FSDP1 has freed it
    reduce    accumulators += full (N s,); FSDP1 gets zeros

What was accumulated is added to the gradient of the flat parameter, of which those of the original ones are
views.  FSDP1 has a public hook for the reduction, but for all units at once and for whole models only; for the
gather it has none.  So both are set per unit, on the objects of one model and not on FSDP1's classes:

    FullyShardedDataParallel._comm_hook, ._comm_hook_state     what `register_comm_hook` sets
    FlatParamHandle._all_gather_flat_param                     overridden on the instance

These names and those of the handle that are used below were run on torch 2.13.0, and read in the sources of
2.11.0, whose FSDP1 differs from it in the names of two collectives only; 2.12 lies in between.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._runtime_utils import _reshard

from runtime.odc.windows import Window, WindowSpec


class FlatUnit:
    """One flat parameter and its window."""

    is_replaced = False
    """FSDP1 keeps its gradients to itself until `pre_optimizer_step`."""

    def __init__(self, name: str, module: FullyShardedDataParallel) -> None:
        """Take a module that has a flat parameter and is initialised (`FullyShardedDataParallel.check_is_root`)."""
        self._module = cast(Any, module)
        self._handle = self._module._handle
        flat = self._flat
        self.trained: list[nn.Parameter] = [flat] if flat.requires_grad else []
        numel = flat._local_shard.numel()
        self.spec = WindowSpec(name, numel, self._handle._fwd_bwd_param_dtype, 0 if self.trained else numel)
        self.pushed = [False] * len(self.trained)

    @property
    def _flat(self) -> Any:
        return self._handle.flat_param

    def use(self, window: Window, before_pull: Callable[[], None]) -> None:
        """Communicate through a window; `before_pull` sees to it that there is something to pull."""
        self.window, self._before_pull = window, before_pull
        self._handle._all_gather_flat_param = self._gather
        self._module._comm_hook, self._module._comm_hook_state = FlatUnit.push, self

    def restore(self) -> None:
        """Let FSDP1 communicate again."""
        vars(self._handle).pop("_all_gather_flat_param", None)
        self._module._comm_hook = self._module._comm_hook_state = None

    @property
    def shards(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What rests on this rank: the flat parameter, and the part of it that it holds here."""
        return [(self._flat, self._flat._local_shard)]

    def publish(self) -> None:
        """Let peers see this rank's shard after the next barrier."""
        self.window.publish(self._flat._local_shard)

    def _gather(self, out: Tensor) -> Tensor:
        """Fill `out` (N s,) and return it; by FSDP1's own way where all ranks ask for values in full precision."""
        summoned = self._handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS
        if summoned or out.dtype != self.window.spec.dtype:
            return cast(Tensor, type(self._handle)._all_gather_flat_param(self._handle, out))
        self._before_pull()
        self.window.pull(out)
        return out

    def push(self, full: Tensor, output: Tensor) -> None:
        """Push a gradient (N s,) and leave zeros in `output` (s,)."""
        output.zero_()
        self.pushed = [True]
        self.window.push(full)

    @torch.no_grad()
    def add_gradient(self, gradient: Tensor, wanted: Sequence[bool]) -> None:
        """Add a gradient (s,) to that of the flat parameter."""
        if not any(wanted):
            return
        flat = self._flat
        self._handle._reset_flat_param_grad_info_if_needed()  # the user may have set gradients to None
        if flat.grad is None:
            flat.grad = gradient.to(flat.dtype)
        else:
            flat.grad.add_(gradient)
        if self._handle._use_orig_params:
            # A rank whose micro-batches left the unit out, or that had none, has no views of it yet.
            flat._is_grad_none_mask = [not parameter.requires_grad for parameter in flat._params]
            self._handle._use_sharded_grad_views()

    def forget(self) -> None:
        self.pushed = [False] * len(self.trained)

    def reshard(self) -> None:
        """Free what a forward without a backward left gathered, which FSDP1 would take for what is valid now."""
        if not self._handle.needs_unshard() or self._handle._skipped_use_sharded_views:
            _reshard(self._module, self._handle, True)
