"""Records of calls and of block executions, which `profiler.trace.activation_ledger` fills.

All bytes are of live storages; what is charged to earlier calls is taken off at the end (`Ledger.finish`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from profiler.trace.handover import Handover
from profiler.trace.live_storage import NO_CHARGE, Charge, LiveStorage
from profiler.trace.lone_input import LoneInput
from profiler.trace.op_cost import Cost
from profiler.trace.own_collectives import Kind

Part = tuple[int | None, int]
"""A block execution and NOBODY, or None and an operator that runs in no block."""


@dataclass(slots=True)
class Tally:
    """Work and memory of one direction of a call."""

    flops: int = 0
    matmul_bytes: int = 0
    other_bytes: int = 0
    launches: int = 0
    """Operations that read or write memory, and collectives."""
    sent: list[tuple[Kind, int]] = field(default_factory=list)
    """The model's own collectives, and their bytes."""
    events: list[int] = field(default_factory=list)
    """Live bytes less what is charged to earlier calls, in order of time."""
    waste: int = 0
    """Most rounding that came on top of any of those, in bytes."""

    @property
    def sum(self) -> int:
        """The sum of all that is measured."""
        sent = sum(size for _, size in self.sent)
        return self.flops + self.matmul_bytes + self.other_bytes + sent + sum(self.events)

    def spend(self, cost: Cost) -> None:
        """Add an operation."""
        self.flops += cost.flops
        self.matmul_bytes += cost.matmul_bytes
        self.other_bytes += cost.other_bytes
        self.launches += cost.matmul_bytes + cost.other_bytes > 0

    def send(self, collective: tuple[Kind, int] | None) -> None:
        """Add a collective."""
        if collective is not None:
            self.sent.append(collective)
            self.launches += 1

    def rebase(self, before: Charge, *, in_forward: bool = False) -> None:
        """Take what is charged to earlier calls off live bytes."""
        charged = before.bytes - (before.held if in_forward else 0)
        self.events = [event - charged for event in self.events]
        self.waste = max(0, self.waste - before.waste)


@dataclass(slots=True)
class Ending:
    """Where the forward of a call's module, or of its block, ended, and when the backward came back to it."""

    number: int | None = None
    """Number of the next autograd node then, None if it did not end in this call."""
    inside: int | None = None
    """How many events of the forward came before."""
    reached: int = 0
    """How many events of the backward came before it reached what is inside."""
    arrived: int | None = None
    """Bytes as of an event when it did, None if it did not."""


@dataclass(slots=True)
class Opening:
    """What a block runs before its first call, in which it is a part of the call before: bytes are less what is charged
    to calls before the block's first.
    """

    begins: int = 0
    """Number of the next autograd node when the block began."""
    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    """Without gradients of parameters."""
    ended: int | None = None
    """Bytes as of an event when its backward was over, None if there was none."""

    def rebase(self, before: Charge) -> None:
        """Take what is charged to earlier calls off live bytes."""
        self.forward.rebase(before, in_forward=True)
        self.backward.rebase(before)
        self.ended = None if self.ended is None else self.ended - before.bytes


@dataclass(slots=True)
class CallRecord:
    """The record of one call."""

    operator: int
    block: int | None
    module: str = ""
    """Path of the operator's module that began with it; empty where none did."""
    saved: Charge = NO_CHARGE
    """What the call keeps if its block does."""
    recomputed: Charge = NO_CHARGE
    """What it keeps if its block is recomputed."""
    kept: Charge = NO_CHARGE
    """What it keeps beside `recomputed` if its block is recomputed selectively; of other passes, no bytes."""
    retaken: Charge = NO_CHARGE
    """The part of `saved` that its block keeps if it is recomputed selectively, and takes up as it runs again."""
    shared: Charge = NO_CHARGE
    """What it keeps beside `saved` if any of `sharers` is recomputed: a mask, which it is the first of them to hold."""
    sharers: frozenset[int] = frozenset()
    """Block executions that take that."""
    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    module_end: Ending = field(default_factory=Ending)
    """Of the operator's module, or else of the block."""
    block_end: Ending = field(default_factory=Ending)
    """Of the block, or, of any but its last call, of the module."""
    opening: Opening | None = None
    """Of the block, if this is its first call and another comes before."""
    ended: int | None = None
    """Bytes as of an event when the backward was over, None if there was none."""
    module_ended: int | None = None
    """The same before the gradients that the call's nodes return are added to those that wait for them."""
    output: int = 0
    """Bytes that this call wrote and later calls read."""
    reads_parameters: bool = False
    """Whether any op of it read parameters of its operator."""
    reads: frozenset[int] = frozenset()
    """Keys of the storages of those that it reads with a gradient, where passes are to tell them apart."""
    late: bool = False
    """Whether its module was handed nothing that needs a gradient."""
    reruns: dict[Part, slice] = field(default_factory=dict)
    """In which events of its backward the model ran other parts of itself again."""


@dataclass(slots=True)
class Execution:
    """One run of a block's forward."""

    path: str
    """Module path of the block."""
    inputs: tuple[LiveStorage, ...]
    """The storages passed in."""
    late: bool = False
    """Whether nothing that it is handed needs a gradient."""
    changed: Charge = NO_CHARGE
    """The buffers that it changes, of which it holds copies if it is recomputed, so that they change once."""
    saves: bool = False
    """Whether it saves anything for backward; if not, recomputation does not hold its inputs either."""
    entered: int = 0
    """Bytes as of an event when its forward began."""
    opening: int = 0
    """Bytes by which that grew to the first call in it: code of its own before its modules, and casts of its inputs."""
    again: Tally = field(default_factory=Tally)
    """Its forward when it runs again."""
    again_in_tail: bool = False
    """Whether what follows the module of its last call needs it to run again, as dropout does."""
    used: set[int] = field(default_factory=set)
    """The `id` of those inputs that it reads and that earlier calls made."""
    made: tuple[LiveStorage, ...] = ()
    """The storages that it made and returned."""
    handover: Handover = field(default_factory=Handover)
    lone: LoneInput | None = None
    """What would be offloaded of its inputs."""
