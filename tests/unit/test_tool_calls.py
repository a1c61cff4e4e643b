"""TOOLS: calls leave while they are generated, join to valid JSON, and nothing is lost."""

import json
import re
import sys
import time
from collections.abc import Callable
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import jinja2.sandbox
import pytest
from artifacts import artifact
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools, mistral
from nights import examples
from start_llm import (
    CALL_SYNTAXES,
    RepeatedKey,
    ReplyReader,
    Tags,
    ToolCallFormat,
    json_type,
    tool_call_prefixes,
    value_as_json,
)

NATIVE = ToolCallFormat(
    start="<tool_call>", end="</tool_call>", syntax="qwen", gap="\n"
)
PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "yes": {"type": "boolean"},
    "items": {"type": "array", "items": {}},
    "tree": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "level": {"enum": [1, 2, "high"]},
    "any": {"description": "no type"},
}


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters or {"properties": PROPERTIES}}
    return {"type": "function", "function": function}


TOOLS = [tool("write"), tool("read"), tool("read_file", {"properties": {}})]


# -- feeding -----------------------------------------------------------------

Delta = dict[str, Any]


class Reply(NamedTuple):
    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]]


def stream(
    tools: list[Any] = TOOLS,
    tool_format: ToolCallFormat = NATIVE,
    *,
    in_reasoning: bool = False,
    max_calls: int = sys.maxsize,
) -> ReplyReader:
    start = re.escape(tool_format.start)
    tags = Tags("<think>", start, tool_format.untagged_pattern(tools), "</think>")
    ids = map("call_{}".format, count())
    return ReplyReader(
        tags,
        tool_format,
        in_reasoning=in_reasoning,
        tools=tools,
        ids=ids,
        max_calls=max_calls,
    )


def read(text: str, cuts: list[int] | None = None, **options: Any) -> Reply:
    """The reply that chunks of a text give; the deltas that came are what it is joined of."""
    replies = stream(**options)
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts or []}), len(text)]
    deltas = []
    for start, end in pairwise(edges):
        deltas += replies.feed(text[start:end])
    deltas += replies.finish()

    reply = join(deltas)
    message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    assert replies.message() == message
    assert replies.n_calls == len(reply.tool_calls) - replies.is_broken
    if replies.is_broken:  # then nobody may take it for a call that is whole
        with pytest.raises(ValueError, match=r".+"):
            json.loads(reply.tool_calls[-1]["function"]["arguments"])
    return reply


