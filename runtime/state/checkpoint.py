"""Save and resume, under any plan and any number of ranks, on `torch.distributed.checkpoint` (DCP).

    save    take the state -> DCP writes one file a rank to `<path>.<job>.partial`, and each rank takes the
            checksum of what it writes -> manifest -> rename to `<path>`
    load    manifest -> sizes, checksums (each rank a share), names and shapes -> DCP reads into place

Every step ends with all ranks agreeing that it was done; if one fails, all raise OsdpError and the
checkpoints that were there stay as they were.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from profiler.errors import OsdpError
from runtime.failures.rank_agreement import Agreement, peer_errors
from runtime.local_shards import LocalShard
from runtime.state import checkpoint_files as folders
from runtime.state.checkpoint_files import latest, prune
from runtime.state.checkpoint_manifest import (
    Manifest,
    ManifestReader,
    OptimizerRecord,
    StoredFile,
    read_manifest,
    stored_tensors,
)
from runtime.state.checkpoint_writer import CheckedWriter
from runtime.state.dcp_tensor import GlobalLoadPlanner, GlobalSavePlanner, GlobalTensor
from runtime.state.model_state import check_model, model_tensors, persistent_buffers
from runtime.state.optimizer_state import Restoration, check_optimizer, optimizer_tensors

__all__ = ["Saving", "latest", "load", "prune", "save"]


class Saving:
    """A checkpoint that is being written, or has been."""

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path = path
        self._future = future

    @property
    def done(self) -> bool:
        """Whether writing has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is whole, on all ranks; raises OsdpError if it will never be."""
        global _under_way
        if _under_way is self:
            _under_way = None
        self._future.result()


_under_way: Saving | None = None
"""The save in the background whose end nobody has waited for; there is at most one."""
_background = ThreadPoolExecutor(1, "checkpoint")


@dataclass(frozen=True)
class _State:
    """What a rank contributes to a checkpoint."""

    tensors: dict[str, GlobalTensor]
    optimizer: OptimizerRecord | None
    extra: dict[str, Any]


def save(
    path: str | Path,
    module: nn.Module,
    shards: Sequence[LocalShard],
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    asynchronous: bool = False,
) -> Saving:
    """Save a model, its optimizer and `extra` to the folder `path`; collective.

    Args:
        path: folder that all ranks share; a checkpoint that is there is replaced when the new one is whole.
        module: whose buffers are saved, as rank 0 has them.
        shards: what this rank holds of the parameters.
        optimizer: any torch optimizer over these parameters whose state has their layout.
        extra: what else `load` shall return, of rank 0; what JSON can hold.
        asynchronous: return when the state is copied to host memory, and write in the background.
            Every rank copies all that it holds, replicated parts too.

    An earlier save in the background is waited for first, and its error raised here. Call `wait` on
    the last one before the process group is destroyed.

    Raises OsdpError, on all ranks, if any of them fails.
    """
    global _under_way
    path = Path(path)
    _await_save()
    ranks = Agreement.all()
    with torch.no_grad():
        state = ranks.together(f"save {path}", lambda: _take(module, shards, optimizer, extra, ranks, asynchronous))
    if asynchronous:
        # DCP's own async_save is no help: checksums, manifest and renaming belong to the background too.
        _under_way = Saving(path, _background.submit(_write, path, state, ranks))
        return _under_way
    _write(path, state, ranks)
    finished: Future[None] = Future()
    finished.set_result(None)
    return Saving(path, finished)


@torch.no_grad()
def load(
    path: str | Path, module: nn.Module, shards: Sequence[LocalShard], optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load a checkpoint into a model, and into its optimizer if one is given; collective.

    The plan and the number of ranks may differ from those under which it was saved. Nothing is
    changed before the checkpoint is known to be whole, undamaged and of this model. The optimizer
    keeps its own way of computing (`foreach`, `fused`); all other options are as saved. Of a save in
    the background the end is waited for first, and its error raised here.

    Returns the `extra` that was saved. Raises OsdpError on all ranks.
    """
    path = Path(path)
    _await_save()
    ranks = Agreement.all()
    targets = model_tensors(module, shards)
    manifest = ranks.together(f"load {path}", lambda: _checked_manifest(path, targets, shards, optimizer))
    share = sorted(manifest.files)[ranks.rank :: ranks.count]
    ranks.together(f"check {path}", lambda: folders.check_contents(path, manifest, share))
    restoration = Restoration(optimizer, shards, manifest) if optimizer is not None else None
    _read(path, manifest, targets | (restoration.targets if restoration else {}), ranks)
    if restoration is not None:
        restoration.finish()
    return manifest.extra


