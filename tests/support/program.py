"""The whole program as a process: started, listened to, ended."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import start_llm
from exact_blas import preloading
from forked_process import ForkedProcess, run_program
from http_client import exchange
from server_fixture import MAX_WAIT_SECONDS, Message, free_port, user, wait_until
from tiny_models import WORDS

BODY_LIMIT = 1 << 20

TTL_SECONDS = 3  # idle for so long, the cache is empty again

CHAT = "/v1/chat/completions"


def copy_helpers(folder: Path) -> None:
    """What keeps LiteLLM beside a Program of this folder."""
    helpers = Path(start_llm.__file__).parent / "scripts" / "helpers"
    shutil.copytree(
        helpers,
        folder / "scripts" / "helpers",
        ignore=shutil.ignore_patterns("__pycache__"),
    )


class Program:
    """start-llm.py, copied to a folder of its own, running there in a process.

    It is forked from one that has the libraries loaded; a FreshProgram is not.
    """

    is_forked = True

    def __init__(
        self,
        folder: Path,
        model: str | Path,
        *,
        port: int | None = None,
        stderr: Path | Connection | None = None,
        **more: str,
    ) -> None:
        """`stderr`: what it writes to in place of the file that `said` reads."""
        folder.mkdir(exist_ok=True)
        shutil.copy(start_llm.__file__, folder / "start-llm.py")
        self.port = port or free_port()
        self._stderr = folder / "stderr.txt"
        settings = {
            "MODEL_PATH": str(model),
            "MLX_PORT": str(self.port),
            "ENABLE_PROXY": "false",
            "LOG_ROOT": str(folder / "logs"),
            "MAX_BODY_BYTES": str(BODY_LIMIT),
            "PROMPT_CACHE_TTL_SECONDS": str(TTL_SECONDS),
            "HF_HUB_OFFLINE": "1",
            **more,
        }

        self.process: subprocess.Popen | ForkedProcess
        environment = {**os.environ, **preloading(), **settings}
        if self.is_forked:
            self._stderr.touch()
            arguments = (folder / "start-llm.py", stderr or self._stderr, environment)
            self.process = ForkedProcess(run_program, *arguments)
            return

        command = [sys.executable, "start-llm.py"]
        with self._stderr.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stderr=file
            )

    @property
    def said(self) -> str:
        """What is on the console so far."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """(status, body); status 0 while nobody listens."""
        try:
            status, _, body = exchange(self.port, "GET", path)
        except OSError:
            return 0, {}
        return status, json.loads(body)

    def wait_until_ready(self) -> list[tuple[int, str]]:
        """What /health answered on the way: each different (status, word) once, in order."""
        answers: list[tuple[int, str]] = []

        def is_ready() -> bool:
            assert self.process.poll() is None, self.said
            status, body = self.get("/health")
            answer = (status, body.get("status", ""))
            if answer not in answers:
                answers.append(answer)
            return status == 200

        wait_until(is_ready)
        return answers

    def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=MAX_WAIT_SECONDS)


class FreshProgram(Program):
    """One that starts as its user starts it, with imports."""

    is_forked = False


def ask(
    port: int, messages: list[Message], *, path: str = CHAT, **fields: Any
) -> dict[str, Any]:
    """The body of a greedy reply. Raises OSError (HTTPError is one), ValueError."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=MAX_WAIT_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


class Agent(threading.Thread):
    """Asks and goes on from the answer, until the server is gone."""

    def __init__(
        self, port: int, seed: int, *, max_tokens: int, max_pause: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._random = random.Random(seed)
        self._max_tokens = max_tokens
        self._max_pause = max_pause
        self.answered_at = time.monotonic()
        self.end: Exception | None = None  # the error that it was sent

    def run(self) -> None:
        messages = [self._question(400)]
        while self.end is None:
            try:
                body = ask(self._port, messages, max_tokens=self._max_tokens)
            except (OSError, ValueError) as error:
                self.end = error
                continue
            message = body["choices"][0]["message"]
            answer = {"role": "assistant", "content": message.get("content") or ""}
            messages += [answer, self._question(50)]
            time.sleep(self._random.random() * self._max_pause)
        self.answered_at = time.monotonic()

    def _question(self, n_words: int) -> Message:
        return user(" ".join(self._random.choices(WORDS, k=n_words)))
