"""Checkpoints of a single process: formats, optimizers, refusals, the folder, a writer that is killed."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from checkpoint_layouts import train
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from profiler.errors import OsdpError
from profiler.yaml_files import validate
from runtime.local_shards import LocalShard, local_shard, whole
from runtime.state import checkpoint_files
from runtime.state.checkpoint import latest, load, prune, save
from runtime.state.checkpoint_manifest import Manifest, StoredTensor, describe_file, read_manifest, write_manifest
from runtime.state.dcp_tensor import GlobalTensor

TESTS = Path(__file__).parents[1]


def pieces_of(net: nn.Module) -> list[LocalShard]:
    return [local_shard(whole(name, parameter.shape), parameter) for name, parameter in net.named_parameters()]


def linear(seed: int = 0) -> tuple[nn.Linear, list[LocalShard]]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    return net, pieces_of(net)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 1.0}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_happened(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    net, shards = linear()
    net.scale = nn.Parameter(torch.tensor(2.0))
    shards.append(local_shard(whole("scale", ()), net.scale))
    optimizer = kind(net.parameters(), **options)
    train(shards, optimizer, range(3))
    save(tmp_path / "step-3", net, shards, optimizer)
    state_3 = pickle.loads(pickle.dumps(optimizer.state_dict()))
    train(shards, optimizer, range(3, 5))
    after_5 = [parameter.detach().clone() for parameter in net.parameters()]

    how = {name: value for name, value in options.items() if name in ("foreach", "fused")}
    lr = torch.tensor(5.0) if isinstance(options.get("lr"), Tensor) else 5.0
    fresh = kind(net.parameters(), lr=lr, **how)
    load(tmp_path / "step-3", net, shards, fresh)
    torch.testing.assert_close(fresh.state_dict(), state_3, rtol=0, atol=0)
    train(shards, fresh, range(3, 5))
    assert all(torch.equal(p, value) for p, value in zip(net.parameters(), after_5, strict=True))


def test_moments_keep_their_dtype(tmp_path: Path) -> None:
    net, _ = linear()
    net.to(torch.bfloat16)
    shards = pieces_of(net)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1.0009765625)
    save(tmp_path / "a", net, shards, optimizer)
    again = torch.optim.SGD(net.parameters(), momentum=0.9)
    load(tmp_path / "a", net, shards, again)
    buffer = again.state[net.weight]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert buffer.eq(1.0009765625).all()


def test_parameters_are_converted_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "a", net, shards)
    half, _ = linear(seed=1)
    half.to(torch.bfloat16)
    load(tmp_path / "a", half, pieces_of(half))
    assert torch.equal(half.weight, net.weight.to(torch.bfloat16))


def test_an_optimizer_without_state_loads_as_one(tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "a", net, shards, torch.optim.Adam(net.parameters(), lr=0.5))
    optimizer = torch.optim.Adam(net.parameters())
    train(shards, optimizer, range(1))
    load(tmp_path / "a", net, shards, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_schedulers_and_data_come_back_in_extra(tmp_path: Path) -> None:
    net, shards = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    extra = {"scheduler": scheduler.state_dict(), "data": {"epoch": 3, "seen": [1, None, True, "ü"]}}
    assert extra["scheduler"]["best"] == math.inf
    save(tmp_path / "a", net, shards, optimizer, extra)
    assert load(tmp_path / "a", net, shards, optimizer) == extra


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"a": {"b": [0, Tensor()]}}, "extra['a']['b'][1] cannot be saved\n  got: a Tensor"),
        ({"a": {3: 1}}, "extra['a'] cannot be saved\n  got: the key 3"),
        ({"a": (1, 2)}, "extra['a'] cannot be saved\n  got: a tuple"),
    ],
)
def test_extra_that_would_come_back_changed_is_refused(extra: dict[str, Any], where: str, tmp_path: Path) -> None:
    net, shards = linear()
    with pytest.raises(OsdpError) as caught:
        save(tmp_path / "a", net, shards, extra=extra)
    assert where in str(caught.value)
    assert not list(tmp_path.iterdir())


class Named(nn.Module):
    def __init__(self, count: int, width: int = 2) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.ones(width)))


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        (Named(1), Named(8), "it lacks parameters or buffers of the model\n  got: p1, p2, p3, p4, p5 and 2 more"),
        (Named(3), Named(1), "it has parameters or buffers that the model does not have\n  got: p1, p2\n"),
        (Named(1), Named(1, width=3), "shapes differ from the model's\n  got: p0 (2,)\n  expected: p0 (3,)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved: Named, here: Named, told: str, tmp_path: Path) -> None:
    save(tmp_path / "a", saved, pieces_of(saved))
    with pytest.raises(OsdpError) as caught:
        load(tmp_path / "a", here, pieces_of(here))
    assert f"{tmp_path / 'a'} cannot be loaded: {told}" in str(caught.value)


def other_optimizers(net: nn.Module) -> list[tuple[torch.optim.Optimizer, str]]:
    weight, bias = net.parameters()
    return [
        (torch.optim.SGD([weight, bias]), "it is of another optimizer\n  got: Adam\n  expected: SGD"),
        (torch.optim.Adam([weight]), "its optimizer has other parameters\n  got: bias"),
        (torch.optim.Adam([weight, nn.Parameter(torch.ones(1))]), "Adam has a parameter that is not the model's"),
    ]


@pytest.mark.parametrize("index", range(3))
def test_state_of_another_optimizer_is_refused(index: int, tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "a", net, shards, torch.optim.Adam(net.parameters()))
    optimizer, told = other_optimizers(net)[index]
    with pytest.raises(OsdpError) as caught:
        load(tmp_path / "a", net, shards, optimizer)
    assert told in str(caught.value)


def test_groups_may_be_divided_but_not_joined(tmp_path: Path) -> None:
    net, shards = linear()
    apart = [{"params": [net.weight], "lr": 1.0}, {"params": [net.bias], "lr": 2.0}]
    save(tmp_path / "joined", net, shards, torch.optim.SGD(net.parameters(), lr=3.0))
    save(tmp_path / "apart", net, shards, torch.optim.SGD(apart))
    optimizer = torch.optim.SGD([{**group, "lr": 0.0} for group in apart])
    load(tmp_path / "joined", net, shards, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [3.0, 3.0]
    with pytest.raises(OsdpError, match="other parameter groups"):
        load(tmp_path / "apart", net, shards, torch.optim.SGD(net.parameters()))


def test_a_checkpoint_without_optimizer_says_so(tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "a", net, shards)
    with pytest.raises(OsdpError, match="it holds no optimizer's state"):
        load(tmp_path / "a", net, shards, torch.optim.Adam(net.parameters()))


class Extra(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}


def test_extra_state_is_refused_and_not_lost(tmp_path: Path) -> None:
    net = nn.Sequential(Extra())
    with pytest.raises(OsdpError, match=r"^0 has extra state"):
        save(tmp_path / "a", net, [])


def test_torch_tools_read_it_too(tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "a", net, shards)
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    by_torch = torch.load(tmp_path / "a.pt", weights_only=True)
    assert by_torch.keys() == {"model.weight", "model.bias"}
    assert torch.equal(by_torch["model.weight"], net.weight)


def test_tensors_that_are_code_are_refused(tmp_path: Path) -> None:
    """Also where the manifest was written to fit: it is no signature."""
    net, shards = linear()
    save(tmp_path / "a", net, shards)
    file, mark = tmp_path / "a" / "__0_0.distcp", tmp_path / "sprung"
    trap = pickle.dumps({"run": Trap(str(mark))}, protocol=2)
    file.write_bytes(trap)
    manifest = read_manifest(tmp_path / "a")
    forged = {
        key: StoredTensor(t.dtype, t.shape, tuple(type(p)(p.offsets, p.sizes, p.file, 0, len(trap)) for p in t.parts))
        for key, t in manifest.tensors.items()
    }
    files = manifest.files | {file.name: describe_file(file)}
    write_manifest(tmp_path / "a", Manifest(files, forged, None, {}))
    with pytest.raises(OsdpError, match="could not read"):
        load(tmp_path / "a", net, shards)
    assert not mark.exists()


class Trap:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "its manifest is damaged"),
        ("[]", "its manifest is damaged"),
        ('{"schema": "osdp.checkpoint/1"}', "its manifest is damaged"),
        ('{"schema": "osdp.checkpoint/9", "blake2b": "", "manifest": {}}', "another version of OSDP wrote it"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(text: str, told: str, tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "step-1", net, shards)
    (tmp_path / "step-1" / "manifest.json").write_text(text)
    with pytest.raises(OsdpError, match=told):
        load(tmp_path / "step-1", net, shards)
    assert latest(tmp_path) is None


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    net, shards = linear()
    save(tmp_path / "a", net, shards)
    path = tmp_path / "a" / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    body["tensors"]["model.bias"]["parts"][0]["file"] = "../b/__0_0.distcp"
    manifest, _ = validate(body, Manifest)
    assert manifest is not None
    write_manifest(tmp_path / "a", manifest)
    with pytest.raises(OsdpError, match="its manifest is damaged"):
        load(tmp_path / "a", net, shards)


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


def test_the_background_writes_what_was_there_when_called(tmp_path: Path) -> None:
    net, shards = linear()
    before = net.weight.detach().clone()
    saving = save(tmp_path / "a", net, shards, asynchronous=True)
    with torch.no_grad():
        net.weight.zero_()
    saving.wait()
    load(tmp_path / "a", net, shards)
    assert torch.equal(net.weight, before)
    assert saving.done


def test_parts_must_lie_in_the_tensor() -> None:
    with pytest.raises(ValueError, match="is no part of"):
        GlobalTensor((2, 2), torch.float32, (((1, 0), torch.zeros(2, 2)),))
    with pytest.raises(ValueError, match="is no part of"):
        GlobalTensor((2,), torch.float32, (((0,), torch.zeros(2, dtype=torch.int64)),))


# --- two writers, links, foreign files, damage that checksums cannot show


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


def test_checksums_are_of_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of what somebody else has put there by the end."""
    net, shards = linear()

    def meddle(self: checkpoint_files.Partial, manifest: Manifest) -> None:
        file = self.folder / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        publish(self, manifest)

    publish = checkpoint_files.Partial.publish
    monkeypatch.setattr(checkpoint_files.Partial, "publish", meddle)
    save(tmp_path / "step-1", net, shards)
    with pytest.raises(OsdpError, match="does not hold what was written"):
        load(tmp_path / "step-1", net, shards)


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    net, shards = linear()
    optimizer = torch.optim.Adam(net.parameters())
    train(shards, optimizer, range(1))
    save(tmp_path / "a", net, shards, optimizer)
    manifest = read_manifest(tmp_path / "a")
    assert set(manifest.files) == {"__0_0.distcp", ".metadata"}
    assert all(describe_file(tmp_path / "a" / name) == file for name, file in manifest.files.items())


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


