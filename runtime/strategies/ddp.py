"""Whole models that are replicated: gradients are averaged over ranks in buckets, as DistributedDataParallel does.

Bucket k is all-reduced when all its gradients and buckets 0 ... k-1 are there, while the backward goes on; what is
left when the backward ends is reduced then.  Averaging is linear, and averaging an average changes nothing: gradients
that a further backward adds to reduced ones are reduced with them, so no order of forwards and backwards is wrong.

The first backward reduces at its end, and shows in which order gradients come; buckets follow that order.  It also
shows whether they come once: where an autograd function runs modules again in its backward, a gradient may
grow again while its bucket is sent, so then all wait for the end.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.strategies.replicate import BUCKET_BYTES, FIRST_BUCKET_BYTES
from profiler.errors import OsdpError
from profiler.opaque_parameters import is_opaque
from runtime.host_copies import on_device
from runtime.schedule import ScheduledUnit
from runtime.sharded_model import WrappedUnit
from runtime.strategies.wrap_context import WrapContext
from runtime.torch_compat import is_fake, storage_references


def _laid_out_as(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """Return a part of a bucket in the strides of a parameter that fills its memory, be it transposed or channels last.

    Fused optimizers on a CPU take a gradient's memory to be laid out as the parameter's, and say nothing if it is not
    (torch 2.13).
    """
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():  # that of a part of other memory
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


class _Bucket:
    """Parameters of a data type whose gradients lie side by side."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.views: dict[nn.Parameter, Tensor] = {}
        self._renew()
        self.reset()

    def _renew(self) -> None:
        """Let go of the memory, and have other."""
        self.flat, first = torch.empty(0), self.parameters[0]
        self.views.clear()
        self.flat = torch.empty(sum(one.numel() for one in self.parameters), dtype=first.dtype, device=first.device)
        parts = torch.split(self.flat, [one.numel() for one in self.parameters])
        self.views |= {one: _laid_out_as(one, part) for one, part in zip(self.parameters, parts, strict=True)}
        del parts
        self._own_references = storage_references(self.flat)

    def reset(self) -> None:
        """Begin a backward."""
        self.missing = set(self.parameters)
        self.absent: list[nn.Parameter] = []
        """Those of which this rank had no gradient to send."""
        self.is_looked_at = False
        """Whether somebody may still hold gradients of before, and was looked for."""
        self.work: dist.Work | None = None

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Put a gradient into its place."""
        gradient = parameter.grad
        if self.holds(gradient):
            return
        if not self.is_looked_at:
            self.is_looked_at, held = True, [one for one in self.parameters if self.holds(one.grad)]
            if storage_references(self.flat) > self._own_references + len(held):  # a loop keeps what was cleared
                self._renew()
                for one in held:
                    self._put(one)
        if gradient is None:
            self.views[parameter].zero_()
            self.absent.append(parameter)
        else:
            self._put(parameter)

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether a gradient lies here."""
        return gradient is not None and gradient.untyped_storage()._cdata == self.flat.untyped_storage()._cdata

    def _put(self, parameter: nn.Parameter) -> None:
        """Have a gradient here."""
        assert parameter.grad is not None
        self.views[parameter].copy_(parameter.grad)
        self._give(parameter)

    def _give(self, parameter: nn.Parameter) -> None:
        """Let a parameter have what is here.

        Not our own tensor, as a loop may put something else into its `.data`, nor a view, on which autograd refuses
        `detach_()`, with which old loops clear gradients.
        """
        parameter.grad = self.views[parameter].detach()

    def send(self) -> None:
        """Begin to add up the gradients of all ranks."""
        for parameter in self.missing:
            self.take(parameter)
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Have the means."""
        if self.work is not None:
            self.work.wait()
            self.flat.div_(dist.get_world_size())
            absent = [] if is_fake(self.flat) else self.absent
            others = torch.stack([self.views[one].any() for one in absent]).tolist() if absent else []
            for parameter, is_there in zip(absent, others, strict=True):  # other ranks have one
                if is_there:
                    self._give(parameter)
                else:
                    parameter.grad = None
        self.reset()


def _buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Return buckets of parameters in this order; the parameter that makes one large enough closes it."""
    groups: list[list[nn.Parameter]] = []
    left_bytes = 0
    for parameter in parameters:
        if left_bytes <= 0 or parameter.dtype != groups[-1][0].dtype:
            left_bytes = BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append([])
        groups[-1].append(parameter)
        left_bytes -= parameter.numel() * parameter.element_size()
    return [_Bucket(group) for group in groups]


