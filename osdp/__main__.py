"""The command line as a program: `python -m osdp`, where the `osdp` command is not on the path, and what ranks run.

The current folder comes last on `sys.path`: a `yaml.py` or `torch.py` there is not taken for the library's, and the
user's own model is found.  `python -m` puts it first; ranks run this file with `-P`, which leaves it out.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path


def _find_own_packages() -> None:
    """Import the packages beside this file from there, when it runs as a script: another OSDP may be installed."""
    home = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, home)
    for name in ("osdp", "planner", "profiler", "runtime"):
        import_module(name)
    sys.path.remove(home)


def _put_current_folder_last() -> None:
    with suppress(OSError):  # a folder that is gone
        here = os.getcwd()
        if not sys.flags.safe_path and sys.path[:1] == [here]:
            del sys.path[0]
        sys.path.append(here)


if __name__ == "__main__":
    if not __package__:
        _find_own_packages()
    _put_current_folder_last()
    from osdp.cli import main

    raise SystemExit(main())
