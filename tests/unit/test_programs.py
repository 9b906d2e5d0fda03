"""The server that programs of the tests are forked from outlives what its clients do, and is replaced if it ends."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import programs
import pytest

pytestmark = pytest.mark.skipif(programs.has_gpu(), reason="programs are not forked from a server where there is a GPU")


def listener_at(address: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen()
    return listener


def test_a_client_that_dies_before_its_request() -> None:
    python = programs.python()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(os.path.join(os.environ[programs.FOLDER], "python.socket"))
    done = subprocess.run([python, "-c", "print(6 * 7)"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_a_server_that_ended_is_told_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, started = tmp_path / "python.socket", []

    def start(command: list[object], **options: Any) -> None:
        started.append(listener_at(address))

    monkeypatch.setenv(programs.FOLDER, str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", start)
    listener_at(address).close()  # which leaves the socket in the folder
    (tmp_path / "log").write_text("why it ended")
    with pytest.warns(UserWarning, match="why it ended"):
        assert programs.python() == str(tmp_path / "python")
    programs.python()
    assert len(started) == 1
    started[0].close()
