"""UPSTREAM: mlx-lm and mlx-vlm are as the section reads them.

A new version that fails here must be read before the pin moves.
"""

import ast
import inspect
import itertools
import re
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import start_llm as s
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from read_layout import read_sections
from tiny_models import HYBRID

TESTS = Path(__file__).parents[1]
SOURCE = Path(s.__file__).read_text(encoding="utf-8")


def numbers(n, start=0):
    """Keys of n tokens, each its position."""
    positions = mx.arange(start, start + n, dtype=mx.float32)
    return positions.reshape(1, 1, n, 1)


def fill(leaf, n, start=0):
    keys = numbers(n, start)
    leaf.update_and_fetch(keys, -keys)
    mx.eval(leaf.keys, leaf.values)
    return leaf


# -- the section itself ----------------------------------------------------------------


def test_each_part_of_the_section_names_a_test_that_exists():
    after_its_start = SOURCE.partition("\n# region UPSTREAM ")[2]
    section = after_its_start.partition("\n# region ")[0]

    pins = re.findall(r"Pinned by (\w+\.py)(?:::(\w+))?", SOURCE)

    assert len(pins) > 20
    for file, test in pins:
        [path] = TESTS.rglob(file)
        text = path.read_text(encoding="utf-8")
        assert f"\ndef {test or 'test_'}" in text, (file, test)

    parts = re.findall(r"(?m)^(# Pinned .*\n)?(def|class) (\w+)", section)
    helpers = {"_add_image_block"}
    assert {name for pin, _, name in parts if not pin} == helpers


def test_no_other_section_uses_a_private_name_of_another_library():
    tree = ast.parse(SOURCE)
    ours = set(re.findall(r"\b(?:self|cls)\.(_\w+)|def (_\w+)|^    (_\w+):", SOURCE))
    ours = {name for names in ours for name in names if name}
    ours |= {"_replace", "_asdict", "_fields", "_exit", "_path"}
    ours |= {"_run_exitfuncs"}  # of Python's own atexit

    foreign = set()
    for section in read_sections(SOURCE, tree):
        if section.name == "UPSTREAM":
            continue
        for attribute in section.used_attributes():
            is_private = attribute.startswith("_") and not attribute.endswith("__")
            if is_private and attribute not in ours:
                foreign.add((section.name, attribute))

    assert foreign == set()


# -- 1 caches --------------------------------------------------------------------------


def test_cache_lists_contain_leaves():
    leaves = [KVCache(), ArraysCache(2), RotatingKVCache(8)]
    layers = [CacheList(leaves[0], leaves[1]), leaves[2]]

    for found, leaf in zip(s.cache_leaves(layers), leaves, strict=True):
        assert found is leaf


def test_attention_caches_keep_all_tokens():
    leaf = fill(KVCache(), 3)
    keys, values, offset = leaf.state

    assert keys is leaf.keys
    assert values is leaf.values
    assert offset == 3
    assert KVCache.step == s.BUFFER_STEP_TOKENS == leaf.keys.shape[2]
    assert s.leaf_kind(leaf).can_cut
    assert s.leaf_kind(BatchKVCache([0])).can_cut

    lookalikes = [
        RotatingKVCache(8),
        ChunkedKVCache(8),
        ArraysCache(2),
        BatchRotatingKVCache(8, [0]),
    ]
    for lookalike in lookalikes:
        assert not s.leaf_kind(lookalike).can_cut


def test_each_class_of_leaves_has_its_kind():
    for leaf in (RotatingKVCache(8), ChunkedKVCache(8), BatchRotatingKVCache(8, [0])):
        kind = s.leaf_kind(leaf)
        assert kind.name == "window"
        assert not kind.can_hold
        assert s.window_tokens(leaf) == 8

    merged = type(RotatingKVCache.merge([fill(RotatingKVCache(8), 3)]))
    assert s.LEAF_KINDS[merged].must_extract
    assert s.LEAF_KINDS[type(KVCache.merge([fill(KVCache(), 3)]))].can_cut

    class OwnCache(KVCache):
        """One that a model brings along."""

    kind = s.leaf_kind(OwnCache())
    assert kind.is_opaque
    assert not (kind.can_cut or kind.can_hold or kind.can_put_back)
    assert not any(known.is_opaque for known in s.LEAF_KINDS.values())


def test_recurrent_caches_are_lists_of_arrays():
    arrays = [mx.ones((1, 2)), mx.zeros((1, 3))]

    leaf = s.make_recurrent(arrays)

    assert type(leaf) is ArraysCache
    assert s.leaf_kind(leaf).can_hold
    assert leaf.cache is arrays
    assert leaf.state[0] is arrays
    assert leaf.state[1:] == (None, None)

    leaf[0] = mx.full((1, 2), 7.0)
    assert arrays[0].tolist() == [[7.0, 7.0]], "an item of the list is replaced"

    assert not s.leaf_kind(KVCache()).can_hold
    assert not s.leaf_kind(RotatingKVCache(8)).can_hold


