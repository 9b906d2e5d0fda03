"""Checkpoints of a single process: formats, optimizers, refusals."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_layouts import linear, train, whole_pieces_of
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from profiler.errors import OsdpError
from profiler.yaml_files import validate
from runtime.local_shards import LocalShard, local_shard, whole
from runtime.state import checkpoint_files
from runtime.state.checkpoint import latest, load, save
from runtime.state.checkpoint_manifest import Manifest, StoredTensor, describe_file, read_manifest, write_manifest
from runtime.state.dcp_tensor import GlobalTensor

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
    shards = whole_pieces_of(net)
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
    load(tmp_path / "a", half, whole_pieces_of(half))
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
    save(tmp_path / "a", saved, whole_pieces_of(saved))
    with pytest.raises(OsdpError) as caught:
        load(tmp_path / "a", here, whole_pieces_of(here))
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


# --- damage that checksums cannot show


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
