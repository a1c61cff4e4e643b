"""SPLIT: any chunking of any reply gives the same texts, and a tag is never one of them."""

import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from start_llm import (
    Piece,
    ReasoningStreamSplitter,
    Tags,
    think_tag_pattern,
)

TAGS = Tags(think_start="<think>", think_end="</think>", tool_start="<tool_call>")
TAGGED = {
    "reasoning": ("<think>", "</think>", "<tool_call>"),
    "content": ("<tool_call>",),
}
SNIPPETS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<thin", "</", "<", ">", "<tool_call",
    "\n", "\n\n", " ", "\t", "a", "word", "é😀", "\u3000", "<b>", "k>", "think>",
]  # fmt: skip
REPLIES = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4), max_size=12).map(
    "".join
)


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def split(
    chunks: list[str],
    *,
    in_reasoning: bool = False,
    tags: Tags = TAGS,
    literal: bool = False,
) -> dict[str, str]:
    """The texts by kind."""
    splitter = ReasoningStreamSplitter(tags, in_reasoning=in_reasoning)
    pieces = [
        piece for chunk in chunks for piece in splitter.feed(chunk, literal=literal)
    ]
    pieces += splitter.finish()
    assert all(piece.text for piece in pieces)

    texts = {"reasoning": "", "content": "", "tool": ""}
    for piece in pieces:
        texts[piece.kind] += piece.text
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
    assert split(chunked(text, cuts), in_reasoning=opened) == expected
    assert split(list(text), in_reasoning=opened) == expected


@given(REPLIES, st.booleans())
def test_a_tag_is_never_text(text: str, opened: bool) -> None:
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=opened)
    texts = {"reasoning": "", "content": ""}

    for piece in splitter.feed(text) + splitter.finish():
        if piece.kind == "tool":
            assert piece.text.lstrip().startswith("<tool_call>")
            continue
        assert not any(tag in piece.text for tag in TAGGED[piece.kind])
        # A tag that is spoken of stands within a line: after a thought, a quote, a blank
        # or another such tag.
        for tag in re.finditer("</?think>", piece.text):
            text_before = texts["content"] + piece.text[: tag.start()]
            line = text_before.rpartition("\n")[2]
            assert line.strip()
            if tag[0] == "</think>":
                assert "<think>" in texts["content"] + piece.text
            else:
                is_after_word = re.search(r"(?:[`'\"\s]|</?think>)\Z", line)
                assert texts["reasoning"] or is_after_word
        texts[piece.kind] += piece.text


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
def test_what_left_before_a_cut_is_what_leaves_without_it(text: str, cut: int) -> None:
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
    early = {"reasoning": "", "content": "", "tool": ""}
    for piece in splitter.feed(text[:cut]):
        early[piece.kind] += piece.text
    late = split([text])
    assert all(late[kind].startswith(early[kind]) for kind in early)


@pytest.mark.parametrize(
    ("text", "opened", "thought", "content"),
    [
        ("plain", False, "", "plain"),
        ("<think>\nwhy\n</think>\n\nanswer", False, "why", "answer"),  # Qwen3
        (
            "why\n</think>\n\nanswer",
            True,
            "why",
            "answer",
        ),  # Qwen3.5: the prompt opened it
        ("\nwhy</think>answer", True, "why", "answer"),  # GLM
        ("<think>\nwhy\n</think>\n\nanswer", True, "why", "answer"),  # opened twice
        ("some\n</think>\nanswer", False, "", "some\nanswer"),  # an orphan closing tag
        ("<think>\n\n</think>\n\nanswer", False, "", "answer"),
        ("\n<think>why", False, "why", ""),  # cut off while thinking
        ("<think>why\n", False, "why\n", ""),
        ("<think>a\n\nb </think> x", False, "a\n\nb", " x"),
        (
            "</think>\n\n    indented",
            True,
            "",
            "    indented",
        ),  # only line breaks are the tag's
        ("one<think>two</think>\n\nthree", False, "two", "one\n\nthree"),
        (
            "why</think>in `<think>` and </think>, so",
            True,
            "why",
            "in `<think>` and </think>, so",
        ),
        ("why</think>one\n<think>two x</think>three", True, "whytwo x", "one\nthree"),
        # A budget ended the thought; the model goes on and ends it, too.
        (
            "2 and</think> 2 make 4.</think>\nIt is 4.",
            True,
            "2 and",
            " 2 make 4.\nIt is 4.",
        ),
        ("  kept \n", False, "", "  kept \n"),  # no tag: as generated
        ("done\n<think>", False, "", "done"),
        ("half <thi", False, "", "half <thi"),  # it was no tag after all
        ("why</thi", True, "why</thi", ""),
        ("", True, "", ""),
    ],
)
def test_real_shapes_of_replies(
    text: str, opened: bool, thought: str, content: str
) -> None:
    texts = split(list(text), in_reasoning=opened)
    assert (texts["reasoning"], texts["content"]) == (thought, content)


def test_a_call_takes_the_white_space_before_it_and_all_that_follows() -> None:
    pieces = ReasoningStreamSplitter(TAGS, in_reasoning=False).feed(
        "I look.\n\n<tool_call>x"
    )
    assert pieces == [Piece("content", "I look."), Piece("tool", "\n\n<tool_call>x")]


