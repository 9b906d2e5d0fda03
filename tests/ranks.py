"""Runs a function on N ranks that speak gloo: `run_ranks(function, 4)` returns four results.

Every call forks fresh processes off a server that has imported torch, which takes a few hundredths
of a second instead of seconds and leaves no state from one test to the next.  As under torchrun,
the store lives in the process that starts the ranks, so it outlives any of them, and the usual
variables (RANK, WORLD_SIZE, LOCAL_RANK, ...) are set.

A rank that has its result stays alive until all have theirs: nobody sees a peer leave that
succeeded.  At the first failure the others are killed, and the traceback of the rank that failed
first is shown.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import torch
import torch.distributed as dist

PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._composable.replicate",
    "torch._dynamo",
    "numpy",
    "pytest",
    "hypothesis",
    "osdp.api",
    "osdp.training.rank_main",
)
"""What every rank imports, and would for 0.6 s each time."""
GRACE_S = 0.3
"""How long a failure waits for earlier ones: peers of a dead rank may report before it is found dead."""


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that are still there."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class RankError(AssertionError):
    """A rank raised, died or did not finish."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} {what}")


@dataclass(frozen=True)
class Outcome:
    """What a rank sends back."""

    value: Any
    """Result of the function."""
    error: str
    """Traceback, empty if it returned."""
    at_s: float
    """When, by the clock that all processes share."""


@dataclass(frozen=True)
class Task:
    """What a rank gets."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    environment: dict[str, str]
    joins: bool
    """Whether the rank joins the default process group before the function is called."""
    collective_timeout_s: float
    stacks: Path
    """File that SIGUSR1 makes it write its threads' stacks to."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    ranks_per_node: int | None = None,
    joins: bool = True,
    lost: Collection[int] = (),
) -> list[Any]:
    """Call `function(rank, *args)` on every rank and return the results in order of rank.

    Args:
        function: a function of a module, so that it can be sent by name.
        world_size: number of ranks.
        args: what else the function gets; must pickle, as must the result.
        timeout_s: after so long all are killed.
        collective_timeout_s: timeout of the process group; by default 0.8 of `timeout_s`.
        ranks_per_node: emulates nodes: sets LOCAL_WORLD_SIZE, LOCAL_RANK and GROUP_RANK by it.
        joins: False if the function itself calls `init_process_group`.
        lost: ranks that are meant to die or hang; nobody waits for them, their result is None.

    Raises:
        RankError: at the first failure, with that rank's traceback.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = _server()
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                environment = _environment(rank, world_size, ranks_per_node or world_size, store.port)
                if lost:  # none dies while others still connect to it
                    environment["TORCH_DIST_INIT_BARRIER"] = "1"
                task = Task(
                    function,
                    args,
                    rank,
                    world_size,
                    environment,
                    joins,
                    collective_timeout_s or 0.8 * timeout_s,
                    Path(folder, str(rank)),
                )
                process = context.Process(target=_rank_main, args=(there, pickle.dumps(task)))
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            awaited = [rank for rank in range(world_size) if rank not in lost]
            outcomes = _collect(processes, pipes, awaited, timeout_s, Path(folder))
        finally:
            for process in processes:
                process.kill()
            for process, pipe in zip(processes, pipes, strict=True):
                process.join()
                pipe.close()
    return [outcomes[rank].value if rank in outcomes else None for rank in range(world_size)]


def _server() -> multiprocessing.context.ForkServerContext:
    """Start what ranks fork from, unless it runs or workers share one."""
    context = multiprocessing.get_context("forkserver")
    folder = os.environ.get(programs.FOLDER)  # None: outside of a test run, as in benchmarks
    if folder is not None and (shared := Path(folder, programs.RANKS)).exists():
        server = forkserver._forkserver  # type: ignore[attr-defined]
        if server._forkserver_address is None:
            server._forkserver_address = str(shared)
            server._forkserver_alive_fd = os.open(
                os.devnull, os.O_RDONLY
            )  # every rank gets one; this server needs none
            server.ensure_running = lambda: None
        return context
    context.set_forkserver_preload([*PRELOADED, *([] if programs.has_gpu() else ["warm_ranks"])])
    # Python 3.11 does not give it sys.path, and skips what it cannot import without a word.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    return context


def _environment(rank: int, world_size: int, ranks_per_node: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for a rank whose store listens on a port of this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", ""),
    }


def _collect(
    processes: list[ForkServerProcess], pipes: list[Connection], awaited: list[int], timeout_s: float, folder: Path
) -> dict[int, Outcome]:
    """Return the awaited outcomes, or raise for the rank that failed first."""
    outcomes: dict[int, Outcome] = {}
    end_s = time.monotonic() + timeout_s
    while missing := [rank for rank in awaited if rank not in outcomes]:
        if not wait([pipes[rank] for rank in missing], max(0.0, end_s - time.monotonic())):
            raise RankError(missing[0], f"did not finish in {timeout_s:g} s\n{_stacks(processes, missing, folder)}")
        failed = _receive(pipes, missing, outcomes)
        if failed:
            time.sleep(GRACE_S)
            failed |= _receive(pipes, [rank for rank in missing if rank not in outcomes.keys() | failed], outcomes)
            first = min(failed, key=lambda rank: outcomes[rank].at_s if rank in outcomes else 0.0)
            if first in outcomes:
                raise RankError(first, f"raised\n{outcomes[first].error}")
            processes[first].join()
            raise RankError(first, f"died without a word, exit code {processes[first].exitcode}")
    return outcomes


def _receive(pipes: list[Connection], ranks: list[int], outcomes: dict[int, Outcome]) -> set[int]:
    """Take what has arrived. Return the ranks that raised or died; the dead have no outcome."""
    failed = set()
    ready = wait([pipes[rank] for rank in ranks], 0.0)
    for rank in ranks:
        if pipes[rank] not in ready:
            continue
        try:
            outcomes[rank] = pickle.loads(pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            failed.add(rank)
        else:
            if outcomes[rank].error:
                failed.add(rank)
    return failed


def _stacks(processes: list[ForkServerProcess], ranks: list[int], folder: Path) -> str:
    """Return where the ranks are, thread by thread."""
    for rank in ranks:
        pid = processes[rank].pid
        if pid is not None and processes[rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
    time.sleep(GRACE_S)
    files = {rank: folder / str(rank) for rank in ranks}
    return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists())


def _rank_main(pipe: Connection, pickled_task: bytes) -> None:
    """Be a rank: send the outcome and stay until the starter has all of them."""
    try:
        task: Task = pickle.loads(pickled_task)
        with open(task.stacks, "w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks)
            value = _call(task)
            message = pickle.dumps(Outcome(value, "", time.monotonic()))
    except BaseException:
        message = pickle.dumps(Outcome(None, traceback.format_exc(), time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(message)
    pipe.poll(None)  # until the starter closes its end
    os._exit(0)


def _call(task: Task) -> Any:
    os.environ.update(task.environment)
    torch.set_num_threads(1)
    if task.joins:
        dist.init_process_group("gloo", timeout=timedelta(seconds=task.collective_timeout_s))
    return task.function(task.rank, *task.args)
