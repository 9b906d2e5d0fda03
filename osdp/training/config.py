"""What a training run is: `configs/train/*.yaml` or the user's own file, and options that win over it.

Every field has an option of the same name, and `osdp train --help` says what it is; here stands what that leaves out.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from osdp.compat.seed_groups import SETTINGS
from osdp.resources import file_of
from profiler.bounds import NodeCount, RanksPerNode, Samples, SamplesOfAStep, Seed, Steps, StepsOrNone, Tokens
from profiler.byte_sizes import parse_bytes
from profiler.errors import OsdpError
from profiler.yaml_files import Problem, read_yaml, validate

DEFAULT = "gpt2"

CHOICES = {
    "task": ("addition", "bytes", "sentences"),
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine"),
    "precision": ("fp32", "bf16", "amp-bf16"),
    "master_weights": (None, "fp32"),
    "fsdp_type": ("OSDP", "FSDP", "DDP"),
    "fsdp_args": (None, *SETTINGS),
    "device": ("auto", "cpu", "cuda"),
    "on_nonfinite": ("stop", "skip"),
    "tracker": (None, "wandb", "mlflow"),
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}
    SCHEMA: ClassVar[str] = "osdp.train/1"

    schema: str
    model: str
    """As `osdp plan --model`: a name, a file, package.module:factory or hf:config.json."""
    steps: Steps
    task: str = "addition"
    """`addition`: sums made on the spot. `bytes`: the bytes of the file `data`. `sentences`: BERT's two tasks, on
    pairs made on the spot or read from the file `data`."""
    digits: Annotated[int, Field(ge=1, le=9)] = 2
    data: str | None = None
    """Text file: its bytes are the tokens. For `sentences` one on each line, and blank lines between documents."""
    seq: Tokens | None = None
    """None: of one sum, or the model's."""
    seed: Seed = 0
    optimizer: str = "adamw"
    lr: PositiveFloat = 1e-3
    """After the warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    schedule: str = "constant"
    """`constant`, or `cosine` down to a tenth of the learning rate."""
    warmup_steps: StepsOrNone = 0
    clip: PositiveFloat | None = None
    on_nonfinite: str = "stop"
    """What becomes of a step whose gradients are not finite: the run ends before the optimizer's step, or the step is
    left out (`skip`)."""
    nonfinite_limit: Steps = 10
    """So many such steps in a row end the run all the same."""
    precision: str = "fp32"
    master_weights: str | None = None
    """What trained parameters of fewer bits rest in; None: the dtype that they have, or what the plan file says."""
    mem: str | None = None
    """None: the device's memory."""
    cluster: str | None = None
    batch: Samples | None = None
    global_batch: SamplesOfAStep | None = None
    """None: one micro-batch of each rank."""
    plan: str | None = None
    fsdp_type: str = "OSDP"
    """`OSDP`: the plan. `FSDP`, `DDP`: everything sharded, or replicated, by the same runtime."""
    fsdp_args: str | None = None
    """With `fsdp_type: FSDP`: `group_sharding` shards inside nodes, `communication_with_groups` gathers across nodes
    and then inside, `none` (the same as nothing) is plain FSDP."""
    device: str = "auto"
    """`cpu` (gloo), `cuda` (NCCL) or `auto`: GPUs if there are any."""
    ranks_per_node: RanksPerNode | None = None
    emulated_nodes: NodeCount = 1
    """Nodes that the ranks of one machine stand for, `ranks_per_node` each: to try groups without a second machine."""
    timeout_s: PositiveFloat = 600.0
    checkpoint: str | None = None
    checkpoint_every: Steps = 500
    """There is one at the end too."""
    checkpoint_keep: Steps = 2
    checkpoint_async: bool = False
    resume: str = "auto"
    """`auto`: from the newest whole checkpoint if there is one. `never`, or the path of a checkpoint."""
    tensorboard: str | None = None
    tracker: str | None = None
    """`wandb` or `mlflow`, where they are installed; their own settings say where the figures go."""
    html: str | None = None
    """File of a report for a browser, which rank 0 writes while the run goes on."""
    trace: str | None = None
    memory_snapshot: str | None = None
    """File of a predicted snapshot, beside which rank 0 writes a real one; see `osdp.training.viewer_files`."""
    timeline: str | None = None
    """The same of a trace."""
    log_every: Steps = 50

    @property
    def sharding(self) -> str:
        """What decides how the model is sharded."""
        return f"FSDP with {self.fsdp_args}" if self.fsdp_args not in (None, "none") else self.fsdp_type


def load_config(spec: str | None, options: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration that `spec` names (a file or one of OSDP's) with `options` put in.

    `options` are fields by name; None leaves what the file has. `data` alone also means the task
    `bytes`, unless the file has `sentences`; `fsdp_type` and `fsdp_args` replace each other. Raises OsdpError.
    """
    path = file_of("train", spec or DEFAULT, "your own file: path/to/config.yaml")
    config = read_yaml(path, TrainConfig, schema=TrainConfig.SCHEMA, check=_problems)
    given = {name: value for name, value in options.items() if value is not None}
    if "data" in given and config.task != "sentences":
        given.setdefault("task", "bytes")
    if "fsdp_type" in given:
        given = {"fsdp_args": None} | given | {"fsdp_type": given["fsdp_type"].upper()}
    elif "fsdp_args" in given:
        given["fsdp_type"] = "FSDP"
    config = dataclasses.replace(config, **given)
    for problem in validate(dataclasses.asdict(config), TrainConfig)[1] or _problems(config):
        what = f"--{problem.location[0].replace('_', '-')} {problem.complaint}"
        raise OsdpError(what, got=problem.got, expected=problem.expected, advice=problem.advice)
    return config


def _problems(config: TrainConfig) -> Iterator[Problem]:
    """Find values that have the right type and yet cannot be."""
    for name, known in CHOICES.items():
        if (value := getattr(config, name)) not in known:
            yield Problem((name,), "is not known", repr(value), f"one of {', '.join(filter(None, known))}")
    if config.data is not None and config.task == "addition":
        yield Problem(("data",), "has no effect on the task addition", config.data, "", "task bytes or sentences")
    if config.data is None and config.task == "bytes":
        yield Problem(("data",), "is missing", "", "a file whose bytes are learned", "data, or the task addition")
    if config.plan is not None and config.fsdp_type != "OSDP":
        yield Problem(("plan",), f"cannot be run as {config.fsdp_type}", config.plan, "fsdp_type OSDP")
    if config.trace is not None:
        from osdp.training.trace_step import TRACE_STEP

        if config.steps < TRACE_STEP:
            yield Problem(("steps",), "are too few for a trace", str(config.steps), f"at least {TRACE_STEP}")
    if config.memory_snapshot is not None or config.timeline is not None:
        from osdp.training.viewer_files import SNAPSHOT_STEP, TIMELINE_STEP

        for name, step in (("memory_snapshot", SNAPSHOT_STEP), ("timeline", TIMELINE_STEP)):
            if getattr(config, name) is not None and config.steps < step:
                yield Problem((name,), "needs more steps", f"{config.steps}", f"at least {step}")
    if config.fsdp_args is not None and config.fsdp_type != "FSDP":
        yield Problem(("fsdp_args",), f"has no effect on {config.fsdp_type}", config.fsdp_args, "fsdp_type FSDP")
    if config.mem is not None:
        try:
            parse_bytes(config.mem)
        except OsdpError as error:
            yield Problem(("mem",), "is wrong", error.got, error.expected)
