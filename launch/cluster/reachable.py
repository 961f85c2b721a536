"""Tells whether machines reach one another: one listens at the port of the rendezvous, the others connect to it.

`python -m launch.cluster.reachable listen PORT SECONDS` and `... connect HOST:PORT`, each of which prints a word.
"""

import os
import socket
import sys
import threading
import time

CONNECT_SECONDS = 10.0


def listen(port: int, seconds: float) -> str | None:
    """Accept connections for a while; returns why that is not possible."""
    try:
        server = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        return f"port {port} cannot be opened ({error.strerror})"
    with server:
        print("listening", flush=True)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                server.accept()[0].close()
            except TimeoutError:
                break
    return None


def connect(place: str) -> str:
    """`connected`, or why not."""
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            return "connected"
    except OSError as error:
        return f"does not reach {place} ({error})"


def _end_with_the_connection() -> None:
    """A remote shell that is killed leaves its program running, which would keep the port."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_connection, daemon=True).start()
    if sys.argv[1] == "listen":
        print(listen(int(sys.argv[2]), float(sys.argv[3])) or "", flush=True)
    else:
        print(connect(sys.argv[2]), flush=True)
