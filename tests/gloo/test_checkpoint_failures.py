"""What one rank cannot do fails on all of them, soon, and leaves the checkpoints that were there."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_layouts import build, train
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from profiler.errors import OsdpError
from runtime.local_shards import LocalShard, local_shard, whole
from runtime.state.checkpoint import latest, load, save


def complaint(action: object) -> str:
    """Return what an action is refused with."""
    with pytest.raises(OsdpError) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def fill_the_disk_of_rank_1(rank: int, folder: str) -> list[str]:
    net, shards = build("shard", seed=1)
    save(f"{folder}/step-1", net, shards)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    told = [complaint(lambda: save(f"{folder}/step-2", net, shards))]
    background = save(f"{folder}/step-3", net, shards, asynchronous=True)
    told.append(complaint(background.wait))
    save(f"{folder}/step-4", net, shards, asynchronous=True)
    told.append(complaint(lambda: save(f"{folder}/step-5", net, shards)))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(f"{folder}/step-6", net, shards)
    return told


def test_a_full_disk_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for told in run_ranks(fill_the_disk_of_rank_1, 2, str(tmp_path)):
        assert len(told) == 3
        assert all(text.startswith("FaultError: rank 1 could not write to") for text in told), told
        assert "step-4" in told[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-6"]


def die_while_writing(rank: int, folder: str) -> str:
    net, shards = build("shard", seed=1)
    save(f"{folder}/step-1", net, shards)
    write = FileSystemWriter.write_data
    if rank == 1:

        def write_and_die(self: FileSystemWriter, plan: object, planner: object) -> object:
            write(self, plan, planner)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = write_and_die
    return complaint(lambda: save(f"{folder}/step-2", net, shards))


def resume_after_the_death(rank: int, folder: str) -> tuple[str, bool]:
    net, shards = build("shard", seed=2)
    newest = latest(Path(folder))
    assert newest is not None
    load(newest, net, shards)
    expected = build("shard", seed=1)[1]
    equal = all(torch.equal(a.local(a.parameter), b.local(b.parameter)) for a, b in zip(shards, expected, strict=True))
    save(f"{folder}/step-2", net, shards)
    return newest.name, equal


def test_a_rank_that_is_killed_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    told = run_ranks(die_while_writing, 2, str(tmp_path), lost=(1,))[0]
    assert "another rank is gone" in told
    assert run_ranks(resume_after_the_death, 2, str(tmp_path)) == [("step-1", True)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def save_steps(rank: int, folder: str) -> None:
    net, shards = build("shard", seed=1)
    optimizer = torch.optim.Adam(net.parameters())
    train(shards, optimizer, range(1))
    for step in (1, 2):
        save(f"{folder}/step-{step}", net, shards, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of both steps, of which each test has a copy."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_steps, 2, str(folder))
    return folder


def damage(folder: Path, how: str) -> None:
    file = folder / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[:-1])
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "lost":
        file.unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"sizes": [2, 7]', '"sizes": [2, 6]', 1))


def load_damaged(rank: int, folder: str) -> tuple[str, bool]:
    net, shards = build("shard", seed=2)
    optimizer = torch.optim.Adam(net.parameters())
    before = [shard.local(shard.parameter).clone() for shard in shards]
    told = complaint(lambda: load(f"{folder}/step-2", net, shards, optimizer))
    untouched = not optimizer.state and all(
        torch.equal(shard.local(shard.parameter), old) for shard, old in zip(shards, before, strict=True)
    )
    return told, untouched


@pytest.mark.parametrize(
    ("how", "what", "newest"),
    [
        ("truncated", "the size of its file __1_0.distcp differs", "step-1"),
        ("flipped", "__1_0.distcp does not hold what was written", "step-2"),
        ("lost", "__1_0.distcp is missing", "step-1"),
        ("no manifest", "it was never finished", "step-1"),
        ("manifest", "its manifest is damaged", "step-1"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(
    tmp_path: Path, saved: Path, how: str, what: str, newest: str
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "step-2", how)
    assert latest(tmp_path) == tmp_path / newest
    for told, untouched in run_ranks(load_damaged, 2, str(tmp_path)):
        assert what in told
        assert f"the newest whole checkpoint before it is {tmp_path / 'step-1'}" in told
        assert untouched


class Trap:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.mark,)


def load_trapped(rank: int, folder: str) -> None:
    net, shards = build("shard", seed=2)
    load(f"{folder}/step-2", net, shards)


def test_loading_runs_no_code_from_the_folder(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    trap, mark = tmp_path / "step-2" / ".metadata", tmp_path / "sprung"
    trap.write_bytes(pickle.dumps(Trap(str(mark))).ljust(trap.stat().st_size, b"\0"))
    with pytest.raises(AssertionError, match="does not hold what was written"):
        run_ranks(load_trapped, 2, str(tmp_path))
    assert not mark.exists()
    pickle.loads(trap.read_bytes())
    assert mark.exists(), "the trap works"


def linear_shards(features: int) -> tuple[nn.Module, list[LocalShard]]:
    net = nn.Linear(features, 2)
    return net, [local_shard(whole(name, p.shape), p, replicas=2) for name, p in net.named_parameters()]


def adafactor_on_one_rank(rank: int, folder: str) -> str:
    net, shards = linear_shards(3)
    optimizer: torch.optim.Optimizer = torch.optim.Adafactor(net.parameters())
    if rank == 1:
        train(shards, optimizer, range(1))
    return complaint(lambda: save(f"{folder}/step-1", net, shards, optimizer))


def test_state_of_unknown_layout_is_named_on_all_ranks(tmp_path: Path) -> None:
    for told in run_ranks(adafactor_on_one_rank, 2, str(tmp_path)):
        assert "Adafactor keeps `row_var` for weight in a layout" in told
    assert not list(tmp_path.iterdir())
