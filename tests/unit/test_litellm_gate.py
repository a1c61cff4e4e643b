"""The gate before LiteLLM, with an application and a server of the test's behind it."""

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import litellm_gate
import pytest
from gate_client import SETTINGS, ask_gate
from litellm_gate import SERVER_CALL, Gate, client_of_server, plain_path
from refusals import HELLO, REFUSALS, of_google
from replica_choice import MAX_ANSWER_BYTES, Replica, Replicas
from starlette.exceptions import HTTPException

KEY = "right"
MISSING = "a key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
ROUTES = {
    ("POST", "/v1/responses"),
    ("POST", "/v1beta/models/m:generateContent"),
    ("GET", "/v1/models"),
    ("GET", "/health/liveliness"),
}
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
GOOGLE = "/v1beta/models/m:generateContent"


PING = {"type": "http.response.body", "body": b": ping\n\n"}


class Behind:
    """Plays LiteLLM: notes what reaches it; without a route it raises as Starlette.

    It answers with `answer`. With `asks`, it makes a chat of a body first; with a `failure`
    it raises that.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}
        self.answer = (200, b'{"translated":true}')
        self.asks = True
        self.pings_first = False
        self.failure: Exception | None = None
        self._client = client

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        self.headers = dict(scope["headers"])
        body = b""
        has_more = True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        self.bodies.append(body)

        if (scope["method"], scope["path"]) not in ROUTES:
            methods = [method for method, path in ROUTES if path == scope["path"]]
            if not methods:
                raise HTTPException(404)
            raise HTTPException(405, headers={"Allow": ", ".join(methods)})
        start = {"type": "http.response.start", "status": self.answer[0], "headers": []}
        if self.pings_first:
            await send(start)
            await send({**PING, "more_body": True})
        if self.asks and scope["method"] == "POST":
            await self._client.post(f"http://x:1{CHAT}", json={"chat": True})
        if self.failure:
            raise self.failure
        if not self.pings_first:
            await send(start)
        await send({"type": "http.response.body", "body": self.answer[1]})


class Door:
    """A gate and what is behind it: LiteLLM, and the server, which answers with `answer`."""

    def __init__(
        self,
        key: str = "",
        server_key: str = "",
        named: dict[str, str] | None = None,
        **fields: Any,
    ) -> None:
        self.requests: list[httpx.Request] = []  # to the server
        self.answer = httpx.Response(200, json={"served": True})
        client = client_of_server(httpx.MockTransport(self._serve))
        self.behind = Behind(client)
        others = {
            name: Replicas([Replica(url, "")], client)
            for name, url in (named or {}).items()
        }
        first = Replicas([Replica("http://x:1", server_key)], client)
        settings = {**SETTINGS, "key": key, "named": others, **fields}
        self.gate = Gate(self.behind, client, first, **settings)

    async def _serve(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.requests.append(request)
        if self.answer.status_code == 599:
            raise httpx.ConnectError("refused")

        async def parts() -> AsyncIterator[bytes]:
            yield self.answer.content

        status, headers = self.answer.status_code, self.answer.headers
        return httpx.Response(status, headers=headers, content=parts())

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has reached LiteLLM or the server."""
        return not (self.behind.paths or self.requests)

    def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, Any]:
        """The status of an answer, and its body: JSON, or text."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = asyncio.run(ask_gate(self.gate, method, path, payload, headers))
        status, self.answer_headers, text = answer
        is_json = text.startswith("{")
        return status, json.loads(text) if is_json else text


def sentence_of(body: Any) -> str:
    error = body["error"]
    return error if isinstance(error, str) else error["message"]


# -- keys ------------------------------------------------------------------------------


def test_a_missing_key_is_a_401_that_says_how_to_send_one():
    door = Door(KEY)
    for headers in ({}, {"authorization": "Bearer "}, {"x_api_key": ""}):
        status, body = door.ask("GET", "/v1/models", **headers)
        assert (status, sentence_of(body)) == (401, MISSING)
        assert body["error"]["code"] == "invalid_api_key"
        assert door.answer_headers[b"www-authenticate"] == b"Bearer"
    assert door.behind.paths == []


def test_a_wrong_key_is_a_401_that_says_that_it_is_wrong():
    door = Door(KEY)
    for headers in ({"authorization": "Bearer sk-no"}, {"x_api_key": "righ"}):
        for path in ("/v1/models", "/v1/messages", "/nothing"):
            status, body = door.ask("POST", path, {}, **headers)
            assert status == 401
            assert "the key that was sent is wrong" in sentence_of(body)
            assert "x-api-key" in sentence_of(body)

    assert door.ask("GET", "/v1/models?key=wrong")[0] == 401
    assert door.behind.paths == []


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer right"},
        {"authorization": "bearer  right"},
        {"x_api_key": "right"},
        {"x_goog_api_key": "right"},
        {"api_key": "right"},
        {"x_api_key": "right", "authorization": "Bearer of-another-service"},
    ],
)
def test_a_right_key_passes_wherever_it_stands(headers):
    door = Door(KEY)
    assert door.ask("GET", "/v1/models", **headers, x_session_id="s")[0] == 200
    assert door.behind.headers[b"authorization"] == b"Bearer right"
    assert b"x-api-key" not in door.behind.headers
    assert door.behind.headers[b"x-session-id"] == b"s"
    assert door.ask("GET", "/v1/models?key=right")[0] == 200


def test_without_a_key_of_its_own_any_will_do_and_health_needs_none():
    assert Door().ask("GET", "/v1/models")[0] == 200
    assert Door().ask("GET", "/v1/models", x_api_key="any")[0] == 200
    assert Door(KEY).ask("GET", "/health/liveliness")[0] == 200
    assert Door(KEY).ask("GET", "/docs")[0] == 401


# -- paths -----------------------------------------------------------------------------


def test_the_root_says_what_it_is_as_a_page_or_as_json():
    for door in (Door(), Door(KEY)):
        assert door.ask("GET", "/") == (200, {"message": "Go to http://x:1/"})
        status, page = door.ask("GET", "/", accept="text/html,*/*")
        assert status == 200
        assert '<a href="http://x:1/">' in page
        assert door.answer_headers[b"content-type"].startswith(b"text/html")


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("GET /v1/v1/models", "/v1/models"),
        ("GET /v1//models", "/v1/models"),
        ("GET //v1/models", "/v1/models"),
        ("POST /responses", "/v1/responses"),
    ],
)
def test_a_path_joined_to_a_base_url_in_the_wrong_way_is_mended(line, path):
    door = Door()
    assert door.ask(*line.split(), {"input": "x"}) == (200, {"translated": True})
    assert door.behind.paths == [path]


@pytest.mark.parametrize(
    ("line", "status", "advice"),
    [
        ("POST /api/chat", 404, "/v1/chat/completions"),
        ("GET /api/tags", 404, "/v1/models"),
        ("GET /v1", 404, "/v1"),
        ("GET /version", 404, "/v1"),
        ("GET /v1/responses", 405, "PROXY_PORT"),
    ],
)
def test_a_path_without_a_route_is_answered_with_what_to_use(line, status, advice):
    found, body = Door().ask(*line.split())
    assert found == status
    assert advice in sentence_of(body)
    assert isinstance(body["error"], str) == ("/api/" in line)


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        ("POST /v1/embeddings, POST /embeddings, POST /rerank", "no embeddings"),
        ("POST /v1/audio/speech, POST /images/generations", "text only"),
        ("GET /v1/responses/a, DELETE /v1/responses/a", "no conversation is stored"),
        ("POST /v1/threads, POST /threads", "no conversation is stored"),
    ],
)
def test_what_a_model_of_text_has_not_does_not_reach_litellm(lines, advice):
    for line in lines.split(", "):
        door = Door()
        status, body = door.ask(*line.split())
        assert status == 404
        assert advice in sentence_of(body)
        assert door.is_untouched


@pytest.mark.parametrize(
    "line",
    [
        "DELETE /v1/messages/../cache",
        "GET /v1/messages/../../metrics",
        "GET /v1/messages/%2e%2E/status",
        "GET /v1/messages/.%2e",
        "GET /docs/../v1/status",
    ],
)
@pytest.mark.parametrize("key", ["", KEY])
def test_a_path_with_dots_does_not_reach_the_server(line, key):
    """A client of HTTP would take it for another path, and the gate adds the server's key."""
    door = Door(key, server_key="of-the-server")
    door.ask(*line.split())
    assert door.requests == []


