"""Bodies wait for memory before they are read and before they are parsed (L-122)."""

from __future__ import annotations

import io
import json
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

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
from server_fixture import Served, connections, wait_until

CHAT = "POST /v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3}


@pytest.fixture(scope="module")
def served(folder) -> Iterator[Served]:
    with Served(folder, keepalive_seconds=0.1, max_kv_size=1024) as served:
        yield served


@pytest.fixture
def memory(served) -> Iterator[s.BodyMemory]:
    memory = served.state.body_memory
    yield memory
    wait_until(lambda: is_free(memory))


@pytest.fixture
def parsed(monkeypatch) -> list[bytes]:
    """The bodies that were parsed."""
    bodies: list[bytes] = []
    parse = s.parse_json_body

    def noted(raw):
        bodies.append(raw)
        return parse(raw)

    monkeypatch.setattr(s, "parse_json_body", noted)
    return bodies


def lanes(memory: s.BodyMemory) -> list[s.WorkBudget]:
    work, held = memory.work, memory.held
    return [work.for_small, work.for_large, held.for_small, held.for_large]


def is_free(memory: s.BodyMemory) -> bool:
    return all(lane.n_free == lane.n_units for lane in lanes(memory))


def n_waiting(memory: s.BodyMemory) -> int:
    return sum(len(lane.waiting) for lane in lanes(memory))


@contextmanager
def taken(budget: s.BodyBudget) -> Iterator[None]:
    """Nothing is left of a budget, neither for small bodies nor for large ones."""
    with ExitStack() as stack:
        for lane in (budget.for_small, budget.for_large):
            stack.enter_context(lane.reserve(lane.n_units, s.assume_client))
        yield


def sent(port: int, body: dict[str, Any], line: str = CHAT) -> socket.socket:
    connection = open_connection(port)
    connection.settimeout(120)
    connection.sendall(request_bytes(port, line=line, body=json.dumps(body).encode()))
    return connection


@pytest.fixture
def port(served) -> int:
    return served.state.config.mlx_port


def test_a_body_is_parsed_when_memory_for_its_work_is_free(memory, port, parsed):
    with taken(memory.work):
        connection = sent(port, QUESTION)
        wait_until(lambda: n_waiting(memory) == 1)
        assert status(port, line="GET /health") == 200
        assert not parsed

    assert read_response(connection, method="POST")[0] == 200
    assert len(parsed) == 1


N_UNHELD = s._MAX_UNHELD_BYTES
LARGE = {**QUESTION, "user": "a" * 3_000_000}


def announced(port: int, n_sent: int, **headers: Any) -> socket.socket:
    """A connection whose body is some bytes of more that were announced."""
    connection = open_connection(port)
    connection.settimeout(120)
    headers = headers or {"Content_Length": 5_000_000}
    head = request_bytes(port, line=CHAT, **headers)
    connection.sendall(head + b" " * n_sent)
    return connection


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def test_a_body_is_read_on_when_memory_for_its_bytes_is_free(memory, port, parsed):
    payload = json.dumps(LARGE).encode()
    with open_connection(port) as connection:
        connection.settimeout(120)
        with taken(memory.held):
            head = request_bytes(port, line=CHAT, Content_Length=len(payload))
            connection.sendall(head + payload[: 2 * N_UNHELD])
            wait_until(lambda: n_waiting(memory) == 1)
        connection.sendall(payload[2 * N_UNHELD :])
        assert read_response(connection, method="POST")[0] == 200
    assert parsed == [payload]


@pytest.mark.parametrize(
    "headers", [{"Content_Length": 5_000_000}, {"Transfer_Encoding": "chunked"}]
)
def test_who_announces_a_body_and_sends_none_holds_no_memory(memory, port, headers):
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(announced(port, 0, **headers))
        stack.enter_context(announced(port, 1))
        for body in (QUESTION, LARGE):
            assert read_response(sent(port, body), method="POST")[0] == 200
            assert chunked_status(port, json.dumps(body).encode()) == 200
        wait_until(lambda: is_free(memory))


