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

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pi_like_probe import (
    TOOLS,
    Body,
    ProbeError,
    Prose,
    Reply,
    Server,
    add_server_options,
    pi_echo,
    progress_bar,
    server_from,
)
from rich.console import Console
from rich.table import Table

SLACK: Final = (
    32  # tokens: how a turn ends and a reply begins, and caches that count in blocks
)
N_GROWTH: Final = 4  # requests of a conversation that only grows
N_PAST: Final = 3  # requests before the past is changed
MAX_TOKENS: Final = 48  # of one reply

Stamp = Callable[
    [list[Body], int], list[Body]
]  # (messages, number of the request) -> as sent


# Drift -------------------------------------------------------------------------------------------


def moment(n: int) -> datetime:
    """When request `n` is sent, by the clock that it shows."""
    return datetime(2026, 11, 20, 8, 52, tzinfo=UTC) + timedelta(
        minutes=7 * n, seconds=13 * n
    )


def as_kept(messages: list[Body], _n: int) -> list[Body]:
    """Nothing drifts."""
    return messages


def with_billing_header(messages: list[Body], n: int) -> list[Body]:
    """Claude Code: a part of its own before the system prompt."""
    system = messages[0]
    cch = random.Random(n).getrandbits(20)
    header = f"x-anthropic-billing-header: cc_version=2.1.121.dd4; cc_entrypoint=cli; cch={cch:05x};"  # noqa: E501
    parts = [{"type": "text", "text": text} for text in (header, system["content"])]
    return [{"role": "system", "content": parts}, *messages[1:]]


