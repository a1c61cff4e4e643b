"""Which library loads a model: by its config, its weights and MODEL_KIND."""

import json
import shutil
import subprocess
import sys

import pytest
import start_llm as s
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model
from tiny_vision import DENSE_VISION, HYBRID_VISION, tiny_vision_model


@pytest.fixture
def folder(tmp_path):
    made = tiny_vision_model(HYBRID_VISION, tmp_path / "made")
    return shutil.copytree(made, tmp_path / "copy")


def loaded(folder, **settings):
    return s.load_model(folder, s.Config(model_path=str(folder), **settings))


def test_a_tower_with_weights_is_loaded_by_mlx_vlm(folder):
    model = loaded(folder)
    assert model.vision is model.model
    assert model.vision.phrase == "<|vision_start|><|image_pad|><|vision_end|>"
    assert loaded(folder, model_kind="text").vision is None


def test_a_conversion_that_left_the_tower_out_is_a_text_model(folder):
    weights = load_file(folder / "model.safetensors")
    text = {name: value for name, value in weights.items() if "vision" not in name}
    save_file(text, folder / "model.safetensors", {"format": "mlx"})
    assert loaded(folder).vision is None
    with pytest.raises(s.ModelError, match="cannot be loaded"):
        loaded(folder, model_kind="vision")


def test_a_tower_that_mlx_vlm_does_not_know_is_none(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "from_the_future"}))
    assert not s.has_vision(folder)


def test_a_text_model_has_no_tower(tmp_path):
    assert not s.has_vision(tiny_model("qwen3", tmp_path))


@pytest.mark.parametrize("kind", [DENSE_VISION, HYBRID_VISION])
def test_nothing_pulls_torch_in(kind, tmp_path):
    folder = tiny_vision_model(kind, tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(s.__file__).rsplit('/', 1)[0] + '/tests'!r})\n"
        "import conftest, pathlib, start_llm as s\n"
        "assert 'mlx_vlm' not in sys.modules, 'imported without need'\n"
        f"s.load_model(pathlib.Path({str(folder)!r}), s.Config(model_path={str(folder)!r}))\n"
        "assert 'mlx_vlm' in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert not done.returncode, done.stderr.decode()[-2000:]
