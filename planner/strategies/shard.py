"""Split over all ranks, G = N: AG(N, e_p P) before forward and again before backward, RS(N, e_r T) after it.

`fully_shard`, with its defaults (FSDP, ZeRO-3).  With `+offload`, S is copied to the device before forward and before
backward, and SG back after the reduction of every micro-batch.
"""

from planner.strategies.spec import StrategySpec

SPEC = StrategySpec(
    "shard", 20, "sharded over all ranks; all-gathered in forward and again in backward", baseline="FSDP"
)
