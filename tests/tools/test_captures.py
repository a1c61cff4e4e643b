"""SCRIPTS for captures: the proxy changes nothing, each volatile field is found, replays add up.

Real clients' volatile fields are imitated here, one conversation for each.
"""

import contextlib
import http.client
import importlib.util
import json
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from server_fixture import MAX_WAIT_SECONDS

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages?beta=true"


def load_script(name: str) -> ModuleType:
    path = ROOT / "scripts" / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before exec: the scripts import one another by name
    spec.loader.exec_module(module)
    return module


capture_proxy = load_script("capture_proxy")
inspect_capture = load_script("inspect_capture")
replay_capture = load_script("replay_capture")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.005)


# -- servers ---------------------------------------------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """A server that records each request and lets `reply` answer it."""

    daemon_threads = True

    def __init__(self, reply: Callable[["FakeHandler"], None]) -> None:
        self.reply = reply
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), FakeHandler)


class FakeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((f"{self.command} {self.path}", headers, self.body))
        self.server.reply(self)

    do_GET = do_HEAD = do_POST = answer

    def send(self, body: bytes, *, status: int = 200, headers: tuple = ()) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_events(self, *events: Any) -> None:
        self.start_stream()
        for event in events:
            self.send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.send_chunk(b"")


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[int]:
    """Its port."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
            proxy = capture_proxy.CaptureProxy(
                ("127.0.0.1", 0), upstream=upstream, capture=capture
            )
            proxy_port = stack.enter_context(running(proxy))
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
    proxy = proxied(lambda handler: handler.send(b'{"a" :1}', headers=cookies))
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


def test_a_connection_is_kept_and_any_answer_passes(proxied):
    body = b"\xff\x00 no text"

    def reply(handler: FakeHandler) -> None:
        status = 404 if "nothing" in handler.path else 200
        handler.send(body, status=status)

    proxy = proxied(reply)
    responses = []
    with proxy.connect() as connection:
        for method, path in (("GET", "/v1/models"), ("HEAD", "/"), ("GET", "/nothing")):
            connection.request(method, path)
            response = connection.getresponse()
            length = response.getheader("Content-Length")
            responses.append((response.status, length, response.read()))

    assert responses == [(200, "10", body), (200, "10", b""), (404, "10", body)]
    records = proxy.records(3)
    assert [record["response"]["status"] for record in records] == [200, 200, 404]
    assert records[0]["response"]["body_base64"]
    assert [record["seq"] for record in records] == [1, 2, 3]


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


def break_a_body(handler: FakeHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "20")
    handler.end_headers()
    handler.wfile.write(b"data: half")
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("reply", [break_a_stream, break_a_body])
def test_a_response_that_breaks_off_breaks_off_for_the_client(proxied, reply):
    proxy = proxied(reply)
    with proxy.connect() as connection:
        connection.request("POST", CHAT, b"{}")
        with pytest.raises(http.client.IncompleteRead):
            connection.getresponse().read()

    (record,) = proxy.records()
    assert record["response"]["body"] == "data: half"
    assert record["response"]["trouble"].startswith("the server")


def test_a_server_that_is_not_there_is_a_502(proxied):
    proxy = proxied(lambda handler: None)
    proxy.fake.server_close()
    with proxy.connect() as connection:
        connection.request("POST", CHAT, b"{}")
        response = connection.getresponse()
        assert response.status == 502
        assert json.loads(response.read())["error"]["type"] == "capture_proxy"
    assert proxy.records()[0]["response"]["trouble"].startswith("the server")


# -- synthetic conversations -----------------------------------------------------------------------

RULES = "\n".join(
    f"Keep {thing} tidy, and lose no {thing}." for thing in ("boats", "doors", "hats")
)
QUESTION = "Read the notes and tell me what they say."
CARRIER = "<<<BEGIN_{0}>>>\nActive sessions: {{}}\n<<<END_{0}>>>".format(
    "OPENCLAW_INTERNAL_CONTEXT"
)
REMINDER = "<system-reminder>\nPlan mode is on.\n</system-reminder>"
N_STEPS = 5

Message = dict[str, Any]


def same(k: int) -> str:
    return RULES


def exchange(seq: int, body: Any, **fields: Any) -> Any:
    fields = {"path": CHAT, "headers": {}, "status": 200, "reply": "", **fields}
    return capture_proxy.Exchange(seq=seq, method="POST", body=body, **fields)


def called(i: int, arguments: str | None = None) -> Message:
    if arguments is None:
        arguments = json.dumps({"path": f"{i}.txt"})
    function = {"name": "read", "arguments": arguments}
    call = {"id": f"call_{i}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(name: str) -> Message:
    function = {"name": name, "description": f"can {name}"}
    return {"type": "function", "function": function}


def chat(
    system: Callable[[int], str] = same,
    *,
    user: Callable[[int], Any] = lambda k: QUESTION,
    tail: Callable[[int], list[Message]] = lambda k: [],
) -> list[Any]:
    """Requests of an agent: the k-th comes after k calls."""
    exchanges = []
    for k in range(N_STEPS):
        messages = [
            {"role": "system", "content": system(k)},
            {"role": "user", "content": user(k)},
        ]
        for i in range(k):
            messages += [called(i), tool_message(i, f"what {i} says")]
        messages += tail(k)

        body = {"model": "m", "messages": messages, "tools": [tool("read")]}
        exchanges.append(exchange(k + 1, body))
    return exchanges


def tool_message(i: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{i}", "content": content}


def anthropic(
    system: Callable[[int], Any] = same,
    *,
    last: Callable[[Any], Any] = lambda content: content,
) -> list[Any]:
    """The same in Anthropic's API; `last` changes the content of the newest message."""
    exchanges = []
    for k in range(N_STEPS):
        messages: list[Message] = [{"role": "user", "content": QUESTION}]
        for i in range(k):
            use = {
                "type": "tool_use",
                "id": f"toolu_{i}",
                "name": "read",
                "input": {"n": i},
            }
            result = {
                "type": "tool_result",
                "tool_use_id": f"toolu_{i}",
                "content": f"says {i}",
            }
            messages.append({"role": "assistant", "content": [use]})
            messages.append({"role": "user", "content": [result]})

        messages[-1] = {"role": "user", "content": last(messages[-1]["content"])}
        body = {
            "model": "m",
            "system": system(k),
            "messages": messages,
            "max_tokens": 9,
        }
        exchanges.append(exchange(k + 1, body, path=MESSAGES))
    return exchanges


