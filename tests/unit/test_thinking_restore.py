"""HEAL: a reply is known by what clients keep of it; what they say themselves is never replaced."""

import copy
import json
import re
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import start_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import examples
from templates import call, said

QUICK = settings(max_examples=examples(60))
THOROUGH = settings(max_examples=examples(200))
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
def test_a_javascript_round_trip_changes_no_arguments(
    arguments: dict, indent: int | None, ascii_only: bool
) -> None:
    """White space, escapes, the order of keys and the spelling of numbers: none of it is a name."""
    generated = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    name = start_llm.canonical_json(generated)
    assert name == start_llm.canonical_json(js_text(arguments))
    assert name == start_llm.canonical_json(arguments)
    assert name == start_llm.canonical_json(name)


def plain(value: Any) -> Any:
    """What Claude Code 2.1 leaves of arguments: `false` is a default, "1" may be 1 (L-81)."""
    if isinstance(value, list):
        return [
            plain(item) if isinstance(item, dict | list) else item for item in value
        ]

    echoed = {}
    for key, item in value.items():
        if isinstance(item, dict | list):
            echoed[key] = plain(item)
            continue
        text = without_changes_of_folder(str(item))
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
        if text not in ("False", "None"):
            echoed[key] = text
    return echoed


def without_changes_of_folder(text: str) -> str:
    """`ls` of `cd /a && cd b && ls`."""
    first, separator, rest = text.partition(" && ")
    while separator and re.fullmatch(r"cd \S+", first):
        text = rest
        first, separator, rest = text.partition(" && ")
    return text


@given(st.data(), objects)
@QUICK
def test_other_arguments_have_another_name(
    data: st.DataObject, arguments: dict
) -> None:
    """Equal names exactly where a JavaScript client could not tell the two apart."""
    with_one_more = {**arguments, "q": 1}
    changed = data.draw(objects | st.just(arguments) | st.just(with_one_more))
    echoes = [
        json.dumps(plain(js_value(value)), sort_keys=True)
        for value in (arguments, changed)
    ]
    names = [start_llm.canonical_json(value) for value in (arguments, changed)]

    assert (names[0] == names[1]) == (echoes[0] == echoes[1])


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
def test_what_clients_were_seen_to_rewrite(written: str, echoed: str) -> None:
    assert start_llm.canonical_json(written) == start_llm.canonical_json(echoed)
    assert start_llm.canonical_json(None) == start_llm.canonical_json("{}")


def test_a_name_takes_no_longer_than_its_text() -> None:
    """A run of blanks that ends no line must not be looked at from each of them."""
    long = " " * 300_000 + "x" + "\t" * 300_000 + "cd a && " * 50_000
    began = time.process_time()
    assert start_llm.canonical_json({"command": long, "content": long})
    assert time.process_time() - began < 2


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
def test_what_is_something_else(arguments: str, changed: str) -> None:
    assert start_llm.canonical_json(arguments) != start_llm.canonical_json(changed)


@given(
    st.text()
    | st.sampled_from(["[" * 500, "NaN", "1e999", "-", '{"a": 1e400}', '"\\ud800"'])
)
@QUICK
def test_text_that_is_no_json_is_its_own_name(text: str) -> None:
    """A model may write anything; it gets a name, the same each time, and nothing is raised."""
    name = start_llm.canonical_json(text)
    assert name == start_llm.canonical_json(text)
    assert isinstance(name, str)


# -- what names a reply -------------------------------------------------------------


def reply(
    content: str = "so it is", *arguments: object, thought: str = "", **fields: Any
) -> dict:
    message = said("assistant", content, **fields)
    if arguments:
        message["tool_calls"] = [call(text, n=n) for n, text in enumerate(arguments)]
    if thought:
        message["reasoning_content"] = thought
    return message


