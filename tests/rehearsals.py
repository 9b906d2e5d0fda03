"""Plans made of choices, as the planner predicts their memory and as a dry run of the runtime measures it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from importlib import import_module
from typing import Any

from graph_files import traced_by_any
from synthetic import cluster
from thoroughness import THOROUGH

from osdp.models.config import FAMILIES
from osdp.planning.verify import as_on
from planner.analysis.explain import open_plan
from planner.plan import ClusterRef, Plan, Prediction, cluster_fingerprint, model_ref
from profiler.cluster.cluster import Cluster
from profiler.model_graph import ModelGraph
from profiler.model_source import ModelSource
from profiler.trace.data_dependent import DataDependent
from profiler.trace.metered_pass import find_loss
from profiler.trace.trace import trace_model
from runtime.compile_plan import compile_plan
from runtime.observe.dry_run import Script, dry_run

SIZES = {
    "gpt2": {"maximum_positions": 256, "hidden_size": 256, "layers": 3, "heads": 4},
    "llama": {
        "maximum_positions": 256,
        "hidden_size": 256,
        "layers": 3,
        "heads": 4,
        "key_value_heads": 2,
        "intermediate_size": 640,
        "tied_head": False,
        "rope_base": 10000.0,
    },
    "bert": {
        "maximum_positions": 256,
        "token_types": 2,
        "hidden_size": 256,
        "layers": 3,
        "heads": 4,
        "intermediate_size": 1024,
    },
    "uneven": {
        "maximum_positions": 256,
        "head_size": 64,
        "encoder_widths": (128, 256, 192),
        "decoder_widths": (256, 128),
    },
}
NO_LIMIT = 1 << 50
"""Under which DistributedDataParallel runs what it can."""


@cache
def source(family: str, vocabulary: int, length: int) -> ModelSource:
    """Return a small model of a family of the zoo; its head is tied to the embedding but for `llama`."""
    module, name = FAMILIES[family].module.split(":")
    sizes = FAMILIES[family].config(vocabulary_size=vocabulary, **SIZES[family])

    def inputs(model: Any, batch: int) -> Any:
        return model.example_inputs(batch, length)

    return ModelSource(family, lambda: getattr(import_module(module), name)(sizes), inputs, length)


@cache
def graph_of(family: str, vocabulary: int, length: int, precision: str) -> ModelGraph:
    """Return what the tracer makes of it."""
    key = f"rehearsals {family} {vocabulary} {length} {precision}"
    return traced_by_any(key, lambda: trace_model(source(family, vocabulary, length), precision))


def plan_of(
    graph: ModelGraph,
    machine: Cluster,
    choices: Mapping[str, str],
    recomputed: Collection[str] = (),
    selective: Collection[str] = (),
    offloaded: Collection[str] = (),
    *,
    micro_batch: int = 2,
    accumulation: int = 1,
    optimizer: str = "adam",
    limit_bytes: int = NO_LIMIT,
) -> Plan:
    """Return a plan as a file would have it, `choices` by the name of the operator; nothing in it is priced."""
    return Plan(
        schema=Plan.SCHEMA,
        model=model_ref(graph),
        cluster=ClusterRef(machine.name, cluster_fingerprint(machine), machine.nodes, machine.gpus_per_node),
        optimizer=optimizer,
        limit_bytes=limit_bytes,
        micro_batch=micro_batch,
        accumulation=accumulation,
        predicted=Prediction(0, {}, "", 1.0, {}, 1.0),
        gap=0.0,
        choices=dict(choices),
        recomputed_blocks=[block.name for block in graph.blocks if block.name in recomputed],
        selectively_recomputed_blocks=[block.name for block in graph.blocks if block.name in selective],
        offloaded_blocks=[block.name for block in graph.blocks if block.name in offloaded],
    )


@dataclass(frozen=True)
class Compared:
    """What a plan was predicted to hold at most, without the reserve, and what its fullest rank held."""

    predicted: Mapping[str, int]
    tracked: Mapping[str, int]
    predicted_phase: str
    tracked_phase: str
    rest_bytes: int
    """What was held between steps."""

    @property
    def error(self) -> float:
        """(predicted - tracked) / tracked."""
        predicted, tracked = sum(self.predicted.values()), sum(self.tracked.values())
        return (predicted - tracked) / tracked


def compare(
    plan: Plan,
    model: ModelSource,
    graph: ModelGraph,
    machine: Cluster,
    rank: int | None = None,
    *,
    with_data: bool = not THOROUGH,
    device_type: str = "cpu",
) -> Compared:
    """Predict a plan's memory and run it dry on a rank (None: the fullest), with the kernels of a kind of device.

    Unless thorough the CPU computes, which takes small models a quarter of the time that fake tensors take them;
    `test_memory_tracker.py` compares the two.
    """
    view = open_plan(plan, graph, machine)
    predicted = {name: size for name, size in view.prediction.memory_by_category.items() if name != "reserve"}
    named = model.build, model.example_inputs, lambda out: find_loss(out)[0]
    answers = partial(as_on, device_type, DataDependent(1.0))
    contexts = [] if with_data else [partial(answers, is_building=building) for building in (False, True)]
    script = Script(*named, plan.optimizer, plan.micro_batch, *contexts)
    if rank is None:
        rank = view.decided.fullest(view.space, view.load)[0]
    found = dry_run(script, compile_plan(plan, graph, machine), rank, with_data=with_data)
    assert found.peak.total_bytes == sum(found.peak.categories.values())
    return Compared(predicted, found.peak.categories, view.prediction.peak_phase, found.peak.phase, found.rest_bytes)


@dataclass(frozen=True)
class Case:
    """A plan for a small model, written shortly."""

    choice: str
    """Of every operator that `changes` does not name."""
    changes: tuple[tuple[str, str], ...] = ()
    """(pattern, choice); of patterns that match an operator's name, the last counts."""
    family: str = "gpt2"
    vocabulary: int = 512
    length: int = 128
    precision: str = "fp32"
    shape: tuple[int, int] = (1, 8)
    """Nodes and ranks on each."""
    recompute: int = 0
    """Every how many blocks are recomputed; 0: none."""
    selective: int = 0
    """Every how many of the others are recomputed selectively; 0: none."""
    micro_batch: int = 2
    accumulation: int = 1
    optimizer: str = "adam"
    limit_bytes: int = NO_LIMIT

    def plan(self) -> Plan:
        """Return the plan."""
        graph = graph_of(self.family, self.vocabulary, self.length, self.precision)
        choices = {operator.name: self.choice for operator in graph.operators}
        for pattern, choice in self.changes:
            found = {name: choice for name in choices if fnmatch(name, pattern)}
            assert found, f"no operator is like {pattern}"
            choices |= found
        again = [block.name for block in graph.blocks[:: self.recompute]] if self.recompute else []
        others = [block.name for block in graph.blocks if block.name not in again]
        return plan_of(
            graph,
            cluster(*self.shape),
            choices,
            again,
            others[:: self.selective] if self.selective else [],
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            optimizer=self.optimizer,
            limit_bytes=self.limit_bytes,
        )

    def compare(self, rank: int | None = None, *, with_data: bool = not THOROUGH) -> Compared:
        """Predict the plan's memory and run it dry on a rank (None: the fullest)."""
        graph = graph_of(self.family, self.vocabulary, self.length, self.precision)
        model = source(self.family, self.vocabulary, self.length)
        return compare(self.plan(), model, graph, cluster(*self.shape), rank, with_data=with_data)
