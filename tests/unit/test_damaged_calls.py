"""TOOLS: a damaged call runs with all that was written in it, or not at all.

The suite tries a few hundred seeded mutations of each format. To try more:

    DAMAGED_CALLS=10000 .venv/bin/python -m pytest tests/unit/test_damaged_calls.py
"""

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import start_llm
from mlx_lm.tool_parsers import longcat
from nights import examples
from start_llm import (
    ReplyReader,
    Tags,
    ToolCallFormat,
    think_tag_pattern,
)

N_MUTATIONS = int(os.environ.get("DAMAGED_CALLS", examples(150)))

# Two calls share no key and no word, so each word tells where it was written.
CALLS: list[dict[str, Any]] = [
    {"path": "alpha one", "n": 3141, "text": "bravo two"},
    {"query": "charlie", "items": [2718, "delta"], "note": "echo five"},
]
TYPES = {
    "path": "string", "n": "integer", "text": "string",
    "query": "string", "items": "array", "note": "string",
}  # fmt: skip
WORDS = {
    "path": "alpha one", "n": "3141", "text": "bravo two",
    "query": "charlie", "items": "2718", "note": "echo five",
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": name} for key, name in TYPES.items()},
            },
        },
    }
]


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Format(NamedTuple):
    """Of one syntax: how it is told, how it is written, and what only markup has."""

    tool_format: ToolCallFormat
    write: Callable[[dict[str, Any]], list[str]]  # a call, in pieces
    key: str  # markup of a key, with KEY in its place
    tag: str  # a pattern of what no value may hold
    has_tokens: bool = True  # its end tag may be a token of its own
    quote: str = ""  # what stands before and after a string, in which a tag is text
    think: tuple[str, str] = ("<think>", "</think>")


def json_pieces(value: Any) -> list[str]:
    """Each bracket, quote and comma alone."""
    if isinstance(value, dict):
        pieces = ["{"]
        for key, member in value.items():
            pieces += ['"', key, '"', ":", " ", *json_pieces(member), ",", " "]
        return [*pieces[:-2], "}"]
    if isinstance(value, list):
        pieces = ["["]
        for item in value:
            pieces += [*json_pieces(item), ",", " "]
        return [*pieces[:-2], "]"]
    return ['"', value, '"'] if isinstance(value, str) else [json.dumps(value)]


def between(before: list[str], after: list[str]) -> Any:
    return lambda arguments: [*before, *json_pieces(arguments), *after]


def tagged(before: list[str], item: list[str], after: list[str]) -> Any:
    def write(arguments: dict[str, Any]) -> list[str]:
        pieces = list(before)
        for key, value in arguments.items():
            text = bare(value)
            pieces += [p.replace("KEY", key).replace("VALUE", text) for p in item]
        return [*pieces, *after]

    return write


def gemma_pieces(value: Any) -> list[str]:
    mark = '<|"|>'
    if isinstance(value, dict):
        pieces = ["{"]
        for key, member in value.items():
            pieces += [key, ":", *gemma_pieces(member), ","]
        return [*pieces[:-1], "}"]
    if isinstance(value, list):
        pieces = ["["]
        for item in value:
            pieces += [*gemma_pieces(item), ","]
        return [*pieces[:-1], "]"]
    return [mark, value, mark] if isinstance(value, str) else [json.dumps(value)]


def python_pieces(arguments: dict[str, Any]) -> list[str]:
    pieces = ["<|tool_call_start|>", "[", "read", "("]
    for key, value in arguments.items():
        written = json_pieces(value)
        pieces += [key, "=", *written, ",", " "]
    return [*pieces[:-2], ")", "]", "<|tool_call_end|>"]


