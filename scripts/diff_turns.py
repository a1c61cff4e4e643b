"""Show where two requests of a session begin to differ, and what that cost.

    python scripts/diff_turns.py                        the last two of the newest session log
    python scripts/diff_turns.py LOG --turns 3 7        the third and the seventh of this one
    python scripts/diff_turns.py --log-root LOGS --json

    message       0, 1, 2 ... where the right conversation is no longer the left one
    field         content, role, tool_calls[0].function.arguments ...
    left, right   the text around the first character that differs
    lost          tokens that the left request had sent or generated, that the right one sent again
                  and that were not cached for it: prompt - cached - new

A session log has one JSON object per line. To stay small, a line has only the messages from the
first that differs on (the end of `n_messages`); what stands before them is taken from the line that
had them last. Other tools and other template switches leave no trace in the log but the tokens
lost: where messages agree and tokens are lost, look there.

EXIT STATUS  0 the right request continues the left one, 1 it does not, 2 there is nothing to read
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

Body = dict[str, Any]
Conversation = list[Body | None]  # None: a message that this log never had

AROUND: Final = 60  # characters of text before and after a difference
SLACK: Final = 32  # tokens that a turn may lose to how it ends
CONTINUED: Final = ("append", "same")


class LogError(Exception):
    """There is nothing to compare; the text says why. Exit status 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of the log."""

    number: int  # from 1
    time: str
    prompt: int  # tokens
    cached: int
    out: int
    match: str
    messages: Conversation
    n_own: int  # of the messages: those that the line has itself, the last ones

    def body(self) -> Body:
        """All but the messages."""
        counts = {"prompt": self.prompt, "cached": self.cached, "out": self.out}
        head = {
            "number": self.number,
            "time": self.time,
            "n_messages": len(self.messages),
        }
        return {**head, **counts, "match": self.match}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two conversations differ; the text of one that has ended is empty."""

    message: int
    field: str  # "" where one of them has ended
    left: str
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two requests have to do with each other."""

    left: Turn
    right: Turn
    kind: str  # "append", "same", "cut" (the right one ends earlier) or "edit"
    difference: Difference | None
    new: int  # tokens
    lost: int

    @property
    def continues(self) -> bool:
        return self.kind in CONTINUED and self.lost <= SLACK

    @property
    def hint(self) -> str:
        """Where to look when the log does not say why tokens were lost."""
        if self.kind not in CONTINUED or self.continues:
            return ""
        n_taken = len(self.right.messages) - self.right.n_own
        return (
            f"nothing in the log differs; {n_taken} messages of the right turn are taken from "
            "earlier lines, and tools and template switches are not logged: look there, or at "
            "what was evicted in between"
        )

    def body(self) -> Body:
        """All of it for --json."""
        where = None if self.difference is None else asdict(self.difference)
        turns = {"left": self.left.body(), "right": self.right.body()}
        counts = {"new": self.new, "lost": self.lost}
        verdict = {"continues": self.continues, "hint": self.hint}
        return {**turns, "kind": self.kind, "difference": where, **counts, **verdict}


# Reading -----------------------------------------------------------------------------------------


def newest_log(root: Path) -> Path:
    """Raises LogError where there is no session log."""
    logs = list(root.glob("*/cache-session-*.log"))
    if not logs:
        raise LogError(
            f"no {root}/<date>/cache-session-*.log; is ENABLE_REQUEST_LOGGING on?"
        )
    return max(logs, key=lambda log: log.stat().st_mtime)


def read_turns(lines: Sequence[str]) -> list[Turn]:
    """The requests of a log with their whole conversations. Raises LogError."""
    turns: list[Turn] = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            record = json.loads(line)
            if "messages" not in record:
                wanted = "set ENABLE_REQUEST_LOGGING=true to have what clients sent in the log"
                raise LogError(f"turn {number} has no messages: {wanted}")
            turns.append(
                read_turn(record, number=number, past=[t.messages for t in turns])
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise LogError(
                f"turn {number} is no line of a session log: {error!r}"
            ) from error
    return turns


def read_turn(record: Body, *, number: int, past: Sequence[Conversation]) -> Turn:
    """`past`: the conversations of the lines before, oldest first."""
    own: list[Body] = record["messages"]
    n_before = record.get("n_messages", len(own)) - len(own)
    return Turn(
        number=number,
        time=str(record.get("time", "")),
        prompt=record["prompt"],
        cached=record["cached"],
        out=record["out"],
        match=str(record.get("match") or "-"),
        messages=[*rebuilt(n_before, past), *own],
        n_own=len(own),
    )


def rebuilt(n_messages: int, past: Sequence[Conversation]) -> Conversation:
    """The first messages of a conversation: those that the request before it had as well."""
    known = past[-1][:n_messages] if past else []
    return [*known, *[None] * (n_messages - len(known))]


# Comparing ---------------------------------------------------------------------------------------


def compare(left: Turn, right: Turn) -> Comparison:
    """What the right request has to do with the left one, which came before it."""
    difference = first_difference(left.messages, right.messages)
    kind = "edit"
    if difference is None:
        kind = "same"
    elif difference.message >= len(left.messages):
        kind = "append"
    elif difference.message >= len(right.messages):
        kind = "cut"
    new = max(
        0, right.prompt - left.prompt - left.out
    )  # it left its prompt and its reply behind
    lost = max(0, right.prompt - right.cached - new)
    return Comparison(
        left=left, right=right, kind=kind, difference=difference, new=new, lost=lost
    )


def first_difference(left: Conversation, right: Conversation) -> Difference | None:
    """None where they are the same; messages that the log does not have differ from none."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one is not None and other is not None and one != other:
            path, *leaves = first_leaf(one, other)
            texts = around(*map(as_text, leaves))
            return Difference(message=place, field=path, left=texts[0], right=texts[1])
    if len(left) == len(right):
        return None
    place = min(len(left), len(right))
    ends = (
        as_text(c[place])[: 2 * AROUND] if place < len(c) else "" for c in (left, right)
    )
    return Difference(message=place, field="", left=next(ends), right=next(ends))


