"""Clusters of GPUs that no preset describes: from the table of cards, or derived, and said so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from shown_gpus import Nvml, Shown, show_gpus

from osdp.planning.clusters import cluster_names, default_cluster, load_cluster
from osdp.planning.plan_file import read_plan, reopen
from osdp.planning.rank_grid import cluster_at_hand
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cards import CARDS, GENERATIONS, card_of, generation_of, slice_of
from profiler.cluster.cluster import Cluster
from profiler.cluster.read_cluster import read_cluster
from profiler.errors import OsdpError
from profiler.yaml_files import write_yaml

L40S = Shown("NVIDIA L40S", (8, 9), 44.4, 142, 2520, 9001, 384)
UNKNOWN = Shown("NVIDIA RTX 4500 Ada Generation", (8, 9), 23.6, 60, 2580, 9001, 192)


def visible(monkeypatch: pytest.MonkeyPatch, gpus: list[Shown], nvml: Nvml | None = None, **more: Any) -> Cluster:
    show_gpus(monkeypatch, gpus, nvml, **more)
    return load_cluster("visible")


# --- the table ------------------------------------------------------------------------------------


def test_names_are_those_of_one_card() -> None:
    assert [card_of(card.name) for card in CARDS] == list(CARDS)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_row_agrees_with_what_its_multiprocessors_do(card: Any) -> None:
    """At some clock that cards have; H20 is held below what its multiprocessors could."""
    flops_per_clock = card.fp32_flops_per_s / card.multiprocessors / 1e9
    assert any(1.3 < flops_per_clock / one.fp32_flops_per_clock < 2.7 for one in GENERATIONS.values())
    if card.bf16_flops_per_s and "H20" not in card.name.replace("H200", ""):
        # L40's published rate is half of the L40S's; GeForce and A10G accumulate in fp32 at half the rate.
        each = card.bf16_flops_per_s / card.multiprocessors / 1e9
        rates = [one.bf16_flops_per_clock for one in GENERATIONS.values() if one.bf16_flops_per_clock]
        assert any(1.3 < each / rate < 2.7 for rate in [*rates, 512])
    assert card.document.startswith("NVIDIA ")
    assert card.memory_bytes_per_s < 10e12


@pytest.mark.parametrize("name", [name for name in cluster_names() if name not in ("cpu-gloo", "a100-2x8", "h100-4x8")])
def test_presets_have_the_figures_of_the_table(name: str) -> None:
    (card,) = [card for card in CARDS if card.preset == name]
    device = load_cluster(name).device
    rates = (("fp32", card.fp32_flops_per_s), ("bf16", card.bf16_flops_per_s), ("fp16", card.fp16_flops_per_s))
    assert {key: figure.value for key, figure in device.matmul_flops_per_s.items()} == {
        key: value for key, value in rates if value
    }
    assert device.memory_bytes_per_s.value == pytest.approx(0.85 * card.memory_bytes_per_s, rel=1e-3)
    assert card_of(card.name, int(device.memory_bytes.value)) == card


@pytest.mark.parametrize(
    ("gpu", "fp32", "bf16", "bandwidth"),
    # The cards that became a TITAN RTX, as torch prints them.
    [
        (Shown("NVIDIA H100 PCIe", (9, 0), 79.1, 114), 51.2, 756, 2039),
        (Shown("NVIDIA H100 NVL", (9, 0), 93.0, 132), 60, 835, 3900),
        (Shown("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, 108), 19.5, 312, 1555),
        (Shown("A100-SXM4-40GB", (8, 0), 39.4, 108), 19.5, 312, 1555),
        (Shown("NVIDIA A100-PCIE-40GB", (8, 0), 39.4, 108), 19.5, 312, 1555),
        (Shown("NVIDIA A100 80GB PCIe", (8, 0), 79.2, 108), 19.5, 312, 1935),
        (L40S, 91.6, 362, 864),
        (Shown("NVIDIA A10G", (8, 6), 22.1, 80), 35, 70, 600),
        (Shown("NVIDIA B200", (10, 0), 178.4, 148), 75, 2250, 7700),
        (Shown("NVIDIA H20", (9, 0), 95.2, 78), 44, 148, 4000),
        (Shown("NVIDIA RTX A6000", (8, 6), 47.4, 84), 38.7, 154.8, 768),
    ],
)
def test_a_card_of_the_table(
    monkeypatch: pytest.MonkeyPatch, gpu: Shown, fp32: float, bf16: float, bandwidth: float
) -> None:
    device = visible(monkeypatch, [gpu]).device
    rates = device.matmul_flops_per_s
    assert (rates["fp32"].value, rates["bf16"].value) == pytest.approx((fp32 * 1e12, bf16 * 1e12))
    assert rates["fp32"].source.startswith("assumed: " if "H20" in gpu.name else "datasheet: NVIDIA ")
    assert device.memory_bytes_per_s.value == pytest.approx(0.85 * bandwidth * 1e9)
    assert (device.name, device.memory_bytes.value) == (gpu.name, gpu.total_memory)
    assert device.memory_bytes.source.startswith("measured: ")
    assert device.memory_bytes.value <= device.nominal_bytes.value < device.memory_bytes.value + GIB


# --- what the table does not have -----------------------------------------------------------------


def test_an_unknown_card_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    device = visible(monkeypatch, [UNKNOWN]).device
    rates = device.matmul_flops_per_s
    assert rates["fp32"].value == pytest.approx(60 * 256 * 2.58e9)  # NVIDIA says 39.6 TFLOPS
    assert rates["bf16"].value == pytest.approx(60 * 1024 * 2.58e9)
    assert rates["fp32"].source.startswith("derived: 60 multiprocessors x 256 FLOP per clock at 2.58 GHz")
    assert device.memory_bytes_per_s.value == pytest.approx(0.85 * 432e9, rel=1e-3)
    assert device.memory_bytes_per_s.source.startswith("derived: ")
    assert device.matmul_efficiency.source.startswith("assumed: ")


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A30", (8, 0)),
        ("NVIDIA A40", (8, 6)),
        ("NVIDIA GeForce RTX 3090", (8, 6)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H100 PCIe", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
    ],
)
def test_derived_rates_are_near_the_datasheet(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]
) -> None:
    """Cards of the table under another name, at the clock of their fp32 rate."""
    card = card_of(name)
    assert card is not None
    clock_mhz = round(card.fp32_flops_per_s / card.multiprocessors / GENERATIONS[capability].fp32_flops_per_clock / 1e6)
    renamed = f"{'NVIDIA GeForce' if 'GeForce' in name else 'NVIDIA'} X"
    gpu = Shown(renamed, capability, card.memory_gib, card.multiprocessors, clock_mhz)
    rates = visible(monkeypatch, [gpu]).device.matmul_flops_per_s
    assert rates["fp32"].value == pytest.approx(card.fp32_flops_per_s, rel=0.01)
    if card.bf16_flops_per_s is None:
        assert "bf16" not in rates
    else:  # Hopper's tensor cores run at a lower clock than its fp32 units.
        assert 0.97 < rates["bf16"].value / card.bf16_flops_per_s < 1.1


@pytest.mark.parametrize("missing", ["pynvml", "nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_what_nothing_tells_is_assumed(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    nvml = None if missing == "pynvml" else Nvml(unsupported=(missing,))
    bare = Shown("NVIDIA Unheard-of", (8, 6), 16, 50, None, None, None)
    cluster = visible(monkeypatch, [bare, bare], nvml)
    device = cluster.device
    assert device.matmul_flops_per_s["bf16"].value == pytest.approx(50 * 1024 * 1.5e9)
    assert "at 1.50 GHz, which nothing tells" in device.matmul_flops_per_s["bf16"].source
    assert device.memory_bytes_per_s.value == pytest.approx(50 * 8e9)
    for figure in (*device.matmul_flops_per_s.values(), device.memory_bytes_per_s, cluster.intra.bytes_per_s):
        assert figure.source.startswith("assumed: ")
    assert "NVML told nothing" in cluster.intra.bytes_per_s.source


@pytest.mark.parametrize(
    ("capability", "as_of"), [((11, 0), "10.0"), ((12, 1), "12.0"), ((99, 0), "12.0"), ((8, 7), "8.6"), ((3, 5), "5.0")]
)
def test_an_unknown_capability_is_taken_for_an_older_one(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], as_of: str
) -> None:
    assert generation_of(capability)[1] == as_of
    rates = visible(monkeypatch, [Shown("NVIDIA Thor", capability, 120, 20)]).device.matmul_flops_per_s
    own = ".".join(map(str, capability))
    assert rates["fp32"].source.startswith("assumed: ")
    assert f"as of compute capability {as_of} and not {own}" in rates["fp32"].source


def test_geforce_accumulates_at_half_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = visible(monkeypatch, [Shown("NVIDIA GeForce RTX 3060", (8, 6), 11.6, 28, 1777)]).device.matmul_flops_per_s
    assert rates["bf16"].value == pytest.approx(28 * 512 * 1.777e9)


# --- MIG ------------------------------------------------------------------------------------------


def test_a_slice_is_a_part_of_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slice_of("NVIDIA H100 PCIe") is None
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    cluster = visible(monkeypatch, [Shown(name, (9, 0), 9.5, 16, 1980, 2619, 5120)])
    rates = cluster.device.matmul_flops_per_s
    assert rates["bf16"].value == pytest.approx(989.4e12 * 16 / 132)
    assert "16 of the 132 multiprocessors" in rates["bf16"].source
    assert cluster.device.memory_bytes_per_s.value == pytest.approx(0.85 * 3350e9 / 8)
    assert cluster.device.memory_bytes.value == int(9.5 * GIB)
    assert cluster.device.reserve_bytes["nccl_buffers"].value == 80 * MIB
    assert cluster.intra.bytes_per_s.source.startswith("assumed: ")


def test_of_a_slice_of_an_unknown_card_the_bus_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = visible(monkeypatch, [Shown("NVIDIA B100 MIG 1c.2g.45gb", (10, 0), 44, 36, 1900, 4000, 8192)]).device
    assert device.matmul_flops_per_s["bf16"].value == pytest.approx(36 * 8192 * 1.9e9)
    assert device.memory_bytes_per_s.value == pytest.approx(36 * 8e9)
    assert device.memory_bytes_per_s.source.startswith("assumed: ")


# --- links ----------------------------------------------------------------------------------------

A100 = Shown("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, 108)
A6000 = Shown("NVIDIA RTX A6000", (8, 6), 47.4, 84)
H100_NVL = Shown("NVIDIA H100 NVL", (9, 0), 93.0, 132)


def pairs(*linked: tuple[int, int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, linked))


CUBE = [*combinations(range(4), 2), *combinations(range(4, 8), 2), *((one, one + 4) for one in range(4))]
"""The hybrid cube mesh of a DGX-1: four links of each GPU."""


@pytest.mark.parametrize(
    ("gpus", "nvml", "gb_per_s", "nvlink", "nvls"),
    [
        ([A100] * 8, Nvml(12, None, to_switch=True), 0.77 * 300, True, False),
        ([H100_NVL] * 2, Nvml(18, None), 0.77 * 450, True, False),
        ([Shown("NVIDIA H800", (9, 0), 79.1, 132)] * 8, Nvml(8, None, to_switch=True), 0.77 * 200, True, True),
        ([A6000] * 2, Nvml(4, pairs((0, 1))), 0.77 * 56, True, False),
        # Bridges between pairs make no ring of four: it crosses PCI Express.
        ([A6000] * 4, Nvml(4, pairs((0, 1), (2, 3))), 0.8 * 24, False, False),
        ([A6000] * 4, Nvml(4, pairs((0, 1), (2, 3)), peers=False), 0.5 * 24, False, False),
        ([Shown("Tesla V100-SXM2-16GB", (7, 0), 15.7, 80)] * 8, Nvml(6, pairs(*CUBE)), 0.77 * 150, True, False),
        ([L40S] * 4, Nvml(generation=4), 0.8 * 24, False, False),
        ([L40S] * 4, Nvml(generation=4, lanes=8, peers=False), 0.5 * 12, False, False),
        ([L40S] * 4, Nvml(generation=9), 0.8 * 96, False, False),
        # One of eight GPUs is visible: its links to the switch would serve more of them.
        ([A100], Nvml(12, None, to_switch=True), 0.77 * 300, True, False),
        ([A6000], Nvml(4, None), 0.8 * 24, False, False),
        # NVSwitch is there, but its fabric manager is not running.
        ([A100] * 8, Nvml(12, frozenset(), to_switch=True), 0.8 * 24, False, False),
    ],
)
def test_links_by_nvml(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Shown], nvml: Nvml, gb_per_s: float, nvlink: bool, nvls: bool
) -> None:
    cluster = visible(monkeypatch, gpus, nvml)
    assert cluster.intra.bytes_per_s.value / 1e9 == pytest.approx(gb_per_s)
    assert cluster.intra.bytes_per_s.source.startswith("derived: ")
    assert cluster.nccl is not None
    assert (cluster.nccl.nvlink, cluster.nccl.nvls) == (nvlink, nvls)
    assert cluster.inter is None


@pytest.mark.parametrize("peers", [False, True])
def test_without_nvml_links_are_pci_express_and_assumed(monkeypatch: pytest.MonkeyPatch, peers: bool) -> None:
    cluster = visible(monkeypatch, [A100] * 8, peers=peers)
    assert cluster.intra.bytes_per_s.value == pytest.approx((0.8 if peers else 0.5) * 24e9)
    assert cluster.intra.bytes_per_s.source.startswith("assumed: ")
    assert cluster.nccl is not None
    assert not cluster.nccl.nvlink
    assert cluster.nccl.source.startswith("assumed: ")
    # Memory is kept for links that may be there.
    assert cluster.device.reserve_bytes["nccl_buffers"].value == 512 * MIB


def test_what_nvml_does_not_support_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkGeneration")
    cluster = visible(monkeypatch, [L40S] * 2, Nvml(unsupported=functions))
    assert cluster.intra.bytes_per_s.value == pytest.approx(0.5 * 24e9)
    assert cluster.intra.bytes_per_s.source.startswith("assumed: ")


# --- several that are not alike -------------------------------------------------------------------


def test_of_unlike_gpus_each_figure_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    t4 = Shown("Tesla T4", (7, 5), 14.6, 40, 1590, 5001, 256)
    show_gpus(monkeypatch, [L40S, t4])
    cluster, why = default_cluster()
    device = cluster.device
    assert "1 x NVIDIA L40S and 1 x Tesla T4" in why
    assert "each figure the least of these GPUs" in why
    assert device.name == "the least of NVIDIA L40S and Tesla T4"
    assert device.memory_bytes.value == t4.total_memory
    assert {name: figure.value for name, figure in device.matmul_flops_per_s.items()} == {"fp32": 8.1e12}
    assert device.memory_bytes_per_s.value == pytest.approx(0.85 * 320e9)
    assert cluster.nccl is not None
    assert cluster.nccl.architecture == "turing"


def test_two_presets_at_once_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As first only the first GPU was looked at."""
    show_gpus(
        monkeypatch, [Shown("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 132), Shown("NVIDIA H200", (9, 0), 139.8, 132)]
    )
    cluster, _ = default_cluster()
    assert cluster.name == "visible-nvidia-h100-80gb-hbm3-and-nvidia-h200"
    assert cluster.device.memory_bytes.value == int(79.1 * GIB)


H100 = Shown("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 132, 1980, 2619, 5120)
TITAN = Shown("NVIDIA TITAN RTX", (7, 5), 23.6, 72, 2100, 7001, 384)


@pytest.mark.parametrize(
    ("gpus", "nvml", "name"),
    [
        ([H100] * 4, Nvml(nvlinks=18, to_switch=True), "h100-8"),
        ([H100] * 4, Nvml(unsupported=("nvmlDeviceGetP2PStatus",)), "h100-8"),
        ([H100] * 2, Nvml(nvlinks=18, pairs=None, to_switch=True), "h100-8"),
        ([H100] * 2, Nvml(nvlinks=0), "visible-nvidia-h100-80gb-hbm3"),
        ([H100] * 2, None, "h100-8"),
        ([H100], Nvml(nvlinks=0), "h100-8"),
        ([TITAN] * 2, Nvml(nvlinks=2, pairs=None), "visible-nvidia-titan-rtx"),
        ([TITAN] * 2, Nvml(nvlinks=0), "titan-rtx-8"),
    ],
    ids=["no ring", "not told", "NVSwitch", "PCI Express", "no NVML", "one alone", "a bridge", "none"],
)
def test_a_preset_is_taken_where_it_has_the_links_that_nvml_finds(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Shown], nvml: Nvml | None, name: str
) -> None:
    show_gpus(monkeypatch, gpus, nvml)
    cluster, why = default_cluster()
    assert cluster.name == name
    told = {"visible-nvidia-h100-80gb-hbm3": "without NVLink", "visible-nvidia-titan-rtx": "by NVLink"}
    assert told.get(name, "the preset of the visible GPUs") in why
    assert cluster.nccl is not None
    assert cluster.nccl.nvlink is (name == "h100-8" or ("titan-rtx" in name and name != "titan-rtx-8"))


def test_one_rank_has_nobody_to_be_connected_with(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, [TITAN] * 2, Nvml(nvlinks=2, pairs=None))
    assert default_cluster(gpus_per_node=1)[0].name == "titan-rtx-8"


# --- what is said, and plans ----------------------------------------------------------------------


def test_gpus_of_amd_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compute capability of 9.4 is no Hopper's."""
    show_gpus(monkeypatch, [Shown("AMD Instinct MI300X", (9, 4), 191, 304)])
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(OsdpError, match="no figures of AMD's GPUs"):
        default_cluster()


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_command_rank_0_warns(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    show_gpus(monkeypatch, [L40S] * 2)
    monkeypatch.setattr("osdp.planning.rank_grid.default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert cluster_at_hand(1, 2).name == "visible-nvidia-l40s"
    said = ["derived from the visible 2 x NVIDIA L40S" in str(one.message) for one in told]
    assert said == ([True] if rank == 0 else [])


def test_no_gpu_and_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OsdpError, match="no GPU is visible"):
        load_cluster("visible-nvidia-l40s")
    show_gpus(monkeypatch, [UNKNOWN])
    with pytest.raises(OsdpError, match="the GPUs of the cluster visible-nvidia-l40s are not the visible ones"):
        load_cluster("visible-nvidia-l40s")


def test_several_nodes_are_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, [L40S])
    with pytest.raises(OsdpError, match="measure one with `osdp profile` on all nodes"):
        default_cluster(nodes=2)


def test_any_card_makes_a_cluster_file_that_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for gpu in drawn_gpus():
        for nvml in (None, Nvml(6, None, to_switch=True)):
            cluster = visible(monkeypatch, [gpu] * 2, nvml)
            write_yaml(tmp_path / "c.yaml", cluster, "")
            assert read_cluster(tmp_path / "c.yaml") == cluster


def drawn_gpus() -> Iterator[Shown]:
    for card in CARDS:
        yield Shown(card.name, (8, 0), 0.97 * card.memory_gib, card.multiprocessors)
    for capability in [*GENERATIONS, (5, 2), (8, 7), (10, 3), (12, 1), (13, 0)]:
        yield Shown("NVIDIA X", capability, 7.7, 20, None, 7000, None)
        yield Shown("NVIDIA X MIG 2g.20gb", capability, 19.5, 28)


def test_the_command_says_what_is_assumed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, [UNKNOWN] * 2)
    asked = ("plan", "--model", "gpt2-tiny", "--batch", "2")
    out = " ".join(cli.done(*asked).split())
    assert "visible-nvidia-rtx-4500-ada-generation: 1 x 2 NVIDIA RTX 4500 Ada Generation, 23.60 GiB each" in out
    assert "TITAN" not in out
    assert "assumed matmul efficiency, reserve: cuda context" in out
    told = cli.json(*asked)
    assert {"matmul efficiency", "bandwidth in a node"} <= set(told["assumed_of_cluster"])
    assert "matmul fp32" not in told["assumed_of_cluster"]
    assert "derived: 60 multiprocessors" in cli.done("clusters", "visible", "--sources")
    frontier = cli.done("plan", "--model", "gpt2-tiny", "--mem", "1GB,2GB")
    assert "Assumed: matmul efficiency" in frontier


def test_a_plan_is_opened_again_on_that_machine(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    show_gpus(monkeypatch, [L40S] * 4)
    cli.done("plan", "--model", "gpt2-tiny", "--batch", "2", "-o", "plan.yaml")
    plan = read_plan(tmp_path / "plan.yaml")
    assert reopen(plan).prediction == plan.predicted
    show_gpus(monkeypatch, [UNKNOWN] * 4)
    with pytest.raises(OsdpError, match="are not the visible ones"):
        reopen(plan)
