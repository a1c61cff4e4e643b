"""TOOLS: the formats of many models, right and nearly right, in any pieces."""

import importlib
import json
import pkgutil
import re
import time
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import start_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from nights import examples
from start_llm import ReplyReader, Tags, ToolCallFormat

PROPERTIES = {
    "path": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "yes": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "string"}},
    "tree": {"type": "object"},
    "any": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("read", "write", "list_all", "list-all")
]


class Format(NamedTuple):
    """A model's format: mlx-lm's parser, a piece of the template, tags of thinking."""

    parser: str
    template: str = ""
    think_start: str = "<think>"
    think_end: str = "</think>"

    def detect(self) -> ToolCallFormat:
        if not self.parser:
            start = "<|channel|>commentary to=functions."
            return ToolCallFormat(start, "<|call|>", "harmony")
        module = importlib.import_module(f"mlx_lm.tool_parsers.{self.parser}")
        tokenizer = SimpleNamespace(
            tool_call_start=module.tool_call_start,
            tool_call_end=module.tool_call_end,
            tool_parser=module.parse_tool_call,
        )
        found = ToolCallFormat.detect(self.template, "generic", tokenizer=tokenizer)
        assert found is not None

        return found


FORMATS = {
    "gemma": Format("gemma4", "", "<|channel>thought", "<channel|>"),
    "function_gemma": Format("function_gemma"),
    "harmony": Format("", "", "<|channel|>analysis<|message|>", "<|end|>"),
    "mistral_lists": Format("mistral", "[TOOL_CALLS][{"),
    "mistral_11": Format("mistral", "[TOOL_CALLS]name[CALL_ID]id[ARGS]{}"),
    "mistral_13": Format("mistral", "[TOOL_CALLS]name[ARGS]{}"),
    "kimi": Format("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    "minicpm": Format("minicpm5", '<function name="f"><param name="a">'),
    "minimax": Format("minimax_m2", '<minimax:tool_call><invoke name="f">'),
    "lfm2": Format("pythonic"),
    "longcat": Format("longcat"),
    "muse": Format("muse_spark"),
    "kimi_k3": Format("kimi_k3"),
    "glm": Format("glm47", "<tool_call><arg_key>"),
    "hermes": Format("json_tools", "<tool_call>"),
    "qwen": Format("qwen3_coder", "<tool_call>\n<function="),
}


class Reply(NamedTuple):
    calls: list[tuple[str, Any]]
    content: str | None = None
    reasoning: str | None = None


def read_message(
    name: str,
    pieces: list[str],
    *,
    in_reasoning: bool = False,
    tools: list[Any] = TOOLS,
) -> Any:
    """What a client has of a reply that comes in these pieces."""
    form = FORMATS[name]
    tool_format = form.detect()
    tags = Tags(
        think_start=start_llm.think_tag_pattern(form.think_start),
        tool_start=re.escape(tool_format.start),
        untagged_call=tool_format.untagged_pattern(tools),
        think_end=start_llm.think_tag_pattern(form.think_end),
    )
    ids = map("call_{}".format, count())
    reader = ReplyReader(
        tags, tool_format, in_reasoning=in_reasoning, tools=tools, ids=ids
    )

    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    return reader.message()


def read(name: str, pieces: list[str], *, in_reasoning: bool = False) -> Reply:
    """Its calls, with their arguments read, and its texts."""
    message = read_message(name, pieces, in_reasoning=in_reasoning)
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [(f["name"], json.loads(f["arguments"])) for f in functions]
    return Reply(calls, message["content"], message.get("reasoning_content"))


def token_like(text: str) -> list[str]:
    """Tags whole, words whole, all other characters alone."""
    return re.findall(r"<\|?/?[\w:]+\|?>|\[[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)


def read_in_any_pieces(name: str, text: str) -> Reply:
    reply = read(name, [text])
    assert read(name, list(text)) == reply
    assert read(name, token_like(text)) == reply
    return reply


# -- Gemma -----------------------------------------------------------------------------

Q = '<|"|>'
E = "<escape>"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (f"path:{Q}a.md{Q}", {"path": "a.md"}),
        ("", {}),
        # Marks that are missing, or plain quotes in their place.
        ("path:a.md", {"path": "a.md"}),
        (f"path:{Q}a.md", {"path": "a.md"}),
        (f"path:a.md{Q}", {"path": "a.md"}),
        ('path:"a.md"', {"path": "a.md"}),
        (f"path:{Q}a.md,any:{Q}b{Q}", {"path": "a.md", "any": "b"}),
        (f"path:{Q}a.md,any:{Q}{Q}", {"path": "a.md", "any": ""}),
        ("path:hello, world,n:3", {"path": "hello, world", "n": 3}),
        ("path:note: see, this: that", {"path": "note: see, this: that"}),
        ("tree:{a:x,b:y z}", {"tree": {"a": "x", "b": "y z"}}),
        ("items:[a, b]", {"items": ["a", "b"]}),
        ("path:,n:1", {"path": "", "n": 1}),
        ("path:'abc'", {"path": "abc"}),
        ("path:'it\\'s, n:2',n:1", {"path": "it's, n:2", "n": 1}),
        # Line breaks before a text are part of it, before others they are not.
        ("path:\nabc,n:\n1", {"path": "\nabc", "n": 1}),
        (f"path:\n{Q}abc{Q}", {"path": "abc"}),
        (f"path:{Q}\nabc{Q}", {"path": "\nabc"}),
        # Brackets and tags inside a string.
        ("path:a}b,n:5", {"path": "a}b", "n": 5}),
        ("path:${HOME}", {"path": "${HOME}"}),
        ("path:{not json", {"path": "{not json"}),
        ("path:[x] done", {"path": "[x] done"}),
        ("any:[x] done", {"any": "[x] done"}),
        (f"path:{Q}if x {{ }} }}{Q},n:5", {"path": "if x { } }", "n": 5}),
        (f"path:{Q}<tool_call|>{Q},n:5", {"path": "<tool_call|>", "n": 5}),
        (f'path:{Q}say "hi",\n b:{Q}', {"path": 'say "hi",\n b:'}),
        (f"path:{Q}a{Q}}}", {"path": "a"}),  # one bracket too many
        ("path:a.md}", {"path": "a.md"}),
        # Values of another type than their marks say.
        ("path:5", {"path": "5"}),
        (f"n:{Q}5{Q}", {"n": 5}),
        (f"n:{Q}five{Q}", {"n": "five"}),
        (f"any:{Q}5{Q}", {"any": "5"}),
        ("items:[1, 2]", {"items": ["1", "2"]}),
        ("items:[1, 2 , ]", {"items": ["1", "2"]}),
        ("items:[1,,2]", {"items": "[1,,2]"}),
        ("items:[,1]", {"items": "[,1]"}),
        (f"items:[{Q}{Q},a]", {"items": ["", "a"]}),
        ("x:1e5,yes:True,any:None", {"x": 1e5, "yes": True, "any": None}),
        # Objects and arrays in each other, keys in quotes.
        (f"tree:{{a:[1,{{b:{Q}c{Q}}}]}}", {"tree": {"a": [1, {"b": "c"}]}}),
        (f'{Q}n{Q}:1,"x":2', {"n": 1, "x": 2}),
        (f"path: {Q}a{Q}, n: 5", {"path": "a", "n": 5}),
        ("other-key:1,n:2", {"other-key": 1, "n": 2}),
    ],
)
@pytest.mark.parametrize("name", ["gemma", "function_gemma"])
def test_gemma_arguments_right_and_nearly_right(
    name: str, written: str, arguments: dict[str, Any]
) -> None:
    start, end, mark = {
        "gemma": ("<|tool_call>", "<tool_call|>", Q),
        "function_gemma": ("<start_function_call>", "<end_function_call>", E),
    }[name]
    written = written.replace(Q, mark)
    text = f"{start}call:read{{{written}}}{end}"

    reply = read_in_any_pieces(name, text)

    assert reply == Reply([("read", arguments)])


