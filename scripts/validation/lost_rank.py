"""A rank that is killed between collectives is named by the other, by NCCL's watchdog or by gloo.

`-m validation.lost_rank DEVICE RESULT` is one of two ranks, of which the environment tells the number: no launcher
starts them, as one that loses a rank ends the others before these can say anything.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from osdp.training.process_group import joined
from runtime.failures.peer_faults import PeerLost, naming_faults
from validation.bounds import judged, outside
from validation.check import Finding, Place
from validation.processes import ROOT, own_environment

RANKS, LOST = 2, 1
STEPS, LAST_STEP = 10, 3
TIMEOUT_S = 40.0
"""Of the process group, from the start of both on."""
MOST_S = 2 * TIMEOUT_S
"""From the end of the lost rank to the other's error."""


def check(place: Place) -> Finding:
    """Run both ranks, and read what the one that is left says of the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**own_environment(), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = place.scratch / "lost-rank"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "validation.lost_rank", place.device, str(result)],
            cwd=ROOT,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    lost_output = output_of(ranks[LOST], MOST_S)
    ended_s = time.monotonic()
    output = output_of(ranks[1 - LOST], MOST_S)
    took_s = time.monotonic() - ended_s
    print(lost_output, output, sep="\n", flush=True)
    told = result.read_text() if result.exists() else ""
    complaints = outside("seconds to the error", took_s, 0, MOST_S)
    if ranks[LOST].returncode != -signal.SIGKILL or "killing itself" not in lost_output:
        complaints.append(f"rank {LOST} was not killed where it should be: {lost_output[-1000:]}")
    if f"rank {LOST}" not in told:
        complaints.append(f"the rank that is left does not name it: {told or output[-1000:]}")
    return judged(f"{told or 'nothing'}, after {took_s:.1f} s", complaints, {"took_s": took_s, "told": told})


def output_of(rank: subprocess.Popen[str], most_s: float) -> str:
    """Return what a rank printed when it has ended, or is ended after so long."""
    try:
        return rank.communicate(timeout=most_s)[0]
    except subprocess.TimeoutExpired:
        rank.kill()
        return rank.communicate()[0]


def main() -> None:
    """Sum numbers until a rank is gone."""
    device_type, result = sys.argv[1:]
    with joined(device_type, TIMEOUT_S) as ranks:
        value = torch.ones(1, device=ranks.device)
        for step in range(STEPS):
            if (ranks.rank, step) == (LOST, LAST_STEP):
                print(f"killing itself in step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                with naming_faults(f"step {step}", TIMEOUT_S):
                    dist.all_reduce(value)
                    value.item()  # it waits for the device
            except PeerLost as error:
                Path(result).write_text(error.what)
                os._exit(0)  # the group cannot be left in order any more


if __name__ == "__main__":
    main()
