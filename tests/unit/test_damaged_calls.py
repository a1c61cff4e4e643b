"""TOOLS: a damaged call runs with all that was written in it, or not at all.

The suite tries a few hundred seeded mutations of each format. To try more:

    DAMAGED_CALLS=10000 .venv/bin/python -m pytest tests/unit/test_damaged_calls.py
"""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import start_llm as s
from call_formats import (
    FORMATS,
    WITH_TOKENS,
    Format,
    cut,
    format_of,
    read,
    read_in_any_pieces,
    read_message,
)
from nights import examples

N_MUTATIONS = int(os.environ.get("DAMAGED_CALLS", examples(150)))

# Two calls share no key and no word, so each word tells where it was written.
CALLS: list[dict[str, Any]] = [
    {"path": "alpha one", "n": 3141, "text": "bravo two"},
    {"query": "charlie", "items": [2718, "delta"], "note": "echo five"},
]
WORDS = {
    "path": "alpha one", "n": "3141", "text": "bravo two",
    "query": "charlie", "items": "2718", "note": "echo five",
}  # fmt: skip
ALL_KEYS = "|".join(WORDS)
# Of two that differ in their line breaks one; mlx-lm's parsers overlook more in the last.
DAMAGED = FORMATS.keys() - {"glm", "mistral_11", "mistral_lists", "muse", "kimi_k3"}

# -- mutations -------------------------------------------------------------------------

CHARACTERS = "\"'{}[],:;<>/=|\\ \nax1"


def damaged_reply(form: Format, rng: random.Random) -> list[str]:
    """A reply in pieces, of one or two calls and perhaps a text, with up to 3 faults."""
    pieces: list[str] = []
    calls = CALLS[: rng.randint(1, 2)]
    for call in calls:
        pieces += form.write("read", call)
        pieces += rng.choice([[], ["\n"]])
    pieces += rng.choice([[], [], ["Done."]])

    markup = [
        piece for piece in form.write("read", CALLS[0]) if piece not in WORDS.values()
    ]
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


def finished_calls(message: Any) -> list[Any]:
    """The arguments of those that a client runs."""
    found = []
    for call in message.get("tool_calls", []):
        try:
            found.append(json.loads(call["function"]["arguments"]))
        except ValueError:
            continue
    return found


def faults(name: str, text: str, message: Any, *, as_tokens: bool = False) -> list[str]:
    """What is lost, or swallowed, in a call that runs."""
    form = FORMATS[name]
    wrong = []
    runs = finished_calls(message)
    for arguments in runs:
        # As a token it is a quotation, too, where the closing tag of the value follows.
        quoted_end = format_of(name).end if as_tokens else "\0"
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


@pytest.mark.parametrize(
    ("name", "as_tokens"),
    [(name, False) for name in sorted(DAMAGED)]
    + [(name, True) for name in sorted(DAMAGED & {*WITH_TOKENS})],
)
def test_a_damaged_call_runs_whole_or_not_at_all(name, as_tokens):
    rng = random.Random(f"{name} {as_tokens}")
    wrong = []
    for _ in range(N_MUTATIONS):
        pieces = damaged_reply(FORMATS[name], rng)
        text = "".join(pieces)
        message = read_message(name, pieces, as_tokens=as_tokens)
        if not as_tokens:
            assert read_message(name, [text]) == read_message(name, text) == message
        found = faults(name, text, message, as_tokens=as_tokens)
        if found:
            wrong.append(f"{text!r}\n   {found}\n   {finished_calls(message)}")

    assert not wrong, "\n".join([f"{len(wrong)} of {N_MUTATIONS}", *wrong[:8]])


