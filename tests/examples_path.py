"""Lets tests import the programs of examples/, as `cd examples && PYTHONPATH=. ...` does."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
