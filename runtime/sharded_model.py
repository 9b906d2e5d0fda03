"""A model to which a schedule was applied, and the interface of the wrapped units that it consists of."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from profiler.errors import OsdpError
from runtime.autocast_weights import AutocastWeights
from runtime.local_shards import LocalShard, Origin, local_shard
from runtime.module_outputs import watch_outputs
from runtime.registered_parameters import RegisteredParameters
from runtime.schedule import Schedule


class WrappedUnit:
    """A unit as its strategy wraps it, or the state that all units of a strategy share.

    A strategy overrides what it needs: by default nothing is to be done, and the mesh of a DTensor says what a
    rank holds.
    """

    modules: Sequence[nn.Module] = ()
    """Those whose forward gathers its parameters."""
    trained: Sequence[nn.Parameter] = ()
    """Those whose gradients `finish_gradients` completes."""
    computing: Sequence[nn.Parameter] = ()
    """Those of its parameters that modules compute with as they rest, so that autograd gives their gradients."""
    replicas: int = 1
    """Ranks that hold the same shards, besides those of a DTensor's mesh."""
    reduces_in_last_backward: bool = False
    """Whether a reduction waits for the backward of a step's last micro-batch."""
    finishes_in_optimizer_step: bool = False
    """Whether gradients are complete only after `finish_gradients`, which the optimizer's step calls."""
    accumulates_apart: bool = False
    """Whether gradients are outside of `.grad` until then."""
    has_accumulated: bool = False
    """Whether this rank has any there."""

    def local_shard(self, origin: Origin, parameter: nn.Parameter) -> LocalShard:
        """Return what this rank holds of one of its parameters."""
        return local_shard(origin, parameter, self.replicas)

    def watch_backward(self, reached: Callable[[], None]) -> None:
        """Have a function called when a backward reaches the unit, before anything of it is reduced."""
        for module in self.modules:
            watch_outputs(module, reached)

    def keep_after_forward(self) -> AbstractContextManager[None]:
        """Stay unsharded after forwards within, as the backward follows at once."""
        return nullcontext()

    def set_requires_all_reduce(self, required: bool) -> None:
        """Say whether the next reduction is the last of its step."""

    def end_backward(self) -> None:
        """Do what is to be done when a backward ends. Collective."""

    def complete_reduction(self) -> None:
        """Reduce what waits for the last backward of the step, where there was none. Collective."""

    def reshard(self) -> None:
        """Discard copies of parameters that a forward left, as these may change; a later backward makes them again."""

    def reset(self) -> None:
        """Clean up after a failed forward or backward, and discard the gradients of an abandoned step. Collective.

        A failure on one rank only cannot be recovered from.
        """

    def discard_gradients(self, pending: bool) -> None:
        """Discard gradients that wait for `finish_gradients`; `pending`: whether this rank made any. Collective."""

    def finish_gradients(self, micro_batches: int) -> float:
        """Complete the gradients of this many micro-batches of this rank. Collective.

        Returns by how much the gradients of other units, which are means over ranks, must be scaled.
        """
        return 1.0

    def averages(self, gradient: Tensor) -> bool:
        """Return whether it has averaged a gradient that is no DTensor, or is about to."""
        return False

    def publish(self) -> None:
        """Make the parameters that the optimizer has changed visible to other ranks. Collective."""

    def expire(self) -> None:
        """Note that parameters were changed by other means than an optimizer."""

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        """Return which of these, by identity, its modules had in place of parameters that rest, for one step."""
        return set()

    @property
    def bytes_beside_allocator(self) -> int:
        """What it has of the GPU's memory that PyTorch's allocator knows nothing of."""
        return 0

    def communication_tensors(self) -> Sequence[Tensor]:
        """Return what a dry run holds from step to step in order to communicate."""
        return ()


@dataclass(eq=False)
class ShardedModel:
    """A model to which a schedule was applied."""

    module: nn.Module
    """The model itself, its parameters sharded."""
    schedule: Schedule
    """What was applied, with substitutes for strategies that cannot run on these ranks."""
    device: torch.device
    """Where it computes."""
    units: list[WrappedUnit] = field(default_factory=list)
    local_shards: tuple[LocalShard, ...] = ()
    """What this rank holds, in the order of `module.named_parameters()`."""
    resting: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The parameters that rest on this rank, by all names that they have in `module`."""
    replaced: Sequence[weakref.ref[nn.Parameter]] = ()
    """Those that the model had before it was sharded and has no more."""
    registered: RegisteredParameters | None = None
    """What the modules had when all were wrapped."""
    autocast: AutocastWeights = field(default_factory=AutocastWeights)
    """What its units do about `torch.autocast`."""

    @property
    def finishes_in_optimizer_step(self) -> bool:
        """Whether gradients are complete only after `finish_gradients`, which the optimizer's step calls."""
        return any(unit.finishes_in_optimizer_step for unit in self.units)

    def named_parameters(
        self, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that rest as `nn.Module.named_parameters` does, whatever is gathered now."""
        yielded = set()
        for name, registered in self.module.named_parameters(prefix, recurse, remove_duplicate=False):
            parameter = self.resting.get(name[len(prefix) + 1 :] if prefix else name, registered)
            if not (remove_duplicate and id(parameter) in yielded):
                yielded.add(id(parameter))
                yield name, parameter

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        """Return which of these, by identity, modules have had in place of parameters that rest, for one step."""
        return set[int]().union(*(unit.gathered(parameters) for unit in self.units))

    def check_registered(self) -> None:
        """Raise OsdpError if somebody has put others in the places of parameters that rest."""
        others = self.registered.others() if self.registered else {}
        if not others:
            return
        gathered = self.gathered({id(one): one for one in others.values() if one is not None})
        names = [name for name, one in others.items() if one is None or id(one) not in gathered]
        if names:
            more = f" and {len(names) - 3} more" if names[3:] else ""
            raise OsdpError(
                "modules have other parameters than those that were sharded",
                got=f"{', '.join(names[:3])}{more}",
                expected="the parameters that they had after OSDP(...)",
                advice="replace, tie, prune or parametrize layers before OSDP(...), change values under "
                "torch.no_grad(), and call torch.func.functional_call under the pin *=replicate in fp32",
            )

    def reshard(self) -> None:
        """Discard copies of parameters that a forward left, as these may change; a later backward makes them again."""
        for unit in self.units:
            unit.reshard()

    def finish_gradients(self, micro_batches: int) -> None:
        """Complete the gradients of this many micro-batches of this rank. A collective call."""
        for unit in reversed(self.units):  # those first whose ranks may find out that they do not do the same
            scale = unit.finish_gradients(micro_batches)
            finished = {id(parameter) for parameter in unit.trained}
            for shard in self.local_shards if scale != 1.0 else ():
                if shard.parameter.grad is not None and id(shard.parameter) not in finished:
                    shard.local(shard.parameter.grad).mul_(scale)

    def expire(self) -> None:
        """Note that parameters were changed by other means than an optimizer."""
        for unit in self.units:
            unit.expire()
