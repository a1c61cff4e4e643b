"""The probes: a healthy server passes, an unhealthy one fails; a log diff names the place."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import diff_turns as diff
import pi_like_probe as pi
import probe_session as session
import pytest
import start_llm as s
from stub_server import StubHandler, running

JsonObject = dict[str, Any]
SCRIPTS = Path(__file__).parents[2] / "scripts"


# A server whose tokens are words ------------------------------------------------------------------

VOLATILE = re.compile(
    r"""(?x:
      x-anthropic-billing-header:\ .*?cch=\w+;
    | "message_id":\ "[^"]*"
    | \[\w{3}\ [\d-]+\ [\d:]+\ UTC\]    # [Fri 2026-11-20 08:51 UTC]
    | Current\ time\ is\ .*
    )"""
)
ARGUMENTS = '{"path": "notes.txt", "limit": 2.0, "10": "é", "2": "<b>"}'


def parsed(arguments: str) -> JsonObject:
    """As values: to a client in JavaScript 2.0 is 2."""
    return json.loads(arguments, parse_float=lambda text: int(float(text)))


def words_of(message: JsonObject, *, masks_volatile: bool) -> list[str]:
    """The tokens of a message; the call ids and the spelling of arguments are not among them."""
    parts = [message.get("reasoning_content") or ""]
    content = message.get("content") or ""
    if isinstance(content, str):
        parts.append(content)
    else:
        parts += [part.get("text") or part["image_url"]["url"][:99] for part in content]
    for call in message.get("tool_calls") or ():
        arguments = parsed(call["function"]["arguments"])
        parts.append(f"{call['function']['name']} {sorted(arguments.items())}")

    text = " ".join(parts)
    if masks_volatile:
        text = VOLATILE.sub("", text)
    return [f"<{message['role']}>", *re.findall(r"\w+|[^\w\s]", text), "<end>"]


class FakeServer(ThreadingHTTPServer):
    """Speaks chat completions. Its `mode` decides the cached tokens that it reports.

    exact       volatile fields are masked; every known prefix is cached
    as_sent     a volatile field ends the cached prefix
    forgetful   nothing is cached
    blind       any old conversation is taken for a prefix of any other
    bumping     like exact, but a counter moves that must not
    trimming    like exact, but each turn lacks a checkpoint, not only the first
    """

    daemon_threads = True

    def __init__(self, mode: str) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.mode = mode
        self.bodies: list[JsonObject] = []
        self._conversations: list[list[str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def status(self) -> JsonObject:
        n_misses = len(self.bodies)
        if self.mode != "trimming":
            n_misses = min(n_misses, 1)
        counters = dict.fromkeys(pi.STILL, 0) | {"hybrid_trim_miss": n_misses}
        if self.mode == "bumping":
            counters["vlm_retreat"] = len(self.bodies)
        return {"counters": counters, "recent": []}

    def complete(self, body: JsonObject) -> tuple[JsonObject, JsonObject]:
        """(reply, usage)"""
        masks_volatile = self.mode != "as_sent"
        prompt = []
        for message in body["messages"]:
            prompt += words_of(message, masks_volatile=masks_volatile)
        prompt.append("<assistant>")

        reply = self._reply(body)
        reply_words = words_of(reply, masks_volatile=masks_volatile)[1:]
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(reply_words),
            "prompt_tokens_details": {"cached_tokens": self._count_cached(prompt)},
        }

        self._conversations.append(prompt + reply_words)
        self.bodies.append(body)
        return reply, usage

    def _reply(self, body: JsonObject) -> JsonObject:
        n = len(self.bodies)
        reply = {"role": "assistant", "content": None, "reasoning_content": f"Hm {n}. "}
        last_role = body["messages"][-1]["role"]
        if body.get("tool_choice") == "none" or last_role == "tool":
            return {**reply, "content": f"Answer {n} to all of it."}
        function = {"name": "read", "arguments": ARGUMENTS}
        call = {"id": f"call_{n}", "type": "function", "function": function}
        return {**reply, "tool_calls": [call]}

    def _count_cached(self, prompt: list[str]) -> int:
        if self.mode == "forgetful":
            return 0
        if self.mode == "blind":
            longest = max(map(len, self._conversations), default=0)
            return min(len(prompt) - 1, longest)

        n_cached = 0
        for conversation in self._conversations:
            n_cached = max(n_cached, _common_prefix(prompt[:-1], conversation))
        return n_cached


def _common_prefix(prompt: list[str], conversation: list[str]) -> int:
    n_common = 0
    for word, old_word in zip(prompt, conversation, strict=False):
        if word != old_word:
            break
        n_common += 1
    return n_common


class FakeHandler(StubHandler):
    def do_GET(self) -> None:
        bodies = {
            "/v1/models": {"data": [{"id": "fake"}]},
            "/v1/status": self.server.status(),
        }
        self.answer(200, json.dumps(bodies[self.path]).encode())

    def do_POST(self) -> None:
        n_bytes = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(n_bytes))
        reply, usage = self.server.complete(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        reply_id = f"chatcmpl-{len(self.server.bodies):04}abcd"
        for event in events_of(reply, usage):
            event["id"] = reply_id
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


def events_of(reply: JsonObject, usage: JsonObject) -> Iterator[JsonObject]:
    """A keep-alive, the reasoning in two pieces, then the text or a call, its arguments in two."""
    reasoning = reply["reasoning_content"]
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": reasoning[:2]},
        {"reasoning_content": reasoning[2:]},
    ]
    if reply["content"]:
        deltas.append({"content": reply["content"]})
    for index, call in enumerate(reply.get("tool_calls", ())):
        function = {**call["function"], "arguments": ARGUMENTS[:9]}
        first_piece = {**call, "index": index, "function": function}
        last_piece = {"index": index, "function": {"arguments": ARGUMENTS[9:]}}
        deltas.append({"tool_calls": [first_piece]})
        deltas.append({"tool_calls": [last_piece]})

    yield {"choices": []}
    for delta in deltas:
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    finish_reason = "tool_calls" if "tool_calls" in reply else "stop"
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]}
    yield {"choices": [], "usage": usage}


@contextmanager
def fake(mode: str) -> Iterator[FakeServer]:
    server = FakeServer(mode)
    with running(server):
        yield server


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As a user would, from any folder."""
    command = [sys.executable, SCRIPTS / f"{script}.py", *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60
    )


