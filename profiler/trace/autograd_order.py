"""Which forward computation a backward kernel belongs to.

Autograd numbers its nodes as the forward creates them, so a node's number tells, by bisection, in
which call it was created.  The functions below use private API of torch, which is used nowhere
else.  Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number that the next autograd node of this thread will get. Torch's own, as it runs often."""


def number_of(node: Node) -> int:
    """Return a node's number; of nodes that only add a gradient to a parameter, more than `next_number` returns."""
    number: int = node._sequence_nr()
    return number


def running_number() -> int | None:
    """Return the number of the node whose backward runs in this thread, or None outside of any."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_checkpointed() -> bool:
    """Return whether the innermost hooks of saved tensors are those of `torch.utils.checkpoint`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


def without_own_node(tensor: Tensor) -> Tensor:
    """Return a tensor that a node is about to save, detached if it is what the node's own operation returns.

    A hook that hands on such a one, as `exp` saves, makes a cycle of the tensor and its node, which torch itself
    avoids: it lives on, and with it all that the nodes before it save, where no backward reaches the node.
    """
    node = tensor.grad_fn
    if node is None or node._sequence_nr() != next_number() - 1:
        return tensor
    return tensor.detach()


def first_number() -> int:
    """Return the number from which on nodes are those of a call that begins now.

    In the forward of a `torch.autograd.Function`, as that of a reentrant checkpoint, the function's own node was made
    just before, and its backward is that of all calls in there: of the last of them.
    """
    return next_number() - is_in_function()


def is_in_function() -> bool:
    """Return whether the forward of a `torch.autograd.Function` runs: alone there, both kinds of gradients are off."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled())