WORDS_BETWEEN = ["`", "'", '"', " ", "\n", "\n\n", "word", "The tag ", "Done.", "```\n",
                 "```xml\n", "~~~\n", "{", "}", "<", "</", "assistant", "thought\n", ", ",
                 "<think>", "</think>"]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_reply_of_prose_and_calls_is_the_same_in_any_pieces(name):
    form = FORMATS[name]
    tags = [format_of(name).start, format_of(name).end.strip("\0"), *form.think]
    rng = random.Random(name)
    for _ in range(N_MUTATIONS // 5):
        text = ""
        for _ in range(rng.randint(1, 16)):
            call = form.write(rng.choice(["read", "unknown"]), rng.choice(CALLS))
            part = call[rng.choice([0, 0, rng.randrange(len(call))]) :]
            words = [rng.choice(WORDS_BETWEEN), rng.choice(WORDS_BETWEEN)]
            text += rng.choice(["".join(part), *words, rng.choice(tags), *words])
        pieces = cut(text, rng.choices(range(len(text) + 1), k=rng.randint(1, 9)))
        whole = read_message(name, [text])
        assert whole == read_message(name, text) == read_message(name, pieces)


# -- tags as tokens, and what follows a call -------------------------------------------

HERMES = '<tool_call>\n{"name": "read", "arguments": '
HERMES_START, HERMES_OPENING = "<tool_call>", HERMES.removeprefix("<tool_call>")
BETWEEN_TAGS = ["qwen", "glm_lines", "minimax"]


def test_a_call_ends_where_its_end_tag_comes_as_a_token():
    """And the same letters in other tokens are part of a text, line breaks or not."""
    call = [HERMES_START, HERMES_OPENING + '{"n": 1, "path": "']
    end = '"}}\n'

    quoted = [*call, "a\n", "</", "tool", "_call>", "\nb", end, "</tool_call>"]
    message = read_message("hermes", quoted, as_tokens=True)
    assert finished_calls(message) == [{"n": 1, "path": "a\n</tool_call>\nb"}]

    second = ["\n", HERMES_START, HERMES_OPENING + '{"n": 2}}\n', "</tool_call>"]
    for rest in (["\nDone."], second):
        message = read_message(
            "hermes", [*call, "a", "</tool_call>", *rest], as_tokens=True
        )
        assert finished_calls(message) == []
        (call_left_open,) = message["tool_calls"]
        text = '{"n": 1, "path": "a</tool_call>\\n'
        assert call_left_open["function"]["arguments"].startswith(text)
        assert message["content"] is None


@pytest.mark.parametrize("name", ["hermes", *BETWEEN_TAGS])
def test_the_end_tag_as_a_token_may_be_quoted(name):
    """Tokenizers write these letters in no other way."""
    start, end = format_of(name).start, format_of(name).end
    arguments = {"path": f"x = '{end}' + '{end}'", "text": "y"}
    pieces = re.split(f"({end}|{start})", FORMATS[name].text(arguments))
    reply = read(name, [*filter(None, pieces), "Done."], as_tokens=True)
    assert (reply.calls, reply.content) == ([("read", arguments)], "Done.")


@pytest.mark.parametrize("value", ["END", "a\nEND\nb", "END\nb\n"])
@pytest.mark.parametrize("name", BETWEEN_TAGS)
def test_the_end_tag_in_other_tokens_is_text(name, value):
    start, end = format_of(name).start, format_of(name).end
    arguments = {"path": value.replace("END", end), "text": "y"}
    body = FORMATS[name].text(arguments).removeprefix(start).removesuffix(end)
    for rest in ([body], list(body)):
        reply = read(name, [start, *rest, end, "Done."], as_tokens=True)
        assert (reply.calls, reply.content) == ([("read", arguments)], "Done.")


@pytest.mark.parametrize("name", BETWEEN_TAGS)
def test_a_call_right_behind_a_tag_that_is_quoted_ends_at_its_token(name):
    start = format_of(name).start
    pieces = [start, "'", *FORMATS[name].write("read", {"path": "x"}), "Done."]
    reply = read(name, pieces, as_tokens=True)
    assert (reply.calls, reply.content) == ([("read", {"path": "x"})], f"{start}'Done.")


@pytest.mark.parametrize("rest", ["\nDone.", "\nI have asked for the file."])
def test_an_end_that_is_spelled_in_other_tokens_loses_nothing(rest):
    """Where the end tag is a token, its letters may be text: then the call is open."""
    call = FORMATS["qwen"].text({"path": "a.md"})
    pieces = [HERMES_START, *call.removeprefix(HERMES_START)]

    whole = read_message("qwen", pieces, as_tokens=True)
    followed = read_message("qwen", [*pieces, rest], as_tokens=True)

    assert finished_calls(whole) == [{"path": "a.md"}]
    assert finished_calls(followed) == []


def test_after_a_comma_the_end_of_a_call_ends_a_text():
    text = HERMES + '{"path": "a.md", </tool_call>Done. All is well.'
    for pieces in ([text], text):
        (call,) = read_message("hermes", pieces)["tool_calls"]
        assert call["function"]["arguments"] == '{"path": "a.md"'


@pytest.mark.parametrize("prose", [", and done", "; ok", ", it's: ok", '\n"yes" it is'])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_prose_behind_a_whole_call_is_content(prose, as_tokens):
    call = [HERMES_START, HERMES_OPENING + '{"n": 1}}\n', "</tool_call>"]
    reply = read("hermes", [*call, prose], as_tokens=as_tokens)
    assert reply.calls == [("read", {"n": 1})]
    assert reply.content.strip() == prose.strip()

    reply = read("hermes", [*call, ", ", *call], as_tokens=as_tokens)
    assert reply.calls == [("read", {"n": 1})] * 2


@pytest.mark.parametrize("rest", ["<b>Done", "</p>Done", "</td>", "<x"])
def test_the_bracket_of_a_call_before_markup_is_no_content(rest):
    for end in ("}", "}}", "\n}\n"):
        reply = read_in_any_pieces("hermes", HERMES + '{"n": 1}' + end + rest)
        assert reply.calls == [("read", {"n": 1})]
        assert reply.content.strip() == rest


def test_a_bracket_too_many_belongs_to_its_call_in_any_pieces():
    text = '[TOOL_CALLS]read[ARGS]{"n": 1} \n }Done.'
    for place in range(len(text)):
        reply = read("mistral_13", [text[:place], text[place:]])
        assert reply.calls == [("read", {"n": 1})]
        assert reply.content.strip() == "Done."


def test_thinking_may_follow_a_call_without_its_end_tag():
    text = HERMES + '{"n": 1}}<think>Wait.</think>Done'
    expected = ([("read", {"n": 1})], "Done", "Wait.")
    assert read_in_any_pieces("hermes", text) == expected


@pytest.mark.parametrize("name", ["qwen", "hermes"])
def test_this_parser_can_be_written_by_a_call(name):
    """Each value has forty lines of its sections, and of its tests.

    And more up to one without a tag: a value that ends with one is left open.
    """
    source = Path(s.__file__ or "").read_text()
    sections = re.findall(r"(?s)# region CALL .*# region CALL FORMS", source)
    tests = Path(__file__).with_name("test_call_formats.py").read_text()
    lines = "\n".join([*sections, tests]).split("\n")
    assert len(lines) > 2_000
    end = 0
    while end < len(lines):
        first, end = end, end + 40
        while end < len(lines) and "<" in lines[end - 1]:
            end += 1
        arguments = {"path": "\n".join(lines[first:end]), "text": "y"}
        text = FORMATS[name].text(arguments)
        assert read(name, [text]).calls == [("read", arguments)]
