"""What `--imbalance` takes: a coefficient of variation, or a file of lengths."""

import math
from pathlib import Path

from planner.cost.stragglers import Imbalance, histogram
from profiler.errors import OsdpError
from profiler.yaml_files import read_text

EXPECTED = "a coefficient of variation such as 0.5, or a file with one length in each line"


def read_imbalance(text: str) -> Imbalance:
    """Return the imbalance that the user gave as a number or as the path of a file.

    Raises OsdpError for a number that is negative or not finite, and for a file that cannot be read or
    has anything but one positive number in each line (empty lines are left out).
    """
    if not text.strip():
        raise OsdpError("the imbalance is empty", expected=EXPECTED)
    variation = _number(text)
    if variation is None:
        return _from_file(Path(text))
    if not 0 <= variation < math.inf:
        raise OsdpError("the imbalance is out of range", got=text, expected=f"at least 0 and finite: {EXPECTED}")
    return Imbalance(variation, source=f"coefficient of variation {variation:g}, given")


def lasting(text: str) -> str:
    """Return what means the same to `read_imbalance` from any folder: a number, or the whole path of a file."""
    return text if not text or _number(text) is not None else str(Path(text).absolute())


def _number(text: str) -> float | None:
    """Return the number that `text` is, or None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def _from_file(path: Path) -> Imbalance:
    if not path.exists():
        raise OsdpError("the imbalance is neither a number nor a file", got=str(path), expected=EXPECTED)
    lengths = lengths_in(path)
    return Imbalance(lengths=histogram(lengths), source=f"from {len(lengths):,} lengths in {path}")


def lengths_in(path: Path) -> list[float]:
    """Return the positive numbers in a file, one in each line; raises OsdpError for anything else but empty lines."""
    lengths = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        length = _number(line)
        if length is None or not 0 < length < math.inf:
            what = f"line {number} of {path} is not a length"
            raise OsdpError(what, got=line.strip()[:40], expected="one positive number in each line")
        lengths.append(length)
    if not lengths:
        raise OsdpError(f"{path} has no lengths", got="an empty file", expected="one length in each line")
    return lengths
