"""Runs Python programs as forks of one server that holds torch: a start takes milliseconds in place of seconds.

`python()` returns the path of an executable that takes the place of `sys.executable`: `-m MODULE`, `-c CODE`
and `SCRIPT`, each with arguments and perhaps `-P` before it.  It passes its arguments, environment, folder and standard
streams to the server, which forks; it passes on signals, and ends as the program ends.  A program that starts Python
by `sys.executable`, as torchrun starts its ranks, starts forks in turn.  Any other option of Python starts Python
itself, and so does the rank that `REAL_RANK` names.

All workers of a test run share the server, which is started when first needed and ends with the run.  Where there are
several workers, they and their ranks are forks too, of a fork of the server that has collected (`warm_workers.py`).
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import garbage
import huge_pages

FOLDER = "OSDP_TEST_PROGRAMS"
"""Environment variable with the folder of the server's files, which the test run makes."""
REAL_RANK = "OSDP_TEST_REAL_RANK"
"""Environment variable with the rank that starts as a process of its own, and imports anew what it needs."""
PRELOADED = (
    "fairscale.nn",
    "matplotlib.pyplot",
    "multiprocessing.spawn",
    "osdp.api",
    "osdp.cli.commands.plan",
    "osdp.training.rank_main",
    "pydantic.functional_validators",
    "pydantic.type_adapter",
    "runtime.apply_schedule",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.launcher.api",
    "torch.profiler",
    "torch.utils.tensorboard",
    "torch._dynamo",
)
RANKS = "ranks.socket"
"""File in the folder where the server of ranks listens."""
START_S = 120.0
"""How long the server has to start."""
REQUEST_S = 10.0
"""How long a client has to send its request, for others wait."""


def make_folder() -> str:
    """Make the folder; its server ends with this process, or when the folder is gone."""
    return tempfile.mkdtemp(prefix=f"osdp-tests-{os.getpid()}-")


@cache
def has_gpu() -> bool:
    """Whether programs find a GPU: a server that warms up would initialise CUDA, which its forks then could not use."""
    import torch

    return torch.cuda.is_available()


def python() -> str:
    """Return the executable, with a server behind it unless there is a GPU."""
    return sys.executable if has_gpu() else _server_behind("python")


def worker_python(collected: Sequence[str]) -> str:
    """Return one that starts workers of the test run, which collects these files; ranks fork beside them."""
    return _server_behind("worker", *collected)


def _server_behind(name: str, *collected: str) -> str:
    """Return an executable whose server listens at a socket of its name, started unless it runs."""
    folder, source = Path(os.environ[FOLDER]), Path(__file__).resolve()
    executable, address = folder / name, folder / f"{name}.socket"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _answers(address):
            if address.exists():
                address.unlink()
                warnings.warn(
                    f"the server of programs ended, and starts anew: {(folder / 'log').read_text()}", stacklevel=3
                )
            with open(folder / "log", "w") as log:
                command = [sys.executable, source, folder, *collected]
                server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            end_s = time.monotonic() + START_S
            while not address.exists():
                assert server.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < end_s, (folder / "log").read_text()
                time.sleep(0.05)
        if not executable.exists():
            client = source.with_name("program_client.py")
            executable.write_text(
                f'#!/bin/sh\nexec "{sys.executable}" -IS "{client}" "{address}" "{sys.executable}" "$@"\n'
            )
            executable.chmod(0o755)
    return str(executable)


def _answers(address: Path) -> bool:
    """Return whether a server listens there: one that was killed leaves its socket behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        return client.connect_ex(str(address)) == 0


def process_of(pid: int) -> int:
    """Return the process that runs the program of an executable's process."""
    return int(Path(os.environ[FOLDER], str(pid)).read_text())


def main(folder: Path, collected: Sequence[str]) -> None:
    """Import and do what programs would; then fork them and, if there are files to collect, workers and ranks."""
    os.setsid()  # an interrupted test run ends its programs before their server
    for name in PRELOADED:
        importlib.import_module(name)
    _warm()
    garbage.set_aside()
    if collected and os.fork() == 0:
        warm_workers = importlib.import_module("warm_workers")
        warm_workers.collect(collected)
        warm_workers.start_rank_server(folder / RANKS)
        serve(folder, "worker", sys.executable)
    huge_pages.collapse()
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [entry for entry in sys.path if entry not in own]
    serve(folder, "python", str(folder / "python"))


