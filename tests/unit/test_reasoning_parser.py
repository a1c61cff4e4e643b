"""SPLIT: any chunking of any reply gives the same texts, and a tag is never one of them."""

import re
from collections import Counter

import pytest
import start_llm as s
from call_formats import TOOLS, cut, format_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import examples

TAGS = s.Tags(think_start="<think>", think_end="</think>", tool_start="<tool_call>")
CALL = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
SNIPPETS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<thin", "</", "<", ">", "<tool_call",
    "\n", "\n\n", " ", "\t", "a", "word", "é😀", "\u3000", "<b>", "k>", "think>",
]  # fmt: skip
REPLIES = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4), max_size=12).map(
    "".join
)


def open_reader(*, in_reasoning: bool = False, tags: s.Tags = TAGS) -> s.ReplyReader:
    ids = map("call_{}".format, range(99))
    return s.ReplyReader(
        tags, format_of("hermes"), in_reasoning=in_reasoning, tools=TOOLS, ids=ids
    )


def texts_of(deltas: list[dict]) -> list[tuple[str, str]]:
    """The kind of each text and the text; "call" and the name of a call."""
    texts = []
    for delta in deltas:
        for field, kind in (("reasoning_content", "reasoning"), ("content", "content")):
            if field in delta:
                texts.append((kind, delta[field]))
        functions = [call["function"] for call in delta.get("tool_calls", ())]
        texts += [("call", each["name"]) for each in functions if "name" in each]
    return texts


def split(
    chunks: list[str],
    *,
    in_reasoning: bool = False,
    tags: s.Tags = TAGS,
    tag: str | None = None,
) -> dict[str, str]:
    """The texts by kind."""
    reader = open_reader(in_reasoning=in_reasoning, tags=tags)
    deltas = [delta for chunk in chunks for delta in reader.feed(chunk, tag=tag)]
    found = texts_of(deltas + reader.finish())
    assert all(text for _, text in found)

    texts = {"reasoning": "", "content": "", "call": ""}
    for kind, text in found:
        texts[kind] += text
    return texts


def content(text: str, **how: bool) -> str:
    return split([text], **how)["content"]


def reasoning(text: str, **how: bool) -> str:
    return split([text], **how)["reasoning"]


