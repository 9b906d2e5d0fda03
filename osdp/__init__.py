"""OSDP: finds the fastest parallel strategy that fits, and runs it on PyTorch."""

from __future__ import annotations

from osdp._shadowing import refuse_shadowed_packages

__version__ = "0.1.0"

refuse_shadowed_packages()
