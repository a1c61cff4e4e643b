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

import argparse
import base64
import gzip
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import httpx
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

CAPTURES = Path(__file__).resolve().parents[2] / "captures"
REDACTED = "<redacted>"
SECRET_HEADER = re.compile(r"auth|cookie|api-?key|secret|token$", re.IGNORECASE)
SECRET_PARAMETER = re.compile(
    r"(?<=[?&])([^=&]*(?:key|token|secret)[^=&]*)=[^&]*", re.IGNORECASE
)
# Between neighbours only, or set here anew.
NOT_PASSED = {
    *("accept-encoding", "connection", "content-length", "expect", "host", "te"),
    *("keep-alive", "proxy-authenticate", "proxy-authorization", "upgrade"),
    *("proxy-connection", "trailer", "transfer-encoding"),
}

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
        messages = (self.body or {}).get("messages")
        if self.method != "POST" or not isinstance(messages, list):
            return ""
        if route.endswith("/chat/completions"):
            return "chat"
        return "messages" if route.endswith("/messages") else ""


def read_capture(path: Path) -> list[Exchange]:
    """Requests in the order they came, of a file that this proxy wrote."""
    exchanges = []
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        body, response = record["body"], record["response"]
        exchange = Exchange(
            seq=record["seq"],
            method=record["method"],
            path=record["path"],
            headers={name.lower(): value for name, value in record["headers"]},
            body=body if isinstance(body, dict) else None,
            status=response["status"],
            reply=response.get("body") or "",
            is_whole=not response["trouble"],
        )
        exchanges.append(exchange)
    return sorted(exchanges, key=lambda exchange: exchange.seq)


# Writing captures ---------------------------------------------------------------------------------


class CaptureFile:
    """Takes whole records, and numbers requests."""

    def __init__(self, path: Path) -> None:
        self.numbers = itertools.count(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent == CAPTURES:  # what people said does not belong into git
            (CAPTURES / ".gitignore").write_text("*\n", encoding="ascii")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._out = os.fdopen(descriptor, "w", encoding="ascii")

    def close(self) -> None:
        self._out.close()

    def write(self, record: Body) -> None:
        # ASCII: lone surrogates of clients survive.
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()


def without_secrets(headers: Headers) -> list[list[str]]:
    return [[n, REDACTED if SECRET_HEADER.search(n) else value] for n, value in headers]


def as_text(body: bytes, field_name: str = "body") -> Body:
    try:
        return {field_name: body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def as_json(body: bytes, encoding: str) -> Body:
    """A request body, parsed where that is possible, unpacked first."""
    with suppress(OSError, EOFError, zlib.error):
        body = gzip.decompress(body) if encoding.lower() == "gzip" else body
    try:
        return {"body": json.loads(body) if body else None}
    except ValueError:
        return {"body": None, **as_text(body, "body_text")}


# Passing on ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class CaptureProxy:
    """An ASGI application: passes everything on to `upstream`, and writes it to `capture`."""

    upstream: str
    capture: CaptureFile

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request. A response that breaks off breaks off for the client, too."""
        request = Request(scope, receive)
        response = CapturedResponse(began=time.perf_counter())
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        record = {
            "seq": next(self.capture.numbers),
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": request.method,
            "path": SECRET_PARAMETER.sub(rf"\1={REDACTED}", path),
            "headers": without_secrets(request.headers.items()),
            "body": None,
        }
        try:
            payload = await request.body()
            encoding = request.headers.get("content-encoding", "")
            record.update(as_json(payload, encoding))
            # Nothing is kept open: a server may close what rests at any time.
            transport = httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
            )
            client = httpx.AsyncClient(
                transport=transport, timeout=None, trust_env=False
            )
            async with client, anyio.create_task_group() as group:
                group.start_soon(response.cancel_when_left, receive, group.cancel_scope)
                headers = request.headers
                kept = [pair for pair in headers.items() if pair[0] not in NOT_PASSED]
                has_body = "content-length" in headers or "transfer-encoding" in headers
                passed = httpx.Request(
                    request.method,
                    self.upstream.rstrip("/") + path,
                    headers=[*kept, ("accept-encoding", "identity")],
                    content=payload if has_body else None,
                )
                try:
                    await response.relay(await client.send(passed, stream=True), send)
                except httpx.HTTPError as error:
                    response.trouble = f"the server: {error!r}"
                group.cancel_scope.cancel()
        except ClientDisconnect:
            response.trouble = "the client left"

        if response.trouble.startswith("the server") and not response.status:
            fault = {"type": "capture_proxy", "message": response.trouble}
            refusal = JSONResponse({"type": "error", "error": fault}, 502)
            await refusal(scope, receive, send)
        told = response.record()
        self.capture.write({**record, "response": told})
        print(
            f"#{record['seq']} {record['method']} {record['path']} {response.status}"
            f" after {told['end_seconds']:.3f} s {response.trouble}",
            file=sys.stderr,
        )


@dataclass(slots=True)
class CapturedResponse:
    """A response as far as it came; seconds since the request arrived."""

    began: float
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    headers_seconds: float | None = None
    first_byte_seconds: float | None = None
    trouble: str = ""
    is_whole: bool = False

    def seconds(self) -> float:
        return round(time.perf_counter() - self.began, 6)

    async def cancel_when_left(self, receive: Any, scope: anyio.CancelScope) -> None:
        """A server that prefills for a minute says nothing: no write would fail meanwhile."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.is_whole:
            self.trouble = "the client left"
        scope.cancel()

    async def relay(self, response: httpx.Response, send: Any) -> None:
        """Send it on as it comes. Raises httpx.HTTPError where it breaks off."""
        self.status = response.status_code
        self.headers = response.headers.multi_items()
        self.headers_seconds = self.seconds()
        passed = [
            (name, value)
            for name, value in response.headers.raw
            if name.lower() == b"content-length"
            or name.decode("latin-1").lower() not in NOT_PASSED
        ]
        start = {"type": "http.response.start", "status": self.status}
        await send({**start, "headers": passed})
        async for piece in response.aiter_raw():
            if not self.pieces:
                self.first_byte_seconds = self.seconds()
            self.pieces.append(piece)
            message = {"type": "http.response.body", "body": piece}
            await send({**message, "more_body": True})
        self.is_whole = True
        await send({"type": "http.response.body", "body": b""})

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


def make_server(upstream: str, capture: CaptureFile) -> uvicorn.Server:
    """What serves the proxy, to be run with a listening socket."""
    config = uvicorn.Config(
        CaptureProxy(upstream, capture),
        log_level="critical",
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


@contextmanager
def serving(upstream: str, capture: CaptureFile) -> Iterator[int]:
    """The port of a proxy that runs meanwhile."""
    server = make_server(upstream, capture)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=4100)
    usual = "http://127.0.0.1:8080"
    parser.add_argument("--upstream", default=usual, help="without /v1")
    text = "a file, or a folder for one file per run"
    parser.add_argument("--out", type=Path, help=text)
    args = parser.parse_args()
    path: Path = args.out or CAPTURES
    if path.suffix != ".jsonl":
        path /= f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}.jsonl"
    with (
        closing(CaptureFile(path)) as capture,
        socket.create_server(("127.0.0.1", args.port)) as listening,
        suppress(KeyboardInterrupt),
    ):
        url = f"http://127.0.0.1:{args.port}"
        print(f"{url} -> {args.upstream}, written to {path}", file=sys.stderr)
        make_server(args.upstream, capture).run([listening])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
