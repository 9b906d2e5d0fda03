"""Replays FSDP2's streams for one step: which kernel runs on which stream, and which event it waits for.

Written from reading `torch/distributed/fsdp/_fully_shard` of torch 2.13.0 (`_fsdp_param_group.py`,
`_fsdp_collectives.py`, `_fsdp_state.py`), and independent of `planner.cost`.  The host issues everything at once,
so a kernel starts when its stream is free, the events that were waited for on its stream have come, and, as NCCL runs
the kernels of one communicator in the order in which they were issued, that communicator is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE, COPY_IN, GATHER = "compute", "all_gather_copy_in", "all_gather"
SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce"


@dataclass(frozen=True)
class Unit:
    """Seconds of the kernels of one `fully_shard` unit."""

    forward: float
    backward: float
    gather: float = 0.0
    """All-gather before forward, on a communicator that the reduce-scatter shares."""
    gather_again: float | None = None
    """The same before backward; None: it is still gathered."""
    scatter: float = 0.0
    all_reduce: float = 0.0
    """Over replicas (HSDP), on a communicator of its own, in the last micro-batch."""
    copy_in: float = 0.0
    """Shards to the all-gather's input."""
    copy_out: float = 0.0
    """`split_with_sizes_copy` before forward: the all-gather's output to parameters."""
    copy_out_again: float = 0.0
    """The same before backward."""
    chunk_cat: float = 0.0
    """Gradients to the reduce-scatter's input."""
    from_host: float = 0.0
    """Offloaded shards to the device before forward, in a group of one rank: `wait_for_unshard` copies them there."""
    from_host_again: float = 0.0
    """The same before backward."""


class Streams:
    """CUDA streams, events and communicators."""

    def __init__(self) -> None:
        self.free = dict.fromkeys((COMPUTE, COPY_IN, GATHER, SCATTER, ALL_REDUCE, "shard group", "replicas"), 0.0)

    def run(self, stream: str, seconds: float, communicator: str = "") -> float:
        """Launch a kernel; return the event recorded after it."""
        on = (stream, communicator) if communicator else (stream,)
        end = max(self.free[one] for one in on) + seconds
        self.free.update(dict.fromkeys(on, end))
        return end

    def wait(self, stream: str, event: float) -> None:
        """`stream.wait_event(event)`."""
        self.free[stream] = max(self.free[stream], event)

    def wait_stream(self, stream: str, other: str) -> None:
        """`stream.wait_stream(other)`."""
        self.wait(stream, self.free[other])


def _unshard(streams: Streams, copy_in: float, gather: float) -> float:
    streams.run(COPY_IN, copy_in)
    streams.wait_stream(GATHER, COPY_IN)
    return streams.run(GATHER, gather, "shard group" if gather else "")


def _forward(streams: Streams, units: Sequence[Unit]) -> None:
    for stream in (COPY_IN, GATHER):  # _root_pre_forward
        streams.wait_stream(stream, COMPUTE)
    before = None
    for unit in units:
        gathered = _unshard(streams, unit.copy_in, unit.gather)
        if before is not None:  # wait_for_unshard: `all_gather_state` of the unit before
            streams.wait(COPY_IN, before)
            streams.wait(GATHER, before)
        streams.wait(COMPUTE, gathered)
        streams.run(COMPUTE, unit.from_host)
        before = streams.run(COMPUTE, unit.copy_out)
        streams.run(COMPUTE, unit.forward)
    assert before is not None
    streams.wait(COPY_IN, before)  # _post_forward of the root
    streams.wait(GATHER, before)


def _backward(streams: Streams, units: Sequence[Unit], last: bool) -> None:
    def unshard(unit: Unit) -> float:
        return 0.0 if unit.gather_again is None else _unshard(streams, unit.copy_in, unit.gather_again)

    gathered = unshard(units[-1])
    scattered = 0.0
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        if unit.gather_again is not None:
            streams.wait(COMPUTE, gathered)
            streams.run(COMPUTE, unit.from_host_again)
            copied = streams.run(COMPUTE, unit.copy_out_again)
            streams.wait(COPY_IN, copied)
            streams.wait(GATHER, copied)
        if index:
            gathered = unshard(units[index - 1])
        streams.run(COMPUTE, unit.backward)
        streams.wait(COMPUTE, scattered)  # one input buffer of a reduce-scatter at a time
        streams.run(COMPUTE, unit.chunk_cat)
        streams.wait_stream(SCATTER, COMPUTE)
        scattered = streams.run(SCATTER, unit.scatter, "shard group" if unit.scatter else "")
        if last and unit.all_reduce:
            streams.wait_stream(ALL_REDUCE, SCATTER)
            streams.run(ALL_REDUCE, unit.all_reduce, "replicas")
    for stream in (SCATTER, ALL_REDUCE):  # finalize_backward
        streams.wait_stream(COMPUTE, stream)


def replay_s(units: Sequence[Unit], micro_batches: int = 1) -> float:
    """Return the seconds of forwards and backwards of a step, units in order of execution."""
    streams = Streams()
    for micro_batch in range(micro_batches):
        _forward(streams, units)
        _backward(streams, units, micro_batch == micro_batches - 1)
    return streams.free[COMPUTE]
