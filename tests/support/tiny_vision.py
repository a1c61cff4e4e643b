"""Tiny vision models: a tiny text model's planted grammar behind a random tower (mlx-vlm)."""

import json
import math
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import load_script

DENSE_VISION = "qwen3_vl"
HYBRID_VISION = "qwen3_5"
EXPERTS_VISION = "qwen3_5_moe"  # hybrid, too
TEXT_KIND = {
    DENSE_VISION: "qwen3",
    HYBRID_VISION: "qwen3_5",
    EXPERTS_VISION: "qwen3_5_moe",
}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PHRASE = "<|vision_start|><|image_pad|><|vision_end|>"
# A token of the prompt is a square of 32 x 32 pixels.
MERGE = 2
PATCH = 16


@dataclass(frozen=True)
class Tower:
    """What looks at images."""

    depth: int = 2
    hidden: int = 32
    heads: int = 2
    side: int = 512  # pixels of the largest square that is not made smaller


TINY = Tower()


def tiny_vision_model(
    kind: str, tmp_root: Path, tower: Tower = TINY, **size: int
) -> Path:
    """The folder of a tiny vision model, for mlx_vlm.load; made at most once under `tmp_root`."""
    size_suffix = "".join(f"-{field}{value}" for field, value in sorted(size.items()))
    if tower != TINY:
        size_suffix += "-tower" + "x".join(map(str, astuple(tower)))
    folder = tmp_root / f"{kind}-vision{size_suffix}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        recipe = load_script().choose_recipe(TEXT_KIND[kind], size="tiny", **size)
        _write(folder, recipe, kind, tower)
        (folder / "done").touch()
    return folder


def _write(folder: Path, recipe: Any, kind: str, tower: Tower) -> None:
    from safetensors.numpy import save_file

    script = load_script()
    tokenizer = script.make_tokenizer()
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    vocabulary = math.ceil(tokenizer.get_vocab_size() / 64) * 64
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    text = script.model_config(recipe, vocabulary, eos)
    config = _config(kind, text, tokenizer, tower)
    states = script.States.from_grammar(tokenizer, vocabulary)
    planter = script.Planter(states, script.Residual(recipe, states.n))
    weights = {
        name: _weight(planter, name, shape) for name, shape in _shapes(config).items()
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    template = (script.SOURCES / "chat_template.jinja").read_text("utf-8")
    loop = "{%- for part in content -%}"
    image_branch = (
        "{%- if part.type == 'image' -%}"
        f"{{{{- '{PHRASE}' -}}}}"
        "{%- continue -%}{%- endif -%}"
    )
    assert loop in template
    template = template.replace(loop, loop + image_branch)
    (folder / "chat_template.jinja").write_text(template, "utf-8")

    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": eos, "do_sample": False},
        "preprocessor_config.json": {
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
            "min_pixels": 64 * 64,
            "max_pixels": tower.side**2,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.context,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2), "utf-8")


def _config(
    kind: str, text: dict[str, Any], tokenizer: Any, tower: Tower
) -> dict[str, Any]:
    half = text["head_dim"] // (2 if kind == DENSE_VISION else 4)  # rotated pairs
    section = [half - 2 * (half // 3), half // 3, half // 3]
    if kind == DENSE_VISION:
        text["model_type"] = kind
        text["rope_scaling"] = {"type": "default", "mrope_section": section}
    else:
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": section}
    vision = {
        "model_type": kind,
        "depth": tower.depth,
        "hidden_size": tower.hidden,
        "intermediate_size": 2 * tower.hidden,
        "out_hidden_size": text["hidden_size"],
        "num_heads": tower.heads,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 256,
        "in_channels": 3,
        "deepstack_visual_indexes": [0] if kind == DENSE_VISION else [],
    }
    ids = {token: tokenizer.token_to_id(token) for token in VISION_TOKENS}
    return {
        "model_type": kind,
        "text_config": text,
        "vision_config": vision,
        "vocab_size": text["vocab_size"],
        "eos_token_id": text["eos_token_id"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import get_model_and_args

    architecture, _ = get_model_and_args(config)
    model = architecture.Model(
        architecture.ModelConfig.from_dict(json.loads(json.dumps(config)))
    )
    parameters: Any = tree_flatten(model.parameters())
    return {name: tuple(value.shape) for name, value in parameters}


def _weight(planter: Any, name: str, shape: tuple[int, ...]) -> Any:
    if name.startswith("language_model."):
        return np.ascontiguousarray(planter.parameter(name, shape), np.float32)
    is_last_layer = "merger" in name and "linear_fc2" in name
    if len(shape) == 1:
        values = np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
        if is_last_layer and "deepstack" not in name:
            # As a word that is not in the grammar.
            values[0] = planter.residual.state_value
        return values

    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.standard_normal(shape, np.float32)
    if is_last_layer:  # adds to the residual stream
        values[: planter.states.n] = 0.0
    if "pos_embed" in name:
        return values
    gain = 0.4 if is_last_layer else 1.5  # about as large as words
    return values * (gain / math.sqrt(math.prod(shape[1:])))