REFERRING_PARAMETERS = {
    "properties": {
        "path": {"$ref": "#/$defs/text"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/text"}},
        "tree": {"$ref": "#/$defs/tree"},
        "lists": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
    },
    "$defs": {
        "list": {"type": "array", "items": {"type": "string"}},
        "text": {"type": "string"},
        "tree": {"type": "object", "properties": {"path": {"$ref": "#/$defs/text"}}},
    },
}
CIRCULAR_PARAMETERS = {
    "properties": {"path": {"$ref": "#/$defs/text"}},
    "$defs": {"text": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/text"}]}},
}


def tool_named_read(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "read", "parameters": parameters}}


def arguments_of(message: Any) -> Any:
    (call,) = message["tool_calls"]
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("name", ["gemma", "function_gemma"])
def test_gemma_arguments_have_the_types_that_a_schema_refers_to(name: str) -> None:
    start, end = {
        "gemma": ("<|tool_call>", "<tool_call|>"),
        "function_gemma": ("<start_function_call>", "<end_function_call>"),
    }[name]
    values = "path:5,items:[6,true],tree:{path:7},lists:[8,a]"
    text = f"{start}call:read{{{values}}}{end}"
    tools = [tool_named_read(REFERRING_PARAMETERS)]

    message = read_message(name, [text], tools=tools)

    assert arguments_of(message) == {
        "path": "5",
        "items": ["6", "true"],
        "tree": {"path": "7"},
        "lists": ["8", "a"],
    }


def test_a_schema_may_refer_to_itself_in_a_union() -> None:
    text = "<tool_call>\n<function=read>\n<parameter=path>\n5\n</parameter>\n"
    text += "</function>\n</tool_call>"
    tools = [tool_named_read(CIRCULAR_PARAMETERS)]

    message = read_message("qwen", [text], tools=tools)

    assert arguments_of(message) == {"path": "5"}


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<|tool_call>call:read{n:1}<tool_call|><tool_call|>ok", ["read"], "ok"),
        ("<|tool_call>call:read{n:1}call:write{}<tool_call|>", ["read", "write"], None),
        ("<|tool_call>call:read{}<tool_call|><|tool_call>call:write{}<tool_call|>",
         ["read", "write"], None),
        ("<|tool_call>read{n:1}<tool_call|>", ["read"], None),
        ("<|tool_call>call:read{n:1}", ["read"], None),
        ("I look.\ncall:read{n:1}<tool_call|>", ["read"], "I look."),
        ("The tag <tool_call|> ends it.", [], "The tag <tool_call|> ends it."),
        ("<|tool_call>call:rm{n:1}<tool_call|>", [],
         "<|tool_call>call:rm{n:1}<tool_call|>"),
        ("<|tool_call>call:read{n:1", [], "<|tool_call>call:read{n:1"),
        (f"<|tool_call>call:read{{path:{Q}a{Q}}}<tool_call|><|tool_call>call:write"
         f"{{path:{Q}b}}<tool_call|>", ["read", "write"], None),
        ("In a call:read{} there is none.", [], "In a call:read{} there is none."),
    ],
)  # fmt: skip
def test_gemma_calls_begin_and_end_as_models_do_it(
    text: str, calls: list[str], content: str | None
) -> None:
    reply = read_in_any_pieces("gemma", text)

    assert [name for name, _ in reply.calls] == calls
    assert reply.content == content


