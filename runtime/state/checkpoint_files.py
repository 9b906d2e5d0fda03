"""Checkpoints on the disk: which are whole, which is the newest, and how they are made and removed.

A checkpoint is written to `<path>.<job>.partial`, a name that no other job has, and renamed when its manifest is on the
disk, so that a path either holds a whole checkpoint or none.  Its writer has a lease on the folder, so that what is
being written is told from what was left.  Only what we wrote is ever deleted: the files that a checkpoint's manifest
names, and in the folders of writers that are gone those with names of ours.  Symbolic links are never followed.
"""

import os
import re
import secrets
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from profiler.errors import OsdpError
from runtime.state.checkpoint_manifest import (
    MANIFEST,
    OUR_FILES,
    Manifest,
    describe_file,
    read_manifest,
    sync_folder,
    write_manifest,
)
from runtime.state.folder_lease import Lease, LeaseHeldError

PARTIAL = ".partial"
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"(?P<name>.+?)(\.replaced)?(\.[0-9a-f]{8})?\.partial")


def latest(folder: Path) -> Path | None:
    """Return the newest whole `step-000123` in `folder`, or None.

    Whole means: the manifest is there and undamaged, and every file has its size. Contents are
    checked by `load`, for which all ranks work together.
    """
    return next((path for path in _steps(folder) if is_whole(path)), None)


def whole_steps(folder: Path) -> list[Path]:
    """Return all whole checkpoints in `folder`, the newest first."""
    return [path for path in _steps(folder) if is_whole(path)]


def prune(folder: Path, keep: int) -> None:
    """Remove all steps in `folder` that are older than the newest `keep` whole ones; call on one rank.

    With fewer whole ones nothing is removed. What is not ours, or cannot be removed, is left, with a warning. Raises
    OsdpError if keep < 1.
    """
    if keep < 1:
        raise OsdpError("at least one checkpoint must be kept", got=f"keep={keep}")
    whole = 0
    for path in _steps(folder):
        if whole < keep:
            whole += is_whole(path)
            continue
        if path.is_symlink():
            warnings.warn(f"{path} is a symbolic link, and is left", stacklevel=2)
            continue
        try:
            _retire(path)
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} could not be removed: {error}", stacklevel=2)


def _retire(path: Path) -> None:
    """Remove what an old checkpoint's manifest names. Raises OSError."""
    try:
        manifest = read_manifest(path)
    except OsdpError as fault:
        warnings.warn(f"{path} is older than the checkpoints that are kept, and is left: {fault.what}", stacklevel=3)
        return
    # Renamed first: a checkpoint that is half deleted must not look like one.
    leaving = path.rename(_beside(path))
    if left := remove(leaving, {*manifest.files, MANIFEST}):
        what = f"the old checkpoint {path} held {left[0]}, which is not part of it"
        warnings.warn(f"{what} and is left in {leaving}", stacklevel=3)


