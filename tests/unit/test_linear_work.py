"""Work before the model grows with the bytes of a request, not with their square (L-113).

No clocks: steps of the interpreter are counted, and characters that are searched or copied.
Only what `re` does is not seen in steps: there quadratic work takes 1 to 7 seconds of the
processor, linear work some thousandths, and a quarter of a second parts them on any machine.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import pytest
import start_llm as s
from templates import chat, said


class Counted(str):
    """A text that counts the characters that are copied out of it or searched in it."""

    n_characters = 0

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        part = str(self)[place]
        self.n_characters += len(part)
        return part

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        end = len(self) if end is None else min(end, len(self))
        position = str(self).find(sub, start, end)
        self.n_characters += (end if position < 0 else position + len(sub)) - start
        return position


def count_steps(work: Callable[[], object]) -> int:
    """Instructions of the interpreter."""
    n_steps = 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal n_steps
        frame.f_trace_opcodes = True
        n_steps += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return n_steps


def canonicalizer() -> s.Canonicalizer:
    return s.Canonicalizer(s.Config(), part_separator="\n", thinking_tags=("", ""))


def reminders(n: int) -> str:
    blocks = [f"<system-reminder>\nplan {i}\n</system-reminder>\n" for i in range(n)]
    return "".join(blocks) + "go on"


def users_then_notes(n: int) -> list:
    return [
        *[said("user", f"hi {i}") for i in range(n)],
        *[said("system", f"note {i}") for i in range(n)],
    ]


def notes_alone(n: int) -> list:
    return [said("user", "hi"), *[said("system", f"note {i}") for i in range(n)]]


def notes_after_a_reply(n: int) -> list:
    notes = [said("system", f"note {i}") for i in range(n)]
    return [said("user", "hi"), said("assistant", "yes"), *notes]


@pytest.mark.parametrize("shape", [users_then_notes, notes_alone, notes_after_a_reply])
def test_twice_the_messages_take_twice_the_steps(shape):
    def canonicalize(n: int) -> Callable[[], object]:
        messages = chat(shape(n)).messages
        return lambda: s.canonicalize_messages(messages, canonicalizer())

    count_steps(canonicalize(10))
    n_steps_of_80 = count_steps(canonicalize(80))
    n_steps_of_160 = count_steps(canonicalize(160))

    assert n_steps_of_160 < 2.1 * n_steps_of_80


def test_reminders_of_one_message_are_masked_in_one_pass():
    text = reminders(300)
    message = canonicalizer().canonicalize(said("user", text))
    counted = Counted(text)

    assert s.mask_volatile(counted, message.inline_notes) == "go on"
    assert counted.n_characters <= 2 * len(text)


@pytest.mark.parametrize("form", [str, json.dumps])
def test_texts_are_looked_for_near_those_before_them(form):
    """Each is printed in one of two forms, the other is nowhere."""

    def count_searched(n: int) -> int:
        lines = [f'line "{i:05}"\nand another' for i in range(n)]
        results = [{"role": "tool", "content": text} for text in lines]
        messages = [{"role": "user", "content": "hi"}, *results]
        printed = [form(message["content"]) for message in messages]
        text = Counted("<|x|>".join(printed))
        assert not s._find_losses(messages, text)
        return text.n_characters

    assert count_searched(8_000) < 2.3 * count_searched(4_000)


def test_lost_texts_are_not_looked_for_again_and_again():
    messages = [{"role": "user", "content": f"lost {i}"} for i in range(500)]
    text = Counted("x" * 10_000)

    assert set(s._find_losses(messages, text)) == {"user messages"}
    assert text.n_characters < 100 * len(text)


def test_canonicalization_is_left_when_the_client_has_gone():
    def leave() -> None:
        raise s.ClientGone

    messages = chat(users_then_notes(300)).messages
    used = canonicalizer()

    with pytest.raises(s.ClientGone):
        s.canonicalize_messages(messages, used, check_client=leave)
    assert not used.memo.entries


FENCES = "```sh\nls\n```\n~~~\n"
COMMAND = "cd /a && cd b && ls  \n"
LINEAR = [
    *[pytest.param(r.pattern, r.example, id=r.name) for r in s._RULES],
    pytest.param(s._FENCE, FENCES, id="fence"),
    pytest.param(s._CLAUDE_CODE_CUTS, COMMAND, id="command"),
]
N_HOSTILE = 30_000  # characters of a hostile text


def hostile_texts(example: str) -> Iterator[str]:
    """A beginning of an example, then again and again what it goes on with, and no end."""
    words = re.findall(r"\w+|\s|[^\w\s]", example)
    for index in range(len(words) + 1):
        rest = ["".join(words[index : index + length]) for length in (1, 2, 4)]
        for unit in sorted({*rest, "".join(words[index:]), " ", "\n", "a "} - {""}):
            yield f"{''.join(words[:index])}{unit * (N_HOSTILE // len(unit))}_"
    yield f"{example}_\n" * (N_HOSTILE // len(example))


class TooMuchWork(Exception):
    """A quarter of a second of the processor was not enough."""


@pytest.fixture
def read_hostile_texts() -> Iterator[Callable[[re.Pattern[str], str], None]]:
    """Finds a pattern in texts of 30 kB; raises TooMuchWork. `re` heeds signals, too."""

    def stop(_number: int, _frame: object) -> None:
        raise TooMuchWork

    def read(pattern: re.Pattern[str], example: str) -> None:
        for text in hostile_texts(example):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.25)
            sum(1 for _ in pattern.finditer(text))

    old_handler = signal.signal(signal.SIGVTALRM, stop)
    yield read
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, old_handler)


@pytest.mark.parametrize(("pattern", "example"), LINEAR)
def test_each_rule_reads_a_hostile_text_in_linear_work(
    pattern, example, read_hostile_texts
):
    read_hostile_texts(pattern, example)
