"""The command line: the `osdp` command.

Everything heavy is imported by the command that needs it, so that `osdp --help` is quick.
"""

import gc

from osdp.cli.exits import run_program


def main() -> int:
    """Run the command in `sys.argv` and return its exit status; see `osdp.cli.exits`."""
    try:
        return run_program(_run)
    finally:
        gc.freeze()  # The process ends: a last collection would walk through all of torch.


def _run() -> None:
    from osdp.cli.app import command  # here, so that an interrupted import ends as any command does

    command()(prog_name="osdp")
