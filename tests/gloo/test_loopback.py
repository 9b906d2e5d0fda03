"""Ranks of one machine are reached from this machine alone, and leave nothing in its temporary folder."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from programs import process_of, python
from ranks import children

from osdp.training.loopback import GLOO_INTERFACE
from runtime.state.checkpoint import latest

CHECKOUT = Path(__file__).resolve().parents[2]
ENDLESS = ("--steps", "1000000", "--global-batch", "8", "--device", "cpu", "--checkpoint-every", "2")
PATIENCE_S = 180.0
LOOPBACK, LISTENS = "0100007F", "0A"
"""127.0.0.1, and the state of a socket that waits for connections, as /proc/net/tcp has them."""


def listening(pid: int) -> list[str]:
    """Return the addresses at which a process waits for connections, in hexadecimal."""
    links = [descriptor.readlink().name for descriptor in Path(f"/proc/{pid}/fd").iterdir() if descriptor.is_symlink()]
    own = {name.removeprefix("socket:[").removesuffix("]") for name in links if name.startswith("socket:[")}
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    return [fields[1].partition(":")[0] for fields in lines if fields[3] == LISTENS and fields[9] in own]


def test_the_store_and_gloo_listen_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    """Run to a checkpoint, which all ranks have met for; then interrupt it, and look for folders."""
    checkpoints, temporary = tmp_path / "checkpoints", tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    environment.pop(GLOO_INTERFACE, None)
    command = [python(), "-m", "osdp", "train", *ENDLESS, "--checkpoint", str(checkpoints)]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end_s = time.monotonic() + PATIENCE_S
        while latest(checkpoints) is None:
            assert started.poll() is None, started.communicate()[1]
            assert time.monotonic() < end_s
            time.sleep(0.05)
        launcher = process_of(started.pid)
        ranks = [process_of(rank) for rank in children(launcher)]
        found = [listening(pid) for pid in (launcher, *ranks)]
        assert len(ranks) == 2
        assert found[0] == [LOOPBACK]
        assert {address for addresses in found for address in addresses} == {LOOPBACK}
        assert any(found[1:])  # gloo
        assert any(temporary.iterdir())
    finally:
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130
    assert [folder.name for folder in temporary.iterdir() if folder.name.startswith(("osdp", "torchelastic"))] == []
