"""LEDGER: what was fed is replayed; what is spliced on is what the template would have said."""

import copy
import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import start_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import CHATML, call, chat, said, tiny_tokenizer, tokenizer_of, tool
from transformers import PreTrainedTokenizerFast

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS = {
    "demo": SCRIPTS / "training" / "demo_chat_template.jinja",
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
MODELS = [f"{name}/tiny" for name in TINY] + [
    *(
        "qwen3/qwen3",
        "qwen3-coder/qwen3",
        "qwen3.5/qwen3",
        "glm-4.7-flash/glm-4",
        "gemma-4/qwen3",
    )
]


@dataclass(frozen=True)
class Spoken:
    """A template, its tokenizer, and the ids at which its model stops."""

    tokenizer: PreTrainedTokenizerFast
    template: start_llm.ChatTemplate
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
    is_tiny = model.endswith("/tiny")
    text = chat_template or (template_text(name) if is_tiny else "")
    tokenizer = tiny_tokenizer(text) if is_tiny else tokenizer_of(model)
    known = tokenizer.get_vocab()
    ends = [known[end] for end in ENDS.get(name, ["<|im_end|>"]) if end in known]
    start, end = (
        ("<|channel>", "<channel|>") if name == "gemma-4" else ("<think>", "</think>")
    )
    template = start_llm.ChatTemplate(
        tokenizer,
        start_llm.Config(**config),
        think_start=start,
        think_end=end,
        ends={*ends},
    )
    call_end = ends[1] if name in {"glm-4.7-flash", "gemma-4"} else ends[0]
    return Spoken(tokenizer, template, ends, call_end)


@cache
def shared(model: str) -> Spoken:
    return spoken(model)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    if not request.param.endswith("/tiny"):
        tokenizer_of(request.param)  # skips where it is absent
    return str(request.param)


def planner(**config: Any) -> start_llm.PromptPlanner:
    settings = start_llm.Config(**config)
    return start_llm.PromptPlanner(
        settings,
        start_llm.CacheMetrics(),
        start_llm.Ledger(settings),
        start_llm.HealingStore(),
    )


def generated(
    ids: Iterable[int], *, is_cut: bool = False, **more: Any
) -> start_llm.GeneratedReply:
    facts = {"session_id": "", "finished_at": 0.0, "block_hashes": (), **more}
    return start_llm.GeneratedReply(ids=list(ids), is_cut=is_cut, **facts)


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
OTHER_TOOL = {**tool(), "function": {**tool()["function"], "name": "other"}}


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
    for thinks in (True, False):
        fields = {"tools": [tool()], "enable_thinking": thinks}
        for (_, last, _), news in zip(
            REPLIES, (AFTER_TEXT, AFTER_CALL, AFTER_CALLS), strict=False
        ):
            for name, new in news.items():
                yield Shape(f"{name}, {thinks}", [SYSTEM, USER, last], new, fields)
    for head, old, fields in HEADS:
        for name, last, new in REPLIES:
            yield Shape(
                f"{head}: {name}", [*old, last], new, {"tools": [tool()], **fields}
            )


@dataclass(frozen=True)
class Whole:
    """A whole conversation as the template renders it: the truth that splicing must meet."""

    speaker: Spoken
    shape: Shape
    request: start_llm.ChatRequest
    truth: start_llm.RenderedPrompt
    end: int  # position of the token that ends the reply

    @classmethod
    def of(cls, speaker: Spoken, shape: Shape) -> "Whole":
        request = chat([*shape.old, *shape.new], **shape.fields)
        truth = planner().plan(request, speaker.template, room=PLENTY, now=0.0).rendered
        ids = truth.ids.tolist()
        stops = (at for at, token in enumerate(ids) if token in speaker.ends)
        end = next(at for at in stops if LAST in speaker.text(ids[:at]))
        return cls(speaker, shape, request, truth, end)

    def drafted(
        self, reply_ids: Sequence[int], ended: int | None
    ) -> start_llm.PromptPlan:
        """The prompt after a past of exactly these tokens, which end in the reply."""
        maker, old = planner(), self.shape.old
        template, fields = self.speaker.template, self.shape.fields
        before = maker.plan(chat(old[:-1], **fields), template, room=PLENTY, now=0.0)
        ids = np.array(reply_ids, np.int32)
        before = replace(before, rendered=replace(before.rendered, ids=ids))
        [reply] = template.canonicalize(chat([old[-1]]).messages)
        maker.ledger.record(
            before, reply=reply, generated=generated((), is_cut=ended is None)
        )
        return maker.plan(self.request, template, room=PLENTY, now=0.0)

    def verdict(self, draft: start_llm.PromptPlan) -> str:
        if draft.transcript is None:
            return "fallback"
        return (
            "ok" if draft.rendered.ids.tolist() == self.truth.ids.tolist() else "WRONG"
        )


def wholes(model: str) -> Iterator[Whole]:
    for shape in shapes():
        yield Whole.of(shared(model), shape)


def is_turned_round(model: str, shape: Shape) -> bool:
    """gemma-4 prints a reply's text behind its calls and their results; it was said before."""
    return "gemma" in model and bool(
        shape.old[-1]["content"] and shape.old[-1].get("tool_calls")
    )


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Shown at the end by `pytest -s`."""
    rows: list[str] = []
    yield rows
    sys.stdout.write("\n" + "\n".join(["template: ok, fallback, WRONG", *rows]) + "\n")


def test_splicing_says_what_the_template_says(model: str, table: list[str]) -> None:
    verdicts: dict[str, list[str]] = {"ok": [], "fallback": [], "WRONG": []}
    turned_round = []
    for whole in wholes(model):
        ids = whole.truth.ids.tolist()[: whole.end + 1]
        verdict = whole.verdict(whole.drafted(ids, ids[-1]))
        verdicts[verdict].append(whole.shape.name)
        turned_round += [whole.shape.name] * is_turned_round(model, whole.shape)
    table.append(
        f"{model}: {', '.join(str(len(names)) for names in verdicts.values())}"
    )
    assert verdicts["WRONG"] == turned_round
    assert not verdicts["fallback"]
    assert len(verdicts["ok"]) == len(list(shapes())) - len(turned_round)


def test_a_model_may_stop_at_another_token(model: str) -> None:
    """Qwen's <|endoftext|>, GLM's <|user|> before a result: what the template prints there wins."""
    for whole in wholes(model):
        if is_turned_round(model, whole.shape):
            continue
        ids = whole.truth.ids.tolist()[: whole.end]
        for other in {*whole.speaker.ends} - {whole.truth.ids.tolist()[whole.end]}:
            assert whole.verdict(whole.drafted([*ids, other], other)) == "ok", (
                whole.shape.name
            )


def test_a_reply_cut_in_its_text_is_replayed_and_one_cut_in_a_call_is_not(
    model: str,
) -> None:
    for whole in wholes(model):
        ids, text = whole.truth.ids.tolist(), whole.speaker.text
        cut = next(at for at in range(whole.end + 1) if LAST in text(ids[:at]))
        verdict = whole.verdict(whole.drafted(ids[:cut], None))
        is_call = "tool_calls" in whole.shape.old[-1]
        assert verdict == ("fallback" if is_call else "ok"), whole.shape.name


def test_positions_are_those_of_the_whole_prompt(model: str) -> None:
    """Checkpoints are taken there. Only of templates and shapes that leave the past as it was."""
    n_compared = 0
    for whole in wholes(model):
        old, template = whole.shape.old[:-1], shared(model).template
        before = planner().plan(
            chat(old, **whole.shape.fields), template, room=PLENTY, now=0.0
        )
        n_same = before.rendered.positions.generation_start
        if before.rendered.ids.tolist()[:n_same] != whole.truth.ids.tolist()[:n_same]:
            continue
        ids = whole.truth.ids.tolist()[: whole.end + 1]
        rendered = whole.drafted(ids, ids[-1]).rendered
        if not is_turned_round(model, whole.shape):
            positions = replace(
                whole.truth.positions, note_ends=rendered.positions.note_ends
            )
            truth = replace(whole.truth, text="", positions=positions)
            assert replace(rendered, text="") == truth, whole.shape.name
            n_compared += 1
    assert n_compared >= 20


@pytest.mark.parametrize(
    "words", [start_llm._NONCE, "zq0q", f"zq0q {start_llm._NONCE} zq1q"]
)
def test_our_own_words_in_a_message_are_never_misread(model: str, words: str) -> None:
    """An agent that edits this server reads them in a file."""
    for old, new in (
        (said("assistant", LAST), said("user", words)),
        (asks(LAST), result(words)),
    ):
        shape = Shape(words, [SYSTEM, USER, old], [new])
        whole = Whole.of(shared(model), shape)
        ids = whole.truth.ids.tolist()[: whole.end + 1]
        draft = whole.drafted(ids, ids[-1])
        assert draft.rendered.ids.tolist() == whole.truth.ids.tolist()


# -- a conversation, step by step ---------------------------------------------------------


class Server:
    """A ledger and what a model says: it speaks in tokens of its own, not as a template would."""

    def __init__(self, model: str = "chatml/tiny", **config: Any) -> None:
        self.speaker = spoken(model, **config) if config else shared(model)
        self.planner = planner(**config)
        self.now = 0.0

    def draft(
        self, messages: list, *, room: int = PLENTY, **fields: Any
    ) -> start_llm.PromptPlan:
        request = chat(messages, **fields)
        return self.planner.plan(
            request, self.speaker.template, room=room, now=self.now
        )

    def say(
        self,
        draft: start_llm.PromptPlan,
        reply: dict,
        *,
        words: str = "",
        session: str = "",
    ) -> list[int]:
        """Record a reply; the tokens of prompt and reply."""
        speaker, [turn] = (
            self.speaker,
            self.speaker.template.canonicalize(chat([reply]).messages),
        )
        end = speaker.call_end if "tool_calls" in reply else speaker.ends[0]
        ids = [*speaker.template.encode(words or f"~{json.dumps(reply)}~"), end]
        record = generated(ids, session_id=session, finished_at=self.now)
        self.planner.ledger.record(draft, reply=turn, generated=record)
        self.planner.healing.remember(
            turn.original, draft.conversation.reply_contexts()[-1]
        )
        return [*draft.rendered.ids.tolist(), *ids]

    def text(self, draft: start_llm.PromptPlan) -> str:
        return self.speaker.text(draft.rendered.ids.tolist())

    def n_fallbacks(self) -> int:
        return self.planner.metrics.snapshot()["ledger_seam_fallback"]


def starts_with(draft: start_llm.PromptPlan, past: Sequence[int]) -> bool:
    """An end token that the template prints otherwise may be missing."""
    tokens = draft.rendered.ids.tolist()[: len(past) - 1]
    return draft.n_replayed >= len(past) - 1 and tokens == list(past[: len(past) - 1])


FINE = said("assistant", "fine")
NEXT = said("user", "next")


def test_generated_tokens_are_replayed_not_rendered_again(model: str) -> None:
    """Over many turns, whatever the model wrote; and the whole history is in each prompt."""
    server = Server(model)
    messages, past = [SYSTEM, USER], [0]
    for n in range(5):
        draft = server.draft(messages, tools=[tool()])
        assert n == 0 or starts_with(draft, past)
        reply = asks(f"ask{n}") if n % 2 else said("assistant", f"answer{n}")
        past = server.say(draft, reply, words=f"  odd  spelling {n} <|im_start|> ")
        news = result(f"r{n}") if n % 2 else said("user", f"more{n}")
        messages = [*messages, reply, news]
    assert server.n_fallbacks() == 0


def note(words: str) -> str:
    return f"<system-reminder>\n{words}\n</system-reminder>"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_note_said_again_after_another_is_told_again(is_late: bool) -> None:
    """The client keeps all three where they are: the mode that holds is the last (L-84)."""
    server, messages = Server(), [SYSTEM]
    for n, mode in enumerate(("MODE plan", "MODE edit", "MODE plan")):
        text = f"task {n}" if is_late else f"task {n}\n\n{note(mode)}"
        messages += [said("user", text)]
        messages += [said("system", mode)] * is_late
        draft = server.draft(messages)
        server.say(draft, FINE)
        messages += [FINE]
    modes = ["plan", "edit", "plan"]
    assert re.findall(r"MODE (\w+)", server.text(draft)) == modes
    as_sent = Server().draft(messages[:-1])
    assert re.findall(r"MODE (\w+)", server.text(as_sent)) == modes


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_note_in_force_again_behind_a_kept_one_is_told_again(
    *, is_kept: bool
) -> None:
    """The first has gone from where it was, but the second was told behind it (L-96)."""
    server, first = Server(), [SYSTEM, said("user", f"task 1\n\n{note('MODE plan')}")]
    server.say(server.draft(first), FINE)
    past, edit = (
        [SYSTEM, said("user", "task 1"), FINE],
        f"task 2\n\n{note('MODE edit')}",
    )
    server.say(server.draft([*past, said("user", edit)]), FINE)
    past += [said("user", edit if is_kept else "task 2"), FINE]
    draft = server.draft([*past, said("user", f"task 3\n\n{note('MODE plan')}")])
    assert draft.transcript and re.findall(r"MODE (\w+)", server.text(draft)) == [
        "plan",
        "edit",
        "plan",
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_note_that_moves_is_told_once(*, late: bool) -> None:
    """Also where late system messages, another rule's, stay behind it: Claude Code's plan mode."""
    server, past = Server(), [SYSTEM]
    for n in range(4):
        left = [said("system", f"{9 - n} left")] * late
        draft = server.draft(
            [*past, said("user", f"task {n}\n\n{note('MODE plan')}"), *left]
        )
        server.say(draft, FINE)
        past += [said("user", f"task {n}"), *left, FINE]
    assert server.text(draft).count("MODE plan") == 1


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_text_of_the_user_that_reads_like_a_note_is_in_the_prompt(
    *, is_kept: bool
) -> None:
    """The system says it after every question; then it is the user's question."""
    words = "x <system-reminder>a</system-reminder>"
    server, past = Server(), [SYSTEM]
    for n, question in enumerate(("first", "second", words, words)):
        asked, late = said("user", question), said("system", words)
        draft = server.draft([*past, asked, late])
        assert n == 0 or draft.transcript
        server.say(draft, FINE)
        past += [asked, *[late] * is_kept, FINE]
    turns = server.text(draft).split("<|im_start|>user\n")[1:]
    texts = [turn.partition("<|im_end|>")[0] for turn in turns]
    note = f"\n\n{words}" * is_kept
    assert texts == [f"{words}\n\nfirst", f"second{note}", words + note, words + note]


@pytest.mark.parametrize("place", ["system", "developer", "reminder"])
def test_a_note_in_force_again_at_its_own_place_is_told_again(place: str) -> None:
    """CLAUDE.md changed and changed back, where the client's first message shows it (L-98)."""
    server, past = Server(), []
    for n, mode in enumerate(("plan", "edit", "plan", "plan")):
        first = [said("user", "hello"), said(place, f"MODE {mode}")]
        if place == "reminder":
            first = [said("user", f"{note(f'MODE {mode}')}\n\nhello")]
        draft = server.draft([SYSTEM, *first, FINE, *past, said("user", f"task {n}")])
        server.say(draft, FINE)
        past += [said("user", f"task {n}"), FINE]
    assert draft.transcript
    assert re.findall(r"MODE (\w+)", server.text(draft)) == ["plan", "edit", "plan"]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("place", ["system", "developer", "reminder"])
def test_a_note_in_front_of_a_question_costs_no_reply(
    place: str, *, stays: bool
) -> None:
    """Retrieved text, a memory, a mode: told before the question, and gone with the answer."""
    server, past = Server(), [SYSTEM, said("user", "hello"), FINE]
    for n in range(4):
        memo, question = said(place, f"MEMO {n}"), said("user", f"task {n}")
        if place == "reminder":
            memo = said("user", note(f"MEMO {n}"))
        draft = server.draft([*past, memo, question])
        assert n == 0 or (
            draft.transcript
            and len(draft.transcript.thinking) == len(draft.conversation.messages) - 1
        )
        server.say(draft, FINE)
        past += [*[memo] * stays, question, FINE]
    told = re.findall(r"(MEMO|task) (\d)", server.text(draft))
    assert told == [(what, str(n)) for n in range(4) for what in ("MEMO", "task")]


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_note_behind_a_reply_stays_the_turn_that_was_answered(
    *, is_answered: bool
) -> None:
    """A wake-up call of the system's: what follows its answer finds it where it was."""
    server, past = (
        Server(),
        [SYSTEM, said("user", "hello"), FINE, said("system", "wake up")],
    )
    first = server.draft(past)
    server.say(first, FINE)
    rest = [FINE] if is_answered else []
    draft = server.draft([*past, *rest, said("user", "more")])
    assert bool(draft.transcript) == is_answered
    assert re.findall("hello|wake up|more", server.text(draft)) == [
        "hello",
        "wake up",
        "more",
    ]


def test_of_two_pasts_the_one_with_the_same_pinned_values_is_replayed() -> None:
    """Ann and Bob begin with the same words at different times; Bob's past is newer (L-99)."""
    server, hello = Server(), said("assistant", "Hello! How can I help?")

    def begun(time: str) -> list:
        return [SYSTEM, said("user", f"hi\nCurrent time: {time}")]

    for time in ("08:00", "21:00"):
        draft = server.draft(begun(time))
        server.say(draft, hello, words=f"It is {time}.", session=f"sha1:{time}")
        server.now += 1
    draft = server.draft([*begun("08:00"), hello, said("user", "is it morning?")])
    assert draft.transcript and re.findall(r"\d\d:\d\d", server.text(draft)) == [
        "08:00",
        "08:00",
    ]


def test_an_argument_is_looked_for_before_what_repeats_it() -> None:
    """Several lines, printed as JSON in the call and as they are in a result behind it."""
    lines = "first line\nsecond line"
    messages = [asks(lines), result("written"), asks("again"), result(lines)]
    for message in messages[::2]:
        message["tool_calls"][0]["function"] = {
            "name": "look",
            "arguments": {"q": lines},
        }
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"q": "again"}
    text = f"look {json.dumps(lines)[1:-1]} written look again {lines}"
    assert not start_llm._find_losses(messages, text)


