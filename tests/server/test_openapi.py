"""web/openapi.json: it lists what the server has, and every answer to anything is one it allows."""

import json
from pathlib import Path
from typing import Any

import nights
import pydantic
import pytest
import schemathesis
import start_llm as s
from http_client import Response, exchange, listening
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from nights import at_night
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core import NOT_SET
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_fixture import MAX_WAIT_SECONDS, Served, user
from tiny_models import TOOLS

FILE = Path(s.__file__).resolve().parent / "web" / "openapi.json"
DESCRIPTION = json.loads(FILE.read_text(encoding="utf-8"))
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
CHECKS += [response_headers_conformance, response_schema_conformance]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EXPLAIN = "/v1/cache/explain"
HELLO = [user("Hello.")]
KEYLESS = {key for key, route in s._ROUTES.items() if not route.needs_key}


@pytest.fixture(scope="module")
def served(folder):
    with Served(folder, default_max_tokens=4, max_kv_size=4096) as server:
        yield server


def ask(served, method, path, body: Any = None, **headers: str) -> Response:
    port = served.state.config.mlx_port
    return exchange(port, method, path, body, **headers)


def closed(schema: Any) -> Any:
    """The same, where an object has no more fields than are described."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict):
        parts.setdefault("additionalProperties", False)
    return parts


CLOSED = closed(DESCRIPTION["components"])


def check_it_is(schema: Any, body: Any, components: Any = CLOSED) -> None:
    """`schema`: itself or a name of one."""
    if isinstance(schema, str):
        schema = {"$ref": f"#/components/schemas/{schema}"}
    validator = Draft202012Validator({**schema, "components": components})
    fault = best_match(validator.iter_errors(body))
    text = json.dumps(body)[:1500]
    assert fault is None, f"{fault.json_path}: {fault.message[:300]} in {text}"


def check(answer: Response, path: str, method: str = "POST") -> Any:
    """The body, which is one that the description has for this status, and gives nothing away."""
    status, headers, payload = answer
    described = DESCRIPTION["paths"][path][method.lower()]["responses"]
    assert str(status) in described, (status, payload[:300])

    response = described[str(status)]
    if "$ref" in response:
        name = response["$ref"].rpartition("/")[2]
        response = DESCRIPTION["components"]["responses"][name]
    kind = headers["Content-Type"].partition(";")[0]

    assert kind in response["content"]

    for name, header in response.get("headers", {}).items():
        assert name in headers or not header.get("required")
    check_it_is_decent(payload)

    if kind != "application/json":
        return payload.decode()
    body = json.loads(payload)
    check_it_is(closed(response["content"][kind]["schema"]), body)

    return body


def check_it_is_decent(payload: bytes) -> None:
    for words in (b"Traceback", b'File "', b"[metal", b"start-llm.py", b"/tmp/"):
        assert words not in payload
    assert b"site-packages" not in payload


def check_it_serves(served) -> None:
    served.state.engine.is_draining = False  # by POST /v1/drain
    assert ask(served, "POST", CHAT, {"messages": HELLO})[0] == 200


TYPES = {  # of bodies, as the server writes them
    "Status": s.StatusBody,
    "Request": s.RequestRow,
    "Health": s.HealthBody,
    "Proxy": s.ProxyBody,
    "Replica": s.ReplicaReport,
}
PARTS = {  # of the status
    "divergences": s.Divergence,
    "refusals": s.Refusal,
    "totals": s.Totals,
    "cache": s.EntryReport,
    "sessions": s.SessionRow,
    "disk": s.DiskReport,
}


@pytest.mark.parametrize("name", [*TYPES, *PARTS])
def test_the_file_describes_the_fields_of_the_servers_own_types(name):
    schemas = DESCRIPTION["components"]["schemas"]
    described = schemas.get(name) or schemas["Status"]["properties"][name]
    described = described.get("items", described)
    own = pydantic.TypeAdapter({**TYPES, **PARTS}[name]).json_schema()
    assert set(described["properties"]) == set(own["properties"])
    assert set(described["required"]) == set(own["required"])


# -- the file --------------------------------------------------------------------------------------


def test_it_lists_the_routes_of_the_server_and_no_other():
    listed = {
        (method.upper(), path)
        for path, operations in DESCRIPTION["paths"].items()
        for method in operations
    }
    served = {key for key in s._ROUTES if key != s._PREFLIGHT}
    assert listed == {(method, path.replace("*", "{id}")) for method, path in served}


def test_those_that_need_no_key_say_so():
    free = {
        (method.upper(), path)
        for path, operations in DESCRIPTION["paths"].items()
        for method, operation in operations.items()
        if operation.get("security") == []
    }
    assert free == KEYLESS - {s._PREFLIGHT}


def test_it_is_valid_openapi_of_valid_schemas():
    SCHEMA.validate()
    assert DESCRIPTION["openapi"].startswith("3.1.")
    for schema in DESCRIPTION["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def fields(name: str) -> set[str]:
    schema = DESCRIPTION["components"]["schemas"][name]
    inner = (
        fields(part["$ref"].rpartition("/")[2]) for part in schema.get("allOf", ())
    )
    return set(schema["properties"]).union(*inner)


def test_every_field_that_is_read_is_described():
    sampling = set(s.SamplingParams.model_fields)
    places = s._THINKING_FIELDS + s._BUDGET_FIELDS
    thinking = {name.partition(".")[0] for name in places}
    chat = set(s._ChatBody.model_fields)
    assert thinking | sampling | chat <= fields("ChatRequest")
    assert sampling | set(s._CompletionBody.model_fields) <= fields("CompletionRequest")
    refusals = set(s.RequestBody.model_fields) - {"model", "stream", "max_tokens"}
    messages = set(s._MessagesBody.model_fields) - refusals
    assert sampling | messages <= fields("MessagesRequest")


# -- real replies ----------------------------------------------------------------------------------

LONG = {"max_tokens": 16, "temperature": 0}
MESSAGES_TOOLS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
PATHS = ["/", "/health", "/openapi.json", "/metrics", "/v1/models", "/v1/status"]
PATHS.append("/version")
REQUESTS = [
    *(("GET", path, None, {}) for path in PATHS),
    ("GET", "/", None, {"Accept": "text/html"}),
    *(("POST", path, {"messages": HELLO, **fields}, {}) for path, fields in (
        (CHAT, {"tools": TOOLS, **LONG}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (MESSAGES, {"thinking": {"type": "enabled"}, **LONG}),
        (MESSAGES, {"tools": MESSAGES_TOOLS, **LONG}),
        (COUNT, {}),
        (EXPLAIN, {}),
        (EXPLAIN, {"system": "You help."}))),
    ("POST", TEXT, {"prompt": "Hello."}, {}),
    ("POST", EXPLAIN, {"prompt": "Hello."}, {}),
    ("DELETE", "/v1/cache", None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "headers"), REQUESTS)
def test_real_replies_are_as_described_to_the_last_field(
    served, method, path, body, headers
):
    answer = ask(served, method, path, body, **headers)
    assert answer[0] == 200

    check(answer, path, method)

    names = {CHAT: "ChatRequest", TEXT: "CompletionRequest", EXPLAIN: "AnyRequest"}
    if body:
        name = names.get(path, "MessagesRequest")
        check_it_is(name, body, DESCRIPTION["components"])


def test_a_model_is_found_by_its_name_and_another_is_not(served):
    body = check(ask(served, "GET", "/v1/models"), "/v1/models", "GET")
    (model,) = body["data"]
    found = ask(served, "GET", f"/v1/models/{model['id']}")
    assert check(found, "/v1/models/{id}", "GET") == model

    missing = ask(served, "GET", "/v1/models/other")
    assert missing[0] == 404
    assert check(missing, "/v1/models/{id}", "GET")


def test_the_status_is_as_described_while_a_request_runs(served):
    answers = []
    fields = {"messages": [user("Hello. " * 200)], "session_id": "s"}

    def look(_fed):
        answers.append(ask(served, "GET", "/v1/status"))

    with served.holding(look):
        assert ask(served, "POST", CHAT, fields)[0] == 200
    bodies = [check(answer, "/v1/status", "GET") for answer in answers]
    assert any(body["requests"] for body in bodies)
    assert ask(served, "GET", "/nothing")[0] == 404

    body = check(ask(served, "GET", "/v1/status"), "/v1/status", "GET")
    assert body["recent"]
    assert body["refusals"]


def test_explanations_are_as_described(served):
    talk = [{"role": "system", "content": "You help. " * 100}, *HELLO]
    request = {"messages": talk, "session_id": "explained"}
    assert ask(served, "POST", CHAT, request)[0] == 200

    talk[0]["content"] = "EDITED " + talk[0]["content"]
    body = check(ask(served, "POST", EXPLAIN, request), EXPLAIN)
    assert body["why_not_more"]["message"] == 0

    request["tools"] = TOOLS
    body = check(ask(served, "POST", EXPLAIN, request), EXPLAIN)
    assert "tools" in body["why_not_more"]["sentence"]


def events(answer: Response) -> list[str]:
    status, headers, payload = answer
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    return payload.decode().removesuffix("\n\n").split("\n\n")


@pytest.mark.parametrize(("path", "name"), [(CHAT, "ChatChunk"), (TEXT, "Completion")])
@pytest.mark.parametrize("usage", [True, False])
def test_every_event_of_a_stream_is_as_described(served, path, name, usage):
    options = {"stream_options": {"include_usage": usage}, "return_progress": usage}
    body = {"stream": True, **options, **LONG}
    if path == TEXT:
        body["prompt"] = "Hello."
    else:
        body["messages"] = HELLO
        body["tools"] = TOOLS
    *chunks, end = events(ask(served, "POST", path, body))

    assert end == "data: [DONE]"
    assert len(chunks) > 2

    bodies = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    has_progress = any("prompt_progress" in body for body in bodies)
    assert has_progress == (usage and path == CHAT)
    for body in bodies:
        check_it_is(name, body)


def test_every_event_of_a_messages_stream_is_as_described(served):
    body = {"messages": HELLO, "tools": MESSAGES_TOOLS, "stream": True, **LONG}
    for event in events(ask(served, "POST", MESSAGES, body)):
        name, _, data = event.removeprefix("event: ").partition("\ndata: ")
        assert json.loads(data)["type"] == name
        check_it_is("MessagesEvent", json.loads(data))


def body_of(method: str, path: str) -> Any:
    if method != "POST":
        return None
    return {"prompt": "Hello."} if path == TEXT else {"messages": HELLO}


EVERY = [tuple(label.split()) for label in OPERATIONS]


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_refusals_are_as_described(served, method, path):
    real = path.replace("{id}", "x")
    refusals = {403: {"Host": "evil.example"}}
    if method == "POST":
        refusals[413] = {"Content-Length": str(10**12)}
        refusals[415] = {"Content-Encoding": "gzip"}
    for status, headers in refusals.items():
        answer = ask(served, method, real, body_of(method, path), **headers)
        assert answer[0] == status
        check(answer, path, method)

    if method == "POST" and path != "/v1/drain":  # which reads no body
        for body in (b"", b"{", b"[]", b"{}", b"\xff"):
            answer = ask(served, method, real, body)
            assert answer[0] == 400
            check(answer, path, method)


@pytest.mark.parametrize(
    "path", [*DESCRIPTION["paths"], "/v1/none", "/v1/messages/none"]
)
def test_other_methods_and_paths_are_refused_as_described(served, path):
    api = "Messages" if path.startswith(MESSAGES) else ""
    is_there = path in DESCRIPTION["paths"]
    status, headers, payload = ask(served, "PUT", path.replace("{id}", "x"))
    assert status == (405 if is_there else 404)
    check_it_is(f"{api}Error", json.loads(payload))
    if is_there:
        allowed = {method.upper() for method in DESCRIPTION["paths"][path]}
        if "GET" in allowed:
            allowed.add("HEAD")
        assert set(headers["Allow"].split(", ")) == allowed


@pytest.fixture(scope="module")
def loading():
    """The port of a server whose model is never loaded, and that asks for a key."""
    with listening(api_key="secret") as port:
        yield port


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_without_a_key_or_a_model_each_says_so_as_described(loading, method, path):
    real = path.replace("{id}", "x")
    is_open = (method, path) in KEYLESS
    described = DESCRIPTION["paths"][path][method.lower()]["responses"]
    for headers in ({}, {"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        answer = exchange(loading, method, real, body_of(method, path), **headers)
        welcome = 503 if "503" in described else 200
        assert answer[0] == (welcome if headers or is_open else 401)
        check(answer, path, method)


def test_a_full_queue_is_a_503_that_says_when_to_come_again(served, monkeypatch):
    def refuse(job):
        raise s.Overloaded("too many wait")

    monkeypatch.setattr(served.state.engine, "submit", refuse)
    for path in (CHAT, TEXT, MESSAGES):
        answer = ask(served, "POST", path, body_of("POST", path))
        assert answer[0] == 503
        assert answer[1]["Retry-After"] == "2"
        check(answer, path)


# -- every request that can be made up -------------------------------------------------------------


def generated_requests():
    """Each operation, and each with wrong bodies: of the others, any text is a name."""
    for label, operation in OPERATIONS.items():
        yield label, GenerationMode.POSITIVE
        if operation.body:
            yield label, GenerationMode.NEGATIVE


@pytest.mark.parametrize(("label", "mode"), [*generated_requests()])
def test_every_answer_is_one_that_the_description_allows(served, label, mode):
    operation = OPERATIONS[label]
    method, path = label.split()
    takes = bool(operation.body) or bool(list(operation.iter_parameters()))
    url = f"http://127.0.0.1:{served.state.config.mlx_port}"
    n_examples = 3 if takes else 1
    if nights.is_night and method == "POST":
        n_examples = 30

    @settings(
        max_examples=n_examples,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask_it(case):
        response = case.call(base_url=url, timeout=MAX_WAIT_SECONDS)
        case.validate_response(response, checks=CHECKS)
        check_it_is_decent(response.content)
        if response.status_code == 200 and case.body is not NOT_SET:
            # what is taken is described
            schema = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]
            schema = schema["application/json"]["schema"]
            check_it_is(schema, case.body, DESCRIPTION["components"])

    ask_it()
    if nights.is_night or path == "/v1/drain":
        check_it_serves(served)


# -- what no schema says ---------------------------------------------------------------------------


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [*messages, *HELLO], **fields}


def offering(parameters: Any, name: str = "read", **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return chat(tools=[tool], **fields)


def deep(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep(n - 1)}} if n else {}


NO_SCHEMAS: list[Any] = [
    {"type": 7},
    {"type": "thing"},
    {"type": [[], {}]},
    {"properties": [1]},
    {"properties": None},
    {"properties": {"path": 5}},
    {"properties": {"path": {"type": {}}}},
    {"properties": {"path": {"anyOf": [5, None]}}},
    {"properties": {"path": {"enum": 3}}},
    {"properties": {"path": {"$ref": "#/nowhere"}}},
    {"$ref": "#"},
    {"$ref": 5},
    {"required": "x"},
    {"additionalProperties": 5},
    {"pattern": "((("},
]
TEN_THOUSAND = [
    {"role": ("user", "assistant")[i % 2], "content": "Hi."} for i in range(10_001)
]
MANY = [
    ("empty body", CHAT, b""),
    *((f"{n} levels", CHAT, b"[" * n + b"]" * n) for n in (10_000, 1_000_000)),
    ("levels in pieces", CHAT, b'{"messages":' * 10_000 + b"1" + b"}" * 10_000),
    ("levels, mended", CHAT, b'["\\ud800",' + b"[" * 10_000 + b"]" * 10_001),
    ("duplicate keys", CHAT, b'{"messages":1,"messages":[{"role":"user","content":"Hi."}]}'),
    ("not UTF-8", CHAT, b'{"messages":[{"role":"user","content":"\xff"}]}'),
    ("UTF-16", CHAT, json.dumps(chat()).encode("utf-16")),
    ("10,000 messages", CHAT, {"messages": TEN_THOUSAND}),
    ("10,000 messages", MESSAGES, {"messages": TEN_THOUSAND}),
    ("10,000 system messages", CHAT, {"messages": [{"role": "system", "content": "Hi."}] * 10_000}),
    ("10,000 faults", CHAT, {"messages": [5] * 10_000}),
    ("10,000 tools", CHAT, offering({})["tools"] * 10_000),
    ("1 MB content", CHAT, chat(user("x" * 10**6))),
    ("1 MB role", CHAT, chat({"role": "x" * 10**6, "content": ""})),
    ("1 MB model", CHAT, chat(model="x" * 10**6)),
    ("1 MB session", CHAT, chat(session_id="x" * 10**6)),
    ("1 MB tool name", CHAT, offering({}, "x" * 10**6)),
    ("1 MB user", MESSAGES, {"messages": HELLO, "metadata": {"user_id": "x" * 10**6}}),
    ("empty tool name", CHAT, offering({}, "")),
    ("empty name", MESSAGES, {"messages": HELLO, "tools": [{"name": "", "input_schema": {}}]}),
    ("huge token id", CHAT, chat(logit_bias={"9" * 5000: 1})),
    ("two names of a token", CHAT, chat(logit_bias={"1": -100, "01": 100})),
    *((f"{n} levels of a tool", CHAT, offering(deep(n), **fields))
      for n in (20, 90) for fields in ({}, {"tool_choice": "required"})),
]  # fmt: skip
for schema in NO_SCHEMAS:
    free, forced = (
        (json.dumps(schema), CHAT, offering(schema, tool_choice=choice, max_tokens=60))
        for choice in ("auto", "required")
    )
    MANY += [at_night(*free), forced]
for schema in [*NO_SCHEMAS, deep(90)]:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    MANY.append((json.dumps(schema), CHAT, chat(response_format=form)))


@pytest.mark.parametrize(
    ("label", "path", "body"), MANY, ids=lambda value: str(value)[:40]
)
def test_what_no_schema_forbids_has_an_answer_and_then_it_serves(
    served, label, path, body
):
    answer = ask(served, "POST", path, body)
    assert answer[0] in (200, 400), answer[2][:300]
    check(answer, path)
    if nights.is_night or label == MANY[-1][0]:
        check_it_serves(served)


# -- faults that are known and left ----------------------------------------------------------------

ESCAPED = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
FAULTS = [
    (CHAT, chat(temperature=1e-40), 200),
    (CHAT, chat(temperature=1.0, top_p=1e-300), 200),
    (CHAT, chat(temperature=0, repetition_penalty=1e-45, max_tokens=60), 400),
    (CHAT, chat(repetition_penalty=1.2, repetition_context_size=2**62), 200),
    (CHAT, chat({"role": "assistant", "tool_calls": [ESCAPED]}), 200),
]


@pytest.mark.parametrize(("path", "body", "status"), FAULTS)
def test_what_once_was_a_500(served, path, body, status):
    assert ask(served, "POST", path, body)[0] == status