JSON_KEY = r'"KEY"\s*:'
FORMATS = {
    "hermes": Format(
        ToolCallFormat("<tool_call>", "</tool_call>", "hermes", "\n"),
        between(
            ["<tool_call>", "\n", '{"name": ', '"read"', ", ", '"arguments": '],
            ["}", "\n", "</tool_call>"],
        ),
        JSON_KEY,
        r"</?tool_call>",
        quote='"',
    ),
    "qwen": Format(
        ToolCallFormat("<tool_call>", "</tool_call>", "qwen", "\n"),
        tagged(
            ["<tool_call>", "\n", "<function=read>", "\n"],
            ["<parameter=KEY>", "\n", "VALUE", "\n", "</parameter>", "\n"],
            ["</function>", "\n", "</tool_call>"],
        ),
        "<parameter=KEY>",
        r"</?tool_call>|<function=|</function>|<parameter=(?:KEYS)>|</parameter>",
    ),
    "glm": Format(
        ToolCallFormat("<tool_call>", "</tool_call>", "glm", "\n"),
        tagged(
            ["<tool_call>", "read", "\n"],
            ["<arg_key>", "KEY", "</arg_key>", "\n", "<arg_value>", "VALUE",
             "</arg_value>", "\n"],
            ["</tool_call>"],
        ),
        r"<arg_key>KEY</arg_key>",
        r"</?tool_call>|</?arg_(?:key|value)>",
    ),
    "minimax": Format(
        ToolCallFormat("<minimax:tool_call>", "</minimax:tool_call>", "minimax"),
        tagged(
            ["<minimax:tool_call>", "\n", '<invoke name="read">', "\n"],
            ['<parameter name="KEY">', "VALUE", "</parameter>", "\n"],
            ["</invoke>", "\n", "</minimax:tool_call>"],
        ),
        '<parameter name="KEY">',
        r'</?minimax:tool_call>|</?invoke|<parameter name="(?:KEYS)">|</parameter>',
    ),
    "minicpm": Format(
        ToolCallFormat("<function name=", "</function>", "minicpm"),
        tagged(
            ['<function name="read">'],
            ['<param name="KEY">', "VALUE", "</param>"],
            ["</function>"],
        ),
        '<param name="KEY">',
        r'<function name=|</function>|<param name="(?:KEYS)">|</param>',
        has_tokens=False,
    ),
    "mistral": Format(
        ToolCallFormat("[TOOL_CALLS]", "\0", "mistral", "[ARGS]"),
        between(["[TOOL_CALLS]", "read", "[ARGS]"], []),
        JSON_KEY,
        r"\[TOOL_CALLS\]|\[ARGS\]",
        has_tokens=False,
        quote='"',
    ),
    "kimi": Format(
        ToolCallFormat(
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "kimi"
        ),
        between(
            ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.read:0",
             "<|tool_call_argument_begin|>"],
            ["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        ),
        JSON_KEY,
        r"<\|tool_call\w*\|>",
        quote='"',
    ),
    "harmony": Format(
        ToolCallFormat("<|channel|>commentary to=functions.", "<|call|>", "harmony"),
        between(
            ["<|channel|>", "commentary", " to=", "functions.read", " ",
             "<|constrain|>", "json", "<|message|>"],
            ["<|call|>"],
        ),
        JSON_KEY,
        r"<\|\w+\|>",
        quote='"',
        think=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    "gemma": Format(
        ToolCallFormat("<|tool_call>", "<tool_call|>", "foreign"),
        lambda arguments: ["<|tool_call>", "call:read", *gemma_pieces(arguments),
                           "<tool_call|>"],
        r"(?<=[{,])KEY:",
        r'<\|tool_call>|<tool_call\|>|<\|"\|>|[,{](?:KEYS):',
        quote='<|"|>',
        think=("<|channel>thought", "<channel|>"),
    ),
    "function_gemma": Format(
        ToolCallFormat("<start_function_call>", "<end_function_call>", "foreign"),
        lambda arguments: [
            "<start_function_call>", "call:read",
            *[piece.replace('<|"|>', "<escape>") for piece in gemma_pieces(arguments)],
            "<end_function_call>",
        ],
        r"(?<=[{,])KEY:",
        r"</?(?:start|end)_function_call>|<escape>|[,{](?:KEYS):",
        quote="<escape>",
    ),
    "lfm2": Format(
        ToolCallFormat("<|tool_call_start|>", "<|tool_call_end|>", "foreign"),
        python_pieces,
        r"\bKEY=",
        r"<\|tool_call\w*\|>|\b(?:KEYS)=",
        quote='"',
    ),
    "longcat": Format(
        ToolCallFormat(
            "<longcat_tool_call>", "</longcat_tool_call>", "foreign",
            parse=longcat.parse_tool_call,
        ),
        tagged(
            ["<longcat_tool_call>", "read", "\n"],
            ["<longcat_arg_key>", "KEY", "</longcat_arg_key>", "\n",
             "<longcat_arg_value>", "VALUE", "</longcat_arg_value>", "\n"],
            ["</longcat_tool_call>"],
        ),
        r"<longcat_arg_key>KEY</longcat_arg_key>",
        r"</?longcat_\w+>",
    ),
}  # fmt: skip
ALL_KEYS = "|".join(TYPES)


# -- mutations -------------------------------------------------------------------------

Piece = tuple[str, bool]  # its text, and whether it is markup
CHARACTERS = "\"'{}[],:;<>/=|\\ \nax1"


def damaged_reply(form: Format, rng: random.Random) -> list[str]:
    """A reply in pieces, of one or two calls and perhaps a text, with up to 3 faults."""
    pieces: list[str] = []
    calls = CALLS[: rng.randint(1, 2)]
    for call in calls:
        pieces += form.write(call)
        pieces += rng.choice([[], ["\n"]])
    pieces += rng.choice([[], [], ["Done."]])

    markup = [piece for piece in form.write(CALLS[0]) if piece not in WORDS.values()]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _damage(pieces, markup, rng)
    if rng.random() < 0.1:
        del pieces[rng.randrange(len(pieces)) + 1 :]
    return pieces


def _damage(pieces: list[str], markup: list[str], rng: random.Random) -> None:
    place = rng.randrange(len(pieces))
    fault = rng.randrange(8)
    piece = pieces[place]
    letter = rng.randrange(len(piece) + 1)
    if fault == 0:
        del pieces[place]
    elif fault == 1:
        pieces.insert(place, piece)
    elif fault == 2:
        pieces.insert(place, rng.choice(markup))
    elif fault == 3:
        pieces[place] = pieces[place - 1]
        pieces[place - 1] = piece
    elif fault == 4:
        pieces[place] = piece[:letter] + piece[letter + 1 :]
    elif fault == 5:
        character = rng.choice(CHARACTERS)
        pieces[place] = piece[:letter] + character + piece[letter:]
    elif fault == 6:
        character = rng.choice(CHARACTERS)
        pieces[place] = piece[:letter] + character + piece[letter + 1 :]
    else:
        pieces.insert(place, rng.choice(["junk", " ", "\n", "// why\n", ";", ", "]))
    if not pieces:
        pieces.append(" ")


# -- reading ---------------------------------------------------------------------------


def read(
    form: Format,
    pieces: list[str],
    *,
    as_tokens: bool = False,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> Any:
    """What a client has. `as_tokens`: a tag of the format is known as a token."""
    tool_format = form.tool_format
    tags = Tags(
        think_tag_pattern(form.think[0]),
        re.escape(tool_format.start),
        tool_format.untagged_pattern(tools),
        think_tag_pattern(form.think[1]),
    )
    ids = map("call_{}".format, range(99))
    reader = ReplyReader(tags, tool_format, in_reasoning=False, tools=tools, ids=ids)
    for piece in pieces:
        is_tag = piece in {tool_format.start, tool_format.end}
        tag = piece if is_tag else ""
        reader.feed(piece, tag=tag if as_tokens else None)
    reader.finish()
    return reader.message()


def finished_calls(message: Any) -> list[Any]:
    """The arguments of those that a client runs."""
    found = []
    for call in message.get("tool_calls", []):
        try:
            found.append(json.loads(call["function"]["arguments"]))
        except ValueError:
            continue
    return found


def faults(
    form: Format, text: str, message: Any, *, as_tokens: bool = False
) -> list[str]:
    """What is lost, or swallowed, in a call that runs."""
    wrong = []
    runs = finished_calls(message)
    for arguments in runs:
        # As a token it is a quotation, too, where the closing tag of the value follows.
        quoted_end = form.tool_format.end if as_tokens else "\0"
        wrong += swallowed(form, text, arguments, quoted_end=quoted_end)
    for call in CALLS:
        written = [
            key
            for key in call
            if WORDS[key] in text
            and re.search(form.key.replace("KEY", key), text[text.find("read") :])
        ]
        mine = [
            arguments
            for arguments in runs
            if any(WORDS[key] in json.dumps(arguments) for key in call)
            or any(key in arguments for key in call)
        ]
        if not mine:
            continue
        for key in written:
            if not any(key in arguments for arguments in mine):
                wrong.append(f"lost {key}")
    if {} in runs and any(word in text for word in WORDS.values()):
        wrong.append("ran empty")
    return wrong


def swallowed(
    form: Format, reply: str, arguments: Any, *, quoted_end: str
) -> Iterator[str]:
    tag = re.compile(form.tag.replace("KEYS", ALL_KEYS))
    key_markup = re.compile(form.key.replace("KEY", f"(?:{ALL_KEYS})"))
    for key, value in arguments.items():
        for text in strings(value):
            words = [word for other, word in WORDS.items() if other != key]
            found = [word for word in words if word in text]
            is_own = len(found) == 1 and (key not in WORDS or text.strip() in words)
            is_quoted = bool(form.quote) and form.quote + text + form.quote in reply
            if is_quoted and form.quote not in text:
                continue
            if (found and not is_own) or key_markup.search(text):
                yield f"{key} holds an argument: {text!r}"
            elif tag.search(text.replace(quoted_end, "")):
                yield f"{key} holds a tag: {text!r}"


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield key
            yield from strings(member)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


WITH_TOKENS = [name for name, form in FORMATS.items() if form.has_tokens]


@pytest.mark.parametrize(
    ("name", "as_tokens"),
    [*((name, False) for name in FORMATS), *((name, True) for name in WITH_TOKENS)],
)
def test_a_damaged_call_runs_whole_or_not_at_all(name: str, as_tokens: bool) -> None:
    form = FORMATS[name]
    rng = random.Random(f"{name} {as_tokens}")
    wrong = []
    for _ in range(N_MUTATIONS):
        pieces = damaged_reply(form, rng)
        text = "".join(pieces)
        message = read(form, pieces, as_tokens=as_tokens)
        if not as_tokens:
            assert read(form, [text]) == read(form, list(text)) == message
        found = faults(form, text, message, as_tokens=as_tokens)
        if found:
            wrong.append(f"{text!r}\n   {found}\n   {finished_calls(message)}")

    assert not wrong, "\n".join([f"{len(wrong)} of {N_MUTATIONS}", *wrong[:8]])


def test_the_calls_that_are_damaged_are_right_before() -> None:
    for name, form in FORMATS.items():
        text = "".join(piece for call in CALLS for piece in form.write(call))
        message = read(form, [text])
        assert finished_calls(message) == CALLS, name
        assert faults(form, text, message) == []


# -- the smallest texts ----------------------------------------------------------------

HERMES = '<tool_call>\n{"name": "read", "arguments": '
QWEN = "<tool_call>\n<function=read>\n"
QWEN_END = "</function>\n</tool_call>"
GLM = "<tool_call>read\n"
MINIMAX = '<minimax:tool_call>\n<invoke name="read">\n'
MINIMAX_END = "</invoke>\n</minimax:tool_call>"
HARMONY = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # An end quote is missing.
        ("hermes", HERMES + '{"path": "x, "n": 1}}\n</tool_call>\nDone.'),
        ("hermes", HERMES + '{"n": 1, "path": "x}}\n</tool_call>\nDone.'),
        ("hermes", HERMES + '{"n": 1, "path": "x}}</tool_call>'),
        ("hermes", HERMES + '{"path": "x", n": 1}}\n</tool_call>'),
        # The arguments are closed too early.
        ("hermes", HERMES + '{"path": "x"} "text": "y"}}\n</tool_call>'),
        ("hermes", HERMES + '{"path": "x"}, text: "y"}}\n</tool_call>'),
        ("hermes", HERMES + "{\"path\": \"x\"}, 'text': 'y'}}\n</tool_call>"),
        ("hermes", HERMES + '{"path": "x"}; "text": "y"}}\n</tool_call>'),
        ("hermes", HERMES + '{"path": "x"} // why\n"text": "y"}}\n</tool_call>'),
        ("hermes", HERMES + '{"path": "x"} /* why */, "text": "y"}}\n</tool_call>'),
        ("hermes", HERMES + '{"path": "x"}} "text": "y"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "x"} "text": "y"}'),
        # The call is.
        ("hermes", HERMES + '{"path": "x"</tool_call>, "text": "y"}}\n</tool_call>'),
        ("hermes", HERMES + '{"path": "x"<tool_call>, "text": "y"}}\n</tool_call>'),
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>\n</tool_call>\n"
         "<parameter=text>\ny\n</parameter>\n" + QWEN_END),
        ("glm", GLM + "<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
         "\n<arg_key>text</arg_key>\n<arg_value>y</arg_value>\n</tool_call>"),
        # JSON stands in the place of tags, and is closed too early.
        ("qwen", QWEN + '{"path": "x"}\n</function>, "text": "y"}\n</tool_call>'),
        ("qwen", QWEN + '{"path": "x"}\n' + QWEN_END + ', "text": "y"}'),
        ("qwen", QWEN + '{"path": "x"}\n' + QWEN_END + "\n<parameter=text>\ny\n"),
        ("glm", GLM + '{"path": "x"}</tool_call>, "text": "y"}</tool_call>'),
        # A bracket is missing.
        ("hermes", HERMES + '{"items": [1, 2, "text": "z"}}\n</tool_call>'),
        ("hermes", HERMES + '{"items": [{"a": 1, "text": "z"}}\n</tool_call>'),
        # Nobody can tell where a value ends.
        ("qwen", QWEN + "<parameter=path>\n<parameter=text>\nx\n</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=path>x<parameter=text>y</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>\njunk\n<parameter=text>\ny\n"
         "</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=path>\nx\n</parametr>\n<parameter=text>\ny\n"
         "</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>\n<paramter=text>\ny\n"
         "</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=n>\n5\n</parameter>\n<parameter=path>\nx\n"
         "<parameter=n>\n6\n</parameter>\n" + QWEN_END),
        ("glm", GLM + "<arg_key>path</arg_key>\n<arg_value>x</arg_vlue>\n<arg_key>text"
         "</arg_key>\n<arg_value>y</arg_value>\n</tool_call>"),
        ("glm", GLM + "<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n<ag_key>text"
         "</arg_key>\n<arg_value>y</arg_value>\n</tool_call>"),
        ("minimax", MINIMAX + '<parameter name="path">x</parameter>\n<paramter name="text">y'
         "</parameter>\n" + MINIMAX_END),
        ("minicpm", '<function name="read"><param name="path">x</param>y</param></function>'),
        ("qwen", QWEN + "<parameter=path>\nx</function>\n</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=path>\nx\njunk</parameter>\n<paramete=n>\n5\n</parameter>\n"
         + QWEN_END),
        ("minimax", MINIMAX + '<parameter name="path">x</parameter>[5]\n</parameter>\n'
         + MINIMAX_END),
        ("glm", GLM + "<arg_key>path</arg_key>\n, <arg_value>x</arg_value>\n</tool_call>"),
        ("harmony", HARMONY + '{"path": "x", "n": 31}1, "text": "y"}<|call|>'),
        ("harmony", HARMONY + '{"path": "x", "n",: 5, "text: "y"}<|call|>'),
        ("harmony", HARMONY + '{"path": "x", "nx: 5", "text": "y"}<|call|>'),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "x", }n": 5}'),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "if (x == "a"} do", "n": 5}'),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "{ "a" } ", "n": 5}'),
        # A key is there twice: JSON keeps one value.
        ("hermes", HERMES + '{"path": "x", "path": "y"}}\n</tool_call>'),
        ("hermes", HERMES + '{"items": [{"a": 1, "a": 2}]}}\n</tool_call>'),
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>\n<parameter=path>\ny\n</parameter>\n"
         + QWEN_END),
        ("qwen", QWEN + '<parameter=items>\n[{"a": 1, "a": 2}]\n</parameter>\n' + QWEN_END),
        ("qwen", QWEN + "<parameter=items>\n[{'a': 1, 'a': 2}]\n</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=items>\n[{1: 1, '1': 2}]\n</parameter>\n" + QWEN_END),
        ("qwen", QWEN + "<parameter=items>\n[{True: 1, 1: 2}]\n</parameter>\n" + QWEN_END),
        ("qwen", QWEN + '<parameter=items>\n[{\\"a\\": 1, \\"a\\": 2}]\n</parameter>\n'
         + QWEN_END),
        ("glm", GLM + '<arg_key>other</arg_key><arg_value>{"a": 1, "a": 2}</arg_value>'
         "</tool_call>"),
        ("hermes", '<tool_call>\n{"arguments": {"n": 1, "n": 2}, "name": "read"}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": "{\\"n\\": 1, \\"n\\": 2}", "name": "read"}'
         "\n</tool_call>"),
        ("hermes", "<tool_call>\n{'arguments': {'n': 1, 'n': 2}, 'name': 'read'}\n</tool_call>"),
        ("gemma", '<|tool_call>call:read{items:<|"|>[{"a": 1, "a": 2}]<|"|>}<tool_call|>'),
        ("lfm2", "<|tool_call_start|>[read(items=[{'a': 1, 'a': 2}])]<|tool_call_end|>"),
        # A quote too many between two tags quotes neither.
        ("minimax", MINIMAX + '<parameter name="path">x</parameter>"<parameter name="n">5'
         '</parameter>\n<parameter name="text">y</parameter>' + MINIMAX_END),
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>'<parameter=n>\n5\n</parameter>\n"
         "<parameter=text>\ny\n</parameter>\n" + QWEN_END),
        ("minimax", MINIMAX + '<parameter name="n">5\ny<parameter name="text"></parameter>'
         + MINIMAX_END),
        # Two texts in a row are one in Python.
        ("hermes", '<tool_call>\n{"arguments": {"path": "x","read" "text": "y"}, "name": "read"}'
         "\n</tool_call>"),
        ("lfm2", '<|tool_call_start|>[read(path="x" "text")]<|tool_call_end|>'),
        ("lfm2", "<|tool_call_start|>[read(items=['x' u'text'])]<|tool_call_end|>"),
        # Of two marks one is missing, and of a key some of its own.
        ("gemma", '<|tool_call>call:read{path:<|"|>x,n;:3141,text:<|"|>y<|"|>}<tool_call|>'),
        ("gemma", '<|tool_call>call:read{path:<|"|>x<|"|>,n:,3141text:y<|"|>}<tool_call|>'),
        ("function_gemma", "<start_function_call>call:read{path:<escape>x<escape,:3141,"
         "text:<escape>y<escape>}<end_function_call>"),
        ("function_gemma", "<start_function_call>call:read{path:<escape>x<escap,text:<escape>}"
         "<end_function_call>"),
        # A tag is there twice, or the value is one: it would lose that.
        ("qwen", QWEN + "<parameter=path>\n</parameter>\n</parameter>\n<parameter=text>\ny\n"
         "</parameter>\n" + QWEN_END),
        # The reply is cut in the next key, or before there is one.
        ("glm", GLM + "<arg_key>path</arg_key>\n<arg_value>x\n<arg_key>text</"),
        ("qwen", QWEN + "<parameter=path>\nx\n<parameter=te"),
        ("qwen", QWEN),
        # The reply ends in an argument whose tag is not one.
        ("qwen", QWEN + "<parameter=path>a.md</parameter><n>5</tool_call>"),
        ("qwen", QWEN + "<parameter=path>\na.md\n</parameter><n>5"),
        ("glm", GLM + "<arg_key>path</arg_key><arg_value>a.md</arg_value><n>5</tool_call>"),
        ("minimax", MINIMAX + '<parameter name="path">a.md</parameter><n>5</invoke>'),
        ("minicpm", '<function name="read"><param name="path">a.md</param><n>5</function>'),
        ("hermes", HERMES + "{"),
        ("mistral", '[TOOL_CALLS]read[ARGS]{"path": "x"}, "tex'),
        ("harmony", HARMONY),
    ],
)  # fmt: skip
def test_a_call_of_which_nobody_can_tell_what_was_meant_does_not_run(
    name: str, text: str
) -> None:
    form = FORMATS[name]
    tags = re.compile(r"(</?[\w:]+>|<\|\w+\|>)")
    for pieces in ([text], list(text), tags.split(text)):
        assert finished_calls(read(form, pieces)) == []
    assert finished_calls(read(form, tags.split(text), as_tokens=True)) == []


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        # A tag that was forgotten.
        ("qwen", QWEN + "<parameter=path>\nx\n<parameter=text>\ny\n</parameter>\n" + QWEN_END,
         {"path": "x", "text": "y"}),
        ("qwen", QWEN + "<parameter=path>\nx\n</tool_call>", {"path": "x"}),
        # A tag that comes twice.
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>\n</parameter>\n" + QWEN_END,
         {"path": "x"}),
        ("qwen", QWEN + "<parameter=path>\n<parameter=path>\nx\n</parameter>\n" + QWEN_END,
         {"path": "x"}),
        ("qwen", QWEN + "<parameter=path>\nx\n</parameter>\n</function>\n" + QWEN_END,
         {"path": "x"}),
        ("qwen", QWEN + QWEN[12:] + "<parameter=path>\nx\n</parameter>\n" + QWEN_END,
         {"path": "x"}),
        ("qwen", QWEN[:12] + QWEN + "<parameter=path>\nx\n</parameter>\n" + QWEN_END,
         {"path": "x"}),
        ("glm", GLM + "<arg_key>path</arg_key><arg_value><arg_value>x</arg_value></tool_call>",
         {"path": "x"}),
        ("glm", GLM + "<arg_key>path</arg_key><arg_value>x</arg_value></arg_value></tool_call>",
         {"path": "x"}),
        ("minimax", MINIMAX + '<parameter name="path">x</parameter></parameter>' + MINIMAX_END,
         {"path": "x"}),
        ("minimax", MINIMAX + MINIMAX[20:] + '<parameter name="path">x</parameter>' + MINIMAX_END,
         {"path": "x"}),
        ("minicpm", '<function name="read"><param name="path">x</param></param></function>',
         {"path": "x"}),
        ("hermes", HERMES + '{"path": "x",, "n": 5}}\n</tool_call>', {"path": "x", "n": 5}),
        # A key twice in a text that is no object.
        ("qwen", QWEN + '<parameter=path>\n{"a": 1, "a": 2}\n</parameter>\n' + QWEN_END,
         {"path": '{"a": 1, "a": 2}'}),
        ("gemma", '<|tool_call>call:read{path:{"a":1,"a":2}}<tool_call|>',
         {"path": '{"a":1,"a":2}'}),
        # A bracket that was forgotten after a value of any type.
        ("hermes", HERMES + '{"path": "x", "n": 5</tool_call>', {"path": "x", "n": 5}),
        ("hermes", HERMES + '{"path": "x", "n": null</tool_call>', {"path": "x", "n": None}),
        ("harmony", HARMONY + '{"path": "x", "n": 5<|call|>', {"path": "x", "n": 5}),
        # Another gap, or a member that is no argument.
        ("hermes", HERMES + '{"path": "x"}, "id": 5}\n</tool_call>', {"path": "x"}),
        ("hermes", HERMES + '{"path": "x"}\n}\n}\n</tool_call>', {"path": "x"}),
        ("hermes", HERMES + '{"path": "x"}} }</tool_call>', {"path": "x"}),
        # Tags in a text.
        ("hermes", HERMES + '{"path": "</tool_call>", "n": 1}}\n</tool_call>',
         {"path": "</tool_call>", "n": 1}),
        ("qwen", QWEN + "<parameter=path>\na </parameter> b\n</parameter>\n" + QWEN_END,
         {"path": "a </parameter> b"}),
        ("qwen", QWEN + "<parameter=path>\n<a>\n <parameter>5</parameter>\n <b/>\n <parameter "
         "x='1'>6</parameter>\n</a>\n</parameter>\n" + QWEN_END,
         {"path": "<a>\n <parameter>5</parameter>\n <b/>\n <parameter x='1'>6</parameter>\n</a>"}),
        ("qwen", QWEN + "<parameter=path>\nc = '</tool_call><tool_call>'\n"
         "</parameter>\n" + QWEN_END,
         {"path": "c = '</tool_call><tool_call>'"}),
        ("glm", GLM + "<arg_key>path</arg_key><arg_value>c = '</tool_call><tool_call>'</arg_value>"
         "</tool_call>", {"path": "c = '</tool_call><tool_call>'"}),
        ("qwen", QWEN + "<parameter=path>\n<parameter>5</parameter>\n</parameter>\n" + QWEN_END,
         {"path": "<parameter>5</parameter>"}),
        ("minimax", MINIMAX + '<parameter name="path"><a><parameter>5</parameter>\n</a></parameter>'
         + MINIMAX_END, {"path": "<a><parameter>5</parameter>\n</a>"}),
        ("gemma", "<|tool_call>call:read{path:'abc'}<tool_call|>", {"path": "abc"}),
        ("minimax", MINIMAX + '<parameter name="path">a<parameter>5</parameter>b</parameter>'
         + MINIMAX_END, {"path": "a<parameter>5</parameter>b"}),
        ("qwen", QWEN + "<parameter=path>\na <function>f</function>\n</parameter>\n" + QWEN_END,
         {"path": "a <function>f</function>"}),
        # A key's tag in a line, of a key that has a value, or has none.
        ("qwen", QWEN + "<parameter=path>\nsay `<parameter=n>` here\n</parameter>\n" + QWEN_END,
         {"path": "say `<parameter=n>` here"}),
        ("qwen", QWEN + "<parameter=path>\nTAG = f'<parameter=path>{x}<parameter=n>'\n"
         "</parameter>\n" + QWEN_END, {"path": "TAG = f'<parameter=path>{x}<parameter=n>'"}),
        ("minimax", MINIMAX + '<parameter name="path">say `<parameter name="n">` here</parameter>'
         + MINIMAX_END, {"path": 'say `<parameter name="n">` here'}),
        ("glm", GLM + "<arg_key>path</arg_key><arg_value>say `<arg_key>n</arg_key>` <arg_value> "
         "here</arg_value></tool_call>", {"path": "say `<arg_key>n</arg_key>` <arg_value> here"}),
        # HTML after the end tag in a line.
        ("qwen", QWEN + "<parameter=path>\nuse `</tool_call>` here\n<details>\n <div a='b'>\n"
         "</parameter>\n" + QWEN_END,
         {"path": "use `</tool_call>` here\n<details>\n <div a='b'>"}),
        ("minimax", MINIMAX + '<parameter name="path">use `</minimax:tool_call>` here\n<div>'
         "</parameter>" + MINIMAX_END, {"path": "use `</minimax:tool_call>` here\n<div>"}),
        # A call in a line, and the end of an element around a function.
        ("qwen", QWEN + "<parameter=path>\na = '<parameter=n>5</parameter></function></tool_call>'"
         "\n</parameter>\n" + QWEN_END,
         {"path": "a = '<parameter=n>5</parameter></function></tool_call>'"}),
        ("qwen", QWEN + '<parameter=path>\n  <parameter name="x">1</parameter>\n  </function>\n'
         "</lib>\n</parameter>\n" + QWEN_END,
         {"path": '  <parameter name="x">1</parameter>\n  </function>\n</lib>'}),
        # Elements in an element of the same name.
        ("minimax", MINIMAX + '<parameter name="path"><parameter=x>\n<parameter>5</parameter>\n'
         "</parameter>\n</parameter>" + MINIMAX_END,
         {"path": "<parameter=x>\n<parameter>5</parameter>\n</parameter>\n"}),
        # An element of more than a tag's length.
        ("qwen", QWEN + '<parameter=path>\n<a>\n<parameter name="a">' + "x " * 400
         + "\n</parameter>\n</a>\n</parameter>\n" + QWEN_END,
         {"path": '<a>\n<parameter name="a">' + "x " * 400 + "\n</parameter>\n</a>"}),
    ],
)  # fmt: skip
def test_a_call_that_is_nearly_right_runs(
    name: str, text: str, arguments: dict[str, Any]
) -> None:
    for pieces in ([text], list(text)):
        assert finished_calls(read(FORMATS[name], pieces)) == [arguments]