def is_whole(path: Path) -> bool:
    """Whether the checkpoint has its manifest, and every file its size."""
    try:
        check_sizes(path, read_manifest(path))
    except OsdpError:
        return False
    return True


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Check that every file is there with its size; raises OsdpError."""
    for name, file in manifest.files.items():
        try:
            size_bytes = (path / name).stat().st_size
        except OSError:
            raise OsdpError(f"its file {name} is missing") from None
        if size_bytes != file.size_bytes:
            what = f"the size of its file {name} differs from when it was written"
            raise OsdpError(what, got=f"{size_bytes} bytes", expected=f"{file.size_bytes} bytes")


def check_contents(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read files and check that they hold what was written; raises OsdpError."""
    with refusing(path):
        for name in names:
            if describe_file(path / name) != manifest.files[name]:
                raise OsdpError(f"its file {name} does not hold what was written: the checksums differ")


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Say in errors which checkpoint cannot be loaded, and name an earlier one that is whole."""
    try:
        yield
    except OsdpError as fault:
        step = _STEP.fullmatch(path.name)
        number = int(step[1]) if step else None
        earlier = next((p for p in _steps(path.parent, number) if p != path and is_whole(p)), None)
        what = f"{path} cannot be loaded: {fault.what}" if path.exists() else f"{path} does not exist"
        advice = f"the newest whole checkpoint before it is {earlier}" if earlier else "no earlier one there is whole"
        raise OsdpError(what, got=fault.got, expected=fault.expected, advice=advice) from fault


class Partial:
    """A checkpoint that this process writes, before it is in its place."""

    def __init__(self, path: Path) -> None:
        """Make the folder to write to, and remove those of writers that are gone; raises OsdpError, OSError."""
        if path.is_symlink() or path.exists():
            _check_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.iterdir():
            found = _LEFTOVER.fullmatch(leftover.name)
            if found and (found["name"] == path.name or _STEP.fullmatch(found["name"])):
                _remove_if_left(leftover)
        self.path, self.folder = path, _beside(path)
        self.folder.mkdir()
        self._lease = Lease(self.folder, f"writes {path.name}")

    def publish(self, manifest: Manifest) -> None:
        """Put the checkpoint that was written in its place; raises OsdpError, OSError.

        A checkpoint that is there already is replaced.
        """
        path, partial = self.path, self.folder
        try:
            check_sizes(partial, manifest)
        except OsdpError as fault:
            advice = "save to a folder that all ranks share"
            what = f"{partial}: {fault.what}"
            raise OsdpError(what, got=fault.got, expected=fault.expected, advice=advice) from None
        write_manifest(partial, manifest)
        replaced = _beside(path, ".replaced") if path.exists() else None
        if replaced is not None:
            path.rename(replaced)
        try:
            partial.rename(path)
        except OSError:
            if replaced is not None:
                with suppress(OSError):
                    replaced.rename(path)
            raise
        # Not before: who cleans up would take the folder for one that was left.
        self._lease.moved(path)
        self._lease.release()
        sync_folder(path.parent)
        if replaced is not None:
            remove(replaced)

    def abandon(self) -> None:
        """Free what a failed attempt has written, if that is possible."""
        self._lease.release()
        with suppress(OSError):
            remove(self.folder)


def remove(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """Delete the files of these names in a folder (None: those of ours), and the folder if nothing is left.

    Returns the names of what is left. Raises OSError.
    """
    left = []
    for entry in os.scandir(folder):
        is_ours = entry.name in names if names is not None else OUR_FILES.fullmatch(entry.name)
        if is_ours and entry.is_file(follow_symlinks=False):
            Path(entry).unlink(missing_ok=True)
        else:
            left.append(entry.name)
    if not left:
        folder.rmdir()
    return left


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose writer is gone, as far as it is ours and can be removed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with suppress(OSError, LeaseHeldError):
        # A writer on another machine may be there yet, though no lock shows it: then the folder is left.
        lease = Lease(folder, "removes it", silent_s=None)
        try:
            remove(folder)
        finally:
            lease.release()


def _beside(path: Path, what: str = "") -> Path:
    """Return a name next to a checkpoint's that nobody has."""
    return path.with_name(f"{path.name}{what}.{secrets.token_hex(4)}{PARTIAL}")


def _check_ours(folder: Path) -> None:
    """Raise OsdpError if a path holds something else than a checkpoint, or points elsewhere."""
    found = ""
    if folder.is_symlink():
        found = "it is a symbolic link"
    elif not folder.is_dir():
        found = "it is a file"
    else:
        # Network file systems keep what was deleted, and is open somewhere, under names of their own.
        kept = (name for name in os.listdir(folder) if not name.startswith(".nfs"))
        foreign = next((name for name in kept if not OUR_FILES.fullmatch(name)), None)
        found = f"it holds {foreign}" if foreign else ""
    if found:
        raise OsdpError(f"{folder} is not a checkpoint, so it is not replaced", got=found, advice="choose another path")


def _steps(folder: Path, before: int | None = None) -> list[Path]:
    """Return the checkpoints in `folder` (of steps before `before`), whole or not, newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = {int(match[1]): match[0] for match in map(_STEP.fullmatch, names) if match}
    return [folder / steps[number] for number in sorted(steps, reverse=True) if before is None or number < before]
