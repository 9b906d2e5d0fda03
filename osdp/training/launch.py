"""Starts the ranks of this node with torch's elastic agent, which is what `torchrun` does.

The agent runs our own command once per rank, with RANK, WORLD_SIZE and the like in the environment.
A rank that fails leaves its error in the file that the agent names; the agent ends the others, and
the error that the others followed from is raised here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import osdp
from osdp.training.loopback import loopback_store, use_loopback
from osdp.training.meeting import Meeting
from profiler.errors import OsdpError
from profiler.yaml_files import write_text_atomic

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

CPU_RANKS = 2
"""Ranks that are started where there are no GPUs and the user gives no number."""
PROGRAM = ("-P", str(Path(osdp.__file__).with_name("__main__.py")))
"""What Python runs as a rank: this very OSDP, without the current folder first on `sys.path`, as `-m osdp` would."""
LAUNCHED = "OSDP_LAUNCHED"
"""Environment variable by which a rank knows that we started it, not torchrun."""
_BAD_INPUT, _BROKEN_PIPE = 2, 128 + signal.SIGPIPE
"""Exit status of a rank that was asked for what cannot be, and of one whose stdout was closed."""
_SHUTDOWN_S = 10
"""How long ranks have to end before they are killed; torch 2.11 and 2.12 always give them 30."""


class RankError(Exception):
    """A rank failed through no fault of the user's input: it died, or lost another."""