def test_a_call_ends_where_its_end_tag_comes_as_a_token() -> None:
    """And the same letters in other tokens are part of a text, line breaks or not."""
    form = FORMATS["hermes"]
    call = ["<tool_call>", HERMES.removeprefix("<tool_call>") + '{"n": 1, "path": "']
    end = '"}}\n'

    quoted = [*call, "a\n", "</", "tool", "_call>", "\nb", end, "</tool_call>"]
    message = read(form, quoted, as_tokens=True)
    assert finished_calls(message) == [{"n": 1, "path": "a\n</tool_call>\nb"}]

    second = ["\n", "<tool_call>", HERMES.removeprefix("<tool_call>") + '{"n": 2}}\n']
    for rest in (["\nDone."], [*second, "</tool_call>"]):
        message = read(form, [*call, "a", "</tool_call>", *rest], as_tokens=True)
        assert finished_calls(message) == []
        (call_left_open,) = message["tool_calls"]
        text = '{"n": 1, "path": "a</tool_call>\\n'
        assert call_left_open["function"]["arguments"].startswith(text)
        assert message["content"] is None


def test_the_end_tag_as_a_token_may_be_quoted_in_json() -> None:
    """Tokenizers write these letters in no other way."""
    start = HERMES.removeprefix("<tool_call>")
    pieces = [
        "<tool_call>",
        start + '{"path": "x = \'',
        "</tool_call>",
        "'\"}}\n",
        "</tool_call>",
    ]
    message = read(FORMATS["hermes"], [*pieces, "Done."], as_tokens=True)
    assert finished_calls(message) == [{"path": "x = '</tool_call>'"}]
    assert message["content"] == "Done."


