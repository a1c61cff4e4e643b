"""Notes: states of recurrent layers from inside a call, and what a layer must be like for them."""

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_bench import Bench, words
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load
from mlx_lm.models import mamba2
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny_model

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 50}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
EPS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": (
        SIZE
        | {"num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4, "n_groups": 1}
        | {"layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True}
        | {"tie_word_embeddings": True, "time_step_limit": (0.001, 10.0), "time_step_rank": 2}
    ),
    "lfm2": (
        SIZE
        | ATTENTION
        | {"norm_eps": 1e-5, "conv_bias": False, "max_position_embeddings": 512, "conv_L_cache": 3}
        | {"block_dim": 32, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0}
        | {"block_auto_adjust_ff_dim": False, "block_ff_dim": 64, "full_attn_idxs": [1, 3]}
    ),
    "falcon_h1": (
        SIZE
        | ATTENTION
        | {"head_dim": 16, "mamba_d_ssm": 32, "mamba_d_head": 16, "mamba_n_heads": 2}
        | {"mamba_d_state": 8, "mamba_expand": 1}
    ),
    "jamba": (
        SIZE
        | ATTENTION
        | EPS
        | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1}
        | {"expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2}
        | {"num_experts": 2, "num_experts_per_tok": 1}
    ),
    "granitemoehybrid": (
        SIZE
        | ATTENTION
        | EPS
        | {"attention_bias": False, "embedding_multiplier": 1.0, "attention_multiplier": 0.25}
        | {"logits_scaling": 1.0, "residual_multiplier": 1.0, "shared_intermediate_size": 64}
        | {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 16}
        | {"mamba_proj_bias": False, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_groups": 1}
        | {"mamba_conv_bias": True}
    ),
    "olmo_hybrid": (
        SIZE
        | ATTENTION
        | EPS
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "attention_bias": False}
        | {"linear_allow_neg_eigval": True, "tie_word_embeddings": False}
    ),
    "rwkv7": (
        SIZE
        | {"norm_eps": 1e-5, "head_dim": 16, "a_low_rank_dim": 4, "v_low_rank_dim": 4}
        | {"gate_low_rank_dim": 4, "decay_low_rank_dim": 4}
    ),
    "recurrent_gemma": (
        SIZE
        | ATTENTION
        | {"attention_bias": False, "logits_soft_cap": 30.0, "rms_norm_eps": 1e-5}
        | {"rope_theta": 10_000.0, "attention_window_size": 16}
        | {"block_types": ["recurrent", "attention"], "conv1d_width": 4}
    ),
}
# Their recurrent layers have one cache for two; or hand out its parts.
REFUSED = ("rwkv7", "recurrent_gemma")
MAMBA_2 = ("mamba2", "granitemoehybrid", "falcon_h1")


def made(family: str) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": family, **FAMILIES[family]}))
    mx.random.seed(3)
    small = tree_map(lambda p: 0.3 * mx.random.normal(p.shape), model.parameters())
    model.update(small)
    mx.eval(model.parameters())
    return model


def states(snapshot: s.StateSnapshot) -> list[np.ndarray]:
    return [np.array(x) for _, x in tree_flatten(snapshot.leaves) if isinstance(x, mx.array)]


