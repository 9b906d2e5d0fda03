"""Which plan a run takes: the one in a file, the fastest that fits, or one strategy for everything.

`FSDP`, with groups or without, and `DDP` take the micro-batch that OSDP would take unless the user gives one, so that
runs compare like with like; the memory limit does not bind them, and the report notes if they exceed it.
"""

import time
import warnings
from dataclasses import replace

from osdp.compat.seed_groups import grouped_strategy
from osdp.planning.allocator_headroom import default_headroom, roomier_headroom
from osdp.planning.clusters import memory_limit
from osdp.planning.rank_grid import cluster_of_plan, cluster_of_ranks, grid
from osdp.planning.request import Request, plan_model
from osdp.training.config import TrainConfig
from osdp.training.job import Job, check_ranks
from planner.analysis.explain import OpenPlan, open_plan
from planner.cost.peak_memory import peak_memory
from planner.cost.workload import Workload
from planner.options.search_space import Space
from planner.plan import Plan
from planner.pricing import make_plan
from planner.problem import Task, micro_batches
from planner.search.baselines import uniform
from planner.strategies.notation import parse_strategy
from planner.strategies.registry import known_strategies
from profiler.byte_sizes import parse_bytes
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute
from profiler.trace.trace import trace_model
from runtime.state.checkpoint_manifest import read_manifest

UNIFORM = {"FSDP": "shard", "DDP": "replicate"}
"""Strategy of every operator, by `fsdp_type`."""


def choose_plan(job: Job) -> tuple[Plan, float]:
    """Return the plan of a job for the ranks of the process group, and the seconds that finding it took.

    Called on one rank. Raises OsdpError if a plan file is for other ranks, or nothing fits.
    """
    if job.plan is None:
        started = time.perf_counter()
        return _planned(job), time.perf_counter() - started
    check_ranks(job.plan, *grid(job.config.emulated_nodes))
    for name in ("mem", "cluster"):
        if getattr(job.config, name) is not None:
            warnings.warn(f"{name} has no effect: the plan file has it", stacklevel=2)
    return job.plan, 0.0


def opened(job: Job, plan: Plan) -> OpenPlan:
    """Trace the model of a job again and return the plan with all that its figures are made of."""
    cluster, ref = cluster_of_plan(plan, None), plan.model
    settings = plan.micro_batch, ref.master_weights, plan.asked.expert_imbalance
    return open_plan(plan, trace_model(job.source, ref.precision, cluster.device.kind, *settings), cluster)


def _planned(job: Job) -> Plan:
    cluster, _ = cluster_of_ranks(job.config.cluster, job.config.emulated_nodes)
    config = _with_samples_kept(job, cluster.world_size)
    limit_bytes = memory_limit(cluster, None if config.mem is None else parse_bytes(config.mem))
    masters, batches = config.master_weights or "", (config.batch, config.global_batch)
    free = default_headroom(cluster), roomier_headroom(cluster)
    request = Request(limit_bytes, config.precision, job.optimizer, *batches, *free, master_weights=masters)
    if config.fsdp_type == "OSDP":
        return plan_model(job.source, cluster, request).plan
    if config.batch is None:
        found = plan_model(job.source, cluster, replace(request, roomier=None))  # it is given the whole limit
        graph, load = found.graph, found.found.load
    else:
        graph = trace_model(job.source, config.precision, cluster.device.kind, config.batch, masters)
        load = _load(graph, cluster, request)
    choice = UNIFORM[config.fsdp_type]
    if config.fsdp_args is not None:
        choice = str(grouped_strategy(config.fsdp_args, cluster.nodes, cluster.gpus_per_node))
    return uniform_plan(graph, load, request, choice)


def _with_samples_kept(job: Job, world_size: int) -> TrainConfig:
    """Return the configuration with as many samples per step as the run had that is resumed, unless it says."""
    config = job.config
    kept = read_manifest(job.resume).extra.get("samples_per_step") if job.resume else None
    if config.global_batch is not None or not isinstance(kept, int):
        return config
    if kept % world_size:
        what = f"{world_size} ranks cannot share the samples of a step evenly"
        got = f"{kept} samples per step in the run of {job.resume}"
        near = max(1, round(kept / world_size)) * world_size
        advice = f"another number of ranks; or --global-batch {near}, with which losses are not as before"
        raise OsdpError(what, got=got, expected=f"a multiple of {world_size}", advice=advice)
    return replace(config, global_batch=kept)


def _load(graph: ModelGraph, cluster: Cluster, request: Request) -> Workload:
    """Return the workload of a micro-batch that the user gave."""
    optimizer, batches = request.optimizer, (request.global_batch, request.micro_batch)
    task = Task(graph, cluster, request.limit_bytes, optimizer, *batches, imbalance=request.imbalance)
    ((micro_batch, accumulation),) = micro_batches(task)
    waits = task.waits(micro_batch, accumulation)
    return Workload.of(graph, cluster, optimizer, micro_batch, accumulation, waits)


def uniform_plan(graph: ModelGraph, load: Workload, request: Request, choice: str) -> Plan:
    """Return the plan with one strategy everywhere; it recomputes of every block as little as fits.

    `choice` is the strategy as plans write it; one rank has nothing to shard over, and takes its only one.
    Raises OsdpError for a strategy that the cluster does not know.
    """
    space, cluster = Space(graph), load.cluster
    strategy = known_strategies(cluster)[0] if cluster.world_size == 1 else parse_strategy(choice, cluster)
    modes = sorted(set[Recompute]().union(*(stage.offered(cluster) for stage in space.model.stages)))
    candidates = [uniform(space, load, strategy, recompute) for recompute in modes]
    fitting = [options for options in candidates if peak_memory(options, load).total_bytes <= request.limit_bytes]
    options = (fitting or candidates)[0]
    spanning = strategy if space.model.spanning else None
    # Of the space that holds this one plan it is the best: no gap.
    return make_plan(options, spanning, space, load, limit_bytes=request.limit_bytes, gap=0.0)
