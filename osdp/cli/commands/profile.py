"""`osdp profile`: the command that measures a machine, on every rank of it, and compares two such measurements."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osdp.cli import options
from osdp.cli.exits import guarded
from osdp.cli.rank_process import end_of_rank, launched
from osdp.cli.terminal import Progress, make_console, progress_bar

if TYPE_CHECKING:
    from osdp.profile.session import Wanted

CPU_RANKS = 2
"""Ranks on a node without GPUs, unless the user says otherwise."""
BUDGET_HELP = "Seconds; collectives take at most about 60 % of them, the rest takes as long as it takes."


@guarded
def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("profile.yaml"),
    model: Annotated[
        str | None, typer.Option(help=f"Also measure what its operators compute. {options.MODEL_HELP}")
    ] = None,
    batch: Annotated[str, typer.Option(help="Micro-batches to measure the operators at, such as 1,2,4.")] = "1",
    seq: options.SequenceLength = None,
    precision: options.Precision = "fp32",
    repetitions: Annotated[int, typer.Option(min=1, help="Timings of each point; figures are medians.")] = 5,
    budget_s: Annotated[float, typer.Option("--budget-s", min=1.0, help=BUDGET_HELP)] = 120.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Default: one for each GPU, or 2 on a CPU.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes; run the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this node, from 0.")] = 0,
    rdzv_endpoint: Annotated[str, typer.Option(help="HOST:PORT of node 0, where several nodes meet.")] = "",
    timeout_s: Annotated[float, typer.Option(help="How long a rank waits for the others.")] = 300.0,
    restart: Annotated[bool, typer.Option("--restart", hidden=True, help="Has no effect: nothing is resumed.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Measure nothing: compare two profiles.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure this machine, or each node of several, and write a file that `osdp plan --cluster` takes.

    Starts the ranks itself, or is one of those that torchrun started.
    """
    if compare is not None:
        _compare(*compare, as_json)
        return
    from osdp.planning.request import check_output
    from osdp.training.launch import Nodes, is_rank, launch

    asked = model, batch, seq, precision, repetitions, budget_s, device
    if is_rank():
        with end_of_rank():
            _run_as_rank(_wanted(*asked), output, timeout_s, as_json)
        return
    wanted = _wanted(*asked)
    if node_rank == 0:  # The file is written there.
        check_output(output, "cluster")
    ranks = ranks_per_node or _ranks_here(wanted.device)
    with launched():
        launch(sys.argv[1:], ranks, Nodes(nnodes, node_rank, rdzv_endpoint), wanted.device, timeout_s)


def _wanted(
    model: str | None, batch: str, seq: int | None, precision: str, repetitions: int, budget_s: float, device: str
) -> Wanted:
    """Check the options."""
    import torch

    from osdp.profile.session import Wanted
    from osdp.zoo import load_model
    from profiler.errors import OsdpError

    sizes = [part.strip() for part in batch.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise OsdpError("--batch is not understood", got=batch, expected="whole numbers from 1, such as 1,2,4")
    if precision not in ("fp32", "bf16"):
        raise OsdpError("--precision is not known", got=precision, expected="fp32 or bf16")
    if device not in ("auto", "cpu", "cuda"):
        raise OsdpError("--device is not known", got=device, expected="cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise OsdpError("there is no GPU here", got="--device cuda", advice="--device cpu, or a CUDA build of torch")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    source = None if model is None else load_model(model, sequence_length=seq)
    micro_batches = tuple(sorted({int(size) for size in sizes}))
    return Wanted(source, precision, micro_batches, repetitions, budget_s, chosen)


def _ranks_here(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else CPU_RANKS


def _run_as_rank(wanted: Wanted, output: Path, timeout_s: float, as_json: bool) -> None:
    """Measure with the other ranks; rank 0 writes the file and reports."""
    from osdp.cli.reports.profile import print_profile, profile_json
    from osdp.planning.request import check_output
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
        comment = "Measured by `osdp profile`; SI units. Take it with: osdp plan --cluster THIS_FILE"
        from_rank_0("write the profile", lambda: write_yaml(output, cluster, comment))
    if as_json:
        print(profile_json(cluster))
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
    told: list[str] = []

    def tell(what: str, fraction: float) -> None:
        stage = what.partition(":")[0]
        if stage not in told:
            told.append(stage)
            print(f"osdp: {fraction:4.0%}  {stage}", file=sys.stderr, flush=True)

    yield tell


def _compare(before: Path, after: Path, as_json: bool) -> None:
    from osdp.cli.reports.profile import comparison_json, print_comparison
    from osdp.profile.profile_diff import compare_profiles
    from profiler.cluster.read_cluster import read_cluster

    rows = compare_profiles(read_cluster(before), read_cluster(after))
    if as_json:
        print(comparison_json(rows, str(before), str(after)))
    else:
        print_comparison(make_console(), rows, str(before), str(after))