def as_parts(content: Any) -> list[Message]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content)


def with_marker(content: Any) -> list[Message]:
    *first_parts, last_part = as_parts(content)
    return [*first_parts, {**last_part, "cache_control": {"type": "ephemeral"}}]


def with_reminder(content: Any) -> list[Message]:
    return [*as_parts(content), {"type": "text", "text": REMINDER}]


def billing(k: int) -> list[Message]:
    line = f"x-anthropic-billing-header: cc_version=2.1.121.dd4; cc_entrypoint=cli; cch={k + 9}a{k}8e;"  # noqa: E501
    return [{"type": "text", "text": line}, {"type": "text", "text": RULES}]


def inbound(k: int) -> str:
    """Pretty JSON in the middle of the system prompt."""
    context = {"message_id": str(UUID(int=k << 90)), "sender": "cli"}
    context_text = json.dumps(context, indent=2)
    return f"{RULES}\n\n## Inbound context\n{context_text}\n\n{RULES}"


def clock(k: int) -> str:
    return f"{RULES}\nCurrent time: Friday, November 20th, 2026 - {k + 7}:03 AM (UTC)\nBe brief."


def git_status(k: int) -> str:
    status = "(clean)" if k < 2 else "?? out.txt"
    return f"{RULES}\nStatus:\n{status}\n\nBe brief."


def found_in(exchanges: list[Any]) -> dict[str, Any]:
    return inspect_capture.inspect(exchanges).body


# -- finding volatile fields -----------------------------------------------------------------------

