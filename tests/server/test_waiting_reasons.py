"""STATUS: why a request was slow, what was refused, and what all requests add up to."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import start_llm as s
from prometheus_client.parser import text_string_to_metric_families
from server_fixture import (
    MAX_WAIT_SECONDS,
    SYSTEM,
    Served,
    user,
    wait_until,
    wait_until_idle,
)
from status_client import ask, status, words

CHAT = "/v1/chat/completions"
SECRET = "xylophonist"  # a word of a prompt that is to appear nowhere
TIGHT = {"prompt_cache_max_bytes": 800_000}  # of KV: for one long prompt


class Gate:
    """Calls of the model wait here, each until it is let through."""

    def __init__(self) -> None:
        self.n_arrived = 0
        self._permits = threading.Semaphore(0)

    def __call__(self, _fed: Any) -> None:
        self.n_arrived += 1
        assert self._permits.acquire(timeout=MAX_WAIT_SECONDS)

    def let_through(self, n: int) -> None:
        """Let so many calls through, and wait until the next one is there."""
        n_expected = self.n_arrived + n
        self._permits.release(n)
        wait_until(lambda: self.n_arrived == n_expected)

    def open(self) -> None:
        self._permits.release(1_000_000)


@contextmanager
def gated(served: Served) -> Iterator[Gate]:
    gate = Gate()
    with served.holding(gate):
        try:
            yield gate
        finally:
            gate.open()
            wait_until_idle(served.state.engine)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("logs")
    with Served(folder, log_root=str(root), max_kv_size=8192) as server:
        yield server


@pytest.fixture(scope="module")
def narrow(folder, tmp_path_factory):
    """One request at a time."""
    root = tmp_path_factory.mktemp("logs")
    with Served(folder, log_root=str(root), batch_max_rows=1) as server:
        yield server


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def live(served: Served) -> list[Any]:
    replies = list(served.state.stores.live.values())
    return [row() for row in replies]


def begin(
    pool: ThreadPoolExecutor, served: Served, text: str, *, session: str = "s"
) -> tuple[str, Future[Any]]:
    """Send a request; its id, once the server has it, and its exchange to come."""
    old_ids = set(served.state.stores.live)
    fields = {"max_tokens": 4, "extra_body": {"session_id": session}}
    exchange = pool.submit(served.ask, [SYSTEM, user(text)], **fields)

    def new_ids() -> set[str]:
        return set(served.state.stores.live) - old_ids

    wait_until(lambda: exchange.done() or new_ids())
    (request_id,) = new_ids()
    return request_id[:8], exchange


def by_id(rows: list[Any], request_id: str) -> Any:
    (row,) = (row for row in rows if row["id"] == request_id)
    return row


def samples(served: Served) -> dict[tuple[Any, ...], float]:
    _, text = ask(served, "GET", "/metrics")
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                values[sample.name, *sample.labels.values()] = sample.value
    return values


def last_request(served: Served) -> Any:
    return status(served)["recent"][-1]


def check_fields(row: Any, **fields: Any) -> None:
    """These fields have these values."""
    assert {name: row[name] for name in fields} == fields


# -- what a request waits for ----------------------------------------------------------


def check_a_wait(
    served: Served,
    pool: ThreadPoolExecutor,
    texts: tuple[str, str],
    *,
    reason: str,
    names_request: bool,
) -> None:
    """The second of two requests waits while the model is held inside the first."""
    n_waits = samples(served)["start_llm_waiting_seconds_count", reason]
    with gated(served) as gate:
        first_id, first = begin(pool, served, texts[0], session="first")
        wait_until(lambda: gate.n_arrived == 1)
        second_id, second = begin(pool, served, texts[1], session="second")
        gate.let_through(1)  # the scheduler has looked at the second one now

        row = by_id(status(served)["requests"], second_id)
        blocker = first_id if names_request else None
        check_fields(row, phase="queued", waiting_for=reason)
        check_fields(row, waiting_for_request=blocker)
        check_fields(row, prefill_left_seconds=None, tokens_per_second=None)
        assert row["waited_seconds"] > 0

        row = by_id(status(served)["requests"], first_id)
        check_fields(row, phase="prefill", waiting_for=None)
        assert row["prefill_left_seconds"] is not None  # 0.0 on a fast machine

    first.result(MAX_WAIT_SECONDS)
    second.result(MAX_WAIT_SECONDS)
    wait_until(lambda: not status(served)["requests"])
    recent = status(served)["recent"]
    ended = by_id(recent, second_id)

    check_fields(ended, waited_for=reason, waited_for_request=blocker)
    assert ended["waited_seconds"] == ended["waited"] >= row["waited_seconds"]
    assert by_id(recent, first_id)["waited_for"] is None
    assert samples(served)["start_llm_waiting_seconds_count", reason] > n_waits

    log_root = Path(served.state.config.log_root)
    (log,) = log_root.glob("*/cache-session-second.log")
    record = json.loads(log.read_text().splitlines()[-1])
    check_fields(record, waited=ended["waited"], waited_for=reason)


def test_a_request_waits_for_the_prefix_that_another_one_reads(served, pool):
    texts = (words(500, 1), words(500, 1) + " And then?")
    check_a_wait(served, pool, texts, reason="prefix", names_request=True)


def test_a_request_waits_in_the_queue_while_all_places_are_taken(narrow, pool):
    texts = (words(500, 2), words(300, 3))
    check_a_wait(narrow, pool, texts, reason="queue", names_request=False)


def test_a_request_waits_for_memory_that_another_one_holds(folder, pool, tmp_path):
    with Served(folder, **TIGHT, log_root=str(tmp_path)) as tight:
        n_words = tight.state.engine.report["capacity_tokens"] // 6  # 3 tokens each
        texts = (words(n_words, 4), words(n_words, 5))
        check_a_wait(tight, pool, texts, reason="memory", names_request=False)


def test_a_request_alone_waits_for_nothing(served):
    served.ask([SYSTEM, user("hello")], max_tokens=4)
    wait_until(lambda: not status(served)["requests"])
    last = last_request(served)
    check_fields(last, waited_for=None, waited_for_request=None)
    assert last["started_at"] + last["waited_seconds"] <= last["time"]
    assert last["tokens_per_second"] > 0


def test_the_first_cause_counts_from_the_beginning_and_the_longest_is_known():
    queue = s.WaitCause("queue")
    prefix = s.WaitCause("prefix", "a")
    times = s.RequestTimes(10.0)
    assert times.wait_seconds(11.0) == {}

    times = times.begin(prefix, 12.0)
    assert times.wait_seconds(13.0) == {prefix: 3.0}
    assert times.begin(prefix, 14.0) is times

    times = times.begin(queue, 15.0)
    times = times.begin(prefix, 16.0)
    times = times.begin("prefill", 18.0)
    assert times.wait_seconds(99.0) == {prefix: 7.0, queue: 1.0}


# -- requests that were cut ------------------------------------------------------------


def test_a_cancelled_request_has_the_numbers_of_what_it_did(served):
    begin_text = words(300, 6)
    body = {"messages": [SYSTEM, user(begin_text)], "max_tokens": 4}
    assert send(served, "POST", CHAT, body) == 200

    longer = [SYSTEM, user(begin_text + " " + words(500, 7))]

    with gated(served) as gate:
        with served.stream(longer, max_tokens=4):
            wait_until(lambda: gate.n_arrived == 1)
            gate.let_through(1)
            (row,) = live(served)
            assert row["cached"] > 200
        wait_until(lambda: not live(served))

    last = last_request(served)
    check_fields(last, id=row["id"], finish="cancelled", out=0)
    check_fields(last, prompt=row["prompt"], cached=row["cached"], match=row["match"])
    assert last["prefill"] > 0
    assert row["match"] != "-"


def test_a_request_cancelled_in_the_queue_has_waited_and_read_nothing(narrow, pool):
    with gated(narrow) as gate:
        _, first = begin(pool, narrow, words(500, 8))
        wait_until(lambda: gate.n_arrived == 1)
        with narrow.stream([SYSTEM, user(words(200, 9))], max_tokens=4):
            wait_until(narrow.state.engine._inbox.qsize)
            while not live(narrow)[-1]["waited_for"]:
                gate.let_through(1)
        wait_until(lambda: len(live(narrow)) == 1)
        last = last_request(narrow)
    first.result(MAX_WAIT_SECONDS)

    check_fields(last, finish="cancelled", waited_for="queue")
    check_fields(last, prefill=0, cached=0, match="-")
    assert last["waited_seconds"] > 0


# -- refused and failed ----------------------------------------------------------------

REFUSED = [  # method, path, body, headers, status, part of the sentence
    ("POST", CHAT, b"{", {}, 400, "not valid JSON"),
    ("POST", CHAT, {"messages": 7}, {}, 400, "messages"),
    ("POST", CHAT, {"messages": [user(words(9000))]}, {}, 400, "context length"),
    ("POST", CHAT, None, {"Content-Length": str(10**12)}, 413, "MAX_BODY_BYTES"),
    ("GET", "/api/tags?x=1", None, {}, 404, "/api/tags"),
    ("PUT", CHAT, None, {}, 405, "POST"),
    ("GET", "/v1/models/other", None, {}, 404, "other"),
    ("GET", "/health", None, {"Host": "evil.example"}, 403, "evil.example"),
    ("POST", "/v1/messages", {"messages": []}, {}, 400, "messages"),
]


def send(served, method, path, body=None, **headers):
    """The status of an answer."""
    return ask(served, method, path, body, **headers)[0]


@pytest.mark.parametrize("case", REFUSED)
def test_each_refused_request_is_listed_counted_and_one_warning(served, caplog, case):
    method, path, body, headers, code, part = case
    wait_until_idle(served.state.engine)
    old = status(served)
    caplog.set_level(logging.INFO, s.logger.name)
    headers = {"User-Agent": "curl/8.1", **headers}

    assert send(served, method, path, body, **headers) == code

    new = status(served)
    refusal = new["refusals"][-1]
    check_fields(refusal, method=method, path=path.partition("?")[0])
    check_fields(refusal, client="curl", status=code)
    assert part in refusal["sentence"]

    n_refused = old["totals"]["refused"] + 1
    assert new["totals"] == {**old["totals"], "refused": n_refused}
    assert samples(served)["start_llm_refused_total",] == new["totals"]["refused"]

    (record,) = caplog.records
    assert record.levelname == "WARNING"

    line = record.getMessage()
    assert line.startswith(f"{code} {method} ")
    assert part in line
    assert "curl" in line


def test_a_wrong_key_is_refused_and_nobody_else_learns_of_it(folder):
    keys = {"api_key": "one,two", "cache_isolation": "key"}
    with Served(folder, **keys) as locked:
        assert send(locked, "GET", "/v1/status", **{"x-api-key": "three"}) == 401
        (refusal,) = locked.state.stores.refusals
        check_fields(refusal, status=401, path="/v1/status")

        assert send(locked, "GET", "/nothing", **{"x-api-key": "one"}) == 404
        expected_codes = {"one": [404], "two": []}
        for key, expected in expected_codes.items():
            _, body = ask(locked, "GET", "/v1/status", **{"x-api-key": key})
            assert [row["status"] for row in body["refusals"]] == expected
            assert body["totals"]["refused"] == len(expected)
        assert locked.state.metrics.totals()["refused"] == 2


def test_what_is_no_http_is_refused_without_what_it_was(served, caplog):
    port = served.state.config.mlx_port
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(f'"content": "the {SECRET}"\r\n\r\n'.encode())
        assert b" 400 " in raw.recv(1000)
    wait_until(lambda: status(served)["refusals"][-1]["method"] == "")
    refusal = status(served)["refusals"][-1]

    check_fields(refusal, path="", client="", status=400)
    assert SECRET not in json.dumps(refusal)
    assert SECRET not in caplog.text


def test_a_failed_request_is_one_warning_and_counts_as_failed(served, caplog):
    def fail(_fed):
        raise ValueError("a bug")

    wait_until_idle(served.state.engine)
    totals = status(served)["totals"]
    caplog.set_level(logging.INFO, s.logger.name)
    body = {"messages": [user("hello " * 200)]}
    with served.holding(fail):
        assert send(served, "POST", CHAT, body, **{"User-Agent": "curl/8"}) == 500
    wait_until(lambda: not live(served))

    new = status(served)
    assert new["refusals"][-1]["status"] == 500
    assert new["recent"][-1]["finish"] == "failed"

    assert new["totals"]["requests"] == totals["requests"] + 1
    assert new["totals"]["failed"] == totals["failed"] + 1
    assert new["totals"]["refused"] == totals["refused"]
    assert samples(served)["start_llm_failed_total",] == new["totals"]["failed"]

    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    second_try, refusal = warnings
    assert "is read again without the cache" in second_try.getMessage()
    assert "a bug" not in refusal.getMessage()


# -- sums ------------------------------------------------------------------------------


def test_totals_add_up_to_the_requests_that_have_ended(folder):
    with Served(folder) as fresh:
        for text in (words(100), words(100), words(60, 1)):
            fresh.ask([SYSTEM, user(text)], max_tokens=4)
        send(fresh, "GET", "/nothing")
        wait_until(lambda: not live(fresh))
        body = status(fresh)
        metrics = samples(fresh)

    totals = body["totals"]
    recent = body["recent"]
    assert totals["requests"] == len(recent) == 3
    check_fields(totals, refused=1, failed=0)

    names = {
        "prompt_tokens": "prompt",
        "cached_tokens": "cached",
        "generated_tokens": "out",
    }
    for name, key in names.items():
        assert totals[name] == sum(row[key] for row in recent) > 0
        assert metrics[f"start_llm_{name}_total",] == totals[name]
    seconds = sum(row["prefill"] for row in recent)

    assert totals["prefill_seconds"] == pytest.approx(seconds)
    assert body["engine"]["prefill_tokens_per_second"] > 0
    assert totals["saved_seconds"] > 0


# -- who asks, and what ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("claude-cli/2.1.2 (external, cli)", "Claude Code"),
        ("pi (linux 6.1.0; x64)", "PI"),
        ("pip/24.0", "pip"),
        ("codex_cli_rs/0.46.0 (Debian 12; x86_64) xterm", "Codex"),
        ("opencode/1.0.1 ai-sdk/provider-utils/3.0.9", "opencode"),
        ("python-requests/2.32", "python"),
        ("AsyncOpenAI/Python 2.6.1", "python"),
        ("OpenAI/JS 6.26.0", "OpenAI"),
        ("Something/1.0 (more)", "Something"),
        ("x" * 90, "x" * 40),
        ("a\x1b[31mb/1", "a_[31mb"),
        ("", ""),
        ("   ", ""),
    ],
)
def test_a_client_is_named_by_its_user_agent(header, name):
    assert s.name_client(header) == name


def test_recent_requests_name_their_client_also_behind_the_proxy(served):
    through_proxy = {"User-Agent": "AsyncOpenAI/Python 2.6", "X-Codex-Window-Id": "1"}
    body = {"messages": [user("hello")], "max_tokens": 4}
    for headers, name in (
        ({"User-Agent": "pi (linux 6; x64)"}, "PI"),
        (through_proxy, "Codex"),
        ({"User-Agent": "OpenAI/JS 6.26.0", "traceparent": "00-a-b-01"}, "OpenClaw"),
        ({"User-Agent": "start-llm-chat"}, "chat.py"),
        ({}, ""),
    ):
        send(served, "POST", CHAT, body, **headers)
        wait_until(lambda: not live(served))
        assert last_request(served)["client"] == name


def test_a_title_is_how_the_user_began_and_only_where_a_setting_wants_it(
    served, folder, tmp_path
):
    reminder = {"type": "text", "text": "<system-reminder>x</system-reminder>"}
    question = {"type": "text", "text": "  Why is\nthe sky " + "so " * 60}
    body = {
        "messages": [
            {"role": "user", "content": [reminder, question]},
            {"role": "assistant", "content": "Because."},
            user("And the sea?"),
        ],
        "max_tokens": 4,
    }
    settings = {"enable_request_logging": True, "log_root": str(tmp_path)}
    with Served(folder, **settings) as server:
        titles = [send_and_find_title(one, body) for one in (server, served)]

    assert titles == [("Why is the sky " + "so " * 60)[:60], ""]


def send_and_find_title(server, body):
    send(server, "POST", CHAT, body)
    wait_until(lambda: not live(server))
    return last_request(server)["title"]


FOLDER = " - Primary working directory: /a/shop\n"


@pytest.mark.parametrize(
    "messages, title",
    [
        ([{"role": "system", "content": FOLDER}, user("Go.")], "shop: Go."),
        (
            [user("<environment_context>\n  <cwd>/a/shop</cwd>\n"), user("Go.")],
            "shop: Go.",
        ),
        ([user("My working directory: /a/secret")], "My working directory: /a/secret"),
        ([{"role": "system", "content": "Working directory: "}, user("Go.")], "Go."),
    ],
)
def test_a_title_begins_with_the_folder_that_an_agent_works_in(messages, title):
    request = SimpleNamespace(messages=messages, prompt=None)

    assert s._find_title(request) == title


# -- the progress of prefill -----------------------------------------------------------


def chunks_of(served: Served, messages: list[Any], **fields: Any) -> list[Any]:
    body = {"messages": messages, "stream": True, "max_tokens": 4, **fields}
    _, text = ask(served, "POST", CHAT, body)
    return [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]


def is_progress(chunk: Any) -> bool:
    return "prompt_progress" in chunk


def has_text(chunk: Any) -> bool:
    deltas = [choice["delta"] for choice in chunk["choices"]]
    return any(d.get("reasoning_content") or d.get("content") for d in deltas)


def test_a_stream_shows_the_progress_of_prefill_to_who_asks(served):
    begin_text = words(300, 20)
    body = {"messages": [SYSTEM, user(begin_text)], "max_tokens": 4}
    assert send(served, "POST", CHAT, body) == 200

    longer = [SYSTEM, user(begin_text + " " + words(500, 21))]
    chunks = chunks_of(
        served, longer, return_progress=True, stream_options={"include_usage": True}
    )
    usage = chunks[-1]["usage"]
    n_prompt = usage["prompt_tokens"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]

    assert n_cached > 200

    rows = [chunk["prompt_progress"] for chunk in chunks if is_progress(chunk)]
    assert {row["total"] for row in rows} == {n_prompt}
    assert {row["cache"] for row in rows} == {n_cached}

    n_processed = [row["processed"] for row in rows]
    assert n_processed == sorted(set(n_processed))
    assert len(n_processed) > 2
    assert n_processed[0] == n_cached
    assert n_processed[-1] == n_prompt

    times = [row["time_ms"] for row in rows]
    assert times == sorted(times)

    last = max(i for i, chunk in enumerate(chunks) if is_progress(chunk))
    assert not any(has_text(chunk) for chunk in chunks[:last])
