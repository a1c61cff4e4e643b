"""Find what keeps a client's prompts from being cached: what changes though a talk only grew.

    python scripts/tools/inspect_capture.py CAPTURE [--json]

CAPTURE is what capture_proxy.py wrote, or a folder of numbered files, one per request.

HOW IT LOOKS
    prompt        what a model reads of a request: system, tools, messages. Each block of the system
                  prompt, each tool and each message is a unit; a unit has texts.
    conversation  a request continues the earlier one whose messages it still has, in order. Where
                  both name a session, it has to be the same.
    compared      with the request before it in its conversation: unit by unit, then text by text,
                  line by line, word by word. What stands before the newest reply is the past, and
                  in the past nothing should change.
    follows       characters of the prompt from a change on. No cache that knows prefixes has them.

WHAT IT SAYS
    telemetry     a value for the provider's statistics: no model needs it
    pinned        a value, or a section of the system prompt, that means something but changes
    transient     a message or block which is attached to the newest end and later gone or moved
    shape         the same content in other JSON: harmless to a server that compares parsed values.
                  Replies are compared with their echo in the next request, too.
    edits         other changes of the past, for which no rule is proposed: pruned results, history
                  that was rewritten, tools that come and go
Rules are given as name, role, class and regular expression; the group `value` is what changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from capture_proxy import Exchange, read_capture, stream_events

Body = dict[str, Any]
Pairs = list[tuple[int, int]]
Span = tuple[int, int]  # start and end in a text
Passage = re.Match[str]  # a wrapped one
Rule = tuple[str, str, str]  # role, class, expression

SHOWN = 60  # characters of an example
VALUE_LIMIT = 200  # characters of what may still be one value
LINE_VALUE_LIMIT = 80  # likewise, for what stands behind a label up to the line's end
ARGUMENTS = "tool arguments re-serialised"
NEAR = 8  # units or lines that are looked at for the counterpart of one
HEAD_LIKENESS = 0.8  # of system prompts that two conversations have in common

SESSION_HEADERS = (
    *("x-claude-code-session-id", "x-claude-code-agent-id", "x-session-id"),
    *("session-id", "thread-id"),
)
SESSION_IN_USER = re.compile(r'"session_id"\s*:\s*"([^"]+)"')
KNOWN_FIELDS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
    | {"type", "text", "cache_control"}
)

VARIES = re.compile(r"[0-9a-fA-F-]*\d[0-9a-fA-F-]*")
THOUGHT = re.compile(r"\A\s*<think>(?P<thought>[\s\S]*?)</think>")
WRAPPED = re.compile(
    r"<(?P<tag>[A-Za-z][\w-]*)(?: [^>\n]*)?>[\s\S]*?</(?P=tag)>"
    r"|<<<BEGIN_(?P<angle>\w+)>>>[\s\S]*?<<<END_(?P=angle)>>>"
    r"|\[\[(?P<square>\w+)_BEGIN\]\][\s\S]*?\[\[(?P=square)_END\]\]"
)
TELEMETRY = re.compile(
    r"billing|telemetry|trace-?(parent|id)|fingerprint|analytics", re.IGNORECASE
)

UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
MOMENT = (
    r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
    r"|\d{1,4}(?:st|nd|rd|th|[ap]m|[AP]M)?|[AaPp][Mm]\b|UTC|GMT|[A-Z]{1,3}ST)"
)
STAMP = rf"\b{MOMENT}(?:[ ,:/.()+T-]+{MOMENT})+Z?"
KINDS = {  # of values, by their text
    "uuid": re.compile(UUID),
    "number": re.compile(r"[-+]?\d[\d.,]*%?"),
    "hex": re.compile(r"[0-9a-fA-F]{6,}|(?=\w*\d)[0-9a-f]{3,}"),
    "timestamp": re.compile(STAMP + r"\)?"),
    "word": re.compile(r"[^\s\"]+"),
}
PATTERNS = {"uuid": UUID, "number": r"[-+]?\d[\d.,]*%?", "hex": r"[0-9a-fA-F]+"}
FORMS = {  # how a value is named where it stands; the first that covers what changed is taken
    "json": re.compile(
        r'"(?P<label>[^"\\]+)"\s*:\s*"?'
        r'(?P<value>(?<=")(?:[^"\\]|\\.)*(?=")|(?<!")(?:-?\d[\d.eE+-]*|true|false|null))'
    ),
    "keyed": re.compile(r"(?P<label>[A-Za-z_][\w.-]*)=(?P<value>[^\s;,&|\"'<>]+)"),
    "tagged": re.compile(r"<(?P<label>[A-Za-z][\w-]*)>(?P<value>[^<]*)</(?P=label)>"),
    "labelled": re.compile(
        r"^\W*(?P<label>[A-Za-z][\w ()/-]{0,40}?):\s+(?P<value>\S.*)$"
    ),
    "timestamp": re.compile(rf"(?P<label>)(?P<value>{STAMP})"),
    "uuid": re.compile(rf"(?P<label>)(?P<value>{UUID})"),
    "bare": re.compile(r"(?P<label>)(?P<value>[\w.+-]+)"),
}


# Prompts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A text of a prompt, and whose it is."""

    path: str
    role: str
    text: str