VOLATILE = {
    "billing header": (anthropic(billing), "cch", "telemetry", "system[0].text"),
    "id in the system prompt": (
        chat(inbound),
        "message_id",
        "pinned",
        "messages[0].content",
    ),
    "time in the system prompt": (
        chat(clock),
        "current_time",
        "pinned",
        "messages[0].content",
    ),
    "time before a user's text": (
        chat(user=lambda k: f"[Fri 2026-11-20 08:5{k} UTC] {QUESTION}"),
        "timestamp",
        "pinned",
        "messages[*].content",
    ),
    "trailing carrier": (
        chat(tail=lambda k: [{"role": "user", "content": CARRIER.format(k)}]),
        "openclaw_internal_context",
        "transient",
        "messages[-1]",
    ),
    "trailing carrier that stays the same": (
        chat(tail=lambda k: [{"role": "user", "content": CARRIER.format(0)}]),
        "openclaw_internal_context",
        "transient",
        "messages[-1]",
    ),
    "trailing message without tags": (
        chat(
            tail=lambda k: [
                {"role": "user", "content": f"Current time is {k}:03. Go on."}
            ]
        ),
        "current_time_is",
        "transient",
        "messages[-1]",
    ),
    "trailing system message": (
        chat(tail=lambda k: [{"role": "system", "content": REMINDER}]),
        "system_reminder",
        "transient",
        "messages[-1]",
    ),
    "reminder that moves": (
        anthropic(last=with_reminder),
        "system_reminder",
        "transient",
        "messages[*].content[*].text",
    ),
    "reminder that comes and goes": (
        chat(user=lambda k: f"{QUESTION}\n\n{REMINDER}" if k % 2 else QUESTION),
        "system_reminder",
        "transient",
        "messages[*].content",
    ),
}


@pytest.mark.parametrize("case", VOLATILE)
def test_a_volatile_field_is_found_and_its_rule_stills_it(case):
    exchanges, name, rule_class, path = VOLATILE[case]

    report = found_in(exchanges)

    (finding,) = report["volatile"]
    assert finding["name"] == name
    assert finding["class"] == rule_class
    assert finding["path"] == path
    assert (finding["n_requests"], finding["n_compared"]) == (N_STEPS - 1, N_STEPS - 1)
    assert finding["rule"]["regex"].startswith("(?m)")
    assert "value" in re.compile(finding["rule"]["regex"]).groupindex
    assert report["kept"]["as_sent"] < 0.99
    assert report["kept"]["with_rules"] == 1.0
    assert not report["edits"]


def test_place_values_and_share_of_a_field_are_exact():
    exchanges = anthropic(billing)
    line = billing(1)[0]["text"]

    (finding,) = found_in(exchanges)["volatile"]

    example = finding["example"]
    assert (example["seq"], example["line"]) == (2, 1)
    assert example["column"] == line.index("10a18e") + 1
    assert (example["before"], example["after"]) == ("9a08e", "10a18e")
    assert re.search(finding["rule"]["regex"], line)["value"] == "10a18e"

    prompt = line + RULES + QUESTION + 'read {"n":0}' + "says 0"
    n_following = len(prompt) - line.index("10a18e")
    share = round(n_following / len(prompt), 4)
    assert finding["most"] >= share >= finding["share"] - 0.05

    (finding,) = found_in(exchanges[:2])["volatile"]
    assert finding["share"] == share
    assert finding["n_following"] == n_following


def test_ids_are_not_cut_where_they_happen_to_agree():
    (finding,) = found_in(chat(inbound))["volatile"]
    assert UUID(finding["example"]["before"]) != UUID(finding["example"]["after"])
    assert finding["example"]["line"] == inbound(1).split("\n").index("{") + 2


def test_a_section_of_the_system_prompt_gets_a_rule_from_its_heading():
    report = found_in(chat(git_status))
    (finding,) = report["volatile"]
    assert finding["name"] == "status"
    assert finding["class"] == "pinned"
    assert finding["n_requests"] == 1
    assert report["kept"]["with_rules"] == 1.0


# -- what is not volatile --------------------------------------------------------------------------