def trained_checkpoint(folder: Path) -> tuple[nn.Linear, list[LocalShard], torch.optim.Optimizer]:
    net, shards = linear()
    optimizer = torch.optim.Adam(net.parameters())
    train(shards, optimizer, range(1))
    save(folder, net, shards, optimizer)
    return net, shards, optimizer


def a_hole(body: dict[str, Any]) -> None:
    part = body["tensors"]["model.weight"]["parts"][0]
    part["sizes"] = [part["sizes"][0] - 1, part["sizes"][1]]


def twice(body: dict[str, Any]) -> None:
    tensor = body["tensors"]["model.weight"]
    tensor["shape"] = [2 * tensor["shape"][0], tensor["shape"][1]]
    tensor["parts"] *= 2


def outside(body: dict[str, Any]) -> None:
    body["tensors"]["model.bias"]["parts"][0]["offsets"] = [1]


def text_rate(body: dict[str, Any]) -> None:
    body["optimizer"]["groups"][0]["lr"] = "high"


def negative_rate(body: dict[str, Any]) -> None:
    body["optimizer"]["groups"][0]["lr"] = -1.0


def unknown_dtype(body: dict[str, Any]) -> None:
    body["tensors"]["model.weight"]["dtype"] = "float12"


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (a_hole, "does not have all of model.weight"),
        (twice, "does not have all of model.weight"),
        (outside, "does not have all of model.bias"),
        (text_rate, "the option `lr` of its optimizer cannot be\n  got: 'high'"),
        (negative_rate, "the option `lr` of its optimizer cannot be\n  got: -1.0"),
        (unknown_dtype, "of a dtype that this PyTorch does not have\n  got: float12"),
    ],
)
def test_a_manifest_that_is_whole_and_wrong_is_refused(harm: Any, told: str, tmp_path: Path) -> None:
    """Before anything is changed."""
    net, shards, optimizer = trained_checkpoint(tmp_path / "a")
    body = json.loads((tmp_path / "a" / "manifest.json").read_text())["manifest"]
    harm(body)
    manifest, _ = validate(body, Manifest)
    assert manifest is not None
    write_manifest(tmp_path / "a", manifest)
    weight = net.weight.detach().clone()
    with pytest.raises(OsdpError) as caught:
        load(tmp_path / "a", net, shards, optimizer)
    assert told in str(caught.value)
    assert torch.equal(net.weight, weight)


def test_parameters_of_a_group_have_the_same_moments(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    shards = [local_shard(whole(name, p.shape), p) for name, p in net.named_parameters()]
    optimizer = torch.optim.Adam(net.parameters())
    train(shards, optimizer, range(1))
    save(tmp_path / "a", net, shards, optimizer)
    body = json.loads((tmp_path / "a" / "manifest.json").read_text())["manifest"]
    del body["tensors"]["optimizer.1.weight.exp_avg"]
    manifest, _ = validate(body, Manifest)
    assert manifest is not None
    write_manifest(tmp_path / "a", manifest)
    with pytest.raises(OsdpError, match=r"the same states of all parameters: exp_avg\n  got: 1\.weight and 0\.weight"):
        load(tmp_path / "a", net, shards, optimizer)
