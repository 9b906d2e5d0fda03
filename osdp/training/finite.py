"""Numbers that are none, found before they reach the weights or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from osdp.training.process_group import Ranks
from profiler.errors import OsdpError

ADVICE = "a lower learning rate, gradient clipping or fp32 instead of bf16; check the data"


class NonFinite:
    """Counts the steps that are left out because of gradients that are infinite or not numbers."""

    def __init__(self, skips: bool, most_in_a_row: int) -> None:
        self._skips, self._most_in_a_row = skips, most_in_a_row
        self.skipped = 0
        """In all."""
        self._in_a_row = 0

    def leaves_out(self, is_finite: bool, step: int) -> bool:
        """Whether to leave out a step; the same on all ranks if `is_finite` is. Raises OsdpError to stop the run."""
        if is_finite:
            self._in_a_row = 0
            return False
        what = f"the gradients of step {step} are not finite"
        if not self._skips:
            advice = f"{ADVICE}; --on-nonfinite skip leaves such steps out"
            raise OsdpError(what, expected="finite gradients", advice=advice)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self._most_in_a_row:
            got = f"{self._in_a_row} such steps in a row"
            raise OsdpError(what, got=got, expected=f"fewer than {self._most_in_a_row}", advice=ADVICE)
        return True


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor], ranks: Ranks) -> bool:
    """Whether all elements of all ranks' tensors are finite. A collective call."""
    local = [one.detach() for one in tensors if one.is_floating_point() and one.numel()]
    norms = torch._foreach_norm(local, torch.inf) if local else []
    is_bad = any(not bool(torch.isfinite(torch.stack(of_dtype)).all()) for of_dtype in _by_kind(norms))
    return ranks.total([int(is_bad)])[0] == 0


def _by_kind(norms: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for norm in norms:
        kinds.setdefault((norm.device, norm.dtype), []).append(norm)
    return kinds.values()
