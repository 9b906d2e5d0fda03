"""How commands that run on several ranks end: in the process that starts the ranks, and in each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from osdp.cli.exits import BAD_INPUT, FAULT, TRACEBACK
from osdp.cli.terminal import note, say

if TYPE_CHECKING:
    from osdp.training.launch import Nodes


def start_ranks(
    ranks: int, nodes: Nodes, device: str, timeout_s: float, *, restarts: int | None = None, **options: Any
) -> None:
    """Run this command as the ranks of this node, see `osdp.training.launch.launch`; report which rank failed.

    With `restarts`, see `osdp.training.restarts.launch_again`.
    """
    from osdp.training.launch import RankError, launch
    from osdp.training.restarts import launch_again

    start = launch if restarts is None else partial(launch_again, restarts, note)
    try:
        start(sys.argv[1:], ranks, nodes, device, timeout_s, **options)
    except RankError as error:
        say(f"error: {error}")
        raise SystemExit(FAULT) from None


@contextmanager
def end_of_rank() -> Iterator[None]:
    """Be one of the ranks inside; an error goes to the process that started them, or to stderr."""
    from osdp.training.launch import LAUNCHED, leave_error
    from osdp.training.process_group import end_at_once_on_signals, end_with_launcher
    from profiler.errors import FaultError, OsdpError

    end_at_once_on_signals()
    if LAUNCHED in os.environ:
        end_with_launcher()
    try:
        yield
    except BrokenPipeError:
        raise  # Nobody reads our output: `guarded` ends quietly.
    except Exception as error:
        # A lost rank, a full disk, or a mistake of ours: no fault of what the user asked for.
        is_fault = isinstance(error, FaultError) or not isinstance(error, OsdpError)
        status = FAULT if is_fault else BAD_INPUT
        leave_error(error, status)
        if LAUNCHED in os.environ and not os.environ.get(TRACEBACK):
            raise SystemExit(status) from None
        if isinstance(error, OsdpError) and is_fault:
            say(f"error: {error}")
            raise SystemExit(FAULT) from None
        raise