@pytest.mark.parametrize("name", ["qwen", "glm", "minimax"])
def test_between_tags_the_end_tag_as_a_token_may_be_quoted(name: str) -> None:
    form = FORMATS[name]
    start, end = form.tool_format.start, form.tool_format.end
    arguments = {"path": f"x = '{end}' + '{end}'", "text": "y"}
    text = "".join(form.write(arguments))
    pieces = [piece for piece in re.split(f"({end}|{start})", text) if piece]
    message = read(form, [*pieces, "Done."], as_tokens=True)
    assert finished_calls(message) == [arguments]
    assert message["content"] == "Done."


@pytest.mark.parametrize(
    "value", ["</tool_call>", "a\n</tool_call>\nb", "</tool_call>\nb\n"]
)
@pytest.mark.parametrize("name", ["qwen", "glm", "minimax"])
def test_between_tags_the_end_tag_in_other_tokens_is_text(
    name: str, value: str
) -> None:
    form = FORMATS[name]
    end = form.tool_format.end
    value = value.replace("</tool_call>", end)
    arguments = {"path": value, "text": "y"}
    text = "".join(form.write(arguments))
    start = form.tool_format.start
    body = text.removeprefix(start).removesuffix(end)
    for rest in ([body], list(body)):
        message = read(form, [start, *rest, end, "Done."], as_tokens=True)
        assert finished_calls(message) == [arguments]
        assert message["content"] == "Done."


