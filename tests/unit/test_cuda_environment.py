"""CUDA: what MLX's CUDA build reads is set where it is installed, and nowhere else."""

import stat
from importlib.metadata import PackageNotFoundError

import pytest
import start_llm as s

VERSIONS = {"mlx-cuda-13": "0.32.4", "nvidia-cuda-nvrtc": "13.5.37"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One with the CUDA build and a GPU of architecture sm_89; its empty environment."""
    monkeypatch.setattr(s, "version_of_package", VERSIONS.__getitem__)
    monkeypatch.setattr(s, "_find_architecture", lambda: "sm_89")
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_kernels_are_kept_apart_for_each_gpu_and_version(machine, tmp_path):
    s.set_cuda_environment(machine)

    folder = tmp_path / "start-llm/kernels/mlx-0.32.4-sm_89-nvrtc-13.5.37"
    assert machine["MLX_PTX_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert machine["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"


def test_what_the_user_has_set_stays(machine, tmp_path):
    machine["MLX_PTX_CACHE_DIR"] = "/mine"
    machine["MLX_CUDA_SDPA_CACHE_SIZE"] = "64"
    s.set_cuda_environment(machine)
    assert machine["MLX_PTX_CACHE_DIR"] == "/mine"
    assert machine["MLX_CUDA_SDPA_CACHE_SIZE"] == "64"
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_that_mlx_can_use_there_is_no_folder(machine, monkeypatch):
    monkeypatch.setattr(s, "_find_architecture", lambda: "")
    s.set_cuda_environment(machine)
    assert "MLX_PTX_CACHE_DIR" not in machine


def test_on_another_build_nothing_is_set(monkeypatch):
    def find(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(s, "version_of_package", find)
    environ = {}
    s.set_cuda_environment(environ)
    assert environ == {}
