"""What forks of `programs.py`'s server do so that workers of a test run, and their ranks, fork from them in turn.

Else each worker would import for 4 s of processor time what all import, and each in a fresh clone rewrite the
assertions of all test files, which takes 6 s; and each would have a server of its own for its ranks, for another 6 s.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import garbage
import huge_pages
import pytest


def collect(arguments: Sequence[str]) -> None:
    """Import test files as pytest does: workers find them imported, their assertions rewritten."""
    path = list(sys.path)
    pytest.main(["--collect-only", "-qq", "--capture=no", *arguments])
    sys.stdout.flush()  # else every fork would write it again, to what it is asked to speak to
    sys.path[:] = path
    importlib.import_module("warm_graphs")
    for name in ("transformers.modeling_utils", "peft"):  # 2 s in each of a dozen processes
        with suppress(ImportError):
            importlib.import_module(name)
    garbage.set_aside()
    huge_pages.collapse()


def start_rank_server(address: Path) -> None:
    """Fork the server of `multiprocessing`, which ends with this process and the workers that are forked from it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    reading, writing = os.pipe()
    if os.fork():
        listener.close()
        os.close(reading)  # the other end is open as long as this process and its forks live
        return
    os.close(writing)
    try:
        importlib.import_module("warm_ranks")
        forkserver.main(listener.detach(), reading, None)
    finally:
        os._exit(0)
