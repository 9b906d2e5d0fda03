"""Storages that a step allocates, and what is charged to calls for them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

NOBODY = -1
"""Operator of the call before the first operator, owner of buffers, producer of inputs."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What is kept from forward to backward."""

    bytes: int = 0
    waste: int = 0
    """Rounding of those."""
    held: int = 0
    """The part of `bytes` that the code around blocks holds on to until the forward is over, and not after; negative:
    what it holds then that is no part of `bytes`."""

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.bytes + other.bytes, self.waste + other.waste, self.held + other.held)

    def __sub__(self, other: Charge) -> Charge:
        return Charge(self.bytes - other.bytes, self.waste - other.waste, self.held - other.held)


NO_CHARGE = Charge()


class LiveStorage(weakref.ref[torch.UntypedStorage]):
    """A storage that the step allocated; calls back when it dies."""

    __slots__ = (
        "addends",
        "bytes",
        "died_at",
        "handed",
        "is_product",
        "is_read",
        "kept_by",
        "kept_in",
        "key",
        "producer",
        "savers",
        "taken_by",
        "waste",
    )

    addends: tuple[LiveStorage, ...]
    """If it is a sum of gradients that the backward of a call makes, those, until that reads it."""
    bytes: int
    waste: int
    """Rounding of those."""
    died_at: int | None
    """How many events came before it died, None if it lives."""
    key: int
    producer: int
    kept_by: int
    """The call whose block keeps it, recomputed selectively, or NOBODY."""
    kept_in: int | None
    """The execution of that block."""
    handed: bool
    is_product: bool
    """Whether it is as an op left it whose output selective recomputation keeps."""
    is_read: bool
    """Whether any op read it."""
    savers: dict[int | None, int]
    """By block execution, None for the code around blocks: the first call that saves it there."""
    taken_by: list[int]
    """Block executions to which it is passed."""

    @property
    def charge(self) -> Charge:
        return Charge(self.bytes, self.waste)
