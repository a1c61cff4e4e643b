"""Copies of caches of any class: whole, counted in bytes, and apart from one another."""

import gc
import math
from collections import OrderedDict, deque

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_vlm.models import cache as mlx_vlm_cache
from mlx_vlm.models.deepseek_v41.language import DeepseekV41Cache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache
from mlx_vlm.models.z1t.language import Z1TCache


def numbers(*shape, start=0):
    return mx.arange(start, start + int(np.prod(shape)), dtype=mx.float32).reshape(
        shape
    )


def write_kv(leaf, n, start):
    keys = numbers(1, 2, n, 64, start=start)
    leaf.update_and_fetch(keys, -keys)


def write_indexed(leaf, n, start):
    write_kv(leaf, n, start)
    leaf.update_indexer(numbers(1, n, 8, start=start), mx.arange(n)[None] + start)
    leaf.index_block_keys = numbers(1, max(1, n // 4), 8, start=start)
    leaf.index_block_ratio = 4


def write_second_index(leaf, n, start):
    write_kv(leaf, n, start)
    leaf.update_index_and_fetch(numbers(1, 1, n, 8, start=start))


def write_pool(leaf, n, start):
    tokens = numbers(1, n, 8, start=start)
    entries, _, _ = leaf.accumulate_windows(tokens, -tokens, start)
    leaf.update_and_fetch(entries[:, :: leaf.ratio])


def write_deepseek_layer(leaf, n, start):
    leaf.update_window(numbers(1, n, 8, start=start))
    leaf.pending_kv = numbers(1, 1, 8, start=start)


def write_deepseek(leaf, n, start):
    for layer in range(leaf.n_layers):
        leaf.window[layer] = numbers(1, n, 8, start=start + layer)
        leaf.compress_kv = leaf.append_compressed(layer, numbers(1, n, 8, start=start))
    leaf.advance(n)


def write_sums(leaf, n, start):
    leaf.cum_eKV = numbers(1, n, 8, start=start)
    leaf.offset += n


# A leaf of each class that models have beside those of LEAF_KINDS, and what writes into it.
CLASSES = {
    "QSAKVCache": (QSAKVCache, write_indexed),
    "MiniMaxM3KVCache": (MiniMaxM3KVCache, write_second_index),
    "HyV4KVCache": (HyV4KVCache, write_kv),
    "PoolingCache": (lambda: mlx_vlm_cache.PoolingCache(4), write_pool),
    "OverlappingPool": (lambda: s._overlapping_pool_class()(4), write_pool),
    "LayerCache": (lambda: LayerCache(4), write_deepseek_layer),
    "DeepseekV41Cache": (lambda: DeepseekV41Cache(2), write_deepseek),
    "RingSlidingKVCache": (lambda: RingSlidingKVCache(4), write_kv),
    "Z1TCache": (Z1TCache, write_sums),
    "mlx-vlm's KVCache": (mlx_vlm_cache.KVCache, write_kv),
    "mlx-vlm's RotatingKVCache": (lambda: mlx_vlm_cache.RotatingKVCache(max_size=8), write_kv),
    "QuantizedKVCache": (mlx_lm_cache.QuantizedKVCache, write_kv),
}  # fmt: skip


def bits(value):
    """All that a leaf, or a part of it, consists of, as bytes and plain values."""
    if isinstance(value, mx.array):
        return value.dtype, tuple(value.shape), np.array(value).tobytes()
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [bits(part) for part in value]
    if hasattr(value, "__dict__") and not callable(value):
        return bits(vars(value))
    return value


@pytest.mark.parametrize("name", CLASSES)
def test_copies_are_whole_and_no_write_is_seen_in_another(name):
    make, write = CLASSES[name]
    running = make()
    assert s.leaf_kind(running).is_opaque
    for n, start in ((9, 0), (1, 9), (3, 10)):
        write(running, n, start)
    checkpoint = s.copy_state([running])
    as_copied = bits(vars(running))

    first, second = make(), make()
    for leaf in (first, second):
        s.restore_state([leaf], checkpoint)
        assert bits(vars(leaf)) == as_copied

    write(running, 1, 100)
    write(first, 1, 200)
    as_first = bits(vars(first))
    assert as_first != as_copied
    assert bits(vars(second)) == as_copied
    write(second, 3, 300)
    assert bits(vars(first)) == as_first
    third = make()
    s.restore_state([third], checkpoint)
    assert bits(vars(third)) == as_copied


def test_what_a_fresh_leaf_has_beside_the_copy_is_gone():
    leaf = QSAKVCache()
    write_indexed(leaf, 9, 0)
    used = QSAKVCache()
    write_indexed(used, 5, 0)
    used.index_rest = numbers(3)

    s.restore_state([used], s.copy_state([leaf]))

    assert bits(vars(used)) == bits(vars(leaf))


def test_a_copy_keeps_no_buffer_that_its_arrays_are_views_of():
    gc.collect()
    before_bytes = mx.get_active_memory()
    leaf = QSAKVCache()
    large = mx.zeros((1, 1 << 20, 8))
    leaf.index_keys = large[:, :16]
    mx.eval(leaf.index_keys)
    checkpoint = s.copy_state([leaf])
    assert checkpoint.nbytes == 16 * 8 * 4
    del large, leaf
    gc.collect()
    assert mx.get_active_memory() - before_bytes < 1 << 20


def test_a_state_of_plain_values_comes_back_from_a_file():
    make, write = CLASSES["QSAKVCache"]
    leaf = make()
    write(leaf, 9, 0)
    leaf.flags = {"a": True, 3: (1.5, None, [numbers(2)])}
    (state,) = s.copy_state([leaf]).leaves
    assert s.can_write_state([state])

    written = {}
    described = s._state_to_json([state], "state.9", written)
    arrays = {name: mx.array(np.array(array)) for name, array in written.items()}
    (read_back,) = s._state_from_json(described, arrays)

    assert bits(read_back.fields) == bits(state.fields)
    assert read_back.nbytes == state.nbytes
    flags = read_back.fields["flags"]
    assert flags["a"] is True
    assert [type(flags[3]), type(flags[3][2])] == [tuple, list]


@pytest.mark.parametrize("name", ["MiniMaxM3KVCache"])
def test_a_state_with_objects_is_not_written(name):
    make, write = CLASSES[name]
    leaf = make()
    write(leaf, 9, 0)
    assert not s.can_write_state(list(s.copy_state([leaf]).leaves))


@pytest.mark.parametrize("part", [math.inf, math.nan, OrderedDict(a=1)], ids=repr)
def test_a_state_that_json_would_change_is_not_written(part):
    """Of infinity it makes null, and a dict of each kind of dict."""
    assert not s.can_write_state([part])
