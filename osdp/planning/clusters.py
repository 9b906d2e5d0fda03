"""Clusters by name, or from a file of the same form as `configs/clusters/*.yaml`."""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from pathlib import Path

from osdp.resources import resource_file, resource_names
from profiler.cluster.cluster import Cluster
from profiler.cluster.read_cluster import read_cluster
from profiler.errors import OsdpError


def cluster_names() -> list[str]:
    """Return the names of the clusters that come with OSDP, sorted."""
    return resource_names("clusters")


def load_cluster(spec: str, nodes: int | None = None, gpus_per_node: int | None = None) -> Cluster:
    """Return the cluster with the name or in the file `spec`, with another number of ranks if given.

    Raises OsdpError.
    """
    is_path = spec.endswith((".yaml", ".yml")) or "/" in spec
    cluster = read_cluster(Path(spec) if is_path else _named(spec))
    nodes = cluster.nodes if nodes is None else nodes
    gpus_per_node = cluster.gpus_per_node if gpus_per_node is None else gpus_per_node
    if nodes < 1 or gpus_per_node < 1:
        raise OsdpError(
            "a cluster has at least one node, and a node at least one device",
            got=f"{nodes} nodes with {gpus_per_node} devices each",
        )
    if nodes > 1 and cluster.inter is None:
        raise OsdpError(
            f"the cluster {spec} says nothing of a link between nodes",
            got=f"{nodes} nodes",
            expected="1 node, or a cluster with an `inter` link",
            advice=f"choose one that has it: {', '.join(_with_inter())}; or copy the file and add `inter`",
        )
    resized = cluster.with_ranks(nodes, gpus_per_node)
    if cluster.measured and not resized.measured:
        warnings.warn(
            f"{spec} was measured with {cluster.gpus_per_node} ranks on a node, not {gpus_per_node}: "
            "times are derived from its links and rates, which are of those",
            stacklevel=2,
        )
    return resized


def _named(name: str) -> Path:
    names = cluster_names()
    if name in names:
        return resource_file("clusters", name)
    near = get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else "your own cluster: path/to/cluster.yaml"
    raise OsdpError("there is no such cluster", got=repr(name), expected=", ".join(names), advice=advice)


def _with_inter() -> list[str]:
    return [name for name in cluster_names() if read_cluster(_named(name)).inter is not None]
