"""Processes that begin with the server's libraries loaded: a start takes half a second, not three.

A process that has no threads (multiprocessing's fork server) imports them once, and the others are
forked from it. How a program starts by itself is what test_whole_program.py, test_start_and_stop.py
and test_cluster.py's command try.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["forked_libraries"])


class ForkedProcess:
    """A function that runs in such a process, with as much of subprocess.Popen as tests use."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # What Python 3.12.1 does not tell the fork server.
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            patch.setenv("HF_HUB_OFFLINE", "1")  # read when it is imported
            forkserver.ensure_running()
        self._process = CONTEXT.Process(target=function, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_program(
    script: Path,
    stderr: Path | Connection,
    environment: Mapping[str, str],
    *arguments: str,
) -> None:
    """What `python SCRIPT` does in its folder. BESIDE: what it takes for its Python."""
    os.chdir(script.parent)
    os.environ.clear()
    os.environ.update(environment)
    if isinstance(stderr, Path):
        descriptor = os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    else:
        descriptor = stderr.fileno()
    os.dup2(descriptor, 2)
    sys.executable = environment.get("BESIDE", sys.executable)
    sys.argv = [script.name, *arguments]
    sys.path[:0] = [str(script.parent)]
    runpy.run_path(str(script), run_name="__main__")
