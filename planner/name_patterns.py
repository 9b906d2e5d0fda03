"""Matches operators and blocks by name: a module's path, that of a module around it, or a pattern."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from profiler.errors import OsdpError


def around(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it: `h.0.mlp`, `h.0`, `h`."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern such as `h.*.mlp` matches a module, by its own path or by that of a module around it.

    The model itself has the empty path, which `*` matches too.
    """
    return any(module == pattern or fnmatchcase(module, pattern) for module in (path, *around(path)))


def unknown_name(name: str, known: Iterable[str], what: str) -> OsdpError:
    """Return the error for an unknown name, with the closest known ones."""
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    examples = ", ".join(near) if near else f"a name such as {known[0]}" if known else "no name: the model has none"
    advice = "a module's path as in named_modules(), or a pattern such as '*.mlp.*'"
    return OsdpError(what, got=name, expected=examples, advice=advice)
