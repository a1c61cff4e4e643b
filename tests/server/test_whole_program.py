"""The whole program as its user starts it: a process, spoken to over HTTP, treated badly."""

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nights
import psutil
import pytest
from litellm_stand_in import write_litellm_that_listens
from program import BODY_LIMIT, CHAT, FreshProgram, Program, copy_helpers
from refusals import WRONG, planted
from server_fixture import (
    MAX_WAIT_SECONDS,
    SYSTEM,
    Client,
    Scribe,
    Talk,
    free_port,
    user,
    wait_until,
)
from tiny_models import HYBRID, TOOLS

# With the malformed ones and some that are right: 500 mixed requests.
N_DISCONNECTS = 390
N_MALFORMED = 100
GROWTH = 1.05  # of memory, after the storm


@pytest.fixture
def start(tmp_path) -> Iterator[Any]:
    """Start programs; those still running at the end are killed."""
    programs: list[Program] = []

    def start(
        model: str | Path, program: type[Program] = Program, **how: Any
    ) -> Program:
        folder = tmp_path / f"program{len(programs)}"
        programs.append(program(folder, model, **how))
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.end(signal.SIGKILL)


def converse(port: int, *, seed: int, n_steps: int = 3) -> list[dict[str, Any]]:
    """A conversation through the SDK: what was said, and all but the first request was warm."""
    with Client(port) as client:
        talk = Talk(client, seed)
        steps = [talk.step() for _ in range(n_steps)]
        assert all(step.n_cached > 300 for step in steps[1:])
        return [{**step.said, "finish_reason": step.finish_reason} for step in steps]


# -- start and stop --------------------------------------------------------------------------------


def test_it_listens_before_it_is_ready_survives_a_kill_and_stops_when_told(
    start, models
):
    model = models(HYBRID)
    first = start(model, FreshProgram)
    answers = [answer for answer in first.wait_until_ready() if answer[0]]
    assert answers == [(503, "loading"), (200, "ok")]

    replies = converse(first.port, seed=1)
    assert first.end(signal.SIGKILL) == -signal.SIGKILL

    second = start(model, port=first.port)
    second.wait_until_ready()
    assert converse(first.port, seed=1) == replies
    second.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: second.get("/health")[1].get("status") == "draining")
    assert second.end(signal.SIGTERM) == 0
    assert "Traceback" not in second.said


def test_what_cannot_start_says_why_in_one_sentence(start, folder, tmp_path):
    """Beside one that can: copied alone, so without a proxy."""
    unknown = tmp_path / "unknown"
    shutil.copytree(folder, unknown)
    config = json.loads((unknown / "config.json").read_text("utf-8"))
    config["model_type"] = "nope7"
    (unknown / "config.json").write_text(json.dumps(config), "utf-8")

    first = start(folder, ENABLE_PROXY="true")
    first.wait_until_ready()
    wait_until(lambda: first.said.count("no proxy") == 1)
    refused = {
        "missing": start(tmp_path / "missing"),
        "nope7": start(unknown),
        f"port {first.port} on 127.0.0.1 is taken": start(folder, port=first.port),
        "API_KEY": start(folder, MLX_HOST="0.0.0.0"),
    }
    for reason, program in refused.items():
        assert program.process.wait(timeout=MAX_WAIT_SECONDS) == 2
        lines = program.said.strip().splitlines()
        (sentence,) = [line for line in lines if line.startswith("start-llm: ")]
        assert reason in sentence
        assert sentence == lines[-1]
        assert "Traceback" not in program.said

    assert first.get("/health")[0] == 200
    assert first.end(signal.SIGTERM) == 0
    assert "Traceback" not in first.said


# -- LiteLLM beside it -----------------------------------------------------------------------------


def is_up(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=1),
    ):
        return True
    return False


