"""`osdp train`: the command that starts the ranks of a run, and that each rank runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from osdp.cli import options
from osdp.cli.exits import guarded
from osdp.cli.rank_process import end_of_rank, start_ranks
from osdp.cli.terminal import note

if TYPE_CHECKING:
    from osdp.training.config import TrainConfig
    from osdp.training.launch import Nodes

_LAUNCH_ONLY = ("context", "config", "nnodes", "nodes", "node_rank", "rdzv_endpoint", "restarts")
"""Parameters that are no fields of the configuration."""


@guarded
def train(
    context: Context,
    config: Annotated[
        str | None,
        Argument(metavar="[CONFIG]", help="A YAML file, or the name of one in configs/train. Default: gpt2."),
    ] = None,
    model: Annotated[str | None, Option(help="As in `osdp plan`.")] = None,
    steps: Annotated[int | None, Option(help="Optimizer steps, including those before a resumed checkpoint.")] = None,
    task: Annotated[str | None, Option(help="addition, bytes or sentences.")] = None,
    digits: Annotated[int | None, Option(help="Task addition: digits of each number.")] = None,
    data: Annotated[str | None, Option(help="Text file for task bytes, which it implies, or sentences.")] = None,
    seq: Annotated[int | None, Option(help="Tokens per sample.")] = None,
    seed: Annotated[int | None, Option(help="Random seed of parameters, sample order and dropout.")] = None,
    optimizer: Annotated[str | None, Option(help="adam, adamw or sgd, with fused=True.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate.")] = None,
    weight_decay: Annotated[float | None, Option(help="Weight decay of the optimizer.")] = None,
    schedule: Annotated[str | None, Option(help="Learning rate schedule: constant or cosine.")] = None,
    warmup_steps: Annotated[int | None, Option(help="Steps of learning rate warm-up.")] = None,
    clip: Annotated[float | None, Option(help="Clip the norm of all gradients to this.")] = None,
    on_nonfinite: Annotated[
        str | None, Option(help="Gradients that are not finite: stop the run, or skip the step.")
    ] = None,
    nonfinite_limit: Annotated[int | None, Option(help="Stop after so many skipped steps in a row.")] = None,
    precision: Annotated[str | None, Option(help=options.PRECISION_HELP)] = None,
    master_weights: options.MasterWeights = None,
    mem: Annotated[
        str | None, Option(help="Memory limit per rank; 8GB means 8 GiB. Default: the device's memory.")
    ] = None,
    cluster: Annotated[str | None, Option(help="As in `osdp plan`. Default: this machine.")] = None,
    batch: Annotated[int | None, Option(help="Micro-batch size of a rank. Default: planned.")] = None,
    global_batch: Annotated[int | None, Option(help="Samples of all ranks per optimizer step.")] = None,
    plan: Annotated[str | None, Option(help="Run this plan file instead of planning.")] = None,
    fsdp_type: Annotated[str | None, Option("--fsdp-type", "--fsdp_type", help="OSDP; baselines: FSDP, DDP.")] = None,
    fsdp_args: Annotated[
        str | None,
        Option("--fsdp-args", "--fsdp_args", help="FSDP with group_sharding, communication_with_groups or none."),
    ] = None,
    device: Annotated[str | None, Option(help="cpu, cuda or auto.")] = None,
    ranks_per_node: Annotated[int | None, Option(help="Ranks per node. Default: one per GPU, or 2 on CPUs.")] = None,
    emulated_nodes: Annotated[int | None, Option(help="Nodes to emulate with the ranks of one machine.")] = None,
    timeout_s: Annotated[float | None, Option(help="Seconds that a rank waits for the others.")] = None,
    checkpoint: Annotated[str | None, Option(help="Folder for checkpoints.")] = None,
    checkpoint_every: Annotated[int | None, Option(help="Steps between checkpoints.")] = None,
    checkpoint_keep: Annotated[int | None, Option(help="Number of newest checkpoints to keep.")] = None,
    checkpoint_async: Annotated[
        bool | None, Option("--checkpoint-async/--no-checkpoint-async", help="Write while training continues.")
    ] = None,
    resume: Annotated[str | None, Option(help="auto, never, or the path of a checkpoint.")] = None,
    tensorboard: Annotated[str | None, Option(help="Folder for TensorBoard event files.")] = None,
    tracker: Annotated[str | None, Option(help="wandb or mlflow, if installed.")] = None,
    html: Annotated[
        str | None,
        Option(metavar="FILE.html", help="Write a report for a browser while the run goes on and at its end."),
    ] = None,
    trace: Annotated[str | None, Option(help="Folder for each rank's memory plot (step 3) and trace (step 4).")] = None,
    memory_snapshot: Annotated[
        str | None,
        Option(metavar="FILE.pickle", help="Write what CUDA's allocator does in step 5 to FILE.measured.pickle."),
    ] = None,
    timeline: Annotated[
        str | None, Option(metavar="FILE.json", help="Write a trace of rank 0's step 6 to FILE.measured.json.")
    ] = None,
    log_every: Annotated[int | None, Option(help="Steps between progress lines.")] = None,
    nnodes: options.NodeCount = 1,
    nodes: options.NodeRange = None,
    node_rank: options.NodeRank = 0,
    rdzv_endpoint: options.RendezvousEndpoint = "",
    restarts: options.Restarts = 0,
    quiet: options.Quiet = False,
) -> None:
    """Train a model under a plan. Runs on all GPUs of this machine, or on CPU ranks.

    Options override the fields of the same name in the configuration.
    """
    from osdp.training.allocator_settings import use_expandable_segments

    use_expandable_segments()
    from osdp.training.config import load_config
    from osdp.training.launch import Nodes, is_rank, node_range

    given = {name: value for name, value in context.params.items() if name not in _LAUNCH_ONLY}
    if is_rank():
        with end_of_rank():
            _run_as_rank(config, given)
    else:
        there = Nodes(nnodes, node_rank, rdzv_endpoint) if nodes is None else node_range(nodes, nnodes, rdzv_endpoint)
        _launch(load_config(config, given), there, restarts)


def _launch(config: TrainConfig, nodes: Nodes, restarts: int) -> None:
    """Check what can be checked, then start the ranks and wait for them."""
    from osdp.training.job import check_ranks, check_restarts, prepare, ranks_to_start
    from runtime.state.checkpoint import latest

    check_restarts(config, restarts, nodes.least)
    job, ranks = prepare(config), ranks_to_start(config)
    if job.plan is not None:
        check_ranks(job.plan, nodes.count * config.emulated_nodes, ranks // config.emulated_nodes)
    try:
        again = restarts if restarts or nodes.least is not None else None
        start_ranks(ranks, nodes, job.device, config.timeout_s, restarts=again)
    except KeyboardInterrupt:
        newest = latest(Path(config.checkpoint)) if config.checkpoint else None
        if newest is not None:
            note(f"{newest} is complete: --resume auto continues from it")
        raise


def _run_as_rank(spec: str | None, given: dict[str, Any]) -> None:
    """Be one of the ranks."""
    from osdp.cli.reports.train import TrainReport, plan_text
    from osdp.training.config import load_config
    from osdp.training.job import prepare
    from osdp.training.progress import continued
    from osdp.training.rank_main import run_rank
    from osdp.training.reporters import Reporter
    from osdp.training.trackers import TRACKERS, Board

    config = continued(load_config(spec, given))
    kept: list[Reporter] = [] if config.tensorboard is None else [Board(Path(config.tensorboard), plan_text)]
    tracked = [] if config.tracker is None else [TRACKERS[config.tracker](plan_text)]
    job = prepare(config)
    if config.html is not None:
        from osdp.report.training_page import TrainingPage
        from osdp.training.choose_plan import opened

        kept.append(
            TrainingPage(Path(config.html), lambda plan: opened(job, plan), shlex.join(["osdp", *sys.argv[1:]]))
        )
    run_rank(job, TrainReport(), *kept, *tracked)
