"""scripts/helpers/count_kv.py: what is counted before loading is what the server measures."""

import json

import choose_model
import mlx.core as mx
import pytest
import recurrent_families
import start_llm as s
import tiny_families
from artifacts import artifact
from count_kv import build_model, count_kv_bytes
from mlx.utils import tree_flatten, tree_map
from tiny_models import KINDS

MIB = 2**20
# (bytes of each token, bytes of each conversation) as others have published or printed them.
PUBLISHED = {
    "qwen3_5-27b": (65_536, 153_944_064),
    "qwen3_5_moe-35b-a3b": (20_480, 64_389_120),
    "gemma4-26b-a4b": (20_480, 209_715_200),
    "gemma4-e4b": (16_384, 20_971_520),
    "gpt_oss-20b": (24_576, 3_145_728),
}
MLA_LAYERS = 47
GLM_FLASH = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": MLA_LAYERS,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def measure(model):
    spec = s.measure_kv(model)
    return spec.token_bytes, spec.state_bytes


def dtype_of(model):
    weights = [array for _, array in tree_flatten(model.parameters())]
    return next(array.dtype for array in weights if array.dtype != mx.uint32)


def read_config(name):
    return json.loads(artifact("configs", f"{name}.json").read_bytes())


def with_weights(facts):
    model = build_model(facts)
    model.update(tree_map(lambda array: array * 0.01, model.parameters()))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_counted_is_what_the_server_measures(kind, models):
    folder = models(kind)
    model = s.mlx_lm.load(str(folder))[0]
    facts = json.loads((folder / "config.json").read_bytes())

    assert count_kv_bytes(facts, dtype_of(model)) == measure(model)


@pytest.mark.parametrize("kind", recurrent_families.FAMILIES)
def test_so_it_is_of_families_with_recurrent_layers(kind):
    facts = {"model_type": kind, **recurrent_families.FAMILIES[kind]}

    assert count_kv_bytes(facts, mx.float32) == measure(with_weights(facts))


@pytest.mark.parametrize("kind", sorted({*tiny_families.FAMILIES} - {"qwen4_exp"}))
def test_so_it_is_of_models_that_see_images(kind, tmp_path_factory):
    folder = tiny_families.tiny_family(kind, tmp_path_factory.getbasetemp())
    model = s.load_model(folder, s.Config(model_kind="vision")).model
    facts = json.loads((folder / "config.json").read_bytes())

    assert count_kv_bytes(facts, mx.float32) == measure(model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_of_published_models_are_those_that_others_print(name):
    assert count_kv_bytes(read_config(name)) == PUBLISHED[name]


def test_latent_attention_keeps_one_vector_a_token():
    assert count_kv_bytes(GLM_FLASH) == (MLA_LAYERS * (512 + 64) * 2, 0)


def test_nothing_of_a_large_model_is_computed():
    mx.reset_peak_memory()
    n_before = mx.get_active_memory()

    count_kv_bytes(read_config("qwen3_5-27b"))

    # Of weights that come from a file MLX subtracts what it has not added: modulo 2**64.
    assert (mx.get_peak_memory() - n_before) % 2**64 < 200 * MIB


def test_models_that_only_mlx_vlm_has_are_counted():
    facts = {
        "model_type": "cohere2_moe",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    }
    layer_bytes = 2 * 2 * 16 * 2  # keys and values, heads, width, bytes

    assert count_kv_bytes(facts) == (layer_bytes, 3 * 32 * layer_bytes)


def test_the_list_has_the_bytes_of_its_models():
    """Those without a config.json here are of a family that has one."""
    qwen_27b = read_config("qwen3_5-27b")
    of_9b = {"num_hidden_layers": 32, "linear_num_value_heads": 32}
    qwen_9b = {**qwen_27b, "text_config": {**qwen_27b["text_config"], **of_9b}}
    qwen_9b["text_config"]["layer_types"] = ["linear_attention"] * 32
    counted = {
        "Qwen3.8-27B": qwen_27b,
        "Qwen3.5-9B": qwen_9b,
        "Qwen3.5-4B": qwen_9b,
        "Qwen3.6-35B": read_config("qwen3_5_moe-35b-a3b"),
        "gemma-4-26b": read_config("gemma4-26b-a4b"),
        "gemma-4-E4B": read_config("gemma4-e4b"),
        "gpt-oss-20b": read_config("gpt_oss-20b"),
    }

    for model in (*choose_model.FIRST_CHOICES, *choose_model.SECOND_CHOICES):
        if model.name == "mlx-community/Qwen3-1.7B-4bit":
            assert model.kv == (2 * 28 * 8 * 128 * 2, 0)  # 28 layers of 8 heads
            continue
        [facts] = [
            facts for name, facts in counted.items() if f"/{name}-" in model.name
        ]
        assert count_kv_bytes(facts) == model.kv, model.name