def join(deltas: list[Delta]) -> Reply:
    """What a client makes of a stream: text by kind, calls by index, names once and first."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        match delta:
            case {"tool_calls": [{"index": index, **call}]} if "id" in call:
                assert index == len(calls) and call["type"] == "function"
                assert call["function"]["name"] and call["function"]["arguments"] == ""
                calls.append({**call, "function": dict(call["function"])})
            case {
                "tool_calls": [{"index": index, "function": {"arguments": arguments}}]
            }:
                assert arguments and index == len(calls) - 1
                calls[-1]["function"]["arguments"] += arguments
            case _:
                ((field, text),) = delta.items()
                assert text
                texts[field] += text

    return Reply(texts["content"] or None, texts["reasoning_content"] or None, calls)


def calls_in(deltas: list[Delta]) -> list[Delta]:
    """What they say of functions: a name, or a part of the arguments."""
    return [
        call["function"] for delta in deltas for call in delta.get("tool_calls", ())
    ]


def calls_of(reply: Reply) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in reply.tool_calls]
    return [(f["name"], strict_json(f["arguments"])) for f in functions]


BROKEN = "a call that cannot be read, or was cut: its arguments are open"


def calls_or_broken(reply: Reply) -> list[Any]:
    """The same; BROKEN, which can only be the last one."""
    calls: list[Any] = []
    for call in reply.tool_calls:
        try:
            arguments = strict_json(call["function"]["arguments"])
        except ValueError:
            calls.append(BROKEN)
        else:
            calls.append((call["function"]["name"], arguments))
    assert BROKEN not in calls[:-1]

    return calls


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


# -- transcripts: independent writers of the three formats ---------------------


def bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_qwen(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def write_hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps(
        {"name": name, "arguments": arguments}, ensure_ascii=len(name) % 2 == 0
    )
    return f"<tool_call>\n{body}\n</tool_call>"


def write_glm(name: str, arguments: dict[str, Any], gap: str = "") -> str:
    values = "".join(
        f"{gap}<arg_key>{k}</arg_key>{gap}<arg_value>{bare(v)}</arg_value>"
        for k, v in arguments.items()
    )
    return f"<tool_call>{name}{values}{gap}</tool_call>"


def write_glm_broken(name: str, arguments: dict[str, Any]) -> str:
    return write_glm(name, arguments, gap="\n")


WRITERS = [write_qwen, write_hermes, write_glm, write_glm_broken]
Writer = Callable[[str, dict[str, Any]], str]

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
TEXTS = (
    st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=8)
    .map("".join)
    .map(lambda text: text.replace("\0", ""))
    .filter(lambda text: not AMBIGUOUS.search(text + "</parameter>x"))
)
NUMBERS = st.integers(-(10**18), 10**18)
TREES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=6,
).filter(lambda tree: not AMBIGUOUS.search(bare(tree)))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "n": NUMBERS,
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "yes": st.booleans(),
        "items": st.lists(TREES, max_size=3),
        "tree": st.dictionaries(TEXTS, TREES, max_size=3),
        "maybe": st.none() | st.just("some words\n"),
        "level": st.sampled_from([1, 2, "high"]),
        "any": st.just("words") | NUMBERS,
    },
).filter(
    lambda arguments: not AMBIGUOUS.search(" ".join(map(bare, arguments.values())))
)
CALLS = st.tuples(
    st.sampled_from(WRITERS), st.sampled_from(["write", "read"]), ARGUMENTS
)
CUTS = st.lists(st.integers(0, 2000), max_size=30)


# -- the table of syntaxes -------------------------------------------------------


EXAMPLES = {
    "qwen": "<tool_call>\n<function=read>\n<parameter=path>\na.md\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>read<arg_key>path</arg_key><arg_value>a.md</arg_value>"
    "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="read">\n'
    '<parameter name="path">a.md</parameter>\n</invoke>\n</minimax:tool_call>',
    "harmony": "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
    '{"path": "a.md"}',
    "mistral": '[TOOL_CALLS]read[ARGS]{"path": "a.md"}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0"
    '<|tool_call_argument_begin|>{"path": "a.md"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "minicpm": '<function name="read"><param name="path">a.md</param></function>',
    "hermes": '<tool_call>\n{"name": "read", "arguments": {"path": "a.md"}}\n'
    "</tool_call>",
}


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_the_example_of_a_syntax_is_read(name: str) -> None:
    syntax = CALL_SYNTAXES[name]
    example_call = EXAMPLES[name]
    start = {
        "minimax": "<minimax:tool_call>",
        "harmony": "<|channel|>commentary to=functions.",
        "mistral": "[TOOL_CALLS]",
        "kimi": "<|tool_calls_section_begin|>",
        "minicpm": "<function name=",
    }.get(name, "<tool_call>")
    tool_format = ToolCallFormat(start, "\0", name)

    for cuts in ([], list(range(len(example_call)))):
        reply = read(example_call, cuts, tool_format=tool_format)
        assert calls_of(reply) == [("read", {"path": "a.md"})]
        assert reply.content is None

    assert syntax.marker in example_call
    assert syntax.prefix.startswith(start)


@pytest.mark.parametrize("name", CALL_SYNTAXES)
def test_the_example_of_a_syntax_without_its_tag_is_read_where_models_do_that(
    name: str,
) -> None:
    syntax = CALL_SYNTAXES[name]
    tag = syntax.prefix.partition("{")[0].partition("<invoke")[0].rstrip("\n")
    tag = tag.removesuffix("<|tool_call_begin|>functions.")
    untagged = EXAMPLES[name].removeprefix(tag).lstrip("\n")
    if name == "harmony":
        untagged = "to=functions.read<|message|>" + '{"path": "a.md"}'
    tool_format = ToolCallFormat(tag, "\0", name)

    reply = read(untagged, tool_format=tool_format)

    if syntax.untagged_call:
        assert calls_of(reply) == [("read", {"path": "a.md"})]
    else:
        assert (reply.content, reply.tool_calls) == (untagged, [])


# -- properties ----------------------------------------------------------------


@given(
    st.lists(CALLS, min_size=1, max_size=3),
    CUTS,
    st.sampled_from(["", "Hello.", "a\nb"]),
)
@example([(write_glm, "write", {"text": "a</arg_value><think>"})], [], "")
def test_calls_come_back_as_they_were_made(
    calls: list[Any], cuts: list[int], answer: str
) -> None:
    text = answer
    for write, name, arguments in calls:
        text += "\n" + write(name, arguments)

    reply = read("why</think>" + text, cuts, in_reasoning=True)

    assert calls_of(reply) == [(name, arguments) for _, name, arguments in calls]
    assert (reply.content, reply.reasoning) == (answer or None, "why")
    assert len({call["id"] for call in reply.tool_calls}) == len(calls)


MINIMAX = ToolCallFormat("<minimax:tool_call>", "</minimax:tool_call>", "minimax")


def write_minimax(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """All in one block, as its template prints them."""
    written = ""
    for name, arguments in calls:
        values = [
            f'<parameter name="{k}">{bare(v)}</parameter>\n'
            for k, v in arguments.items()
        ]
        written += f'<invoke name="{name}">\n{"".join(values)}</invoke>\n'

    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "read"]), ARGUMENTS), min_size=1, max_size=3
    ),
    CUTS,
    st.sampled_from(["", "Hello."]),
    st.sampled_from(["", "\nBye."]),
)
def test_minimax_calls_keep_their_blanks(
    calls: list[Any], cuts: list[int], answer: str, ending: str
) -> None:
    text = f"{answer}\n{write_minimax(calls)}{ending}"

    reply = read("why</think>" + text, cuts, in_reasoning=True, tool_format=MINIMAX)

    content = answer + ending if answer else ending.strip("\n")
    assert calls_of(reply) == calls
    assert reply.content == (content or None)
    assert reply.reasoning == "why"

    template = "{% if tools %}" + write_minimax([("NAME", {"a": 1})])
    tokenizer = speaking("<minimax:tool_call>", "</minimax:tool_call>")
    assert ToolCallFormat.detect(template, "generic", tokenizer=tokenizer) == MINIMAX

    opened = tool_call_prefixes(MINIMAX, TOOLS, name=calls[0][0])
    assert write_minimax(calls).startswith(tuple(opened))


def test_minimax_calls_that_are_nearly_right() -> None:
    """None is a word in a text; the outer tag is forgotten; the block is cut."""
    text_of_call = write_minimax([("write", {"text": "None", "maybe": "  x"})])
    inner = text_of_call.removeprefix("<minimax:tool_call>\n")
    inner = inner.removesuffix("</minimax:tool_call>")

    for text, content in (
        (text_of_call, None),
        (inner, None),
        (text_of_call.partition("</invoke>")[0], None),
        (text_of_call.replace("</invoke>\n", "") + "ok", "ok"),
    ):
        reply = read(text, tool_format=MINIMAX)
        assert calls_of(reply) == [("write", {"text": "None", "maybe": "  x"})]
        assert reply.content == content

    assert calls_of(read("See `<invoke name=x>`.", tool_format=MINIMAX)) == []


def write_mistral(name: str, arguments: dict[str, Any], gap: str) -> str:
    call_id = "[CALL_ID]aB3dE6gH9" if gap == "[CALL_ID]" else ""
    as_json = json.dumps(arguments, ensure_ascii=False)
    return f"[TOOL_CALLS]{name}{call_id}[ARGS]{as_json}"


@pytest.mark.parametrize("gap", ["[CALL_ID]", "[ARGS]"])
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["write", "read"]), ARGUMENTS), min_size=1, max_size=3
    ),
    cuts=CUTS,
    answer=st.sampled_from(["", "Hello.", "a [ARGS] b"]),
)
def test_mistral_calls_leave_as_they_grow(
    gap: str, calls: list[Any], cuts: list[int], answer: str
) -> None:
    parser = mistral.parse_tool_call
    form = ToolCallFormat("[TOOL_CALLS]", "\0", "mistral", gap, parser)
    written = [write_mistral(*call, gap) for call in calls]

    reply = read(answer + "".join(written), cuts, tool_format=form)
    assert calls_of(reply) == calls
    assert reply.content == (answer or None)

    tokenizer = speaking("[TOOL_CALLS]", "", parser)
    assert ToolCallFormat.detect(written[0], "generic", tokenizer=tokenizer) == form
    prefixes = tool_call_prefixes(form, TOOLS, name=calls[0][0])
    assert written[0].startswith(tuple(prefixes))

    begun = write_mistral("write", {"text": "ab"}, gap)[:-2]
    deltas = calls_in(stream(tool_format=form).feed(begun))
    assert "".join(delta["arguments"] for delta in deltas) == '{"text": "ab'

    later_calls = [call.removeprefix("[TOOL_CALLS]") for call in written[1:]]
    with_one_tag = written[0] + "".join(later_calls)
    assert calls_of(read(with_one_tag, cuts, tool_format=form)) == calls

    unknown_call = write_mistral("unknown", calls[0][1], gap)
    reply = read(unknown_call, cuts, tool_format=form)
    assert reply.content == unknown_call


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (
            '{"arguments": {"n": 5}, "name": "read"}',
            {"n": 5},
        ),  # Hermes 2 and 3 write it so
        ('{"id": "a", "name": "read", "arguments": {"n": 5}}', {"n": 5}),
        ('{"name": "read", "arguments": null}', {}),
        ('{"nam": "read"}', None),
        ('{"arguments": {}, "name": "unknown"}', None),
    ],
)
def test_members_of_a_json_call_may_stand_in_another_order(
    call: str, arguments: dict[str, Any] | None
) -> None:
    tokenizer = speaking("<tool_call>", "</tool_call>", json_tools.parse_tool_call)
    form = ToolCallFormat.detect("<tool_call>", "generic", tokenizer=tokenizer)
    assert form
    assert form.syntax == "hermes"

    text = f"<tool_call>\n{call}\n</tool_call>"
    for cuts in ([], list(range(len(text)))):
        reply = read(f"Go.\n{text}", cuts, tool_format=form)
        if arguments is None:
            assert (reply.content, reply.tool_calls) == (f"Go.\n{text}", [])
        else:
            assert (reply.content, calls_of(reply)) == ("Go.", [("read", arguments)])


def test_mistral_lists_of_calls_are_for_mlx_lm() -> None:
    tokenizer = speaking("[TOOL_CALLS]", "", lambda *_: [])
    found = ToolCallFormat.detect(
        "'[TOOL_CALLS][' + calls", "generic", tokenizer=tokenizer
    )
    assert found and found.syntax == "foreign"


REPLIES = st.lists(
    CALLS.map(lambda call: call[0](call[1], call[2]))
    | st.tuples(st.sampled_from(WRITERS), ARGUMENTS).map(
        lambda call: call[0]("unknown", call[1])
    )
    | st.sampled_from(MARKUP)
    | st.text(max_size=6),
    max_size=8,
).map("".join)


@given(REPLIES, CUTS, st.booleans())
def test_any_chunking_gives_the_same_reply(
    text: str, cuts: list[int], thinking: bool
) -> None:
    expected = read(text, in_reasoning=thinking)
    assert read(text, cuts, in_reasoning=thinking) == expected
    assert read(text, list(range(len(text))), in_reasoning=thinking) == expected


@given(REPLIES, st.integers(0, 2000))
def test_cut_off_anywhere_arguments_are_valid_json_or_left_open(
    text: str, cut: int
) -> None:
    calls_or_broken(read(text[: cut % (len(text) + 1)]))


@given(st.sampled_from(WRITERS), ARGUMENTS, st.integers(0, 2000))
def test_a_call_cut_off_gives_what_was_parsed(
    write: Writer, arguments: dict[str, Any], cut: int
) -> None:
    text = write("write", arguments)
    cut %= len(text) + 1
    reply = read(text[:cut])

    if not reply.tool_calls:
        assert reply.content == (text[:cut] or None)  # the name was not known yet
        return
    if calls_or_broken(reply) == [BROKEN]:  # it was cut in a key, in a number ...
        return

    ((_, parsed),) = calls_of(reply)
    assert reply.content is None
    assert list(parsed) == list(arguments)[: len(parsed)]
    for key, value in list(parsed.items())[:-1]:
        assert value == arguments[key]

    last_key = next(reversed(parsed), None)
    if last_key is not None and isinstance(arguments[last_key], str):
        assert arguments[last_key].startswith(str(parsed[last_key] or ""))


@given(st.sampled_from(WRITERS), ARGUMENTS, CUTS, st.booleans())
def test_a_call_to_a_tool_that_was_not_offered_is_text(
    write: Writer, arguments: dict[str, Any], cuts: list[int], any_tools: bool
) -> None:
    text = "Look: " + write("unknown", arguments) + "\n<tool_call>ok"
    reply = read(text, cuts, tools=TOOLS if any_tools else [])
    assert (reply.content, reply.tool_calls) == (text, [])


@pytest.mark.parametrize(
    "opened",
    [
        "<tool_call>\n<function=read>",
        '<tool_call>{"name": "read", "arguments": {"n": 1',
        '<tool_call>{"name": "read", "arguments": {"text": "a"',
    ],
)
def test_a_model_caught_in_blanks_is_not_waited_for(opened: str) -> None:
    replies = stream()
    replies.feed(opened)
    for _ in range(300):
        replies.feed("\n ")
    assert replies.is_broken


def test_a_tag_and_blanks_are_text() -> None:
    replies = stream()
    replies.feed("<tool_call>read")
    came = [delta for _ in range(300) for delta in replies.feed("\n ")]
    assert str(join(came).content).startswith("<tool_call>read")


def test_a_value_and_blanks_leave() -> None:
    replies = stream()
    replies.feed(write_qwen("read", {"text": "a"}).partition("\n</function>")[0])
    for _ in range(300):
        replies.feed("\n ")
    assert replies.is_broken


def test_white_space_before_a_call_has_no_bound() -> None:
    assert calls_of(read("a" + "\n" * 1000 + write_qwen("read", {"n": 1}))) == [
        ("read", {"n": 1})
    ]


@pytest.mark.parametrize("cut", ['{"n": 12', '{"n": 1.', '{"yes": tru', '{"yes": True'])
def test_json_cut_off_in_a_number_or_a_word_is_left_open(cut: str) -> None:
    """12 may become 123."""
    reply = read('<tool_call>\n{"name": "read", "arguments": ' + cut)
    assert calls_or_broken(reply) == [BROKEN]


@given(
    st.text(alphabet='<>/tool_cal{}",:\n nameargumntsfi=pk\\[]01', max_size=60), CUTS
)
@example('<tool_call>{"name": "read", "arguments": {"a": [1}}\n</tool_call>', [])
@example("<tool_call>" * 300, [])
@settings(max_examples=examples(300))
def test_garbage_never_fails_and_never_vanishes(text: str, cuts: list[int]) -> None:
    text = "<tool_call>" + text
    reply = read(text, cuts)
    calls_or_broken(reply)
    if not reply.tool_calls:
        assert reply.content == text


# -- while it is generated -----------------------------------------------------


# GLM calls without arguments are left out: only their closing tag says that the name is complete.
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "arguments", [{"n": 5}, {"text": "line\n" * 50}, {"items": [1, 2]}]
)
def test_name_and_arguments_leave_while_the_call_is_generated(
    write: Writer, arguments: dict[str, Any]
) -> None:
    text = write("write", arguments)
    replies = stream()
    name_positions = []
    pieces = []
    for position, character in enumerate(text):
        for delta in calls_in(replies.feed(character)):
            if "name" in delta:
                name_positions.append(position)
            if delta["arguments"]:
                pieces.append((position, delta["arguments"]))

    [name_position] = name_positions
    assert name_position <= text.index("write") + len('write", "arguments": {')
    first_position, _ = pieces[0]
    assert first_position < len(text) - len("</tool_call>")
    if "text" in arguments:  # a string leaves at the pace it comes
        middle = len(text) // 2
        n_early = sum(len(piece) for position, piece in pieces if position < middle)
        n_characters = sum(len(piece) for _, piece in pieces)
        assert n_early > 0.35 * n_characters


def test_nothing_leaves_before_the_name_is_known() -> None:
    replies = stream()
    assert replies.feed("\n<tool_call>\n<function=rea") == []
    assert [call.get("name") for call in calls_in(replies.feed("d>"))] == ["read", None]


@pytest.mark.parametrize("write", WRITERS)
def test_only_the_whole_arguments_are_json(write: Writer) -> None:
    # Some clients take the first arguments that parse for the whole of them.
    replies = stream()
    states = [""]
    for char in write("write", {"n": 1, "tree": {"a": {}}, "text": "}", "items": [[]]}):
        for call in calls_in(replies.feed(char)):
            states.append(states[-1] + call["arguments"])
    for call in calls_in(replies.finish()):
        states.append(states[-1] + call["arguments"])

    def is_json(text: str) -> bool:
        try:
            return bool(json.loads(text))
        except ValueError:
            return False

    assert [state for state in states if is_json(state)] == [states[-1]]


# -- values --------------------------------------------------------------------


TEXT = {"type": "string"}


def value_of(text: str, schema: object) -> Any:
    tools = [tool("f", {"type": "object", "properties": {"k": schema}})]
    return calls_of(read(write_glm("f", {"k": text}), tools=tools))[0][1]["k"]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ("5", {"type": "integer"}, 5),
        ("-2.5e3", {"type": "number"}, -2500.0),
        ("True", {"type": "boolean"}, True),  # as Jinja prints it
        ("false", {"type": "boolean"}, False),
        ("[1, {}]", {"type": "array"}, [1, {}]),
        ('{"a":"b\nc"}', {"type": "object"}, {"a": "b\nc"}),
        ("None", {"type": ["object", "null"]}, None),
        ("['a', 'b',]", {"type": "array"}, ["a", "b"]),  # as Python prints it
        ("{'on': True, \"n\": [None]}", {"type": "object"}, {"on": True, "n": [None]}),
        ("['a']", {}, ["a"]),
        ("['a']", {"type": "string"}, "['a']"),
        ("['a']", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "['a']"),
        ("(1, 2)", {}, "(1, 2)"),
        ("+491701234567", {}, "+491701234567"),
        ("2024_01_01", {}, "2024_01_01"),
        ("0x1F", {"type": ["string", "integer"]}, "0x1F"),
        ("5 # five", {}, "5 # five"),
        ('["\\d"]', {"type": "array"}, ["\\d"]),
        ("{'a'}", {"type": "object"}, "{'a'}"),
        ("{1: {2}}", {"type": "object"}, "{1: {2}}"),
        ("'a'", {}, "'a'"),
        (
            "five",
            {"type": "integer"},
            "five",
        ),  # the client may say what is wrong with it
        ("[1, 2", {"type": "array"}, "[1, 2"),
        # A comma was forgotten.
        ("['a' # it's a\n 'b']", {"type": "array"}, "['a' # it's a\n 'b']"),
        ("['a' # a\n # b\n 'b']", {"type": "array"}, "['a' # a\n # b\n 'b']"),
        ("['a' \\\n 'b']", {"type": "array"}, "['a' \\\n 'b']"),
        ("['a', # it's a\n 'b', # 'c'\n]", {"type": "array"}, ["a", "b"]),
        # In escapes, as if it stood in a string.
        (
            '[{\\"a\\": \\"say \\\\\\"x\\\\\\"\\"}]',
            {"type": "array"},
            [{"a": 'say "x"'}],
        ),
        ('"[{\\"a\\": 1}]"', {"type": "array"}, [{"a": 1}]),
        ('{\\"a\\": 1}', {"type": ["object", "null"]}, {"a": 1}),
        ('"5"', {"type": "integer"}, 5),
        ('"five"', {"type": "integer"}, '"five"'),
        ('[{\\"a\\": 1}]', {"type": "string"}, '[{\\"a\\": 1}]'),
        ('[{\\"a\\": 1}]', {}, '[{\\"a\\": 1}]'),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nothing", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nothing"),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("high", {"enum": [1, "high"]}, "high"),
        ("1", {"enum": [1, "high"]}, 1),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"type": "string", "enum": ["1"]}, "1"),
        ("1", {"type": "string", "enum": ["1", 1]}, "1"),
        ("1", {"const": "1"}, "1"),
        ("1", {"const": 1}, 1),
        ("5", {"type": ["string", "integer"], "enum": ["5"]}, "5"),
        ("5", {"type": "integer", "enum": ["5"]}, 5),
        ("null", {"type": ["string", "null"], "enum": ["a", "b"]}, None),
        ("5", {"type": "number", "enum": [5]}, 5),
        # A branch of any type; of all of several schemas, the types that each has.
        ("<b>5</b>", {"anyOf": [{}, {"type": "null"}]}, "<b>5</b>"),
        ("<b>5</b>", {"anyOf": [True, {"type": "null"}]}, "<b>5</b>"),
        ("<b>5</b>", {"oneOf": [{"description": "any"}, {"type": "null"}]}, "<b>5</b>"),
        ("null", {"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, "null"),
        ("5", {"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 9}]}, "5"),
        ("5", {"anyOf": [{"const": f"{n} "} for n in range(300)]}, "5"),
        ("5", {"allOf": [{"type": "number"}, {"type": "integer"}]}, 5),
        ("5", {}, 5),
        ("word", {}, "word"),
        ('"quoted"', {}, '"quoted"'),
        ("007", {}, "007"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("['\\ud83d\\ude00']", {"type": "array"}, ["\U0001f600"]),  # as JSON writes it
        ('["\\ud83d"]', {"type": "array"}, ["\ufffd"]),  # half of it is no text
        # A key twice in a text that may be no object.
        ('{"a": 1, "a": 2}', {"type": ["string", "array"]}, '{"a": 1, "a": 2}'),
        ('[{"a": 1, "a": 2}]', {"type": ["string", "object"]}, '[{"a": 1, "a": 2}]'),
        # References to nothing.
        ('{\\"a\\": 1}', {"$ref": "Foo"}, '{\\"a\\": 1}'),
        ('{\\"a\\": 1}', {"$ref": "#foo"}, '{\\"a\\": 1}'),
        ("5", None, 5),  # schemas that are none
        ("5", ["string"], 5),
        ("5", "string", 5),
        ("5", True, 5),
        ("5", {"type": 7, "anyOf": "x", "enum": 3}, 5),
        ("5", {"type": [None, {}], "oneOf": [None, 3, {"type": "string"}]}, "5"),
    ],
)
def test_values_are_typed_by_the_schema(
    text: str, schema: object, value: object
) -> None:
    found = value_of(text, schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "parameters",
    [{}, {"properties": [1]}, {"properties": {"k": 5}}, {"properties": None}],
)
def test_parameters_that_are_no_schema_say_nothing(parameters: object) -> None:
    tools = [
        {"function": {"name": "f", "parameters": parameters}},
        {"function": {"name": "g"}},
    ]
    for write in WRITERS:
        assert calls_of(read(write("f", {"k": 5}), tools=tools)) == [("f", {"k": 5})]


def test_a_schema_may_refer_to_a_branch_of_a_union() -> None:
    """As zod-to-json-schema writes what a schema has twice."""
    union = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    reference = {"$ref": "#/properties/a/anyOf/0"}
    tools = [tool("f", {"properties": {"a": union, "b": reference}})]
    reply = read(write_qwen("f", {"b": "5"}), tools=tools)
    assert calls_of(reply) == [("f", {"b": "5"})]


@pytest.mark.parametrize("step", ["a~1b", "a~0c", "a%20d", "a%25e", "a~01f"])
def test_a_step_of_a_reference_may_be_escaped(step: str) -> None:
    key = {
        "a~1b": "a/b",
        "a~0c": "a~c",
        "a%20d": "a d",
        "a%25e": "a%e",
        "a~01f": "a~1f",
    }
    schema = {
        "$defs": {key[step]: {"type": "string"}},
        "properties": {"k": {"$ref": f"#/$defs/{step}"}},
    }
    reply = read(write_qwen("f", {"k": "5"}), tools=[tool("f", schema)])
    assert calls_of(reply) == [("f", {"k": "5"})]


def test_a_schema_may_refer_to_one_definition_twice() -> None:
    text = {"$ref": "#/$defs/text"}
    k = {"anyOf": [text, {"type": "integer"}], "allOf": [text]}
    schema = {"$defs": {"text": {"type": "string"}}, "properties": {"k": k}}
    reply = read(write_qwen("f", {"k": "5"}), tools=[tool("f", schema)])
    assert calls_of(reply) == [("f", {"k": "5"})]


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"a": 1, "a": 2}]'])
def test_a_repeated_key_is_no_text_where_its_container_is_allowed(text: str) -> None:
    container = json_type(json.loads(text))

    with pytest.raises(RepeatedKey):
        value_as_json(text, {"string", container})


@pytest.mark.parametrize(
    "parameters",
    [
        {"additionalProperties": TEXT},
        {"allOf": [{"properties": {"k": TEXT}}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": {"k": TEXT}}}},
        {"allOf": [{"properties": {"n": {}}}, {"properties": {"k": TEXT}}]},
        {"properties": {"n": {}}, "allOf": [{"properties": {"k": TEXT}}]},
        {"properties": {"k": TEXT}, "allOf": [{"properties": {"k": {}}}]},
    ],
)
def test_the_type_of_a_key_may_stand_beside_the_properties(parameters: Any) -> None:
    tools = [tool("f", parameters)]
    assert calls_of(read(write_qwen("f", {"k": "5"}), tools=tools)) == [
        ("f", {"k": "5"})
    ]


# -- what models really write ----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            "<tool_call><function=read><parameter=n>5</parameter></function></tool_call>",
            [{"n": 5}],
        ),
        # Exactly one line break on each side is the format's.
        (
            "<tool_call>\n<function=read>\n<parameter=text>\n\n a \n\n</parameter>\n</function>\n"
            "</tool_call>",
            [{"text": "\n a \n"}],
        ),
        # A file that contains the markup of calls.
        (
            "<tool_call>\n<function=read>\n<parameter=text>\na </parameter> b </function>\n"
            "</tool_call> c\n</parameter>\n</function>\n</tool_call>",
            [{"text": "a </parameter> b </function>\n</tool_call> c"}],
        ),
        # Closing tags that were forgotten.
        (
            "<tool_call>\n<function=read>\n<parameter=n>\n5\n</parameter>\n</tool_call>",
            [{"n": 5}],
        ),
        (
            "<tool_call>\n<function=read>\n<parameter=n>\n5\n</parameter>\n</function>",
            [{"n": 5}],
        ),
        (
            "<tool_call>\n<function=read>\n<parameter=n>\n5\n</function>\n</tool_call>",
            [{"n": 5}],
        ),
        (
            "<tool_call>\n<function=read>\n<parameter=n>\n5\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=read>\n</function>\n</tool_call>",
            [{"n": 5}, {}],
        ),
        ("<tool_call>read<arg_key>n</arg_key><arg_value>5</tool_call>", [{"n": 5}]),
        # Tags that were forgotten, or came twice (L-82).
        (
            "<function=read>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
            [{"n": 5}],
        ),
        ("<function=read>\n<parameter=n>\n5\n</parameter>\n</function>", [{"n": 5}]),
        ("\n\n<function=read>\n</function>\n</tool_call>", [{}]),
        (
            "<tool_call>\n<function=read>\n<parameter=n>\n5\n</parameter>\n</function>\n"
            "<function=read>\n<parameter=n>\n6\n</parameter>\n</function>\n</tool_call>",
            [{"n": 5}, {"n": 6}],
        ),
        (
            "<tool_call>read<arg_key>text</arg_key>a.py</arg_value></tool_call>",
            [{"text": "a.py"}],
        ),
        (
            "<tool_call>read<arg_key>n</arg_key></arg_key><arg_value>5</arg_value></tool_call>",
            [{"n": 5}],
        ),
        (
            '<tool_call>{"name": "read", "arguments": {"n": 1}}\n'
            '<tool_call>{"name": "read", "arguments": {"n": 2}}</tool_call>',
            [{"n": 1}, {"n": 2}],
        ),
        (
            "<tool_call>read<arg_key>text</arg_key><arg_value>a</arg_value><tool_call>read"
            "<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
            [{"text": "a"}, {"n": 5}],
        ),
        ("<tool_call>read</tool_call>", [{}]),
        ("<tool_call>\nread\n</tool_call>", [{}]),
        # JSON that is almost JSON.
        (
            '<tool_call>{"name": "read", "arguments": {"text": "say "hi"", "n": 1}}</tool_call>',
            [{"text": 'say "hi"', "n": 1}],
        ),
        (
            '<tool_call>{"name": "read", "arguments": {"text": "print("a", b) f("c")", "n": 1}}'
            "</tool_call>",
            [{"text": 'print("a", b) f("c")', "n": 1}],
        ),
        (
            '<tool_call>{"name": "read", "arguments": {"text": "<a href="x"></a>", "items": ["a", '
            '"b"]}}</tool_call>',
            [{"text": '<a href="x"></a>', "items": ["a", "b"]}],
        ),
        (
            '<tool_call>{"name": "read", "arguments": {"text": "grep "a" /etc/x", "n": 3}}'
            "</tool_call>",
            [{"text": 'grep "a" /etc/x', "n": 3}],
        ),
        (
            '<tool_call>{"name":"read","arguments":{"text":"a\nb \\d \\u00e9"}}</tool_call>',
            [{"text": "a\nb \\d é"}],
        ),
        ('<tool_call>{"name":"read","arguments":{"n":1}</tool_call>', [{"n": 1}]),
        ('<tool_call>{"name":"read","arguments":{"n":1\n</tool_call>', [{"n": 1}]),
        ('<tool_call>{"name":"read","arguments":{}}}\n</tool_call>', [{}]),
    ],
)
def test_calls_as_models_write_them(text: str, calls: list[dict[str, Any]]) -> None:
    for cuts in ([], list(range(len(text)))):
        reply = read(text, cuts)
        assert calls_of(reply) == [("read", arguments) for arguments in calls]
        assert reply.content is None


@pytest.mark.parametrize(
    "call",
    [
        "read<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
        "<function=read><parameter=n>5</parameter></function></tool_call>",
    ],
)
@pytest.mark.parametrize(
    "lead", ["<tool_call>", "<tool_call></think>", "<tool_call>read"]
)
def test_a_call_behind_a_tag_that_opens_none_keeps_its_arguments(
    lead: str, call: str
) -> None:
    """Also where it is first read when the reply is over."""
    text = f"{lead}<tool_call>{call}"
    for cuts in ([], list(range(len(text)))):
        assert calls_of(read(text, cuts)) == [("read", {"n": 5})]


@pytest.mark.parametrize(
    "text",
    [
        "The tag <tool_call> opens a call.",
        "<tool_call>read the file</tool_call>",
        "<tool_call>\nread",
        "<tool_call>\n<function=read",
        "A call begins with <function=read> and ends with </function>.",
        "Write <function=unknown>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "read", "argu',
        '<tool_call>{"nam": "read"}</tool_call>',
        '<tool_call>{"arguments": {"n": 1}, "name": "rm"}</tool_call>',
        '<tool_call>{"name": "read", "parameters": {"n": 1}}</tool_call>',
        '<tool_call>{"name": "read", "arguments": "{\\"n\\": 1"}</tool_call>',
        '<tool_call>{"name": "read", "arguments": "n"}</tool_call>',
        '<tool_call>{"name": "read", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "read", "arguments": 5}</tool_call>',
        '<tool_call>[{"name": "read", "arguments": {"n": 1}}, {"name": "rm"}]</tool_call>',
        '<tool_call>{"function": {"name": "read", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": "read", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["read"], "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call></tool_call>",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_text_exactly_as_generated(text: str) -> None:
    for cuts in ([], list(range(len(text)))):
        reply = read(text, cuts)
        assert not reply.tool_calls
        assert reply.content == text


def test_a_number_that_no_client_can_read_leaves_its_call_open() -> None:
    text = '<tool_call>{"name": "read", "arguments": {"a": 1e999}, }</tool_call>'
    for cuts in ([], list(range(len(text)))):
        (call,) = read(text, cuts).tool_calls
        assert call["function"]["arguments"] == '{"a": 1e999'


@pytest.mark.parametrize("parse", [None, json_tools.parse_tool_call])
@pytest.mark.parametrize("syntax", ["hermes", "qwen", "glm"])
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "read", "arguments": "{\\"n\\": 1}"}', [{"n": 1}]),
        ('{"arguments": {"n": 1}, "name": "read"}', [{"n": 1}]),
        ('{"id": "a", "name": "read", "arguments": {"n": 1}}', [{"n": 1}]),
        ('{"name": "read", "arguments": []}', [{}]),
        ('{"name": "read", "arguments": ""}', [{}]),
        ("{'name': 'read', 'arguments': {'n': 1}}", [{"n": 1}]),
        ('[{"name": "read", "arguments": {"n": 1}}]', [{"n": 1}]),
        ('[\n {"name": "read", "arguments": "{}"}, {"name": "read"}]', [{}, {}]),
        ('{"arguments": {"text": "</tool_call>"}, "name": "read"}',
         [{"text": "</tool_call>"}]),
        ('{"arguments": {"text": "\\"}</tool_call>"}, "name": "read"}}',
         [{"text": '"}</tool_call>'}]),
    ],
)  # fmt: skip
def test_json_calls_are_read_whether_or_not_mlx_lm_has_a_parser(
    body: str, arguments: list[Any], syntax: str, parse: Any
) -> None:
    form = ToolCallFormat("<tool_call>", "</tool_call>", syntax, parse=parse)
    untold = form._replace(end="\0")  # of a tokenizer that does not know the tags
    call = f"<tool_call>\n{body}\n"

    for tool_format in (form, untold):
        for rest in ("</tool_call>", "</tool_call>\nok", "ok", ""):
            text = call + rest
            reply = read(text, tool_format=tool_format)
            assert calls_of(reply) == [("read", each) for each in arguments]
            assert reply.content == ("ok" if rest.endswith("ok") else None)
            assert read(text, list(range(len(text))), tool_format=tool_format) == reply
        twice = read(call + call, tool_format=tool_format)
        assert calls_of(twice) == [("read", each) for each in arguments * 2]


@pytest.mark.parametrize("key", ["parameters", "input", "args"])
def test_arguments_under_another_name_are_not_lost_to_an_empty_call(key: str) -> None:
    """mlx-lm's parser passes on what it finds, and a tool run without its arguments may do harm."""
    hermes = ToolCallFormat(
        "<tool_call>", "</tool_call>", "hermes", "\n", json_tools.parse_tool_call
    )
    text = f'<tool_call>{{"name": "read", "{key}": {{"n": 1}}}}</tool_call>'

    reply = read(text, tool_format=hermes)
    assert (reply.content, reply.tool_calls) == (text, [])

    reply = read(text.replace(key, "arguments"), tool_format=hermes)
    (call,) = reply.tool_calls
    assert call["function"]["arguments"] == '{"n": 1}'


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"text": "a" "n": 2}', {"text": "a", "n": 2}),
        ('{"text": "it\'s, \'n\': 2"}', {"text": "it's, 'n': 2"}),
        ('{"text": "// a", "any": "/* b */"}', {"text": "// a", "any": "/* b */"}),
        ('{"items": [1, 2,], "n": 3,}', {"items": [1, 2], "n": 3}),
        ('{"text": "\\u12"}', {"text": "\\u12"}),
        (
            '{"text": "env.get("KEY", "x")", "n": 1}',
            {"text": 'env.get("KEY", "x")', "n": 1},
        ),
        ('{"n": 1}}', {"n": 1}),
    ],
)
@pytest.mark.parametrize("later", ["", ', "id": 5', ', "type": "function", "id": "a"'])
def test_json_that_is_nearly_right_is_read(
    written: str, arguments: dict[str, Any], later: str
) -> None:
    if written.endswith('{"n": 1}'):  # then all that follows is in its array
        later = ""
    call = f'<tool_call>{{"name": "read", "arguments": {written}{later}}}</tool_call>'
    text = call + " ok"

    for cuts in ([], list(range(len(text)))):
        reply = read(text, cuts)
        assert calls_of(reply) == [("read", arguments)]
        assert (reply.content or "").strip() == "ok"


