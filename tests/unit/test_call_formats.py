"""TOOLS: the formats of many models, right and nearly right, in any pieces."""

import json
import pkgutil
import re
import time
from itertools import product
from keyword import kwlist
from typing import Any

import nights
import pytest
import start_llm as s
from call_formats import (
    BROKEN,
    FORMATS,
    HARMONY_START,
    SECTION,
    TOOLS,
    WITH_TOKENS,
    Reply,
    cut,
    format_of,
    open_reader,
    read,
    read_in_any_pieces,
    read_message,
    token_like,
    tokenizer_with,
    tool,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers

FEW = 100 if nights.is_night else 6  # examples for each of many formats
OURS = [name for name in FORMATS if format_of(name).syntax != "foreign"]
JSON_IN_TAGS = ["hermes", "qwen", "glm"]  # all begin with <tool_call>
THOUGHT = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"

# -- every format ----------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_found_in_the_template_that_prints_it(name):
    found = format_of(name)
    assert (found.syntax, found.gap) == (FORMATS[name].syntax, FORMATS[name].gap)


@pytest.mark.parametrize(
    ("template", "start", "family", "syntax"),
    [
        ("no tools", None, "generic", None),
        ("<arg_key>", None, "generic", None),
        ("<tool_call>", "<tool_call>", "generic", "hermes"),
        # Of several, the family's own.
        ("<tool_call><function= <tool_call>{name}<arg_key>", None, "qwen3", "qwen"),
        ("<tool_call><function= <tool_call>{name}<arg_key>", None, "glm4", "glm"),
        ("<tool_call>", None, "glm4", "hermes"),
    ],
)
def test_of_several_formats_in_a_template_the_familys_own_is_meant(
    template, start, family, syntax
):
    found = s.ToolCallFormat.detect(template, family, tokenizer=tokenizer_with(start))
    assert (found and found.syntax) == syntax


def test_each_parser_of_mlx_lm_has_a_format_here():
    """A new one is read by mlx-lm alone until it is tried here."""
    names = {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}
    assert names == {form.parser for form in FORMATS.values()} - {""}


MARKUP = [
    "<tool_call>", "</tool_call>", "</parameter>", "<parameter=zz>", "</function>", "<think>",
    "<function=read>", "</think>", "</arg_value>", "<arg_key>", "\n", "\n\n", " ", '"', "'", "\\",
    "\\d", "{", "}", "[", "]", ",", ":", "null", "1", "é", "😀", "\u2028", "\x7f", "\t", "\r\n",
    "plain words", "```", "```json\n",
]  # fmt: skip
# What no reader of these formats can tell from the format itself: a value is not escaped in them.
# A tag may be quoted inside a line, but not with another tag of the format behind it.
AMBIGUOUS = re.compile(
    r"(?m)^\s*</?(?:parameter>|function|tool_call|arg_)"
    r"|(?:</?(?:parameter|tool_call|arg_value|arg_key)>|function[^<>]*>)\s*$"
    r"|</parameter>(?:\s*<|\w|[\s\S]*<parameter)"
    r"|</arg_value>(?:\s*</|\s*<tool_call|[\s\S]*</?arg_)"
    r"|</tool_call>\s*<tool_call>"
)


def spell(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


TEXTS = (
    st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=8)
    .map(lambda parts: "".join(parts).replace("\0", ""))
    .filter(lambda text: not AMBIGUOUS.search(text + "</parameter>x"))
)
NUMBERS = st.integers(-(10**18), 10**18)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
).filter(lambda tree: not AMBIGUOUS.search(spell(tree)))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "n": NUMBERS,
        "x": FLOATS,
        "yes": st.booleans(),
        "items": st.lists(TREES, max_size=3),
        "tree": st.dictionaries(TEXTS, TREES, max_size=3),
        "maybe": st.none() | st.just("some words\n"),
        "level": st.sampled_from([1, 2, "high"]),
        "any": st.just("words") | NUMBERS,
    },
).filter(lambda found: not AMBIGUOUS.search(" ".join(map(spell, found.values()))))
# Of formats that have less room: what mlx-lm reads, and MiniCPM's text without quotes.
PLAIN_ARGUMENTS = st.fixed_dictionaries(
    {"path": st.sampled_from(["a.md", "docs/b c.md", 'say "hi"', "x{y}z"])},
    optional={
        "n": st.integers(-99, 99),
        "yes": st.booleans(),
        "names": st.lists(st.sampled_from(["a", "b c"]), max_size=2),
        "tree": st.fixed_dictionaries({}, optional={"a": st.just({"b": [1, "c"]})}),
    },
)
CUTS = st.lists(st.integers(0, 2000), max_size=30)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=FEW)
@given(data=st.data(), cuts=CUTS, answer=st.sampled_from(["", "Hello.", "a [ARGS] b"]))
def test_calls_come_back_as_they_were_made(name, data, cuts, answer):
    """In each format, after a thought and an answer, in any pieces."""
    form = FORMATS[name]
    is_plain = name == "minicpm" or name not in OURS
    arguments = PLAIN_ARGUMENTS if is_plain else ARGUMENTS
    call = st.tuples(st.sampled_from(["write", "read"]), arguments)
    calls = data.draw(st.lists(call, min_size=1, max_size=3))
    written = [form.text(values, tool_name) for tool_name, values in calls]
    text = "\n".join([f"{form.think[0]}\nwhy{form.think[1]}{answer}", *written])
    if name == "harmony":
        answer = None
        text = f"{THOUGHT}{'<|start|>assistant'.join(written)}"

    reply = read(name, cut(text, cuts))

    assert reply == Reply(calls, answer or None, "why")
    assert written[0].startswith(format_of(name).opening(calls[0][0], {}))


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(JSON_IN_TAGS), ARGUMENTS), min_size=1, max_size=3
    ),
    cuts=CUTS,
)
@example([("glm", {"text": "a</arg_value><think>"})], [])
def test_a_model_may_write_all_formats_of_its_tag(calls, cuts):
    text = "".join(FORMATS[name].text(arguments) for name, arguments in calls)
    reply = read("qwen", cut(text, cuts))
    assert reply == Reply([("read", arguments) for _, arguments in calls])


UNTAGGED = {
    "qwen": "<function=read>\n<parameter=path>\na.md\n</parameter>\n</function>",
    "minimax": '<invoke name="read">\n<parameter name="path">a.md</parameter>\n</invoke>',
    "harmony": 'to=functions.read<|message|>{"path": "a.md"}',
    "mistral_13": 'read[ARGS]{"path": "a.md"}',
    "mistral_11": 'read[CALL_ID]aB3dE6gH9[ARGS]{"path": "a.md"}',
    "kimi": "<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>"
    '{"path": "a.md"}<|tool_call_end|>',
    "hermes": '{"name": "read", "arguments": {"path": "a.md"}}',
    "gemma": 'call:read{path:<|"|>a.md<|"|>}<tool_call|>',
}


@pytest.mark.parametrize("name", UNTAGGED)
def test_a_call_without_its_first_tag_is_read_where_models_forget_that(name):
    assert read_in_any_pieces(name, UNTAGGED[name]) == Reply(
        [("read", {"path": "a.md"})]
    )


def test_a_call_of_glm_without_its_first_tag_is_text():
    untagged = FORMATS["glm"].text({"path": "a.md"}).removeprefix("<tool_call>")
    assert read_in_any_pieces("glm", untagged) == Reply([], untagged)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["others", "none"])
def test_a_call_to_a_tool_that_was_not_offered_is_text(name, tools):
    call = FORMATS[name].text({"n": 1, "text": "a"}, "unknown")
    text = f"Look: {call}\n{format_of(name).start}ok"
    assert read_in_any_pieces(name, text, tools=tools) == Reply([], text)


