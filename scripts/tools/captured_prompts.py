"""What a client's recorded requests ask, and which of them are one conversation.

    prompt        what a model reads of a request: system, tools, messages. Each block of the system
                  prompt, each tool and each message is a unit; a unit has texts.
    conversation  a request continues the earlier one whose messages it still has, in order. Where
                  both name a session, it has to be the same.

Read by client_check.py; recorded by capture_proxy.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from typing import Any

from capture_proxy import Exchange

Body = dict[str, Any]
Pairs = list[tuple[int, int]]

NEAR = 8  # units or lines that are looked at for the counterpart of one

SESSION_HEADERS = (
    *("x-claude-code-session-id", "x-claude-code-agent-id", "x-session-id"),
    *("session-id", "thread-id"),
)
SESSION_IN_USER = re.compile(r'"session_id"\s*:\s*"([^"]+)"')

VARIES = re.compile(r"[0-9a-fA-F-]*\d[0-9a-fA-F-]*")
THOUGHT = re.compile(r"\A\s*<think>(?P<thought>[\s\S]*?)</think>")


# Prompts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A block of the system prompt, a tool, or a message."""

    role: str
    raw: Body
    texts: tuple[str, ...]  # what counts: no reasoning, ids, empty parts, cache markers

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Equal where the content is."""
        return (self.role, *self.texts)

    @cached_property
    def text(self) -> str:
        return "\n".join(self.texts)

    @cached_property
    def call_ids(self) -> tuple[str, ...]:
        parts = [self.raw]
        for name in ("content", "tool_calls"):
            if isinstance(self.raw.get(name), list):
                parts += [part for part in self.raw[name] if isinstance(part, dict)]
        names = ("tool_call_id", "tool_use_id", "id")
        return tuple(
            str(part[name]) for part in parts for name in names if part.get(name)
        )


@dataclass(frozen=True)
class Prompt:
    """A request, in the order in which a model reads it."""

    exchange: Exchange
    head: tuple[Unit, ...]
    messages: tuple[Unit, ...]

    @cached_property
    def session(self) -> tuple[str, ...]:
        """What the request says it belongs to; empty where it says nothing."""
        body = self.exchange.body or {}
        user = str((body.get("metadata") or {}).get("user_id") or "")
        names = [self.exchange.headers.get(name, "") for name in SESSION_HEADERS]
        names += SESSION_IN_USER.findall(user)
        names.append(str(body.get("prompt_cache_key") or ""))
        return tuple(names) if any(names) else ()

    @cached_property
    def system(self) -> str:
        return "\n".join(unit.text for unit in self.head if unit.role == "system")


def canonical(value: object) -> str:
    """The same text for the same JSON value, however a client wrote it."""
    return json.dumps(
        plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )


def plain(value: Any) -> Any:
    """Without cache markers; whole floats as integers, as JavaScript writes them."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k != "cache_control"}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parsed(arguments: object) -> object:
    if isinstance(arguments, str):
        with suppress(ValueError):
            return json.loads(arguments)
    return arguments


def is_thinking(part: Body) -> bool:
    return part.get("type") in ("thinking", "redacted_thinking", "reasoning")


def content_texts(content: object, role: str) -> Iterator[str]:
    if isinstance(content, str):
        text = THOUGHT.sub("", content) if role == "assistant" else content
        if text:
            yield text
    elif isinstance(content, list):
        for part in content:
            yield from part_texts(part, role)


def part_texts(part: Any, role: str) -> Iterator[str]:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            yield from content_texts(text, role)
        case {"type": "tool_use", "name": name, "input": given}:
            yield f"{name} {canonical(given)}"
        case {"type": "tool_result"}:
            yield from content_texts(part.get("content"), "tool")
        case {"type": "image" | "image_url" | "document" | "input_audio" as sort}:
            data = canonical(part).encode("utf-8", "replace")
            digest = hashlib.sha256(data).hexdigest()
            yield f"<{sort} {digest[:12]}>"
        case str():
            yield from content_texts(part, role)
        case dict() if not is_thinking(part):
            yield canonical(part)


def call_texts(message: Body) -> Iterator[str]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = canonical(parsed(function.get("arguments")))
        yield f"{function.get('name')} {arguments}"


def message_unit(message: Body) -> Unit:
    role = str(message.get("role"))
    role = "system" if role == "developer" else role
    texts = list(content_texts(message.get("content"), role))
    texts += call_texts(message)
    return Unit(role, message, tuple(texts))


