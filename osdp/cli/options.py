"""Options and arguments of commands, with their help: those of `osdp plan`, and those that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = "A name from `osdp models`, path/to/model.yaml, package.module:factory or hf:path/to/config.json."
CLUSTER_HELP = "A name from `osdp clusters` or path/to/cluster.yaml."

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, as `osdp plan -o` writes it.")]
ModelOfPlan = Annotated[
    str | None, typer.Option("--model", help="Load the model from here, not by the name in the plan file.")
]
ClusterOfPlan = Annotated[
    str | None, typer.Option("--cluster", help="Load the cluster from here, not by the name in the plan file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")]

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
ClusterName = Annotated[
    str | None, typer.Option(help=f"{CLUSTER_HELP} Default: the visible GPUs; without any, titan-rtx-8.")
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of nodes. Default: the cluster's.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Number of ranks per node. Default: the cluster's.")]
Mem = Annotated[
    str | None,
    typer.Option(
        help="Memory limit per device; 8GB means 8 GiB (8192 MiB). A list (6GB,8GB) or a range start:stop:step "
        "(6GB:24GB:2GB) gives the frontier of memory and speed. Default: all of the device's memory."
    ),
]
Headroom = Annotated[
    str | None, typer.Option(help="Memory to leave unused below the limit: 512MB, or 5% of the limit. Default: none.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=CHOICE",
        help="Fix a choice yourself: 'blocks.*.mlp=shard' sets a strategy, 'blocks.0=recompute' activation "
        "checkpointing, 'blocks.0=keep' none. Repeatable.",
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Micro-batch size of a rank. Default: searched.")]
GlobalBatch = Annotated[
    int | None, typer.Option(min=1, help="Samples per optimizer step, over all ranks. Default: one micro-batch each.")
]
Imbalance = Annotated[
    str | None,
    typer.Option(
        help="How much the compute time of micro-batches varies: the coefficient of variation (such as 0.5), or a "
        "text file with the length of one sample per line, whose longest has --seq tokens. Default: not at all."
    ),
]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens per sample. Default: the model's.")]
Precision = Annotated[str, typer.Option(help="Compute dtype: fp32 or bf16.")]
OptimizerName = Annotated[str, typer.Option(help="adam, adamw or sgd.")]
AskWhatIf = Annotated[
    bool, typer.Option("--what-if", help="Also find the bottleneck: how much more memory or faster parts would help.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write the plan to this YAML file, for OSDP() to run; with several limits, the plans to this folder.",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Plot the frontier to this file (needs matplotlib).")]

RanksPerNode = Annotated[int | None, typer.Option(min=1, help="Ranks per node. Default: one per GPU, or 2 on CPUs.")]
NodeCount = Annotated[int, typer.Option("--nnodes", min=1, help="Number of nodes; run the same command on each.")]
NodeRank = Annotated[int, typer.Option(min=0, help="Rank of this node, from 0.")]
RendezvousEndpoint = Annotated[
    str, typer.Option("--rdzv-endpoint", help="HOST:PORT of node 0, for the rendezvous of several nodes.")
]
DeviceType = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
