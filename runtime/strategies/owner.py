"""Owner sharding: an operator's parameters are kept whole by one rank.

    forward     the owner broadcasts the parameters, in compute dtype, as one flat buffer of bytes; freed afterwards
    backward    broadcast again before the operator's backward; gradients reduced to the owner, in fp32

A unit's backward begins with the gradient of an output of its modules.  It ends with the gradients of
the inputs of the module that ran first, or, where no input needs one, when all backward is over.
So a module must not change such inputs in place: PyTorch refuses it, as it does with FSDP2.
Parameters without a gradient are left out of the reduction and keep none: as with FSDP2, which
parameters get one has to be the same on all ranks.

The modules see `full` parameters, views of the flat buffer whose storage is emptied and filled in
place, so that autograd's saved views stay valid; between uses they see the resting ones.  The
resting parameters are DTensors that the ranks share unevenly: all rows on the owner, none elsewhere.
Optimizers work on them as on any other sharded parameter; their `full_tensor` is not defined,
`runtime.local_shards` says what a rank holds.  Communication is on the compute stream: it does not overlap.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from profiler.nested_tensors import tensors_in, with_tensors
from runtime.autograd_compat import without_transforms
from runtime.local_shards import LocalShard, Origin, add_gradient, local_data, whole_or_nothing
from runtime.module_outputs import refuse_double_backward
from runtime.parameter_places import ParameterSite
from runtime.registered_parameters import Place, refuse_others
from runtime.schedule import ScheduledUnit
from runtime.sharded_model import WrappedUnit
from runtime.strategies.wrap_context import WrapContext
from runtime.torch_compat import uneven_dtensor

T = TypeVar("T")


class OwnedParameter:
    """One parameter: where it is registered, its sharded form, and the one that modules compute with."""

    def __init__(self, places: Sequence[ParameterSite], resting: nn.Parameter, full: nn.Parameter) -> None:
        self.places, self.resting, self.full = tuple(places), resting, full

    def register(self, parameter: nn.Parameter) -> None:
        """Let the modules see `parameter`."""
        for module, name in self.places:
            module.register_parameter(name, parameter)

    def known_places(self) -> list[Place]:
        """Return where it is registered, and what may be there."""
        return [(module, name, lambda now: now is self.resting or now is self.full) for module, name in self.places]

    def rest(self) -> None:
        """Let the modules see the resting parameter where they see the full one, and not what others have put there."""
        for module, name in self.places:
            if module._parameters.get(name) is self.full:
                module.register_parameter(name, self.resting)


class OwnedUnit(WrappedUnit):
    """An operator's modules, whose parameters one rank owns."""

    def __init__(self, unit: ScheduledUnit, context: WrapContext) -> None:
        assert unit.owner is not None
        self.owner, self.device, compute = unit.owner, context.device, context.compute_dtype(unit)
        self.mesh = context.meshes.mesh(context.schedule.world_size)
        self.group = self.mesh.get_group()
        self.is_owner = dist.get_rank() == self.owner
        self.home = torch.device("cpu") if unit.strategy.offload else self.device
        places = context.materialise(unit)
        wanted = list(places)
        dtypes = [compute if compute and one.is_floating_point() else one.dtype for one in wanted]
        # Each begins where the largest element could: of one dtype, there is nothing between them.
        whole = max(dtype.itemsize for dtype in dtypes)
        sizes = (-(-one.numel() * dtype.itemsize // whole) * whole for one, dtype in zip(wanted, dtypes, strict=True))
        ends = [*accumulate(sizes)]
        self.flat = torch.empty(ends[-1], dtype=torch.uint8, device=self.device)
        self.parameters = []
        for parameter, dtype, start in zip(wanted, dtypes, [0, *ends], strict=False):
            part = self.flat[start : start + parameter.numel() * dtype.itemsize].view(dtype).view(parameter.shape)
            full = nn.Parameter(part, requires_grad=parameter.requires_grad)
            self.parameters.append(OwnedParameter(places[parameter], self._rested(parameter), full))
        self.flat.untyped_storage().resize_(0)
        self.modules = context.modules(unit)
        self.called = set(self.modules) - context.uncalled(unit)
        """Modules that a forward runs."""
        self.to_run: set[nn.Module] = set()
        """Modules whose forward is still to come in this pass: tied ones are gathered once for all."""
        self.began: nn.Module | None = None
        """The one whose forward began this pass."""
        self.kept = self.in_backward = False
        """`kept`: stay gathered when a forward ends, as the backward comes next; `in_backward`: it is under way."""
        for owned in self.parameters:
            owned.register(owned.resting)
        for module in self.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, always_call=True)
        refuse_others(self.modules, [place for one in self.parameters for place in one.known_places()])

    def local_shard(self, origin: Origin, parameter: nn.Parameter) -> LocalShard:
        return whole_or_nothing(origin, parameter, self.is_owner)

    @contextmanager
    def keep_after_forward(self) -> Iterator[None]:
        self.kept = True
        try:
            yield
        finally:
            self.kept = False

    def _rested(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter as it rests on this rank."""
        whole = parameter.detach()
        local = whole if self.is_owner else whole.new_empty((0, *whole.shape[1:]))
        return nn.Parameter(uneven_dtensor(local.to(self.home), self.mesh, whole.shape), parameter.requires_grad)

    @property
    def is_gathered(self) -> bool:
        """Whether the modules see full parameters now."""
        return self.flat.untyped_storage().nbytes() > 0

    def gather(self) -> None:
        """Broadcast the owner's parameters and let the modules see them."""
        if self.is_gathered:
            return
        self.flat.untyped_storage().resize_(self.flat.numel())
        # Through `.data`: autograd's saved views are of this storage, and filling it is no new version.
        for parameter in self.parameters if self.is_owner else ():
            parameter.full.data.copy_(local_data(parameter.resting))
        dist.broadcast(self.flat.data, src=self.owner, group=self.group)
        for parameter in self.parameters:
            if parameter.full.requires_grad != parameter.resting.requires_grad:
                parameter.full.requires_grad_(parameter.resting.requires_grad)
            parameter.register(parameter.full)

    def reshard(self) -> None:
        """Let the modules see the resting parameters and free the full ones; the next forward begins a new pass."""
        self.to_run.clear()
        for parameter in self.parameters:
            parameter.rest()
        self.flat.untyped_storage().resize_(0)

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        return {id(one.full) for one in self.parameters} & parameters.keys()

    def reset(self) -> None:
        for parameter in self.parameters:
            parameter.full.grad = None
        self.in_backward = False
        self.reshard()

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # What a pass that left out some module has left gathered may be old; others may run again before all have run.
        is_first = not self.to_run or (module is self.began and module not in self.to_run)
        if is_first:
            self._release_if_idle()
            self.to_run, self.began = set(self.called), module
        self.gather()
        return _mark((args, kwargs), self.end_backward) if is_first else (args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.to_run.discard(module)
        if not self.to_run:
            self._release_if_idle()
        if torch.is_grad_enabled():
            for tensor in map(without_transforms, tensors_in(output)):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]

    def _release_if_idle(self) -> None:
        """Release, unless a backward needs it: this forward may be one that runs again for a backward."""
        if not (self.kept or self.in_backward):
            self.reshard()

    def _before_backward(self, gradient: Tensor) -> None:
        refuse_double_backward()
        self.gather()
        if not self.in_backward:
            self.in_backward = True
            _waiting.append(self)
            Variable._execution_engine.queue_callback(_end_waiting)

    def end_backward(self) -> None:
        """Free the full parameters, reduce the gradients that they got to the owner and add them to its own.

        May be called again: a module that ran twice gets its gradient when both have been through backward.
        """
        self.in_backward = False
        trained = [parameter for parameter in self.parameters if parameter.full.grad is not None]
        sizes = [parameter.full.numel() for parameter in trained]
        dtype = reduce(torch.promote_types, (parameter.full.dtype for parameter in trained), torch.float32)
        reduced = torch.empty(sum(sizes), dtype=dtype, device=self.device)
        parts = torch.split(reduced, sizes)
        for parameter, part in zip(trained, parts, strict=True):
            assert parameter.full.grad is not None
            part.copy_(parameter.full.grad.reshape(-1))
            parameter.full.grad = None
        self.reshard()
        if not trained:
            return
        sent = torch.view_as_real(reduced) if dtype.is_complex else reduced
        dist.reduce(sent, dst=self.owner, op=dist.ReduceOp.SUM, group=self.group)
        reduced.div_(self.group.size())
        for parameter, part in zip(trained, parts, strict=True):
            add_gradient(parameter.resting, part)
            for hook in (parameter.resting._post_accumulate_grad_hooks or {}).values():  # as FSDP2 calls them
                hook(parameter.resting)


_waiting: list[OwnedUnit] = []
"""Units whose backward has begun since the last one ended, of all models: autograd runs one backward at a time."""


def _end_waiting() -> None:
    """End the backward of units that no input's gradient has ended, such as embeddings.

    Those that come first in the model go first, as in FSDP2, so that memory is highest with the first of them
    whatever the strategy.  One that a failed backward has left waiting has no gradient, and is only released.
    """
    while _waiting:
        _waiting.pop().end_backward()


class _Marked(torch.autograd.Function):
    """The identity, on tensors that need gradients; calls a function when these are there."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then()
        return None, *gradients


def _mark(inputs: T, then: Callable[[], None]) -> T:
    """Have a function called in backward when the tensors in these inputs have their gradients."""
    # One that is given twice stays one.
    tensors = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
    if not (tensors and torch.is_grad_enabled()):
        return inputs
    marked = dict(zip(tensors, _Marked.apply(then, *tensors.values()), strict=True))  # type: ignore[no-untyped-call]
    return with_tensors(inputs, lambda tensor: marked.get(id(tensor), tensor))


def wrap(unit: ScheduledUnit, context: WrapContext) -> OwnedUnit:
    """Leave a unit's parameters with their owner."""
    wrapped = OwnedUnit(unit, context)
    context.ignored.update(parameter.resting for parameter in wrapped.parameters)
    return wrapped
