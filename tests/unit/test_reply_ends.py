"""ANSWER: what a request becomes before it runs, and how a reply ends where the client said."""

import os
import stat
import time
from types import SimpleNamespace

import pytest
import start_llm as s
from call_formats import TEXT, format_of, tool
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PIECES = st.lists(st.text(alphabet="abST OP\n", max_size=5), max_size=20)


@example(["bO"], ["O", "bOO"])  # at the end the longer one can no longer come
@given(PIECES, st.lists(st.text(alphabet="abSTOP", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_at_the_first_one_however_the_text_is_chunked(pieces, stops):
    text = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    machine = s.StopStrings(tuple(stops))

    shown = "".join(machine.feed(piece) for piece in pieces)
    shown += machine.feed("", is_last=True)

    assert shown == (text[: min(found)] if found else text)
    assert bool(machine.hit) == bool(found)
    if found:
        assert machine.hit in stops
        assert text.startswith(machine.hit, min(found))


def test_stop_strings_hold_back_no_more_than_they_must():
    machine = s.StopStrings(("STOP",))
    assert machine.feed("and ST") == "and "
    assert machine.feed("AY ") == "STAY "


WRITE = tool("write", {"properties": {"content": TEXT}})
HERMES, MINIMAX = format_of("hermes"), format_of("minimax")
CALL = [
    "<tool_call>",
    '\n{"name": "write", "arguments": {"content": "# T\\n',
    "```",
    'py"}}\n',
]
ASKED = {
    "kind": "chat",
    "tools": (WRITE,),
    "deferred_tools": (),
    "parallel_tool_calls": True,
    "json_schema": None,
}


def decoder_of(monkeypatch, pieces, *, stop=(), thinks=True, form=HERMES, **fields):
    """A reply of tokens, one for each of these texts, before its end is read."""

    def detokenizer(_, hidden):
        feed = lambda token: "" if token in hidden else pieces[token]  # noqa: E731
        return SimpleNamespace(feed=feed, finish=lambda: "", is_inside_character=False)

    monkeypatch.setattr(s, "Detokenizer", detokenizer)
    special_tokens = fields.pop("special", ())
    tokenizer = SimpleNamespace(
        think_start="<think>", think_end="</think>", backend_tokenizer=None
    )
    template = SimpleNamespace(
        encode=lambda text: [pieces.index(text) if text in pieces else -1]
    )
    model = SimpleNamespace(
        tokenizer=tokenizer,
        template=template,
        hidden_ids=frozenset(pieces.index(token) for token in special_tokens),
        eos_ids=frozenset(),
    )
    prepared = SimpleNamespace(
        request=SimpleNamespace(**{**ASKED, "stop": stop, **fields}),
        model=model,
        tool_format=form,
        plan=SimpleNamespace(rendered=SimpleNamespace(starts_in_reasoning=thinks)),
    )

    listener = s.ReplyDecoder(prepared)
    for token in range(len(pieces)):
        listener.feed(token)
    return listener


def heard(monkeypatch, pieces, **how):
    """What a listener makes of such a reply: the message, what stopped."""
    listener = decoder_of(monkeypatch, pieces, **how)
    listener.finish(closes=True)

    message = listener.reader.message()
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return (
        message.get("reasoning_content"),
        message["content"],
        calls,
        listener.stops.hit,
    )


def test_stop_strings_end_what_is_said_and_not_what_is_thought(monkeypatch):
    thought = ["I see.", "\n\n", "Observa", "tion: it", " is 4."]
    thought += ["</think>", "\n\n", "It is", " 4."]
    message = ("I see.\n\nObservation: it is 4.", "It is 4.", [])

    for stop in ("\n\n", "Observation", "see"):
        assert heard(monkeypatch, thought, stop=(stop,)) == (*message, "")
        pieces = [*thought, f"{stop} and", " more"]
        assert heard(monkeypatch, pieces, stop=(stop,)) == (*message, stop)

    reply = heard(monkeypatch, ["a", "\n\n", "b"], stop=("\n\n",), thinks=False)
    assert reply[1] == "a"


def test_stop_strings_cut_no_call_in_two(monkeypatch):
    """Half a file must not be written: after "stop" clients run what they got."""
    pieces = ["Done", " soon", *CALL, "</tool_call>"]
    written = '{"content": "# T\\n```py"}'

    reply = heard(monkeypatch, pieces, stop=("```", "soon!"), thinks=False)
    assert reply == (None, "Done soon", [written], "")

    reply = heard(monkeypatch, [*pieces, "and ```"], stop=("```",), thinks=False)
    assert reply == (None, "Done soonand ", [written], "```")


@pytest.mark.parametrize("stop", ["call", ">", "<", "_call>\n{", "soon<"])
def test_no_stop_string_is_found_in_a_tag(monkeypatch, stop):
    pieces = ["Done", " soon", *CALL, "</tool_call>"]
    reply = heard(monkeypatch, pieces, stop=(stop,), thinks=False)
    assert reply == (None, "Done soon", ['{"content": "# T\\n```py"}'], "")


def test_an_answer_may_begin_with_a_stop_string_of_several_tokens(monkeypatch):
    """White space that follows a tag goes with it; behind what was held back it does not."""
    pieces = ["why", "</think>", "\n\n", "END", "\n", "more", " text"]
    reply = heard(monkeypatch, pieces, stop=("END\nmore",))
    assert reply == ("why", None, [], "END\nmore")


def test_a_special_token_may_be_a_stop_string(monkeypatch):
    """As those who fill in code ask for it (CodeGemma); others stay unseen."""
    pieces = ["a", "<|quiet|>", "b", "<|next_file|>", "c"]
    special = ["<|quiet|>", "<|next_file|>"]

    def reply_to(stop):
        return heard(monkeypatch, pieces, stop=(stop,), special=special, thinks=False)

    assert reply_to("<|next_file|>")[1::2] == ("ab", "<|next_file|>")
    assert reply_to("zz")[1::2] == ("abc", "")


def test_nothing_of_a_call_too_many_is_said(monkeypatch):
    invoke = ["\n<invoke", ' name="write">\n<parameter name="content">']
    invoke += ["x</parameter>", "</invoke>"]
    pieces = ["I look.", "\n", "<minimax:tool_call>", *invoke, *invoke]
    pieces.append("\n</minimax:tool_call>")
    written = '{"content": "x"}'
    for is_parallel, calls in ((True, [written, written]), (False, [written])):
        how = {"form": MINIMAX, "parallel_tool_calls": is_parallel, "thinks": False}
        reply = heard(monkeypatch, pieces, **how)
        assert reply == (None, "I look.", calls, "")

    second = ["<tool_call>", '{"name": "write", "arguments": {}}', "</tool_call>"]
    pieces = [*CALL, *second]
    reply = heard(monkeypatch, pieces, thinks=False, parallel_tool_calls=False)
    assert reply[1:3] == (None, ['{"content": "# T\\n```py"}'])


def test_a_reply_ends_with_its_call_unless_its_last_tokens_have_more(monkeypatch):
    """`parallel_tool_calls: false`: what is recorded is what the client has (L-120)."""
    invoke = ['<invoke name="write">', '<parameter name="content">', "x</parameter>"]
    block = ["<minimax:tool_call>", *invoke, "</invoke>"]
    endings = {"</minimax:tool_call>": True, "\n<invoke ": False}
    for ending, is_all in endings.items():
        how = {"form": MINIMAX, "parallel_tool_calls": False, "thinks": False}
        decoder = decoder_of(monkeypatch, [*block, ending, "more"], **how)
        assert decoder.end == "call_limit"
        assert len(decoder.token_ids) == len(block) + 1
        assert decoder.ends_with_call == is_all
    decoder = decoder_of(monkeypatch, [*CALL, "</tool_call>"], thinks=False)
    assert not decoder.ends_with_call


def test_a_client_may_leave_a_reply_wherever_it_has_the_text_of_all_tokens(monkeypatch):
    """Not in thinking or a call, nor where a part of a stop string is held back (L-121)."""
    pieces = ["why", "</think>", "\n\n", "It is", " so", ".\n", "\n"]
    pieces += ["No", " EN", "OUGH"]
    decoder = decoder_of(monkeypatch, [*pieces, *CALL], stop=("END",))
    texts = ["It is", "It is so", "It is so.", "It is so.\n\nNo"]
    texts.append(f"{texts[-1]} ENOUGH")
    assert decoder.shown_ends == [
        (n_tokens, len(text))
        for n_tokens, text in zip([4, 5, 6, 8, 10], texts, strict=True)
    ]


def byte_level_tokens():
    """The one-byte tokens of a vocabulary of bytes, and those of all bytes together."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: n for n, letter in enumerate(letters)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def as_transformers(tokenizer):
    return SimpleNamespace(
        decode=tokenizer.decode, convert_ids_to_tokens=tokenizer.id_to_token
    )


def test_the_bytes_of_all_tokens_are_those_of_the_text():
    """A client joins them: a token that is a part of a character has its bytes, too."""
    tokenizer = byte_level_tokens()
    text = "é €😀 \ufffd\x00\n~"
    entries = [
        s.format_logprob(as_transformers(tokenizer), token_id, -0.5)
        for token_id in tokenizer.encode(text).ids
    ]
    assert "\ufffd" in entries[0]["token"]

    token_bytes = [bytes(entry["bytes"]) for entry in entries]
    assert b"".join(token_bytes) == text.encode()


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [("<0xE2>", b"\xe2"), ("\ufffd", "\ufffd".encode()), ("\u65e5", None)],
)
def test_the_bytes_of_a_token_in_a_vocabulary_of_characters(spelling, expected):
    tokenizer = SimpleNamespace(
        decode=lambda _: "\ufffd", convert_ids_to_tokens=lambda _: spelling
    )
    token_bytes = s.format_logprob(tokenizer, 7, -0.5)["bytes"]
    assert token_bytes == (None if expected is None else list(expected))


@pytest.mark.parametrize("wanted", [True, False])
def test_the_machine_is_kept_awake_while_a_request_runs_and_no_longer(
    tmp_path, monkeypatch, wanted
):
    note = tmp_path / "pid"
    fake = tmp_path / "caffeinate"
    fake.write_text(f'#!/bin/sh\necho "$$ $*" > {note}\nexec sleep 60\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with s.kept_awake(s.Config(keep_awake=wanted)):
        pid, *arguments = _wait_for(note) if wanted else (None,)
        if pid:
            os.kill(pid, 0)
            assert arguments[-2:] == ["-w", str(os.getpid())]  # or it would outlive us

    if pid:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert note.exists() == wanted


def test_a_request_runs_though_the_machine_cannot_be_kept_awake(tmp_path, monkeypatch):
    fake = tmp_path / "caffeinate"
    fake.write_text("#!/nothing/here\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))

    with s.kept_awake(s.Config(keep_awake=True)):
        pass


def _wait_for(note):
    for _ in range(500):
        if note.exists() and note.read_text().strip():
            pid, *arguments = note.read_text().split()
            return int(pid), *arguments
        os.sched_yield()
        time.sleep(0.01)
    raise AssertionError("caffeinate was not started")


ENDINGS = {  # what the engine says, why the text was over before: kind, finish_reason
    ("stop", "open", 0): ("finished", "stop"),
    ("stop", "open", 2): ("finished", "tool_calls"),
    ("length", "open", 2): ("cut", "length"),
    ("deadline", "open", 0): ("cut", "length"),
    ("repeated", "open", 0): ("cut", "length"),
    ("stop", "stop_string", 1): ("stopped", "stop"),
    ("length", "stop_string", 0): ("stopped", "stop"),
    ("stop", "call_limit", 1): ("stopped", "tool_calls"),
    ("length", "call_limit", 1): ("stopped", "tool_calls"),
    ("stop", "broken", 1): ("stopped", "length"),
    ("cancelled", "open", 0): ("left", "length"),
    ("cancelled", "stop_string", 0): ("left", "length"),
    ("failed", "call_limit", 1): ("failed", "length"),
}


@pytest.mark.parametrize(("told", "expected"), ENDINGS.items())
def test_an_ending_is_one_row_of_a_table(told, expected):
    reason, text_end, n_calls = told
    assert s.find_ending(reason, text_end, n_calls=n_calls) == expected


def is_replayed(kind="finished", *, content="Hi", has_calls=False, **fields):
    """A reply that the model ended after some text, but for these fields."""
    message = {"role": "assistant", "content": content}
    if has_calls:
        message["tool_calls"] = [{}]
    ordinary = {"has_end_token": True, "is_thinking": False, "ends_with_call": False}
    return s.can_be_replayed(kind, message, **{**ordinary, **fields})


def test_a_reply_that_the_model_ended_is_replayed():
    for fields in ({}, {"has_calls": True}, {"content": ""}):
        assert is_replayed(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"has_calls": True}, False),
        ({"content": ""}, False),
        ({"is_thinking": True, "content": ""}, False),
    ],
)
def test_a_reply_cut_at_a_limit_is_replayed_if_it_was_cut_in_its_text(fields, expected):
    assert is_replayed("cut", has_end_token=False, **fields) == expected


def test_a_reply_that_was_stopped_is_replayed_if_it_ended_with_its_only_call():
    fields = {"has_end_token": False, "has_calls": True}
    assert is_replayed("stopped", ends_with_call=True, **fields)
    assert not is_replayed("stopped", **fields)
    assert not is_replayed("stopped", has_end_token=False)  # at a stop string


# -- how a conversation is named -------------------------------------------------------


def title_of(*texts):
    """The title of a conversation whose user messages have these texts."""
    messages = [{"role": "system", "content": "You help."}]
    messages += [{"role": "user", "content": text} for text in texts]
    return s._find_title(SimpleNamespace(messages=messages, prompt=None))


def part(text):
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "agents_md", ["# AGENTS.md instructions for /home/me/p", "<x>"]
)
@pytest.mark.parametrize("wrap", [part, str])
def test_a_conversation_is_named_by_the_first_words_of_its_user(agents_md, wrap):
    own = "Why is the build slow?"

    assert title_of(wrap(agents_md), wrap("<environment_context>"), wrap(own)) == own
    assert title_of(wrap(agents_md)) == agents_md


def test_a_completion_is_named_by_its_prompt():
    assert s._find_title(SimpleNamespace(messages=[], prompt="Once")) == "Once"
    assert s._find_title(SimpleNamespace(messages=[], prompt=[1, 2])) == ""
