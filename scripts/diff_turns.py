"""Show where two requests of a session begin to differ, and what that cost.

    python scripts/diff_turns.py                        the last two of the newest session log
    python scripts/diff_turns.py LOG --turns 3 7        the third and the seventh of this one
    python scripts/diff_turns.py --log-root LOGS --json   default: LOG_ROOT, as the server reads it

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

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from chat import make_table
from launch import ROOT, read_settings
from rich.console import Console
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two conversations differ; the text of one that has ended is empty."""

    message: int
    field: str  # "" where one of them has ended
    left: str
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How one request continues another."""

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
        """All of it for --json, but for the messages."""
        body = asdict(self)
        for turn in (body["left"], body["right"]):
            turn["n_messages"] = len(turn.pop("messages"))
            del turn["n_own"]
        return {**body, "continues": self.continues, "hint": self.hint}


# Reading -----------------------------------------------------------------------------------------


def read_turns(lines: Sequence[str]) -> list[Turn]:
    """The requests of a log with their whole conversations. Raises LogError."""
    turns: list[Turn] = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            record = json.loads(line)
            if "messages" not in record:
                hint = "set ENABLE_REQUEST_LOGGING=true to have what clients sent in the log"
                raise LogError(f"turn {number} has no messages: {hint}")
            own: list[Body] = record["messages"]
            n_taken = record.get("n_messages", len(own)) - len(own)
            # A completion has none: what the next chat has new is told of the last one.
            with_messages = (t.messages for t in reversed(turns) if t.messages)
            taken = next(with_messages, [])[:n_taken]
            taken += [None] * (n_taken - len(taken))
            turn = Turn(
                number=number,
                time=str(record.get("time", "")),
                prompt=record["prompt"],
                cached=record["cached"],
                out=record["out"],
                match=str(record.get("match") or "-"),
                messages=[*taken, *own],
                n_own=len(own),
            )
            turns.append(turn)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            fault = f"turn {number} is no line of a session log: {error!r}"
            raise LogError(fault) from error
    return turns


# Comparing ---------------------------------------------------------------------------------------


def compare(left: Turn, right: Turn) -> Comparison:
    """How the right request continues the left one, which came before it."""
    difference = first_difference(left.messages, right.messages)
    kind = "edit"
    if difference is None:
        kind = "same"
    elif difference.message >= len(left.messages):
        kind = "append"
    elif difference.message >= len(right.messages):
        kind = "cut"

    # The left request leaves its prompt and its reply in the cache.
    new = max(0, right.prompt - left.prompt - left.out)
    lost = max(0, right.prompt - right.cached - new)
    return Comparison(
        left=left, right=right, kind=kind, difference=difference, new=new, lost=lost
    )


def first_difference(left: Conversation, right: Conversation) -> Difference | None:
    """None where they are the same; messages that the log does not have differ from none."""
    pairs = zip(left, right, strict=False)
    for index, (left_message, right_message) in enumerate(pairs):
        if left_message is None or right_message is None:
            continue
        if left_message != right_message:
            path, left_value, right_value = first_leaf(left_message, right_message)
            left_part, right_part = around(as_text(left_value), as_text(right_value))
            return Difference(
                message=index, field=path, left=left_part, right=right_part
            )

    if len(left) == len(right):
        return None
    end = min(len(left), len(right))
    # The beginning of the message that one of them has, and nothing of the other.
    left_part, right_part = (
        as_text(conversation[end])[: 2 * AROUND] if end < len(conversation) else ""
        for conversation in (left, right)
    )
    return Difference(message=end, field="", left=left_part, right=right_part)


def first_leaf(left: Any, right: Any, path: str = "") -> tuple[str, Any, Any]:
    """(path, value, value) of the first difference between two JSON values; None for what lacks."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys([*left, *right]):
            inner_path = f"{path}.{key}".lstrip(".")
            pairs.append((inner_path, left.get(key), right.get(key)))
    elif isinstance(left, list) and isinstance(right, list):
        for index, (left_item, right_item) in enumerate(zip_longest(left, right)):
            pairs.append((f"{path}[{index}]", left_item, right_item))

    for inner_path, left_value, right_value in pairs:
        if left_value != right_value:
            return first_leaf(left_value, right_value, inner_path)
    return path, left, right


def as_text(value: Any) -> str:
    """Text as it is, nothing as nothing, other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def around(left: str, right: str) -> list[str]:
    """Both texts near the first character that differs; "…" where something is left out."""
    pairs = enumerate(zip(left, right, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    start, end = max(0, index - AROUND), index + AROUND
    prefix = "…" if start else ""
    texts = (left, right)
    return [f"{prefix}{t[start:end]}{'…' if end < len(t) else ''}" for t in texts]


def pick(turns: Sequence[Turn], number: int) -> Turn:
    """Turn 1, 2 ..., or -1 for the last one, -2 ... Raises LogError."""
    index = number if number < 0 else number - 1
    if number == 0 or not -len(turns) <= index < len(turns):
        raise LogError(f"the log has {len(turns)} turns; there is no turn {number}")
    return turns[index]


# Showing -----------------------------------------------------------------------------------------


def show(comparison: Comparison, console: Console) -> None:
    """The two turns, the difference and what it cost."""
    names = ("", "turn", "time", "messages", "prompt", "cached", "match", "out")
    table = make_table("", names, texts=("", "time", "match"))
    for side, turn in (("left", comparison.left), ("right", comparison.right)):
        numbers = (len(turn.messages), turn.prompt, turn.cached)
        messages, prompt, cached = (f"{n:,}" for n in numbers)
        time = turn.time[11:23]  # of 2026-11-20T14:14:12.832+00:00
        row = (side, str(turn.number), time, messages, prompt, cached)
        table.add_row(*row, turn.match, f"{turn.out:,}")
    console.print(table)

    if difference := comparison.difference:
        place = f"message {difference.message}"
        if difference.field:
            place += f" in {difference.field}"
        console.print(f"{comparison.kind} at {place}", soft_wrap=True)
        for side, text in (("left", difference.left), ("right", difference.right)):
            if text:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", nargs="?", type=Path, help="default: the newest one")
    # As the server resolves it.
    usual = ROOT / os.path.expanduser(read_settings().get("LOG_ROOT", "logs"))
    parser.add_argument("--log-root", type=Path, default=usual)
    text = "from 1; negative: from the end"
    parser.add_argument("--turns", nargs=2, type=int, metavar=("A", "B"), help=text)
    parser.set_defaults(turns=(-2, -1))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        logs = [options.log]
        if not options.log:
            logs = list(options.log_root.glob("*/cache-session-*.log"))
        if not logs:
            fault = f"no session log in {options.log_root}"
            raise LogError(f"{fault}; is ENABLE_REQUEST_LOGGING on?")
        log = max(logs, key=os.path.getmtime)
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
