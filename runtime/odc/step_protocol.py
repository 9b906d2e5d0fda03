"""When the ranks of a model synchronize: before parameters are pulled anew, and before gradients are used.

    stale    --barrier, publish, barrier-->  open     at the first pull; values were given or loaded since the last one
    open     --pulls and pushes----------->  open     micro-batches, as many as each rank likes
    open     --barrier, take-------------->  taken    before the optimizer's step, or whenever gradients are asked for
    taken    --publish, barrier----------->  open     after the optimizer's step
    taken    --publish, barrier----------->  open     at the next pull, if the step is left out
    open     --barrier-------------------->  open     when gradients are set to zero; what was accumulated is forgotten
    any      --barrier, publish, barrier-->  open     where a loop says that a step starts anew (`renew`)
    open     ----------------------------->  stale    where parameters were changed since they were published

Such changes (weights that are clamped, averages that are swapped in) are seen by the version counters of what rests,
before a forward and before gradients are taken; every rank must make them alike.  `.data` of what is published counts
alike (`runtime.dtensor_values`).  Where some ranks alone make a change, one that has nothing to publish takes gradients
while another waits to publish: the notes of their barriers differ, and both raise.  So do all where the sum of all bits
differs when gradients are taken, after a change that nothing counts, as the gradient may be that of other values.
They raise as well where a loop has put other gradients in the places of those that are still to be completed.

With S the sum of what all N ranks pushed, c_r the micro-batches of rank r and M those of the plan, the gradient is

    S / N            if all c_r are equal: what FSDP2 gives, the mean over ranks
    S M / sum c_r    if not: losses are divided by M, as ever, and this is the mean over all micro-batches;
                     also if they are equal, where M was given for that (`is_mean`)

and other gradients of the model, means over ranks, are brought to the same scale.  What ranks must know of
each other for that (sum of c_r, and of their squares; which parameters got a gradient) is pushed like a
gradient, through a window of its own.  Groups of ranks that are replicas of each other
all-reduce what they accumulated, all units at once.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.errors import OsdpError
from runtime.failures.liveness import announce
from runtime.failures.peer_faults import PeerLost, naming_peers
from runtime.failures.rank_agreement import Agreement
from runtime.host_copies import on_device
from runtime.meshes import Meshes
from runtime.odc.choose_transport import open_transport
from runtime.odc.dry_run_windows import DryRunTransport, is_dry_run
from runtime.odc.pending_gradient import ADVICE
from runtime.odc.windows import Transport, Window, WindowSpec
from runtime.sharded_model import WrappedUnit
from runtime.torch_compat import default_timeout

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""
TO_PUBLISH, TO_TAKE = 2.0, 3.0
"""What ranks note at a barrier: that they publish changes after it, or take gradients.  1: that they have some."""
TIMEOUT_S = 600.0
"""How long a rank waits for others where the process group has no timeout."""


class Unit(Protocol):
    """Parameters that are published, and whose gradients are accumulated, together."""

    spec: WindowSpec
    window: Window
    trained: list[nn.Parameter]
    """Those that get a gradient."""
    pushed: list[bool]
    """Which of them got one on this rank since the last barrier."""

    @property
    def is_replaced(self) -> bool:
        """Whether somebody has put others, or None, in the places of gradients since the last barrier."""

    @property
    def shards(self) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """What rests on this rank: parameters, and the tensors that they hold here."""

    def use(self, window: Window, before_pull: Callable[[], None]) -> None:
        """Communicate through a window; `before_pull` makes sure that there is something to pull."""

    def publish(self) -> None:
        """Let peers see this rank's shard after the next barrier."""

    def add_gradient(self, gradient: Tensor, wanted: Sequence[bool]) -> None:
        """Add a gradient (t,) to those of the wanted parameters."""

    def forget(self) -> None:
        """Forget which parameters got gradients."""


@dataclass(frozen=True, order=True)
class Sharing:
    """How units are split and summed up."""

    ranks: int
    """Neighbours among which a unit is split."""
    ordered: bool = False
    """Whether sums are bitwise reproducible."""