@dataclass(frozen=True)
class Unit:
    """A block of the system prompt, a tool, or a message."""

    path: str
    role: str
    raw: Body
    leaves: tuple[
        Leaf, ...
    ]  # what counts: no reasoning, ids, empty parts, cache markers

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Equal where the content is."""
        return (self.role, *(leaf.text for leaf in self.leaves))

    @cached_property
    def text(self) -> str:
        return "\n".join(leaf.text for leaf in self.leaves)

    @cached_property
    def reasoning(self) -> tuple[str, str]:
        """(its text, the field it stands in)."""
        for name in ("reasoning_content", "reasoning"):
            if isinstance(self.raw.get(name), str) and self.raw[name]:
                return self.raw[name], name
        content = self.raw.get("content")
        if isinstance(content, list):
            blocks = [part for part in content if isinstance(part, dict)]
            blocks = [block for block in blocks if is_thinking(block)]
            if blocks:
                thoughts = [str(block.get("thinking") or "") for block in blocks]
                return "\n".join(thoughts), "thinking block"
        if isinstance(content, str):
            match = THOUGHT.match(content)
            if match:
                return match["thought"].strip(), "<think>"
        return "", ""

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
    def units(self) -> tuple[Unit, ...]:
        return self.head + self.messages

    @cached_property
    def starts(self) -> list[int]:
        """Characters before each unit, and of all in the end."""
        lengths = [len(unit.text) for unit in self.units]
        return list(accumulate(lengths, initial=0))

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


def content_leaves(content: object, path: str, role: str) -> Iterator[Leaf]:
    if isinstance(content, str):
        text = THOUGHT.sub("", content) if role == "assistant" else content
        if text:
            yield Leaf(path, role, text)
    elif isinstance(content, list):
        for place, part in enumerate(content):
            yield from part_leaves(part, f"{path}[{place}]", role)


def part_leaves(part: Any, path: str, role: str) -> Iterator[Leaf]:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            yield from content_leaves(text, f"{path}.text", role)
        case {"type": "tool_use", "name": name, "input": given}:
            yield Leaf(f"{path}.input", role, f"{name} {canonical(given)}")
        case {"type": "tool_result"}:
            yield from content_leaves(part.get("content"), f"{path}.content", "tool")
        case {"type": "image" | "image_url" | "document" | "input_audio" as sort}:
            data = canonical(part).encode("utf-8", "replace")
            digest = hashlib.sha256(data).hexdigest()
            yield Leaf(path, role, f"<{sort} {digest[:12]}>")
        case str():
            yield from content_leaves(part, path, role)
        case dict() if not is_thinking(part):
            yield Leaf(path, role, canonical(part))


def call_leaves(message: Body, path: str, role: str) -> Iterator[Leaf]:
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        arguments = canonical(parsed(function.get("arguments")))
        text = f"{function.get('name')} {arguments}"
        yield Leaf(f"{path}.tool_calls[{place}].function.arguments", role, text)


def message_unit(message: Body, path: str) -> Unit:
    role = str(message.get("role"))
    role = "system" if role == "developer" else role
    leaves = list(content_leaves(message.get("content"), f"{path}.content", role))
    leaves += call_leaves(message, path, role)
    return Unit(path, role, message, tuple(leaves))


def system_units(system: Any) -> Iterator[Unit]:
    """Of Anthropic's `system`."""
    if isinstance(system, str) and system:
        leaf = Leaf("system", "system", system)
        yield Unit("system", "system", {"content": system}, (leaf,))
    for place, block in enumerate(system if isinstance(system, list) else ()):
        path = f"system[{place}]"
        leaves = tuple(part_leaves(block, path, "system"))
        if leaves and isinstance(block, dict):
            yield Unit(path, "system", block, leaves)


def tool_units(tools: Any) -> Iterator[Unit]:
    for place, tool in enumerate(tools or ()):
        path = f"tools[{place}]"
        if isinstance(tool, dict):
            yield Unit(path, "tools", tool, tuple(tool_leaves(tool, path)))


def tool_leaves(thing: Any, path: str) -> Iterator[Leaf]:
    """Every string in a tool's description; what is left of it as one text."""
    if isinstance(thing, dict):
        for key in sorted(thing.keys() - {"cache_control"}):
            yield from tool_leaves(thing[key], f"{path}.{key}")
    else:
        yield Leaf(path, "tools", thing if isinstance(thing, str) else canonical(thing))


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
        message_unit(message, f"messages[{place}]")
        for place, message in enumerate(body["messages"])
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


# Replies ------------------------------------------------------------------------------------------


def reply_of(exchange: Exchange) -> Body | None:
    """The assistant message in the recorded response, streamed or whole."""
    response = parsed(exchange.reply) if exchange.reply.startswith("{") else None
    if isinstance(response, dict):
        return whole_reply(response)
    events = list(stream_events(exchange.reply.split("\n")))
    if not events or any("error" in event for event in events):
        return None
    return chat_reply(events) if exchange.api == "chat" else messages_reply(events)


def whole_reply(response: Body) -> Body | None:
    if choices := response.get("choices"):
        return dict(choices[0].get("message") or {}) or None
    content = response.get("content")
    if isinstance(content, list):
        return {"role": "assistant", "content": content}
    return None


def chat_reply(events: Iterable[Body]) -> Body:
    message: Body = {"role": "assistant", "content": None}
    calls: dict[int, Body] = {}
    choices = [choice for event in events for choice in event.get("choices") or ()]
    for delta in (choice.get("delta") or {} for choice in choices):
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls") or ():
            new_call = {"function": {"arguments": ""}}
            call = calls.setdefault(piece.get("index", 0), new_call)
            call["id"] = piece.get("id") or call.get("id")

            function = call["function"]
            function_piece = piece.get("function") or {}
            function["name"] = function_piece.get("name") or function.get("name")
            function["arguments"] += function_piece.get("arguments") or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def messages_reply(events: Iterable[Body]) -> Body:
    blocks: dict[int, Body] = {}
    written: dict[int, str] = {}  # JSON of a call's input
    for event in events:
        index = event.get("index", 0)
        delta = event.get("delta") or {}
        if event.get("type") == "content_block_start":
            blocks[index] = dict(event["content_block"])
        elif event.get("type") == "content_block_delta" and index in blocks:
            for name in delta.keys() & {"text", "thinking", "signature"}:
                blocks[index][name] = (blocks[index].get(name) or "") + delta[name]
            written[index] = written.get(index, "") + delta.get("partial_json", "")
    for index, block in blocks.items():
        if block.get("type") == "tool_use" and written.get(index):
            block["input"] = parsed(written[index])
    return {"role": "assistant", "content": [blocks[index] for index in sorted(blocks)]}


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


