"""Port 4000: what the server serves goes on to it unread, the rest is LiteLLM's.

LiteLLM imports this file, since its settings name `litellm_gate.gate` as a callback, and takes
the gate into its application. START_LLM_GATE is the path of those settings; the part
`start_llm_gate` is for the gate:

    key          that a client must send; empty: none
    servers      the URL of each start-llm, and the key that is sent to it; empty: none
    model_id     of the model that all of them serve
    named_servers  the same of one with another model, by the model's name (PROXY_MODELS)
    models       the names that it answers to; empty: any
    max_body_bytes
    host_names   what a client may call it in the header Host; empty: whatever it likes
    cors_origins    of web pages that may ask; `*`: all
    welcome      the sentence at `/`
    advice       for a path that is not served, and all below it, what to use instead

A request takes one of three ways:

    chats, completions, messages   to the server, as they came, and so do its answers. LiteLLM
    and how the server is          would lose fields and codes of errors, count tokens wrongly,
                                   and ask every model for a reply to say how it is
    responses, Google's API        LiteLLM makes a chat of them. The body is checked before
                                   (translated_bodies.py); an error is the server's own
    anything else                  to LiteLLM

Which of several servers gets a chat, replica_choice.py says. LiteLLM's router never sees those that
go to a server as they came; of its own it gets the deployment that is that server (the callback).
"""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import logging
import math
import os
import re
import socket
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import closing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import anyio
import httpx
from replica_choice import (
    MAX_ANSWER_BYTES,
    Replica,
    Replicas,
    conversation_by_body,
    conversation_by_headers,
    read_object,
)
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from translated_bodies import (
    GOOGLE_NAMES,
    RESPONSE_NAMES,
    Fault,
    check_response,
    mend_google,
    plain_name,
)

JSON: Final = "application/json"
logger = logging.getLogger("litellm_gate")

# All headers that LiteLLM takes a key from, and Google's parameter of the query.
KEY_HEADERS: Final = (
    b"x-litellm-api-key authorization api-key x-api-key x-goog-api-key "
    b"ocp-apim-subscription-key"
).split()
# Where LiteLLM asks for none: its pages, and whether it lives.
OPEN_PATHS: Final = ("/ui", "/health/liv", "/health/readiness")
# What stands for messages or a prompt that are stored nowhere here.
STORED_FIELDS: Final = (
    *("previous_response_id", "conversation", "assistant_id", "prompt"),
)
# What the server has, and what LiteLLM makes a chat of, each after plain_path().
# why(L-186): LiteLLM's own /health has every model write something.
SERVED_PATH: Final = re.compile(
    "/health|/v1/(?:chat/completions|completions|messages(?:/count_tokens)?)"
)
GOOGLE_PATH: Final = re.compile(
    r"(?s:(?:/v1beta)?/models/(.+):)(?:generateContent|streamGenerateContent|countTokens)"
)
TRANSLATED_PATH: Final = re.compile(f"/(?:openai/)?v1/responses|{GOOGLE_PATH.pattern}")
# Of one connection (RFC 9110 section 7.6.1), or written anew by both servers.
CONNECTION_HEADERS: Final = (
    b"connection keep-alive te trailer transfer-encoding upgrade host date server"
).split()
# What LiteLLM would send on to a model that writes text.
UNSERVED_PATHS: Final = (
    *("/v1/embeddings", "/v1/rerank", "/v1/audio", "/v1/images", "/v1/threads"),
    *("/v1/assistants", "/v1/conversations"),
)
# What may come without the /v1 before it.
BEGINNINGS: Final = (
    *("/messages", "/chat", "/completions", "/responses"),
    *(path.removeprefix("/v1") for path in UNSERVED_PATHS),
)

# A machine that drops packets refuses no connection: after so long it counts as down.
CONNECT_SECONDS: Final = 5.0

MAX_REPLY_BYTES: Final = 1 << 28  # that LiteLLM makes an answer of: a million tokens

SOON: Final = {"retry-after": "5"}

# So many of the largest bodies are held at once, or more of smaller ones.
MAX_HELD_BODIES: Final = 4

