"""`osdp strategies` and `osdp partition`: tables of what strategies keep and send, and of how even owners are."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Annotated

from typer import Option

from osdp.cli import options
from osdp.cli.exits import guarded
from osdp.cli.rank_process import end_of_rank, start_ranks
from osdp.cli.terminal import progress_bar, show
from profiler.bounds import MOST_NODES, MOST_SAMPLES

if TYPE_CHECKING:
    from osdp.planning.request import Request
    from osdp.planning.strategy_footprint import Uniform
    from profiler.cluster.cluster import Cluster
    from profiler.model_source import ModelSource

STRATEGIES = ("replicate", "owner", "shard")
"""Those that are shown where the user names none: DDP, ZeRO-3 by whole tensors, FSDP."""
PRIORITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Values of `evenness_priority` in the table."""
TIMEOUT_S = 300.0


@guarded
def strategies(
    model: options.Model,
    cluster: options.ClusterName = None,
    nodes: options.Nodes = None,
    gpus_per_node: options.GpusPerNode = None,
    strategy: Annotated[
        list[str] | None,
        Option(help="A strategy as plan files name it; repeatable. Default: replicate, owner and shard."),
    ] = None,
    batch: Annotated[int, Option(min=1, max=MOST_SAMPLES, help="Micro-batch size of a rank.")] = 1,
    seq: options.SequenceLength = None,
    precision: options.Precision = "fp32",
    optimizer: options.OptimizerName = None,
    optimizer_bytes_per_parameter: options.OptimizerBytes = None,
    measure: Annotated[bool, Option("--measure", help="Also train a few steps on this machine and measure.")] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare strategies for a whole model. Prints memory and communication of a step with one micro-batch."""
    from osdp.planning.clusters import choose_cluster
    from osdp.planning.request import Request
    from osdp.training.launch import Nodes, is_rank
    from osdp.zoo import load_model
    from profiler.errors import OsdpError

    names = tuple(dict.fromkeys(strategy or ()))
    if measure and nodes is not None:
        raise OsdpError("--measure runs on this machine only", got=f"--nodes {nodes}", advice="--gpus-per-node N")
    if measure and not is_rank():
        device, ranks = _here(gpus_per_node)
        start_ranks(ranks, Nodes(), device, TIMEOUT_S)
        return
    with progress_bar():
        source = load_model(model, sequence_length=seq)
    from osdp.cli.reports.strategies import print_strategies, strategies_object
    from osdp.planning.strategy_footprint import NO_LIMIT_BYTES
    from planner.optimizers import optimizer_name

    kept = optimizer_name(optimizer, optimizer_bytes_per_parameter)
    request = Request(NO_LIMIT_BYTES, precision, kept, batch)
    if measure:
        with end_of_rank():
            found, target = _measured(source, cluster, request, names)
    else:
        target, _ = choose_cluster(cluster, nodes, gpus_per_node)
        with progress_bar() as progress:
            progress(f"tracing {source.name}", 0.0)
            found = _predicted(source, target, request, names)
    if not measure or os.environ["RANK"] == "0":
        show(as_json, strategies_object, print_strategies, found, target)


def _here(ranks: int | None) -> tuple[str, int]:
    """Return the device type and the number of ranks to start."""
    import torch

    from osdp.training.launch import CPU_RANKS
    from profiler.errors import OsdpError

    available = torch.cuda.device_count()
    if available and (ranks or 0) > available:
        what = "this machine has fewer GPUs than ranks"
        raise OsdpError(what, got=f"--gpus-per-node {ranks}", expected=f"at most {available}")
    return ("cuda", ranks or available) if available else ("cpu", ranks or CPU_RANKS)


def _predicted(source: ModelSource, cluster: Cluster, request: Request, names: tuple[str, ...]) -> list[Uniform]:
    from osdp.planning.strategy_footprint import predict
    from planner.strategies.notation import parse_strategy
    from profiler.trace.trace import trace_model

    names = names or (STRATEGIES if cluster.world_size > 1 else STRATEGIES[:1])  # one rank has but one of them
    for name in names:
        parse_strategy(name, cluster)  # refuses before the trace takes its seconds
    settings = request.precision, cluster.device.kind, request.micro_batch
    graph = trace_model(source, *settings, world_size=cluster.world_size)
    return [predict(graph, cluster, name, request) for name in names]


def _measured(
    source: ModelSource, cluster_name: str | None, request: Request, names: tuple[str, ...]
) -> tuple[list[Uniform], Cluster]:
    """Be one of the ranks; return what was predicted and counted, and for which cluster."""
    import torch

    from osdp.planning.rank_grid import cluster_of_ranks
    from osdp.planning.strategy_footprint import count
    from osdp.training.process_group import joined

    with joined("cuda" if torch.cuda.is_available() else "cpu", TIMEOUT_S) as ranks:
        cluster, _ = cluster_of_ranks(cluster_name)
        predicted = _predicted(source, cluster, request, names)
        return [replace(one, counted=count(source, one, cluster, ranks)) for one in predicted], cluster


@guarded
def partition(
    model: options.Model,
    ranks: Annotated[
        list[int] | None, Option(min=1, max=MOST_NODES, help="Number of ranks; repeatable. Default: 2 to 8.")
    ] = None,
    by_module: Annotated[
        bool, Option("--by-module", help="Keep a module's parameters on one rank, as the strategy `owner` does.")
    ] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Divide whole tensors among ranks. Prints how evenly, for values of `evenness_priority`."""
    import torch

    from osdp.cli.reports.strategies import partition_object, print_partition
    from osdp.compat.zero3_partition import zero3_partition_tensors
    from osdp.zoo import load_model

    with progress_bar(), torch.device("meta"):
        source = load_model(model)
        tensors = dict(source.build().named_parameters())
    found = {}
    for count, priority in product(dict.fromkeys(ranks or range(2, 9)), PRIORITIES):
        names = [f"rank {rank}" for rank in range(count)]
        found[count, priority] = zero3_partition_tensors(tensors, names, priority, by_module=by_module)[1]
    show(as_json, partition_object, print_partition, source.name, found)