@dataclass(frozen=True)
class Group:
    """Units that are split over groups of equally many ranks and summed up in the same way, and this rank's group."""

    units: tuple[Unit, ...]
    transport: Transport
    """Its last window is for the summary."""
    across: dist.ProcessGroup | None
    """Ranks with equal shards in the other groups; None if there is one group."""

    @property
    def summary(self) -> Window:
        """The window for messages: two numbers on micro-batches, two on changes, and one for each parameter."""
        return self.transport.windows[-1]

    def publish(self) -> None:
        """Publish all shards, then wait for all ranks."""
        for unit in self.units:
            unit.publish()
        self.transport.barrier()

    def send_message(self, micro_batches: int, is_changed: bool) -> None:
        """Send the others this rank's counts and flags of the step."""
        is_replaced = any(unit.is_replaced for unit in self.units)
        flags = [float(flag) for unit in self.units for flag in unit.pushed]
        numbers = [micro_batches, micro_batches**2, is_changed, is_replaced, *flags]
        message = on_device(torch.tensor(numbers, dtype=torch.float32), torch.device(self.transport.device_type))
        self.summary.push(message.repeat(len(self.transport.ranks)))

    def received(self) -> list[float]:
        """Return the sums of all ranks' messages."""
        if isinstance(self.transport, DryRunTransport):  # every parameter has a gradient
            return [0.0] * 4 + [1.0] * (self.summary.spec.shard_numel - 4)
        return self.take(self.summary).tolist()

    def discard(self) -> None:
        """Forget what was accumulated for this rank, and what it pushed."""
        for window in self.transport.windows:
            window.take_gradient()
        for unit in self.units:
            unit.forget()

    def reduce_across(self) -> None:
        """Sum what was pushed in all groups, before it is taken; of ordered sums each is reduced as it is taken.

        Ordered windows have a slot for each rank: to reduce these at once would send as many times the bytes, and to
        reduce their sums at once takes the memory of another gradient.
        """
        if self.across is not None and not self.transport.ordered:
            self.transport.all_reduce(self.across)

    def take(self, window: Window) -> Tensor:
        """Return what all ranks of all groups pushed for this rank."""
        taken = window.take_gradient()
        if self.across is not None and self.transport.ordered:
            dist.all_reduce(taken, group=self.across)
        return taken