@pytest.mark.parametrize(
    "text",
    [
        *(
            f'<tool_call>{{"name": "read", "arguments": {written}}}</tool_call>'
            for written in (
                "{'text': 'it's', 'n': 1}",
                '{"text": "a", \'n": 1}',
                '{"n": 1}, "m": 2}',
                '{"n": 1], "m": 2}',
                '{"items": [1 2]}',
                '{"n": 1 + 2}',
                f'{{"n": 1, "{"key" * 400}": 2}}',
                f'{{"n": 1, "x": {"9" * 400}}}',
            )
        ),
        "<tool_call><function=read>n=5</function></tool_call>",
        "<tool_call><function=read>\n<parameter>5</parameter></function></tool_call>",
        "<tool_call><function=read>\n<parameter=n>5</parameter>\n<parameter=>5"
        "</parameter></function></tool_call>",
        "<tool_call><function=read>\n{'text': 'it's'}</function></tool_call>",
        "<tool_call><function=read><parameter=text>a<parameter=n>5</parameter></function>"
        "</tool_call>",
        "<tool_call>read<arg_key>n</arg_key></tool_call>",
        "<tool_call>read<arg_key>n</arg_key><arg_key>x</arg_key><arg_value>1"
        "</arg_value></tool_call>",
        "<tool_call>read<arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>read{'text': 'it's'}</tool_call>",
        '<minimax:tool_call><invoke name="read">\n<parameter>5</parameter></invoke>'
        "</minimax:tool_call>",
        '<minimax:tool_call><invoke name="read">\nn: 5</invoke></minimax:tool_call>',
        # The model ends the reply itself.
        '<tool_call>{"name": "read", "arguments": {"n": 1, "x": ',
        '<tool_call>{"name": "read", "arguments": {"n": 1, "x',
        "<tool_call><function=read>\n<parameter=n>5</parameter>\n<parameter=x",
        "<tool_call>read<arg_key>n</arg_key><arg_value>5</arg_value><arg_key>x</arg_",
    ],
)
def test_a_call_with_arguments_that_cannot_be_read_is_left_open(text: str) -> None:
    """Clients run any call that is valid JSON (L-86)."""
    for rest in ("", " ok"):
        if rest and not text.endswith(">"):
            continue
        for cuts in ([], list(range(len(text)))):
            tool_format = MINIMAX if "<minimax" in text else NATIVE
            reply = read(text + rest, cuts, tool_format=tool_format)
            assert calls_or_broken(reply) == [BROKEN]
            assert reply.content is None


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # All arguments as one JSON object, in the place of the tags.
        ('<tool_call>\n<function=read>\n{"z": "1"}\n</function>\n</tool_call>', {"z": "1"}),
        ('<tool_call><function=read>{"z": {"a": [1]}}</function></tool_call>', {"z": {"a": [1]}}),
        ("<tool_call><function=read>\n{}\n</function>", {}),
        ('<tool_call>read{"z": "1"}</tool_call>', {"z": "1"}),
        ('<tool_call>read\n{"z": "1", "n": 2}\n</tool_call>', {"z": "1", "n": 2}),
        # MiniMax's spelling of Qwen's tag, with and without quotes.
        ('<tool_call><function=read><parameter name="z">\n1\n</parameter></function></tool_call>',
         {"z": 1}),
        ("<tool_call><function=read><parameter name=z>a</parameter>\n<parameter='n'>2</parameter>"
         "</function></tool_call>", {"z": "a", "n": 2}),
        # A value that was never closed, before a key of the tool's that has none yet.
        ("<tool_call><function=read>\n<parameter=text>\nDallas\n<parameter=n>\n5\n</parameter>\n"
         "</function></tool_call>", {"text": "Dallas", "n": 5}),
        ('<tool_call><function=read>\n<parameter=text>\na\n<parameter name="any">\nb\n'
         "<parameter=n>\n5</parameter></function></tool_call>", {"text": "a", "any": "b", "n": 5}),
        ("<tool_call>read<arg_key>text</arg_key><arg_value>Dallas<arg_key>n</arg_key><arg_value>5"
         "</arg_value></tool_call>", {"text": "Dallas", "n": 5}),
        # But not before one that the tool does not have.
        ("<tool_call>read<arg_key>text</arg_key><arg_value>a<arg_key>zz</arg_key>b</arg_value>"
         "</tool_call>", {"text": "a<arg_key>zz</arg_key>b"}),
    ],
)  # fmt: skip
def test_arguments_between_tags_in_other_spellings(
    text: str, arguments: dict[str, Any]
) -> None:
    for rest in ("", "\nok"):
        for cuts in ([], list(range(len(text)))):
            reply = read(text + rest, cuts)
            assert calls_of(reply) == [("read", arguments)]
            assert (reply.content or "").strip() == rest.strip()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<minimax:tool_call><invoke name="read"><parameter name="text">Dallas\n'
         '<parameter name="n">5</parameter></invoke></minimax:tool_call>',
         {"text": "Dallas", "n": 5}),
        ('<minimax:tool_call><invoke name="read">\n{"z": "1"}\n</invoke></minimax:tool_call>',
         {"z": "1"}),
        ('<function name="read"><param name="text">Dallas\n<param name="n">5</param></function>',
         {"text": "Dallas", "n": 5}),
    ],
)  # fmt: skip
def test_arguments_between_other_tags_in_other_spellings(
    text: str, arguments: dict[str, Any]
) -> None:
    minicpm = ToolCallFormat("<function name=", "\0", "minicpm")
    tool_format = MINIMAX if "minimax" in text else minicpm
    for cuts in ([], list(range(len(text)))):
        reply = read(text, cuts, tool_format=tool_format)
        assert calls_of(reply) == [("read", arguments)]
        assert reply.content is None


