"""Seconds that a unit communicates: its collectives, and what it copies on the device and between host and device.

With S the shard that rests and SG its gradient, one rank of a unit with `+offload` copies, at
the rate of `Host.link_bytes_per_s`, as FSDP2 with `CPUOffloadPolicy` does (torch 2.13,
`FSDPParam.all_gather_inputs` and `foreach_reduce`),

    before forward, and before backward if it is gathered again     S
    reduction, or once per step                                     SG

(`StrategySpec.host_copies`; the strategies' files document exceptions).  Copies run in sequence with their
collectives: FSDP2 copies to the device on a separate stream, so it can be faster than this.  A group of one rank
(`replicate`, and everything at world size 1) has no all-gather that FSDP2 could issue ahead: shards are copied to the
device as their unit begins, on the compute stream (`FSDPParamGroup.wait_for_unshard`), and nothing hides that
(`UnitTraffic.copy_out_s`).  The copy of the gradient back is on the stream of reductions there too.

With several micro-batches a reduced shard is added to the one on the host.  That reads two tensors and writes one, at
the host's rate, and the thread that launches the backward waits for it: such reductions do not overlap with
computation (`UnitTraffic.add_s`).  On a cluster without figures of its host, copies take no time.

FSDP2 communicates flat tensors, and copies parameters and gradients out of them and into them (torch 2.13,
`foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`).  At the rate of device memory, reading and
writing, with P what is gathered and the rest as in `planner.strategies.unit_collectives.Volume`,

    after each gather         P read (a whole copy, as nothing is gathered: as it rests) and written
    before each reduction     gradients in compute dtype read, and written in reduce dtype

on the compute stream, which nothing hides (`UnitTraffic.copy_out_s`, `copy_in_s`).  A rank's own shard is copied, and
cast, before a gather on a stream of its own, under the communication that is before it: that is not charged.

Where units of several ranks were measured, each gather and each reduction that communicates takes `Measured.overhead_s`
more, and has those copies in its own time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.collectives import ONE_SIDED
from planner.cost.shared_collectives import Parts, SharedCollectives, trained_bytes
from planner.strategies.spec import Phase, Strategy
from planner.strategies.unit_collectives import is_plain, unit_collectives, volume_of
from profiler.cluster.cluster import Cluster
from profiler.model_graph import Parameter

ADD_TENSORS = 3
"""Tensors that adding one to another reads and writes."""


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """Seconds that one unit's collectives and copies take."""

    forward_gather_s: float
    """Before its forward."""
    backward_gather_s: float
    """Before its backward; 0 if kept unsharded."""
    reduce_s: float
    """After its backward, in every micro-batch."""
    step_reduce_s: float
    """After its backward, in the last micro-batch of a step only; with its share of what units send together."""
    add_s: float = 0.0
    """After its reduction in every micro-batch but the first: adding the gradient to the one on the host."""
    copy_out_s: float = 0.0
    """Before its forward, on the compute stream: parameters out of what was gathered, or in a group of one rank from
    the host."""
    copy_out_again_s: float = 0.0
    """The same before its backward; 0 if kept unsharded."""
    copy_in_s: float = 0.0
    """After its backward, on the compute stream: gradients into what is reduced."""
    syncs_each_microbatch: bool = False
    """Whether ranks wait for each other in every micro-batch."""
    parts: Parts = ()
    """What it shares with other units, and its part of that."""


def unit_traffic(
    parameters: Iterable[Parameter],
    strategy: Strategy,
    precision: str,
    cluster: Cluster,
    *,
    trains: bool = True,
    model_bytes: int | None = None,
) -> UnitTraffic:
    """Return the seconds of a unit's collectives and copies.

    `trains`: see `unit_collectives`; `model_bytes` are the `trained_bytes` of the model, by default of the unit alone.
    """
    parameters = tuple(parameters)
    seconds: dict[Phase, float] = {"forward": 0.0, "backward": 0.0, "reduce": 0.0, "step": 0.0}
    syncs = False
    parts: Parts = ()
    all_bytes = trained_bytes(parameters) if model_bytes is None else model_bytes
    shared = SharedCollectives.of(strategy, all_bytes, cluster)
    if shared and trains:
        own_bytes = trained_bytes(parameters)
        parts = ((shared, shared.part(own_bytes)),)
        seconds["step"] += shared.share_s(own_bytes)
    for collective in unit_collectives(parameters, strategy, precision, cluster, trains=trains):
        if collective.shared:
            continue
        seconds[collective.phase] += collective.time_s(cluster)
        syncs = syncs or (collective.phase != "step" and collective.operation not in ONE_SIDED)
        seconds[collective.phase] += strategy.spec.extra_s(collective, cluster)
    volume = volume_of(parameters, strategy.parts, precision)
    out_s = in_s = add_s = host_s = 0.0
    measured = cluster.measured
    if measured is not None and measured.unit_overhead_s is not None and cluster.world_size > 1:
        for phase in ("forward", "backward", "reduce"):
            seconds[phase] += measured.overhead_s(strategy.spec.one_sided) if seconds[phase] else 0.0
    elif not is_plain(parameters, strategy, precision):
        memory = cluster.device.memory_bytes_per_s.value
        gradients = [p for p in parameters if p.trainable and p.used and trains]
        out_s = ((volume.gathered if strategy.parts > 1 else volume.rested) + volume.gathered) / memory
        if gradients:
            in_s = (sum(p.compute_bytes(precision) * p.numel for p in gradients) + volume.reduced) / memory
    if strategy.offload and cluster.host:
        rested, reduced = volume.rested // strategy.parts, volume.reduced // strategy.parts
        copies = [copy for copy in strategy.spec.host_copies(strategy, cluster) if trains or copy[0] == "forward"]
        for phase, is_gradient in copies:
            copy_s = (reduced if is_gradient else rested) / cluster.host.link_bytes_per_s.value
            if strategy.group == 1 and phase in ("forward", "backward"):
                host_s = copy_s
            else:
                seconds[phase] += copy_s
        if ("reduce", True) in copies:
            add_s = ADD_TENSORS * reduced / cluster.host.memory_bytes_per_s.value
    out_s += host_s
    again_s = out_s if trains and not strategy.keeps_unsharded else 0.0
    own_s = seconds["forward"], seconds["backward"], seconds["reduce"], seconds["step"]
    return UnitTraffic(*own_s, add_s, out_s, again_s, in_s, syncs, parts)