@pytest.mark.parametrize(
    "written",
    [
        f'path:{Q}a.md"',
        f'path:"a.md{Q},n:1',
        "n 1",
        "n:1 x:2",
        "n:1,,x:2",
        ":1",
        "tree:{a",
        "{",
        "n:1,n:2",
        "tree:{a:1,a:2}",
    ],
)
def test_gemma_arguments_that_cannot_be_read_are_text(written: str) -> None:
    """A call must not run with fewer arguments than were written."""
    text = f"<|tool_call>call:read{{{written}}}<tool_call|>"

    reply = read_in_any_pieces("gemma", text)

    known_text = json.dumps([list(arguments.values()) for _, arguments in reply.calls])
    if reply.calls:
        assert all(letter in known_text for letter in re.findall(r"\d", written))
    else:
        assert reply.content == text


def test_a_file_that_quotes_the_end_tag_is_read_once() -> None:
    """Each piece searched all that came before: 4 ms a token after 6,600 of them."""
    lines = "say <tool_call|> here\n" * 2_000
    text = f"<|tool_call>call:read{{path:{Q}{lines}{Q}}}<tool_call|>"
    began = time.process_time()

    reply = read("gemma", token_like(text))

    assert reply == Reply([("read", {"path": lines})])
    assert time.process_time() - began < 6


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", [" ", "}", "{", "[", ",", "n:", ", ", "} ", Q, "a,a:"])
@pytest.mark.parametrize("key", ["path", "any", "tree", "items"])
def test_gemma_arguments_that_run_away_take_no_longer_than_their_length(
    run: str, key: str
) -> None:
    text = f"<|tool_call>call:read{{{key}:a{run * 30_000}b<tool_call|>"
    began = time.process_time()

    read("gemma", [text])

    assert time.process_time() - began < 4


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("thought\nI think.<channel|>Hi", Reply([], "Hi", "I think.")),
        ("<|channel>thought\nI think.<channel|>Hi", Reply([], "Hi", "I think.")),
        ("thought\n<channel|>Hi", Reply([], "Hi")),
        ("thought", Reply([], "thought")),
        ("My thought\nis this.", Reply([], "My thought\nis this.")),
        ("A list:\nthought\nword", Reply([], "A list:\nthought\nword")),
        (
            "thought\nWhy?\n<channel|><|tool_call>call:read{n:1}<tool_call|>",
            Reply([("read", {"n": 1})], None, "Why?"),
        ),
    ],
)
def test_gemma_thinks_also_without_the_tag_before_it(text: str, reply: Reply) -> None:
    assert read_in_any_pieces("gemma", text) == reply


# -- harmony ---------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PATH = '{"path": "a.md"}'


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=read <|constrain|>json<|message|>",
        "<|channel|>commentary to=read json<|message|>",
        "<|channel|>commentary to=read<|message|>",
        " to=read<|channel|>commentary json<|message|>",
        " to=functions.read<|channel|>commentary json<|message|>",
        "<|channel|><|channel|>commentary to=functions.read json<|message|>",
        "<|channel|>analysis to=read code<|message|>",
    ],
)
@pytest.mark.parametrize("thought", ["", THOUGHT])
@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_harmony_calls_have_many_headers(header: str, thought: str, end: str) -> None:
    reply = read_in_any_pieces("harmony", thought + header + PATH + end)

    reasoning = "Why?" if thought else None
    assert reply == Reply([("read", {"path": "a.md"})], None, reasoning)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f" to=assistant{FINAL}Hi", "Hi"),
        (f"{THOUGHT} to=assistant{FINAL}Hi", "Hi"),
        (f"{THOUGHT}<|channel|>{FINAL}Hi", "Hi"),
        ("<|channel|>commentary to=assistant<|message|>Hi", "Hi"),
        (f"<|channel|>commentary to=assistant{FINAL}Hi", "Hi"),
        # Two messages of one channel are two paragraphs.
        (f"{FINAL}One.<|end|><|start|>assistant{FINAL}Two.", "One.\n\nTwo."),
        (f"<|channel|>commentary<|message|>One.<|end|>{THOUGHT}{FINAL}Two.<|end|>",
         "One.\n\nTwo."),
        (f"{FINAL}One.\n<|end|><|start|>assistant{FINAL}\nTwo.", "One.\n\nTwo."),
        # Markup that is spoken of.
        (f"{FINAL}Here <|end|> ends it.", "Here <|end|> ends it."),
        (f"{FINAL}`<|start|>assistant{FINAL}` begins it.",
         f"`<|start|>assistant{FINAL}` begins it."),
        (f"{FINAL}Say `to=functions.read` or to=read there.",
         "Say `to=functions.read` or to=read there."),
        (f"{FINAL}So:\nto=read x", "So:\nto=read x"),
    ],
)  # fmt: skip
def test_harmony_answers_are_all_that_is_said(text: str, content: str) -> None:
    reply = read_in_any_pieces("harmony", text)

    assert (reply.calls, reply.content) == ([], content)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=container.exec code<|message|>",
        "<|channel|>analysis to=python code<|message|>",
        " to=python<|channel|>analysis <|constrain|>code<|message|>",
        " to=browser.search<|message|>",
    ],
)
def test_harmony_code_for_a_tool_that_nobody_offered_is_no_answer(header: str) -> None:
    reply = read_in_any_pieces("harmony", f"{THOUGHT}{header}ls(1)")
    assert reply == Reply([], None, "Why?\n\nls(1)")

    text = f"{header}ls(1)<|end|><|start|>assistant{FINAL}Hi"
    assert read_in_any_pieces("harmony", text) == Reply([], "Hi", "ls(1)")


def test_harmony_thoughts_are_parted_as_messages_are() -> None:
    second_thought = THOUGHT.replace("Why?", "So.")

    reply = read_in_any_pieces("harmony", f"{THOUGHT}{second_thought}{FINAL}Hi")

    assert reply == Reply([], "Hi", "Why?\n\nSo.")


