"""TOOLS: what values mean, what is no call but text, and what mlx-lm's parsers read."""

import json
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import start_llm as s
from call_formats import (
    FORMATS,
    TEXT,
    TOOLS,
    Reply,
    format_of,
    open_reader,
    read,
    read_in_any_pieces,
    tokenizer_with,
    tool,
)
from templates import tokenizer_of

READ = [("read", {"n": 1})]
QWEN_CALL = FORMATS["qwen"].text({"n": 1})
HERMES_CALL = FORMATS["hermes"].text({"n": 1})
BARE_CALL = '{"name": "read", "arguments": {"n": 1}}'

# -- while it is generated -------------------------------------------------------------


def test_nothing_leaves_before_the_name_is_known():
    reader = open_reader("qwen")
    assert reader.feed("\n<tool_call>\n<function=rea") == []
    named, opened = reader.feed("d>")
    assert named["tool_calls"][0]["function"]["name"] == "read"
    assert opened["tool_calls"][0]["function"] == {"arguments": "{"}


@pytest.mark.parametrize(
    "opened",
    [
        "<tool_call>\n<function=read>",
        QWEN_CALL.partition("\n</function>")[0],
        '<tool_call>{"name": "read", "arguments": {"n": 1',
        '<tool_call>{"name": "read", "arguments": {"text": "a"',
    ],
)
def test_a_model_caught_in_blanks_is_not_waited_for(opened):
    reader = open_reader("qwen")
    reader.feed(opened)
    for _ in range(300):
        reader.feed("\n ")
    assert reader.is_broken


def test_a_tag_and_blanks_are_text():
    reader = open_reader("qwen")
    reader.feed("<tool_call>read")
    for _ in range(300):
        reader.feed("\n ")
    assert reader.message()["content"].startswith("<tool_call>read")


def test_white_space_before_a_call_has_no_bound():
    assert read("qwen", ["a" + "\n" * 1000 + QWEN_CALL]).calls == READ


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "write", "arguments": {"x": 0.' + "3" * 12_000,
        '<tool_call>\n{"name": "write", "arguments": {"' + "key" * 4_000,
        "<tool_call>\n<function=" + "name" * 6_000,
    ],
    ids=["number", "key", "name"],
)
def test_what_runs_away_takes_no_longer_than_its_length(text):
    """It comes character by character, and must not be read from its start each time."""
    began = time.process_time()
    read("qwen", text)
    assert time.process_time() - began < 4


def test_after_the_last_call_that_may_be_nothing_is_emitted():
    """`parallel_tool_calls: false`."""
    reader = open_reader("hermes", max_calls=1)
    reader.feed("<tool_call>", tag="<tool_call>")
    reader.feed(BARE_CALL, tag="")
    reader.feed("\n</tool_call></tool_call>", tag="</tool_call>")
    reader.finish()
    message = reader.message()
    assert (len(message["tool_calls"]), message["content"]) == (1, None)


def test_calls_of_tools_that_nobody_offered_are_not_too_many():
    calls = '[{"name": "x", "arguments": {}}, {"name": "y", "arguments": {}}]'
    reader = open_reader("hermes", max_calls=1)
    reader.feed(f"<tool_call>{calls}</tool_call>")
    reader.finish()
    assert (reader.n_calls, reader.has_more) == (0, False)


# -- values ----------------------------------------------------------------------------