def questions(n: int) -> list[Any]:
    """Branches: the same messages, then another question each time."""
    body = chat()[-1].body
    answer = {"role": "assistant", "content": "Done."}
    exchanges = []
    for i in range(n):
        question = {"role": "user", "content": f"Question {i}: where is it?"}
        messages = [*body["messages"], answer, question]
        exchanges.append(exchange(20 + i, {**body, "messages": messages}))
    return exchanges


def sub_agents() -> list[Any]:
    """Two agents with one system prompt and tasks that are nearly the same, side by side."""
    first_agent = chat(user=lambda k: "Please count the files in folder 1.")
    second_agent = chat(user=lambda k: "Please count the files in folder 2.")
    exchanges = []
    for pair in zip(first_agent, second_agent, strict=True):
        exchanges += pair
    return exchanges


def title() -> list[Any]:
    system = {"role": "system", "content": "You write short titles."}
    question = {"role": "user", "content": QUESTION}
    return [exchange(1, {"messages": [system, question]})]


@pytest.mark.parametrize(
    "exchanges",
    [
        chat(),
        anthropic(),
        [*title(), *chat(), *questions(4)],
        sub_agents(),
        [*chat(), *anthropic()],
    ],
    ids=["chat", "anthropic", "title and branches", "sub-agents", "both APIs"],
)
def test_conversations_that_only_grow_show_nothing(exchanges):
    report = found_in(exchanges)
    assert report["n_compared"] >= N_STEPS - 1
    assert [report[name] for name in ("volatile", "shape", "edits")] == [[], [], []]
    assert report["kept"] == {"as_sent": 1.0, "with_rules": 1.0}


def test_another_answer_to_the_same_question_is_another_conversation():
    question = {"role": "user", "content": QUESTION}
    next_question = {"role": "user", "content": "Then go on."}
    exchanges = []
    for text in ("The notes are about boats.", "Sorry, I cannot open them!"):
        answer = {"role": "assistant", "content": text}
        messages = [question, answer, next_question]
        exchanges.append(exchange(len(exchanges), {"messages": messages}))

    report = found_in(exchanges)

    assert report["n_conversations"] == 2


def test_markers_and_the_form_of_content_are_shape():
    report = found_in(anthropic(last=with_marker))
    assert not report["volatile"]
    assert {(f["name"], f["n_requests"]) for f in report["shape"]} == {
        ("cache_control", N_STEPS - 1),
        ("content as string, part list or nothing", 1),
    }


def test_arguments_written_otherwise_are_shape():
    question = {"role": "user", "content": QUESTION}
    result = tool_message(0, "it says")
    first_call = called(0, '{"path": "caf\\u00e9", "n": 2.0}')
    same_call = called(0, '{"n":2,"path":"café"}')
    first = {"messages": [question, first_call, result]}
    second = {"messages": [question, same_call, result, called(1), result]}

    report = found_in([exchange(0, first), exchange(1, second)])

    assert [f["name"] for f in report["shape"]] == ["tool arguments re-serialised"]
    assert not report["volatile"]
    assert report["kept"]["as_sent"] == 1.0


def streamed(*deltas: Message) -> str:
    """The body of a stream with these deltas."""
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


def test_a_reply_is_compared_with_its_echo():
    call_start = {
        "index": 0,
        "id": "call_1",
        "function": {"name": "read", "arguments": ""},
    }
    reply = streamed(
        {"reasoning": "I thi"},
        {"reasoning": "nk"},
        {"tool_calls": [call_start]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"n": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "2.0}"}}]},
    )
    question = {"role": "user", "content": QUESTION}
    first = exchange(1, {"messages": [question]}, reply=reply)

    echo = called(1, '{"n":2}')
    echo["content"] = ""
    echo["tool_calls"][0]["id"] = "call1"
    result = {"role": "tool", "tool_call_id": "call1", "content": "it says"}
    second = exchange(2, {"messages": [question, echo, result]})

    report = found_in([first, second])
    assert {f["name"] for f in report["shape"]} == {
        "echo: call ids",
        "echo: content as string, part list or nothing",
        "echo: reasoning dropped",
        "echo: tool arguments re-serialised",
    }
    assert not report["edits"]

    echo["reasoning_content"] = "I think"
    report = found_in([first, second])
    assert "echo: reasoning moved" in {f["name"] for f in report["shape"]}


