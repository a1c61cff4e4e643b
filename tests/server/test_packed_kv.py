"""KV_BITS: packed KV is the same whoever reads it, and takes as much less as promised.

The cold reference has no packed arrays: it rounds each number when it is written.
"""

import io

import httpx
import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from cold_reference import RoundedKVCache, Rounding
from drafting import counters, forced, make_eager
from engine_fixture import Bench, words
from mlx_lm import load
from mlx_lm.models import falcon_h1, gemma3n
from mlx_lm.models.cache import CacheList, make_prompt_cache
from nights import at_night
from numpy.testing import assert_allclose
from recurrent_families import FAMILIES
from server_fixture import Served, user
from test_engine import (
    at_once,
    branch_and_return,
    cancelled,
    edits_everywhere,
    one_more_token,
    staggered,
)
from tiny_models import DENSE, HYBRID, MLA, SLIDING, tiny_model

WIDE = {"head_dim": 64}  # of MLA 32 are rotated by their position: groups of 32
PACKINGS = [
    {"kv_bits": "8", "kv_group_size": "32"},
    {"kv_bits": "4"},
    {"kv_bits": "4", "kv_quant_scheme": "turboquant", "kv_group_size": "32"},
    {"kv_bits": "2.5", "kv_quant_scheme": "turboquant"},
]
# A window that has wrapped sums in another order, and MLA decodes by other sums than it
# prefills by. What then falls on the other side of a rounding is a step away.
TOLERANCE = {SLIDING: 1e-3, MLA: 5e-3}


def name_of(settings):
    return "-".join(settings.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", PACKINGS, ids=name_of)
@pytest.mark.parametrize(
    "scenario", [edits_everywhere, at_once], ids=lambda x: x.__name__
)
@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING, MLA])
def test_warm_logits_are_cold_logits_of_rounded_kv(bench, kind, scenario, settings):
    check_scenario(bench(kind, WIDE, **settings), kind, scenario)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "scenario",
    [branch_and_return, cancelled, *map(at_night, (one_more_token, staggered))],
    ids=lambda x: x.__name__,
)
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_all_that_happens_to_kv_happens_to_packed_kv(bench, kind, scenario):
    check_scenario(bench(kind, WIDE, kv_bits="8"), kind, scenario)


def check_scenario(b, kind, scenario):
    results = scenario(b, np.random.default_rng(7))
    worst = max(b.largest_difference(ticket, ids) for ticket, ids, _ in results)
    assert worst <= TOLERANCE.get(kind, 0.0)
    if len(results) > 1:
        assert any(end.cached_tokens for _, _, end in results), (
            "nothing was reused: this tested nothing"
        )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_numbers_far_from_zero_are_kept_as_finely_as_their_type_allows(dtype):
    """Keys may be about 10 and differ little: bfloat16 has steps of 1/16 there."""
    packing = s.choose_packing(s.Config(kv_bits="8"))
    keys = (mx.random.uniform(10, 11, (1, 2, 9, 64))).astype(dtype)
    packed = packing.pack(keys, packing.key_bits)
    kept = packing.unpack(*packed, bits=packing.key_bits, dtype=dtype)

    assert kept.dtype == dtype
    worst = mx.abs(kept.astype(mx.float32) - keys.astype(mx.float32)).max().item()
    assert worst <= (0.013 if dtype == mx.float16 else 0.07)


def test_layers_that_keep_a_list_stay_plain():
    """Each layer has a list: of recurrent state, and of KV."""
    fields = {**FAMILIES["falcon_h1"], "model_type": "falcon_h1", **WIDE}
    model = falcon_h1.Model(falcon_h1.ModelArgs.from_dict(fields))
    layers = make_prompt_cache(model)
    is_list = [isinstance(layer, CacheList) for layer in layers]
    assert any(is_list)

    s.pack_caches(model, s.choose_packing(s.Config(kv_bits="8")))
    packed = make_prompt_cache(model)

    for layer, of_list, plain in zip(packed, is_list, layers, strict=True):
        assert (type(layer) is s.PackedKVCache) == (type(plain) is s.KVCache)
        assert type(layer) is CacheList or not of_list
    for tokens in ([1, 2, 3], [4], [5]):
        logits = model(mx.array([tokens]), cache=packed)
    assert mx.isfinite(logits).all()