def system_units(system: Any) -> Iterator[Unit]:
    """Of Anthropic's `system`."""
    if isinstance(system, str) and system:
        yield Unit("system", {"content": system}, (system,))
    for block in system if isinstance(system, list) else ():
        texts = tuple(part_texts(block, "system"))
        if texts and isinstance(block, dict):
            yield Unit("system", block, texts)


def tool_units(tools: Any) -> Iterator[Unit]:
    for tool in tools or ():
        if isinstance(tool, dict):
            yield Unit("tools", tool, tuple(tool_texts(tool)))


def tool_texts(thing: Any) -> Iterator[str]:
    """Every string in a tool's description; what is left of it as one text."""
    if isinstance(thing, dict):
        for key in sorted(thing.keys() - {"cache_control"}):
            yield from tool_texts(thing[key])
    else:
        yield thing if isinstance(thing, str) else canonical(thing)


def tool_name(tool: Body) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))


def prompts_of(exchanges: Iterable[Exchange]) -> Iterator[Prompt]:
    """Of requests that generate; a malformed one, which its server refused, is left out."""
    for exchange in exchanges:
        with suppress(AttributeError, KeyError, TypeError):
            if exchange.api:
                yield prompt_of(exchange)


def prompt_of(exchange: Exchange) -> Prompt:
    """Leading system messages of chat completions are the head, as Anthropic's `system` is."""
    body = exchange.body or {}
    units = [
        message_unit(message)
        for message in body["messages"]
        if isinstance(message, dict)
    ]
    head = list(system_units(body.get("system")))
    n_leading = 0
    if exchange.api == "chat":
        roles = [unit.role == "system" for unit in units]
        n_leading = roles.index(False) if False in roles else len(roles)
    head += units[:n_leading]
    head += tool_units(body.get("tools"))
    return Prompt(exchange, tuple(head), tuple(units[n_leading:]))


# Conversations ------------------------------------------------------------------------------------


def skeleton(text: str) -> str:
    """Texts that differ in numbers and ids only have the same."""
    return VARIES.sub("#", text)


