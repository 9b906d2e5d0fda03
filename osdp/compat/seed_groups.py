"""Sharding with groups, by the names that OSDP's first release gave it; a group is the ranks of a node.

setting                    strategy of everything    between nodes
group_sharding             group_shard:g             an all-reduce of gradients, once per step
communication_with_groups  hierarchical              a phase of each all-gather and reduce-scatter
none                       shard                     every all-gather and reduce-scatter
"""

import warnings

from planner.strategies.spec import Strategy
from profiler.errors import OsdpError

SETTINGS = ("group_sharding", "communication_with_groups", "none")
"""What `--fsdp_args` and `gen_fsdp_args` take."""


def grouped_strategy(setting: str, nodes: int, ranks_per_node: int) -> Strategy:
    """Return the strategy of a setting on `nodes` nodes of `ranks_per_node` ranks.

    Where there are no groups, on one node or with one rank on each, the setting makes no difference,
    or not the one that it is named for; a warning then names what it comes to.  Raises OsdpError if the
    setting is not known or there are no ranks.
    """
    if setting not in SETTINGS:
        raise OsdpError("there is no such way to shard with groups", got=repr(setting), expected=", ".join(SETTINGS))
    if nodes < 1 or ranks_per_node < 1:
        got = f"{nodes} nodes with {ranks_per_node} ranks each"
        raise OsdpError("there is at least one node, and one rank on each", got=got)
    world_size = nodes * ranks_per_node
    if world_size == 1:
        if setting != "none":
            _warn(f"{setting} has no effect on one rank, which has everything")
        return Strategy("replicate", 1)
    if setting != "none" and nodes == 1:
        _warn(f"{setting} has no effect on one node, where the group is all ranks: everything is sharded over them")
    elif setting == "group_sharding" and ranks_per_node == 1:
        _warn("group_sharding comes to replication where a node has one rank")
        return Strategy("replicate", 1)
    elif setting == "group_sharding":
        return Strategy("group_shard", ranks_per_node)
    elif setting != "none" and ranks_per_node == 1:
        _warn(f"{setting} has no effect where a node has one rank: everything is sharded over all ranks")
    elif setting != "none":
        return Strategy("hierarchical", world_size)
    return Strategy("shard", world_size)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