def with_inbound_context(messages: list[Body], n: int) -> list[Body]:
    """OpenClaw 2026.2.17: three quarters into the developer prompt."""
    known = {"schema": "openclaw.inbound_meta.v1"}
    known["message_id"] = str(
        uuid.UUID(int=random.Random(n).getrandbits(128), version=4)
    )
    known |= {"channel": "webchat", "provider": "webchat", "chat_type": "direct"}
    listed = json.dumps(known, indent=2)
    block = f"## Inbound Context (trusted metadata)\n\n```json\n{listed}\n```\n\n"
    text = messages[0]["content"]
    place = text.index("\n\n", len(text) * 3 // 4) + 2
    return [
        {**messages[0], "content": text[:place] + block + text[place:]},
        *messages[1:],
    ]


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
    return [{**messages[0], "content": messages[0]["content"] + line}, *messages[1:]]


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

    server: Server
    prose: Prose
    messages: list[Body]
    stamp: Stamp
    advance: Callable[[], None]
    replies: list[Reply] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the questions, in messages
    found: list[Body] = field(
        default_factory=list
    )  # the fields of Row that the requests gave

    def ask(self, what: str, *, at_least: int = 0, at_most: int | None = None) -> None:
        """Put the next question; the reply becomes part of the conversation."""
        self.places.append(len(self.messages))
        self.messages.append(
            {"role": "user", "content": f"Keep {self.prose.text(300)}"}
        )
        reply = self.server.ask(self._body())
        self.messages.append(
            pi_echo(reply) or {"role": "assistant", "content": "Done."}
        )
        for call in reply.calls:  # forbidden, but not every server knows how
            result = {"role": "tool", "content": "Done.", "tool_call_id": call["id"]}
            self.messages.append(result)
        bounds = {"at_least": max(0, at_least), "at_most": reply.n_prompt - 1}
        if at_most is not None:
            bounds["at_most"] = at_most
        counts = {"prompt": reply.n_prompt, "cached": reply.n_cached}
        self.found.append({"what": what, **counts, **bounds})
        self.replies.append(reply)
        self.advance()

    def _body(self) -> Body:
        """No call and no thinking: a reply is one short text in every request."""
        return {
            "messages": self.stamp(self.messages, len(self.replies)),
            "tools": TOOLS,
            "tool_choice": "none",
            "max_completion_tokens": MAX_TOKENS,
            "chat_template_kwargs": {"enable_thinking": False},
        }

    def grow(self, what: str) -> None:
        """Ask once more; all that the request before sent should be cached."""
        self.ask(what, at_least=self.replies[-1].n_prompt - SLACK)


def start_talk(
    server: Server,
    options: argparse.Namespace,
    *,
    stamp: Stamp,
    advance: Callable[[], None],
) -> Talk:
    """A conversation whose system prompt begins like no other's."""
    nonce = secrets.token_hex(8)
    prose = Prose(nonce)
    head = f"You keep the records of house {nonce}.\n\n{prose.text(options.head_chars)}"
    return Talk(
        server, prose, [{"role": options.role, "content": head}], stamp, advance
    )


# Scenarios ---------------------------------------------------------------------------------------


def growth(talk: Talk) -> None:
    """Requests that each append to the one before."""
    talk.ask("cold")
    for _ in range(N_GROWTH - 1):
        talk.grow("append")


def past(talk: Talk) -> None:
    """What comes before a change: requests that only fill the cache."""
    talk.ask("cold")
    for _ in range(N_PAST - 1):
        talk.grow("append")


def edit(talk: Talk) -> None:
    """The first word of the second question turns into its opposite."""
    past(talk)
    place, before = talk.places[1], talk.replies[0]
    question = talk.messages[place]
    changed = question["content"].replace("Keep", "Drop", 1)
    talk.messages[place] = {**question, "content": changed}
    end = before.n_prompt + before.n_out
    talk.ask("edit", at_least=before.n_prompt - SLACK, at_most=end + SLACK)
    talk.grow("append")


def insertion(talk: Talk) -> None:
    """A call and its result appear between the second question and its answer."""
    past(talk)
    before = talk.replies[1]
    function = {"name": "read", "arguments": '{"path":"ledger.txt"}'}
    calls = [{"id": "call_0001", "type": "function", "function": function}]
    place = talk.places[1] + 1
    talk.messages[place:place] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": talk.prose.text(300), "tool_call_id": "call_0001"},
    ]
    end = before.n_prompt + before.n_out
    talk.ask("insert", at_least=before.n_prompt - SLACK, at_most=end + SLACK)
    talk.grow("append")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens in a conversation, and the ways in which it is told."""

    play: Callable[[Talk], None]
    n_requests: int
    cases: Mapping[str, Stamp]


ONE: Final[Mapping[str, Stamp]] = {"": as_kept}
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
    """One row per request of the scenarios in `only`. Raises ProbeError."""
    rows: list[Row] = []
    asked = {name: SCENARIOS[name] for name in options.only}
    total = sum(
        scenario.n_requests * len(scenario.cases) for scenario in asked.values()
    )
    with progress_bar("requests", total) as advance:
        for name, scenario in asked.items():
            for case, stamp in scenario.cases.items():
                talk = start_talk(server, options, stamp=stamp, advance=advance)
                scenario.play(talk)
                rows += [
                    Row(scenario=name, case=case, **fields) for fields in talk.found
                ]
    return rows


# Showing -----------------------------------------------------------------------------------------


def show(rows: Sequence[Row], console: Console, *, title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("scenario", "request", "prompt", "cached", "expected", "verdict"):
        table.add_column(
            name, justify="right" if name in ("prompt", "cached") else "left"
        )
    for row, before in zip(rows, [None, *rows], strict=False):
        is_new = before is None or (row.scenario, row.case) != (
            before.scenario,
            before.case,
        )
        if is_new and before is not None:
            table.add_section()
        name = f"{row.scenario}: {row.case}" if row.case else row.scenario
        color = "green" if row.verdict == "ok" else "bold red"
        counts = (
            f"{row.prompt:,}",
            f"{row.cached:,}",
            f"{row.at_least:,}..{row.at_most:,}",
        )
        table.add_row(
            name if is_new else "", row.what, *counts, f"[{color}]{row.verdict}[/]"
        )
    console.print(table)


def summary(rows: Sequence[Row]) -> dict[str, bool]:
    """Scenario -> whether all its bounds are kept."""
    names = dict.fromkeys(row.scenario for row in rows)
    return {
        n: all(row.verdict == "ok" for row in rows if row.scenario == n) for n in names
    }


def body_of(rows: Sequence[Row], server: Server) -> dict[str, Any]:
    """All of it for --json."""
    kept = summary(rows)
    head = {"base_url": server.base_url, "model": server.model}
    requests = [{**asdict(row), "verdict": row.verdict} for row in rows]
    return {
        **head,
        "requests": requests,
        "scenarios": kept,
        "healthy": all(kept.values()),
    }


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_server_options(parser)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument(
        "--head-chars", type=int, default=6_000, help="of the system prompt"
    )
    return parser.parse_args()


def main() -> int:
    options = read_options()
    try:
        server = server_from(options)
        rows = play(server, options)
    except ProbeError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(body_of(rows, server), indent=2))
    else:
        console = Console(highlight=False)
        show(rows, console, title=f"{server.model} at {server.base_url}")
        for name, kept in summary(rows).items():
            console.print(
                f"{'[green]healthy[/]' if kept else '[bold red]NOT HEALTHY[/]'}  {name}"
            )
    return 0 if all(summary(rows).values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