@pytest.mark.parametrize("name", [name for name in OURS if name != "kimi"])
@settings(max_examples=FEW)
@given(arguments=ARGUMENTS, place=st.integers(0, 2000))
def test_a_call_cut_off_gives_what_was_read_or_stays_open(name, arguments, place):
    text = FORMATS[name].text(arguments, "write")
    text = text[: place % (len(text) + 1)]

    reply = read(name, [text])

    if reply.calls in ([], [BROKEN]):  # in its name; in a key, a number ...
        assert reply.content == (None if reply.calls else text or None)
        return
    ((_, found),) = reply.calls
    is_half_a_tag = not arguments and text.endswith("\n<")  # that is text (`finish`)
    assert reply.content == ("<" if is_half_a_tag else None)
    assert list(found) == list(arguments)[: len(found)]
    for key, value in list(found.items())[:-1]:
        assert value == arguments[key]
    last_key = next(reversed(found), None)
    if last_key is not None and isinstance(arguments[last_key], str):
        assert arguments[last_key].startswith(str(found[last_key] or ""))


# Of GLM's and MiniCPM's only a tag after the name says that it is complete.
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("arguments", [{"n": 5}, {"text": "line\n" * 50}])
def test_name_and_arguments_leave_while_the_call_is_generated(name, arguments):
    text = FORMATS[name].text(arguments, "write")
    reader = open_reader(name)
    pieces = []
    for position, character in enumerate(text):
        for delta in reader.feed(character):
            function = delta["tool_calls"][0]["function"]
            if "name" in function:
                name_position = position
            pieces.append((position, function["arguments"]))

    assert name_position <= text.index("write") + len(
        "write:0<|tool_call_argument_begin|>{"
    )
    n_early = sum(len(piece) for at, piece in pieces if at < len(text) // 2)
    n_all = sum(len(piece) for _, piece in pieces)
    # A string leaves at the pace it comes.
    assert n_early > 0.35 * n_all if "text" in arguments else n_all > 0


@pytest.mark.parametrize("name", OURS)
def test_only_the_whole_arguments_are_json(name):
    """Some clients take the first arguments that parse for the whole of them."""
    arguments = {"n": 1, "tree": {"a": {}}, "text": "}", "items": [[]]}
    reader = open_reader(name)
    states = [""]
    for letter in [*FORMATS[name].text(arguments, "write"), ""]:
        for delta in reader.feed(letter) if letter else reader.finish():
            added = delta["tool_calls"][0]["function"]["arguments"]
            states.append(states[-1] + added)

    def is_json(text):
        try:
            return bool(json.loads(text))
        except ValueError:
            return False

    assert [state for state in states if is_json(state)] == [states[-1]]


# -- nothing that was written is lost --------------------------------------------------

JSON_PARTS = [
    '"', "n", "path", ":", ",", "5", "{", "}", "[", "]", "//", "/*", "*/", "\n", "'", "True",
    '"n"', '"id"', "\\", " ",
]  # fmt: skip
GEMMA_PARTS = ["path:", "n:", "items:", "tree:", *'5,{}[]" :', "call:write{"]
# Of each format: how a call begins, and all that may be written of it, rightly or not.
WRITTEN: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (['<tool_call>{"name": "read", "arguments": {'], [*JSON_PARTS, "</tool_call>"]),
    "qwen": (
        ["<tool_call>\n<function=read>"],
        ["<parameter=", "<parameter", ">", "n", "</parameter>", "\n", "5", " name=", '"',
         "</function>", "</tool_call>", "<tool_call>", "<parameter=n>", "text", "{", "}", ":"],
    ),
    "glm": (
        ["<tool_call>read<arg_key>"],
        ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "n", "5", "\n", "text",
         "</tool_call>", "<tool_call>", "{", "}", '"', ":"],
    ),
    "minimax": (
        ['<minimax:tool_call><invoke name="read">'],
        ['<parameter name="', '">', "n", "text", "5", "</parameter>", "</invoke>", "\n", "<",
         "</minimax:tool_call>", "<invoke ", "{", "}", '"', ":"],
    ),
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
        ["<|channel|>commentary to=functions.read <|constrain|>json<|message|>{",
         " to=read<|channel|>commentary json<|message|>{"],
        [*JSON_PARTS, "<|call|>", "<|end|>", "<|start|>assistant", " to=functions.read", "`",
         "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|", "thought"],
    ),
    "kimi": (
        [f"{start}<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{{"
         for start in ("", SECTION[0])],
        [*JSON_PARTS, "<|tool_call_end|>", SECTION[1], "<|tool_call_begin|>"],
    ),
    "gemma": (
        ["<|tool_call>call:read{", "call:read{"],
        [*GEMMA_PARTS, '<|"|>', "<tool_call|>", "<|tool_call>"],
    ),
    "function_gemma": (
        ["<start_function_call>call:read{"], [*GEMMA_PARTS, "<escape>", "<end_function_call>"],
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
}  # fmt: skip
# mlx-lm's parsers overlook text beside the arguments of the other two.
assert WRITTEN.keys() == FORMATS.keys() - {"muse", "kimi_k3", "glm_lines"}


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
@settings(max_examples=200 if nights.is_night else 20)
def test_a_call_never_runs_with_fewer_arguments_than_were_written(name, data):
    """Every 5 that was written is in the arguments, or in text, or the call is cut.

    One in a comment is no argument.
    """
    openings, parts = WRITTEN[name]
    opening = data.draw(st.sampled_from(openings))
    written = data.draw(st.lists(st.sampled_from(parts), max_size=14).map("".join))

    message = read_message(name, [opening + written])

    assert read_message(name, list(opening + written)) == message
    if BROKEN not in read(name, [opening + written]).calls:
        # As they are written: of a key that comes twice JSON has the last value.
        uncommented_text = re.sub(r"//[^\n]*|/\*.*?\*/", "", opening + written)
        assert json.dumps(message).count("5") >= uncommented_text.count("5")


@given(
    st.text(alphabet='<>/tool_cal{}",:\n nameargumntsfi=pk\\[]01', max_size=60), CUTS
)
@example('{"name": "read", "arguments": {"a": [1}}\n</tool_call>', [])
@example("<tool_call>" * 300, [])
def test_garbage_never_fails_and_never_vanishes(text, cuts):
    text = f"<tool_call>{text}"
    reply = read("qwen", cut(text, cuts))
    assert reply.calls or reply.content == text


FOREIGN_ENDS = {  # what follows the last value: without it, its parser overlooks that one
    "longcat": "</longcat_arg_value>\n</longcat_tool_call>",
    "muse": "</atem:parameter></atem:invoke>",
    "kimi_k3": "<|close|>argument<|sep|><|close|>call",
}


@pytest.mark.parametrize("name", FOREIGN_ENDS)
def test_calls_that_mlx_lm_reads_lose_no_argument(name):
    ending = FOREIGN_ENDS[name]
    text = FORMATS[name].text({"path": "a.md", "n": 5})
    broken = text.replace(ending, ending.partition(">")[2])
    assert broken != text
    assert read_in_any_pieces(name, broken) == Reply([], broken)


# -- calls that are nearly right -------------------------------------------------------


def hermes(arguments, after="}\n</tool_call>"):
    return f'<tool_call>\n{{"name": "read", "arguments": {arguments}{after}'


def qwen(*values, before="<tool_call>\n", after="</function>\n</tool_call>"):
    return f"{before}<function=read>\n{''.join(values)}{after}"


def p(key, value, after="\n</parameter>\n"):
    return f"<parameter={key}>\n{value}{after}"


def glm(*values, after="</tool_call>"):
    return f"<tool_call>read{''.join(values)}{after}"


def a(key, value, after="</arg_value>"):
    return f"<arg_key>{key}</arg_key><arg_value>{value}{after}"


def minimax(*values, after="</invoke>\n</minimax:tool_call>"):
    return f'<minimax:tool_call>\n<invoke name="read">\n{"".join(values)}{after}'


def m(key, value, after="</parameter>\n"):
    return f'<parameter name="{key}">{value}{after}'


def minicpm(*values):
    return f'<function name="read">{"".join(values)}</function>'


