"""The probes: a healthy server passes, an unhealthy one is told; a log diff says where."""

import copy
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import start_llm as s

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = (
        module  # before exec: dataclasses and other scripts look it up by name
    )
    spec.loader.exec_module(module)
    return module


pi = load("pi_like_probe")
session = load("probe_session")
diff = load("diff_turns")


# A server made of words ---------------------------------------------------------------------------

VOLATILE = re.compile(
    r'x-anthropic-billing-header: .*?cch=\w+;|"message_id": "[^"]*"|\[\w{3} [\d-]+ [\d:]+ UTC\]'
    r"|Current time is .*"
)
ARGUMENTS = '{"path": "notes.txt", "limit": 2.0, "10": "é", "2": "<b>"}'


def parsed(arguments: str) -> dict[str, Any]:
    """As values: to a client in JavaScript 2.0 is 2."""
    return json.loads(arguments, parse_float=lambda text: int(float(text)))


def words_of(message: dict[str, Any], *, stills: bool) -> list[str]:
    """The tokens of a message; the call ids and the spelling of arguments are not among them."""
    content = message.get("content") or ""
    parts = (
        [content] if isinstance(content, str) else [part["text"] for part in content]
    )
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parts += [
        f"{call['name']} {sorted(parsed(call['arguments']).items())}" for call in calls
    ]
    text = " ".join([message.get("reasoning_content") or "", *parts])
    text = VOLATILE.sub("", text) if stills else text
    return [f"<{message['role']}>", *re.findall(r"\w+|[^\w\s]", text), "<end>"]