@dataclass(frozen=True)
class Nodes:
    """Where this node stands among the nodes of a run."""

    count: int = 1
    index: int = 0
    """From 0."""
    endpoint: str = ""
    """host:port of node 0, the rendezvous endpoint; empty on one node, which chooses its own."""
    least: int | None = None
    """Where nodes may come and go: how many are needed; `count` is then how many there can be."""
    meeting: Meeting | None = None
    """How they meet if the ranks are started again when one is lost; None: once, in the order of `index`."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            expected = f"from 0 to {self.count - 1}"
            raise OsdpError("there is no such node", got=f"--node-rank {self.index}", expected=expected)
        port = self.endpoint.partition(":")[2]
        if self.count > 1 and not (port.isdecimal() and 0 < int(port) < 2**16):
            what, got = "several nodes need a rendezvous endpoint", self.endpoint or "no --rdzv-endpoint"
            raise OsdpError(what, got=got, expected="--rdzv-endpoint HOST:PORT of node 0, the same on every node")


def node_range(text: str, count: int, endpoint: str) -> Nodes:
    """Return the nodes that `--nodes MIN:MAX` means."""
    least, _, most = text.partition(":")
    if count != 1 or not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        got = f"--nodes {text}" + (f" --nnodes {count}" if count != 1 else "")
        raise OsdpError("the number of nodes is wrong", got=got, expected="--nodes MIN:MAX, such as 1:4, or --nnodes N")
    return Nodes(int(most), endpoint=endpoint, least=int(least))


def is_rank() -> bool:
    """Whether this process is one of the ranks: torchrun or `launch` started it."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launch(
    command: Sequence[str], ranks: int, nodes: Nodes, device: str, timeout_s: float, program: Sequence[str] = PROGRAM
) -> None:
    """Run `command`, the arguments of `osdp`, as `ranks` ranks on this node until all are done.

    `program` is what Python runs in place of `osdp`: a script that ends as in `osdp.cli.rank_process`.

    Raises OsdpError as a rank did, RankError if one died, BrokenPipeError where nobody reads the output,
    and KeyboardInterrupt on SIGINT or SIGTERM; no rank is left then.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    os.environ[LAUNCHED] = "1"
    # As many threads as there are cores, all ranks together: they compute on CPUs, and step there what is offloaded.
    # torchrun gives every rank one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # The agent's own words about a failure would stand around ours.
    logging.disable(logging.NOTSET if os.environ.get("LOGLEVEL") else logging.CRITICAL)
    try:
        with (
            _left_together(nodes, timeout_s) as reachable,
            # The agent makes folders for the errors of ranks, and leaves its own there for good.
            tempfile.TemporaryDirectory(prefix="osdp-ranks-", ignore_cleanup_errors=True) as folder,
        ):
            elastic_launch(_settings(ranks, reachable, timeout_s, folder), sys.executable)(*program, *command)
    except ChildFailedError as error:
        raise _cause(error) from None
    except RendezvousError as error:
        if nodes.meeting is None:
            raise
        raise RankError(f"the nodes did not meet at {nodes.endpoint}: {str(error) or type(error).__name__}") from None
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _left_together(nodes: Nodes, timeout_s: float) -> Iterator[Nodes]:
    """Have a store for the ranks to meet in; gives the nodes with its endpoint.

    On one node it is our own. Of several, that of node 0 is kept until all have left it: its agent would close it once
    all have come to the end, while another may still wait for its answer, and get a warning with a stack trace (seen
    with torch 2.13).
    """
    if nodes.count == 1 and nodes.meeting is None:
        use_loopback()
        with loopback_store() as endpoint:
            yield Nodes(endpoint=endpoint)
        return
    if nodes.meeting is not None:
        yield nodes
        return
    import torch.distributed as dist

    host, _, port = nodes.endpoint.partition(":")
    store_of: Any = dist.TCPStore  # type: ignore[attr-defined]
    connect = partial(store_of, host, int(port), is_master=nodes.index == 0, wait_for_workers=False, multi_tenant=True)
    if nodes.index == 0:
        try:
            store = connect(timeout=timedelta(seconds=timeout_s))
        except dist.DistNetworkError as error:
            what, got = "node 0 cannot listen at the rendezvous endpoint", f"{nodes.endpoint}: {error}"
            raise OsdpError(what, got=got, expected="an address of this machine and a free port") from None
        yield nodes
        with suppress(dist.DistError):  # a node that was lost at the very end
            store.wait([f"osdp/left/{node}" for node in range(1, nodes.count)], timedelta(seconds=_SHUTDOWN_S))
    else:
        yield nodes
        with suppress(dist.DistError):
            connect(timeout=timedelta(seconds=_SHUTDOWN_S)).set(f"osdp/left/{nodes.index}", "1")


def _settings(ranks: int, nodes: Nodes, timeout_s: float, folder: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    logs = DefaultLogsSpecs(log_dir=folder)
    found = LaunchConfig(nodes.count, nodes.count, ranks, run_id="osdp", max_restarts=0, logs_specs=logs)
    if hasattr(found, "shutdown_timeout"):
        found.shutdown_timeout = _SHUTDOWN_S
    # In the order of --node-rank, which decides the order of ranks.
    found.rdzv_backend, found.rdzv_endpoint = "static", nodes.endpoint
    found.rdzv_configs = {"timeout": round(timeout_s), "rank": nodes.index}
    if nodes.meeting is not None:
        nodes.meeting.set_up(found, timeout_s)
    return found


def leave_error(error: Exception, status: int) -> None:
    """Write a rank's error, and the exit status that it will have, to the file that the agent reads, in its form.

    Nothing if no agent started it.  The agent may end a rank that has found a mistake before it has ended by itself,
    because another has lost it.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = str(error) if isinstance(error, OsdpError) else f"{type(error).__name__}: {error}"
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time())), "status": status}
        # The agent may end this rank at any time, and fails itself at half a file.
        write_text_atomic(Path(path), json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _cause(error: ChildFailedError) -> Exception:
    """Return the failure that the others followed from.

    A rank that was killed comes first: what others report is that they lost it. Then bad input, then a
    death without a message, then faults. The agent itself ends the remaining ranks, by SIGTERM, and by SIGKILL
    those that are stopped or do not listen, `_SHUTDOWN_S` after the first failure or later.  And gloo, and NCCL's
    watchdog, abort a rank whose peer has ended: that is no killed rank if another had said before why it ends.
    """
    first_s = min(failure.timestamp for failure in error.failures.values())
    told_s = min((one.timestamp for one in error.failures.values() if _message(one)), default=math.inf)

    def weight(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        by_agent = failure.exitcode == -signal.SIGKILL and failure.timestamp - first_s >= _SHUTDOWN_S - 1
        if _message(failure):
            order = 1 if _status(failure) == _BAD_INPUT else 3
        elif failure.exitcode == -signal.SIGTERM or by_agent:
            order = 4
        else:
            is_aborted = failure.exitcode == -signal.SIGABRT and failure.timestamp >= told_s
            order = 0 if failure.exitcode < 0 and not is_aborted else 2
        return order, failure.timestamp, rank

    rank, failure = min(error.failures.items(), key=weight)
    if failure.exitcode == _BROKEN_PIPE:
        return BrokenPipeError()
    if message := _message(failure):
        return OsdpError(message) if _status(failure) == _BAD_INPUT else RankError(message)
    if failure.exitcode >= 0:
        return RankError(f"rank {rank} ended with exit status {failure.exitcode}; what it printed is above")
    advice = "; perhaps the machine ran out of memory (see dmesg)" if -failure.exitcode == signal.SIGKILL else ""
    return RankError(f"rank {rank} was killed by {failure.signal_name()}{advice}")


def _status(failure: ProcessFailure) -> int:
    """Return the exit status that a rank has, or was about to end with as the agent ended it."""
    message: Any = failure.error_file_data["message"]
    left = message["extraInfo"].get("status") if isinstance(message, dict) else None
    return failure.exitcode if left is None else int(left)


def _message(failure: ProcessFailure) -> str:
    """Return what a rank left in its error file; empty if it left none."""
    message: Any = failure.error_file_data["message"]
    return str(message["message"]) if isinstance(message, dict) else ""
