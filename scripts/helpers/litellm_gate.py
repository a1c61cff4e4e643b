"""What a client of port 4000 meets before LiteLLM: keys, wrong paths, lost fields.

LiteLLM imports this file, since its settings name `litellm_gate.gate` as a callback, and takes
the gate into its application. START_LLM_GATE is the path of those settings; the part
`start_llm_gate` is for the gate:

    key       that a client must send; empty: none
    welcome   the sentence at `/`
    advice    for a path that is not served, and all below it, what to use instead

A request passes the gate as it came, but for these:

    /v1/v1/models, /v1//models      become /v1/models; /messages is /v1/messages
    a chat's thinking, metadata     go into extra_body, for LiteLLM would drop them
"""

from __future__ import annotations

import hmac
import html
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException

type Scope = dict[str, Any]
type Message = dict[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[Message], Awaitable[None]]
type Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# All headers that LiteLLM takes a key from, and Google's parameter of the query.
KEY_HEADERS: Final = (
    "x-litellm-api-key",
    "authorization",
    "api-key",
    "x-api-key",
    "x-goog-api-key",
    "ocp-apim-subscription-key",
)
# Where LiteLLM asks for none: its documentation, pages, and whether it lives.
OPEN_PATHS: Final = (
    "/docs",
    "/openapi.json",
    "/swagger",
    "/ui",
    "/health/liv",
    "/health/readiness",
)
# What stands for messages or a prompt that are stored nowhere here.
STORED_FIELDS: Final = ("previous_response_id", "conversation", "assistant_id")
LOST_FIELDS: Final = ("thinking", "metadata")
# What LiteLLM would send on to a model that writes text.
UNSERVED_PATHS: Final = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/audio",
    "/v1/images",
    "/v1/threads",
    "/v1/assistants",
    "/v1/conversations",
)


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """A request that does not reach LiteLLM."""

    status: int
    sentence: str
    field: str | None = None
    code: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self, path: str) -> object:
        """In the form of the API that was called: Ollama's, Anthropic's or OpenAI's."""
        if path.startswith("/api/"):
            return {"error": self.sentence}
        if path.startswith("/v1/messages"):
            kinds = {401: "authentication_error", 404: "not_found_error"}
            kind = kinds.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.sentence}}
        return {
            "error": {
                "message": self.sentence,
                "type": "invalid_request_error",
                "param": self.field,
                "code": self.code,
            }
        }


@dataclass(frozen=True, slots=True)
class Gate:
    """An ASGI application before that of LiteLLM."""

    app: Application
    key: str
    welcome: str
    advice: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return

        path = plain_path(scope["path"])
        scope = {**scope, "path": path, "raw_path": path.encode()}
        try:
            if path == "/":
                await self._welcome(scope, send)
                return
            scope = check_key(scope, self.key)
            if scope["method"] == "POST":
                scope, receive = await check_body(scope, receive)
            await self._pass_on(scope, receive, send)
        except Refusal as refusal:
            body = json.dumps(refusal.body(path)).encode()
            await respond(send, refusal.status, body, headers=refusal.headers)

    async def _welcome(self, scope: Scope, send: Send) -> None:
        accepted = dict(scope["headers"]).get(b"accept", b"")
        if b"text/html" not in accepted:
            body = json.dumps({"message": self.welcome}).encode()
            await respond(send, 200, body)
            return
        text = html.escape(self.welcome)
        linked = re.sub(
            r"http://[\w.:/\[\]-]*[\w/]", r'<a href="\g<0>">\g<0></a>', text
        )
        page = f"<!DOCTYPE html><title>start-llm: LiteLLM</title><p>{linked}</p>"
        await respond(send, 200, page.encode(), content_type="text/html; charset=utf-8")

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let LiteLLM answer. Raises Refusal if it, or its model, has no such route."""
        path = scope["path"]
        method = scope["method"]
        if path.startswith(UNSERVED_PATHS):
            raise self._refuse_path(path)
        if path.startswith("/v1/responses/") and method != "POST":
            sentence = f"there is nothing at {path[:200]}: {self.advice['/v1/threads']}"
            raise Refusal(404, sentence)
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
            headers = ((b"allow", allowed.encode()),)
            raise Refusal(405, f"{sentence}: {advice}", headers=headers) from None

    def _refuse_path(self, path: str) -> Refusal:
        advice = find_advice(path, self.advice)
        return Refusal(404, f"there is nothing at {path[:200]}: {advice}")


def plain_path(path: str) -> str:
    """A path however a client joined it to its base URL: /v1/v1/models is /v1/models.

    Of paths without /v1, LiteLLM has all that matter, but for /messages.
    """
    path = re.sub("/{2,}", "/", path)
    while path.startswith("/v1/v1"):
        path = path.removeprefix("/v1")
    return f"/v1{path}" if path.startswith(("/messages", "/embeddings")) else path


def find_advice(path: str, advice: Mapping[str, str]) -> str:
    """What is said of a path, or of the nearest one above it."""
    while path not in advice:
        path = path.rpartition("/")[0] or "/"
    return advice[path]


# -- keys ------------------------------------------------------------------------------


def check_key(scope: Scope, key: str) -> Scope:
    """The request with the key where LiteLLM looks first. Raises Refusal: a 401.

    LiteLLM would look a wrong key up in a database that is not there, and fails where
    there is none.
    """
    if not key or scope["path"].startswith(OPEN_PATHS):
        return scope
    sent_keys = find_keys(scope)
    if any(hmac.compare_digest(sent_key, key.encode()) for sent_key in sent_keys):
        names = [name.encode() for name in KEY_HEADERS]
        other_headers = [
            header for header in scope["headers"] if header[0] not in names
        ]
        bearer = (b"authorization", b"Bearer " + key.encode())
        return {**scope, "headers": [*other_headers, bearer]}

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
        headers=((b"www-authenticate", b"Bearer"),),
    )


def find_keys(scope: Scope) -> list[bytes]:
    """Every key of a request, as bytes."""
    names = [name.encode() for name in KEY_HEADERS]
    values = [value for name, value in scope["headers"] if name in names]
    values += parse_qs(scope["query_string"]).get(b"key", [])
    return [re.sub(rb"(?i)^bearer(\s+|$)", b"", value.strip()) for value in values]


# -- bodies ----------------------------------------------------------------------------


async def check_body(scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
    """The request with a body that loses nothing. Raises Refusal: a 400."""
    path = scope["path"].rstrip("/")
    if not path.endswith(("/completions", "/messages", "/responses")):
        return scope, receive

    payload = await read_body(receive)
    body = parse_object(payload)
    refuse_stored(body, is_response=path.endswith("/responses"))
    if path.endswith("/chat/completions") and keep_lost_fields(body):
        payload = json.dumps(body).encode()
    return with_length(scope, len(payload)), replaying(payload, receive)


def parse_object(payload: bytes) -> dict[str, Any]:
    """A JSON object; anything else is LiteLLM's to refuse."""
    try:
        body = json.loads(payload)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def refuse_stored(body: Mapping[str, Any], *, is_response: bool) -> None:
    """Raise Refusal for a field that names stored messages: the reply would lack them.

    The Responses API has a stored prompt, too, and items that are known by their id.
    """
    fields = [name for name in STORED_FIELDS if body.get(name)]
    items = body.get("input")
    if is_response and body.get("prompt"):
        fields.append("prompt")
    if is_response and isinstance(items, list):
        fields += [
            f"input[{index}]"
            for index, item in enumerate(items)
            if isinstance(item, dict) and item.get("type") == "item_reference"
        ]
    if fields:
        sentence = "no conversation is stored here: leave it out, send all messages"
        raise Refusal(400, f"{fields[0]}: {sentence}", field=fields[0])


