"""All ranks succeed or all fail: an error on one rank is raised on every rank, and none waits for it in vain."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from profiler.errors import FaultError, OsdpError, first_line
from runtime.failures.liveness import find_lost
from runtime.failures.peer_lost import ANSWER_S, PeerLost, describe_lost
from runtime.torch_compat import default_timeout

T = TypeVar("T")
WRITER = "inline_container"
"""In the words of PyTorch's writer of tensors, when it could not write: a disk is full or does not answer."""
OF_THE_INPUT = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
"""What the operating system says of a path that is wrong; all else is a fault of the machine."""


@dataclass(frozen=True)
class Agreement:
    """Ranks that agree: all of the default process group, or this process alone."""

    group: dist.ProcessGroup | None
    """A gloo group of its own, so that a background thread may use it while the model trains."""
    rank: int
    count: int

    @classmethod
    def all(cls) -> Agreement:
        """Return all ranks; the first call is collective, because it makes the group."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        return cls(_gloo_group(dist.group.WORLD), dist.get_rank(), dist.get_world_size())

    def gather(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results, in order of rank; they must pickle.

        `doing` completes "rank 2 could not ...". Collective. Raises OsdpError on all ranks if the
        action fails on one: the error of the lowest rank that has one.
        """
        cause: Exception | None = None
        outcome: tuple[T | None, OsdpError | None]
        try:
            outcome = action(), None
        except OsdpError as error:
            outcome = None, error
        except Exception as error:
            cause, outcome = error, (None, _failure(self.rank, doing, error))
        outcomes = [outcome]
        if self.group is not None:
            outcomes = [outcome] * self.count
            with peer_errors(doing):
                dist.all_gather_object(outcomes, outcome, group=self.group)
        for _, raised in outcomes:
            if raised is not None:
                raise raised from cause
        return [cast(T, value) for value, _ in outcomes]

    def together(self, doing: str, action: Callable[[], T]) -> T:
        """Like `gather`, but each rank keeps its result to itself."""
        results: list[T] = []
        self.gather(doing, lambda: results.append(action()))
        return results[0]

    def on_first(self, doing: str, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 while the others wait; collective, raises on all ranks."""
        self.together(doing, lambda: action() if self.rank == 0 else None)


def from_rank_0(doing: str, make: Callable[[], T]) -> T:
    """Return on every rank what `make` returns on rank 0, or raise what it raises there. Collective."""
    ranks = Agreement.all()
    return cast(T, ranks.gather(doing, lambda: make() if ranks.rank == 0 else None)[0])


def agree(what: str, doing: str, make: Callable[[], T], advice: str) -> T:
    """Return what `make` returns, or raise OsdpError on every rank if it fails on one or results print differently.

    `what` is the name of the result, `doing` completes "rank 2 could not ...". Collective.
    """
    results: list[T] = []

    def digest() -> str:
        results.append(make())
        return hashlib.sha256(repr(results[0]).encode()).hexdigest()

    digests = Agreement.all().gather(doing, digest)
    odd = [str(rank) for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        got = f"ranks {', '.join(odd[:8])} differ from rank 0"
        raise OsdpError(f"{what} is not the same on all ranks", got=got, advice=advice)
    return results[0]


@contextmanager
def peer_errors(doing: str) -> Iterator[None]:
    """Raise as OsdpError the failure of a collective call because of other ranks: they failed in it, or are gone."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if not isinstance(cause, Exception):  # Ctrl-C
            raise cause from None
        raise _failure(rank, doing, cause) from cause
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        fates, advice = describe_lost(find_lost(ANSWER_S))
        what = f"could not {doing}: another rank is gone or does not answer: {fates}"
        raise PeerLost(what, got=first_line(error), advice=advice) from error


def _failure(rank: int, doing: str, error: Exception) -> OsdpError:
    is_fault = isinstance(error, OSError) and error.errno not in OF_THE_INPUT
    is_fault |= isinstance(error, RuntimeError) and WRITER in str(error)
    kind = FaultError if is_fault else OsdpError
    return kind(f"rank {rank} could not {doing}", got=f"{type(error).__name__}: {first_line(error)}")


@lru_cache(maxsize=1)
def _gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the one gloo group for agreements, besides the default group `world`."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=default_timeout()))
