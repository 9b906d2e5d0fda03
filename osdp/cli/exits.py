"""How a command ends: what it prints on stderr, and the exit status.

    0    done
    1    a check did not hold, or a fault of OSDP itself or of the machine
    2    bad input, or no plan fits
    130  interrupted by the user
    141  stdout was closed (`| head`); a shell's status for SIGPIPE

`OSDP_TRACEBACK=1` shows where an error was raised.
"""

import io
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from osdp.cli.terminal import say
from profiler.errors import FaultError, OsdpError

FAULT, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
TRACEBACK = "OSDP_TRACEBACK"

Arguments = ParamSpec("Arguments")


def run_program(program: Callable[[], None]) -> int:
    """Run the whole command line, `program`, and return its exit status."""
    # Where the caller has closed them (`>&-`), Python has none.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    with _short_warnings():
        try:
            return status_of(program)
        except SystemExit as done:
            # From the option parser, which has printed what is wrong, or from `guarded`.
            return done.code if isinstance(done.code, int) else BAD_INPUT if done.code else 0


def guarded(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Make a command end with its exit status instead of an exception."""

    @wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        status = status_of(lambda: command(*args, **kwargs))
        if status:
            raise SystemExit(status)

    return run


def status_of(work: Callable[[], None]) -> int:
    """Do the work, print errors on stderr, and return the exit status."""
    try:
        work()
        sys.stdout.flush()  # Now, while an error can still be reported.
    except OsdpError as error:
        _say_why(f"error: {error}")
        return FAULT if isinstance(error, FaultError) else BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except OSError as error:
        _drop_stdout()
        _say_why(f"error: {error}")
        return FAULT
    except Exception as error:
        again = "" if os.environ.get(TRACEBACK) else f"\n  try: {TRACEBACK}=1 in the environment shows the traceback"
        _say_why(f"error: unexpected {type(error).__name__}: {error}\n  this is a bug in OSDP{again}")
        return FAULT
    return 0


def _drop_stdout() -> None:
    """Let what is still to be written go nowhere: Python flushes stdout once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_why(text: str) -> None:
    """Print a message to stderr, after the traceback of the current exception if that is wanted."""
    if os.environ.get(TRACEBACK):
        traceback.print_exc()
    say(text)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Show warnings as one line that is for the user, without our source code; and none of other libraries' own."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    ours = tuple(
        f"{Path(__file__).parents[2] / package}{os.sep}" for package in ("osdp", "planner", "profiler", "runtime")
    )

    def show(message: object, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if filename.startswith(ours) or not filename.startswith(libraries):
            say(f"warning: {message}", file)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