def test_a_past_with_another_conversations_notes_is_none_of_ours() -> None:
    """Ann and Bob begin with the same words and get the same reply (L-85)."""
    server, hello = Server(), said("assistant", "Hello! How can I help?")

    def begin(name: str) -> list:
        return [SYSTEM, said("user", "hi"), said("system", f"The user is {name}.")]

    for name in ("Ann", "Bob"):
        server.say(server.draft(begin(name)), hello, session="sha1:same")
        server.now += 1
    draft = server.draft([*begin("Ann"), hello, said("user", "who am I?")])
    assert (
        re.findall(r"The user is (\w+)", server.text(draft)) == ["Ann"]
        and draft.transcript
    )


@pytest.mark.parametrize("knows_id", [True, False])
def test_who_has_the_id_of_our_last_call_goes_on_from_there(*, knows_id: bool) -> None:
    """A client without session ids looks at its folder again when it is resumed (L-103)."""
    server, called = Server("chatml/tiny"), asks("ls")
    called["tool_calls"][0]["id"] = "5e1e438e4"

    def begun(files: str) -> list:
        return [
            SYSTEM,
            said("user", f"{note(f'In this folder: {files}.')}\n\nMake out.txt."),
        ]

    first = server.draft(begun("notes.txt"))
    server.say(first, called, session="sha1:own")
    past = [called, said("tool", "made", tool_call_id="5e1e438e4")]
    done = said("assistant", "It is there.")
    whole = server.say(
        server.draft([*begun("notes.txt"), *past]), done, session="sha1:own"
    )
    if not knows_id:  # as somebody has it who asked the same and was answered the same
        past[0] = asks("ls")
    draft = server.draft(
        [*begun("notes.txt, out.txt"), *past, done, said("user", "go on")]
    )
    told = re.findall(r"In this folder: ([^<]*?)\.\n", server.text(draft))
    assert told == (["notes.txt"] if knows_id else []) + ["notes.txt, out.txt"]
    assert starts_with(draft, whole) == knows_id