OR_NULL = {"anyOf": [TEXT, {"type": "null"}]}
ARRAY = {"type": "array"}
INTEGER = {"type": "integer"}
REFERENCE = {"$ref": "#/$defs/text"}
VALUES = [
    ("5", TEXT, "5"),
    ("null", TEXT, "null"),
    ("5", INTEGER, 5),
    ("-2.5e3", {"type": "number"}, -2500.0),
    ("True", {"type": "boolean"}, True),  # as Jinja prints it
    ("false", {"type": "boolean"}, False),
    ("[1, {}]", ARRAY, [1, {}]),
    ('{"a":"b\nc"}', {"type": "object"}, {"a": "b\nc"}),
    # As Python prints it.
    ("None", {"type": ["object", "null"]}, None),
    ("['a', 'b',]", ARRAY, ["a", "b"]),
    ("{'on': True, \"n\": [None]}", {"type": "object"}, {"on": True, "n": [None]}),
    ("['a', # it's a\n 'b', # 'c'\n]", ARRAY, ["a", "b"]),
    ("['a']", {}, ["a"]),
    ("['a']", OR_NULL, "['a']"),
    *((text, {}, text) for text in (
        "(1, 2)", "+491701234567", "2024_01_01", "5 # five", "'a'", "word", '"quoted"', "007")),
    ("0x1F", {"type": ["string", "integer"]}, "0x1F"),
    # The client may say what is wrong with it.
    *((text, ARRAY, text) for text in (
        "[1, 2", "['a' # it's a\n 'b']", "['a' # a\n # b\n 'b']", "['a' \\\n 'b']",
        "[" * 100_000)),
    ("{'a'}", {"type": "object"}, "{'a'}"),
    ("{1: {2}}", {"type": "object"}, "{1: {2}}"),
    ("five", INTEGER, "five"),
    ("NaN", {"type": "number"}, "NaN"),
    ("1e999", {"type": "number"}, "1e999"),
    # In escapes, as if it stood in a string.
    ('[{\\"a\\": \\"say \\\\\\"x\\\\\\"\\"}]', ARRAY, [{"a": 'say "x"'}]),
    ('"[{\\"a\\": 1}]"', ARRAY, [{"a": 1}]),
    ('"5"', INTEGER, 5),
    ('"five"', INTEGER, '"five"'),
    ('[{\\"a\\": 1}]', TEXT, '[{\\"a\\": 1}]'),
    ('[{\\"a\\": 1}]', {}, '[{\\"a\\": 1}]'),
    ('["\\d"]', ARRAY, ["\\d"]),
    ("['\\ud83d\\ude00']", ARRAY, ["\U0001f600"]),  # as JSON writes it
    ('["\\ud83d"]', ARRAY, ["\ufffd"]),  # half of it is no text
    # Unions and enumerations.
    ("null", OR_NULL, None),
    ("nothing", OR_NULL, "nothing"),
    ("5", OR_NULL, "5"),
    ("5", {"type": ["string", "integer"]}, 5),
    ("high", {"enum": [1, "high"]}, "high"),
    ("1", {"enum": [1, "high"]}, 1),
    ("1", {"enum": ["1", "2"]}, "1"),
    ("1", {"type": "string", "enum": ["1", 1]}, "1"),
    ("1", {"const": "1"}, "1"),
    ("1", {"const": 1}, 1),
    ("5", {"type": ["string", "integer"], "enum": ["5"]}, "5"),
    ("5", {"type": "integer", "enum": ["5"]}, 5),
    ("null", {"type": ["string", "null"], "enum": ["a", "b"]}, None),
    ("5", {"type": "number", "enum": [5]}, 5),
    # A branch of any type; of all of several schemas, the types that each has.
    ("<b>5</b>", {"anyOf": [{}, {"type": "null"}]}, "<b>5</b>"),
    ("<b>5</b>", {"oneOf": [True, {"type": "null"}]}, "<b>5</b>"),
    ("null", {"allOf": [{"type": ["string", "null"]}, TEXT]}, "null"),
    ("5", {"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 9}]}, "5"),
    ("5", {"anyOf": [{"const": f"{n} "} for n in range(300)]}, "5"),
    ("5", {"allOf": [{"type": "number"}, INTEGER]}, 5),
    # A key twice in a text that may be no object.
    ('{"a": 1, "a": 2}', {"type": ["string", "array"]}, '{"a": 1, "a": 2}'),
    ('[{"a": 1, "a": 2}]', {"type": ["string", "object"]}, '[{"a": 1, "a": 2}]'),
    # References to nothing, and schemas that are none.
    ('{\\"a\\": 1}', {"$ref": "Foo"}, '{\\"a\\": 1}'),
    ('{\\"a\\": 1}', {"$ref": "#foo"}, '{\\"a\\": 1}'),
    ("5", None, 5),
    ("5", ["string"], 5),
    ("5", True, 5),
    ("5", {"type": 7, "anyOf": "x", "enum": 3}, 5),
    ("5", {"type": [None, {}], "oneOf": [None, 3, TEXT]}, "5"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "schema", "value"), VALUES)
def test_values_are_typed_by_the_schema(text, schema, value):
    call = f"<tool_call>f<arg_key>k</arg_key><arg_value>{text}</arg_value></tool_call>"
    tools = [tool("f", {"type": "object", "properties": {"k": schema}})]
    ((_, arguments),) = read("glm", [call], tools=tools).calls
    assert (arguments["k"], type(arguments["k"])) == (value, type(value))


@pytest.mark.parametrize(
    "parameters",
    [
        {"additionalProperties": TEXT},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"properties": {"k": TEXT}}}},
        {"allOf": [{"properties": {"n": {}}}, {"properties": {"k": TEXT}}]},
        {"properties": {"n": {}}, "allOf": [{"properties": {"k": TEXT}}]},
        {"properties": {"k": TEXT}, "allOf": [{"properties": {"k": {}}}]},
        # As zod-to-json-schema refers to what a schema has twice.
        {"properties": {"a": OR_NULL, "k": {"$ref": "#/properties/a/anyOf/0"}}},
        # To one definition twice.
        {"properties": {"k": {"anyOf": [REFERENCE, INTEGER], "allOf": [REFERENCE]}},
         "$defs": {"text": TEXT}},
        # Steps of a reference that are escaped.
        *({"properties": {"k": {"$ref": f"#/$defs/{step}"}}, "$defs": {key: TEXT}}
          for step, key in (("a~1b", "a/b"), ("a~0c", "a~c"), ("a%25e", "a%e"), ("a~01f", "a~1f"))),
    ],
)  # fmt: skip
def test_the_type_of_a_key_is_found_wherever_the_schema_has_it(parameters):
    text = FORMATS["qwen"].text({"k": "5"}, "f")
    assert read("qwen", [text], tools=[tool("f", parameters)]).calls == [
        ("f", {"k": "5"})
    ]


