"""Ask a running server what a cache must get right, in four scenarios, and say whether it does.

    python scripts/probe_session.py                          all four
    python scripts/probe_session.py --only drift semantic    some of them
    python scripts/probe_session.py --json

THE SCENARIOS (each conversation is new to every cache; replies are echoed as they were generated)

    normal      [system][u1][a1][u2][a2] ...        only grows: all that was sent before is cached
    drift       the same, but one field has another value in each request, in all places where the
                clients that have it put it: all that was sent before is cached all the same
    semantic    [system][u1][a1][U2][a2] ...        one word of the past is another: what stands
                before it is cached and nothing behind it, or the model would answer the old past
    insert      [system][u1][a1][u2][call][result][a2] ...    a call and its result appear in the
                past: what stands before them is cached

WHAT IS PRINTED per request, in tokens: prompt, cached, and the bounds that cached must keep. They
follow from what earlier requests of the conversation counted, give or take SLACK.

EXIT STATUS  0 all bounds are kept, 1 one is not, 2 the server could not be asked
"""

import argparse
import json
import random
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from agent_steps import Body, CannotAsk, Reply, Server, make_words, reply_message, user
from chat import make_table
from pi_like_probe import TOOLS, add_server_options, tracked
from rich.console import Console

# Tokens: how a turn ends and a reply begins, and caches that count in blocks.
SLACK: Final = 32
N_GROWTH: Final = 4  # requests of a conversation that only grows
N_PAST: Final = 3  # requests before the past is changed
MAX_TOKENS: Final = 400  # of one reply: room for a model that thinks all the same

# (messages, number of the request) -> as sent
Stamp = Callable[[list[Body], int], list[Body]]


# Drift -------------------------------------------------------------------------------------------


def moment(n: int) -> datetime:
    """When request `n` is sent, by the clock that it shows."""
    start = datetime(2026, 11, 20, 8, 52, tzinfo=UTC)
    return start + timedelta(minutes=7 * n, seconds=13 * n)


def with_billing_header(messages: list[Body], n: int) -> list[Body]:
    """Claude Code: a part of its own before the system prompt."""
    system = messages[0]
    cch = random.Random(n).getrandbits(20)
    header = f"x-anthropic-billing-header: cc_version=2.1.121.dd4; cc_entrypoint=cli; cch={cch:05x};"  # noqa: E501
    parts = [{"type": "text", "text": text} for text in (header, system["content"])]
    return [{"role": "system", "content": parts}, *messages[1:]]


