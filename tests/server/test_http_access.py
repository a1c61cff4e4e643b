"""HTTP: who may ask, what a web page may do, and that nobody holds a connection for ever."""

import fcntl
import itertools
import json
import logging
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import start_llm as s
from http_client import (
    answer,
    listening,
    message_of,
    open_connection,
    read_response,
    request_bytes,
    status,
)
from nights import at_night
from server_fixture import MAX_WAIT_SECONDS, Served, user

CHAT = "/v1/chat/completions"
KEY = "sk-örtlich-1"
OTHER_KEY = "sk-second"
PAGE = "https://chat.example"
IDLE = 0.4  # seconds; a request has twice as long


def is_closed(connection: socket.socket) -> bool:
    """Whether nothing but the end comes."""
    with suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def all_heard(connection: socket.socket) -> list[int]:
    """The statuses of every response until the other end closes."""
    received = read_all(connection)
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


# -- keys ------------------------------------------------------------------------------------------

WITHOUT_KEY = [("OPTIONS", "*")]
WITHOUT_KEY += [("GET", path) for path in ("/", "/health", "/openapi.json")]
RIGHT: list[dict[str, str]] = [
    {"Authorization": f"Bearer {KEY}"},
    {"Authorization": f"bearer   {OTHER_KEY}"},
    {"x-api-key": KEY},
    {"X-Api-Key": OTHER_KEY},
    {"x-api-key": "wrong", "Authorization": f"Bearer {KEY}"},
]
WRONG: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": KEY},
    {"Authorization": f"Bearer {KEY},{OTHER_KEY}"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"x-api-key": ""},
    {"x-api-key": f"{KEY}x"},
    {"x-api-key": f"{KEY}, {OTHER_KEY}"},
    {"Cookie": f"x-api-key={KEY}"},
]


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    with listening(api_key=f" {KEY} ,, {OTHER_KEY}") as port:
        yield port


@pytest.mark.parametrize("headers", RIGHT, ids=repr)
def test_each_key_opens_the_server_either_way(locked, headers):
    assert status(locked, **headers) == 200


def test_the_question_of_the_page_whether_a_key_is_needed_is_no_refusal(locked):
    def n_refused():
        _, _, body = answer(locked, line="GET /v1/status", x_api_key=KEY)
        return json.loads(body)["totals"]["refused"]

    n_before = n_refused()
    assert status(locked, line="GET /v1/status") == 401
    assert n_refused() == n_before

    for headers in ({"x_api_key": "wrong"}, {"Authorization": "Bearer wrong"}):
        assert status(locked, line="GET /v1/status", **headers) == 401
    assert status(locked, line="GET /v1/models") == 401
    assert n_refused() == n_before + 3


@pytest.mark.parametrize("headers", WRONG, ids=repr)
def test_nothing_else_opens_it(locked, headers):
    code, response_headers, body = answer(locked, **headers)
    assert code == 401
    assert response_headers["www-authenticate"] == "Bearer"
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_api_key"
    assert "x-api-key" in error["message"]
    assert KEY not in body.decode()


def test_every_route_needs_a_key_but_those_that_say_whether_it_lives(locked):
    for method, path in s._ROUTES:
        for line in (f"{method} {path}", f"{method} {path}/?x=1"):
            is_open = (method, path) in WITHOUT_KEY
            assert (status(locked, line=line) != 401) is is_open, line
    for line in ("GET /nothing", "POST /", "POST /health", "OPTIONS /", "GET *"):
        assert status(locked, line=line) == 401, line
    assert status(locked, line="HEAD /health") == 503
    assert status(locked, line="GET /nothing", x_api_key=KEY) == 404


def test_a_wrong_key_is_told_that_it_is_wrong_and_a_missing_one_that_it_is_needed(
    locked,
):
    for missing in ({}, {"x-api-key": ""}, {"Authorization": "Basic YTpi"}):
        assert "a key is needed" in message_of(answer(locked, **missing)[2])
    for wrong in ({"x-api-key": "none"}, {"Authorization": "Bearer none"}):
        _, _, body = answer(locked, line="POST /v1/messages", body=b"{}", **wrong)
        assert "wrong: it is none of API_KEY" in message_of(body)
        assert json.loads(body)["error"]["type"] == "authentication_error"


def test_without_api_key_any_key_will_do():
    with listening() as port:
        assert {status(port, **headers) for headers in (*RIGHT, *WRONG)} == {200}


