"""Memory of one unit on the device of the fullest rank.

For a unit whose tensors are cut into `parts` (`Strategy.parts`: the ranks of the group, 1 if one rank
holds them whole), with e_s bytes per element as parameters rest, e_p in compute dtype and e_r in reduce
dtype (in fp32: 4, 4, 4; mixed precision: 4, 2, 4; bf16 at rest: 2, 2, 4), per parameter tensor of first
dimension d0 and `rest` elements per row padded to ceil(d0/parts) parts rows (FSDP2 pads so),

    S    sharded parameters                         e_s pad/parts        `UnitBytes.parameters`
    SG   sharded gradients                          e_s pad/parts        `UnitBytes.stepped`
    OPT  optimizer states (Adam: 2 S + 512; `Optimizer.state_bytes`)     `UnitBytes.optimizer`
    TMP  what the optimizer makes as it steps all together (Adam, unless fused: S of trainable ones)
                                                                         `UnitBytes.updates`
    TMP1 the same of one after the other (two of the largest tensor of S, beside the second largest at most)
                                                                         `UnitBytes.largest`, `second`
    U    unsharded parameters                       e_p pad              `UnitBytes.unsharded`
    AG   all-gather output (none if parts = 1)      e_p pad              `UnitBytes.gathered`
    RSI  reduce-scatter input; if it is pushed one-sidedly, e_p pad
                                                    e_r pad              `UnitBytes.reduce_input`
    G    unsharded gradients                        e_p numel            `UnitBytes.full_gradients`
    G1   the last of those, which FSDP2 holds on to as it reduces        `UnitBytes.last_gradient`
    H    secondary copy over K ranks                e_p pad/K            `UnitBytes.secondary`
    AGX  what only an all-gather holds as it runs: the shard that is sent, e_p pad/parts, if it is a copy, as it
         is cast or comes from the host                                  `UnitBytes.gather_temporary`
    AGH  the same in backward: of H, e_p pad/K, which FSDP2 copies too if shards are cast, but none of the host's;
         AGX without H                                                   `UnitBytes.regather_temporary`
    UX   what unsharding holds beside U if parts = 1 and nothing is gathered: one tensor after the other is copied
         from the host, cast, and copied to U                            `UnitBytes.unshard_temporary`
    RSX  the same of a reduction: if e_s < e_r, the shard that was reduced, e_r pad/parts; if it is pushed
         one-sidedly and e_p < e_s, e_p pad/parts                        `UnitBytes.reduce_temporary`
    W    window: published shard, A accumulators    (e_p + A e_r) pad/G  `UnitBytes.window`

each tensor rounded up to 512 bytes (SG: the unit).  `UnitBytes.gradients` is what holds gradients from reduction to
the end of backward: SG and, if e_s < e_r and sums of a group are all-reduced over other groups, those too:
FSDP2 (torch 2.13) lets go of them at the end.

A copy on every rank (G = 1) of parameters of which none is trained is not FSDP2's: there is S and nothing
else, unless they are cast.

Source: measured on FSDP2 (torch 2.13.0) with PyTorch's memory tracker on fake tensors.  With `+offload`, S, SG
and OPT are 0, they are in the host's memory; RSX has SG, on its way to the host; of sums that are all-reduced over
other groups the buffer, e_r pad/parts, stays on the device to the end of backward (`FSDPParamGroup._all_reduce_state`,
read in torch 2.11 and 2.13, and seen on a GPU), and takes the place of the sums of micro-batches before.  Other
differences are documented in the strategies' files in `planner/strategies/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from planner.optimizers import Optimizer
from planner.strategies.replicate import COPY
from planner.strategies.spec import Strategy
from planner.strategies.unit_collectives import is_plain, padded_rows, volume_of
from profiler.byte_sizes import allocated_bytes
from profiler.model_graph import Parameter


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit on the fullest rank (rank 0, which never has the short shard)."""

    parameters: int = 0
    gradients: int = 0
    stepped: int = 0
    updates: int = 0
    largest: int = 0
    """The largest of the tensors of S that an optimizer may step apart, 0 if it makes nothing as it does."""
    second: int = 0
    optimizer: int = 0
    unsharded: int = 0
    gathered: int = 0
    reduce_input: int = 0
    full_gradients: int = 0
    last_gradient: int = 0
    secondary: int = 0
    gather_temporary: int = 0
    regather_temporary: int = 0
    unshard_temporary: int = 0
    reduce_temporary: int = 0
    window: int = 0
    offloaded: int = 0
    """SG in the host's memory."""

    @property
    def beside_sums(self) -> int:
        """SG, where FSDP2 has the sums in reduce dtype beside it from the reduction to the end of backward, else 0."""
        return self.stepped if self.gradients > self.stepped else 0

    def __add__(self, other: UnitBytes) -> UnitBytes:
        both = UnitBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
        largest, second = two_largest((self.largest, self.second, other.largest, other.second))
        return replace(both, largest=largest, second=second)