def call_main(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    return module.main()


# As PI echoes it ---------------------------------------------------------------------------------


def reply_of(**fields: Any) -> Any:
    """`calls=True`: a reply with one call."""
    calls = []
    if fields.pop("calls", False):
        function = {"name": "read", "arguments": ARGUMENTS}
        calls.append({"id": "c1", "type": "function", "function": function})
    return pi.Reply(calls=calls, **fields)


def test_a_reply_of_calls_alone_is_echoed_without_content():
    for content in ("", "\n\n"):
        reply = reply_of(content=content, reasoning="Hm.", calls=True)
        echo = reply.echo()
        assert echo["content"] is None
        assert echo["reasoning_content"] == "Hm."
        arguments = echo["tool_calls"][0]["function"]["arguments"]
        assert arguments == '{"path":"notes.txt","limit":2.0,"10":"é","2":"<b>"}'


def test_a_reply_of_thinking_alone_is_dropped():
    assert reply_of(reasoning="Hm.", content=" \n").echo() is None


def test_an_error_in_the_stream_is_no_reply(monkeypatch):
    server = pi.Server("http://x", model="m", key="")
    stream = io.BytesIO(b'data: {"error": {"message": "engine died"}}\n')
    monkeypatch.setattr(server, "open", lambda *_: stream)
    with pytest.raises(pi.CannotAsk, match="engine died"):
        server.ask_chat({})


# Verdicts -----------------------------------------------------------------------------------------


def turns_of(*counts: tuple[int, int, int]) -> list[Any]:
    """(prompt, cached, out) of each turn."""
    turns: list[Any] = []
    last_turn = None
    for n_prompt, n_cached, n_out in counts:
        reply = pi.Reply(n_prompt=n_prompt, n_cached=n_cached, n_out=n_out)
        last_turn = pi.measure_turn(reply, asked_role="user", last_turn=last_turn)
        turns.append(last_turn)
    return turns


def test_lost_is_what_was_sent_or_generated_and_not_cached():
    turns = turns_of((100, 0, 10), (150, 109, 10), (200, 100, 10), (300, 250, 5))
    assert [turn.lost for turn in turns] == [0, 1, 60, 0]
    assert [turn.number for turn in turns] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("third", "counters", "healthy"),
    [
        (970, {}, True),
        (969, {}, False),
        (970, None, True),
        (970, {"hybrid_trim_miss": 3}, True),
        (970, {"vlm_retreat": 1}, False),
        (970, {"exact_key_rejected_by_model_lcp": 1}, False),
    ],
)
def test_health_is_the_share_from_turn_three_and_still_counters(
    third, counters, healthy
):
    turns = turns_of((1000, 0, 1), (1000, 0, 1), (1000, third, 1), (1000, 999, 1))
    assert all(check.healthy for check in pi.judge(turns, counters)) is healthy


