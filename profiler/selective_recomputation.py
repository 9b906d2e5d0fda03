"""Which outputs a block keeps under selective recomputation: those that take long to compute again.

Matrix products, convolutions and attention, by torch's own list (`torch.utils.flop_counter.flop_registry`), are kept;
all else (norms, activations, residuals, dropout) runs again.  But of these, two run again too:

- a batched product that is larger than what it is made of, as are the scores of attention without a fused kernel:
  it holds the most memory for the least work;
- attention with dropout, whose kernel draws random numbers: left out when the forward runs again, the dropout after it
  would draw others than before.

Torch has contexts for this (`create_selective_checkpoint_contexts`), and they were tried first.  They count every
operation of a forward, those of FSDP2's hooks too, which differ when it runs again; they allow one backward, and refuse
a block that changes in place what a product returned.  So an output is kept here (`KeptOutputs`) until it is taken up
again, and what is not there any more, or has changed, is computed: whatever trains recomputed, trains so.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from profiler.errors import OsdpError

_BATCHED = frozenset({torch.ops.aten.bmm, torch.ops.aten.baddbmm})
_MORE = frozenset({torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.aten._grouped_mm})
"""What torch's list leaves out."""


@cache
def is_product(op: Any) -> bool:
    """Return whether an op is a matrix product, a convolution or attention."""
    packet = getattr(op, "overloadpacket", op)
    return packet in flop_registry or packet in _MORE


def is_kept(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a selectively recomputed block keeps what a call of an op returns."""
    if not is_product(op) or is_mutable(op):  # out= makes nothing to keep
        return False
    if getattr(op, "overloadpacket", None) in _BATCHED:
        left, right = [one for one in args if isinstance(one, Tensor)][-2:]
        rows, columns = left.shape[-2], right.shape[-1]
        return rows * columns <= (rows + columns) * left.shape[-1]
    return not _drops_out(op, args, kwargs)


@cache
def is_mutable(op: Any) -> bool:
    """Return whether an op changes some of its arguments in place."""
    return isinstance(op, OpOverload) and op._schema.is_mutable


def _drops_out(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an op draws random numbers, by its argument `dropout_p`."""
    if (place := _place_of_dropout(op)) is None:
        return False
    position, name, default = place
    return bool(args[position] if position < len(args) else kwargs.get(name, default))


@cache
def _place_of_dropout(op: Any) -> tuple[int, str, Any] | None:
    """Return position, name and default of an op's argument `dropout_p`, None if it has none."""
    for position, argument in enumerate(op._schema.arguments if isinstance(op, OpOverload) else ()):
        if argument.name == "dropout_p":
            return position, argument.name, argument.default_value
    return None


@dataclass
class _Kept:
    """What a call of an op returned."""

    op: Any
    held: Any
    versions: tuple[int, ...]
    is_changed: bool = False


class KeptOutputs:
    """What one execution of a block keeps, in the order in which it was made."""

    def __init__(self) -> None:
        self._entries = deque[_Kept]()
        self._of_storage: dict[int, _Kept] = {}
        self._is_over = False

    def add(self, op: Any, out: Any) -> None:
        """Keep what a call of an op returned."""
        held = tree_map_only(Tensor, _alias, out)
        entry = _Kept(op, held, _versions(held))
        self._entries.append(entry)
        self._of_storage |= dict.fromkeys(_storages(held), entry)

    def note_changes(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what of the kept an op changes in place.

        Versions do not tell all: `.data` and what `unsafe_split` returns, by which recurrent layers cut their products,
        count their own.
        """
        if not self._of_storage or not is_mutable(op):
            return
        for position, argument in enumerate(op._schema.arguments):
            if argument.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                for storage in _storages(given):
                    if entry := self._of_storage.get(storage):
                        entry.is_changed = True

    def take(self, op: Any) -> Any:
        """Return what the next call of an op returned, and keep it no more.

        Return None if it is not kept any more, or has been changed in place.  Raises OsdpError if the forward calls
        other operations than before.
        """
        if self._is_over:
            return None
        entry = self._entries.popleft() if self._entries else _Kept("no more", None, ())
        if entry.op is not op:
            what = "a block that is recomputed selectively does something else when its forward runs again"
            raise OsdpError(what, got=str(op), expected=str(entry.op), advice="recompute it whole, or keep it")
        return None if entry.is_changed or _versions(entry.held) != entry.versions else entry.held

    def end(self) -> None:
        """Keep nothing any more: the forward has run again, so far as backward needs it."""
        self._entries.clear()
        self._of_storage.clear()
        self._is_over = True


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the same storage without history, which would hold on to the block.

    Changes in place are counted for both: by default not, in a dispatch mode (torch 2.11 to 2.13).
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _storages(held: Any) -> list[int]:
    return [one.untyped_storage()._cdata for one in tree_leaves(held) if isinstance(one, Tensor)]


def _versions(held: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tree_leaves(held) if isinstance(tensor, Tensor))