def two_largest(sizes: Iterable[int]) -> tuple[int, int]:
    """Return the two largest of at least two sizes."""
    first, second, *_ = sorted(sizes, reverse=True)
    return first, second


def unit_bytes(
    parameters: Iterable[Parameter],
    strategy: Strategy,
    precision: str,
    optimizer: Optimizer,
    elsewhere: bool = False,
    node: int = 1,
    ranks: int = 0,
) -> UnitBytes:
    """Return the memory of a unit; equations at the top of this module.

    `elsewhere` means that another rank owns it, for strategies with an owner; `node` is the number of ranks per node,
    `ranks` that of all.
    """
    parts, parameters = strategy.parts, tuple(parameters)
    if is_plain(parameters, strategy, precision):
        return UnitBytes(parameters=sum(allocated_bytes(p.element_bytes * p.numel) for p in parameters))
    # Plain sums: a large search looks at a hundred thousand parameters.
    at_rest = states = unsharded = full_gradients = secondary = gradients = last_gradient = counters = 0
    updates = pushed = cast = copied = 0
    stepped_apart = [0, 0]
    for parameter in parameters:
        rows, rest = padded_rows(parameter, parts)
        shard, compute, element_bytes = rows * rest, parameter.compute_bytes(precision), parameter.element_bytes
        held = allocated_bytes(element_bytes * shard)
        cast += compute * shard if parameter.is_cast(precision) else 0
        copied += allocated_bytes(compute * shard)
        if parameter.trainable and parameter.used:
            gradients += element_bytes * shard
            counters += optimizer.state_bytes(0, element_bytes)
            states += optimizer.state_bytes(shard, element_bytes)
            updates += optimizer.temporaries * held
            stepped_apart.append(held if optimizer.steps_apart else 0)
            pushed += compute * shard * parts
            last_gradient = allocated_bytes(compute * parameter.numel)
            full_gradients += last_gradient
        at_rest += held
        unsharded += allocated_bytes(compute * shard * parts)
        if strategy.secondary:
            secondary += allocated_bytes(compute * shard * parts // strategy.secondary)
    spec, volume = strategy.spec, volume_of(parameters, parts, precision)
    reduced = _reduced_copy(strategy, gradients, volume.reduced // parts, pushed // parts)
    # Until the end of backward, where it is all-reduced over other groups in there.
    until_the_end = strategy.group < ranks and not spec.one_sided
    sent, resent = _sent_copies(strategy, cast, copied)
    permuted = sum(map(allocated_bytes, spec.temporaries(volume.gathered, node)))
    # It is gone before SG is made, where that is not what was reduced.
    exchanged = sum(map(allocated_bytes, spec.temporaries(volume.reduced, node)))
    windows = (volume.gathered // parts, spec.accumulators(strategy) * volume.reduced // parts)
    largest, second = two_largest(stepped_apart)
    unit = UnitBytes(
        parameters=at_rest,
        optimizer=states,
        unsharded=unsharded,
        full_gradients=full_gradients,
        secondary=secondary,
        gradients=allocated_bytes(gradients) + (reduced if until_the_end else 0),
        stepped=allocated_bytes(gradients),
        updates=updates,
        largest=largest,
        second=second,
        gathered=allocated_bytes(volume.gathered) if parts > 1 else 0,
        reduce_input=allocated_bytes(pushed if spec.one_sided else volume.reduced),
        last_gradient=last_gradient if parts > 1 else 0,
        gather_temporary=permuted + sent,
        regather_temporary=permuted + resent,
        unshard_temporary=0 if parts > 1 or spec.has_owner else _unshard_temporary(parameters, strategy, precision),
        reduce_temporary=max(0, exchanged - (allocated_bytes(gradients) if reduced else 0))
        + (0 if until_the_end else reduced),
        window=sum(map(allocated_bytes, windows)) if spec.one_sided else 0,
    )
    # Optimizers count the steps of an empty shard too.
    there = _at_rest(unit, strategy, counters, elsewhere)
    if not (strategy.offload and until_the_end):
        return there
    # Of what goes to the host, FSDP2 keeps the buffer that was all-reduced; a copy of it is made only to cast it.
    casts = allocated_bytes(gradients) if reduced else 0
    kept = allocated_bytes(volume.reduced // parts)
    return replace(there, gradients=kept, reduce_temporary=unit.reduce_temporary + casts)


def _reduced_copy(strategy: Strategy, gradients: int, reduced: int, pushed: int) -> int:
    """Return the bytes of the shard that was reduced where that is a copy, given all shards' before rounding.

    It is in reduce dtype: a copy, unless it rests in that dtype, or the buffer is one rank's anyway.
    """
    if strategy.spec.has_owner:
        return 0
    if strategy.spec.one_sided:
        # FSDP2 makes the sharded gradients out of zeros of the dtype that is pushed.
        return allocated_bytes(pushed) if pushed < gradients else 0
    return allocated_bytes(reduced) if gradients < reduced else 0


def _sent_copies(strategy: Strategy, cast: int, copied: int) -> tuple[int, int]:
    """Return what of AGX and AGH is the shard that is sent, given the bytes of its `cast` tensors and of all.

    It is in compute dtype: a copy, unless it rests in that dtype on the device.  Those of the host are tensors of their
    own; what they were cast from is gone before there is AG, which is larger.
    """
    if strategy.parts == 1 or strategy.spec.one_sided:
        return 0, 0
    sent = copied if strategy.offload else allocated_bytes(cast)
    if not strategy.secondary:
        return sent, sent
    return sent, 0 if strategy.offload else allocated_bytes(cast * strategy.parts // strategy.secondary)


def _unshard_temporary(parameters: Iterable[Parameter], strategy: Strategy, precision: str) -> int:
    """Return UX: `FSDPParamGroup.wait_for_unshard` has the copy of one tensor until it has that of the next."""
    unsharded = highest = before = 0
    for parameter in parameters:
        whole, is_cast = (
            allocated_bytes(parameter.compute_bytes(precision) * parameter.numel),
            parameter.is_cast(precision),
        )
        copy = whole if is_cast or strategy.offload else 0
        from_host = allocated_bytes(parameter.element_bytes * parameter.numel) if is_cast and strategy.offload else 0
        highest = max(highest, unsharded + before + from_host + copy, unsharded + whole + copy)
        unsharded, before = unsharded + whole, copy
    return max(0, highest - unsharded)


def outside_bytes(parameters: Iterable[Parameter], precision: str, optimizer: Optimizer) -> int:
    """Return the memory of parameters that no unit holds: each rank has them, their states and two gradients whole."""
    alone = [unit_bytes([parameter], COPY, precision, optimizer) for parameter in parameters]
    return sum(unit.parameters + unit.optimizer + unit.full_gradients + unit.reduce_input for unit in alone)


_NOTHING_STEPS = {"parameters": 0, "gradients": 0, "stepped": 0, "updates": 0, "largest": 0, "second": 0}
"""Of a unit that does not rest on this device."""


def _at_rest(unit: UnitBytes, strategy: Strategy, counters: int, elsewhere: bool) -> UnitBytes:
    """Return a unit's bytes without what does not rest on this device."""
    if strategy.spec.has_owner and elsewhere:
        return replace(unit, **_NOTHING_STEPS, optimizer=0 if strategy.offload else counters)
    if strategy.offload:
        leaving = unit.stepped if strategy.spec.offload_buffers else 0
        kept = replace(unit, reduce_temporary=unit.reduce_temporary + leaving, offloaded=unit.stepped)
        return replace(kept, **_NOTHING_STEPS, optimizer=0)
    return unit