GOOGLE_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    503: "UNAVAILABLE",
}
ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """An error that a client gets from the gate."""

    status: int
    sentence: str
    parameter: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, path: str) -> object:
        """In the form of the API that was called: Ollama's, Anthropic's, Google's, OpenAI's."""
        is_fault_of_ours = self.status >= 500
        if path.startswith("/api/"):
            return {"error": self.sentence}
        if path.startswith("/v1/messages"):
            other_kind = "api_error" if is_fault_of_ours else "invalid_request_error"
            kind = ANTHROPIC_KINDS.get(self.status, other_kind)
            return {"type": "error", "error": {"type": kind, "message": self.sentence}}
        if GOOGLE_PATH.fullmatch(path):
            status = GOOGLE_STATUS.get(self.status, "INTERNAL")
            error = {"code": self.status, "message": self.sentence, "status": status}
            return {"error": error}
        return {
            "error": {
                "message": self.sentence,
                "type": "server_error" if is_fault_of_ours else "invalid_request_error",
                "param": self.parameter,
                "code": self.code,
            }
        }

    def last_event(self, path: str) -> bytes:
        """What ends a stream of the API that was called."""
        data = self.body(path)
        if path.endswith("/v1/responses"):
            fault = {"message": self.sentence, "param": self.parameter}
            data = {"type": "error", "code": self.code, **fault, "sequence_number": 0}
        is_named = path.endswith(("/v1/responses", "/v1/messages"))
        name = "event: error\n" if is_named else ""
        return f"{name}data: {json.dumps(data)}\n\n".encode()


@dataclass(slots=True)
class ServerCall:
    """Who answers a request and, where SERVER_CALL holds it, what LiteLLM has asked there."""

    servers: Replicas  # that may answer it
    conversation: str  # "": one that nobody knows again, see replica_choice.py
    server: Replica = field(init=False)  # the one that was chosen
    was_sent: bool = False
    error: httpx.Response | None = None  # whole


SERVER_CALL: Final[ContextVar[ServerCall | None]] = ContextVar("call", default=None)


async def note_request(request: httpx.Request) -> None:
    """A hook of the client that LiteLLM uses, with a timeout of its own for each request."""
    request.extensions["timeout"]["connect"] = CONNECT_SECONDS
    call = SERVER_CALL.get()
    if call is not None:
        call.was_sent = True


async def note_response(response: httpx.Response) -> None:
    """Another: LiteLLM would make an error of its own of the server's."""
    call = SERVER_CALL.get()
    if call is None:
        return
    response.headers.pop("content-encoding", None)  # unpacked, it would have no bound
    max_bytes = MAX_ANSWER_BYTES if response.is_error else MAX_REPLY_BYTES
    response.stream = BoundedStream(response.stream, max_bytes)
    if response.is_error:
        await response.aread()
        call.error = response


