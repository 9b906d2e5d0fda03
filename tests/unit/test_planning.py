"""What joins the stages: the default cluster, the limit, and plans that are opened again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osdp.planning.clusters import default_cluster, memory_limit
from osdp.planning.plan_file import read_plan, reopen, write_plan
from osdp.planning.request import Request, plan_model
from osdp.zoo import load_cluster, load_model
from profiler.byte_sizes import GIB, MIB
from profiler.errors import OsdpError


def test_a_plan_is_the_same_after_the_file(tmp_path: Path) -> None:
    cluster = load_cluster("rtx4090-2")
    plan = plan_model(load_model("gpt2-tiny"), cluster, Request(GIB, micro_batch=2)).plan
    write_plan(tmp_path / "plan.yaml", plan, "made by a test")
    again = read_plan(tmp_path / "plan.yaml")
    assert again == plan
    # Traced and predicted anew, from the names alone.
    assert reopen(again).prediction == plan.predicted


def test_progress_tells_of_the_trace_first() -> None:
    told: list[tuple[str, float]] = []
    request = Request(GIB, micro_batch=2)
    plan_model(load_model("gpt2-tiny"), load_cluster("rtx4090-2"), request, lambda *what: told.append(what))
    assert told[0] == ("tracing gpt2-tiny", 0.0)
    assert told[-1] == ("done", 1.0)
    assert all(0 <= fraction <= 1 for _, fraction in told)


def test_what_cannot_be_asked_is_refused_before_the_trace() -> None:
    source = replace(load_model("gpt2-tiny"), build=lambda: pytest.fail("it was built"))
    for request in (Request(GIB, precision="fp8"), Request(GIB, optimizer="lion")):
        with pytest.raises(OsdpError):
            plan_model(source, load_cluster("rtx4090-2"), request)


# --- the cluster where none is named ------------------------------------------------------------------------


def show_gpus(monkeypatch: pytest.MonkeyPatch, name: str, count: int, memory_bytes: float) -> None:
    class Properties:
        total_memory = int(memory_bytes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)


@pytest.mark.parametrize(
    ("name", "count", "memory_gib", "expected"),
    [
        ("NVIDIA TITAN RTX", 2, 23.65, ("titan-rtx-8", 1, 2)),
        ("NVIDIA H100 80GB HBM3", 4, 79.1, ("h100-8", 1, 4)),
        ("NVIDIA A100-SXM4-80GB", 8, 79.15, ("a100-80g-8", 1, 8)),
        ("NVIDIA GeForce RTX 4090", 1, 23.5, ("rtx4090-2", 1, 1)),
        ("NVIDIA H200", 1, 139.8, ("h200-1", 1, 1)),
    ],
)
def test_visible_gpus_choose_their_preset(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, memory_gib: float, expected: tuple[str, int, int]
) -> None:
    show_gpus(monkeypatch, name, count, memory_gib * GIB)
    cluster, why = default_cluster()
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == expected
    assert f"{count} x {name}" in why
    assert default_cluster(gpus_per_node=3)[0].gpus_per_node == 3


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4),  # half the memory of the preset
        ("NVIDIA H100 PCIe", 79.1),  # slower, and on another link
        ("NVIDIA GeForce RTX 3090", 23.6),
        ("Tesla T4", 14.6),
    ],
)
def test_other_gpus_get_the_default_and_are_told(monkeypatch: pytest.MonkeyPatch, name: str, memory_gib: float) -> None:
    show_gpus(monkeypatch, name, 2, memory_gib * GIB)
    cluster, why = default_cluster()
    assert cluster == load_cluster("titan-rtx-8")
    assert f"there is no preset for the visible {name}" in why


def test_the_limit_is_the_device_unless_asked() -> None:
    cluster = load_cluster("titan-rtx-8")
    assert memory_limit(cluster, None) == 25340305408
    assert memory_limit(cluster, 8 * GIB) == 8 * GIB
    # A card sold with 24 GB, of which its driver leaves 23.6: asking for 24 means all of it.
    assert memory_limit(cluster, 24 * GIB) == 25340305408
    with pytest.raises(OsdpError, match="larger than the memory"):
        memory_limit(cluster, 24 * GIB + MIB)