@pytest.mark.parametrize("parameters", [{"properties": [1]}, {"properties": {"k": 5}}])
def test_parameters_that_are_no_schema_say_nothing(parameters):
    tools = [tool("f", parameters), {"function": {"name": "g"}}]
    for name in ("hermes", "qwen", "glm"):
        text = FORMATS[name].text({"k": 5}, "f")
        assert read(name, [text], tools=tools).calls == [("f", {"k": 5})]


# -- texts and thoughts beside calls ---------------------------------------------------


@pytest.mark.parametrize(
    "quotation",
    [
        "Use <function=foo> so.",
        "Format: `<function=NAME><parameter=KEY>`. Now I read.",
        "Mention of `<function=` here, and of <function=read> there.",
        "Write <function=read>\n<parameter=text>...</parameter> to read.",
        "The syntax:\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>",
    ],
)
def test_what_is_said_of_calls_is_no_call_and_hides_none(quotation):
    for call in (QWEN_CALL, QWEN_CALL.removeprefix("<tool_call>\n")):
        reply = read_in_any_pieces("qwen", f"{quotation}\n\n{call}")
        assert reply == Reply(READ, quotation)


def test_a_tag_that_is_spoken_of_holds_nothing_back():
    reader = open_reader("qwen")
    text = "Mention of `<function=` here, " + "and so it goes on, word by word. " * 50
    for n, letter in enumerate(text, 1):
        reader.feed(letter, tag="")
        n_shown = len(reader.message()["content"] or "")
        assert n - n_shown <= 2 or n < 40