HERMES = ToolCallFormat(
    "<tool_call>", "</tool_call>", "hermes", "\n", json_tools.parse_tool_call
)
BARE_CALL = '{"name": "read", "arguments": {"n": 1}}'
TAGGED_CALL = f"<tool_call>\n{BARE_CALL}\n</tool_call>"


def fenced(code: str, language: str = "") -> str:
    return f"```{language}\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "n_calls", "content"),
    [
        # A block that has nothing but calls between tags is part of them.
        (fenced(TAGGED_CALL, "xml"), 1, None),
        (f"I look:\n{fenced(TAGGED_CALL)}\nDone.", 1, "I look:\n\nDone."),
        (fenced(f"{TAGGED_CALL}\n{TAGGED_CALL}", "xml"), 2, None),
        (f"{fenced(TAGGED_CALL)}\n{fenced(TAGGED_CALL, 'json')}", 2, None),
        (f"{fenced(TAGGED_CALL)}\n{TAGGED_CALL}", 2, None),
        (f"```xml\n{TAGGED_CALL}", 1, None),
        (fenced(write_glm("read", {"n": 1})), 1, None),
        (fenced(write_qwen("read", {"n": 1}), "xml"), 1, None),
        # Without tags it is one where the reply begins with it.
        (fenced(BARE_CALL, "json"), 1, None),
        (fenced(BARE_CALL), 1, None),
        (f"\n{fenced(BARE_CALL, 'json')}\nok", 1, "ok"),
        (f"<think>Hm.</think>\n\n{fenced(BARE_CALL, 'json')}", 1, None),
        (f"```json\n{BARE_CALL}", 1, None),
        (fenced('{\n  "name": "read",\n  "arguments": {\n    "n": 1\n  }\n}', "json"), 1, None),
        (BARE_CALL, 1, None),
        (f"<think>Hm.</think>\n{BARE_CALL}\n{BARE_CALL}\nok", 2, "ok"),
        (f"<think>\n{BARE_CALL}\n</think>\nok", 0, "ok"),
        # After other text it is an example of one.
        (f"A call:\n{BARE_CALL}", 0, f"A call:\n{BARE_CALL}"),
        (f"A call:\n{fenced(BARE_CALL, 'json')}", 0, f"A call:\n{fenced(BARE_CALL, 'json')}"),
        # What is no call is code.
        (fenced('{"name": "rm", "arguments": {}}'), 0, fenced('{"name": "rm", "arguments": {}}')),
        (fenced('{"name": "read"}'), 0, fenced('{"name": "read"}')),
        ('{"name": "rm", "arguments": {}}', 0, '{"name": "rm", "arguments": {}}'),
        (fenced(TAGGED_CALL.replace("read", "rm")), 0, fenced(TAGGED_CALL.replace("read", "rm"))),
        (f"{fenced('x', 'json')}\nok", 0, f"{fenced('x', 'json')}\nok"),
        # Other blocks stay as they are.
        (f"{fenced('x', 'python')}\n{TAGGED_CALL}", 1, fenced("x", "python")),
        (f"{fenced('x')}\n{fenced(TAGGED_CALL)}\n{fenced('y')}\nz", 1,
         f"{fenced('x')}\n\n{fenced('y')}\nz"),
        (f"{TAGGED_CALL}\n{fenced('y')}", 1, fenced("y")),
        (f"{fenced(TAGGED_CALL)}\nThen {fenced('y')}", 1, f"Then {fenced('y')}"),
    ],
)  # fmt: skip
def test_a_block_of_code_that_is_a_call_is_a_call(
    text: str, n_calls: int, content: str | None
) -> None:
    for cuts in ([], list(range(len(text))), list(range(0, len(text), 3))):
        reply = read(text, cuts, tool_format=HERMES)
        assert calls_of(reply) == [("read", {"n": 1})] * n_calls
        assert reply.content == content


