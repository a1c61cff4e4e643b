"""KEY: a block's name stands for every token before it, and for nothing else."""

import hashlib
import struct

import numpy as np
import start_llm as s
from hypothesis import given
from hypothesis import strategies as st

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
def test_hashes_are_the_chain_they_say(tokens, size, root):
    names = s.block_hashes(tokens, size, root=root)

    assert names == oracle(tokens, size, root)
    token_array = np.array(tokens, np.int32)
    assert names == s.block_hashes(token_array, size, root=root)
    assert len(names) == len(tokens) // size


@given(token_lists, sizes, st.integers(0, 80))
def test_a_chain_goes_on_where_it_was_left(tokens, size, cut):
    names = s.block_hashes(tokens, size, root=b"r")
    resumed = s.block_hashes(tokens, size, root=b"r", first_hashes=names[:cut])
    assert resumed == names