def test_rows_of_a_batch_are_padded_at_their_beginning():
    short = fill(KVCache(), 3)
    long = fill(KVCache(), 5)

    batch = KVCache.merge([short, long])

    assert type(batch) is BatchKVCache
    assert s.first_slot(batch, row=0) == 2
    assert s.first_slot(batch, row=1) == 0
    assert batch.keys[0, 0, 2:5, 0].tolist() == [0, 1, 2]
    assert batch.offset.tolist() == [3, 5], "tokens of each row, padding not counted"
    assert s.first_slot(short, row=0) == 0


def test_windows_say_how_many_tokens_they_read():
    assert s.window_tokens(RotatingKVCache(8)) == 8
    assert s.window_tokens(ChunkedKVCache(16)) == 16
    assert s.window_tokens(ArraysCache(2)) == 0


@pytest.mark.parametrize("keep", [0, 4])
def test_a_window_is_no_longer_than_what_is_read_again(keep):
    leaf = RotatingKVCache(8, keep=keep)
    fill(leaf, 6)
    fill(leaf, 20, start=6)
    assert leaf.keys.shape[2] > 8

    s.drop_outside_window(leaf)

    expected = [*range(keep), *range(26 - (8 - keep), 26)]
    assert leaf.keys.reshape(-1).tolist() == expected
    assert leaf.offset == 26

    keys = leaf.keys
    s.drop_outside_window(leaf)
    assert leaf.keys is keys

    fill(leaf, 1, start=26)
    expected = [*expected[:keep], *expected[keep + 1 :], 26]
    assert sorted(leaf.keys.reshape(-1).tolist()) == expected


