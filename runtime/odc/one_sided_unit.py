"""A unit that `fully_shard` wraps, whose ranks pull parameters and push gradients instead of gathering and reducing.

With G ranks, s elements of a rank's shard and t of its part of the gradient (s without the frozen ones),

    gather    out (G s,)   <- all published shards              in forward, and again in backward
    reduce    accumulators += full (G t,); FSDP2 gets zeros     after backward

FSDP2 makes the sharded gradients out of the zeros and adds further zeros to them, micro-batch by
micro-batch; what was accumulated is added when ranks have synchronized (`runtime.odc.step_protocol`).
Until then nobody else can use them (`runtime.odc.pending_gradient`).

Parameters that got no gradient are not in what FSDP2 reduces, and only its hooks show which they were:
then the part of each is copied into zeros when its hook runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from profiler.errors import OsdpError
from runtime.local_shards import add_gradient, local_data
from runtime.odc.pending_gradient import PendingGradient, restore, suspend
from runtime.odc.windows import Window, WindowSpec
from runtime.torch_compat import AllGather, OrdinaryMemory, ReduceScatter, packed_parameters


class OneSidedUnit:
    """One unit's parameters and its window."""

    def __init__(self, name: str, module: FSDPModule, dtype: torch.dtype | None) -> None:
        """Take a module that `fully_shard` has wrapped; `dtype` is what it computes in, None: what the parameters have.

        Raises OsdpError if parameters have several dtypes, or one that windows cannot publish.
        """
        self.name, self.module = name, module
        self._packed = packed_parameters(module)
        dtypes = {dtype or one.sharded_param.dtype for one in self._packed}
        if len(dtypes) > 1:
            what = f"unit {name} has parameters of several dtypes, which no window can publish"
            advice = "plan in bf16, which casts all of them; or convert them before OSDP(...)"
            raise OsdpError(what, got=", ".join(sorted(map(str, dtypes))), expected="one dtype", advice=advice)
        self.trained: list[nn.Parameter] = []
        """In the order in which FSDP2 packs their gradients."""
        self._frozen: list[nn.Parameter] = []
        """All others."""
        self._sizes: list[int] = []
        """Padded elements of each on a rank."""
        self._hooks: list[RemovableHandle] = []
        # Weak, as Python's garbage collector does not find cycles through hooks of tensors.
        here = ref(self)
        for one in self._packed:
            one.sharded_param.is_published = True  # for `dtensor_values`: changes by `.data` count
            if not one.sharded_param.requires_grad:
                self._frozen.append(one.sharded_param)
            else:
                self.trained.append(one.sharded_param)
                self._sizes.append(one._sharded_param_data.numel())
                find = partial(_find, here, len(self._hooks))
                self._hooks.append(one.sharded_param.register_post_accumulate_grad_hook(find))
        shard_numel = sum(one._sharded_param_data.numel() for one in self._packed)
        self.spec = WindowSpec(name, shard_numel, dtypes.pop(), shard_numel - sum(self._sizes))
        self.pushed = [False] * len(self.trained)
        """Which parameters got a gradient on this rank since the last barrier."""
        self._partial: Tensor | None = None
        """What was reduced, until it is known of which parameters."""
        self._found: list[int] = []
        self._suspended: set[int] = set()
        """Those whose gradients nobody can use before the next barrier."""
        self._was_replaced = False

    def use(self, window: Window, before_pull: Callable[[], None]) -> None:
        """Communicate through a window; `before_pull` makes sure that there is something to pull."""
        self.window = window
        self.module.set_custom_all_gather(_Pull(window, before_pull))
        self.module.set_custom_reduce_scatter(_Push(self))

    @property
    def shards(self) -> list[tuple[nn.Parameter, Tensor]]:
        """What rests on this rank: parameters, and the tensors that they hold here."""
        return [(one.sharded_param, local_data(one.sharded_param)) for one in self._packed]

    def release(self) -> None:
        """Remove the parameters' hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def publish(self) -> None:
        """Let peers see this rank's shard after the next barrier, wherever it rests."""
        self.window.publish(*(one._sharded_param_data.to(self.window.device_type) for one in self._packed))

    def push(self, full: Tensor) -> None:
        """Add a gradient (G t,), or that of some parameters, to the accumulators.

        Raises OsdpError if parameters are trained that were frozen when the unit was wrapped: they have no accumulator.
        """
        thawed = sum(parameter.requires_grad for parameter in self._frozen)
        if thawed:
            what = f"unit {self.name} trains parameters that were frozen when it was wrapped"
            got = f"{thawed} that now require gradients"
            raise OsdpError(what, got=got, expected="none", advice="set requires_grad before OSDP(...)")
        if full.numel() < sum(self._sizes) * self._ranks:
            self._partial, self._found = full, []
            if full.is_cuda:  # FSDP2 takes the buffer back before it is known whose parts these are
                full.record_stream(torch.cuda.current_stream(full.device))
            return
        self.pushed = [True] * len(self.trained)
        self.window.push(full)

    @property
    def _ranks(self) -> int:
        mesh = self._packed[0].sharded_param.device_mesh
        return int(mesh.size(mesh.ndim - 1))

    def find(self, index: int) -> None:
        """Note that the gradient of a parameter is in what was reduced; push when all are known."""
        gradient = self.trained[index].grad
        assert gradient is not None
        if index in self._suspended and not isinstance(gradient, PendingGradient):
            self._was_replaced = True
        suspend(gradient)
        self._suspended.add(index)
        if self._partial is None:
            return
        self._found.append(index)
        sizes = [self._sizes[index] for index in self._found]
        if sum(sizes) * self._ranks < self._partial.numel():
            return
        full = self._partial.new_zeros(self._ranks, sum(self._sizes))
        starts = list(accumulate(self._sizes, initial=0))
        parts = torch.split(self._partial.view(self._ranks, -1), sizes, dim=1)
        for found, part in zip(self._found, parts, strict=True):
            full[:, starts[found] : starts[found + 1]] = part
            self.pushed[found] = True
        self._partial = None
        self.window.push(full)

    @property
    def is_unclear(self) -> bool:
        """Whether a gradient was reduced whose parameters are not all known yet."""
        return self._partial is not None

    @property
    def is_replaced(self) -> bool:
        """Whether somebody has put others, or None, in the places of gradients since the last barrier."""
        gradients = [self.trained[index].grad for index in self._suspended]
        return self._was_replaced or not all(isinstance(gradient, PendingGradient) for gradient in gradients)

    def forget(self) -> None:
        """Forget which parameters got gradients, and let everybody use these."""
        self.pushed, self._partial, self._was_replaced = [False] * len(self.trained), None, False
        for index in self._suspended:
            restore(self.trained[index].grad)
        self._suspended.clear()

    def add_gradient(self, gradient: Tensor, wanted: Sequence[bool]) -> None:
        """Add a gradient (t,) to those of the wanted parameters."""
        parts = torch.split(gradient, self._sizes)
        for parameter, part, is_wanted in zip(self.trained, parts, wanted, strict=True):
            if is_wanted:
                add_gradient(parameter, part)


def _find(unit: ref[OneSidedUnit], index: int, _: nn.Parameter) -> None:
    found = unit()
    if found is not None:
        found.find(index)


class _Pull(OrdinaryMemory, AllGather):
    """Pulls in place of an all-gather."""

    def __init__(self, window: Window, before: Callable[[], None]) -> None:
        self.window, self.before = window, before

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` (G s,) with all published shards, this rank's own among them."""
        self.before()
        self.window.pull(output_tensor)


class _Push(OrdinaryMemory, ReduceScatter):
    """Pushes in place of a reduce-scatter."""

    def __init__(self, unit: OneSidedUnit) -> None:
        self.unit = unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Push `input_tensor` (G t,) and leave zeros in `output_tensor` (t,). Raises OsdpError unless `op` is AVG."""
        is_mean = op == dist.ReduceOp.AVG  # `op` may be an object that equals the constant, which does not equal it
        if not is_mean:
            what, got = "one-sided communication supports one reduction only", str(getattr(op, "op", op))
            raise OsdpError(what, got=got, expected="AVG", advice="do not call set_gradient_divide_factor")
        output_tensor.zero_()
        self.unit.push(input_tensor)