@pytest.mark.parametrize("kind", [at_night(DENSE), HYBRID])
def test_packed_kv_survives_a_restart(kind, tmp_path, monkeypatch, rng):
    path = tiny_model(kind, tmp_path, **WIDE)
    prompt = words(rng, 700)
    settings = {"kv_bits": "4", "cache_disk_folder": str(tmp_path / "kv")}

    def ask(tokens, **changes):
        b = Bench(path, monkeypatch, **{**settings, **changes})
        ids, end, ticket = b.ask(tokens, n=2)
        difference = b.largest_difference(ticket, ids)
        b.engine.stop()
        return end.cached_tokens, difference, ids

    *first, ids = ask(prompt)
    follow_up = prompt + ids + words(rng, 40)
    assert first == [0, 0.0]
    assert ask(follow_up, kv_bits="8")[:2] == (0, 0.0)
    assert ask(follow_up, kv_bits="off")[:2] == (0, 0.0)
    assert ask(follow_up)[:2] == (702, 0.0)


# -- graphs ------------------------------------------------------------------------------

FIELDS_OF_KV = ("keys", "values", "offset", "left_padding")


def dense_model(tmp_path):
    return load(str(tiny_model(DENSE, tmp_path, **WIDE)))[0]


def count_edges(caches):
    """Of the graph of all that these caches keep and that is still to be computed."""
    leaves = s.cache_leaves(caches)
    fields = [vars(leaf).get(name) for leaf in leaves for name in FIELDS_OF_KV]
    dot = io.StringIO()
    mx.export_to_dot(dot, *(field for field in fields if isinstance(field, mx.array)))
    return dot.getvalue().count("->")


@pytest.mark.parametrize("n_rows", [1, 2])
def test_no_graph_grows_with_the_steps_of_a_reply(tmp_path, n_rows):
    """A step asks for its logits alone: they have to need all that it has written."""
    model = dense_model(tmp_path)
    s.pack_caches(model, s.choose_packing(s.Config(kv_bits="8")))
    rows = [make_prompt_cache(model) for _ in range(n_rows)]
    for n_tokens, row in enumerate(rows, start=3):
        model(mx.ones((1, n_tokens), mx.int32), cache=row)
        s.evaluate_caches(row)
    caches = s.to_batch(*rows) if n_rows > 1 else rows[0]

    edges = []
    for _ in range(30):
        mx.eval(model(mx.ones((n_rows, 1), mx.int32), cache=caches))
        edges.append(count_edges(caches))

    assert edges[-1] == edges[5]


# -- with drafts -------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch):
    make_eager(monkeypatch, "copies")


DRAFT_PACKINGS = [
    {"kv_bits": "8"},
    {"kv_bits": "4", "kv_quant_scheme": "turboquant", "kv_group_size": "32"},
]


@pytest.mark.covering(1)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "settings", [*DRAFT_PACKINGS, at_night({"kv_bits": "4"})], ids=name_of
)
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_a_reply_of_packed_kv_is_the_same_with_drafts_and_without(
    bench, monkeypatch, kind, settings
):
    check_drafts(bench, monkeypatch, kind, settings)


def check_drafts(bench, monkeypatch, kind, settings):
    """Two turns, whose replies are the prompt's tokens or, at each place, another."""
    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    plain = bench(kind, WIDE, speculation="off", **settings)
    drafting = bench(kind, WIDE, **settings)
    rng = np.random.default_rng(4)
    prompt = words(rng, 60) * 3
    for _ in range(2):
        copy = forced(prompt[:60] * 2, n_others=1)
        expected, _, plain_ticket = plain.ask(prompt, n=100, constraints=(copy,))
        ids, _, ticket = drafting.ask(prompt, n=100, constraints=(copy,))
        assert ids == expected
        assert np.array_equal(drafting.seen[ticket], plain.seen[plain_ticket])

        prompt = prompt + ids + words(rng, 9)
        ids, end, ticket = drafting.ask(prompt, n=5)
        assert end.cached_tokens >= len(prompt) - 10
        assert drafting.largest_difference(ticket, ids) == 0.0
        plain.ask(prompt, n=5)
        prompt = prompt + ids + words(rng, 9)

    assert counters(drafting)["draft_tokens_accepted"] > 0


# -- layers that share KV ----------------------------------------------------------------

SHARING = {  # fields of gemma3n: the last two layers read what those before them keep
    "model_type": "gemma3n_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": [64] * 4,
    "num_attention_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "sliding_window": 32,
    "max_position_embeddings": 8192,
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 4,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}


@pytest.mark.parametrize("bits", ["4", at_night("8")])
def test_a_layer_that_shares_packed_kv_reads_it_unpacked(bits):
    mx.random.seed(1)
    model = gemma3n.Model(gemma3n.ModelArgs(model_type="gemma3n", text_config=SHARING))
    packing = s.choose_packing(s.Config(kv_bits=bits))
    rounding = Rounding(
        (packing.key_bits, packing.value_bits), group_size=64, is_rotated=False
    )
    rounded = [
        RoundedKVCache(rounding) if type(leaf) is s.KVCache else leaf
        for leaf in make_prompt_cache(model)
    ]
    s.pack_caches(model, packing)
    packed = make_prompt_cache(model)
    assert "PackedKVCache" in [type(leaf).__name__ for leaf in packed]

    for tokens in ([1, 2, 3, 4, 5], [6], [7, 8]):
        logits = model(mx.array([tokens]), cache=packed)
        expected = model(mx.array([tokens]), cache=rounded)
        assert mx.array_equal(logits, expected)


