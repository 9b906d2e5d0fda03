"""The command line: `osdp plan`, `osdp explain`, `osdp diff`, `osdp train`, `osdp models`, `osdp clusters`.

Everything heavy is imported by the command that needs it, so that `osdp --help` is quick.
"""

from __future__ import annotations

import time

STARTED_S = time.perf_counter()
"""When the command line was loaded; what "since start" counts from."""


def main() -> int:
    """Run the command in `sys.argv` and return its exit status; see `osdp.cli.exits`."""
    from osdp.cli.exits import run_app

    return run_app()