def chunked_status(port: int, *pieces: bytes) -> int:
    with open_connection(port) as connection:
        connection.settimeout(120)
        head = request_bytes(port, line=CHAT, Transfer_Encoding="chunked")
        connection.sendall(head + chunks(*pieces) + b"0\r\n\r\n")
        return read_response(connection, method="POST")[0]


def test_who_stalls_holds_no_memory_for_long(memory, port, monkeypatch):
    monkeypatch.setattr(s, "_HELD_GAP_SECONDS", 0.2)
    with announced(port, N_UNHELD), announced(port, N_UNHELD):
        wait_until(lambda: not is_free(memory))
        wait_until(lambda: is_free(memory))


@pytest.mark.parametrize(
    "body", [QUESTION, {**QUESTION, "stream": True}, {"messages": 5, "stream": True}]
)
def test_what_has_waited_has_a_status_of_its_own(memory, port, body):
    with taken(memory.work):
        connection = sent(port, body)
        wait_until(lambda: n_waiting(memory) == 1)
    expected = 400 if body["messages"] == 5 else 200
    assert read_response(connection, method="POST")[0] == expected


def test_a_body_of_tiny_chunks_takes_no_more_than_its_bytes():
    """An object for each of them would take 18 times as much."""
    n = 60_000
    body = chunks(*[b"abc"] * (n // 3)) + b"0\r\n\r\n"
    peaks = []
    for _ in range(5):  # other threads may need memory, too: the least counts
        stream = io.BufferedReader(io.BytesIO(body))
        tracemalloc.start()
        payload = bytearray()
        for piece in s._read_chunks(stream, n):
            payload += piece
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    assert payload == b"abc" * (n // 3)
    assert min(peaks) < s.BodyMemory.HELD_BYTES * n + s._PIECE_BYTES * 2


@pytest.mark.parametrize("rest", [b"", b"ff\r\nabc", b"2\r\n{}"])
def test_a_client_that_leaves_in_its_chunks_is_no_bad_request(rest):
    stream = io.BufferedReader(io.BytesIO(rest))
    with pytest.raises(s.ClientGone):
        list(s._read_chunks(stream, 1_000))


def test_a_body_that_no_memory_is_enough_for_is_refused_before_it_is_read():
    memory = s.BodyMemory(1_000_000_000)
    assert memory.max_body_bytes * memory.WORK_BYTES <= 250_000_000

    limits = {
        5_208_333: {"memory_limit_bytes": 1_000_000_000},
        900: {"max_body_bytes": 900},
    }
    for n_bytes, settings in limits.items():
        with listening(**settings) as small_port:
            code, _, body = answer(small_port, line=CHAT, Content_Length=n_bytes + 1)
            assert code == 413
            assert f"larger than {n_bytes} bytes" in message_of(body)
            assert status(small_port, line=CHAT, body=b" " * 900) == 400


def test_who_has_gone_waits_no_more_and_is_not_parsed(memory, port, parsed):
    with taken(memory.work):
        connection = sent(port, QUESTION)
        wait_until(lambda: n_waiting(memory) == 1)
        connection.close()
        wait_until(lambda: n_waiting(memory) == 0)
    assert not parsed


def test_small_requests_pass_large_ones_that_wait(memory, port):
    n_letters = memory.work.max_small_bytes // memory.WORK_BYTES
    large = {**QUESTION, "user": "a" * n_letters}
    lane = memory.work.for_large
    with lane.reserve(lane.n_units, s.assume_client):
        connection = sent(port, large)
        wait_until(lambda: n_waiting(memory) == 1)
        small = read_response(sent(port, QUESTION), method="POST")
        assert small[0] == 200
        assert n_waiting(memory) == 1
    assert read_response(connection, method="POST")[0] == 200


def test_while_the_model_works_the_bytes_are_held_and_no_work(memory, served, port):
    is_seen = []

    def look(_rows):
        work = memory.work
        is_seen.append(
            (
                work.for_small.n_free == work.for_small.n_units,
                memory.held.for_small.n_free < memory.held.for_small.n_units,
            )
        )

    with served.holding(look):
        assert read_response(sent(port, QUESTION), method="POST")[0] == 200
    assert is_seen[-1] == (True, True)


def test_a_client_that_leaves_in_its_body_leaves_no_memory_reserved(memory, port):
    n_connections = connections()
    with announced(port, N_UNHELD):
        wait_until(lambda: not is_free(memory))
    wait_until(lambda: is_free(memory) and connections() <= n_connections)


def test_more_messages_than_tokens_fit_are_refused_before_they_are_rendered(
    served, port, monkeypatch
):
    def fail(*_args, **_how):
        raise AssertionError("it was canonicalized")

    monkeypatch.setattr(s, "canonicalize_messages", fail)
    limit = served.state.engine.model.max_context_tokens
    messages = [{"role": "user", "content": ""}] * (2 * limit + 1)
    code, _, body = read_response(sent(port, {"messages": messages}), method="POST")
    assert code == 400
    assert json.loads(body)["error"]["code"] == "context_length_exceeded"


@pytest.fixture
def rendered(monkeypatch) -> list[int]:
    """The number of messages, each time that some are rendered."""
    noted: list[int] = []
    render = s.Renderer.render

    def note(renderer, messages, **how):
        noted.append(len(messages))
        return render(renderer, messages, **how)

    monkeypatch.setattr(s.Renderer, "render", note)
    return noted


def tools(n: int) -> list[dict[str, Any]]:
    names = [f"look{i}" for i in range(n)]
    return [{"type": "function", "function": {"name": name}} for name in names]


CALL = {"name": "look", "arguments": json.dumps({"path": "a path"})}
CALLS = [{"id": "call12345", "type": "function", "function": CALL}]
FAR_TOO_LONG = {
    "tools": {"tools": tools(3_000)},
    "messages": {"messages": [{"role": "user", "content": "a word"}] * 2_000},
    "text": {"messages": [{"role": "user", "content": "a word " * 20_000}]},
    "calls": {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": CALLS * 1_000},
        ]
    },
}


@pytest.mark.parametrize("kind", FAR_TOO_LONG)
def test_what_cannot_fit_is_refused_before_it_is_rendered(
    memory, served, port, rendered, kind
):
    body = {**QUESTION, **FAR_TOO_LONG[kind]}
    code, _, answer = read_response(sent(port, body), method="POST")
    error = json.loads(answer)["error"]
    assert code == 400 and error["code"] == "context_length_exceeded"
    assert not rendered
    ledgers = [state.stores.ledger for state in served.state.tenants.states()]
    assert not any(ledger.snapshot()["tools"] for ledger in ledgers)


def test_a_long_reply_is_no_reason_to_refuse(memory, port, rendered):
    """Its thinking may be left out: whether it fits shows when it is rendered."""
    reply = {"role": "assistant", "content": "a word " * 20_000}
    body = {**QUESTION, "messages": [*QUESTION["messages"], reply] * 2}
    assert read_response(sent(port, body), method="POST")[0] == 400
    assert rendered


def test_rendering_is_left_when_the_client_has_gone(memory, served, port, monkeypatch):
    def leave() -> None:
        raise s.ClientGone

    request = s.parse_chat_request(QUESTION, s.Config(), request_id="r", headers={})
    template = served.state.engine.model.template
    with pytest.raises(s.ClientGone):
        template.render_prompt(s.replace(request, check_client=leave))


def test_a_body_of_a_million_brackets_is_refused_before_it_is_parsed(memory, port):
    texts = {**QUESTION, "user": "[" * (s.MAX_BRACKETS - 100)}
    assert read_response(sent(port, texts), method="POST")[0] == 200
    brackets = {**QUESTION, "unknown": [[]] * s.MAX_BRACKETS}
    code, _, answer = read_response(sent(port, brackets), method="POST")
    assert code == 400 and "brackets" in json.loads(answer)["error"]["message"]