HARMONY_PARTS = [
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>", "<|",
    "assistant", " to=", "functions.", "read", "rm", "analysis", "final", "commentary",
    " json", '{"path": "a"}', "{", "`", "\n", " ", "word", "thought",
]  # fmt: skip


@given(st.lists(st.sampled_from(HARMONY_PARTS), max_size=14).map("".join))
def test_harmony_reads_the_same_in_any_pieces(text: str) -> None:
    read_in_any_pieces("harmony", text)


# -- Mistral ---------------------------------------------------------------------------

MISTRALS = ["mistral_lists", "mistral_11", "mistral_13"]
ONE = '{"name": "read", "arguments": {"path": "a]\\\\\\"}"}}'
TWO = '{"name": "write", "arguments": "{\\"n\\": 1}", "id": "aB3dE6gH9"}'
ONE_READ = ("read", {"path": 'a]\\"}'})
TWO_READ = ("write", {"n": 1})


@pytest.mark.parametrize("name", MISTRALS)
@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (f"[TOOL_CALLS][{ONE}]", Reply([ONE_READ])),
        (f"[TOOL_CALLS] [{ONE}, {TWO}]\n\nDone.", Reply([ONE_READ, TWO_READ], "Done.")),
        (f"I look.[TOOL_CALLS]{TWO} ", Reply([TWO_READ], "I look.")),
        (f"[TOOL_CALLS][{ONE}][TOOL_CALLS][{TWO}]", Reply([ONE_READ, TWO_READ])),
        ('[TOOL_CALLS][{"name": "list_all"}]', Reply([("list_all", {})])),
        ('[TOOL_CALLS]write[ARGS]{"n": 1}\nDone.', Reply([TWO_READ], "Done.")),
        ('[TOOL_CALLS]write{"n": 1}', Reply([TWO_READ])),
        ('[TOOL_CALLS]write[CALL_ID]aB3dE6gH9[ARGS]{"n": 1}', Reply([TWO_READ])),
        ('write[ARGS]{"n": 1}', Reply([TWO_READ])),
        ('[TOOL_CALLS]write{"n": 1}write[ARGS]{"n": 1}', Reply([TWO_READ] * 2)),
        ("write[ARGS] is how.", Reply([], "write[ARGS] is how.")),
        (
            'So:\nwrite[ARGS] it.[TOOL_CALLS]write[ARGS]{"n": 1}',
            Reply([TWO_READ], "So:\nwrite[ARGS] it."),
        ),
    ],
)
def test_mistral_models_write_all_of_its_formats(
    name: str, text: str, reply: Reply
) -> None:
    found = read_in_any_pieces(name, text)

    assert found.calls == reply.calls
    assert (found.content or "").strip() == (reply.content or "")


@pytest.mark.parametrize("name", MISTRALS)
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "read", "parameters": {"n": 1}}]',
        '[TOOL_CALLS][{"name": "rm", "arguments": {"n": 1}}]',
        '[TOOL_CALLS][{"name": "read", "arguments": {"n": 1}}, {"name": "rm"}]',
        '[TOOL_CALLS][{"name": "read", "arguments": [1]}] ok',
        '[TOOL_CALLS][{"name": "read", "arguments": {"n": 1}',
        '[TOOL_CALLS][{"name": "read", "arguments": "{n}"}]',
        "[TOOL_CALLS] begins a call.",
    ],
)
def test_mistral_lists_that_are_no_calls_are_text(name: str, text: str) -> None:
    assert read_in_any_pieces(name, text) == Reply([], text)


@pytest.mark.parametrize("name", MISTRALS)
def test_a_call_keeps_the_id_that_the_model_wrote(name: str) -> None:
    """Its template prints it. An id that comes twice names one call only."""
    written = 'read[CALL_ID]aB3dE6gH9[ARGS]{"n": 1}'

    message = read_message(name, [f"[TOOL_CALLS]{written}[TOOL_CALLS]{written}"])

    ids = [call["id"] for call in message["tool_calls"]]
    assert ids == ["aB3dE6gH9", "call_0"]
    message = read_message(name, [f"[TOOL_CALLS][{TWO}]"])
    assert message["tool_calls"][0]["id"] == "aB3dE6gH9"


# -- Kimi, MiniCPM, MiniMax, LFM2 ------------------------------------------------------


def write_kimi(name: str, arguments: str, index: int = 0) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|>"
    )


SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


@pytest.mark.parametrize("start", ["", SECTION[0], "<|tool_call_section_begin|>"])
@pytest.mark.parametrize("end", ["", SECTION[1], "<|tool_call_section_end|>"])
def test_kimi_calls_need_no_section(start: str, end: str) -> None:
    calls = write_kimi("read", PATH) + write_kimi("write", '{"n": 1}', 1)

    reply = read_in_any_pieces("kimi", f"I look.\n{start}{calls}{end}\nDone.")

    assert reply.calls == [("read", {"path": "a.md"}), ("write", {"n": 1})]
    assert reply.content == "I look.\nDone."
    cut = read_in_any_pieces("kimi", start + calls.removesuffix("<|tool_call_end|>"))
    assert cut == Reply(reply.calls)


@pytest.mark.parametrize("start", ["", SECTION[0]])
@pytest.mark.parametrize(
    ("calls", "content"),
    [
        # Closing tags that were forgotten; an identifier without its first half.
        (
            write_kimi("read", PATH).removesuffix("<|tool_call_end|>")
            + write_kimi("write", '{"n": 1}', 1),
            None,
        ),
        (
            write_kimi("read", PATH).replace("functions.", "")
            + "\n"
            + write_kimi("write", '{"n": 1}', 1),
            None,
        ),
        # After a call of a tool that nobody offered, and after text.
        (
            write_kimi("read", PATH)
            + write_kimi("rm", '{"n": 5}', 1)
            + write_kimi("write", '{"n": 1}', 2),
            write_kimi("rm", '{"n": 5}', 1),
        ),
        (
            write_kimi("read", PATH) + "And:" + write_kimi("write", '{"n": 1}', 1),
            "And:",
        ),
    ],
)
def test_kimi_calls_follow_each_other(
    start: str, calls: str, content: str | None
) -> None:
    reply = read_in_any_pieces("kimi", start + calls)

    assert reply.calls == [("read", {"path": "a.md"}), ("write", {"n": 1})]
    assert reply.content == content


