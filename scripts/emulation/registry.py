"""Clusters that stay, by name: one file for each, locked by the cluster's keeper for as long as it lives.

The lock tells a cluster that is there from one whose keeper was killed, with no PID to be mistaken for
another's.  A run on the cluster takes a lock of the other kind (fcntl's, which does not meet flock's) on the
same file, so that two runs do not use the same ports and links at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from .cluster import Cluster, end, make
from .errors import RefusalError
from .network import Links


def folder() -> Path:
    """Return where the files are."""
    return Path(os.environ.get("EMULATED_CLUSTER_DIR", "/run/emulated-clusters"))


def _file(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", name):
        raise RefusalError(
            "not a name for a cluster",
            got=repr(name),
            expected="up to 32 letters, digits, - and _, a letter or digit first",
        )
    return folder() / f"{name}.json"


def _lock(file: int) -> bool:
    """Take the keeper's lock; whether nobody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: int) -> bool:
    """Whether a path still leads to an open file."""
    return path.exists() and path.stat().st_ino == os.fstat(file).st_ino


def _claim(name: str) -> int:
    """Return the open and locked file of a name that no cluster has."""
    path = _file(name)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if not _lock(file):
            os.close(file)
            raise RefusalError(f"the cluster '{name}' is up already", advice=f"'down {name}' first, or another name")
        if _is_at(path, file):
            return file
        os.close(file)  # a `down` removed it before we had the lock


def up(name: str, links: Links) -> Cluster:
    """Make a cluster that stays until `down`."""
    file = _claim(name)
    try:
        os.ftruncate(file, 0)
        # The keeper inherits the open file, and with it the lock.
        return make(name, links, lambda cluster: _write(file, cluster))
    except BaseException:
        _remove(name)
        raise
    finally:
        os.close(file)


def _write(file: int, cluster: Cluster) -> None:
    os.write(file, json.dumps(asdict(cluster)).encode())


def load(name: str) -> Cluster:
    """Return the cluster of that name."""
    try:
        file = os.open(_file(name), os.O_RDONLY)
    except FileNotFoundError:
        others = ", ".join(names()) or "none"
        raise RefusalError(f"no cluster '{name}' is up", got=f"clusters: {others}", advice=f"'up {name}'") from None
    with os.fdopen(file) as stream:
        if _lock(file):
            raise RefusalError(
                f"the cluster '{name}' is gone: its keeper was killed, or the machine restarted",
                advice=f"'down {name}', then 'up {name}'",
            )
        text = stream.read()
    if not text:
        raise RefusalError(f"the cluster '{name}' is being made", advice="try again in a second")
    told = json.loads(text)
    files = tuple(tuple(node) for node in told["files"])
    return Cluster(told["name"], Links(**told["links"]), told["keeper"], files)


def down(name: str) -> bool:
    """End a cluster and forget it, also one that has died; whether there was any."""
    try:
        file = os.open(_file(name), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        if not _lock(file):
            end(load(name).keeper)
            _lock(file)
        if _is_at(_file(name), file):
            _remove(name)
    finally:
        os.close(file)
    return True


def _remove(name: str) -> None:
    _file(name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it
        folder().rmdir()


def names() -> list[str]:
    """Return the names of all clusters, also of dead ones."""
    return sorted(path.stem for path in folder().glob("*.json"))


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Be the only run on a cluster."""
    file = os.open(_file(name), os.O_RDWR)
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusalError(
                f"another run is on the cluster '{name}'",
                expected="one at a time: they would share ports and links",
                advice="wait for it, or another cluster",
            ) from None
        yield
    finally:
        os.close(file)
