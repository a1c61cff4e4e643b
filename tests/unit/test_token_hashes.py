"""KEY: a block's name stands for every token before it, and for nothing else."""

import hashlib
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from start_llm import block_hashes

Tokens = list[int]

token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=80)
sizes = st.integers(1, 20)


def oracle(tokens: Tokens, size: int, root: bytes) -> list[bytes]:
    names = []
    name = root
    n_blocks = len(tokens) // size
    for block in range(n_blocks):
        digest = hashlib.sha256(name)
        start = block * size
        for token in tokens[start : start + size]:
            digest.update(struct.pack("<i", token))
        name = digest.digest()
        names.append(name)
    return names


@given(token_lists, sizes, st.binary(max_size=40))
def test_hashes_are_the_chain_they_say(tokens: Tokens, size: int, root: bytes) -> None:
    names = block_hashes(tokens, size, root=root)

    assert names == oracle(tokens, size, root)
    token_array = np.array(tokens, np.int32)
    assert names == block_hashes(token_array, size, root=root)
    assert len(names) == len(tokens) // size


@given(token_lists, sizes, st.integers(0, 80))
def test_a_chain_goes_on_where_it_was_left(tokens: Tokens, size: int, cut: int) -> None:
    names = block_hashes(tokens, size, root=b"r")
    resumed = block_hashes(tokens, size, root=b"r", first_hashes=names[:cut])
    assert resumed == names


@given(token_lists.filter(bool), sizes, st.data())
def test_one_other_token_renames_all_blocks_from_there(
    tokens: Tokens, size: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[index] ^= 1

    names = block_hashes(tokens, size, root=b"r")
    changed_names = block_hashes(changed, size, root=b"r")

    first_changed = index // size
    assert changed_names[:first_changed] == names[:first_changed]
    assert len(changed_names) == len(names)
    for block in range(first_changed, len(names)):
        assert changed_names[block] != names[block]


def test_roots_keep_worlds_apart() -> None:
    tokens = list(range(64))
    first = block_hashes(tokens, 16, root=b"a")
    second = block_hashes(tokens, 16, root=b"b")
    assert not set(first) & set(second)