@pytest.mark.parametrize(
    "text",
    [
        f"Say `{write_kimi('read', PATH)}` to read.",
        SECTION[0] + SECTION[1] + "Hi",
        SECTION[0] + write_kimi("read", ""),
        SECTION[0] + write_kimi("read", PATH).replace(":0", ""),
        SECTION[0] + write_kimi("read", PATH).partition("argument")[0],
    ],
)
def test_kimi_calls_that_are_none_are_text(text: str) -> None:
    assert read_in_any_pieces("kimi", text) == Reply([], text)


def test_kimi_calls_leave_while_they_are_generated() -> None:
    call = write_kimi("read", '{"path": "a long path"}')

    message = read_message("kimi", [SECTION[0], call.partition(" path")[0]])

    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"path": "a l')


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('<param name="path">a.md</param>', {"path": "a.md"}),
        ('\n<param name="path">\n a.md\n</param>\n', {"path": "a.md"}),
        ('<param name="n">5</param><param name="any">a</param>', {"n": 5, "any": "a"}),
        ('<param name="path"><![CDATA[a <b>\n]]></param><param name="n">5</param>',
         {"path": "a <b>\n", "n": 5}),
        ('<param name="path"><![CDATA[</param></function>]]></param>',
         {"path": "</param></function>"}),
        ('<param name="path">\n<![CDATA[ a ]]>\n</param>', {"path": " a "}),
        ('<param name="path">a ]]></param>', {"path": "a ]]>"}),
        ('<param name="path"><b></param>', {"path": "<b>"}),
        ('<param name="path">a.md', {"path": "a.md"}),
        ('<param name="path"></param>', {"path": ""}),
        ("", {}),
    ],
)  # fmt: skip
def test_minicpm_arguments_and_quoted_ones(
    written: str, arguments: dict[str, Any]
) -> None:
    text = f'<function name="read">{written}</function>'

    assert read_in_any_pieces("minicpm", text) == Reply([("read", arguments)])
    twice = read_in_any_pieces("minicpm", f"{text}\n{text}")
    assert twice == Reply([("read", arguments)] * 2)


def write_minimax(value: str) -> str:
    return (
        f'<minimax:tool_call>\n<invoke name="read">\n<parameter name="path">{value}'
        "</parameter>\n</invoke>\n</minimax:tool_call>"
    )


@pytest.mark.parametrize(
    "value",
    [
        "a</parameter> b",
        "a '</parameter>\n</invoke>' b",
        "a</invoke> b",
        "a</minimax:tool_call>b",
    ],
)
def test_minimax_values_may_contain_closing_tags(value: str) -> None:
    reply = read_in_any_pieces("minimax", write_minimax(value) + "Done.")

    assert reply == Reply([("read", {"path": value})], "Done.")


def test_minimax_text_after_a_block_that_was_not_closed_is_text() -> None:
    text = write_minimax("a").removesuffix("</minimax:tool_call>") + "Done."

    assert read_in_any_pieces("minimax", text) == Reply(
        [("read", {"path": "a"})], "Done."
    )


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ('[read(path="a.md")]', [("read", {"path": "a.md"})]),
        ('read(path="a.md")', [("read", {"path": "a.md"})]),
        ('[read(path="a"), write(n=2)]', [("read", {"path": "a"}), ("write", {"n": 2})]),
        ('[{"name": "read", "arguments": {"n": 1}}]', [("read", {"n": 1})]),
        ('{"name": "read", "arguments": {"n": 1}}', [("read", {"n": 1})]),
        ('\n[read(path="two\nlines")]\n', [("read", {"path": "two\nlines"})]),
        ('[read(path="cp a \\\n b")]', [("read", {"path": "cp a \\\n b"})]),
        ('[read(path="a\\\\\nb")]', [("read", {"path": "a\\\nb"})]),
        ('[read(path="a\r\nb", text="c\\\rd")]',
         [("read", {"path": "a\r\nb", "text": "c\\\rd"})]),
        ("[read(path=R'''a\n\"b\"\\c''')]", [("read", {"path": 'a\n"b"\\c'})]),
        ('[read(path="""a\r\n"b" \'c\'""")]', [("read", {"path": 'a\r\n"b" \'c\''})]),
        ("[read(tree={'a': true}, yes=False)]",
         [("read", {"tree": {"a": True}, "yes": False})]),
        ("[list_all()]", [("list_all", {})]),
        ("[list-all(), read(n=1)]", [("list-all", {}), ("read", {"n": 1})]),
        # What is not understood must not run with less.
        ('[read("a.md")]', []),
        ('[read(path="a" n=1)]', []),
        ("[read(path=docs/a.md, n=1)]", []),
        ("[read(**{'n': 1})]", []),
        ("[read(n=1), rm()]", []),
        ("[read(path=a b)]", []),
        ("[2 - list_all()]", []),
        ("[]", []),
    ],
)  # fmt: skip
def test_lfm2_calls_are_python_or_json(written: str, calls: list[Any]) -> None:
    text = f"<|tool_call_start|>{written}<|tool_call_end|>"

    reply = read_in_any_pieces("lfm2", f"Go.{text}")

    assert reply == Reply(calls, "Go." if calls else f"Go.{text}")


# -- formats that mlx-lm's parsers read ------------------------------------------------