def c(key, value, after="</param>"):
    return f'<param name="{key}">{value}{after}'


def gemma(arguments):
    return f"<|tool_call>call:read{{{arguments}}}<tool_call|>"


Q = '<|"|>'
MISTRAL = "[TOOL_CALLS]read[ARGS]"
HARMONY = f"{HARMONY_START}read <|constrain|>json<|message|>"
PYTHON = "<|tool_call_start|>", "<|tool_call_end|>"
KIMI_READ = (
    FORMATS["kimi"]
    .text({"path": "a.md"})
    .removeprefix(SECTION[0])
    .removesuffix(SECTION[1])
)
KIMI_WRITE = KIMI_READ.replace("read:0", "write:1").replace('"path": "a.md"', '"n": 1')
# Calls of `read`, by format: a text, and the arguments of each call in it.
RUNS: dict[str, list[tuple[str, Any]]] = {
    "hermes": [
        # Quotes and other characters that JSON would escape.
        (hermes('{"text": "say "hi"", "n": 1}'), {"text": 'say "hi"', "n": 1}),
        (hermes('{"text": "print("a", b) f("c")", "n": 1}'),
         {"text": 'print("a", b) f("c")', "n": 1}),
        (hermes('{"text": "<a href="x"></a>", "items": ["a", "b"]}'),
         {"text": '<a href="x"></a>', "items": ["a", "b"]}),
        (hermes('{"text":"a\nb \\d \\u00e9"}'), {"text": "a\nb \\d é"}),
        (hermes(r'{"text": "/[\ud800-\udbff]/g"}'), {"text": r"/[\ud800-\udbff]/g"}),
        (hermes(r'{"text": "\documentclass{a} \usepackage{b}", "n": 1}'),
         {"text": r"\documentclass{a} \usepackage{b}", "n": 1}),
        (hermes(r'{"text": "C:\users\me \u12 ok \ud83d", "n": 1}'),
         {"text": r"C:\users\me \u12 ok \ud83d", "n": 1}),
        (hermes('{"text": "it\'s, \'n\': 2"}'), {"text": "it's, 'n': 2"}),
        (hermes('{"text": "// a", "any": "/* b */"}'), {"text": "// a", "any": "/* b */"}),
        (hermes('{"path": "</tool_call>", "n": 1}'), {"path": "</tool_call>", "n": 1}),
        # Commas, Python's words, brackets.
        (hermes('{"text": "a" "n": 2}'), {"text": "a", "n": 2}),
        (hermes('{"items": [1, 2,], "n": 3,, "x": 4,}'), {"items": [1, 2], "n": 3, "x": 4}),
        (hermes('{"yes": True, "text": "True", "items": [None, {"a": False} ], "n": null}'),
         {"yes": True, "text": "True", "items": [None, {"a": False}], "n": None}),
        (hermes('{"path": "x", "n": null', "</tool_call>"), {"path": "x", "n": None}),
        (hermes('{"n":1', "\n</tool_call>"), {"n": 1}),
        (hermes("{}", "}}\n</tool_call>"), {}),
        (hermes('{"n": 1}', "\n}\n}\n</tool_call>"), {"n": 1}),
        (hermes('{"tree": {"k": 1, "n": 5}}'), {"tree": {"k": 1, "n": 5}}),
        # Other members, in any order, or none.
        (hermes('{"n": 1}', ', "id": "1", "type": "function", "index": 0}</tool_call>'), {"n": 1}),
        (hermes('{"n": 1}', '}, "id": null}</tool_call>'), {"n": 1}),
        (hermes('{"n": 1}', ', "id": "1"}}</tool_call>'), {"n": 1}),
        (hermes('{"path": "a", "items": [{"q": 1, "n": 2}]}', ', "id": "1"}</tool_call>'),
         {"path": "a", "items": [{"q": 1, "n": 2}]}),
        ('<tool_call>\n{"name": "read" }\n</tool_call>\n<tool_call>{"name": "read"}', [{}, {}]),
        # An end that was forgotten.
        (f'{hermes("{}", "}")}\n{hermes("{}")}', [{}, {}]),
    ],
    "qwen": [
        ("<tool_call><function=read><parameter=n>5</parameter></function></tool_call>", {"n": 5}),
        (qwen(p("text", "\n a \n")), {"text": "\n a \n"}),
        # Windows' line breaks are no part of a value, where its tag has one; else they are.
        (qwen(p("path", "a.md"), p("n", 5), p("text", "\n a\n\n")).replace("\n", "\r\n"),
         {"path": "a.md", "n": 5, "text": "\r\n a\r\n\r\n"}),
        ("<function=read>\r\n<parameter=path>\r\n<parameter=path>\r\na.md\r\n</function>",
         {"path": "a.md"}),
        (qwen(p("text", "\r\na\r"), "<parameter=path>\ra\r</parameter>"),
         {"text": "\r\na\r", "path": "\ra\r"}),
        # Tags that were forgotten.
        (qwen(p("n", 5), after="</tool_call>"), {"n": 5}),
        (qwen(p("n", 5), after="</function>"), {"n": 5}),
        (qwen(p("n", 5, "\n")), {"n": 5}),
        (qwen(p("n", 5, "\n"), after="</tool_call>"), {"n": 5}),
        (f"{qwen(p('n', 5, ''))}\n{qwen()}", [{"n": 5}, {}]),
        (qwen(p("n", 5), before=""), {"n": 5}),
        (qwen(before="\n\n"), {}),
        (f"{qwen(p('n', 5), after='</function>')}{qwen(p('n', 6), before='')}",
         [{"n": 5}, {"n": 6}]),
        # A value that was never closed, before a key that has none yet.
        (qwen(p("text", "Dallas", "\n"), p("n", 5)), {"text": "Dallas", "n": 5}),
        (qwen(p("text", "a", "\n"), '<parameter name="any">\nb\n', p("n", 5)),
         {"text": "a", "any": "b", "n": 5}),
        # Tags that come twice.
        (qwen(p("path", "x"), "</parameter>\n"), {"path": "x"}),
        (qwen("<parameter=path>\n", p("path", "x")), {"path": "x"}),
        (qwen(p("path", "x"), "</function>\n"), {"path": "x"}),
        (qwen("<function=read>\n", p("path", "x")), {"path": "x"}),
        (qwen(p("path", "x"), before="<tool_call>\n<tool_call>\n"), {"path": "x"}),
        # All arguments as one JSON object, or MiniMax's spelling.
        (qwen('{"z": {"a": [1]}}\n'), {"z": {"a": [1]}}),
        ("<tool_call><function=read>\n{}\n</function>", {}),
        (qwen("<parameter name=z>a</parameter>\n<parameter='n'>2</parameter>"), {"z": "a", "n": 2}),
        # Text that looks like an object with a key that comes twice.
        (qwen(p("path", '{"a": 1, "a": 2}')), {"path": '{"a": 1, "a": 2}'}),
        *((qwen(p("path", value)), {"path": value}) for value in (
            # Tags in a text.
            "a </parameter> b </function>\n</tool_call> c",
            "<a>\n <parameter>5</parameter>\n <b/>\n <parameter x='1'>6</parameter>\n</a>",
            "<parameter>5</parameter>",
            "c = '</tool_call><tool_call>'",
            "a <function>f</function>",
            # A key's tag in a line, of a key that has a value, or has none.
            "say `<parameter=n>` here",
            "TAG = f'<parameter=path>{x}<parameter=n>'",
            # HTML after the end tag in a line, and a call in a line.
            "use `</tool_call>` here\n<details>\n <div a='b'>",
            "a = '<parameter=n>5</parameter></function></tool_call>'",
            # The end of an element around a function; one longer than any tag.
            '  <parameter name="zz">1</parameter>\n  </function>\n</lib>',
            f'<a>\n<parameter name="a">{"x " * 400}\n</parameter>\n</a>',
        )),
    ],
    "glm": [
        (glm(), {}),
        ("<tool_call>\nread\n</tool_call>", {}),
        (glm(a("n", 5, "")), {"n": 5}),
        (glm("<arg_key>text</arg_key>a.py</arg_value>"), {"text": "a.py"}),
        (glm("<arg_key>n</arg_key></arg_key><arg_value>5</arg_value>"), {"n": 5}),
        (glm("<arg_key><arg_key>n</arg_key><arg_value>5</arg_value>"), {"n": 5}),
        (glm(a("path", "<arg_value>x"), "</arg_value>"), {"path": "x"}),
        (f"{glm(a('text', 'a'), after='')}{glm(a('n', 5))}", [{"text": "a"}, {"n": 5}]),
        (glm('{"z": "1"}'), {"z": "1"}),
        (glm('\n{"z": "1", "n": 2}\n'), {"z": "1", "n": 2}),
        (glm(a("text", "Dallas", ""), a("n", 5)), {"text": "Dallas", "n": 5}),
        *((glm(a("path", value)), {"path": value}) for value in (
            "a<arg_key>zz</arg_key>b",  # the tool has no such key
            "c = '</tool_call><tool_call>'",
            "say `<arg_key>n</arg_key>` <arg_value> here",
        )),
    ],
    "minimax": [
        (minimax(m("text", "None"), m("maybe", "  x")), {"text": "None", "maybe": "  x"}),
        (minimax(m("n", 1), after=""), {"n": 1}),
        ('<invoke name="read">\n<parameter name="n">1</parameter></invoke>', {"n": 1}),
        ('<minimax:tool_call>\n<invoke name="read">\n</invoke>\n<invoke name="read">\n'
         '<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>', [{}, {"n": 1}]),
        (minimax(m("text", "Dallas\n", ""), m("n", 5)), {"text": "Dallas", "n": 5}),
        (minimax('{"z": "1"}\n'), {"z": "1"}),
        (minimax(m("path", "x"), "</parameter>"), {"path": "x"}),
        (minimax('<invoke name="read">\n', m("path", "x")), {"path": "x"}),
        *((minimax(m("path", value)), {"path": value}) for value in (
            "a</parameter> b",
            "a '</parameter>\n</invoke>' b",
            "a</invoke> b",
            "a</minimax:tool_call>b",
            "a<parameter>5</parameter>b",
            'say `<parameter name="n">` here',
            "use `</minimax:tool_call>` here\n<div>",
            "<parameter=x>\n<parameter>5</parameter>\n</parameter>\n",
        )),
    ],
    "minicpm": [
        (minicpm("\n", c("path", "\n a.md\n"), "\n"), {"path": "a.md"}),
        (minicpm(c("n", 5), c("any", "a")), {"n": 5, "any": "a"}),
        (minicpm(c("path", "<![CDATA[a <b>\n]]>"), c("n", 5)), {"path": "a <b>\n", "n": 5}),
        (minicpm(c("path", "<![CDATA[</param></function>]]>")), {"path": "</param></function>"}),
        (minicpm(c("path", "\n<![CDATA[ a ]]>\n")), {"path": " a "}),
        (minicpm(c("path", "a ]]>")), {"path": "a ]]>"}),
        (minicpm(c("path", "<b>")), {"path": "<b>"}),
        (minicpm(c("path", "a.md", "")), {"path": "a.md"}),
        (minicpm(c("path", "")), {"path": ""}),
        (minicpm(c("path", "x"), "</param>"), {"path": "x"}),
        (minicpm(c("path", "Dallas\n", ""), c("n", 5)), {"path": "Dallas", "n": 5}),
        (f"{minicpm()}\n{minicpm()}", [{}, {}]),
    ],
    "mistral_13": [
        # A false escape at the end of a reply: no end tag follows.
        (MISTRAL + r'{"path": "foo\d+"}', {"path": r"foo\d+"}),
        (MISTRAL + r'{"path": "C:\user"}', {"path": r"C:\user"}),
        (MISTRAL + r'{"path": "a\"b"}', {"path": 'a"b'}),
        ('[TOOL_CALLS]read{"n": 1}', {"n": 1}),
        ('[TOOL_CALLS]read{"n": 1}read[ARGS]{"n": 1}', [{"n": 1}] * 2),
        ('[TOOL_CALLS]read[CALL_ID]aB3dE6gH9[ARGS]{"n": 1}', {"n": 1}),
        (r'[TOOL_CALLS][{"name": "read", "arguments": {"path": "a]\\\"}"}}]', {"path": 'a]\\"}'}),
        ('[TOOL_CALLS]{"name": "read", "arguments": "{\\"n\\": 1}", "id": "aB3dE6gH9"} ',
         {"n": 1}),
        ('[TOOL_CALLS][{"name": "read"}][TOOL_CALLS][{"name": "read"}]', [{}, {}]),
    ],
    "harmony": [(HARMONY + '{"path": "x", "n": 5<|call|>', {"path": "x", "n": 5})],
    "gemma": [
        (gemma(""), {}),
        # Marks that are missing, or other quotes in their place.
        (gemma("path:a.md"), {"path": "a.md"}),
        (gemma(f"path:{Q}a.md"), {"path": "a.md"}),
        (gemma(f"path:a.md{Q}"), {"path": "a.md"}),
        (gemma('path:"a.md"'), {"path": "a.md"}),
        (gemma("path:'it\\'s, n:2',n:1"), {"path": "it's, n:2", "n": 1}),
        (gemma(f"path:{Q}a.md,any:{Q}b{Q}"), {"path": "a.md", "any": "b"}),
        (gemma(f"path:{Q}a.md,any:{Q}{Q}"), {"path": "a.md", "any": ""}),
        (gemma("path:hello, world,n:3"), {"path": "hello, world", "n": 3}),
        (gemma("path:note: see, this: that"), {"path": "note: see, this: that"}),
        (gemma("tree:{a:x,b:y z}"), {"tree": {"a": "x", "b": "y z"}}),
        (gemma("names:[a, b]"), {"names": ["a", "b"]}),
        (gemma("path:,n:1"), {"path": "", "n": 1}),
        # Line breaks before a text are part of it, before others they are not.
        (gemma("path:\nabc,n:\n1"), {"path": "\nabc", "n": 1}),
        (gemma(f"path:\n{Q}abc{Q}"), {"path": "abc"}),
        # Brackets and tags inside a string.
        (gemma("path:a}b,n:5"), {"path": "a}b", "n": 5}),
        (gemma("path:{not json"), {"path": "{not json"}),
        (gemma("path:f() { return }"), {"path": "f() { return }"}),
        (gemma("path:if (a) { if (b) {c }\n}"), {"path": "if (a) { if (b) {c }\n}"}),
        (gemma('path:{"a":1,"a":2}'), {"path": '{"a":1,"a":2}'}),
        (gemma(f"path:{Q}if x {{ }} }}{Q},n:5"), {"path": "if x { } }", "n": 5}),
        (gemma(f"path:{Q}<tool_call|>{Q},n:5"), {"path": "<tool_call|>", "n": 5}),
        (gemma(f'path:{Q}say "hi",\n b:{Q}'), {"path": 'say "hi",\n b:'}),
        (gemma(f"path:{Q}a{Q}}}"), {"path": "a"}),  # one bracket too many
        # Values of another type than their marks say.
        (gemma("path:5"), {"path": "5"}),
        (gemma(f"n:{Q}5{Q}"), {"n": 5}),
        (gemma(f"n:{Q}five{Q}"), {"n": "five"}),
        (gemma(f"any:{Q}5{Q}"), {"any": "5"}),
        (gemma("names:[1, 2 , ]"), {"names": ["1", "2"]}),
        (gemma(f"names:[{Q}{Q},a]"), {"names": ["", "a"]}),
        (gemma("x:1e5,yes:True,any:None"), {"x": 1e5, "yes": True, "any": None}),
        # Objects and arrays in each other, keys in quotes.
        (gemma(f"tree:{{a:[1,{{b:{Q}c{Q}}}]}}"), {"tree": {"a": [1, {"b": "c"}]}}),
        (gemma(f'{Q}n{Q}:1, "x":2, other-key: 3'), {"n": 1, "x": 2, "other-key": 3}),
        # Tags that come twice, or not at all.
        (f"{gemma('n:1')}<tool_call|>", {"n": 1}),
        ("<|tool_call>call:read{n:1}call:read{}<tool_call|>", [{"n": 1}, {}]),
        ("<|tool_call>read{n:1}<tool_call|>", {"n": 1}),
        ("<|tool_call>call:read{n:1}", {"n": 1}),
    ],
    "function_gemma": [
        (f"<start_function_call>call:read{{{written}}}<end_function_call>", {"path": "a.md"})
        for written in ("path:<escape>a.md<escape>", "path:<escape>a.md", "path:a.md<escape>")
    ],
    "lfm2": [
        (f"{PYTHON[0]}{written}{PYTHON[1]}", arguments)
        for written, arguments in (
            ('read(path="a.md")', {"path": "a.md"}),
            ('[read(path="a"), read(n=2)]', [{"path": "a"}, {"n": 2}]),
            ('[{"name": "read", "arguments": {"n": 1}}]', {"n": 1}),
            ('{"name": "read", "arguments": {"n": 1}}', {"n": 1}),
            ('\n[read(path="two\nlines")]\n', {"path": "two\nlines"}),
            ('[read(path="cp a \\\n b")]', {"path": "cp a \\\n b"}),
            ('[read(path="a\\\\\nb")]', {"path": "a\\\nb"}),
            ('[read(path="a\r\nb", text="c\\\rd")]', {"path": "a\r\nb", "text": "c\\\rd"}),
            ("[read(path=R'''a\n\"b\"\\c''')]", {"path": 'a\n"b"\\c'}),
            ('[read(path="""a\r\n"b" \'c\'""")]', {"path": 'a\r\n"b" \'c\''}),
            ("[read(tree={'a': true}, yes=False)]", {"tree": {"a": True}, "yes": False}),
            # Arguments that are called like a word of Python or JSON.
            ('[read(from="a", to="from=b"), read(n=[true], null =null, from_=True)]',
             [{"from": "a", "to": "from=b"}, {"n": [True], "null": None, "from_": True}]),
            *((f'[read({word}="a", n=1)]', {word: "a", "n": 1})
              for word in (*kwlist, "true", "false", "null")),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [(name, *row) for name, rows in RUNS.items() for row in rows],
)
def test_a_call_that_is_nearly_right_runs(name, text, arguments):
    calls = arguments if isinstance(arguments, list) else [arguments]
    expected = [("read", each) for each in calls]
    assert read_in_any_pieces(name, text) == Reply(expected)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (name, *row)
        for name, rows in RUNS.items()
        for row in (rows[:2] if name in {"qwen", "glm", "minicpm"} else rows)
        if row[0].endswith(format_of(name).end)
    ],
)
def test_text_after_the_end_tag_of_a_call_is_content(name, text, arguments):
    """Where nothing in the call was left open."""
    calls = arguments if isinstance(arguments, list) else [arguments]
    reply = read_in_any_pieces(name, f"{text}\nDone.")
    assert reply.calls == [("read", each) for each in calls]
    assert reply.content.strip() == "Done."