def differences(
    a: Sequence[Any], b: Sequence[Any]
) -> Iterator[tuple[bool, range, range]]:
    return (part for part in passages_of(a, b) if not part[0])


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
    def added(self) -> list[int]:
        """Messages of the later prompt that now stand in the past."""
        paired = {j for _, j in self.pairs}
        end = max(paired, default=-1) if self.reply is None else self.reply
        return [j for j in range(end) if j not in paired]

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


# Texts --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of two texts."""

    sort: str  # value, words, block (lines or a wrapped passage that come or go), lines (replaced)
    at: int  # where, in the later text
    before: str
    after: str
    label: str = ""
    regex: str = ""
    lines: tuple[str, str] = ("", "")  # where it stands, before and after


@dataclass(frozen=True, slots=True)
class Value:
    """What changed in a line, widened to something that can be named."""

    start: int
    end: int
    form: str
    label: str
    text: str

    @property
    def kind(self) -> str:
        for kind, pattern in KINDS.items():
            if pattern.fullmatch(self.text):
                return kind
        return "text"

    @property
    def is_nameable(self) -> bool:
        """Not just other words."""
        if self.form in ("bare", "words"):
            return self.kind not in ("word", "text")
        return self.kind != "text" or bool(re.search(r"\d", self.text))


def text_changes(old_text: str, new_text: str) -> Iterator[Change]:
    """Wrapped passages that come or go, then what differs in the lines that are left."""
    removed, added = unpaired_passages(old_text, new_text)
    for passage in removed:
        position = n_shared(old_text[: passage.start()], new_text)
        regex = wrapped_regex(passage)
        yield Change("block", position, passage[0], "", wrapper(passage), regex)
    for passage in added:
        regex = wrapped_regex(passage)
        yield Change("block", passage.start(), "", passage[0], wrapper(passage), regex)

    old_rest = without(old_text, removed)
    new_rest = without(new_text, added)
    for change in line_changes(old_rest, new_rest):
        is_blank = not (change.before + change.after).strip()
        if is_blank and (removed or added):  # where a passage was cut out
            continue
        yield moved(change, added)


def moved(change: Change, cut: Sequence[Passage]) -> Change:
    """The change with `at` counted in the text as it was before passages were cut out."""
    position = change.at
    for passage in cut:
        if passage.start() <= position:
            position += passage.end() - passage.start()
    return replace(change, at=position)


def without(text: str, passages: Sequence[Passage]) -> str:
    for passage in reversed(passages):
        text = text[: passage.start()] + text[passage.end() :]
    return text.rstrip() if passages else text


def wrapper(passage: Passage) -> str:
    return passage["tag"] or passage["angle"] or passage["square"]


def unpaired_passages(
    old_text: str, new_text: str
) -> tuple[list[Passage], list[Passage]]:
    """Wrapped passages that only one of the texts has.

    One that changed inside is in both; one that is the whole text was not attached to it.
    """
    old_passages = attached_passages(old_text)
    new_passages = attached_passages(new_text)
    old_texts = [passage[0] for passage in old_passages]
    new_texts = [passage[0] for passage in new_passages]
    removed = []
    added = []
    for _, old_places, new_places in differences(old_texts, new_texts):
        old_part = [old_passages[i] for i in old_places]
        new_part = [new_passages[j] for j in new_places]
        if list(map(wrapper, old_part)) != list(map(wrapper, new_part)):
            removed += old_part
            added += new_part
    return removed, added


def attached_passages(text: str) -> list[Passage]:
    """Wrapped passages of a text that are not all of it."""
    return [match for match in WRAPPED.finditer(text) if match[0] != text.strip()]


def line_changes(old_text: str, new_text: str) -> Iterator[Change]:
    a = old_text.split("\n")
    b = new_text.split("\n")
    lengths = [len(line) + 1 for line in b]
    starts = list(accumulate(lengths, initial=0))

    def are_like(i: int, j: int) -> bool:
        return are_like_lines(a[i], b[j])

    for _, left, right in differences(a, b):
        pairs = list(matched_gap(left, right, are_like))
        for i, j in pairs:
            yield from value_changes(a[i], b[j], line_start=starts[j])
        yield from run_changes(a, b, gap=(left, right), pairs=pairs)


def are_like_lines(a: str, b: str) -> bool:
    match_a = FORMS["labelled"].match(a)
    match_b = FORMS["labelled"].match(b)
    if match_a and match_b and match_a["label"] == match_b["label"]:
        return True
    return likeness(a, b) >= 0.4


