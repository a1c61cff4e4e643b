"""HTTP by hand: bytes sent to a server, what it answers, and to whom it does."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import start_llm as s
from server_fixture import free_port, wait_until

Response = tuple[int, dict[str, str], bytes]


@contextmanager
def listening(**settings: Any) -> Iterator[int]:
    """The port of a server whose model is never loaded: who is let in gets a 503, or better."""
    config = s.Config(
        **{"mlx_port": free_port(), "enable_request_logging": False, **settings}
    )
    servers = s._listen(config, s.build_state(config))
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield config.mlx_port
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    wait_until(lambda: servers[0]._slots._value == config.max_connections)


def told(
    port: int, *, line: str = "GET /v1/status", body: bytes = b"", **headers: Any
) -> bytes:
    """A request as bytes; `Host=None` leaves one out, an underscore is a hyphen."""
    named = {
        "Host": f"localhost:{port}",
        **({"Content_Length": len(body)} if body else {}),
    }
    named |= headers
    fields = [f"{n.replace('_', '-')}: {v}" for n, v in named.items() if v is not None]
    return "\r\n".join([f"{line} HTTP/1.1", *fields]).encode() + b"\r\n\r\n" + body


def opened(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=20)


def heard(connection: socket.socket, *, method: str = "GET") -> Response:
    """The next response: status, headers in small letters, body."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    body = response.read()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, body


def answer(port: int, **how: Any) -> Response:
    with opened(port) as connection:
        connection.sendall(told(port, **how))
        return heard(connection, method=how.get("line", "GET").partition(" ")[0])


def status(port: int, **how: Any) -> int:
    return answer(port, **how)[0]


def message_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    return error if isinstance(error, str) else error["message"]
