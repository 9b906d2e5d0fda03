"""Parses and formats amounts of memory.

`8GB` means 8 GiB = 8192 MiB: GPU vendors print powers of two and call them GB.
"""

import re

from profiler.errors import OsdpError

MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
ALLOCATION_BYTES = 512
"""The CUDA caching allocator allocates multiples of this (`kMinBlockSize` in c10/core/AllocatorConfig.h)."""

_UNITS = {"M": MIB, "MB": MIB, "MIB": MIB, "G": GIB, "GB": GIB, "GIB": GIB, "T": TIB, "TB": TIB, "TIB": TIB}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")
_LARGEST_BYTES = 1 << 60
_FORMS = "an amount such as 8GB, 7.5GiB or 512MB (8GB is 8192 MiB); a whole number alone is MB"


def parse_bytes(text: str | int) -> int:
    """Return the bytes that `text` means: `8GB`, `8GiB`, `8G`, `512MB`, `1TB`, or 8192 (MB).

    Raises OsdpError for anything else, for less than one byte and for more than 1 EiB.
    """
    error = OsdpError("this is not an amount of memory", got=repr(text), expected=_FORMS)
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise error
    match = _AMOUNT.fullmatch(str(text).strip())
    if match is None:
        raise error
    number, unit = match.groups()
    if unit and unit.upper() not in _UNITS:
        raise error
    if not unit and not number.isdecimal():
        raise OsdpError("an amount with a fraction needs a unit", got=repr(text), expected=_FORMS)
    amount_bytes = float(number) * _UNITS.get(unit.upper(), MIB)
    if not 1 <= amount_bytes <= _LARGEST_BYTES:
        raise OsdpError("memory must be from 1 byte to 1 EiB", got=repr(text), expected=_FORMS)
    return int(amount_bytes)


def allocated_bytes(size_bytes: int) -> int:
    """Return the bytes that the CUDA caching allocator allocates for a request of `size_bytes`."""
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def whole_mib(amount_bytes: float) -> int:
    """Return bytes, rounded up to whole MiB, the resolution of `--mem`."""
    return -(-round(amount_bytes) // MIB) * MIB


def format_bytes(amount_bytes: float) -> str:
    """Return `amount_bytes` as `7.87 GiB` or `512.0 MiB`; GiB from 1 GiB on."""
    if round(abs(amount_bytes) / MIB, 1) >= 1024:
        return f"{amount_bytes / GIB:.2f} GiB"
    return f"{amount_bytes / MIB:.1f} MiB"