def test_a_call_inside_an_unclosed_think_block_closes_it() -> None:
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=True)
    assert splitter.is_thinking
    assert splitter.feed("hm\n<tool_call>c") == [
        Piece("reasoning", "hm"), Piece("tool", "\n<tool_call>c"),
    ]  # fmt: skip
    assert splitter.in_call and not splitter.is_thinking
    assert splitter.feed("</think>") == [
        Piece("tool", "</think>")
    ]  # the call's own text
    assert splitter.resume("\n\ndone", called=True) == [Piece("content", "done")]
    assert not splitter.is_thinking


def test_what_only_looked_like_a_call_leaves_the_reply_where_it_was() -> None:
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=True)
    (_, call) = splitter.feed("say <tool_call> to call")
    pieces = splitter.add_text(call.text[: -len(" to call")])
    assert pieces == [Piece("reasoning", " <tool_call>")]
    assert splitter.resume(" to call", called=False) == [Piece("reasoning", " to call")]
    assert splitter.feed("</think>ok") == [Piece("content", "ok")]


def test_text_around_calls_is_as_generated_and_calls_alone_have_no_content() -> None:
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
    assert [p.kind for p in splitter.feed("\n\n<tool_call>")] == ["tool"]
    assert [p.kind for p in splitter.resume("\n<tool_call>", called=True)] == ["tool"]
    assert splitter.resume("\n\n", called=True) == [] == splitter.finish()

    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
    splitter.feed("before \n<tool_call>")
    assert splitter.resume("\nafter", called=True) == [Piece("content", "\nafter")]


@given(REPLIES, st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=50)
def test_text_without_tag_tokens_is_literal(text: str, cuts: list[int]) -> None:
    texts = split(chunked(text, cuts), literal=True)
    assert texts == {"reasoning": "", "content": text, "tool": ""}


def test_literal_text_ends_what_might_have_become_a_tag() -> None:
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
    assert splitter.feed("a<thi") == [Piece("content", "a")]
    assert splitter.feed("nk>", literal=True) == [Piece("content", "<think>")]
    assert splitter.feed("<think>b") == [Piece("reasoning", "b")]


def test_what_may_belong_to_a_tag_is_held_back_until_it_is_certain() -> None:
    """The example in the banner of the section."""
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
    assert splitter.feed("I look.\n") == [Piece("content", "I look.")]
    assert splitter.feed("\n<tool") == []
    assert splitter.feed("box>") == [Piece("content", "\n\n<toolbox>")]


@given(st.text(" \n", min_size=90, max_size=120), st.integers(0, 120))
def test_no_more_than_a_page_of_white_space_is_held_back(space: str, cut: int) -> None:
    """A model that prints line breaks without end: each chunk searched all of them."""
    reply = f"One.{space}<think>Why</think>Two."
    splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
    pieces = splitter.feed(f"One.{space * 9}")

    assert len("".join(piece.text for piece in pieces)) > 7 * len(space)
    assert split(chunked(reply, [cut])) == split(list(reply)) == split([reply])


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
    assert content("<think>a</think><tool_call>") == "" == reasoning("b")
    plain = split(["<think>a</think>", "<tool_call>"], tags=Tags())
    assert plain["content"] == "<think>a</think><tool_call>"


def test_tags_of_other_models() -> None:
    tags = Tags(
        think_start=re.escape("<|channel>thought"),
        think_end=re.escape("<channel|>"),
        tool_start=re.escape("<|tool_call>"),
    )
    texts = split(
        list("<|channel>thought\nwhy<channel|>ok<|tool_call>call:f{}"), tags=tags
    )

    assert texts == {
        "reasoning": "why",
        "content": "ok",
        "tool": "<|tool_call>call:f{}",
    }


def test_a_header_without_its_start_tag_ends_thinking() -> None:
    tags = Tags(think_end=think_tag_pattern("<|end|>"))
    reply = "Why?assistant<|channel|>final<|message|>Hi"
    for chunks in ([reply], list(reply)):
        texts = split(chunks, in_reasoning=True, tags=tags)
        assert (texts["reasoning"], texts["content"]) == ("Why?", "Hi")


def test_the_word_thought_begins_thinking_without_a_token() -> None:
    tags = Tags(
        think_start=think_tag_pattern("<|channel>thought"),
        think_end=think_tag_pattern("<channel|>"),
    )
    splitter = ReasoningStreamSplitter(tags, in_reasoning=False)
    pieces = splitter.feed("thought\nWhy?", literal=True)
    pieces += splitter.feed("<channel|>Hi") + splitter.finish()
    assert pieces == [Piece("reasoning", "Why?"), Piece("content", "Hi")]


def test_an_inline_span_begins_no_block_and_a_language_ends_none() -> None:
    assert reasoning("```foo``` is short.\n<think>a</think>b") == "a"
    assert reasoning("```md\n```python\n<think>a</think>b") == ""


def test_only_the_line_after_a_fenced_call_ends_its_block() -> None:
    """The model wrote no line that closes the block around its call."""
    example = "\nSo:\n```\na\n```\nDone."
    for after_call, content in ((example, example), ("\n```\nDone.", "\n\nDone.")):
        for chunks in ([after_call], list(after_call)):
            splitter = ReasoningStreamSplitter(TAGS, in_reasoning=False)
            splitter.feed("Look:\n```json\n<tool_call>x")
            pieces = splitter.resume("", called=True)
            for chunk in chunks:
                pieces += splitter.feed(chunk)
            pieces += splitter.finish()
            assert "".join(piece.text for piece in pieces) == content


def test_words_around_a_thought_stay_apart() -> None:
    texts = split(list("One.\n<think>Why\n</think>Two.\n<think>Still</think>\n\nSix."))
    assert texts["content"] == "One.\nTwo.\n\nSix."
    assert texts["reasoning"] == "Why\nStill"