# Nobody can tell what was meant, or clients would run it with less than was written (L-86).
STAYS_OPEN: dict[str, list[str]] = {
    "hermes": [
        # A quote is missing, or is another.
        hermes('{"path": "x, "n": 1}'), hermes('{"n": 1, "path": "x}'),
        hermes('{"n": 1, "path": "x}', "}</tool_call>"), hermes('{"path": "x", n": 1}'),
        hermes("{'text': 'it's', 'n': 1}"), hermes('{"text": "a", \'n": 1}'),
        hermes('{"n": 1, key: 2}'), hermes('{"path": "x", text: "y"}'),
        hermes('{"path": "x", \'text\': "y"}'), hermes('{"path": "x",\n\'n\': 5}'),
        # The arguments are closed too early, or the call is.
        hermes('{"path": "x"} "text": "y"}'), hermes('{"path": "x"}, text: "y"}'),
        hermes("{\"path\": \"x\"}, 'text': 'y'}"), hermes('{"path": "x"}; "text": "y"}'),
        hermes('{"path": "x"} // why\n"text": "y"}'),
        hermes('{"path": "x"} /* why */, "text": "y"}'), hermes('{"path": "x"}} "text": "y"}'),
        hermes('{"n": 1], "m": 2}'), hermes('{"path": "x"</tool_call>, "text": "y"}'),
        hermes('{"path": "x"<tool_call>, "text": "y"}'),
        # A bracket is missing, a comma between numbers, a value that is none.
        hermes('{"items": [1, 2, "text": "z"}'), hermes('{"items": [{"a": 1, "text": "z"}'),
        hermes('{"tree": {"k": 1}', ""), hermes('{"tree": {"k": 1}', "</tool_call>"),
        hermes('{"items": [1 2]}'), hermes('{"items": [1, 2}'), hermes('{"items": [{"n": 1}'),
        hermes('{"items": [1, {"n": 1], "x": 2}'), hermes('{"items": [1, {"a": [true, "b', ""),
        hermes('{"n": 1 + 2}'), hermes('{"x": NaN, "n": 1}'), hermes('{"x": 1e999}', ", }"),
        hermes(f'{{"n": 1, "{"key" * 400}": 2}}'), hermes(f'{{"n": 1, "x": {"9" * 400}}}'),
        # A member after the arguments may be one of them.
        hermes('{"n": 1}', ', "id": "1", "n": 5}</tool_call>'),
        hermes('{"n": 1}', ', "id": 1 "n": 5}</tool_call>'),
        hermes('{"n": 1}', ', "id": "1, "n": 5}</tool_call>'),
        hermes('{"n": 1}', ', "n": 5, "id": "1"}</tool_call>'),
        # A key is there twice: JSON keeps one value.
        hermes('{"path": "x", "path": "y"}'), hermes('{"items": [{"a": 1, "a": 2}]}'),
        # The reply ends in a text, a word, a number, a key.
        hermes("{", ""), hermes('{"text": "a\\', ""), hermes('{"n": 12', ""),
        hermes('{"yes": True', ""), hermes('{"n": 1, "x', ""),
    ],
    "qwen": [
        # The call is closed too early.
        qwen(p("path", "x"), "</tool_call>\n", p("text", "y")),
        qwen('{"path": "x"}\n</function>, "text": "y"}\n', after="</tool_call>"),
        qwen('{"path": "x"}\n') + ', "text": "y"}',
        qwen('{"path": "x"}\n') + "\n<parameter=text>\ny\n",
        # Nobody can tell where a value ends.
        qwen("<parameter=path>\n", p("text", "x")), qwen("<parameter=path>x", p("text", "y")),
        qwen(p("path", "x"), "junk\n", p("text", "y")),
        qwen(p("path", "x", "\n</parametr>\n"), p("text", "y")),
        qwen(p("path", "x"), "<paramter=text>\ny\n</parameter>\n"),
        qwen(p("n", 5), p("path", "x", "\n"), p("n", 6)),
        qwen("<parameter=path>\nx</function>\n</parameter>\n"),
        qwen("<parameter=path>\r\nx<parameter=n>\r\n5\r\n</parameter>\r\n"),
        qwen(p("path", "x\njunk", "</parameter>\n"), "<paramete=n>\n5\n</parameter>\n"),
        qwen(p("text", "a", "\n"), p("zz", 5)),
        qwen(p("path", "x"), "'", p("n", 5), p("text", "y")),
        qwen(p("path", ""), "</parameter>\n", p("text", "y")),
        # What is no argument, or has no name.
        qwen("n=5"), qwen("<parameter>5</parameter>"), qwen("{'text': 'it's'}"),
        qwen(p("n", 5), "<parameter=>5</parameter>"), qwen(p("path", "a.md"), "<n>5"),
        qwen(p("path", "a.md", "</parameter>"), "<n>5", after=""),
        # A key is there twice.
        qwen(p("path", "x"), p("path", "y")),
        *(qwen(p("items", text)) for text in (
            '[{"a": 1, "a": 2}]', "[{'a': 1, 'a': 2}]", "[{1: 1, '1': 2}]", "[{True: 1, 1: 2}]",
            '[{\\"a\\": 1, \\"a\\": 2}]')),
        # The reply ends in a key, or before there is one.
        qwen(p("path", "x", "\n"), "<parameter=te", after=""), qwen(after=""),
    ],
    "glm": [
        glm(a("path", "x"), "\n</tool_call>\n", a("text", "y")),
        glm('{"path": "x"}</tool_call>, "text": "y"}'),
        glm(a("path", "x", "</arg_vlue>"), a("text", "y")),
        glm(a("path", "x"), "<ag_key>text</arg_key>\n<arg_value>y</arg_value>\n"),
        glm("<arg_key>path</arg_key>\n, <arg_value>x</arg_value>\n"),
        glm(a("other", '{"a": 1, "a": 2}')), glm(a("path", "a.md"), "<n>5"),
        glm("<arg_key>n</arg_key>"), glm("<arg_key>n</arg_key>", a("x", 1)), glm(a("", 1)),
        glm("{'text': 'it's'}"), glm(a("path", "x", "\n"), "<arg_key>text</", after=""),
    ],
    "minimax": [
        minimax(m("path", "x"), '<paramter name="text">y</parameter>\n'),
        minimax(m("path", "x"), "[5]\n</parameter>\n"),
        minimax(m("path", "x"), '"', m("n", 5), m("text", "y")),
        minimax('<parameter name="n">5\ny', m("text", "")), minimax("n: 5"),
        minimax("<parameter>5</parameter>"), minimax(m("path", "a.md"), "<n>5"),
    ],
    "minicpm": [minicpm(c("path", "x"), "y</param>"), minicpm(c("path", "a.md"), "<n>5")],
    "mistral_13": [
        MISTRAL + text for text in (
            '{"path": "x"} "text": "y"}', '{"path": "x", }n": 5}', '{"path": "x"}, "tex',
            '{"path": "if (x == "a"} do", "n": 5}', '{"path": "{ "a" } ", "n": 5}',
            '{"items": [1, 2} Done.', '{"items": [1, 2} "delta"')
    ],
    "kimi": [FORMATS["kimi"].text({"path": "x"}).replace('x"', "x")],
    "harmony": [
        HARMONY + text for text in (
            '{"path": "x", "n": 31}1, "text": "y"}<|call|>', '{"path": "x", "n",: 5, "text: "y"}',
            '{"path": "x", "nx: 5", "text": "y"}<|call|>')
    ],
}  # fmt: skip
IS_TEXT: dict[str, list[str]] = {
    "hermes": [
        "The tag <tool_call> opens a call.", '<tool_call>\n{"name": "read", "argu',
        '<tool_call>{"nam": "read"}</tool_call>', "<tool_call>[1]</tool_call>", "</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "<tool_call></tool_call>",
        '<tool_call>{"name": ["read"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "read", "parameters": {"n": 1}}</tool_call>',
        '<tool_call>{"name": "read", "input": {"n": 1}}</tool_call>',
        '<tool_call>{"arguments": {"path": "a"}, "n": 5, "name": "read"}</tool_call>',
        '<tool_call>{"arguments": {"n": 1}, "name": "rm"}</tool_call>',
        *(f'<tool_call>{{"name": "read", "arguments": {text}}}</tool_call>'
          for text in ('"{\\"n\\": 1"', '"n"', '"[1]"', "5", "[1]")),
        '<tool_call>[{"name": "read", "arguments": {"n": 1}}, {"name": "rm"}]</tool_call>',
        '<tool_call>{"function": {"name": "read", "arguments": {}}}</tool_call>',
        '<tool_call>\n{"arguments": {"n": 1, "n": 2}, "name": "read"}\n</tool_call>',
        '<tool_call>{"arguments": "{\\"n\\": 1, \\"n\\": 2}", "name": "read"}</tool_call>',
        "<tool_call>\n{'arguments': {'n': 1, 'n': 2}, 'name': 'read'}\n</tool_call>",
        '<tool_call>\n{"arguments": {"path": "x","read" "text": "y"}, "name": "read"}</tool_call>',
    ],
    "qwen": [
        "<tool_call>\n<function=read", "Use <function=foo> so, `<function=NAME><parameter=KEY>`.",
        "A call begins with <function=read> and ends with </function>.",
        "Write <function=unknown>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    ],
    "glm": ["<tool_call>read the file</tool_call>", "<tool_call>\nread"],
    "minimax": ["See `<invoke name=x>`."],
    "mistral_lists": [
        '[TOOL_CALLS][{"name": "read", "parameters": {"n": 1}}]',
        '[TOOL_CALLS][{"name": "read", "arguments": {"n": 1}}, {"name": "rm"}]',
        '[TOOL_CALLS][{"name": "read", "arguments": [1]}] ok',
        '[TOOL_CALLS][{"name": "read", "arguments": {"n": 1}',
        '[TOOL_CALLS][{"name": "read", "arguments": "{n}"}]',
        "[TOOL_CALLS] begins a call.", "write[ARGS] is how.",
    ],
    "kimi": [
        f"Say `{KIMI_READ}` to read.", f"{SECTION[0]}{SECTION[1]}Hi",
        FORMATS["kimi"].text({}).replace("{}", ""), FORMATS["kimi"].text({}).replace(":0", ""),
        FORMATS["kimi"].text({}).partition("argument")[0],
    ],
    "gemma": [
        "The tag <tool_call|> ends it.", "In a call:read{} there is none.",
        gemma("n:1").replace("read", "rm"), "<|tool_call>call:read{n:1", gemma(f'path:{Q}a.md"'),
        gemma("n 1"), gemma("n:1 x:2"), gemma("n:1,,x:2"), gemma(":1"), gemma("{"),
        gemma("n:1,n:2"), gemma("any:[x] done"), gemma("items:[1,,2]"), gemma("tree:{a:1,a:2}"),
        gemma(f'items:{Q}[{{"a": 1, "a": 2}}]{Q}'), gemma(f"path:{Q}x,n;:3141,text:{Q}y{Q}"),
        gemma(f"path:{Q}x{Q},n:,3141text:y{Q}"),
    ],
    "function_gemma": [
        "<start_function_call>call:read{path:<escape>x<escape,:3141,text:<escape>y<escape>}"
        "<end_function_call>",
        "<start_function_call>call:read{path:<escape>x<escap,text:<escape>}<end_function_call>",
    ],
    "lfm2": [
        f"Go.{PYTHON[0]}{written}{PYTHON[1]}"
        for written in (
            '[read("a.md")]', '[read(path="a" n=1)]', "[read(path=docs/a.md, n=1)]", "[]",
            "[read(**{'n': 1})]", "[read(n=1), rm()]", "[read(path=a b)]", "[2 - list_all()]",
            "[read(items=[{'a': 1, 'a': 2}])]", '[read(path="x" "text")]',
            "[read(items=['x' u'text'])]", '[read(path="a") - read(path="b")]')
    ],
    # What mlx-lm's parser overlooks: a call of several.
    "kimi_k3": [
        '<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="read" index="2"<|sep|><|open|>json type="object"<|sep|>{"n": 5'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, texts in STAYS_OPEN.items() for text in texts],
)
def test_a_call_of_which_nobody_can_tell_what_was_meant_is_left_open(name, text):
    assert read_in_any_pieces(name, text) == Reply([BROKEN])
    if name in WITH_TOKENS:
        pieces = re.split(r"(</?[\w:]+>|<\|\w+\|>)", text)
        assert read(name, pieces, as_tokens=True) == Reply([BROKEN])


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, texts in IS_TEXT.items() for text in texts],
)
def test_what_is_no_call_is_text_exactly_as_generated(name, text):
    assert read_in_any_pieces(name, text) == Reply([], text)