def test_the_path_of_a_large_request_line_is_read_at_once():
    for path in ("//v1" * 20_000, "/v1" * 20_000):
        began = time.process_time()
        plain_path(path)
        assert time.process_time() - began < 1


# -- what the server has ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (f"POST {CHAT}", CHAT),
        ("POST /chat/completions", CHAT),
        ("POST /v1/v1/chat/completions/", CHAT),
        ("POST /v1/completions", "/v1/completions"),
        ("POST /v1/messages?beta=true", "/v1/messages?beta=true"),
        ("POST /messages", "/v1/messages"),
        ("POST /v1/v1/messages", "/v1/messages"),
        ("POST /v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("GET /v1/messages", "/v1/messages"),
        ("GET /health", "/health"),
    ],
)
def test_what_the_server_has_goes_to_it_and_never_to_litellm(line, path):
    door = Door()
    assert door.ask(*line.split()) == (200, {"served": True})
    assert [str(request.url) for request in door.requests] == [f"http://x:1{path}"]
    assert door.behind.paths == []


@pytest.mark.parametrize("body", [b"", b"no json", b'{"messages": 5, "tools" :[ 1]}'])
def test_a_body_goes_on_to_the_byte_and_so_does_an_error(body):
    door = Door()
    answer = b'{"error": {"message": "messages: should be a list", "code": "c"}}'
    headers = {"retry-after": "7", "connection": "close"}
    door.answer = httpx.Response(429, content=answer, headers=headers)

    status, answered = door.ask("POST", CHAT, body)

    assert (status, answered) == (429, json.loads(answer))
    assert door.requests[0].content == body
    assert door.answer_headers[b"retry-after"] == b"7"
    assert b"connection" not in door.answer_headers


