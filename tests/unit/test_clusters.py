"""Clusters: that every figure is plausible and has a source, and that files are read strictly."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import draws

from osdp.resources import resource_file
from osdp.zoo import cluster_names, load_cluster
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.cluster.read_cluster import read_cluster
from profiler.errors import OsdpError
from profiler.yaml_files import write_yaml

GIB = 1024**3
SHAPES = {
    "titan-rtx-8": (1, 8),
    "rtx4090-2": (1, 2),
    "a100-80g-8": (1, 8),
    "a100-2x8": (2, 8),
    "h100-8": (1, 8),
    "h100-4x8": (4, 8),
    "h200-1": (1, 1),
    "cpu-gloo": (1, 4),
}
every = pytest.mark.parametrize("name", sorted(SHAPES))


def figures(value: Any, at: str = "") -> Iterator[tuple[str, Figure]]:
    """Yield every figure inside a dataclass or dict, with its path."""
    if isinstance(value, Figure):
        yield at, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from figures(getattr(value, field.name), f"{at}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from figures(item, f"{at}.{key}")


def test_the_list_is_complete() -> None:
    assert cluster_names() == sorted(SHAPES)


@every
def test_shape_and_kind(name: str) -> None:
    cluster = load_cluster(name)
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == (name, *SHAPES[name])
    # The CPU's figures are for any number of emulated nodes.
    assert (cluster.inter is not None) == (cluster.nodes > 1 or cluster.device.kind == "cpu")
    assert cluster.device.kind == ("cpu" if name == "cpu-gloo" else "cuda")
    assert cluster.overlaps == (name != "cpu-gloo")


@every
def test_every_figure_has_a_source_that_says_something(name: str) -> None:
    cluster = load_cluster(name)
    found = dict(figures(cluster))
    assert len(found) >= 9
    for at, source in [*((at, figure.source) for at, figure in found.items()), ("", cluster.overlap_source)]:
        kind, colon, words = source.partition(": ")
        assert kind in ("datasheet", "paper", "measured", "derived", "assumed"), at
        assert colon, at
        assert len(words) > 15, at


@every
def test_no_number_is_outside_a_figure(name: str) -> None:
    """So that none escapes the rule that numbers have sources."""
    document = yaml.safe_load(resource_file("clusters", name).read_text())

    def bare(value: Any, key: str) -> Iterator[str]:
        if isinstance(value, dict):
            for inner, item in value.items():
                if not (inner == "value" and "source" in value):
                    yield from bare(item, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key

    assert sorted(bare(document, "")) == ["gpus_per_node", "nodes"]


@every
def test_plain_yaml_readers_see_the_same_numbers(name: str) -> None:
    """YAML 1.1 needs a sign in exponents, or it takes the number for text."""
    document = yaml.safe_load(resource_file("clusters", name).read_text())
    cluster = load_cluster(name)
    assert document["device"]["memory_bytes_per_s"]["value"] == cluster.device.memory_bytes_per_s.value
    assert document["intra"]["bytes_per_s"]["value"] == cluster.intra.bytes_per_s.value
    assert document["device"]["matmul_flops_per_s"]["fp32"]["value"] == pytest.approx(
        cluster.device.matmul_flops_per_s["fp32"].value
    )


# Datasheets: memory GB, fp32 and dense bf16 TFLOPS, memory GB/s, link GB/s in one direction.
DATASHEETS = {
    "titan-rtx-8": (24, 16.3, None, 672, 15.75),
    "rtx4090-2": (24, 82.6, 165.2, 1008, 31.5),
    "a100-80g-8": (80, 19.5, 312, 2039, 300),
    "a100-2x8": (80, 19.5, 312, 2039, 300),
    "h100-8": (80, 66.9, 989.4, 3350, 450),
    "h100-4x8": (80, 66.9, 989.4, 3350, 450),
    "h200-1": (141, 66.9, 989.4, 4800, 450),
}


@pytest.mark.parametrize("name", sorted(DATASHEETS))
def test_figures_are_plausible_against_the_datasheet(name: str) -> None:
    memory, fp32, bf16, bandwidth, link = DATASHEETS[name]
    cluster = load_cluster(name)
    device = cluster.device
    assert 0.96 * memory < device.memory_bytes.value / GIB <= memory
    assert device.matmul_flops_per_s["fp32"].value == pytest.approx(fp32 * 1e12, rel=1e-12)
    if bf16 is None:
        assert "bf16" not in device.matmul_flops_per_s
    else:
        assert device.matmul_flops_per_s["bf16"].value == pytest.approx(bf16 * 1e12, rel=1e-12)
    assert 0.5 <= device.matmul_efficiency.value < 1
    assert 0.7 * bandwidth < device.memory_bytes_per_s.value / 1e9 < bandwidth
    assert 0.3 * link < cluster.intra.bytes_per_s.value / 1e9 < link
    assert 1e-6 < cluster.intra.latency_s.value < 1e-4
    assert 0.2 < cluster.reserve_bytes / GIB < 2.5
    assert {"cuda_context", "nccl_buffers", "cublas_workspace", "allocator_rounding"} == set(device.reserve_bytes)


def test_the_reserve_of_the_titan_rtx_is_about_half_a_gib() -> None:
    assert 0.4 < load_cluster("titan-rtx-8").reserve_bytes / GIB < 0.6


@pytest.mark.parametrize(("name", "adapter_gbit_per_s"), [("a100-2x8", 200), ("h100-4x8", 400)])
def test_between_nodes_each_rank_has_an_adapter(name: str, adapter_gbit_per_s: int) -> None:
    cluster = load_cluster(name)
    assert cluster.inter is not None
    peak = adapter_gbit_per_s / 8 * 1e9
    assert 0.85 * peak < cluster.inter.bytes_per_s.value < peak
    assert cluster.inter.latency_s.value > cluster.intra.latency_s.value
    assert cluster.inter.bytes_per_s.value < cluster.intra.bytes_per_s.value


def test_the_same_device_has_the_same_figures() -> None:
    assert load_cluster("a100-80g-8").device == load_cluster("a100-2x8").device
    assert load_cluster("h100-8").device == load_cluster("h100-4x8").device
    assert load_cluster("h100-8").intra == load_cluster("h100-4x8").intra


def test_ranks_can_be_changed() -> None:
    cluster = load_cluster("a100-2x8", nodes=16, gpus_per_node=4)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.world_size) == (16, 4, 64)
    assert load_cluster("h200-1", gpus_per_node=8).world_size == 8
    assert load_cluster("a100-2x8", nodes=1).world_size == 8


def refused(spec: str, **keywords: int) -> str:
    with pytest.raises(OsdpError) as caught:
        load_cluster(spec, **keywords)
    return str(caught.value)


def test_more_nodes_need_a_link_between_them() -> None:
    message = refused("titan-rtx-8", nodes=2)
    assert "has no link between nodes" in message
    assert "a100-2x8, cpu-gloo, h100-4x8" in message
    for keywords in ({"nodes": 0}, {"gpus_per_node": 0}, {"nodes": -1}):
        assert "at least one node" in refused("titan-rtx-8", **keywords)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("titan-rtx", "did you mean titan-rtx-8"),
        ("A100-80G-8", "did you mean a100-80g-8"),
        ("xyzzy", "path/to/cluster.yaml"),
        ("./xyzzy", "does not exist"),
        ("xyzzy.yaml", "does not exist"),
    ],
)
def test_unknown_clusters_get_a_hint(spec: str, part: str) -> None:
    assert part in refused(spec)


@every
def test_a_cluster_goes_round(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    write_yaml(path, load_cluster(name), "measured by hand")
    assert load_cluster(str(path)) == load_cluster(name)


def changed(tmp_path: Path, pattern: str, replacement: str) -> str:
    text = resource_file("clusters", "a100-2x8").read_text()
    text, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(OsdpError) as caught:
        read_cluster(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "replacement", "field", "part"),
    [
        ("kind: cuda", "kind: gpu", "device.kind", "one of cuda, cpu"),
        ("value: 312.0e", "value: -312.0e", "device.matmul_flops_per_s.bf16", "must be finite and not negative"),
        ("bf16:", "fp8:", "device.matmul_flops_per_s.fp8", "one of fp32, bf16, fp16"),
        ("fp32:", "tf32:", "device.matmul_flops_per_s.fp32", "is missing"),
        ("value: 0.85", "value: 85", "device.matmul_efficiency.value", "more than 0 and at most 1"),
        ("value: 0.85", "value: 0", "device.matmul_efficiency.value", "more than 0 and at most 1"),
        ("value: 230.0e[+]9", "value: 0", "intra.bytes_per_s.value", "more than 0"),
        ("value: 14.0e-6", "value: 14", "inter.latency_s.value", "it is in seconds"),
        ("value: 471859200", "value: 1.0e+12", "device.reserve_bytes", "less than memory_bytes"),
        ("source: .measured: 232", 'source: "heard: 232', "intra.bytes_per_s", "source must start with"),
        ("nodes: 2", "nodes: 0", "nodes", "1 or more"),
        ("nodes: 2", "nodes: 2.0", "nodes", "a whole number"),
        ("gpus_per_node: 8\n", "gpus: 8\n", "gpus_per_node", "is missing"),
        ("overlaps: true", "overlaps: maybe", "overlaps", "true or false"),
        ("inter:\n", "outer:\n", "outer", "did you mean `inter`?"),
        (r"inter:\n(  .*\n)*", "inter: null\n", "the document", "2 nodes need an `inter` link"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    tmp_path: Path, pattern: str, replacement: str, field: str, part: str
) -> None:
    message = changed(tmp_path, pattern, replacement)
    assert f"`{field}`" in message or field == "the document"
    assert part in message
    assert re.search(r"c\.yaml, line \d+: ", message)


@settings(max_examples=draws(40))
@given(st.data())
def test_damaged_files_raise_nothing_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A cluster file with a few lines lost, doubled, re-indented or replaced is read or refused."""
    lines = resource_file("clusters", "a100-2x8").read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        junk = st.text(max_size=12) | st.sampled_from(["  value: [", "a: *b", "- 1", "device: 3", "inter: {}"])
        lines[at : at + 1] = data.draw(
            st.sampled_from([[], [lines[at]] * 2, ["  " + lines[at]], [lines[at].lstrip()]])
            | st.lists(junk, max_size=2)
        )
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text("\n".join(lines), "utf-8", "replace")
    with suppress(OsdpError):
        assert isinstance(read_cluster(path), Cluster)


@pytest.mark.parametrize(
    ("name", "precision", "rate"),
    [
        ("titan-rtx-8", "amp-fp16", "fp16"),
        ("titan-rtx-8", "amp-bf16", ""),
        ("h100-8", "amp-fp16", "bf16"),
        ("h100-8", "amp-bf16", "bf16"),
        ("h100-8", "fp16", "bf16"),
        ("h100-8", "fp32", "fp32"),
    ],
)
def test_products_under_autocast_are_priced_at_the_rate_of_their_dtype(name: str, precision: str, rate: str) -> None:
    assert load_cluster(name).device.rate_name(precision) == rate
