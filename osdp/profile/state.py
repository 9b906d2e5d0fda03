"""What a profile has measured so far, in a file that a later run takes up.

The file stands beside the profile that it becomes, and goes when that is written.  It is for one
question: the same ranks, options and versions; anything else starts afresh.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osdp.profile.lines import is_sound
from profiler.errors import OsdpError
from profiler.yaml_files import read_text, write_text_atomic

SCHEMA = "osdp.profile_state/1"


@dataclass
class State:
    """Results by part; plain data only."""

    question: dict[str, Any]
    """What is measured: a file of another question is not taken up."""
    path: Path | None = None
    """Where it is kept; None on ranks that keep nothing."""
    parts: dict[str, Any] = field(default_factory=dict)
    """By name of the part."""

    def put(self, name: str, value: Any) -> None:
        """Add a part and keep it."""
        self.parts[name] = value
        if self.path is not None:
            text = json.dumps({"schema": SCHEMA, "question": self.question, "parts": self.parts})
            write_text_atomic(self.path, text)

    def drop(self) -> None:
        """Forget what was kept: the profile is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def state_path(output: Path) -> Path:
    """Return where the state of a profile is kept."""
    return output.with_name(output.name + ".partial")


def take_up(output: Path, question: dict[str, Any], restart: bool) -> tuple[State, str]:
    """Return the state to go on from, and what to tell the user of it (empty: nothing was there)."""
    path = state_path(output)
    fresh = State(question, path)
    if restart or not path.exists():
        return fresh, ""
    try:
        data = json.loads(read_text(path))
        schema, parts = data["schema"], data["parts"]
    except (OsdpError, ValueError, KeyError, TypeError):
        return fresh, f"{path} is not whole: starting afresh"
    # JSON has no tuples and no integer keys: compare as it would be read again.
    if schema != SCHEMA or data.get("question") != json.loads(json.dumps(question)):
        return fresh, f"{path} is of another question: starting afresh"
    # Other parts are checked when they are taken: a wrong one is measured again.
    if not isinstance(parts, dict) or ("communication" in parts and not is_sound(parts["communication"])):
        return fresh, f"{path} is not whole: starting afresh"
    return State(question, path, parts), f"going on from {path}: {', '.join(parts)} measured before"