@pytest.mark.parametrize(
    ("later", "healthy"), [({}, True), ({"hybrid_trim_miss": 1}, False)]
)
def test_a_missing_checkpoint_is_unhealthy_after_the_first_turn(later, healthy):
    turns = turns_of((1000, 0, 1), (1000, 0, 1), (1000, 999, 1))
    counters = {"hybrid_trim_miss": 1}
    checks = pi.judge(turns, counters, later=later)
    assert all(check.healthy for check in checks) is healthy


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [(99, "1 lost"), (100, "ok"), (150, "ok"), (152, "2 served from the old past")],
)
def test_cached_must_keep_both_bounds(cached, verdict):
    fields = {"scenario": "semantic", "case": "", "what": "edit", "prompt": 900}
    row = session.Row(cached=cached, at_least=100, at_most=150, **fields)
    assert row.verdict == verdict


# The probes against a server ----------------------------------------------------------------------


def test_pi_like_probe_finds_a_healthy_server_healthy():
    with fake("exact") as server:
        url = server.url + "/v1/"
        result = run("pi_like_probe", "--base-url", url, "--turns", 5, "--json")

    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["healthy"] and report["model"] == "fake"
    assert report["counters"]["hybrid_trim_miss"] == 1
    turns = report["turns"]
    assert [turn["asked"] for turn in turns] == ["user", "tool", "user", "tool", "user"]
    lost_tokens = [turn["lost"] for turn in turns]
    assert lost_tokens == [0] * 5, "what is echoed is not what was said"
    assert turns[0]["cached"] <= 12, "the first turn is not cold"

    body = server.bodies[-1]
    assert body["messages"][0]["role"] == "developer"
    tool_names = [tool["function"]["name"] for tool in body["tools"]]
    assert tool_names == ["read", "bash", "edit", "write"]
    expected = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": False,
    }
    assert expected.items() <= body.items()
    assert body["max_completion_tokens"] and body["reasoning_effort"]


@pytest.mark.parametrize("mode", ["forgetful", "bumping", "trimming"])
def test_pi_like_probe_finds_an_unhealthy_server_unhealthy(mode, monkeypatch, capsys):
    with fake(mode) as server:
        status = call_main(pi, monkeypatch, "--base-url", server.url, "--turns", 3)
    assert status == 1
    shown = capsys.readouterr().out
    assert "NOT HEALTHY" in shown
    assert ("0.0% in turn 3" in shown) is (mode == "forgetful")
    assert ("vlm_retreat: moved by 3" in shown) is (mode == "bumping")
    later = "hybrid_trim_miss from turn 2 on: moved by 2"
    assert (later in shown) is (mode == "trimming")