BODIES = [
    ('{"name": "read", "arguments": "{\\"n\\": 1}"}', [{"n": 1}]),
    ('{"arguments": {"n": 1}, "name": "read"}', [{"n": 1}]),  # Hermes 2 and 3 write it so
    ('{"id": "a", "name": "read", "arguments": {"n": 1}}', [{"n": 1}]),
    ('{"name": "read", "arguments": []}', [{}]),
    ('{"name": "read", "arguments": ""}', [{}]),
    ('{"name": "read", "arguments": null}', [{}]),
    ("{'name': 'read', 'arguments': {'n': 1}}", [{"n": 1}]),
    ('[\n {"name": "read", "arguments": "{}"}, {"name": "read"}]', [{}, {}]),
    ('{"arguments": {"text": "\\"}</tool_call>"}, "name": "read"}}',
     [{"text": '"}</tool_call>'}]),
]  # fmt: skip


@pytest.mark.parametrize("is_known", [True, False], ids=["tags", "no tags"])
@pytest.mark.parametrize("name", JSON_IN_TAGS)
@pytest.mark.parametrize(("body", "arguments"), BODIES)
def test_json_calls_are_read_in_any_order_whatever_the_tokenizer_knows(
    body, arguments, name, is_known
):
    tool_format = format_of(name)
    if not is_known:
        tool_format = tool_format._replace(end="\0", parse=None)
    call = f"<tool_call>\n{body}\n"
    calls = [("read", each) for each in arguments]

    for text, content in (
        (f"{call}</tool_call>", None),
        (f"{call}</tool_call>\nok", "ok"),
        (f"{call}ok", "ok"),
        (call, None),
    ):
        assert read_in_any_pieces(tool_format, text) == Reply(calls, content)
    assert read(tool_format, [call + call]) == Reply(calls * 2)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('[{"name": "get", "id": 7}]', []),
        ('{"id": 7, "name": "get"}', []),
        ('[{"name": "get", "type": "function"}]', []),
        ('[{"name": "get"}]', [{}]),
        ('[{"name": "get", "arguments": {"id": 7}, "id": "1"}]', [{"id": 7}]),
        ('{"id": "1", "name": "get", "arguments": {}}', [{}]),
    ],
)
def test_a_member_that_is_a_key_of_the_tools_may_be_an_argument(call, arguments):
    properties = {"id": {"type": "integer"}, "name": {"type": "string"}}
    tools = [tool("get", {"properties": properties})]
    reply = read_in_any_pieces(
        "hermes", f"<tool_call>\n{call}</tool_call>", tools=tools
    )
    assert reply.calls == [("get", each) for each in arguments]


