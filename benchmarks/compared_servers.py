"""The two servers as processes, and one HTTP client that asks both the same way."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from project_files import START_LLM, script

OURS = "start-llm"
THEIRS = "mlx_lm.server"
START_SECONDS = 120.0
REPLY_SECONDS = 900.0

Body = dict[str, Any]

_beside: list[Path] = []  # a start-llm.py in the place of mlx_lm.server, if any


def compare_with(file: Path) -> None:
    """Measure another start-llm.py, an older one say, wherever mlx_lm.server would be."""
    _beside[:] = [file.resolve(strict=True)]


@dataclass
class Reply(script("agent_steps").Reply):  # type: ignore[misc]
    """One answer, with the moment of every piece of it, in seconds since it was sent."""

    stamps: list[float] = field(default_factory=list)
    sent: float = 0.0  # perf_counter

    def hear(self, event: Body, *, seconds: float) -> bool:
        has_part: bool = super().hear(event, seconds=seconds)
        if has_part:
            self.stamps.append(seconds)
        return has_part

    @property
    def message(self) -> Body:
        message: Body = {"role": "assistant", "content": self.content}
        message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    @property
    def ttft(self) -> float:
        return self.stamps[0]

    @property
    def prefilled(self) -> int:
        return int(self.n_prompt - (self.n_cached or 0))

    @property
    def decode_speed(self) -> float:
        """Tokens per second, by the client's clock, from the first piece of text to the last."""
        return (self.n_out - 1) / (self.stamps[-1] - self.stamps[0])


@dataclass
class Server:
    """A running server."""

    name: str
    port: int
    pid: int = 0
    model: str = ""  # to be named in requests, for servers that insist
    headers: dict[str, str] = field(default_factory=dict)  # beside the usual one

    def ask(self, body: Body, *, give_up_after: float | None = None) -> Reply:
        """Stream one chat request; `give_up_after` closes the connection after so many seconds.

        Raises RuntimeError for any status but 200.
        """
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=REPLY_SECONDS
        )
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if self.model:
            streamed["model"] = self.model
        payload = json.dumps(streamed).encode()
        sent = time.perf_counter()
        try:
            response = post(
                connection, payload, timeout=give_up_after, headers=self.headers
            )
            if response.status != 200:
                raise RuntimeError(
                    f"{self.name} said {response.status}: {response.read()[:500]!r}"
                )
            lines = list(stamped_lines(response, sent, give_up_after))
        except TimeoutError:
            return Reply(sent=sent, seconds=time.perf_counter() - sent)
        finally:
            connection.close()

        reply = Reply(sent=sent)
        for seconds, line in lines:
            event = json.loads(line)
            if "error" in event:
                raise RuntimeError(f"error event: {event['error']}")
            reply.hear(event, seconds=seconds)
        return reply

    def status_of(self, body: Body) -> tuple[int, float]:
        """Status and seconds of a request that is expected to be refused."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=REPLY_SECONDS
        )
        payload = json.dumps(body).encode()
        sent = time.perf_counter()
        response = post(connection, payload)
        response.read()
        connection.close()
        return response.status, time.perf_counter() - sent


def post(
    connection: http.client.HTTPConnection,
    payload: bytes,
    *,
    timeout: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> http.client.HTTPResponse:
    connection.connect()
    connection.sock.settimeout(timeout or REPLY_SECONDS)
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    connection.request("POST", "/v1/chat/completions", payload, all_headers)
    return connection.getresponse()


def stamped_lines(
    response: http.client.HTTPResponse, sent: float, give_up_after: float | None
) -> Iterator[tuple[float, bytes]]:
    """(seconds since `sent`, payload) of each event. Raises TimeoutError past `give_up_after`."""
    while line := response.readline():
        seconds = time.perf_counter() - sent
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield seconds, line[6:]
        if give_up_after is not None and seconds > give_up_after:
            raise TimeoutError


# Processes --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def our_environment(
    model: Path, port: int, scratch: Path, **settings: object
) -> dict[str, str]:
    """Defaults, as a person gets them, but for model, port and where logs go."""
    environment = {
        **os.environ,
        "MODEL_PATH": str(model),
        "MLX_PORT": str(port),
        "CACHE_DISK": "off",
        "ENABLE_PROXY": "false",
        "LOG_ROOT": str(scratch / "logs"),
    }
    for name, value in settings.items():
        environment[name.upper()] = str(value)
    return environment


@contextmanager
def our_server(
    model: Path,
    scratch: Path,
    *,
    program: Sequence[str] = (str(START_LLM),),
    **settings: object,
) -> Iterator[Server]:
    port = free_port()
    environ = our_environment(model, port, scratch, **settings)
    command = [sys.executable, *program]
    with running(Server(OURS, port), command, scratch, environ) as server:
        yield server


@contextmanager
def their_server(
    model: Path,
    scratch: Path,
    *,
    program: Sequence[str] = ("-m", "mlx_lm", "server"),
) -> Iterator[Server]:
    """mlx-lm's own server, with its defaults; or the file of `compare_with`."""
    port = free_port()
    environ = dict(os.environ)
    command = [sys.executable, *program, "--model", str(model)]
    command += ["--port", str(port), "--log-level", "WARNING"]
    if _beside:
        environ = our_environment(model, port, scratch)
        command = [sys.executable, str(_beside[0])]
    with running(Server(THEIRS, port), command, scratch, environ) as server:
        yield server


@contextmanager
def both_servers(
    model: Path, scratch: Path, **settings: object
) -> Iterator[list[Server]]:
    """Ours, then theirs, side by side: the one that is not asked sleeps."""
    with (
        our_server(model, scratch, **settings) as ours,
        their_server(model, scratch) as theirs,
    ):
        yield [ours, theirs]


@contextmanager
def running(
    server: Server, command: list[str], scratch: Path, environ: dict[str, str]
) -> Iterator[Server]:
    """Start a server, wait until it has answered once, stop it in the end."""
    log = scratch / f"{server.name}-{server.port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=output, cwd=scratch
        )
    try:
        server.pid = process.pid
        wait_until_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(
    server: Server, process: subprocess.Popen[bytes], log: Path
) -> None:
    hello = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
        "temperature": 0,
    }
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            server.ask(hello)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{server.name} does not start: {log.read_text()}"
                ) from error
            time.sleep(0.2)
        else:
            return


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """[resident bytes before, most seen while inside], looked at every 10 ms."""
    process = psutil.Process(pid)
    resident = process.memory_info().rss
    first_and_peak = [resident, resident]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            resident = process.memory_info().rss
            first_and_peak[1] = max(first_and_peak[1], resident)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield first_and_peak
    finally:
        stop.set()
        watcher.join()


BURN = """
import sys, time
for line in sys.stdin:
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    print(flush=True)
"""


@contextmanager
def burner() -> Iterator[Callable[[], float]]:
    """A function that waits while another program computes for 50 ms; the seconds it took."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", BURN], **pipes) as process:
        stdin = process.stdin
        stdout = process.stdout
        assert stdin and stdout

        def burn() -> float:
            began = time.perf_counter()
            stdin.write("\n")
            stdin.flush()
            stdout.readline()
            return time.perf_counter() - began

        yield burn
        stdin.close()