@pytest.mark.parametrize("ending", ["killed", "told twice"])
def test_a_server_that_ends_at_once_leaves_no_litellm(start, folder, tmp_path, ending):
    copy_helpers(tmp_path / "program0")
    port = free_port()
    python = write_litellm_that_listens(tmp_path)
    settings = {"ENABLE_PROXY": "true", "PROXY_PORT": str(port), "BESIDE": str(python)}
    program = start(folder, **settings)
    program.wait_until_ready()
    wait_until(lambda: f"LiteLLM is up at http://127.0.0.1:{port}" in program.said)
    family = psutil.Process(program.process.pid).children(recursive=True)
    groups = {os.getpgid(process.pid) for process in family}
    assert os.getpgid(program.process.pid) not in groups  # Ctrl-C is for the server
    assert any("--host 127.0.0.1" in " ".join(each.cmdline()) for each in family)
    if ending == "killed":
        program.end(signal.SIGKILL)
    while program.process.poll() is None:
        program.process.send_signal(signal.SIGINT)
        time.sleep(0.05)

    assert not psutil.wait_procs(family, 10)[1]
    assert not is_up(port)


# -- clients that leave ----------------------------------------------------------------------------


def endless_request(rng: random.Random, end: int) -> bytes:
    """A chat request whose reply nobody has the time to wait for: its end token is banned."""
    talk = Talk(None, rng.randrange(1 << 30))
    body = {
        "messages": [SYSTEM, user(talk.words(rng.choice((10, 200, 400))))],
        "tools": TOOLS,
        "stream": rng.random() < 0.5,
        "max_tokens": 50_000,
        "logit_bias": {str(end): -100},
    }
    return http_bytes(json.dumps(body).encode())


def http_bytes(
    body: bytes, *, line: str = f"POST {CHAT} HTTP/1.1", **headers: str
) -> bytes:
    fields = {"Host": "localhost", "Content_Length": str(len(body)), **headers}
    lines = [line]
    for name, value in fields.items():
        lines.append(f"{name.replace('_', '-')}: {value}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def leave(port: int, end: int, *, seed: int) -> None:
    """Connect, get as far as chance has it, and go: politely or with a reset."""
    rng = random.Random(seed)
    message = endless_request(rng, end)
    n_all = len(message)
    n_sent = rng.choice(
        (0, rng.randrange(100), rng.randrange(n_all), n_all, n_all, n_all)
    )
    with socket.create_connection(
        ("127.0.0.1", port), timeout=MAX_WAIT_SECONDS
    ) as connection:
        connection.sendall(message[:n_sent])
        if rng.random() < 0.5:
            connection.settimeout(rng.random() ** 3)
            with contextlib.suppress(TimeoutError):
                connection.recv(rng.choice((1, 500, 5000)))
        time.sleep(rng.random() ** 3 * 0.5)
        if rng.random() < 0.5:
            no_linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)


def many_leave(port: int, end: int, *, seeds: range) -> None:
    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(leave, port, end, seed=seed) for seed in seeds]
        for client in clients:
            client.result()


# -- requests that are wrong -----------------------------------------------------------------------

