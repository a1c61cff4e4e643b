"""Starting and stopping: signals at any time, a log that nobody reads, replies that are cut."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import start_llm as s
from forked_process import CONTEXT, ForkedProcess, run_program
from nights import at_night
from program import Program
from server_fixture import MAX_WAIT_SECONDS, free_port, wait_until

ROOT = Path(s.__file__).parent

# An installed package whose import is a signal to its own process, and then takes long.
SIGNALLING_PACKAGE = """
import os, signal, time
os.kill(os.getpid(), signal.{name})
time.sleep(60)
"""

# The server with a model that is loaded for ever, inside MLX.
ENDLESS_LOADING = """
import sys
import mlx.core as mx
import start_llm as s

def load(*_):
    weights = mx.random.normal((1500, 1500))
    print("inside", file=sys.stderr, flush=True)
    while True:
        mx.eval(weights @ weights)

s.load_model = load
sys.stderr = s.ConsoleStream(sys.stderr)
s.end_process(s.main())
"""

# Of two megabytes, how many bytes are in no part of the heap: before and after some were
# freed, from when glibc would put as much into it.
MAPPED_BUFFERS = """
import ctypes, sys
import start_llm as s

def stop_here(*_):
    class Figures(ctypes.Structure):
        _fields_ = [(f"n{i}", ctypes.c_size_t) for i in range(10)]
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = Figures
    for _ in range(2):
        mapped_before = libc.mallinfo2().n4
        buffer = libc.malloc(2 << 20)
        print("mapped", libc.mallinfo2().n4 - mapped_before, file=sys.stderr)
        libc.free(buffer)
    raise s.ConfigError("that is all")

