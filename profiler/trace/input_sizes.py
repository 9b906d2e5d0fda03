"""Whether example inputs for more samples are larger: if not, memory and time of a micro-batch are those of any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ALIKE = (
    "example inputs have the same sizes for every micro-batch, so memory and time are those of one, whatever the "
    "plan's micro-batch is: make inputs of as many samples as they are asked for, or plan with --batch 1"
)


class InputSizes:
    """How large inputs were, by how many samples they were asked for."""

    def __init__(self) -> None:
        self._by_samples = dict[int, tuple[Any, ...]]()

    def add(self, samples: int, inputs: Any) -> None:
        """Take the sizes of inputs."""
        self._by_samples[samples] = tuple(map(_size, tree_leaves(inputs)))

    def are_alike(self) -> bool:
        """Return whether inputs of several numbers of samples were equally large."""
        return len(self._by_samples) > 1 == len({*self._by_samples.values()})


def _size(leaf: Any) -> Any:
    """Return what is equal for leaves that are equally large; of objects whose size is not known it never is."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return leaf if isinstance(leaf, int | float | str | torch.dtype | torch.device | None) else object()
