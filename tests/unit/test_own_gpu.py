"""Which GPU a rank takes, and how it joins the others there, by stand-ins for torch.cuda and NCCL."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from osdp.training import process_group, rank_main
from osdp.training.process_group import Ranks, joined
from profiler.errors import OsdpError
from runtime import own_gpu
from runtime.failures.rank_agreement import Agreement


class Gpus:
    """`torch.cuda` with GPUs, and a process group that takes notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: self.calls.append(("set_device", gpu.index)))
        properties = lambda gpu: SimpleNamespace(uuid=f"GPU-{gpu.index}")  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(dist, "init_process_group", self._note("init"))
        monkeypatch.setattr(dist, "barrier", self._note("barrier"))
        monkeypatch.setattr(dist, "destroy_process_group", self._note("destroy"))
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def _note(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, kwargs))


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"), [("3", 8, 3), ("3", 1, 0), ("5", 4, 1), (None, 1, 0), (None, 4, 0)]
)
def test_the_gpu_of_the_local_rank_among_those_that_are_seen(
    local_rank: str | None, visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four ranks of a machine may see one GPU alone, which is then its number 0."""
    monkeypatch.setenv("LOCAL_RANK", local_rank or "")
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK")
    gpus = Gpus(monkeypatch, visible)
    with joined("cuda", 60.0) as ranks:
        assert ranks.device == torch.device("cuda", index)
    names = [call[0] for call in gpus.calls]
    assert names == ["set_device", "init", "barrier", "destroy"]
    assert gpus.calls[0] == ("set_device", index)
    assert gpus.calls[1][1] == "cpu:gloo,cuda:nccl"
    assert gpus.calls[2] == ("barrier", {"device_ids": [index]})


def test_cpu_ranks_name_no_gpu_at_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 0)
    with joined("cpu", 60.0):
        pass
    assert gpus.calls[1] == ("barrier", {"device_ids": None})


@pytest.mark.parametrize("given", [None, "1"])
def test_a_lost_rank_is_to_raise_unless_the_user_says_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpus(monkeypatch, 1)
    monkeypatch.setenv(own_gpu.NCCL_ERRORS, given or "")  # so that it is put back afterwards
    if given is None:
        monkeypatch.delenv(own_gpu.NCCL_ERRORS)
    seen: list[str | None] = []
    monkeypatch.setattr(
        process_group.dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(own_gpu.NCCL_ERRORS))
    )
    with joined("cuda", 60.0):
        pass
    assert seen == [given or "2"]


@pytest.mark.parametrize(
    ("names", "got"),
    [(("a", "b", "c"), ""), (("a", "b", "a"), "ranks 0, 2 on one"), (("a", "a", "b"), "ranks 0, 1 on one")],
)
def test_ranks_that_share_a_gpu_are_named(names: tuple[str, ...], got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would say that it is an invalid usage."""
    monkeypatch.setattr(Agreement, "gather", lambda self, doing, action: list(names))
    if not got:
        own_gpu.refuse_shared_gpus(torch.device("cuda", 0))
        return
    with pytest.raises(OsdpError, match="ranks share a GPU") as caught:
        own_gpu.refuse_shared_gpus(torch.device("cuda", 0))
    assert caught.value.got == got


def test_the_allocator_is_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a limit beyond what the driver has is all of that."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, gpu: fractions.append(part))
    for limit_bytes in (250, 1000, 1001):
        own_gpu.keep_within(limit_bytes, torch.device("cuda", 0))
    assert fractions == [0.25, 1.0, 1.0]


@given(st.integers(1, 2 * 10**11), st.integers(1, 2 * 10**11))
def test_not_a_byte_of_a_limit_is_lost(one: int, other: int) -> None:
    """3,820 MiB of an H200's 150,109,880,320 bytes were 3,820 MiB less one byte."""
    for limit_bytes, total_bytes in ((min(one, other), max(one, other)), (3820 * 2**20, 150_109_880_320)):
        with (
            patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(total_memory=total_bytes)),
            patch.object(torch.cuda, "set_per_process_memory_fraction") as taken,
        ):
            own_gpu.keep_within(limit_bytes, torch.device("cuda", 0))
        assert limit_bytes <= int(taken.call_args.args[0] * total_bytes) <= limit_bytes + 1


@pytest.mark.parametrize(
    ("device", "fsdp_type", "done"),
    [
        ("cuda", "OSDP", ["within 9400", "built", "within 8376", "trained"]),
        ("cuda", "FSDP", ["built", "trained"]),
        ("cpu", "OSDP", ["built", "trained"]),
    ],
)
def test_windows_are_taken_off_what_the_allocator_may_have(
    device: str, fsdp_type: str, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a limit of 10,000 bytes the context takes 600, and what two units have beside the allocator 1000 and 24."""
    calls: list[str] = []
    gpu = torch.device("cuda", 3)
    plan = SimpleNamespace(limit_bytes=10_000)
    cluster = SimpleNamespace(device=SimpleNamespace(reserve_bytes={"context": SimpleNamespace(value=600.0)}))
    units = [SimpleNamespace(bytes_beside_allocator=size) for size in (1000, 0, 24)]
    trainer = SimpleNamespace(
        model=SimpleNamespace(sharded=SimpleNamespace(units=units)),
        position=SimpleNamespace(step=0),
        resumed=None,
        run=lambda: calls.append("trained"),
    )

    def keep_within(limit_bytes: int, of: torch.device) -> None:
        assert of == gpu
        calls.append(f"within {limit_bytes}")

    stand_ins: dict[str, Any] = {
        "from_rank_0": lambda name, choose: (plan, 0.0),
        "cluster_of_plan": lambda of, path: cluster,
        "keep_within": keep_within,
        "_trainer": lambda *_: calls.append("built") or trainer,
        "_summary": lambda *_: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(rank_main, name, stand_in)
    job: Any = SimpleNamespace(device=device, config=SimpleNamespace(fsdp_type=fsdp_type))
    rank_main._train(job, Ranks(0, 1, gpu), lambda event: None)
    assert calls == done
