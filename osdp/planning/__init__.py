"""From a model and a cluster to a plan, and from a plan file back."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import what is asked for from `osdp.planning.request`: the modules beside it start without the planner."""
    from osdp.planning import request

    return getattr(request, name)
