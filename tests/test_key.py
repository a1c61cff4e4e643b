"""KEY: a block's name stands for every token before it, and for nothing else."""

import hashlib
import struct

import numpy as np
import pytest
import start_llm
from hypothesis import given
from hypothesis import strategies as st

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=80)
sizes = st.integers(1, 20)


def oracle(tokens: list[int], size: int, root: bytes) -> list[bytes]:
    names, name = [], root
    for at in range(0, len(tokens) - size + 1, size):
        block = b"".join(struct.pack("<i", token) for token in tokens[at : at + size])
        name = hashlib.sha256(name + block).digest()
        names.append(name)
    return names


@given(tokens=token_lists, size=sizes, root=st.binary(max_size=40))
def test_hashes_are_the_chain_they_say(tokens: list[int], size: int, root: bytes) -> None:
    names = start_llm._block_hashes(tokens, size, root=root)
    assert names == oracle(tokens, size, root)
    assert names == start_llm._block_hashes(np.array(tokens, np.int32), size, root=root)
    assert len(names) == len(tokens) // size


@given(tokens=token_lists, size=sizes, cut=st.integers(0, 80))
def test_a_chain_goes_on_where_it_was_left(tokens: list[int], size: int, cut: int) -> None:
    names = start_llm._block_hashes(tokens, size, root=b"r")
    assert start_llm._block_hashes(tokens, size, root=b"r", known=names[:cut]) == names


@given(tokens=token_lists.filter(bool), size=sizes, data=st.data())
def test_one_other_token_renames_all_blocks_from_there(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    names, others = (start_llm._block_hashes(t, size, root=b"r") for t in (tokens, other))
    same = [a == b for a, b in zip(names, others, strict=True)]
    assert same == [i < at // size for i in range(len(names))]


def test_roots_keep_worlds_apart() -> None:
    tokens = list(range(64))
    first, second = (start_llm._block_hashes(tokens, 16, root=root) for root in (b"a", b"b"))
    assert not set(first) & set(second)


BILLING = "x-anthropic-billing-header: cc_version=2.1.121.dd4; cc_entrypoint=sdk-cli; cch=b8926;"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\nCurrent time is Fri 09:03.\nb", "a\nCurrent time is __STABLE_TIME__\nb"),
        ("a cch=b8926; b", "a cch=__STABLE_CCH__; b"),
        (f"a\n{BILLING}\nb", "a\nb"),
        (f"say {BILLING}", "say " + BILLING.replace("b8926", "__STABLE_CCH__")),
        ("a<system-reminder>\nx\n\ny</system-reminder>b", "ab"),
        ("a<system-reminder>x\n\ntext\n<|im_end|>", "a<system-reminder>x\n\ntext\n<|im_end|>"),
        (
            "<system-reminder> is a tag <system-reminder>x</system-reminder>",
            "<system-reminder> is a tag ",
        ),
        ("current times, cch=xyz; cch=12", "current times, cch=xyz; cch=12"),
    ],
)
def test_scrub(text: str, wanted: str) -> None:
    assert start_llm._scrub_cache_key(text) == wanted


LINES = [
    "Current time is 9",
    "a cch=ab; b",
    BILLING,
    f" {BILLING}",
    "words",
    "</system-reminder>",
    "",
]
line_lists = st.lists(st.sampled_from(LINES), max_size=12).map(
    lambda lines: "\n".join(lines) + "\n"
)


@given(line_lists)
def test_rules_stay_inside_their_line(text: str) -> None:
    by_line = [start_llm._scrub_cache_key(line) for line in text.splitlines(keepends=True)]
    assert start_llm._scrub_cache_key(text) == "".join(by_line)
    assert start_llm._scrub_cache_key("".join(by_line)) == "".join(by_line)


@given(before=line_lists, inside=line_lists, after=line_lists)
def test_a_reminder_takes_nothing_along(before: str, inside: str, after: str) -> None:
    inside = inside.replace("</system-reminder>", "")
    text = f"{before}<system-reminder>{inside}</system-reminder>\n{after}"
    kept = f"{start_llm._scrub_cache_key(before)}\n{start_llm._scrub_cache_key(after)}"
    assert start_llm._scrub_cache_key(text) == kept
    unclosed = f"{before}<system-reminder>\n{inside}"
    parts = [before, "<system-reminder>\n", inside]
    assert start_llm._scrub_cache_key(unclosed) == "".join(map(start_llm._scrub_cache_key, parts))


def test_two_turns_of_a_client_scrub_to_one_text() -> None:
    first, second = (
        f"{BILLING.replace('b8926', cch)}\nYou are.\nCurrent time is {time}\nDo it."
        for cch, time in (("b8926", "09:03"), ("0c1d2", "09:04"))
    )
    assert start_llm._scrub_cache_key(first) == start_llm._scrub_cache_key(second)
    other = second.replace("Do it", "Do that")
    assert start_llm._scrub_cache_key(first) != start_llm._scrub_cache_key(other)


@pytest.mark.parametrize(("kept", "is_safe"), [(100, True), (90, True), (89, False), (0, False)])
def test_safety_is_nine_tenths(kept: int, is_safe: bool) -> None:
    assert start_llm._assert_cache_key_safety("k" * kept, "m" * 100) is is_safe
