"""Folders of safetensors: every rank reads its part, none holds the whole, and plain libraries read what was saved."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import Case, build, graph_of, initial
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from thoroughness import THOROUGH
from torch import Tensor, nn
from toys import STRATEGIES, Toy, plan_of, refusal, seeded

MIB = 1 << 20
MIXED = {operator.name: STRATEGIES[i % len(STRATEGIES)] for i, operator in enumerate(graph_of("gpt2").operators)}
MIXED["blocks.0.mlp_up"] = "split(shard, owner)"


def plans() -> Iterator[tuple[str, Any]]:
    """Yield plans by name: some of one strategy, two unless thorough, and a mixture with a split layer."""
    for name in ("replicate", "shard", "group_shard:2", "owner", "odc:2") if THOROUGH else ("shard", "owner"):
        yield name, Case("gpt2", {}, name).plan()
    yield "mixed", Case("gpt2", MIXED).plan()


def read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder as its index lists them, by the library alone."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    return {key: files[name][key] for key, name in weight_map.items()}


def save_and_load(rank: int, folder: Path) -> None:
    """Save under each plan and load under the next, from other values; in one file and in several."""
    from osdp import OSDP

    wanted = initial("gpt2").state_dict()
    made = list(plans())
    for number, (name, plan) in enumerate(made):
        there = folder / name.replace(":", "-")
        OSDP(initial("gpt2"), plan).save_pretrained(there, max_shard_bytes=2000 if number % 2 else 1 << 30)
        dist.barrier()
        tensors = read(there)
        assert wanted.keys() - tensors.keys() == {"lm_head.weight"}, "tied, and so saved once"
        assert not tensors.keys() - wanted.keys()
        assert (len(list(there.glob("*.safetensors"))) > 1) == bool(number % 2)
        for key, value in tensors.items():
            assert torch.equal(value, wanted[key]), key
        model = OSDP(seeded(lambda: build("gpt2"), seed=5), made[(number + 1) % len(made)][1])
        assert model.load_pretrained(there) == ([], [])
        got = model.full_state_dict(rank0_only=False)
        assert all(torch.equal(got[key], wanted[key]) for key in wanted), name
        assert list(there.glob(".*")) == []


def test_what_is_saved_is_loaded_under_any_plan(tmp_path: Path) -> None:
    run_ranks(save_and_load, 4, tmp_path, ranks_per_node=2)


class Small(Toy):
    """Two layers, one of them named differently elsewhere, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5, 6) -> a loss."""
        return (self.second(self.first(x)) * self.scale).pow(2).mean()


def load_foreign(rank: int, folder: Path) -> dict[str, str]:
    """Load what others have saved, in another dtype and under other names; return what is refused."""
    from osdp import OSDP

    model = OSDP(seeded(Small), plan_of(Small(), "shard", ranks=(1, 2)))
    before = model.full_state_dict(rank0_only=False)
    said = {
        "names": refusal(lambda: model.load_pretrained(folder)),
        "shape": refusal(lambda: model.load_pretrained(folder / "shape")),
        "nothing": refusal(lambda: model.load_pretrained(folder / "nothing")),
        "damaged": refusal(lambda: model.load_pretrained(folder / "damaged")),
        "outside": refusal(lambda: model.load_pretrained(folder / "outside")),
        "lacking": refusal(lambda: model.load_pretrained(folder / "lacking")),
    }
    after = model.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[key], before[key]) for key in before), "what is refused changes nothing"
    renamed = {"first.weight": "model.first.weight", "first.bias": "model.first.bias"}
    missing, unexpected = model.load_pretrained(folder, rename=renamed, strict=False)
    assert (missing, unexpected) == (["second.bias"], ["extra"])
    got, saved = model.full_state_dict(rank0_only=False), load_file(folder / "model.safetensors")
    assert torch.equal(got["first.weight"], saved["model.first.weight"].float())
    assert torch.equal(got["second.weight"], saved["second.weight"].float())
    assert torch.equal(got["second.bias"], before["second.bias"])
    assert (got["scale"], got["steps"]) == (3.5, 7)
    return said


def test_what_others_saved_is_loaded_or_refused(tmp_path: Path) -> None:
    other = {key: value.bfloat16() for key, value in seeded(Small, seed=9).state_dict().items()}
    named = {f"model.{key}" if key.startswith("first") else key: value for key, value in other.items()}
    named |= {"extra": torch.ones(1), "scale": torch.tensor(3.5), "steps": torch.tensor(7)}
    del named["second.bias"]
    for name in ("", "shape", "damaged", "outside", "lacking", "nothing"):
        (tmp_path / name).mkdir(exist_ok=True)
    save_file(named, tmp_path / "model.safetensors")
    plain = dict(seeded(Small).state_dict())
    save_file(plain | {"first.weight": torch.zeros(6, 7)}, tmp_path / "shape" / "model.safetensors")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\xff" * 40)
    save_file(plain, tmp_path / "lacking" / "a.safetensors")
    for name, file in (("outside", "../model.safetensors"), ("lacking", "a.safetensors")):
        weight_map = dict.fromkeys([*plain, "more"], file)
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    said = run_ranks(load_foreign, 2, tmp_path)
    assert said[0] == said[1]
    for name, parts in {
        "names": ("are not the model's", "unknown names extra, model.first.bias", "second.bias", "rename="),
        "shape": ("first.weight", "(6, 7)", "(6, 6)"),
        "nothing": ("cannot be read as a pretrained model", "model.safetensors"),
        "damaged": ("cannot be read as a pretrained model",),
        "outside": ("outside of its folder",),
        "lacking": ("lists tensors that its files lack", "more"),
    }.items():
        assert all(part in said[0][name] for part in parts), said[0][name]


def cannot_write(rank: int, folder: Path) -> str:
    """Return what is said where a file stands in the way of the folder."""
    from osdp import OSDP

    model = OSDP(seeded(Small), plan_of(Small(), "shard", ranks=(1, 2)))
    return refusal(lambda: model.save_pretrained(folder / "file" / "model"))


def test_what_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = run_ranks(cannot_write, 2, tmp_path)
    assert said[0] == said[1]
    assert "could not make the folder" in said[0]


# --- memory


LAYERS, WIDTH = (16, 4096) if THOROUGH else (8, 2048)
"""Of 64 MiB each, 1 GiB; or of 16 MiB each, 128 MiB."""
LARGEST = 4 * WIDTH * WIDTH
SLACK = 24 * MIB
"""For buffers of gloo, the header and the interpreter."""
ATTEMPTS = 3
"""Of which one has to do: which rank is ahead varies, and once in four whole test runs 28 KB too much were seen."""


class Large(Toy):
    """Large linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def example_inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of forward."""
        return (torch.randn(batch, WIDTH),), {}

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> a loss."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def anonymous_bytes() -> int:
    """Return this process's memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