def test_a_call_without_its_tag_is_one_in_what_is_said_but_not_in_a_thought():
    call = QWEN_CALL.removeprefix("<tool_call>\n")
    for pieces in ([call], list(call)):  # in tokens that are no tag's
        assert read("qwen", pieces, as_tokens=True).calls == READ
        thought = read("qwen", pieces, as_tokens=True, in_reasoning=True)
        assert thought == Reply([], None, call)


def test_a_call_in_an_unclosed_think_block_is_a_call_and_closes_it():
    call = FORMATS["qwen"].text({"text": "</think>"})
    reply = read("qwen", [f"I look.\n{call}\n</think>\n\nDone."], in_reasoning=True)
    assert reply == Reply([("read", {"text": "</think>"})], "Done.", "I look.")


def test_a_call_quoted_in_a_thought_stays_there():
    quoted = FORMATS["glm"].text({"text": "x"}, "unknown")
    thought = f"A <tool_call> tag, or {quoted} would do."
    reply = read("qwen", [f"{thought}\n</think>\n\nHi"], in_reasoning=True)
    assert reply == Reply([], "Hi", thought)


def test_text_between_and_after_calls_is_content():
    text = f"One.\n\n{HERMES_CALL}\n\nTwo.\n{HERMES_CALL}\nThree.\n{HERMES_CALL}\n"
    assert read("hermes", [text]) == Reply(READ * 3, "One.\n\nTwo.\nThree.")


@pytest.mark.parametrize(
    ("members", "arguments"), [(', "arguments": {"n": 1}', {"n": 1}), ("", {})]
)
def test_text_behind_a_call_without_its_end_is_that_text_alone(members, arguments):
    text = f'<tool_call>{{"name": "read"{members}}}\n\nNow I wait.'
    assert read("hermes", [text]) == Reply([("read", arguments)], "Now I wait.")


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
def test_thinking_that_is_spoken_of_is_part_of_the_answer(answer, thought):
    reply = read_in_any_pieces("qwen", thought + answer)
    assert reply == Reply([], answer, "Hm." if thought else None)


def test_thinking_after_a_block_of_code_is_thinking():
    reply = read_in_any_pieces("qwen", "```\na\n```\n<think>\nWhy?\n</think>\nSo.")
    assert reply == Reply([], "```\na\n```\nSo.", "Why?")


@pytest.mark.parametrize("schema", [None, {"type": "object"}])
def test_a_reply_that_has_to_be_json_is_no_call_without_its_tag(schema):
    """It may look like one in every letter."""
    prepared = SimpleNamespace(
        request=SimpleNamespace(
            kind="chat", tools=TOOLS, deferred_tools=[], json_schema=schema
        ),
        model=SimpleNamespace(
            tokenizer=SimpleNamespace(think_start="<think>", think_end="</think>"),
            template=SimpleNamespace(encode=lambda _: [1]),
        ),
        tool_format=format_of("hermes"),
    )
    tags = s.find_tags(prepared)[0]
    reader = s.ReplyReader(
        tags, prepared.tool_format, in_reasoning=False, tools=TOOLS, ids=iter("a")
    )
    reader.feed(BARE_CALL, tag="")
    reader.finish()
    assert ("tool_calls" in reader.message()) == (schema is None)
    assert reader.message()["content"] == (BARE_CALL if schema else None)


def test_a_character_that_marks_the_end_is_none_where_a_model_writes_it():
    text = '<tool_call>{"name": "read", "arguments": {"path": "a\0b"}}</tool_call>'
    path = "a\N{REPLACEMENT CHARACTER}b"
    assert read_in_any_pieces("hermes", text).calls == [("read", {"path": path})]
    assert read("hermes", ["Hi\0 you"]).content == "Hi\N{REPLACEMENT CHARACTER} you"


def fenced(code: str, language: str = "") -> str:
    return f"```{language}\n{code}\n```"


UNKNOWN_CALL = fenced(HERMES_CALL.replace("read", "rm"))
NO_CALL = fenced('{"name": "rm", "arguments": {}}')


