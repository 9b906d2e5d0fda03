"""Whole tensors on one rank each, the owner (ZeRO-3 as Tiny-FSDP does it); nothing is padded.

    forward      broadcast(N, e_p P)
    backward     broadcast(N, e_p P)
    reduction    reduce(N, e_r T), to the owner

S, SG and OPT are whole on the owner and nothing elsewhere, but for the step counters that optimizers keep for empty
tensors.  A unit is one operator, so that it has one owner (`planner.strategies.owner_assignment`).  U is the broadcast
buffer itself, so there is no AG; it stays until the gradients have been copied.  RSI is what is reduced.  All is on
the stream that computes: nothing overlaps.  With `+offload`, the owner copies S to what it sends before forward and
before backward, and SG from what it gets, without further buffers.
"""

from planner.strategies.spec import StrategySpec

SPEC = StrategySpec(
    "owner",
    70,
    "whole tensors on one rank each; broadcast for forward and backward",
    wrapping="owner",
    gather="broadcast",
    reduction="reduce",
    joins=False,
    has_owner=True,
    stalls=True,
    frees_before_reduction=False,
    offload_buffers=False,
)