@contextmanager
def highest() -> Iterator[list[int]]:
    """Note by how much memory grew at most within."""
    found, done, before = [0], threading.Event(), anonymous_bytes()

    def watch() -> None:
        while not done.is_set():
            found[0] = max(found[0], anonymous_bytes() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def stay_small(rank: int, folder: Path) -> tuple[int, int, int]:
    """Return what loading and saving take at most beside the share, and the bytes of the share."""
    from osdp import OSDP

    with torch.device("meta"):
        made = Large()
    for layer in made.layers:
        layer.reset_parameters = lambda layer=layer: nn.init.zeros_(layer.weight)
    model = OSDP(made, plan_of(Large(), "shard", ranks=(1, 4)))
    share = sum(shard.numel * 4 for shard in model.sharded.local_shards)
    with highest() as loading:
        assert model.load_pretrained(folder) == ([], [])
    for number, shard in enumerate(model.sharded.local_shards):
        assert (shard.local(shard.parameter) == number + 1).all()
    with highest() as saving:
        model.save_pretrained(folder / "saved", max_shard_bytes=2 * LARGEST)
    return loading[0], saving[0], share


def test_a_large_model_is_loaded_and_saved_in_shares(tmp_path: Path) -> None:
    """A rank has its quarter from the start; loading adds a part of a tensor, saving a file and a tensor."""
    tensors = {f"layers.{i}.weight": torch.full((WIDTH, WIDTH), float(i + 1)) for i in range(LAYERS)}
    save_file(tensors, tmp_path / "model.safetensors")
    for attempt in range(ATTEMPTS):
        ranks = run_ranks(stay_small, 4, tmp_path, timeout_s=240)
        assert {share for _, _, share in ranks} == {LAYERS * LARGEST // 4}
        loading, saving = (max(rank[what] for rank in ranks) for what in (0, 1))
        if (loading <= LARGEST + SLACK and saving <= 3 * LARGEST + SLACK) or attempt == ATTEMPTS - 1:
            break
        shutil.rmtree(tmp_path / "saved")
    assert loading <= LARGEST + SLACK
    assert saving <= 3 * LARGEST + SLACK
    for key, value in read(tmp_path / "saved").items():
        assert torch.equal(value, tensors[key])
