"""Kills, stops and fills disks under `osdp train` at random, and checks that no step and no checkpoint is lost.

    python scripts/chaos.py --minutes 15 [--seed N]

A tiny model trains on two CPU ranks, under FSDP, a plan of mixed strategies, and ODC.  Each round is a run that first
is left alone, and then is disturbed until it has done its steps; its losses must be the same.  Exit status 1, and the
seed, otherwise.  Needs Linux, and nothing beside OSDP.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from profiler.errors import OsdpError  # noqa: E402
from runtime.state.checkpoint_files import check_contents, check_sizes, latest, whole_steps  # noqa: E402
from runtime.state.checkpoint_manifest import read_manifest  # noqa: E402

STEPS, EVERY, STEP_S, EPISODES = 60, 4, 0.12, 3
TIMEOUT_S, PATIENCE_S = 15, 180.0
MODEL = f"""
import time
from osdp.zoo import load_model

def build():
    model = load_model("gpt2-tiny").build()

    def before(module, args):
        if module.training and not args[0].is_meta:
            time.sleep({STEP_S})

    model.register_forward_pre_hook(before)
    return model
"""
CONFIG = {"schema": "osdp.train/1", "model": "slow:build", "steps": STEPS, "batch": 4, "clip": 1.0, "device": "cpu"}
MIXTURE = ("--pin", "*=replicate", "--pin", "blocks.*.mlp=shard")
ODC = ("--pin", "*=odc:2")


class Lost(Exception):  # noqa: N818 - what is found, not a mistake
    """What must not be lost is, or something did not end as it must."""


@dataclass
class Run:
    """One job, and the folder in which it is."""

    folder: Path
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.newest = 0
        """Step of the newest checkpoint that was reported or found."""

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    def start(self, *more: str, limit_bytes: int | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "osdp", "train", "run.yaml", "--log-every", "1", *self.arguments, *more]
        command += ["--checkpoint", "saved", "--checkpoint-every", str(EVERY), "--timeout-s", str(TIMEOUT_S)]
        if limit_bytes is not None:  # Files of at most so many bytes: what a full disk or a quota does to a checkpoint.
            command = [sys.executable, "-c", LIMITED, str(limit_bytes), *command]
        environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, stdout=out, stderr=err)

    def told(self) -> str:
        return (self.folder / "err").read_text()

    def printed(self) -> str:
        return (self.folder / "out").read_text()

    def await_step(self, process: subprocess.Popen[str], steps: int) -> bool:
        """Wait until a start has done so many steps; whether it still runs then."""
        end_s = time.monotonic() + PATIENCE_S
        while len(re.findall(r"^step +\d+/", self.printed(), re.MULTILINE)) < steps:
            if process.poll() is not None:
                return False
            if time.monotonic() > end_s:
                raise Lost(f"no step in {PATIENCE_S:.0f} s: {self.told()}")
            time.sleep(0.02)
        return process.poll() is None

    def end(self, process: subprocess.Popen[str], *expected: int) -> int:
        """Wait for the end of a start, and take note of its losses; its exit status must be one of `expected`."""
        try:
            status = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Lost(f"it did not end in {PATIENCE_S:.0f} s") from None
        self.check_left(process.pid)
        for step, loss in re.findall(r"^step +(\d+)/\d+ +loss (\S+)", self.printed(), re.MULTILINE):
            if self.losses.setdefault(int(step), loss) != loss:
                raise Lost(f"step {step} had the loss {self.losses[int(step)]}, and now has {loss}")
        self.check_checkpoints()
        if status not in expected:
            raise Lost(f"exit status {status} in place of {' or '.join(map(str, expected))}: {self.told()}")
        if "Traceback" in self.told():
            raise Lost(f"a traceback: {self.told()}")
        return status

    def check_left(self, launcher: int) -> None:
        """Raise Lost if ranks outlive their launcher."""
        end_s = time.monotonic() + 10
        while left := [pid for pid in processes() if f"OSDP_CHAOS={self.folder}" in environment_of(pid)]:
            if time.monotonic() > end_s:
                raise Lost(f"processes {left} are left of launcher {launcher}")
            time.sleep(0.1)

    def check_checkpoints(self) -> None:
        """Raise Lost if a checkpoint is damaged, or one that was reported is gone with none after it."""
        for path in whole_steps(self.saved):
            try:
                manifest = read_manifest(path)
                check_sizes(path, manifest)
                check_contents(path, manifest, manifest.files)
            except OsdpError as error:
                raise Lost(f"{path.name} is damaged: {error}") from None
        reported = [int(step) for step in re.findall(r"^checkpoint .*step-(\d+)$", self.printed(), re.MULTILINE)]
        self.newest = max([self.newest, *reported])
        newest = latest(self.saved)
        found = int(newest.name.removeprefix("step-")) if newest else 0
        if found < self.newest:
            raise Lost(f"the newest checkpoint is of step {found}, and one of step {self.newest} was reported")
        self.newest = found


LIMITED = """
import os, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def environment_of(pid: int) -> list[str]:
    """Return the environment of a process that is not a zombie; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def ranks_of(run: Run) -> list[int]:
    """Return the processes of the ranks, in order."""
    found = {}
    for pid in processes():
        values = dict(item.partition("=")[::2] for item in environment_of(pid))
        if values.get("OSDP_CHAOS") == str(run.folder) and "LOCAL_RANK" in values:
            found[int(values["LOCAL_RANK"])] = pid
    return [found[rank] for rank in sorted(found)]


class Chaos:
    """The disturbances, each of which leaves a run that can be continued."""

    def __init__(self, seed: int) -> None:
        self.random, self.tried = random.Random(seed), Counter[str]()

    def moment(self) -> int:
        """Return how many steps to wait for."""
        return self.random.randint(1, 9)

    def victim(self, run: Run) -> int:
        # Within a step, or within the writing of a checkpoint.
        time.sleep(self.random.random() * 3 * STEP_S)
        ranks = ranks_of(run)
        if not ranks:
            raise ProcessLookupError
        return self.random.choice(ranks)

    def a_killed_rank(self, run: Run) -> None:
        process = run.start()
        if run.await_step(process, self.moment()):
            os.kill(self.victim(run), signal.SIGKILL)
        run.end(process, 0, 1)

    def a_stopped_rank(self, run: Run) -> None:
        process = run.start()
        stopped = False
        if run.await_step(process, self.moment()):
            os.kill(self.victim(run), signal.SIGSTOP)
            stopped = True
        if run.end(process, 0, 1) and stopped and not re.search(r"rank \d", run.told()):
            raise Lost(f"the stopped rank is not named: {run.told()}")

    def a_full_disk(self, run: Run) -> None:
        process = run.start(limit_bytes=self.random.randint(20_000, 900_000))
        run.end(process, 0, 1)

    def a_killed_launcher(self, run: Run) -> None:
        process = run.start()
        if run.await_step(process, self.moment()):
            time.sleep(self.random.random() * 3 * STEP_S)
            process.kill()
        run.end(process, 0, -signal.SIGKILL)

    def an_interrupted_launcher(self, run: Run) -> None:
        process = run.start()
        if run.await_step(process, self.moment()):
            process.send_signal(self.random.choice([signal.SIGINT, signal.SIGTERM]))
        run.end(process, 0, 130)

    def a_second_job(self, run: Run) -> None:
        process = run.start()
        if run.await_step(process, 1):
            second = Run(run.folder, run.arguments)
            kept = run.folder / "out", run.folder / "err"
            for path in kept:
                path.rename(path.with_suffix(".first"))
            other = second.start()
            status, told = other.wait(PATIENCE_S), second.told()
            is_over = process.poll() is not None
            for path in kept:
                path.with_suffix(".first").rename(path)
            if not is_over and (status != 2 or "another" not in told):
                raise Lost(f"a second job was not refused, exit status {status}: {told}")
            self.tried["a second job that was refused"] += not is_over
            process.kill()
        run.end(process, 0, -signal.SIGKILL)

    def a_restart(self, run: Run) -> None:
        process = run.start("--restarts", "3")
        kills = self.random.randint(1, 2)
        for kill in range(kills):
            if run.await_step(process, self.moment() + 4 * kill):
                os.kill(self.victim(run), signal.SIGKILL)
                time.sleep(1.0)
        run.end(process, 0)

    def all(self) -> list[Callable[[Run], None]]:
        calm = [self.a_killed_rank, self.a_full_disk, self.a_killed_launcher, self.an_interrupted_launcher]
        return [*calm, self.a_second_job, self.a_stopped_rank, self.a_restart]


def plan(folder: Path, name: str, pins: tuple[str, ...]) -> tuple[str, ...]:
    command = [
        sys.executable,
        "-m",
        "osdp",
        "plan",
        "--model",
        "slow:build",
        "--cluster",
        "cpu-gloo",
        "--batch",
        "4",
        "--seq",
        "7",
    ]
    command += ["--nodes", "1", "--gpus-per-node", "2", "--optimizer", "adamw", "-o", f"{name}.yaml", *pins]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return "--plan", str(folder / f"{name}.yaml")


def ready(folder: Path, arguments: tuple[str, ...]) -> Run:
    folder.mkdir()
    (folder / "slow.py").write_text(MODEL)
    (folder / "run.yaml").write_text(json.dumps(CONFIG))
    os.environ["OSDP_CHAOS"] = str(folder)
    return Run(folder, arguments)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=15)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = options.parse_args()
    chaos, started_s = Chaos(given.seed), time.monotonic()
    end_s, rounds, what = started_s + 60 * given.minutes, Counter[str](), "preparing"
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="osdp-chaos-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        try:
            first = ready(folder / "plans", ())
            kinds: dict[str, tuple[str, ...]] = {"FSDP": ("--fsdp-type", "FSDP")}
            kinds |= {name: plan(first.folder, name, pins) for name, pins in (("mixture", MIXTURE), ("ODC", ODC))}
            alone: dict[str, dict[int, str]] = {}
            left: list[Callable[[Run], None]] = []
            for number in range(10**6):
                name = list(kinds)[number % len(kinds)]
                if name not in alone:
                    what = f"{name}, undisturbed"
                    run = ready(folder / name, kinds[name])
                    run.end(run.start(), 0)
                    alone[name] = run.losses
                run = ready(folder / f"{name}-{number}", kinds[name])
                for _ in range(EPISODES):  # Then the next kind has its turn.
                    if run.newest == STEPS or time.monotonic() > end_s:
                        break
                    if not left:  # All of them before any again.
                        left = chaos.all()
                        chaos.random.shuffle(left)
                    episode = left.pop()
                    what = f"{name}: {episode.__name__.replace('_', ' ')}, after step {run.newest}"
                    before_s = time.monotonic()
                    episode(run)
                    chaos.tried[episode.__name__.replace("_", " ")] += 1
                    print(f"{what}: {run.newest} steps saved, {time.monotonic() - before_s:.0f} s", flush=True)
                what = f"{name}, the rest"
                run.end(run.start(), 0)
                if run.newest != STEPS or run.losses != {**alone[name], **run.losses}:
                    raise Lost("its losses are not those of the undisturbed run")
                if run.losses.get(STEPS) != alone[name][STEPS]:
                    raise Lost(f"final loss {run.losses.get(STEPS)} in place of {alone[name][STEPS]}")
                rounds[name] += 1
                print(f"{name}: final loss {run.losses[STEPS]}, as undisturbed", flush=True)
                if time.monotonic() >= end_s and len(alone) == len(kinds):
                    break
        except (Lost, OSError, subprocess.SubprocessError) as error:
            print(f"LOST in {what} (seed {given.seed}): {error or type(error).__name__}")
            return 1
    tried = ", ".join(f"{name} {count}" for name, count in sorted(chaos.tried.items()))
    done = ", ".join(f"{name} {count}" for name, count in rounds.items())
    print(f"tried: {tried}\nruns: {done}\n{time.monotonic() - started_s:.0f} s; nothing was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
