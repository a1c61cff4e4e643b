"""Tiny models of the vision families that mlx-vlm knows: its own random weights, no grammar."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import load_script

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 8192,
}

HIDDEN = 64
HEADS = 4
WINDOW = 32
Body = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How the folder of a kind differs from others."""

    phrase: str  # what the template prints for an image
    pad: str  # the token that stands for a part of it
    config: Callable[
        [Body, Callable[[str], int]], Body
    ]  # (sizes of the text model, id of a token)
    preprocessor: Body
    tokens: tuple[str, ...] = ()  # further ones
    named: Body = field(
        default_factory=dict
    )  # tokens that the processor asks its tokenizer for
    processor: Body | None = None
    seed: int = 1  # one whose replies, as text, become the same tokens again
    tolerance: float = (
        0.0  # where layers see a window, a step of decoding sums in another order
    )
    scale: float = 0.0  # of random weights; 0.0: as upstream makes them


VISION = {"hidden_size": 32, "intermediate_size": 64}
PLAIN = {"num_hidden_layers": 2, "num_attention_heads": 2, **VISION}
CLIP = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
MROPE = [2, 3, 3]  # pairs of a head of 16


def _qwen2_5_vl(text: Body, token: Callable[[str], int]) -> Body:
    tower = {
        **VISION,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "window_size": 56,
    }
    rope = {"type": "mrope", "mrope_section": MROPE}
    return {
        **text,  # not in a part of its own
        "rope_scaling": rope,
        "vision_config": {**tower, "fullatt_block_indexes": [1]},
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }


def _glm4v(text: Body, token: Callable[[str], int]) -> Body:
    tower = {
        **VISION,
        "model_type": "glm4v",
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
    }
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
    }  # half of a head is turned
    return {
        "text_config": {**text, "model_type": "glm4v_text", "rope_scaling": rope},
        "vision_config": {**tower, "image_size": 112, "out_hidden_size": HIDDEN},
        # as GLM-4.1V-Thinking's config.json says it; image_token_index it does not state
        "image_token_id": token("<|image|>"),
        "video_token_id": token("<|video|>"),
        "vision_start_token_id": token("<|begin_of_image|>"),
        "vision_end_token_id": token("<|end_of_image|>"),
    }


def _gemma3(text: Body, token: Callable[[str], int]) -> Body:
    heads = {"head_dim": 16, "query_pre_attn_scalar": 16, "mm_tokens_per_image": 16}
    windows = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
    return {
        "text_config": {**text, **heads, **windows, "model_type": "gemma3_text"},
        "vision_config": {
            **PLAIN,
            "model_type": "siglip_vision_model",
            "image_size": 64,
            "patch_size": 8,
        },
        "image_token_index": token("<image_soft_token>"),
        "mm_tokens_per_image": 16,
        "hidden_size": HIDDEN,
        "pad_token_id": token("<|endoftext|>"),
    }