def test_thinking_and_ids_name_no_reply() -> None:
    """OpenClaw sends `call_779` back as `call779`; most clients drop thinking at some time."""
    plain = reply("x", '{"q": 1}', '{"q": 2}')
    echo = copy.deepcopy(plain)
    echo["reasoning_content"] = "why"
    for tool_call in echo["tool_calls"]:
        tool_call["id"] = tool_call["id"].replace("call", "call_")
        tool_call["index"] = 7

    assert start_llm.reply_digest(plain) == start_llm.reply_digest(echo)


def test_line_breaks_around_a_reply_name_none() -> None:
    """A client drops the thinking, and the line breaks after it, or only the thinking."""
    echoes = [
        reply("4"),
        reply("\n\n4\n"),
        reply("\n\n4", thought="2 + 2"),
        reply("<think>\n2 + 2\n</think>\n\n4"),
    ]
    digests = {start_llm.reply_digest(message) for message in echoes[:3]}
    digests |= {start_llm.reply_digest(as_parsed(echo)) for echo in echoes}

    assert len(digests) == 1


def test_each_word_call_and_order_names_a_reply() -> None:
    different = [
        reply("x"),
        reply("x y"),
        reply("", '{"q": 1}'),
        reply("x", '{"q": 1}'),
        reply("x", '{"q": 2}'),
        reply("x", '{"q": 1}', '{"q": 2}'),
        reply("x", '{"q": 2}', '{"q": 1}'),
        reply("x", '{"q": 1}', '{"q": 1}'),
        reply("x", tool_calls=[call('{"q": 1}', name="listen")]),
    ]
    digests = {start_llm.reply_digest(message) for message in different}

    assert len(digests) == len(different)


# -- what is remembered -------------------------------------------------------------


class Store:
    """A ledger, of which only thinking is asked, and a clock."""

    def __init__(
        self, saved: start_llm.TenantRecords | None = None, **config: Any
    ) -> None:
        self.ledger = start_llm.Ledger(start_llm.Config(**config), saved)
        self.ledger.load()

    def remember(self, answer: dict, context: Any, *, session_id: str = "") -> None:
        now = start_llm.time.monotonic()
        self.ledger.remember_thinking(answer, context, session_id=session_id, now=now)

    def find_thinking(self, answer: dict, context: Any) -> str:
        return self.ledger.find_thinking(answer, context)

    def __len__(self) -> int:
        return self.ledger.snapshot()["healing"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["keep", "ask"]), st.integers(0, 7)), min_size=20
    )
)
@THOROUGH
def test_the_replies_used_least_recently_are_forgotten(steps: list) -> None:
    """Against a plain LRU: remembering a reply and asking for it are both uses."""
    oracle: OrderedDict[int, str] = OrderedDict()
    store = Store()
    store.remember(reply("r", thought="thought 00"), (b"one context",))
    n_bytes = store.ledger.nbytes
    store = Store(ledger_max_bytes=4 * n_bytes)
    for n_steps, (step, n) in enumerate(steps):
        if step == "keep":
            oracle[n] = f"thought {n_steps:02}"
            thought = reply(f"r{n}", thought=oracle[n])
            store.remember(thought, (b"one context",))
        # By its context alone: the signature is a key that nobody asks for.
        found = store.find_thinking(reply(f"r{n}"), (b"one context",))
        assert found in ("", oracle.get(n))

        if found:
            oracle.move_to_end(n)
        newest = list(oracle)[-2:]
        assert all(
            store.find_thinking(reply(f"r{m}"), (b"one context",)) == oracle[m]
            for m in newest
        )
        assert store.ledger.nbytes <= 4 * n_bytes


def test_a_reply_without_thinking_is_not_kept() -> None:
    store = Store()
    store.remember(reply("x"), ASKED)
    store.remember(reply("y", reasoning_content=""), ASKED)
    assert len(store) == 0


