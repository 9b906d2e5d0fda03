"""The collectives of one unit by its strategy, with its tensors padded as FSDP2 pads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.strategies.spec import COMPUTE_BYTES, MASTER_BYTES, REDUCE_BYTES, Collective, Strategy, Volume
from profiler.cluster.cluster import Cluster
from profiler.model_graph import Parameter


def padded_rows(parameter: Parameter, parts: int) -> tuple[int, int]:
    """Return (rows per part, elements per row) after FSDP2's padding of the first dimension."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // parts), parameter.numel // max(rows, 1)


def padded_numel(parameters: Iterable[Parameter], parts: int) -> int:
    """Return the number of elements of the parameters, each padded to so many equal parts."""
    return sum(rows * rest * parts for rows, rest in (padded_rows(p, parts) for p in parameters))


def unit_collectives(
    parameters: Iterable[Parameter], strategy: Strategy, precision: str, cluster: Cluster, *, trains: bool = True
) -> tuple[Collective, ...]:
    """Return everything that one unit sends, those of a phase in the order in which they are sent.

    `trains` is whether anything in the model does: if not, there are only forwards.
    Offload copies between host and device are not collectives: see `planner.cost.unit_communication`.
    """
    parameters = tuple(parameters)
    every = padded_numel(parameters, strategy.parts)
    trained = padded_numel((parameter for parameter in parameters if parameter.trainable), strategy.parts)
    volume = Volume(COMPUTE_BYTES[precision] * every, REDUCE_BYTES * trained, MASTER_BYTES * every)
    sent = strategy.spec.collectives(volume, strategy, cluster)
    sent = tuple(c for c in sent if c.ranks > 1 and (c.size_bytes > 0 or c.operation == "barrier"))
    sent = tuple(c for c in sent if trains or c.phase == "forward")
    if not cluster.ring:
        return sent
    return tuple(replace(c, algorithm=cluster.algorithm(c.operation, c.ranks, c.stride, c.size_bytes)) for c in sent)
