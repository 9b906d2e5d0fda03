"""Checks that `planner`, `profiler` and `runtime` are OSDP's own.

Their names are common.  A user's `profiler.py` beside the training script comes first on
`sys.path`, and imports inside OSDP would then fail far from the cause.  The check looks the
packages up without importing them, so `import osdp` stays light.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from osdp.plain_text import plain

PACKAGES = ("planner", "profiler", "runtime")
"""Top-level packages that OSDP brings beside itself."""

EXIT_BAD_INPUT = 2


def refuse_shadowed_packages() -> None:
    """Stop the import of osdp where Python would take another package for one of its own.

    Raises ImportError; when osdp is the program itself, prints the message and exits with 2.
    """
    problem = find_shadow()
    if problem is None:
        return
    if _is_program():
        print(plain(problem), file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)
    raise ImportError(problem)


def find_shadow() -> str | None:
    """Return a message on the first of `PACKAGES` that is not the one beside osdp, or None."""
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        location = _location(name)
        if location is None:
            return f"OSDP's package `{name}` is missing\n  expected: {home / name}\n  try: install OSDP again"
        if location != home / name:
            return (
                f"{location} shadows OSDP's package `{name}`\n"
                f"  expected: {home / name}\n"
                "  try: rename it; or, if this program does not need it, run from another directory, or with "
                "`python -P`, which leaves the script's directory off sys.path"
            )
    return None


def _location(name: str) -> Path | None:
    """Return the folder of the package, or the file of the module, that `import name` gives."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__spec__", None) is None:
        # Made by hand, or loaded by a tool that sets no spec; `find_spec` would refuse it.
        return _folder_or_file(getattr(module, "__file__", None) or f"<module {name}>")
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.origin:
        return _folder_or_file(spec.origin)
    # No file: a namespace package, that is, a folder without an __init__.py.
    return Path(next(iter(spec.submodule_search_locations or ()), f"<module {name}>")).resolve()


def _folder_or_file(origin: str) -> Path:
    """Return the folder of a package's `__init__`, or the file itself of a plain module."""
    file = Path(origin).resolve()
    return file.parent if file.stem == "__init__" else file


def _is_program() -> bool:
    """Whether osdp is being imported as the program: the `osdp` command or `python -m osdp`.

    While `python -m` imports the package that it is to run, `sys.argv[0]` is still "-m".
    """
    program = sys.argv[0] if sys.argv else ""
    return program == "-m" or Path(program).stem == "osdp"