def test_a_body_is_not_read_before_the_key(locked):
    with open_connection(locked) as connection:
        connection.sendall(
            request_bytes(locked, line=f"POST {CHAT}", Content_Length=99)
        )
        assert read_response(connection)[0] == 401
        assert is_closed(connection)

    with open_connection(locked) as connection:  # who waits to be asked is asked
        headers = {"Content_Length": 99, "Expect": "100-continue"}
        connection.sendall(request_bytes(locked, line=f"POST {CHAT}", **headers))
        answered = b""
        while piece := connection.recv(1 << 16):
            answered += piece
        assert answered.startswith(b"HTTP/1.1 100 ")
        assert b"HTTP/1.1 401 " in answered


def test_a_refusal_reaches_a_client_that_is_still_sending(locked):
    body = b"x" * (16 << 20)
    for _ in range(5):
        with open_connection(locked) as connection:
            connection.sendall(request_bytes(locked, line=f"POST {CHAT}", body=body))
            assert read_response(connection)[0] == 401
            assert is_closed(connection)


def test_after_a_refusal_without_a_body_the_connection_goes_on(locked):
    with open_connection(locked) as connection:
        for headers, code in [({}, 401), ({"x_api_key": KEY}, 200), ({}, 401)]:
            connection.sendall(request_bytes(locked, **headers))
            assert read_response(connection)[0] == code


def test_keys_are_in_no_log_and_in_no_repr(locked, caplog, monkeypatch):
    monkeypatch.setattr(s.logger, "propagate", True)
    caplog.set_level(logging.DEBUG, s.logger.name)
    for headers in (*RIGHT, *WRONG, {"x-api-key": "sk-mistyped"}):
        status(locked, **headers)
        status(locked, line=f"POST {CHAT}", body=b"{", **headers)
    assert len(caplog.records) > len(RIGHT + WRONG)
    assert not re.search("sk-|rtlich", caplog.text)
    assert "sk-" not in repr(s.Config(api_key=KEY, proxy_api_key=OTHER_KEY))


def respond_with(route, monkeypatch: pytest.MonkeyPatch) -> tuple[int, bytes]:
    """The status of a route's response, and all that comes after its headers."""
    planted = {("GET", "/v1/planted"): s._Route(route)}
    monkeypatch.setattr(s, "_ROUTES", {**s._ROUTES, **planted})
    with listening() as port, open_connection(port) as connection:
        connection.sendall(
            request_bytes(port, line="GET /v1/planted", Connection="close")
        )
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return int(head.split()[1] if head else 0), body


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError])
def test_an_error_of_ours_is_not_taken_for_a_client_that_left(error, monkeypatch):
    def fail(_request: object) -> None:
        raise error("planted")

    code, body = respond_with(fail, monkeypatch)

    assert code == 500
    assert message_of(body) == "the server failed on this request"


def test_nothing_follows_a_whole_response_that_fails_late(monkeypatch):
    def fail(request: Any) -> None:
        request.response.send_json(200, {"sent": True})
        raise RuntimeError("planted")

    assert respond_with(fail, monkeypatch) == (200, b'{"sent": true}')


def test_half_of_a_surrogate_pair_is_sent_as_it_is_in_a_stream(monkeypatch):
    _, body = respond_with(lambda _request: {"text": "é\ud83d"}, monkeypatch)

    assert json.loads(body) == {"text": "é\ud83d"}
    assert "é".encode() in body


# -- names -----------------------------------------------------------------------------------------


def test_only_its_own_names_reach_a_server_on_loopback():
    with listening(allowed_hosts="host.docker.internal, Mac.local:9") as port:
        own_names = [*("localhost", "LocalHost", "127.0.0.1", "[::1]")]
        own_names.append("host.docker.internal")
        passes = [*own_names, "mac.local:9"]
        passes += [f"{name}:{n}" for name in own_names for n in (port, 9000)]
        other_names = [
            *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example"),
            *("x@localhost", "mac.local", "mac.local:8", "localhost:1:2"),
            *("localhost:x", "", "::1", "0.0.0.0"),
        ]
        for name in passes:
            assert status(port, Host=name) == 200, name
        for name in [*other_names, *(f"{name}:{port}" for name in other_names)]:
            code, _, body = answer(port, Host=name)
            assert code == 403, name
            assert "ALLOWED_HOSTS" in json.loads(body)["error"]["message"]
        assert status(port, Host=None) == 200
        for line in ("GET /", "GET /health", "OPTIONS /", f"POST {CHAT}"):
            assert status(port, line=line, Host="evil.example") == 403
        with open_connection(port, "::1") as connection:
            own_request = request_bytes(port, Host=f"[::1]:{port}")
            connection.sendall(own_request + request_bytes(port, Host="evil.example"))
            assert read_response(connection)[0] == 200