@pytest.mark.parametrize("keep", [0, 4])
def test_a_window_is_as_if_what_was_cut_off_had_not_been_fed(keep):
    """After a call of several tokens, of which the first stays; alone and as a batch."""

    def fetch(leaf, n, start):
        mask = leaf.make_mask(n)
        keys, values = leaf.update_and_fetch(numbers(n, start), -numbers(n, start))
        assert mx.array_equal(keys, -values)
        is_array = isinstance(mask, mx.array)
        seen = mask.tolist() if is_array and n > 1 else mask is None
        return sorted(keys.reshape(-1).tolist()), seen, np.array(leaf.offset).item()

    def begin(kind, n_before):
        leaf = kind(8, keep=keep) if kind is RotatingKVCache else kind(8, [0])
        if n_before:
            fetch(leaf, (n_before + 1) // 2, 0)
        for place in range((n_before + 1) // 2, n_before):
            fetch(leaf, 1, place)
        return leaf

    kinds = [RotatingKVCache, BatchRotatingKVCache][: 1 if keep else 2]
    calls = [(2, 1), (4, 1), (4, 3), (12, 1), (12, 6), (12, 11)]
    befores = (0, 1, 5, 6, 7, 8, 9, 23)
    for kind, n_before, (n, n_wrong) in itertools.product(kinds, befores, calls):
        end = n_before + n - n_wrong
        for n_next in (1, 3):
            cut, plain = begin(kind, n_before), begin(kind, n_before)
            fetch(cut, n, n_before)
            s.trim_leaf(cut, n_wrong)
            fetch(plain, n - n_wrong, n_before)
            for place in (end, end + n_next, end + 2 * n_next):
                assert fetch(cut, n_next, place) == fetch(plain, n_next, place)
            for place in range(end + 3 * n_next, end + 3 * n_next + 10):
                assert fetch(cut, 1, place) == fetch(plain, 1, place)
            s.drop_outside_window(cut)
            if kind is RotatingKVCache:
                assert cut.keys.shape[2] <= 8


def test_a_maximum_size_is_never_asked_for():
    """why(L-09): with one, upstream builds caches that forget in silence."""
    assert "max_kv_size" in inspect.signature(make_prompt_cache).parameters

    source = SOURCE.partition("# region UPSTREAM")[2]
    source = source.replace("config.max_kv_size", "")
    assert "max_kv_size" not in source


# -- 2 calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("n_read", [(0, 0, 0, 0), (9, 20, 0, 13)])
def test_rows_that_are_read_together_have_the_kv_of_each_alone(folder, n_read):
    model = mlx_lm.load(str(folder))[0]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(10, 300, n).tolist() for n in (31, 40, 17, 40)]

    rows = [make_prompt_cache(model) for _ in prompts]
    rests = []
    for prompt, cache, n in zip(prompts, rows, n_read, strict=True):
        if n:
            model(mx.array([prompt[:n]]), cache=cache)
        rests.append(prompt[n:])
    joint_caches = s.to_batch(*rows)
    s.feed_padded(model, rests, joint_caches)

    assert s.row_offsets(joint_caches).tolist() == list(map(len, prompts))
    for row, prompt in enumerate(prompts):
        alone = make_prompt_cache(model)
        model(mx.array([prompt]), cache=alone)
        joint_span = s.copy_span(joint_caches, len(prompt), row=row)
        alone_span = s.copy_span(alone, len(prompt), row=0)
        for joint, single in zip(joint_span.arrays, alone_span.arrays, strict=True):
            assert np.array_equal(np.array(joint), np.array(single))


# -- 3 tokenizer -----------------------------------------------------------------------


def test_a_tokenizer_is_told_to_keep_no_words(folder):
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    ids = tokenizer.encode("No word of this is kept.")
    s.keep_no_words(tokenizer)
    assert tokenizer.encode("No word of this is kept.") == ids


@pytest.mark.parametrize("tag", s.REPLY_TAGS)
def test_a_tag_that_is_set_is_read_by_the_property(folder, tag):
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    ids = tuple(tokenizer.encode("<|im_start|>[x]", add_special_tokens=False))

    setattr(tokenizer, f"_{tag}", "<|im_start|>[x]")
    setattr(tokenizer, f"_{tag}_tokens", ids)

    assert getattr(tokenizer, tag) == "<|im_start|>[x]"
    assert getattr(tokenizer, f"{tag}_tokens") == ids


def test_a_tool_parser_is_a_function_of_a_module(folder):
    tokenizer = mlx_lm.utils.load_tokenizer(folder)

    source = inspect.getsource(sys.modules[tokenizer.tool_parser.__module__])
    assert "def parse_tool_call" in source
    assert tokenizer.tool_call_start in source
    tokenizer._tool_parser = None
    assert tokenizer.tool_parser is None


# -- 4 vision --------------------------------------------------------------------------


@pytest.mark.parametrize("n_cached", [0, 5])
def test_the_tokens_of_an_image_see_each_other(n_cached):
    from mlx_vlm.models.gemma4.language import Gemma4TextModel

    name = "_apply_blockwise_bidirectional_overlay"
    parameters = inspect.signature(getattr(Gemma4TextModel, name)).parameters
    assert list(parameters) == ["self", "base_mask", "mm_token_type_ids"]

    n = 6
    image = range(2, 5)
    flags = [int(position in image) for position in range(n)]
    rows = np.arange(n)[:, None] + n_cached
    causal = rows >= np.arange(n_cached + n)[None]

    mask = s._add_image_block(mx.array(causal), mx.array([flags]))
    mask = np.array(mask)[0, 0]

    for row in range(n):
        for column in range(n_cached + n):
            are_of_image = row in image and column - n_cached in image
            assert mask[row, column] == (causal[row, column] or are_of_image)


def gemma3n():
    """mlx-vlm's layers of Gemma 3n: the last two share the KV of those before them."""
    from mlx_vlm.models.gemma3n.config import TextConfig
    from mlx_vlm.models.gemma3n.language import LanguageModel

    mx.random.seed(1)
    return LanguageModel(TextConfig(**GEMMA3N, query_pre_attn_scalar=1.0))


GEMMA3N = {
    "model_type": "gemma3n", "hidden_size": 64, "num_hidden_layers": 4,
    "intermediate_size": [64] * 4, "num_attention_heads": 2, "head_dim": 64,
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "laurel_rank": 8,
    "num_key_value_heads": 1, "hidden_size_per_layer_input": 16,
    "sliding_window": 32, "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize("bits", ["off", "8"])
def test_a_layer_that_reads_the_state_of_a_cache_is_refused(bits):
    model = gemma3n()
    own_caches = model.make_cache()
    model.make_cache = lambda: s.to_mlx_lm_caches(own_caches)
    s.pack_caches(model, s.choose_packing(s.Config(kv_bits=bits)))
    caches = model.make_cache()
    s.seal_state(caches)

    with pytest.raises(ValueError, match="read the state of caches"):
        model(mx.array([[1, 2]]), cache=caches)


# -- CUDA ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_read", [2, 64, 200])
def test_gated_delta_layers_read_chunks_as_they_read_tokens(
    monkeypatch, models, n_read
):
    """Outputs and state after a prompt, and those of a token after it."""
    monkeypatch.setattr(gated_delta, "gated_delta_ops", gated_delta.gated_delta_ops)
    model = mlx_lm.load(str(models(HYBRID)))[0]
    tokens = mx.array([[*range(1, n_read), 7, 8]]) % 90

    def read():
        caches = make_prompt_cache(model)
        outputs = model(tokens[:, :-1], cache=caches)
        last = model(tokens[:, -1:], cache=caches)
        mx.eval(outputs, last)
        return outputs, last

    one_by_one = read()
    s.read_gated_delta_in_chunks()
    chunks = []
    read_chunks = gated_delta.gated_delta_ops
    monkeypatch.setattr(
        gated_delta,
        "gated_delta_ops",
        lambda *args: chunks.append(args[0].shape[1]) or read_chunks(*args),
    )
    chunked = read()

    assert set(chunks) == {n_read, 1}
    for expected, found in zip(one_by_one, chunked, strict=True):
        difference = mx.abs(expected - found).max().item()
        assert difference <= 1e-4 * mx.abs(expected).max().item()