def test_a_string_in_json_that_was_never_closed_leaves_the_call_open() -> None:
    form = FORMATS["kimi"]
    start = form.tool_format.start
    call = "".join(form.write({"path": "x"})).removeprefix(start).split('"}')[0]
    pieces = [start, call + "}", form.tool_format.end, "\nDone."]
    message = read(form, pieces, as_tokens=True)
    assert finished_calls(message) == []
    assert len(message["tool_calls"]) == 1


def test_after_a_comma_the_end_of_a_call_ends_a_text() -> None:
    text = HERMES + '{"path": "a.md", </tool_call>Done. All is well.'
    for pieces in ([text], list(text)):
        message = read(FORMATS["hermes"], pieces)
        [call] = message["tool_calls"]
        assert call["function"]["arguments"] == '{"path": "a.md"'


@pytest.mark.parametrize("prose", [", and done", "; ok", ", it's: ok", '\n"yes" it is'])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_prose_behind_a_whole_call_is_content(prose: str, as_tokens: bool) -> None:
    call = HERMES.removeprefix("<tool_call>") + '{"n": 1}}\n'
    pieces = ["<tool_call>", call, "</tool_call>", prose]
    message = read(FORMATS["hermes"], pieces, as_tokens=as_tokens)
    assert finished_calls(message) == [{"n": 1}]
    assert message["content"].strip() == prose.strip()

    pieces = [*pieces[:3], ", ", *pieces[:3]]
    message = read(FORMATS["hermes"], pieces, as_tokens=as_tokens)
    assert finished_calls(message) == [{"n": 1}, {"n": 1}]


