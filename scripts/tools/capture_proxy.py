"""Pass a client's traffic through to its server, and write down each request and its response.

    python scripts/tools/capture_proxy.py [--port 4100] [--upstream URL] [--out PATH]

Point a client at http://127.0.0.1:4100 instead of its server, OpenAI's or Anthropic's API alike.
Bodies pass untouched in both directions, each piece of a stream as it comes; when the client
leaves, the server is left too. One header changes: the server is asked not to compress, so that
what it says can be read here.

A run writes one file of JSON lines, by default captures/<time>.jsonl, one line per request when it
has ended:

    {"seq": 3, "at": "2026-11-20T14:00:00.000+00:00", "method": "POST", "path": "/v1/messages",
     "headers": [["content-type", "application/json"], ...], "body": {...},
     "response": {"status": 200, "headers": [...], "body": "event: ...", "headers_seconds": 0.01,
                  "first_byte_seconds": 0.32, "end_seconds": 1.4, "trouble": ""}}

Seconds count from the request's arrival. A request body that is no JSON is "body_text", any body
that is no UTF-8 is "body_base64" instead. Keys and cookies are replaced by <redacted>; what is said
in the bodies is not, so the file can be read by its owner only.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import http.client
import json
import os
import re
import selectors
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

CAPTURES = Path(__file__).resolve().parents[2] / "captures"
PIECE_BYTES = 65_536  # most that is read before it is passed on
REDACTED = "<redacted>"
SECRET_HEADER = re.compile(r"auth|cookie|api-?key|secret|token$", re.IGNORECASE)
SECRET_PARAMETER = re.compile(
    r"(?<=[?&])([^=&]*(?:key|token|secret)[^=&]*)=[^&]*", re.IGNORECASE
)
# Between neighbours only, or set here anew.
NOT_PASSED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

Body = dict[str, Any]
Headers = Iterable[tuple[str, str]]


# Reading captures ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a capture and what came back."""

    seq: int
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: Body | None  # None where it is no JSON object
    status: int  # 0 where no response came
    reply: str  # "" where none was recorded
    is_whole: bool = True  # False where the response is known to have broken off

    @property
    def api(self) -> str:
        """ "chat", "messages", or "" for what does not generate from messages."""
        route = self.path.partition("?")[0].rstrip("/")
        if self.method != "POST" or not isinstance(
            (self.body or {}).get("messages"), list
        ):
            return ""
        if route.endswith("/chat/completions"):
            return "chat"
        return "messages" if route.endswith("/messages") else ""


def read_capture(path: Path) -> list[Exchange]:
    """Requests in the order they came: of a file that this proxy wrote, or of a folder.

    A folder may hold such files, or one numbered JSON file per request with the same keys.
    Raises OSError, and ValueError where a file is no capture.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.jsonl")) or sorted(path.glob("[0-9]*.json"))
    if not files:
        raise ValueError(f"{path}: no *.jsonl and no numbered *.json in it")
    if all(file.suffix == ".json" for file in files):
        exchanges = [read_record(file.read_text("utf-8"), file) for file in files]
        return sorted(exchanges, key=lambda exchange: exchange.seq)
    return [exchange for file in files for exchange in read_lines(file)]


def read_lines(path: Path) -> list[Exchange]:
    exchanges = []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if line:
            exchanges.append(read_record(line, f"{path}, line {number}"))
    return sorted(exchanges, key=lambda exchange: exchange.seq)


def read_record(text: str, location: object) -> Exchange:
    try:
        record = json.loads(text)
        headers = {str(name).lower(): str(value) for name, value in record["headers"]}
        body = record["body"]
        response = record.get("response") or {}
        return Exchange(
            seq=record["seq"],
            method=record["method"],
            path=record["path"],
            headers=headers,
            body=body if isinstance(body, dict) else None,
            status=response.get("status") or 0,
            reply=response.get("body") or "",
            is_whole=not (response.get("trouble") or response.get("fault")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{location}: no record of a request ({error!r})") from error


def stream_events(lines: Iterable[bytes | str]) -> Iterator[Body]:
    """The JSON objects in the data lines of a stream of server-sent events."""
    for line in lines:
        text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        event = None
        with suppress(ValueError):  # [DONE], or a line that a drop cut off
            event = (
                json.loads(text.removeprefix("data:"))
                if text.startswith("data:")
                else None
            )
        if isinstance(event, dict):
            yield event


# Writing captures ---------------------------------------------------------------------------------


class CaptureFile:
    """Takes whole records from any thread, and counts requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._n_requests = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if (
            path.parent == CAPTURES
        ):  # what people said does not belong into the repository
            (CAPTURES / ".gitignore").write_text("*\n", encoding="ascii")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._out = os.fdopen(descriptor, "w", encoding="ascii")

    def close(self) -> None:
        self._out.close()

    def next_number(self) -> int:
        with self._lock:
            self._n_requests += 1
            return self._n_requests

    def write(self, record: Body) -> None:
        line = json.dumps(record) + "\n"  # ASCII: lone surrogates of clients survive
        with self._lock:
            if not self._out.closed:
                self._out.write(line)
                self._out.flush()


