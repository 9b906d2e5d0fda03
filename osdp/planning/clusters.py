"""Clusters by name, or from a file of the same form as `configs/clusters/*.yaml`, or of the GPUs that torch sees."""

import warnings
from collections import Counter
from collections.abc import Sequence

from osdp.resources import file_of, is_path, resource_names
from profiler.byte_sizes import MIB, format_bytes
from profiler.cluster.cards import card_of
from profiler.cluster.cluster import Cluster, Device
from profiler.cluster.read_cluster import read_cluster
from profiler.cluster.visible_cluster import VISIBLE, visible_cluster
from profiler.cluster.visible_gpus import Connections, Gpu, any_visible, visible_gpus
from profiler.errors import OsdpError

WORKSPACE = "cublas_workspace"
ROUNDING = "allocator_rounding"
"""The part for what its pages leave unused, and for what kernels make while they run."""
ALLOCATED_RESERVES = (WORKSPACE, ROUNDING)
"""Parts of a cluster's reserve that come out of PyTorch's allocator; others are taken beside it."""

DEFAULT_CLUSTER = "titan-rtx-8"
"""Planned for if the user names no cluster and no GPU is visible."""


def cluster_names() -> list[str]:
    """Return the names of the clusters that come with OSDP, sorted."""
    return resource_names("clusters")


def load_cluster(spec: str, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
    """Return the cluster of the name or file `spec`, with another number of ranks if given; raises OsdpError.

    `visible` is that of the GPUs that torch sees.
    """
    if spec == VISIBLE or (spec.startswith(f"{VISIBLE}-") and not is_path(spec)):
        cluster = _visible(spec)
    else:
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
        own = "measure one with `osdp profile` on all nodes" if is_derived(cluster) else "copy the file and add `inter`"
        advice = f"a cluster that has it: {', '.join(linked)}; or {own}"
        raise OsdpError(what, got=f"{nodes} nodes", expected="1 node, or a cluster with an `inter` link", advice=advice)
    found = cluster.with_ranks(nodes, gpus_per_node)
    if cluster.measured and found.gpus_per_node != cluster.gpus_per_node:
        ranks = cluster.gpus_per_node
        how = f"{ranks} rank{'s' * (ranks > 1)} per node, not {gpus_per_node}"
        which = "times of communication" if found.measured else "times"
        derived = f"{which} are derived from the links and rates that were measured so"
        if cluster.world_size == 1:
            derived = f"{which} are derived from its file's link, which one rank cannot measure"
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


def rounding_bytes(cluster: Cluster) -> int:
    """Return what is kept of PyTorch's allocator beside tensors and workspaces."""
    figure = cluster.device.reserve_bytes.get(ROUNDING)
    return 0 if figure is None else round(figure.value)


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

    That is the preset of the GPUs that torch sees, with as many of them; or one that is derived from their properties,
    where no preset describes them; or `DEFAULT_CLUSTER` without any GPU.
    """
    if not any_visible():
        return load_cluster(DEFAULT_CLUSTER, nodes, gpus_per_node), "the default, as no GPU is visible"
    gpus, connections = _visible_gpus()
    seen = " and ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
    nodes, gpus_per_node = nodes or 1, gpus_per_node or len(gpus)
    unlike = ""
    if (name := _preset_of(gpus)) is not None:
        preset = load_cluster(name, nodes, gpus_per_node)
        if _may_be_connected_so(preset, min(gpus_per_node, len(gpus)), connections):
            return preset, f"the preset of the visible GPUs, {seen}"
        unlike = f" as they are connected {'by' if connections.nvlinks else 'without'} NVLink"
    if len({gpu.name for gpu in gpus}) > 1:
        unlike += ", each figure the least of these GPUs"
    cluster = visible_cluster(gpus, connections)
    why = f"derived from the visible {seen}, which no preset describes{unlike}"
    return resized(cluster, nodes, gpus_per_node), f"{why}; osdp clusters {VISIBLE} --sources lists what is assumed"


def is_derived(cluster: Cluster) -> bool:
    """Whether the figures of a cluster were derived from the visible GPUs."""
    return cluster.name.startswith(f"{VISIBLE}-") and cluster.measured is None


def _visible(spec: str) -> Cluster:
    """Return the cluster of the visible GPUs; raises OsdpError if `spec` names others, or if there is none."""
    advice = "a file that `osdp profile` wrote there, or the name of a preset"
    if not any_visible():
        what = f"the cluster {spec} is made of the GPUs that torch sees"
        raise OsdpError(what, got="no GPU is visible", expected="one GPU or more", advice=advice)
    cluster = visible_cluster(*_visible_gpus())
    if spec not in (VISIBLE, cluster.name):
        what = f"the GPUs of the cluster {spec} are not the visible ones"
        raise OsdpError(what, got=cluster.description, expected=spec, advice=f"{advice}, or --cluster {VISIBLE}")
    return cluster


def _visible_gpus() -> tuple[tuple[Gpu, ...], Connections]:
    """Return the visible GPUs; raises OsdpError for those of another vendor, whose capabilities mean something else."""
    import torch

    if torch.version.hip is not None:
        what = "there are no figures of AMD's GPUs"
        advice = "a file that `osdp profile` wrote: --cluster, or device_info of OSDP()"
        raise OsdpError(what, got=torch.cuda.get_device_name(0), expected="GPUs of NVIDIA", advice=advice)
    return visible_gpus()


def _may_be_connected_so(preset: Cluster, ranks: int, connections: Connections) -> bool:
    """Whether NVML does not contradict a preset: links of its NVLink, and no ring of links that it has not.

    One rank alone has nobody to be connected with.
    """
    if ranks < 2 or preset.nccl is None:
        return True
    return connections.has_nvlink is not False if preset.nccl.nvlink else not connections.nvlinks


def _preset_of(gpus: Sequence[Gpu]) -> str | None:
    """Return the preset whose device all of these are exactly; None: there is none."""
    presets = set()
    for gpu in gpus:
        card = card_of(gpu.name, gpu.memory_bytes)
        is_whole = card is not None and card.multiprocessors == gpu.multiprocessors
        presets.add(card.preset if card is not None and is_whole else "")
    return presets.pop() or None if len(presets) == 1 else None
