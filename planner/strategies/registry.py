"""Finds the strategies: every file of this folder that has a `SPEC`, in the order in which the search prefers them."""

import pkgutil
import sys
from dataclasses import replace
from importlib import import_module

from planner.strategies.spec import SPECS, Strategy, StrategySpec
from profiler.cluster.cluster import Cluster


def register(spec: StrategySpec) -> None:
    """Add a strategy, or put it in place of the one of that name."""
    specs = sorted([*(other for other in SPECS.values() if other.name != spec.name), spec], key=lambda s: s.preference)
    SPECS.clear()
    SPECS.update((each.name, each) for each in specs)


def find() -> None:
    """Register the strategies of this package's folders."""
    for module in pkgutil.iter_modules(sys.modules[__package__].__path__, f"{__package__}."):
        if module.name != __name__ and (spec := getattr(import_module(module.name), "SPEC", None)) is not None:
            register(spec)


def known_strategies(cluster: Cluster) -> tuple[Strategy, ...]:
    """Return every strategy that a plan for the cluster can name: first without, then with offload."""
    on_device = tuple(strategy for spec in SPECS.values() for strategy in spec.on(cluster))
    return on_device + tuple(replace(strategy, offload=True) for strategy in on_device)


def strategies_on(cluster: Cluster, uneven: bool = False) -> tuple[Strategy, ...]:
    """Return every strategy that the search offers on the cluster, in the order of preference.

    Each is also offered with offload, after all those without, if the cluster has figures of the host.  `uneven` says
    whether micro-batches differ (`StrategySpec.offered`).
    """
    known = [strategy for strategy in known_strategies(cluster) if cluster.host or not strategy.offload]
    return tuple(strategy for strategy in known if strategy.spec.offered(strategy, uneven))


find()
