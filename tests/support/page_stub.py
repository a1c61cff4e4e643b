"""The page of web/ with a server of its own, which answers what a test has written down."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import start_llm as s
from stub_server import StubHandler, running

Body = dict[str, Any]
PAGE = Path(__file__).parents[2] / "web" / "index.html"
STARTED = 1_795_600_000  # Unix seconds
NOW = STARTED + 7_300

MEMORY = {
    "limit": 28_000_000_000,
    "model": 4_600_000_000,
    "cache": 260_000_000,
    "running": 120_000_000,
    "working": 310_000_000,
    "process": 5_400_000_000,
}


def idle_body() -> Body:
    """A server that nobody has asked anything, in the fields that the oldest one sends."""
    return {
        "status": "ok",
        "started": STARTED,
        "uptime_seconds": NOW - STARTED,
        "model": {
            "id": "mlx-community/Qwen3-8B-4bit",
            "family": "qwen3",
            "bytes": 4_600_000_000,
            "context_length": 40_960,
        },
        "engine": {
            "state": "ready",
            "queued": 0,
            "prefilling": 0,
            "decoding": 0,
            "lines": 0,
            "cache_max_bytes": 12_000_000_000,
            "capacity_tokens": 81_380,
            "kv_bytes_per_token": 147_456,
        },
        "memory": dict(MEMORY),
        "requests": [],
        "recent": [],
        "divergences": [],
        "cache": [],
        "sessions": [],
        "ledger": {"transcripts": 0, "heads": 0, "bytes": 0, "healing": 0},
        "counters": dict.fromkeys(s.CacheMetrics().snapshot(), 0),
    }


def live(request_id: str, **facts: Any) -> Body:
    """A request that runs."""
    return {
        "id": request_id,
        "api": "chat",
        "session": f"session-of-{request_id}",
        "prompt": 12_000,
        "out": 0,
        "cached": 11_000,
        "done": 11_400,
        "phase": "prefill",
        "match": "exact",
        "tokens_per_second": 400.0,
        "seconds": 2.0,
        **facts,
    }


def ended(request_id: str, **facts: Any) -> Body:
    """A request that has ended."""
    return {
        "time": NOW - 5.0,
        "id": request_id,
        "api": "chat",
        "session": f"session-of-{request_id}",
        "prompt": 12_000,
        "out": 64,
        "cached": 11_000,
        "saved_steps": 0,
        "match": "exact",
        "finish": "stop",
        "prefill": 2.5,
        "decode": 1.6,
        "ttft_ms": 2_600,
        "replayed": 11_000,
        "fallback": None,
        **facts,
    }


def cache_entry(entry_id: int, **facts: Any) -> Body:
    """A cache entry at rest."""
    return {
        "id": entry_id,
        "parent": None,
        "shared": 0,
        "tokens": 12_000,
        "bytes": 12_000 * 147_456,
        "idle_seconds": 12.0,
        "session": "",
        "running": False,
        "cold_seconds": 24.0,
        **facts,
    }


AGENTS = {  # client, session and what it was asked
    "a": ("Claude Code", "5f2e8d10", "Fix the failing login test"),
    "b": ("PI", "c81b22fe", "Rename Ledger to Transcript everywhere"),
    "c": ("opencode", "90aa11bc", "Why is the build slow on Linux?"),
    "d": ("Codex", "77e0c3d4", "Write the release notes of 2.4"),
}


def whose(agent: str) -> Body:
    client, session, title = AGENTS[agent]
    return {"client": client, "session": session, "title": title}


def four_agents_body() -> Body:
    """Four agents at work: one reads, one writes, one waits for a prefix, one for its turn."""
    body = idle_body()
    body["version"] = "1.4.0"
    body["memory"]["peak"] = 6_900_000_000
    body["requests"] = [
        live(
            "a1f0",
            phase="decode",
            out=118,
            done=12_000,
            tokens_per_second=41.0,
            seconds=4.6,
            waited_seconds=0.1,
            waiting_for=None,
            **whose("a"),
        ),
        live(
            "b2f0",
            prompt=22_400,
            cached=3_100,
            done=9_600,
            seconds=16.2,
            waited_seconds=0.3,
            waiting_for=None,
            prefill_left_seconds=31.5,
            **whose("b"),
        ),
        live(
            "c3f0",
            phase="queued",
            prompt=18_200,
            cached=0,
            done=0,
            seconds=9.4,
            waited_seconds=9.4,
            waiting_for="prefix",
            waiting_for_request="b2f0",
            **whose("c"),
        ),
        live(
            "d4f0",
            phase="queued",
            prompt=6_000,
            cached=0,
            done=0,
            seconds=1.2,
            waited_seconds=1.2,
            waiting_for="queue",
            waiting_for_request=None,
            **whose("d"),
        ),
    ]
    body["recent"] = list(_history())
    body["cache"] = [
        cache_entry(1, session="5f2e8d10", tokens=14_100, running=True),
        cache_entry(2, parent=1, shared=9_000, session="c81b22fe", tokens=11_000),
        cache_entry(
            3,
            parent=1,
            shared=3_100,
            session="90aa11bc",
            tokens=8_200,
            idle_seconds=420.0,
        ),
        cache_entry(4, session="77e0c3d4", tokens=5_100, idle_seconds=1_500.0),
    ]
    body["divergences"] = [
        {
            "time": NOW - 300.0,
            "id": "r011",
            "session": "c81b22fe",
            "again": 2_012,
            "why": "Message 14 (tool) is another than it was: the client shortened it.",
        }
    ]
    body["refusals"] = [
        {
            "at": NOW - 40.0,
            "method": "POST",
            "path": "/chat/completions",
            "status": 404,
            "client": "curl",
            "sentence": "there is nothing at /chat/completions; did you mean /v1/chat/completions?",
        },
        {
            "at": NOW - 2_000.0,
            "method": "POST",
            "path": "/v1/messages",
            "status": 401,
            "client": "Claude Code",
            "sentence": "the key is wrong",
        },
    ]
    body["totals"] = {
        "requests": 143,
        "refused": 2,
        "failed": 1,
        "prompt_tokens": 1_243_551,
        "cached_tokens": 1_186_002,
        "generated_tokens": 9_014,
        "prefill_seconds": 143.9,
        "saved_seconds": 2_965.0,
    }
    body["sessions"] = [
        {"id": session, "idle_seconds": 3.0, "turns": []}
        for _, session, _ in AGENTS.values()
    ]
    return body


def _history() -> Iterator[Body]:
    """Finished requests of the four agents: cold ones, warm ones, one slow, one failed."""
    for index in range(24):
        agent = "abcd"[index % 4]
        cached = 0 if index < 4 else 9_000 + 120 * index
        new = 9_000 if index < 4 else 90 + 37 * (index % 5)
        facts = {
            "time": NOW - 1_400.0 + 58.0 * index,
            "prompt": cached + new,
            "cached": cached,
            "prefill": round(new / 400, 2),
            "waited_seconds": 0.0,
            "ttft_ms": round(1000 * new / 400),
            "decode": 1.2 + 0.2 * (index % 3),
        }
        if index == 22:
            facts["waited_seconds"] = 12.5
            facts["waited_for"] = "prefix"
            facts["waited_for_request"] = "b2f0"
            facts["ttft_ms"] = 12_900
        if index == 18:
            facts["saved_steps"] = 36
        if index == 20:
            facts["finish"] = "failed"
            facts["out"] = 3
        yield ended(f"r{index:03}", **facts, **whose(agent))


def chat_events(
    text: str, *, reasoning: str = "", model: str = "demo", request_id: str = "abcdef12"
) -> list[Body]:
    """The events of a streamed reply, word by word."""
    base = {"id": f"chatcmpl-{request_id}0000", "model": model}

    def chunk(delta: Body, finish: str | None = None) -> Body:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**base, "choices": [choice]}

    deltas = [{"reasoning_content": word} for word in reasoning.split()]
    deltas += [{"content": piece} for piece in text.splitlines(keepends=True)]
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 86},
        "completion_tokens_details": {"reasoning_tokens": 12},
    }
    return [
        chunk({"role": "assistant", "content": ""}),
        *(chunk(delta) for delta in deltas),
        chunk({}, "stop"),
        {**base, "choices": [], "usage": usage},
    ]


@dataclass
class StubServer:
    """What it answers; what it was asked."""

    status: Body = field(default_factory=idle_body)
    key: str = ""
    events: list[Body] = field(default_factory=list)
    # Of a chat, or of what is to be dropped: status and sentence.
    refusal: tuple[int, str] | None = None
    before_event: Callable[[int], object] = lambda _index: None
    asked: list[tuple[str, str, Body]] = field(default_factory=list)
    url: str = ""


class _Handler(StubHandler):
    stub: StubServer

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self._has_key():
            self._send_json(200, self.stub.status)

    def do_DELETE(self) -> None:
        self.stub.asked.append(("DELETE", self.path, {}))
        if not self._is_refused():
            self._send_json(200, {"dropped": 3})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stub.asked.append(("POST", self.path, body))

        if not self._has_key() or self._is_refused():
            return

        self._send_head(200, "text/event-stream; charset=utf-8")
        for index, event in enumerate(self.stub.events):
            self.stub.before_event(index)
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _has_key(self) -> bool:
        sent = self.headers.get("Authorization")
        if not self.stub.key or sent == f"Bearer {self.stub.key}":
            return True
        self._send_json(401, {"error": {"message": "a key is needed"}})
        return False

    def _is_refused(self) -> bool:
        if self.stub.refusal is None:
            return False
        status, sentence = self.stub.refusal
        self._send_json(status, {"error": {"message": sentence}})
        return True

    def _send_json(self, status: int, body: object) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, payload: bytes, content_type: str) -> None:
        self._send_head(status, content_type)
        self.wfile.write(payload)

    def _send_head(self, status: int, content_type: str) -> None:
        self.send_response(status)
        for name, value in s._COMMON_HEADERS.items():  # the page must do with them
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.end_headers()


@contextmanager
def serving_page(**answers: Any) -> Iterator[StubServer]:
    """The page and what it asks for, on a free port."""
    stub = StubServer(**answers)
    handler = type("Handler", (_Handler,), {"stub": stub})

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    with running(server) as port:
        stub.url = f"http://127.0.0.1:{port}/"
        yield stub
