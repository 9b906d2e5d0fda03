"""The plan: the planner's output, for the runtime and, as a YAML file, for the user."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Lt

from planner.cost.stragglers import NO_WAITS, Waits
from planner.model.fsdp_units import check_selective
from planner.strategies.notation import parse_choice
from planner.strategies.spec import Strategy
from profiler.affine import Affine
from profiler.bounds import Bytes, NodeCount, RanksPerNode, Samples, SamplesOfAStep, Tokens
from profiler.cluster.cluster import Cluster
from profiler.cluster.measurements import RingRule
from profiler.errors import OsdpError
from profiler.model_graph import ModelGraph, Recompute


class _Strict:
    """What is read from files without keys that are unknown here."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class ModelRef(_Strict):
    """The model that a plan is for."""

    name: str
    """As given to `--model`."""
    fingerprint: str
    """Of the traced graph."""
    parameters: Bytes
    """Number of parameters."""
    sequence_length: Tokens
    precision: str
    """`fp32`, `bf16`, `amp-bf16` or `amp-fp16`."""
    master_weights: str = ""
    """What trained parameters of fewer bits rest in: `fp32`, or empty for the dtype that they have."""
    autocast: str = ""
    """Dtype that `torch.autocast` in the forward has products compute in: `bf16`, `fp16`, or empty for none."""


@dataclass(frozen=True)
class ClusterRef(_Strict):
    """The cluster that a plan is for."""

    name: str
    fingerprint: str
    nodes: NodeCount
    gpus_per_node: RanksPerNode
    ring: tuple[RingRule, ...] = ()
    """Groups in which reduce-scatter uses OSDP's own ring, as in the cluster file."""


@dataclass(frozen=True)
class Prediction(_Strict):
    """What the cost model expects; nothing here was measured."""

    peak_memory_bytes: Bytes
    """Per device, reserve included."""
    memory_by_category: dict[str, Bytes]
    """Bytes at the peak by category."""
    peak_phase: str
    """Phase, and the operator where there is one."""
    step_time_s: float
    time_by_term: dict[str, float]
    """Seconds by term; `hidden_communication_s` is not part of the sum."""
    samples_per_s: float
    """Of all ranks together."""

    @property
    def reserve_bytes(self) -> int:
        """What is reserved for the CUDA context, NCCL and cuBLAS."""
        return self.memory_by_category.get("reserve", 0)

    @property
    def tensors_bytes(self) -> int:
        """The peak without the reserve: PyTorch's tensors."""
        return self.peak_memory_bytes - self.reserve_bytes


@dataclass(frozen=True)
class Asked(_Strict):
    """The options that the user set, so that another search can be run with the same."""

    micro_batch: Samples | None = None
    """Samples per rank in one forward; None: searched."""
    global_batch: SamplesOfAStep | None = None
    """Samples per step of all ranks; None: one micro-batch per step."""
    pins: list[str] = field(default_factory=list)
    """As `--pin` takes them (`planner.pins`)."""
    imbalance: str = ""
    """As `--imbalance` takes it, a file by its whole path; empty: none."""
    expert_imbalance: Annotated[float, Ge(1)] = 1.0
    """As `--expert-imbalance` takes it."""


NOTHING_ASKED = Asked()


@dataclass(frozen=True)
class Plan(_Strict):
    """A strategy for every operator, and which blocks are recomputed."""

    SCHEMA: ClassVar[str] = "osdp.plan/1"

    schema: str
    model: ModelRef
    cluster: ClusterRef
    optimizer: str
    """A name, or what it keeps: `planner.optimizers.optimizer_name`."""
    limit_bytes: Annotated[Bytes, Ge(1)]
    """Memory per device that the user allows, reserve included."""
    micro_batch: Samples
    """Samples per rank in one forward."""
    accumulation: SamplesOfAStep
    """Micro-batches per step."""
    predicted: Prediction
    gap: Annotated[float, Ge(0), Lt(1)]
    """No plan in the search space, within the limit less the headroom, exceeds samples_per_s / (1 - gap)."""
    choices: dict[str, str]
    """Strategy of every operator, or of its slices, by its name (`planner.strategies.notation.parse_choice`)."""
    recomputed_blocks: list[str]
    """Names of the blocks whose whole forward runs again in backward."""
    headroom_bytes: Bytes = 0
    """Part of the limit that the search left unused."""
    asked: Asked = NOTHING_ASKED
    """The options that the user set besides the limit."""
    waits: Waits = NO_WAITS
    """How long ranks wait for the slowest, as predicted."""
    selectively_recomputed_blocks: list[str] = field(default_factory=list)
    """Names of the blocks of which all but matrix products and attention runs again."""
    offloaded_blocks: list[str] = field(default_factory=list)
    """Names of the blocks whose whole forward runs again, with their input in the host's memory until then."""

    @property
    def usable_bytes(self) -> int:
        """The limit that the predicted peak stays within: `limit_bytes` less the headroom."""
        return self.limit_bytes - self.headroom_bytes

    @property
    def recomputations(self) -> dict[str, Recompute]:
        """What runs again, by the name of the block; of blocks that are not in it, nothing."""
        lists = self.recomputed_blocks, self.selectively_recomputed_blocks, self.offloaded_blocks
        modes = Recompute.EVERYTHING, Recompute.SELECTIVE, Recompute.OFFLOADED
        return {name: mode for names, mode in zip(lists, modes, strict=True) for name in names}