def test_a_server_that_others_reach_has_names_it_does_not_know(locked):
    with listening(mlx_host="0.0.0.0", api_key=KEY) as port:
        assert status(port, Host="mac.lan", x_api_key=KEY) == 200
        assert status(port, Host="mac.lan") == 401
    assert status(locked, Host="mac.lan", x_api_key=KEY) == 403


# -- web pages -------------------------------------------------------------------------------------

FOREIGN = [PAGE, "null", "http://localhost:1", "file://", ""]
FOREIGN.append("http://localhost.evil.example")


def test_no_web_page_but_its_own_can_spend_the_machine():
    with listening() as port:
        own_origin = f"http://localhost:{port}"
        assert status(port, Origin=own_origin) == status(port) == 200
        assert "access-control-allow-origin" not in answer(port, Origin=own_origin)[1]
        origins = [*FOREIGN, f"ws://localhost:{port}", f"http://127.0.0.1:{port}"]
        lines = ["GET /v1/status", "OPTIONS /v1/models", "GET /", "PUT /x"]
        lines.append(f"POST {CHAT}")
        for origin, line in itertools.product(origins, lines):
            fields = {"line": line, "Origin": origin, "Content_Type": "text/plain"}
            code, headers, body = answer(port, body=b"{}", **fields)
            assert code == 403, (origin, line)
            assert "CORS_ORIGINS" in json.loads(body)["error"]["message"]
            assert "access-control-allow-origin" not in headers

        asks = {"Access_Control_Request_Method": "POST"}
        assert status(port, line=f"OPTIONS {CHAT}", Origin=PAGE, **asks) == 403


def test_its_own_page_may_ask_through_a_tunnel_and_behind_a_proxy_that_adds_tls():
    with listening(allowed_hosts="llm.example") as port:
        for host, scheme in (("localhost:9000", "http"), ("llm.example", "https")):
            page = {"Host": host, "Origin": f"{scheme}://{host}"}
            # 400: the body is read.
            assert status(port, line=f"POST {CHAT}", body=b"{", **page) == 400
            page["Host"] = "localhost"
            assert status(port, line=f"POST {CHAT}", body=b"{", **page) == 403


@pytest.mark.parametrize("origins", [f"https://x, {PAGE.upper()}", "*"])
def test_a_page_that_may_ask_can_read_every_answer(origins):
    with listening(cors_origins=origins, api_key=KEY) as port:
        for fields in (
            {"x_api_key": KEY},
            {},
            {"line": "GET /nothing", "x_api_key": KEY},
            {"line": "GET /"},
            {"line": f"POST {CHAT}", "body": b"{", "x_api_key": KEY},
        ):
            _, headers, _ = answer(port, Origin=PAGE, **fields)
            assert headers["access-control-allow-origin"] == PAGE
            assert headers["vary"] == "Origin"
        code = status(port, Origin="https://evil.example", x_api_key=KEY)
        assert code == (200 if origins == "*" else 403)
        with open_connection(port) as connection:
            for origin in (PAGE, None):
                connection.sendall(request_bytes(port, x_api_key=KEY, Origin=origin))
                _, headers, _ = read_response(connection)
                assert headers.get("access-control-allow-origin") == origin


def test_what_a_page_may_send_is_said_before_it_has_a_key():
    allowed = "authorization, x-stainless-os"
    asks = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": allowed,
    }
    line = f"OPTIONS {CHAT}"
    with (
        listening(cors_origins=PAGE, api_key=KEY) as port,
        open_connection(port) as connection,
    ):
        connection.sendall(request_bytes(port, line=line, Origin=PAGE, **asks))
        code, headers, body = read_response(connection)
        assert code == 204
        assert body == b""
        assert headers["access-control-allow-headers"] == allowed
        methods = headers["access-control-allow-methods"].split(", ")
        assert {"GET", "POST", "DELETE"} <= set(methods)
        assert int(headers["access-control-max-age"]) > 0
        assert headers["access-control-allow-origin"] == PAGE

        # nothing of it is left over
        connection.sendall(request_bytes(port, Origin=PAGE, x_api_key=KEY))
        assert read_response(connection)[0] == 200

        assert status(port, line=line) == 401  # no page
        assert status(port, line=line, Origin="https://x", **asks) == 403


