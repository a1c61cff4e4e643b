"""How models write calls, a row for each format, and what a client has of their replies."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import start_llm as s

TEXT = {"type": "string"}
PROPERTIES = {
    **dict.fromkeys(("path", "text", "query", "note"), TEXT),
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "yes": {"type": "boolean"},
    "items": {"type": "array"},
    "names": {"type": "array", "items": TEXT},
    "tree": {"type": "object"},
    "maybe": {"anyOf": [TEXT, {"type": "null"}]},
    "level": {"enum": [1, 2, "high"]},
    "any": {"description": "no type"},
}


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    """`parameters` are PROPERTIES where they are not given."""
    if parameters is None:
        parameters = {"type": "object", "properties": PROPERTIES}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool(name) for name in ("read", "write", "read_file", "list_all", "list-all")]


# -- the table -------------------------------------------------------------------------

Arguments = dict[str, Any]
Writer = Callable[[str, Arguments], list[str]]  # a call in pieces: tags and marks alone


class Format(NamedTuple):
    """How a model is told to write, and what only the markup of it has."""

    parser: str  # mlx-lm's module that knows the tags; "": none does
    syntax: str  # as it is found in a template that prints such calls
    gap: str
    write: Writer
    key: str  # a pattern: an argument's name, KEY, with the markup around it
    tag: str  # a pattern: what no value may hold; KEYS are names of arguments
    quote: str = ""  # stands before and after a string, in which a tag is text
    think: tuple[str, str] = ("<think>", "</think>")

    def text(self, arguments: Arguments, name: str = "read") -> str:
        return "".join(self.write(name, arguments))


def json_pieces(value: Any, mark: str = '"') -> list[str]:
    """A value as JSON, or with the marks of Gemma: each bracket, mark and comma alone."""
    is_json = mark == '"'
    gap = [" "] if is_json else []
    if isinstance(value, dict):
        pieces = ["{"]
        for key, member in value.items():
            name = json_pieces(key) if is_json else [key]
            pieces += [*name, ":", *gap, *json_pieces(member, mark), ",", *gap]
        return [*(pieces[: -1 - len(gap)] if value else pieces), "}"]
    if isinstance(value, list):
        pieces = ["["]
        for item in value:
            pieces += [*json_pieces(item, mark), ",", *gap]
        return [*(pieces[: -1 - len(gap)] if value else pieces), "]"]
    if not isinstance(value, str):
        return [json.dumps(value)]
    escaped = json.dumps(value, ensure_ascii=len(value) % 2 == 0)[1:-1]
    return [mark, escaped if is_json else value, mark]


def around(before: list[str], after: list[str], mark: str = '"') -> Writer:
    """Arguments as JSON; NAME stands for the tool."""

    def write(name: str, arguments: Arguments) -> list[str]:
        opening = [piece.replace("NAME", name) for piece in before]
        return [*opening, *json_pieces(arguments, mark), *after]

    return write


def between(before: list[str], item: list[str], after: list[str]) -> Writer:
    """Values between tags: `item` for each, with its KEY, VALUE and TYPE."""

    def write(name: str, arguments: Arguments) -> list[str]:
        pieces = [piece.replace("NAME", name) for piece in before]
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            kind, text = ("string", value) if is_text else ("any", json.dumps(value))
            for piece in item:
                tag = piece.replace("KEY", key).replace("TYPE", kind)
                pieces.append(text if piece == "VALUE" else tag)
        return [*pieces, *after]

    return write


def write_python(name: str, arguments: Arguments) -> list[str]:
    pieces = ["<|tool_call_start|>", "[", name, "("]
    for key, value in arguments.items():
        pieces += [key, "=", *json_pieces(value), ",", " "]
    return [*(pieces[:-2] if arguments else pieces), ")", "]", "<|tool_call_end|>"]


def glm(gap: list[str], prefix: str = "") -> Writer:
    key = [f"<{prefix}arg_key>", "KEY", f"</{prefix}arg_key>", *gap]
    value = [f"<{prefix}arg_value>", "VALUE", f"</{prefix}arg_value>", *gap]
    opening = [f"<{prefix}tool_call>", "NAME", *gap]
    return between(opening, [*key, *value], [f"</{prefix}tool_call>"])


SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
HARMONY_START = "<|channel|>commentary to=functions."
JSON_KEY = r'"KEY"\s*:'
NEVER = "(?!)"
FORMATS = {
    "hermes": Format(
        "json_tools", "hermes", "\n",
        around(["<tool_call>", "\n", '{"name": ', '"NAME"', ", ", '"arguments": '],
               ["}", "\n", "</tool_call>"]),
        JSON_KEY, r"</?tool_call>", '"',
    ),
    "qwen": Format(
        "qwen3_coder", "qwen", "\n",
        between(["<tool_call>", "\n", "<function=NAME>", "\n"],
                ["<parameter=KEY>", "\n", "VALUE", "\n", "</parameter>", "\n"],
                ["</function>", "\n", "</tool_call>"]),
        "<parameter=KEY>",
        r"</?tool_call>|<function=|</function>|<parameter=(?:KEYS)>|</parameter>",
    ),
    "glm": Format(
        "glm47", "glm", "", glm([]),
        r"<arg_key>KEY</arg_key>", r"</?tool_call>|</?arg_(?:key|value)>",
    ),
    "glm_lines": Format(
        "laguna", "glm", "\n", glm(["\n"]),
        r"<arg_key>KEY</arg_key>", r"</?tool_call>|</?arg_(?:key|value)>",
    ),
    "minimax": Format(
        "minimax_m2", "minimax", "",
        between(["<minimax:tool_call>", "\n", '<invoke name="NAME">', "\n"],
                ['<parameter name="KEY">', "VALUE", "</parameter>", "\n"],
                ["</invoke>", "\n", "</minimax:tool_call>"]),
        '<parameter name="KEY">',
        r'</?minimax:tool_call>|</?invoke|<parameter name="(?:KEYS)">|</parameter>',
    ),
    "minicpm": Format(
        "minicpm5", "minicpm", "",
        between(['<function name="NAME">'], ['<param name="KEY">', "VALUE", "</param>"],
                ["</function>"]),
        '<param name="KEY">',
        r'<function name=|</function>|<param name="(?:KEYS)">|</param>',
    ),
    "mistral_11": Format(
        "mistral", "mistral", "[CALL_ID]",
        around(["[TOOL_CALLS]", "NAME", "[CALL_ID]", "aB3dE6gH9", "[ARGS]"], []),
        JSON_KEY, r"\[TOOL_CALLS\]|\[ARGS\]", '"',
    ),
    "mistral_13": Format(
        "mistral", "mistral", "[ARGS]", around(["[TOOL_CALLS]", "NAME", "[ARGS]"], []),
        JSON_KEY, r"\[TOOL_CALLS\]|\[ARGS\]", '"',
    ),
    "mistral_lists": Format(
        "mistral", "foreign", "",
        around(["[TOOL_CALLS]", "[", '{"name": ', '"NAME"', ', "arguments": '], ["}", "]"]),
        JSON_KEY, r"\[TOOL_CALLS\]", '"',
    ),
    "kimi": Format(
        "kimi_k2", "kimi", "",
        around([SECTION[0], "<|tool_call_begin|>", "functions.NAME:0",
                "<|tool_call_argument_begin|>"], ["<|tool_call_end|>", SECTION[1]]),
        JSON_KEY, r"<\|tool_call\w*\|>", '"',
    ),
    "harmony": Format(
        "", "harmony", "",
        around(["<|channel|>", "commentary", " to=", "functions.NAME", " ", "<|constrain|>",
                "json", "<|message|>"], ["<|call|>"]),
        JSON_KEY, r"<\|\w+\|>", '"', ("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    "gemma": Format(
        "gemma4", "foreign", "", around(["<|tool_call>", "call:NAME"], ["<tool_call|>"], '<|"|>'),
        r"(?<=[{,])KEY:", r'<\|tool_call>|<tool_call\|>|<\|"\|>|[,{](?:KEYS):',
        '<|"|>', ("<|channel>thought", "<channel|>"),
    ),
    "function_gemma": Format(
        "function_gemma", "foreign", "",
        around(["<start_function_call>", "call:NAME"], ["<end_function_call>"], "<escape>"),
        r"(?<=[{,])KEY:", r"</?(?:start|end)_function_call>|<escape>|[,{](?:KEYS):",
        "<escape>",
    ),
    "lfm2": Format(
        "pythonic", "foreign", "", write_python,
        r"\bKEY=", r"<\|tool_call\w*\|>|\b(?:KEYS)=", '"',
    ),
    "longcat": Format(
        "longcat", "foreign", "", glm(["\n"], "longcat_"),
        r"<longcat_arg_key>KEY</longcat_arg_key>", r"</?longcat_\w+>",
    ),
    "muse": Format(
        "muse_spark", "foreign", "",
        between(["<atem:function_calls>", '<atem:invoke name="NAME">'],
                ['<atem:parameter name="KEY">', "VALUE", "</atem:parameter>"],
                ["</atem:invoke>", "</atem:function_calls>"]),
        NEVER, NEVER,
    ),
    "kimi_k3": Format(
        "kimi_k3", "foreign", "",
        between(['<|open|>tools<|sep|>', '<|open|>call tool="NAME" index="1"<|sep|>'],
                ['<|open|>argument key="KEY" type="TYPE"<|sep|>', "VALUE",
                 "<|close|>argument<|sep|>"],
                ["<|close|>call<|sep|>", "<|close|>tools<|sep|>"]),
        NEVER, NEVER,
    ),
}  # fmt: skip


@cache
def format_of(name: str) -> s.ToolCallFormat:
    """The format that is found where a template prints such calls."""
    form = FORMATS[name]
    module: Any = SimpleNamespace(
        tool_call_start=HARMONY_START, tool_call_end="<|call|>", parse_tool_call=None
    )
    if form.parser:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{form.parser}")
    tokenizer = tokenizer_with(
        module.tool_call_start, module.tool_call_end, module.parse_tool_call
    )
    template = form.text({"path": "a.md", "n": 5})
    found = s.ToolCallFormat.detect(template, "generic", tokenizer=tokenizer)
    assert found
    return found


def tokenizer_with(start: str | None, end: str | None = None, parse: Any = None) -> Any:
    """What mlx-lm's tokenizer knows of calls."""
    return SimpleNamespace(tool_call_start=start, tool_call_end=end, tool_parser=parse)