def test_a_block_of_code_may_have_a_call_without_its_first_tag() -> None:
    call = write_qwen("read", {"n": 1}).removeprefix("<tool_call>\n")
    text = f"Go.\n{fenced(call, 'xml')}\nok"
    for cuts in ([], list(range(len(text)))):
        reply = read(text, cuts)
        assert calls_of(reply) == [("read", {"n": 1})]
        assert reply.content == "Go.\n\nok"


def test_a_call_in_a_block_is_found_in_text_without_special_tokens() -> None:
    """The lines around it are ordinary text; its tag may be a token of its own."""
    for tag_is_token, call in ((True, TAGGED_CALL), (False, BARE_CALL)):
        replies = stream(tool_format=HERMES)
        text = f"{fenced(call, 'json')}\nDone."
        for piece in re.split(r"(</?tool_call>|\s+)", text):
            is_tag = "tool_call" in piece
            replies.feed(piece, tag=piece if is_tag and tag_is_token else "")
        replies.finish()
        message = replies.message()
        (made,) = message["tool_calls"]
        assert made["function"] == {"name": "read", "arguments": '{"n": 1}'}
        assert message["content"] == "Done."


# All that a model may write of one argument, in each syntax, and whether it is right.
PARTS = {
    "qwen": [
        "<parameter=", "<parameter", ">", "n", "</parameter>", "\n", "5", " name=", '"',
        "</function>", "</tool_call>", "<tool_call>", "<parameter=n>", "text", "{", "}", ":",
    ],
    "glm": [
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "n", "5", "\n", "text",
        "</tool_call>", "<tool_call>", "{", "}", '"', ":",
    ],
    "hermes": [
        '"', "n", "text", ":", ",", "5", "{", "}", "[", "]", "//", "/*", "*/", "\n", "'",
        "</tool_call>", "True", '"n"', '"id"', "\\", " ",
    ],
    "minimax": [
        '<parameter name="', '">', "n", "text", "5", "</parameter>", "</invoke>", "\n", "<",
        "</minimax:tool_call>", "<invoke ", "{", "}", '"', ":",
    ],
}  # fmt: skip
OPENINGS = {
    "qwen": "<tool_call>\n<function=read>",
    "glm": "<tool_call>read<arg_key>",
    "hermes": '<tool_call>{"name": "read", "arguments": {',
    "minimax": '<minimax:tool_call><invoke name="read">',
}


