"""Tiny random models with caches of their own kind: the structure of real config.json files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_families import TOKENIZER_CONFIG, Family, make_tokenizer, randomize
from tiny_models import load_script

Body = dict[str, Any]
HYBRID_LAYERS = ["linear_attention"] * 3
SMALL_EXPERTS: Body = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: Body = {
    "hidden_size": 64,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
}

# Qwen3.8-Flash-Next; a budget of eight groups of tokens is spent after 32 tokens.
QWEN4_EXP: Body = {
    "model_type": "qwen4_exp",
    "tie_word_embeddings": False,
    "text_config": {
        **SHARED,
        **SMALL_EXPERTS,
        "model_type": "qwen4_exp_text",
        "num_hidden_layers": 4,
        "layer_types": [*HYBRID_LAYERS, "full_attention"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "hc_count": 4,
        "hc_lowrank": 16,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "ngram_size": 3,
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "split_ngram_parts": 4,
        "make_ngram_vocab_size_divisible_by": 4,
        "seed": 1234,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "output_gate_type": "sigmoid",
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
            "rope_theta": 10_000,
            "rope_type": "default",
        },
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [],
    },
}

# GLM-5.3-Flash.
GLM5_NEXT: Body = {
    "model_type": "glm5_next",
    "tie_word_embeddings": False,
    "text_config": {
        **SHARED,
        **SMALL_EXPERTS,
        "model_type": "glm5_next_text",
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "qk_head_dim": 16,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 32,
        "indexer_types": ["full"] * 4,
        "indexer_rope_interleave": True,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [0, 1, 2],
            "full_attn_layers": [3],
        },
        "layer_types": [*HYBRID_LAYERS, "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
        "first_k_dense_replace": 3,
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
    },
    "vision_config": {
        "model_type": "glm5_next_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "projection_intermediate_size": 64,
        "swiglu_limit": 10.0,
    },
}

# DeepSeek-V4-Flash: windows, and entries of 4 and of 128 tokens.
DEEPSEEK_V4: Body = {
    **SHARED,
    **SMALL_EXPERTS,
    "model_type": "deepseek_v4",
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "head_dim": 32,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "sliding_window": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "hc_mult": 4,
}

# North-Mini-Code: windows and attention, which mlx-lm has caches for, but no model.
COHERE2_MOE: Body = {
    **SHARED,
    "model_type": "cohere2_moe",
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "sliding_window": 32,
    "sliding_window_pattern": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 64,
    "logit_scale": 1.0,
}


@dataclass(frozen=True)
class OpaqueFamily:
    """A config.json without a vocabulary, and what its logits may differ by."""

    config: Body
    tolerance: float
    is_opaque: bool = True
    scale: float = 0.3  # of random weights


# Steps sum in another order than prefills, where windows or latent attention decode.
FAMILIES: dict[str, OpaqueFamily] = {
    "qwen4_exp": OpaqueFamily(QWEN4_EXP, 0.0),
    "glm5_next": OpaqueFamily(GLM5_NEXT, 1e-5),
    "deepseek_v4": OpaqueFamily(DEEPSEEK_V4, 1e-5),
    "cohere2_moe": OpaqueFamily(COHERE2_MOE, 1e-5, is_opaque=False),
}


def opaque_model(name: str, tmp_root: Path) -> Path:
    """The folder of a tiny model without its vision tower; made once under `tmp_root`."""
    folder = tmp_root / f"{name}-opaque"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True)
        write_text_model(folder, FAMILIES[name])
    return folder


def write_text_model(folder: Path, family: OpaqueFamily) -> None:
    """A model of random weights, with tokenizer and template, and no processor."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    plain = Family(
        "", "<|image_pad|>", config=lambda text, token: text, preprocessor={}
    )
    tokenizer = make_tokenizer(folder, plain)
    config = with_vocabulary(family.config, tokenizer)
    weights = dict(tree_flatten(build(config, scale=family.scale).parameters()))
    weights = {name: w for name, w in weights.items() if "vision" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer_config(folder)
    (folder / "config.json").write_text(json.dumps(config))


def with_vocabulary(config: Body, tokenizer: Any) -> Body:
    config = json.loads(json.dumps(config))
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    sizes = {
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "eos_token_id": eos,
    }
    config.update(sizes)
    if "text_config" in config:
        config["text_config"].update(sizes)
    names = ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")
    for field, token in names:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            config[field] = token_id
    return config


def write_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    template = (load_script().SOURCES / "chat_template.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")


def build(config: Body, *, scale: float) -> Any:
    """mlx-vlm's model of random weights, as large as `scale` on average."""
    import mlx.core as mx
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = json.loads(json.dumps(config))
    for part in ("text_config", "vision_config", "audio_config"):
        config.setdefault(part, {})
    architecture, _ = get_model_and_args(config)
    sizes = architecture.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    model = architecture.Model(
        update_module_configs(sizes, architecture, config, parts)
    )

    mx.random.seed(1)
    randomize(model, scale)
    model.eval()
    return model
