"""What binds and what more would buy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import chain, cluster

from planner.analysis.what_if import Answer, WhatIf, what_if
from planner.pins import Pin, resolve
from planner.problem import Task
from planner.search.search import search
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph


def asked(graph: ModelGraph, machine: Cluster, limit: int, **more: object) -> dict[str, Answer]:
    task = Task(graph, machine, limit, **more)  # type: ignore[arg-type]
    found = what_if(task, search(task))
    return {answer.resource: answer for answer in found.answers} | {"": Answer("", ",".join(found.binds), 0, 0, 0)}


def test_answers_are_searches_of_the_changed_question() -> None:
    graph, machine, limit = chain([(1024, 1024)] * 4, [20] * 4, [20] * 4), cluster(2, 2), 180 * MIB
    task = Task(graph, machine, limit)
    now = search(task)
    told = asked(graph, machine, limit)
    assert list(told)[:-1] == ["memory", "link in a node", "link between nodes", "nodes", "compute"]
    more = search(replace(task, limit_bytes=limit + GIB))
    assert told["memory"].samples_per_s == more.samples_per_s
    assert told["memory"].ratio == pytest.approx(more.samples_per_s / now.samples_per_s)
    larger = search(replace(task, cluster=replace(machine, nodes=3)))
    assert told["nodes"].samples_per_s == larger.samples_per_s
    # The same device and links, twice as fast: made by the arguments of `cluster`.
    for resource, faster in {
        "link in a node": cluster(2, 2, intra=20e9),
        "link between nodes": cluster(2, 2, inter=2e9),
    }.items():
        assert told[resource].samples_per_s == pytest.approx(search(replace(task, cluster=faster)).samples_per_s)
    device = cluster(2, 2, flops=20e12).device
    rates = replace(machine.device, matmul_flops_per_s=device.matmul_flops_per_s)
    quicker = search(replace(task, cluster=replace(machine, device=rates)))
    assert told["compute"].samples_per_s == pytest.approx(quicker.samples_per_s)


def test_compute_binds_alone_where_there_is_nothing_to_send() -> None:
    """One rank, operators of 30 and 60 GFLOP forward: 3 x 90 GFLOP a sample at 10 TFLOP/s, and the optimizer."""
    graph = chain([(1024, 1024), (2048, 1024)], [30, 60], [1, 1])
    told = asked(graph, cluster(1, 1), 4 * GIB, micro_batch=8)
    assert told[""].change == "compute"
    assert "link in a node" not in told
    assert told["memory"].ratio == pytest.approx(1.0)
    compute_s = 8 * 3 * 90e9 / 10e12
    optimizer_s = 8 / told["memory"].samples_per_s - compute_s  # type: ignore[operator]
    assert 0 < optimizer_s < 0.01
    assert told["compute"].ratio == pytest.approx((compute_s + optimizer_s) / (compute_s / 2 + optimizer_s))


def test_memory_binds_where_a_larger_batch_would_be_faster() -> None:
    """The step sends as much for one sample as for many: a small limit costs samples per second."""
    graph = chain([(1024, 1024)] * 4, [1] * 4, [20] * 4)
    told = asked(graph, cluster(1, 4, overlaps=False), 180 * MIB)
    assert told[""].change.split(",")[0] == "memory"
    assert told["memory"].ratio > 2  # type: ignore[operator]
    assert told["memory"].change == "one more GiB of memory"
    full = asked(graph, cluster(1, 4, memory_gib=0.5), 400 * MIB)
    assert full["memory"].change == "one more GiB of memory (more than the device has)"


def test_links_bind_where_little_is_computed() -> None:
    graph = chain([(4096, 1024)] * 4, [0.001] * 4, [1] * 4)
    told = asked(graph, cluster(1, 4, overlaps=False, latency_s=0.0), 4 * GIB, micro_batch=1)
    assert told[""].change == "link in a node"
    # Almost all of the step is communication, and halves.
    assert 1.7 < told["link in a node"].ratio < 2  # type: ignore[operator]


def test_what_cannot_be_told_says_why() -> None:
    graph = chain([(1024, 1024)] * 2, [1] * 2, [1] * 2)
    told = asked(graph, cluster(1, 4), GIB, micro_batch=1)
    assert "link between nodes" not in told
    assert (told["nodes"].samples_per_s, told["nodes"].why_not) == (None, "test has no inter-node link")
    split = asked(graph, cluster(2, 4), GIB, global_batch=8)
    assert split["nodes"].why_not == "a global batch of 8 cannot be split over 12 ranks"
    machine = cluster(4, 1)
    # Groups of two nodes: of four nodes there are two such groups, of five there is none.
    pins = resolve([Pin("op0", "group_shard:2")], graph, machine)
    assert (
        "a pinned strategy does not exist there"
        in asked(graph, machine, GIB, micro_batch=1, pins=pins)["nodes"].why_not
    )
    pins = resolve([Pin("op0", "shard")], graph, machine)
    assert asked(graph, machine, GIB, micro_batch=1, pins=pins)["nodes"].samples_per_s is not None


def test_what_is_within_the_bound_does_not_bind() -> None:
    def answered(speed: float) -> WhatIf:
        memory = Answer("memory", "", 105.0, 1.05, 0.0)
        return WhatIf(100.0, 104.0, (Answer("compute", "", speed, speed / 100, 0.0), memory))

    assert answered(103.9).binds == ("memory",)
    assert answered(104.1).binds == ("memory", "compute")
    assert answered(200.0).binds == ("compute", "memory")
    assert WhatIf(100.0, 100.0, (Answer("nodes", "", 150.0, 1.5, 0.0),)).binds == ()
    # Proven, but too little to name.
    assert WhatIf(100.0, 100.0, (Answer("compute", "", 100.4, 1.004, 0.0),)).binds == ()
