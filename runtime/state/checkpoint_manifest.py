"""What a checkpoint's folder holds, and its manifest.

    manifest.json     every file with its size and checksum, every tensor with the parts that were
                      written and where, the optimizer's settings, and `extra`; with a checksum of its own
    __0_0.distcp ...  one file a rank, tensors one after another, each as `torch.save` writes it
    .metadata         the same table of tensors as DCP writes it, for torch's own tools; a pickle,
                      which can run any code when it is loaded, so nothing here ever reads it

Reading runs no code: the manifest is JSON, and tensors are loaded with `weights_only`.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from profiler.errors import OsdpError
from profiler.yaml_files import read_text, validate, write_text_atomic

MANIFEST = "manifest.json"
DIGEST_BYTES = 16
OUR_FILES = re.compile(r"manifest\.json|__\d+_\d+\.distcp|\.metadata(\.tmp)?|\.osdp-[0-9a-f]+\.tmp|\.osdp-lease")
"""What may lie in a checkpoint's folder, also when its writer was killed."""


@dataclass(frozen=True)
class StoredFile:
    """A file as its writer found it after writing."""

    size_bytes: int
    blake2b: str


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and the parts that together are all of it."""

    dtype: str
    """As PyTorch calls it: `float32`."""
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the parts are inside the tensor, do not overlap, and are all of it."""
        dims = len(self.shape)
        if any(not len(part.offsets) == len(part.sizes) == dims for part in self.parts):
            return False
        boxes = sorted(tuple(zip(part.offsets, part.sizes, strict=True)) for part in self.parts)
        limits = self.shape
        if any(not 0 <= at <= at + size <= end for box in boxes for (at, size), end in zip(box, limits, strict=True)):
            return False
        beside: list[tuple[tuple[int, int], ...]] = []  # those before in order that reach as far as the next one
        for box in boxes if dims else ():
            beside = [one for one in beside if one[0][0] + one[0][1] > box[0][0]]
            if any(_overlap(one, box) for one in beside):
                return False
            beside.append(box)
        return sum(prod(part.sizes) for part in self.parts) == prod(limits)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself; raises OsdpError for an unknown name."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise OsdpError("the checkpoint has tensors of a dtype that this PyTorch does not have", got=self.dtype)
        return dtype


def _overlap(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    """Whether two boxes, each given by (start, size) along every dimension, have elements in common."""
    return all(max(a, b) < min(a + m, b + n) for (a, m), (b, n) in zip(one, other, strict=True))


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors."""

    kind: str
    """Name of its class."""
    groups: tuple[dict[str, Any], ...]
    """Its parameter groups; `params` are original names, tuples became lists."""
    values: dict[str, dict[str, Any]]
    """State that is no tensor: by original name, then by name of the state."""


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint holds."""

    SCHEMA: ClassVar[str] = "osdp.checkpoint/1"

    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    """By key: `model.<original name>` or `optimizer.<original name>.<state>`."""
    optimizer: OptimizerRecord | None
    extra: dict[str, Any]
    """What the caller saved along, such as the position in the data."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and have it and the folder's entries on the disk; raises OsdpError."""
    body = asdict(manifest)
    document = {"schema": Manifest.SCHEMA, "blake2b": _digest(body), "manifest": body}
    write_text_atomic(folder / MANIFEST, json.dumps(document) + "\n")
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest in a checkpoint's folder; raises OsdpError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.exists():
        raise OsdpError("it has no manifest, so it was never finished")
    damaged = OsdpError("its manifest is damaged")
    try:
        document = json.loads(read_text(path))
        schema, digest, body = document["schema"], document["blake2b"], document["manifest"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged from error
    if schema != Manifest.SCHEMA:
        raise OsdpError("another version of OSDP wrote it", got=str(schema)[:60], expected=Manifest.SCHEMA)
    if digest != _digest(body):
        raise damaged
    manifest, problems = validate(body, Manifest)
    if manifest is None or problems:
        raise damaged
    # All files that it names must be in the checkpoint's own folder.
    for key, tensor in manifest.tensors.items():
        _ = tensor.torch_dtype  # raises for one that this PyTorch does not have
        if not tensor.is_whole:
            raise OsdpError(f"its manifest does not have all of {key}, each element once")
    named = {part.file for tensor in manifest.tensors.values() for part in tensor.parts}
    if not (named <= manifest.files.keys() and all(OUR_FILES.fullmatch(name) for name in manifest.files)):
        raise damaged
    return manifest


def stored_tensors(metadata: Metadata) -> dict[str, StoredTensor]:
    """Return what DCP has written, by key."""
    tensors = {}
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        parts = []
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            offsets, sizes, file = tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path
            parts.append(StoredPart(offsets, sizes, file, place.offset, place.length))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[key] = StoredTensor(dtype, tuple(tensor.size), tuple(parts))
    return tensors


def describe_file(path: Path) -> StoredFile:
    """Read a file and return its size and checksum."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
        return StoredFile(stream.tell(), digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Have a folder's entries on the disk, so that they outlive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ManifestReader(FileSystemReader):
    """DCP's reader with the metadata of the manifest instead of the pickle."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's view of the manifest."""
        tensors: dict[str, Any] = {}
        places = {}
        for key, tensor in self._manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.parts]
            properties = TensorProperties(dtype=tensor.torch_dtype)
            tensors[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            for part in tensor.parts:
                # By the names under which DCP's reader asks (the same in torch 2.11, read, and 2.13, run).
                place = {"relative_path": part.file, "offset": part.start_bytes, "length": part.length_bytes}
                places[MetadataIndex(key, part.offsets)] = SimpleNamespace(**place, transform_descriptors=None)
        return Metadata(tensors, storage_data=places)


def _digest(body: Any) -> str:
    return hashlib.blake2b(json.dumps(body).encode(), digest_size=DIGEST_BYTES).hexdigest()
