"""The command line: run and check."""

import argparse
import json
import os
import signal
import sys
from math import inf
from pathlib import Path
from subprocess import PIPE
from types import FrameType

from . import job, linux
from .cluster import Cluster, emulated
from .errors import RefusalError
from .network import Links, address, format_rate, parse_delay, parse_nodes, parse_rate

DESCRIPTION = """A cluster of several nodes emulated on one Linux machine; needs root and iproute2.

  run [--nodes N] [--rate RATE] -- CMD...   a command on every node of a cluster, which is gone afterwards
  check [--nodes N] [--rate RATE]           measured bandwidth and latency of such a cluster
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
    options, command = _parser().parse_args(arguments[:split]), arguments[split + 1 :]
    links = Links(options.nodes, options.rate, options.intra_rate, options.delay)
    if options.verb == "run":
        if not command:
            advice = "emulated_cluster.py run ... -- hostname"
            raise RefusalError("'run' needs a command", got="none after --", advice=advice)
        return job.run(links, command, timeout_s=options.timeout, grace_s=options.grace, pin=options.pin)
    if split < len(arguments):
        raise RefusalError("'check' takes no command", got=" ".join(arguments[split:]))
    _check(links)
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("emulated_cluster.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    run = verbs.add_parser("run", help="run a command on every node", usage="%(prog)s [OPTION]... -- CMD...")
    check = verbs.add_parser("check", help="measure bandwidth and latency", usage="%(prog)s [OPTION]...")
    for one in (run, check):
        one.add_argument("--nodes", type=parse_nodes, default=2, help="how many (default: 2)")
        text = "between nodes, each way, or none (default: 200mbit)"
        one.add_argument("--rate", type=parse_rate, default="200mbit", help=text)
        text = "inside a node (default: none)"
        one.add_argument("--intra-rate", type=parse_rate, default="none", metavar="RATE", help=text)
        text = "added to each way between nodes, e.g. 0.5ms; needs netem"
        one.add_argument("--delay", type=parse_delay, default=0.0, help=text)
    run.add_argument("--pin", action="store_true", help="give each node cores of its own")
    run.add_argument("--timeout", type=_seconds, metavar="S", default=inf, help="stop all nodes after S seconds")
    text = "how long the other nodes may run on after the first failed (default: 10 seconds)"
    run.add_argument("--grace", type=_seconds, metavar="S", default=10.0, help=text)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < inf:
        raise RefusalError("not a time", got=text, expected="a number of seconds above 0", advice="--timeout 60")
    return seconds


def _check(links: Links) -> None:
    """Measure node 0 with itself, and with each other node in both directions."""
    with emulated(links) as cluster:
        print(f"{'from':6} {'to':6} {'link':6} {'measured':>15} {'set':>13} {'round trip':>12}")
        intra, inter = ("intra", links.intra_rate_bits_per_s), ("inter", links.rate_bits_per_s)
        others = range(1, links.nodes)
        for source, target in ((0, 0), *((node, 0) for node in others), *((0, node) for node in others)):
            bits_per_s, round_trip_s = _measure(cluster, source, target)
            link, rate = intra if source == target else inter
            print(
                f"node{source:<2} node{target:<2} {link:6} {bits_per_s / 1e6:8.1f} Mbit/s {format_rate(rate):>13} "
                f"{1e6 * round_trip_s:9.0f} us",
                flush=True,
            )


def _measure(cluster: Cluster, source: int, target: int) -> tuple[float, float]:
    """Return bits per second and seconds of a round trip from one node to another."""
    program = [sys.executable, str(Path(__file__).with_name("tcp_stream.py"))]
    server = cluster.start(target, [*program, "serve", address(target)])
    client = cluster.start(source, [*program, "send", address(target)], output=PIPE)
    text, errors = client.communicate()
    if client.returncode or server.wait():
        raise RefusalError(f"node{source} and node{target} could not be measured", got=errors.decode().strip())
    bits_per_s, round_trip_s = json.loads(text)
    return bits_per_s, round_trip_s