def test_probe_session_finds_a_healthy_server_healthy():
    with fake("exact") as server:
        result = run("probe_session", "--base-url", server.url, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["scenarios"] == dict.fromkeys(
        ["normal", "drift", "semantic", "insert"], True
    )
    total = sum(s.n_requests * len(s.cases) for s in session.SCENARIOS.values())
    assert len(report["requests"]) == len(server.bodies) == total


@pytest.mark.parametrize(
    ("mode", "healthy"),
    [
        ("as_sent", {"normal": True, "drift": False, "semantic": True, "insert": True}),
        (
            "forgetful",
            {"normal": False, "drift": False, "semantic": False, "insert": False},
        ),
        ("blind", {"normal": True, "drift": True, "semantic": False, "insert": False}),
    ],
)
def test_probe_session_tells_what_is_wrong(mode, healthy, monkeypatch, capsys):
    with fake(mode) as server:
        assert call_main(session, monkeypatch, "--base-url", server.url, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["scenarios"] == healthy
    edits = [row["verdict"] for row in report["requests"] if row["what"] == "edit"]
    assert ("served from the old past" in edits[0]) is (mode == "blind")


# Session logs -------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def said(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


TALK = [SYSTEM, user("one"), said("1"), user("two"), said("2"), user("three")]


def log_of(folder: Path, *requests: tuple[list[JsonObject], int, int]) -> Path:
    """A log by the server's own code, of (messages, prompt, cached); replies have 10 tokens."""
    log = s.SessionLog(s.Config(log_root=str(folder)))
    earlier: list[JsonObject] = []

    for messages, n_prompt, n_cached in requests:
        n_known = s.message_diff(earlier, messages)
        earlier = messages
        record = {
            "prompt": n_prompt,
            "cached": n_cached,
            "out": 10,
            "match": "line",
            "n_messages": len(messages),
            "messages": messages[n_known:],
        }
        log.write("session", record)
    return next(folder.glob("*/cache-session-*.log"))


def read_log(path: Path) -> list[Any]:
    return diff.read_turns(path.read_text(encoding="utf-8").splitlines())


def test_conversations_are_rebuilt_from_what_was_new(tmp_path):
    retry = TALK[:4]
    log = log_of(
        tmp_path, (TALK[:2], 20, 0), (TALK[:4], 40, 30), (TALK, 60, 50), (retry, 40, 39)
    )

    turns = read_log(log)
    assert [turn.messages for turn in turns] == [TALK[:2], TALK[:4], TALK, retry]
    assert [turn.n_own for turn in turns] == [2, 2, 2, 0]


def test_what_the_log_never_had_is_unknown_and_differs_from_nothing(tmp_path):
    log = log_of(tmp_path, (TALK[:2], 20, 0), (TALK[:4], 40, 0), (TALK, 60, 50))
    _, rest = log.read_text(encoding="utf-8").split("\n", 1)
    log.write_text(rest)

    turns = read_log(log)

    assert turns[0].messages == [None, None, *TALK[2:4]]
    assert diff.compare(*turns).kind == "append"
    assert diff.first_difference(TALK[:4], turns[0].messages) is None


def calling(arguments: str) -> JsonObject:
    function = {"name": "read", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (user("same"), user("same, not"), ("content", "same", "same, not")),
        (user("a"), {**user("a"), "name": "x"}, ("name", "", "x")),
        (
            calling('{"a":1}'),
            calling('{"a": 1}'),
            ("tool_calls[0].function.arguments", '{"a":1}', '{"a": 1}'),
        ),
        (
            user("a"),
            {"role": "user", "content": [{"type": "text"}]},
            ("content", "a", '[{"type": "text"}]'),
        ),
        (
            {**user(""), "content": ["a"]},
            {**user(""), "content": ["a", "b"]},
            ("content[1]", "", "b"),
        ),
    ],
)
def test_the_first_difference_is_named(left, right, expected):
    difference = diff.first_difference([SYSTEM, left], [SYSTEM, right])
    assert difference.message == 1
    assert (difference.field, difference.left, difference.right) == expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((TALK[:4], 100, 0), (TALK, 150, 109), ("append", 40, 1, True)),
        ((TALK[:4], 100, 0), (TALK, 150, 40), ("append", 40, 70, False)),
        ((TALK, 100, 0), (TALK, 100, 99), ("same", 0, 1, True)),
        ((TALK, 100, 0), (TALK[:2], 30, 29), ("cut", 0, 1, False)),
        ((TALK, 100, 0), ([SYSTEM, user("1")], 30, 20), ("edit", 0, 10, False)),
    ],
)
def test_lost_is_what_is_neither_cached_nor_new(tmp_path, left, right, expected):
    log = log_of(tmp_path, (TALK[:2], 50, 0), left, right)
    _, left_turn, right_turn = read_log(log)

    result = diff.compare(left_turn, right_turn)

    assert (result.kind, result.new, result.lost, result.continues) == expected
    assert bool(result.hint) is (result.kind == "append" and not result.continues)


def test_diff_turns_shows_the_last_two_turns_of_the_newest_log(tmp_path):
    changed = [SYSTEM, user("[bold]uno[/]")]
    log = log_of(tmp_path, (TALK[:2], 90, 0), (TALK[:4], 120, 100), (changed, 90, 40))

    result = run("diff_turns", "--log-root", tmp_path)

    assert (result.returncode, result.stderr) == (1, "")
    assert "edit at message 1 in content" in result.stdout
    assert "'one'" in result.stdout and "'[bold]uno[/]'" in result.stdout
    assert "lost 50" in result.stdout and str(log) in result.stdout


def test_diff_turns_as_json_of_two_chosen_turns(tmp_path, monkeypatch, capsys):
    log = log_of(tmp_path, (TALK[:2], 90, 0), (TALK[:4], 120, 100), (TALK, 150, 30))

    assert call_main(diff, monkeypatch, log, "--turns", 1, -2, "--json") == 0

    report = json.loads(capsys.readouterr().out)
    assert (report["left"]["number"], report["right"]["number"]) == (1, 2)
    assert (report["kind"], report["new"], report["lost"]) == ("append", 20, 0)
    assert report["difference"]["message"] == 2 and report["continues"] is True
