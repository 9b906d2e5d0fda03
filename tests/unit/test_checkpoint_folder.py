"""The folder of checkpoints: two writers, a writer that is killed, links, foreign files, old steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import programs
import pytest
import torch
from checkpoint_layouts import linear

from profiler.errors import OsdpError
from runtime.state import checkpoint_files
from runtime.state.checkpoint import latest, load, prune, save
from runtime.state.checkpoint_manifest import Manifest

TESTS = Path(__file__).parents[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_keeps_the_newest(tmp_path: Path) -> None:
    net, shards = linear()
    assert latest(tmp_path / "none") is None
    for step in (2, 10, 9, 30):
        save(tmp_path / f"step-{step:06d}", net, shards)
    assert latest(tmp_path) == tmp_path / "step-000030"
    (tmp_path / "step-000030" / "manifest.json").unlink()
    assert latest(tmp_path) == tmp_path / "step-000010"
    prune(tmp_path, keep=3)
    assert len(names(tmp_path)) == 4, "only three are whole"
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000010", "step-000030"]
    with pytest.raises(OsdpError, match="at least one"):
        prune(tmp_path, keep=0)


def test_a_checkpoint_is_replaced_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "step-1", net, shards, extra={"try": 1})
    save(tmp_path / "step-1", net, shards, extra={"try": 2})
    assert load(tmp_path / "step-1", net, shards) == {"try": 2}
    assert names(tmp_path) == ["step-1"]
    (tmp_path / "step-1" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path, told in [("step-1", "it holds thesis.txt"), ("file", "it is a file")]:
        with pytest.raises(OsdpError, match=told):
            save(tmp_path / path, net, shards)
    assert names(tmp_path) == ["file", "step-1"]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn
from runtime.state import checkpoint, checkpoint_files
from runtime.local_shards import local_shard, whole
net = nn.Linear(3, 2)
shards = [local_shard(whole(n, p.shape), p) for n, p in net.named_parameters()]
checkpoint.save(Path(sys.argv[1]) / "step-1", net, shards)
die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "before the manifest":
    checkpoint_files.write_manifest = die
else:
    checkpoint_files.sync_folder = die
    checkpoint_files.Path.rename = die
checkpoint.save(Path(sys.argv[1]) / "step-2", net, shards)
"""


@pytest.mark.parametrize("when", ["before the manifest", "before renaming"])
def test_a_writer_that_is_killed_leaves_the_previous_checkpoint(when: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run([programs.python(), "-c", KILLED, str(tmp_path), when], env=environment)
    assert result.returncode == -signal.SIGKILL
    first, second = names(tmp_path)
    assert first == "step-1"
    assert re.fullmatch(r"step-2\.[0-9a-f]{8}\.partial", second)
    assert latest(tmp_path) == tmp_path / "step-1"
    net, shards = linear()
    with pytest.raises(OsdpError, match=r"step-2 does not exist\n.*the newest whole checkpoint before it is .*step-1"):
        load(tmp_path / "step-2", net, shards)
    load(tmp_path / "step-1", net, shards)
    save(tmp_path / "step-3", net, shards)
    assert names(tmp_path) == ["step-1", "step-3"]


def test_two_jobs_that_save_to_one_path_do_not_mix(tmp_path: Path) -> None:
    """The second begins, writes and publishes while the first is between writing and publishing."""
    (one, ones), (two, twos) = linear(), linear()
    with torch.no_grad():
        one.weight.fill_(1.0)
        two.weight.fill_(2.0)
    publish = checkpoint_files.Partial.publish

    def publish_late(partial: checkpoint_files.Partial, manifest: Manifest) -> None:
        checkpoint_files.Partial.publish = publish  # type: ignore[method-assign]
        save(tmp_path / "step-1", two, twos, extra={"job": 2})
        assert load(tmp_path / "step-1", *linear()) == {"job": 2}
        assert partial.folder.is_dir(), "the first's is being written, and not left over"
        publish(partial, manifest)

    checkpoint_files.Partial.publish = publish_late  # type: ignore[method-assign]
    try:
        save(tmp_path / "step-1", one, ones, extra={"job": 1})
    finally:
        checkpoint_files.Partial.publish = publish  # type: ignore[method-assign]
    found, shards = linear()
    assert load(tmp_path / "step-1", found, shards) == {"job": 1}
    assert torch.equal(found.weight, one.weight)
    assert names(tmp_path) == ["step-1"]


def test_links_are_never_followed(tmp_path: Path) -> None:
    net, shards = linear()
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    save(outside, net, shards)
    before = names(outside)
    folder.mkdir()
    for name in ("step-1", "step-2.partial", "step-3.00000000.partial"):
        (folder / name).symlink_to(outside)
    for step in (4, 5):
        save(folder / f"step-{step}", net, shards)
    (folder / "step-4" / "manifest.json").rename(tmp_path / "manifest.json")
    (folder / "step-4" / "manifest.json").symlink_to(tmp_path / "manifest.json")
    with pytest.warns(UserWarning, match="is a symbolic link, and is left"):
        prune(folder, keep=1)
    with pytest.raises(OsdpError, match="it is a symbolic link"):
        save(folder / "step-1", net, shards)
    assert names(outside) == before
    assert (tmp_path / "manifest.json").is_file()


def test_foreign_files_in_old_steps_stop_nothing(tmp_path: Path) -> None:
    """As `.nfs*` files are, which servers keep for who has a deleted file open."""
    net, shards = linear()
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", net, shards)
    (tmp_path / "step-1" / ".nfs0001").write_text("open elsewhere")
    (tmp_path / "step-2" / "__9_9.distcp").write_text("of another tool")
    with pytest.warns(UserWarning, match="which is not part of it"):
        prune(tmp_path, keep=1)
    left = {name[:6]: names(tmp_path / name) for name in names(tmp_path) if name != "step-3"}
    assert left == {"step-1": [".nfs0001"], "step-2": ["__9_9.distcp"]}
    save(tmp_path / "step-4", net, shards)
    assert latest(tmp_path) == tmp_path / "step-4"


def test_a_step_of_another_tool_is_not_pruned(tmp_path: Path) -> None:
    """PyTorch's own checkpoints have files of the same names."""
    net, shards = linear()
    theirs = tmp_path / "step-1"
    torch.distributed.checkpoint.save({"weight": net.weight}, checkpoint_id=theirs, no_dist=True)
    before = names(theirs)
    for step in (2, 3):
        save(tmp_path / f"step-{step}", net, shards)
    with pytest.warns(UserWarning, match="is left: it has no manifest"):
        prune(tmp_path, keep=1)
    assert names(theirs) == before
    assert names(tmp_path) == ["step-1", "step-3"]


def test_a_prune_that_fails_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, shards = linear()
    for step in (1, 2):
        save(tmp_path / f"step-{step}", net, shards)

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.warns(UserWarning, match="could not be removed: read-only"):
        prune(tmp_path, keep=1)
