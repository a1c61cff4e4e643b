"""Small settings of each family with recurrent layers that mlx-lm has."""

from typing import Any

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 50,
}

ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}

EPS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 512}

FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": (
        SIZE
        | {
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "conv_kernel": 4,
            "n_groups": 1,
        }
        | {"layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True}
        | {
            "tie_word_embeddings": True,
            "time_step_limit": (0.001, 10.0),
            "time_step_rank": 2,
        }
    ),
    "lfm2": (
        SIZE
        | ATTENTION
        | {
            "norm_eps": 1e-5,
            "conv_bias": False,
            "max_position_embeddings": 512,
            "conv_L_cache": 3,
        }
        | {"block_dim": 32, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0}
        | {
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 64,
            "full_attn_idxs": [1, 3],
        }
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
        | {
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
        }
        | {"num_experts": 2, "num_experts_per_tok": 1}
    ),
    "granitemoehybrid": (
        SIZE
        | ATTENTION
        | EPS
        | {
            "attention_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
        }
        | {
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "shared_intermediate_size": 64,
        }
        | {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
        }
        | {
            "mamba_proj_bias": False,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
        }
        | {"mamba_conv_bias": True}
    ),
    "olmo_hybrid": (
        SIZE
        | ATTENTION
        | EPS
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
        }
        | {
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "attention_bias": False,
        }
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