def test_headers_go_on_but_for_keys_and_what_is_of_the_connection():
    door = Door(KEY, server_key="of-the-server")
    headers = {"x_session_id": "s", "user_agent": "agent"}
    door.ask("POST", CHAT, {}, x_api_key=KEY, host="127.0.0.1:4000", **headers)
    sent = door.requests[0].headers
    assert sent["authorization"] == "Bearer of-the-server"
    assert "x-api-key" not in sent
    assert sent["host"] == "x:1"
    assert {name: sent[name.replace("_", "-")] for name in headers} == headers

    keyless = Door()
    keyless.ask("POST", CHAT, {}, authorization="Bearer unused")
    assert "authorization" not in keyless.requests[0].headers


ALL_WAYS = [
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("POST", CHAT),
    ("POST", "/v1/messages"),
    ("POST", RESPONSES),
    ("POST", GOOGLE),
]
BODY = {"input": "Hello.", "contents": [{"parts": [{"text": "Hello."}]}]}


NAMES = ["localhost", "127.0.0.1", "mac.local"]


@pytest.mark.parametrize(("method", "path"), ALL_WAYS)
def test_a_page_that_may_not_ask_reaches_nothing(method, path):
    for host, origin, setting in [
        ("evil.example", None, "ALLOWED_HOSTS"),
        ("evil.example:4000", None, "ALLOWED_HOSTS"),
        ("localhost.evil.example", None, "ALLOWED_HOSTS"),
        ("", None, "ALLOWED_HOSTS"),
        ("evil.example", "http://evil.example", "ALLOWED_HOSTS"),
        ("localhost:4000", "http://evil.example", "CORS_ORIGINS"),
        ("localhost:4000", "http://localhost:9", "CORS_ORIGINS"),
        ("localhost:4000", "null", "CORS_ORIGINS"),
        ("localhost:4000", "", "CORS_ORIGINS"),
    ]:
        door = Door(host_names=NAMES, cors_origins=["https://page.example"])
        headers = {"host": host} if origin is None else {"host": host, "origin": origin}
        status, body = door.ask(method, path, BODY, **headers)
        assert (status, door.is_untouched) == (403, True), headers
        assert setting in sentence_of(body)


