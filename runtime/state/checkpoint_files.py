"""Checkpoints on the disk: which are whole, which is the newest, and how they are made and removed.

A checkpoint is written to `<path>.partial` and renamed when its manifest is on the disk, so that a
path either holds a whole checkpoint or none.  Only files of ours are ever deleted.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from profiler.errors import OsdpError
from runtime.state.checkpoint_manifest import (
    OUR_FILES,
    Manifest,
    describe_file,
    read_manifest,
    sync_folder,
    write_manifest,
)

PARTIAL = ".partial"
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+(\.replaced)?\.partial")


def latest(folder: Path) -> Path | None:
    """Return the newest whole `step-000123` in `folder`, or None.

    Whole means: the manifest is there and undamaged, and every file has its size. Contents are
    checked by `load`, for which all ranks work together.
    """
    return next((path for path in _steps(folder) if is_whole(path)), None)


def prune(folder: Path, keep: int) -> None:
    """Remove all steps in `folder` that are older than the newest `keep` whole ones; call on one rank.

    With fewer whole ones nothing is removed. Raises OsdpError if files there are not ours, or keep < 1.
    """
    if keep < 1:
        raise OsdpError("at least one checkpoint must be kept", got=f"keep={keep}")
    whole = 0
    for path in _steps(folder):
        if whole == keep:
            # Renamed first: a checkpoint that is half deleted must not look like one.
            leaving = path.with_name(path.name + PARTIAL)
            if leaving.exists():
                remove(leaving)
            remove(path.rename(leaving))
        elif is_whole(path):
            whole += 1


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


def begin(path: Path) -> None:
    """Make the folder to write to, without what earlier attempts left; raises OsdpError, OSError."""
    if path.exists():
        _check_ours(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    for leftover in {partial, *path.parent.glob("step-*" + PARTIAL)}:
        if leftover.exists() and (leftover == partial or _LEFTOVER.fullmatch(leftover.name)):
            remove(leftover)
    partial.mkdir()


def publish(path: Path, manifest: Manifest) -> None:
    """Put the checkpoint that was written in its place; raises OsdpError, OSError.

    A checkpoint that is there already is replaced.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        check_sizes(partial, manifest)
    except OsdpError as fault:
        advice = "save to a folder that all ranks share"
        raise OsdpError(f"{partial}: {fault.what}", got=fault.got, expected=fault.expected, advice=advice) from None
    write_manifest(partial, manifest)
    replaced = path.with_name(path.name + ".replaced" + PARTIAL)
    if path.exists():
        path.rename(replaced)
    try:
        partial.rename(path)
    except OSError:
        with suppress(OSError):
            replaced.rename(path)
        raise
    sync_folder(path.parent)
    if replaced.exists():
        remove(replaced)


def abandon(path: Path) -> None:
    """Free what a failed attempt to save to `path` has written, if that is possible."""
    with suppress(OSError, OsdpError):
        remove(path.with_name(path.name + PARTIAL))


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; raises OsdpError if anything in it is not ours."""
    _check_ours(folder)
    for entry in list(folder.iterdir()):
        entry.unlink(missing_ok=True)
    folder.rmdir()


def _check_ours(folder: Path) -> None:
    foreign = [name for name in os.listdir(folder) if not OUR_FILES.fullmatch(name)] if folder.is_dir() else [""]
    if foreign:
        got = f"it holds {foreign[0]}" if foreign[0] else "it is a file"
        raise OsdpError(f"{folder} is not a checkpoint, so it is not replaced", got=got, advice="choose another path")


def _steps(folder: Path, before: int | None = None) -> list[Path]:
    """Return the checkpoints in `folder` (of steps before `before`), whole or not, newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    steps = {int(match[1]): match[0] for match in map(_STEP.fullmatch, names) if match}
    return [folder / steps[number] for number in sorted(steps, reverse=True) if before is None or number < before]
