"""Split over all ranks, and kept gathered from forward to backward: AG(N, e_p P) before forward, RS(N, e_r T) after
backward; U lives between the two.

`fully_shard(reshard_after_forward=False)` (ZeRO-2).  With `+offload`, S is copied to the device before forward only.
"""

from planner.strategies.spec import StrategySpec

SPEC = StrategySpec(
    "shard_grad",
    30,
    "sharded over all ranks; all-gathered once, kept until backward (ZeRO-2)",
    keeps_unsharded=True,
    baseline="ZeRO-2",
)
