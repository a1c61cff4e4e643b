"""Put a real coding agent to work on a running server, and say whether the cache holds.

    CLIENTS_HOME=~/clients scripts/tools/clients/install.sh           once: the clients, from npm
    python scripts/tools/client_check.py claude-code                  start-llm on this machine
    python scripts/tools/client_check.py pi --url http://127.0.0.1:4000 --model NAME

The client works in a folder of its own and says three things in one session: the first needs files
read, commands run and a file written. Its requests pass through the recorder of capture_proxy.py.

    prompt    tokens that were sent
    cached    of them, what the server did not compute again
    known     what the request before it in the same conversation had sent and got back
    share     cached / known: HEALTHY where it is 99 % or more for each but the first request

Exit status: 0 healthy, 1 not, 2 where nothing could be judged. What a model says decides how many
requests there are: the bundled demo model does as it is told only where it is told simply.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from capture_proxy import CaptureFile, Exchange, read_capture, serving
from clients import drive
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import agent_steps
from agent_steps import CannotAsk, Reply, read_events
from chat import add_place_options, make_table

CLIENTS: Final[dict[str, type[drive.Client]]] = {
    "claude-code": drive.ClaudeCode,
    "claude-code-2.1.150": drive.OldClaudeCode,
    "pi": drive.Pi,
    "openclaw": drive.OpenClaw,
    "openclaw-2026.2.17": drive.OldOpenClaw,
    "opencode": drive.OpenCode,
    "copilot": drive.Copilot,
    "qwen-code": drive.QwenCode,
}
HEALTHY_SHARE: Final = 0.99
SERVER: Final = "checked"  # the client's name for it
WORDS: Final = (
    "Read notes.txt and src/app.py, run `ls -la`, then write a summary of two lines to out.txt.",
    "Now show out.txt with `cat` and tell me how many lines it has.",
    "Say goodbye in one short sentence, without tools.",
)
SESSION_HEADERS: Final = (
    *("x-claude-code-session-id", "x-claude-code-agent-id", "x-session-id"),
    *("session-id", "thread-id"),
)
SESSION_IN_USER: Final = re.compile(r'"session_id"\s*:\s*"([^"]+)"')
VARIES: Final = re.compile(r"[0-9a-fA-F-]*\d[0-9a-fA-F-]*")  # ids, times, numbers
THOUGHT: Final = re.compile(r"\A\s*<think>[\s\S]*?</think>")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, by what tells the conversation that it belongs to."""

    exchange: Exchange
    session: tuple[str, ...]  # that it names; empty: none
    system: str
    question: str  # the first
    replies: tuple[str, ...]  # of its past, without thinking

    def continues(self, earlier: Prompt) -> bool:
        """Whether it is a later state of that conversation, and no branch of it."""
        n_replies = len(earlier.replies)
        return (
            self.exchange.api == earlier.exchange.api
            and (not self.session or self.session == (earlier.session or self.session))
            and len(self.replies) > n_replies
            and self.replies[:n_replies] == earlier.replies
            and are_alike(self.system, earlier.system)
            and are_alike(self.question, earlier.question)
        )


def are_alike(a: str, b: str) -> bool:
    """Whether half of the shorter text is in the other, but for ids, times and numbers."""
    lines_a, lines_b = (Counter(VARIES.sub("#", t).split("\n")) for t in (a, b))
    sizes = [
        sum(len(line) * n for line, n in lines.items())
        for lines in (lines_a & lines_b, lines_a, lines_b)
    ]
    return 2 * sizes[0] >= min(sizes[1:])


def text_of(content: object) -> str:
    """The texts and calls of a message's content, in either API's form."""
    match content:
        case str():
            return THOUGHT.sub("", content)
        case {"type": "tool_use", "name": name, "input": arguments}:
            return f"{name} {json.dumps(arguments, sort_keys=True)}"
        case {"function": {"name": name, "arguments": str(arguments)}}:
            with suppress(ValueError):
                arguments = json.dumps(json.loads(arguments), sort_keys=True)
            return f"{name} {arguments}"
        case {"text": str(text)}:
            return text
        case list():
            return "\n".join(filter(None, map(text_of, content)))
    return ""


def prompt_of(exchange: Exchange) -> Prompt:
    body = exchange.body or {}
    by_role: dict[str, list[str]] = {}
    for message in body["messages"]:
        role = "system" if message["role"] == "developer" else message["role"]
        calls = message.get("tool_calls") or []
        texts = (text_of(message.get("content")), text_of(calls))
        by_role.setdefault(role, []).append("\n".join(filter(None, texts)))

    user = str((body.get("metadata") or {}).get("user_id") or "")
    session = [exchange.headers.get(name, "") for name in SESSION_HEADERS]
    session += SESSION_IN_USER.findall(user)
    session.append(str(body.get("prompt_cache_key") or ""))
    return Prompt(
        exchange,
        session=tuple(session) if any(session) else (),
        system=text_of(body.get("system")) or by_role.get("system", [""])[0],
        question=by_role.get("user", [""])[0],
        replies=tuple(by_role.get("assistant", ())),
    )