@pytest.mark.parametrize("rest", ["<b>Done", "</p>Done", "</td>", "<x"])
def test_the_bracket_of_a_call_before_markup_is_no_content(rest: str) -> None:
    for end in ("}", "}}", "\n}\n"):
        text = HERMES + '{"n": 1}' + end + rest
        for pieces in ([text], list(text)):
            message = read(FORMATS["hermes"], pieces)
            assert finished_calls(message) == [{"n": 1}]
            assert message["content"].strip() == rest


def test_thinking_may_follow_a_call_without_its_end_tag() -> None:
    text = HERMES + '{"n": 1}}<think>Wait.</think>Done'
    for pieces in ([text], list(text)):
        message = read(FORMATS["hermes"], pieces)
        assert finished_calls(message) == [{"n": 1}]
        assert message["content"] == "Done"
        assert message["reasoning_content"] == "Wait."


@pytest.mark.parametrize(
    ("rest", "runs"),
    [
        ('}, "id": "1", "type": "function", "index": 0}', True),
        ('}, "id": null}', True),
        ('}, "id": "1"}}', True),
        ('}}, "id": "1"}', True),
        ('}, "id": "1", "n": 5}', False),
        ('}, "id": 1 "n": 5}', False),
        ('}, "id": "1, "n": 5}', False),
        ('}, "n": 5, "id": "1"}', False),
    ],
)
def test_members_of_a_call_may_follow_its_arguments_and_no_argument(
    rest: str, runs: bool
) -> None:
    text = HERMES + '{"path": "a", "text": "b"' + rest + "\n</tool_call>"
    for pieces in ([text], list(text)):
        message = read(FORMATS["hermes"], pieces)
        expected = [{"path": "a", "text": "b"}] if runs else []
        assert finished_calls(message) == expected


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('[{"name": "get", "id": 7}]', []),
        ('{"name": "get", "id": 7}', []),
        ('{"id": 7, "name": "get"}', []),
        ('[{"name": "get", "type": "function"}]', [{}]),
        ('[{"name": "get", "arguments": {"id": 7}, "id": "1"}]', [{"id": 7}]),
        ('{"id": "1", "name": "get", "arguments": {}}', [{}]),
    ],
)
def test_a_member_that_is_a_key_of_the_tools_may_be_an_argument(
    call: str, arguments: list[Any]
) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    properties = {"id": {"type": "integer"}, "name": {"type": "string"}}
    function = {"name": "get", "parameters": {"properties": properties}}
    tools = [{"type": "function", "function": function}]
    for pieces in ([text], list(text)):
        message = read(FORMATS["hermes"], pieces, tools=tools)
        assert finished_calls(message) == arguments


