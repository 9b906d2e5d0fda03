"""Settings for every test."""

from __future__ import annotations

from command_line import cli
from hypothesis import settings

__all__ = ["cli"]  # a fixture

# The same examples on every run, and no deadline: shared CI machines stall.
settings.register_profile("osdp", deadline=None, derandomize=True)
settings.load_profile("osdp")