def without_secrets(headers: Headers) -> list[list[str]]:
    return [[n, REDACTED if SECRET_HEADER.search(n) else value] for n, value in headers]


def as_text(body: bytes) -> Body:
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def as_json(body: bytes, encoding: str) -> Body:
    """A request body, parsed where that is possible, unpacked first."""
    with suppress(OSError, EOFError, zlib.error):
        body = gzip.decompress(body) if encoding.lower() == "gzip" else body
    try:
        return {"body": json.loads(body) if body else None}
    except ValueError:
        fields = as_text(body)
        if "body" in fields:
            return {"body": None, "body_text": fields["body"]}
        return {"body": None, **fields}


# Passing on ---------------------------------------------------------------------------------------


class ClientGoneError(Exception):
    """The client closed its connection before it had the whole response."""


@dataclass
class CapturedResponse:
    """A response as far as it came; seconds since the request arrived."""

    began: float
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    headers_seconds: float | None = None
    first_byte_seconds: float | None = None
    trouble: str = ""

    def seconds(self) -> float:
        return round(time.perf_counter() - self.began, 6)

    def note_head(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.getheaders()
        self.headers_seconds = self.seconds()

    def note_piece(self, piece: bytes) -> None:
        if not self.pieces:
            self.first_byte_seconds = self.seconds()
        self.pieces.append(piece)

    def record(self) -> Body:
        return {
            "status": self.status,
            "headers": without_secrets(self.headers),
            **as_text(b"".join(self.pieces)),
            "headers_seconds": self.headers_seconds,
            "first_byte_seconds": self.first_byte_seconds,
            "end_seconds": self.seconds(),
            "trouble": self.trouble,
        }


def read_body(headers: Message, stream: BufferedIOBase) -> bytes:
    """Raises ValueError where the body is framed wrongly or ends too soon."""
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        return b"".join(read_chunks(stream))
    return read_exactly(stream, int(headers.get("Content-Length") or 0))


def read_chunks(stream: BufferedIOBase) -> Iterator[bytes]:
    while size := int(stream.readline().partition(b";")[0], 16):
        yield read_exactly(stream, size)
        stream.readline()
    while stream.readline().strip():
        pass  # trailers


def read_exactly(stream: BufferedIOBase, size: int) -> bytes:
    body = stream.read(size) if size >= 0 else b""
    if len(body) != size:
        raise ValueError(f"{size} bytes were announced, {len(body)} came")
    return body


@contextmanager
def hanging_up(
    client: socket.socket, upstream: socket.socket
) -> Iterator[threading.Event]:
    """Cut the upstream connection as soon as the client leaves; the event tells that it did.

    A server that prefills for a minute says nothing, so no write would fail meanwhile.
    """
    is_gone = threading.Event()
    ours, theirs = socket.socketpair()

    def watch() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            selector.register(theirs, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select()]
        if theirs not in ready and has_left(client):
            is_gone.set()
            with suppress(OSError):
                upstream.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield is_gone
    finally:
        ours.close()  # wakes the watcher
        watcher.join()
        theirs.close()


def has_left(client: socket.socket) -> bool:
    """Asked when there is something to read: an end, or the next request."""
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


@contextmanager
def writing_to_client() -> Iterator[None]:
    """Tells a client that left from a server that failed: both are OSErrors."""
    try:
        yield
    except OSError as error:
        raise ClientGoneError from error


class CaptureProxy(ThreadingHTTPServer):
    """Listens at `address`, passes everything on to `upstream`, and writes it to `capture`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], *, upstream: str, capture: CaptureFile
    ) -> None:
        self.upstream: SplitResult = urlsplit(upstream)
        self.capture = capture
        super().__init__(address, Handler)

    def connect(self) -> tuple[http.client.HTTPConnection, socket.socket]:
        """Raises OSError."""
        is_tls = self.upstream.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        connection = kind(self.upstream.hostname or "127.0.0.1", self.upstream.port)
        connection.connect()
        return connection, connection.sock

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that resets its connection between two requests is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection of the client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: CaptureProxy

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Silence: `_answer` prints one line per request, when it has ended."""

    def _answer(self) -> None:
        captured = CapturedResponse(time.perf_counter())
        record = {
            "seq": self.server.capture.next_number(),
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": self.command,
            "path": SECRET_PARAMETER.sub(rf"\1={REDACTED}", self.path),
            "headers": without_secrets(self.headers.items()),
            "body": None,
        }
        try:
            payload = read_body(self.headers, self.rfile)
            encoding = self.headers.get("Content-Encoding", "")
            record.update(as_json(payload, encoding))
            self._exchange(payload, captured)
        except ClientGoneError:
            captured.trouble = "the client left"
        except ValueError as error:
            captured.trouble = f"the request's body: {error}"
        except (OSError, http.client.HTTPException) as error:
            captured.trouble = f"the server: {error!r}"
        if captured.trouble:
            self._give_up(captured)

        response = captured.record()
        self.server.capture.write({**record, "response": response})
        print(
            f"#{record['seq']} {self.command} {record['path']} {captured.status}"
            f" after {response['end_seconds']:.3f} s {captured.trouble}",
            file=sys.stderr,
        )

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer

    def _give_up(self, captured: CapturedResponse) -> None:
        """Send an error if no head was sent; a response that broke off breaks off here too."""
        self.close_connection = True
        if captured.headers_seconds is None and captured.trouble != "the client left":
            error = {"type": "capture_proxy", "message": captured.trouble}
            body = json.dumps({"type": "error", "error": error}).encode()
            status = 502 if captured.trouble.startswith("the server") else 400
            with suppress(OSError):
                self.send_response_only(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    def _exchange(self, payload: bytes, captured: CapturedResponse) -> None:
        """Raises ClientGoneError; OSError or HTTPException where the server is to blame."""
        connection, upstream = self.server.connect()
        with (
            closing(connection),
            closing(upstream),
            hanging_up(self.connection, upstream) as client_left,
        ):
            try:
                self._send_request(connection, payload)
                response = connection.getresponse()
                ends_by_closing = response.length is None and not response.chunked
                with closing(response):
                    captured.note_head(response)
                    self._relay(response, captured)
                if ends_by_closing and client_left.is_set():
                    raise ClientGoneError  # it was we who closed
            except (OSError, http.client.HTTPException) as error:
                if client_left.is_set():
                    raise ClientGoneError from error
                raise

    def _send_request(
        self, connection: http.client.HTTPConnection, payload: bytes
    ) -> None:
        target = self.server.upstream.path.rstrip("/") + self.path
        connection.putrequest(
            self.command, target, skip_host=True, skip_accept_encoding=True
        )
        connection.putheader("Host", self.server.upstream.netloc.rpartition("@")[2])
        connection.putheader("Accept-Encoding", "identity")
        for name, value in self.headers.items():
            if name.lower() not in NOT_PASSED:
                connection.putheader(name, value)
        sent_names = {name.lower() for name in self.headers}
        if sent_names & {"content-length", "transfer-encoding"}:
            connection.putheader("Content-Length", str(len(payload)))
        # A server that refuses a body may answer without reading it to its end.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.endheaders(payload or None)

    def _relay(
        self, response: http.client.HTTPResponse, captured: CapturedResponse
    ) -> None:
        is_chunked = self._send_head(response)
        while piece := response.read1(PIECE_BYTES):
            captured.note_piece(piece)
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece
            with writing_to_client():
                self.wfile.write(framed)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        if is_chunked:
            with writing_to_client():
                self.wfile.write(b"0\r\n\r\n")

    def _send_head(self, response: http.client.HTTPResponse) -> bool:
        """Whether the body has to be sent in chunks: its length is not known."""
        length = response.getheader("Content-Length")
        has_body = self.command != "HEAD" and response.status not in (204, 304)
        is_open = length is None and has_body
        is_chunked = is_open and self.request_version == "HTTP/1.1"
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in NOT_PASSED:
                self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", length)
        elif is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif is_open:
            self.send_header("Connection", "close")
        with writing_to_client():
            self.end_headers()
        return is_chunked


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pass traffic through and write it down."
    )
    parser.add_argument("--port", type=int, default=4100)
    parser.add_argument(
        "--upstream", default="http://127.0.0.1:8080", help="without /v1"
    )
    parser.add_argument(
        "--out", type=Path, help="a file, or a folder for one file per run"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    path: Path = args.out or CAPTURES
    if path.suffix != ".jsonl":
        path /= f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}.jsonl"
    address = ("127.0.0.1", args.port)
    with (
        closing(CaptureFile(path)) as capture,
        CaptureProxy(address, upstream=args.upstream, capture=capture) as proxy,
    ):
        print(
            f"http://127.0.0.1:{args.port} -> {args.upstream}, written to {path}",
            file=sys.stderr,
        )
        with suppress(KeyboardInterrupt):
            proxy.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
