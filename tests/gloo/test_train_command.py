"""`osdp train` as a process: what it prints, its exit status, and that no rank outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from programs import REAL_RANK, process_of, python
from ranks import children
from thoroughness import some

from runtime.state.checkpoint import latest

CHECKOUT = Path(__file__).resolve().parents[2]
COMMAND = ("-m", "osdp", "train")
SHORT = ("--global-batch", "8", "--device", "cpu", "--log-every", "1")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
PATIENCE_S = 180.0


def train(*arguments: str, real: bool = False) -> subprocess.CompletedProcess[str]:
    command, environment = [python(), *COMMAND, *SHORT, *arguments], ENVIRONMENT | ({REAL_RANK: "0"} if real else {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_and_wait_for_a_checkpoint(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a run without end, wait for its first checkpoint, return it and its ranks."""
    arguments = ("--steps", "1000000", "--checkpoint", str(folder), "--checkpoint-every", "2")
    command = [python(), *COMMAND, *SHORT, *arguments]
    started = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end_s = time.monotonic() + PATIENCE_S
    while latest(folder) is None:
        assert started.poll() is None, started.communicate()[1]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    ranks = [process_of(rank) for rank in children(process_of(started.pid))]
    assert len(ranks) == 2
    return started, ranks


def test_a_short_run_prints_what_it_measured() -> None:
    done = train("--steps", "4", real=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("OSDP trains gpt2-tiny (241,024 parameters) on 2 ranks (1 x 2), cpu (gloo): addition")
    assert [line.split()[1] for line in lines if line.startswith("step ")][-4:] == ["1/4", "2/4", "3/4", "4/4"]
    assert sum("device memory utilization: " in line and " MB / 512 MB (measured" in line for line in lines) == 1
    assert sum("overall system throughput: " in line and " seq/sec (measured" in line for line in lines) == 1
    assert lines[-1].startswith("sums held out of training: ")


def test_an_error_on_the_ranks_is_told_once() -> None:
    done = train("--steps", "4", "--mem", "2MB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("osdp: error: no plan fits the memory limit\n")
    assert done.stderr.count("no plan fits") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], 2))
def test_a_signal_leaves_no_rank_and_a_whole_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    started, ranks = start_and_wait_for_a_checkpoint(tmp_path)
    started.send_signal(number)
    _, told = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130
    assert [rank for rank in ranks if is_running(rank)] == []
    newest = latest(tmp_path)
    assert newest is not None
    assert told == f"osdp: note: {newest} is complete: --resume auto continues from it\ninterrupted\n"


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    started, ranks = start_and_wait_for_a_checkpoint(tmp_path)
    os.kill(ranks[1], signal.SIGKILL)
    _, told = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 1
    assert told == "osdp: error: rank 1 was killed by SIGKILL; perhaps the machine ran out of memory (see dmesg)\n"
    assert not is_running(ranks[0])


def test_two_nodes_meet() -> None:
    """Two commands on one machine, with a rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = (*SHORT, "--steps", "2", "--ranks-per-node", "1", "--nnodes", "2", "--rdzv-endpoint", endpoint)
    nodes = [
        subprocess.Popen(
            [python(), *COMMAND, *arguments, "--node-rank", str(node)],
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]
    (first, first_told), (second, second_told) = (node.communicate(timeout=PATIENCE_S) for node in nodes)
    assert (nodes[0].returncode, nodes[1].returncode, first_told, second_told) == (0, 0, "", "")
    assert "on 2 ranks (2 x 1)" in first
    assert second == ""  # rank 0 reports


def test_a_place_to_meet_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        done = train("--nnodes", "2", "--ranks-per-node", "1", "--rdzv-endpoint", endpoint, "--node-rank", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("osdp: error: node 0 cannot listen at the rendezvous endpoint\n")
    assert endpoint in done.stderr


def test_several_nodes_need_a_place_to_meet() -> None:
    done = train("--nnodes", "2")
    assert done.returncode == 2
    assert "several nodes need a rendezvous endpoint" in done.stderr