@pytest.mark.parametrize(("method", "path"), ALL_WAYS)
def test_a_page_that_may_ask_is_answered_and_its_origin_is_not_sent_on(method, path):
    for headers in (
        {},
        {"host": "localhost:9000"},  # of a tunnel
        {"host": "LocalHost:9000", "origin": "http://localhost:9000"},
        {"host": "mac.local", "origin": "https://mac.local"},  # it adds TLS
        {"host": "localhost:4000", "origin": "https://page.example"},
    ):
        door = Door(host_names=NAMES, cors_origins=["https://page.example"])
        status, _ = door.ask(method, path, BODY, **headers)
        assert status == 200, headers
        assert not any("origin" in request.headers for request in door.requests)


def test_a_proxy_that_others_reach_has_any_name_and_a_star_means_every_page():
    door = Door(cors_origins=["*"])
    headers = {"host": "mac.lan", "origin": "https://page.example"}
    assert door.ask("POST", RESPONSES, BODY, **headers)[0] == 200


def test_a_websocket_reaches_nothing():
    door = Door()
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": RESPONSES, "headers": []}
    asyncio.run(door.gate(scope, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert door.is_untouched


def test_a_server_that_does_not_answer_is_a_502_in_the_form_of_the_api():
    for path, kind in ((CHAT, "server_error"), ("/v1/messages", "api_error")):
        door = Door()
        door.answer = httpx.Response(599)
        status, body = door.ask("POST", path, {})
        assert (status, body["error"]["type"]) == (502, kind)
        assert "start-llm does not answer at http://x:1" in sentence_of(body)


class Endless(httpx.AsyncBaseTransport):
    """A server, or LiteLLM, that never answers; it notes whether it was told to stop."""

    has_ended = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return await self._wait()

    async def translate(self, _scope: Any, receive: Any, _send: Any) -> None:
        await receive()
        await self._wait()

    async def _wait(self) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended = True


@pytest.mark.parametrize("path", [CHAT, RESPONSES, GOOGLE])
def test_who_leaves_ends_what_is_done_for_them(path):
    """Also where LiteLLM looks for nobody: it would read an endless reply on."""
    endless = Endless()
    client = client_of_server(endless)
    gate = dataclasses.replace(Door().gate, app=endless.translate, client=client)
    messages = [
        {"type": "http.request", "body": json.dumps(BODY).encode()},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    answering = gate({**scope, "headers": []}, receive, send)
    asyncio.run(asyncio.wait_for(answering, timeout=60))
    assert endless.has_ended


# -- what LiteLLM makes a chat of ------------------------------------------------------


def test_a_response_that_names_nothing_passes_to_the_byte():
    door = Door()
    sent = b'{ "input": [{"type":"reasoning"}],  "store": true, "conversation": null}'
    assert door.ask("POST", RESPONSES, sent)[0] == 200
    assert door.behind.bodies == [sent]
    assert door.behind.headers[b"content-length"] == b"%d" % len(sent)


REFUSED = [refusal for refusal in REFUSALS if refusal.api in ("responses", "google")]


@pytest.mark.parametrize(("api", "body", "name", "words"), REFUSED)
def test_a_wrong_body_is_a_400_that_names_its_field_and_reaches_nothing(
    api, body, name, words
):
    verbs = ("generateContent", "streamGenerateContent?alt=sse", "countTokens")
    google_paths = [f"/v1beta/models/a/b:{verb}" for verb in verbs]
    for path in google_paths if api == "google" else [RESPONSES]:
        door = Door()
        status, answer = door.ask("POST", path, body)
        assert status == 400
        assert sentence_of(answer).startswith(f"{name}: {words}" if name else words)
        if api == "google":
            assert answer["error"]["code"] == 400
            assert answer["error"]["status"] == "INVALID_ARGUMENT"
        else:
            assert answer["error"]["param"] == (name or None)
        assert door.is_untouched


def test_a_body_that_is_too_large_is_a_413_that_names_the_setting():
    door = Door()
    status, answer = door.ask("POST", RESPONSES, {"input": "x" * 20_000})
    assert status == 413
    assert "the body is larger than MAX_BODY_BYTES (10000" in sentence_of(answer)
    assert door.is_untouched


def test_what_litellm_would_leave_out_of_googles_bodies_is_written_as_it_reads_it():
    door = Door()
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    system = {"parts": [{"text": "First."}, {"text": "Second."}]}
    body = of_google(HELLO, image, systemInstruction=system)

    assert door.ask("POST", GOOGLE, body) == (200, {"translated": True})

    arrived = json.loads(door.behind.bodies[0])
    parts = [HELLO, {"inline_data": {"mime_type": "image/png", "data": "AAAA"}}]
    assert arrived["contents"] == [{"role": "user", "parts": parts}]
    assert arrived["systemInstruction"] == {"parts": [{"text": "First.\n\nSecond."}]}

    plain = b'{"contents":  [{"parts":[{"text":"x"}]}]}'
    door.ask("POST", GOOGLE, plain)
    assert door.behind.bodies[1] == plain


CAMEL_CASE = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"inline_data": {"mime_type": "a/b", "data": "A"}}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"mime_type": 1}}}]},
        {"role": "user",
         "parts": [{"functionResponse": {"name": "f", "response": {"top_p": 1}}}]},
    ],
    "tools": [{"functionDeclarations": [
        {"name": "f", "parameters": {"properties": {"mime_type": {}}}},
        {"name": "g", "parametersJsonSchema": {"type": "object"}},
    ]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
    "generationConfig": {
        "maxOutputTokens": 9,
        "stopSequences": ["x"],
        "topP": 0.5,
        "responseMimeType": "application/json",
        "responseSchema": {"properties": {"top_p": {}}},
    },
}  # fmt: skip


def test_names_in_snake_case_are_renamed_but_for_schemas_and_payloads():
    """LiteLLM reads the fields of inline data in snake case."""
    names = re.compile(r'"([a-z]+[A-Z]\w+)":')
    text = names.sub(
        lambda m: re.sub("([A-Z])", r"_\1", m[0]).lower(), json.dumps(CAMEL_CASE)
    )
    assert '"function_calling_config":' in text and '"parameters_json_schema":' in text
    door = Door()
    assert door.ask("POST", GOOGLE, text.encode())[0] == 200
    assert json.loads(door.behind.bodies[0]) == CAMEL_CASE


@pytest.mark.parametrize("role", ["tool", "function", None])
def test_the_role_of_a_result_is_written_as_litellm_reads_it(role):
    door = Door()
    part = {"functionResponse": {"name": "f", "response": {"n": 1}}}
    body = {"contents": [{"role": role, "parts": [part]}]}
    assert door.ask("POST", GOOGLE, body)[0] == 200
    content = json.loads(door.behind.bodies[0])["contents"][0]
    assert content.get("role", "user") == "user"
    assert content["parts"] == [part]


def test_null_is_as_good_as_nothing_in_a_body_of_googles():
    door = Door()
    call = {"functionCall": {"name": "f", "args": None}, "text": None}
    body = of_google(call, role="model", tools=None, generationConfig=None)
    assert door.ask("POST", GOOGLE, body)[0] == 200
    calls = of_google({"functionCall": {"name": "f"}}, role="model")
    assert json.loads(door.behind.bodies[0]) == calls


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RESPONSES, {"input": "x"}, "max_output_tokens"),
        (GOOGLE, of_google(HELLO), "generationConfig.maxOutputTokens"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_an_error_of_the_chat_is_the_servers_with_the_clients_names(
    path, body, field, fails
):
    """Whatever LiteLLM makes of it: a 500 in Google's API, an exception."""
    door = Door()
    sentence = "max_tokens: should be 1 or more"
    error = {"message": sentence, "param": "max_tokens", "code": "c"}
    headers = {"retry-after": "3"}
    door.answer = httpx.Response(429, json={"error": error}, headers=headers)
    door.behind.answer = (500, b"'NoneType' object is not iterable")
    door.behind.failure = ValueError("lost") if fails else None

    status, answer = door.ask("POST", path, body)

    assert status == 429
    assert sentence_of(answer) == f"{field}: should be 1 or more"
    assert door.answer_headers[b"retry-after"] == b"3"
    if path == RESPONSES:
        assert (answer["error"]["param"], answer["error"]["code"]) == (field, "c")


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        (
            RESPONSES,
            {"input": "x"},
            {"type": "error", "message": "a", "param": "input"},
        ),
        (GOOGLE, of_google(HELLO), {"code": 400, "message": "a"}),
    ],
)
def test_an_error_after_a_ping_is_the_last_event_of_the_stream(path, body, event):
    door = Door()
    error = {"message": "a", "param": "messages" if path == RESPONSES else None}
    door.answer = httpx.Response(400, json={"error": error})
    door.behind.pings_first = True
    door.behind.answer = (200, b"data: 'NoneType' object\n\n")

    status, text = door.ask("POST", path, body)

    assert status == 200
    ping, _, rest = text.partition("\n\n")
    assert ping == ": ping"
    sent = json.loads(rest.rpartition("data: ")[2])
    assert event.items() <= sent.get("error", sent).items()
    assert rest.startswith("event: error\n") == (path == RESPONSES)
    assert "NoneType" not in rest