def test_many_threads_share_a_store() -> None:
    store = Store(ledger_max_bytes=100_000)

    def work(seed: int) -> bool:
        for n in range(300):
            name = f"r{(n * seed) % 97}"
            store.remember(reply(name, thought=f"of {name}"), ASKED)
            if store.find_thinking(reply(name), ASKED) not in {"", f"of {name}"}:
                return False
            if n % 90 == 89:
                store.ledger.forget(None)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(1, 9)))
    assert 0 < store.ledger.nbytes <= 100_000
    store.ledger.forget(None)
    assert store.ledger.nbytes == len(store) == 0


def test_the_text_of_a_thought_is_counted_once_and_until_its_last_key_is_gone() -> None:
    text = "a long thought " * 1_000
    context = start_llm.ReplyContext(b"all messages", b"the last one")
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


def test_the_thinking_of_a_session_is_forgotten_with_it() -> None:
    store = Store()
    for session_id in ("one", "two"):
        answer = reply(session_id, thought=f"of {session_id}")
        store.remember(answer, ASKED, session_id=session_id)

    store.ledger.forget("one")
    signature = start_llm.thinking_signature("of one")
    assert store.find_thinking(reply("one", thought_id=signature), ASKED) == ""
    assert store.find_thinking(reply("two"), ASKED) == "of two"


# -- healing ------------------------------------------------------------------------


def as_parsed(message: dict) -> dict:
    """A message as HEAL gets it: CANON has put thinking under one name."""
    canon = start_llm.Canonicalizer(
        start_llm.Config(), part_separator="\n", thinking_tags=TAGS
    )
    [turn] = start_llm.canonicalize_messages([message], canon)
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
def test_thinking_comes_back_however_it_was_dropped(echo: dict) -> None:
    store = Store()
    store.remember(reply("so it is", thought="because"), ASKED)
    [healed] = start_llm.heal_messages(
        [as_parsed(echo)], store.find_thinking, contexts=[ASKED]
    )
    assert healed == reply("so it is", thought="because")


def test_a_call_without_words_is_healed_through_its_arguments() -> None:
    store = Store()
    store.remember(reply("", '{"n": 2.0, "1": "\\u00e9"}', thought="because"), ASKED)
    echo = reply("", '{"1":"é","n":2}')
    [healed] = start_llm.heal_messages([echo], store.find_thinking, contexts=[ASKED])
    assert healed["reasoning_content"] == "because"
    assert healed["tool_calls"] == echo["tool_calls"]


@pytest.mark.parametrize(
    "echo",
    [
        reply("so it is", thought="I say otherwise"),
        reply("<think>\nI say otherwise\n</think>\n\nso it is"),
    ],
)
def test_what_the_client_thinks_is_never_replaced(echo: dict) -> None:
    store = Store()
    store.remember(reply("so it is", thought="because"), ASKED)
    [healed] = start_llm.heal_messages(
        [as_parsed(echo)], store.find_thinking, contexts=[ASKED]
    )
    assert healed["reasoning_content"] == "I say otherwise"


def test_a_signature_finds_its_own_thinking_though_the_same_words_had_another_since() -> (
    None
):
    store = Store()
    for thought in ("the sky is blue", "two is even"):
        store.remember(reply("yes", thought=thought), ASKED)
    name = start_llm.thinking_signature("the sky is blue")

    assert store.find_thinking(reply("yes", thought_id=name), ()) == "the sky is blue"
    assert (
        store.find_thinking(reply("yes", thought_id="unknown"), ASKED) == "two is even"
    )


def test_the_same_words_said_to_something_else_stay_without_thinking() -> None:
    """A client's own examples are full of "yes"; no thought of ours led to them."""
    store = Store()
    thoughts = {b"is the sky blue?": "it is day", b"is two even?": "two halves"}
    for question, thought in thoughts.items():
        store.remember(reply("yes", thought=thought), (question,))

    questions = (b"", b"is the sky blue?", b"are you there?", b"is two even?")
    contexts = [(question,) for question in questions]
    healed = start_llm.heal_messages(
        [reply("yes")] * 4, store.find_thinking, contexts=contexts
    )

    assert [m.get("reasoning_content") for m in healed] == [
        None,
        "it is day",
        None,
        "two halves",
    ]


