"""The command line: run and check."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from math import inf
from types import FrameType

from . import job, linux, probe
from .cluster import temporary
from .errors import RefusalError
from .network import Links, format_rate, parse_delay, parse_nodes, parse_rate

DESCRIPTION = """A cluster of several nodes emulated on one Linux machine; needs root and iproute2.

  run [--nodes N] [--rate RATE] -- CMD...   run a command on every node of a cluster, which ends with it
  check [--nodes N] [--rate RATE]           measure the bandwidth and latency of such a cluster
"""
EPILOG = """exit status: that of CMD, of the first node that failed if there are several; 124 after --timeout; 2 for bad
input; 128 + n when stopped by signal n"""
STATUS_REFUSED, STATUS_PIPE = 2, 128 + signal.SIGPIPE


class StoppedError(BaseException):
    """A signal asked us to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(arguments: list[str]) -> int:
    """Run a command line and return its exit status."""
    before = {number: signal.signal(number, _stop) for number in linux.STOPPING}
    try:
        return _dispatch(arguments)
    except RefusalError as refusal:
        print(f"emulated_cluster: {refusal}", file=sys.stderr)
        return STATUS_REFUSED
    except StoppedError as stopped:
        job.note(f"stopped by {signal.Signals(stopped.number).name}")
        return 128 + stopped.number
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
        return STATUS_PIPE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """End in order at the first signal; at the second at once, which ends all that runs too."""
    for each in linux.STOPPING:
        signal.signal(each, lambda again, _: os._exit(128 + again))
    raise StoppedError(number)


def _dispatch(arguments: list[str]) -> int:
    """Parse and do."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    options.command = arguments[split + 1 :]
    if options.takes_command and not options.command:
        raise RefusalError(
            f"'{options.verb}' needs a command",
            got="none after --",
            advice=f"emulated_cluster.py {options.verb} ... -- hostname",
        )
    if not options.takes_command and split < len(arguments):
        raise RefusalError(f"'{options.verb}' takes no command", got=" ".join(arguments[split:]))
    status: int = options.does(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "emulated_cluster.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def verb(name: str, does: object, text: str, *, takes_command: bool) -> argparse.ArgumentParser:
        usage = f"%(prog)s [OPTION]...{' -- CMD...' if takes_command else ''}"
        one = verbs.add_parser(name, help=text, description=text, allow_abbrev=False, usage=usage)
        one.set_defaults(does=does, takes_command=takes_command)
        one.add_argument("--nodes", type=parse_nodes, default=2, help="number of nodes (default: 2)")
        one.add_argument("--rate", type=parse_rate, default="200mbit", help="between nodes, in each direction, or none")
        one.add_argument("--intra-rate", metavar="RATE", type=parse_rate, default="none", help="inside a node")
        delay = "added to each direction between nodes, e.g. 0.5ms; needs the kernel module sch_netem"
        one.add_argument("--delay", type=parse_delay, default=0.0, help=delay)
        return one

    run = verb("run", _run, "run a command on every node", takes_command=True)
    run.add_argument("--pin", action="store_true", help="give each node CPU cores of its own")
    run.add_argument("--timeout", type=_seconds, metavar="S", default=inf, help="stop all nodes after so many seconds")
    grace = "seconds that the other nodes have after the first failed (default: 10)"
    run.add_argument("--grace", type=_seconds, metavar="S", default=10.0, help=grace)
    verb("check", _check, "measure bandwidth and latency", takes_command=False)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < inf:
        raise RefusalError("not a time", got=text, expected="a number of seconds above 0", advice="--timeout 60")
    return seconds


def _links(options: argparse.Namespace) -> Links:
    return Links(options.nodes, options.rate, options.intra_rate, options.delay)


def _run(options: argparse.Namespace) -> int:
    with temporary(_links(options)) as cluster:
        return job.run(cluster, options.command, timeout_s=options.timeout, grace_s=options.grace, pin=options.pin)


def _check(options: argparse.Namespace) -> int:
    links = _links(options)
    with temporary(links) as cluster:
        print(f"{'from':6} {'to':6} {'link':6} {'measured':>15} {'set':>13} {'round trip':>12}")
        for one in probe.measure(cluster):
            inside = one.source == one.target
            rate = links.intra_rate_bits_per_s if inside else links.rate_bits_per_s
            print(
                f"node{one.source:<2} node{one.target:<2} {'intra' if inside else 'inter':6} "
                f"{one.bits_per_s / 1e6:8.1f} Mbit/s {format_rate(rate):>13} "
                f"{1e6 * one.round_trip_s:9.0f} us",
                flush=True,
            )
    return 0