@pytest.mark.parametrize(("asks", "status"), [(False, 400), (True, 502)])
@pytest.mark.parametrize("fails", [False, True])
def test_where_litellm_fails_no_words_of_python_reach_the_client(asks, status, fails):
    door = Door()
    door.behind.asks = asks
    door.behind.answer = (400, b"'int' object has no attribute 'get'")
    door.behind.failure = ValueError("astray") if fails else None
    found, answer = door.ask("POST", RESPONSES, {"input": "x"})
    assert found == status
    assert "object" not in sentence_of(answer)
    assert "astray" not in sentence_of(answer)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>Bad gateway</html>",
        b"[]",
        b'{"error": "x"}',
        b'{"error": {}}',
        b"[" * 200_000,
        b'{"error": {"message": "x"}, "' + b" " * MAX_ANSWER_BYTES + b'": 0}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_an_error_of_what_is_no_start_llm_is_a_502(content):
    door = Door()
    door.answer = httpx.Response(502, content=content)
    status, answer = door.ask("POST", RESPONSES, {"input": "x"})
    assert status == 502
    assert "start-llm at http://x:1 did not answer" in sentence_of(answer)


def test_an_endless_reply_is_not_kept_whole(monkeypatch):
    monkeypatch.setattr(litellm_gate, "MAX_REPLY_BYTES", 1_000)
    door = Door()
    door.answer = httpx.Response(200, content=b" " * 2_000)
    status, answer = door.ask("POST", RESPONSES, BODY)
    assert status == 502
    assert "start-llm at http://x:1 did not answer" in sentence_of(answer)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("m", "m"),
        ("maker/Model 4bit", "maker/Model 4bit"),
        ("模型", "%E6%A8%A1%E5%9E%8B"),
        ("modèle", "mod%C3%A8le"),
        ("a\nb", "a%0Ab"),
        (" m", "%20m"),
        ("a\ud800", "a%3F"),
    ],
)
def test_a_name_that_no_header_takes_reaches_litellm_percent_encoded(name, plain):
    door = Door(models=[name])
    assert door.ask("POST", RESPONSES, {"input": "x", "model": name})[0] == 200
    assert json.loads(door.behind.bodies[0])["model"] == plain
    if "\ud800" not in name:
        door.ask("POST", f"/v1beta/models/{name}:generateContent", BODY)
        assert door.behind.paths[1] == f"/v1beta/models/{plain}:generateContent"


