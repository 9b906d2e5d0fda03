"""Ranks of one machine that are reached from this machine alone: they meet and exchange on the loopback interface."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ADDRESS, INTERFACE = "127.0.0.1", "lo"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface that gloo listens on."""


def use_loopback() -> None:
    """Have gloo in the ranks to be started listen on the loopback interface, unless the user names another."""
    os.environ.setdefault(GLOO_INTERFACE, INTERFACE)


@contextmanager
def loopback_store() -> Iterator[str]:
    """Have a store in this process that only this machine reaches; gives its host:port.

    By itself a `TCPStore` listens on every interface, whatever its host name, and asks nobody for a password. Whoever
    makes another one for the same port in this process, as the agent does, gets this one (`multi_tenant`).
    """
    import torch.distributed as dist

    listener = socket.socket()
    listener.bind((ADDRESS, 0))
    port = listener.getsockname()[1]
    store_of: Any = dist.TCPStore  # type: ignore[attr-defined]
    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    store = store_of(ADDRESS, port, master_listen_fd=listener.detach(), **options)
    yield f"{ADDRESS}:{store.port}"
