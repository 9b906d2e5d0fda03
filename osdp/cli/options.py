"""Options and arguments of commands, with their help: those of `osdp plan`, and those that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = "A name from `osdp models`, path/to/model.yaml, package.module:factory or hf:path/to/config.json."
CLUSTER_HELP = "A name from `osdp clusters` or path/to/cluster.yaml."

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `osdp plan -o` wrote.")]
ModelOfPlan = Annotated[
    str | None, typer.Option("--model", help="The model, where it no longer has the name that the plan knows it by.")
]
ClusterOfPlan = Annotated[
    str | None,
    typer.Option("--cluster", help="The cluster, where it no longer has the name that the plan knows it by."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")]

Model = Annotated[str, typer.Option(help=MODEL_HELP)]
ClusterName = Annotated[
    str | None, typer.Option(help=f"{CLUSTER_HELP} Default: the GPUs that are visible, or else titan-rtx-8.")
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes, instead of the cluster's own number.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="Ranks on each node, likewise.")]
Mem = Annotated[
    str | None,
    typer.Option(
        help="Memory limit per device; 8GB means 8 GiB, that is 8192 MiB. Several (6GB,8GB) or a range "
        "start:stop:step (6GB:24GB:2GB) give the frontier. Default: all of it."
    ),
]
Headroom = Annotated[
    str | None, typer.Option(help="What is left free under the limit: 512MB, or 5% of it. Default: nothing.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=CHOICE",
        help="Decide a part yourself: 'blocks.*.mlp=shard', 'blocks.0=recompute' (or keep). Repeatable.",
    ),
]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Micro-batch: samples of a rank in one forward. Default: searched.")
]
GlobalBatch = Annotated[
    int | None, typer.Option(min=1, help="Samples of all ranks in one step. Default: one micro-batch of each rank.")
]
Imbalance = Annotated[
    str | None,
    typer.Option(
        help="How unlike micro-batches are: the coefficient of variation of their compute time (0.5), or a "
        "file with the length of a sample in each line, the longest being as long as --seq. Default: all alike."
    ),
]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens per sample. Default: the model's.")]
Precision = Annotated[str, typer.Option(help="Compute in fp32 or bf16.")]
OptimizerName = Annotated[str, typer.Option(help="adam, adamw or sgd.")]
AskWhatIf = Annotated[
    bool, typer.Option("--what-if", help="Also say what binds, and what more memory or faster parts would buy.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write the plan to this YAML file, for OSDP() to run; of a frontier, the plans into this folder.",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw a frontier into this file (needs matplotlib).")]