def run_changes(
    a: list[str], b: list[str], *, gap: tuple[range, range], pairs: Pairs
) -> Iterator[Change]:
    """The lines of a gap that have no counterpart, one change for each run of them."""
    left, right = gap
    edges = [(left.start - 1, right.start - 1), *pairs, (left.stop, right.stop)]
    for (i1, j1), (i2, j2) in pairwise(edges):
        if i2 - i1 <= 1 and j2 - j1 <= 1:
            continue
        old_run = "\n".join(a[i1 + 1 : i2])
        new_run = "\n".join(b[j1 + 1 : j2])
        sort = "lines" if old_run and new_run else "block"
        position = len("\n".join(b[: j1 + 1]))
        if j1 >= 0:
            position += 1  # the newline

        heading = heading_above(b, j1 + 1)
        if heading:
            texts = ("\n".join(a), "\n".join(b))
            regex = section_regex(heading)
            yield Change(sort, position, old_run, new_run, heading, regex, texts)
        else:
            label = first_words(new_run or old_run)
            regex = opening_regex([new_run or old_run], "$")
            yield Change(sort, position, old_run, new_run, label, regex)


def heading_above(lines: list[str], place: int) -> str:
    """The nearest line that looks like a heading, in the same paragraph."""
    for line in reversed(lines[max(0, place - NEAR) : place]):
        if not line.strip():
            break
        if re.fullmatch(r"#+ \S.{0,60}|\W*[A-Za-z][\w '/()-]{1,40}:\s*", line):
            return line
    return ""


def value_changes(old_line: str, new_line: str, *, line_start: int) -> Iterator[Change]:
    """What differs in two lines, as values; each value once."""
    seen_spans = set()
    for (i1, i2), (j1, j2) in changed_spans(old_line, new_line):
        old = widened(old_line, i1, i2)
        new = widened(new_line, j1, j2)
        if (new.start, new.end) in seen_spans:
            continue
        seen_spans.add((new.start, new.end))
        yield Change(
            "value" if new.is_nameable else "words",
            line_start + new.start,
            old.text,
            new.text,
            new.label or previous_word(new_line, new.start) or new.kind,
            value_regex(new_line, new),
            (old_line, new_line),
        )


def changed_spans(a: str, b: str) -> Iterator[tuple[Span, Span]]:
    """Pairs of (start, end), in words: no half of an id is left out because it happens to agree."""
    words_a = re.findall(r"\w+|\s+|[^\w\s]", a)
    words_b = re.findall(r"\w+|\s+|[^\w\s]", b)
    starts_a = list(accumulate(map(len, words_a), initial=0))
    starts_b = list(accumulate(map(len, words_b), initial=0))
    for _, left, right in differences(words_a, words_b):
        span_a = (starts_a[left.start], starts_a[left.stop])
        span_b = (starts_b[right.start], starts_b[right.stop])
        yield span_a, span_b


def widened(line: str, start: int, end: int) -> Value:
    """The named value, timestamp, id or word around what changed."""
    for form, pattern in FORMS.items():
        limit = LINE_VALUE_LIMIT if form == "labelled" else VALUE_LIMIT
        for match in pattern.finditer(line):
            left, right = match.span("value")
            if left <= start and end <= right and right - left <= limit:
                return Value(left, right, form, match["label"], match["value"])
    word_start = re.split(r"\s", line[:start])[-1]
    word_end = re.split(r"\s", line[end:])[0]
    left = start - len(word_start)
    right = end + len(word_end)
    return Value(left, right, "words", "", line[left:right])


def previous_word(line: str, start: int) -> str:
    """A name right before a value: `id 5f3` and `(id: 5f3)`, but no prose."""
    pattern = r"([A-Za-z]\w*[_-]\w+|\b[Ii][Dd]|\b[A-Za-z]+(?=[:#]))[\s:#]*$"
    match = re.search(pattern, line[:start])
    return match[1] if match else ""


# Rules --------------------------------------------------------------------------------------------


def literal(text: str) -> str:
    """An expression for this text; words with digits may be others the next time."""
    expression = ""
    for word in re.findall(r"\s+|\S+", text):
        has_digits = re.search(r"\d", word) is not None
        escaped = re.sub(r"([.^$*+?{}\[\]\\|()])", r"\\\1", word)
        expression += r"\S+" if has_digits else escaped
    return expression


def value_regex(line: str, value: Value) -> str:
    """An expression that finds a named value, by its form and label."""
    prefix = line[: value.start]
    label = literal(value.label)
    lead = lead_regex(prefix[: prefix.rfind(value.label)].strip(' "'))
    inner = PATTERNS.get(value.kind, r"[^\s;,|\"'<>]+")
    if value.form == "json":
        is_text = prefix.endswith('"')
        json_value = (
            r'"(?P<value>(?:[^"\\]|\\.)*)' if is_text else r"(?P<value>[^\s,}\]]+)"
        )
        return rf'(?m)^{lead}"{label}"\s*:\s*{json_value}'
    if value.form == "keyed":
        return rf"(?m)^{lead}\b{label}=(?P<value>{inner})"
    if value.form == "tagged":
        return rf"(?m)^.*?<{label}>(?P<value>[^<\n]*)</{label}>"
    if value.form == "labelled":
        return rf"(?m)^{literal(prefix)}(?P<value>.+)$"
    return loose_regex(line, value, inner)


def lead_regex(text: str) -> str:
    """For what stands in a line before a label: its own label, if it has one, then anything."""
    match = re.match(r"\W*[A-Za-z][\w-]*:", text)
    if match:
        return literal(match[0]) + ".*?"
    return ".*?" if text else r"\s*"


def loose_regex(line: str, value: Value, inner: str) -> str:
    """For a value without a name: by what stands before it, from the line's start if it is near."""
    prefix = line[: value.start]
    next_character = line[value.end : value.end + 1]
    end = literal(next_character)
    is_near = len(prefix) <= 40
    lead = literal(prefix) if is_near else ".*?" + literal(prefix[-20:])
    if value.kind == "timestamp" or " " in value.text:
        inner = rf"[^\n{end}]+" if next_character.strip() else r".+?"
    return rf"(?m)^{lead}(?P<value>{inner}){end or '$'}"


