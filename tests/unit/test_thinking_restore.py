"""HEAL: a reply is known by what clients keep of it; what they say themselves is never replaced."""

import copy
import json
from decimal import Decimal
from typing import Any

import pytest
import start_llm as s
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import examples
from templates import call, said

QUICK = settings(max_examples=examples(60))
TAGS = ("<think>", "</think>")
ASKED = (b"digest of what is answered",)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# -0.0, 2.0, 1e21, 2**53 + 1 and keys that look like indices: what a JavaScript client rewrites.
numbers = (
    st.integers(-(2**70), 2**70)
    | st.integers(-9, 9).map(float)
    | st.sampled_from([-0.0, 2.0, 1e21, 1e300, 5e-324, 2.0**53, 2**53 + 1])
    | st.floats(allow_nan=False, allow_infinity=False)
)
scalars = st.none() | st.booleans() | numbers | words
keys = words | st.integers(0, 30).map(str)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=8,
)
objects = st.dictionaries(keys, values, max_size=4)


# -- arguments ----------------------------------------------------------------------


def js_number(value: float) -> int | float:
    """As Number.prototype.toString prints it: whole below 1e21, shortest digits, no minus zero."""
    number = float(value)
    is_printed_whole = number.is_integer() and abs(number) < 1e21
    return int(Decimal(repr(number))) if is_printed_whole else number


def js_value(value: Any) -> Any:
    """The value after JSON.parse and JSON.stringify: indices first and ascending, then the rest."""
    if isinstance(value, dict):
        indices = [key for key in value if key.isdecimal() and str(int(key)) == key]
        other_keys = [key for key in value if key not in indices]
        order = [*sorted(indices, key=int), *other_keys]
        return {key: js_value(value[key]) for key in order}
    if isinstance(value, list):
        return [js_value(item) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)

    return js_number(value) if is_number else value


def js_text(value: Any) -> str:
    return json.dumps(js_value(value), ensure_ascii=False, separators=(",", ":"))


@given(objects, st.sampled_from([None, 1, 4]), st.booleans())
@QUICK
def test_a_javascript_round_trip_changes_no_arguments(arguments, indent, ascii_only):
    """White space, escapes, the order of keys and the spelling of numbers: none of it is a name."""
    generated = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    name = s.canonical_json(generated)
    assert name == s.canonical_json(js_text(arguments))
    assert name == s.canonical_json(arguments)
    assert name == s.canonical_json(name)


WRITTEN = (
    r"""{ "timeout" : 20.0,  "command":"printf '%s\\n' \"caf\u00e9 \u6f22 <b>&amp; """
    r"""\ud83d\ude00 a\/b\"", "10":"ten",  "2" : {"z":1.50, "a":[1.0, 1e2 ,-0.0] , "1":null}, """
    '"x": true }'
)
ECHOED = (
    r'{"2":{"1":null,"z":1.5,"a":[1,100,0]},"10":"ten","timeout":20,'
    r""""command":"printf '%s\\n' \"café 漢 <b>&amp; 😀 a/b\"","x":true}"""
)


