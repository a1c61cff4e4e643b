"""HTTP by hand: bytes sent to a server, what it answers, and to whom it does."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import start_llm as s
from server_fixture import MAX_WAIT_SECONDS, free_port, wait_until

Response = tuple[int, dict[str, str], bytes]


@contextmanager
def listening(**settings: Any) -> Iterator[int]:
    """The port of a server whose model is never loaded: who is let in gets a 503, or better."""
    settings.setdefault("mlx_port", free_port())
    settings.setdefault("enable_request_logging", False)
    config = s.Config(**settings)
    servers = s._listen(config, s.build_state(config))
    for server in servers:
        thread = threading.Thread(
            target=server.serve_forever, args=(0.05,), daemon=True
        )
        thread.start()

    try:
        yield config.mlx_port
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    wait_until(lambda: servers[0]._slots._value == config.max_connections)


def exchange(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> Response:
    """The response to a request whose `body` is JSON, or bytes as they are."""
    is_json = body is not None and not isinstance(body, bytes)
    payload = json.dumps(body) if is_json else body
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MAX_WAIT_SECONDS)
    with closing(connection):
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def request_bytes(
    port: int, *, line: str = "GET /v1/status", body: bytes = b"", **headers: Any
) -> bytes:
    """A request as bytes; `Host=None` leaves a header out, an underscore is a hyphen."""
    fields: dict[str, Any] = {"Host": f"localhost:{port}"}
    if body:
        fields["Content_Length"] = len(body)
    fields.update(headers)

    lines = [f"{line} HTTP/1.1"]
    for name, value in fields.items():
        if value is not None:
            lines.append(f"{name.replace('_', '-')}: {value}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def open_connection(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=20)


def read_response(connection: socket.socket, *, method: str = "GET") -> Response:
    """The next response: status, headers in small letters, body."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    body = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, body


def answer(port: int, **request: Any) -> Response:
    """The response to what `request_bytes` makes of `request`."""
    method = request.get("line", "GET").partition(" ")[0]
    with open_connection(port) as connection:
        connection.sendall(request_bytes(port, **request))
        return read_response(connection, method=method)


def status(port: int, **request: Any) -> int:
    return answer(port, **request)[0]


def message_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    return error if isinstance(error, str) else error["message"]
