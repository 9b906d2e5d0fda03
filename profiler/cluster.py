"""What is known of a cluster: devices, memory, rates and links, each number with its source.

A cluster is read from `configs/clusters/*.yaml` (published figures) or from a measured profile
of the same form.  Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    value: float
    """SI value; the field that holds the figure gives the unit."""
    source: str
    """`datasheet: ...`, `paper: ...`, `measured: ...`, `derived: ...` or `assumed: ...`."""

    def __post_init__(self) -> None:
        if not 0 <= self.value < float("inf"):
            raise ValueError(f"must be finite and not negative, got {self.value}")
        kinds = ("datasheet", "paper", "measured", "derived", "assumed")
        if self.source.partition(": ")[0] not in kinds or not self.source.partition(": ")[2]:
            raise ValueError(f"source must start with one of {', '.join(kinds)} and a colon, got {self.source!r}")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one rank's share of a CPU)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    """Marketing name."""
    kind: str
    """`cuda` or `cpu`."""
    nominal_bytes: Figure
    """Memory of one device as it is sold (1 GB meant as 1 GiB): the most that a user can ask for."""
    memory_bytes: Figure
    """Memory of one device that its driver leaves to programs."""
    matmul_flops_per_s: dict[str, Figure]
    """Peak rate of dense matrix products by precision (`fp32`, `bf16`)."""
    matmul_efficiency: Figure
    """Fraction of that peak which large matrix products reach, in (0, 1]."""
    memory_bytes_per_s: Figure
    """Rate at which kernels other than matrix products read and write device memory."""
    reserve_bytes: dict[str, Figure]
    """Memory that is not PyTorch's to give: context, communicator buffers, cuBLAS workspace, ..."""


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network, as ring collectives see it (alpha-beta)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    latency_s: Figure
    """Time per ring step that does not depend on the size."""
    bytes_per_s: Figure
    """Bus bandwidth of one rank: collective bytes times (n-1)/n over time."""


@dataclass(frozen=True, slots=True)
class Host:
    """One rank's share of its node's host, as offload uses it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    link_bytes_per_s: Figure
    """Rate of copies between device and host, each direction, while all ranks of the node copy."""
    memory_bytes_per_s: Figure
    """Rate at which the optimizer of one rank reads and writes host memory, while all ranks of the node do."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` x `gpus_per_node` alike devices."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    SCHEMA: ClassVar[str] = "osdp.cluster/1"

    schema: str
    """Version of the file format."""
    name: str
    """Short name, as given to `--cluster`."""
    description: str
    """One line for `osdp clusters`."""
    nodes: int
    """Number of nodes."""
    gpus_per_node: int
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
    host: Host | None = None
    """The host's figures; None: the search offers no offload."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"nodes and gpus_per_node must be at least 1, got {self.nodes} x {self.gpus_per_node}")
        if self.nodes > 1 and self.inter is None:
            raise ValueError(f"{self.nodes} nodes need an `inter` link")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def reserve_bytes(self) -> float:
        """Bytes per device that no tensor may use."""
        return sum(figure.value for figure in self.device.reserve_bytes.values())