@pytest.mark.parametrize(
    "lead", ["<tool_call>", "<tool_call></think>", "<tool_call>read"]
)
@pytest.mark.parametrize("call", [glm(a("n", 5)), qwen(p("n", 5))])
def test_a_call_behind_a_tag_that_opens_none_keeps_its_arguments(lead, call):
    assert read_in_any_pieces("qwen", lead + call).calls == [("read", {"n": 5})]


def test_generated_json_is_kept_as_it_is():
    raw = '{ "n":1.50,\n "text" : "\\u00e9\\/" , "tree": {  } }'
    (call,) = read_message("hermes", [hermes(raw)])["tool_calls"]
    assert call["function"]["arguments"] == raw


# -- what only some of them have -------------------------------------------------------


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


def test_gemma_arguments_have_the_types_that_a_schema_refers_to():
    text = gemma("path:5,items:[6,true],tree:{path:7},lists:[8,a]")
    reply = read("gemma", [text], tools=[tool("read", REFERRING_PARAMETERS)])
    tree = {"path": "7"}
    expected = {"path": "5", "items": ["6", "true"], "tree": tree, "lists": ["8", "a"]}
    assert reply == Reply([("read", expected)])


@pytest.mark.parametrize("key", ["NUMBER", "MARK", "BARE_KEY", "AFTER_VALUE", "NAMES"])
@pytest.mark.parametrize("value", [f"{Q}b{Q}", "b"])
def test_gemma_arguments_may_be_called_as_a_part_of_a_pattern_is(key, value):
    tools = [tool("read", {"properties": {"path": {"type": "string"}, key: {}}})]
    reply = read_in_any_pieces("gemma", gemma(f"path:a.md,{key}:{value}"), tools=tools)
    assert reply == Reply([("read", {"path": "a.md", key: "b"})])


