"""Names in /dev/shm, where everybody may make some."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.odc import shared_segment
from runtime.odc.shared_segment import HEADER_BYTES, PREFIX, Segment, remove_leftovers


def test_symbolic_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_segment, "FOLDER", tmp_path)
    theirs, link = tmp_path / "theirs", tmp_path / f"{PREFIX}1-0"
    theirs.write_bytes(bytes(HEADER_BYTES))
    link.symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        Segment(link, HEADER_BYTES)
    remove_leftovers()
    assert link.is_symlink()
    segment = Segment.create(HEADER_BYTES)
    assert not segment.path.is_symlink()
    segment.close()
