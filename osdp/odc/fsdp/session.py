"""A model whose units pull and push, from its first `pre_minibatch_start` to `stop`.

    pre_minibatch_start    synchronize, drop unused gradients, publish, synchronize
    forward, backward      pulls and pushes; the first pull after a step publishes anew, if nothing else has
    pre_optimizer_step     synchronize, and the sum of all pushes becomes the gradient

Parameters are taken to have changed whenever gradients were completed or an optimizer has stepped, so the
next pull of any rank is preceded by a barrier at which all publish: nobody pulls old values, in whatever loop
these calls stand.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp.odc.options import Options, forget
from profiler.errors import OsdpError
from profiler.nested_tensors import tensors_in
from runtime.local_shards import LocalShard
from runtime.meshes import Meshes
from runtime.odc.choose_transport import why_none_anywhere
from runtime.odc.step_protocol import Exchange, Sharing, Unit
from runtime.step.optimizer_hooks import unwatch_optimizers, watch_optimizers


@dataclass(frozen=True)
class Wrapped:
    """A model as FSDP1 or FSDP2 has wrapped it."""

    face: str
    """`fsdp1` or `fsdp2`, for messages."""
    model: nn.Module
    units: Sequence[Unit]
    device: torch.device
    shards: int
    """Ranks over which each unit is split."""
    reshard: Callable[[], None]
    """Frees parameters that a forward left gathered; their values are about to change."""
    restore: Callable[[], None]
    """Gives the model back to FSDP's own communication."""
    check: Callable[[], None]
    """Raises OsdpError if gradients were pushed that cannot be attributed."""


class Session:
    """The barriers of the ranks of one model."""

    def __init__(self, wrapped: Wrapped, options: Options) -> None:
        """Open windows. A collective call."""
        self.wrapped, self.accumulation = wrapped, options.accumulation
        self.parts = {id(part) for part in wrapped.model.modules()}
        self._done = 0
        """Micro-batches whose backward has begun since the last `finish`."""
        self.exchange = _open(wrapped, options)
        self._hook = wrapped.model.register_forward_hook(self._after_forward)
        _sessions.add(self)
        watch_optimizers(self, wrapped.model.parameters())

    def start(self) -> None:
        """Publish parameters; give up what was pushed since the last `finish`. A collective call."""
        self.wrapped.reshard()
        if self.exchange is not None:
            self.exchange.renew(self._is_pending)
        self._done = 0

    def finish(self, micro_batches: int | None) -> None:
        """Complete the gradients. A collective call; raises PeerLost, naming ranks, if some do not come."""
        done = self._done if micro_batches is None else micro_batches
        self._check_count(done, micro_batches)
        self.wrapped.check()
        self.wrapped.reshard()
        if self.exchange is None:
            self._average(done)
        elif self.accumulation is None:
            # As if all ranks had done the same: the sum, divided by the number of ranks.
            self.exchange.finish_gradients(1)
        else:
            self.exchange.finish_gradients(done, is_mean=True)
        self._done = 0
        self.after_step()

    @torch.no_grad()
    def _average(self, done: int) -> None:
        """Make gradients that FSDP has reduced, on ranks that all did the same number, the mean over micro-batches."""
        if self.accumulation is None or not done:
            return
        for parameter in self.wrapped.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.accumulation / done)

    def _check_count(self, done: int, given: int | None) -> None:
        if given is not None and self.accumulation is None:
            expected = "odc.init(accumulation=...), by which losses are divided"
            raise OsdpError("micro_batches has no effect", got=f"micro_batches={given}", expected=expected)
        if done < 0 or (done == 0 and self.accumulation is not None and self._is_pending):
            what = "the micro-batches of the step are not known"
            advice = "call the model itself, not a part of it, or pass pre_optimizer_step(model, micro_batches=...)"
            raise OsdpError(what, got=f"{done}, and gradients were pushed", advice=advice)

    @property
    def _is_pending(self) -> bool:
        """Whether this rank has begun a backward whose gradients are not complete."""
        return self._done > 0 or any(any(unit.pushed) for unit in self.wrapped.units)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count the micro-batch when its backward begins."""
        counted = False

        def count(gradient: Tensor) -> None:
            nonlocal counted
            self._done += not counted
            counted = True

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(count)  # type: ignore[no-untyped-call]

    def before_step(self, has_closure: bool) -> None:
        """Free what is gathered, as its values change. Raises OsdpError if gradients are not complete."""
        if has_closure:
            what = "an optimizer's step cannot run a closure under odc, whose ranks synchronize before the step"
            raise OsdpError(what, advice="run forward and backward before step()")
        if self._is_pending:
            what, call = "the optimizer steps before gradients are complete", "pre_optimizer_step(model) on every rank"
            expected = f"{self.wrapped.face}.{call}, between the last backward and step()"
            raise OsdpError(what, got="gradients of this rank alone", expected=expected)
        self.wrapped.reshard()

    def gathered(self, parameters: Mapping[int, nn.Parameter]) -> set[int]:
        """Return nothing: FSDP itself says what its parameters are."""
        return set()

    @property
    def local_shards(self) -> Sequence[LocalShard]:
        """Return nothing: FSDP has no owners."""
        return ()

    def before_zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Leave what lies in accumulators to `pre_minibatch_start`."""

    def after_step(self) -> None:
        """Publish parameters before the next pull."""
        if self.exchange is not None:
            self.exchange.expire()

    def close(self) -> None:
        """Close the windows and give the model back to FSDP."""
        self._hook.remove()
        _sessions.discard(self)
        unwatch_optimizers(self)
        if self.exchange is not None:
            self.exchange.close()
            self.wrapped.restore()