@given(REPLIES, st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_any_chunking_gives_the_same_texts(
    text: str, cuts: list[int], opened: bool
) -> None:
    expected = split([text], in_reasoning=opened)
    assert split(cut(text, cuts), in_reasoning=opened) == expected
    assert split(list(text), in_reasoning=opened) == expected


@given(REPLIES, st.booleans())
def test_a_tag_is_never_text(text: str, opened: bool) -> None:
    text = text.replace("<tool_call>", "")
    reader = open_reader(in_reasoning=opened)
    texts = {"reasoning": "", "content": ""}

    for kind, part in texts_of(reader.feed(text) + reader.finish()):
        assert kind == "content" or not re.search("</?think>", part)
        # A tag that is spoken of stands within a line: after a thought, a quote, a blank
        # or another such tag.
        for tag in re.finditer("</?think>", part):
            text_before = texts["content"] + part[: tag.start()]
            line = text_before.rpartition("\n")[2]
            assert line.strip()
            if tag[0] == "</think>":
                assert "<think>" in texts["content"] + part
            else:
                is_after_word = re.search(r"(?:[`'\"\s]|</?think>)\Z", line)
                assert texts["reasoning"] or is_after_word
        texts[kind] += part


@given(REPLIES, st.booleans())
def test_nothing_but_tags_and_white_space_is_lost(text: str, opened: bool) -> None:
    spoken = text.partition("<tool_call>")[0]
    kinds = split([spoken], in_reasoning=opened)

    lost = Counter("".join(spoken.split()))
    lost.subtract("".join((kinds["reasoning"] + kinds["content"]).split()))
    n_closing = lost["/"]
    n_opening = lost["<"] - n_closing

    assert 0 <= n_opening <= spoken.count("<think>")
    assert 0 <= n_closing <= spoken.count("</think>")
    assert lost == Counter("<think>" * n_opening + "</think>" * n_closing)


@given(REPLIES, st.integers(0, 60))
def test_what_left_before_a_cut_is_what_leaves_without_it(text: str, end: int) -> None:
    early = {"reasoning": "", "content": "", "call": ""}
    for kind, part in texts_of(open_reader().feed(text[:end])):
        early[kind] += part
    late = split([text])
    assert all(late[kind].startswith(early[kind]) for kind in early)


@pytest.mark.parametrize(
    ("text", "opened", "thought", "content"),
    [
        ("plain", False, "", "plain"),
        ("<think>\nwhy\n</think>\n\nanswer", False, "why", "answer"),  # Qwen3
        ("why\n</think>\n\nanswer", True, "why", "answer"),  # Qwen3.5: the prompt opened it
        ("\nwhy</think>answer", True, "why", "answer"),  # GLM
        ("<think>\nwhy\n</think>\n\nanswer", True, "why", "answer"),  # opened twice
        ("some\n</think>\nanswer", False, "", "some\nanswer"),  # an orphan closing tag
        ("<think>\n\n</think>\n\nanswer", False, "", "answer"),
        ("\n<think>why", False, "why", ""),  # cut off while thinking
        ("<think>why\n", False, "why\n", ""),
        ("<think>a\n\nb </think> x", False, "a\n\nb", " x"),
        # Only line breaks are the tag's.
        ("</think>\n\n    indented", True, "", "    indented"),
        ("one<think>two</think>\n\nthree", False, "two", "one\n\nthree"),
        ("why</think>in `<think>` and </think>, so", True, "why", "in `<think>` and </think>, so"),
        ("why</think>one\n<think>two x</think>three", True, "whytwo x", "one\nthree"),
        # A budget ended the thought; the model goes on and ends it, too.
        ("2 and</think> 2 make 4.</think>\nIt is 4.", True, "2 and", " 2 make 4.\nIt is 4."),
        ("  kept \n", False, "", "  kept \n"),  # no tag: as generated
        ("done\n<think>", False, "", "done"),
        ("half <thi", False, "", "half <thi"),  # it was no tag after all
        ("why</thi", True, "why</thi", ""),
        ("", True, "", ""),
    ],
)  # fmt: skip
def test_real_shapes_of_replies(
    text: str, opened: bool, thought: str, content: str
) -> None:
    texts = split(list(text), in_reasoning=opened)
    assert (texts["reasoning"], texts["content"]) == (thought, content)


@given(REPLIES, st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=examples(50))
def test_text_without_tag_tokens_is_literal(text: str, cuts: list[int]) -> None:
    texts = split(cut(text, cuts), tag="")
    assert texts == {"reasoning": "", "content": text, "call": ""}


def test_literal_text_ends_what_might_have_become_a_tag() -> None:
    reader = open_reader()
    assert texts_of(reader.feed("a<thi")) == [("content", "a")]
    assert texts_of(reader.feed("nk>", tag="")) == [("content", "<think>")]
    assert texts_of(reader.feed("<think>b")) == [("reasoning", "b")]


def test_what_may_belong_to_a_tag_is_held_back_until_it_is_certain() -> None:
    """The example in the banner of the section."""
    reader = open_reader()
    assert texts_of(reader.feed("I look.\n")) == [("content", "I look.")]
    assert reader.feed("\n<tool") == []
    assert texts_of(reader.feed("box>")) == [("content", "\n\n<toolbox>")]


@given(st.text(" \n", min_size=90, max_size=120), st.integers(0, 120))
def test_no_more_than_a_page_of_white_space_is_held_back(
    space: str, place: int
) -> None:
    """A model that prints line breaks without end: each chunk searched all of them."""
    reply = f"One.{space}<think>Why</think>Two."
    texts = texts_of(open_reader().feed(f"One.{space * 9}"))

    assert len("".join(text for _, text in texts)) > 7 * len(space)
    assert split(cut(reply, [place])) == split(list(reply)) == split([reply])


def test_a_block_of_code_may_contain_the_fences_of_another() -> None:
    """Only the fence that opened a block closes it."""
    for fence, inner in (("````", "```"), ("~~~", "```"), ("```", "~~~")):
        example = f"{fence}md\n{inner}\n</think>\n{inner}\n<think>\n{fence}\n"
        reply = f"So:\n{example}Done."
        assert content(reply) == reply
        assert (
            content(f"So:\n{fence}\n{fence}\n<think>\nWhy") == f"So:\n{fence}\n{fence}"
        )


def test_a_model_without_tags_has_only_content() -> None:
    assert content("<think>a</think>") == "" == reasoning("b")
    plain = split(["<think>a</think>", "<tool_call>"], tags=s.Tags())
    assert plain["content"] == "<think>a</think><tool_call>"


def test_a_header_without_its_start_tag_ends_thinking() -> None:
    tags = s.Tags(think_end=s.think_tag_pattern("<|end|>"))
    reply = "Why?assistant<|channel|>final<|message|>Hi"
    for chunks in ([reply], list(reply)):
        texts = split(chunks, in_reasoning=True, tags=tags)
        assert (texts["reasoning"], texts["content"]) == ("Why?", "Hi")


def test_without_tools_a_call_of_harmony_is_the_answer() -> None:
    tags = s.Tags(
        think_start=s.think_tag_pattern("<|channel|>analysis<|message|>"),
        think_end=s.think_tag_pattern("<|end|>"),
    )
    call = '<|channel|>commentary to=functions.rm json<|message|>{"a": 1}'
    assert split([call], tags=tags)["content"] == '{"a": 1}'


def test_the_word_thought_begins_thinking_without_a_token() -> None:
    tags = s.Tags(
        think_start=s.think_tag_pattern("<|channel>thought"),
        think_end=s.think_tag_pattern("<channel|>"),
    )
    reader = open_reader(tags=tags)
    deltas = reader.feed("thought\nWhy?", tag="")
    deltas += reader.feed("<channel|>Hi") + reader.finish()
    assert texts_of(deltas) == [("reasoning", "Why?"), ("content", "Hi")]


def test_an_inline_span_begins_no_block_and_a_language_ends_none() -> None:
    assert reasoning("```foo``` is short.\n<think>a</think>b") == "a"
    assert reasoning("```md\n```python\n<think>a</think>b") == ""


def test_only_the_line_after_a_fenced_call_ends_its_block() -> None:
    """The model wrote no line that closes the block around its call."""
    example = "\nSo:\n```\na\n```\nDone."
    for after_call, content in ((example, example), ("\n```\nDone.", "\n\nDone.")):
        for chunks in ([after_call], list(after_call)):
            texts = split([f"Look:\n```json\n{CALL}", *chunks])
            assert texts["content"] == f"Look:{content}"


def test_words_around_a_thought_stay_apart() -> None:
    texts = split(list("One.\n<think>Why\n</think>Two.\n<think>Still</think>\n\nSix."))
    assert texts["content"] == "One.\nTwo.\n\nSix."
    assert texts["reasoning"] == "Why\nStill"
