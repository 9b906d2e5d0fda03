"""scripts/emulated_cluster.py: its pure parts everywhere, clusters where root, ip and tc are there."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import pytest
from thoroughness import THOROUGH
from torch.distributed.run import get_args_parser

from scripts.emulation import commands, network
from scripts.emulation.cluster import environment
from scripts.emulation.errors import RefusalError
from scripts.emulation.job import cores_of_nodes, relay
from scripts.emulation.network import Links

ATTEMPTS = 10
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "emulated_cluster.py"
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(x)
text = f"rank {dist.get_rank()} of node {os.environ['GROUP_RANK']} on {os.uname().nodename}: {x.item()}\\n"
os.write(1, text.encode())  # at once: print writes in pieces, between which another rank's may come
dist.barrier()
dist.destroy_process_group()
"""


FORKED = () if THOROUGH else ("--run-path", "--start-method=fork")
"""Options with which ranks are forks of torchrun: they import nothing anew."""


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("200mbit", 200_000_000), ("2.5gbit", 2_500_000_000), ("100kbit", 100_000), ("1Gbit", 10**9), ("none", None)],
)
def test_rates(text: str, bits_per_s: int | None) -> None:
    assert network.parse_rate(text) == bits_per_s


@pytest.mark.parametrize("text", ["200mb", "200mbps", "200", "-1mbit", "0mbit", "99kbit", "101gbit", "1e3mbit"])
def test_bad_rates_are_refused(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["run", f"--rate={text}", "--", "true"]) == 2
    assert capfd.readouterr().err.startswith(f"emulated_cluster: not a rate that can be kept\n  got: {text}\n")


@pytest.mark.parametrize(("text", "delay_s"), [("0", 0.0), ("200us", 2e-4), ("0.5ms", 5e-4), ("1s", 1.0)])
def test_delays(text: str, delay_s: float) -> None:
    assert network.parse_delay(text) == pytest.approx(delay_s)


@pytest.mark.parametrize("text", ["1", "1m", "-1ms", "11s", ""])
def test_bad_delays_are_refused(text: str) -> None:
    with pytest.raises(RefusalError, match="not a delay"):
        network.parse_delay(text)


def test_cores_are_shared_out() -> None:
    assert cores_of_nodes(2, [0, 1, 2, 3, 6]) == [[0, 1], [2, 3]]
    assert cores_of_nodes(3, [4, 5]) == [[4], [5], [4]]


def test_addresses_as_text_are_in_the_order_of_the_nodes() -> None:
    """torchrun gives group ranks so."""
    addresses = [network.address(node) for node in range(network.MOST_NODES)]
    assert sorted(addresses) == addresses
    assert len(set(addresses)) == network.MOST_NODES


def test_torchrun_finds_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = environment(Links(3, 10**9, None, 0.0), 1)
    assert "http_proxy" not in words
    assert words["OMP_NUM_THREADS"] == "1"
    for key, value in words.items():
        monkeypatch.setenv(key, value)
    options = get_args_parser().parse_args(["--nproc_per_node=2", "train.py"])
    assert (options.nnodes, options.rdzv_backend, options.rdzv_id) == ("3", "c10d", f"emulated-{os.getpid()}")
    assert (options.rdzv_endpoint, options.rdzv_conf) == ("10.231.77.11:29400", "is_host=0")
    assert options.local_addr == "10.231.77.12"


