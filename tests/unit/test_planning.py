"""What joins the stages: the default cluster, the limit, and plans that are opened again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shown_gpus import Shown, show_gpus

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


@pytest.mark.parametrize(
    ("gpu", "count", "expected"),
    [
        (Shown("NVIDIA TITAN RTX", (7, 5), 23.65, 72), 2, ("titan-rtx-8", 1, 2)),
        (Shown("TITAN RTX", (7, 5), 23.65, 72), 2, ("titan-rtx-8", 1, 2)),
        (Shown("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 132), 4, ("h100-8", 1, 4)),
        (Shown("NVIDIA A100-SXM4-80GB", (8, 0), 79.15, 108), 8, ("a100-80g-8", 1, 8)),
        (Shown("NVIDIA GeForce RTX 4090", (8, 9), 23.5, 128), 1, ("rtx4090-2", 1, 1)),
        (Shown("NVIDIA H200", (9, 0), 139.8, 132), 1, ("h200-1", 1, 1)),
    ],
)
def test_visible_gpus_choose_their_preset(
    monkeypatch: pytest.MonkeyPatch, gpu: Shown, count: int, expected: tuple[str, int, int]
) -> None:
    show_gpus(monkeypatch, [gpu] * count)
    cluster, why = default_cluster()
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == expected
    assert f"{count} x {gpu.name}" in why
    assert default_cluster(gpus_per_node=3)[0].gpus_per_node == 3


@pytest.mark.parametrize(
    "gpu",
    [
        Shown("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, 108),  # half the memory of the preset
        Shown("NVIDIA A100-SXM4-80GB", (8, 0), 79.15, 54),  # MPS gives it half of the multiprocessors
        Shown("NVIDIA H100 PCIe", (9, 0), 79.1, 114),  # slower, and on another link
        Shown("NVIDIA H100 80GB HBM2e", (9, 0), 79.1, 114),  # the same card, as older drivers name it
        Shown("NVIDIA H100 80GB HBM3 MIG 7g.80gb", (9, 0), 79.1, 132),
        Shown("NVIDIA GeForce RTX 3060", (8, 6), 11.6, 28),
        Shown("Tesla T4", (7, 5), 14.6, 40),
    ],
)
def test_other_gpus_never_become_a_preset(monkeypatch: pytest.MonkeyPatch, gpu: Shown) -> None:
    show_gpus(monkeypatch, [gpu, gpu])
    cluster, why = default_cluster()
    assert (cluster.device.name, cluster.gpus_per_node) == (gpu.name, 2)
    assert cluster.device.memory_bytes.value == gpu.total_memory
    assert f"derived from the visible 2 x {gpu.name}, which no preset describes" in why


def test_the_limit_is_the_device_unless_asked() -> None:
    cluster = load_cluster("titan-rtx-8")
    assert memory_limit(cluster, None) == 25340305408
    assert memory_limit(cluster, 8 * GIB) == 8 * GIB
    # A card sold with 24 GB, of which its driver leaves 23.6: asking for 24 means all of it.
    assert memory_limit(cluster, 24 * GIB) == 25340305408
    with pytest.raises(OsdpError, match="larger than the memory"):
        memory_limit(cluster, 24 * GIB + MIB)
