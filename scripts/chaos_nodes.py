"""Kills, stops and cuts off emulated nodes under `osdp train --restarts --nodes` at random; losses must be as without.

    python scripts/chaos_nodes.py --minutes 15 [--seed N]

A tiny model trains on three nodes of one CPU rank each, which `scripts/emulation` makes on one Linux machine (root and
iproute2 are needed).  Nodes that were killed are started again while the others train, or are not.  A round ends when
the run has done its steps; all losses must be those of a run that was left alone, to rounding.  Exit status 1, and the
seed, otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "scripts")]

from chaos import MODEL, Lost, environment_of, processes  # noqa: E402
from emulation.cluster import Cluster, emulated  # noqa: E402
from emulation.network import Links, address  # noqa: E402

NODES, STEPS, EPISODES, PATIENCE_S = 3, 40, 3, 240.0
TOLERANCE = 1e-3
"""Of losses, relative: sums over other numbers of ranks are rounded differently, and five digits are printed."""
CONFIG = {"schema": "osdp.train/1", "model": "slow:build", "steps": STEPS, "batch": 2, "global_batch": 12}
CONFIG |= {"clip": 1.0, "device": "cpu"}


class Job:
    """A run on all nodes of a cluster, in a folder that they share."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.starts = cluster, folder, 0
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        folder.mkdir()
        (folder / "slow.py").write_text(MODEL)
        (folder / "run.yaml").write_text(json.dumps(CONFIG))

    def start(self, node: int) -> None:
        """Start the launcher of a node; those of other nodes may run already."""
        self.starts += 1
        command = [sys.executable, "-m", "osdp", "train", "run.yaml", "--log-every", "1", "--timeout-s", "10"]
        command += ["--checkpoint", "saved", "--checkpoint-every", "4", "--restarts", "100", "--ranks-per-node", "1"]
        command += ["--nodes", f"1:{NODES}", "--rdzv-endpoint", f"{address(0)}:29500"]
        with open(self.folder / f"{self.starts:03}-node{node}", "wb") as output, entered(self.folder):
            os.environ |= {"PYTHONPATH": str(CHECKOUT), "OSDP_CHAOS": str(self.folder)}
            self.launchers[node] = self.cluster.start(node, command, output=output.fileno())

    def start_all(self) -> None:
        """Start the nodes, the one that keeps the store first."""
        for node in range(NODES):
            if node not in self.launchers or self.launchers[node].poll() is not None:
                self.start(node)
                time.sleep(0.5)

    def processes_of(self, node: int, *, ranks_only: bool = False) -> list[int]:
        found = []
        for pid in processes():
            values = dict(item.partition("=")[::2] for item in environment_of(pid))
            if values.get("OSDP_CHAOS") == str(self.folder) and values.get("NODE_RANK") == str(node):
                found += [pid] if not ranks_only or "LOCAL_RANK" in values else []
        return found

    def told(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*-node*")))

    def losses(self) -> list[tuple[int, float]]:
        """Return what was printed of all steps, also of those that were run again."""
        found = re.findall(r"^step +(\d+)/\d+ +loss (\S+)", self.told(), re.MULTILINE)
        return [(int(step), float(loss)) for step, loss in found]

    def await_steps(self, more: int) -> bool:
        """Wait for so many steps more, also the same again; whether some launcher runs then."""
        count, end_s = len(self.losses()) + more, time.monotonic() + PATIENCE_S
        while len(self.losses()) < count and (running := self.running()):
            if time.monotonic() > end_s:
                raise Lost(f"no step in {PATIENCE_S:.0f} s on nodes {running}: {self.told()[-2000:]}")
            time.sleep(0.1)
        return bool(self.running())

    def running(self) -> list[int]:
        return [node for node, launcher in self.launchers.items() if launcher.poll() is None]

    def finish(self) -> None:
        """Let the run do its steps, and start it again where it ended before."""
        for _ in range(5):
            while self.await_steps(1):
                pass
            if max((step for step, _ in self.losses()), default=0) == STEPS:
                return
            self.start_all()
        raise Lost(f"it does not come to its end: {self.told()[-2000:]}")


@contextmanager
def entered(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class Chaos:
    """The disturbances. Each returns what it was."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def disturb(self, job: Job) -> str:
        kind = self.random.choice(["killed", "killed and started again", "rank killed", "rank stopped", "cut off"])
        node = self.random.randrange(NODES)
        if node == 0 and kind in ("killed", "cut off"):
            kind = "killed and started again"  # It keeps the store: the job ends on all nodes.
        if kind == "rank stopped" and len(job.running()) == 1:
            kind = "rank killed"  # One that is alone is missed by nobody.
        if kind.startswith("rank"):
            self.signal(job.processes_of(node, ranks_only=True), signal.SIGKILL if "kill" in kind else signal.SIGSTOP)
            return f"{kind} on {self.name(node)}"
        if kind == "cut off":
            job.cluster.start(node, ["ip", "link", "set", "eth0", "down"]).wait()
            time.sleep(self.random.uniform(1.0, 25.0))
            self.signal(job.processes_of(node), signal.SIGKILL)
            job.cluster.start(node, ["ip", "link", "set", "eth0", "up"]).wait()
            return f"{self.name(node)} cut off, then killed"
        self.signal(job.processes_of(node), signal.SIGKILL)
        if kind.endswith("again"):
            time.sleep(self.random.uniform(0.0, 20.0))
            job.start(node)
        return f"{self.name(node)} {kind}"

    def name(self, node: int) -> str:
        return "the node with the store" if node == 0 else "a node"

    def signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def compare(found: list[tuple[int, float]], alone: dict[int, float]) -> None:
    """Raise Lost if a loss is not that of the undisturbed run."""
    for step, loss in found:
        if abs(loss - alone[step]) > TOLERANCE * abs(alone[step]):
            raise Lost(f"step {step} has the loss {loss} in place of {alone[step]}")
    if missing := alone.keys() - dict(found).keys():
        raise Lost(f"steps {sorted(missing)} were never printed")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=15)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = options.parse_args()
    chaos, started_s, tried, restarts = Chaos(given.seed), time.monotonic(), Counter[str](), 0
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="osdp-chaos-", ignore_cleanup_errors=True) as text:
        try:
            with emulated(Links(NODES, None, None, 0.0)) as cluster:
                job = Job(cluster, Path(text, "alone"))
                job.start_all()
                job.finish()
                alone = dict(job.losses())
                for number in range(10**6):
                    job = Job(cluster, Path(text, f"round-{number}"))
                    job.start_all()
                    for _ in range(EPISODES):
                        if not job.await_steps(chaos.random.randint(1, 12)) or chaos.random.random() < 0.5:
                            job.start_all()  # Those that are gone come back, and join.
                            job.await_steps(1)
                        what = chaos.disturb(job)
                        tried[what] += 1
                        print(f"after step {max(dict(job.losses()), default=0)}: {what}", flush=True)
                    job.finish()
                    compare(job.losses(), alone)
                    restarts += len(set(re.findall(r"^restart (\d+): continues", job.told(), re.MULTILINE)))
                    print(f"round {number}: final loss {dict(job.losses())[STEPS]}, alone {alone[STEPS]}", flush=True)
                    if time.monotonic() >= started_s + 60 * given.minutes:
                        break
        except (Lost, OSError, subprocess.SubprocessError) as error:
            print(f"LOST (seed {given.seed}): {error or type(error).__name__}")
            return 1
    print("tried: " + ", ".join(f"{name} {count}" for name, count in sorted(tried.items())))
    print(f"{number + 1} rounds, {restarts} restarts, {time.monotonic() - started_s:.0f} s; nothing was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
