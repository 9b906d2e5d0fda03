"""OSDP: finds the fastest parallel strategy that fits, and runs it on PyTorch.

from osdp import OSDP

model = OSDP(model, description, device_info)
"""

from typing import TYPE_CHECKING, Any

from osdp._shadowing import refuse_shadowed_packages

if TYPE_CHECKING:
    from osdp.api import OSDP, OptimalShardedDataParallel

__all__ = ["OSDP", "OptimalShardedDataParallel"]
__version__ = "0.1.0"

refuse_shadowed_packages()


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: the planner's commands start without it."""
    if name in __all__:
        from osdp import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