def serve(folder: Path, name: str, executable: str) -> NoReturn:
    """Fork programs, whose `sys.executable` is given, until the folder is gone, or the process that made it."""
    maker = Path("/proc", folder.name.split("-")[2])
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starting = folder / f"{name}.starting"
    listener.bind(str(starting))
    listener.listen(64)
    starting.rename(folder / f"{name}.socket")
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    watched.register(reading, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    while folder.exists() and maker.exists():
        for key, _ in watched.select(1.0):
            if key.fileobj is listener:
                client, _ = listener.accept()
                client.settimeout(REQUEST_S)
                try:
                    message, files, _, _ = socket.recv_fds(client, 2**20, 3)
                except OSError:
                    message = b""
                if not message:  # killed before it asked, as torchrun kills ranks that are just starting
                    client.close()
                    continue
                request = json.loads(message)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (reading, writing):
                        os.close(descriptor)
                    for connection in (listener, client, watched, *clients.values()):
                        connection.close()
                    _be(request, files, executable)
                for descriptor in files:
                    os.close(descriptor)
                (folder / str(request["pid"])).write_text(str(pid))
                clients[pid] = client
                watched.register(client, selectors.EVENT_READ, pid)
                with suppress(OSError):
                    client.send(str(pid).encode())
            elif key.data:  # the client is gone, killed perhaps
                watched.unregister(key.fileobj)
                with suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
            else:
                os.read(reading, 4096)
        for pid in list(clients):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                client = clients.pop(pid)
                with suppress(KeyError):
                    watched.unregister(client)
                with suppress(OSError):
                    client.send(str(status).encode())
                client.close()
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _warm() -> None:
    """Do once what nearly every program would do first, as `warm_ranks.py` does for ranks: fill caches of PyTorch."""
    import quick_torch
    import torch
    import traced_once
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from osdp.cli.app import command
    from osdp.models.config import GPT2Config
    from osdp.models.gpt2 import GPT2
    from osdp.models.user_factory import source_of
    from osdp.planning.clusters import load_cluster
    from osdp.planning.request import Request, plan_graph
    from planner.pins import parse_pin
    from profiler.trace.trace import trace_model
    from runtime.compile_plan import compile_plan
    from runtime.observe.dry_run import Script, dry_run

    command()
    quick_torch.install()
    traced_once.install()
    torch.set_num_threads(1)  # threads of the server would not be in its forks
    state, config = torch.get_rng_state(), GPT2Config(29, 8, hidden_size=12, layers=1, heads=2)
    source, cluster = source_of(lambda: GPT2(config), "warm", None, None), load_cluster("cpu-gloo", 1, 2)
    graph = trace_model(source)
    garbage.set_aside()
    for strategy in ("replicate", "shard", "owner"):
        plan = plan_graph(graph, cluster, Request(1 << 30, micro_batch=2, pins=(parse_pin(f"*={strategy}"),))).plan
        script = Script(source.build, source.example_inputs, lambda output: output, "adam", 2)
        dry_run(script, compile_plan(plan, graph, cluster))
    torch.set_rng_state(state)
    # torchrun asks at each of its steps, and by `inspect.stack` that takes it a second of processor time in all.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False  # operators that libraries define end with the process


def _be(request: dict[str, object], files: list[int], executable: str) -> None:
    """Be a program, to its end."""
    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
            os.close(descriptor)
        environment = request["environment"]
        assert isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # which was found by the environment of the server
        os.chdir(str(request["folder"]))
        if environment.get("PYTHONUNBUFFERED"):
            for stream in (sys.stdout, sys.stderr):
                assert isinstance(stream, io.TextIOWrapper)
                stream.reconfigure(write_through=True)
        import torch

        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        sys.executable = executable
        arguments = request["arguments"]
        assert isinstance(arguments, list)
        status = _run(arguments, [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _run(arguments: list[str], path: list[str]) -> int:
    """Run a program as Python does; return its exit status."""
    is_safe = arguments[0] == "-P"  # nothing before PYTHONPATH
    what, *others = arguments[is_safe:]
    try:
        if what == "-m":
            sys.argv[:] = ["-m", *others[1:]]
            sys.path[:0] = [*([] if is_safe else [os.getcwd()]), *path]
            runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.argv[:] = ["-c", *others[1:]]
            sys.path[:0] = [*([] if is_safe else [""]), *path]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__dict__["__builtins__"] = builtins
            exec(compile(others[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv[:] = arguments[is_safe:]
            sys.path[:0] = [*([] if is_safe else [str(Path(what).resolve().parent)]), *path]
            runpy.run_path(what, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