LATER = frozenset(
    {"host", "launch", "ring", "measured", "fp32_efficiency", "forward_launch_s", "backward_launch_s"}
    | {"stepped_tensor_s"}
)
"""Fields of a cluster that came later: those without keep the fingerprint that older plans have of them."""


def cluster_fingerprint(cluster: Cluster) -> str:
    """Return a hash of every figure of a cluster."""

    def figures(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if value or name not in LATER}

    text = json.dumps(asdict(cluster, dict_factory=figures), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cluster_ref(cluster: Cluster) -> ClusterRef:
    """Return the reference to a cluster that plans for it hold."""
    fingerprint = cluster_fingerprint(cluster)
    return ClusterRef(cluster.name, fingerprint, cluster.nodes, cluster.gpus_per_node, cluster.ring)


def read_choices(plan: Plan, graph: ModelGraph, cluster: Cluster) -> list[tuple[Strategy, ...]]:
    """Return the strategies of every operator's slices, one for an operator that is not split.

    Raises `OsdpError` if the choices do not cover the model or name unknown strategies or blocks.
    """
    missing = [operator.name for operator in graph.operators if operator.name not in plan.choices]
    foreign = set(plan.choices) - {operator.name for operator in graph.operators}
    unknown = set(plan.recomputations) - {block.name for block in graph.blocks}
    lists = plan.recomputed_blocks, plan.selectively_recomputed_blocks, plan.offloaded_blocks
    listed = Counter(name for names in lists for name in {*names})  # one that runs often may be there as often
    if both := sorted(name for name, times in listed.items() if times > 1):
        what, expected = "the plan recomputes blocks in two ways", "each block in one of the lists"
        raise OsdpError(what, got=", ".join(both[:5]), expected=expected, advice="plan the model again")
    empty = [b.name for b in graph.blocks if b.name in plan.offloaded_blocks and b.offloadable_bytes == Affine()]
    if empty:
        what, got = "the plan offloads the input of blocks that others hold too", ", ".join(empty[:5])
        raise OsdpError(what, got=got, expected="blocks with an input of their own", advice="plan the model again")
    if missing or foreign or unknown:
        got = ", ".join([*sorted(foreign), *sorted(unknown)][:5]) or f"{len(plan.choices)} of the model's operators"
        expected = f"also {', '.join(missing[:5])}" if missing else "only names of the model"
        what = "the plan's operators or blocks are not the model's"
        raise OsdpError(what, got=got, expected=expected, advice="plan the model again")
    texts = [plan.choices[operator.name] for operator in graph.operators]
    parsed = {text: parse_choice(text, cluster) for text in dict.fromkeys(texts)}  # a few, of hundreds of operators
    choices = [parsed[text] for text in texts]
    selective = {i for i, block in enumerate(graph.blocks) if block.name in plan.selectively_recomputed_blocks}
    check_selective(graph, {index: len(slices) for index, slices in enumerate(choices)}, selective)
    return choices


def model_ref(graph: ModelGraph) -> ModelRef:
    """Return the reference to a model that its plans hold."""
    return ModelRef(
        graph.name,
        graph.fingerprint,
        graph.numel,
        graph.sequence_length,
        graph.precision,
        graph.master_weights,
        graph.autocast,
    )


def check_parameters(plan: Plan, graph: ModelGraph) -> None:
    """Raise `OsdpError` if a model has other operators than the one of the plan, or another number of parameters."""
    odd = sorted({operator.name for operator in graph.operators} ^ set(plan.choices))
    if odd or graph.numel != plan.model.parameters:
        raise _other_model(plan, graph, f"; operators that differ: {', '.join(odd[:5])}" if odd else "")


def check_model(plan: Plan, graph: ModelGraph) -> None:
    """Raise `OsdpError` if the plan was made for another model, or for other costs of it."""
    if plan.model.fingerprint != graph.fingerprint:
        check_parameters(plan, graph)
        raise _other_model(plan, graph, "; operator names match, sizes differ")


def _other_model(plan: Plan, graph: ModelGraph, detail: str) -> OsdpError:
    got = f"{graph.name} ({graph.fingerprint}, {graph.numel:,} parameters){detail}"
    expected = f"{plan.model.name} ({plan.model.fingerprint}, {plan.model.parameters:,} parameters)"
    advice = (
        "plan this model again, or give the model, --seq, --precision and --master-weights that the plan was made for"
    )
    return OsdpError("this plan was made for another model", got=got, expected=expected, advice=advice)
