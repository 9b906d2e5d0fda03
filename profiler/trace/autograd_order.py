"""Which forward computation a backward kernel belongs to.

Autograd numbers its nodes as the forward creates them, so a node's number tells, by bisection, in
which call it was created.  The functions below use private API of torch, which is used nowhere
else.  Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import Node


def next_number() -> int:
    """Return the number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def number_of(node: Node) -> int:
    """Return a node's number; of nodes that only add a gradient to a parameter, more than `next_number` returns."""
    return int(node._sequence_nr())


def running_number() -> int | None:
    """Return the number of the node whose backward runs in this thread, or None outside of any."""
    node = torch._C._current_autograd_node()
    return None if node is None else number_of(node)


def is_in_function() -> bool:
    """Return whether the forward of a `torch.autograd.Function` runs: alone there, both kinds of gradients are off."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled())