@pytest.mark.parametrize(
    ("text", "n_calls", "content"),
    [
        # A block that has nothing but calls between tags is part of them.
        (fenced(HERMES_CALL, "xml"), 1, None),
        (f"I look:\n{fenced(HERMES_CALL)}\nDone.", 1, "I look:\n\nDone."),
        (fenced(f"{HERMES_CALL}\n{HERMES_CALL}", "xml"), 2, None),
        (f"{fenced(HERMES_CALL)}\n{fenced(HERMES_CALL, 'json')}", 2, None),
        (f"{fenced(HERMES_CALL)}\n{HERMES_CALL}", 2, None),
        (f"```xml\n{HERMES_CALL}", 1, None),
        (fenced(FORMATS["glm"].text({"n": 1})), 1, None),
        (fenced(QWEN_CALL, "xml"), 1, None),
        # Without tags it is one where the reply begins with it.
        (fenced(BARE_CALL, "json"), 1, None),
        (f"\n{fenced(BARE_CALL)}\nok", 1, "ok"),
        (f"```json\n{BARE_CALL}", 1, None),
        (fenced(json.dumps(json.loads(BARE_CALL), indent=2), "json"), 1, None),
        (BARE_CALL, 1, None),
        (f"<think>Hm.</think>\n\n{fenced(BARE_CALL, 'json')}", 1, None),
        (f"<think>Hm.</think>\n{BARE_CALL}\n{BARE_CALL}\nok", 2, "ok"),
        (f"<think>\n{BARE_CALL}\n</think>\nok", 0, "ok"),
        # After other text it is an example of one; what is no call is code.
        *((text, 0, text) for text in (
            f"A call:\n{BARE_CALL}", f"A call:\n{fenced(BARE_CALL, 'json')}", NO_CALL,
            fenced('{"name": "read"}'), '{"name": "rm", "arguments": {}}', UNKNOWN_CALL,
            f"{fenced('x', 'json')}\nok")),
        # Other blocks stay as they are.
        (f"{fenced('x', 'python')}\n{HERMES_CALL}", 1, fenced("x", "python")),
        (f"{fenced('x')}\n{fenced(HERMES_CALL)}\n{fenced('y')}\nz", 1,
         f"{fenced('x')}\n\n{fenced('y')}\nz"),
        (f"{HERMES_CALL}\n{fenced('y')}", 1, fenced("y")),
        (f"{fenced(HERMES_CALL)}\nThen {fenced('y')}", 1, f"Then {fenced('y')}"),
    ],
)  # fmt: skip
def test_a_block_of_code_that_is_a_call_is_a_call(text, n_calls, content):
    reply = read_in_any_pieces("hermes", text)
    assert (reply.calls, reply.content) == (READ * n_calls, content)


def test_a_block_of_code_may_have_a_call_without_its_first_tag():
    text = f"Go.\n{fenced(QWEN_CALL.removeprefix('<tool_call>\n'), 'xml')}\nok"
    assert read_in_any_pieces("qwen", text) == Reply(READ, "Go.\n\nok")


@pytest.mark.parametrize("call", [HERMES_CALL, BARE_CALL])
def test_a_call_in_a_block_is_found_in_text_without_special_tokens(call):
    """The lines around it are ordinary text; its tag may be a token of its own."""
    pieces = re.split(r"(</?tool_call>|\s+)", f"{fenced(call, 'json')}\nDone.")
    assert read("hermes", pieces, as_tokens=True) == Reply(READ, "Done.")


# -- formats that mlx-lm's parsers read ------------------------------------------------


def foreign(start: str, end: str, parse: Callable[[str, Any], Any]) -> s.ToolCallFormat:
    tokenizer = tokenizer_with(start, end, parse)
    found = s.ToolCallFormat.detect("", "generic", tokenizer=tokenizer)
    assert found and found.is_foreign
    return found