WITH_TOKENS = [  # whose end tag is a token of its own
    name for name in FORMATS if format_of(name).end not in {"\0", "</function>"}
]


# -- reading ---------------------------------------------------------------------------

BROKEN = "a call that cannot be read, or was cut: its arguments are open"


class Reply(NamedTuple):
    """The calls, as (name, arguments), of which the last may be BROKEN; and the texts."""

    calls: list[Any]
    content: str | None = None
    reasoning: str | None = None


def open_reader(
    form: str | s.ToolCallFormat,
    *,
    tools: Sequence[Any] = TOOLS,
    in_reasoning: bool = False,
    max_calls: int = sys.maxsize,
) -> s.ReplyReader:
    """`form`: a name in the table, or another format."""
    is_name = isinstance(form, str)
    tool_format = format_of(form) if is_name else form
    think = FORMATS[form].think if is_name else ("<think>", "</think>")
    tags = s.Tags(
        s.think_tag_pattern(think[0]),
        re.escape(tool_format.start),
        tool_format.untagged_pattern(tools),
        s.think_tag_pattern(think[1]),
    )
    return s.ReplyReader(
        tags,
        tool_format,
        in_reasoning=in_reasoning,
        tools=tools,
        ids=map("call_{}".format, count()),
        max_calls=max_calls,
    )