def wrapped_regex(passage: Passage) -> str:
    """For a passage between two tags, and the tags."""
    name = wrapper(passage)
    edges = (rf"<{name}(?: [^>\n]*)?>", rf"</{name}>")
    if passage["angle"]:
        edges = (f"<<<BEGIN_{name}>>>", f"<<<END_{name}>>>")
    elif passage["square"]:
        edges = (rf"\[\[{name}_BEGIN\]\]", rf"\[\[{name}_END\]\]")
    starts_line = passage.string[: passage.start()][-1:] in ("", "\n")
    anchor = "^" if starts_line else ""
    return f"(?m){anchor}{edges[0]}(?P<value>[\\s\\S]*?){edges[1]}"


def opening_regex(texts: Sequence[str], end: str) -> str:
    """For passages without tags: what they begin with, if that is anything; `end` is $ or \\Z."""
    smallest, _, _ = min(texts).partition("\n")
    largest, _, _ = max(texts).partition("\n")
    shared = smallest[: n_shared(smallest, largest)]
    shared = re.sub(r"\S*\d.*$", "", shared)[:40]  # what has digits will be another
    if "\n" in texts[0] or len(shared) == 40:
        shared = re.sub(r"\S*$", "", shared) or shared
    if len(shared.strip()) < 4:
        return ""
    anchor, rest = ("^", ".*") if end == "$" else (r"\A", r"[\s\S]*")
    return rf"(?m){anchor}{literal(shared)}(?P<value>{rest}){end}"


def section_regex(heading: str) -> str:
    """For the lines under a heading, up to an empty one."""
    return rf"(?m)^{literal(heading)}\n(?P<value>(?:.+(?:\n|\Z))*)"


def first_words(text: str) -> str:
    return " ".join(re.findall(r"[A-Za-z][\w'-]*", text)[:3])


# Events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """Where in a prompt something changed; line and column are 0 where it is no place in a text."""

    path: str
    role: str
    position: int  # characters of the prompt before it
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One change in one request."""

    sort: str  # telemetry, pinned, transient, edit, shape
    name: str
    change: Change
    spot: Spot
    where: str  # the path, with * for places that move as a conversation grows
    seq: int
    n_prompt: int  # characters

    @property
    def n_following(self) -> int:
        return self.n_prompt - self.spot.position

    @property
    def share(self) -> float:
        return self.n_following / max(1, self.n_prompt)


class Lens:
    """Sees changes as events of one request."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._head = {leaf.path for unit in prompt.head for leaf in unit.leaves}
        self._head |= {unit.path for unit in prompt.head}
        self._starts: dict[str, int] = {}
        position = 0
        for unit in prompt.units:
            self._starts.setdefault(unit.path, position)
            for leaf in unit.leaves:
                self._starts[leaf.path] = position
                position += len(leaf.text)
        self._total = position

    def start_of(self, thing: Unit | Leaf) -> int:
        """`thing` is of this prompt."""
        return self._starts[thing.path]

    def is_head(self, path: str) -> bool:
        return path in self._head

    def event(self, sort: str, change: Change, spot: Spot) -> Event:
        path = spot.path
        if not self.is_head(path):
            path = re.sub(r"(messages|content|tool_calls)\[\d+\]", r"\1[*]", path)
        name = slug(change.label)
        seq = self.prompt.exchange.seq
        return Event(sort, name, change, spot, path, seq, self._total)

    def in_text(self, change: Change, leaf: Leaf) -> Event:
        """A change in a text of this prompt."""
        text_before = leaf.text[: change.at]
        line = text_before.count("\n") + 1
        column = len(text_before) - text_before.rfind("\n")
        position = self.start_of(leaf) + change.at
        spot = Spot(leaf.path, leaf.role, position, line, column)
        return self.event(self.sort_of(change, leaf), change, spot)

    def sort_of(self, change: Change, leaf: Leaf) -> str:
        is_head = self.is_head(leaf.path)
        if change.sort == "block" and is_head:
            return "pinned"
        if change.sort == "block":
            is_ruled_result = leaf.role == "tool" and bool(change.regex)
            is_ours = leaf.role in ("user", "system") or is_ruled_result
            return "transient" if is_ours else "edit"
        if change.sort != "value" and not is_head:
            return "edit"
        line_and_label = f"{change.lines[1][:SHOWN]} {change.label}"
        return "telemetry" if TELEMETRY.search(line_and_label) else "pinned"


def slug(label: str) -> str:
    split = re.sub(r"([a-z])([A-Z])", r"\1_\2", label)
    name = re.sub(r"\W+", "_", split).strip("_").lower()
    return name[:40] or "text"


def step_events(step: Step) -> Iterator[Event]:
    """All that changed in the past of one request."""
    lens = Lens(step.later)
    yield from head_events(step, lens)

    a = step.earlier.messages
    b = step.later.messages
    for i, j in step.pairs:
        yield from unit_events(a[i], b[j], lens)
    for i in step.removed:
        yield gone_event(step, i, lens)
    for j in step.added:
        unit = b[j]
        spot = Spot(unit.path, unit.role, lens.start_of(unit))
        yield lens.event(message_sort(unit), passage_change("", unit.text), spot)
    if step.reply is not None:
        yield from echo_events(step.earlier.exchange, b[step.reply], lens)