def test_lines_stay_whole() -> None:
    target = io.BytesIO()
    relay(io.BytesIO(b"ab\nc\n\nd"), b"> ", target, Lock(), Event())
    assert target.getvalue() == b"> ab\n> c\n> \n> d\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "'run' needs a command"),
        (["check", "--", "true"], "'check' takes no command"),
        (["run", "--nodes", "65", "--", "true"], "not a number of nodes\n  got: 65\n  expected: 1 to 64"),
        (["run", "--timeout", "-1", "--", "true"], "not a time"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program, path: program)
    assert commands.main(arguments) == 2
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["run", "--", "true"], ["check"]])
def test_refused_without_root(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert commands.main(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith("emulated_cluster: a cluster can only be made by root\n  got: user id 1000\n")


def test_refused_without_iproute2(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program, path: None if program == "tc" else program)
    assert commands.main(["run", "--", "true"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("emulated_cluster: the program 'tc' is needed\n")
    assert "apt-get install iproute2" in error


@dataclass
class Tool:
    """The tool on this machine, with clusters of its own."""

    environment: dict[str, str]
    mark: str

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(SCRIPT), *arguments]

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment | variables,
            text=True,
            capture_output=True,
            timeout=50,
            stdin=subprocess.DEVNULL,
        )

    def begin(self, *arguments: str, lines: int) -> subprocess.Popen[str]:
        """Start the tool and return it when it has printed so many lines."""
        process = subprocess.Popen(
            self.command(*arguments), env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout
        for _ in range(lines):
            process.stdout.readline()
        return process

    def processes(self) -> list[int]:
        """Return the PIDs of all that the tool started, wherever it went."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def leaves_processes(self) -> list[int]:
        """Return those that are there after a moment: a killed tool's children are killed, but after it."""
        for _ in range(100):
            if not (found := self.processes()):
                return []
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def machine() -> None:
    """Skip where no cluster can be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if any(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None for program in ("ip", "tc")):
        pytest.skip("needs iproute2")
    first = subprocess.run([sys.executable, str(SCRIPT), "run", "--", "true"], capture_output=True, text=True)
    if "does not let us" in first.stderr or "this kernel" in first.stderr:
        pytest.skip(first.stderr)


@pytest.fixture
def tool(machine: None) -> Iterator[Tool]:
    """The tool; after the test nothing that it made may be left."""
    mark = f"EMULATED_TEST={uuid.uuid4()}"
    variables = dict(word.split("=") for word in (mark, "OMP_NUM_THREADS=1"))
    devices, shared = sorted(os.listdir("/sys/class/net")), mounts()
    tool = Tool({**os.environ, **variables}, mark)
    yield tool
    left = tool.leaves_processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert sorted(os.listdir("/sys/class/net")) == devices
    assert mounts() == shared


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def test_a_cluster_has_the_rates_asked_for(tool: Tool) -> None:
    """No link is ever faster; how near it comes to its rate is seen when nothing else keeps the cores busy."""
    asked = {("node0", "node0"): 100, ("node1", "node0"): 200, ("node0", "node1"): 200}
    best = dict.fromkeys(asked, 0.0)
    for _ in range(ATTEMPTS):
        done = tool("check", "--rate", "200mbit", "--intra-rate", "100mbit")
        assert done.returncode == 0, done.stderr
        measured = {(row[0], row[1]): float(row[3]) for row in map(str.split, done.stdout.splitlines()[1:])}
        assert all(measured[link] < 1.15 * rate for link, rate in asked.items())
        best = {link: max(rate, measured[link]) for link, rate in best.items()}
        if all(best[link] > 0.85 * rate for link, rate in asked.items()):
            return
    pytest.fail(f"no more than {best} Mbit/s in {ATTEMPTS} attempts")


def test_torchrun_needs_no_options_for_the_rendezvous(tool: Tool, tmp_path: Path) -> None:
    program = tmp_path / "all_reduce.py"
    program.write_text(ALL_REDUCE)
    of_a_node = 2 if THOROUGH else 1
    done = tool(
        "run",
        "--pin",
        "--timeout",
        "45",
        "--",
        sys.executable,
        "-m",
        "torch.distributed.run",
        *FORKED,
        f"--nproc_per_node={of_a_node}",
        str(program),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[node{node}] rank {node * of_a_node + rank} of node {node} on node{node}: {'11' * of_a_node}.0"
        for node in (0, 1)
        for rank in range(of_a_node)
    ]


def test_nodes_share_files_but_not_shared_memory(tool: Tool) -> None:
    look_up = "import socket; print(socket.gethostbyname('node1'))"
    files = "touch /dev/shm/$(hostname); ls /dev/shm; pwd"
    done = tool("run", "--", "sh", "-c", f'{files}; {sys.executable} -c "{look_up}"')
    expected = [f"[node{node}] {line}" for node in (0, 1) for line in (f"node{node}", os.getcwd(), "10.231.77.12")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert not Path("/dev/shm/node0").exists()


def test_the_status_is_that_of_the_first_failure(tool: Tool) -> None:
    """Node 1 fails; node 0, which would take an hour, is stopped."""
    done = tool("run", "--grace", "0.5", "--", "sh", "-c", "[ $NODE_RANK = 0 ] || exit 7; sleep 3600")
    assert done.returncode == 7
    assert "node1: exit status 7" in done.stderr
    assert "stopping the other nodes" in done.stderr


def test_others_may_end_by_themselves_after_a_failure(tool: Tool) -> None:
    done = tool("run", "--", "sh", "-c", "[ $NODE_RANK = 0 ] || exit 7; sleep 0.5; echo saved")
    assert (done.returncode, done.stdout) == (7, "[node0] saved\n")


def test_a_timeout_ends_what_will_not_end(tool: Tool) -> None:
    """Also what ignores SIGTERM, and what went to another session."""
    done = tool("run", "--timeout", "0.5", "--", "sh", "-c", "trap '' TERM; setsid sleep 3600 & sleep 3600")
    assert done.returncode == 124
    assert "--timeout 0.5 is over" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_tool_is_the_end_of_its_cluster(tool: Tool, number: signal.Signals) -> None:
    with tool.begin("run", "--", "sh", "-c", "setsid sleep 3600 & echo ready; sleep 3600", lines=2) as process:
        process.send_signal(number)
        _, told = process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), told


def test_what_a_command_leaves_running_ends_with_the_run(tool: Tool) -> None:
    done = tool("run", "--", "sh", "-c", "setsid sleep 3600 & echo ready")
    assert (done.returncode, done.stdout.count("ready")) == (0, 2)


def test_a_reader_that_goes_away_ends_the_run(tool: Tool) -> None:
    """As `| head` does."""
    with tool.begin("run", "--", "sh", "-c", "while echo tick; do sleep 0.1; done", lines=1) as process:
        assert process.stdout
        process.stdout.close()
        assert process.wait(timeout=20) == 128 + signal.SIGPIPE


def test_a_program_that_is_not_there(tool: Tool) -> None:
    done = tool("run", "--", "no-such-program")
    assert (done.returncode, done.stderr) == (
        127,
        "emulated_cluster: cannot run 'no-such-program': No such file or directory\n",
    )


def test_two_clusters_at_once_do_not_see_each_other(tool: Tool) -> None:
    """They have the same addresses, and here the same port."""
    listen = "import socket, time; socket.create_server(('', 29500)); print('ready', flush=True); time.sleep(1)"
    with tool.begin("run", "--", sys.executable, "-c", listen, lines=2) as process:
        second = tool("run", "--", sys.executable, "-c", listen)
        process.communicate()
    assert (process.returncode, second.returncode) == (0, 0), second.stderr


@pytest.mark.parametrize(("lacking", "text"), [("htb", "cannot shape with HTB"), ("netem", "it has no netem")])
def test_a_kernel_that_cannot_is_refused(tool: Tool, tmp_path: Path, lacking: str, text: str) -> None:
    """A stand-in for tc answers as it does on a kernel that lacks a discipline."""
    fake = tmp_path / "tc"
    answer = "echo 'Error: Specified qdisc kind is unknown.' >&2; exit 2"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *{lacking}*) {answer} ;; esac\n')
    fake.chmod(0o755)
    done = tool("run", "--delay", "1ms", "--", "true", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert f"{text}\n  got: Error: Specified qdisc kind is unknown.\n" in done.stderr
    assert "Traceback" not in done.stderr