@pytest.mark.parametrize("syntax", PARTS)
@given(data=st.data())
@settings(max_examples=examples(300))
def test_a_call_never_runs_with_fewer_arguments_than_were_written(
    syntax: str, data: st.DataObject
) -> None:
    """Every 5 that was written is in the arguments, or in text, or the call is cut."""
    part = st.sampled_from(PARTS[syntax])
    written = data.draw(st.lists(part, max_size=14).map("".join))
    text = OPENINGS[syntax] + written
    tool_format = MINIMAX if syntax == "minimax" else NATIVE

    reply = read(text, tool_format=tool_format)

    assert read(text, list(range(len(text))), tool_format=tool_format) == reply
    calls = calls_or_broken(reply)
    if BROKEN not in calls:
        # As they are written: of a key that comes twice JSON has the last value.
        found = json.dumps([reply.tool_calls, reply.content or ""])
        assert found.count("5") >= text.count("5")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n": 1, key: 2}',
        "{'n': 'it's'}",
        '{"items": [{"n": 1}',
        '{"items": [1, 2}',
        '{"items": [27 18]}',
        '{"items": [1, {"n": 1], "x": 2}',
        '{"items": [1, {"a": [true, "b',
    ],
)
def test_json_with_other_quotes_or_brackets_inside_is_left_open(arguments: str) -> None:
    text = '<tool_call>\n{"name": "read", "arguments": ' + arguments
    for rest in ("}\n</tool_call>", ""):
        for cuts in ([], list(range(len(text + rest)))):
            assert calls_or_broken(read(text + rest, cuts)) == [BROKEN]


