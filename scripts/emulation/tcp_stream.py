"""What a TCP connection gets: `tcp_stream.py serve HOST` in one node, and in another `tcp_stream.py send HOST`.

The latter prints, as JSON, bits per second of one stream and seconds of a round trip of one byte.
"""

import json
import socket
import sys
import time
from statistics import median

PORT = 28999
CHUNK_BYTES = 1 << 18
MEASURED_S = 0.5
"""How long a stream is measured, as estimated by a shorter one."""
ROUND_TRIPS = 50
HEADER_BYTES = 8
"""Length of the number before a message, which says how many bytes follow; each is answered by one byte."""
CONNECT_S = 30.0
"""How long one waits for the other to be there."""


def serve(host: str) -> None:
    """Answer one connection until it is closed."""
    with socket.create_server((host, PORT)) as server:
        server.settimeout(CONNECT_S)
        connection, _ = server.accept()
    buffer = bytearray(CHUNK_BYTES)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while header := connection.recv(HEADER_BYTES, socket.MSG_WAITALL):
            left = int.from_bytes(header, "little")
            while left:
                received = connection.recv_into(buffer, min(left, CHUNK_BYTES))
                if not received:
                    raise ConnectionError("the sender is gone")
                left -= received
            connection.sendall(b"1")


def send(host: str) -> tuple[float, float]:
    """Return bits per second and seconds of a round trip."""
    until_s = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection((host, PORT), timeout=60)
            break
        except ConnectionRefusedError:  # the other is not there yet
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
    with connection:
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


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(send(sys.argv[2])))
