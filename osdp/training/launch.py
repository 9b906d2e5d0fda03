"""Starts the ranks of this node with torch's elastic agent, which is what `torchrun` does.

The agent runs our own command once per rank, with RANK, WORLD_SIZE and the like in the environment.
A rank that fails leaves its error in the file that the agent names; the agent ends the others, and
the error that started it all is raised here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import OsdpError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

LAUNCHED = "OSDP_LAUNCHED"
"""Environment variable that tells a rank that we started it, not torchrun."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PARTS = ("what", "got", "expected", "advice")
_BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit status of a rank whose output nobody reads any more."""
_SHUTDOWN_S = 10
"""How long ranks have to end before they are killed."""


class RankError(Exception):
    """A rank failed through no fault of the user's input: it died, or lost another."""


@dataclass(frozen=True)
class Nodes:
    """Where this node stands among the nodes of a run."""

    count: int = 1
    """Number of nodes."""
    index: int = 0
    """Number of this node, from 0."""
    endpoint: str = ""
    """host:port of node 0, at which the nodes meet; empty on one node."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise OsdpError(
                "there is no such node", got=f"--node-rank {self.index}", expected=f"from 0 to {self.count - 1}"
            )
        port = self.endpoint.partition(":")[2]
        if self.count > 1 and not (port.isdecimal() and 0 < int(port) < 2**16):
            raise OsdpError(
                "several nodes need a place to meet",
                got=self.endpoint or "no --rdzv-endpoint",
                expected="--rdzv-endpoint HOST:PORT of node 0, the same on every node",
            )


def is_rank() -> bool:
    """Whether this process is one of the ranks: torchrun or `launch` started it."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launch(
    command: Sequence[str],
    ranks: int,
    nodes: Nodes,
    device: str,
    timeout_s: float,
    program: Sequence[str] = ("-m", "osdp"),
) -> None:
    """Run `command`, the arguments of `osdp`, as `ranks` ranks on this node until all are done.

    `program` is what Python runs in place of `osdp`: a script that ends as `osdp.cli.rank_process` says.

    Raises OsdpError as a rank did, RankError if one died, BrokenPipeError where nobody reads the output,
    and KeyboardInterrupt on SIGINT or SIGTERM; no rank is left then.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ[LAUNCHED] = "1"
    if device == "cpu":
        # As many threads as there are cores, all ranks together; torchrun gives every rank one.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # The agent's own words about a failure would stand around ours.
    logging.disable(logging.NOTSET if os.environ.get("LOGLEVEL") else logging.CRITICAL)
    try:
        with _left_together(nodes, timeout_s):
            elastic_launch(_settings(ranks, nodes, timeout_s), sys.executable)(*program, *command)
    except ChildFailedError as error:
        raise _cause(error) from None
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _left_together(nodes: Nodes, timeout_s: float) -> Iterator[None]:
    """Keep the store of several nodes, which is in the process of node 0, until all have left it.

    The agent of node 0 would close it once all have come to the end, while another may still wait to be told
    so, and be answered by a warning with a stack trace (seen with torch 2.13).
    """
    if nodes.count == 1:
        yield
        return
    import torch.distributed as dist

    host, _, port = nodes.endpoint.partition(":")
    left = [f"osdp/left/{node}" for node in range(1, nodes.count)]

    def store(limit_s: float) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            int(port),
            is_master=nodes.index == 0,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    if nodes.index == 0:
        try:
            kept = store(timeout_s)
        except dist.DistNetworkError as error:
            raise OsdpError(
                "node 0 cannot listen where the nodes are to meet",
                got=f"{nodes.endpoint}: {error}",
                expected="an address of this machine and a free port",
            ) from None
        yield
        with suppress(dist.DistError):  # a node that was lost at the very end
            kept.wait(left, timedelta(seconds=_SHUTDOWN_S))
    else:
        yield
        with suppress(dist.DistError):
            store(_SHUTDOWN_S).set(left[nodes.index - 1], "1")


def _settings(ranks: int, nodes: Nodes, timeout_s: float) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    # On one node any free port will do. Several nodes are told who is first, so that --node-rank
    # decides the order of ranks.
    alone = nodes.count == 1
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=ranks,
        run_id="osdp",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else nodes.endpoint,
        rdzv_configs={"timeout": round(timeout_s)} | ({} if alone else {"rank": nodes.index}),
        local_addr="localhost" if alone else None,
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_S,
    )


def leave_error(error: Exception, is_fault: bool) -> None:
    """Write a rank's error to the file that the agent reads; nothing if no agent started it."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    told = OsdpError(f"{type(error).__name__}: {error}") if not isinstance(error, OsdpError) else error
    data = {
        # The form that torch's agent expects, and beside it ours.
        "message": {
            "message": str(told),
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))},
        },
        "osdp": {part: getattr(told, part) for part in _PARTS} | {"is_fault": is_fault},
    }
    Path(path).write_text(json.dumps(data))


def _cause(error: ChildFailedError) -> Exception:
    """Return the failure that the others followed from.

    A rank that was killed comes first: what others told is that they lost it. Then bad input, then a
    death without a word, then faults. The agent itself ends the remaining ranks, by SIGTERM.
    """

    def weight(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        told = _told(failure)
        if failure.exitcode == -signal.SIGTERM:
            kind = 4
        elif told is None:
            kind = 0 if failure.exitcode < 0 else 2
        else:
            kind = 3 if told["is_fault"] else 1
        return kind, failure.timestamp, rank

    rank, failure = min(error.failures.items(), key=weight)
    told = _told(failure)
    if failure.exitcode == _BROKEN_PIPE:
        return BrokenPipeError()
    if told is None:
        return RankError(f"rank {rank} {_death(failure)}")
    parts = OsdpError(**{part: told[part] for part in _PARTS})
    return RankError(str(parts)) if told["is_fault"] else parts


def _told(failure: ProcessFailure) -> dict[str, Any] | None:
    """Return what a rank left in its error file."""
    data: Any = failure.error_file_data
    found = data.get("osdp") if isinstance(data, dict) else None
    return found if isinstance(found, dict) else None


def _death(failure: ProcessFailure) -> str:
    """Say how a rank died that left no error."""
    if failure.exitcode >= 0:
        return f"ended with exit status {failure.exitcode}; what it printed is above"
    name = failure.signal_name()
    advice = "; perhaps the machine ran out of memory (see dmesg)" if -failure.exitcode == signal.SIGKILL else ""
    return f"was killed by {name}{advice}"