def follow(exchanges: Iterable[Exchange]) -> list[list[Prompt]]:
    """The conversations, in the order of their first requests.

    A malformed request, which its server refused, is left out.
    """
    talks: list[list[Prompt]] = []
    for exchange in exchanges:
        with suppress(AttributeError, KeyError, TypeError):
            prompt = prompt_of(exchange)
            continued = [talk for talk in talks if prompt.continues(talk[-1])]
            if continued:  # of sub-agents side by side the one with the very same task
                talk = max(continued, key=lambda t: t[-1].question == prompt.question)
                talk.append(prompt)
            else:
                talks.append([prompt])
    return talks


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a conversation, in tokens."""

    talk: int  # conversations count from 1: the session, its sub-agents, its titles
    n_prompt: int
    n_cached: int
    n_reply: int
    n_known: int  # 0 for the first of its conversation
    n_calls: int

    @property
    def share(self) -> float | None:
        return self.n_cached / self.n_known if self.n_known else None

    @property
    def is_healthy(self) -> bool:
        return self.share is None or self.share >= HEALTHY_SHARE

    def cells(self) -> list[str]:
        share = "" if self.share is None else f"{self.share:.2%}"
        cells = [self.talk, self.n_prompt, self.n_cached, self.n_known or "", share]
        return [str(cell) for cell in (*cells, self.n_reply, self.n_calls)]


def rows_of(exchanges: Sequence[Exchange]) -> list[Row]:
    """In the order of the requests, conversation by conversation."""
    rows = []
    for number, talk in enumerate(follow(exchanges), 1):
        n_known = 0
        for prompt in talk:
            reply = read_reply(prompt.exchange)
            row = Row(
                number,
                n_prompt=reply.n_prompt,
                n_cached=reply.n_cached or 0,
                n_reply=reply.n_out,
                n_known=n_known,
                n_calls=len(reply.calls),
            )
            rows.append(row)
            n_known = row.n_prompt + row.n_reply
    return rows


def is_done(exchange: Exchange) -> bool:
    """A client may leave as soon as it has read the last event."""
    last_events = ("data: [DONE]", '"type": "message_stop"}', '"type":"message_stop"}')
    has_last_event = exchange.reply.rstrip().endswith(last_events)
    return exchange.status == 200 and (exchange.is_whole or has_last_event)


def read_reply(exchange: Exchange) -> Reply:
    """What a reply says, streamed or whole, of either API."""
    reply = Reply()
    events: list[agent_steps.Body] = []
    with suppress(ValueError):  # a line that a drop cut off
        events += read_events(exchange.reply.encode().splitlines())
    if exchange.reply.startswith("{"):
        whole = json.loads(exchange.reply)
        events = [{"usage": whole.get("usage") or {}}]
        for number, block in enumerate(whole.get("content") or ()):
            events.append({"index": number, "content_block": block})
        for choice in whole.get("choices") or ():
            calls = choice["message"].get("tool_calls") or ()
            delta = {"tool_calls": [{**c, "index": n} for n, c in enumerate(calls)]}
            events.append({"choices": [{"delta": delta}]})
    for event in events:
        reply.hear(event)
    return reply


def have_session(name: str, args: argparse.Namespace, room: Path) -> list[Exchange]:
    """What the client asked. Raises ClientError."""
    path = room / "capture.jsonl"
    with closing(CaptureFile(path)) as capture, serving(args.url, capture) as port:
        url = f"http://127.0.0.1:{port}"
        client = CLIENTS[name](room, {SERVER: url}, model=args.model, key=args.key)
        try:
            client.start()
            for words in WORDS:
                client.say(SERVER, words, seconds=args.minutes * 60)
                client.finish(SERVER, seconds=args.minutes * 60)
        finally:
            client.close()
    return [exchange for exchange in read_capture(path) if exchange.api]


def verdict(rows: Sequence[Row], failed: Sequence[Exchange]) -> tuple[str, int]:
    """A sentence and the exit status."""
    judged = [row for row in rows if row.n_known]
    unhealthy = [row for row in judged if not row.is_healthy]
    n_calls = sum(row.n_calls for row in rows)
    counts = f"{len(rows)} requests, {n_calls} tool calls"

    if failed:
        status = failed[0].status
        return f"NOT HEALTHY: {len(failed)} of {counts} failed, status {status}", 1
    if unhealthy:
        fault = f"have less than {HEALTHY_SHARE:.0%} cached"
        return f"NOT HEALTHY: {len(unhealthy)} of {counts} {fault}", 1
    if not judged:
        return f"NOTHING TO JUDGE: {counts}; the client never went on", 2
    if not n_calls:
        counts += "; the model called no tool (a demo model's words mean nothing)"
    return f"HEALTHY: {counts}", 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=CLIENTS)
    add_place_options(parser)
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--minutes", type=float, default=10, help="longest turn")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if parts := CLIENTS[args.name].missing():
        install = f"CLIENTS_HOME={drive.CLIENTS} scripts/tools/clients/install.sh"
        print(f"to install: {install} {' '.join(parts)}", file=sys.stderr)
        return 2
    try:
        server = agent_steps.Server(args.url, model=args.model, key=args.key)
        args.url, args.model = server.url, server.model
        with TemporaryDirectory(ignore_cleanup_errors=True) as room:
            # Of macOS's folder for temporary files, a client knows the other name.
            exchanges = have_session(args.name, args, Path(room).resolve())
    except (OSError, CannotAsk, drive.ClientError) as error:
        print(f"{args.name} on {args.url}: {error}", file=sys.stderr)
        return 2

    failed = [exchange for exchange in exchanges if not is_done(exchange)]
    rows = rows_of([exchange for exchange in exchanges if exchange not in failed])
    sentence, status = verdict(rows, failed)
    if args.json:
        requests = [{**asdict(row), "share": row.share} for row in rows]
        result = {"client": args.name, "verdict": sentence, "requests": requests}
        print(json.dumps(result, indent=1))
    else:
        names = ("talk", "prompt", "cached", "known", "share", "reply", "calls")
        table = make_table(args.name, names)
        for row in rows:
            table.add_row(*row.cells(), style="" if row.is_healthy else "red")
        Console().print(table)
        print(sentence)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
