"""Where nodes that come and go meet: a store at the rendezvous endpoint, and torch's c10d rendezvous."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from profiler.errors import OsdpError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

LAST_CALL_S = 30.0
"""How long nodes wait for more of them, once there are as many as are needed."""


@dataclass(frozen=True)
class Meeting:
    """How this node meets the others in a round."""

    least: int
    """Nodes that are needed."""
    address: str
    """Of this node, for the others."""
    has_store: bool
    """Whether the store is in this process."""
    round: int = 0

    def set_up(self, settings: LaunchConfig, timeout_s: float) -> None:
        """Let the agent's nodes meet by the c10d rendezvous; each round is one of its own."""
        settings.min_nodes, settings.run_id, settings.local_addr = self.least, f"osdp-{self.round}", self.address
        settings.rdzv_backend = "c10d"
        last_call_s = max(1, round(min(LAST_CALL_S, timeout_s)))
        settings.rdzv_configs = {
            "join_timeout": round(timeout_s) + 2 * last_call_s,
            "last_call_timeout": last_call_s,
            "is_host": self.has_store,
        }
        # The agent keeps the address of a store that it shares with the ranks for all rendezvous of a round, though
        # a node that joins, or another order of nodes, may give another one (torch 2.13, read). Rank 0 makes a new one.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def join_store(endpoint: str, timeout_s: float) -> tuple[Any, bool]:
    """Return the store at an endpoint, and whether it is in this process.

    It is made here if that is an address of this machine and nobody has the port. Raises OsdpError.
    """
    import torch.distributed as dist

    host, port = _parts(endpoint)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    if _is_here(host):
        with suppress(dist.DistNetworkError):  # Another node of this machine has it.
            return make(host, port, None, True, timeout, wait_for_workers=False, multi_tenant=True), True
    try:
        return make(host, port, None, False, timeout, wait_for_workers=False), False
    except dist.DistError as error:
        got = f"{endpoint}: {str(error).splitlines()[0]}"
        advice = "start the command on that machine too; is the port free, and open to the others?"
        raise OsdpError("the rendezvous endpoint cannot be reached", got=got, advice=advice) from None


def address_towards(endpoint: str) -> str:
    """Return the address of this machine on the way to an endpoint; nothing is sent."""
    host, port = _parts(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        what = "the rendezvous endpoint is no address that this machine knows"
        raise OsdpError(what, got=f"{endpoint}: {error}", expected="HOST:PORT of one of the nodes") from None


def _is_here(host: str) -> bool:
    """Whether a host is this machine: its address can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