def test_a_schema_may_refer_to_itself_in_a_union():
    union = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/text"}]}
    parameters = {
        "properties": {"path": {"$ref": "#/$defs/text"}},
        "$defs": {"text": union},
    }
    reply = read("qwen", [qwen(p("path", 5))], tools=[tool("read", parameters)])
    assert reply == Reply([("read", {"path": "5"})])


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", [" ", "}", "{", "[", ",", "n:", ", ", "} ", Q, "a,a:"])
@pytest.mark.parametrize("key", ["path", "any", "tree", "items"])
def test_gemma_arguments_that_run_away_take_no_longer_than_their_length(run, key):
    text = f"<|tool_call>call:read{{{key}:a{run * 30_000}b<tool_call|>"
    began = time.process_time()
    read("gemma", [text])
    assert time.process_time() - began < 4


def test_a_file_that_quotes_the_end_tag_is_read_once():
    """Each piece searched all that came before: 4 ms a token after 6,600 of them."""
    lines = "say <tool_call|> here\n" * 2_000
    began = time.process_time()
    reply = read("gemma", token_like(gemma(f"path:{Q}{lines}{Q}")))
    assert reply == Reply([("read", {"path": lines})])
    assert time.process_time() - began < 6


def test_brackets_that_stay_open_are_read_in_linear_work():
    """Thirty of them took an hour: each was tried again by each that contains it."""
    began = time.process_time()
    assert read("gemma", ["<|tool_call>call:read{n:" + "[1," * 60]).calls == []
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("thought\nI think.<channel|>Hi", Reply([], "Hi", "I think.")),
        ("<|channel>thought\nI think.<channel|>Hi", Reply([], "Hi", "I think.")),
        ("thought\n<channel|>Hi", Reply([], "Hi")),
        ("thought", Reply([], "thought")),
        ("My thought\nis this.", Reply([], "My thought\nis this.")),
        ("A list:\nthought\nword", Reply([], "A list:\nthought\nword")),
        (f"thought\nwhy\n<channel|>{gemma('n:1')}", Reply([("read", {"n": 1})], None, "why")),
        ("I look.\ncall:read{n:1}<tool_call|>", Reply([("read", {"n": 1})], "I look.")),
    ],
)  # fmt: skip
def test_gemma_thinks_also_without_the_tag_before_it(text, reply):
    assert read_in_any_pieces("gemma", text) == reply


COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
HEADERS = [
    "<|channel|>commentary to=read <|constrain|>json<|message|>",
    "<|channel|>commentary to=read json<|message|>",
    "<|channel|>commentary to=read<|message|>",
    " to=read<|channel|>commentary json<|message|>",
    " to=functions.read<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|><|channel|>commentary to=functions.read json<|message|>",
    "<|channel|>analysis to=read code<|message|>",
]