def keep_lost_fields(body: dict[str, Any]) -> bool:
    """Move what LiteLLM would drop where it passes on all. Whether there was any.

    Names of Claude go by Anthropic's API, for which LiteLLM translates them itself.
    """
    if str(body.get("model")).startswith("claude-"):
        return False
    extra_body = body.get("extra_body") or {}
    lost = {name: body[name] for name in LOST_FIELDS if body.get(name) is not None}
    if not lost or not isinstance(extra_body, dict):
        return False
    for name in lost:
        del body[name]
    body["extra_body"] = {**lost, **extra_body}
    return True


async def read_body(receive: Receive) -> bytes:
    """All that a client sends; what came if it leaves."""
    parts = []
    has_more = True
    while has_more:
        message = await receive()
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def replaying(payload: bytes, receive: Receive) -> Receive:
    """Receive a body that was read, then what comes after it."""
    unread = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again


def with_length(scope: Scope, n_bytes: int) -> Scope:
    framing = (b"content-length", b"transfer-encoding")
    other_headers = [header for header in scope["headers"] if header[0] not in framing]
    return {**scope, "headers": [*other_headers, (b"content-length", b"%d" % n_bytes)]}


# -- responses -------------------------------------------------------------------------


async def respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Send a whole response."""
    all_headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", b"%d" % len(body)),
        *headers,
    ]
    head = {"type": "http.response.start", "status": status, "headers": all_headers}
    await send(head)
    await send({"type": "http.response.body", "body": body})


# -- inside LiteLLM --------------------------------------------------------------------


def install_gate() -> object:
    """Take the gate into LiteLLM's application, which runs by now. Returns a callback.

    A middleware cannot be added any more, but the router's own stack can be wrapped:
    inside of what LiteLLM does for web pages (CORS).
    """
    # It is LiteLLM that runs this function, in its own process.
    from litellm.integrations.custom_logger import CustomLogger  # noqa: TID251
    from litellm.proxy.proxy_server import app  # noqa: TID251

    settings = json.loads(Path(os.environ["START_LLM_GATE"]).read_text())
    router: Any = app.router
    router.middleware_stack = Gate(
        router.middleware_stack, **settings["start_llm_gate"]
    )
    return CustomLogger()


def __getattr__(name: str) -> object:
    """`gate`, made when LiteLLM asks for it: others import this file without LiteLLM."""
    if name == "gate":
        return install_gate()
    raise AttributeError(name)
