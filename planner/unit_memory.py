"""What one unit holds on the fullest rank's device.

For a unit whose tensors are cut into `parts` (`Strategy.parts`: the ranks of the group; 1 for
`owner`), with e_p bytes per parameter in compute dtype and e_r = 4 in reduce dtype, per parameter
tensor of first dimension d0 and `rest` elements per row padded to ceil(d0/parts) parts rows
(FSDP2 pads so),

    S    sharded parameters, fp32                   4 pad/parts          `UnitBytes.parameters`
    SG   sharded gradients                          e_r pad/parts        `UnitBytes.gradients`
    OPT  optimizer states (Adam: 2 S + 512)                              `UnitBytes.optimizer`
    U    unsharded parameters                       e_p pad              `UnitBytes.unsharded`
    AG   all-gather output (none if parts = 1)      e_p pad              `UnitBytes.gathered`
    RSI  reduce-scatter input                       e_r pad              `UnitBytes.reduce_input`
    G    unsharded gradients                        e_p numel            `UnitBytes.full_gradients`
    H    secondary copy over K ranks                e_p pad/K            `UnitBytes.secondary`

each tensor rounded up to 512 bytes.  Source: measured on FSDP2 (torch 2.13.0) with PyTorch's memory
tracker on fake tensors.  What differs by strategy:

    hierarchical       AG and RSI 2.5 times: the permutation to or from rank order, and what passes
                       between nodes, 1/g of the whole with g >= 2 ranks on a node (an upper bound)
    secondary_shard    H lives from forward to backward
    owner              S, SG and OPT are whole on the owner and nothing elsewhere; U is the broadcast
                       buffer itself, so there is no AG; RSI is what is reduced
    + offload          S, SG and OPT are 0, they are in the host's memory; AG has S on top, the copy
                       that is gathered from, and RSI has SG on top, on its way to the host
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from planner.strategy import COMPUTE_BYTES, REDUCE_BYTES, Strategy, padded_rows
from profiler.graph import Parameter

ALLOCATION_BYTES = 512
"""Granularity of PyTorch's CUDA caching allocator (kMinBlockSize in CUDACachingAllocator)."""
MASTER_BYTES = 4
"""Sharded parameters rest in fp32 under every precision."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an optimizer keeps per parameter."""

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
    secondary: int = 0

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def _two_phase_buffer(size_bytes: int) -> int:
    return 2 * _rounded(size_bytes) + _rounded(-(-size_bytes // 2))


def unit_bytes(parameters: Iterable[Parameter], strategy: Strategy, precision: str, optimizer: Optimizer,
               elsewhere: bool = False) -> UnitBytes:  # fmt: skip
    """Return the memory of a unit; equations at the top of this module.

    `elsewhere` says that another rank owns it, which matters to strategy `owner` only.
    """
    parts, compute = strategy.parts, COMPUTE_BYTES[precision]
    total, flat, flat_trained = UnitBytes(), 0, 0
    for parameter in parameters:
        rows, rest = padded_rows(parameter, parts)
        shard, padded = rows * rest, rows * rest * parts
        flat += padded
        state = 0
        if parameter.trainable:
            flat_trained += padded
            state = optimizer.moments * _rounded(MASTER_BYTES * shard)
            state += ALLOCATION_BYTES if optimizer.has_step_counter else 0
        total += UnitBytes(
            parameters=_rounded(MASTER_BYTES * shard),
            optimizer=state,
            unsharded=_rounded(compute * padded),
            full_gradients=_rounded(compute * parameter.numel) if parameter.trainable else 0,
            secondary=_rounded(compute * padded // strategy.secondary) if strategy.secondary else 0,
        )
    buffer = _two_phase_buffer if strategy.kind.two_phase else _rounded
    unit = total + UnitBytes(
        gradients=_rounded(REDUCE_BYTES * flat_trained // parts),
        gathered=buffer(compute * flat) if parts > 1 else 0,
        reduce_input=buffer(REDUCE_BYTES * flat_trained),
    )
    return _at_rest(unit, strategy, elsewhere)


def _at_rest(unit: UnitBytes, strategy: Strategy, elsewhere: bool) -> UnitBytes:
    """Return a unit's bytes without what does not rest on this device."""
    if strategy.kind.wrapping == "owner" and elsewhere:
        return replace(unit, parameters=0, gradients=0, optimizer=0)
    if strategy.offload:
        gathered, reduce_input = unit.gathered + unit.parameters, unit.reduce_input + unit.gradients
        return replace(unit, parameters=0, gradients=0, optimizer=0, gathered=gathered, reduce_input=reduce_input)
    return unit
