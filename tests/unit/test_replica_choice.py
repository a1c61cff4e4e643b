"""Which of several servers gets a request at port 4000, with servers of the test's."""

import asyncio
import dataclasses
import json
import stat
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import replica_choice as r
from gate_client import SETTINGS, ask_gate
from litellm_gate import CONNECT_SECONDS, SERVER_CALL, Gate, client_of_server
from replica_choice import Replica, Replicas

URLS = ("http://one:1", "http://two:2", "http://three:3")
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EVENTS = b'data: {"choices":[]}\n\n'


class Wire(httpx.AsyncBaseTransport):
    """As httpx.MockTransport, but who refuses a connection has read nothing.

    And no answer is read before somebody reads it.
    """

    def __init__(
        self, serve: Callable[[httpx.Request], Awaitable[httpx.Response]]
    ) -> None:
        self._serve = serve

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._serve(request)
        return httpx.Response(
            answer.status_code, headers=answer.headers, stream=answer.stream
        )


def refuse_connection(request: httpx.Request, state: str) -> None:
    """Raise what httpx does for a server that is down, or whose machine drops packets."""
    if state == "down":
        raise httpx.ConnectError("refused")
    if state == "unreachable":
        assert request.extensions["timeout"]["connect"] == CONNECT_SECONDS
        raise httpx.ConnectTimeout("")


class Farm:
    """Some servers, each with a state, and the gate before them and before LiteLLM."""

    def __init__(
        self, n_servers: int = 2, assignments_file: Path | None = None
    ) -> None:
        self.states = dict.fromkeys(URLS[:n_servers], "ok")
        self.asked: list[httpx.Request] = []  # but for how they are
        self.checked: list[str] = []  # URLs that were asked how they are
        self.said: list[str] = []
        self.model_ids = dict.fromkeys(URLS, "m")
        self.keys = dict.fromkeys(URLS, "")
        self.breaks_after: bytes | None = None  # part of an answer
        self.client = client_of_server(Wire(self._serve))
        servers = [Replica(url, f"key of {url}") for url in self.states]
        self.servers = Replicas(
            servers,
            self.client,
            model_id="m",
            assignments_file=assignments_file,
            report=self.said.append,
        )
        self.gate = Gate(self._translate, self.client, self.servers, **SETTINGS)

    async def _serve(self, request: httpx.Request) -> httpx.Response:
        url = f"{request.url.scheme}://{request.url.netloc.decode()}"
        state = self.states[url]
        if request.url.path == "/health":
            self.checked.append(url)
        refuse_connection(request, state)
        await request.aread()
        if request.url.path == "/health":
            return httpx.Response(200, json={"status": state})
        if request.url.path == "/v1/models":
            if self.keys[url] not in ("", request.headers["authorization"]):
                return httpx.Response(401, json={})
            return httpx.Response(200, json={"data": [{"id": self.model_ids[url]}]})
        self.asked.append(request)
        if state == "dies":
            self.states[url] = "down"
            if self.breaks_after is None:
                raise httpx.ReadError("reset")
        is_refused = state == "draining" and not request.headers.get("x-known")

        async def parts() -> AsyncIterator[bytes]:
            if state == "dies":
                yield self.breaks_after or b""
                raise httpx.RemoteProtocolError("incomplete")
            yield b'{"error": {"message": "draining"}}' if is_refused else b"{}"

        return httpx.Response(503 if is_refused else 200, content=parts())

    async def _translate(self, _scope: Any, receive: Any, send: Any) -> None:
        """Plays LiteLLM, which asks the server that the gate has chosen."""
        await receive()
        call = SERVER_CALL.get()
        assert call is not None
        a_day = 86_400.0
        url = f"{call.server.url}{CHAT}"
        answer = await self.client.post(url, json={}, timeout=a_day)
        start = {"type": "http.response.start", "headers": []}
        await send({**start, "status": answer.status_code})
        await send({"type": "http.response.body", "body": b"{}"})

    def check(self) -> None:
        async def check_all() -> None:
            for server in self.servers.servers:
                await self.servers.check(server)

        asyncio.run(check_all())

    def ask(self, body: Any, path: str = CHAT, **headers: str) -> tuple[int, str]:
        """Status and text of an answer."""
        return asyncio.run(self.send(body, path, **headers))

    async def send(self, body: Any, path: str, **headers: str) -> tuple[int, str]:
        payload = json.dumps(body).encode()
        answer = await ask_gate(self.gate, "POST", path, payload, headers)
        return answer.status, answer.text

    @property
    def hosts(self) -> list[str]:
        """Of the servers that were asked, in order."""
        return [request.url.host for request in self.asked]