def check_notes(model: Any, *, within: float = 0.0) -> None:
    """Noted states are those of a run that ends there, and nothing else is another."""
    rng = np.random.default_rng(5)
    tokens = mx.array(rng.integers(10, 50, (1, 40)))
    plain, noted = make_prompt_cache(model), make_prompt_cache(model)
    expected = model(tokens, cache=plain)
    ends = sorted(rng.choice(np.arange(1, 40), 5, replace=False).tolist())
    s.note_states(noted, ends)
    assert mx.abs(model(tokens, cache=noted) - expected).max() <= within
    notes = s.noted_states(noted)
    assert len(notes) == len(ends) + 1
    for end, note in zip([*ends, 40], notes, strict=True):
        short = make_prompt_cache(model)
        model(tokens[:, :end], cache=short)
        for ours, theirs in zip(states(note), states(s.snapshot_state(short)), strict=True):
            assert np.abs(ours - theirs).max() <= within
    assert s.noted_states(noted) == []
    assert mx.abs(model(tokens, cache=noted) - model(tokens, cache=plain)).max() <= within


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in REFUSED])
def test_states_inside_a_call_are_those_of_a_call_that_ends_there(family: str) -> None:
    model = made(family)
    assert s.measure_kv(model).can_note
    # upstream computes Mamba 2 in blocks of the tokens that it is given
    check_notes(model, within=1e-4 if family in MAMBA_2 else 0.0)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_so_are_those_of_the_models_that_people_use(kind: str, tmp_path_factory: Any) -> None:
    model = load(str(tiny_model(kind, tmp_path_factory.getbasetemp())))[0]
    assert s.measure_kv(model).can_note
    check_notes(model)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_is_left_as_it_was(family: str) -> None:
    model = made(family)
    before, tokens = [type(layer) for layer in model.modules()], mx.array([[1, 2, 3]])
    logits = model(tokens, cache=make_prompt_cache(model))
    shape = s.measure_kv(model)
    assert shape.has_state and not shape.can_note
    assert [type(layer) for layer in model.modules()] == before
    cache = make_prompt_cache(model)
    s.note_states(cache, [1])
    assert (model(tokens, cache=cache) == logits).all()
    assert s.noted_states(cache) == []


def test_layers_whose_notes_are_wrong_are_refused() -> None:
    class Forgetful(mamba2.Mamba2Block):
        """Remembers the last call elsewhere than in its cache, so halves are not the whole."""

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            out = super().__call__(x, mask, cache)
            self.calls = getattr(self, "calls", 0) + 1
            cache[1] = cache[1] * self.calls
            return out

    model = made("mamba2")
    for layer in model.layers:
        layer.mixer.__class__ = Forgetful
    assert not s.measure_kv(model).can_note
    assert {type(layer.mixer) for layer in model.layers} == {Forgetful}


def test_a_chunk_of_local_attention_counts_as_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4's: it is measured behind two tokens, and a snapshot holds up to a chunk of them."""
    text: dict[str, Any] = SIZE | ATTENTION | {"head_dim": 16}
    text |= {"attention_bias": False, "attention_chunk_size": 512, "rope_theta": 1e4}
    text |= {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 64, "rms_norm_eps": 1e-5}
    text |= {"num_experts_per_tok": 1, "num_local_experts": 2, "use_qk_norm": True}
    text |= {"max_position_embeddings": 4096, "model_type": "llama4_text", "rope_scaling": None}
    monkeypatch.setitem(FAMILIES, "llama4", {"text_config": text})
    model = made("llama4")
    cache, tokens = make_prompt_cache(model), mx.zeros((1, 256), mx.int32)
    for _ in range(4):
        model(tokens, cache=cache)
        s.evaluate(cache)
    assert s.snapshot_state(cache).nbytes <= 1.6 * s.measure_kv(model).state_bytes


def test_boundaries_cost_no_call_of_the_model_and_are_gone_on_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    bench = Bench(tiny_model("qwen3_5", tmp_path_factory.getbasetemp()), monkeypatch)
    rng = np.random.default_rng(2)
    past, cuts = words(rng, 400), [90, 200, 330, 360, 395]
    bench.ask(past, n=1, boundaries=cuts)
    assert [len(call.tokens) for call in bench.model.fed][-3:-1] == [399, 1]  # then a step too many
    for cut in cuts:
        ids, end, ticket = bench.ask([*past[:cut], *words(rng, 12)], boundaries=[cut])
        assert end.cached == cut
        assert bench.worst(ticket, ids) == 0.0
    bench.engine.stop()
