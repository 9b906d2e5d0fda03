"""From a model and a cluster to a plan, and from a plan file back."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    **dict.fromkeys(("Planned", "Request", "plan_model"), "request"),
    **dict.fromkeys(("read_plan", "reopen", "write_plan"), "plan_file"),
    **dict.fromkeys(("default_cluster", "memory_limit"), "clusters"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: most modules of this package start without the planner."""
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