def test_a_foreign_format_is_read_by_its_parser_at_the_calls_end():
    def parse(text: str, tools: Any) -> Any:
        assert tools == TOOLS
        return [{"name": name, "arguments": {"text": name}} for name in text.split()]

    bracketed = foreign("[[", "]]", parse)
    read_call, write_call = ((name, {"text": name}) for name in ("read", "write"))
    for text, reply in (
        ("a [[read write]] b", Reply([read_call, write_call], "a b")),
        ("[[read nobody]]", Reply([], "[[read nobody]]")),
        ("x[[read", Reply([read_call], "x")),
        ("[[read]] [[read write]]", Reply([read_call, read_call, write_call])),
    ):
        assert read_in_any_pieces(bracketed, text) == reply
    assert read(bracketed, ["[[read write]]"], max_calls=1).calls == [read_call]
    assert bracketed.opening("read", {}) == "[["


def test_a_foreign_format_without_an_end_ends_with_the_reply():
    def parse(text: str, _tools: Any) -> Any:
        name, _, arguments = text.partition("[ARGS]")
        return {"name": name, "arguments": json.loads(arguments)}

    tool_format = foreign("[TOOL_CALLS]", "", parse)
    reply = read_in_any_pieces(tool_format, 'ok[TOOL_CALLS]read[ARGS]{"n": 1}')
    assert reply == Reply(READ, "ok")


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
        [{"name": "read", "arguments": {}}, {"name": ["read"], "arguments": {}}],
    ],
)
def test_what_a_foreign_parser_cannot_read_is_text(result):
    def parse(_text: str, _tools: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    reply = read(foreign("[[", "]]", parse), ["a [[read]] b"])
    assert reply == Reply([], "a [[read]] b")


# -- real templates --------------------------------------------------------------------


def render(name: str, messages: list[Any], **how: Any) -> str:
    tokenizer = tokenizer_of(f"{name}/tiny")
    text = tokenizer.apply_chat_template(messages, TOOLS, tokenize=False, **how)
    return str(text)


def call_of(name: str, arguments: Any) -> Any:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


QUESTION = {"role": "user", "content": "q"}
REAL = {
    "qwen3": "hermes",
    "qwen3-coder": "qwen",
    "qwen3.5": "qwen",
    "glm-4.7-flash": "glm",
}
REAL_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write", {"text": 'line\n\tline "two" </parameter> <think> é😀\n', "n": -3, "yes": False}),
    ("read", {"items": [1, {"a": None}], "tree": {"k": ["</tool_call>", "\\d"]}, "x": 0.5}),
    ("read", {}),
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_a_real_templates_calls_are_read_back(name):
    template = tokenizer_of(f"{name}/tiny").chat_template
    tokenizer = tokenizer_with("<tool_call>", "</tool_call>")
    tool_format = s.ToolCallFormat.detect(template, "generic", tokenizer=tokenizer)
    assert tool_format
    assert tool_format.syntax == REAL[name]

    calls = [call_of(*call) for call in REAL_CALLS]
    answer = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    if name != "qwen3-coder":
        answer["reasoning_content"] = "why"
    prompt = render(name, [QUESTION], add_generation_prompt=True)
    text = render(name, [QUESTION, answer])
    assert text.startswith(prompt)
    text = text[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>")
    opened = prompt.rstrip().endswith("<think>")

    reply = read_in_any_pieces(tool_format, text, in_reasoning=opened)
    assert reply == Reply(REAL_CALLS, "I look.", answer.get("reasoning_content"))
    for tool_name in ("write", "read"):
        assert tool_format.opening(tool_name, {}) in text


def test_a_gemma_templates_calls_are_read_back():
    arguments = {
        "text": 'a "b"\n{c,-n:1}',
        "n": 5,
        "items": [1, 2],
        "-n": True,
        "a.b": {"c-d": 0},
    }
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call_of("read", arguments)],
    }
    text = render("gemma-4", [QUESTION, answer])
    text = text[text.index("<|tool_call>", text.index("<|turn>model")) :]
    text = text[: text.index("<tool_call|>") + len("<tool_call|>")]

    assert read_in_any_pieces("gemma", text) == Reply([("read", arguments)])
    assert text.startswith(format_of("gemma").opening("read", {}))