def head_events(step: Step, lens: Lens) -> Iterator[Event]:
    a = step.earlier.head
    b = step.later.head
    pairs = matched(a, b)
    for i, j in pairs:
        yield from unit_events(a[i], b[j], lens)

    paired_a = {i for i, _ in pairs}
    paired_b = {j for _, j in pairs}
    for i, unit in enumerate(a):
        if i not in paired_a:
            places_before = [j for earlier, j in pairs if earlier < i]
            position = step.later.starts[max(places_before, default=-1) + 1]
            yield head_unit_event((unit, None), lens, position)
    for j, unit in enumerate(b):
        if j not in paired_b:
            yield head_unit_event((None, unit), lens, step.later.starts[j])


def head_unit_event(
    units: tuple[Unit | None, Unit | None], lens: Lens, position: int
) -> Event:
    """A tool or a block of the system prompt that only one of the prompts has."""
    old_unit, new_unit = units
    unit = old_unit or new_unit
    assert unit, "one of them is there"
    if unit.role == "tools":
        old_name = tool_name(old_unit.raw) if old_unit else ""
        new_name = tool_name(new_unit.raw) if new_unit else ""
        label = "tool removed" if old_unit else "tool added"
        change = Change("block", 0, old_name, new_name, label)
        return lens.event("edit", change, Spot("tools", "tools", position))

    old_text = old_unit.text if old_unit else ""
    new_text = new_unit.text if new_unit else ""
    spot = Spot(unit.path, unit.role, position)
    return lens.event("pinned", passage_change(old_text, new_text), spot)


def gone_event(step: Step, place: int, lens: Lens) -> Event:
    """A message that is no more where it was, or is nowhere."""
    unit = step.earlier.messages[place]
    places_before = [j for i, j in step.pairs if i < place]
    position = step.later.starts[
        len(step.later.head) + max(places_before, default=-1) + 1
    ]
    is_last = place == len(step.earlier.messages) - 1
    spot = Spot("messages[-1]" if is_last else unit.path, unit.role, position)
    return lens.event(message_sort(unit), passage_change(unit.text, ""), spot)


def message_sort(unit: Unit) -> str:
    """Of a message that comes or goes: clients attach reminders, but take no turns away."""
    has_result = any(leaf.role == "tool" for leaf in unit.leaves)
    is_talk = unit.role in ("assistant", "tool") or has_result
    return "edit" if is_talk else "transient"


def passage_change(old_text: str, new_text: str) -> Change:
    """A whole text that is only in one of two prompts."""
    text = (old_text or new_text).strip()
    if passage := WRAPPED.fullmatch(text):
        regex = wrapped_regex(passage)
        return Change("block", 0, old_text, new_text, wrapper(passage), regex)
    match = FORMS["labelled"].match(text.split("\n")[0])
    label = match["label"] if match else first_words(text)
    return Change("block", 0, old_text, new_text, label)


def unit_events(a: Unit, b: Unit, lens: Lens) -> Iterator[Event]:
    """`b` is what became of `a`."""
    if a.raw != b.raw:
        yield from shape_events(a, b, lens)
    texts_a = [leaf.text for leaf in a.leaves]
    texts_b = [leaf.text for leaf in b.leaves]
    for _, left, right in differences(texts_a, texts_b):
        yield from gap_events(a, b, lens, gap=(left, right))


def gap_events(
    a: Unit, b: Unit, lens: Lens, *, gap: tuple[range, range]
) -> Iterator[Event]:
    """Of texts that changed, then of those that went, then of those that came."""
    left, right = gap
    is_only = len(a.leaves) == len(b.leaves) == 1

    def are_like(i: int, j: int) -> bool:
        old_leaf = a.leaves[i]
        new_leaf = b.leaves[j]
        if old_leaf.role != new_leaf.role:
            return False
        return is_only or likeness(old_leaf.text, new_leaf.text) >= 0.5

    pairs = list(matched_gap(left, right, are_like))
    for i, j in pairs:
        for change in text_changes(a.leaves[i].text, b.leaves[j].text):
            yield lens.in_text(change, b.leaves[j])

    n_characters = sum(len(leaf.text) for leaf in b.leaves[: right.start])
    for i in sorted(set(left) - {i for i, _ in pairs}):
        leaf = a.leaves[i]
        change = passage_change(leaf.text, "")
        spot = Spot(leaf.path, leaf.role, lens.start_of(b) + n_characters)
        yield lens.event(lens.sort_of(change, leaf), change, spot)
    for j in sorted(set(right) - {j for _, j in pairs}):
        leaf = b.leaves[j]
        yield lens.in_text(passage_change("", leaf.text), leaf)


def shape_events(a: Unit, b: Unit, lens: Lens) -> Iterator[Event]:
    """The same content written otherwise."""
    old_facts = dict(shape_facts(a))
    new_facts = dict(shape_facts(b))
    for name in sorted(old_facts.keys() | new_facts.keys()):
        old = old_facts.get(name)
        new = new_facts.get(name)
        if old == new or (name == ARGUMENTS and a.key != b.key):
            continue
        label = reasoning_name(old, new) if name == "reasoning" else name
        if isinstance(old, list) and isinstance(new, list):
            old, new = first_different(old, new)
        change = Change("shape", 0, shown(old), shown(new), label)
        spot = Spot(b.path, b.role, lens.start_of(b))
        yield replace(lens.event("shape", change, spot), name=label)


def first_different(old: list[Any], new: list[Any]) -> tuple[Any, Any]:
    """The first two items that differ; the lists, where one is the beginning of the other."""
    for old_item, new_item in zip(old, new, strict=False):
        if old_item != new_item:
            return old_item, new_item
    return old, new