def test_a_call_whose_objects_have_a_key_of_the_tools_may_have_an_id() -> None:
    arguments = '{"path": "a", "items": [{"q": 1, "n": 2}]}'
    text = HERMES + arguments + ', "id": "1"}\n</tool_call>'
    for pieces in ([text], list(text)):
        message = read(FORMATS["hermes"], pieces)
        assert finished_calls(message) == [json.loads(arguments)]


@pytest.mark.parametrize("rest", [" Done.", ' "delta"'])
def test_a_bracket_that_was_forgotten_before_a_text_may_hide_items(rest: str) -> None:
    text = '[TOOL_CALLS]read[ARGS]{"items": [1, 2}' + rest
    for pieces in ([text], list(text)):
        assert finished_calls(read(FORMATS["mistral"], pieces)) == []


@pytest.mark.parametrize("name", ["qwen", "hermes"])
def test_this_parser_can_be_written_by_a_call(name: str) -> None:
    """Each value has forty lines of its sections, and of its tests.

    And more up to one without a tag: a value that ends with one is left open.
    """
    source = Path(start_llm.__file__ or "").read_text()
    names = "CALL TEXT|CALL SYNTAXES|CALL ARGUMENTS|WHOLE CALLS|REPLY READER"
    sections = re.findall(rf"(?s)# region (?:{names}) =.*?(?=\n# region)", source)
    assert len(sections) == 5
    tests = Path(__file__).with_name("test_tool_calls.py").read_text()
    lines = "\n".join([*sections, tests]).split("\n")
    form = FORMATS[name]
    end = 0
    while end < len(lines):
        first, end = end, end + 40
        while end < len(lines) and "<" in lines[end - 1]:
            end += 1
        arguments = {"path": "\n".join(lines[first:end]), "text": "y"}
        written = arguments
        if form.quote:
            written = {key: json.dumps(text)[1:-1] for key, text in arguments.items()}
        text = "".join(form.write(written))
        for size in (50, len(text)):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            assert finished_calls(read(form, pieces)) == [arguments]