class Exchange(WrappedUnit):
    """The units of a model that communicate one-sidedly."""

    finishes_in_optimizer_step = accumulates_apart = True

    def __init__(
        self,
        units: Mapping[Sharing, Sequence[Unit]],
        meshes: Meshes,
        micro_batches: int,
        timeout_s: float | None = None,
    ) -> None:
        """Open windows for units. A collective call.

        `micro_batches` are those of a step of the plan; `timeout_s` is the process group's unless given.
        Raises OsdpError on every rank if ranks of a group cannot share memory.
        """
        self.micro_batches, self.world_size = micro_batches, meshes.world_size
        self._state = "stale"
        self._version = (0, 0)
        """Of the shards that were published: what `_count_changes` returned."""
        self._bits: dict[torch.device, Tensor] = {}
        """By device, the sum of those shards' bits as integers."""
        timeout = default_timeout()
        self.timeout_s = timeout_s or (timeout.total_seconds() if timeout else TIMEOUT_S)
        if not is_dry_run():
            announce("opening windows")
        self._opened: list[Transport] = []
        close = weakref.finalize(self, _close, self._opened, os.getpid())  # at the latest when Python exits
        try:
            self.groups = tuple(self._open(sharing, units[sharing], meshes) for sharing in sorted(units))
        except BaseException:
            close()
            raise

    def _open(self, sharing: Sharing, units: Sequence[Unit], meshes: Meshes) -> Group:
        message_numel = 4 + sum(len(unit.trained) for unit in units)
        specs = [*(unit.spec for unit in units), WindowSpec("summary", message_numel, torch.float32)]
        ranks = sharing.ranks
        group = meshes.group(ranks)
        across = meshes.group(meshes.world_size // ranks, stride=ranks) if ranks < meshes.world_size else None

        def open_windows() -> None:
            self._opened.append(open_transport(group, specs, meshes.device_type, self.timeout_s, sharing.ordered))

        if is_dry_run():
            open_windows()
        else:  # An error in one group is raised in all, which would otherwise wait for it.
            Agreement.all().together("open windows", open_windows)
        transport = self._opened[-1]
        for unit, window in zip(units, transport.windows, strict=False):
            unit.use(window, self.open)
        return Group(tuple(units), transport, across)

    @property
    def trained(self) -> list[nn.Parameter]:  # type: ignore[override]
        """Those whose gradients `finish_gradients` completes."""
        return [parameter for group in self.groups for unit in group.units for parameter in unit.trained]

    @property
    def has_accumulated(self) -> bool:  # type: ignore[override]
        """Whether this rank has pushed gradients since ranks last synchronized."""
        return any(any(unit.pushed) for group in self.groups for unit in group.units)

    def open(self) -> None:
        """Make parameters available to pull, and accumulators to push into. A collective call."""
        if self._state == "open":
            return
        with self._together():
            for group in self.groups:
                if self._state == "stale":
                    _check_alike(group.transport.barrier(TO_PUBLISH))
                group.publish()
        self._note_published()

    def _note_published(self) -> None:
        self._state, self._version, self._bits = "open", self._count_changes(), self._sum_bits()

    def _shards(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [shard for group in self.groups for unit in group.units for shard in unit.shards]

    def _count_changes(self) -> tuple[int, int]:
        """Return numbers that differ after a change: of all changes in place, and of the memory that shards are in."""
        shards = self._shards()
        # A DTensor counts what is done to it, and the tensor that it holds what is done to that.
        counts = (parameter._version + (0 if parameter is own else own._version) for parameter, own in shards)
        return sum(counts), sum(own.data_ptr() for _, own in shards)

    @torch.no_grad()
    def _sum_bits(self) -> dict[torch.device, Tensor]:
        sums: dict[torch.device, Tensor] = {}
        for _, own in () if is_dry_run() else self._shards():
            bits = own.detach().reshape(-1).view(INTEGERS[own.itemsize]).sum(dtype=torch.int64)
            sums[own.device] = sums[own.device] + bits if own.device in sums else bits
        return sums

    def expire(self) -> None:
        """Note that parameters have other values than were published."""
        self._state = "stale"

    def reshard(self) -> None:
        if self._state == "open" and self._count_changes() != self._version:
            self.expire()

    def finish_gradients(self, micro_batches: int, is_mean: bool = False) -> float:
        """Synchronize, and add to gradients what was accumulated, unless that was done. A collective call.

        `micro_batches` is the number whose gradients this rank has pushed; `is_mean` makes the gradient S M / sum c_r
        though all are equal. Returns by how much the model's other gradients, which are means over ranks, must be
        scaled. Raises PeerLost, naming ranks, if some do not take part, and OsdpError if parameters have other values
        than those that peers pulled.
        """
        scale = 1.0
        if self._state == "taken":
            return scale
        self.open()
        now = self._sum_bits()
        is_changed = any(not torch.equal(bits, now[device]) for device, bits in self._bits.items())
        with self._together():
            for group in self.groups:
                group.send_message(micro_batches, is_changed)
            for group in self.groups:
                _check_alike(group.transport.barrier(TO_TAKE))
                scale = self._take(group, is_mean)
        self._state = "taken"
        return scale

    @torch.no_grad()
    def _take(self, group: Group, is_mean: bool) -> float:
        group.reduce_across()
        total, squares, changed, replaced, *flags = group.received()
        if changed:
            raise _changed_alone(int(changed), self.world_size)
        if replaced:
            what = "gradients were replaced, or set to None, before ranks have synchronized under odc"
            got = f"{replaced:.0f} of {self.world_size} ranks with others"
            raise OsdpError(what, got=got, advice=f"{ADVICE}; to give a step up, call model.zero_grad()")
        are_equal = self.world_size * squares == total**2
        scale = 1.0 if are_equal and not (is_mean and total) else self.micro_batches * self.world_size / total
        for unit in group.units:
            wanted = [flag > 0 for flag in flags[: len(unit.trained)]]
            del flags[: len(unit.trained)]
            unit.forget()
            if any(wanted):
                unit.add_gradient(group.take(unit.window).mul_(scale / self.world_size), wanted)
        return scale

    def reset(self) -> None:
        self.discard_gradients(pending=True)

    def discard_gradients(self, pending: bool) -> None:
        """Synchronize, and discard what was accumulated if any rank has `pending` gradients. A collective call."""
        if self._state == "taken":
            return
        with self._together():
            for group in self.groups:
                if 1.0 in group.transport.barrier(float(pending)):
                    group.discard()
                    group.transport.barrier()

    def renew(self, pending: bool) -> None:
        """Publish what parameters are now, for a step that starts anew. A collective call.

        What was accumulated is forgotten if any rank has `pending` gradients, pushed since the last `finish_gradients`.
        """
        with self._together():
            for group in self.groups:
                if 1.0 in group.transport.barrier(float(pending)):
                    group.discard()
                group.publish()
        self._note_published()

    def close(self) -> None:
        """Close the windows. Not collective: the others' next barrier raises PeerLost."""
        for group in self.groups:
            group.transport.close()

    def publish(self) -> None:
        """Publish the parameters that the optimizer has changed. A collective call, after `finish_gradients`."""
        with self._together():
            for group in self.groups:
                group.publish()
        self._note_published()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Name the ranks that are lost in a barrier, or between groups; nothing can be exchanged after that."""
        try:
            with naming_peers("a barrier", self.timeout_s):
                yield
        except PeerLost:
            for group in self.groups:
                group.transport.give_up()
            raise

    @property
    def bytes_beside_allocator(self) -> int:
        return sum(group.transport.device_bytes for group in self.groups)

    def communication_tensors(self) -> list[Tensor]:
        dry = [group.transport for group in self.groups if isinstance(group.transport, DryRunTransport)]
        return [tensor for transport in dry for tensor in (*transport.published, *transport.accumulated)]


def _check_alike(notes: Sequence[float]) -> None:
    """Raise OsdpError if some ranks publish changes where others take gradients."""
    if {TO_PUBLISH, TO_TAKE} <= {*notes}:
        raise _changed_alone(notes.count(TO_PUBLISH), len(notes))


def _changed_alone(changed: int, ranks: int) -> OsdpError:
    return OsdpError(
        "parameters were changed through .data after ranks could pull them, or by some ranks alone: gradients may be "
        "of other values",
        got=f"{changed} of {ranks} ranks with other values",
        advice="change them alike on all ranks, between a step and the next forward: p.clamp_(-0.1, 0.1) under "
        "torch.no_grad()",
    )


def _close(transports: Sequence[Transport], process: int) -> None:
    if os.getpid() != process:  # a fork that ends must not close its parent's
        return
    for transport in transports:
        transport.close()
