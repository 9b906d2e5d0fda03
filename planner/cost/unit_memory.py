"""Memory of one unit on the device of the fullest rank.

For a unit whose tensors are cut into `parts` (`Strategy.parts`: the ranks of the group, 1 if one rank
holds them whole), with e_p bytes per parameter in compute dtype and e_r = 4 in reduce dtype, per parameter
tensor of first dimension d0 and `rest` elements per row padded to ceil(d0/parts) parts rows
(FSDP2 pads so),

    S    sharded parameters, fp32                   4 pad/parts          `UnitBytes.parameters`
    SG   sharded gradients                          e_r pad/parts        `UnitBytes.gradients`
    OPT  optimizer states (Adam: 2 S + 512)                              `UnitBytes.optimizer`
    U    unsharded parameters                       e_p pad              `UnitBytes.unsharded`
    AG   all-gather output (none if parts = 1)      e_p pad              `UnitBytes.gathered`
    RSI  reduce-scatter input                       e_r pad              `UnitBytes.reduce_input`
    G    unsharded gradients                        e_p numel            `UnitBytes.full_gradients`
    G1   the last of those, which FSDP2 holds on to as it reduces        `UnitBytes.last_gradient`
    H    secondary copy over K ranks                e_p pad/K            `UnitBytes.secondary`
    AGX  what only an all-gather holds as it runs: under bf16 e_p pad/parts, the shard that is sent
                                                                         `UnitBytes.gather_temporary`
    RSX  the same of a reduction                                         `UnitBytes.reduce_temporary`
    W    window: published shard, A accumulators    (e_p + A e_r) pad/G  `UnitBytes.window`

each tensor rounded up to 512 bytes.  Source: measured on FSDP2 (torch 2.13.0) with PyTorch's memory
tracker on fake tensors.  With `+offload`, S, SG and OPT are 0, they are in the host's memory; AGX has S on top, the
copy that is gathered from, and RSX has SG, on its way to the host.  Other differences
are documented in the strategies' files in `planner/strategies/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from planner.strategies.spec import COMPUTE_BYTES, MASTER_BYTES, REDUCE_BYTES, Strategy
from planner.strategies.unit_collectives import padded_rows
from profiler.byte_sizes import ALLOCATION_BYTES, allocated_bytes
from profiler.model_graph import Parameter


@dataclass(frozen=True, slots=True)
class Optimizer:
    """State, temporaries and memory traffic of an optimizer per parameter."""

    moments: int
    """fp32 tensors of the parameter's size kept between steps."""
    has_step_counter: bool
    """Whether it keeps one scalar tensor per parameter."""
    temporaries: int
    """fp32 tensors of the parameter's size that live while it steps (foreach implementation)."""
    touched: int
    """fp32 tensors of the parameter's size that a step reads and writes."""


OPTIMIZERS = {
    "adam": Optimizer(moments=2, has_step_counter=True, temporaries=1, touched=18),
    "adamw": Optimizer(moments=2, has_step_counter=True, temporaries=1, touched=20),
    "sgd": Optimizer(moments=0, has_step_counter=False, temporaries=0, touched=3),
}
"""`torch.optim` with default arguments: SGD without momentum, Adam in its foreach form.

`touched`, from `torch/optim/adam.py` of torch 2.13: lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
addcdiv 4, and for AdamW's decay mul 2; SGD: add 3."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of one unit on the fullest rank (rank 0, which never has the short shard)."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded: int = 0
    gathered: int = 0
    reduce_input: int = 0
    full_gradients: int = 0
    last_gradient: int = 0
    secondary: int = 0
    gather_temporary: int = 0
    reduce_temporary: int = 0
    window: int = 0
    offloaded: int = 0
    """SG in the host's memory."""

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def unit_bytes(
    parameters: Iterable[Parameter],
    strategy: Strategy,
    precision: str,
    optimizer: Optimizer,
    elsewhere: bool = False,
    node: int = 1,
) -> UnitBytes:
    """Return the memory of a unit; equations at the top of this module.

    `elsewhere` means that another rank owns it, for strategies with an owner; `node` is the number of ranks per node.
    """
    parts, compute = strategy.parts, COMPUTE_BYTES[precision]
    total, flat, flat_trained, last_gradient, counters = UnitBytes(), 0, 0, 0, 0
    for parameter in parameters:
        rows, rest = padded_rows(parameter, parts)
        shard, padded = rows * rest, rows * rest * parts
        flat += padded
        state = gradient = 0
        if parameter.trainable:
            flat_trained += padded
            counter = ALLOCATION_BYTES if optimizer.has_step_counter else 0
            counters += counter
            state = optimizer.moments * allocated_bytes(MASTER_BYTES * shard) + counter
            gradient = last_gradient = allocated_bytes(compute * parameter.numel)
        total += UnitBytes(
            parameters=allocated_bytes(MASTER_BYTES * shard),
            optimizer=state,
            unsharded=allocated_bytes(compute * padded),
            full_gradients=gradient,
            secondary=allocated_bytes(compute * padded // strategy.secondary) if strategy.secondary else 0,
        )
    spec, shard_bytes, trained_bytes = strategy.spec, compute * flat // parts, REDUCE_BYTES * flat_trained // parts
    # The shard is sent in compute dtype: a copy, unless it rests in that dtype (offloaded, the copy S is larger).
    copies = compute < MASTER_BYTES and parts > 1 and not (strategy.offload or spec.one_sided)
    windows = (shard_bytes, spec.accumulators(strategy) * trained_bytes) if spec.one_sided else ()
    unit = total + UnitBytes(
        gradients=allocated_bytes(trained_bytes),
        gathered=allocated_bytes(compute * flat) if parts > 1 else 0,
        reduce_input=allocated_bytes(REDUCE_BYTES * flat_trained),
        last_gradient=last_gradient if parts > 1 else 0,
        gather_temporary=sum(map(allocated_bytes, spec.temporaries(compute * flat, node)))
        + (allocated_bytes(shard_bytes) if copies else 0),
        reduce_temporary=sum(map(allocated_bytes, spec.temporaries(REDUCE_BYTES * flat_trained, node))),
        window=sum(map(allocated_bytes, windows)),
    )
    # Optimizers count the steps of an empty shard too.
    return _at_rest(unit, strategy, counters, elsewhere)


def _at_rest(unit: UnitBytes, strategy: Strategy, counters: int, elsewhere: bool) -> UnitBytes:
    """Return a unit's bytes without what does not rest on this device."""
    if strategy.spec.has_owner and elsewhere:
        return replace(unit, parameters=0, gradients=0, optimizer=0 if strategy.offload else counters)
    if strategy.offload:
        shard, gradient = (unit.parameters, unit.gradients) if strategy.spec.offload_buffers else (0, 0)
        gather, reduction = unit.gather_temporary + shard, unit.reduce_temporary + gradient
        kept = replace(unit, gather_temporary=gather, reduce_temporary=reduction, offloaded=unit.gradients)
        return replace(kept, parameters=0, gradients=0, optimizer=0)
    return unit