def _await_save() -> None:
    """Wait for the save in the background, if there is one; raises its error."""
    if _under_way is not None:
        _under_way.wait()


def _take(
    module: nn.Module,
    shards: Sequence[LocalShard],
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    ranks: Agreement,
    copies: bool,
) -> _State:
    """Return this rank's contribution, sharing the model's memory or as copies on the host."""
    extra = dict(extra or {})
    _check_plain(extra, "extra")
    tensors = model_tensors(module, shards)
    if ranks.rank != 0:
        for name in persistent_buffers(module):
            tensors.pop(f"model.{name}", None)  # not there if the buffer is empty
    record = None
    if optimizer is not None:
        moments, record = optimizer_tensors(optimizer, shards)
        tensors |= moments
    if copies:
        tensors = {key: tensor.copy_to_cpu() for key, tensor in tensors.items()}
    return _State(tensors, record, json.loads(json.dumps(extra)))


def _check_plain(value: object, at: str) -> None:
    """Check that JSON gives back an equal value; raises OsdpError that says where it would not."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise OsdpError(f"{at} cannot be saved", got=f"the key {key!r}", expected="keys that are text")
            _check_plain(item, f"{at}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{at}[{index}]")
    elif type(value) not in (bool, int, float, str, NoneType):
        expected = "numbers, text, true, false, none, lists and dicts of these"
        raise OsdpError(f"{at} cannot be saved", got=f"a {type(value).__name__}", expected=expected)


def _write(path: Path, state: _State, ranks: Agreement) -> None:
    """Write what all ranks have taken, and put it in its place."""
    started: list[folders.Partial] = []  # on rank 0

    def begin() -> str:
        if ranks.rank == 0:
            started.append(folders.Partial(path))
        return started[0].folder.name if started else ""

    try:
        partial = path.with_name(ranks.gather(f"make a folder for {path}", begin)[0])
        writer = CheckedWriter(partial)
        metadata = _write_tensors(writer, partial, state.tensors, ranks)
        files: dict[str, StoredFile] = {}
        for written in ranks.gather(f"write to {partial}", lambda: writer.written):
            files |= written
        records = ranks.gather(f"save {path}", lambda: state.optimizer)
        manifest = Manifest(files, stored_tensors(metadata), _merge(records), state.extra)
        ranks.on_first(f"finish {path}", lambda: started[0].publish(manifest))
    except OsdpError:
        for each in started:
            each.abandon()
        raise


def _write_tensors(writer: CheckedWriter, folder: Path, tensors: dict[str, GlobalTensor], ranks: Agreement) -> Metadata:
    """Have DCP write the tensors, each part by one of the ranks that hold it."""
    group = ranks.group
    with _dcp_errors(f"write to {folder}"):
        metadata: Metadata = save_tensors(
            tensors, storage_writer=writer, planner=GlobalSavePlanner(), process_group=group, no_dist=group is None
        )
    return metadata


def _merge(records: Sequence[OptimizerRecord | None]) -> OptimizerRecord | None:
    """Return rank 0's record with the values that only other ranks have."""
    first = records[0]
    if first is None:
        return None
    values: dict[str, dict[str, Any]] = {}
    for record in reversed(records):
        values |= record.values if record is not None else {}
    return replace(first, values=values)


def _checked_manifest(
    path: Path, targets: Mapping[str, GlobalTensor], shards: Sequence[LocalShard], optimizer: Optimizer | None
) -> Manifest:
    """Read the manifest, and check by it that the checkpoint is whole and of this model."""
    with folders.refusing(path):
        manifest = read_manifest(path)
        folders.check_sizes(path, manifest)
    try:
        check_model(manifest, targets)
        if optimizer is not None:
            check_optimizer(manifest, optimizer, shards)
    except OsdpError as fault:
        what = f"{path} cannot be loaded: {fault.what}"
        raise OsdpError(what, got=fault.got, expected=fault.expected, advice=fault.advice) from fault
    return manifest


def _read(path: Path, manifest: Manifest, targets: dict[str, GlobalTensor], ranks: Agreement) -> None:
    """Have DCP read what this rank holds of the tensors, in place."""
    reader, group = ManifestReader(path, manifest), ranks.group
    with _dcp_errors(f"read {path}"):
        load_tensors(
            targets, storage_reader=reader, planner=GlobalLoadPlanner(), process_group=group, no_dist=group is None
        )


@contextmanager
def _dcp_errors(doing: str) -> Iterator[None]:
    with peer_errors(doing), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
