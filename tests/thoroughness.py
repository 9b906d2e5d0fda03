"""How much a test draws: enough for every change, or with `sh scripts/test.sh --thorough` all there is."""

from __future__ import annotations

import os

VARIABLE = "OSDP_TEST_THOROUGH"
"""Environment variable that tests/conftest.py sets for the option."""
THOROUGH = VARIABLE in os.environ


def draws(count: int) -> int:
    """Return how many examples to draw where `count` are enough for every change."""
    return 10 * count if THOROUGH else count