s._read_config = stop_here
s.end_process(s.main())
"""


def settings(tmp_path, **more):
    return {
        **os.environ,
        "MODEL_PATH": "demo",
        "MLX_PORT": str(free_port()),
        "ENABLE_PROXY": "false",
        "LOG_ROOT": str(tmp_path / "logs"),
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def run_forked(tmp_path, code):
    """A process that has start_llm loaded and runs this, and what it writes to."""
    script = tmp_path / "program.py"
    script.write_text(code, "utf-8")
    console = tmp_path / "console"
    return ForkedProcess(run_program, script, console, settings(tmp_path)), console


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", at_night("SIGTERM")])
def test_a_signal_while_libraries_are_imported_ends_the_program_quietly(tmp_path, name):
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text(SIGNALLING_PACKAGE.format(name=name), "utf-8")

    ended = subprocess.run(
        [sys.executable, str(ROOT / "start-llm.py")],
        check=False,
        env=settings(tmp_path, PYTHONPATH=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=MAX_WAIT_SECONDS,
    )

    assert ended.returncode == -signal.Signals[name]
    assert (ended.stdout, ended.stderr) == (b"", b"")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *map(at_night, (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_while_the_model_is_inside_mlx_ends_the_program_quietly(
    tmp_path, number
):
    process, console_file = run_forked(tmp_path, ENDLESS_LOADING)
    wait_until(lambda: console_file.exists() and "inside" in console_file.read_text())
    process.send_signal(number)

    assert process.wait(MAX_WAIT_SECONDS) == 0
    console = console_file.read_text()
    assert console.splitlines()[-1] == "stopped."
    assert "terminate called" not in console
    assert "Traceback" not in console


def test_install_and_run_hands_a_signal_to_the_next_program(tmp_path):
    """Python's own start would print a traceback at Ctrl-C: until then it waits."""
    script = tmp_path / "install.py"
    script.write_text(
        "import importlib.util, os, signal, sys\n"
        "spec = importlib.util.spec_from_file_location('program', sys.argv[1])\n"
        "program = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(program)\n"
        "program.hold_signals()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "os.execv(sys.executable, [sys.executable, sys.argv[2], '--help'])\n",
        "utf-8",
    )

    ended = subprocess.run(
        [
            sys.executable,
            str(script),
            str(ROOT / "install_and_run.py"),
            str(ROOT / "start-llm.py"),
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=MAX_WAIT_SECONDS,
    )

    assert ended.returncode == -signal.SIGINT
    assert (ended.stdout, ended.stderr) == (b"", b"")


# -- a log that cannot be written ------------------------------------------------------------------


def flood(program, n):
    """Requests that are refused, and so logged: enough to fill a pipe."""
    for _ in range(n):
        assert program.get("/nothing/" + "x" * 190)[0] == 404


@pytest.fixture
def start(tmp_path, folder):
    programs = []

    def start(**how):
        programs.append(Program(tmp_path / f"program{len(programs)}", folder, **how))
        programs[-1].wait_until_ready()
        return programs[-1]

    yield start
    for program in programs:
        if program.process.poll() is None:
            program.end(signal.SIGKILL)


def test_a_server_whose_stderr_nobody_reads_serves_on(start):
    reader, stderr = CONTEXT.Pipe(duplex=False)
    program = start(stderr=stderr)
    stderr.close()

    flood(program, 500)

    assert program.get("/health")[0] == 200
    assert program.end(signal.SIGTERM) == 0

    reader.close()


@contextlib.contextmanager
def console_on_a_pipe():
    """A console, and a function that reads what has been written."""
    read_end, write_end = os.pipe()
    console = s.ConsoleStream(os.fdopen(write_end, "w", encoding="utf-8"))
    yield console, lambda: os.read(read_end, 1 << 16).decode()
    os.close(read_end)


def test_a_console_drops_what_it_cannot_keep_and_goes_on(monkeypatch):
    monkeypatch.setattr(s, "_MAX_WAITING_TEXTS", 1_000)
    with console_on_a_pipe() as (console, read):
        lines = [f"line {i:05}\n" for i in range(40_000)]
        for line in lines:
            console.write(line)
        text = ""
        while "the end\n" not in text:
            console.write("the end\n")  # is dropped, too, while the console is full
            text += read()

    kept = text.partition("the end\n")[0].splitlines(keepends=True)
    assert kept == sorted(set(kept) & set(lines))
    assert 1_000 <= len(kept) < 40_000


def test_a_console_on_a_full_device_goes_on_once_there_is_room(monkeypatch):
    write = os.write
    is_full = True

    def write_unless_full(descriptor, payload):
        if is_full:
            raise OSError(28, "No space left on device")
        return write(descriptor, payload)

    with console_on_a_pipe() as (console, read):
        monkeypatch.setattr(os, "write", write_unless_full)
        for _ in range(7):
            console.write("lost\n")
        console.drain(seconds=MAX_WAIT_SECONDS)
        is_full = False
        console.write("kept\n")
        console.drain(seconds=MAX_WAIT_SECONDS)
        assert read() == "kept\n"


def test_a_closed_stderr_is_no_fault():
    console = s.ConsoleStream(None)
    console.write("anything\n")
    console.drain(seconds=MAX_WAIT_SECONDS)
    assert not console.isatty()


def test_nobody_waits_for_a_console(monkeypatch):
    """write() returns although the thread that writes does not get on."""
    is_released = threading.Event()
    monkeypatch.setattr(s.ConsoleStream, "_write_out", lambda *_: is_released.wait())
    console = s.ConsoleStream(io.TextIOWrapper(io.BytesIO()))
    for _ in range(3):
        console.write("text\n")
    console.drain(seconds=0)
    is_released.set()


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc's malloc")
def test_large_buffers_are_given_back_when_they_are_freed(tmp_path):
    """In the heap, what is behind them would keep them (L-210)."""
    process, console = run_forked(tmp_path, MAPPED_BUFFERS)
    process.wait(MAX_WAIT_SECONDS)

    assert "that is all" in console.read_text()
    n_mapped = [int(n) for n in re.findall(r"mapped (\d+)", console.read_text())]
    assert len(n_mapped) == 2
    assert min(n_mapped) >= 2 << 20


def test_a_log_root_that_cannot_be_written_is_said_at_the_start(start):
    program = start(LOG_ROOT="/dev/null/logs")

    (line,) = [line for line in program.said.splitlines() if "LOG_ROOT /dev" in line]
    assert "LOG_ROOT /dev/null/logs cannot be written: Not a directory" in line
    assert program.end(signal.SIGTERM) == 0