def test_a_prompt_that_is_rewritten_for_a_retry_is_found():
    question = {"role": "user", "content": QUESTION}
    answer = {"role": "assistant", "content": "Done."}
    text = "And what is in the other file?"
    queued_text = f"[Queued message of an earlier turn]\n{text}"
    body = {"messages": [question, answer, {"role": "user", "content": text}]}
    retry = {"messages": [question, answer, {"role": "user", "content": queued_text}]}

    report = found_in([exchange(1, body, status=503), exchange(2, retry)])
    assert [(f["class"], f["path"]) for f in report["volatile"]] == [
        ("transient", "messages[*].content")
    ]
    assert report["kept"]["with_rules"] == 1.0

    report = found_in([exchange(1, body), exchange(2, retry)])
    assert report["n_conversations"] == 2  # without a failure it is another question


@pytest.mark.parametrize(
    "messages",
    [[None], [{"role": "user", "content": [3, None]}], [{"tool_calls": [3]}], [{}]],
)
def test_malformed_requests_are_no_trouble(messages):
    body = {"messages": messages, "tools": [None]}
    report = found_in([exchange(0, body), exchange(1, {"messages": messages}), *chat()])
    assert not report["volatile"]
    assert report["n_requests"] == N_STEPS + 2


def test_what_no_rule_can_still_is_an_edit():
    exchanges = chat()
    last = exchanges[-1].body
    last["tools"] = [tool("cron"), *last["tools"]]
    last["messages"][3] = {
        **last["messages"][3],
        "content": "[Old tool result content cleared]",
    }

    report = found_in(exchanges)

    assert not report["volatile"]
    assert {(f["name"], f["path"]) for f in report["edits"]} == {
        ("tool_added", "tools"),
        ("old_tool_result", "messages[*].content"),
    }


def test_system_prompts_of_conversations_are_compared_too():
    def chat_on_day(day: int) -> list[Any]:
        return chat(
            lambda k: f"{RULES}\nCurrent date: 2026-11-{day}\n{RULES}",
            user=lambda k: f"{QUESTION} {day}",
        )

    report = found_in([*chat_on_day(20), *chat_on_day(21)])

    assert report["n_conversations"] == 2
    assert not report["volatile"]
    assert [(f["name"], f["class"]) for f in report["between"]] == [
        ("current_date", "pinned")
    ]


# -- files and programs ----------------------------------------------------------------------------


def write_folder(folder: Path, exchanges: list[Any]) -> None:
    """As the recorder of real clients writes them: one numbered file per request."""
    for request in exchanges:
        record = {
            "seq": request.seq,
            "t": 0.1,
            "kind": "chat",
            "method": "POST",
            "path": request.path,
            "headers": [["Host", "x"]],
            "body": request.body,
            "body_raw": "",
            "wire_len": 0,
            "response": {"status": 200, "plan": "A", "text": "hello", "dur_s": 0.1},
        }
        file = folder / f"{request.seq:03d}.json"
        file.write_text(json.dumps(record, indent=1))


def run(script: ModuleType, *arguments: object, monkeypatch: Any) -> int:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    return script.main()


def test_both_capture_formats_say_the_same(proxied, tmp_path, monkeypatch, capsys):
    exchanges = chat(inbound)
    (tmp_path / "numbered").mkdir()
    write_folder(tmp_path / "numbered", exchanges)
    proxy = proxied(lambda handler: handler.send(b"{}"))
    with proxy.connect() as connection:
        for request in exchanges:
            connection.request("POST", request.path, json.dumps(request.body))
            connection.getresponse().read()
    proxy.records(N_STEPS)

    reports = []
    for capture in (tmp_path / "numbered", proxy.capture_file, tmp_path):
        capsys.readouterr()
        assert run(inspect_capture, capture, "--json", monkeypatch=monkeypatch) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1] == reports[2]
    (finding,) = reports[0]["volatile"]
    assert finding["name"] == "message_id"

    assert run(inspect_capture, proxy.capture_file, monkeypatch=monkeypatch) == 0
    assert finding["rule"]["regex"] in capsys.readouterr().out