def test_a_misspelt_key_between_tags_leaves_the_call_open() -> None:
    """The value before it was never closed: it would swallow the argument."""
    value = "<parameter=text>\na\n<parameter=zz>\n5\n</parameter>\n"
    reply = read(f"<tool_call><function=read>\n{value}</function></tool_call>")
    assert calls_or_broken(reply) == [BROKEN]


@pytest.mark.parametrize(
    "cut",
    [
        '{"text": "a',
        '{"text": "a\\',
        '{"text": "a\\u00e',
        '{"text": "a\\ud83d',
        '{"text": "a"',
        '{"n": 12 ',
        '{"x": NaN, "n": 1}}',
    ],
)
def test_json_that_is_cut_or_has_other_words_is_left_open(cut: str) -> None:
    reply = read('<tool_call>\n{"name": "read", "arguments": ' + cut)
    assert calls_or_broken(reply) == [BROKEN]


@pytest.mark.parametrize(
    "written",
    [
        r"/[\ud800-\udbff]/g",
        r"ok \ud83d cut",
        r"\documentclass{a} \usepackage{b}",
        r"C:\users\me",
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 500])
def test_a_backslash_that_begins_no_escape_is_a_backslash(
    written: str, size: int
) -> None:
    """What is behind it must not be lost: clients run a call that is whole but for its end."""
    body = f'{{"text": "{written}", "n": 1}}'
    text = f'<tool_call>\n{{"name": "read", "arguments": {body}}}\n</tool_call>'
    reply = read(text, list(range(0, len(text), size)))
    assert calls_of(reply) == [("read", {"text": written, "n": 1})]
    assert reply.content is None


@pytest.mark.parametrize("size", [1, 3, 500])
def test_a_call_may_have_no_arguments_at_all(size: int) -> None:
    text = '<tool_call>\n{"name": "read" }\n</tool_call>\n<tool_call>{"name": "read"}'
    reply = read(text, list(range(0, len(text), size)))
    assert calls_of(reply) == [("read", {})] * 2 and reply.content is None


@pytest.mark.parametrize("size", [1, 3, 500])
def test_json_with_pythons_words_is_json(size: int) -> None:
    """`True` left out what followed it, and the call was run all the same."""
    body = '{"yes": True, "text": "True", "items": [None, {"a": False} ], "n": null}'
    text = f'<tool_call>\n{{"name": "read", "arguments": {body}}}\n</tool_call>'
    reply = read(text, list(range(0, len(text), size)))
    wanted = {"yes": True, "text": "True", "items": [None, {"a": False}], "n": None}
    assert calls_of(reply) == [("read", wanted)] and reply.content is None


@pytest.mark.parametrize(
    ("members", "arguments"), [(', "arguments": {"n": 1}', {"n": 1}), ("", {})]
)
def test_text_behind_a_call_without_its_end_is_that_text_alone(
    members: str, arguments: dict[str, Any]
) -> None:
    reply = read(f'<tool_call>{{"name": "read"{members}}}\n\nNow I wait.')
    assert calls_of(reply) == [("read", arguments)]
    assert reply.content == "Now I wait."


def test_an_object_may_have_a_member_that_is_called_as_an_argument_is() -> None:
    text = '<tool_call>{"name": "read", "arguments": {"tree": {"k": 1, "n": 5}}'
    arguments = [("read", {"tree": {"k": 1, "n": 5}})]
    assert calls_of(read(f"{text}}}")) == arguments
    assert calls_of(read(f"{text}}}</tool_call>")) == arguments

    # One bracket is missing. Was it the tree's?
    for rest in ("", "</tool_call>", '<tool_call>{"name": "read"}</tool_call>'):
        replies = stream()
        replies.feed(text + rest)
        replies.finish()
        assert replies.is_broken


def test_generated_json_is_kept_as_it_is() -> None:
    raw = '{ "n":1.50,\n "text" : "\\u00e9\\/" , "tree": {  } }'
    reply = read(f'<tool_call>\n{{"name": "read", "arguments": {raw}}}\n</tool_call>')
    assert reply.tool_calls[0]["function"]["arguments"] == raw


def test_a_call_in_an_unclosed_think_block_is_a_call_and_closes_it() -> None:
    call = write_qwen("read", {"text": "</think>"})
    reply = read(f"I look.\n{call}\n</think>\n\nDone.", in_reasoning=True)
    assert (reply.reasoning, reply.content) == ("I look.", "Done.")
    assert calls_of(reply) == [("read", {"text": "</think>"})]


def test_a_call_without_its_tag_is_one_in_what_is_said_but_not_in_a_thought() -> None:
    call = "<function=read>\n<parameter=n>\n5\n</parameter>\n</function>"
    for cuts in ([len(call)], range(1, len(call) + 1)):
        replies = stream()
        thoughts = stream(in_reasoning=True)
        for start, end in pairwise([0, *cuts]):  # in tokens that are no tag's
            replies.feed(call[start:end], tag="")
            thoughts.feed(call[start:end], tag="")
        replies.finish()
        thoughts.finish()

        (spoken,) = replies.message()["tool_calls"]
        assert spoken["function"] == {"name": "read", "arguments": '{"n": 5}'}
        assert thoughts.message() == {
            "role": "assistant",
            "content": None,
            "reasoning_content": call,
        }


QUOTED = [
    "Use <function=foo> so.",
    "Format: `<function=NAME><parameter=KEY>`. Now I read.",
    "Mention of `<function=` here, and of <function=read> there.",
    "Write <function=read>\n<parameter=text>...</parameter> to read.",
    "The syntax:\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>",
]


@pytest.mark.parametrize("quotation", QUOTED)
def test_what_is_said_of_calls_is_no_call_and_hides_none(quotation: str) -> None:
    for call in (
        write_qwen("read", {"n": 1}),
        write_qwen("read", {"n": 1})[len("<tool_call>\n") :],
    ):
        text = f"{quotation}\n\n{call}"
        for cuts in ([], list(range(len(text)))):
            reply = read(text, cuts)
            assert (reply.content, calls_of(reply)) == (quotation, [("read", {"n": 1})])


def test_a_tag_that_is_spoken_of_holds_nothing_back() -> None:
    replies = stream()
    words = "and so it goes on, word by word. " * 50
    replies.feed("Mention of `<function=` here, ", tag="")
    held = 0
    for n, letter in enumerate(words, 1):
        replies.feed(letter, tag="")
        held = max(
            held,
            n
            - len(replies.message()["content"])
            + len("Mention of `<function=` here, "),
        )

    assert held <= 2


def test_a_call_quoted_in_a_thought_stays_there() -> None:
    thought = (
        "A <tool_call> tag, or " + write_glm("unknown", {"text": "x"}) + " would do."
    )
    reply = read(thought + "\n</think>\n\nHi", in_reasoning=True)
    assert (reply.reasoning, reply.content, reply.tool_calls) == (thought, "Hi", [])


def test_text_between_and_after_calls_is_content() -> None:
    call = write_hermes("read", {})
    reply = read(f"One.\n\n{call}\n\nTwo.\n{call}\nThree.\n{call}\n")
    assert reply.content == "One.\n\nTwo.\nThree."
    assert [call["id"] for call in reply.tool_calls] == ["call_0", "call_1", "call_2"]


# -- formats -------------------------------------------------------------------


def speaking(start: str | None, end: str | None = None, parse: Any = None) -> Any:
    """What mlx-lm's tokenizer says of calls."""
    return SimpleNamespace(tool_call_start=start, tool_call_end=end, tool_parser=parse)


def foreign(start: str, end: str, parse: Callable[[str, Any], Any]) -> ToolCallFormat:
    found = ToolCallFormat.detect("", "generic", tokenizer=speaking(start, end, parse))
    assert found and found.syntax == "foreign"
    return found


def test_a_foreign_format_is_read_by_its_parser_at_the_calls_end() -> None:
    def parse(text: str, tools: Any) -> Any:
        assert tools == TOOLS
        return [{"name": name, "arguments": {"text": name}} for name in text.split()]

    bracketed = foreign("[[", "]]", parse)
    reply = read("a [[read write]] b", [3, 4, 9, 13, 14, 15], tool_format=bracketed)
    assert calls_of(reply) == [("read", {"text": "read"}), ("write", {"text": "write"})]
    assert reply.content == "a b"
    assert read("[[read nobody]]", tool_format=bracketed).content == "[[read nobody]]"
    assert calls_of(read("x[[read", tool_format=bracketed)) == [
        ("read", {"text": "read"})
    ]
    twice = read("[[read]] [[read write]]", tool_format=bracketed)
    assert [name for name, _ in calls_of(twice)] == ["read", "read", "write"]


