"""The notation of strategies in plan files, pins and reports: parsing and formatting."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from planner.strategies.registry import known_strategies
from planner.strategies.spec import SPECS, Strategy
from profiler.cluster.cluster import Cluster
from profiler.errors import OsdpError

MAX_SLICES = 1024
"""Slices of one operator; larger values are rejected as typos."""


def parse_strategy(text: str, cluster: Cluster) -> Strategy:
    """Return the strategy that `str(strategy)` printed; `owner@3` also fixes the rank that owns the unit.

    Raises `OsdpError` if it is unknown or does not fit the cluster.
    """
    known = {str(strategy): strategy for strategy in known_strategies(cluster)}
    if text in known:
        return known[text]
    form = re.fullmatch(r"([a-z_]+)(?:@([0-9]{1,9})|[:@][0-9]+)?((?:\+offload)?)", text)
    name, rank, offload = form.groups() if form else ("", None, "")
    free = known.get(name + offload)
    if free is not None and free.spec.has_owner and rank is not None:
        if int(rank) >= cluster.world_size:
            expected = f"a rank from 0 to {cluster.world_size - 1}"
            raise OsdpError("the owner must be one of the ranks", got=f"{name}@{int(rank)}", expected=expected)
        return replace(free, owner=int(rank))
    if cluster.world_size == 1 and name in SPECS and name not in known:
        advice = "two ranks or more: torchrun --nproc_per_node, or --gpus-per-node"
        raise OsdpError(f"{text} needs several ranks", got="1 rank", expected=", ".join(known), advice=advice)
    plain = [name for name, strategy in known.items() if not strategy.offload]
    what = f"no such strategy on {cluster.nodes} x {cluster.gpus_per_node} ranks"
    raise OsdpError(what, got=text or "nothing", expected=f"{', '.join(plain)}; each also with +offload")


def format_choice(slices: Sequence[Strategy]) -> str:
    """Return an operator's choice as plan files write it.

    That is its strategy, or `split(...)` with the strategies of its slices in order, where equal neighbours are
    counted: `split(2*shard, replicate)` has three slices.
    """
    if len(slices) == 1:
        return str(slices[0])
    runs = [(str(strategy), len(list(run))) for strategy, run in groupby(slices)]
    return f"split({', '.join(name if count == 1 else f'{count}*{name}' for name, count in runs)})"


def parse_choice(text: str, cluster: Cluster) -> tuple[Strategy, ...]:
    """Return the strategies of an operator's slices, one if it is not split: what `format_choice` printed.

    Raises `OsdpError` if the form is another, or a strategy is unknown or does not fit the cluster.
    """
    inside = re.fullmatch(r"\s*split\((.*)\)\s*", text)
    if inside is None:
        return (parse_strategy(text.strip(), cluster),)
    slices: list[Strategy] = []
    for part in inside[1].split(","):
        counted = re.fullmatch(r"\s*(?:([0-9]{1,6})\s*\*)?\s*(.*?)\s*", part)
        assert counted is not None, "the pattern takes every text of one line"
        count = int(counted[1] or 1)
        slices += [parse_strategy(counted[2], cluster)] * min(count, MAX_SLICES + 1)
        if not 1 <= count <= MAX_SLICES or len(slices) > MAX_SLICES:
            raise OsdpError("invalid slice count in a split", got=text, expected=f"2 to {MAX_SLICES} slices in all")
    if len(slices) < 2:
        advice = f"write {slices[0]} for an operator that is not split"
        raise OsdpError("a split needs two slices or more", got=text, expected="e.g. split(2*shard)", advice=advice)
    return tuple(slices)
