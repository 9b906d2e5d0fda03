"""A cluster: devices, memory, rates and links, each number with its source.

A cluster is read from `configs/clusters/*.yaml` (published figures) or from a measured profile
of the same form.  Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from profiler.bounds import NodeCount, RanksPerNode
from profiler.cluster.figure import Figure
from profiler.cluster.measurements import Measured, RingRule


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one rank's share of a CPU)."""

    name: str
    """Marketing name."""
    kind: str
    """`cuda` or `cpu`."""
    nominal_bytes: Figure
    """Nominal memory of one device (1 GB meant as 1 GiB): the largest limit that a user can set."""
    memory_bytes: Figure
    """Memory of one device that is available to programs."""
    matmul_flops_per_s: dict[str, Figure]
    """Peak rate of dense matrix products by precision (`fp32`, `bf16`, `fp16`)."""
    matmul_efficiency: Figure
    """Fraction of that peak which large matrix products reach, in (0, 1]."""
    memory_bytes_per_s: Figure
    """Rate at which kernels other than matrix products read and write device memory."""
    reserve_bytes: dict[str, Figure]
    """Reserved for the CUDA context, NCCL and cuBLAS, and for the caching allocator's rounding."""
    fp32_efficiency: Figure | None = None
    """`matmul_efficiency` of products in fp32, where it is another."""

    def rate_name(self, precision: str) -> str:
        """Return by what name `matmul_flops_per_s` has the rate of a precision; empty if it has none.

        Tensor cores that know bf16 are as fast in fp16 (NVIDIA's datasheets of A100, H100 and RTX 4090).
        """
        precision = precision.removeprefix("amp-")  # with `torch.autocast`
        names = {"fp16": ("fp16", "bf16")}.get(precision, (precision,))
        return next((name for name in names if name in self.matmul_flops_per_s), "")

    def efficiency(self, precision: str) -> Figure:
        """Return the fraction of the peak rate of a precision that large matrix products reach."""
        return self.fp32_efficiency or self.matmul_efficiency if precision == "fp32" else self.matmul_efficiency


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network, as ring collectives see it (alpha-beta)."""

    latency_s: Figure
    """Time per ring step that does not depend on the size."""
    bytes_per_s: Figure
    """Bus bandwidth of one rank: collective bytes times (n-1)/n over time."""


@dataclass(frozen=True, slots=True)
class Nccl:
    """What NCCL chooses its algorithms and protocols by (`planner.nccl`)."""

    architecture: Literal["turing", "ampere", "hopper"]
    """Of the GPUs, as NCCL's tuning table distinguishes them: Ada is `ampere`."""
    nvlink: bool
    """Whether the GPUs of a node have NVLink; otherwise PCI Express."""
    nvls: bool
    """Whether NVLink's switches reduce and multicast (NVLink SHARP)."""
    source: str
    """Where that is from."""


@dataclass(frozen=True, slots=True)
class Host:
    """One rank's share of its node's host, as offload uses it."""

    link_bytes_per_s: Figure
    """Rate of copies between device and host, each direction, while all ranks of the node copy."""
    memory_bytes_per_s: Figure
    """Rate at which the optimizer of one rank reads and writes host memory, while all ranks of the node do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How long a rank's host takes, in Python and in the driver, to launch what its GPU runs."""

    kernel_s: Figure
    """Seconds for each kernel of a model's forward and backward."""
    unit_s: Figure
    """Seconds for each gather and each reduction of an FSDP2 unit, its hooks included."""
    unit_tensor_s: Figure
    """Seconds more for each parameter tensor of the unit."""
    stepped_tensor_s: Figure | None = None
    """Seconds for each tensor that a fused optimizer steps, and whose gradient it forgets; None: not known."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` x `gpus_per_node` equal devices."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # holds for all that is inside, too
    SCHEMA: ClassVar[str] = "osdp.cluster/1"

    schema: str
    """Version of the file format."""
    name: str
    """Short name, as given to `--cluster`."""
    description: str
    """One line for `osdp clusters`."""
    nodes: NodeCount
    """Number of nodes."""
    gpus_per_node: RanksPerNode
    """Ranks per node."""
    device: Device
    """The device."""
    intra: Link
    """Link between ranks of one node."""
    inter: Link | None
    """Link between nodes, per rank with all ranks of a node communicating; None for one node."""
    overlaps: bool
    """Whether communication runs under computation on this backend."""
    overlap_source: str
    """Source of `overlaps`."""
    nccl: Nccl | None = None
    """What NCCL runs collectives by; None: another backend, or unknown, and collectives are priced as rings."""
    host: Host | None = None
    """The host's figures; None: the search offers no offload."""
    launch: Launch | None = None
    """What launching costs the host; None: not known, or a CPU, and steps are as long as the devices compute."""
    ring: tuple[RingRule, ...] = ()
    """Groups in which OSDP's own ring reduce-scatter was measured to be faster than the backend's."""
    measured: Measured | None = None
    """Measurements of `osdp profile`; None: times are derived from the figures above."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"nodes and gpus_per_node must be at least 1, got {self.nodes} x {self.gpus_per_node}")
        if self.nodes > 1 and self.inter is None:
            raise ValueError(f"{self.nodes} nodes need an `inter` link")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    def with_ranks(self, nodes: int, gpus_per_node: int) -> Cluster:
        """Return the cluster with another number of ranks.

        Measurements are kept for the same number of ranks per node: otherwise groups lie on other nodes, and other
        ranks share a machine.  What a GPU computes is kept, as each rank has its own.
        """
        resized, measured = replace(self, nodes=nodes, gpus_per_node=gpus_per_node), self.measured
        if measured is not None and (self.world_size == 1 < nodes or gpus_per_node != self.gpus_per_node):
            measured = measured.of_one_rank
        if gpus_per_node == self.gpus_per_node:
            return replace(resized, measured=measured)
        return replace(resized, ring=(), measured=measured if self.device.kind == "cuda" else None)

    def algorithm(self, operation: str, ranks: int, stride: int, size_bytes: float) -> str:
        """Return how the runtime executes a collective: `native` or `ring`."""
        for rule in self.ring:
            if operation == "reduce_scatter" and (rule.ranks, rule.stride) == (ranks, stride):
                return "ring" if size_bytes >= rule.from_bytes else "native"
        return "native"

    @property
    def leaves_host_link(self) -> bool:
        """Whether collectives leave the link between device and host alone: of one rank, or of one node with NVLink.

        Over PCI Express, or to a network adapter that is on it, gathers take that link for most of a step.
        """
        return self.world_size == 1 or (self.nodes == 1 and self.nccl is not None and self.nccl.nvlink)

    @property
    def interference(self) -> float:
        """Slow-down of computation by overlapped communication, per second of that communication."""
        return self.measured.interference if self.measured and self.overlaps else 0.0

    @property
    def hides_buckets(self) -> bool:
        """Whether DistributedDataParallel's all-reduces run under its backward."""
        return self.overlaps or (self.measured is not None and self.measured.asynchronous)

    @property
    def reserve_bytes(self) -> float:
        """Bytes per device that tensors cannot use."""
        return sum(figure.value for figure in self.device.reserve_bytes.values())