def first_leaf(one: Any, other: Any, path: str = "") -> tuple[str, Any, Any]:
    """(path, value, value) of the first difference between two JSON values; None for what lacks."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        pairs = [
            (f"{path}.{key}".lstrip("."), one.get(key), other.get(key)) for key in keys
        ]
    elif isinstance(one, list) and isinstance(other, list):
        padded = [[*items, *[None] * (len(one) + len(other))] for items in (one, other)]
        both = zip(*padded, strict=False)
        pairs = [(f"{path}[{place}]", *pair) for place, pair in enumerate(both)]
    for inner, a, b in pairs:
        if a != b:
            return first_leaf(a, b, inner)
    return path, one, other


def as_text(value: Any) -> str:
    """Text as it is, nothing as nothing, other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def around(left: str, right: str) -> tuple[str, str]:
    """Both texts near the first character that differs; "…" where something is left out."""
    differ = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    at = next(differ, min(len(left), len(right)))
    start, end = max(0, at - AROUND), at + AROUND
    shown = [
        ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
        for text in (left, right)
    ]
    return shown[0], shown[1]


def pick(turns: Sequence[Turn], number: int) -> Turn:
    """Turn 1, 2 ..., or -1 for the last one, -2 ... Raises LogError."""
    place = number if number < 0 else number - 1
    if number == 0 or not -len(turns) <= place < len(turns):
        raise LogError(f"the log has {len(turns)} turns; there is no turn {number}")
    return turns[place]


# Showing -----------------------------------------------------------------------------------------


def show(comparison: Comparison, console: Console) -> None:
    """The two turns, the difference and what it cost."""
    table = Table()
    for name in ("", "turn", "time", "messages", "prompt", "cached", "match", "out"):
        table.add_column(
            name, justify="left" if name in ("", "time", "match") else "right"
        )
    for side, turn in (("left", comparison.left), ("right", comparison.right)):
        counts = (f"{turn.prompt:,}", f"{turn.cached:,}", turn.match, f"{turn.out:,}")
        clock = turn.time[11:23]  # of 2026-11-20T14:14:12.832+00:00
        table.add_row(side, str(turn.number), clock, str(len(turn.messages)), *counts)
    console.print(table)
    if difference := comparison.difference:
        where = f" in {difference.field}" if difference.field else ""
        console.print(
            f"{comparison.kind} at message {difference.message}{where}", soft_wrap=True
        )
        for side in ("left", "right"):
            if text := getattr(difference, side):
                # Text: what a client wrote is no markup, and repr() keeps it on its line.
                console.print(Text(f"  {side:5}  {text!r}"), soft_wrap=True)
    else:
        console.print("the same messages")
    color = "green" if comparison.continues else "bold red"
    console.print(
        f"new {comparison.new:,}  [{color}]lost {comparison.lost:,}[/] tokens"
    )
    if comparison.hint:
        console.print(comparison.hint)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "log", nargs="?", type=Path, help="default: the newest below --log-root"
    )
    logs = Path(__file__).resolve().parents[1] / "logs"
    parser.add_argument("--log-root", type=Path, default=logs)
    parser.add_argument(
        "--turns",
        nargs=2,
        type=int,
        default=(-2, -1),
        metavar=("A", "B"),
        help="from 1; negative: from the end",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    try:
        log = options.log or newest_log(options.log_root)
        turns = read_turns(log.read_text(encoding="utf-8").splitlines())
        left, right = (pick(turns, number) for number in options.turns)
    except (LogError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    comparison = compare(left, right)
    if options.json:
        print(json.dumps({"log": str(log), **comparison.body()}, indent=2))
    else:
        print(log)
        show(comparison, Console(highlight=False))
    return 0 if comparison.continues else 1


if __name__ == "__main__":
    raise SystemExit(main())