WRONG_BODIES = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b'"text"',
    b"{'messages': []}",
    b"\xff\xfe{}",
    b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}',
    b"[" * 50_000,
    b'{"a":' * 50_000,
    b'{"messages": ' + b"9" * 6000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1e300}',
]
WRONG_REQUESTS: list[tuple[bytes, set[int]]] = [
    (http_bytes(b"{}", line="POST /v1/nothing HTTP/1.1"), {404}),
    (http_bytes(b"{}", line="POST / HTTP/1.1"), {405}),
    (http_bytes(b"", line="GET /etc/passwd HTTP/1.1"), {404}),
    (http_bytes(b"", line="GET /../../x HTTP/1.1"), {404}),
    (http_bytes(b"", line="GET /v1/models/none HTTP/1.1"), {404}),
    (http_bytes(b"", line=f"GET {CHAT} HTTP/1.1"), {405}),
    (http_bytes(b"", line=f"DELETE {CHAT} HTTP/1.1"), {405}),
    (http_bytes(b"{}", line="PUT /v1/models HTTP/1.1"), {405}),
    (http_bytes(b"", line=f"BREW {CHAT} HTTP/1.1"), {400, 405, 501}),
    (http_bytes(b"{}", Content_Encoding="gzip"), {415}),
    (http_bytes(b"{}", Content_Length="x"), {400}),
    (http_bytes(b"{}", Content_Length="-2"), {400}),
    (http_bytes(b"", Content_Length=str(1 << 40)), {413}),
    (http_bytes(b"x" * (BODY_LIMIT + 1)), {413}),
    (http_bytes(b"zz\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), {400}),
    (http_bytes(b"-5\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), {400}),
    (http_bytes(b"fffffff\r\n{}", Transfer_Encoding="chunked"), {413}),
    (http_bytes(b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), {400}),
    (http_bytes(b"{}", Expect="100-continue", Content_Encoding="br"), {415}),
    (b"GARBAGE\r\n\r\n", {400}),
    (b"GET / HTTP/9.9\r\n\r\n", {400, 505}),
    (b"GET " + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", {400, 414}),
    (http_bytes(b"", line="GET /health HTTP/1.1", X="y" * 70_000), {400, 431}),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
]


CUT_EMOJI = (
    rb'{"messages": [{"role": "user", "content": "cut: \ud83d"}], "max_tokens": 3}'
)


def malformed() -> list[tuple[bytes, set[int]]]:
    """Requests nobody should send, each with the statuses that are a right answer."""
    bodies = [json.dumps(planted(path, value)).encode() for path, value in WRONG]
    refused = [(http_bytes(body), {400}) for body in [*bodies, *WRONG_BODIES]]
    # JavaScript sends these; they can be read
    readable = (http_bytes(CUT_EMOJI), {200})
    return [*refused, *WRONG_REQUESTS, readable]


def answer_to(port: int, message: bytes) -> tuple[int, dict[str, Any]]:
    """(status, body) of the response to raw bytes."""
    with socket.create_connection(
        ("127.0.0.1", port), timeout=MAX_WAIT_SECONDS
    ) as connection:
        # an answer may come before all is sent
        with contextlib.suppress(ConnectionError):
            connection.sendall(message)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, json.loads(response.read())


def check_malformed(port: int) -> None:
    """Each is refused with a status and an OpenAI-shaped error that has something to say."""
    requests = malformed()
    assert len(requests) >= N_MALFORMED

    for message, statuses in requests:
        status, body = answer_to(port, message)
        assert status in statuses, (message[:300], status, body)
        if status != 200:
            assert body["error"].keys() == {"message", "type", "param", "code"}
            assert body["error"]["message"]


# -- and afterwards --------------------------------------------------------------------------------


def at_rest(program: Program) -> dict[str, float]:
    """What the process holds once it is idle and its cache has run out."""

    def is_idle() -> bool:
        engine = program.get("/v1/status")[1]["engine"]
        names = ("queued", "prefilling", "decoding", "lines")
        return not any(engine[name] for name in names)

    wait_until(is_idle)
    # an idle engine without KV gives unused buffers back within a second
    time.sleep(2.5)
    process = psutil.Process(program.process.pid)
    with process.oneshot():
        return {
            "cache_bytes": program.get("/v1/status")[1]["engine"]["cache_bytes"],
            "memory": process.memory_info().rss,
            "threads": process.num_threads(),
            "files": process.num_fds(),
        }


def test_it_stands_clients_that_leave_and_requests_that_are_wrong(start, folder):
    n_disconnects = N_DISCONNECTS if nights.is_night else 65
    end = Scribe(folder).end
    program = start(folder)
    program.wait_until_ready()
    replies = converse(program.port, seed=2)
    # what is kept for good, buffers and memories of fixed size, fills up
    many_leave(program.port, end, seeds=range(n_disconnects, 2 * n_disconnects))

    check_malformed(program.port)

    first_rest = at_rest(program)

    # Buffers that fill up late are no leak: a leak grows in each round.
    rests = [first_rest]
    for _ in range(3):
        many_leave(program.port, end, seeds=range(n_disconnects))
        check_malformed(program.port)
        assert converse(program.port, seed=2) == replies
        rests.append(at_rest(program))
        if rests[-1]["memory"] <= rests[-2]["memory"] * GROWTH:
            break

    second_rest = rests[-1]
    assert second_rest["cache_bytes"] == first_rest["cache_bytes"] == 0
    assert second_rest["memory"] <= rests[-2]["memory"] * GROWTH
    # the connection that asked may still close
    assert second_rest["threads"] <= first_rest["threads"] + 1
    assert second_rest["files"] <= first_rest["files"] + 1
    assert program.end(signal.SIGTERM) == 0
    assert "Traceback" not in program.said
    assert "ERROR" not in program.said
