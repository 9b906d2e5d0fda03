"""What a TCP connection gets: bandwidth of one stream, and the round trip of one byte."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from . import linux
from .cluster import Cluster
from .errors import RefusalError
from .network import address
from .nodes import start

PORT = 28999
CHUNK_BYTES = 1 << 18
MEASURED_S = 0.5
"""How long a stream is measured, as estimated by a shorter one."""
ROUND_TRIPS = 50
HEADER_BYTES = 8
"""Length of the number before a message, which says how many bytes follow; each is answered by one byte."""


@dataclass(frozen=True)
class Measured:
    """One direction between two nodes."""

    source: int
    """Node that sends."""
    target: int
    """Node that receives."""
    bits_per_s: float
    """Payload of one stream."""
    round_trip_s: float
    """Median for one byte there and one back."""


def measure(cluster: Cluster) -> list[Measured]:
    """Return node 0 with itself, and with each other node in both directions."""
    others = range(1, cluster.links.nodes)
    pairs = [(0, 0), *((node, 0) for node in others), *((0, node) for node in others)]
    return [_pair(cluster, source, target) for source, target in pairs]


def _pair(cluster: Cluster, source: int, target: int) -> Measured:
    """Serve in one node, send from another, and read what it measured."""
    listening, listens = os.pipe()
    server = start(cluster, target, lambda: _serve(address(target), listens))
    os.close(listens)
    os.read(listening, 1)  # or nothing, if the server ended
    os.close(listening)
    answer, question = os.pipe()
    client = start(cluster, source, lambda: _tell(question, lambda: _send(address(target))))
    os.close(question)
    with os.fdopen(answer) as pipe:
        text = pipe.read()
    statuses = [linux.exit_status(os.waitpid(pid, 0)[1]) for pid in (client, server)]
    if any(statuses) or not text:
        raise RefusalError(
            f"node{source} and node{target} could not be measured",
            got=f"exit statuses {statuses}",
            advice="'status' shows what runs; 'down' and 'up' make the cluster anew",
        )
    return Measured(source, target, *json.loads(text))


def _tell(question: int, body: Callable[[], tuple[float, float]]) -> int:
    os.write(question, json.dumps(body()).encode())
    return 0


def _serve(host: str, listens: int) -> int:
    """Answer one connection until it is closed."""
    with socket.create_server((host, PORT)) as server:
        server.settimeout(30)
        os.write(listens, b"1")
        connection, _ = server.accept()
    buffer = bytearray(CHUNK_BYTES)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := connection.recv(HEADER_BYTES, socket.MSG_WAITALL):
            left = int.from_bytes(header, "little")
            while left:
                received = connection.recv_into(buffer, min(left, CHUNK_BYTES))
                if not received:
                    return 1
                left -= received
            connection.sendall(b"1")
    return 0


def _send(host: str) -> tuple[float, float]:
    """Return bits per second and seconds of a round trip."""
    with socket.create_connection((host, PORT), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size_bytes = CHUNK_BYTES
        elapsed_s = _message(connection, size_bytes)
        while elapsed_s < MEASURED_S / 10:  # find a size that takes long enough to go by
            size_bytes *= 2
            elapsed_s = _message(connection, size_bytes)
        size_bytes = max(size_bytes, round(size_bytes * MEASURED_S / elapsed_s))
        bits_per_s = 8 * size_bytes / _message(connection, size_bytes)
        return bits_per_s, median(_message(connection, 1) for _ in range(ROUND_TRIPS))


def _message(connection: socket.socket, size_bytes: int) -> float:
    """Send so many bytes and return the seconds until they are acknowledged."""
    chunk = bytes(min(size_bytes, CHUNK_BYTES))
    began_s = time.perf_counter()
    connection.sendall(size_bytes.to_bytes(HEADER_BYTES, "little") + chunk)
    for sent_bytes in range(len(chunk), size_bytes, CHUNK_BYTES):
        connection.sendall(chunk[: size_bytes - sent_bytes])
    connection.recv(1)
    return time.perf_counter() - began_s