def with_inbound_context(messages: list[Body], n: int) -> list[Body]:
    """OpenClaw 2026.2.17: three quarters into the developer prompt."""
    message_id = uuid.UUID(int=random.Random(n).getrandbits(128), version=4)
    metadata = {
        "schema": "openclaw.inbound_meta.v1",
        "message_id": str(message_id),
        "channel": "webchat",
        "provider": "webchat",
        "chat_type": "direct",
    }
    heading = "## Inbound Context (trusted metadata)"
    block = f"{heading}\n\n```json\n{json.dumps(metadata, indent=2)}\n```\n\n"

    text = messages[0]["content"]
    position = text.index("\n", len(text) * 3 // 4) + 1
    content = text[:position] + block + text[position:]
    return [{**messages[0], "content": content}, *messages[1:]]


def with_timestamps(messages: list[Body], n: int) -> list[Body]:
    """OpenClaw: before the words of each user message."""
    stamp = f"[{moment(n):%a %Y-%m-%d %H:%M} UTC] "
    return [
        {**message, "content": stamp + message["content"]}
        if message["role"] == "user"
        else message
        for message in messages
    ]


def with_current_time(messages: list[Body], n: int) -> list[Body]:
    """A last line of the system prompt."""
    line = f"\n\nCurrent time is {moment(n):%Y-%m-%d %H:%M:%S} UTC"
    system = {**messages[0], "content": messages[0]["content"] + line}
    return [system, *messages[1:]]


# Conversations -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request: what was cached of it and what had to be, in tokens."""

    scenario: str
    case: str
    what: str
    prompt: int
    cached: int
    at_least: int
    at_most: int

    @property
    def verdict(self) -> str:
        if self.cached > self.at_most:
            return f"{self.cached - self.at_most} served from the old past"
        if self.cached < self.at_least:
            return f"{self.at_least - self.cached} lost"
        return "ok"


@dataclass(slots=True)
class Talk:
    """A conversation about nothing, which only the scenario changes."""

    scenario: str
    case: str
    server: Server
    words: random.Random  # that it is about
    messages: list[Body]
    stamp: Stamp
    replies: list[Reply] = field(default_factory=list)
    # Of the newest request whose reply came back: tokens of its prompt. One that was cut
    # in its thinking has no words to send back, and what replaces it is not the past.
    n_continued: int = 0
    question_indexes: list[int] = field(default_factory=list)  # in messages
    rows: list[Row] = field(default_factory=list)

    def ask(self, kind: str, *, at_least: int = 0, at_most: int | None = None) -> None:
        """Put the next question; the reply becomes part of the conversation."""
        self.question_indexes.append(len(self.messages))
        text = f"Keep this and answer with OK alone. {make_words(self.words, 300)}"
        self.messages.append(user(text))

        # No call and no thinking: a reply is one short text in every request.
        body = {
            "messages": self.stamp(self.messages, len(self.replies)),
            "tools": TOOLS,
            "tool_choice": "none",
            "max_completion_tokens": MAX_TOKENS,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        reply = self.server.ask_chat(body)
        if reply.echo() is not None:
            self.n_continued = reply.n_prompt
        self.messages.append(reply_message(reply))
        for call in reply.calls:  # forbidden, but not every server obeys
            result = {"role": "tool", "content": "Done.", "tool_call_id": call["id"]}
            self.messages.append(result)

        row = Row(
            scenario=self.scenario,
            case=self.case,
            what=kind,
            prompt=reply.n_prompt,
            cached=reply.n_cached or 0,
            at_least=max(0, at_least),
            at_most=reply.n_prompt - 1 if at_most is None else at_most,
        )
        self.rows.append(row)
        self.replies.append(reply)

    def grow(self, n_requests: int) -> None:
        """Ask so often; all that the request before sent should be cached."""
        for _ in range(n_requests):
            kind = "append" if self.replies else "cold"
            self.ask(kind, at_least=self.n_continued - SLACK)

    def ask_changed(self, kind: str, unchanged: Reply) -> None:
        """Ask after a change: what stood before it is cached, and nothing behind it."""
        end = unchanged.n_prompt + unchanged.n_out
        self.ask(kind, at_least=unchanged.n_prompt - SLACK, at_most=end + SLACK)
        self.grow(1)


# Scenarios ---------------------------------------------------------------------------------------


def growth(talk: Talk) -> None:
    """Requests that each append to the one before."""
    talk.grow(N_GROWTH)


def edit(talk: Talk) -> None:
    """The first word of the second question turns into its opposite."""
    talk.grow(N_PAST)

    index = talk.question_indexes[1]
    question = talk.messages[index]
    changed_text = question["content"].replace("Keep", "Drop", 1)
    talk.messages[index] = {**question, "content": changed_text}

    talk.ask_changed("edit", talk.replies[0])


def insertion(talk: Talk) -> None:
    """A call and its result appear between the second question and its answer."""
    talk.grow(N_PAST)

    function = {"name": "read", "arguments": '{"path":"ledger.txt"}'}
    calls = [{"id": "call_0001", "type": "function", "function": function}]
    index = talk.question_indexes[1] + 1
    result = {"role": "tool", "tool_call_id": "call_0001"}
    talk.messages[index:index] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {**result, "content": make_words(talk.words, 300)},
    ]

    talk.ask_changed("insert", talk.replies[1])


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens in a conversation, and the ways in which it is sent."""

    play: Callable[[Talk], None]
    n_requests: int
    cases: Mapping[str, Stamp]


ONE: Final[Mapping[str, Stamp]] = {"": lambda messages, _n: messages}  # nothing drifts
DRIFTS: Final[Mapping[str, Stamp]] = {
    "message_id": with_inbound_context,
    "timestamps": with_timestamps,
    "current time": with_current_time,
    "billing header": with_billing_header,
}
SCENARIOS: Final[Mapping[str, Scenario]] = {
    "normal": Scenario(growth, N_GROWTH, ONE),
    "drift": Scenario(growth, N_GROWTH, DRIFTS),
    "semantic": Scenario(edit, N_PAST + 2, ONE),
    "insert": Scenario(insertion, N_PAST + 2, ONE),
}


def play(server: Server, options: argparse.Namespace) -> list[Row]:
    """One row per request of the scenarios in `only`. Raises CannotAsk."""
    cases = [
        (name, case, stamp)
        for name in options.only
        for case, stamp in SCENARIOS[name].cases.items()
    ]
    rows: list[Row] = []
    for name, case, stamp in tracked(cases, "conversations"):
        nonce = secrets.token_hex(8)  # so that its system prompt begins like no other's
        words = random.Random(nonce)
        text = f"You keep the records of house {nonce}.\n\n{make_words(words, options.head_chars)}"
        system = {"role": options.role, "content": text}
        talk = Talk(name, case, server, words, [system], stamp)
        SCENARIOS[name].play(talk)
        rows += talk.rows
    return rows


# Showing -----------------------------------------------------------------------------------------


def show(rows: Sequence[Row], console: Console, *, title: str) -> None:
    names = ("scenario", "request", "prompt", "cached", "expected", "verdict")
    table = make_table(title, names, texts=set(names) - {"prompt", "cached"})
    last_title = ""
    for row in rows:
        row_title = f"{row.scenario}: {row.case}" if row.case else row.scenario
        is_new = row_title != last_title
        if is_new and last_title:
            table.add_section()
        last_title = row_title
        color = "green" if row.verdict == "ok" else "bold red"
        table.add_row(
            row_title if is_new else "",
            row.what,
            f"{row.prompt:,}",
            f"{row.cached:,}",
            f"{row.at_least:,}..{row.at_most:,}",
            f"[{color}]{row.verdict}[/]",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_server_options(parser)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--head-chars", type=int, default=6_000, help="of the prompt")
    options = parser.parse_args()
    try:
        server = Server(options.base_url, model=options.model, key=options.api_key)
        rows = play(server, options)
    except CannotAsk as error:
        print(error, file=sys.stderr)
        return 2
    scenarios: dict[str, bool] = {}  # whether all its bounds are kept
    for row in rows:
        is_kept = scenarios.get(row.scenario, True)
        scenarios[row.scenario] = is_kept and row.verdict == "ok"
    is_healthy = all(scenarios.values())
    if options.json:
        body = {
            "base_url": server.url,
            "model": server.model,
            "requests": [{**asdict(row), "verdict": row.verdict} for row in rows],
            "scenarios": scenarios,
            "healthy": is_healthy,
        }
        print(json.dumps(body, indent=2))
    else:
        console = Console(highlight=False)
        show(rows, console, title=f"{server.model} at {server.url}")
        for name, is_kept in scenarios.items():
            word = "[green]healthy[/]" if is_kept else "[bold red]NOT HEALTHY[/]"
            console.print(f"{word}  {name}")
    return 0 if is_healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