def run(work: Awaitable[Any]) -> Any:
    async def whole() -> Any:
        return await work

    return asyncio.run(whole())


def said_by_user(text: str, *more: str) -> dict[str, Any]:
    """A body without an id of its session."""
    roles = ("user", "assistant")
    turns = [
        {"role": roles[number % 2], "content": words}
        for number, words in enumerate((text, *more))
    ]
    return {"messages": [{"role": "system", "content": "Now it is 8:00"}, *turns]}


# -- where a conversation goes ---------------------------------------------------------


def test_a_session_keeps_its_server_and_sessions_are_spread_evenly():
    farm = Farm(3)

    for _ in range(4):
        for session in range(9):
            farm.ask({}, x_session_id=f"s{session}")
    assert farm.hosts == farm.hosts[:9] * 4
    assert set(Counter(farm.hosts).values()) == {12}


def test_six_first_requests_at_once_go_to_one_server():
    farm = Farm(3)
    farm.ask({}, x_session_id="other")

    async def work() -> None:
        six = [farm.send({}, CHAT, x_session_id="one") for _ in range(6)]
        await asyncio.gather(*six)

    run(work())
    assert len(set(farm.hosts[1:])) == 1
    assert farm.hosts[1] != farm.hosts[0]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_without_an_id_the_first_words_of_the_user_are_the_conversation(path):
    field = "input" if path == RESPONSES else "messages"
    farm = Farm(3)

    for text in "abc":
        for number in range(3):
            body = said_by_user(text, *["reply", "question"] * number)
            body["messages"][0]["content"] = f"Now it is 8:0{number}"
            farm.ask({field: body["messages"]}, path)
    assert [len(set(farm.hosts[n : n + 3])) for n in (0, 3, 6)] == [1, 1, 1]
    assert len(set(farm.hosts)) == 3


