"""Tiny models that are told what to say by their last token, mostly, and heads that know it."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tiny_families import tiny_family
from tiny_models import tiny_model

# What is left of that which the layers write: of 1, a head would be right one time in four.
SCALE = 0.05
WRITERS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
GEMMA = "gemma4"
# Gemma's layers norm what they write.
GEMMA_WRITERS = (
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "post_per_layer_input_norm.weight",
)


def scaled(weights: Iterable[tuple[str, Any]], writers: tuple[str, ...]) -> dict:
    """Weights of which those that write into the stream are small."""
    return {
        name: values * SCALE if name.endswith(writers) else values
        for name, values in weights
    }


def tiny_pair(kind: str, tmp_root: Path, **size: int) -> tuple[Path, Path]:
    """Folders of a model and of its head."""
    if kind == GEMMA:
        return tiny_gemma(tmp_root)
    plain_folder = tiny_model(kind, tmp_root, **size)
    folder = tmp_root / f"{plain_folder.name}-by-last-token"
    if not folder.exists():
        shutil.copytree(plain_folder, folder)
        file = str(folder / "model.safetensors")
        weights = scaled(mx.load(file).items(), WRITERS)
        mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return folder, tiny_head(folder)


def tiny_head(folder: Path) -> Path:
    """The folder of a head for a tiny model, which reads the token, and of states little."""
    head_folder = folder.with_name(f"{folder.name}-head")
    if head_folder.exists():
        return head_folder
    config = head_config(folder)
    size = config["text_config"]["hidden_size"]
    head_weights = scaled(tree_flatten(new_head(config).parameters()), WRITERS)
    parts = [mx.eye(size), SCALE * mx.random.normal((size, size)) / size**0.5]
    head_weights["fc.weight"] = mx.concatenate(parts, axis=1)
    (weights_file,) = folder.glob("model*.safetensors")
    for name, values in mx.load(str(weights_file)).items():
        if name.endswith("model.norm.weight"):
            head_weights["norm.weight"] = values
    head_folder.mkdir()
    (head_folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(head_folder / "model.safetensors"), head_weights, metadata={"format": "mlx"}
    )
    return head_folder


def tiny_gemma(tmp_root: Path, **size: int) -> tuple[Path, Path]:
    """Folders of a Gemma 4 with windows, shared KV and a tower, and of its assistant."""
    plain_folder = tiny_family(GEMMA, tmp_root, **size)
    folder = tmp_root / f"{plain_folder.name}-by-last-token"
    if not folder.exists():
        shutil.copytree(plain_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["tie_word_embeddings"] = True
        (folder / "config.json").write_text(json.dumps(config))
        file = str(folder / "model.safetensors")
        weights = scaled(mx.load(file).items(), GEMMA_WRITERS)
        mx.random.seed(2)
        for name, values in weights.items():
            if name.endswith("language_model.model.norm.weight"):
                # Else each token would be followed by itself: the embeddings are tied.
                weights[name] = mx.random.normal(values.shape)
        mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return folder, tiny_assistant(folder)


def tiny_assistant(folder: Path) -> Path:
    """The folder of an assistant, which reads the token, and of states and KV little."""
    head_folder = folder.with_name(f"{folder.name}-head")
    if head_folder.exists():
        return head_folder
    from mlx_vlm.speculative.drafters import gemma4_assistant

    facts = json.loads((folder / "config.json").read_text())["text_config"]
    size = facts["hidden_size"]
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "rms_norm_eps",
        "head_dim",
    )
    kept += ("num_attention_heads", "num_key_value_heads", "global_head_dim")
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": size,
        "use_ordered_embeddings": False,
        "text_config": {
            **{name: facts[name] for name in (*kept, "sliding_window")},
            "model_type": "gemma4_text",
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
        },
    }
    mx.random.seed(1)
    head = gemma4_assistant.Model(gemma4_assistant.ModelConfig.from_dict(config))
    weights = {
        name: values * SCALE if name.endswith(GEMMA_WRITERS) else values
        for name, values in tree_flatten(head.parameters())
    }
    parts = [mx.eye(size), SCALE * mx.random.normal((size, size)) / size**0.5]
    weights["pre_projection.weight"] = mx.concatenate(parts, axis=1)
    weights["post_projection.weight"] = mx.eye(size)
    for name, values in mx.load(str(folder / "model.safetensors")).items():
        if name.endswith("language_model.model.norm.weight"):
            weights["model.norm.weight"] = values
        elif name.endswith("language_model.model.embed_tokens.weight"):
            weights["model.embed_tokens.weight"] = values
    head_folder.mkdir()
    (head_folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(head_folder / "model.safetensors"), weights, metadata={"format": "mlx"}
    )
    return head_folder


def head_config(folder: Path) -> dict:
    """The config.json of a head for a tiny model, as mlx-vlm's splitter writes it."""
    facts = json.loads((folder / "config.json").read_text())
    facts = {**facts, **facts.pop("text_config", {})}
    rope = facts.get("rope_parameters") or {
        "type": "default",
        "rope_theta": facts["rope_theta"],
        "partial_rotary_factor": facts["partial_rotary_factor"],
    }
    rope_pairs = int(facts["head_dim"] * rope["partial_rotary_factor"]) // 2
    facts["rope_parameters"] = {**rope, "mrope_section": [rope_pairs, 0, 0]}
    facts.setdefault("norm_topk_prob", False)
    return {
        "model_type": "qwen3_5_mtp",
        "text_config": facts,
        "block_size": 3,
        "tie_word_embeddings": False,
    }


def new_head(config: dict) -> object:
    """A head of mlx-vlm's class with random weights, the same ones each time."""
    from mlx_vlm.speculative.drafters import qwen3_5_mtp

    mx.random.seed(1)
    head = qwen3_5_mtp.Model(qwen3_5_mtp.ModelConfig.from_dict(config))
    head.update(tree_map(lambda weights: weights.astype(mx.float32), head.parameters()))
    return head