def test_headers_that_are_echoed_cannot_become_others():
    with listening(cors_origins="*") as port:
        fields = {
            "line": "OPTIONS /",
            "Origin": "x\r\n\tSet-Cookie: c",
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "a,\r\n Set-Cookie: b",
        }
        _, headers, _ = answer(port, **fields)
        assert headers["access-control-allow-headers"] == "a, set-cookie: b"
        assert headers["access-control-allow-origin"] == "x set-cookie: c"
        assert "set-cookie" not in headers


@pytest.fixture(scope="module")
def served(folder) -> Iterator[Served]:
    with Served(folder, cors_origins=PAGE) as served:
        yield served


def test_a_stream_is_read_by_the_page(served):
    chat = {"messages": [user("Hello.")], "max_tokens": 3, "stream": True}
    fields = {"line": f"POST {CHAT}", "body": json.dumps(chat).encode()}
    code, headers, body = answer(served.state.config.mlx_port, Origin=PAGE, **fields)
    assert code == 200
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["content-type"].startswith("text/event-stream")
    assert body.endswith(b"data: [DONE]\n\n")


def test_http_1_0_knows_no_chunks_and_is_told_that_the_connection_ends(served):
    port = served.state.config.mlx_port
    chat = {"messages": [user("Hello.")], "max_tokens": 3}
    chat_body = json.dumps(chat).encode()
    stream_body = json.dumps({**chat, "stream": True}).encode()
    for line, body in [
        ("GET /health", b""),
        (f"POST {CHAT}", chat_body),
        (f"POST {CHAT}", stream_body),
        ("POST /v1/messages", stream_body),
    ]:
        fields = {
            "line": line,
            "body": body,
            "Connection": "keep-alive",
            "Expect": "100-continue",
        }
        request = request_bytes(port, **fields).replace(b" HTTP/1.1", b" HTTP/1.0", 1)
        with open_connection(port) as connection:
            connection.sendall(request)
            response = read_all(connection)

        head, _, content = response.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nConnection: close" in head
        assert b"Transfer-Encoding" not in head
        assert content.startswith((b"data: {", b"event: message_start\n", b"{"))
        assert content.endswith((b"data: [DONE]\n\n", b'message_stop"}\n\n', b"}"))


# -- one request is one request --------------------------------------------------------------------

SECOND = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
NO_LENGTH: dict[str, Any] = {"Content_Length": None}
EMPTY_CHUNKS = {
    **NO_LENGTH,
    "body": b"0\r\n\r\n" + SECOND,
    "Transfer_Encoding": "chunked",
}
TWO_IN_ONE: list[dict[str, Any]] = [  # of a POST with a body, what is otherwise
    {"line": "GET /health"},
    {"line": "GET /nothing"},
    {"line": f"PUT {CHAT}"},
    {"Host": "evil.example"},
    {"Origin": PAGE},
    {"line": "OPTIONS /", "Origin": "https://x", "Access_Control_Request_Method": ""},
    {"Content_Length": "0\r\nContent-Length: 44"},
    {"line": "GET /health", "Content_Length": "0\r\nContent-Length: 44"},
    {"Content_Length": "0, 44"},
    {"Content_Length": "0\r\nno header\r\nX: y"},
    {**NO_LENGTH, "line": "GET /health", "X": "y\r\nContent-Length : 44"},
    {**NO_LENGTH, "Transfer_Encoding": "gzip"},
    {"Transfer_Encoding": "identity"},
    {**EMPTY_CHUNKS, "Content_Length": 44},
    {**EMPTY_CHUNKS, "line": "GET /health"},
]


@pytest.fixture(scope="module")
def open_to_x() -> Iterator[int]:
    with listening(cors_origins="https://x") as port:
        yield port


@pytest.mark.parametrize("fields", TWO_IN_ONE, ids=repr)
def test_no_request_hides_in_another(open_to_x, fields):
    fields = {"line": f"POST {CHAT}", "body": SECOND, **fields}
    with open_connection(open_to_x) as connection:
        connection.sendall(request_bytes(open_to_x, **fields))
        assert len(all_heard(connection)) == 1