CLAUDE_USER = '{"device_id":"d","session_id":"abc"}'


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"metadata": {"user_id": CLAUDE_USER}}, {"metadata": {"user_id": "u_session_abc"}}),
        ({"prompt_cache_key": "k"}, {"prompt_cache_key": "k", "input": "other"}),
        ({"metadata": {"session_id": "k"}}, {"session_id": "k"}),
        (said_by_user("a<system-reminder>\nThe list is empty\n</system-reminder>"),
         said_by_user("a", "b", "c")),
        (user("a"), user([{"type": "text", "text": "a", "cache_control": {}}])),
        ({"contents": [{"parts": [{"text": "a"}]}]},
         {"contents": [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model"}]}),
        ({"prompt": "a" * 2_000}, {"prompt": "a" * 3_000}),
        ({"input": "a"}, {"input": [{"role": "user", "content": "a"}]}),
    ],
)  # fmt: skip
def test_these_two_are_of_one_conversation(body, same):
    keys = [r.conversation_by_body(each) for each in (body, same)]
    assert keys[0] == keys[1] != ""
    assert len(keys[0]) == 32
    other = r.conversation_by_body(said_by_user("other words"))
    assert other not in keys


def test_ids_of_sessions_come_before_words_and_a_sub_agent_is_with_its_parent():
    one = [(b"x-session-id", b"parent")]
    sub_agent = [(b"x-session-id", b"own"), (b"x-parent-session-id", b"parent")]
    assert r.conversation_by_headers(one) == r.conversation_by_headers(sub_agent) != ""
    assert r.conversation_by_headers([(b"x-session-id", b"")]) == ""


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{", b"[" * 100_000, b"{}", b'{"messages": 3}', b'{"messages": [3]}'],
)
def test_a_body_without_a_conversation_has_none(payload):
    assert r.conversation_by_body(r.read_object(payload)) == ""


def test_one_server_alone_gets_bodies_unread_and_is_never_asked_how_it_is():
    farm = Farm(1)
    farm.servers.servers[0].state = "down"
    assert farm.ask({"messages": 3})[0] == 200
    farm.check()
    assert farm.servers.servers[0].state == "down"
    assert farm.said == []
    assert not farm.servers._assignments


NAMELESS = [
    {"prompt": ["a"]},
    {"prompt": [1, 2, 3]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
]


@pytest.mark.parametrize("body", NAMELESS)
def test_requests_without_a_conversation_go_to_the_servers_in_turns(body):
    farm = Farm(3)

    for _ in range(6):
        farm.ask(body)
    farm.states["http://two:2"] = "down"
    farm.check()
    for _ in range(4):
        farm.ask(body)
    assert Counter(farm.hosts[:6]) == {"one": 2, "two": 2, "three": 2}
    assert Counter(farm.hosts[6:]) == {"one": 2, "three": 2}


def test_each_server_gets_its_own_key():
    farm = Farm(2)

    farm.ask({}, x_session_id="a", authorization="Bearer of-the-client")
    farm.ask({}, x_session_id="b")
    keys = [request.headers["authorization"] for request in farm.asked]
    assert keys == ["Bearer key of http://one:1", "Bearer key of http://two:2"]


# -- servers that go and come ----------------------------------------------------------


def test_a_dead_servers_sessions_move_once_and_no_others():
    farm = Farm(2)

    for session in "abcd":  # a and c are on one, b and d on two
        farm.ask({}, x_session_id=session)
    farm.states["http://one:1"] = "down"
    for session in "abd":
        assert farm.ask({}, x_session_id=session)[0] == 200
    farm.states["http://one:1"] = "ok"
    farm.check()
    for session in "abcd":
        farm.ask({}, x_session_id=session)
    assert farm.hosts[:4] == ["one", "two", "one", "two"]
    assert farm.hosts[4:7] == ["two", "two", "two"]
    # a stays where it is warm by now; c has not noticed
    assert farm.hosts[7:] == ["two", "two", "one", "two"]
    assert any("WARNING http://one:1 does not answer" in line for line in farm.said)
    assert any("INFO http://one:1 is up" in line for line in farm.said)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_machine_that_drops_packets_is_left_and_not_asked_once_more(path):
    farm = Farm(2)
    farm.states["http://one:1"] = "unreachable"

    assert farm.ask(said_by_user("x"), path)[0] == 200
    assert farm.checked == []
    assert farm.servers.servers[0].state == "down"  # so the next one does not wait
    assert farm.ask(said_by_user("y"), path)[0] == 200
    assert farm.hosts == ["two", "two"]


def test_litellm_too_leaves_a_machine_that_drops_packets_though_it_waits_for_a_day():
    farm = Farm(2)
    farm.states["http://one:1"] = "unreachable"

    status, text = farm.ask({"input": "x"}, RESPONSES)
    assert status == 502
    assert "send it again" in text
    assert farm.ask({"input": "x"}, RESPONSES)[0] == 200
    assert farm.hosts == ["two"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_request_whose_server_dies_gets_an_error_and_its_retry_an_answer(path):
    farm = Farm(2)
    body = {"input": "x"} if path == RESPONSES else said_by_user("x")

    farm.states["http://one:1"] = "dies"
    status, text = farm.ask(body, path)
    assert status == 502
    assert "http://one:1 did not answer, or not in full" in text
    assert "(connection lost): send it again" in text
    assert farm.ask(body, path)[0] == 200
    assert farm.hosts == ["one", "two"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_stream_whose_server_dies_ends_with_an_error(path):
    farm = Farm(2)
    farm.breaks_after = EVENTS

    farm.states["http://one:1"] = "dies"
    status, text = farm.ask(said_by_user("x"), path)
    assert status == 200
    sent, _, end = text.partition("\n\n")
    assert f"{sent}\n\n".encode() == EVENTS
    assert end.startswith("event: error\n") == (path == MESSAGES)
    error = json.loads(end.partition("data: ")[2])["error"]
    assert "send it again" in error["message"]
    assert farm.servers.servers[0].state == "down"  # for a retry at once


def test_with_no_server_left_the_error_says_how_each_is():
    farm = Farm(2)
    farm.states = dict.fromkeys(farm.states, "down")
    farm.states["http://two:2"] = "loading"

    farm.check()
    for path, body in ((CHAT, said_by_user("x")), (RESPONSES, {"input": "x"})):
        status, text = farm.ask(body, path)
        assert status == 503
        sentence = json.loads(text)["error"]["message"]
        assert "http://one:1 does not answer" in sentence
        assert "http://two:2 still loads its model" in sentence


def test_a_server_being_drained_keeps_its_sessions_and_gets_no_others():
    farm = Farm(2)

    farm.ask({}, x_session_id="old", x_known="yes")
    farm.states["http://one:1"] = "draining"
    farm.check()
    for session in ("old", "a", "b", "old"):
        known = {"x_known": "yes"} if session == "old" else {}
        assert farm.ask({}, x_session_id=session, **known)[0] == 200
    assert farm.hosts == ["one", "one", "two", "two", "one"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_session_that_a_drained_server_refuses_moves_with_the_retry(path):
    farm = Farm(2)
    body = {"input": "x"} if path == RESPONSES else said_by_user("x")
    farm.states["http://one:1"] = "draining"  # since the last check

    assert farm.ask(body, path)[0] == 503
    assert farm.ask(body, path)[0] == 200
    assert farm.hosts == ["one", "two"]


@pytest.mark.parametrize(
    ("state", "words"),
    [("other_model", "another model"), ("key_refused", "refuses the key")],
)
def test_a_server_of_another_model_or_key_gets_nothing(state, words):
    farm = Farm(2)
    if state == "other_model":
        farm.model_ids["http://one:1"] = "another"
    else:
        farm.keys["http://one:1"] = "Bearer right"

    farm.check()
    for session in "abc":
        farm.ask({}, x_session_id=session)
    assert set(farm.hosts) == {"two"}
    assert words in farm.said[0]
    rows = json.loads(farm.said[-1].removeprefix("REPLICAS "))
    assert rows[0] == {"url": "http://one:1", "state": state, "sessions": 0}


ODD_ANSWERS = [
    *("[]", "{}", "<html>", "[" * 200_000, "\udcff", '{"status": "fine"}'),
    *(
        '{"status": []}',
        '{"status": ' + "1" * 5_000 + "}",
        '{"status": "ok", "data": 5}',
    ),
    '{"status": "ok", "data": [{"id": []}]}',
]


@pytest.mark.parametrize("answer", ODD_ANSWERS, ids=lambda answer: repr(answer[:40]))
def test_what_is_no_start_llm_is_not_up_and_the_others_are_watched_on(
    answer, monkeypatch
):
    farm = Farm(2)
    serve = farm._serve

    async def serve_oddly(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one":
            payload = answer.encode("utf-8", "surrogateescape")
            return httpx.Response(200, content=payload)
        return await serve(request)

    monkeypatch.setattr(r, "CHECK_EVERY_SECONDS", 0.001)
    farm.client._transport = Wire(serve_oddly)
    first, second = farm.servers.servers
    second.state = "down"

    async def watch() -> None:
        watching = asyncio.create_task(farm.servers.watch())
        while first.state == r.UP or second.state != r.UP:
            assert not watching.done(), watching.exception()
            await asyncio.sleep(0.001)
        watching.cancel()

    run(watch())
    assert first.state in ("down", "other_model")


def test_an_endless_answer_about_a_server_is_down_and_not_kept():
    n_sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal n_sent
        while True:
            n_sent += 65_536
            assert n_sent < 4 * r.MAX_ANSWER_BYTES
            yield b" " * 65_536

    async def serve(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=chunks())

    client = client_of_server(Wire(serve))
    servers = Replicas([Replica(url, "") for url in URLS], client)
    run(servers.check(servers.servers[0]))
    assert servers.servers[0].state == "down"
    assert n_sent > r.MAX_ANSWER_BYTES


def test_no_key_is_in_what_the_server_is_told():
    farm = Farm(2)
    farm.check()
    farm.states["http://one:1"] = "down"
    farm.check()
    assert farm.said
    assert not any("key of" in line for line in farm.said)


# -- bodies that are read before it is known where they go -----------------------------


class Upload:
    """A request without an id, whose client sends its body in parts when it is told to."""

    def __init__(self, farm: Farm, path: str = CHAT) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answered: list[dict[str, Any]] = []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        self.task = asyncio.ensure_future(
            farm.gate({**scope, "headers": []}, self._messages.get, self._send)
        )

    async def _send(self, message: dict[str, Any]) -> None:
        self.answered.append(message)

    async def post(self, part: bytes, *, is_last: bool = False) -> None:
        self._messages.put_nowait(
            {"type": "http.request", "body": part, "more_body": not is_last}
        )
        await settle()

    async def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})
        await settle()

    @property
    def status(self) -> int:
        return self.answered[0]["status"]


async def settle() -> None:
    """Let all go on until they wait for the test."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_what_is_held_of_all_bodies_has_a_limit(path):
    farm = Farm(2)

    async def work() -> None:
        uploads = [Upload(farm, path) for _ in range(5)]
        for upload in uploads[:4]:
            await upload.post(b"x" * 10_000)
        assert farm.gate.held_bytes.n_bytes == 40_000
        await uploads[4].post(b"x")

        assert uploads[4].status == 503
        assert b"send it again" in uploads[4].answered[1]["body"]
        assert (b"retry-after", b"5") in uploads[4].answered[0]["headers"]
        assert farm.gate.held_bytes.n_bytes == 40_000

        await uploads[0].post(b"x")
        assert uploads[0].status == 413
        await uploads[1].leave()
        assert farm.gate.held_bytes.n_bytes == 20_000
        again = {"input": "x"} if path == RESPONSES else said_by_user("x")
        assert (await farm.send(again, path))[0] == 200
        for upload in uploads[2:4]:
            await upload.leave()

    run(work())
    assert farm.gate.held_bytes.n_bytes == 0


class SlowWire(httpx.AsyncBaseTransport):
    """A server that has read a body, keeps nothing of it, and replies for minutes."""

    def __init__(self) -> None:
        self.n_read = 0
        self.goes_on = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async for part in request.stream:
            self.n_read += len(part)
        return httpx.Response(200, content=self._reply())

    async def _reply(self) -> AsyncIterator[bytes]:
        yield EVENTS
        await self.goes_on.wait()


def test_a_body_is_let_go_when_it_has_been_sent_on_and_not_at_the_end_of_the_reply():
    farm = Farm(2)
    wire = SlowWire()
    client = client_of_server(wire)
    farm.gate = dataclasses.replace(farm.gate, client=client, max_body_bytes=1 << 23)

    async def work() -> None:
        upload = Upload(farm)
        tracemalloc.start()
        try:
            body = json.dumps(said_by_user("x" * 4_000_000)).encode()
            await upload.post(body, is_last=True)
            del body
            n_held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert wire.n_read > 4_000_000
        assert n_held < 1_000_000
        assert farm.gate.held_bytes.n_bytes == 0
        wire.goes_on.set()
        await upload.task
        assert upload.status == 200

    run(work())


# -- what is kept ----------------------------------------------------------------------


def test_a_proxy_that_starts_again_knows_where_conversations_are(tmp_path):
    path = tmp_path / "litellm-1.assignments"
    farm = Farm(3, path)

    for session in "abc":
        farm.ask(said_by_user(f"secret {session}"))
    farm.servers._save()
    text = path.read_text()
    assert "secret" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    again = Farm(3, path)

    again.servers._load()
    for session in "cba":
        again.ask(said_by_user(f"secret {session}"))
    assert again.hosts == ["three", "two", "one"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": ["u", "x"]}'])
def test_a_file_that_cannot_be_read_is_begun_anew(tmp_path, text):
    path = tmp_path / "litellm-1.assignments"
    path.write_text(text)
    farm = Farm(2, path)
    farm.servers._load()
    assert farm.ask(said_by_user("x"))[0] == 200
    farm.servers._save()
    assert json.loads(path.read_text())


def test_the_conversations_used_least_recently_are_forgotten(monkeypatch):
    monkeypatch.setattr(r, "MAX_CONVERSATIONS", 3)
    farm = Farm(2)
    for conversation in ("a", "b", "c", "a", "d"):
        farm.servers.choose(conversation)
    assert list(farm.servers._assignments) == ["c", "a", "d"]