class FakeServer(ThreadingHTTPServer):
    """Speaks chat completions. What it says of its cache depends on its `mode`.

    exact       volatile fields are stilled; all that is known is cached
    as_sent     a volatile field ends what is cached
    forgetful   nothing is cached
    blind       any old conversation is taken for the past of any other
    bumping     like exact, but a counter moves that must not
    """

    daemon_threads = True

    def __init__(self, mode: str) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.mode = mode
        self.bodies: list[dict[str, Any]] = []
        self._pasts: list[list[str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def status(self) -> dict[str, Any]:
        counters = dict.fromkeys(pi.STILL, 0) | {"hybrid_trim_miss": len(self.bodies)}
        if self.mode == "bumping":
            counters["vlm_retreat"] = len(self.bodies)
        return {"counters": counters}

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(reply, usage)"""
        stills = self.mode != "as_sent"
        rows = (words_of(message, stills=stills) for message in body["messages"])
        prompt = [*itertools.chain.from_iterable(rows), "<assistant>"]
        reply = self._reply(body)
        said = words_of(reply, stills=stills)[1:]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        usage["prompt_tokens_details"] = {"cached_tokens": self._cached(prompt)}
        self._pasts.append(prompt + said)
        self.bodies.append(body)
        return reply, usage

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        n = len(self.bodies)
        reply = {"role": "assistant", "content": None, "reasoning_content": f"Hm {n}. "}
        if body.get("tool_choice") == "none" or body["messages"][-1]["role"] == "tool":
            return {**reply, "content": f"Answer {n} to all of it."}
        call = {"name": "read", "arguments": ARGUMENTS}
        return {
            **reply,
            "tool_calls": [{"id": f"call_{n}", "type": "function", "function": call}],
        }

    def _cached(self, prompt: list[str]) -> int:
        if self.mode == "forgetful":
            return 0
        if self.mode == "blind":
            return min(len(prompt) - 1, max(map(len, self._pasts), default=0))
        pairs = [zip(prompt[:-1], past, strict=False) for past in self._pasts]
        return max(
            (len(list(itertools.takewhile(_same, pair))) for pair in pairs), default=0
        )


def _same(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


class FakeHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        bodies = {
            "/v1/models": {"data": [{"id": "fake"}]},
            "/v1/status": self.server.status(),
        }
        self._send(bodies[self.path], "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply, usage = self.server.answer(body)
        self._send(None, "text/event-stream")
        for event in events_of(reply, usage):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, body: Any, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(b"" if body is None else json.dumps(body).encode())

    def log_message(self, *args) -> None:
        """Nothing: pytest's output is for failures."""


def events_of(reply: dict[str, Any], usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A keep-alive, the thinking in two pieces, then the words or a call, its arguments in two."""
    thought = reply["reasoning_content"]
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": thought[:2]}, {"reasoning_content": thought[2:]}]
    deltas += [{"content": reply["content"]}] if reply["content"] else []
    for index, call in enumerate(reply.get("tool_calls", ())):
        opened = {**call, "function": {**call["function"], "arguments": ARGUMENTS[:9]}}
        rest = {"index": index, "function": {"arguments": ARGUMENTS[9:]}}
        deltas += [{"tool_calls": [{"index": index, **opened}]}, {"tool_calls": [rest]}]
    yield {"choices": []}
    for delta in deltas:
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = "tool_calls" if "tool_calls" in reply else "stop"
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": end}]}
    yield {"choices": [], "usage": usage}


@contextmanager
def fake(mode: str) -> Iterator[FakeServer]:
    with FakeServer(mode) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


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


# As JavaScript writes it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ('{"path": "a.txt", "limit": 2.0}', '{"path":"a.txt","limit":2}'),
        ('{"b": 1, "10": 2, "a": 3, "2": 4}', '{"2":4,"10":2,"b":1,"a":3}'),
        (
            '{"01": 1, "4294967295": 2, "0": 3, "-1": 4}',
            '{"0":3,"01":1,"4294967295":2,"-1":4}',
        ),
        (r'{"x": "\u00e9\u2028/\u007f"}', '{"x":"é\u2028/\x7f"}'),
        (r'["\ud83d\ude00", "\ud83d", "\u0001\n"]', r'["😀","\ud83d","\u0001\n"]'),
        (
            "[1e21, 1e20, 1.5e-7, 0.000001, -0.0, -2.50]",
            "[1e+21,100000000000000000000,1.5e-7,0.000001,0,-2.5]",
        ),
        (
            "[12345678901234567890, 9007199254740993]",
            "[12345678901234567000,9007199254740992]",
        ),
        (f"[1e999, {'9' * 400}, true, null, [], {{}}]", "[null,null,true,null,[],{}]"),
        ('{"a": 1, "a": 2}', '{"a":2}'),
        ('{"path": "a.t', "{}"),
        ("[NaN]", "{}"),
    ],
)
def test_arguments_come_back_as_javascript_writes_them(given, written):
    assert pi.js_arguments(given) == written


def reply_of(**fields: Any) -> Any:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "read", "arguments": ARGUMENTS},
    }
    calls = [call] if fields.pop("calls", False) else []
    return pi.Reply(calls=calls, **fields)


def test_a_reply_of_calls_alone_is_echoed_without_content():
    for content in ("", "\n\n"):
        echo = pi.pi_echo(reply_of(content=content, reasoning="Hm.", calls=True))
        assert echo["content"] is None
        assert echo["reasoning_content"] == "Hm."
        arguments = echo["tool_calls"][0]["function"]["arguments"]
        assert arguments == '{"2":"<b>","10":"é","path":"notes.txt","limit":2}'


def test_words_are_echoed_with_their_spaces_and_thinking_under_its_name():
    reply = reply_of(content="  so \n\n", reasoning="Hm.", reasoning_field="reasoning")
    expected = {"role": "assistant", "content": "  so \n\n", "reasoning": "Hm."}
    assert pi.pi_echo(reply) == expected


def test_a_reply_of_thinking_alone_is_dropped():
    assert pi.pi_echo(reply_of(reasoning="Hm.", content=" \n")) is None


def test_calls_are_joined_with_and_without_an_index():
    pieces = [
        {"id": "a", "function": {"name": "read", "arguments": '{"x"'}},
        {"function": {"arguments": ": 1}"}},
        {"id": "b", "function": {"name": "bash", "arguments": "{}"}},
    ]
    indexed = [
        {"index": index, **piece}
        for index, piece in zip((0, 0, 1), pieces, strict=True)
    ]
    for stream in (pieces, indexed):
        reply = pi.Reply()
        for piece in stream:
            reply.hear({"choices": [{"delta": {"tool_calls": [piece]}}]}, at=1.0)
        functions = [(call["id"], *call["function"].values()) for call in reply.calls]
        assert functions == [("a", "read", '{"x": 1}'), ("b", "bash", "{}")]


def test_the_first_word_is_when_something_is_said():
    reply = pi.Reply()
    events = [
        {"choices": []},
        *[{"choices": [{"delta": {"content": c}}]} for c in ("", "a", "b")],
    ]
    for at, event in enumerate(events):
        reply.hear(event, at=float(at))
    assert (reply.ttft_seconds, reply.seconds, reply.content) == (2.0, 3.0, "ab")


def test_an_error_in_the_stream_is_no_reply():
    with pytest.raises(pi.ProbeError, match="engine died"):
        pi.Reply().hear({"error": {"message": "engine died"}}, at=0.0)


# Verdicts -----------------------------------------------------------------------------------------


def turns_of(*counts: tuple[int, int, int]) -> list[Any]:
    """(prompt, cached, out) of each turn."""
    turns: list[Any] = []
    for prompt, cached, out in counts:
        reply = pi.Reply(n_prompt=prompt, n_cached=cached, n_out=out)
        turns.append(
            pi.measured(reply, asked="user", before=turns[-1] if turns else None)
        )
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


def test_counters_count_from_where_they_stood():
    assert pi.moved({"a": 2}, {"a": 5, "b": 1}) == {"a": 3, "b": 1}
    assert pi.moved(None, {"a": 5}) is None


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [(99, "1 lost"), (100, "ok"), (150, "ok"), (152, "2 served from the old past")],
)
def test_cached_must_keep_both_bounds(cached, verdict):
    fields = {"scenario": "semantic", "case": "", "what": "edit", "prompt": 900}
    row = session.Row(cached=cached, at_least=100, at_most=150, **fields)
    assert row.verdict == verdict


@pytest.mark.parametrize("name", session.DRIFTS)
def test_a_drift_is_another_in_each_request_and_hides_nothing(name):
    text = "\n\n".join(f"Paragraph {n}." for n in range(20))
    messages = [
        {"role": "developer", "content": text},
        {"role": "user", "content": "Hello"},
    ]
    kept, stamp = copy.deepcopy(messages), session.DRIFTS[name]
    sent = [stamp(messages, n) for n in range(3)]
    assert messages == kept
    assert all(one != other for one, other in itertools.combinations(sent, 2))
    plain = words_of(messages[0], stills=True) + words_of(messages[1], stills=True)
    for stamped in sent:
        words = [word for message in stamped for word in words_of(message, stills=True)]
        rest = iter(words)
        assert all(
            word in rest for word in plain[1:]
        )  # in order, but for the system's role


# The probes against a server ----------------------------------------------------------------------


def test_pi_like_probe_finds_a_healthy_server_healthy():
    with fake("exact") as server:
        done = run(
            "pi_like_probe", "--base-url", server.url + "/v1/", "--turns", 5, "--json"
        )
        assert (done.returncode, done.stderr) == (0, "")
        report = json.loads(done.stdout)
    assert report["healthy"] and report["model"] == "fake"
    assert report["counters"]["hybrid_trim_miss"] == 5
    turns = report["turns"]
    assert [turn["asked"] for turn in turns] == ["user", "tool", "user", "tool", "user"]
    assert [turn["lost"] for turn in turns] == [0] * 5, (
        "what is echoed is not what was said"
    )
    assert turns[0]["cached"] <= 12, "the first turn is not cold"
    body = server.bodies[-1]
    assert body["messages"][0]["role"] == "developer"
    assert [tool["function"]["name"] for tool in body["tools"]] == [
        "read",
        "bash",
        "edit",
        "write",
    ]
    expected = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "store": False,
    }
    assert expected.items() <= body.items()
    assert body["max_completion_tokens"] and body["reasoning_effort"]


@pytest.mark.parametrize("mode", ["forgetful", "bumping"])
def test_pi_like_probe_finds_an_unhealthy_server_unhealthy(mode, monkeypatch, capsys):
    with fake(mode) as server:
        status = call_main(pi, monkeypatch, "--base-url", server.url, "--turns", 3)
    assert status == 1
    shown = capsys.readouterr().out
    assert "NOT HEALTHY" in shown
    assert ("0.0% in turn 3" in shown) is (mode == "forgetful")
    assert ("vlm_retreat: moved by 3" in shown) is (mode == "bumping")


@pytest.mark.parametrize("module", [pi, session], ids=lambda module: module.__name__)
def test_a_server_that_does_not_answer_is_another_status(module, monkeypatch, capsys):
    with fake("exact") as server:
        url = server.url
    assert call_main(module, monkeypatch, "--base-url", url) == 2
    assert url in capsys.readouterr().err


def test_probe_session_finds_a_healthy_server_healthy():
    with fake("exact") as server:
        done = run("probe_session", "--base-url", server.url, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
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


def test_probe_session_shows_a_table_of_what_was_asked_for(monkeypatch, capsys):
    with fake("exact") as server:
        only = ("--base-url", server.url, "--only", "insert", "normal")
        assert call_main(session, monkeypatch, *only) == 0
        assert len(server.bodies) == session.N_PAST + 2 + session.N_GROWTH
    shown = capsys.readouterr().out
    assert "insert" in shown and "normal" in shown and "drift" not in shown


# Session logs -------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TALK = [SYSTEM, user("one"), said("1"), user("two"), said("2"), user("three")]


def log_of(folder: Path, *requests: tuple[list[dict[str, Any]], int, int]) -> Path:
    """A log by the server's own code, of (messages, prompt, cached); replies have 10 tokens."""
    log, store = s.SessionLog(s.Config(log_root=str(folder))), s.SessionTurnStore()
    for messages, prompt, cached in requests:
        facts = {"prompt": prompt, "cached": cached, "out": 10, "match": "line"}
        start = store.exchange_last("session", list(map(str, messages)))
        news = {"n_messages": len(messages), "messages": messages[start:]}
        log.write("session", {**facts, **news})
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
    log.write_text(
        "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[1:])
    )
    turns = read_log(log)
    assert turns[0].messages == [None, None, *TALK[2:4]]
    assert diff.compare(*turns).kind == "append"
    assert diff.first_difference(TALK[:4], turns[0].messages) is None


def test_an_old_log_without_counts_can_be_read():
    record = {"prompt": 9, "cached": 0, "out": 1, "messages": TALK[:2]}
    (turn,) = diff.read_turns([json.dumps(record), ""])
    assert turn.messages == TALK[:2]


def calling(arguments: str) -> dict[str, Any]:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "read", "arguments": arguments},
    }
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


def test_long_texts_are_shown_around_the_difference():
    left, right = ("a" * 500 + middle + "b" * 500 for middle in ("<old>", "<new>"))
    shown = diff.around(left, right)
    assert (
        shown[0].startswith("…aaa")
        and "<old>bbb" in shown[0]
        and shown[0].endswith("b…")
    )
    assert "<new>bbb" in shown[1] and len(shown[1]) == 2 * diff.AROUND + 2


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
    turns = read_log(log_of(tmp_path, (TALK[:2], 50, 0), left, right))[1:]
    found = diff.compare(*turns)
    assert (found.kind, found.new, found.lost, found.continues) == expected
    assert bool(found.hint) is (found.kind == "append" and not found.continues)


def test_diff_turns_shows_the_last_two_turns_of_the_newest_log(tmp_path):
    changed = [SYSTEM, user("[bold]uno[/]")]
    log = log_of(tmp_path, (TALK[:2], 90, 0), (TALK[:4], 120, 100), (changed, 90, 40))
    done = run("diff_turns", "--log-root", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "edit at message 1 in content" in done.stdout
    assert "'one'" in done.stdout and "'[bold]uno[/]'" in done.stdout
    assert "lost 50" in done.stdout and str(log) in done.stdout


def test_diff_turns_as_json_of_two_chosen_turns(tmp_path, monkeypatch, capsys):
    log = log_of(tmp_path, (TALK[:2], 90, 0), (TALK[:4], 120, 100), (TALK, 150, 30))
    assert call_main(diff, monkeypatch, log, "--turns", 1, -2, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["left"]["number"], report["right"]["number"]) == (1, 2)
    assert (report["kind"], report["new"], report["lost"]) == ("append", 20, 0)
    assert report["difference"]["message"] == 2 and report["continues"] is True


def test_diff_turns_says_what_it_cannot_read(tmp_path, monkeypatch, capsys):
    assert call_main(diff, monkeypatch, "--log-root", tmp_path) == 2
    log = log_of(tmp_path, (TALK[:2], 90, 0))
    assert call_main(diff, monkeypatch, log) == 2
    log.write_text("no json\n", encoding="utf-8")
    assert call_main(diff, monkeypatch, log) == 2
    told = capsys.readouterr().err.splitlines()
    assert "ENABLE_REQUEST_LOGGING" in told[0]
    assert "no turn -2" in told[1] and "turn 1 is no line" in told[2]