class BoundedStream(httpx.AsyncByteStream):
    """What a server answers to LiteLLM, which keeps all of it."""

    def __init__(self, stream: object, max_bytes: int) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self._stream = stream
        self._n_bytes_left = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Each part. Raises httpx.ReadError: there are too many."""
        async for chunk in self._stream:
            self._n_bytes_left -= len(chunk)
            if self._n_bytes_left < 0:
                raise httpx.ReadError("an answer without an end")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()


# The system asks a silent machine whether it is there, for a minute: one that is switched
# off, or sleeps, closes no connection.
IDLE_OPTION: Final = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
KEEPALIVE_OPTIONS: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, IDLE_OPTION), 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def client_of_server(
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """What calls the server: for the gate, and for LiteLLM.

    A connection is for one request: the server may close one that rests, at any time.
    """
    transport = transport or httpx.AsyncHTTPTransport(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
        socket_options=KEEPALIVE_OPTIONS,
    )
    return httpx.AsyncClient(
        transport=transport,
        timeout=None,
        trust_env=False,
        event_hooks={"request": [note_request], "response": [note_response]},
    )


@dataclass(slots=True)
class HeldBytes:
    """Of the bodies that the gate has read before they go on, of all requests."""

    n_bytes: int = 0


@dataclass(slots=True)
class HeldBody:
    """A body that is read whole before it goes on. Until then its bytes count (L-122)."""

    of_all: HeldBytes
    max_bytes: int  # of one body
    n_bytes: int = 0

    async def read(self, receive: Receive) -> bytes:
        """All that a client sends. Raises ClientDisconnect, and Refusal: a 413, or a 503."""
        parts = []
        async for part in Request({"type": "http"}, receive).stream():
            parts.append(part)
            self.n_bytes += len(part)
            self.of_all.n_bytes += len(part)
            if self.n_bytes > self.max_bytes:
                sentence = (
                    f"the body is larger than MAX_BODY_BYTES ({self.max_bytes} bytes)"
                )
                raise Refusal(413, sentence, code="request_too_large")
            max_held_bytes = MAX_HELD_BODIES * self.max_bytes
            if self.of_all.n_bytes > max_held_bytes:
                sentence = (
                    f"the bodies of other requests fill the {max_held_bytes} bytes that "
                    "LiteLLM has for them: send it again in some seconds"
                )
                raise Refusal(503, sentence, code="queue_full", headers=SOON)
        return b"".join(parts)

    def close(self) -> None:
        """It has been sent on, or nobody wants it any more."""
        self.of_all.n_bytes -= self.n_bytes
        self.n_bytes = 0


@dataclass(frozen=True, slots=True)
class Gate:
    """An ASGI application before that of LiteLLM."""

    app: ASGIApp
    client: httpx.AsyncClient
    servers: Replicas
    key: str
    models: list[str]
    max_body_bytes: int
    host_names: list[str]
    cors_origins: list[str]
    welcome: str
    advice: Mapping[str, str]
    named: Mapping[str, Replicas] = field(default_factory=dict)  # by plain_name()
    held_bytes: HeldBytes = field(default_factory=HeldBytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the server or LiteLLM do so."""
        if scope["type"] == "websocket":  # no API of ours is one: a 403
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return

        path = plain_path(scope["path"])
        scope = {**scope, "path": path, "raw_path": path.encode()}
        try:
            refuse_page(scope["headers"], self.host_names, self.cors_origins)
            if path == "/":
                await self._welcome(scope)(scope, receive, send)
                return
            scope = check_key(scope, self.key)
            if SERVED_PATH.fullmatch(path):
                await self._forward(scope, receive, send)
            elif scope["method"] == "POST" and TRANSLATED_PATH.fullmatch(path):
                await self._translate(scope, receive, send)
            else:
                await self._pass_on_safely(scope, receive, send)
        except Refusal as refusal:
            body = json.dumps(refusal.body(path))
            response = Response(body, refusal.status, refusal.headers, JSON)
            await response(scope, receive, send)
        except ClientDisconnect:
            return

    def _welcome(self, scope: Scope) -> Response:
        if "text/html" not in Headers(scope=scope).get("accept", ""):
            return Response(json.dumps({"message": self.welcome}), media_type=JSON)
        text = html.escape(self.welcome)
        linked = re.sub(
            r"http://[\w.:/\[\]-]*[\w/]", r'<a href="\g<0>">\g<0></a>', text
        )
        page = f"<!DOCTYPE html><title>start-llm: LiteLLM</title><p>{linked}</p>"
        return Response(page, media_type="text/html")

    # -- to the server -----------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request to a server while it comes, and back what it answers.

        Who leaves is noticed: then the connection to the server is closed.
        """
        call = self._find_call(scope, None)
        is_unknown = self.servers.are_several and not call.conversation
        with closing(HeldBody(self.held_bytes, self.max_body_bytes)) as held_body:
            if scope["method"] == "POST" and (is_unknown or self.named):
                call, receive = await self._read_call(scope, held_body, receive)
            body = ClientBody(receive)
            exchange = self._send_on(scope, body, send, call)
            await do_until(body.wait_until_left, exchange)

    async def _read_call(
        self, scope: Scope, held_body: HeldBody, receive: Receive
    ) -> tuple[ServerCall, Receive]:
        """Who may answer, and the body. Only what is returned holds that: it is let go."""
        payload = await held_body.read(receive)
        call = self._find_call(scope, payload)
        return call, replaying(payload, receive, held_body.close)

    def _find_call(self, scope: Scope, payload: bytes | None) -> ServerCall:
        """Who may answer, by headers, path and, where it was read, the body."""
        body: Mapping[str, Any] = {}
        if payload is not None and (self.named or self.servers.are_several):
            body = read_object(payload)
        google = GOOGLE_PATH.fullmatch(scope["path"])
        name = google[1] if google else str(body.get("model", ""))
        servers = self.named.get(plain_name(name), self.servers)
        conversation = ""
        if servers.are_several:
            conversation = conversation_by_headers(scope["headers"])
            conversation = conversation or conversation_by_body(body)
        return ServerCall(servers, conversation)

    async def _send_on(
        self, scope: Scope, body: ClientBody, send: Send, call: ServerCall
    ) -> None:
        """Exchange it with the first server that takes the connection. Raises Refusal."""
        servers = call.servers
        failed_urls: list[str] = []
        while server := servers.choose(call.conversation, without=failed_urls):
            call.server = server
            request = self._request_to(server, scope, body)
            try:
                response = await self.client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                # It has got nothing of the request.
                failed_urls.append(server.url)
                servers.note(server, "down")
                continue
            except httpx.TransportError:
                await servers.check(server)
                raise refusal_for_lost(server) from None
            try:
                if response.status_code == 503:
                    await servers.note_refusal(server, call.conversation)
                await self._send_back(response, call, scope["path"], send)
            finally:
                await response.aclose()
            return
        raise refusal_for_none(servers)

    def _request_to(
        self, server: Replica, scope: Scope, body: ClientBody
    ) -> httpx.Request:
        """A client's request as a server gets it. Raises Refusal.

        Left out are headers of its connection, its key and its page, which are checked.
        """
        left_out = [*CONNECTION_HEADERS, *KEY_HEADERS, b"expect", b"origin"]
        if scope["method"] != "POST":  # then it goes on without a body
            left_out.append(b"content-length")
        headers = [header for header in scope["headers"] if header[0] not in left_out]
        if server.key:
            headers.append((b"authorization", b"Bearer " + server.key.encode()))
        query = scope["query_string"].decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        try:
            return self.client.build_request(
                scope["method"],
                f"{server.url}{target}",
                headers=headers,
                content=body if scope["method"] == "POST" else None,
            )
        except httpx.InvalidURL:
            sentence = (
                "the query cannot be sent on: it is too long, or has a character that no "
                "URL has"
            )
            raise Refusal(400, sentence) from None

    async def _send_back(
        self, response: httpx.Response, call: ServerCall, path: str, send: Send
    ) -> None:
        """Send on what a server answers; of a stream that it leaves, an error is the end."""
        headers = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if name.lower() not in CONNECTION_HEADERS
        ]
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": headers,
        }
        last_chunk = b""
        end = b""
        try:
            await send(start)
            async for chunk in response.aiter_raw():
                last_chunk = chunk
                message = {"type": "http.response.body", "body": chunk}
                await send({**message, "more_body": True})
        except httpx.TransportError:
            await call.servers.check(call.server)
            # Inside an event, or a whole response, only a broken connection says it.
            if not last_chunk.endswith(b"\n\n"):
                raise
            end = refusal_for_lost(call.server).last_event(path)
        await send({"type": "http.response.body", "body": end})

    # -- to LiteLLM --------------------------------------------------------------------

    async def _translate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let LiteLLM make a chat of a body, and an answer of the chat's.

        Raises Refusal: the body is wrong, or the chat failed before the answer began.
        """
        path = scope["path"]
        with closing(HeldBody(self.held_bytes, self.max_body_bytes)) as held_body:
            payload = self._check_body(path, await held_body.read(receive))
            if google := GOOGLE_PATH.fullmatch(path):
                path = path.replace(google[1], plain_name(google[1]))
            framing = (b"content-length", b"transfer-encoding")
            headers = [
                header for header in scope["headers"] if header[0] not in framing
            ]
            headers.append((b"content-length", b"%d" % len(payload)))
            named = {"path": path, "raw_path": path.encode(), "headers": headers}
            scope = {**scope, **named}

            call = self._find_call(scope, payload)
            server = call.servers.choose(call.conversation)
            if server is None:
                raise refusal_for_none(call.servers)
            call.server = server
            SERVER_CALL.set(call)
            answer = Answer(send, call)
            # Who leaves is noticed here, whatever LiteLLM is waiting for.
            body = replaying(payload, wait_for_ever)
            translation = self._pass_on(scope, body, answer.send)
            try:
                await do_until(partial(wait_until_left, receive), translation)
            except Exception as error:
                if isinstance(error, Refusal) or answer.has_begun:
                    raise
                answer.is_error = True
            if not answer.is_error:
                return
            if call.error is None:
                await call.servers.check(call.server)
            elif call.error.status_code == 503:
                await call.servers.note_refusal(call.server, call.conversation)
            refusal = explain_failure(call, path)
            if not answer.has_begun:
                raise refusal
            end = refusal.last_event(path)
            await send({"type": "http.response.body", "body": end})

    def _check_body(self, path: str, payload: bytes) -> bytes:
        """A body that LiteLLM reads in full. Raises Refusal."""
        body = parse_body(payload)
        google = GOOGLE_PATH.fullmatch(path)
        mended = body
        try:
            if google:
                mended = mend_google(body)
            else:
                check_response(body)
        except Fault as fault:
            raise Refusal(400, str(fault), parameter=fault.field or None) from None

        name = google[1] if google else body.get("model")
        is_known = name is None or name in self.models or plain_name(name) in self.named
        if self.models and not is_known:
            sentence = f"the model {name[:200]!r} is not loaded, {self.models[0]!r} is"
            raise Refusal(404, sentence, parameter="model", code="model_not_found")
        if not google:
            refuse_stored(body)
            if body.get("model"):
                mended = {**body, "model": plain_name(body["model"])}
        return payload if mended == body else json.dumps(mended).encode()

    async def _pass_on_safely(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let LiteLLM answer, also where it fails. Raises Refusal."""
        has_begun = False

        async def note_and_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._pass_on(scope, receive, note_and_send)
        except Exception as error:
            if isinstance(error, Refusal) or has_begun:
                raise
            path = scope["path"][:200]
            logger.exception("LiteLLM fails at %r", path)
            fault = "a database, or what else it has not got here"
            advice = find_advice(scope["path"], self.advice)
            sentence = f"LiteLLM fails at {path}, which needs {fault}: {advice}"
            raise Refusal(501, sentence) from None

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let LiteLLM answer. Raises Refusal if it, or its model, has no such route."""
        path = scope["path"]
        method = scope["method"]
        if path.startswith(UNSERVED_PATHS):
            raise self._refuse_path(path)
        if path.startswith("/v1/responses/") and method != "POST":
            raise self._refuse_path(path, self.advice["/v1/threads"])
        try:
            await self.app(scope, receive, send)
        except HTTPException as error:  # of the router alone: routes answer theirs
            if error.status_code == 404:
                raise self._refuse_path(path) from None
            if error.status_code != 405:
                raise
            allowed = (error.headers or {}).get("Allow", "")
            sentence = f"{path[:200]} takes {allowed}, not {method}"
            advice = find_advice(path, self.advice)
            headers = {"allow": allowed}
            raise Refusal(405, f"{sentence}: {advice}", headers=headers) from None

    def _refuse_path(self, path: str, advice: str = "") -> Refusal:
        advice = advice or find_advice(path, self.advice)
        return Refusal(404, f"there is nothing at {path[:200]}: {advice}")


def plain_path(path: str) -> str:
    """A path however a client joined it to its base URL: /v1/v1/models is /v1/models."""
    path = re.sub("/{2,}", "/", path)
    path = re.sub(r"\A(?:/v1)+(?=/v1)", "", path)
    path = f"/v1{path}" if path.startswith(BEGINNINGS) else path
    return path.rstrip("/") if path.startswith("/v1/") else path


def find_advice(path: str, advice: Mapping[str, str]) -> str:
    """What is said of a path, or of the nearest one above it."""
    while path not in advice:
        path = path.rpartition("/")[0] or "/"
    return advice[path]


# -- web pages and keys ----------------------------------------------------------------


def refuse_page(
    headers: Iterable[tuple[bytes, bytes]],
    host_names: Collection[str],
    cors_origins: Collection[str],
) -> None:
    """Raise Refusal for a web page that may not ask, a 403, as the server does itself.

    A page can make its own name point to 127.0.0.1, but not send another name than that.
    """
    values = {name: value.decode("latin-1").lower() for name, value in headers}
    host = values.get(b"host", "")
    is_named = host in host_names or re.sub(r":[0-9]+\Z", "", host) in host_names
    if host_names and b"host" in values and not is_named:
        sentence = f"the Host {host[:200]!r} is not this server's: see ALLOWED_HOSTS"
        raise Refusal(403, sentence)
    origin = values.get(b"origin")
    allowed_origins = (f"http://{host}", f"https://{host}", *cors_origins)
    if origin is not None and not {origin, "*"}.intersection(allowed_origins):
        sentence = f"web pages of {origin[:200]!r} may not ask: see CORS_ORIGINS"
        raise Refusal(403, sentence)


def check_key(scope: Scope, key: str) -> Scope:
    """The request with the key where LiteLLM looks first. Raises Refusal: a 401.

    LiteLLM would look a wrong key up in a database that is not there, and fails where
    there is none.
    """
    if not key or scope["path"].startswith(OPEN_PATHS):
        return scope
    values = [value for name, value in scope["headers"] if name in KEY_HEADERS]
    values += parse_qs(scope["query_string"]).get(b"key", [])
    sent_keys = [re.sub(rb"(?i)^bearer(\s+|$)", b"", v.strip()) for v in values]
    if any(hmac.compare_digest(sent_key, key.encode()) for sent_key in sent_keys):
        others = [header for header in scope["headers"] if header[0] not in KEY_HEADERS]
        bearer = (b"authorization", b"Bearer " + key.encode())
        return {**scope, "headers": [*others, bearer]}

    fault = "a key is needed"
    if any(sent_keys):
        fault = (
            "the key that was sent is wrong: it is not PROXY_API_KEY or, where that is "
            "empty, the first of API_KEY. Send that"
        )
    raise Refusal(
        401,
        f"{fault}, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


# -- requests --------------------------------------------------------------------------


class ClientBody:
    """The parts of a body while they come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._was_read = anyio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Each part. Raises ClientDisconnect."""
        async for part in Request({"type": "http"}, self._receive).stream():
            yield part
        self._was_read.set()

    async def wait_until_left(self) -> None:
        """Wait until the whole body has come, then until the client leaves."""
        await self._was_read.wait()
        await wait_until_left(self._receive)


async def wait_until_left(receive: Receive) -> None:
    """Of a request whose body was read: wait until its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def do_until(end: Callable[[], Awaitable[None]], work: Awaitable[None]) -> None:
    """Do the work, at most until end() returns. Raises what the work raises."""

    async def cancel_at_end() -> None:
        await end()
        group.cancel_scope.cancel()

    raised = None
    async with anyio.create_task_group() as group:
        group.start_soon(cancel_at_end)
        try:
            await work
        except Exception as error:  # noqa: BLE001  # the group would wrap it
            raised = error
        group.cancel_scope.cancel()
    if raised:
        raise raised


async def wait_for_ever() -> Message:
    """A client that neither sends more nor leaves."""
    await anyio.sleep_forever()
    raise AssertionError


def parse_body(payload: bytes) -> Any:
    """A value of JSON. Raises Refusal: a 400."""
    try:
        return json.loads(
            payload.decode(), parse_float=read_finite, parse_constant=read_finite
        )
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from None


def read_finite(text: str) -> float:
    """A number. Raises ValueError for NaN and the like, which json reads, and for 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is NaN or infinite")
    return number


def refuse_stored(body: Mapping[str, Any]) -> None:
    """Raise Refusal for a field that names stored messages: the reply would lack them.

    So does a stored prompt, and an item that is known by its id.
    """
    fields = [name for name in STORED_FIELDS if body.get(name)]
    items = body.get("input")
    if isinstance(items, list):
        fields += [
            f"input[{index}]"
            for index, item in enumerate(items)
            if item.get("type") == "item_reference"
        ]
    if fields:
        sentence = "no conversation is stored here: leave it out, send all messages"
        raise Refusal(400, f"{fields[0]}: {sentence}", parameter=fields[0])


def replaying(
    payload: bytes, receive: Receive, release: Callable[[], None] | None = None
) -> Receive:
    """Receive a body that was read, then what comes after it.

    `release` is called when more is asked for: the body has been sent on by then.
    """
    unread = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive_again() -> Message:
        if unread:
            return unread.pop()
        if release is not None:
            release()
        return await receive()

    return receive_again


# -- responses -------------------------------------------------------------------------


class Answer:
    """Sends what LiteLLM answers, but for errors: a status, or the end of a stream.

    A stream that has pings alone may have begun when the server refuses the chat.
    """

    def __init__(self, send: Send, call: ServerCall) -> None:
        self._send = send
        self._call = call
        self.has_begun = False
        self.is_error = False

    async def send(self, message: Message) -> None:
        """Send on a part of a response, or note that it is an error."""
        if message["type"] == "http.response.start":
            self.is_error = message["status"] >= 400
        if self._call.error is not None:
            self.is_error = True
        if not self.is_error:
            self.has_begun = True
            await self._send(message)


def refusal_for_none(servers: Replicas) -> Refusal:
    """No server can take a request."""
    if not servers.are_several:
        url = servers.servers[0].url
        return Refusal(502, f"start-llm does not answer at {url}")
    return Refusal(503, servers.explain(), headers=SOON)


def refusal_for_lost(server: Replica) -> Refusal:
    """A server that has ended before its reply did.

    PI sends it again by itself where it reads `connection lost`.
    """
    sentence = (
        f"start-llm at {server.url} did not answer, or not in full "
        "(connection lost): send it again"
    )
    return Refusal(502, sentence)


def explain_failure(call: ServerCall, path: str) -> Refusal:
    """What the server said of a chat that LiteLLM made, with the client's own names."""
    if not call.was_sent:
        sentence = "LiteLLM cannot make a chat of this body: one of its fields is wrong"
        return Refusal(400, sentence)
    error: Any = None
    if call.error is not None:
        with suppress(ValueError, RecursionError, LookupError, TypeError):
            error = call.error.json()["error"]
    if call.error is None or not isinstance(error, dict):
        return refusal_for_lost(call.server)
    # Of start-llm's form all are texts, or null.
    texts = {name: text for name, text in error.items() if isinstance(text, str)}
    if "message" not in texts:
        return refusal_for_lost(call.server)

    parameter = texts.get("param")
    sentence = texts["message"]
    names = GOOGLE_NAMES if GOOGLE_PATH.fullmatch(path) else RESPONSE_NAMES
    if parameter in names:
        _, colon, fault = sentence.partition(f"{parameter}: ")
        sentence = f"{names[parameter]}: {fault}" if colon else sentence
        parameter = names[parameter]
    sent = call.error.headers
    return Refusal(
        call.error.status_code,
        sentence,
        parameter=parameter,
        code=texts.get("code"),
        headers={name: sent[name] for name in ("retry-after",) if name in sent},
    )


# -- inside LiteLLM --------------------------------------------------------------------


REPORTS: Final = "START_LLM_REPORTS"  # descriptor of a pipe to the server's log


def install_gate() -> object:
    """Take the gate into LiteLLM's application, which runs by now. Returns a callback.

    A middleware cannot be added any more, but the router's own stack can be wrapped:
    inside of what LiteLLM does for web pages (CORS).
    """
    # It is LiteLLM that runs this function, in its own process.
    import litellm  # noqa: TID251
    from litellm.integrations.custom_logger import CustomLogger  # noqa: TID251
    from litellm.proxy.proxy_server import app  # noqa: TID251

    class ServerOfRequest(CustomLogger):  # type: ignore[misc]
        """Of the servers that LiteLLM knows, the one that the gate has chosen."""

        watching: asyncio.Task[None] | None = None  # kept, so that it runs on

        async def async_filter_deployments(
            self, healthy_deployments: list[Any], **_request: Any
        ) -> list[Any]:
            call = SERVER_CALL.get()
            if call is None:
                return healthy_deployments
            api_base = f"{call.server.url}/v1"
            return [
                deployment
                for deployment in healthy_deployments
                if deployment["litellm_params"]["api_base"] == api_base
            ]

    path = Path(os.environ["START_LLM_GATE"])
    settings = json.loads(path.read_text())["start_llm_gate"]

    def report(line: str) -> None:
        """Tell the server. It may be gone."""
        with suppress(OSError):
            os.write(int(os.environ[REPORTS]), f"{line}\n".encode())

    client = client_of_server()
    litellm.aclient_session = client
    servers = Replicas(
        [Replica(**server) for server in settings.pop("servers")],
        client,
        model_id=settings.pop("model_id"),
        assignments_file=path.with_suffix(".assignments"),
        report=report,
    )
    named = {
        name: Replicas([Replica(**server)], client, model_id=name)
        for name, server in settings.pop("named_servers").items()
    }
    callback = ServerOfRequest()
    if servers.are_several:
        callback.watching = asyncio.get_running_loop().create_task(servers.watch())
    router: Any = app.router
    router.middleware_stack = Gate(
        router.middleware_stack, client, servers, named=named, **settings
    )
    return callback


def __getattr__(name: str) -> object:
    """`gate`, made when LiteLLM asks for it: others import this file without LiteLLM."""
    if name == "gate":
        return install_gate()
    raise AttributeError(name)