@pytest.mark.parametrize(
    ("written", "echoed"),
    [
        (WRITTEN, ECHOED),  # by Claude Code, PI and OpenClaw alike
        ('{"n": 2.0}', '{"n":2}'),
        ('{"n": -0.0}', '{"n":0}'),
        ('{"n": 9007199254740993}', '{"n":9007199254740992}'),
        ('{"n": 1e21}', '{"n":1e+21}'),
        ('{"b": 1, "10": 2, "9": 3}', '{"9":3,"10":2,"b":1}'),
        ('{"s": "\\u6f22 \\u00e9"}', '{"s":"漢 é"}'),
        ('{"new_string": "x"}', '{"replace_all":false,"new_string":"x","limit":null}'),
        ('{"content": "a  \\n\\tb \\n"}', '{"content":"a\\n\\tb\\n"}'),
        ('{"command": "cd /work/a-b && ls"}', '{"command":"ls"}'),
        ('{"offset": "1", "edits": [{"n": "2"}]}', '{"offset":1,"edits":[{"n":2}]}'),
        ('{ "a" : [ 1 , 2.50 ] }', '{"a":[1,2.5]}'),
        ("", "{}"),
        ("null", "{}"),
    ],
)
def test_what_clients_were_seen_to_rewrite(written, echoed):
    assert s.canonical_json(written) == s.canonical_json(echoed)
    assert s.canonical_json(None) == s.canonical_json("{}")


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ('{"n": 2}', '{"n": 2.5}'),
        ('{"n": 1}', '{"n": true}'),
        ('{"n": 0}', "{}"),
        ('{"command": "ls && cd /a && ls"}', '{"command": "ls && ls"}'),
        ('{"a": ["x "]}', '{"a": ["x"]}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"s": " x"}', '{"s": "x"}'),
        ('{"q": "cut o', '{"q": "cut off'),
        ('{"new": "None"}', '{"new": "False"}'),
        ('{"new": "False"}', "{}"),
    ],
)
def test_what_is_something_else(arguments, changed):
    assert s.canonical_json(arguments) != s.canonical_json(changed)


@given(
    st.text()
    | st.sampled_from(["[" * 500, "NaN", "1e999", "-", '{"a": 1e400}', '"\\ud800"'])
)
@QUICK
def test_text_that_is_no_json_is_its_own_name(text):
    """A model may write anything; it gets a name, the same each time, and nothing is raised."""
    name = s.canonical_json(text)
    assert name == s.canonical_json(text)
    assert isinstance(name, str)


# -- what names a reply -------------------------------------------------------------


def reply(content="so it is", *arguments, thought="", **fields):
    message = said("assistant", content, **fields)
    if arguments:
        message["tool_calls"] = [call(text, n=n) for n, text in enumerate(arguments)]
    if thought:
        message["reasoning_content"] = thought
    return message


# -- what is remembered -------------------------------------------------------------


class Store:
    """A ledger, of which only thinking is asked, and a clock."""

    def __init__(self, saved=None, **config):
        self.ledger = s.Ledger(s.Config(**config), saved)
        self.ledger.load()

    def remember(self, answer: dict, context: Any, *, session_id: str = "") -> None:
        now = s.time.monotonic()
        self.ledger.remember_thinking(answer, context, session_id=session_id, now=now)

    def find_thinking(self, answer: dict, context: Any) -> str:
        return self.ledger.find_thinking(answer, context)

    def __len__(self) -> int:
        return self.ledger.snapshot()["healing"]


def test_the_text_of_a_thought_is_counted_once_and_until_its_last_key_is_gone():
    text = "a long thought " * 1_000
    context = s.ReplyContext(b"all messages", b"the last one")
    store = Store(ledger_ttl_seconds=0.0)
    for _ in range(3):  # the same again counts once
        store.remember(reply("x", thought=text), context)
    assert len(text) < store.ledger.nbytes < 1.5 * len(text)
    assert len(store) == 1

    store.ledger.drop_oldest()
    store.ledger.drop_oldest()
    assert store.ledger.nbytes > len(text)
    assert store.find_thinking(reply("x"), context) == text
    store.ledger.drop_oldest()
    assert store.ledger.nbytes == len(store) == 0


# -- healing ------------------------------------------------------------------------


def as_parsed(message: dict) -> dict:
    """A message as HEAL gets it: CANON has put thinking under one name."""
    canon = s.Canonicalizer(s.Config(), part_separator="\n", thinking_tags=TAGS)
    [turn] = s.canonicalize_messages([message], canon)
    return turn.original


@pytest.mark.parametrize(
    "echo",
    [
        reply("so it is"),
        reply("\n\nso it is"),
        reply("so it is", reasoning_content=""),
        reply("so it is", reasoning_content=" \n"),
        reply("<think>\n\n</think>\n\nso it is"),
        said("assistant", [{"type": "text", "text": "so it is"}]),
    ],
)
def test_thinking_comes_back_however_it_was_dropped(echo):
    store = Store()
    store.remember(reply("so it is", thought="because"), ASKED)
    [healed] = s.heal_messages([as_parsed(echo)], store.find_thinking, contexts=[ASKED])
    assert healed == reply("so it is", thought="because")


