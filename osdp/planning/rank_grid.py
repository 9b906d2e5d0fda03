"""The cluster that the ranks of the default process group make up."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from osdp.planning.clusters import default_cluster, is_derived, load_cluster, resized
from planner.plan import Plan
from profiler.byte_sizes import MIB, parse_bytes
from profiler.cluster.cluster import Cluster
from profiler.cluster.figure import Figure
from profiler.errors import OsdpError
from runtime.apply_schedule import default_device

DeviceInfo = None | str | Path | int | Cluster
"""A cluster (its name, file or figures), or the memory limit per device: `"8GB"`, or a number of MB."""

CPU_CLUSTER = "cpu-gloo"
"""Figures for ranks without GPUs."""


def grid(emulated_nodes: int = 1) -> tuple[int, int]:
    """Return (nodes, ranks per node) of the default process group, by torchrun's LOCAL_WORLD_SIZE.

    The ranks of one machine stand for `emulated_nodes` nodes. Raises OsdpError if nodes have different
    numbers of ranks.
    """
    world_size = dist.get_world_size()
    text = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    local = int(text) if text.isdecimal() else 0
    if not local or world_size % local:
        what = "the ranks do not divide evenly into nodes"
        raise OsdpError(what, got=f"{world_size} ranks, {text} on this node", expected="as many ranks on every node")
    if local % emulated_nodes:
        what = "the ranks of a machine do not divide evenly into the emulated nodes"
        raise OsdpError(what, got=f"{local} ranks", expected=f"a multiple of {emulated_nodes}")
    return world_size // local * emulated_nodes, local // emulated_nodes


def cluster_of_ranks(device_info: DeviceInfo, emulated_nodes: int = 1) -> tuple[Cluster, int | None]:
    """Return the cluster to plan for, with as many ranks as there are, and the memory limit in bytes if given.

    The ranks of one machine stand for `emulated_nodes` nodes. Raises OsdpError.
    """
    nodes, local = grid(emulated_nodes)
    if isinstance(device_info, bool) or not isinstance(device_info, None | str | Path | int | Cluster):
        expected = 'a cluster, its name or file, a memory limit such as "8GB", or a number of MB'
        raise OsdpError("device_info has an unsupported form", got=repr(device_info), expected=expected)
    if isinstance(device_info, Cluster):
        return resized(device_info, nodes, local), None
    if device_info is None:
        return cluster_at_hand(nodes, local), None
    text = str(device_info)
    if isinstance(device_info, int) or text[:1].isdigit():
        limit_bytes = device_info * MIB if isinstance(device_info, int) else parse_bytes(text)
        return _with_memory(cluster_at_hand(nodes, local), limit_bytes), limit_bytes
    return load_cluster(text, nodes, local), None


def cluster_of_plan(plan: Plan, device_info: DeviceInfo) -> Cluster:
    """Return the cluster that a plan is for, or where that is not known here, the one at hand in its size.

    Collectives run as in the plan, also if the cluster's file has changed since.
    """
    nodes, local = plan.cluster.nodes, plan.cluster.gpus_per_node
    if isinstance(device_info, Cluster):
        return replace(resized(device_info, nodes, local), ring=plan.cluster.ring)
    try:
        cluster = load_cluster(plan.cluster.name, nodes, local)
    except OsdpError:
        cluster = cluster_at_hand(nodes, local)
    return replace(cluster, ring=plan.cluster.ring)


def cluster_at_hand(nodes: int, local: int) -> Cluster:
    """Return the cluster of this machine's devices, as far as their figures are known; raises OsdpError."""
    if default_device().type == "cpu":
        return load_cluster(CPU_CLUSTER, nodes, local)
    cluster, why = default_cluster(nodes, local)
    if is_derived(cluster) and dist.get_rank() == 0:
        warnings.warn(f"the cluster is {why}", stacklevel=4)
    return cluster


def _with_memory(cluster: Cluster, limit_bytes: int) -> Cluster:
    """Return a CPU cluster whose ranks have the memory that the user gives; a GPU's is known."""
    device = cluster.device
    if device.kind != "cpu" or limit_bytes <= device.memory_bytes.value:
        return cluster
    memory = Figure(float(limit_bytes), "assumed: as the memory limit given")
    return replace(cluster, device=replace(device, nominal_bytes=memory, memory_bytes=memory))
