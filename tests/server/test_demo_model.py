"""models/demo: what is shipped loads and is small; test_garden.py asks it."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models" / "demo"
MOST_BYTES = 30_000_000


def test_the_folder_is_whole_and_small():
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= MOST_BYTES
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert config["max_position_embeddings"] >= 32_768


def test_the_server_reads_what_it_was_trained_on():
    """why(L-59): transformers may replace what tokenizer.json says."""
    trained_on = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    talks = json.loads((ROOT / "benchmarks" / "conversations.json").read_text("utf-8"))
    for talk in talks:
        text = json.dumps(talk, indent=2) + repr(talk) + '\n  {"a": [69, 4519]}\n'
        ids = trained_on.encode(text, add_special_tokens=False).ids
        assert load_tokenizer(FOLDER).encode(text, add_special_tokens=False) == ids


def test_mlx_says_what_the_trainers_own_network_said():
    """The delta rule in chunks, which it was trained with, is the one that mlx-lm steps through."""
    stated = json.loads((FOLDER / "check.json").read_text())
    model, _ = mlx_lm.load(str(FOLDER))
    logits = model(mx.array([stated["tokens"]]))[0, -1].tolist()
    assert logits[: len(stated["logits"])] == pytest.approx(stated["logits"], abs=1e-3)