CHUNKED_BODIES = {  # how a chunked body may be written: whether it can be read
    b"2\r\n{}\r\n0\r\n\r\n": True,
    b"2;name=value\r\n{}\r\n0\r\n\r\n": True,
    b"2 ;name\r\n{}\r\n0\r\nTrailer: x\r\n\r\n": True,
    b"2\n{}\n0\n\n": True,
    b"\r\n{}\r\n0\r\n\r\n": False,
    b"-2\r\n{}\r\n0\r\n\r\n": False,
    b" 2\r\n{}\r\n0\r\n\r\n": False,
}


@pytest.mark.parametrize("body", CHUNKED_BODIES, ids=repr)
def test_a_chunked_body_is_read_and_the_connection_closes_after_it(body):
    """So nothing can hide in it. One that can be read is refused for its lack of messages."""
    headers = {"Content_Length": None, "Transfer_Encoding": "chunked"}
    with listening() as port:
        code, response_headers, reply = answer(
            port, line=f"POST {CHAT}", body=body, **headers
        )

    assert code == 400

    is_malformed = message_of(reply) == "the chunked body is malformed"
    assert is_malformed != CHUNKED_BODIES[body]
    assert response_headers["connection"] == "close"


@pytest.mark.parametrize(
    "coding, status",
    {
        "identity": 501,
        "chunked, identity": 501,
        "chunked, chunked": 501,
        "xchunked": 501,
        "gzip, chunked": 501,
        "Chunked": 200,
    }.items(),
)
@pytest.mark.parametrize("has_length", [at_night(False), True])
def test_a_transfer_coding_other_than_chunked_is_refused(coding, status, has_length):
    length = {"Content_Length": 0} if has_length else {}
    with listening() as port:
        code, response_headers, reply = answer(port, Transfer_Encoding=coding, **length)

    assert code == status
    assert response_headers["connection"] == "close"
    assert status == 200 or "Transfer-Encoding can only be chunked" in message_of(reply)


def test_a_connection_may_have_any_descriptor():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2_048)), hard))
    near, far = socket.socketpair()
    with near, far:
        descriptor = fcntl.fcntl(near, fcntl.F_DUPFD, 1_500)
        with socket.socket(fileno=descriptor) as connection:
            assert not s._is_readable(connection, 0)
            far.sendall(b"a")
            assert s._is_readable(connection, 0.001)


def test_a_request_after_another_is_no_part_of_it():
    with listening() as port, open_connection(port) as connection:
        empty = request_bytes(port, line=f"POST {CHAT}", Content_Length=0)
        broken = request_bytes(port, line=f"POST {CHAT}", body=b"{")
        request = request_bytes(port, Connection="close")
        connection.sendall(empty + broken + request)
        assert all_heard(connection) == [400, 400, 200]


def test_a_model_is_found_by_the_name_of_its_repository(monkeypatch):
    name = "maker/Größe 4bit"
    model = SimpleNamespace(model_id=name, max_context_tokens=8, vision=None)
    monkeypatch.setattr(s.Engine, "model", model)
    with listening() as port:
        url = f"http://localhost:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            assert sdk.models.retrieve(name).id == name  # it writes %2F
        path = "/v1/models/maker/Gr%C3%B6%C3%9Fe%204bit"
        assert status(port, line=f"GET {path}") == 200
        assert status(port, line="GET /v1/models/maker%2Fother") == 404


# -- connections -----------------------------------------------------------------------------------

START = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED_START = START + b"Transfer-Encoding: chunked\r\n\r\n"
SLOW = {
    "headers": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000,
    "body": START + b"Content-Length: 10000\r\n\r\n" + b" " * 9000,
    "one, then another": request_bytes(1, Host="localhost") + b"GET /" + b"a" * 10_000,
    "chunk sizes": CHUNKED_START + b"1\r\n \r\n" * 10_000,
    "trailers": CHUNKED_START + b"0\r\n" + b"X: y\r\n" * 10_000,
}


def dribble(connection: socket.socket, sent: bytes) -> None:
    """Send it byte by byte until cut off."""
    began = time.monotonic()
    with suppress(OSError):
        for byte in sent:
            connection.sendall(bytes([byte]))
            time.sleep(IDLE / 20)
            assert time.monotonic() - began < 15, "it is never cut off"


