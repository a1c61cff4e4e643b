"""Which library loads a model: by its config, its weights and MODEL_KIND."""

import json
import shutil

import pytest
import start_llm as s
from mlx_vlm.models.cohere2_moe import language
from nights import at_night
from opaque_families import opaque_model
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_model
from tiny_vision import HYBRID_VISION, tiny_vision_model


@pytest.fixture
def folder(tmp_path):
    model_folder = tiny_vision_model(HYBRID_VISION, tmp_path / "made")
    return shutil.copytree(model_folder, tmp_path / "copy")


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
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["model_type"] = "from_the_future"
    config_file.write_text(json.dumps(config))

    assert not s.has_vision_tower(folder)


@pytest.mark.parametrize(
    "method", ["__init__", at_night("_run_tower"), at_night("make_cache")]
)
def test_a_model_whose_images_cannot_be_read_is_served_as_text(
    folder, monkeypatch, caplog, method
):
    def fail(*_, **__):
        raise ValueError("planted")

    monkeypatch.setattr(s.VisionModel, method, fail)
    monkeypatch.setattr(s.logger, "propagate", True)  # caplog is on the root logger
    caplog.set_level("INFO", logger=s.logger.name)  # whatever another test has set

    model = loaded(folder)

    assert model.vision is None
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    [sentence] = {r.getMessage() for r in warnings if r.name == s.logger.name}
    assert "MODEL_KIND=vision insists" in sentence
    assert "planted" in sentence
    with pytest.raises(s.ModelError, match=r"loaded by mlx-vlm: .*planted"):
        loaded(folder, model_kind="vision")


def test_a_model_that_neither_library_loads_is_one_error(folder, monkeypatch, caplog):
    def fail_with(reason):
        def fail(*_, **__):
            raise ValueError(reason)

        return fail

    monkeypatch.setattr(s.VisionModel, "__init__", fail_with("no tower"))
    monkeypatch.setattr(s.mlx_lm, "load", fail_with("no text"))
    monkeypatch.setattr(s.logger, "propagate", True)

    reasons = r"cannot be loaded by mlx-vlm.*no tower.*loaded by mlx-lm .*no text"
    with pytest.raises(s.ModelError, match=reasons):
        loaded(folder)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_the_folder_above_a_model_does_not_name_its_family(tmp_path):
    folder = tiny_model("gemma3_text", tmp_path / "qwen")
    assert loaded(folder).family == "generic"


def test_a_text_model_has_no_tower(tmp_path):
    assert not s.has_vision_tower(tiny_model("qwen3", tmp_path))


def test_a_text_model_that_only_mlx_vlm_has_is_loaded_by_it(tmp_path):
    folder = opaque_model("cohere2_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert not s.has_text_class(config)
    assert s.has_text_class({"model_type": "qwen3"})
    assert s.has_text_class({"model_type": "mistral"})  # mlx-lm's llama

    model = loaded(folder)
    assert model.vision is None
    assert type(model.model) is s.VlmModel


def test_what_is_wrong_with_it_is_told_of_mlx_vlm(tmp_path):
    folder = opaque_model("cohere2_moe", tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "other.safetensors").touch()
    with pytest.raises(s.ModelError, match="cannot be loaded by mlx-vlm, for text: "):
        loaded(folder)


def test_a_model_that_sees_what_comes_later_is_refused(tmp_path, monkeypatch):
    """As a diffusion model does, whose replies are not written token by token."""
    folder = opaque_model("cohere2_moe", tmp_path)
    monkeypatch.setattr(language, "create_attention_mask", lambda *_, **__: None)
    with pytest.raises(s.ModelError, match="otherwise in parts than at once"):
        loaded(folder)
