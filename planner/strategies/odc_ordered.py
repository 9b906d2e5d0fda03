"""As `planner.strategies.odc`, with A = G accumulators, one for each rank of the group.

They are added up in the order of ranks, which gives the same bits in every run; each unit's sum has an all-reduce of
its own.  The search never offers it: it does
the same as `odc` with more memory.
"""

from dataclasses import dataclass

from planner.strategies.odc import OneSided
from planner.strategies.spec import Strategy


@dataclass(frozen=True)
class OrderedOneSided(OneSided):
    """Pulled and pushed inside a group, with an accumulator for every rank."""

    ordered: bool = True

    def offered(self, strategy: Strategy, uneven: bool) -> bool:
        return False


SPEC = OrderedOneSided("odc_ordered", 90, "as odc, with bitwise reproducible gradients", argument="group")
