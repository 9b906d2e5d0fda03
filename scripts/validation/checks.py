"""All checks, in the order in which they run."""

from __future__ import annotations

from validation import machine
from validation.check import Check

CHECKS = (Check(1, "versions, driver, L2 cache, P2P and NVLink matrix", "recorded", machine.record, 60.0),)
