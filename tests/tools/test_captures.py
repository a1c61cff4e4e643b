"""capture_proxy.py: a request and its response pass unchanged, and no key is written down."""

import contextlib
import http.client
import json
import socket
import stat
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import capture_proxy
import pytest
from server_fixture import MAX_WAIT_SECONDS, wait_until
from stub_server import StubHandler, running

CHAT = "/v1/chat/completions"


# -- servers ---------------------------------------------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """A server that records each request and lets `reply` answer it."""

    daemon_threads = True

    def __init__(self, reply: Callable[["FakeHandler"], None]) -> None:
        self.reply = reply
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), FakeHandler)


class FakeHandler(StubHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def take(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((f"{self.command} {self.path}", headers, self.body))
        self.server.reply(self)

    do_POST = take

    def send(self, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response(200)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class Proxied:
    """A proxy in front of a fake, and what it has written so far."""

    def __init__(self, fake: FakeServer, port: int, capture_file: Path) -> None:
        self.fake = fake
        self.port = port
        self.capture_file = capture_file

    def connect(self) -> contextlib.closing:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        return contextlib.closing(connection)

    def records(self, n: int = 1) -> list[dict[str, Any]]:
        wait_until(lambda: self.capture_file.read_text().count("\n") >= n)
        lines = self.capture_file.read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def proxied(tmp_path):
    """A function: what the fake replies -> the proxy before it."""
    with contextlib.ExitStack() as stack:

        def start(reply: Callable[[FakeHandler], None]) -> Proxied:
            fake = FakeServer(reply)
            fake_port = stack.enter_context(running(fake))

            path = tmp_path / "run.jsonl"
            capture = capture_proxy.CaptureFile(path)
            stack.enter_context(contextlib.closing(capture))

            upstream = f"http://127.0.0.1:{fake_port}"
            serving = capture_proxy.serving(upstream, capture)
            proxy_port = stack.enter_context(serving)
            return Proxied(fake, proxy_port, path)

        yield start


# -- the proxy -------------------------------------------------------------------------------------


def test_a_stream_stays_a_stream_and_is_written_down(proxied):
    first_came = threading.Event()

    def reply(handler: FakeHandler) -> None:
        handler.start_stream()
        handler.send_chunk("data: früh\n\n".encode())
        assert first_came.wait(MAX_WAIT_SECONDS)
        handler.send_chunk(b"data: [DONE]\n\n")
        handler.send_chunk(b"")

    proxy = proxied(reply)
    with proxy.connect() as connection:
        connection.request("POST", CHAT, b'{"stream": true}')
        response = connection.getresponse()
        early = response.read1(100)
        first_came.set()  # only now does the server say the rest
        assert early + response.read() == "data: früh\n\ndata: [DONE]\n\n".encode()

    (record,) = proxy.records()
    response = record["response"]
    assert response["body"] == "data: früh\n\ndata: [DONE]\n\n"
    assert (response["status"], response["trouble"]) == (200, "")
    assert 0 < response["headers_seconds"] <= response["first_byte_seconds"]
    assert response["first_byte_seconds"] < response["end_seconds"]


def test_bodies_pass_as_they_are_and_keys_are_not_written_down(proxied):
    cookies = [("Set-Cookie", "s3cret"), ("Set-Cookie", "s3cret")]
    proxy = proxied(lambda handler: handler.send(b'{"a" :1}', cookies))
    path = f"{CHAT}?key=s3cret"
    body = b'{"b" :2.0,\n "a": "\\u00e9 \\ud83d", "b": 3}'
    chunks = [body[:7], body[7:]]
    headers = {
        "Authorization": "Bearer s3cret",
        "X-Api-Key": "s3cret",
        "Cookie": "a=s3cret",
    }

    with proxy.connect() as connection:
        connection.request("POST", path, iter(chunks), headers)
        response = connection.getresponse()
        assert response.read() == b'{"a" :1}'
        assert response.headers.get_all("Set-Cookie") == ["s3cret", "s3cret"]

    ((request_line, passed_headers, passed_body),) = proxy.fake.requests
    assert request_line == f"POST {path}"
    assert passed_body == body
    assert passed_headers["authorization"] == "Bearer s3cret"
    assert passed_headers["x-api-key"] == "s3cret"

    (record,) = proxy.records()
    assert record["body"] == {"a": "é \ud83d", "b": 3}
    assert "s3cret" not in proxy.capture_file.read_text()
    assert stat.S_IMODE(proxy.capture_file.stat().st_mode) == 0o600


def test_when_the_client_leaves_the_server_is_left_too(proxied):
    was_left = threading.Event()

    def reply(handler: FakeHandler) -> None:
        assert handler.connection.recv(1) == b""  # says nothing until then
        was_left.set()

    proxy = proxied(reply)
    with proxy.connect() as connection:
        connection.request("POST", CHAT, b"{}")
        wait_until(lambda: proxy.fake.requests)

    assert was_left.wait(MAX_WAIT_SECONDS)
    (record,) = proxy.records()
    assert record["response"]["trouble"] == "the client left"
    assert record["response"]["status"] == 0


def break_a_stream(handler: FakeHandler) -> None:
    handler.start_stream()
    handler.send_chunk(b"data: half")
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_a_response_that_breaks_off_breaks_off_for_the_client(proxied):
    proxy = proxied(break_a_stream)
    with proxy.connect() as connection:
        connection.request("POST", CHAT, b"{}")
        with pytest.raises(http.client.IncompleteRead):
            connection.getresponse().read()

    (record,) = proxy.records()
    assert record["response"]["body"] == "data: half"
    assert record["response"]["trouble"].startswith("the server")
