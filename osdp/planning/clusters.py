"""Clusters by name, or from a file of the same form as `configs/clusters/*.yaml`."""

import re
import warnings

from osdp.resources import file_of, resource_names
from profiler.byte_sizes import MIB, format_bytes
from profiler.cluster.cluster import Cluster, Device
from profiler.cluster.read_cluster import read_cluster
from profiler.errors import OsdpError

WORKSPACE = "cublas_workspace"
ALLOCATED_RESERVES = (WORKSPACE, "allocator_rounding")
"""Parts of a cluster's reserve that come out of PyTorch's allocator; others are taken beside it."""

DEFAULT_CLUSTER = "titan-rtx-8"
"""Planned for if the user names no cluster and no GPU is visible."""

_VARIANT = re.compile(r"nvidia|sxm\d*|hbm\d\w*|\d+gb", re.IGNORECASE)
"""Words of a device's name that its vendor and torch do not use alike."""
_SAME_MEMORY = 0.1
"""Relative difference up to which two sizes are the same card's: drivers keep a part."""


def cluster_names() -> list[str]:
    """Return the names of the clusters that come with OSDP, sorted."""
    return resource_names("clusters")


def load_cluster(spec: str, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
    """Return the cluster of the name or file `spec`, with another number of ranks if given; raises OsdpError."""
    cluster = read_cluster(file_of("clusters", spec, "your own cluster: path/to/cluster.yaml"))
    nodes = cluster.nodes if nodes is None else nodes
    return resized(cluster, nodes, cluster.gpus_per_node if gpus_per_node is None else gpus_per_node)


def resized(cluster: Cluster, nodes: int, gpus_per_node: int) -> Cluster:
    """Return a cluster with another number of ranks; raises OsdpError."""
    if nodes < 1 or gpus_per_node < 1:
        what = "a cluster has at least one node, and a node at least one device"
        raise OsdpError(what, got=f"{nodes} nodes with {gpus_per_node} devices each")
    if nodes > 1 and cluster.inter is None:
        linked = [name for name in cluster_names() if load_cluster(name).inter is not None]
        what = f"the cluster {cluster.name} has no link between nodes"
        advice = f"a cluster that has it: {', '.join(linked)}; or copy the file and add `inter`"
        raise OsdpError(what, got=f"{nodes} nodes", expected="1 node, or a cluster with an `inter` link", advice=advice)
    found = cluster.with_ranks(nodes, gpus_per_node)
    if cluster.measured and not found.measured:
        how = f"{cluster.gpus_per_node} ranks per node, not {gpus_per_node}"
        derived = "times are derived from the links and rates that were measured so"
        warnings.warn(f"{cluster.name} was measured with {how}: {derived}", stacklevel=3)
    return found


def reserve_use(device: Device) -> str:
    """Return what the memory of a device is reserved for that a plan's tensors cannot use."""
    return "the CUDA context, NCCL and cuBLAS" if device.kind == "cuda" else "Python, torch and the allocator"


def allocatable_bytes(cluster: Cluster, limit_bytes: int) -> int:
    """Return what a limit per device leaves PyTorch's allocator to reserve."""
    reserves = cluster.device.reserve_bytes
    return limit_bytes - round(sum(figure.value for name, figure in reserves.items() if name not in ALLOCATED_RESERVES))


def workspaces_bytes(cluster: Cluster) -> tuple[int, ...]:
    """Return what cuBLAS has PyTorch's allocator keep: a workspace for the forward's thread, one for the backward's."""
    figure = cluster.device.reserve_bytes.get(WORKSPACE)
    return () if figure is None else (round(figure.value / 2),) * 2


def memory_limit(cluster: Cluster, limit_bytes: int | None) -> int:
    """Return the limit per device: what was asked for, but at most what the driver leaves of the device.

    So the 24 GB of a card sold with 24 GB are taken for all that it has. Raises OsdpError for more.
    """
    device = cluster.device
    available, nominal = int(device.memory_bytes.value), int(device.nominal_bytes.value)
    if limit_bytes is not None and limit_bytes > max(available, nominal):
        what = f"the memory limit is larger than the memory of {device.name} ({cluster.name})"
        got = f"{format_bytes(limit_bytes)} ({limit_bytes / MIB:,.0f} MiB)"
        expected = f"at most {format_bytes(nominal)}; its driver leaves {available // MIB:,} MiB to programs"
        advice = f"--mem {available // MIB}MB, no --mem at all, or another --cluster"
        raise OsdpError(what, got=got, expected=expected, advice=advice)
    return available if limit_bytes is None else min(limit_bytes, available)


def choose_cluster(name: str | None, nodes: int | None, gpus_per_node: int | None) -> tuple[Cluster, str]:
    """Return the cluster that the user named, or the default, and then also why it was taken."""
    return (load_cluster(name, nodes, gpus_per_node), "") if name else default_cluster(nodes, gpus_per_node)


def default_cluster(nodes: int | None = None, gpus_per_node: int | None = None) -> tuple[Cluster, str]:
    """Return the cluster to plan for where the user names none, and why it was taken.

    That is the preset of the GPUs that torch sees, with as many of them, or else `DEFAULT_CLUSTER`.
    """
    import torch

    if not torch.cuda.is_available():
        return load_cluster(DEFAULT_CLUSTER, nodes, gpus_per_node), "the default, as no GPU is visible"
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    preset = _preset_of(name, memory_bytes)
    if preset is None:
        why = f"the default, as there is no preset for the visible {name}; --cluster takes your own file"
        return load_cluster(DEFAULT_CLUSTER, nodes, gpus_per_node), why
    cluster = load_cluster(preset, nodes or 1, gpus_per_node or count)
    return cluster, f"the preset of the visible GPUs, {count} x {name}"


def _preset_of(name: str, memory_bytes: int) -> str | None:
    """Return the preset whose device has that name and memory, one of a single node if there is."""
    presets = {preset: load_cluster(preset) for preset in cluster_names()}
    for preset in sorted(presets, key=lambda preset: presets[preset].nodes):
        device = presets[preset].device
        known_bytes = device.memory_bytes.value
        same_size = abs(memory_bytes - known_bytes) <= _SAME_MEMORY * known_bytes
        if device.kind == "cuda" and same_size and _words(device.name) == _words(name):
            return preset
    return None


def _words(name: str) -> set[str]:
    """Return the words of a device's name that tell it from another model."""
    return {word for word in re.split(r"\W+", name.lower()) if word and not _VARIANT.fullmatch(word)}