def between_tags(call_tag: str, key_tag: str, value_tag: str) -> Any:
    def write(name: str, arguments: dict[str, Any]) -> str:
        written = "".join(
            f"<{key_tag}>{key}</{key_tag}>\n<{value_tag}>{bare(value)}</{value_tag}>\n"
            for key, value in arguments.items()
        )
        return f"<{call_tag}>{name}\n{written}</{call_tag}>"

    return write


def between_named_tags(start: str, item: str, close: str, end: str) -> Any:
    """`item` for each argument, with KEY and VALUE; NAME in `start` is the tool's."""

    def write(name: str, arguments: dict[str, Any]) -> str:
        written = "".join(
            item.replace("KEY", key).replace("VALUE", bare(value))
            for key, value in arguments.items()
        )
        return f"{start.replace('NAME', name)}{written}{close}{end}"

    return write


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_kimi_k3(name: str, arguments: dict[str, Any]) -> str:
    written = "".join(
        f'<|open|>argument key="{key}" type="'
        f'{"string" if isinstance(value, str) else "any"}"<|sep|>{bare(value)}'
        "<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )

    return (
        f'<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{written}'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    )


def write_python(name: str, arguments: dict[str, Any]) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({written})]<|tool_call_end|>"


def write_json(name: str, arguments: dict[str, Any]) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


