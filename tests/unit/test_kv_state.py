"""KV: what is copied is independent, what is moved is not copied."""

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache


def kv_leaf(n_tokens, start=0):
    leaf = KVCache()
    values = mx.arange(start, start + n_tokens, dtype=mx.float32).reshape(
        1, 1, n_tokens, 1
    )
    leaf.update_and_fetch(values, -values)
    mx.eval(leaf.keys, leaf.values)
    return leaf


def tokens_of(array, n):
    return array.reshape(-1)[:n].tolist()


def recurrent_leaf(value):
    leaf = ArraysCache(size=2)
    leaf[0] = mx.full((1, 3), value)
    leaf[1] = mx.full((1, 2, 2), value)
    return leaf


def window_leaf(n_tokens, window=8):
    leaf = RotatingKVCache(max_size=window)
    for t in range(n_tokens):
        x = mx.full((1, 1, 1, 1), float(t))
        leaf.update_and_fetch(x, -x)
    mx.eval(leaf.keys, leaf.values)
    return leaf


def contents(leaf):
    arrays = []
    for _, part in tree_flatten(leaf.state):
        if isinstance(part, mx.array):
            arrays.append(np.array(part).tolist())
    return arrays


@pytest.mark.parametrize("make", [lambda: recurrent_leaf(1.0), lambda: window_leaf(20)])
def test_a_snapshot_survives_what_happens_to_the_cache_and_to_its_restored_copies(make):
    cache = [kv_leaf(20), make()]
    snapshot = s.copy_state(cache)
    expected = contents(cache[1])

    def restored():
        twin = [kv_leaf(20), make()]
        s.restore_state(twin, snapshot)
        assert contents(twin[1]) == expected
        return twin

    for twin in (cache, restored(), restored()):
        change(twin[1])
        s.evaluate_caches(twin)
        assert contents(twin[1]) != expected
        restored()


def change(leaf):
    if isinstance(leaf, RotatingKVCache):
        x = mx.full((1, 1, 1, 1), 900.0)
        leaf.update_and_fetch(x, x)
    else:
        leaf[0] = mx.full((1, 3), 900.0)


def test_a_cut_is_a_copy_and_a_join_continues_it():
    cache = [kv_leaf(600), kv_leaf(600)]
    span = s.take_span(cache, 600)
    head = span.cut(0, 300)
    tail = span.cut(300, 600)
    tail_keys = tail.arrays[0]

    joined = head.join(tail)

    tokens = list(range(600))
    all_keys = joined.arrays[::2]
    all_values = joined.arrays[1::2]
    for keys, values in zip(all_keys, all_values, strict=True):
        assert tokens_of(keys, 600) == tokens
        assert tokens_of(-values, 600) == tokens

    joined.arrays[0][..., 0:5, :] = 77
    assert tokens_of(span.arrays[0], 600) == tokens
    assert tokens_of(tail_keys, 300) == tokens[300:]


def test_joining_many_parts_never_holds_them_twice():
    parts = [s.take_span([kv_leaf(8_000) for _ in range(8)], 8_000) for _ in range(10)]
    n_bytes_before = mx.get_active_memory()
    mx.reset_peak_memory()

    joined = parts[0].join(*parts[1:])

    n_bytes_more = mx.get_peak_memory() - n_bytes_before
    assert n_bytes_more < joined.nbytes / 4
    assert tokens_of(joined.arrays[0], 80_000) == 10 * list(range(8_000))


def test_taking_and_lending_moves_the_buffers():
    cache = [kv_leaf(5000)]
    n_bytes = mx.get_active_memory()

    span = s.take_span(cache, 5000)
    lent = [KVCache()]
    s.load_span(lent, span)

    assert mx.get_active_memory() == n_bytes
    assert lent[0].offset == 5000
    assert s.kv_cache_offset(lent, recorded=0) == 5000


def test_taking_a_span_notices_layers_at_different_depths():
    with pytest.raises(AssertionError, match="disagree on depth"):
        s.take_span([kv_leaf(10), kv_leaf(9)], 10)


def test_the_offset_comes_from_the_first_layer_that_has_one():
    recurrent = recurrent_leaf(1.0)
    nested = CacheList(recurrent, kv_leaf(9))

    assert s.kv_cache_offset([recurrent, kv_leaf(7)], recorded=0) == 7
    assert s.kv_cache_offset([nested], recorded=0) == 9
    assert s.kv_cache_offset([recurrent], recorded=5) == 5


def test_a_batch_has_no_single_offset():
    batch = s.to_batch([kv_leaf(5)])

    with pytest.raises(AssertionError, match="several rows"):
        s.kv_cache_offset(batch, recorded=4)


def test_a_row_of_a_batch_is_its_own():
    lengths = (5, 9, 7)
    rows = [[kv_leaf(n), recurrent_leaf(float(n))] for n in lengths]
    batch = s.to_batch(rows[0])
    for row in rows[1:]:
        for layer, layer_of_row in zip(batch, s.to_batch(row), strict=True):
            layer.extend(layer_of_row)

    for index, n in enumerate(lengths):
        recurrent = contents(recurrent_leaf(float(n)))
        tokens = list(range(n))

        keys, values = s.copy_span(batch, n - 1, row=index).arrays
        assert tokens_of(keys, n - 1) == tokens[:-1]
        assert tokens_of(-values, n - 1) == tokens[:-1]

        attention, state = s.extract_row(batch, index)
        assert tokens_of(attention.keys, n) == tokens
        assert attention.offset == n
        assert contents(state) == recurrent

        held = s.hold_recurrent_state(batch)
        (leaf_state,) = s.copy_state(held, row=index).leaves
        assert [np.array(array).tolist() for array in leaf_state[0]] == recurrent


@pytest.mark.parametrize("make", [recurrent_leaf, window_leaf])
def test_the_state_of_a_row_of_a_batch_is_that_of_the_row_alone(make):
    lengths = (5, 30, 7)
    rows = [[kv_leaf(n), make(n)] for n in lengths]
    batch = s.to_batch(rows[0])
    for row in rows[1:]:
        for layer, other in zip(batch, s.to_batch(row), strict=True):
            layer.extend(other)
    for row in range(len(lengths)):
        alone = s.copy_state(s.extract_row(batch, row))
        state = s.copy_state(batch, row=row)
        assert state.nbytes == alone.nbytes
        arrays = zip(
            s._arrays_in(state.leaves), s._arrays_in(alone.leaves), strict=True
        )
        assert all(mx.array_equal(one, other) for one, other in arrays)


def test_models_with_a_window_have_no_free_step_back():
    assert s.hold_recurrent_state([kv_leaf(3), window_leaf(3)]) is None
    assert s.hold_recurrent_state([kv_leaf(3)]) is None
