"""`osdp profile`: the command that measures a machine, on every rank of it, and compares two such measurements."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from osdp.cli import options
from osdp.cli.exits import guarded
from osdp.cli.rank_process import end_of_rank, start_ranks
from osdp.cli.terminal import make_console, print_json, progress_bar, say, show
from profiler.bounds import MOST_REPETITIONS, MOST_SAMPLES

if TYPE_CHECKING:
    from osdp.profile.session import Wanted
    from planner.problem import Progress

BUDGET_HELP = "Seconds of which collectives take at most about 60%; the time for everything else is not limited."


@guarded
def profile(
    output: Annotated[Path, Option("--output", "-o", help="Cluster file to write.")] = Path("profile.yaml"),
    model: Annotated[str | None, Option(help=f"Also time the operators of this model. {options.MODEL_HELP}")] = None,
    batch: Annotated[str, Option(help="Micro-batch sizes at which operators are timed, such as 1,2,4.")] = "1",
    seq: options.SequenceLength = None,
    precision: options.Precision = "fp32",
    repetitions: Annotated[
        int, Option(min=1, max=MOST_REPETITIONS, help="Timings of each point, of which the median is taken.")
    ] = 5,
    budget_s: Annotated[float, Option("--budget-s", min=1.0, help=BUDGET_HELP)] = 120.0,
    device: options.DeviceType = "auto",
    ranks_per_node: options.RanksPerNode = None,
    nnodes: options.NodeCount = 1,
    node_rank: options.NodeRank = 0,
    rdzv_endpoint: options.RendezvousEndpoint = "",
    timeout_s: Annotated[float, Option(help="Seconds that a rank waits for the others.")] = 300.0,
    compare: Annotated[tuple[Path, Path] | None, Option(metavar="A B", help="Only compare two cluster files.")] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a machine. Writes a cluster file for `osdp plan --cluster`, also of several nodes.

    Starts the ranks itself, unless torchrun did.
    """
    if compare is not None:
        _compare(*compare, as_json)
        return
    import torch

    from osdp.planning.plan_file import check_output
    from osdp.training.launch import CPU_RANKS, Nodes, is_rank
    from profiler.errors import OsdpError

    asked = model, batch, seq, precision, repetitions, budget_s, device
    if is_rank():
        with end_of_rank():
            _run_as_rank(_wanted(*asked), output, timeout_s, as_json)
        return
    wanted = _wanted(*asked)
    if node_rank == 0:  # The file is written there.
        check_output(output, "cluster")
    gpus = torch.cuda.device_count()
    ranks = ranks_per_node or (gpus if wanted.device == "cuda" else CPU_RANKS)
    if wanted.device == "cuda" and ranks > gpus:
        what, got = "ranks would share a GPU, where NCCL cannot connect them", f"{ranks} ranks, {gpus} visible"
        advice = f"--ranks-per-node {gpus}, or --device cpu"
        raise OsdpError(what, got=got, expected="a GPU for every rank", advice=advice)
    start_ranks(ranks, Nodes(nnodes, node_rank, rdzv_endpoint), wanted.device, timeout_s)


def _wanted(
    model: str | None, batch: str, seq: int | None, precision: str, repetitions: int, budget_s: float, device: str
) -> Wanted:
    from osdp.profile.session import Wanted
    from osdp.training.devices import chosen_device
    from osdp.zoo import load_model
    from profiler.errors import OsdpError
    from profiler.mixed_precision import COMPUTE_DTYPE

    sizes = [part.strip() for part in batch.split(",")]
    digits = len(str(MOST_SAMPLES))
    if not all(size.isdecimal() and len(size) <= digits and 0 < int(size) <= MOST_SAMPLES for size in sizes):
        expected = f"whole numbers from 1 to {MOST_SAMPLES:,}, such as 1,2,4"
        raise OsdpError("--batch takes micro-batch sizes", got=batch[:80], expected=expected)
    if precision not in COMPUTE_DTYPE:
        raise OsdpError("unknown --precision", got=precision, expected=" or ".join(COMPUTE_DTYPE))
    if device not in ("auto", "cpu", "cuda"):
        raise OsdpError("unknown --device", got=device, expected="cpu, cuda or auto")
    chosen = chosen_device(device)
    source = None if model is None else load_model(model, sequence_length=seq)
    micro_batches = tuple(sorted({int(size) for size in sizes}))
    return Wanted(source, precision, micro_batches, repetitions, budget_s, chosen)


def _run_as_rank(wanted: Wanted, output: Path, timeout_s: float, as_json: bool) -> None:
    """Measure with the other ranks; rank 0 writes the file and reports."""
    from osdp.cli.reports.profile import print_profile
    from osdp.planning.plan_file import check_output
    from osdp.profile.cluster_from_timings import assemble
    from osdp.profile.session import measure
    from osdp.training.process_group import joined
    from profiler.yaml_files import write_yaml
    from runtime.failures.rank_agreement import from_rank_0

    is_first = os.environ["RANK"] == "0"
    with joined(wanted.device, timeout_s) as ranks, _progress(is_first) as progress:
        from_rank_0("check the output", lambda: check_output(output, "cluster"))
        found = measure(wanted, ranks.device, progress)
        if not is_first:
            from_rank_0("write the profile", lambda: None)
            return
        cluster = assemble(found, output.name.removesuffix(".yaml").removesuffix(".yml"))
        comment = "Measured by `osdp profile`; SI units. Plan with it: osdp plan --cluster THIS_FILE"
        from_rank_0("write the profile", lambda: write_yaml(output, cluster, comment))
    if as_json:
        print_json(asdict(cluster))  # the fields of its file
    else:
        print_profile(make_console(), cluster, found.graph, output)


@contextmanager
def _progress(is_first: bool) -> Iterator[Progress]:
    """Show a bar on rank 0's terminal, and a line at every stage where there is none."""
    if not is_first:
        yield lambda what, fraction: None
        return
    if sys.stderr.isatty():
        with progress_bar() as progress:
            yield progress
        return
    printed = set()

    def print_stage(what: str, fraction: float) -> None:
        stage = what.partition(":")[0]
        if stage not in printed:
            printed.add(stage)
            say(f"{fraction:4.0%}  {stage}")

    yield print_stage


def _compare(before: Path, after: Path, as_json: bool) -> None:
    from osdp.cli.reports.profile import comparison_object, print_comparison
    from osdp.profile.profile_diff import compare_profiles
    from profiler.cluster.read_cluster import read_cluster

    rows = compare_profiles(read_cluster(before), read_cluster(after))
    show(as_json, comparison_object, print_comparison, rows, str(before), str(after))