def test_a_call_behind_one_that_nobody_offered_is_a_call() -> None:
    unknown = '<invoke name="rm"><parameter name="path">x</parameter></invoke>'
    known = '<invoke name="read"><parameter name="n">5</parameter></invoke>'
    text = f"<minimax:tool_call>{unknown}{known}</minimax:tool_call>"

    for pieces in ([text], list(text)):
        message = read(FORMATS["minimax"], pieces)
        assert finished_calls(message) == [{"n": 5}]
        assert message["content"] == f"<minimax:tool_call>{unknown}"


def test_text_after_a_call_without_its_outer_tag_is_shown_as_it_comes() -> None:
    form = FORMATS["minimax"]
    call = MINIMAX + '<parameter name="path">x</parameter>\n</invoke>\n'
    tags = Tags(tool_start=re.escape(form.tool_format.start))
    reader = ReplyReader(
        tags, form.tool_format, in_reasoning=False, tools=TOOLS, ids=iter("a")
    )
    reader.feed(call)
    prose = "I have asked for the file. "
    shown = [delta.get("content", "") for delta in reader.feed(prose * 5)]

    # After a hundred letters without a tag no argument follows.
    assert "".join(shown).startswith(prose * 4)
    assert finished_calls(reader.message()) == [{"path": "x"}]


@pytest.mark.parametrize("rest", ["\nDone.", "\nI have asked for the file."])
def test_an_end_that_is_spelled_in_other_tokens_loses_nothing(rest: str) -> None:
    """Where the end tag is a token, its letters may be text: then the call is open."""
    call = QWEN + "<parameter=path>\na.md\n</parameter>\n" + QWEN_END
    pieces = ["<tool_call>", *list(call.removeprefix("<tool_call>"))]

    whole = read(FORMATS["qwen"], pieces, as_tokens=True)
    followed = read(FORMATS["qwen"], [*pieces, rest], as_tokens=True)

    assert finished_calls(whole) == [{"path": "a.md"}]
    assert finished_calls(followed) == []


def test_a_tag_that_begins_first_counts_also_if_one_in_it_is_whole_before() -> None:
    text = "<|channel|><|constrain|>commentary to=functions.read <|constrain|>json<|message|>{"
    whole = read(FORMATS["harmony"], [text])
    for place in range(len(text)):
        assert read(FORMATS["harmony"], [text[:place], text[place:]]) == whole


@pytest.mark.parametrize("name", ["qwen", "glm", "minimax"])
def test_a_call_right_behind_a_tag_that_is_quoted_ends_at_its_token(name: str) -> None:
    form = FORMATS[name]
    start = form.tool_format.start
    pieces = [start, "'", *form.write({"path": "x"}), "Done."]
    message = read(form, pieces, as_tokens=True)
    assert finished_calls(message) == [{"path": "x"}]
    assert message["content"] == f"{start}'Done."


def test_a_bracket_too_many_belongs_to_its_call_in_any_chunks() -> None:
    text = '[TOOL_CALLS]read[ARGS]{"n": 1} \n }Done.'
    for place in range(len(text)):
        message = read(FORMATS["mistral"], [text[:place], text[place:]])
        assert finished_calls(message) == [{"n": 1}]
        assert message["content"].strip() == "Done."


WORDS_BETWEEN = ["`", "'", '"', " ", "\n", "\n\n", "word", "The tag ", "Done.", "```\n",
                 "```xml\n", "~~~\n", "{", "}", "<", "</", "assistant", "thought\n", ", ",
                 "<think>", "</think>"]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_reply_of_prose_and_calls_is_the_same_in_any_chunks(name: str) -> None:
    form = FORMATS[name]
    rng = random.Random(name)
    tags = [form.tool_format.start, form.tool_format.end, *form.think]
    for _ in range(N_MUTATIONS // 5):
        text = ""
        for _ in range(rng.randint(1, 16)):
            call = form.write(rng.choice(CALLS))
            part = call[rng.choice([0, 0, rng.randrange(len(call))]) :]
            words = [rng.choice(WORDS_BETWEEN), rng.choice(WORDS_BETWEEN)]
            text += rng.choice(["".join(part), *words, rng.choice(tags), *words])
        text = text.replace("\0", "")
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 9)))
        pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
        assert read(form, [text]) == read(form, list(text)) == read(form, pieces)
