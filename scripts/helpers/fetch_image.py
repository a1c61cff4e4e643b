"""Fetch an image from a public web address: the URL comes on stdin, the bytes go to stdout.

    echo https://example.org/cat.png | python fetch_image.py > cat.png

start-llm.py runs it for http(s) image URLs while ALLOW_REMOTE_IMAGES is on: in a process of its
own it can be ended at any moment. It never connects to an address that is not public; which
address that is, is decided once, before the connection, so that a name cannot change in between
(DNS rebinding). What it cannot fetch it says in one sentence on stderr, with exit status 1.
"""

import math
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

MAX_BYTES: Final = 20_971_520  # of the image (20 MiB)
MAX_SECONDS: Final = 10.0  # for all of it, redirects included
MAX_REDIRECTS: Final = 3
PORTS: Final = {"http": 80, "https": 443}
# What IANA's registries of special-purpose addresses (and multicast) leave of the two internets.
PUBLIC: Final = (ip_network("0.0.0.0/0"), ip_network("2000::/3"))
# Of IPv6: what tunnels (6to4, Teredo) reach IPv4 by, and documentation.
SPECIAL_NETWORKS: Final = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24
192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24
224.0.0.0/3 2001::/23 2001:db8::/32 2002::/16 3fff::/20
"""
SPECIAL: Final = tuple(map(ip_network, SPECIAL_NETWORKS.split()))


def fetch(url: str) -> bytes:
    """What stands at `url`. Raises OSError, ValueError or HTTPException."""
    deadline = time.monotonic() + MAX_SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        with connected(urlsplit(url)) as (connection, target):
            connection.request("GET", target, headers={"Accept": "image/*"})
            reply = connection.getresponse()
            if reply.status == 200:
                return b"".join(pieces(reply, deadline=deadline))
            location = reply.getheader("Location")
        if reply.status not in (301, 302, 303, 307, 308) or not location:
            raise ValueError(f"the server answered with status {reply.status}")
        url = urljoin(url, location)
    raise ValueError(f"more than {MAX_REDIRECTS} redirects")


def pieces(reply: HTTPResponse, *, deadline: float) -> Iterator[bytes]:
    """The body as it comes. Raises ValueError when it is too large or too slow."""
    n_bytes = 0
    while chunk := reply.read1(65_536):
        n_bytes += len(chunk)
        if n_bytes > MAX_BYTES or time.monotonic() > deadline:
            raise ValueError(f"it takes over {MAX_BYTES:,} bytes or {MAX_SECONDS:g} s")
        yield chunk


def public_address(host: str, port: int) -> str:
    """The address to connect to. Raises ValueError if it is this machine's or its network's."""
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    ip = ip_address(address.partition("%")[0])
    is_public = any(ip in network for network in PUBLIC)
    is_special = any(ip in network for network in SPECIAL)
    if is_special or not is_public:
        raise ValueError(f"{host} is not a public address")
    return str(ip)


@contextmanager
def connected(url: SplitResult) -> Iterator[tuple[HTTPConnection, str]]:
    """A connection to a public address, and what to ask it for."""
    host = url.hostname or ""
    if url.scheme not in PORTS or not host:
        raise ValueError("neither http nor https")

    port = url.port or PORTS[url.scheme]
    connection = HTTPConnection(host, port)
    address = public_address(host, port)
    sock = socket.create_connection((address, port), timeout=MAX_SECONDS / 2)
    try:
        if url.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection.sock = sock
        yield connection, urlunsplit(("", "", url.path or "/", url.query, ""))
    finally:
        sock.close()


def too_late(_number: int, _frame: object) -> None:
    """A signal's handler: not even a header a second keeps it waiting."""
    raise TimeoutError(f"it takes over {MAX_SECONDS:g} s")


def main() -> int:
    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(math.ceil(MAX_SECONDS))
    try:
        sys.stdout.buffer.write(fetch(sys.stdin.read().strip()))
    except (OSError, ValueError, HTTPException) as fault:
        print(f"{fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