def test_of_several_calls_in_one_block_no_more_are_sent_than_may_be() -> None:
    """`parallel_tool_calls: false`: a block is read at its end, when all its calls are there."""
    calls = [{"name": name, "arguments": {"n": 1}} for name in ("read", "write")]
    bracketed = foreign("[[", "]]", lambda body, tools: calls)

    reply = read("[[two]]", tool_format=bracketed, max_calls=1)
    assert calls_of(reply) == [("read", {"n": 1})]
    assert len(read("[[two]]", tool_format=bracketed).tool_calls) == 2


def test_nothing_more_is_emitted_after_the_last_call_that_may_be() -> None:
    reader = stream(max_calls=1)

    reader.feed("<tool_call>", tag="<tool_call>")
    reader.feed('{"name": "read", "arguments": {}}', tag="")
    reader.feed("\n</tool_call></tool_call>", tag="</tool_call>")
    reader.finish()

    message = reader.message()
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None


def test_calls_of_tools_that_nobody_offered_are_not_too_many() -> None:
    calls = '[{"name": "x", "arguments": {}}, {"name": "y", "arguments": {}}]'
    reader = stream(max_calls=1)

    reader.feed(f"<tool_call>{calls}</tool_call>")
    reader.finish()

    assert reader.n_calls == 0
    assert not reader.has_more


def test_a_foreign_format_without_an_end_ends_with_the_reply() -> None:
    def parse(text: str, _tools: Any) -> Any:
        name, _, arguments = text.partition("[ARGS]")
        return {"name": name, "arguments": json.loads(arguments)}

    reply = read(
        'ok[TOOL_CALLS]read[ARGS]{"n": 1}',
        [4],
        tool_format=foreign("[TOOL_CALLS]", "", parse),
    )
    assert (reply.content, calls_of(reply)) == ("ok", [("read", {"n": 1})])


@pytest.mark.parametrize(
    "result",
    [
        ValueError(),
        AttributeError(),
        None,
        [],
        "x",
        {"name": "read", "arguments": 5},
        {"name": "read", "arguments": 0},
        {"name": "read", "arguments": [1]},
        {"name": 5, "arguments": {}},
        {"name": None, "arguments": {}},
        {"name": ["read"], "arguments": {}},
        {"name": {"read": 1}, "arguments": {}},
        [{"name": "read", "arguments": {}}, {"name": ["read"], "arguments": {}}],
    ],
)
def test_what_a_foreign_parser_cannot_read_is_text(result: Any) -> None:
    def parse(_text: str, _tools: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    reply = read("a [[read]] b", tool_format=foreign("[[", "]]", parse))
    assert (reply.content, reply.tool_calls) == ("a [[read]] b", [])


def test_formats_are_read_off_the_template() -> None:
    def detect(
        template: str, start: str | None = None, family: str = "generic"
    ) -> tuple[str, str] | None:
        found = ToolCallFormat.detect(template, family, tokenizer=speaking(start))
        return (found.syntax, found.gap) if found else None

    assert detect("'<tool_call>\\n<function=' + name") == ("qwen", "\n")
    assert detect("<tool_call><function=") == ("qwen", "")
    assert detect('<tool_call>\n{"name": <function-name>}') == ("hermes", "\n")
    assert detect("<tool_call>{name}<arg_key>k</arg_key><arg_value>") == ("glm", "")
    with_gap = "<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>"
    assert detect(with_gap) == ("glm", "\n")
    assert detect("no tools") is None
    assert detect("<arg_key>") is None
    assert detect("<tool_call>", "<tool_call>") == ("hermes", "")

    # The family's own goes first.
    mixed = "<tool_call><function= <tool_call>{name}<arg_key>"
    assert detect(mixed, family="qwen3") == ("qwen", "")
    assert detect(mixed, family="glm4") == ("glm", "")
    assert detect("<tool_call>", family="glm4") == ("hermes", "")


def test_openings_are_the_beginnings_of_calls() -> None:
    tools = [tool("read", {"required": ["n"]}), tool("read_file", {})]

    def openings(syntax: Any, gap: str = "\n", name: str | None = None) -> list[str]:
        tool_format = ToolCallFormat(
            start="<tool_call>", end="</tool_call>", syntax=syntax, gap=gap
        )
        return tool_call_prefixes(tool_format, tools, name=name)

    assert openings("qwen", name="read") == ["<tool_call>\n<function=read>\n"]
    assert openings("hermes")[1] == '<tool_call>\n{"name": "read_file", "arguments":'
    assert openings("glm", "") == ["<tool_call>read<arg_key>", "<tool_call>read_file"]
    assert openings("glm") == ["<tool_call>read\n<arg_key>", "<tool_call>read_file\n"]
    assert openings("qwen", name="other") == []
    assert tool_call_prefixes(foreign("[[", "]]", json.loads), tools) == ["[["]


# -- real templates --------------------------------------------------------------


def render(template: str, messages: list[Any], **context: Any) -> str:
    def raise_exception(message: str) -> None:
        raise AssertionError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=how.get("ensure_ascii", False), indent=how.get("indent")
    )
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(
        messages=messages, tools=TOOLS, **context
    )


def real_template(name: str) -> str:
    return artifact("templates", f"{name}.jinja").read_text(encoding="utf-8")


REAL = {
    "qwen3": "hermes",
    "qwen3-coder": "qwen",
    "qwen3.5": "qwen",
    "glm-4.7-flash": "glm",
}
REAL_ARGUMENTS: list[dict[str, Any]] = [
    {"text": 'line\n\tline "two" </parameter> <think> é😀\n', "n": -3, "yes": False},
    {"items": [1, {"a": None}], "tree": {"k": ["</tool_call>", "\\d"]}, "x": 0.5},
    {},
]


@pytest.mark.parametrize("name", REAL)
def test_a_real_templates_calls_are_read_back(name: str) -> None:
    template = real_template(name)
    tokenizer = speaking("<tool_call>", "</tool_call>")
    tool_format = ToolCallFormat.detect(template, "generic", tokenizer=tokenizer)
    assert tool_format
    assert tool_format.syntax == REAL[name]

    called = list(zip(["write", "read", "read"], REAL_ARGUMENTS, strict=True))
    calls = [
        {"type": "function", "function": {"name": tool_name, "arguments": arguments}}
        for tool_name, arguments in called
    ]
    question = [{"role": "user", "content": "q"}]
    answer = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    if name != "qwen3-coder":
        answer["reasoning_content"] = "why"
    prompt = render(template, question, add_generation_prompt=True)
    text = render(template, [*question, answer])
    assert text.startswith(prompt)
    text = text[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>")
    opened = prompt.rstrip().endswith("<think>")

    for cuts in ([], list(range(len(text)))):
        reply = read(text, cuts, tool_format=tool_format, in_reasoning=opened)
        assert calls_of(reply) == called
        assert reply.content == "I look."
        assert reply.reasoning == answer.get("reasoning_content")

    for tool_name in ("write", "read"):
        (opening,) = tool_call_prefixes(tool_format, TOOLS, name=tool_name)
        assert opening in text


def test_a_gemma_templates_calls_are_read_back() -> None:
    gemma4 = pytest.importorskip("mlx_lm.tool_parsers.gemma4")
    template = real_template("gemma-4")
    arguments = {
        "text": 'a "b"\n{c,-n:1}',
        "n": 5,
        "items": [1, 2],
        "-n": True,
        "a.b": {"c-d": 0},
    }
    call = {"type": "function", "function": {"name": "read", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = render(template, [{"role": "user", "content": "q"}, answer], bos_token="")
    text = text[text.index("<|tool_call>", text.index("<|turn>model")) :]
    text = text[: text.index("<tool_call|>") + len("<tool_call|>")]

    tokenizer = speaking(
        gemma4.tool_call_start, gemma4.tool_call_end, gemma4.parse_tool_call
    )
    tool_format = ToolCallFormat.detect(template, "generic", tokenizer=tokenizer)
    assert tool_format

    reply = read(text, list(range(len(text))), tool_format=tool_format)
    assert calls_of(reply) == [("read", arguments)]
    assert tool_call_prefixes(tool_format, TOOLS) == [
        f"<|tool_call>call:{tool['function']['name']}{{" for tool in TOOLS
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "write", "arguments": {"x": 0.' + "3" * 12_000,
        '<tool_call>\n{"name": "write", "arguments": {"x": 1' + "0" * 12_000,
        '<tool_call>\n{"name": "write", "arguments": {"' + "key" * 4_000,
        "<tool_call>\n<function=" + "name" * 6_000,
    ],
    ids=["fraction", "number", "key", "name"],
)
def test_what_runs_away_takes_no_longer_than_its_length(text: str) -> None:
    """It comes character by character, and must not be read from its start each time."""
    began = time.process_time()
    read(text, cuts=list(range(len(text))))
    assert time.process_time() - began < 4