@pytest.mark.parametrize("call_id", ["5e1e438e4", ""])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_chat_that_was_cloned_behind_a_call_is_told_its_own_notes(
    call_id: str, *, is_ours: bool
) -> None:
    """Ann and Bob go on from one beginning, with the id of its call (L-103)."""
    server, called = Server(), asks("ls")
    called["tool_calls"][0]["id"] = call_id
    begun = [
        SYSTEM,
        said("user", "list"),
        called,
        said("tool", "a.txt", tool_call_id=call_id),
    ]
    if is_ours:
        server.say(server.draft(begun[:2]), called, session="sha1:same")
    hello = said("assistant", "Hello! How can I help?")
    named = {
        name: said("user", f"hi\n\n{note(f'The user is {name}.')}")
        for name in ("Ann", "Bob")
    }
    server.say(server.draft([*begun, FINE, named["Ann"]]), hello, session="sha1:same")
    draft = server.draft([*begun, FINE, named["Bob"], hello, said("user", "who am I?")])
    assert re.findall(r"The user is (\w+)", server.text(draft)) == ["Bob"]


@pytest.mark.parametrize("call_id", ["call_1", ""])
def test_a_call_that_was_not_made_here_says_nothing_of_who_asks(call_id: str) -> None:
    """Ann's and Bob's beginnings come from another server, which calls every call the same."""
    server, called = Server(), asks("ls")
    called["tool_calls"][0]["id"] = call_id
    past = [called, said("tool", "a.txt", tool_call_id=call_id)]
    begun = {
        name: [SYSTEM, said("user", f"list\n\n{note(f'The user is {name}.')}"), *past]
        for name in ("Ann", "Bob")
    }
    server.say(server.draft(begun["Ann"]), FINE, session="sha1:same")
    draft = server.draft([*begun["Bob"], FINE, said("user", "who am I?")])
    assert re.findall(r"The user is (\w+)", server.text(draft)) == ["Bob"]


@pytest.mark.parametrize("session", ["", "shared"])
def test_of_two_pasts_the_one_with_fewer_notes_of_others_is_replayed(
    session: str,
) -> None:
    """Two sub-agents with one task and one first reply; the other's is newer (L-96)."""
    server, fine = Server(), said("assistant", "I will read it.")
    begun = {
        name: [
            SYSTEM,
            said(
                "user",
                f"Review it.\n\n{note(f'Sub-agent {name}.')}" if name else "Review it.",
            ),
        ]
        for name in ("A", "", "B")
    }
    for messages in begun.values():
        server.say(server.draft(messages, user=session), fine, session=session)
        server.now += 1
    for name, messages in begun.items():
        draft = server.draft([*messages, fine, said("user", "go on")], user=session)
        assert draft.transcript
        assert re.findall(r"Sub-agent (\w+)", server.text(draft)) == [name] * bool(name)


class Everywhere:
    """As if a guess had been wrong in every world."""

    def __contains__(self, _world: object) -> bool:
        return True


def test_a_guess_counts_if_the_whole_past_says_the_same(model: str) -> None:
    """What is used in the end is what is rendered behind all messages, guessed at or not."""
    server, sure = Server(model), Server(model)
    sure.planner.unguessable = Everywhere()
    messages, n_wrong, n_guesses = [SYSTEM, USER], 0, 0
    for n in range(16):
        while not server.planner.verify(
            draft := server.draft(messages, tools=[tool()])
        ):
            n_wrong += 1
        n_guesses += draft.unverified is not None
        truth = sure.draft(messages, tools=[tool()])
        assert draft.rendered == truth.rendered and truth.unverified is None
        assert draft.rendered.ids.tolist() == truth.rendered.ids.tolist()
        reply = said("assistant", f"answer{n}") if n % 4 == 3 else asks(f"ask{n}")
        for each, drafted in ((server, draft), (sure, truth)):
            each.say(drafted, reply)
        messages = [
            *messages,
            reply,
            said("user", f"more{n}") if n % 4 == 3 else result(f"r{n}"),
        ]
    assert n_wrong == (
        model == "numbered/tiny"
    )  # once, and then it is guessed at no more
    assert (n_guesses > 4) != n_wrong