def reasoning_name(old: Any, new: Any) -> str:
    """Both as (text, the field it stands in)."""
    if not old[0] or not new[0]:
        return f"reasoning {'added' if new[0] else 'dropped'}"
    return (
        "reasoning moved" if old[0].strip() == new[0].strip() else "reasoning changed"
    )


def shape_facts(unit: Unit) -> Iterator[tuple[str, Any]]:
    """What may differ without a difference in content."""
    raw = unit.raw
    yield "cache_control", json.dumps(raw).count('"cache_control"')
    if unit.role == "tools":
        return

    content = raw.get("content")
    parts = content if isinstance(content, list) else []
    functions = [call.get("function") or {} for call in raw.get("tool_calls") or ()]
    written = [function.get("arguments") for function in functions]
    result_shapes = set()
    for part in parts:
        match part:
            case {"type": "tool_use"}:
                written.append(json.dumps(part.get("input")))
            case {"type": "tool_result"}:
                result_shapes.add(json_shape(part))

    yield ARGUMENTS, written
    shapes = [json_shape(raw), *sorted(result_shapes)]
    yield "content as string, part list or nothing", shapes
    yield "call ids", list(unit.call_ids)
    yield "role", raw.get("role")
    yield "reasoning", unit.reasoning
    for name in raw.keys() - KNOWN_FIELDS:
        yield f"field {name}", raw[name]


def json_shape(raw: Body) -> str:
    content = raw.get("content")
    if isinstance(content, list):
        return "part list"
    if content:
        return "string"
    return json.dumps(content) if "content" in raw else "absent"


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def echo_events(exchange: Exchange, echo: Unit, lens: Lens) -> Iterator[Event]:
    """What the client made of the reply it got."""
    message = reply_of(exchange)
    if message is None:
        return
    reply = with_known_fields(message_unit(message, echo.path))
    for event in unit_events(reply, with_known_fields(echo), lens):
        sort = "shape" if event.sort == "shape" else "edit"
        yield replace(event, sort=sort, name=f"echo: {event.name}")


def with_known_fields(unit: Unit) -> Unit:
    """The unit without fields that only one client or server has."""
    raw = {name: value for name, value in unit.raw.items() if name in KNOWN_FIELDS}
    return replace(unit, raw=raw)


# Findings -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The same change in several requests."""

    events: list[Event]
    n_compared: int

    @property
    def first(self) -> Event:
        return self.events[0]

    @property
    def n_requests(self) -> int:
        return len({event.seq for event in self.events})

    @cached_property
    def shares(self) -> list[float]:
        """One for each request: of the first such change in it."""
        shares: dict[int, float] = {}
        for event in self.events:
            share = shares.get(event.seq, 0.0)
            shares[event.seq] = max(event.share, share)
        return list(shares.values())

    @cached_property
    def regex(self) -> str | None:
        """The proposal that fits most of the changes; None where nothing is common to them."""
        if self.first.sort in ("edit", "shape"):
            return None
        changes = [event.change for event in self.events]
        counted = Counter(c.regex for c in changes if c.regex)
        if not counted and self.first.change.sort == "block":
            passages = [(c.before or c.after).strip() for c in changes]
            return opening_regex(passages, r"\Z") or None
        hits = {regex: sum(captures(regex, c) for c in changes) for regex in counted}
        best_regex = max(
            hits, key=lambda regex: (hits[regex], counted[regex]), default=""
        )
        return best_regex if hits.get(best_regex) else None

    @property
    def body(self) -> Body:
        first = self.first
        spot = first.spot
        rule = {
            "name": first.name,
            "role": spot.role,
            "class": first.sort,
            "regex": self.regex,
        }
        return {
            "name": first.name,
            "role": spot.role,
            "class": first.sort,
            "path": first.where,
            "n_requests": self.n_requests,
            "n_compared": self.n_compared,
            "share": round(statistics.median(self.shares), 4),
            "most": round(max(self.shares), 4),
            "n_following": sum(event.n_following for event in self.events),
            "rule": rule if self.regex else None,
            "example": {
                "seq": first.seq,
                "path": spot.path,
                "line": spot.line,
                "column": spot.column,
                "before": clipped(first.change.before),
                "after": clipped(first.change.after),
            },
        }


def captures(regex: str, change: Change) -> bool:
    """Whether a rule finds what changed: exactly the value in both lines, or at least the lines."""
    if not any(change.lines):
        return re.search(regex, change.before or change.after) is not None
    for text, value in zip(change.lines, (change.before, change.after), strict=True):
        match = re.search(regex, text)
        if match is None or match["value"] is None:
            return False
        if change.sort in ("value", "words"):
            is_captured = match["value"] == value
        else:
            is_captured = value in match["value"]
        if not is_captured:
            return False
    return True


def clipped(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[:SHOWN]}... ({len(text)} characters)"


def findings(events: Iterable[Event], n_compared: int) -> list[Finding]:
    """What is alike is one finding; what poisons most comes first."""
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in events:
        key = (event.sort, event.name, event.spot.role, event.where)
        groups.setdefault(key, []).append(event)

    def n_poisoned(finding: Finding) -> int:
        return sum(event.n_following for event in finding.events)

    result = [Finding(group, n_compared) for group in groups.values()]
    return sorted(result, key=n_poisoned, reverse=True)


