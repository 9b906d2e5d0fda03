"""What comes before sharding: the model is traced, planned unless there is a plan, and the plan compiled.

What every rank does by itself ends with an agreement on whether it succeeded: if one rank fails, all
raise its error, and none waits for it.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from osdp.description import Described, read_description
from osdp.models.user_factory import ExampleInputs, Model, source_of
from osdp.planning.allocator_headroom import default_headroom, roomier_headroom
from osdp.planning.clusters import memory_limit
from osdp.planning.rank_grid import DeviceInfo, cluster_of_plan, cluster_of_ranks
from osdp.planning.request import Request, plan_graph
from planner.optimizers import optimizer_name
from planner.pins import parse_pin
from planner.plan import Plan, check_parameters
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph
from profiler.parameter_memory import shared_memory
from profiler.trace.trace import run_by_some, trace_model
from runtime.compile_plan import compile_plan
from runtime.deferred_init.deferred_init import is_meta
from runtime.failures.rank_agreement import Agreement, agree, from_rank_0
from runtime.meshes import check_process_group, check_world
from runtime.schedule import Schedule


@dataclass(frozen=True)
class _Traced:
    """What a rank finds out by itself."""

    graph: ModelGraph
    cluster: Cluster
    wish: Plan | Request
    """The plan that was given, or what to plan for."""


def prepare(
    model: Model,
    description: Described,
    device_info: DeviceInfo,
    example_inputs: ExampleInputs,
    find_unused_parameters: bool = False,
) -> tuple[Plan, Schedule]:
    """Return the plan and its schedule, the same on all ranks. A collective call; raises OsdpError."""
    check_process_group()
    traces: list[_Traced] = []

    def trace() -> tuple[bool, tuple[str, ...]]:
        traces.append(_trace(model, description, device_info, example_inputs))
        return isinstance(traces[0].wish, Plan), traces[0].graph.running

    given, running = zip(*Agreement.all().gather("trace the model", trace), strict=True)
    if len(set(given)) > 1:
        raise OsdpError("some ranks were given a plan and some were not", advice="give every rank the same description")
    traced = traces[0]
    left_out = *traced.graph.left_out, *run_by_some(running)
    traced = replace(traced, graph=replace(traced.graph, left_out=left_out))
    if isinstance(wish := traced.wish, Plan):
        plan = wish
    else:  # rank 0's on every rank: a search within a time limit need not end alike everywhere
        plan = from_rank_0("plan", lambda: plan_graph(traced.graph, traced.cluster, wish).plan)

    def compiled() -> Schedule:
        schedule = compile_plan(plan, traced.graph, traced.cluster)
        if not (schedule.world_size == 1 or (schedule.by_ddp and find_unused_parameters)):
            _check_all_run(traced.graph)
        _check_unchanged(traced.graph, schedule)
        _check_held(traced.graph, schedule, model)
        return schedule

    advice = "give every rank the same model, description and device_info"
    return plan, agree("the schedule", "compile the plan", compiled, advice)


def _check_all_run(graph: ModelGraph) -> None:
    """Raise OsdpError if ranks may run different operators, as they would wait for each other forever."""
    if graph.left_out:
        first = graph.left_out[0]
        what = f"ranks would wait for each other where one of them leaves out `{first}`"
        got = f"{len(graph.left_out)} operators that only run if data, random numbers or the rank decide so"
        advice = (
            "run each on no rows where nothing chooses it (for expert in self.experts: expert(x[rows])), leave "
            "out none at random (layerdrop=0) or multiply what a layer adds by 0, or replicate everything: "
            "description={'pins': ['*=replicate']}, find_unused_parameters=True"
        )
        raise OsdpError(what, got=got, expected="the same operators on every rank", advice=advice)


def _check_unchanged(graph: ModelGraph, schedule: Schedule) -> None:
    """Raise OsdpError if a forward changes parameters of which it gets copies."""
    copied = {one.path for unit in schedule.units if not unit.is_plain for one in unit.parameters}
    written = [name for name in graph.written if name in copied and not schedule.by_ddp]
    if written:
        names = ", ".join(f"`{name}`" for name in written[:3])
        raise OsdpError(
            f"the model itself changes parameters, which would be lost where they are sharded: {names}",
            got=f"{len(written)} parameters that its forward or backward writes into, or whose .data it sets",
            expected="a forward that reads its parameters",
            advice="change model.parameters() after optimizer.step(), under torch.no_grad(), or compute with a changed "
            "copy (torch.nn.utils.parametrize), or keep what is not trained in a buffer, or replicate everything: "
            "description={'pins': ['*=replicate']}",
        )


def _check_held(graph: ModelGraph, schedule: Schedule, model: Model) -> None:
    """Raise OsdpError if parameters that will be replaced are reached by more than the modules that own them."""
    keeps = schedule.by_ddp and isinstance(model, nn.Module) and not is_meta(model)
    shared = shared_memory(model) if isinstance(model, nn.Module) else []
    found = [] if keeps else list(dict.fromkeys([*graph.held_elsewhere, *shared]))
    if found:
        raise OsdpError(
            f"sharding replaces parameters, and not what else reaches them: {found[0]}",
            got=f"{len(found)} parameters that share memory, or are read through lists and other attributes",
            expected="parameters that are one tensor each, read from the modules that own them",
            advice="tie parameters as one (self.decoder.weight = self.encoder.weight), compute with a view in the "
            "forward (F.linear(x, self.encoder.weight.t())), collect them there ([layer.weight for layer in "
            "self.layers]) or in an nn.ParameterList, or replicate everything and give the module: "
            "description={'pins': ['*=replicate']}",
        )


def _trace(model: Model, description: Described, device_info: DeviceInfo, example_inputs: ExampleInputs) -> _Traced:
    wish = read_description(description)
    if isinstance(wish, Plan):
        check_world(wish.cluster.nodes, wish.cluster.gpus_per_node)
        cluster = cluster_of_plan(wish, device_info)
        source = source_of(model, wish.model.name, wish.model.sequence_length, example_inputs)
        ref, settings = wish.model, (wish.micro_batch, wish.model.master_weights, wish.asked.expert_imbalance)
        graph = trace_model(source, ref.precision, cluster.device.kind, *settings, world_size=cluster.world_size)
        check_parameters(wish, graph)
        return _Traced(graph, cluster, wish)
    cluster, limit_bytes = cluster_of_ranks(device_info)
    limit_bytes, pins = memory_limit(cluster, limit_bytes), tuple(map(parse_pin, wish.pins))
    optimizer = optimizer_name(wish.optimizer, wish.optimizer_bytes_per_parameter)
    asked = wish.precision, optimizer, wish.micro_batch, wish.global_batch
    master_weights, imbalance = wish.master_weights or "", wish.expert_imbalance
    options: dict[str, Any] = {"pins": pins, "master_weights": master_weights, "expert_imbalance": imbalance}
    request = Request(limit_bytes, *asked, default_headroom(cluster), roomier_headroom(cluster), **options)
    name = wish.name or str(getattr(model, "__name__", type(model).__name__))
    source = source_of(model, name, wish.sequence_length, example_inputs)
    asked_of_trace = wish.precision, cluster.device.kind, wish.micro_batch, master_weights, imbalance
    graph = trace_model(source, *asked_of_trace, world_size=cluster.world_size)
    return _Traced(graph, cluster, request)
