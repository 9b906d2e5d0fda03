"""How far a run is, in a small file that outlives its ranks, so that a restart can say what it cost.

The launcher makes a temporary folder and names it in the environment.  The first rank of each node keeps a file, so
that there is one whichever node is lost.  Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from osdp.training.config import TrainConfig

FOLDER, ROUND = "OSDP_PROGRESS", "OSDP_ROUND"
"""Environment variables: the launcher's folder, and how often the ranks were started before."""
FILE = "progress.json"


@dataclass(frozen=True)
class Restarts:
    """What restarts have cost."""

    count: int
    lost_steps: int
    """Steps that were run again, as no checkpoint had them."""
    lost_s: float
    """From the end of the last step before each fault to the end of the first step after it."""

    def __str__(self) -> str:
        times = f"{self.count} restart{'' if self.count == 1 else 's'}"
        steps = f"{self.lost_steps} step{'' if self.lost_steps == 1 else 's'}"
        return f"{times}: {steps} lost and run again, {self.lost_s:.1f} s lost"


@dataclass(frozen=True)
class Record:
    """What the file holds."""

    step: int
    """Steps that are done."""
    since_s: float
    """When the last of them ended, or the run began."""
    lost_steps: int = 0
    lost_s: float = 0.0
    saved: str = ""
    """The newest checkpoint that this run has written."""


class Progress:
    """Keeps the file; does nothing where no launcher asks for it."""

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER)
        self._path = Path(folder, FILE) if folder and os.environ.get("LOCAL_RANK", "0") == "0" else None
        self._record = Record(0, time.monotonic())
        self._is_back = False
        """Whether the first step after a restart is done."""

    def begin(self, step: int) -> None:
        """Take note that training goes on after `step` steps."""
        before = read(os.environ[FOLDER]) if self._path is not None and rounds() else None
        if before is not None:
            lost = max(0, before.step - step)
            self._record = dataclasses.replace(before, step=step, lost_steps=before.lost_steps + lost)
        else:
            self._record, self._is_back = Record(step, time.monotonic()), True
        self._write()

    def done(self, step: int) -> None:
        """Take note that a step is done."""
        now_s, before = time.monotonic(), self._record
        lost_s = before.lost_s + (0.0 if self._is_back else now_s - before.since_s)
        self._record, self._is_back = dataclasses.replace(before, step=step, since_s=now_s, lost_s=lost_s), True
        self._write()

    def saved(self, path: Path) -> None:
        """Take note that a checkpoint is whole."""
        self._record = dataclasses.replace(self._record, saved=str(path))
        self._write()

    def restarts(self) -> Restarts | None:
        """Return what restarts have cost; None if there was none."""
        found = self._record
        return Restarts(rounds(), found.lost_steps, found.lost_s) if rounds() else None

    def _write(self) -> None:
        if self._path is not None:
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(asdict(self._record)))
            beside.rename(self._path)


def rounds() -> int:
    """Return how often the ranks were started before."""
    return int(os.environ.get(ROUND, "0"))


def read(folder: str | Path) -> Record | None:
    """Return what the ranks of this node have noted; None if they have not come so far."""
    try:
        return Record(**json.loads(Path(folder, FILE).read_text()))
    except FileNotFoundError:
        return None


def continued(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a rank that may be of a restart: what it had saved goes before `resume`."""
    if not rounds() or config.resume == "auto":
        return config
    if config.resume == "never":  # The folder was empty when the run began.
        return dataclasses.replace(config, resume="auto")
    noted = read(os.environ[FOLDER])
    return dataclasses.replace(config, resume=noted.saved) if noted and Path(noted.saved or "-").is_dir() else config