@pytest.mark.parametrize("name", [*list(SLOW)[:3], *map(at_night, list(SLOW)[3:])])
def test_a_byte_now_and_then_holds_no_slot_for_ever(name):
    sent = SLOW[name]
    n_at_once = sent.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in sent else 5
    began = time.monotonic()
    server = listening(max_connections=1, idle_connection_seconds=IDLE)
    with (
        server as port,
        open_connection(port) as connection,
        ThreadPoolExecutor() as pool,
    ):
        connection.sendall(sent[:n_at_once])
        # its turn comes, though the first never hangs up
        next_status = pool.submit(status, port)
        dribble(connection, sent[n_at_once:])
        assert time.monotonic() - began > IDLE * 2  # no sooner than promised
        assert next_status.result(timeout=MAX_WAIT_SECONDS) == 200


def test_what_comes_steadily_and_in_time_is_served_and_a_long_answer_is_not_cut(
    monkeypatch,
):
    idle_seconds = 3 * IDLE  # more than a busy machine takes between two pieces
    seconds_of_answers = [3 * idle_seconds, 0.0]

    def slow_status(_state):
        time.sleep(seconds_of_answers.pop(0))
        return {"so": "long"}

    monkeypatch.setattr(s, "status_body", slow_status)
    with (
        listening(idle_connection_seconds=idle_seconds) as port,
        open_connection(port) as connection,
    ):
        while seconds_of_answers:  # each request has its own time
            request = request_bytes(port)
            for start in range(0, len(request), 10):
                connection.sendall(request[start : start + 10])
                time.sleep(0.02)
            assert read_response(connection)[0] == 200


BROKEN = {
    "half a request line": b"GET /hea",
    "half the headers": b"GET /health HTTP/1.1\r\nHost: loc",
    "less than Content-Length": START + b"Content-Length: 500\r\n\r\n{}",
    "half a chunk": START + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "no body": START + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    "nothing": b"",
    "a header too long": b"GET / HTTP/1.1\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
    "headers too many": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    "a request line too long": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "a body too large": START
    + b"Content-Length: 99999999999\r\n\r\n"
    + b" " * (1 << 20),
}


def stay(connection: socket.socket) -> None:
    """And say nothing."""


def say_no_more(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    "leave", [stay, *map(at_night, (say_no_more, socket.socket.close)), reset]
)
def test_every_broken_request_gives_its_slot_back(leave):
    with (
        listening(max_connections=2, idle_connection_seconds=IDLE) as port,
        ExitStack() as stack,
    ):
        for sent in BROKEN.values():
            connection = stack.enter_context(open_connection(port))
            with suppress(ConnectionError):
                connection.sendall(sent)
            leave(connection)
        for _ in range(2):  # both at once
            connection = stack.enter_context(open_connection(port))
            connection.sendall(request_bytes(port))
            assert read_response(connection)[0] == 200


# -- the page --------------------------------------------------------------------------------------


def check_page_headers(headers) -> None:
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"
    rules = headers["content-security-policy"].split("; ")
    sources = dict(rule.split(" ", 1) for rule in rules)
    for name in ("default-src", "frame-ancestors", "base-uri"):
        assert sources[name] == "'none'"
    assert sources["connect-src"] == "'self'"


def test_a_browser_gets_the_page_and_programs_the_health(tmp_path, monkeypatch):
    monkeypatch.setattr(s, "__file__", str(tmp_path / "start-llm.py"))
    accepts = "text/html,application/xhtml+xml,*/*;q=0.8"
    page_request = {"line": "GET /", "Accept": accepts}
    with listening() as port:
        for fields in (page_request, {"line": "GET /openapi.json"}):
            code, _, body = answer(port, **fields)
            assert code == 404
            assert "web/" in json.loads(body)["error"]["message"]
            assert str(tmp_path) not in body.decode()

        (tmp_path / "web").mkdir()
        for text in ("<p>Grüße</p>", "<p>changed</p>"):  # without a restart
            (tmp_path / "web" / "index.html").write_text(text, "utf-8")
            code, headers, body = answer(port, **page_request)
            assert (code, body.decode()) == (200, text)
        check_page_headers(headers)

        (tmp_path / "web" / "openapi.json").write_text('{"openapi": "3.1.0"}')
        code, headers, body = answer(port, line="GET /openapi.json")
        assert (code, json.loads(body)) == (200, {"openapi": "3.1.0"})
        assert headers["content-type"] == "application/json"

        for accept in ("application/json", "*/*", None):
            code, _, body = answer(port, line="GET /", Accept=accept)
            assert (code, json.loads(body)["status"]) == (503, "loading")

        code, headers, body = answer(port, line="HEAD /", Accept=accepts)
        assert (code, headers["content-length"], body) == (200, "14", b"")
