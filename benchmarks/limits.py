"""What hostile bodies cost before the model has them: peak memory, seconds, the answer.

    python benchmarks/limits.py [MODEL]      the bundled demo model, if none is named

Starts the server of this folder, sends each load to it, and prints a line for each.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
from compared_servers import free_port

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300  # seconds


def chat(*messages: dict[str, str]) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def note(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def words(n_bytes: int) -> bytes:
    return chat(user("some words of a client " * (n_bytes // 23)))


def notes(n: int) -> bytes:
    users = [user(f"hi {i}") for i in range(n)]
    return chat(*users, *[note(f"note {i}") for i in range(n)])


def reminders(n: int) -> bytes:
    block = "<system-reminder>\nplan {}\n</system-reminder>\n"
    return chat(user("".join(block.format(i) for i in range(n)) + "go on"))


LOADS = {
    "10 MB of words": [words(10_000_000)],
    "four of 5 MB": [words(5_000_000)] * 4,
    "12,000 users, as many notes": [notes(12_000)],
    "32,000 reminders": [reminders(32_000)],
}


@contextmanager
def serving(model: str) -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of a server that is ready."""
    port = free_port()
    settings = {"MODEL_PATH": model, "MLX_PORT": str(port), "ENABLE_PROXY": "false"}
    process = subprocess.Popen(
        [sys.executable, "start-llm.py"],
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not is_ready(port):
            if process.poll() is not None:
                raise SystemExit("the server has ended")
            time.sleep(0.2)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def send(port: int, body: bytes) -> int:
    """The status of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        response.read()
        return response.status


def measure(port: int, process: psutil.Process, bodies: list[bytes]) -> str:
    """Statuses, seconds, and memory of the process before and at its peak."""
    first_rss = process.memory_info().rss
    peak_rss = first_rss
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak_rss
        while not is_done.wait(0.01):
            peak_rss = max(peak_rss, process.memory_info().rss)

    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        watcher = pool.submit(watch)
        started_at = time.monotonic()
        statuses = list(pool.map(lambda body: send(port, body), bodies))
        seconds = time.monotonic() - started_at
        is_done.set()
        watcher.result()
    return f"{statuses} {seconds:5.1f} s  {first_rss / 1e6:6.0f} -> {peak_rss / 1e6:6.0f} MB"


def main() -> None:
    with serving(*(sys.argv[1:2] or ["demo"])) as (port, process):
        for name, bodies in LOADS.items():
            print(f"{name:30} {measure(port, process, bodies)}", flush=True)


if __name__ == "__main__":
    main()
