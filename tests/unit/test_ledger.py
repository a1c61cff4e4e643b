"""LEDGER: what was fed is replayed; what is spliced on is what the template would have said."""

import copy
import json
import random
import re
import sqlite3
import tracemalloc
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import start_llm as s
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import at_night, by_day
from server_fixture import wait_until
from templates import CHATML, call, chat, said, tiny_tokenizer, tokenizer_of, tool
from transformers import PreTrainedTokenizerFast

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS = {
    "demo": SCRIPTS.parent / "models" / "demo" / "chat_template.jinja",
    "planted": SCRIPTS / "tools" / "tiny_model" / "chat_template.jinja",
}
FEW = settings(max_examples=12)
PLENTY = 10**9  # tokens of room

# -- the templates, and where their models stop ------------------------------------------
# Two of these repeat in the newest user message what the head says (as Mistral's do), one numbers
# calls through the conversation (Kimi), one heads the first result of a turn only (Bielik).

ENDS = {
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "qwen3-coder": ["<|im_end|>", "<|endoftext|>"],
    "qwen3.5": ["<|im_end|>", "<|endoftext|>"],
    "glm-4.7-flash": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "gemma-4": ["<turn|>", "<|tool_response>"],
}
TURN = """\
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BENT = {
    "tools-behind": """\
{%- for m in messages %}
{%- if m.role == 'user' and loop.last and tools %}
{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
""",
    "system-behind": """\
{%- for m in messages %}
{%- if m.role == 'user' and loop.last and messages[0].role == 'system' %}
{{- '<|im_start|>again\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
""",
    "numbered": """\
{%- for m in messages %}
{%- set n = messages[:loop.index0] | selectattr('role', 'equalto', 'tool') | list | length %}
{%- if m.role == 'tool' %}{{ '<|im_start|>result ' ~ n ~ '<|im_end|>\\n' }}{% endif %}
""",
    "first-result": """\
{%- for m in messages %}
{%- set turn = (messages[:loop.index0] | map(attribute='role') | join(' ')).split('user')[-1] %}
{%- if m.role == 'tool' and 'tool' not in turn %}{{ '<|im_start|>results<|im_end|>\\n' }}{% endif %}
""",
}
TINY = ["chatml", *OURS, *BENT]
BY_DAY = ["chatml/tiny", "numbered/tiny", "qwen3.5/qwen3", "glm-4.7-flash/tiny"]
OTHERS = [f"{name}/tiny" for name in (*TINY, "qwen3", "qwen3-coder", "gemma-4")]
MODELS = [*dict.fromkeys([*BY_DAY, *OTHERS])]
LARGE = ["qwen3/qwen3", "qwen3-coder/qwen3", "glm-4.7-flash/glm-4", "gemma-4/qwen3"]


@dataclass(frozen=True)
class Spoken:
    """A template, its tokenizer, and the ids at which its model stops."""

    tokenizer: PreTrainedTokenizerFast
    template: s.ChatTemplate
    ends: list[int]
    call_end: int  # where it stops after a call

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))


def template_text(name: str) -> str:
    if name in OURS:
        return OURS[name].read_text("utf-8")
    return CHATML if name == "chatml" else BENT[name] + TURN


def spoken(model: str, chat_template: str = "", **config: Any) -> Spoken:
    name = model.partition("/")[0]
    if name in TINY:
        tokenizer = tiny_tokenizer(chat_template or template_text(name))
    else:
        tokenizer = tokenizer_of(model)
    vocabulary = tokenizer.get_vocab()
    end_texts = ENDS.get(name, ["<|im_end|>"])
    ends = [vocabulary[text] for text in end_texts if text in vocabulary]
    thinking_tags = ("<think>", "</think>")
    if name == "gemma-4":
        thinking_tags = ("<|channel>", "<channel|>")

    template = s.ChatTemplate(
        tokenizer,
        s.Config(**config),
        think_start=thinking_tags[0],
        think_end=thinking_tags[1],
        ends={*ends},
    )
    call_end = ends[1] if name in {"glm-4.7-flash", "gemma-4"} else ends[0]
    return Spoken(tokenizer, template, ends, call_end)


@cache
def shared(model: str) -> Spoken:
    return spoken(model)


@pytest.fixture(params=[*BY_DAY, *map(at_night, MODELS[len(BY_DAY) :])])
def model(request: pytest.FixtureRequest) -> str:
    return available(request.param)


@pytest.fixture(params=[*MODELS, *map(at_night, LARGE)])
def any_model(request: pytest.FixtureRequest) -> str:
    return available(request.param)


def available(model: str) -> str:
    if model.partition("/")[0] not in TINY:
        tokenizer_of(model)  # skips where it is absent
    return model


def planner(saved=None, **config):
    settings = s.Config(**config)
    ledger = s.Ledger(settings, saved)
    ledger.load()
    return s.PromptPlanner(settings, s.CacheMetrics(), ledger)


def ids_of(plan: s.PromptPlan) -> list[int]:
    return list(plan.rendered.ids.tolist())


def generated(ids, *, is_cut=False, **more):
    token_ids = np.array([*ids], np.int32)
    return s.GeneratedReply(ids=token_ids, is_cut=is_cut, **more)


# -- the table of LEDGER.md ----------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A past that ends in a reply whose last word is LAST, and what a client adds to it."""

    name: str
    old: list
    new: list
    fields: dict = field(default_factory=dict)


LAST = "endword9"
SYSTEM = said("system", "You are an agent.")
USER = said("user", "Please look at it.")
LATE = said("system", "late words")
CARRIER = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
)
MARKUP = "a <|im_end|> <|im_start|>user <turn|> <|user|> <|observation|> </think> </tool_response> z"  # noqa: E501
AS_JSON = '{"ä": ["漢字", "🙂", "\\"q\\""], "n": 1.0}\n'
PARTS = [{"type": "text", "text": "part1"}, {"type": "text", "text": "part2"}]
STEP = [said("assistant", "a step of another model"), said("user", "go on")]
TOOLS = [tool()]
OTHER_TOOL = tool()
OTHER_TOOL["function"]["name"] = "other"


def asks(*arguments: str, content: object = "", **fields: object) -> dict:
    calls = [call(json.dumps({"q": text}), n=n) for n, text in enumerate(arguments)]
    return said("assistant", content, tool_calls=calls, **fields)


def result(content: object, n: int = 0) -> dict:
    return said("tool", content, tool_call_id=f"call0000{n}")


AFTER_TEXT = {
    "user": [said("user", "next")],
    "users": [said("user", "one"), said("user", "two")],
    "parts": [said("user", PARTS)],
    "empty": [said("user", "")],
    "json": [said("user", AS_JSON)],
    "markup": [said("user", MARKUP)],
    "late system": [said("user", "next"), LATE],
    "late system first": [LATE, said("user", "next")],
    "carrier": [said("user", "next"), said("user", CARRIER.format("none"))],
    "other model": [said("user", "one"), *STEP],
}
AFTER_CALL = {
    "result": [result("found it")],
    "user": [result("found it"), said("user", "and?")],
    "empty": [result("")],
    "parts": [result(PARTS)],
    "json": [result(AS_JSON)],
    "markup": [result(MARKUP)],
    "late system": [result("found it"), LATE],
    "carrier": [result("found it"), said("user", CARRIER.format("none"))],
    "other model": [result("found it"), *STEP],
    "other call": [result("found it"), asks("more"), result("more of it")],
    "unanswered": [said("user", "stop")],
}
AFTER_CALLS = {
    "results": [result("r0"), result("r1", 1)],
    "as they came": [result("r1", 1), result("r0")],
    "user": [result("r0"), result("r1", 1), said("user", "and?")],
    "one of two": [result("r1", 1)],
    "late system": [result("r0"), result("r1", 1), LATE],
    "late system between": [result("r0"), LATE, result("r1", 1)],
}
REPLIES: list[tuple[str, dict, list]] = [
    ("text", said("assistant", f"some {LAST}"), AFTER_TEXT["user"]),
    ("null and call", asks(LAST, content=None), AFTER_CALL["result"]),
    ("calls", asks("ask0", LAST), AFTER_CALLS["results"]),
    ("text and call", asks(LAST, content="I look."), AFTER_CALL["result"]),
    ("thinking", said("assistant", LAST, reasoning_content="why"), AFTER_TEXT["user"]),
    ("thinking and call", asks(LAST, reasoning_content="why"), AFTER_CALL["result"]),
    ("thinking, call, user", asks(LAST, reasoning_content="why"), AFTER_CALL["user"]),
]
LOOP = [asks("x"), result("r"), said("assistant", "done"), said("user", "more")]
HEADS: list[tuple[str, list, dict]] = [
    ("alone", [USER], {"tools": []}),
    ("no system", [USER], {}),
    ("no tools", [SYSTEM, USER], {"tools": []}),
    ("two tools", [SYSTEM, USER], {"tools": [tool(), OTHER_TOOL]}),
    ("history", [SYSTEM, USER, *LOOP, asks("y", "z"), result("a"), result("b", 1)], {}),
]


def shapes() -> Iterator[Shape]:
    """One tool, mostly; a proof made with one must not be believed where there are two."""
    tables = (AFTER_TEXT, AFTER_CALL, AFTER_CALLS)
    for thinks in (True, False):
        fields = {"tools": TOOLS, "enable_thinking": thinks}
        for (_, last, _), news in zip(REPLIES, tables, strict=False):
            for name, new in news.items():
                yield Shape(f"{name}, {thinks}", [SYSTEM, USER, last], new, fields)

    for head, old, head_fields in HEADS:
        fields = {"tools": TOOLS, **head_fields}
        for name, last, new in REPLIES:
            yield Shape(f"{head}: {name}", [*old, last], new, fields)


@dataclass(frozen=True)
class Conversation:
    """A whole conversation as the template renders it: the truth that splicing must meet."""

    speaker: Spoken
    shape: Shape
    request: s.ChatRequest
    truth: s.RenderedPrompt
    end: int  # position of the token that ends the reply

    n_tokens: int  # to the one that completes LAST

    @classmethod
    def of(cls, speaker: Spoken, shape: Shape) -> "Conversation":
        request = chat([*shape.old, *shape.new], **shape.fields)
        plan = planner().plan(request, speaker.template, room=PLENTY)
        ids = ids_of(plan)
        n_tokens = bisect_left(
            range(len(ids)), True, key=lambda n: LAST in speaker.text(ids[:n])
        )
        end = n_tokens
        while ids[end] not in speaker.ends:
            end += 1
        return cls(speaker, shape, request, plan.rendered, end, n_tokens)

    @cached_property
    def old_plan(self) -> s.PromptPlan:
        """The prompt that the reply answers."""
        request = chat(self.shape.old[:-1], **self.shape.fields)
        return planner().plan(request, self.speaker.template, room=PLENTY)

    def drafted(self, reply_ids, ended):
        """The prompt after a past of exactly these tokens, which end in the reply."""
        maker = planner()
        template = self.speaker.template
        rendered = replace(
            self.old_plan.rendered, ids=np.array(reply_ids[:-1], np.int32)
        )
        [reply] = template.canonicalize(chat([self.shape.old[-1]]).messages)

        maker.ledger.record(
            replace(self.old_plan, rendered=rendered),
            reply=reply,
            generated=generated(reply_ids[-1:], is_cut=ended is None),
            session_id="",
            now=0.0,
        )
        return maker.plan(self.request, template, room=PLENTY)

    def verdict(self, draft: s.PromptPlan) -> str:
        if draft.transcript is None:
            return "fallback"
        return "ok" if ids_of(draft) == self.truth.ids.tolist() else "WRONG"


@pytest.fixture
def conversations(any_model, pytestconfig):
    """By day each shape with a sixth of the templates, at night with all of them."""
    return conversations_of(any_model, 1 if pytestconfig.getoption("--all") else 6)


@cache
def conversations_of(model: str, step: int) -> tuple[Conversation, ...]:
    chosen = [*shapes()][[*MODELS, *LARGE].index(model) % step :: step]
    return tuple(Conversation.of(shared(model), shape) for shape in chosen)


def is_turned_round(model: str, shape: Shape) -> bool:
    """gemma-4 prints a reply's text behind its calls and their results; it was said before."""
    reply = shape.old[-1]
    has_text_and_calls = bool(reply["content"] and reply.get("tool_calls"))
    return "gemma" in model and has_text_and_calls


def test_splicing_says_what_the_template_says(any_model, conversations):
    for conversation in conversations:
        ids = conversation.truth.ids.tolist()[: conversation.end + 1]
        verdict = conversation.verdict(conversation.drafted(ids, ids[-1]))
        is_wrong = is_turned_round(any_model, conversation.shape)
        assert verdict == ("WRONG" if is_wrong else "ok"), conversation.shape.name


def test_a_model_may_stop_at_another_token(any_model, conversations):
    """Qwen's <|endoftext|>, GLM's <|user|> before a result: what the template prints there wins."""
    for conversation in conversations:
        if is_turned_round(any_model, conversation.shape):
            continue
        *ids, end_token = conversation.truth.ids.tolist()[: conversation.end + 1]
        for other_end in {*conversation.speaker.ends} - {end_token}:
            draft = conversation.drafted([*ids, other_end], other_end)
            assert conversation.verdict(draft) == "ok", conversation.shape.name


def test_a_reply_cut_in_its_text_is_replayed_and_one_cut_in_a_call_is_not(
    conversations,
):
    for conversation in conversations:
        ids = conversation.truth.ids.tolist()[: conversation.n_tokens]
        verdict = conversation.verdict(conversation.drafted(ids, None))
        is_call = "tool_calls" in conversation.shape.old[-1]
        assert verdict == ("fallback" if is_call else "ok"), conversation.shape.name


def test_a_reply_that_ended_with_its_call_is_replayed(
    any_model, conversations, pytestconfig
):
    """The end token was never generated, and perhaps not all that comes before it (L-120).

    By day one end in three, and the last.
    """
    step = 1 if pytestconfig.getoption("--all") else 3
    for conversation in conversations:
        name = conversation.shape.name
        is_call = "tool_calls" in conversation.shape.old[-1]
        if not is_call or is_turned_round(any_model, conversation.shape):
            continue
        ids = conversation.truth.ids.tolist()
        text = conversation.speaker.text(ids)
        for end in range(conversation.end, conversation.n_tokens, -step)[::-1]:
            draft = conversation.drafted(ids[:end], None)
            assert draft.transcript is not None, name
            assert (
                ids_of(draft) == ids or conversation.speaker.text(ids_of(draft)) == text
            ), name
        assert conversation.verdict(draft) == "ok", name


def test_positions_are_those_of_the_whole_prompt(any_model, conversations):
    """Checkpoints are taken there. Only of templates and shapes that leave the past as it was."""
    n_compared = 0
    for conversation in conversations:
        plan = conversation.old_plan
        n_same = plan.rendered.positions.turn_starts[-1]
        ids = conversation.truth.ids.tolist()
        if ids_of(plan)[:n_same] != ids[:n_same]:
            continue
        if is_turned_round(any_model, conversation.shape):
            continue

        rendered = conversation.drafted(
            ids[: conversation.end + 1], ids[conversation.end]
        ).rendered
        truth = conversation.truth
        assert replace(rendered, text="", positions=truth.positions) == replace(
            truth, text=""
        ), conversation.shape.name
        # Where the recorded reply begins is one that only replaying knows.
        starts = [{*p.positions.turn_starts} - {n_same} for p in (rendered, truth)]
        assert starts[0] == starts[1], conversation.shape.name
        n_compared += 1

    assert n_compared >= len(conversations) / 5


def test_our_own_words_in_a_message_are_never_misread(model):
    """An agent that edits this server reads them in a file."""
    words = f"zq0q {s._NONCE} zq1q"
    for old, new in (
        (said("assistant", LAST), said("user", words)),
        (asks(LAST), result(words)),
    ):
        shape = Shape(words, [SYSTEM, USER, old], [new])
        conversation = Conversation.of(shared(model), shape)
        ids = conversation.truth.ids.tolist()[: conversation.end + 1]
        draft = conversation.drafted(ids, ids[-1])
        assert ids_of(draft) == conversation.truth.ids.tolist()


# -- a conversation, step by step ---------------------------------------------------------


class Server:
    """A ledger and what a model says: it speaks in tokens of its own, not as a template would."""

    def __init__(self, model: str = "chatml/tiny", **config: Any) -> None:
        self.speaker = spoken(model, **config) if config else shared(model)
        self.config = config
        self.planner = planner(**config)
        self.records: s.RecordFile | None = None
        self.path = Path()
        self.now = 0.0

    def flush(self) -> None:
        assert self.records and self.records.flush(60.0)

    def restart(self, path: Path | None = None) -> None:
        """End, and begin again with what was saved in this file, if there is one."""
        if self.records is not None:
            self.flush()
        self.path = path or self.path
        self.records = s.RecordFile()
        self.records.open(self.path, ttl_seconds=0.0)
        self.planner = planner(self.records.of_tenant(""), **self.config)

    def plan(self, messages, *, room=PLENTY, **fields):
        """The plan of a request that is not accepted."""
        request = chat(messages, **fields)
        return self.planner.plan(request, self.speaker.template, room=room)

    def draft(self, messages, *, room=PLENTY, **fields):
        self.planner.ledger.expire(self.now)
        plan = self.plan(messages, room=room, **fields)
        session_id = chat(messages, **fields).session.session_id or ""
        self.planner.ledger.remember(plan, session_id=session_id, now=self.now)
        return plan

    def say(self, draft, reply, *, words="", session=""):
        """Record a reply; the tokens of prompt and reply."""
        speaker = self.speaker
        [turn] = speaker.template.canonicalize(chat([reply]).messages)
        end = speaker.call_end if "tool_calls" in reply else speaker.ends[0]
        text = words or f"~{json.dumps(reply)}~"
        ids = [*speaker.template.encode(text), end]

        ledger = self.planner.ledger
        place = {"session_id": session or draft.conversation.session, "now": self.now}
        ledger.record(draft, reply=turn, generated=generated(ids), **place)
        context = draft.conversation.contexts[-1]
        ledger.remember_thinking(turn.original, context, **place)
        return [*ids_of(draft), *ids]

    def answer(self, messages, reply, *, words="", session="", **fields):
        """Plan a prompt and record the reply to it; the tokens of both."""
        draft = self.draft(messages, **fields)
        return self.say(draft, reply, words=words, session=session)

    def text(self, draft: s.PromptPlan) -> str:
        return self.speaker.text(ids_of(draft))

    def n_fallbacks(self) -> int:
        return self.planner.metrics.snapshot()["ledger_seam_fallback"]

    def n_bytes(self) -> int:
        return self.planner.ledger.snapshot()["bytes"]


@pytest.fixture
def saving(tmp_path: Path) -> Server:
    """One whose records are saved."""
    server = Server()
    server.restart(tmp_path / "records")
    return server


def transcripts(records: Iterable[Any]) -> list[s.Transcript]:
    return [record for record in records if isinstance(record, s.Transcript)]


def forget_transcripts(server: Server) -> None:
    """Forget them alone: what else is remembered of replies is their thinking."""
    ledger = server.planner.ledger
    for record in transcripts(ledger._by_use):
        ledger._drop(record)


def starts_with(draft: s.PromptPlan, past: Sequence[int]) -> bool:
    """An end token that the template prints otherwise may be missing."""
    n_tokens = len(past) - 1
    is_equal = ids_of(draft)[:n_tokens] == list(past[:n_tokens])
    return draft.n_replayed >= n_tokens and is_equal


FINE = said("assistant", "fine")
NEXT = said("user", "next")
SECOND_REQUEST = [SYSTEM, USER, FINE, NEXT]


def test_generated_tokens_are_replayed_not_rendered_again(model):
    """Over many turns, whatever the model wrote; and the whole history is in each prompt."""
    server = Server(model)
    messages = [SYSTEM, USER]
    past = [0]
    for n in range(5):
        draft = server.draft(messages, tools=TOOLS)
        assert n == 0 or starts_with(draft, past)
        turn = [said("assistant", f"answer{n}"), said("user", f"more{n}")]
        if n % 2:
            turn = [asks(f"ask{n}"), result(f"r{n}")]
        spelling = f"  odd  spelling {n} <|im_start|> "
        past = server.say(draft, turn[0], words=spelling)
        messages = [*messages, *turn]

    assert server.n_fallbacks() == 0


def note(words: str) -> str:
    return f"<system-reminder>\n{words}\n</system-reminder>"


def modes_in(server: Server, draft: s.PromptPlan) -> list[str]:
    return re.findall(r"MODE (\w+)", server.text(draft))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_note_said_again_after_another_is_told_again(is_late):
    """The client keeps all three where they are: the mode that holds is the last (L-84)."""
    server = Server()
    messages = [SYSTEM]
    for n, mode in enumerate(("MODE plan", "MODE edit", "MODE plan")):
        text = f"task {n}" if is_late else f"task {n}\n\n{note(mode)}"
        messages.append(said("user", text))
        if is_late:
            messages.append(said("system", mode))
        draft = server.draft(messages)
        server.say(draft, FINE)
        messages.append(FINE)

    as_sent = Server().draft(messages[:-1])
    assert modes_in(server, draft) == ["plan", "edit", "plan"]
    assert modes_in(server, as_sent) == ["plan", "edit", "plan"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_note_in_force_again_behind_a_kept_one_is_told_again(is_kept):
    """The first has gone from where it was, but the second was told behind it (L-96)."""
    server = Server()
    first = [SYSTEM, said("user", f"task 1\n\n{note('MODE plan')}")]
    server.answer(first, FINE)
    past = [SYSTEM, said("user", "task 1"), FINE]
    edit = f"task 2\n\n{note('MODE edit')}"
    server.answer([*past, said("user", edit)], FINE)
    past += [said("user", edit if is_kept else "task 2"), FINE]
    draft = server.draft([*past, said("user", f"task 3\n\n{note('MODE plan')}")])

    assert draft.transcript
    assert modes_in(server, draft) == ["plan", "edit", "plan"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_text_of_the_user_that_reads_like_a_note_is_in_the_prompt(is_kept):
    """The system says it after every question; then it is the user's question."""
    words = "<system-reminder>a</system-reminder> x"
    server = Server()
    past = [SYSTEM]
    for n, question in enumerate(("first", "second", words, words)):
        late = said("system", words)
        draft = server.draft([*past, said("user", question), late])
        assert n == 0 or draft.transcript
        server.say(draft, FINE)
        past.append(said("user", question))
        if is_kept:
            past.append(late)
        past.append(FINE)

    turns = server.text(draft).split("<|im_start|>user\n")[1:]
    texts = [turn.partition("<|im_end|>")[0] for turn in turns]
    note = f"\n\n{words}" if is_kept else ""
    assert texts == [f"{words}\n\nfirst", f"second{note}", words + note, words + note]


@pytest.mark.parametrize("place", ["system", "developer", "reminder"])
def test_a_note_in_force_again_at_its_own_place_is_told_again(place):
    """CLAUDE.md changed and changed back, where the client's first message shows it (L-98)."""
    server = Server()
    past = []
    for n, mode in enumerate(("plan", "edit", "plan", "plan")):
        first = [said("user", "hello"), said(place, f"MODE {mode}")]
        if place == "reminder":
            first = [said("user", f"{note(f'MODE {mode}')}\n\nhello")]
        task = said("user", f"task {n}")
        draft = server.draft([SYSTEM, *first, FINE, *past, task], user="s")
        server.say(draft, FINE, session="s")
        past += [said("user", f"task {n}"), FINE]

    assert draft.transcript
    assert modes_in(server, draft) == ["plan", "edit", "plan"]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("place", ["system", "developer", "reminder"])
def test_a_note_in_front_of_a_question_costs_no_reply(place, stays):
    """Retrieved text, a memory, a mode: told before the question, and gone with the answer."""
    server = Server()
    past = [SYSTEM, said("user", "hello"), FINE]
    for n in range(4):
        memo = said(place, f"MEMO {n}")
        question = said("user", f"task {n}")
        if place == "reminder":
            memo = said("user", note(f"MEMO {n}"))
        draft = server.draft([*past, memo, question])
        if n > 0:
            n_messages = len(draft.conversation.messages)
            assert draft.transcript
            assert draft.transcript.n_messages == n_messages - 1
        server.say(draft, FINE)
        past += [memo, question, FINE] if stays else [question, FINE]

    told_words = re.findall(r"(?:MEMO|task) \d", server.text(draft))
    assert told_words == [f"{kind} {n}" for n in range(4) for kind in ("MEMO", "task")]


def users_in(server: Server, draft: s.PromptPlan) -> list[str]:
    return re.findall(r"The user is (\w+)", server.text(draft))


def test_of_two_pasts_the_one_with_the_same_pinned_values_is_replayed():
    """Ann and Bob begin with the same words at different times; Bob's past is newer (L-99)."""
    server = Server()
    hello = said("assistant", "Hello! How can I help?")

    def begun(time: str) -> list:
        return [SYSTEM, said("user", f"hi\nCurrent time: {time}")]

    for time in ("08:00", "21:00"):
        draft = server.draft(begun(time))
        server.say(draft, hello, words=f"It is {time}.", session=f"sha1:{time}")
        server.now += 1
    draft = server.draft([*begun("08:00"), hello, said("user", "is it morning?")])
    times = re.findall(r"\d\d:\d\d", server.text(draft))
    assert draft.transcript
    assert times == ["08:00", "08:00"]


def test_results_may_stand_before_the_text_of_their_reply():
    """gemma-4 prints them so (L-200); what is nowhere is lost all the same."""
    messages = [asks("x", content="I look."), result("found it"), said("user", "on")]
    messages[0]["tool_calls"][0]["function"] = {"name": "look", "arguments": {"q": "x"}}
    assert not s._find_losses(messages, "found it I look. look x on")
    assert s._find_losses(messages, "I look. look x on") == ["tool messages"]


def test_new_messages_that_cannot_fit_are_neither_spliced_nor_tokenized():
    """Replies are not counted before they are rendered (L-129)."""
    server = Server()
    server.answer([SYSTEM, USER], FINE)
    foreign_reply = said("assistant", "word " * 5_000)
    request = chat([SYSTEM, USER, FINE, NEXT, foreign_reply, NEXT])
    limited = replace(request, max_prompt_characters=10_000)

    plan = server.planner.plan(limited, server.speaker.template, room=PLENTY)

    assert plan.refusal == "too long"
    assert plan.rendered.n_tokens > 5_000
    assert not plan.rendered.ids.size


def test_a_past_with_another_conversations_notes_is_none_of_ours():
    """Ann and Bob begin with the same words and get the same reply (L-85)."""
    server = Server()
    hello = said("assistant", "Hello! How can I help?")

    def begin(name: str) -> list:
        return [SYSTEM, said("user", "hi"), said("system", f"The user is {name}.")]

    for name in ("Ann", "Bob"):
        server.answer(begin(name), hello, session="sha1:same")
        server.now += 1
    draft = server.draft([*begin("Ann"), hello, said("user", "who am I?")])
    assert users_in(server, draft) == ["Ann"]
    assert draft.transcript


@pytest.mark.parametrize(
    ("first", "second", "is_replayed"),
    [("s1", "s2", False), ("s1", "", False), ("", "s2", False), ("s1", "s1", True)],
)
def test_a_note_of_another_session_is_in_no_prompt(first, second, is_replayed):
    """Bob sends no note at all (L-216). Without any name, nobody can tell them apart."""
    server = Server()
    question = said("user", f"{note('The user is Ann')}\nhi")
    server.answer([SYSTEM, question], FINE, session_id=first)

    past = [SYSTEM, said("user", "hi"), FINE]
    draft = server.draft([*past, said("user", "who am I?")], session_id=second)
    assert ("The user is Ann" in server.text(draft)) == is_replayed
    assert bool(draft.transcript) == is_replayed


@pytest.mark.parametrize(
    ("sent", "is_replayed"),
    [
        (["cd a && ls", "cd b && ls"], True),
        (["ls", "cd b && ls"], True),
        (["cd b && ls", "cd a && ls"], False),
        (["cd c && ls", "cd b && ls"], False),
    ],
)
@pytest.mark.parametrize("is_nested", [True, False])
def test_a_command_in_another_folder_is_another_one(sent, is_nested, is_replayed):
    """Claude Code may leave out the folder, and changes it never (L-216)."""

    def asks_for(commands: list[str]) -> dict:
        if not is_nested:
            return asks(*commands)
        steps = {"steps": [{"command": command} for command in commands]}
        return said("assistant", "", tool_calls=[call(json.dumps(steps), n=0)])

    server = Server()
    past = server.answer([SYSTEM, USER], asks_for(["cd a && ls", "cd b && ls"]))
    draft = server.draft([SYSTEM, USER, asks_for(sent), result("x")])
    assert starts_with(draft, past) == is_replayed
    assert is_replayed or sent[0] in server.text(draft)


@pytest.mark.parametrize("call_id", ["call_1", ""])
def test_a_call_that_was_not_made_here_says_nothing_of_who_asks(call_id):
    """Ann's and Bob's beginnings come from another server, which calls every call the same."""
    server = Server()
    called = asks("ls")
    called["tool_calls"][0]["id"] = call_id
    past = [called, said("tool", "a.txt", tool_call_id=call_id)]

    def messages_of(name: str) -> list:
        question = said("user", f"list\n\n{note(f'The user is {name}.')}")
        return [SYSTEM, question, *past]

    server.answer(messages_of("Ann"), FINE, session="sha1:same")
    draft = server.draft([*messages_of("Bob"), FINE, said("user", "who am I?")])
    assert users_in(server, draft) == ["Bob"]


@pytest.mark.parametrize("session", ["", "shared"])
def test_of_two_pasts_the_one_with_fewer_notes_of_others_is_replayed(session):
    """Two sub-agents with one task and one first reply; the other's is newer (L-96)."""
    server = Server()
    fine = said("assistant", "I will read it.")
    begun = {
        "A": [SYSTEM, said("user", f"Review it.\n\n{note('Sub-agent A.')}")],
        "": [SYSTEM, said("user", "Review it.")],
        "B": [SYSTEM, said("user", f"Review it.\n\n{note('Sub-agent B.')}")],
    }
    for messages in begun.values():
        server.answer(messages, fine, user=session, session=session)
        server.now += 1

    for name, messages in begun.items():
        draft = server.draft([*messages, fine, said("user", "go on")], user=session)
        names = re.findall(r"Sub-agent (\w+)", server.text(draft))
        assert draft.transcript
        assert names == ([name] if name else [])


class Everywhere:
    """As if a guess had been wrong in every world."""

    def __contains__(self, _world: object) -> bool:
        return True


def test_a_guess_counts_if_the_whole_past_says_the_same(model):
    """What is used in the end is what is rendered behind all messages, guessed at or not."""
    server = Server(model)
    sure = Server(model)
    sure.planner.unguessable = Everywhere()
    messages = [SYSTEM, USER]
    n_wrong = 0
    n_guesses = 0
    for n in range(16):
        draft = server.draft(messages, tools=TOOLS)
        while not server.planner.verify(draft):
            n_wrong += 1
            draft = server.draft(messages, tools=TOOLS)
        n_guesses += draft.unverified is not None
        truth = sure.draft(messages, tools=TOOLS)
        assert draft.rendered == truth.rendered
        assert truth.unverified is None
        assert ids_of(draft) == ids_of(truth)

        turn = [asks(f"ask{n}"), result(f"r{n}")]
        if n % 4 == 3:
            turn = [said("assistant", f"answer{n}"), said("user", f"more{n}")]
        server.say(draft, turn[0])
        sure.say(truth, turn[0])
        messages = [*messages, *turn]

    # Once, and then it is guessed at no more.
    assert n_wrong == (model == "numbered/tiny")
    assert (n_guesses > 4) != n_wrong


def test_a_guess_does_not_print_the_tools(monkeypatch):
    """They take longer than all else (L-225); its check prints them, as they are in the prompt."""
    server = Server()
    messages = [SYSTEM, USER]
    for n in range(8):
        server.answer(messages, asks(f"ask{n}"), tools=TOOLS)
        messages = [*messages, asks(f"ask{n}"), result(f"r{n}")]

    printed: list[list[str]] = []
    render = s.Renderer.render

    def note_tools(renderer: Any, *args: Any, tools: Any, **more: Any) -> str:
        printed.append([tool["function"]["name"] for tool in tools])
        return render(renderer, *args, tools=tools, **more)

    monkeypatch.setattr(s.Renderer, "render", note_tools)
    plan = server.draft(messages, tools=TOOLS)
    assert plan.unverified
    assert all("look" not in names for names in printed)
    printed.clear()
    assert server.planner.verify(plan)
    assert printed == [["look"]]


def test_a_retry_is_rendered_behind_the_past_before(model):
    """A full resend has no new message behind its longest past; the same tokens all the same."""
    server = Server(model)
    past = server.answer([SYSTEM, USER], FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    first = server.draft(messages)
    server.say(first, said("assistant", "done"))
    again = server.draft(messages)
    assert again.transcript is first.transcript
    assert starts_with(again, past)
    assert again.rendered == first.rendered
    assert ids_of(again) == ids_of(first)

    interruption = [said("assistant", "do"), said("user", "go on")]
    interrupted = server.draft([*messages, *interruption])
    assert interrupted.transcript is first.transcript


def test_a_request_may_end_in_a_reply(model):
    """To be continued, or by mistake: nothing follows its longest past, so a shorter one serves."""
    server = Server(model)
    past = server.answer([SYSTEM, USER], FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    server.answer(messages, said("assistant", "done"))
    draft = server.draft([*messages, said("assistant", "done")])

    assert starts_with(draft, past)
    assert draft.transcript
    assert draft.transcript.n_messages == 3
    assert server.draft([SYSTEM, USER, FINE]).transcript is None


CUTS = CHATML.replace(
    "m.content }}", "m.content[:20] if m.role == 'user' else m.content }}"
)


def test_what_cannot_be_verified_is_rendered_as_sent():
    """And counted, with its reason for the log."""
    assert CUTS != CHATML
    server = Server()
    server.speaker = spoken("chatml/tiny", CUTS)
    past = server.answer([SYSTEM, USER], FINE)
    assert starts_with(server.draft(SECOND_REQUEST), past)

    words = "a message that is longer than twenty letters"
    messages = [SYSTEM, USER, FINE, said("user", words)]
    draft = server.draft(messages)
    assert draft.transcript is None
    assert draft.refusal == "lost text"
    counts = server.planner.metrics.snapshot()
    assert counts["ledger_seam_fallback"] == 1
    assert counts["exact_key_rejected_by_model_lcp"] == 1
    truth = server.speaker.template.render_prompt(chat(messages))
    assert ids_of(draft) == truth.ids.tolist()


def test_an_end_token_of_a_new_message_does_not_close_the_reply():
    """As gpt-oss: past texts end by another token than replies, calls by one of these."""
    server = Server()
    tokenizer = server.speaker.tokenizer
    template = s.ChatTemplate(
        tokenizer,
        s.Config(),
        think_start="<think>",
        think_end="</think>",
        ends={tokenizer.get_vocab()["</tool_call>"]},
    )
    server.speaker = replace(server.speaker, template=template)
    past = server.answer([SYSTEM, USER], FINE)
    draft = server.draft([SYSTEM, USER, FINE, NEXT, asks("ask"), result("r")])
    assert starts_with(draft, past)


def test_another_world_is_another_past():
    """Tools, system prompt and an edited message; not the order of what a client resends."""
    server = Server()
    messages = [SYSTEM, USER, FINE, NEXT]
    server.answer([SYSTEM, USER], FINE, tools=TOOLS)
    assert server.draft(messages, tools=TOOLS).transcript

    assert not server.draft(messages).transcript
    assert not server.draft(messages, tools=[tool("Sees.")]).transcript

    other_system = [said("system", "You are."), USER, FINE, NEXT]
    other_question = [SYSTEM, NEXT, FINE, NEXT]
    other_reply = [SYSTEM, USER, said("assistant", "fin"), NEXT]
    for edited in (other_system, other_question, other_reply):
        assert not server.draft(edited, tools=TOOLS).transcript


def test_one_key_has_up_to_four_pasts():
    server = Server()
    messages = [SYSTEM, USER, FINE, NEXT]
    pasts = []
    for n in range(6):
        server.now += 1
        draft = server.draft([SYSTEM, USER], user=f"s{n}")
        past = server.say(draft, FINE, words=f"version {n}", session=f"s{n}")
        pasts.append(past)
        assert server.planner.ledger.snapshot()["transcripts"] == min(n + 1, 4)
    for n in range(6):
        draft_of_session = server.draft(messages, user=f"s{n}")
        assert n < 2 or starts_with(draft_of_session, pasts[n])

    server.now += 1
    newest = server.say(draft, FINE, words="newest", session="else")
    assert starts_with(server.draft(messages, user="nobody"), newest)


def test_of_several_alternatives_the_one_used_least_recently_goes():
    server = Server()
    past = server.answer([SYSTEM, USER], FINE, words="own", session="own", user="own")
    for n in range(6):
        server.now += 1
        draft = server.draft([SYSTEM, USER, FINE, NEXT], user="own")
        assert starts_with(draft, past)
        server.now += 1
        server.answer([SYSTEM, USER], FINE, words=f"version {n}", session=f"s{n}")


def test_equal_alternatives_are_one():
    """Whoever says "hi" four times pushes nobody's transcript out."""
    server = Server()
    past = server.answer([SYSTEM, USER], FINE, words="own", session="own", user="own")
    for _ in range(6):
        server.now += 1
        server.answer([SYSTEM, USER], FINE, words="the same")
    assert server.planner.ledger.snapshot()["transcripts"] == 2
    assert starts_with(server.draft([SYSTEM, USER, FINE, NEXT], user="own"), past)


# -- replies that their clients have left -------------------------------------------------

PIECES = ["I have", " looked.", " It is", "\n\n", "four,", " and more"]


def leave(server: Server, draft: s.PromptPlan) -> list[list[int]]:
    """Record a reply of these pieces, each a delta; the tokens up to each of them."""
    encode = server.speaker.template.encode
    pieces = [encode(piece) for piece in PIECES]
    ends, text, ids = [], "", []
    for piece, piece_ids in zip(PIECES, pieces, strict=True):
        text += piece
        ids = [*ids, *piece_ids]
        if piece.strip():  # white space is held back
            ends.append(s.ShownEnd(len(ids), len(text)))
    thought = said("assistant", text, reasoning_content="because of it")
    [reply] = server.speaker.template.canonicalize(chat([thought]).messages)
    record = generated(ids, is_cut=True, shown_text=text, shown_ends=tuple(ends))
    server.planner.ledger.record(
        draft,
        reply=reply,
        generated=record,
        session_id=draft.conversation.session,
        now=server.now,
    )
    return [[*ids_of(draft), *ids[: end.n_tokens]] for end in ends]


def test_a_left_reply_is_replayed_as_far_as_its_client_has_it(model):
    server, asked = Server(model), [SYSTEM, USER]
    pasts = leave(server, server.draft(asked))
    texts = ["I have", "I have looked.", "I have looked. It is"]
    texts += [f"{texts[-1]}\n\nfour,", f"{texts[-1]}\n\nfour, and more"]
    for text, past in zip(texts, pasts, strict=True):
        for thinking in ("", "because of it"):
            echo = said("assistant", text, reasoning_content=thinking)
            draft = server.draft([*asked, echo, NEXT])
            assert draft.n_replayed == len(past)
            assert ids_of(draft)[: len(past)] == past
            later = [*asked, echo, NEXT, FINE, NEXT]
            after = server.say(server.draft([*asked, echo, NEXT]), FINE)
            assert starts_with(server.draft(later), after)
    assert server.n_fallbacks() == 0


@pytest.mark.parametrize(
    "echo",
    [
        said("assistant", "I ha"),
        said("assistant", "I have looked. It is five"),
        said("assistant", "I have looked. It is\n\nfour, and more of it"),
        said("assistant", "I have", reasoning_content="of something else"),
        asks("more", content="I have"),
        said("assistant", ""),
    ],
    ids=str,
)
def test_of_a_left_reply_nothing_is_replayed_to_a_client_with_another_text(echo):
    server, asked = Server(), [SYSTEM, USER]
    leave(server, server.draft(asked))
    news = result("r") if "tool_calls" in echo else NEXT
    assert server.draft([*asked, echo, news]).transcript is None


def test_a_left_reply_to_another_persons_note_is_not_replayed():
    server = Server()
    asked = [SYSTEM, said("user", f"{note('The user is Bob')}\nhello")]
    leave(server, server.draft(asked, user="bob"))
    other = [SYSTEM, said("user", f"{note('The user is Ann')}\nhello")]
    echo = [said("assistant", "I have looked."), NEXT]
    assert server.draft([*other, *echo], user="ann").transcript is None
    assert server.draft([*asked, *echo], user="bob").transcript is not None
    server.planner.ledger.forget("bob")
    assert server.draft([*asked, *echo], user="bob").transcript is None
    assert server.n_bytes() == 0


@pytest.mark.parametrize(("words", "rule"), [("hi", "session_line"), ("", "")])
def test_a_private_value_is_named_only_where_it_alone_withholds_a_reply(words, rule):
    """Without these words the request has a note, too, that the reply's prompt lacks."""

    def asked(agent: str, words: str) -> list[dict]:
        head = said("system", f"You help.\nRuntime: agent={agent} | session=x")
        return [head, said("user", words)]

    server = Server()
    server.answer(asked("bob", "hi"), FINE)
    words = words or f"{note('The user is Ann')}\nhi"
    draft = server.draft([*asked("ann", words), FINE, NEXT])
    assert draft.transcript is None
    ledger = server.planner.ledger
    assert ledger.find_withheld(draft.conversation, n_past=0) == rule


def test_a_left_reply_that_follows_another_reply_is_no_part_of_that():
    """It lies under the key of its prompt, which is that of a whole conversation."""
    server = Server()
    leave(server, server.draft([SYSTEM, USER, FINE]))
    assert not server.draft([SYSTEM, USER, FINE, NEXT]).transcript


# -- thinking ---------------------------------------------------------------------------

THOUGHT = said("assistant", "fine", reasoning_content="because of it")


def test_thinking_that_the_client_dropped_is_replayed(model):
    server = Server(model)
    past = server.answer([SYSTEM, USER], THOUGHT)
    echoes = [
        FINE,
        THOUGHT,
        {**FINE, "reasoning_content": ""},
        said("assistant", "\n\nfine"),
    ]

    for echo in [*echoes, {**FINE, "reasoning": "because of it\n"}]:
        assert starts_with(server.draft([SYSTEM, USER, echo, NEXT]), past)


def test_a_reply_whose_end_was_trimmed_is_replayed(model):
    """As opencode sends it back; its thinking is healed, too (L-92)."""
    server = Server(model)
    reply = said("assistant", "All done. \n\n", reasoning_content="why")
    past = server.answer([SYSTEM, USER], reply)
    echoed = [SYSTEM, USER, said("assistant", "All done."), NEXT]
    assert starts_with(server.draft(echoed), past)

    forget_transcripts(server)
    whole_reply = said("assistant", "All done.", reasoning_content="why")
    cold = Server(model).draft([SYSTEM, USER, whole_reply, NEXT])
    assert ids_of(server.draft(echoed)) == ids_of(cold)


def test_thinking_that_the_client_changed_refuses_the_past(model):
    """What it sends is what the model must see; a past before it may still be replayed."""
    server = Server(model)
    first = server.answer([SYSTEM, USER], FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    server.answer(messages, THOUGHT)
    changed = {**FINE, "reasoning_content": "of something else"}
    draft = server.draft([*messages, changed, said("user", "go on")])
    assert starts_with(draft, first)
    assert draft.transcript
    assert draft.transcript.n_messages == 3

    invented = server.draft([SYSTEM, USER, changed, NEXT])
    assert invented.transcript is None


def test_thinking_is_put_back_into_a_reply_after_the_replayed_past():
    server = Server()
    server.answer([SYSTEM, USER], FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    server.answer(
        messages, said("assistant", "done", reasoning_content="because of it")
    )
    forget_transcripts(server)
    past = server.answer([SYSTEM, USER], FINE)

    draft = server.draft([*messages, said("assistant", "done"), NEXT])
    assert starts_with(draft, past)
    assert "because of it" in server.text(draft)


def test_two_thoughts_under_one_reply_are_told_apart():
    server = Server()
    draft = server.draft([SYSTEM, USER])
    pasts = {}
    for thought in ("one", "two"):
        reply = {**FINE, "reasoning_content": thought}
        pasts[thought] = server.say(draft, reply, words=thought)

    for thought, past in pasts.items():
        echo = {**FINE, "reasoning_content": thought}
        assert starts_with(server.draft([SYSTEM, USER, echo, NEXT]), past)


LONG = "a long thought " * 30


@pytest.mark.parametrize(
    "name", ["qwen3/tiny", "demo/tiny", at_night("glm-4.7-flash/glm-4")]
)
def test_thinking_is_not_preserved_when_so_configured(name):
    """It stays within a tool loop, where templates print it, and is gone at the next user turn."""
    server = Server(name, preserve_thinking=False)
    messages = [SYSTEM, USER]
    thinks = asks("x", reasoning_content="why I look")
    server.answer(messages, thinks, tools=TOOLS, words="why I look")
    messages = [*messages, asks("x"), result("r")]
    draft = server.draft(messages, tools=TOOLS)
    assert draft.transcript
    assert "why I look" in server.text(draft)

    server.say(draft, THOUGHT, words="because of it")
    messages = [*messages, FINE, NEXT]
    turn = server.draft(messages, tools=TOOLS)
    assert turn.transcript is None
    assert turn.refusal
    truth = server.speaker.template.render_prompt(chat(messages, tools=TOOLS))
    assert ids_of(turn) == truth.ids.tolist()
    assert "why" not in server.text(turn)
    assert "because" not in server.text(turn)
    counts = server.planner.metrics.snapshot()
    assert counts["exact_key_rejected_by_model_lcp"] == 0  # it was set, so is no fault


def test_thinking_that_was_put_back_is_in_the_transcript():
    """The prompt has it, so a client that sends it after all may have it replayed."""
    server = Server("demo/tiny")
    server.answer([SYSTEM, USER], THOUGHT)
    forget_transcripts(server)
    past = server.answer(SECOND_REQUEST, said("assistant", "done"))
    assert "because of it" in server.speaker.text(past)

    messages = [SYSTEM, USER, THOUGHT, NEXT, said("assistant", "done"), NEXT]
    assert starts_with(server.draft(messages), past)
    messages[2] = {**THOUGHT, "reasoning_content": "of something else"}
    assert not server.draft(messages).transcript


def test_a_prompt_that_does_not_fit_goes_without_past_thinking():
    """And without nothing else: all that fits is told, notes and current values too."""
    server = Server()
    reply = said("assistant", "fine", reasoning_content=LONG)
    head = [head_with("id-1"), USER]
    server.answer(head, reply, words=LONG)
    loop = asks("x", reasoning_content="of this turn")
    late = [LATE, said("user", CARRIER.format("a job"))]
    step = [said("user", "look"), loop, result("r")]
    messages = [head_with("id-2"), USER, FINE, *step, *late]

    full = server.draft(messages)
    assert LONG in server.text(full)
    assert full.transcript

    bare = server.draft(messages, room=len(full.rendered.ids) - 1)
    assert bare.transcript is None
    assert LONG not in server.text(bare)
    for words in ("id-2", "of this turn", "look", "late words", "a job", "fine"):
        assert words in server.text(bare), words

    tight = server.draft(messages, room=len(bare.rendered.ids))
    assert ids_of(tight) == ids_of(bare)

    past = server.say(bare, said("assistant", "done"))
    again = server.draft([*messages, said("assistant", "done"), NEXT])
    assert starts_with(again, past)


def test_a_prompt_without_past_thinking_begins_as_all_others_do():
    """Its head stays as first rendered, so a new id in it moves nothing (L-38)."""
    server = Server()
    reply = said("assistant", "fine", reasoning_content=LONG)
    server.answer([head_with("id-1"), USER], reply, words=LONG)
    messages = [head_with("id-1"), USER, FINE, NEXT]
    room = server.draft(messages).rendered.n_tokens - 1
    plans = [
        server.draft([head_with(value), USER, FINE, NEXT], room=room)
        for value in ("id-1", "id-2")
    ]

    assert all(LONG not in server.text(plan) for plan in plans)
    texts = [server.text(plan).partition("[message_id")[0].strip() for plan in plans]
    assert texts[0].startswith(texts[1])
    assert restated(server.text(plans[1])) == ["id-2"]


# -- pinned fields and notes -------------------------------------------------------------


def head_with(message_id: str, role: str = "developer") -> dict:
    fenced = f'```json\n{{\n  "message_id": "{message_id}"\n}}\n```'
    return said(role, f"You help.\n{fenced}\nBe brief.")


def restated(text: str) -> list[str]:
    return re.findall(r"\[message_id is now ([\w-]+)\]", text)


def test_a_new_id_in_the_head_moves_nothing(model):
    """The first value stays; each other is told once, in the message that was newest then."""
    if model == "system-behind/tiny":
        pytest.skip("its head stands in the newest message, too")
    server = Server(model)
    past = server.answer([head_with("id-1"), USER], FINE)
    rest = [USER, FINE, NEXT]

    plain = server.draft([head_with("id-1"), *rest])
    assert starts_with(plain, past)
    assert restated(server.text(plain)) == []

    drifted = server.draft([head_with("id-2"), *rest])
    assert starts_with(drifted, past)
    assert restated(server.text(drifted)) == ["id-2"]
    line = "\n\n[message_id is now id-2]"
    assert server.text(drifted) == server.text(plain).replace("next", f"next{line}")

    past = server.say(drifted, said("assistant", "two"))
    rest = [*rest, said("assistant", "two"), said("user", "more")]
    all_values = {"id-2": ["id-2"], "id-1": ["id-2", "id-1"], "id-3": ["id-2", "id-3"]}
    for message_id, values in all_values.items():
        draft = server.draft([head_with(message_id), *rest])
        assert starts_with(draft, past)
        assert restated(server.text(draft)) == values


def test_a_head_is_shared_by_all_who_begin_alike(model):
    server = Server(model)
    first = server.draft([head_with("id-1"), USER])
    second = server.draft([head_with("id-2"), said("user", "Something else.")])

    head_ids = [
        ids_of(draft)[: draft.rendered.positions.head_ends[0]]
        for draft in (first, second)
    ]
    assert head_ids[0] == head_ids[1]
    assert restated(server.text(second)) == ["id-2"]
    assert server.planner.ledger.snapshot()["heads"] == 1


def named(name: str, **fields: Any) -> dict:
    function = {**tool()["function"], "name": name, **fields}
    return {"type": "function", "function": function}


def turned(value: Any) -> Any:
    """The same JSON, the keys of each object backwards."""
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    return value


def test_the_same_tools_in_another_order_move_nothing(model):
    """Nor in another order of their keys: they are told as they were first."""
    server = Server(model)
    tools = [named("look"), named("list"), named("write")]
    past = server.answer([SYSTEM, USER], FINE, tools=tools)
    messages = [SYSTEM, USER, FINE, NEXT]
    first = server.draft(messages, tools=tools)
    assert starts_with(first, past)

    assert json.dumps(turned(tools[0])) != json.dumps(tools[0])
    for order in (*permutations(tools), [turned(tools[0]), *tools[1:]]):
        draft = server.draft(messages, tools=list(order))
        assert ids_of(draft) == ids_of(first)

    fewer = tools[:2]
    repeated = [*tools, tools[0]]
    described = [*tools[:2], named("write", description="Writes.")]
    for changed in (fewer, repeated, described):
        draft = server.draft(messages, tools=changed)
        assert not starts_with(draft, past)
        assert draft.transcript is None
        cold = Server(model).draft(messages, tools=changed)
        assert ids_of(draft) == ids_of(cold)

    server.planner.ledger.forget(None)
    backwards = server.draft(messages, tools=tools[::-1])
    assert ids_of(backwards) != ids_of(first)


def test_who_asks_for_a_summary_without_tools_reads_nothing_again(model):
    """The conversation's tools are told, since it used them; who never called one has none."""
    server = Server(model)
    offered = [named("f"), named("other")]
    first_past = server.answer([SYSTEM, USER], asks("x"), tools=offered)
    history = [SYSTEM, USER, asks("x"), result("r")]
    past = server.answer(history, FINE, tools=offered)

    ask = [*history, FINE, said("user", "sum it up")]
    draft = server.draft(ask, tools=[])
    assert starts_with(draft, past)
    assert ids_of(draft) == ids_of(server.draft(ask, tools=offered))
    assert starts_with(server.draft(history, tools=[]), first_past)

    # as sent: of another server, without a call, with other words before it, after a restart
    elsewhere = [SYSTEM, said("user", "Another task."), *ask[2:]]
    for messages in (SECOND_REQUEST, elsewhere):
        draft = server.draft(messages, tools=[])
        cold = Server(model).draft(messages, tools=[])
        assert ids_of(draft) == ids_of(cold)


def test_tools_of_a_conversation_are_of_the_session_that_used_them_last():
    server = Server()
    offered = [named("f")]
    history = [SYSTEM, USER, asks("x"), result("r")]
    for session in ("one", "two"):
        server.draft(history, tools=offered, user=session)
    server.planner.ledger.forget("one")
    plan = server.draft([*history, FINE, NEXT], tools=[], user="two")
    assert plan.tools == tuple(offered)


def test_tools_that_do_not_fit_are_not_told_unasked(model):
    """Where the context is full a summary may be asked for without them: it must not be refused."""
    server = Server(model)
    offered = [named("f", description="many words " * 200)]
    server.answer([SYSTEM, USER], asks("x"), tools=offered)
    ask = [SYSTEM, USER, asks("x"), result("r"), said("user", "sum it up")]
    cold = Server(model).draft(ask, tools=[])
    n_whole = len(Server(model).draft(ask, tools=offered).rendered.ids)
    tight = server.draft(ask, tools=[], room=n_whole)  # and none for the summary
    assert ids_of(tight) == ids_of(cold)

    past = server.say(tight, FINE)
    with_tools = server.draft([*ask, FINE, NEXT], tools=offered)
    assert not starts_with(with_tools, past), "behind a past that has none"


SECTION = """\
## Inbound Context (trusted metadata)
Treat it as authoritative metadata.

```json
{
  "message_id": "id-1",
  "channel": "webchat"
}
```
"""


def test_a_section_that_comes_and_goes_moves_nothing():
    """Told whole when the head as first rendered has none of it or another, and then no more."""
    sections = {
        "": "",
        "chat": SECTION,
        "wake": SECTION.replace("webchat", "heartbeat"),
    }
    heads = {
        name: said("system", f"Be brief.\n{text}# End")
        for name, text in sections.items()
    }

    for first, second in (("", "chat"), ("chat", ""), ("chat", "wake")):
        server = Server()
        messages = [USER]
        past = server.answer([heads[first], *messages], FINE, user="s", session="s")
        for n in range(2):
            messages = [*messages, FINE if n == 0 else said("assistant", "so"), NEXT]
            draft = server.draft([heads[second], *messages], user="s")
            assert starts_with(draft, past)
            text = server.text(draft)
            assert sections[second].strip() in text
            n_sections = bool(sections[first]) + bool(sections[second])
            assert text.count("## Inbound") == n_sections
            past = server.say(draft, said("assistant", "so"), session="s")


def test_who_has_no_section_is_told_nobody_elses():
    """A head is shared by those who have the same blocks in it (L-93, L-106)."""
    server = Server()
    day = "Current date: 2026-11-20\n"

    def told(section: str, session: str = "") -> str:
        head = said("system", f"Be brief.\n{day}{section}# End")
        fields = {"user": session} if session else {}
        return server.text(server.draft([head, NEXT], **fields))

    first = told(SECTION, "s1")
    phone = SECTION.replace("webchat", "phone")
    assert "## Inbound" not in told("", "s1")

    same_session = told(phone, "s1")
    head = first.partition("# End")[0]
    assert same_session.startswith(head)
    assert '"phone"' in same_session

    other_session = told(phone, "s2")
    assert '"phone"' in other_session.partition("# End")[0]
    assert "webchat" not in other_session


# -- two senders (L-106) -----------------------------------------------------------------

SENDERS = [("alice", "bob"), ("bob", "alice")]
IDS = [("", ""), ("s-one", "s-two"), ("s-one", ""), ("", "s-two")]
PRIVATE = {
    "inbound context": (
        "system",
        SECTION.replace('"channel"', '"sender_id": "SENDER",\n  "channel"'),
    ),
    "session line of the system": ("system", "Runtime: agent=SENDER | host=vm\n"),
    "session line of the user": ("user", "Runtime: agent=SENDER | host=vm\n"),
    "runtime": ("user", "Stats: runtime SENDER\n"),
    "routed": ("user", ""),
}


def begun_by(sender: str, place: str, message_id: str = "id-1") -> list:
    role, text = PRIVATE[place]
    text = text.replace("SENDER", sender).replace("id-1", message_id)
    section = ""
    question = "hello"
    if role == "system":
        section = text
    else:
        question = f"hello\n{text}"
    if place == "routed":
        question = f"[Inter-session message] sourceSession={sender} x\nIt came.\nhello"

    head = f"Be brief.\nCurrent date: 2026-11-20\n{section}# End"
    return [said("system", head), said("user", question)]


def say_to(server: Server, messages: list, sender: str, session: str) -> dict:
    """The same words for everybody, after thinking about who asks."""
    reply = said("assistant", "Hello!", reasoning_content=f"{sender} greets me")
    draft = server.draft(messages, **({"user": session} if session else {}))
    server.say(draft, reply, words=f"{sender} greets me", session=session or "sha1:x")
    server.now += 1
    return said("assistant", "Hello!")


@pytest.mark.covering(2)
@pytest.mark.parametrize("place", PRIVATE)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("senders", SENDERS)
def test_nothing_of_one_sender_is_in_the_prompt_of_another(place, ids, senders):
    """Neither head nor transcript nor thinking: as if the first had never been here."""
    first, second = senders
    first_id, second_id = ids
    server = Server()
    hello = say_to(server, begun_by(first, place), first, first_id)
    fields = {"user": second_id} if second_id else {}

    begun = begun_by(second, place)
    for messages in (begun, [*begun, hello, NEXT]):
        draft = server.draft(messages, **fields)
        cold = Server().draft(messages)
        assert draft.transcript is None
        assert first not in server.text(draft)
        assert second in server.text(draft)
        assert ids_of(draft) == ids_of(cold)


def test_the_name_of_an_anonymous_session_is_no_session_id():
    """The status page shows it, so anybody may send it."""
    server = Server()
    hello = say_to(server, begun_by("alice", "inbound context"), "alice", "")
    messages = [*begun_by("bob", "inbound context"), hello, NEXT]
    draft = server.draft(messages, user="sha1:x")
    assert draft.transcript is None
    assert "alice" not in server.text(draft)


# The call of the transcript stands between two notes and two private values.
BEFORE_CALL = ["a note", "a value"]
ALL = [*BEFORE_CALL, "a later note", "a later value"]
WHOSE = [
    # session of the request, ids are those generated, what it has otherwise, may replay
    ("own", False, ALL, True),
    ("other", True, ["a note"], True),
    ("other", True, ["a later note"], False),
    ("other", False, ["a note"], False),
    ("other", True, ["a value"], False),
    (None, True, BEFORE_CALL, True),
    (None, True, ["a later note"], False),
    (None, True, ["a later value"], False),
    (None, True, ["the head"], False),
    (None, False, ["a note"], False),
    (None, False, ["a value"], False),
    (None, False, [], True),
    ("other", False, [], True),
    ("own", True, ["the thinking"], False),
]


@pytest.mark.parametrize(("session", "has_id", "changes", "may_replay"), WHOSE)
def test_whose_transcript_may_be_replayed(session, has_id, changes, may_replay):
    """The table of LEDGER, part 4; the id of the last call stands for a session (L-103)."""
    server = Server()

    def messages_with(call_id: str, changes: list[str]) -> list:
        def one_or_other(name: str) -> str:
            return f"{name} {'of another' if name in changes else 'as it was'}"

        head = f"Be brief.\nRuntime: agent={one_or_other('the head')} | host=vm\n"
        called = asks("ls", reasoning_content="")
        called["tool_calls"][0]["id"] = call_id
        if "the thinking" in changes:
            called["reasoning_content"] = "I think otherwise"
        texts = [
            f"hello\n{note(one_or_other(name))}\nStats: runtime {one_or_other(value)}\n"
            for name, value in (("a note", "a value"), ALL[2:])
        ]
        return [
            *(said("system", head), said("user", texts[0]), called),
            *(said("tool", "r", tool_call_id=call_id), said("user", texts[1])),
        ]

    messages = messages_with("5e1e438e4", [])
    called = {**messages[2], "reasoning_content": "I think"}
    server.answer(messages[:2], called, user="own", session="own")
    draft = server.draft(messages, user="own")
    assert draft.transcript
    server.say(draft, FINE, session="own")
    key = server.draft([*messages, FINE], user="own").conversation.prefix_keys[6]

    sent = messages_with("5e1e438e4" if has_id else "another", changes)
    fields = {"user": session} if session else {}
    draft = server.draft([*sent, FINE, NEXT], **fields)
    assert draft.conversation.prefix_keys[6] == key
    n_messages = draft.transcript.n_messages if draft.transcript else 0
    assert (n_messages == 6) == may_replay


def test_a_value_that_changes_inside_a_session_moves_nothing():
    """A group: the session is the chat. And after a restart of the conversation, too."""
    server = Server()
    fields = {"user": "group"}
    hello = say_to(server, begun_by("alice", "inbound context"), "alice", "group")
    begun = begun_by("bob", "inbound context")

    draft = server.draft([*begun, hello, NEXT], **fields)
    text = server.text(draft)
    assert draft.transcript
    assert text.index('"alice"') < text.index('"bob"')

    anew = server.draft([begun[0], said("user", "another task")], **fields)
    head = server.text(anew).partition("another task")[0]
    assert '"alice"' in head
    assert '"bob"' not in head
    assert '"bob"' in server.text(anew)


def test_tools_of_one_sender_are_not_shown_to_another():
    """Who asks for a summary without tools is shown those of his conversation (L-91)."""
    server = Server()
    called = asks("ls")
    begun = {name: begun_by(name, "inbound context") for name in ("alice", "bob")}
    tools = [named("look", description="the secret of alice")]
    server.answer(begun["alice"], called, tools=tools, session="sha1:x")
    tail = [called, result("a.txt"), NEXT]
    server.draft([*begun["alice"], *tail[:2]], tools=tools)

    for name, is_shown in (("alice", True), ("bob", False)):
        text = server.text(server.draft([*begun[name], *tail], tools=[]))
        assert ("the secret of alice" in text) is is_shown


def test_a_head_of_a_forgotten_session_is_for_who_had_it_alone():
    server = Server()
    for name in "ab":
        draft = server.draft([head_with(f"id-{name}"), USER], user=name)
    del draft
    server.planner.ledger.forget("a")

    kept = server.draft([head_with("id-b"), USER], user="b")
    assert restated(server.text(kept)) == ["id-b"]
    new = server.draft([head_with("id-c"), USER], user="c")
    assert restated(server.text(new)) == [] and "id-a" not in server.text(new)


def started(server: Server, n: int, *, size: int = 0, **fields: Any) -> Any:
    """The plan of a request with a head and tools of its own."""
    head = head_with(f"id-{n}")
    head["content"] += f"{n}" + "x" * size
    return server.plan([head, USER], tools=[named(f"tool{n}")], **fields)


def test_a_request_that_is_not_accepted_leaves_nothing():
    server = Server()
    ledger = server.planner.ledger
    plan = started(server, 1, user="group")
    assert ledger.snapshot() == EMPTY
    assert {*map(type, ledger._planned.values())} == {s.RenderedHead, s.RenderedTools}

    del plan
    assert not ledger._planned


def test_what_prompts_begin_with_is_counted_and_bounded():
    """By use, over heads, tools and transcripts together."""
    server = Server(ledger_max_bytes=60_000)
    ledger = server.planner.ledger
    for n in range(20):
        plan = started(server, n, size=10_000)
        ledger.remember(plan, session_id="", now=float(n))
        assert ledger.nbytes == counted(ledger) <= 60_000

    shown = ledger.snapshot()
    held = [*ledger._by_use]
    assert s.memory_bytes(*held) < 1.2 * shown["bytes"]
    assert 3 < shown["heads"] < 20 and 3 < shown["tools"] < 20


def carried(server: Server, job: str, messages: list) -> s.PromptPlan:
    return server.draft([*messages, said("user", CARRIER.format(job))])


def test_a_note_is_repeated_only_when_it_changed(model):
    """The carrier ends every request and is gone from the next one (OpenClaw 2026.9.6)."""
    server = Server(model)
    messages = [SYSTEM, USER]
    counts = []
    past = [0]
    for n, job in enumerate(["none", "none", "job 1", "job 1", "none"]):
        draft = carried(server, job, messages)
        assert n == 0 or starts_with(draft, past)
        jobs = re.findall(r"INTERNAL_CONTEXT>>>\n(.*)\n", server.text(draft))
        counts.append(len(jobs))
        past = server.say(draft, said("assistant", f"a{n}"))
        messages = [*messages, said("assistant", f"a{n}"), said("user", f"u{n}")]

    assert counts == [1, 1, 2, 2, 3]
    assert jobs == ["none", "job 1", "none"]
    assert server.n_fallbacks() == 0


@pytest.mark.parametrize("words", ["hello", "hello\n", "\nhello", "\n\nhello\n"])
def test_a_reminder_that_moves_along_is_told_once(words):
    """`opencode run` ends a piped text in a line break, which the block has for its own (L-92)."""
    block = "<system-reminder>\nplan mode\n</system-reminder>"
    server = Server()
    texts = [{"type": "text", "text": text} for text in (words, block)]
    past = server.answer([SYSTEM, said("user", texts)], FINE, user="s", session="s")
    next_with_block = said("user", f"next\n\n{block}")
    draft = server.draft([SYSTEM, said("user", words), FINE, next_with_block], user="s")
    assert starts_with(draft, past)
    assert server.text(draft).count("plan mode") == 1

    draft = server.draft([SYSTEM, said("user", "hello"), FINE, NEXT], user="s")
    assert starts_with(draft, past)

    changed = block.replace("plan", "build")
    hello = said("user", f"hello\n\n{changed}")
    draft = server.draft([SYSTEM, hello, FINE, NEXT], user="s")
    assert starts_with(draft, past)
    assert f"next\n\n{changed}" in server.text(draft)


# -- switches ---------------------------------------------------------------------------

STYLED = {
    "tail": CHATML + "{{ reasoning_effort if add_generation_prompt }}",
    "head": "<|im_start|>{{ reasoning_effort }}<|im_end|>" + CHATML,
    "calls": CHATML.replace(
        "c.function.name", "c.function.name + (reasoning_effort or '')"
    ),
}


@pytest.mark.parametrize("place", STYLED)
def test_a_switch_of_the_tail_or_the_head_keeps_the_past(place):
    """One that changes what stands between them does not: that would be another prompt."""
    server = Server()
    server.speaker = spoken("chatml/tiny", STYLED[place])
    loop = [asks("x"), result("r")]
    messages = [SYSTEM, USER, *loop]
    first = server.draft(messages, tools=TOOLS, user="s", reasoning_effort="low")
    past = server.say(first, FINE)
    messages = [*messages, FINE, NEXT]

    for effort in ("low", "high"):
        draft = server.draft(messages, tools=TOOLS, user="s", reasoning_effort=effort)
        is_same = effort == "low" or place != "calls"
        assert starts_with(draft, past) if is_same else draft.transcript is None
        assert server.text(draft).count(effort) >= 1


@pytest.mark.parametrize(
    ("model", "statement"),
    [("qwen3/tiny", ""), ("gemma-4/tiny", "[thinking is now off]")],
)
def test_thinking_may_be_switched_in_mid_session(model, statement):
    """Qwen3 prints the switch in the generation prompt, gemma-4 in the head (L-190)."""
    server = Server(model)
    past = server.answer([SYSTEM, USER], FINE, user="s", enable_thinking=True)
    draft = server.draft(SECOND_REQUEST, user="s", enable_thinking=False)
    assert starts_with(draft, past)
    assert statement in server.text(draft)
    assert statement or "is now" not in server.text(draft)


HEAD_EFFORTS = {"qwen3.8": ("low", "high", "xhigh"), "gpt-oss": ("low", "max", "high")}


EFFORT_MODELS = ["qwen3.8/tiny", "gpt-oss/tiny", at_night("qwen3.8/qwen3.5")]


@pytest.mark.parametrize("model", EFFORT_MODELS)
def test_an_effort_that_stands_at_the_head_may_change_in_mid_session(model):
    """What was rendered stays, the newest message states the new one, once (L-190)."""
    first, asked, taken = HEAD_EFFORTS[model.partition("/")[0]]
    server = Server(model)
    statement = f"[reasoning_effort is now {taken}]"
    past = server.answer([SYSTEM, USER], FINE, user="s", reasoning_effort=first)
    second = server.draft(SECOND_REQUEST, user="s", reasoning_effort=asked)
    assert starts_with(second, past)
    assert server.text(second).count(statement) == 1

    past = server.say(second, FINE)
    third_request = [*SECOND_REQUEST, FINE, NEXT]
    third = server.draft(third_request, user="s", reasoning_effort=asked)
    assert starts_with(third, past)
    assert server.text(third).count(statement) == 1  # as the model has read it

    past = server.say(third, FINE)
    fourth = server.draft(
        [*third_request, FINE, NEXT], user="s", reasoning_effort=first
    )
    assert starts_with(fourth, past)
    assert f"[reasoning_effort is now {first}]" in server.text(fourth)


@pytest.mark.parametrize("model", EFFORT_MODELS)
def test_other_sessions_are_rendered_with_the_effort_that_they_ask_for(model):
    first, asked, _ = HEAD_EFFORTS[model.partition("/")[0]]
    server = Server(model)
    server.answer([SYSTEM, USER], FINE, user="s", reasoning_effort=first)
    for other in ({"user": "t"}, {}):
        draft = server.draft(SECOND_REQUEST, reasoning_effort=asked, **other)
        assert draft.transcript is None
        assert "is now" not in server.text(draft)
    same = server.draft(SECOND_REQUEST, user="t", reasoning_effort=first)
    assert same.transcript is not None


# -- what is forgotten --------------------------------------------------------------------


def fill(server: Server, n: int, *, turns: int = 3) -> list:
    """A conversation of its own, recorded turn by turn; its messages."""
    messages = [SYSTEM, said("user", f"conversation {n}")]
    for turn in range(turns):
        server.now += 1
        reply = said("assistant", f"answer {turn}")
        server.answer(messages, reply)
        messages = [*messages, reply, said("user", f"more {turn}")]
    return messages


def counted(book: s.Ledger) -> int:
    found = book._by_use
    held = chain.from_iterable(record.lineage() for record in found)
    return sum(record.nbytes for record in {*held})


def test_ledger_counts_as_many_bytes_as_its_records_take():
    ledger = s.Ledger(s.Config())
    tracemalloc.start()
    for n in range(2_000):
        reply = said("assistant", f"{n}", reasoning_content=f"because {n}")
        context = s.ReplyContext(b"all %d" % n, b"last %d" % n)
        ledger.remember_thinking(reply, context, session_id="", now=0.0)
    n_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert ledger.nbytes == pytest.approx(n_bytes, rel=0.15)


def test_the_ledger_is_bounded_and_forgets_what_was_used_least_recently():
    server = Server(ledger_max_bytes=40_000)
    conversations = [fill(server, 0)]
    for n in range(1, 40):
        conversations.append(fill(server, n))
        assert server.draft(conversations[0]).transcript  # keeps it in use
        shown = server.planner.ledger.snapshot()
        assert shown["bytes"] == counted(server.planner.ledger) <= 40_000

    assert server.draft(conversations[-1]).transcript
    assert not server.draft(conversations[1]).transcript
    assert 10 < shown["transcripts"] < 40


def test_what_transcripts_share_counts_until_the_last_of_them_is_gone():
    """Each question is shared by what goes on from it, which outlives its first record."""
    server = Server()
    base = [SYSTEM, said("user", "a long question " * 1_000)]
    for n in range(12):
        server.now += 1
        server.answer(base, FINE, words=f"version {n}")
        draft = server.draft([*base, FINE, said("user", f"go on {n}")])
        server.say(draft, said("assistant", f"done {n}"))

    found = transcripts(server.planner.ledger._by_use)
    held = {*chain.from_iterable(record.transcripts() for record in found)}
    assert len(held) > len(found) == 4 + 12
    assert sum(record.prompt_ids.nbytes for record in held) < server.n_bytes()
    server.planner.ledger.forget("")
    assert server.n_bytes() == 0


def test_what_is_too_large_leaves_what_has_its_key():
    server = Server(ledger_max_bytes=40_000)
    ledger = server.planner.ledger
    messages = [SYSTEM, said("user", "Hi")]
    n_kept = ledger.MAX_ALTERNATIVES
    for n in range(n_kept):
        server.answer(messages, FINE, words=f"~{n}~")
    server.answer(messages, FINE, words="~long~" * 10_000)
    assert ledger.snapshot()["transcripts"] == n_kept

    [context] = server.draft(messages).conversation.contexts[-1:]
    for thinking in ("short", "long " * 10_000):
        reply = {**FINE, "reasoning_content": thinking}
        ledger.remember_thinking(reply, context, session_id="", now=server.now)
    assert ledger.find_thinking(FINE, context) == "short"


def test_a_conversation_that_is_too_large_leaves_the_others():
    """Each of its records is small, but is held with all that it continues."""
    question = said("user", "a long question " * 1_000)
    server = Server()
    server.answer([SYSTEM, question], FINE)
    n_bytes = server.n_bytes()  # a turn

    server = Server(ledger_max_bytes=5 * n_bytes // 2)
    others = fill(server, 0)
    messages = [SYSTEM]
    for n in range(4):
        messages += [{**question, "content": f"{question['content']} {n}"}]
        server.answer(messages, FINE)
        messages.append(FINE)
        assert server.draft(others).transcript
    assert server.planner.ledger.snapshot()["transcripts"] == 3 + 2


@pytest.mark.parametrize("is_restarted", [False, True])
def test_no_past_is_forgotten_before_those_that_go_on_from_it(saving, is_restarted):
    for n in range(3):
        fill(saving, n, turns=3 + n)
    if is_restarted:
        saving.restart()
    ledger = saving.planner.ledger
    assert ledger.snapshot()["transcripts"] == 12
    while ledger._by_use:
        found = {*ledger._by_use}
        assert all(found.issuperset(record.lineage()) for record in found)
        ledger.drop_oldest()


EMPTY = {"transcripts": 0, "heads": 0, "tools": 0, "healing": 0, "bytes": 0}


def test_a_past_expires_unless_it_is_used():
    server = Server(ledger_ttl_seconds=100.0)
    messages = fill(server, 1)
    for _ in range(3):
        server.now += 90
        assert server.draft(messages).transcript
    server.now += 101

    assert not server.draft(messages).transcript
    assert server.planner.ledger.snapshot() == EMPTY


def test_each_transcript_under_a_key_expires_by_its_own_use():
    server = Server(ledger_ttl_seconds=100.0)
    for name in ("ann", "bob"):
        server.answer([SYSTEM, USER], FINE, words=f"for {name}", user=name)
        server.now += 90
    server.planner.ledger.expire(150.0)
    assert server.planner.ledger.snapshot()["transcripts"] == 1
    draft = server.draft(SECOND_REQUEST, user="ann")
    assert "for bob" in server.text(draft)


def test_what_is_found_for_a_request_that_is_refused_stays_as_old_as_it_was():
    server = Server(ledger_ttl_seconds=100.0)
    ledger = server.planner.ledger
    conversations = [fill(server, n) for n in range(2)]
    for n in range(2):
        ledger.remember(started(server, n), session_id="", now=server.now)
    order = [*ledger._by_use]

    started(server, 0)
    server.plan(conversations[0])

    assert [*ledger._by_use] == order
    ledger.expire(server.now + 101)
    assert ledger.snapshot() == EMPTY


# -- all of it at once --------------------------------------------------------------------


class Client:
    """An agent with the habits of CLIENTS.md, each by chance; checks every prompt it causes."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.chance = random.Random(seed)
        self.habit = {
            name: self.chance.random() < 0.5 for name in ("id", "carrier", "blank")
        }
        self.echoes = self.chance.choice(["all", "none", "blank"])
        self.history: list = []
        self.past: list[int] = []
        self.n_words = 0

    def word(self) -> str:
        self.n_words += 1
        return f"w{self.seed}n{self.n_words}z"

    def one_in(self, n: int) -> bool:
        return self.chance.randrange(n) == 0

    def news(self) -> list:
        """What the client adds: results, or a question; and what hangs on to either."""
        new = []
        calls = self.history[-1].get("tool_calls", ()) if self.history else ()
        for tool_call in calls:
            text = f"r {self.word()}"
            new.append(said("tool", text, tool_call_id=tool_call["id"]))
        if not new or self.one_in(5):
            new.append(said("user", self.question()))
        if self.one_in(4):
            note_text = self.chance.choice(["9 left", f"late {self.word()}"])
            new.append(said("system", note_text))

        return new

    def question(self) -> str:
        text = f"ask {self.word()}"
        if self.one_in(2):
            text = f"[Fri 2026-11-20 14:1{self.chance.randrange(3)} UTC] {text}"
        if self.one_in(3):
            text += f"\n{note(f'mode {self.chance.choice("ab")}')}\n"
        return text

    def request(self, new: list) -> list:
        number = self.chance.randrange(3) if self.habit["id"] else 0
        messages = [head_with(f"id-{number}"), *self.history, *new]
        if self.habit["carrier"]:
            job = self.chance.choice(["none", "job 1"])
            messages.append(said("user", CARRIER.format(job)))
        return messages

    def reply(self) -> dict:
        reply = said("assistant", f"so {self.word()}")
        if self.one_in(2):
            arguments = [f"{self.word()} é漢", self.word()]
            reply = asks(*arguments[: 1 + self.one_in(3)])
        if self.one_in(2):
            reply["reasoning_content"] = f"I think {self.word()}"
        return reply

    def turn(self) -> None:
        new = self.news()
        for _ in range(1 + self.one_in(4)):  # sent again, with other values
            messages = self.request(new)
            messages_before = copy.deepcopy(messages)
            draft = self.server.draft(messages, tools=TOOLS)
            assert messages == messages_before
            self.check(messages, draft)

        reply = self.reply()
        self.past = self.server.say(draft, reply, session=str(self.seed))
        echo = dict(reply)
        if "reasoning_content" in reply and self.echoes == "none":
            del echo["reasoning_content"]
        if "reasoning_content" in reply and self.echoes == "blank":
            echo["reasoning_content"] = "\n"
        self.history = [*self.history, *new, echo]

    def check(self, messages: list, draft: s.PromptPlan) -> None:
        """Nothing is prefilled twice, nothing the client says is missing, the last id is right."""
        text = self.server.text(draft)
        assert not draft.refusal
        assert starts_with(draft, self.past or [0])

        turns = self.server.speaker.template.canonicalize(chat(messages).messages)
        for turn in turns:
            words = turn.original["content"] if turn.role != "assistant" else ""
            start = 0
            fields = [*turn.pinned, *turn.inline_notes]
            for volatile_field in sorted(fields, key=lambda field: field.start):
                assert words[start : volatile_field.start].strip() in text
                start = volatile_field.end
            assert words[start:].strip() in text
            assert all(pinned.value in text for pinned in turn.pinned)
            assert all(note.text in text for note in turn.notes)

        value = turns[0].pinned[0].value
        assert re.findall(r'message_id(?:": "| is now )(id-\d)', text)[-1] == value


@given(seed=st.integers(0, 10**6))
@FEW
def test_whatever_a_client_does_nothing_is_lost_and_nothing_fed_twice(
    model_of_sessions, seed
):
    client = Client(Server(model_of_sessions), seed)
    for _ in range(5):
        client.turn()


@pytest.fixture(
    scope="module", params=["chatml/tiny", "qwen3.5/qwen3", "glm-4.7-flash/tiny"]
)
def model_of_sessions(request: pytest.FixtureRequest) -> str:
    return available(request.param)


@pytest.mark.parametrize("seed", by_day(1, of=12))
def test_ledger_is_the_same_after_a_restart_between_any_two_turns(
    model_of_sessions, seed, tmp_path, monkeypatch
):
    """What the client above checks holds: its thinking, notes, values and tokens survive."""
    monkeypatch.setattr(s, "_SAVE_DELAY_SECONDS", 0.001)
    server = Server(model_of_sessions)
    clients = [Client(server, seed), Client(server, seed + 100)]
    for _ in range(4):
        for client in clients:
            server.restart(tmp_path / "records")
            client.turn()

    before = server.planner.ledger.snapshot()
    server.restart(tmp_path / "records")
    after = server.planner.ledger.snapshot()
    assert after["bytes"] == counted(server.planner.ledger)
    assert after == {**before, "bytes": after["bytes"]}
    # Objects that two records shared are each their own now.
    assert after["bytes"] == pytest.approx(before["bytes"], rel=0.2)


def test_a_transcript_that_is_replayed_is_as_young_in_the_file(saving):
    saving.answer([SYSTEM, USER], FINE)
    saving.now = 50.0
    assert saving.draft([SYSTEM, USER, FINE, NEXT]).transcript

    (saved,) = saving.records.of_tenant("").load()
    assert saved.last_used == pytest.approx(50.0, abs=1.0)


def test_forgotten_session_is_not_in_the_file_of_records(saving, tmp_path):
    for session in ("a", "b"):
        words = [SYSTEM, said("user", f"the secret of {session}")]
        reply = said("assistant", f"told {session}", reasoning_content=f"hm {session}")
        saving.answer(words, reply, session=session)
    saving.planner.ledger.forget("a")
    saving.flush()

    saved = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"hm b" in saved
    assert b"hm a" not in saved
    saving.restart()
    assert saving.planner.ledger.snapshot()["transcripts"] == 1


def test_a_row_does_not_grow_with_what_its_prompt_states(saving):
    """A new time and a new reminder in each question, as agents send (L-215)."""
    messages = [SYSTEM]
    for n in range(40):
        time_and_note = f"[Fri 2026-11-20 14:{n:02} UTC] more\n{note(f'now {n} ' * 50)}"
        messages.append(said("user", time_and_note))
        saving.answer(messages, FINE)
        messages.append(FINE)

    sizes = [len(row.value) for row in saving.records.of_tenant("").load()]
    assert sizes[-1] < 1.5 * sizes[5]
    before = saving.n_bytes()
    saving.restart()
    assert saving.n_bytes() == pytest.approx(before, rel=0.1)
    draft = saving.draft([*messages, NEXT])
    assert draft.transcript
    assert saving.text(draft).count("now 0 ") == 50
    assert len(draft.transcript.stated().notes) == 40


def test_what_another_session_continues_is_nobodys_in_the_file(saving, tmp_path):
    """Its tokens stay for that session; it is not found, and has no name any more."""
    asked = [SYSTEM, said("user", "of somebody")]
    saving.answer(asked, asks("x"), user="the first")
    messages = [*asked, asks("x"), result("r")]
    past = saving.answer(messages, FINE, user="the second")
    assert starts_with(saving.draft([*messages, FINE, NEXT], user="the second"), past)

    saving.planner.ledger.forget("the first")
    saving.flush()
    saved = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"the first" not in saved
    for _ in range(2):
        assert saving.n_bytes() == counted(saving.planner.ledger)
        assert saving.planner.ledger.snapshot()["transcripts"] == 1
        again = saving.draft([*messages, FINE, NEXT], user="the second")
        assert starts_with(again, past)
        assert not saving.draft(messages, user="the second").transcript
        saving.restart()

    saving.planner.ledger.forget("the second")
    assert saving.n_bytes() == 0
    assert saving.records.of_tenant("").load() == []


def test_a_file_that_was_erased_has_the_whole_conversation_again(saving):
    messages = fill(saving, 0)
    saving.flush()
    saving.records.erase()
    past = saving.answer(messages, FINE)

    saving.restart()
    assert starts_with(saving.draft([*messages, FINE, NEXT]), past)


def test_replies_around_the_loss_of_the_file_are_there_after_a_restart(
    saving, monkeypatch
):
    """The first reply after it is in the new file before those that it continues."""
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    messages = fill(saving, 0)
    saving.flush()

    saving.path.unlink()
    saving.answer(messages, FINE)
    wait_until(lambda: saving.records.number > 1)
    longer = [*messages, FINE, NEXT]
    past = saving.answer(longer, FINE)
    saving.restart()

    assert starts_with(saving.draft([*longer, FINE, NEXT]), past)


def test_what_continues_a_damaged_record_is_not_replayed(saving):
    """Nor is it read again and again."""
    messages = fill(saving, 0)
    saving.flush()
    with sqlite3.connect(saving.path) as database:
        database.execute("UPDATE records SET value = x'00' WHERE parent = x''")

    saving.restart()
    assert not saving.draft(messages).transcript
    assert saving.planner.ledger.snapshot() == EMPTY
    assert saving.records.of_tenant("").load() == []


def test_a_conversation_of_any_length_is_let_go():
    """Its records hold each other, one after the other."""
    server = Server()
    ledger = server.planner.ledger
    record: Any = None
    for _ in range(20_000):
        record = s.Alias(parent=record)
    ledger._add(b"key", record)
    assert server.n_bytes() == counted(ledger) > 20_000

    ledger.forget(None)
    assert server.n_bytes() == 0
    del record


def test_eight_clients_share_a_ledger():
    server = Server()

    def work(seed: int) -> int:
        client = Client(server, seed)
        for _ in range(8):
            client.turn()
        return client.n_words

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    shown = server.planner.ledger.snapshot()
    assert shown["transcripts"] == 64
    assert shown["bytes"] == counted(server.planner.ledger)
    assert server.n_fallbacks() == 0


def test_requests_that_are_planned_at_once_begin_alike():
    """Sub-agents start together: none of them is accepted when the last is planned."""
    server = Server()
    plans = [
        server.plan([head_with(f"id-{n}"), USER], tools=[*tools])
        for n, tools in enumerate(permutations([named("look"), named("ask")]))
    ]

    texts = [server.text(plan) for plan in plans]
    first, second = (plan.tools for plan in plans)
    assert first == second
    assert [restated(text) for text in texts] == [[], ["id-1"]]


def test_requests_of_a_session_that_are_planned_at_once_have_one_head():
    """Whatever private values they send."""
    server = Server()
    heads = [begun_by(name, "inbound context") for name in ("alice", "bob", "alice")]
    plans = [server.plan(messages, user="group") for messages in heads]
    head_ids = [ids_of(plan)[: plan.rendered.positions.head_ends[0]] for plan in plans]
    assert head_ids[0] == head_ids[1]
    assert plans[0].starts == plans[2].starts
    assert len(plans[0].starts) == 2 and len(plans[1].starts) == 1  # not under bob's


def test_what_is_dropped_is_counted():
    server = Server()
    billing = "x-anthropic-billing-header: cc_version=2.1.121.dd4; cch=0d3a3;\n"
    talk = [said("system", billing + "Be brief."), said("user", "hi")]
    server.draft(talk)
    counts = server.planner.metrics.snapshot()
    assert counts["telemetry_dropped"] == 1