def between_conversations(talks: list[Talk]) -> tuple[list[Event], int]:
    """Values in which system prompts of conversations differ, and how many were compared."""
    firsts = [talk[0] for talk in talks if isinstance(talk[0], Prompt)]
    events = []
    n_compared = 0
    for index, later in enumerate(firsts):
        earlier = last_with_like_head(firsts[:index], later)
        if earlier is None:
            continue
        n_compared += 1
        for event in head_events(Step(earlier, later, [], None), Lens(later)):
            is_value = event.change.sort == "value" and event.sort != "edit"
            if is_value:
                events.append(event)
    return events, n_compared


def last_with_like_head(prompts: list[Prompt], later: Prompt) -> Prompt | None:
    for prompt in reversed(prompts):
        if prompt.exchange.api != later.exchange.api or not prompt.system:
            continue
        if have_like_heads(prompt, later, HEAD_LIKENESS):
            return prompt
    return None


def kept_share(step: Step, rules: Sequence[Rule]) -> float:
    """How much of the earlier prompt the later one begins with, once `rules` have masked both."""
    old_text = masked(step.earlier, rules)
    new_text = masked(step.later, rules)
    return n_shared(old_text, new_text) / max(1, len(old_text))


def masked(prompt: Prompt, rules: Sequence[Rule]) -> str:
    """The prompt without what the rules (role, class, expression) find."""
    texts = []
    for leaf in (leaf for unit in prompt.units for leaf in unit.leaves):
        text = leaf.text
        for role, sort, regex in rules:
            if role == leaf.role:
                text = without_found(text, regex, is_whole=sort == "transient")
        if text:
            texts.append(f"\0{leaf.role}\0{text}")
    return "".join(texts)


def without_found(text: str, regex: str, *, is_whole: bool) -> str:
    group = 0 if is_whole else "value"
    pieces = []
    end = 0
    for match in re.finditer(regex, text):
        pieces.append(text[end : match.start(group)])
        end = match.end(group)
    rest = "".join([*pieces, text[end:]])
    return rest.strip() if is_whole else rest


# Report -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a capture shows."""

    exchanges: list[Exchange]
    talks: list[Talk]
    lists: dict[str, list[Finding]] = field(default_factory=dict)

    @cached_property
    def steps(self) -> list[Step]:
        return [step for talk in self.talks for step in talk if isinstance(step, Step)]

    @cached_property
    def kept(self) -> tuple[float, float] | None:
        """Mean share of the prompt before, as sent and with the rules."""
        if not self.steps:
            return None

        rules = []
        for finding in self.lists["volatile"]:
            if finding.regex:
                role = finding.first.spot.role
                rules.append((role, finding.first.sort, finding.regex))
        share_as_sent = statistics.fmean(kept_share(step, []) for step in self.steps)
        share_with_rules = statistics.fmean(
            kept_share(step, rules) for step in self.steps
        )
        return share_as_sent, share_with_rules

    @property
    def body(self) -> Body:
        kept_shares = None
        if self.kept:
            share_as_sent, share_with_rules = self.kept
            kept_shares = {"as_sent": share_as_sent, "with_rules": share_with_rules}
        body: Body = {
            "n_requests": len(self.exchanges),
            "n_read": sum(len(talk) for talk in self.talks),
            "n_conversations": len(self.talks),
            "n_compared": len(self.steps),
            "kept": kept_shares,
        }
        for name, group in self.lists.items():
            body[name] = [finding.body for finding in group]
        return body


def inspect(exchanges: Iterable[Exchange]) -> Report:
    """Compare the requests of a capture, in the order they came."""
    exchanges = list(exchanges)
    report = Report(exchanges, follow(list(prompts_of(exchanges))))
    n_compared = len(report.steps)
    events = [event for step in report.steps for event in step_events(step)]
    sorts = {"shape": "shape", "edit": "edits"}
    for name in ("volatile", "shape", "edits"):
        chosen = [
            event for event in events if sorts.get(event.sort, "volatile") == name
        ]
        report.lists[name] = findings(chosen, n_compared)
    report.lists["between"] = findings(*between_conversations(report.talks))
    return report


HEADINGS = {
    "volatile": "volatile",
    "between": "differs between conversations with the same system prompt",
    "shape": "shape only, the same content",
    "edits": "other changes of the past, without a rule",
}


def text_of(report: Report) -> Iterator[str]:
    """The lines of the report for people."""
    body = report.body
    yield (
        f"requests: {body['n_requests']}, of conversations: {body['n_read']}, conversations: "
        f"{body['n_conversations']}, compared with the request before: {body['n_compared']}"
    )
    for name, heading in HEADINGS.items():
        yield f"\n{heading}: {len(body[name]) or 'nothing'}"
        for finding in body[name]:
            yield from finding_lines(finding)
    if report.kept:
        sent, ruled = (f"{share:.1%}" for share in report.kept)
        yield f"\nof the prompt before, the next begins with {sent} as sent, {ruled} with the rules"


def finding_lines(finding: Body) -> Iterator[str]:
    example = finding["example"]
    count = f"{finding['n_requests']} of {finding['n_compared']} requests"
    if finding["class"] != "shape":
        count += f", {finding['share']:.1%} of the prompt follows"
    place = finding["path"]
    if example["line"]:
        place += f" line {example['line']} column {example['column']}"

    yield f"  {finding['name']}  {finding['class']}  {count}"
    yield f"      {place}, first in request {example['seq']}"
    yield f"      {example['before']!r} -> {example['after']!r}"
    if finding["rule"]:
        yield f"      {finding['rule']['role']}: {finding['rule']['regex']}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Find volatile fields in captured requests."
    )
    parser.add_argument("capture", type=Path)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        report = inspect(read_capture(args.capture))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    lines = [json.dumps(report.body, indent=1)] if args.json else text_of(report)
    for line in lines:
        print(line.encode("utf-8", "replace").decode("utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