def test_a_conversation_has_its_own_thinking_though_another_answered_the_same_since() -> (
    None
):
    store = Store()
    for conversation in (b"Ann's", b"Bob's"):
        store.remember(
            reply("hello", thought=f"{conversation!r} greets"), (conversation, b"hi")
        )

    names = [(b"Ann's", b"hi"), (b"Bob's", b"hi"), (b"an edited one", b"hi")]
    thoughts = [store.find_thinking(reply("hello"), name) for name in names]
    assert thoughts == [f"{name!r} greets" for name in (b"Ann's", b"Bob's", b"Bob's")]


@pytest.mark.parametrize("name", [["a"], {"a": 1}, 7, None])
def test_a_signature_that_is_none_finds_nothing(name: object) -> None:
    """Fields that a client adds come as they are."""
    store = Store()
    store.remember(
        {"role": "assistant", "content": "x", "reasoning_content": "t"}, [b""]
    )
    reply = {"role": "assistant", "content": "y", "thought_id": name}
    assert store.find_thinking(reply, [b""]) == ""


def test_no_message_is_lost_where_a_context_is_missing() -> None:
    with pytest.raises(ValueError, match="shorter"):
        start_llm.heal_messages(
            [reply("a"), reply("b")], Store().find_thinking, contexts=[ASKED]
        )


def test_only_replies_are_healed_and_the_originals_stay_as_they_are() -> None:
    store = Store()
    store.remember(reply("same words", thought="because"), ASKED)
    messages = [
        said("system", "same words"),
        said("user", "same words"),
        reply("same words"),
        said("tool", "same words", tool_call_id="call00000"),
        reply("other words"),
    ]
    messages_before = copy.deepcopy(messages)
    healed = [
        *start_llm.heal_messages(messages, store.find_thinking, contexts=[ASKED] * 5)
    ]

    assert messages == messages_before
    assert [m.get("reasoning_content") for m in healed] == [
        None,
        None,
        "because",
        None,
        None,
    ]
    assert [{**m, "reasoning_content": 0} for m in healed] == [
        {**m, "reasoning_content": 0} for m in messages
    ]


def test_thinking_that_was_not_used_for_too_long_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(start_llm.time, "monotonic", lambda: now[0])
    store = Store(ledger_ttl_seconds=100.0)
    store.remember(reply("old", thought="old thought"), ASKED)
    store.remember(reply("used", thought="used thought"), ASKED)
    now[0] += 80.0
    assert store.find_thinking(reply("used"), ASKED) == "used thought"
    now[0] += 80.0
    store.ledger.expire(now[0])

    assert store.find_thinking(reply("old"), ASKED) == ""
    assert store.find_thinking(reply("used"), ASKED) == "used thought"


def test_thinking_in_use_keeps_no_other_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(start_llm.time, "monotonic", lambda: now[0])
    store = Store(ledger_ttl_seconds=100.0)
    contexts = start_llm.ReplyContext(b"all messages", b"the last one")
    store.remember(reply("used", thought="used thought"), contexts)
    store.remember(reply("old", thought="old thought"), contexts)
    now[0] += 80.0
    assert store.find_thinking(reply("used"), contexts) == "used thought"
    now[0] += 80.0
    store.ledger.expire(now[0])

    assert store.find_thinking(reply("old"), contexts) == ""
    assert store.find_thinking(reply("used"), contexts) == "used thought"


def test_a_session_is_forgotten_after_a_restart_though_another_thought_the_same(
    tmp_path: Path,
) -> None:
    """Each has its own record, under the same signature only the last one."""
    sessions = ("one", "two")
    for has_restarted in (False, True):
        file = start_llm.RecordFile()
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
    ] == [
        "42",
        "",
    ]