def test_what_is_no_capture_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.jsonl").write_text('{"seq": 1}\n')
    for path in (tmp_path / "bad.jsonl", tmp_path / "absent.jsonl"):
        assert run(inspect_capture, path, monkeypatch=monkeypatch) == 2
        assert path.name in capsys.readouterr().err


# -- replaying -------------------------------------------------------------------------------------


class Cache:
    """A fake server's replies: usage counts characters, cached is the longest prefix it has had."""

    def __init__(self, *, remembers: bool = True) -> None:
        self.remembers = remembers
        self.texts: list[str] = []
        self.bodies: list[Message] = []

    def __call__(self, handler: FakeHandler) -> None:
        body = json.loads(handler.body)
        self.bodies.append(body)
        text = json.dumps(body["messages"])[:-1]  # the next text goes on here
        n_cached = self._count_cached(text)
        if self.remembers:
            self.texts.append(text)
        if handler.path.startswith("/v1/messages"):
            send_anthropic_stream(handler, len(text), n_cached)
        else:
            send_openai_stream(handler, len(text), n_cached)

    def _count_cached(self, text: str) -> int:
        return max((len(old) for old in self.texts if text.startswith(old)), default=0)


def send_anthropic_stream(handler: FakeHandler, n_prompt: int, n_cached: int) -> None:
    usage = {"input_tokens": n_prompt - n_cached, "cache_read_input_tokens": n_cached}
    text_delta = {"type": "text_delta", "text": "hm"}
    handler.send_events(
        {"message": {"usage": usage}},
        {"type": "ping"},
        {"type": "content_block_delta", "delta": text_delta},
        {"type": "message_delta", "usage": {"output_tokens": 1}},
    )


def send_openai_stream(handler: FakeHandler, n_prompt: int, n_cached: int) -> None:
    details = {"cached_tokens": n_cached}
    usage = {"prompt_tokens": n_prompt, "prompt_tokens_details": details}
    handler.send_events(
        {"choices": []},
        {"choices": [{"delta": {"content": "hm"}}]},
        {"choices": [], "usage": usage},
    )


@pytest.mark.parametrize("exchanges", [chat(), anthropic()], ids=["chat", "anthropic"])
def test_a_replay_counts_what_each_server_had_cached(
    exchanges, tmp_path, monkeypatch, capsys
):
    write_folder(tmp_path, exchanges)
    cache = Cache()
    no_cache = Cache(remembers=False)
    with (
        running(FakeServer(cache)) as port,
        running(FakeServer(no_cache)) as other_port,
    ):
        urls = [f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{other_port}"]
        arguments = [tmp_path, "--base-url", urls[0], "--against", urls[1]]
        arguments += ["--limit", 4, "--model", "x", "--json"]
        assert run(replay_capture, *arguments, monkeypatch=monkeypatch) == 0

    printed = json.loads(capsys.readouterr().out)
    lengths = [len(json.dumps(e.body["messages"])) - 1 for e in exchanges[:4]]
    for url, n_cached in zip(urls, ([0, *lengths[:3]], [0] * 4), strict=True):
        results = printed[url]["requests"]
        assert [result["n_prompt"] for result in results] == lengths
        assert [result["n_cached"] for result in results] == n_cached
        assert all(result["ttft_seconds"] > 0 for result in results)
        assert printed[url]["total"]["hit_share"] == sum(n_cached) / sum(lengths)
    for body in cache.bodies:
        assert (body["max_tokens"], body["model"], body["stream"]) == (1, "x", True)


def test_a_replay_says_what_failed(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path, chat())
    with running(
        FakeServer(lambda handler: handler.send(b"too long", status=400))
    ) as port:
        arguments = (tmp_path, "--base-url", f"http://127.0.0.1:{port}", "--limit", 2)
        assert run(replay_capture, *arguments, monkeypatch=monkeypatch) == 1

    printed = capsys.readouterr()
    assert "failed" in printed.out
    assert "#1: 400: too long" in printed.err
