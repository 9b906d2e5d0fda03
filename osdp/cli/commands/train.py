"""`osdp train`: the command that starts the ranks of a run, and that each rank runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osdp.cli.exits import guarded
from osdp.cli.rank_process import end_of_rank, launched
from osdp.cli.terminal import note

if TYPE_CHECKING:
    from osdp.training.config import TrainConfig
    from osdp.training.launch import Nodes

_LAUNCH_ONLY = ("context", "config", "nnodes", "node_rank", "rdzv_endpoint")
"""Parameters that are no fields of the configuration."""


@guarded
def train(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="A file, or the name of one in configs/train. Default: gpt2."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="As in `osdp plan`.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, those before a resumed checkpoint too.")] = None,
    task: Annotated[str | None, typer.Option(help="addition, bytes or sentences.")] = None,
    digits: Annotated[int | None, typer.Option(help="Digits of each number of a sum.")] = None,
    data: Annotated[str | None, typer.Option(help="Text file; its bytes are the tokens.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sample.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of parameters, order of samples, dropout.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="As torch's optimizers take it.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant or cosine.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps in which the learning rate grows.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of all gradients together.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory limit per rank; 8GB means 8 GiB.")] = None,
    cluster: Annotated[str | None, typer.Option(help="As in `osdp plan`. Default: what is there.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a rank in one forward. Default: planned.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of all ranks in a step.")] = None,
    plan: Annotated[str | None, typer.Option(help="Plan file to run, instead of planning.")] = None,
    fsdp_type: Annotated[
        str | None, typer.Option("--fsdp-type", "--fsdp_type", help="OSDP, or FSDP or DDP to compare with.")
    ] = None,
    fsdp_args: Annotated[
        str | None,
        typer.Option("--fsdp-args", "--fsdp_args", help="group_sharding, communication_with_groups or none: FSDP."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Default: one for each GPU, or 2 on a CPU.")] = None,
    emulated_nodes: Annotated[int | None, typer.Option(help="Nodes that one machine's ranks stand for.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="How long a rank waits for the others.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Folder of checkpoints.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    checkpoint_keep: Annotated[int | None, typer.Option(help="Newest checkpoints that are kept.")] = None,
    checkpoint_async: Annotated[
        bool | None, typer.Option("--checkpoint-async/--no-checkpoint-async", help="Write while training goes on.")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="auto, never, or the path of a checkpoint.")] = None,
    tensorboard: Annotated[str | None, typer.Option(help="Folder of TensorBoard's files.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="Folder for a picture of each rank's memory in step 3, and a trace of step 4.")
    ] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between two lines of progress.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes; run the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this node, from 0.")] = 0,
    rdzv_endpoint: Annotated[str, typer.Option(help="HOST:PORT of node 0, where several nodes meet.")] = "",
) -> None:
    """Train a model under a plan, on all GPUs of this machine or on CPU ranks.

    Every option wins over the field of the same name in the configuration.
    """
    from osdp.training.config import load_config
    from osdp.training.launch import Nodes, is_rank

    given = {name: value for name, value in context.params.items() if name not in _LAUNCH_ONLY}
    if is_rank():
        with end_of_rank():
            _run_as_rank(config, given)
    else:
        _launch(load_config(config, given), Nodes(nnodes, node_rank, rdzv_endpoint))


def _launch(config: TrainConfig, nodes: Nodes) -> None:
    """Check what can be checked, then start the ranks and wait for them."""
    from osdp.training.job import check_ranks, prepare, ranks_to_start
    from osdp.training.launch import launch
    from runtime.state.checkpoint import latest

    job, ranks = prepare(config), ranks_to_start(config)
    if job.plan is not None:
        check_ranks(job.plan, nodes.count * config.emulated_nodes, ranks // config.emulated_nodes)
    try:
        with launched():
            launch(sys.argv[1:], ranks, nodes, job.device, config.timeout_s)
    except KeyboardInterrupt:
        newest = latest(Path(config.checkpoint)) if config.checkpoint else None
        if newest is not None:
            note(f"{newest} is whole: --resume auto continues from it")
        raise


def _run_as_rank(spec: str | None, given: dict[str, Any]) -> None:
    """Be one of the ranks."""
    from osdp.cli.reports.train import TrainReport
    from osdp.training.config import load_config
    from osdp.training.job import prepare
    from osdp.training.rank_main import run_rank
    from osdp.training.reporters import Board

    config = load_config(spec, given)
    boards = [] if config.tensorboard is None else [Board(Path(config.tensorboard))]
    run_rank(prepare(config), TrainReport(), *boards)
