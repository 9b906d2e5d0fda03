"""The links: a bridge in a namespace of its own, a veth pair to every node, and rates kept by HTB.

Both ends of every pair are made inside namespaces, so nothing is ever seen on the machine's own network.
A node's rate holds in each direction: its uplink is shaped where it leaves the node, its downlink where it
leaves the bridge, so many nodes that send to one share that one's rate.  What a node sends to itself, to its
own address too, goes over its loopback.

Why HTB: it sends the kernel's large segments (up to 64 KiB) whole and waits afterwards for as long as they
would have taken.  tbf cuts them to its burst, which costs CPU time and, with a burst small enough not to let
a small collective through unshaped, a part of the rate.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import RefusalError
from .linux import inside

UNITS_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SLOWEST_BITS, FASTEST_BITS = 10**5, 10**11
LONGEST_DELAY_S = 10.0
MOST_NODES = 64
BURST_S = 1e-4
"""What a link may send at once after a rest, as time at its rate: about how late a timer of the kernel fires."""
LEAST_BURST_BYTES = 2000
"""A frame of Ethernet, rounded up."""
INSTALL = "install iproute2 (Debian and Ubuntu: apt-get install iproute2)"


@dataclass(frozen=True)
class Links:
    """What the network of a cluster should be."""

    nodes: int
    """Number of nodes."""
    rate_bits_per_s: int | None
    """Between nodes, in each direction; None for as fast as the machine is."""
    intra_rate_bits_per_s: int | None
    """Inside a node, all its processes together; None for as fast as the machine is."""
    delay_s: float
    """Added to each way between nodes, 0 for none."""


def parse_rate(text: str) -> int | None:
    """Return bits per second for `200mbit`, `2.5gbit`, `64kbit`, or None for `none`."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.lower())
    rate = round(float(match[1]) * UNITS_BITS[match[2]]) if match else 0
    if not SLOWEST_BITS <= rate <= FASTEST_BITS:
        what = "not a rate that can be kept"
        advice = "--rate 200mbit (bits, not bytes: 25 megabytes a second)"
        raise RefusalError(what, got=text, expected="100kbit to 100gbit, or none", advice=advice)
    return rate


def format_rate(bits_per_s: int | None) -> str:
    """Return a rate for people."""
    if bits_per_s is None:
        return "no limit"
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 10**9 else f"{bits_per_s / 1e6:g} Mbit/s"


def parse_delay(text: str) -> float:
    """Return seconds for `200us`, `0.2ms`, `1s` or `0`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text) or re.fullmatch(r"(0)()", text)
    delay_s = float(match[1]) * UNITS_S.get(match[2], 1.0) if match else -1.0
    if not 0 <= delay_s <= LONGEST_DELAY_S:
        raise RefusalError("not a delay", got=text, expected="0 to 10s, in us, ms or s", advice="--delay 0.5ms")
    return delay_s


def parse_nodes(text: str) -> int:
    """Return the number of nodes."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_NODES:
        raise RefusalError("not a number of nodes", got=text, expected=f"1 to {MOST_NODES}", advice="--nodes 2")
    return int(text)


def address(node: int) -> str:
    """Return a node's address.  All have two digits at the end: torchrun ranks nodes by their addresses as text."""
    return f"10.231.77.{11 + node}"


def hosts_file(nodes: int) -> str:
    """Return an /etc/hosts with node0, node1, ...; also with addresses as IPv6 writes them, as PyTorch's store asks."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{prefix}{address(node)} node{node}" for node in range(nodes) for prefix in ("", "::ffff:")]
    return "\n".join(lines) + "\n"


def find(program: str) -> str:
    """Return where `ip` or `tc` is; a PATH of root may lack the folders of administration."""
    found = shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))
    if found is None:
        raise RefusalError(f"the program '{program}' is needed", got="none on PATH or in /usr/sbin", advice=INSTALL)
    return found


def call(program: str, words: str, *files: int, lacks: str = "") -> None:
    """Run `ip` or `tc`.  `files` stay open in it; `lacks` says what a failure probably means.

    Raises RefusalError, or PermissionError where root is not allowed it.
    """
    command = [find(program), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=files)
    if done.returncode:
        got = (done.stderr or done.stdout).strip().replace("\n", "; ") or f"exit status {done.returncode}"
        if "not permitted" in got:
            raise PermissionError(got)
        expected = "a kernel with veth, bridge and sch_htb, and a delay only with sch_netem"
        advice = "another kernel, or an option less: --rate none, no --delay"
        raise RefusalError(lacks or f"could not do: {program} {words}", got=got, expected=expected, advice=advice)


def make_switch() -> None:
    """Make the bridge, in the network namespace that we are in."""
    call("ip", "link set lo up")
    call("ip", "link add switch type bridge stp_state 0 forward_delay 0", lacks="this kernel makes no bridge")
    call("ip", "link set switch up")


def connect(node: int, network: int, links: Links) -> None:
    """Join a node, given the open file of its network namespace, to the bridge of the namespace that we are in."""
    port = f"port{node}"
    words = f"link add {port} type veth peer name eth0 netns /proc/self/fd/{network}"
    call("ip", words, network, lacks="this kernel makes no veth pair")
    _silence(port)
    call("ip", f"link set {port} master switch up")
    shape(port, links.rate_bits_per_s)
    with inside(network, "net"):
        call("ip", "link set lo up")
        _silence("eth0")
        call("ip", f"address add {address(node)}/24 dev eth0")
        call("ip", "link set eth0 up")
        shape("eth0", links.rate_bits_per_s, links.delay_s)
        shape("lo", links.intra_rate_bits_per_s)
        # Links rest while a step computes; TCP would then start slowly again, which no cluster for training lets it.
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")


def _silence(device: str) -> None:
    """Give a device no address of IPv6, which would talk on the link by itself."""
    if Path("/proc/sys/net/ipv6").exists():
        call("ip", f"link set {device} addrgenmode none")


def shape(device: str, rate_bits_per_s: int | None, delay_s: float = 0.0) -> None:
    """Limit what leaves a device, and delay it."""
    parent = "root"
    if rate_bits_per_s is not None:
        burst_bytes = max(LEAST_BURST_BYTES, round(rate_bits_per_s / 8 * BURST_S))
        call("tc", f"qdisc add dev {device} root handle 1: htb default 1", lacks="this kernel cannot shape with HTB")
        rates = f"rate {rate_bits_per_s}bit burst {burst_bytes} cburst {burst_bytes} quantum 60000"
        call("tc", f"class add dev {device} parent 1: classid 1:1 htb {rates}")
        parent = "parent 1:1"
    if delay_s:
        words = f"qdisc add dev {device} {parent} handle 10: netem delay {1e6 * delay_s:.0f}us limit 100000"
        call("tc", words, lacks="this kernel cannot delay: it has no netem")