@pytest.mark.parametrize("header", HEADERS)
def test_harmony_calls_have_many_headers(header):
    look = f"{COMMENTARY}I look.<|end|><|start|>assistant"
    for (lead, content), thought, end in product(
        [("", None), (look, "I look.")], ["", THOUGHT], ["", "<|call|>"]
    ):
        text = f'{thought}{lead}{header}{{"path": "a.md"}}{end}'
        reply = read_in_any_pieces("harmony", text)
        reasoning = "why" if thought else None
        assert reply == Reply([("read", {"path": "a.md"})], content, reasoning)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Plain.", "Plain."),
        (f" to=assistant{FINAL}Hi", "Hi"),
        (f"{THOUGHT} to=assistant{FINAL}Hi", "Hi"),
        (f"{THOUGHT}<|channel|>{FINAL}Hi", "Hi"),
        ("<|channel|>commentary to=assistant<|message|>Hi", "Hi"),
        (f"<|channel|>commentary to=assistant{FINAL}Hi", "Hi"),
        # Two messages of one channel are two paragraphs.
        (f"{FINAL}One.<|end|><|start|>assistant{FINAL}Two.", "One.\n\nTwo."),
        (f"{COMMENTARY}One.<|end|>{THOUGHT}{FINAL}Two.<|end|>", "One.\n\nTwo."),
        (f"{FINAL}One.\n<|end|><|start|>assistant{FINAL}\nTwo.", "One.\n\nTwo."),
        # Markup that is spoken of.
        *((f"{THOUGHT}{FINAL}{words}", words) for words in (
            "Here <|end|> ends it.", f"`<|start|>assistant{FINAL}` begins it.",
            "Say `to=functions.read` or to=read there.", "So:\nto=read x",
            "See `to=functions.x` and <b>.\n",
            "The header is `assistant to=functions.read` and so on.")),
    ],
)  # fmt: skip
def test_harmony_answers_are_all_that_is_said(text, content):
    reply = read_in_any_pieces("harmony", text)
    assert (reply.calls, reply.content) == ([], content)


def test_harmony_thoughts_are_parted_as_messages_are_and_may_speak_of_calls():
    spoken = (
        "Plan:\nto=functions.read, says the assistant to=functions.read, then\n done."
    )
    second_thought = THOUGHT.replace("why", spoken)
    reply = read_in_any_pieces("harmony", f"{THOUGHT}{second_thought}{FINAL}Hi")
    assert reply == Reply([], "Hi", f"why\n\n{spoken}")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=container.exec code<|message|>",
        "<|channel|>analysis to=python code<|message|>",
        " to=python<|channel|>analysis <|constrain|>code<|message|>",
        " to=browser.search<|message|>",
    ],
)
def test_harmony_code_for_a_tool_that_nobody_offered_is_no_answer(header):
    reply = read_in_any_pieces("harmony", f"{THOUGHT}{header}ls(1)")
    assert reply == Reply([], None, "why\n\nls(1)")

    text = f"{header}ls(1)<|end|><|start|>assistant{FINAL}Hi"
    assert read_in_any_pieces("harmony", text) == Reply([], "Hi", "ls(1)")


WRITE_CALL = '{"name": "write", "arguments": "{\\"n\\": 1}", "id": "aB3dE6gH9"}'


@pytest.mark.parametrize("name", ["mistral_lists", "mistral_11", "mistral_13"])
def test_mistral_models_write_all_of_its_formats_among_text(name):
    write = ("write", {"n": 1})
    for text, calls, content in (
        (f'[TOOL_CALLS] [{{"name": "read"}}, {WRITE_CALL}]\n\nDone.', [("read", {}), write],
         "Done."),
        (f"I look.[TOOL_CALLS]{WRITE_CALL} ", [write], "I look."),
        ('[TOOL_CALLS]write[ARGS]{"n": 1}\nDone.', [write], "Done."),
        ('So:\nwrite[ARGS] it.[TOOL_CALLS]write[ARGS]{"n": 1}', [write], "So:\nwrite[ARGS] it."),
    ):  # fmt: skip
        reply = read_in_any_pieces(name, text)
        assert (reply.calls, (reply.content or "").strip()) == (calls, content)


@pytest.mark.parametrize("name", ["mistral_lists", "mistral_11", "mistral_13"])
def test_a_call_keeps_the_id_that_the_model_wrote(name):
    """Its template prints it. An id that comes twice names one call only."""
    written = 'read[CALL_ID]aB3dE6gH9[ARGS]{"n": 1}'
    for text, ids in (
        (f"[TOOL_CALLS]{written}[TOOL_CALLS]{written}", ["aB3dE6gH9", "call_0"]),
        (f"[TOOL_CALLS][{WRITE_CALL}]", ["aB3dE6gH9"]),
    ):
        calls = read_message(name, [text])["tool_calls"]
        assert [call["id"] for call in calls] == ids


KIMI_CALLS = [("read", {"path": "a.md"}), ("write", {"n": 1})]


@pytest.mark.parametrize("start", ["", SECTION[0], "<|tool_call_section_begin|>"])
@pytest.mark.parametrize("end", ["", SECTION[1], "<|tool_call_section_end|>"])
def test_kimi_calls_need_no_section_and_no_end(start, end):
    calls = KIMI_READ + KIMI_WRITE
    reply = read_in_any_pieces("kimi", f"I look.\n{start}{calls}{end}\nDone.")
    assert reply == Reply(KIMI_CALLS, "I look.\nDone.")
    cut_reply = read_in_any_pieces(
        "kimi", start + calls.removesuffix("<|tool_call_end|>")
    )
    assert cut_reply == Reply(KIMI_CALLS)


@pytest.mark.parametrize("start", ["", SECTION[0]])
def test_kimi_calls_follow_each_other_also_after_what_is_none(start):
    unknown = KIMI_WRITE.replace("write", "rm")
    for calls, content in (
        (KIMI_READ.removesuffix("<|tool_call_end|>") + KIMI_WRITE, None),
        (f"{KIMI_READ.replace('functions.', '')}\n{KIMI_WRITE}", None),
        (KIMI_READ + unknown + KIMI_WRITE, unknown),
        (f"{KIMI_READ}And:{KIMI_WRITE}", "And:"),
    ):
        assert read_in_any_pieces("kimi", start + calls) == Reply(KIMI_CALLS, content)


def test_minimax_text_after_a_block_that_was_not_closed_is_text():
    text = f"{minimax(m('path', 'a'), after='</invoke>')}\nDone."
    assert read_in_any_pieces("minimax", text) == Reply(
        [("read", {"path": "a"})], "Done."
    )


def test_minimax_text_is_shown_as_it_comes_when_no_argument_can_follow():
    reader = open_reader("minimax")
    reader.feed(minimax(m("path", "x"), after="</invoke>\n"))
    prose = "I have asked for the file. "
    shown = [delta.get("content", "") for delta in reader.feed(prose * 5)]

    # After a hundred letters without a tag.
    assert "".join(shown).startswith(prose * 4)


def test_a_call_behind_one_that_nobody_offered_is_a_call():
    unknown = '<minimax:tool_call><invoke name="rm"><parameter name="path">x</parameter></invoke>'
    known = '<invoke name="read"><parameter name="n">5</parameter></invoke></minimax:tool_call>'
    reply = read_in_any_pieces("minimax", unknown + known)
    assert reply == Reply([("read", {"n": 5})], unknown)


def test_a_name_of_python_may_have_a_dash():
    text = f"{PYTHON[0]}[list-all(), read(n=1)]{PYTHON[1]}"
    assert read_in_any_pieces("lfm2", text).calls == [
        ("list-all", {}),
        ("read", {"n": 1}),
    ]


def test_a_forced_call_begins_with_the_beginning_of_a_call():
    """Tools whose names begin with another's are told apart by what follows."""

    def openings(name):
        tool_format = format_of(name)
        read_opening = tool_format.opening("read", {"required": ["n"]})
        return [read_opening, tool_format.opening("read_file", {})]

    assert openings("qwen")[0] == "<tool_call>\n<function=read>\n"
    assert openings("hermes")[1] == '<tool_call>\n{"name": "read_file", "arguments":'
    assert openings("glm") == ["<tool_call>read<arg_key>", "<tool_call>read_file"]
    assert openings("glm_lines") == [
        "<tool_call>read\n<arg_key>",
        "<tool_call>read_file\n",
    ]
    assert openings("muse") == ["<atem:function_calls>"] * 2
