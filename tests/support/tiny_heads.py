"""Tiny models that are told what to say by their last token, mostly, and heads that know it."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from tiny_models import tiny_model

# What is left of that which the layers write: of 1, a head would be right one time in four.
SCALE = 0.05
WRITERS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def tiny_pair(kind: str, tmp_root: Path, **size: int) -> tuple[Path, Path]:
    """Folders of a model and of its head."""
    plain_folder = tiny_model(kind, tmp_root, **size)
    folder = tmp_root / f"{plain_folder.name}-by-last-token"
    if not folder.exists():
        shutil.copytree(plain_folder, folder)
        file = str(folder / "model.safetensors")
        weights = {
            name: values * SCALE if name.endswith(WRITERS) else values
            for name, values in mx.load(file).items()
        }
        mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return folder, tiny_head(folder)


def tiny_head(folder: Path) -> Path:
    """The folder of a head for a tiny model, which reads the token, and of states little."""
    head_folder = folder.with_name(f"{folder.name}-head")
    if head_folder.exists():
        return head_folder
    config = head_config(folder)
    size = config["text_config"]["hidden_size"]
    head_weights = {
        name: values * SCALE if name.endswith(WRITERS) else values
        for name, values in tree_flatten(new_head(config).parameters())
    }
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
