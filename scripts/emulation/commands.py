"""The command line: up, run, exec, check, status and down."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from math import inf
from types import FrameType

from . import job, linux, nodes, probe, registry
from .cluster import Cluster, require_machine, temporary
from .errors import RefusalError
from .network import Links, address, format_rate, parse_delay, parse_nodes, parse_rate

DESCRIPTION = """A cluster of several nodes emulated on one Linux machine; needs root and iproute2.

  run [--nodes N] [--rate RATE] -- CMD...   a cluster for one command on every node, then gone
  up [NAME]                                 a cluster that stays until 'down'
  run --on NAME -- CMD...                   a command on every node of it
  exec NODE [--on NAME] -- CMD...           a command on one node of it
  check [NAME]                              its measured bandwidth and latency
  status [NAME], down [NAME]
"""
EPILOG = """exit status: that of CMD, of the first node that failed if there are several; 124 after --timeout; 2 for bad
input; 128 + n when stopped by signal n"""
DEFAULT_NAME = "emulated"
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

    def verb(name: str, does: object, text: str, *, name_given: bool, takes_command: bool) -> argparse.ArgumentParser:
        one = verbs.add_parser(
            name,
            help=text,
            description=text,
            allow_abbrev=False,
            usage=f"%(prog)s [OPTION]...{' -- CMD...' if takes_command else ''}",
        )
        one.set_defaults(does=does, takes_command=takes_command)
        if name_given:
            one.add_argument("name", nargs="?", metavar="NAME", default=None if name == "status" else DEFAULT_NAME)
        return one

    up = verb("up", _up, "make a cluster that stays", name_given=True, takes_command=False)
    run = verb("run", _run, "run a command on every node", name_given=False, takes_command=True)
    for one in (up, run):
        one.add_argument("--nodes", type=parse_nodes, help="how many (default: 2)")
        one.add_argument("--rate", help="between nodes, in each direction, or none (default: 200mbit)")
        one.add_argument("--intra-rate", metavar="RATE", help="inside a node (default: none, as fast as it goes)")
        one.add_argument("--delay", type=parse_delay, help="added to each way between nodes, e.g. 0.5ms; needs netem")
    run.add_argument("--on", metavar="NAME", help="use a cluster that is up, instead of one for this run")
    run.add_argument("--pin", action="store_true", help="give each node cores of its own")
    run.add_argument("--timeout", type=_seconds, metavar="S", default=inf, help="stop all after so many seconds")
    run.add_argument(
        "--grace",
        type=_seconds,
        metavar="S",
        default=10.0,
        help="what the other nodes have after the first failed (default: 10 seconds)",
    )
    execute = verb("exec", _exec, "run a command on one node", name_given=False, takes_command=True)
    execute.add_argument("node", metavar="NODE", help="0, 1, ...")
    execute.add_argument("--on", metavar="NAME", default=DEFAULT_NAME)
    verb("check", _check, "measure bandwidth and latency", name_given=True, takes_command=False)
    verb("status", _status, "show clusters and what runs in them", name_given=True, takes_command=False)
    verb("down", _down, "end a cluster and all that runs in it", name_given=True, takes_command=False)
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
    """Return the network that was asked for, with the defaults."""
    rate, intra_rate = (
        default if text is None else text for text, default in ((options.rate, "200mbit"), (options.intra_rate, "none"))
    )
    return Links(options.nodes or 2, parse_rate(rate), parse_rate(intra_rate), options.delay or 0.0)


def _up(options: argparse.Namespace) -> int:
    links = _links(options)
    require_machine()
    registry.up(options.name, links)
    print(f"cluster {options.name}: {links.describe()}")
    return 0


def _run(options: argparse.Namespace) -> int:
    how = {"timeout_s": options.timeout, "grace_s": options.grace, "pin": options.pin}
    if options.on is None:
        with temporary(_links(options)) as cluster:
            return job.run(cluster, options.command, **how)
    words = {
        "--nodes": options.nodes,
        "--rate": options.rate,
        "--intra-rate": options.intra_rate,
        "--delay": options.delay,
    }
    given = [word for word, value in words.items() if value is not None]
    if given:
        raise RefusalError(
            f"the cluster '{options.on}' is there already and stays as it is",
            got=" ".join(given),
            advice=f"'down {options.on}', then 'up {options.on}' with them; or without",
        )
    require_machine()
    cluster = registry.load(options.on)
    with registry.alone(options.on):
        return job.run(cluster, options.command, **how)


def _exec(options: argparse.Namespace) -> int:
    require_machine()
    cluster = registry.load(options.on)
    if not options.node.isdecimal() or int(options.node) >= cluster.links.nodes:
        raise RefusalError("no such node", got=options.node, expected=f"0 to {cluster.links.nodes - 1}")
    terminal = sys.stdin.isatty()
    if terminal:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's
    node = int(options.node)
    variables = nodes.environment(cluster, node, f"exec-{os.getpid()}")
    gate = nodes.start(cluster, node, nodes.program(options.command, variables, terminal=terminal))
    return linux.exit_status(os.waitpid(gate, 0)[1])


def _check(options: argparse.Namespace) -> int:
    require_machine()
    cluster = registry.load(options.name)
    print(f"{'from':6} {'to':6} {'link':6} {'measured':>15} {'set':>13} {'round trip':>12}")
    with registry.alone(options.name):
        for one in probe.measure(cluster):
            inside = one.source == one.target
            rate = cluster.links.intra_rate_bits_per_s if inside else cluster.links.rate_bits_per_s
            print(
                f"node{one.source:<2} node{one.target:<2} {'intra' if inside else 'inter':6} "
                f"{one.bits_per_s / 1e6:8.1f} Mbit/s {format_rate(rate):>13} "
                f"{1e6 * one.round_trip_s:9.0f} us",
                flush=True,
            )
    return 0


def _status(options: argparse.Namespace) -> int:
    require_machine()
    names = [options.name] if options.name else registry.names()
    if not names:
        print("no cluster is up")
    for name in names:
        try:
            _show(registry.load(name))
        except RefusalError as refusal:
            if options.name:
                raise
            print(refusal)
    return 0


def _show(cluster: Cluster) -> None:
    print(f"cluster {cluster.name}: {cluster.links.describe()}; keeper is process {cluster.keeper}")
    for node in range(cluster.links.nodes):
        running = ", ".join(map(str, cluster.processes(node))) or "none"
        print(f"  node{node}  {address(node)}  processes: {running}")


def _down(options: argparse.Namespace) -> int:
    require_machine()
    found = registry.down(options.name)
    print(f"cluster {options.name}: {'gone' if found else 'there was none'}")
    return 0