def _open(wrapped: Wrapped, options: Options) -> Exchange | None:
    """Open windows; None, with one warning, where ranks cannot have any and FSDP's own communication goes on."""
    exchange, meshes = None, Meshes(wrapped.device.type, 1, dist.get_world_size())
    try:
        if meshes.world_size == 1:
            return None
        if reason := why_none_anywhere([(meshes.group(wrapped.shards), options.ordered)], wrapped.device.type):
            if dist.get_rank() == 0:
                message = "FSDP's own collectives give the same, and need equal numbers of micro-batches on all ranks"
                warnings.warn(f"{wrapped.face}: no on-demand communication, since {reason}. {message}", stacklevel=4)
            return None
        units = {Sharing(wrapped.shards, options.ordered): wrapped.units}
        exchange = Exchange(units, meshes, options.accumulation or 1, options.timeout_s)
        return exchange
    finally:
        if exchange is None:
            wrapped.restore()


_sessions: WeakSet[Session] = WeakSet()
"""Held by their models."""


def session_of(module: nn.Module) -> Session | None:
    """Return the open session of the model that a module is, or is a part of."""
    return next((session for session in list(_sessions) if id(module) in session.parts), None)


def check_neighbours(ranks: Sequence[int], world_size: int) -> None:
    """Raise OsdpError unless a model is on all ranks, and split over neighbours."""
    first = ranks[0] - ranks[0] % len(ranks)
    is_whole = len(ranks) == 1 < world_size
    if is_whole or world_size != dist.get_world_size() or tuple(ranks) != tuple(range(first, first + len(ranks))):
        what = "on-demand communication needs a model on all ranks, split over neighbours"
        got = f"split over ranks {', '.join(map(str, ranks))}; {world_size} ranks in its mesh"
        expected = f"{dist.get_world_size()} ranks; groups of two or more consecutive ones"
        raise OsdpError(what, got=got, expected=expected)


def finish(face: str, model: nn.Module, micro_batches: int | None) -> None:
    """Complete the gradients of a model; raises OsdpError before `pre_minibatch_start`."""
    session = session_of(model)
    if session is None:
        expected = f"{face}.pre_minibatch_start(model) before the first forward"
        raise OsdpError("pre_optimizer_step of a model that no minibatch was started for", expected=expected)
    session.finish(micro_batches)


def stop() -> None:
    """Close all windows, of FSDP1 and FSDP2 alike. Not collective; may be called again."""
    for session in list(_sessions):
        session.close()
    forget()