@pytest.mark.parametrize(
    "echo",
    [
        reply("so it is", thought="I say otherwise"),
        reply("<think>\nI say otherwise\n</think>\n\nso it is"),
    ],
)
def test_what_the_client_thinks_is_never_replaced(echo):
    store = Store()
    store.remember(reply("so it is", thought="because"), ASKED)
    [healed] = s.heal_messages([as_parsed(echo)], store.find_thinking, contexts=[ASKED])
    assert healed["reasoning_content"] == "I say otherwise"


def test_a_signature_finds_its_own_thinking_though_the_same_words_had_another_since():
    store = Store()
    for thought in ("the sky is blue", "two is even"):
        store.remember(reply("yes", thought=thought), ASKED)
    name = s.thinking_signature("the sky is blue")

    assert store.find_thinking(reply("yes", thought_id=name), ()) == "the sky is blue"
    assert (
        store.find_thinking(reply("yes", thought_id="unknown"), ASKED) == "two is even"
    )


def test_the_same_words_said_to_something_else_stay_without_thinking():
    """A client's own examples are full of "yes"; no thought of ours led to them."""
    store = Store()
    thoughts = {b"is the sky blue?": "it is day", b"is two even?": "two halves"}
    for question, thought in thoughts.items():
        store.remember(reply("yes", thought=thought), (question,))

    questions = (b"", b"is the sky blue?", b"are you there?", b"is two even?")
    contexts = [(question,) for question in questions]
    healed = s.heal_messages([reply("yes")] * 4, store.find_thinking, contexts=contexts)

    thoughts = [message.get("reasoning_content") for message in healed]
    assert thoughts == [None, "it is day", None, "two halves"]


def test_a_conversation_has_its_own_thinking_though_another_answered_the_same_since():
    store = Store()
    for conversation in (b"Ann's", b"Bob's"):
        store.remember(
            reply("hello", thought=f"{conversation!r} greets"), (conversation, b"hi")
        )

    names = [(b"Ann's", b"hi"), (b"Bob's", b"hi"), (b"an edited one", b"hi")]
    thoughts = [store.find_thinking(reply("hello"), name) for name in names]
    assert thoughts == [f"{name!r} greets" for name in (b"Ann's", b"Bob's", b"Bob's")]


@pytest.mark.parametrize("name", [["a"], {"a": 1}, 7, None])
def test_a_signature_that_is_none_finds_nothing(name):
    """Fields that a client adds come as they are."""
    store = Store()
    store.remember(
        {"role": "assistant", "content": "x", "reasoning_content": "t"}, [b""]
    )
    reply = {"role": "assistant", "content": "y", "thought_id": name}
    assert store.find_thinking(reply, [b""]) == ""


def test_only_replies_are_healed_and_the_originals_stay_as_they_are():
    store = Store()
    store.remember(reply("same words", thought="because"), ASKED)
    messages = [
        said("system", "same words"),
        said("user", "same words"),
        reply("same words"),
        said("tool", "same words", tool_call_id="call00000"),
        reply("other words"),
    ]
    expected = copy.deepcopy(messages)
    healed = s.heal_messages(messages, store.find_thinking, contexts=[ASKED] * 5)
    healed = list(healed)

    assert messages == expected
    expected[2]["reasoning_content"] = "because"
    assert healed == expected


def test_a_session_is_forgotten_after_a_restart_though_another_thought_the_same(
    tmp_path,
):
    """Each has its own record, under the same signature only the last one."""
    sessions = ("one", "two")
    for has_restarted in (False, True):
        file = s.RecordFile()
        file.open(tmp_path / "records", ttl_seconds=0.0)
        store = Store(file.of_tenant(""))
        if not has_restarted:
            for name in sessions:
                store.remember(
                    reply(name, thought="42"), (name.encode(),), session_id=name
                )
            assert file.flush(60.0)

    store.ledger.forget("two")
    assert [
        store.find_thinking(reply(name), (name.encode(),)) for name in sessions
    ] == ["42", ""]