def read_message(
    form: str | s.ToolCallFormat,
    pieces: Iterable[str],
    *,
    as_tokens: bool = False,
    **how: Any,
) -> Any:
    """The message that a client has. `as_tokens`: it is known which pieces are tags.

    Whatever the reply is: the deltas give the message, and no client takes a call that
    is broken for a whole one.
    """
    reader = open_reader(form, **how)
    tool_format = format_of(form) if isinstance(form, str) else form
    deltas = []
    for piece in pieces:
        is_tag = piece in {tool_format.start, tool_format.end}
        tag = (piece if is_tag else "") if as_tokens else None
        deltas += reader.feed(piece, tag=tag)
    deltas += reader.finish()

    message = reader.message()
    assert joined(deltas) == message
    calls = message.get("tool_calls", [])
    assert reader.n_calls == len(calls) - reader.is_broken
    if reader.is_broken:
        with pytest.raises(ValueError, match=r".+"):
            json.loads(calls[-1]["function"]["arguments"])
    return message


def joined(deltas: list[Any]) -> Any:
    """What a client makes of a stream: text by kind, calls by index, names once and first."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[Any] = []
    for delta in deltas:
        if "tool_calls" not in delta:
            ((field, text),) = delta.items()
            assert text
            texts[field] += text
            continue
        ((call),) = delta["tool_calls"]
        arguments = call["function"]["arguments"]
        if "id" in call:
            assert call["index"] == len(calls)
            assert (call["type"], arguments) == ("function", "")
            function = {"name": call["function"]["name"], "arguments": ""}
            calls.append({"id": call["id"], "type": "function", "function": function})
        else:
            assert arguments and call["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += arguments

    message = {"role": "assistant", "content": texts["content"] or None}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    return {**message, "tool_calls": calls} if calls else message


def reply_of(message: Any) -> Reply:
    """Each call but the last is whole."""
    calls: list[Any] = []
    for call in message.get("tool_calls", []):
        try:
            arguments = strict_json(call["function"]["arguments"])
        except ValueError:
            calls.append(BROKEN)
        else:
            calls.append((call["function"]["name"], arguments))
    assert BROKEN not in calls[:-1]
    return Reply(calls, message["content"], message.get("reasoning_content"))


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def read(form: str | s.ToolCallFormat, pieces: Iterable[str], **how: Any) -> Reply:
    return reply_of(read_message(form, pieces, **how))


def read_in_any_pieces(form: str | s.ToolCallFormat, text: str, **how: Any) -> Reply:
    """The reply of a text that comes whole, by letters or in something like tokens."""
    message = read_message(form, [text], **how)
    for pieces in (list(text), token_like(text)):
        assert read_message(form, pieces, **how) == message
    return reply_of(message)


def token_like(text: str) -> list[str]:
    """Tags whole, words whole, all other characters alone."""
    return re.findall(r"<\|?/?[\w:]+\|?>|\[[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces; places of a longer text are taken round."""
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]
