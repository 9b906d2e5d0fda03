"""The strategies that an operator can take: one file each, found by `planner.strategies.registry`."""

from planner.strategies import registry as registry