def n_shared(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common beginning; compares slices, because prompts are long."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache(maxsize=10_000)
def likeness(a: str, b: str) -> float:
    """Share of the shorter text, by lines or by beginning and end, that the other one has too."""
    if not a or not b or skeleton(a) == skeleton(b):
        return float(bool(a) == bool(b))
    shorter = min(len(a), len(b))
    start = n_shared(a, b)
    n_shared_at_end = n_shared(a[::-1], b[::-1])
    end = min(n_shared_at_end, shorter - start)

    lines_a = Counter(skeleton(a).split("\n"))
    lines_b = Counter(skeleton(b).split("\n"))
    n_common = count_characters(lines_a & lines_b)
    n_shorter = min(count_characters(lines_a), count_characters(lines_b))
    return max((start + end) / shorter, n_common / max(1, n_shorter))


def count_characters(lines: Counter[str]) -> int:
    return sum(len(line) * n for line, n in lines.items())


def are_alike(a: Unit, b: Unit) -> bool:
    """Whether one may be what became of the other."""
    if a.role != b.role:
        return False
    if a.role == "tools":
        return tool_name(a.raw) == tool_name(b.raw)
    if not set(a.call_ids).isdisjoint(b.call_ids):
        return True
    return likeness(a.text, b.text) >= 0.5


def matched(a: Sequence[Unit], b: Sequence[Unit]) -> Pairs:
    """Places of units that are the same, or what became of one another, in the order of both."""
    keys_a = [unit.key for unit in a]
    keys_b = [unit.key for unit in b]
    pairs: Pairs = []
    for is_same, left, right in passages_of(keys_a, keys_b):
        if is_same:
            pairs += zip(left, right, strict=True)
        else:
            pairs += matched_gap(left, right, lambda i, j: are_alike(a[i], b[j]))
    return pairs


def passages_of(
    a: Sequence[Any], b: Sequence[Any]
) -> Iterator[tuple[bool, range, range]]:
    """(are equal, places in one, places in the other), in order."""
    start = n_shared(a, b)
    yield True, range(start), range(start)
    matcher = SequenceMatcher(None, a[start:], b[start:], autojunk=False)
    for sort, i1, i2, j1, j2 in matcher.get_opcodes():
        left = range(start + i1, start + i2)
        right = range(start + j1, start + j2)
        yield sort == "equal", left, right


def matched_gap(
    left: range, right: range, alike: Callable[[int, int], bool]
) -> Iterator[tuple[int, int]]:
    """Pairs of places between which `alike` holds; a place as far into the gap is tried first."""
    free = right.start
    for i in left:
        expected = right.start + i - left.start
        first = max(free, expected - NEAR)
        end = min(right.stop, max(free, expected) + NEAR)
        candidates = sorted(range(first, end), key=lambda j: abs(j - expected))
        match = next((j for j in candidates if alike(i, j)), None)
        if match is not None:
            yield i, match
            free = match + 1


@dataclass(frozen=True)
class Step:
    """A request and the one before it in its conversation."""

    earlier: Prompt
    later: Prompt
    pairs: Pairs  # places of messages that still stand where they stood
    # Place of the new reply in the later messages: the past ends there.
    reply: int | None

    @cached_property
    def removed(self) -> list[int]:
        """Messages of the earlier prompt that are gone, or stand after the reply now."""
        paired = {i for i, _ in self.pairs}
        return [i for i in range(len(self.earlier.messages)) if i not in paired]

    @cached_property
    def rewritten(self) -> list[tuple[Unit, Unit]]:
        units = [
            (self.earlier.messages[i], self.later.messages[j]) for i, j in self.pairs
        ]
        return [(old, new) for old, new in units if old.key != new.key]

    @property
    def score(self) -> int:
        """A message that is the same counts twice, one that was rewritten once."""
        return 2 * len(self.pairs) - len(self.rewritten)


Talk = list[Prompt | Step]  # the first prompt of a conversation, then its steps


def step_between(earlier: Prompt, later: Prompt) -> Step:
    """How the later prompt goes on from the earlier one."""
    pairs = matched(earlier.messages, later.messages)
    paired = {j for _, j in pairs}
    replies = [j for j, unit in enumerate(later.messages) if unit.role == "assistant"]
    last_paired = max((j for j in replies if j in paired), default=-1)
    new_reply = next((j for j in replies if j > last_paired), None)
    if new_reply is not None:
        pairs = [(i, j) for i, j in pairs if j < new_reply]
    return Step(earlier, later, pairs, new_reply)


def continues(step: Step) -> bool:
    """Whether the later request is a later state of the same conversation, not a branch of it."""
    messages = step.earlier.messages
    removed_units = [messages[i] for i in step.removed]
    if not keeps_first_question(step):
        return False
    if len(removed_units) > max(2, len(messages) // 3):
        return False
    if any(unit.role == "assistant" for unit in removed_units):
        return False
    if step.reply is not None:
        return True

    exchange = step.earlier.exchange
    is_retry = exchange.status != 200 or not exchange.is_whole
    questions = [(old, new) for old, new in step.rewritten if old.role == "user"]
    are_kept = all(is_retry and old.text in new.text for old, new in questions)
    return are_kept and not removed_units


def keeps_first_question(step: Step) -> bool:
    roles = [unit.role for unit in step.earlier.messages]
    questions = [i for i, role in enumerate(roles) if role == "user"]
    paired_questions = [i for i, _ in step.pairs if roles[i] == "user"]
    return questions[:1] == paired_questions[:1]


def have_like_heads(a: Prompt, b: Prompt, wanted: float) -> bool:
    return likeness(a.system, b.system) >= wanted


def follow(prompts: Sequence[Prompt]) -> list[Talk]:
    """The conversations, in the order of their first prompts."""
    talks: list[Talk] = []
    for prompt in prompts:
        candidates = [talk for talk in talks if may_continue(newest(talk), prompt)]
        continued = []
        for talk in candidates:
            step = step_between(newest(talk), prompt)
            if continues(step):
                continued.append((step, talk))
        if continued:
            step, talk = max(reversed(continued), key=lambda pair: pair[0].score)
            talk.append(step)
        else:
            talks.append([prompt])
    return talks


def newest(talk: Talk) -> Prompt:
    last = talk[-1]
    return last.later if isinstance(last, Step) else last


def may_continue(earlier: Prompt, later: Prompt) -> bool:
    if earlier.exchange.api != later.exchange.api:
        return False
    if earlier.session != later.session and earlier.session and later.session:
        return False
    return have_like_heads(earlier, later, 0.5)


# Tokens -------------------------------------------------------------------------------------------


def usage_of(event: Body) -> Body:
    """The counts in an event; Anthropic's first ones are in its message."""
    usage = event.get("usage") or (event.get("message") or {}).get("usage") or {}
    return {name: value for name, value in usage.items() if value is not None}


def tokens_of(usage: Body) -> tuple[int, int]:
    """(prompt, of it cached): Anthropic counts apart what was read from a cache or put there."""
    if "prompt_tokens" in usage:
        details = usage.get("prompt_tokens_details") or {}
        return usage["prompt_tokens"], details.get("cached_tokens") or 0
    cached = usage.get("cache_read_input_tokens", 0)
    created = usage.get("cache_creation_input_tokens", 0)
    return usage.get("input_tokens", 0) + cached + created, cached