class ReplicatedModel(WrappedUnit):
    """A model of which every rank holds all."""

    reduces_in_last_backward = True

    def __init__(self, context: WrapContext) -> None:
        self.device, self.find_unused_parameters = context.device, context.find_unused_parameters
        self.parameters = self.computing = [one for one in context.model.parameters() if _can_be_trained(one)]
        self.buckets = _buckets(reversed(self.parameters))
        self.overlaps = self.is_last = False
        self.reached: Callable[[], None] = lambda: None
        self.came: list[nn.Parameter] = []
        """Parameters in the order in which a backward that reduces has made their gradients."""
        here = ref(self)  # Python's garbage collector does not find cycles through hooks of tensors
        for parameter in self.parameters:
            trains = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(_came, here))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trains)  # one that is frozen may be trained later

    def watch_backward(self, reached: Callable[[], None]) -> None:
        self.reached = reached

    def set_requires_all_reduce(self, required: bool) -> None:
        self.is_last = required

    def add(self, parameter: nn.Parameter) -> None:
        """Take a gradient that is there, and send the buckets that are full."""
        self.reached()
        if not self.is_last:
            return
        self.came.append(parameter)
        bucket = next(one for one in self.buckets if parameter in one.views)
        if not self.overlaps:
            bucket.take(parameter)  # where it may grow yet: beside the bucket it would take as much again
            return
        if bucket.work is not None:
            what = "a parameter got a gradient twice in one backward, and only once in the first"
            raise OsdpError(
                what, advice="run modules again by torch.utils.checkpoint, not in an autograd function of your own"
            )
        bucket.take(parameter)
        bucket.missing.discard(parameter)
        for bucket in self.buckets:
            if bucket.missing:
                break
            if bucket.work is None:
                bucket.send()

    def end_backward(self) -> None:
        if self.is_last and (self.came or self.find_unused_parameters):
            if not self.overlaps:
                self._exchange(refuses=not self.find_unused_parameters)
            self._reduce()
            came = set(self.came)
            if not (self.overlaps or self.find_unused_parameters) and len(came) == len(self.came):
                self._follow([*self.came, *(one for one in reversed(self.parameters) if one not in came)])
        self.came.clear()

    def _follow(self, order: Sequence[nn.Parameter]) -> None:
        """Make the buckets anew in this order."""
        self.overlaps, self.buckets = True, _buckets(order)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                bucket.take(parameter)
            bucket.reset()

    def complete_reduction(self) -> None:
        self._exchange(refuses=False)
        self._reduce()

    def _exchange(self, refuses: bool) -> None:
        """Give this rank gradients where any has one: some may have left out layers that others have run.

        Raises OsdpError on all ranks if that is so and `refuses`.
        """
        own = on_device(torch.tensor([one.grad is not None for one in self.parameters], dtype=torch.int32), self.device)
        most = torch.stack([own, -own])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if is_fake(most):
            return
        anywhere, nowhere = most.tolist()
        differ = sum(some != -none for some, none in zip(anywhere, nowhere, strict=True))
        if refuses and differ:
            what = "some ranks have gradients that others have not"
            raise OsdpError(
                what,
                got=f"{differ} of {len(self.parameters)} parameters",
                expected="the same layers in a step's last micro-batch on all ranks",
                advice="OSDP(..., find_unused_parameters=True)",
            )
        for parameter, is_trained in zip(self.parameters, anywhere, strict=True):
            if is_trained and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _reduce(self) -> None:
        """Have the means of all gradients."""
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.send()
        for bucket in self.buckets:
            bucket.finish()

    def averages(self, gradient: Tensor) -> bool:
        return any(bucket.holds(gradient) for bucket in self.buckets)

    def reset(self) -> None:
        self.came.clear()
        for bucket in self.buckets:
            bucket.finish()


def _can_be_trained(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not is_opaque(parameter)


def _came(model: ref[ReplicatedModel], parameter: Tensor) -> None:
    found = model()
    if found is not None:
        assert isinstance(parameter, nn.Parameter)
        found.add(parameter)


class ReplicatedUnit(WrappedUnit):
    """Parameters of which every rank holds all."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas


def wrap(unit: ScheduledUnit, context: WrapContext) -> ReplicatedUnit:
    """Move a unit's parameters to the device."""
    for parameter in context.materialise(unit):
        parameter.data = parameter.to(context.device)
    return ReplicatedUnit(context.schedule.world_size)


def finish(context: WrapContext, units: Sequence[WrappedUnit]) -> list[WrappedUnit]:
    """Reduce the gradients of all."""
    return [ReplicatedModel(context)]
