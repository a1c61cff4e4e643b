"""The gate before LiteLLM, with an application of the test's behind it."""

import asyncio
import json
from typing import Any

import pytest
import start_llm as s
from litellm_gate import Gate
from starlette.exceptions import HTTPException
from start_llm import Config

KEY = "right"
MISSING = "a key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
ROUTES = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("GET", "/v1/models"),
    ("GET", "/docs"),
}


class Behind:
    """Plays LiteLLM: notes what reaches it; without a route it raises as Starlette."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}

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
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"served":true}'})


class Door:
    """A gate and what is behind it."""

    def __init__(self, key: str = "") -> None:
        self.behind = Behind()
        advice = s.advice_by_path(Config(proxy_port=4001, mlx_port=8081))
        self.gate = Gate(
            self.behind, key=key, welcome="Go to http://x:1/", advice=advice
        )

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """The status of an answer, and its body: JSON, or text."""
        target, _, query = path.partition("?")
        sent_headers = [
            (name.replace("_", "-").encode(), value.encode())
            for name, value in headers.items()
        ]
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        halves = [payload[: len(payload) // 2], payload[len(payload) // 2 :]]
        messages = [
            {"type": "http.request", "body": halves[0], "more_body": True},
            {"type": "http.request", "body": halves[1], "more_body": False},
        ]
        answered: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            answered.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": target,
            "query_string": query.encode(),
            "headers": [*sent_headers, (b"content-length", b"%d" % len(payload))],
        }
        asyncio.run(self.gate(scope, receive, send))
        text = b"".join(message.get("body", b"") for message in answered[1:]).decode()
        self.answer_headers = dict(answered[0]["headers"])
        is_json = text.startswith("{")
        return answered[0]["status"], json.loads(text) if is_json else text


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


def test_without_a_key_of_its_own_any_will_do_and_documentation_needs_none():
    assert Door().ask("GET", "/v1/models")[0] == 200
    assert Door().ask("GET", "/v1/models", x_api_key="any")[0] == 200
    assert Door(KEY).ask("GET", "/docs")[0] == 200


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
        ("POST /messages", "/v1/messages"),
        ("POST /v1/v1/messages", "/v1/messages"),
    ],
)
def test_a_path_joined_to_a_base_url_in_the_wrong_way_is_mended(line, path):
    door = Door()
    assert door.ask(*line.split()) == (200, {"served": True})
    assert door.behind.paths == [path]


@pytest.mark.parametrize(
    ("line", "status", "advice"),
    [
        ("POST /api/chat", 404, "http://127.0.0.1:8081/v1/chat/completions"),
        ("GET /api/tags", 404, "http://127.0.0.1:8081/v1/models"),
        ("GET /v1", 404, "http://127.0.0.1:8081/v1"),
        ("GET /version", 404, "http://127.0.0.1:8081/v1"),
        ("GET /v1/chat/completions", 405, "/v1/chat/completions takes POST, not GET: "),
        ("GET /v1/messages", 405, "http://127.0.0.1:8081/v1/messages"),
        ("GET /v1/responses", 405, "http://127.0.0.1:4001/v1/responses"),
    ],
)
def test_a_path_without_a_route_is_answered_with_what_to_use(line, status, advice):
    found, body = Door().ask(*line.split())
    assert found == status
    assert advice in sentence_of(body)
    assert isinstance(body["error"], str) == ("/api/" in line)
    assert ("type" in body) == ("messages" in line)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("POST /v1/embeddings", "no embeddings"),
        ("POST /embeddings", "no embeddings"),
        ("POST /v1/audio/speech", "text only"),
        ("GET /v1/responses/resp_1", "no conversation is stored"),
        ("DELETE /v1/responses/resp_1", "no conversation is stored"),
        ("POST /v1/threads", "no conversation is stored"),
    ],
)
def test_what_a_model_of_text_has_not_does_not_reach_litellm(line, advice):
    door = Door()
    status, body = door.ask(*line.split())
    assert status == 404
    assert advice in sentence_of(body)
    assert door.behind.paths == []


# -- bodies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": {"id": "conv_1"}}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("input[1]", {"input": ["x", {"type": "item_reference", "id": "msg_1"}]}),
    ],
)
def test_a_response_that_names_what_is_stored_nowhere_is_a_400(field, fields):
    door = Door()
    status, body = door.ask("POST", "/v1/responses", {"model": "m", **fields})
    assert (status, body["error"]["param"]) == (400, field)
    assert sentence_of(body).startswith(f"{field}: no conversation is stored here")
    assert door.behind.paths == []


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/chat/completions", "/v1/completions"]
)
def test_stored_messages_are_refused_by_the_other_apis_as_well(path):
    door = Door()
    for field in ("previous_response_id", "conversation", "assistant_id"):
        status, body = door.ask("POST", path, {"prompt": "x", field: "id_1"})
        assert status == 400
        assert sentence_of(body).startswith(f"{field}: no conversation is stored here")
    assert door.behind.paths == []
    assert door.ask("POST", path, {"prompt": "x", "thread_id": "t"})[0] == 200


def test_a_response_that_names_nothing_passes_to_the_byte():
    door = Door()
    sent = b'{ "input": [{"type":"message"}],  "store": true, "conversation": null}'
    assert door.ask("POST", "/v1/responses", sent)[0] == 200
    assert door.ask("POST", "/v1/messages", b'{"metadata":{"user_id":"u"}}')[0] == 200
    assert door.ask("POST", "/v1/chat/completions", b"no json")[0] == 200
    assert door.behind.bodies == [sent, b'{"metadata":{"user_id":"u"}}', b"no json"]


def test_what_litellm_would_drop_of_a_chat_goes_into_its_extra_body():
    door = Door()
    lost = {"thinking": {"type": "enabled"}, "metadata": {"session_id": "s"}}
    chat = {"model": "m", "messages": [], "extra_body": {"a": 1}}

    door.ask("POST", "/v1/chat/completions", {**chat, **lost})

    arrived = door.behind.bodies[-1]
    assert json.loads(arrived) == {**chat, "extra_body": {**lost, "a": 1}}
    assert door.behind.headers[b"content-length"] == b"%d" % len(arrived)


def test_a_chat_without_these_or_with_a_name_of_claude_passes_to_the_byte():
    door = Door()
    for sent in (b'{"model":"m" }', b'{"model":"claude-x" , "thinking":{}}'):
        door.ask("POST", "/v1/chat/completions", sent)
        assert door.behind.bodies[-1] == sent
