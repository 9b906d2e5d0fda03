"""What a profile says of a machine: memory with its sources, notes, the report; and which node may write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Cli
from shown_gpus import Shown, show_gpus
from synthetic import transformer

from osdp.cli.reports.profile import print_profile
from osdp.cli.terminal import make_console
from osdp.planning.clusters import ALLOCATED_RESERVES, memory_limit
from osdp.profile import session
from osdp.profile.cluster_from_timings import assemble
from osdp.profile.session import Findings, ModelTimes, UnitTimes
from osdp.profile.time_collectives import Line, Timings, collective_times
from profiler.cluster.cluster import Link
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import CallTimes, call_key
from profiler.cluster.read_cluster import read_cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.timing.device_rates import DeviceMemory, DeviceRates, device_memory
from profiler.timing.overlap import Overlap
from profiler.yaml_files import write_yaml

MIB, GIB = 1 << 20, 1 << 30
TIMINGS = tuple(
    Timings(Line("all_gather", "native", 2, 1), size, (1e-4 + 1e-9 * size,) * 3) for size in (4096, 65536, 1048576)
)


def findings(
    kind: str = "cpu",
    memory: DeviceMemory | None = None,
    graph: ModelGraph | None = None,
    model: ModelTimes | None = None,
) -> Findings:
    """Two ranks on one node, with nothing to complain of."""
    return Findings(
        precision="fp32",
        device_type=kind,
        nodes=1,
        ranks_per_node=2,
        versions="none",
        repetitions=3,
        memory=memory or DeviceMemory("a device", 8 * GIB, GIB),
        rates=DeviceRates({"fp32": 1e12}, 1e11),
        timings=TIMINGS,
        times=collective_times(TIMINGS),
        overlap=Overlap(1.0, 1.0, 2.0, 1.0, on_streams=kind == "cuda"),
        unit=UnitTimes(1e-4),
        graph=graph,
        model=model or ModelTimes(),
    )


def notes(found: Findings) -> tuple[str, ...]:
    measured = assemble(found, "mine").measured
    assert measured is not None
    return measured.notes


# --- memory ----------------------------------------------------------------------------------


def test_what_pytorch_holds_of_a_gpu_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 28 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = device_memory(torch.device("cuda", 0), 8)
    assert found == DeviceMemory("a GPU", 80 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("device", "after_bytes", "expected_bytes"), [("cuda", 3 * GIB, 3 * GIB), ("cuda", MIB, GIB), ("cpu", 5 * GIB, GIB)]
)
def test_more_memory_is_taken_at_the_end_of_a_gpu(
    device: str, after_bytes: int, expected_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = DeviceMemory("a device", 8 * GIB, GIB), DeviceMemory("a device", 8 * GIB, after_bytes)
    monkeypatch.setattr(session, "_least_memory", lambda *_: after)
    found = session._memory_at_the_end(before, torch.device(device), 2)
    assert found == DeviceMemory("a device", 8 * GIB, expected_bytes)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("cuda", {"beside_the_allocator": GIB, "cublas_workspace": 64 * MIB, "allocator_rounding": 96 * MIB}),
        ("cpu", {"before_any_tensor": GIB, "allocator_rounding": 32 * MIB}),
    ],
)
def test_the_reserve_is_what_was_taken_and_what_allocators_lose(kind: str, names: dict[str, float]) -> None:
    reserves = assemble(findings(kind), "mine").device.reserve_bytes
    assert {name: figure.value for name, figure in reserves.items()} == names
    for name, figure in reserves.items():
        says = ("assumed: ", "derived: ") if name in ALLOCATED_RESERVES else "measured: "
        assert figure.source.startswith(says), name


def test_a_limit_of_what_a_measured_card_is_sold_with_is_taken() -> None:
    available = 84_932_978_278  # of an H100 with 80 GB
    cluster = assemble(findings("cuda", DeviceMemory("a GPU", available, GIB)), "mine")
    assert cluster.device.nominal_bytes.value == 80 * GIB
    assert memory_limit(cluster, 80 * GIB) == available
    with pytest.raises(OsdpError):
        memory_limit(cluster, 80 * GIB + MIB)
    whole = assemble(findings(memory=DeviceMemory("a rank", 12 * GIB, GIB)), "mine")
    assert whole.device.nominal_bytes.value == 12 * GIB


def alone(kind: str, link: Link) -> Findings:
    """One rank, which does not communicate."""
    one = replace(findings(kind), ranks_per_node=1, timings=(), times=(), overlap=None, unit=UnitTimes(0.0))
    return replace(one, link=link)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_one_rank_alone_is_a_cluster(kind: str, tmp_path: Path) -> None:
    source = "assumed: as somewhere"
    cluster = assemble(alone(kind, Link(Figure(1e-6, source), Figure(1e9, source))), "mine")
    assert (cluster.world_size, cluster.overlaps, cluster.hides_buckets) == (1, kind == "cuda", kind == "cuda")
    assert cluster.overlap_source.startswith("assumed: ")
    assert cluster.intra.bytes_per_s == Figure(1e9, source)
    assert notes(alone(kind, cluster.intra)) == ()
    write_yaml(tmp_path / "mine.yaml", cluster)
    assert read_cluster(tmp_path / "mine.yaml") == cluster


def test_the_link_of_one_gpu_is_that_of_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, [Shown("NVIDIA L40S", (8, 9), 44.4, 142)])
    monkeypatch.setattr("osdp.planning.rank_grid.default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    link = session._assumed_link()
    source = "assumed: one rank alone has no link, so as of visible-nvidia-l40s"
    assert link.bytes_per_s == Figure(0.8 * 24e9, source)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert session._assumed_link().bytes_per_s.source == "assumed: one rank alone has no link, so as of titan-rtx-8"


def test_ranks_that_would_share_a_gpu_are_not_started(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, [Shown("NVIDIA L40S", (8, 9), 44.4, 142)])
    message = cli.refused("profile", "--ranks-per-node", "2", "--device", "cuda")
    assert "ranks would share a GPU" in message
    assert "2 ranks, 1 visible" in message
    assert "--ranks-per-node 1, or --device cpu" in message


def test_sources_say_what_was_measured() -> None:
    for kind, source in (("cuda", "measured: "), ("cpu", "derived: ")):
        device = assemble(findings(kind), "mine").device
        assert device.memory_bytes.source.startswith(source)
        assert device.nominal_bytes.source.startswith("derived: ")
        assert device.matmul_efficiency.source.startswith("derived: ")


# --- notes -----------------------------------------------------------------------------------


def test_nothing_to_note() -> None:
    assert notes(findings(model=ModelTimes(disagreement=-0.1))) == ()


@pytest.mark.parametrize(("disagreement", "told"), [(-0.25, "25% less"), (0.5, "50% more")])
def test_calls_that_do_not_add_up(disagreement: float, told: str) -> None:
    (note,) = notes(findings(model=ModelTimes(disagreement=disagreement)))
    assert f"add up to {told} than whole passes take" in note
    assert "were scaled so that they do not" in note


def test_a_model_that_was_not_cut_is_told() -> None:
    (note,) = notes(findings(model=ModelTimes(cut=False)))
    assert "could not be cut at its blocks" in note


def test_what_is_bound_by_the_host_is_told() -> None:
    bound = (replace(TIMINGS[0], is_host_bound=True), *TIMINGS[1:])
    overlap = Overlap(1.0, 1.0, 2.0, 1.0, on_streams=True, is_host_bound=True)
    told = notes(replace(findings(model=ModelTimes(is_host_bound=True)), timings=bound, overlap=overlap))
    assert [note.partition(" host-bound")[0] for note in told] == [
        "1 of 3 timings of collectives are",
        "the overlap of communication and computation is",
        "the times of the model's calls are",
    ]


def test_why_pulls_were_not_measured_is_told() -> None:
    (note,) = notes(replace(findings("cuda"), no_windows="rank 1: CuPy cannot be loaded"))
    assert note == "pulls and pushes of odc were not measured: rank 1: CuPy cannot be loaded"


@pytest.mark.parametrize(("more_bytes", "is_told"), [(0, False), (4096, False), (-4096, False), (8192, True)])
def test_rounding_is_no_contradiction(more_bytes: int, is_told: bool) -> None:
    graph = transformer(1, 64)
    call = graph.calls[0]  # keeps 0.01 MiB, so that 2 % are 210 bytes
    kept = call.saved_bytes(1) + more_bytes
    times = CallTimes(call_key(graph, call), "embed", (1,), (1e-3,), (1e-3,), (kept,))
    told = notes(findings(graph=graph, model=ModelTimes((times,))))
    assert [note.partition(" keeps")[0] for note in told] == ["embed"] * is_told


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize("both_s", [1.0, 2.0])
def test_computation_is_slower_only_under_what_overlaps(both_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = replace(findings(), overlap=Overlap(1.0, 1.0, both_s, 1.5, on_streams=False))
    print_profile(make_console(), assemble(found, "mine"), None, Path("mine.yaml"))
    assert ("computation then takes 1.50 times" in " ".join(capsys.readouterr().out.split())) == (both_s == 1.0)


def test_only_node_0_looks_at_the_file_that_it_writes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    monkeypatch.setattr("osdp.training.launch.launch", lambda command, ranks, nodes, *_: launches.append(nodes.index))
    Path("notes.txt").write_text("mine")
    options = ("profile", "--device", "cpu", "-o", "notes.txt", "--nnodes", "2", "--rdzv-endpoint", "localhost:1")
    assert cli(*options, "--node-rank", "1").status == 0
    assert "not overwritten" in cli.refused(*options, "--node-rank", "0")
    assert launches == [1]