# -- read packed -------------------------------------------------------------------------


@pytest.fixture
def packed_reads(monkeypatch):
    """An item for each time that attention has multiplied by words: how many tokens it saw."""
    reads = []
    attend = s._attend_packed

    def noted(queries, keys, values, **fields):
        reads.append(keys[0].shape[-2])
        return attend(queries, keys, values, **fields)

    monkeypatch.setattr(s, "_attend_packed", noted)
    return reads


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", [*PACKINGS, {"kv_bits": "3.5"}], ids=name_of)
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_a_step_of_one_token_reads_kv_packed(
    bench, monkeypatch, packed_reads, kind, settings
):
    """As on a GPU; on the CPU nothing that was turned is read so."""
    monkeypatch.setattr(s, "_is_better_packed", lambda *_: True)
    tolerance = 5e-3 if "kv_quant_scheme" in settings else 0.0
    b = bench(kind, WIDE, **settings, speculation="off")
    prompt = words(np.random.default_rng(1), 100)
    b.ask(prompt, n=1)
    packed_reads.clear()
    ids, _, ticket = b.ask(prompt, n=9)

    assert set(range(102, 108)) <= set(packed_reads)
    assert b.largest_difference(ticket, ids) <= tolerance


@pytest.mark.parametrize(
    "scenario", [edits_everywhere, *map(at_night, (at_once, staggered, cancelled))]
)
def test_turned_kv_that_is_read_packed_is_the_same_but_for_rounding(
    bench, monkeypatch, packed_reads, scenario
):
    monkeypatch.setattr(s, "_is_better_packed", lambda *_: True)
    b = bench(DENSE, WIDE, kv_bits="4", kv_quant_scheme="turboquant")
    results = scenario(b, np.random.default_rng(7))

    assert packed_reads
    worst = max(b.largest_difference(ticket, ids) for ticket, ids, _ in results)
    assert worst <= 5e-3  # a rounding that falls on the other side is a step away


PADDED = (mx.arange(50)[None] >= mx.array([[0], [7], [49]]))[:, None, None]
FOR_EACH_HEAD = mx.arange(50) >= mx.arange(24).reshape(3, 8, 1, 1)


@pytest.mark.parametrize("mask", [None, PADDED, FOR_EACH_HEAD])
def test_heads_that_share_kv_and_padded_rows_read_it_packed(mask):
    """As upstream's function does it, which knows one width and no rotation."""
    packing = s.choose_packing(s.Config(kv_bits="8"))
    queries = mx.random.normal((3, 8, 1, 64))
    keys, values = (
        mx.quantize(mx.random.normal((3, 2, 50, 64)), group_size=64, bits=8)
        for _ in "kv"
    )
    fields = {"scale": 0.125, "mask": mask, "group_size": 64}
    seen = s._attend_packed(queries, keys, values, **fields, bits=packing)
    expected = mx.fast.scaled_dot_product_attention(
        queries,
        mx.dequantize(*keys, group_size=64, bits=8),
        mx.dequantize(*values, group_size=64, bits=8),
        scale=0.125,
        mask=mask,
    )

    assert_allclose(np.array(seen), np.array(expected), atol=1e-6)


@pytest.mark.parametrize(
    "n_tokens, mask", [(1, mx.zeros((1, 1, 1, 9))), (2, None), (2, "causal")]
)
def test_attention_of_packed_kv_refuses_what_it_would_read_wrongly(n_tokens, mask):
    """A mask that is added, and several tokens, of which none may see the next."""
    packing = s.choose_packing(s.Config(kv_bits="8"))
    array = mx.quantize(mx.random.normal((1, 2, 9, 64)), group_size=64, bits=8)
    queries = mx.zeros((1, 2, n_tokens, 64))

    with pytest.raises(AssertionError, match=r"to be hidden|to be added"):
        s._attend_packed(
            queries, array, array, scale=1.0, mask=mask, group_size=64, bits=packing
        )


def another_failure(*_args, **_kwargs):
    raise NotImplementedError("no kernel")


attend_packed = s._attend_packed


def only_the_last_token_is_seen(queries, *arrays, **fields):
    last = [tuple(part[..., -1:, :] for part in array) for array in arrays]
    return attend_packed(queries, *last, **fields)


