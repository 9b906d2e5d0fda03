"""Options and arguments of commands, with their help: those of `osdp plan`, and those that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from osdp.cli.terminal import set_quiet
from profiler import bounds

MODEL_HELP = (
    "A name from `osdp models`, path/to/model.yaml, package.module:factory, path/to/file.py:factory or "
    "hf:path/to/config.json."
)
CLUSTER_HELP = "A name from `osdp clusters`, path/to/cluster.yaml, or `visible`: derived from the visible GPUs."
MEM_HELP = (
    "Memory limit per device; 8GB means 8 GiB (8192 MiB). A list (6GB,8GB) or a range start:stop:step "
    "(6GB:24GB:2GB) gives the frontier of memory and speed. Default: all of the device's memory."
)
PIN_HELP = (
    "Fix a choice yourself: 'blocks.*.mlp=shard' sets a strategy, 'blocks.0=recompute' activation "
    "checkpointing, 'blocks.0=recompute+offload' the same with the block's input in the host's memory, "
    "'blocks.0=selective' all but matrix products and attention, 'blocks.0=keep' none. Repeatable."
)
IMBALANCE_HELP = (
    "How much the compute time of micro-batches varies: the coefficient of variation (such as 0.5), or a "
    "text file with the length of one sample per line, whose longest has --seq tokens. Default: not at all."
)
PRECISION_HELP = (
    "bf16: mixed precision, parameters compute in bf16. fp32: none, they compute in the dtype that they have. "
    "amp-bf16, amp-fp16: the forward runs under torch.autocast."
)
MASTER_WEIGHTS_HELP = (
    "fp32: trained parameters of fewer bits, such as those of a bf16 checkpoint, and their optimizer states are kept "
    "in fp32. Default: in the dtype that they have."
)
OPTIMIZER_BYTES_HELP = (
    "For any other optimizer, in place of --optimizer: what it keeps between steps per trained parameter, such as 2.25 "
    "for Adam in 8 bits with an fp32 scale for every 32 values, or 4 for Lion in fp32."
)
EXPERT_IMBALANCE_HELP = (
    "How unevenly a router loads the experts of a mixture of experts: the largest load over the mean."
)
SIMPLE_HELP = (
    "One strategy for all blocks, one for what is outside them, at most two kinds of recomputation. Default: if the "
    "fastest plan gains less than 2% over that."
)
SOLVER_HELP = "labels, or ilp: the integer program alone, without label setting after it."
TIME_LIMIT_HELP = (
    "Seconds after which the search ends with the best plan so far. Default: none; its work is limited instead."
)
OUTPUT_HELP = "Write the plan to this YAML file, for OSDP() to run; with several limits, the plans to this folder."


def model_starts(incomplete: str) -> list[str]:
    """Return the names of models that begin so, for a shell to complete."""
    return _starts("models", incomplete)


def cluster_starts(incomplete: str) -> list[str]:
    """Likewise of clusters."""
    return _starts("clusters", incomplete)


def _starts(kind: Literal["models", "clusters"], incomplete: str) -> list[str]:
    from osdp.resources import resource_names

    return [name for name in resource_names(kind) if name.startswith(incomplete)]


PlanPath = Annotated[Path, Argument(metavar="PLAN", help="A plan file, as `osdp plan -o` writes it.")]
ModelOfPlan = Annotated[str | None, Option("--model", help="Name or file to load instead of the plan file's.")]
ClusterOfPlan = Annotated[str | None, Option("--cluster", help="Name or file to load instead of the plan file's.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead of the report.")]

Quiet = Annotated[
    bool,
    Option(
        "--quiet",
        "-q",
        expose_value=False,
        is_eager=True,
        callback=set_quiet,
        help="Show no progress and no notes; warnings and errors still.",
    ),
]

Model = Annotated[str, Option(help=MODEL_HELP, autocompletion=model_starts)]
ModelOrNone = Annotated[str | None, Option(help=MODEL_HELP, autocompletion=model_starts)]
ClusterName = Annotated[
    str | None,
    Option(help=f"{CLUSTER_HELP} Default: the visible GPUs; without any, titan-rtx-8.", autocompletion=cluster_starts),
]
Nodes = Annotated[int | None, Option(min=1, max=bounds.MOST_NODES, help="Number of nodes. Default: the cluster's.")]
GpusPerNode = Annotated[
    int | None, Option(min=1, max=bounds.MOST_RANKS_PER_NODE, help="Number of ranks per node. Default: the cluster's.")
]
Mem = Annotated[str | None, Option(help=MEM_HELP)]
Headroom = Annotated[
    str | None,
    Option(
        help="Memory to leave unused: 512MB, or 5% of the limit. Default: on GPUs 1.5%, for fragments, or 15% where a "
        "step is faster for it."
    ),
]
Pins = Annotated[list[str] | None, Option(metavar="PATTERN=CHOICE", help=PIN_HELP)]
Batch = Annotated[
    int | None, Option(min=1, max=bounds.MOST_SAMPLES, help="Micro-batch size of a rank. Default: searched.")
]
GlobalBatch = Annotated[
    int | None,
    Option(
        min=1, max=bounds.MOST_SAMPLES_OF_A_STEP, help="Samples of all ranks per step. Default: one micro-batch each."
    ),
]
Imbalance = Annotated[str | None, Option(help=IMBALANCE_HELP)]
ExpertImbalance = Annotated[float, Option(min=1, help=EXPERT_IMBALANCE_HELP)]
ExpertImbalanceOfPlan = Annotated[float | None, Option(min=1, help=EXPERT_IMBALANCE_HELP + " Default: the plan's.")]
SequenceLength = Annotated[
    int | None, Option(min=1, max=bounds.MOST_TOKENS, help="Tokens per sample. Default: the model's.")
]
Precision = Annotated[str, Option(help=PRECISION_HELP)]
MasterWeights = Annotated[str | None, Option(help=MASTER_WEIGHTS_HELP)]
OptimizerName = Annotated[
    str | None, Option(help="adam, adamw or sgd; with fused=True, fused_adam, fused_adamw or fused_sgd. Default: adam.")
]
OptimizerBytes = Annotated[float | None, Option("--optimizer-bytes-per-parameter", help=OPTIMIZER_BYTES_HELP)]
Simple = Annotated[bool, Option("--simple", help=SIMPLE_HELP)]
Best = Annotated[bool, Option("--best", help="The fastest plan, however many parts it has, to the last per cent.")]
Solver = Annotated[str, Option(help=SOLVER_HELP)]
TimeLimit = Annotated[float | None, Option("--time-limit", min=0, help=TIME_LIMIT_HELP)]
WhatIf = Annotated[bool, Option("--what-if", help="Also find the bottleneck: what more memory or faster parts gain.")]
Output = Annotated[Path | None, Option("--output", "-o", help=OUTPUT_HELP)]
Html = Annotated[
    Path | None,
    Option("--html", help="Also write a report for a browser: one file, nothing is fetched (needs jinja2 and plotly)."),
]
MemorySnapshot = Annotated[
    Path | None,
    Option(metavar="FILE.pickle", help="Write the step's predicted memory for https://pytorch.org/memory_viz."),
]
Timeline = Annotated[
    Path | None, Option(metavar="FILE.json", help="Write the step's predicted trace for https://ui.perfetto.dev.")
]
Plot = Annotated[Path | None, Option(help="Plot the frontier to this file (needs matplotlib).")]

RanksPerNode = Annotated[
    int | None,
    Option(min=1, max=bounds.MOST_RANKS_PER_NODE, help="Ranks per node. Default: one per GPU, or 2 on CPUs."),
]
NodeCount = Annotated[
    int, Option("--nnodes", min=1, max=bounds.MOST_NODES, help="Number of nodes; run the same command on each.")
]
NodeRank = Annotated[int, Option(min=0, max=bounds.MOST_NODES - 1, help="Rank of this node, from 0.")]
RendezvousEndpoint = Annotated[str, Option("--rdzv-endpoint", help="HOST:PORT of node 0, needed with several nodes.")]
NodeRange = Annotated[
    str | None, Option(metavar="MIN:MAX", help="In place of --nnodes: train on MIN to MAX nodes, as many as there are.")
]
Restarts = Annotated[
    int,
    Option(
        min=0,
        max=bounds.MOST_REPETITIONS,
        help="How many times to start again from the last checkpoint after a rank or a node is lost.",
    ),
]
DeviceType = Annotated[str, Option(help="cpu, cuda or auto.")]
