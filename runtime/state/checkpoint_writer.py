"""DCP's writer, with checksums of what is written, computed as it is written.

Taken of the files afterwards, a checksum would vouch for whatever lies there by then.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from runtime.state.checkpoint_manifest import DIGEST_BYTES, StoredFile


class CheckedWriter(FileSystemWriter):
    """Writes a checkpoint's files, and knows what it has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = _CheckedFiles()
        self.fs = self._files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # torch 2.11 notes in a copy of the metadata where tensors are, and not in what it returns.
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}

    @property
    def written(self) -> dict[str, StoredFile]:
        """Size and checksum of each file that this rank has written, by name."""
        return self._files.written


class _CheckedFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _CheckedFile(path) as file:
            yield file
            self.written[Path(path).name] = file.described()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _CheckedFile(io.BufferedWriter):
    """A new file that is written from its beginning to its end."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(cast(Any, io.FileIO(path, "xb")))
        self._digest, self._size_bytes = hashlib.blake2b(digest_size=DIGEST_BYTES), 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self._digest.update(data)
        self._size_bytes += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        raise io.UnsupportedOperation("what was written already has its checksum")

    def described(self) -> StoredFile:
        return StoredFile(self._size_bytes, self._digest.hexdigest())
