"""The collectives of one unit by its strategy, with its tensors padded as FSDP2 pads them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.strategies.spec import Collective, Strategy, Volume
from profiler.cluster.cluster import Cluster
from profiler.model_graph import Parameter


def padded_rows(parameter: Parameter, parts: int) -> tuple[int, int]:
    """Return (rows per part, elements per row) after FSDP2's padding of the first dimension."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // parts), parameter.numel // max(rows, 1)


def padded_numel(parameter: Parameter, parts: int) -> int:
    """Return the number of elements of a parameter, padded to so many equal parts."""
    rows, rest = padded_rows(parameter, parts)
    return rows * rest * parts


def volume_of(parameters: Iterable[Parameter], parts: int, precision: str) -> Volume:
    """Return the bytes of a unit's flat tensors, each parameter padded to so many equal parts."""
    sizes = [(parameter, padded_numel(parameter, parts)) for parameter in parameters]
    return Volume(
        sum(parameter.compute_bytes(precision) * numel for parameter, numel in sizes),
        sum(parameter.reduce_bytes * numel for parameter, numel in sizes if parameter.trainable and parameter.used),
        sum(parameter.element_bytes * numel for parameter, numel in sizes),
    )


def all_used(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return parameters as they are where the loss depends on all that are trained."""
    return tuple(one if one.used else replace(one, used=True) for one in parameters)


def as_reduced(
    parameters: Iterable[Parameter], strategy: Strategy, ranks: int, *, accumulates: bool
) -> tuple[Parameter, ...]:
    """Return a unit's parameters, all of them as used where it reduces something for the others too.

    What is all-reduced once per step has zeros for parameters without a gradient, where others of the unit have one
    (`runtime.torch_compat.reduce_all_or_none`).
    """
    found = tuple(parameters)
    if not accumulates or strategy.group == ranks or strategy.spec.one_sided or all(one.used for one in found):
        return found
    return all_used(found) if any(one.trainable and one.used for one in found) else found


def is_plain(parameters: Sequence[Parameter], strategy: Strategy, precision: str) -> bool:
    """Return whether a unit is nothing but tensors on every rank, which no collective and no hook concerns."""
    is_copied = strategy.group == 1 and not strategy.offload
    return is_copied and not any(p.trainable or p.is_cast(precision) for p in parameters)


def unit_collectives(
    parameters: Iterable[Parameter], strategy: Strategy, precision: str, cluster: Cluster, *, trains: bool = True
) -> tuple[Collective, ...]:
    """Return everything that one unit sends, those of a phase in the order in which they are sent.

    `trains` is whether anything in the model does: if not, there are only forwards.
    Offload copies between host and device are not collectives: see `planner.cost.unit_communication`.
    """
    volume = volume_of(parameters, strategy.parts, precision)
    sent = strategy.spec.collectives(volume, strategy, cluster)
    sent = tuple(c for c in sent if c.ranks > 1 and (c.size_bytes > 0 or c.operation == "barrier"))
    sent = tuple(c for c in sent if trains or c.phase == "forward")
    if not cluster.ring:
        return sent
    return tuple(replace(c, algorithm=cluster.algorithm(c.operation, c.ranks, c.stride, c.size_bytes)) for c in sent)