# By mlx-lm's parser: our format, and a writer of a call in it. Written from the formats'
# descriptions, so that it owes nothing to either reader.
WRITERS = {
    "function_gemma": (
        "function_gemma",
        lambda name, arguments: (
            "<start_function_call>call:"
            f"{name}{write_gemma(arguments, E)}<end_function_call>"
        ),
    ),
    "gemma4": (
        "gemma",
        lambda name, arguments: (
            f"<|tool_call>call:{name}{write_gemma(arguments, Q)}<tool_call|>"
        ),
    ),
    "glm47": ("glm", between_tags("tool_call", "arg_key", "arg_value")),
    "laguna": ("glm", between_tags("tool_call", "arg_key", "arg_value")),
    "json_tools": ("hermes", write_json),
    "kimi_k2": (
        "kimi",
        lambda name, arguments: (
            SECTION[0] + write_kimi(name, json.dumps(arguments)) + SECTION[1]
        ),
    ),
    "kimi_k3": ("kimi_k3", write_kimi_k3),
    "longcat": (
        "longcat",
        between_tags("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    ),
    "minicpm5": (
        "minicpm",
        between_named_tags(
            '<function name="NAME">',
            '<param name="KEY"><![CDATA[VALUE]]></param>',
            "</function>",
            "",
        ),
    ),
    "minimax_m2": (
        "minimax",
        between_named_tags(
            '<minimax:tool_call>\n<invoke name="NAME">\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            "</invoke>\n",
            "</minimax:tool_call>",
        ),
    ),
    "mistral": (
        "mistral_13",
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
    ),
    "muse_spark": (
        "muse",
        between_named_tags(
            '<atem:function_calls><atem:invoke name="NAME">',
            '<atem:parameter name="KEY">VALUE</atem:parameter>',
            "</atem:invoke>",
            "</atem:function_calls>",
        ),
    ),
    "pythonic": ("lfm2", write_python),
    "qwen3_coder": (
        "qwen",
        between_named_tags(
            "<tool_call>\n<function=NAME>\n",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
            "</function>\n",
            "</tool_call>",
        ),
    ),
}
NESTED = st.fixed_dictionaries(
    {"path": st.sampled_from(["a.md", "docs/b c.md", 'say "hi"', "x{y}z"])},
    optional={
        "n": st.integers(-99, 99),
        "yes": st.booleans(),
        "items": st.lists(st.sampled_from(["a", "b c"]), max_size=2),
        "tree": st.fixed_dictionaries({}, optional={"a": st.just({"b": [1, "c"]})}),
    },
)


@pytest.mark.parametrize("parser", WRITERS)
@given(arguments=NESTED, cuts=st.lists(st.integers(0, 999), max_size=9))
def test_what_mlx_lm_reads_rightly_is_read_rightly(
    parser: str, arguments: dict[str, Any], cuts: list[int]
) -> None:
    name, write = WRITERS[parser]
    text = write("read", arguments)
    edges = [0, *sorted({cut % len(text) for cut in cuts}), len(text)]

    reply = read(name, [text[a:b] for a, b in pairwise(edges)])

    assert reply == Reply([("read", arguments)])
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    body = text.partition(module.tool_call_start)[2]
    if module.tool_call_end:
        body = body.rpartition(module.tool_call_end)[0]
    try:
        call = module.parse_tool_call(body, TOOLS)
    except Exception:  # noqa: BLE001 - they raise what they like
        return
    (call,) = call if isinstance(call, list) else [call]
    is_right = call["arguments"] == arguments
    assert is_right or parser == "function_gemma"  # which cuts lists in pieces


def test_each_parser_of_mlx_lm_has_a_format_here() -> None:
    """A new one is read by mlx-lm alone until it is tried here."""
    names = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}

    assert names == set(WRITERS)


# Of each parser: how its format writes a call of `read` with two arguments, and what is
# left when the value of the second has no closing tag, or no value.
FOREIGN = {
    "longcat": (
        "<longcat_tool_call>read\n<longcat_arg_key>path</longcat_arg_key>\n"
        "<longcat_arg_value>a.md</longcat_arg_value>\n<longcat_arg_key>n"
        "</longcat_arg_key>\n<longcat_arg_value>5</longcat_arg_value>\n"
        "</longcat_tool_call>",
        "</longcat_arg_value>\n</longcat_tool_call>",
    ),
    "muse": (
        '<atem:function_calls><atem:invoke name="read"><atem:parameter name="path">a.md'
        '</atem:parameter><atem:parameter name="n">5</atem:parameter></atem:invoke>'
        "</atem:function_calls>",
        "</atem:parameter></atem:invoke>",
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|><|open|>argument '
        'key="path" type="string"<|sep|>a.md<|close|>argument<|sep|><|open|>argument '
        'key="n" type="number"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        "<|close|>argument<|sep|><|close|>call",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_calls_that_mlx_lm_reads_lose_no_argument(name: str) -> None:
    """Its parsers overlook an argument that was not closed."""
    text, last_closer = FOREIGN[name]

    assert read_in_any_pieces(name, text).calls == [("read", {"path": "a.md", "n": 5})]
    broken = text.replace(last_closer, last_closer.partition(">")[2])
    assert broken != text
    assert read_in_any_pieces(name, broken) == Reply([], broken)


@pytest.mark.parametrize("schema", [None, {"type": "object"}])
def test_a_reply_that_has_to_be_json_is_no_call_without_its_tag(schema: Any) -> None:
    """It may look like one in every letter."""
    prepared = SimpleNamespace(
        request=SimpleNamespace(
            kind="chat", tools=TOOLS, deferred_tools=[], json_schema=schema
        ),
        model=SimpleNamespace(
            tokenizer=SimpleNamespace(think_start="<think>", think_end="</think>"),
            template=SimpleNamespace(encode=lambda _: [1]),
        ),
        tool_format=FORMATS["hermes"].detect(),
    )
    tags = start_llm.find_tags(prepared)[0]
    ids = map("call_{}".format, count())
    reader = ReplyReader(
        tags, prepared.tool_format, in_reasoning=False, tools=TOOLS, ids=ids
    )
    text = '{"name": "read", "arguments": {"path": "a.md"}}'

    reader.feed(text, tag="")
    reader.finish()

    message = reader.message()
    if schema is None:
        assert message["tool_calls"][0]["function"]["name"] == "read"
    else:
        assert message == {"role": "assistant", "content": text}


# -- nothing that was written is lost --------------------------------------------------

JSON_PARTS = [
    '"', "n", "path", ":", ",", "5", "{", "}", "[", "]", "//", "\n", "'", "True", '"n"',
    '"id"', "\\", " ",
]  # fmt: skip
GEMMA_PARTS = [
    "path:",
    "n:",
    "items:",
    "tree:",
    "5",
    ",",
    "{",
    "}",
    "[",
    "]",
    '"',
    " ",
    ":",
]
# Of each format: how a call begins, and all that may be written of it, rightly or not.
WRITTEN: dict[str, tuple[list[str], list[str]]] = {
    "mistral_lists": (
        ['[TOOL_CALLS][{"name": "read", "arguments": {', "[TOOL_CALLS]read[ARGS]{"],
        [*JSON_PARTS, "[TOOL_CALLS]", "[ARGS]", "read", '"name"', '"arguments"', "}}]"],
    ),
    "mistral_11": (
        ["[TOOL_CALLS]read[CALL_ID]aB3dE6gH9[ARGS]{", "[TOOL_CALLS]read"],
        [*JSON_PARTS, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "read"],
    ),
    "mistral_13": (
        ["[TOOL_CALLS]read[ARGS]{", "read[ARGS]{"],
        [*JSON_PARTS, "[TOOL_CALLS]", "[ARGS]", "read"],
    ),
    "harmony": (
        [
            "<|channel|>commentary to=functions.read <|constrain|>json<|message|>{",
            " to=read<|channel|>commentary json<|message|>{",
        ],
        [*JSON_PARTS, "<|call|>", "<|end|>", "<|start|>assistant", " to=functions.read",
         "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"],
    ),
    "kimi": (
        [
            f"{start}<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{{"
            for start in ("", SECTION[0])
        ],
        [*JSON_PARTS, "<|tool_call_end|>", SECTION[1], "<|tool_call_begin|>"],
    ),
    "gemma": (
        ["<|tool_call>call:read{", "call:read{"],
        [*GEMMA_PARTS, Q, "<tool_call|>", "call:write{", "<|tool_call>"],
    ),
    "function_gemma": (
        ["<start_function_call>call:read{"],
        [*GEMMA_PARTS, E, "<end_function_call>", "call:write{"],
    ),
    "minicpm": (
        ['<function name="read">'],
        ['<param name="n">', '<param name="', '">', "n", "5", "path", "</param>", "\n",
         "</function>", "<![CDATA[", "]]>", "<param", "</"],
    ),
    "lfm2": (
        ["<|tool_call_start|>[read(", "<|tool_call_start|>"],
        ["n=", "path=", "5", ",", ")", "]", "[", "'", '"', "write(", "read(", "+", " ",
         "<|tool_call_end|>", "a", '{"name": "read", "arguments": {"n": ', "}"],
    ),
    "longcat": (
        ["<longcat_tool_call>read\n", "<longcat_tool_call>"],
        ["<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "n", "5",
         "</longcat_arg_value>", "path", "\n", "</longcat_tool_call>",
         "<longcat_arg_key>n</longcat_arg_key><longcat_arg_value>"],
    ),
    "muse": (
        ['<atem:function_calls><atem:invoke name="read">'],
        ['<atem:parameter name="n">', '<atem:parameter name="', '">', "n", "5", "path",
         "</atem:parameter>", "</atem:invoke>", "</atem:function_calls>", "\n",
         '<atem:invoke name="write">', "<atem:parameter"],
    ),
    "kimi_k3": (
        ['<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|>'],
        ['<|open|>argument key="n" type="any"<|sep|>', "<|open|>", "argument", "<|sep|>",
         '<|open|>argument key="path" type="string"<|sep|>', ' key="n"', ' type="any"',
         "<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|close|>tools<|sep|>",
         "5", "n", "\n", "<|close|>", '<|open|>json type="object"<|sep|>{"n": '],
    ),
}  # fmt: skip


# mlx-lm's parser overlooks text beside the arguments of Muse Spark.
@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"muse"}))
@given(data=st.data())
@settings(max_examples=examples(200))
def test_no_format_runs_a_call_with_fewer_arguments_than_were_written(
    name: str, data: st.DataObject
) -> None:
    """Every 5 that was written is in the arguments, or in text, or the call is cut.

    One in a comment is no argument.
    """
    openings, parts = WRITTEN[name]
    opening = data.draw(st.sampled_from(openings))
    written = data.draw(st.lists(st.sampled_from(parts), max_size=14).map("".join))
    text = opening + written

    message = read_message(name, [text])

    assert read_message(name, list(text)) == message
    if not ends_in_cut_call(message):
        # As they are written: of a key that comes twice JSON has the last value.
        uncommented_text = re.sub(r"//[^\n]*", "", text)
        assert json.dumps(message).count("5") >= uncommented_text.count("5")


