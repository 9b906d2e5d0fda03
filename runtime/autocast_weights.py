"""Copies of weights that `torch.autocast` makes: of each forward its own, and told of where they are made.

Autocast casts a weight once and gives all forwards in its context the same copy.  The gradient comes through that copy,
so with the backward of the forward that made it: in a context around several backwards, as of a step's micro-batches,
FSDP2 and ODC have reduced the others without it.

Autograd keeps the copies from forward to backward, those of all units, whenever the plan gathers and frees what they
were made of.  Plans count them where the model's forward asks for autocast, and not where only a loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from runtime.schedule import Schedule

NEVER_CAST = (nn.Embedding, nn.EmbeddingBag)
"""Modules of whose weights autocast makes no copy; nor does it of norms, whose weights have one dimension."""


class AutocastWeights:
    """Has units forget copies of weights as their forward begins."""

    def __init__(self) -> None:
        self.check: Callable[[torch.dtype], None] = lambda dtype: None
        """Called before copies in a dtype are made that a backward needs; raises where there is no room for them."""
        self._checked = set[torch.dtype]()

    def follow(self, modules: Iterable[nn.Module], device_type: str) -> None:
        """Hook modules that are wrapped, and compute on a kind of device."""
        for module in modules:
            module.register_forward_pre_hook(partial(self._forget, device_type), prepend=True)

    def _forget(self, device_type: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        torch.clear_autocast_cache()  # also where a context is off here, within one that keeps copies, or on inside
        if not torch.is_autocast_enabled(device_type):
            return
        dtype = torch.get_autocast_dtype(device_type)
        if torch.is_grad_enabled() and dtype not in self._checked:
            self.check(dtype)
            self._checked.add(dtype)


def bytes_of_copies(model: nn.Module, schedule: Schedule, dtype: torch.dtype) -> int:
    """Return at most how many bytes of copies in a dtype a backward begins with: none of a block that runs again, but
    those of the largest while it does.
    """
    multiplied = {
        path
        for prefix, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, NEVER_CAST)
        for path, _ in module.named_parameters(prefix, recurse=False, remove_duplicate=False)
    }
    cast = {id(one) for path, one in model.named_parameters(remove_duplicate=False) if path in multiplied}
    kept, again = 0, dict.fromkeys(schedule.recomputed, 0)
    for parameter in (one for unit in schedule.units for one in unit.parameters):
        is_multiplied = id(model.get_parameter(parameter.path)) in cast and len(parameter.origin.shape) > 1
        in_bf16 = schedule.precision == "bf16" and not parameter.keeps_dtype
        is_copied = dtype != torch.bfloat16 if in_bf16 else parameter.element_bytes == 4  # never of fp64
        if not (is_multiplied and is_copied):
            continue
        size_bytes = parameter.origin.numel * dtype.itemsize
        block = next((one for one in again if parameter.path.startswith(f"{one}.")), None)
        if block is None:
            kept += size_bytes
        else:
            again[block] += size_bytes
    return kept + max(again.values(), default=0)