def test_a_retry_is_rendered_behind_the_past_before(model: str) -> None:
    """A full resend has no new message behind its longest past; the same tokens all the same."""
    server = Server(model)
    past = server.say(server.draft([SYSTEM, USER]), FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    first = server.draft(messages)
    server.say(first, said("assistant", "done"))
    again = server.draft(messages)
    assert again.transcript is first.transcript and starts_with(again, past)
    assert (
        again.rendered == first.rendered
        and again.rendered.ids.tolist() == first.rendered.ids.tolist()
    )
    edited = server.draft([SYSTEM, USER, FINE, said("user", "other")])
    assert edited.transcript is first.transcript
    interrupted = server.draft(
        [*messages, said("assistant", "do"), said("user", "go on")]
    )
    assert interrupted.transcript is first.transcript


def test_a_request_may_end_in_a_reply(model: str) -> None:
    """To be continued, or by mistake: nothing follows its longest past, so a shorter one serves."""
    server = Server(model)
    past = server.say(server.draft([SYSTEM, USER]), FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    server.say(server.draft(messages), said("assistant", "done"))
    draft = server.draft([*messages, said("assistant", "done")])
    assert (
        starts_with(draft, past)
        and draft.transcript
        and len(draft.transcript.thinking) == 3
    )
    assert server.draft([SYSTEM, USER, FINE]).transcript is None


CUTS = CHATML.replace(
    "m.content }}", "m.content[:20] if m.role == 'user' else m.content }}"
)


@pytest.mark.parametrize(
    ("template", "words", "why"),
    [
        (CUTS, "a message that is longer than twenty letters", "lost text"),
    ],
)
def test_what_cannot_be_verified_is_rendered_as_sent(
    template: str, words: str, why: str
) -> None:
    """And counted, with its reason for the log."""
    assert template != CHATML
    server = Server()
    server.speaker = spoken("chatml/tiny", template)
    past = server.say(server.draft([SYSTEM, USER]), FINE)
    assert starts_with(server.draft([SYSTEM, USER, FINE, NEXT]), past)
    draft = server.draft([SYSTEM, USER, FINE, said("user", words)])
    assert (
        draft.transcript is None and draft.refusal == why and server.n_fallbacks() == 1
    )
    truth = server.speaker.template.render_prompt(
        chat([SYSTEM, USER, FINE, said("user", words)])
    )
    assert draft.rendered.ids.tolist() == truth.ids.tolist()


ENDING = "{{- '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add"
BEFORE_BARE = "'bare' in (messages[loop.index] | default({'content': ''})).content"
CHANGES = CHATML.replace(ENDING, f"{{{{- '\\n' if {BEFORE_BARE} }}}}{ENDING}")


def test_what_closes_a_reply_may_depend_on_what_follows_it() -> None:
    """It is read off this very conversation; a whole reply keeps the end that was generated."""
    assert CHANGES != CHATML
    server = Server()
    server.speaker = spoken("chatml/tiny", CHANGES)
    past = server.say(server.draft([SYSTEM, USER]), FINE)
    for words in ("bare words", "other words"):
        draft = server.draft([SYSTEM, USER, FINE, said("user", words)])
        assert starts_with(draft, past) and not draft.refusal


def test_what_is_rendered_first_is_what_is_rendered_again() -> None:
    server = Server()
    drafts = [server.draft([SYSTEM, USER]) for _ in range(2)]
    assert drafts[0].rendered.ids.tolist() == drafts[1].rendered.ids.tolist()
    assert drafts[0].transcript is None and not drafts[0].refusal


def test_another_world_is_another_past() -> None:
    """Tools, system prompt and an edited message; not the order of what a client resends."""
    server = Server()
    messages = [SYSTEM, USER, FINE, NEXT]
    server.say(server.draft([SYSTEM, USER], tools=[tool()]), FINE)
    assert server.draft(messages, tools=[tool()]).transcript
    assert not server.draft(messages).transcript
    assert not server.draft(messages, tools=[tool("Sees.")]).transcript
    assert not server.draft(
        [said("system", "You are."), *messages[1:]], tools=[tool()]
    ).transcript
    assert not server.draft([SYSTEM, NEXT, *messages[2:]], tools=[tool()]).transcript
    assert not server.draft(
        [SYSTEM, USER, said("assistant", "fin"), NEXT], tools=[tool()]
    ).transcript


# -- alternatives -----------------------------------------------------------------------


def test_one_key_has_up_to_four_pasts() -> None:
    server = Server()
    messages = [SYSTEM, USER, FINE, NEXT]
    draft = server.draft([SYSTEM, USER])
    said_tokens = []
    for n in range(6):
        server.now += 1
        said_tokens.append(
            server.say(draft, FINE, words=f"version {n}", session=f"s{n}")
        )
        assert server.planner.ledger.snapshot()["transcripts"] == min(n + 1, 4)
    for n in range(6):
        drafted = server.draft(messages, user=f"s{n}")
        wanted = said_tokens[n] if n >= 2 else None
        assert wanted is None or starts_with(drafted, wanted)
    server.now += 1
    newest = server.say(draft, FINE, words="newest", session="else")
    assert starts_with(server.draft(messages, user="nobody"), newest)


# -- thinking ---------------------------------------------------------------------------

THOUGHT = said("assistant", "fine", reasoning_content="because of it")


def test_thinking_that_the_client_dropped_is_replayed(model: str) -> None:
    server = Server(model)
    past = server.say(server.draft([SYSTEM, USER]), THOUGHT)
    echoes = [
        FINE,
        THOUGHT,
        {**FINE, "reasoning_content": ""},
        said("assistant", "\n\nfine"),
    ]
    for echo in [*echoes, {**FINE, "reasoning": "because of it\n"}]:
        assert starts_with(server.draft([SYSTEM, USER, echo, NEXT]), past)


def test_a_reply_whose_end_was_trimmed_is_replayed(model: str) -> None:
    """As opencode sends it back; its thinking is healed, too (L-92)."""
    server, asked = Server(model), [SYSTEM, USER]
    reply = said("assistant", "All done. \n\n", reasoning_content="why")
    past = server.say(server.draft(asked), reply)
    echoed = [*asked, said("assistant", "All done."), NEXT]
    assert starts_with(server.draft(echoed), past)
    server.planner.ledger.forget(None)
    told = [*asked, said("assistant", "All done.", reasoning_content="why"), NEXT]
    cold = Server(model).draft(told).rendered.ids.tolist()
    assert server.draft(echoed).rendered.ids.tolist() == cold


def test_thinking_that_the_client_changed_refuses_the_past(model: str) -> None:
    """What it sends is what the model must see; a past before it may still be replayed."""
    server = Server(model)
    first = server.say(server.draft([SYSTEM, USER]), FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    server.say(server.draft(messages), THOUGHT)
    changed = {**FINE, "reasoning_content": "of something else"}
    draft = server.draft([*messages, changed, said("user", "go on")])
    assert (
        starts_with(draft, first)
        and draft.transcript
        and len(draft.transcript.thinking) == 3
    )
    invented = server.draft([SYSTEM, USER, changed, NEXT])
    assert invented.transcript is None


def test_a_tool_loop_tells_no_pinned_value_again_and_holds_none() -> None:
    """Bytes of a past are those of what it adds, however much was told before."""
    server, sizes = Server(), []
    stamps = [f"[Wed 2026-02-18 20:{m:02} UTC] question {m}" for m in range(40)]
    messages = [SYSTEM]
    for stamp in stamps:
        messages += [said("user", stamp), FINE]
    messages.append(NEXT)
    for n in range(6):
        before = server.planner.ledger.snapshot()["bytes"]
        server.say(server.draft(messages), asks(f"call {n}"))
        sizes.append(server.planner.ledger.snapshot()["bytes"] - before)
        messages += [asks(f"call {n}"), result(f"result {n}")]
    assert max(sizes[1:]) < 0.3 * sizes[0]


def test_thinking_outlives_the_past_it_was_part_of() -> None:
    """What is rendered again for want of a past is healed, where the template prints it."""
    server = Server()
    server.say(server.draft([SYSTEM, USER]), THOUGHT)
    server.planner.ledger._transcripts.clear()
    draft = server.draft([SYSTEM, USER, FINE, NEXT])
    assert draft.transcript is None and "because of it" in server.text(draft)


def test_two_thoughts_under_one_reply_are_told_apart() -> None:
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


@pytest.mark.parametrize("name", ["qwen3/qwen3", "glm-4.7-flash/glm-4", "demo/tiny"])
def test_thinking_is_not_preserved_when_so_configured(name: str) -> None:
    """It stays within a tool loop, where templates print it, and is gone at the next user turn."""
    server = Server(name, preserve_thinking=False)
    messages = [SYSTEM, USER]
    thinks = asks("x", reasoning_content="why I look")
    server.say(server.draft(messages, tools=[tool()]), thinks, words="why I look")
    messages = [*messages, asks("x"), result("r")]
    draft = server.draft(messages, tools=[tool()])
    assert draft.transcript and "why I look" in server.text(draft)
    server.say(draft, THOUGHT, words="because of it")
    turn = server.draft([*messages, FINE, NEXT], tools=[tool()])
    assert turn.transcript is None and turn.refusal
    truth = server.speaker.template.render_prompt(
        chat([*messages, FINE, NEXT], tools=[tool()])
    )
    assert turn.rendered.ids.tolist() == truth.ids.tolist()
    assert "why" not in server.text(turn) and "because" not in server.text(turn)


def test_without_past_thinking_a_past_is_replayed_even_then() -> None:
    server = Server("chatml/tiny", preserve_thinking=False)
    past = server.say(server.draft([SYSTEM, USER]), FINE)
    assert starts_with(server.draft([SYSTEM, USER, FINE, NEXT]), past)


def test_a_prompt_that_does_not_fit_goes_without_past_thinking() -> None:
    """And without nothing else: all that fits is told, notes and current values too."""
    server = Server()
    reply = said("assistant", "fine", reasoning_content=LONG)
    head = [head_with("id-1"), USER]
    server.say(server.draft(head), reply, words=LONG)
    loop = asks("x", reasoning_content="of this turn")
    late = [LATE, said("user", CARRIER.format("a job"))]
    messages = [
        head_with("id-2"),
        USER,
        FINE,
        said("user", "look"),
        loop,
        result("r"),
        *late,
    ]
    full = server.draft(messages)
    assert LONG in server.text(full) and full.transcript
    bare = server.draft(messages, room=len(full.rendered.ids) - 1)
    assert bare.transcript is None and LONG not in server.text(bare)
    for words in ("id-2", "of this turn", "look", "late words", "a job", "fine"):
        assert words in server.text(bare), words
    tight = server.draft(messages, room=len(bare.rendered.ids))
    assert tight.rendered.ids.tolist() == bare.rendered.ids.tolist()
    past = server.say(bare, said("assistant", "done"))
    again = server.draft([*messages, said("assistant", "done"), NEXT])
    assert starts_with(again, past)


@pytest.mark.parametrize("thought", ["a long thought " * 30, "思考🙂" * 50])
def test_replayed_thinking_counts_as_much_as_thinking_that_was_sent(
    thought: str,
) -> None:
    server = Server()
    reply = {**FINE, "reasoning_content": thought}
    server.say(server.draft([SYSTEM, USER]), reply, words=thought)
    for echo in (FINE, reply):
        messages = [SYSTEM, USER, echo, NEXT]
        n_full = len(server.draft(messages).rendered.ids)
        without = server.speaker.template.render_prompt(
            chat([SYSTEM, USER, FINE, NEXT])
        )
        bare = server.draft(messages, room=n_full - 100)
        assert bare.rendered.ids.tolist() == without.ids.tolist()


# -- pinned fields and notes -------------------------------------------------------------


def head_with(message_id: str, role: str = "developer") -> dict:
    fenced = f'```json\n{{\n  "message_id": "{message_id}"\n}}\n```'
    return said(role, f"You help.\n{fenced}\nBe brief.")


def restated(text: str) -> list[str]:
    return re.findall(r"\[message_id is now ([\w-]+)\]", text)


@pytest.mark.parametrize(
    "model", [m for m in MODELS if m != "system-behind/tiny"], indirect=True
)
def test_a_new_id_in_the_head_moves_nothing(model: str) -> None:
    """The first value stays; each other is told once, in the message that was newest then."""
    server = Server(model)
    past = server.say(server.draft([head_with("id-1"), USER]), FINE)
    rest = [USER, FINE, NEXT]
    plain, drifted = (server.draft([head_with(f"id-{n}"), *rest]) for n in (1, 2))
    assert starts_with(plain, past) and starts_with(drifted, past)
    assert restated(server.text(plain)) == [] and restated(server.text(drifted)) == [
        "id-2"
    ]
    line = "\n\n[message_id is now id-2]"
    assert server.text(drifted) == server.text(plain).replace("next", f"next{line}")
    past = server.say(drifted, said("assistant", "two"))
    rest = [*rest, said("assistant", "two"), said("user", "more")]
    for value, told in (
        ("id-2", ["id-2"]),
        ("id-1", ["id-2", "id-1"]),
        ("id-3", ["id-2", "id-3"]),
    ):
        draft = server.draft([head_with(value), *rest])
        assert starts_with(draft, past)
        assert restated(server.text(draft)) == told


def test_a_head_is_shared_by_all_who_begin_alike(model: str) -> None:
    server = Server(model)
    first = server.draft([head_with("id-1"), USER])
    other = server.draft([head_with("id-2"), said("user", "Something else.")])
    shared_ids = first.rendered.ids.tolist()[: first.rendered.positions.system_end]
    assert (
        other.rendered.ids.tolist()[: other.rendered.positions.system_end] == shared_ids
    )
    assert restated(server.text(other)) == ["id-2"]
    assert server.planner.ledger.snapshot()["heads"] == 1


def named(name: str, **fields: Any) -> dict:
    function = tool()["function"] | {"name": name} | fields
    return {"type": "function", "function": function}


def turned(value: Any) -> Any:
    """The same JSON, the keys of each object backwards."""
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    return value


def test_the_same_tools_in_another_order_move_nothing(model: str) -> None:
    """Nor in another order of their keys: they are told as they were first."""
    server = Server(model)
    tools = [named("look"), named("list"), named("write")]
    past = server.say(server.draft([SYSTEM, USER], tools=tools), FINE)
    messages = [SYSTEM, USER, FINE, NEXT]
    first = server.draft(messages, tools=tools)
    assert starts_with(first, past)
    assert json.dumps(turned(tools[0])) != json.dumps(tools[0])
    for order in (*permutations(tools), [turned(tools[0]), *tools[1:]]):
        draft = server.draft(messages, tools=list(order))
        assert draft.rendered.ids.tolist() == first.rendered.ids.tolist()
    others = [
        tools[:2],
        [*tools, tools[0]],
        [*tools[:2], named("write", description="Writes.")],
    ]
    for other in others:
        draft = server.draft(messages, tools=other)
        assert not starts_with(draft, past) and draft.transcript is None
        cold = Server(model).draft(messages, tools=other)
        assert draft.rendered.ids.tolist() == cold.rendered.ids.tolist()
    server.planner.ledger.forget(None)
    backwards = server.draft(messages, tools=tools[::-1])
    assert backwards.rendered.ids.tolist() != first.rendered.ids.tolist()


def test_who_asks_for_a_summary_without_tools_reads_nothing_again(model: str) -> None:
    """The conversation's tools are told, since it used them; who never called one has none."""
    server, offered = Server(model), [named("f"), named("other")]
    before = server.say(server.draft([SYSTEM, USER], tools=offered), asks("x"))
    history = [SYSTEM, USER, asks("x"), result("r")]
    past = server.say(server.draft(history, tools=offered), FINE)
    ask = [*history, FINE, said("user", "sum it up")]
    draft = server.draft(ask, tools=[])
    assert starts_with(draft, past)
    assert (
        draft.rendered.ids.tolist()
        == server.draft(ask, tools=offered).rendered.ids.tolist()
    )
    assert starts_with(server.draft(history, tools=[]), before)
    # as sent: of another server, without a call, with other words before it, after a restart
    elsewhere = [SYSTEM, said("user", "Another task."), *ask[2:]]
    for other in ([SYSTEM, USER, FINE, NEXT], elsewhere):
        cold = Server(model).draft(other, tools=[])
        assert (
            server.draft(other, tools=[]).rendered.ids.tolist()
            == cold.rendered.ids.tolist()
        )


def test_tools_that_do_not_fit_are_not_told_unasked(model: str) -> None:
    """Where the context is full a summary may be asked for without them: it must not be refused."""
    server, offered = Server(model), [named("f", description="many words " * 200)]
    server.say(server.draft([SYSTEM, USER], tools=offered), asks("x"))
    ask = [SYSTEM, USER, asks("x"), result("r"), said("user", "sum it up")]
    cold = Server(model).draft(ask, tools=[])
    n_whole = len(Server(model).draft(ask, tools=offered).rendered.ids)
    tight = server.draft(ask, tools=[], room=n_whole)  # and none for the summary
    assert tight.rendered.ids.tolist() == cold.rendered.ids.tolist()
    past, more = server.say(tight, FINE), [*ask, FINE, NEXT]
    assert starts_with(server.draft(more, tools=[]), past)
    with_tools = server.draft(more, tools=offered)  # not behind a past that has none
    assert not starts_with(with_tools, past)


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


def test_a_section_that_comes_and_goes_moves_nothing() -> None:
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
        past = server.say(server.draft([heads[first], *messages]), FINE)
        for n in range(2):
            messages = [*messages, FINE if n == 0 else said("assistant", "so"), NEXT]
            draft = server.draft([heads[second], *messages])
            assert starts_with(draft, past)
            text = server.text(draft)
            assert sections[second].strip() in text
            assert text.count("## Inbound") == sum(
                bool(sections[name]) for name in (first, second)
            )
            past = server.say(draft, said("assistant", "so"))


def test_who_has_no_section_is_told_nobody_elses() -> None:
    """A head is shared by those who have the same blocks in it (L-93, L-106)."""
    server, day = Server(), "Current date: 2026-11-20\n"

    def told(section: str, session: str = "") -> str:
        head = said("system", f"Be brief.\n{day}{section}# End")
        fields = {"user": session} if session else {}
        return server.text(server.draft([head, NEXT], **fields))

    first, phone = told(SECTION, "s1"), SECTION.replace("webchat", "phone")
    assert "## Inbound" not in told("", "s1")
    same = told(phone, "s1")
    assert same.startswith(first[: first.index("# End")]) and '"phone"' in same
    other = told(phone, "s2")
    assert '"phone"' in other.partition("# End")[0] and "webchat" not in other


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


def begun_by(sender: str, where: str, message_id: str = "id-1") -> list:
    role, text = PRIVATE[where]
    text = text.replace("SENDER", sender).replace("id-1", message_id)
    head = (
        f"Be brief.\nCurrent date: 2026-11-20\n{text if role == 'system' else ''}# End"
    )
    question = f"hello\n{text}" if role == "user" else "hello"
    if where == "routed":
        question = f"[Inter-session message] sourceSession={sender} x\nIt came.\nhello"
    return [said("system", head), said("user", question)]


def say_to(server: Server, messages: list, sender: str, session: str) -> dict:
    """The same words for everybody, after thinking about who asks."""
    reply = said("assistant", "Hello!", reasoning_content=f"{sender} greets me")
    draft = server.draft(messages, **({"user": session} if session else {}))
    server.say(draft, reply, words=f"{sender} greets me", session=session or "sha1:x")
    server.now += 1
    return said("assistant", "Hello!")


@pytest.mark.parametrize("where", PRIVATE)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("senders", SENDERS)
def test_nothing_of_one_sender_is_in_the_prompt_of_another(
    where: str, ids: tuple[str, str], senders: tuple[str, str]
) -> None:
    """Neither head nor transcript nor thinking: as if the first had never been here."""
    (first, second), (first_id, second_id) = senders, ids
    server = Server()
    hello = say_to(server, begun_by(first, where), first, first_id)
    fields = {"user": second_id} if second_id else {}

    begun = begun_by(second, where)
    for messages in (begun, [*begun, hello, NEXT]):
        draft, cold = server.draft(messages, **fields), Server().draft(messages)
        assert draft.transcript is None
        assert first not in server.text(draft) and second in server.text(draft)
        assert draft.rendered.ids.tolist() == cold.rendered.ids.tolist()


@pytest.mark.parametrize("ids", IDS)
def test_two_senders_in_turns_keep_their_own_transcripts(ids: tuple[str, str]) -> None:
    server, names = Server(), dict(zip(("alice", "bob"), ids, strict=True))
    for name, session in names.items():
        say_to(server, begun_by(name, "inbound context"), name, session)
    for name, session in names.items():
        fields = {"user": session} if session else {}
        messages = [*begun_by(name, "inbound context"), said("assistant", "Hello!")]
        draft = server.draft([*messages, NEXT], **fields)
        other = {"alice": "bob", "bob": "alice"}[name]
        text = server.text(draft)
        assert draft.transcript and f"{name} greets me" in text and other not in text


@pytest.mark.parametrize("ids", IDS)
def test_the_same_sender_with_another_message_id_shares_the_head(
    ids: tuple[str, str],
) -> None:
    server = Server()
    say_to(server, begun_by("alice", "inbound context"), "alice", ids[0])
    begun = begun_by("alice", "inbound context", "id-2")
    draft = server.draft(begun, **({"user": ids[1]} if ids[1] else {}))
    head = server.text(draft).partition("hello")[0]
    assert "id-1" in head and "id-2" not in head
    messages = [*begun, said("assistant", "Hello!"), NEXT]
    again = server.draft(messages, **({"user": ids[1]} if ids[1] else {}))
    assert again.transcript and "id-2" in server.text(again)


def test_a_value_that_changes_inside_a_session_moves_nothing() -> None:
    """A group: the session is the chat. And after a restart of the conversation, too."""
    server, fields = Server(), {"user": "group"}
    hello = say_to(server, begun_by("alice", "inbound context"), "alice", "group")
    begun = begun_by("bob", "inbound context")
    draft = server.draft([*begun, hello, NEXT], **fields)
    text = server.text(draft)
    assert draft.transcript and text.index('"alice"') < text.index('"bob"')
    anew = server.draft([begun[0], said("user", "another task")], **fields)
    head = server.text(anew).partition("another task")[0]
    assert '"alice"' in head and '"bob"' not in head
    assert '"bob"' in server.text(anew)


@pytest.mark.parametrize("ids", IDS)
def test_a_chat_that_another_sender_has_cloned_is_rendered_anew(
    ids: tuple[str, str],
) -> None:
    """The clone has the id of the call that was made here (L-103)."""
    server = Server()
    fields = [{"user": session} if session else {} for session in ids]
    begun, called = begun_by("alice", "inbound context"), asks("ls")
    called["tool_calls"][0]["id"] = "5e1e438e4"
    server.say(server.draft(begun, **fields[0]), called, session=ids[0] or "sha1:x")
    past = [called, said("tool", "a.txt", tool_call_id="5e1e438e4")]
    draft = server.draft([*begun_by("bob", "inbound context"), *past], **fields[1])
    assert draft.transcript is None and "alice" not in server.text(draft)


def test_a_section_that_is_absent_for_once_is_of_the_conversation_with_its_call() -> (
    None
):
    """OpenClaw sends no session id, and no section when a sub-agent has finished."""
    server, called = Server(), asks("ls")
    called["tool_calls"][0]["id"] = "5e1e438e4"
    begun = begun_by("alice", "inbound context")
    past = server.say(server.draft(begun), called, session="sha1:x")
    head = said("system", "Be brief.\nCurrent date: 2026-11-20\n# End")
    tail = [called, said("tool", "a.txt", tool_call_id="5e1e438e4")]
    assert starts_with(server.draft([head, begun[1], *tail]), past)
    unknown = [asks("ls"), said("tool", "a.txt", tool_call_id="call00000")]
    assert "alice" not in server.text(server.draft([head, begun[1], *unknown]))


def test_tools_of_one_sender_are_not_shown_to_another() -> None:
    """Who asks for a summary without tools is shown those of his conversation (L-91)."""
    server, called = Server(), asks("ls")
    begun = {name: begun_by(name, "inbound context") for name in ("alice", "bob")}
    tools = [named("look", description="the secret of alice")]
    server.say(server.draft(begun["alice"], tools=tools), called, session="sha1:x")
    tail = [called, result("a.txt"), NEXT]
    server.draft([*begun["alice"], *tail[:2]], tools=tools)
    for name, is_shown in (("alice", True), ("bob", False)):
        text = server.text(server.draft([*begun[name], *tail], tools=[]))
        assert ("the secret of alice" in text) is is_shown


def test_notes_in_a_system_prompt_stay_in_their_session() -> None:
    """With a rule configured so: a head is shared by those with the same notes."""
    server = Server(rule_inbound_context="transient")
    say_to(server, begun_by("alice", "inbound context"), "alice", "")
    draft = server.draft(begun_by("bob", "inbound context"))
    assert "alice" not in server.text(draft)


def test_a_session_that_was_forgotten_renders_its_head_anew() -> None:
    server, fields = Server(), {"user": "group"}
    say_to(server, begun_by("alice", "inbound context"), "alice", "group")
    server.planner.ledger.forget("group")
    text = server.text(server.draft(begun_by("bob", "inbound context"), **fields))
    assert "alice" not in text


def test_heads_used_least_recently_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_llm.HeadMemory, "MAX_HEADS", 2)
    server = Server()

    def told(words: str, value: str) -> list[str]:
        head = head_with(value)
        head["content"] += words
        return restated(server.text(server.draft([head, USER])))

    assert [told(words, "id-1") for words in "aba"] == [[], [], []]
    assert told("c", "id-1") == [] and server.planner.ledger.snapshot()["heads"] == 2
    assert told("a", "id-2") == ["id-2"] and told("b", "id-2") == []


def test_a_stamp_of_a_retry_is_restated() -> None:
    server = Server()
    messages = [SYSTEM, said("user", "[Fri 2026-11-20 14:16 UTC] hello"), FINE, NEXT]
    past = server.say(server.draft(messages[:2]), FINE)
    messages[1] = said("user", "[Fri 2026-11-20 14:19 UTC] hello")
    draft = server.draft(messages)
    assert starts_with(draft, past)
    assert re.search(
        r"next\n\n\[timestamp is now \[?Fri 2026-11-20 14:19 UTC", server.text(draft)
    )


def carried(server: Server, job: str, messages: list) -> start_llm.PromptPlan:
    return server.draft([*messages, said("user", CARRIER.format(job))])


def test_a_note_is_repeated_only_when_it_changed(model: str) -> None:
    """The carrier ends every request and is gone from the next one (OpenClaw 2026.9.6)."""
    server = Server(model)
    messages, counts, past = [SYSTEM, USER], [], [0]
    for n, job in enumerate(["none", "none", "job 1", "job 1", "none"]):
        draft = carried(server, job, messages)
        assert n == 0 or starts_with(draft, past)
        told = re.findall(r"INTERNAL_CONTEXT>>>\n(.*)\n", server.text(draft))
        counts.append(told)
        past = server.say(draft, said("assistant", f"a{n}"))
        messages = [*messages, said("assistant", f"a{n}"), said("user", f"u{n}")]
    assert [len(told) for told in counts] == [1, 1, 2, 2, 3]
    assert counts[-1] == ["none", "job 1", "none"]
    assert server.n_fallbacks() == 0


@pytest.mark.parametrize("words", ["hello", "hello\n", "\nhello", "\n\nhello\n"])
def test_a_reminder_that_moves_along_is_told_once(words: str) -> None:
    """`opencode run` ends a piped text in a line break, which the block has for its own (L-92)."""
    block = "<system-reminder>\nplan mode\n</system-reminder>"
    server, texts = (
        Server(),
        [{"type": "text", "text": text} for text in (words, block)],
    )
    past = server.say(server.draft([SYSTEM, said("user", texts)]), FINE)
    draft = server.draft(
        [SYSTEM, said("user", words), FINE, said("user", f"next\n\n{block}")]
    )
    assert starts_with(draft, past) and server.text(draft).count("plan mode") == 1
    gone = server.draft([SYSTEM, said("user", "hello"), FINE, NEXT])
    assert starts_with(gone, past)
    changed = block.replace("plan", "build")
    other = server.draft([SYSTEM, said("user", f"hello\n\n{changed}"), FINE, NEXT])
    assert starts_with(other, past) and f"next\n\n{changed}" in server.text(other)


# -- switches ---------------------------------------------------------------------------

STYLED = {
    "tail": CHATML + "{{ reasoning_effort if add_generation_prompt }}",
    "head": "<|im_start|>{{ reasoning_effort }}<|im_end|>" + CHATML,
    "tools": CHATML.replace(
        "(tools | tojson)", "(tools | tojson) + (reasoning_effort or '')"
    ),
    "calls": CHATML.replace(
        "c.function.name", "c.function.name + (reasoning_effort or '')"
    ),
}


@pytest.mark.parametrize("place", STYLED)
def test_a_switch_of_the_tail_keeps_the_past(place: str) -> None:
    """One that changes what stands before it does not: those tokens would be of another prompt."""
    server = Server()
    server.speaker = spoken("chatml/tiny", STYLED[place])
    loop = [asks("x"), result("r")]
    messages = [SYSTEM, USER, *loop]
    past = server.say(
        server.draft(messages, tools=[tool()], reasoning_effort="low"), FINE
    )
    messages = [*messages, FINE, NEXT]
    for effort in ("low", "high"):
        draft = server.draft(messages, tools=[tool()], reasoning_effort=effort)
        is_same = effort == "low" or place == "tail"
        assert starts_with(draft, past) if is_same else draft.transcript is None
        assert server.text(draft).count(effort) >= 1


@pytest.mark.parametrize(
    ("model", "keeps"), [("qwen3/qwen3", True), ("gemma-4/qwen3", False)]
)
def test_thinking_may_be_switched_in_mid_session(model: str, keeps: bool) -> None:
    """Qwen3 prints the switch in the generation prompt, gemma-4 in the head."""
    server = Server(model)
    past = server.say(server.draft([SYSTEM, USER], enable_thinking=True), FINE)
    draft = server.draft([SYSTEM, USER, FINE, NEXT], enable_thinking=False)
    assert starts_with(draft, past) if keeps else draft.transcript is None


# -- what is forgotten --------------------------------------------------------------------


def fill(server: Server, n: int, *, turns: int = 3) -> list:
    """A conversation of its own, recorded turn by turn; its messages."""
    messages = [SYSTEM, said("user", f"conversation {n}")]
    for turn in range(turns):
        server.now += 1
        reply = said("assistant", f"answer {turn}")
        server.say(server.draft(messages), reply)
        messages = [*messages, reply, said("user", f"more {turn}")]
    return messages


def counted(book: start_llm.Ledger) -> int:
    return sum(
        past.nbytes
        for alternatives in book._transcripts.values()
        for past in alternatives
    )


def test_the_ledger_is_bounded_and_forgets_what_was_used_least_recently() -> None:
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


def test_what_a_fifth_alternative_pushes_out_counts_no_more() -> None:
    server = Server(ledger_max_bytes=100_000)
    base = [SYSTEM, said("user", "a long question " * 100)]
    for n in range(30):
        server.now += 1
        server.say(server.draft(base), FINE, words=f"version {n}")
        draft = server.draft([*base, FINE, said("user", f"go on {n}")])
        server.say(draft, said("assistant", f"done {n}"))
        assert (
            server.planner.ledger.snapshot()["bytes"]
            == counted(server.planner.ledger)
            <= 100_000
        )
    server.now += 10**6
    assert not server.draft([*base, FINE, NEXT]).transcript
    assert (
        server.planner.ledger.snapshot()["bytes"] == counted(server.planner.ledger) == 0
    )


def test_no_past_is_forgotten_before_those_that_go_on_from_it() -> None:
    server = Server(ledger_max_bytes=20_000)
    for n in range(12):
        fill(server, n, turns=3 + n % 5)
        kept = [
            past.segments
            for pasts in server.planner.ledger._transcripts.values()
            for past in pasts
        ]
        own = {id(ids[-1]) for ids in kept}
        assert all(id(tokens) in own for ids in kept for tokens in ids)


def test_one_past_that_is_too_large_is_not_kept() -> None:
    server = Server(ledger_max_bytes=500)
    fill(server, 1)
    assert server.planner.ledger.snapshot() == {
        "transcripts": 0,
        "heads": 0,
        "bytes": 0,
    }


def test_a_past_expires_unless_it_is_used() -> None:
    server = Server(ledger_ttl_seconds=100.0)
    messages = fill(server, 1)
    for _ in range(3):
        server.now += 90
        assert server.draft(messages).transcript
    server.now += 101
    assert not server.draft(messages).transcript
    assert server.planner.ledger.snapshot() == {
        "transcripts": 0,
        "heads": 0,
        "bytes": 0,
    }


def test_zero_seconds_are_for_ever() -> None:
    server = Server(ledger_ttl_seconds=0.0)
    messages = fill(server, 1)
    server.now += 10**9
    assert server.draft(messages).transcript


# -- all of it at once --------------------------------------------------------------------


class Client:
    """An agent with the habits of CLIENTS.md, each by chance; checks every prompt it causes."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.seed = server, seed
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
        calls = self.history[-1].get("tool_calls", ()) if self.history else ()
        new = [
            said("tool", f"r {self.word()}", tool_call_id=each["id"]) for each in calls
        ]
        if not new or self.one_in(5):
            stamp = (
                f"[Fri 2026-11-20 14:1{self.chance.randrange(3)} UTC] " * self.one_in(2)
            )
            mode = f"\n<system-reminder>\nmode {self.chance.choice('ab')}\n</system-reminder>\n"
            new.append(said("user", f"{stamp}ask {self.word()}{mode * self.one_in(3)}"))
        if self.one_in(4):
            new.append(
                said("system", self.chance.choice(["9 left", f"late {self.word()}"]))
            )
        return new

    def request(self, new: list) -> list:
        value = f"id-{self.chance.randrange(3) if self.habit['id'] else 0}"
        carrier = said("user", CARRIER.format(self.chance.choice(["none", "job 1"])))
        tail = [carrier] if self.habit["carrier"] else []
        return [head_with(value), *self.history, *new, *tail]

    def reply(self) -> dict:
        texts = [f"{self.word()} é漢", self.word()][: 1 + self.one_in(3)]
        reply = (
            asks(*texts) if self.one_in(2) else said("assistant", f"so {self.word()}")
        )
        thought = (
            {"reasoning_content": f"I think {self.word()}"} if self.one_in(2) else {}
        )
        return reply | thought

    def turn(self) -> None:
        new = self.news()
        for _ in range(1 + self.one_in(4)):  # sent again, with other values
            messages = self.request(new)
            before = copy.deepcopy(messages)
            draft = self.server.draft(messages, tools=[tool()])
            assert messages == before
            self.check(messages, draft)
        reply = self.reply()
        self.past = self.server.say(draft, reply, session=str(self.seed))
        echo = dict(reply)
        if (
            self.echoes != "all"
            and echo.pop("reasoning_content", "")
            and self.echoes == "blank"
        ):
            echo["reasoning_content"] = "\n"
        self.history = [*self.history, *new, echo]

    def check(self, messages: list, draft: start_llm.PromptPlan) -> None:
        """Nothing is prefilled twice, nothing the client says is missing, the last id is right."""
        text = self.server.text(draft)
        assert not draft.refusal and starts_with(draft, self.past or [0])
        turns = self.server.speaker.template.canonicalize(chat(messages).messages)
        for turn in turns:
            start, said_words = (
                0,
                turn.original["content"] if turn.role != "assistant" else "",
            )
            fields = [*turn.pinned, *turn.inline_notes]
            for one in sorted(fields, key=lambda one: one.start):
                assert said_words[start : one.start].strip() in text
                start = one.end
            assert said_words[start:].strip() in text
            assert all(pinned.value in text for pinned in turn.pinned)
            assert all(note.text in text for note in turn.notes)
        value = turns[0].pinned[0].value
        assert re.findall(r'message_id(?:": "| is now )(id-\d)', text)[-1] == value


@given(seed=st.integers(0, 10**6))
@FEW
def test_whatever_a_client_does_nothing_is_lost_and_nothing_fed_twice(
    model_of_sessions: str, seed: int
) -> None:
    client = Client(Server(model_of_sessions), seed)
    for _ in range(5):
        client.turn()


@pytest.fixture(
    scope="module", params=["chatml/tiny", "qwen3.5/qwen3", "glm-4.7-flash/glm-4"]
)
def model_of_sessions(request: pytest.FixtureRequest) -> str:
    if not request.param.endswith("/tiny"):
        tokenizer_of(request.param)
    return str(request.param)


def test_eight_clients_share_a_ledger() -> None:
    server = Server()

    def work(seed: int) -> int:
        client = Client(server, seed)
        for _ in range(8):
            client.turn()
        return client.n_words

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    shown = server.planner.ledger.snapshot()
    assert shown["transcripts"] == 64 and shown["bytes"] == counted(
        server.planner.ledger
    )
    assert server.n_fallbacks() == 0


class BothMiss(start_llm.LRUCache):
    """A cache in which threads that look for a key at once all find nothing.

    Who finds nothing waits for the other one, unless that waits for a lock.
    """

    def __init__(self, capacity: int, lock: "WatchedLock") -> None:
        super().__init__(capacity)
        self.lock = lock
        self.n_misses = 0

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            self.n_misses += 1
            while self.n_misses < 2 and self.lock.n_entered < 2:
                os.sched_yield()
            raise


class WatchedLock:
    """A lock that counts who has asked for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n_entered = 0

    def __enter__(self) -> None:
        self.n_entered += 1
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def chosen_at_once(choose: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(choose, range(2)))


def test_two_threads_at_once_render_the_same_first_head() -> None:
    memory, lock = start_llm.HeadMemory(), WatchedLock()
    memory._heads_lock = lock  # type: ignore[assignment]
    memory._heads = BothMiss(8, lock)
    heads = [([said("system", f"id-{n}")], start_llm.NOTHING_STATED) for n in range(2)]

    first, second = chosen_at_once(lambda n: memory.choose(b"key", heads[n], ""))

    assert first is second


def test_two_threads_at_once_show_tools_in_the_same_order() -> None:
    memory, lock = start_llm.ToolMemory(), WatchedLock()
    memory._tools_lock = lock  # type: ignore[assignment]
    memory._first_order = BothMiss(8, lock)
    tools = (named("look"), named("ask"))
    orders = [tools, tools[::-1]]

    first, second = chosen_at_once(lambda n: memory.choose(orders[n], (), ""))

    assert first is second


def test_what_is_dropped_and_what_is_refused_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both counters would read 0 for ever if nothing moved them."""
    server = Server()
    billing = "x-anthropic-billing-header: cc_version=2.1.121.dd4; cch=0d3a3;\n"
    talk = [
        {"role": "system", "content": billing + "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    server.draft(talk)
    counts = server.planner.metrics.snapshot()
    assert counts["telemetry_dropped"] == 1
    assert counts["exact_key_rejected_by_model_lcp"] == 0

    server.say(server.draft(talk), {"role": "assistant", "content": "yes"})

    def refuse(*_: Any, **__: Any) -> None:
        raise start_llm.SpliceRefused("lost text")

    monkeypatch.setattr(start_llm.Splice, "_render_after", refuse)
    server.draft(
        [
            *talk,
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "u"},
        ]
    )
    assert server.planner.metrics.snapshot()["exact_key_rejected_by_model_lcp"] == 1
    assert server.n_fallbacks() == 1
