"""Which forward computation a backward kernel belongs to.

Autograd numbers its nodes as the forward creates them, so a node's number tells, by bisection, in
which call it was created.  The two functions below are private API of torch; they are used nowhere
else.  Written for torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch


def next_number() -> int:
    """Return the number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def running_number() -> int | None:
    """Return the number of the node whose backward runs in this thread, or None outside of any.

    Nodes that only add a gradient to a parameter have no number of their own; theirs is greater
    than any that `next_number` returns.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