def ends_in_cut_call(message: Any) -> bool:
    """Whether its last call is left open. No other may be."""
    calls = message.get("tool_calls", [])
    *earlier, last = [call["function"]["arguments"] for call in calls] or ["{}"]
    for arguments in earlier:
        json.loads(arguments)
    try:
        json.loads(last)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "call"),
    [
        # What mlx-lm's parser overlooks: a call of several.
        ("kimi_k3", '<|open|>call tool="read" index="1"<|sep|><|close|>call<|sep|>'
         '<|open|>call tool="read" index="2"<|sep|><|open|>json type="object"<|sep|>'
         '{"n": 5<|close|>json<|sep|><|close|>call<|sep|>'),
    ],
)  # fmt: skip
def test_what_mlx_lm_overlooks_makes_the_call_text(name: str, call: str) -> None:
    tool_format = FORMATS[name].detect()
    text = f"{tool_format.start}{call}{tool_format.end}"

    assert read_in_any_pieces(name, text) == Reply([], text)


# -- thinking that an answer only speaks of --------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "The <think> tag begins a thought, and </think> ends it.",
        "Write `<think>` first.",
        'The tags are "<think>" and "</think>".',
        "An example:\n```xml\n<think>\nWhy?\n</think>\n```\nThat is all.",
        "~~~\n<think>\n~~~\nSo.",
    ],
)
@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n"])
def test_thinking_that_is_spoken_of_is_part_of_the_answer(
    answer: str, thought: str
) -> None:
    reply = read_in_any_pieces("qwen", thought + answer)

    assert reply == Reply([], answer, "Hm." if thought else None)


def test_thinking_after_a_block_of_code_is_thinking() -> None:
    reply = read_in_any_pieces("qwen", "```\na\n```\n<think>\nWhy?\n</think>\nSo.")

    assert reply == Reply([], "```\na\n```\nSo.", "Why?")


JSON_VALUES = st.recursive(
    st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(alphabet="ab ,:{}[]\"\\\n'é<|>", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


def write_gemma(value: Any, mark: str) -> str:
    """A value as Gemma's template prints it."""
    if isinstance(value, dict):
        members = [f"{k}:{write_gemma(v, mark)}" for k, v in value.items()]
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(write_gemma(item, mark) for item in value)}]"
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


@given(
    arguments=st.dictionaries(
        st.sampled_from(["path", "any", "tree", "new"]), JSON_VALUES, max_size=4
    ),
    cuts=st.lists(st.integers(0, 400), max_size=9),
)
def test_gemma_calls_come_back_as_they_were_made(
    arguments: dict[str, Any], cuts: list[int]
) -> None:
    arguments["path"] = str(arguments.get("path"))
    if "tree" in arguments:
        arguments["tree"] = {"a": arguments["tree"]}
    text = f"<|tool_call>call:read{write_gemma(arguments, Q)}<tool_call|>"
    edges = [0, *sorted({cut % len(text) for cut in cuts}), len(text)]

    reply = read("gemma", [text[a:b] for a, b in pairwise(edges)])

    assert reply == Reply([("read", arguments)])


# -- what a reader of the parser found -------------------------------------------------


@pytest.mark.parametrize("name", ["mistral_11", "mistral_13"])
@pytest.mark.parametrize(
    ("written", "path"),
    [(r"foo\d+", r"foo\d+"), (r"C:\user", r"C:\user"), (r"a\"b", 'a"b')],
)
def test_a_false_escape_at_the_end_of_a_reply_is_text(name, written, path) -> None:
    """Nothing follows the call, for this format has no end tag."""
    text = f'[TOOL_CALLS]read[ARGS]{{"path": "{written}"}}'
    assert read_in_any_pieces(name, text).calls == [("read", {"path": path})]


def test_an_argument_beside_the_arguments_makes_a_call_text() -> None:
    text = '<tool_call>{"arguments": {"path": "a"}, "n": 5, "name": "read"}</tool_call>'
    assert read_in_any_pieces("hermes", text).calls == []


def test_two_calls_in_one_element_of_a_list_are_text() -> None:
    text = '<|tool_call_start|>[read(path="a") - read(path="b")]<|tool_call_end|>'
    assert read_in_any_pieces("lfm2", text).calls == []


def test_brackets_that_stay_open_are_read_in_linear_work() -> None:
    """Thirty of them took an hour: each was tried again by each that contains it."""
    text = "<|tool_call>call:read{n:" + "[1," * 60
    began = time.process_time()
    assert read("gemma", [text]).calls == []
    assert time.process_time() - began < 30


def test_a_character_that_marks_the_end_is_none_where_a_model_writes_it() -> None:
    text = '<tool_call>{"name": "read", "arguments": {"path": "a\0b"}}</tool_call>'
    path = "a\N{REPLACEMENT CHARACTER}b"
    assert read_in_any_pieces("hermes", text).calls == [("read", {"path": path})]
    assert read("hermes", ["Hi\0 you"]).content == "Hi\N{REPLACEMENT CHARACTER} you"
