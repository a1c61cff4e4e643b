"""KEY: a block's name stands for every token before it, and for nothing else."""

import hashlib
import struct

import numpy as np
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
def test_hashes_are_the_chain_they_say(
    tokens: list[int], size: int, root: bytes
) -> None:
    names = start_llm.block_hashes(tokens, size, root=root)
    assert names == oracle(tokens, size, root)
    assert names == start_llm.block_hashes(np.array(tokens, np.int32), size, root=root)
    assert len(names) == len(tokens) // size


@given(tokens=token_lists, size=sizes, cut=st.integers(0, 80))
def test_a_chain_goes_on_where_it_was_left(
    tokens: list[int], size: int, cut: int
) -> None:
    names = start_llm.block_hashes(tokens, size, root=b"r")
    assert (
        start_llm.block_hashes(tokens, size, root=b"r", first_hashes=names[:cut])
        == names
    )


@given(tokens=token_lists.filter(bool), size=sizes, data=st.data())
def test_one_other_token_renames_all_blocks_from_there(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    names, others = (
        start_llm.block_hashes(t, size, root=b"r") for t in (tokens, other)
    )
    same = [a == b for a, b in zip(names, others, strict=True)]
    assert same == [i < at // size for i in range(len(names))]


def test_roots_keep_worlds_apart() -> None:
    tokens = list(range(64))
    first, second = (
        start_llm.block_hashes(tokens, 16, root=root) for root in (b"a", b"b")
    )
    assert not set(first) & set(second)