@pytest.mark.parametrize("attention", [another_failure, only_the_last_token_is_seen])
def test_layers_that_read_otherwise_are_noticed_when_a_model_is_loaded(
    monkeypatch, tmp_path, caplog, attention
):
    caplog.set_level("INFO")
    packing = s.choose_packing(s.Config(kv_bits="8"))

    def pack():
        model, _ = load(str(tiny_model(DENSE, tmp_path, **WIDE)))
        s.pack_caches(model, packing)
        return model.make_cache.keywords["read_packed"]

    assert pack()
    assert "unpacked" not in caplog.text
    monkeypatch.setattr(s, "_attend_packed", attention)
    assert not pack()
    assert "so it is unpacked" in caplog.text


# -- planted faults ----------------------------------------------------------------------


def late_packing(monkeypatch):
    """As upstream does: what a slice has read is plain until the slice has ended."""
    update = s.PackedKVCache.update_and_fetch

    def late(leaf, keys, values):
        n_new = keys.shape[2]
        all_keys, all_values = update(leaf, keys, values)
        return (
            mx.concatenate([all_keys[..., :-n_new, :], keys], axis=2),
            mx.concatenate([all_values[..., :-n_new, :], values], axis=2),
        )

    monkeypatch.setattr(s.PackedKVCache, "update_and_fetch", late)


def groups_across_tokens(monkeypatch):
    pack = s.KVPacking.pack

    def across(packing, plain, bits):
        mean = plain.mean(axis=2, keepdims=True)
        return pack(packing, plain - mean + mean.astype(mx.bfloat16), bits)

    monkeypatch.setattr(s.KVPacking, "pack", across)


@pytest.mark.parametrize("fault", [late_packing, at_night(groups_across_tokens)])
def test_a_planted_fault_of_packing_is_noticed(bench, monkeypatch, fault):
    fault(monkeypatch)
    b = bench(DENSE, WIDE, kv_bits="8")
    with pytest.raises(AssertionError, match=r"assert .* <= 0.0"):
        check_scenario(b, DENSE, edits_everywhere)


# -- bytes -------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("bits, share", [("8", 0.54), ("4", 0.29), ("2.5", 0.21)])
@pytest.mark.parametrize("kind", [DENSE, HYBRID, MLA])
def test_packed_kv_takes_its_share_of_bfloat16(kind, bits, share, tmp_path):
    model, _ = load(str(tiny_model(kind, tmp_path, head_dim=128)))
    model.set_dtype(mx.bfloat16)
    plain = s.measure_kv(model)
    s.pack_caches(model, s.choose_packing(s.Config(kv_bits=bits)))
    packed = s.measure_kv(model)

    assert 0 < packed.token_bytes <= share * plain.token_bytes
    assert packed.state_bytes == plain.state_bytes
    if bits == "8":
        assert packed.token_bytes == plain.packed_token_bytes


@pytest.mark.parametrize(
    "size, kind, sentence",
    [
        ({}, "attention", "KV_BITS=8 packs nothing"),  # heads of 16 numbers
        (WIDE, "attention in 8 bits", "KV in 8 bits: 544 bytes a token"),
    ],
)
def test_heads_of_no_whole_groups_stay_plain(bench, caplog, size, kind, sentence):
    caplog.set_level("INFO")
    b = bench(DENSE, size, kv_bits="8")

    spec = b.engine.call(lambda scheduler: scheduler.spec)
    assert set(spec.layer_kinds) == {kind}
    assert sentence in caplog.text
    prompt = words(np.random.default_rng(1), 100)
    ids, _, ticket = b.ask(prompt)
    assert b.largest_difference(ticket, ids) == 0.0


def test_a_prompt_that_is_too_long_hears_what_kv_bits_makes_room_for(tmp_path):
    folder = tiny_model(DENSE, tmp_path, **WIDE)
    with Served(folder, memory_limit_bytes=12 << 20) as served:
        model = served.state.engine.model
        n_tokens = model.max_context_tokens
        n_packed = model.packed_context_tokens
        assert 3 * n_tokens < n_packed  # it computes in float32
        banner = s._write_banner(served.state)

        def refusal(n_words):
            url = f"{served._sdk.base_url}chat/completions"
            body = {"messages": [user("river " * n_words)]}
            return httpx.post(url, json=body, timeout=60).json()["error"]["message"]

        advice = (
            f"With KV_BITS=8 in its .env, this server has room for {n_packed} tokens."
        )
        assert advice in refusal(n_tokens + 100)
        assert "KV_BITS" not in refusal(n_packed + 100)
        assert f"{n_packed:,} tokens, with KV_BITS=8" in banner