def test_where_litellm_alone_fails_the_error_is_json_without_its_words(caplog):
    door = Door()

    async def fail(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("no files_settings")

    gate = dataclasses.replace(door.gate, app=fail)
    door.gate = gate
    for line in ("GET /v1/batches", "POST /key/generate"):
        status, answer = door.ask(*line.split(), {})
        assert status == 501
        assert answer["error"]["param"] is None
        assert "files_settings" not in sentence_of(answer)
        assert "files_settings" in caplog.text


def test_with_strict_names_another_model_is_a_404():
    door = Door(models=["mine", "m"])
    assert door.ask("POST", RESPONSES, {"input": "x", "model": "m"})[0] == 200
    assert door.ask("POST", RESPONSES, {"input": "x"})[0] == 200
    status, answer = door.ask("POST", RESPONSES, {"input": "x", "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    path = GOOGLE.replace("/m:", "/other:")
    assert door.ask("POST", path, of_google(HELLO))[0] == 404
    assert Door().ask("POST", RESPONSES, {"input": "x", "model": "other"})[0] == 200


# -- other models, by name (PROXY_MODELS) ----------------------------------------------


SMALL = {"small": "http://y:2"}


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"]
)
def test_a_body_goes_to_the_server_of_the_model_that_it_names(path):
    door = Door(named=SMALL)
    for name in ("small", "any other", None, 7):
        body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
        assert door.ask("POST", path, body)[0] == 200
        assert json.loads(door.requests[-1].content) == body
    hosts = [request.url.host for request in door.requests]
    assert hosts == ["y", "x", "x", "x"]
    assert not door.behind.paths


def test_what_has_no_body_or_no_model_goes_to_the_first_server():
    door = Door(named=SMALL)
    door.ask("GET", "/health")
    door.ask("POST", CHAT, b"no json")
    door.ask("POST", CHAT, ["small"])
    assert [request.url.host for request in door.requests] == ["x", "x", "x"]


def test_a_body_is_read_before_it_goes_on_only_where_models_have_names():
    """Too large a body of those that are not read is refused by the server itself."""
    body = {"model": "small", "prompt": "x" * 20_000}
    assert Door().ask("POST", CHAT, body)[0] == 200
    door = Door(named=SMALL)
    assert door.ask("POST", CHAT, body)[0] == 413
    assert door.gate.held_bytes.n_bytes == 0


@pytest.mark.parametrize("is_google", [False, True])
def test_a_chat_that_litellm_makes_is_of_the_server_of_its_model(is_google):
    """The callback leaves LiteLLM the deployments of this server alone."""
    chosen = []
    door = Door(named=SMALL, models=["m"])

    class Asked(type(door.behind)):
        async def __call__(self, *args: Any) -> None:
            chosen.append(SERVER_CALL.get().server.url)
            await super().__call__(*args)

    door.behind.__class__ = Asked
    for name in ("m", "small", "no name of any"):
        if is_google:
            path, body = GOOGLE.replace("/m:", f"/{name}:"), of_google(HELLO)
        else:
            path, body = RESPONSES, {"input": "x", "model": name}
        door.ask("POST", path.replace(" ", "%20"), body)
    assert chosen == ["http://x:1", "http://y:2"]


def test_a_named_server_that_does_not_answer_is_told_by_its_url():
    door = Door(named=SMALL)
    door.answer = httpx.Response(599)
    status, answer = door.ask("POST", CHAT, {"model": "small"})
    assert status == 502
    assert "http://y:2" in sentence_of(answer)