def _gemma4(text: Body, token: Callable[[str], int], **changes: Any) -> Body:
    heads = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8}
    windows = {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 2,
    }
    layers = {"num_hidden_layers": 6, "vocab_size_per_layer_input": text["vocab_size"]}
    tower = {**PLAIN, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    return {
        "text_config": {
            **text,
            **heads,
            **windows,
            **layers,
            **changes,
            "model_type": "gemma4_text",
        },
        "vision_config": {
            **tower,
            "model_type": "gemma4_vision",
            "default_output_length": 20,
            "patch_size": 8,
        },
        "image_token_id": token("<|image|>"),
        "video_token_id": token("<|video|>"),
        "boi_token_id": token("<|image>"),
        "eoi_token_id": token("<image|>"),
        "hidden_size": HIDDEN,
        "pad_token_id": token("<|endoftext|>"),
    }


def _gemma4_both_ways(text: Body, token: Callable[[str], int]) -> Body:
    return _gemma4(
        text,
        token,
        use_bidirectional_attention="vision",
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )


def _qwen4_exp(text: Body, token: Callable[[str], int]) -> Body:
    from opaque_families import QWEN4_EXP

    config = json.loads(json.dumps(QWEN4_EXP))
    sizes = {name: text[name] for name in ("vocab_size", "eos_token_id")}
    config["text_config"].update(sizes)
    return {
        **config,
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }


def _llava(text: Body, token: Callable[[str], int]) -> Body:
    return {
        "text_config": {**text, "model_type": "llama"},
        "vision_config": {
            **PLAIN,
            "model_type": "clip_vision_model",
            "image_size": 56,
            "patch_size": 14,
        },
        "image_token_index": token("<image>"),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _mistral3(text: Body, token: Callable[[str], int]) -> Body:
    tower = {
        **PLAIN,
        "model_type": "pixtral",
        "head_dim": 16,
        "image_size": 140,
        "patch_size": 14,
    }
    return {
        "text_config": {**text, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**tower, "rope_theta": 10_000.0},
        "image_token_index": token("[IMG]"),
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    }


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM_TOKENS = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")
GEMMA4: Body = {
    "phrase": "\n\n<|image|>\n\n",
    "pad": "<|image|>",
    "tokens": ("<|image>", "<image|>", "<|video|>"),
    "named": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
    },
    "preprocessor": {"patch_size": 8, "max_soft_tokens": 20, "pooling_kernel_size": 3},
    "tolerance": 1e-4,
}

FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_pad|>",
        _qwen2_5_vl,
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 56 * 56,
            "max_pixels": 112 * 168,
        },
        QWEN_TOKENS,
    ),
    "qwen4_exp": Family(
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|image_pad|>",
        _qwen4_exp,
        {
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "min_pixels": 64 * 64,
            "max_pixels": 128 * 192,
        },
        QWEN_TOKENS,
        seed=3,
        scale=0.3,
    ),
    "glm4v": Family(
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|image|>",
        _glm4v,
        {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 2 * 112 * 168},
        },
        GLM_TOKENS,
    ),
    "gemma3": Family(
        "<start_of_image>",
        "<image_soft_token>",
        _gemma3,
        {
            **CLIP,
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 64, "width": 64},
        },
        ("<start_of_image>", "<end_of_image>"),
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        tolerance=1e-4,
    ),
    "gemma4": Family(config=_gemma4, seed=2, **GEMMA4),
    "gemma4_both_ways": Family(config=_gemma4_both_ways, **GEMMA4),
    "llava": Family(
        "<image>\n",
        "<image>",
        _llava,
        {
            **CLIP,
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        named={"image_token": "<image>"},
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
        },
    ),
    "mistral3": Family(
        "[IMG]",
        "[IMG]",
        _mistral3,
        {
            **CLIP,
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 140},
            "patch_size": {"height": 14, "width": 14},
        },
        ("[IMG_BREAK]", "[IMG_END]"),
        processor={"processor_class": "PixtralProcessor", "spatial_merge_size": 2},
    ),
}


def tiny_family(name: str, tmp_root: Path, **size: int) -> Path:
    """The folder of a tiny model of this family, for mlx_vlm.load.

    `size`: fields of its text_config. One folder has one model of a family.
    """
    folder = tmp_root / f"{name}-family"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True)
        _write(folder, name.removesuffix("_both_ways"), FAMILIES[name], size)
    return folder


def _write(folder: Path, kind: str, family: Family, size: dict[str, int]) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    tokenizer = make_tokenizer(folder, family)
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    text = {
        "model_type": kind,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "max_position_embeddings": 8192,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        **size,
    }
    config = family.config(text, tokenizer.token_to_id)
    config["model_type"] = kind
    config["eos_token_id"] = eos
    config["vocab_size"] = text["vocab_size"]

    (folder / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    if family.processor:
        (folder / "processor_config.json").write_text(json.dumps(family.processor))
    tokenizer_config = {**TOKENIZER_CONFIG, "extra_special_tokens": family.named}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    template = (load_script().SOURCES / "chat_template.jinja").read_text("utf-8")
    phrase = family.phrase.replace("\n", "\\n")
    shown = (
        "{%- if part.type == 'image' -%}{{- '"
        + phrase
        + "' -}}{%- continue -%}{%- endif -%}"
    )
    start = "{%- for part in content -%}"
    template = template.replace(start, start + shown)
    template = template.replace(
        "text_of(message.content) | trim", "text_of(message.content)"
    )
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    architecture, _ = get_model_and_args(config)
    mx.random.seed(family.seed)
    plain = json.loads(json.dumps(config))
    plain.setdefault("text_config", {})
    sizes = architecture.ModelConfig.from_dict(plain)
    parts = ["text", "vision"]
    model = architecture.Model(update_module_configs(sizes, architecture, plain, parts))
    if family.scale:
        randomize(model, family.scale)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def make_tokenizer(folder: Path, family: Family) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_script().make_tokenizer()
    tokenizer.add_special_tokens(list(dict.fromkeys((family.pad, *family.tokens))))
    start = [("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    # a beginning that tokenizers of Gemma, Llama and GLM add unasked, and templates print
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=start
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def randomize(model: Any, scale: float) -> None:
    """Random numbers in all weights of a model: upstream begins with some that say nothing."""
    import mlx.core as mx
    from mlx.utils import tree_map

    def random_like(weights: mx.array) -> mx.array:
        if not mx.issubdtype(weights.dtype, mx.floating):
            return weights
        return scale * mx.random.normal(weights.shape)

    model.update(tree_map(random_like, model.parameters()))
    mx.eval(model.parameters())
