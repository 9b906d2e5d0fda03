"""Why nothing fits: the phase, the operator and the categories, and only remedies that were tried."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from synthetic import chain, cluster, transformer

from osdp.planning.memory_options import Headroom
from osdp.planning.request import Request, explain_refusal, task_of
from planner.pins import Pin
from planner.problem import Task
from planner.search.infeasible import LARGEST_NODE, NothingFits, Refusal
from planner.search.search import Effort, search
from profiler.byte_sizes import GIB, MIB
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.model_graph import ModelGraph


def refused(task: Task, *, remedies: bool = True) -> Refusal:
    with pytest.raises(NothingFits, match="no plan fits the memory limit") as caught:
        search(task, effort=Effort(remedies=remedies))
    return caught.value.refusal


def remedies(refusal: Refusal) -> dict[str, int]:
    return {remedy.change: remedy.needed_bytes for remedy in refusal.remedies}


def least_bytes(task: Task) -> int:
    """Return what is said to be needed."""
    return refused(replace(task, limit_bytes=MIB), remedies=False).needed_bytes


def smallest(graph: ModelGraph, machine: Cluster) -> int:
    return least_bytes(Task(graph, machine, MIB))


def test_the_optimizer_step_of_one_rank_by_hand() -> None:
    """One rank, plain SGD: parameters and gradients of 3 x 4 MiB, and one activation at a time."""
    graph = chain([(1024, 1024)] * 3, [1] * 3, [0.5] * 3)
    task = Task(graph, cluster(1, 1), 8 * MIB, "sgd")
    refusal = refused(task)
    assert refusal.peak.categories["parameters"] == 12 * MIB
    assert refusal.needed_bytes >= 24 * MIB
    assert sum(refusal.peak.categories.values()) == pytest.approx(refusal.peak.total_bytes)
    assert search(replace(task, limit_bytes=refusal.needed_bytes)).load is not None
    message = str(NothingFits(refusal))
    assert "got: 8.0 MiB per device" in message
    assert f"at least {refusal.needed_bytes // MIB:,} MiB for the smallest plan found (micro-batch 1)" in message
    assert "parameters 12.0 MiB" in message
    assert f"try: --mem {refusal.needed_bytes // MIB}MB; or " in message
    assert "the largest operators are op0 and op1" in message


def test_the_operator_that_peaks_is_named() -> None:
    """Of four operators the last has a call that saves 200 MiB a sample, and nothing is held after it."""
    graph = chain([(1024, 1024)] * 4, [1] * 4, [1, 1, 1, 200])
    refusal = refused(Task(graph, cluster(1, 4), 100 * MIB))
    assert refusal.operator == "op3"
    assert f"which peaks in {refusal.peak.phase} of op3: activations" in str(NothingFits(refusal))


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return transformer(2, 512)


@pytest.fixture(scope="module")
def one_block() -> ModelGraph:
    return transformer(1, 512)


def test_every_remedy_is_enough(one_block: ModelGraph) -> None:
    machine = cluster(2, 2)
    # A little more than two nodes need for one sample.
    task = Task(one_block, machine, smallest(one_block, machine) + 8 * MIB, micro_batch=4)
    found = remedies(refused(task))
    changed = {
        "--batch 1": replace(task, micro_batch=1),
        "--batch 2": replace(task, micro_batch=2),
        "--optimizer sgd": replace(task, optimizer="sgd"),
        **{f"--nodes {n}": replace(task, cluster=replace(machine, nodes=n)) for n in (4, 8, 16, 32)},
    }
    assert found
    for change, needed_bytes in found.items():
        assert needed_bytes <= task.limit_bytes
        assert search(changed[change]).load is not None
        # And what is said to be needed is what the search says too.
        assert least_bytes(changed[change]) == needed_bytes


def test_the_fewest_ranks_that_help_are_named(one_block: ModelGraph) -> None:
    needs = {nodes: smallest(one_block, cluster(nodes, 2)) for nodes in (2, 4, 8)}
    assert needs[2] > needs[4] > needs[8]
    found = remedies(refused(Task(one_block, cluster(2, 2), needs[8])))
    assert found["--nodes 8"] == needs[8]
    assert "--nodes 4" not in found
    # Without a link to other nodes it is the node that grows, and no further than nodes are built.
    alone = remedies(refused(Task(one_block, cluster(1, 4), smallest(one_block, cluster(1, 8)))))
    assert next(iter(alone)) == "--gpus-per-node 8"
    layers = chain([(1024, 1024)] * 2, [1] * 2, [0.5] * 2)
    tiny = remedies(refused(Task(layers, cluster(1, LARGEST_NODE), 2 * MIB)))
    assert not any(change.startswith("--gpus") for change in tiny)


def test_micro_batches_that_accumulate_keep_gradients(one_block: ModelGraph) -> None:
    machine = cluster(1, 4)
    task = Task(one_block, machine, 1 * MIB, global_batch=64, micro_batch=1)
    accumulating = refused(task, remedies=False)
    once = refused(replace(task, global_batch=4), remedies=False)
    assert (accumulating.load.accumulation, once.load.accumulation) == (16, 1)
    assert accumulating.needed_bytes > once.needed_bytes
    found = remedies(refused(replace(task, limit_bytes=once.needed_bytes)))
    assert found["--global-batch 4"] == once.needed_bytes


def test_a_limit_that_the_device_does_not_have_is_not_advised(graph: ModelGraph) -> None:
    message = str(NothingFits(refused(Task(graph, cluster(1, 1, memory_gib=0.1), 90 * MIB))))
    assert "--mem" not in message
    assert "a device with more memory than the 102.4 MiB of test device" in message


# --- pins and headroom -------------------------------------------------------------------------------


def told(graph: ModelGraph, request: Request, machine: Cluster) -> NothingFits:
    task = task_of(request, graph, machine)
    with pytest.raises(NothingFits) as caught:
        search(task)
    return explain_refusal(caught.value, task, request)


def test_the_pin_to_blame_is_named_with_what_fits_without_it(graph: ModelGraph) -> None:
    machine = cluster(1, 4)
    free = smallest(graph, machine)
    pins = (Pin("blocks.*", "replicate"), Pin("norm", "shard"))
    # What would be enough has the headroom, too.
    error = told(graph, Request(free + 14 * MIB, pins=pins, headroom=Headroom(size_bytes=10 * MIB)), machine)
    found = remedies(error.refusal)
    assert "without --pin 'blocks.*=replicate'" in found
    assert "without --pin 'norm=shard'" not in found
    assert (
        found["without --pin 'blocks.*=replicate'"]
        == least_bytes(task_of(Request(MIB, pins=pins[1:]), graph, machine)) + 10 * MIB
    )
    assert error.refusal.needed_bytes > free + 4 * MIB
    assert "without --pin 'blocks.*=replicate' (then " in str(error)


def test_pins_that_are_to_blame_together(graph: ModelGraph) -> None:
    machine = cluster(1, 4)
    pins = (Pin("blocks.0", "replicate"), Pin("blocks.1", "replicate"))
    alone = min(least_bytes(task_of(Request(MIB, pins=(pin,)), graph, machine)) for pin in pins)
    error = told(graph, Request(alone - 2 * MIB, pins=pins), machine)
    assert next(iter(remedies(error.refusal))) == "without any pin"


def test_pins_are_not_blamed_where_nothing_fits_anyway(graph: ModelGraph) -> None:
    error = told(graph, Request(2 * MIB, pins=(Pin("blocks.*", "shard"),)), cluster(1, 4))
    assert "pin" not in str(error)


def test_headroom_is_counted(one_block: ModelGraph) -> None:
    plain = cluster(1, 4)
    context = {"context": Figure(50 * MIB, "assumed: for a test")}
    machine = replace(plain, device=replace(plain.device, reserve_bytes=context))
    needed = smallest(one_block, machine)
    error = told(one_block, Request(needed + 2 * MIB, headroom=Headroom(size_bytes=10 * MIB)), machine)
    assert remedies(error.refusal)["--headroom 0"] == needed
    assert f"got: {(needed + 2 * MIB) / MIB:.1f} MiB per device, of which 10.0 MiB are headroom" in str(error)
    assert f"--mem {needed // MIB + 10}MB" in str(error)
    share = Headroom(share=0.5)
    advised = told(one_block, Request(needed, headroom=share), machine).refusal.advised_bytes
    assert advised is not None
    assert advised - share.of(advised) >= needed
    assert search(task_of(Request(advised, headroom=share), one_block, machine)).load is not None
    assert advised < 2 * GIB


def test_a_refusal_can_be_handed_from_rank_to_rank() -> None:
    with pytest.raises(NothingFits) as caught:
        search(Task(transformer(3, 512), cluster(1, 4), MIB))
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, NothingFits)
    assert str(again) == str(caught.value)
    assert again.refusal.needed_bytes == caught.value.refusal.needed_bytes
