"""What hostile bodies cost before the model has them: peak memory, seconds, the answers.

    python benchmarks/limits.py [MODEL] [--only WORD ...] [--memory BYTES]

Starts the server of this folder anew for each load, sends it, and prints a line: how
many bodies got which status, seconds until the last answer, the longest time that
/health took meanwhile, memory before and at its peak, and what that is for each byte.

MODEL: a folder; the bundled demo model, if none is named, for images a tiny one.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import random
import socket
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from compared_servers import our_server, peak_memory
from PIL import Image
from project_files import tiny_vision

PATIENCE = 600  # seconds
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COUNT_TOKENS = "/v1/messages/count_tokens"
NUMBER = "@number@"


class Load(NamedTuple):
    """Bodies that are sent at once, or one after the other."""

    body: Callable[[], bytes]  # in each NUMBER is replaced by its index
    n: int = 1
    path: str = CHAT
    has_images: bool = False
    n_stalled: int = 0  # clients that have announced 5 MB before, and are silent
    stalled_bytes: int = 0  # that each of them has sent
    is_in_turn: bool = False


def chat(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1, **fields}).encode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def note(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def words(n_bytes: int, *, last: str = "") -> bytes:
    text = "some words of a client " * (n_bytes // 23) + last
    return json.dumps({**json.loads(chat(user(text)))}, ensure_ascii=False).encode()


def letters(n_bytes: int) -> bytes:
    rng = random.Random(1)
    return chat(user(base64.b64encode(rng.randbytes(n_bytes * 3 // 4)).decode()))


def short_messages(n_bytes: int) -> bytes:
    message = user("a")
    return chat(*[message] * (n_bytes // (len(json.dumps(message)) + 2)))


def calls(n_bytes: int) -> bytes:
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "call", "type": "function", "function": function}
    n_calls = n_bytes // (len(json.dumps(call)) + 2)
    answer = {"role": "assistant", "content": "", "tool_calls": [call] * n_calls}
    return chat(user("go"), answer, user("on"))


def parts(n_bytes: int) -> bytes:
    part = {"type": "text", "text": "a"}
    return chat(user([part] * (n_bytes // (len(json.dumps(part)) + 2))))


def tools(n_bytes: int) -> bytes:
    properties = {f"p{i}": {"type": "string"} for i in range(n_bytes // 30)}
    parameters = {"type": "object", "properties": properties}
    function = {"name": f"f{NUMBER}", "parameters": parameters}
    return chat(user("go"), tools=[{"type": "function", "function": function}])


def many_tools(n: int, **fields: Any) -> bytes:
    """Tools of 90 bytes each."""
    tools = []
    for i in range(n):
        parameters = {"type": "object", "properties": {}}
        function = {"name": f"f{NUMBER}{i}", "description": "d"}
        function["parameters"] = parameters
        tools.append({"type": "function", "function": function})
    return chat(user("go"), tools=tools, **fields)


def counted_tools(n: int) -> bytes:
    schema = {"type": "object"}
    tools = [{"name": f"f{i}", "input_schema": schema} for i in range(n)]
    return chat(user("go"), tools=tools)


def system_text(n_bytes: int) -> bytes:
    """A system message with a field that changes, which is rendered as it was first."""
    text = f"Current time is {NUMBER}. " + "some words of a client " * (n_bytes // 23)
    return chat(note(f"{text} {NUMBER}"), user("go"))


def named_schema(schema: dict[str, Any]) -> bytes:
    json_schema = {"name": "s", "schema": schema}
    wanted = {"type": "json_schema", "json_schema": json_schema}
    return chat(user("go"), response_format=wanted)


def schema_of_properties(n_bytes: int) -> bytes:
    properties = {f"p{i}{NUMBER}": {"type": "string"} for i in range(n_bytes // 35)}
    return named_schema({"type": "object", "properties": properties})


def schema_of_brackets(n_bytes: int) -> bytes:
    return named_schema({"type": "object", "examples": [[]] * (n_bytes // 4)})


def pattern(n_bytes: int) -> bytes:
    text = "^(" + "ab?" * (n_bytes // 3) + ")$"
    properties = {"p": {"type": "string", "pattern": text}}
    return named_schema({"type": "object", "properties": properties})


def strict_tool(n_bytes: int) -> bytes:
    properties = {f"p{i}": {"type": "string"} for i in range(n_bytes // 35)}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "f", "strict": True, "parameters": parameters}
    return chat(user("go"), tools=[{"type": "function", "function": function}])


def message_of_brackets(n_bytes: int) -> bytes:
    """A message with a field that nobody knows."""
    return chat({**user(f"go {NUMBER}"), "unknown": [[]] * (n_bytes // 4)})


def brackets(n_bytes: int) -> bytes:
    """A field that nobody knows."""
    return chat(user("go"), unknown=[[]] * (n_bytes // 4))


def notes(n: int) -> bytes:
    users = [user(f"hi {i}") for i in range(n)]
    return chat(*users, *[note(f"note {i}") for i in range(n)])


def reminders(n: int) -> bytes:
    block = "<system-reminder>\nplan {}\n</system-reminder>\n"
    return chat(user("".join(block.format(i) for i in range(n)) + "go on"))


def completion(n_bytes: int) -> bytes:
    prompt = "some words of a client " * (n_bytes // 23)
    return json.dumps({"prompt": prompt, "max_tokens": 1}).encode()


def token_ids(n_bytes: int) -> bytes:
    return json.dumps({"prompt": [1] * (n_bytes // 3), "max_tokens": 1}).encode()


def pictures(*files: bytes, kind: str = "png") -> bytes:
    """A message of such images alone."""
    head = f"data:image/{kind};base64,"
    urls = [head + base64.b64encode(file).decode() for file in files]
    contents = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return chat(user(contents))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def large_image() -> bytes:
    """An image of 64 million pixels in 10 kB."""
    return pictures(saved(Image.new("1", (8_000, 8_000))))


def noise(n_bytes: int) -> bytes:
    """An image of random pixels, which cannot be compressed."""
    side = int((n_bytes * 3 / 4 / 3) ** 0.5)
    pixels = random.Random(2).randbytes(side * side * 3)
    return pictures(saved(Image.frombytes("RGB", (side, side), pixels)))


def clear_picture() -> bytes:
    """An image of 64 million pixels, half transparent, in 250 kB."""
    return pictures(saved(Image.new("RGBA", (8_000, 8_000), (9, 0, 0, 128))))


def scans(n: int) -> bytes:
    """A progressive JPEG of 64 million pixels; its last scan comes again and again."""
    data = saved(Image.new("L", (8_000, 8_000)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return pictures(data[:-2] + scan * n + data[-2:], kind="jpeg")


def chunks(n: int) -> bytes:
    """A PNG of one pixel, and empty chunks."""
    data = saved(Image.new("L", (1, 1)))
    chunk = b"\0\0\0\0abCd" + zlib.crc32(b"abCd").to_bytes(4)
    return pictures(data[:33] + chunk * n + data[33:])


def nested(n_bytes: int) -> bytes:
    """Objects in objects, in a field that nobody knows."""
    value: Any = {}
    for _ in range(100):
        value = {"a": value}
    return chat(user("go"), unknown=[value] * (n_bytes // len(json.dumps(value))))


MB = 1_000_000
LOADS = {
    "10 MB of words": Load(lambda: words(10 * MB)),
    "10 MB of words, a wide character": Load(lambda: words(10 * MB, last="\U0001f642")),
    "10 MB without a space": Load(lambda: letters(10 * MB)),
    "10 MB of short messages": Load(lambda: short_messages(10 * MB)),
    "10 MB of text parts": Load(lambda: parts(10 * MB)),
    "10 MB of calls": Load(lambda: calls(10 * MB)),
    "10 MB of a tool": Load(lambda: tools(10 * MB)),
    "10 MB of brackets": Load(lambda: brackets(10 * MB)),
    "10 MB of a completion": Load(lambda: completion(10 * MB), path=COMPLETIONS),
    "10 MB of token ids": Load(lambda: token_ids(10 * MB), path=COMPLETIONS),
    "12,000 users, as many notes": Load(lambda: notes(12_000)),
    "32,000 reminders": Load(lambda: reminders(32_000)),
    "32,000 tools": Load(lambda: many_tools(32_000)),
    "120,000 tools": Load(lambda: many_tools(120_000)),
    "16,000 tools, a forced call": Load(
        lambda: many_tools(16_000, tool_choice="required")
    ),
    "count 16,000 tools": Load(lambda: counted_tools(16_000), path=COUNT_TOKENS),
    "six tools of 10 MB, in turn": Load(lambda: tools(10 * MB), n=6, is_in_turn=True),
    "25 systems of 2 MB, in turn": Load(
        lambda: system_text(2 * MB), n=25, is_in_turn=True
    ),
    "20 odd messages of 0.8 MB, in turn": Load(
        lambda: message_of_brackets(800_000), n=20, is_in_turn=True
    ),
    "schema of 10 MB": Load(lambda: schema_of_properties(10 * MB)),
    "schema of 10 MB of brackets": Load(lambda: schema_of_brackets(10 * MB)),
    "30 schemas of 200 kB, in turn": Load(
        lambda: schema_of_properties(200_000), n=30, is_in_turn=True
    ),
    "pattern of 1 MB": Load(lambda: pattern(MB)),
    "strict tool of 10 MB": Load(lambda: strict_tool(10 * MB)),
    "four of 5 MB": Load(lambda: words(5 * MB), n=4),
    "burst of 60 with 1 MB": Load(lambda: words(MB), n=60),
    "burst of 60 with 1 MB, no space": Load(lambda: letters(MB), n=60),
    "burst of 500 with 1 kB": Load(lambda: words(1_000), n=500),
    "six images of 64 megapixels": Load(large_image, n=6, has_images=True),
    "six images with transparency": Load(clear_picture, n=6, has_images=True),
    "an image of 3,000 scans": Load(lambda: scans(3_000), has_images=True),
    "an image of 3 million chunks": Load(lambda: chunks(3_000_000), has_images=True),
    "5 MB of short messages": Load(lambda: short_messages(5 * MB)),
    "5 MB of a tool": Load(lambda: tools(5 * MB)),
    "5 MB of objects in objects": Load(lambda: nested(5 * MB)),
    "60 MB of short messages": Load(lambda: short_messages(60 * MB)),
    "60 MB of a tool": Load(lambda: tools(60 * MB)),
    "60 MB of objects in objects": Load(lambda: nested(60 * MB)),
    "5 MB, five silent clients": Load(lambda: words(5 * MB), n_stalled=5),
    "5 MB, five that stall": Load(
        lambda: words(5 * MB), n_stalled=5, stalled_bytes=1 << 17
    ),
    "burst of 12 with 8 MB of image": Load(
        lambda: noise(8 * MB), n=12, has_images=True
    ),
}


def is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def announce(port: int, n_bytes: int) -> socket.socket:
    """A connection with a head that announces 5 MB, and some bytes of the body."""
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: {5 * MB}"
    connection.sendall(head.encode() + b"\r\n\r\n" + b" " * n_bytes)
    return connection


def send(port: int, path: str, body: bytes) -> str:
    """The status of the response, or how the connection was lost."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with closing(connection):
        try:
            connection.request("POST", path, body)
            response = connection.getresponse()
            response.read()
        except OSError as error:
            return type(error).__name__
        return str(response.status)


def measure(port: int, pid: int, load: Load) -> str:
    """Statuses, seconds, and memory of the process before and at its peak."""
    body = load.body()
    bodies = [body.replace(NUMBER.encode(), b"%d" % i) for i in range(load.n)]
    n_bytes = sum(map(len, bodies))
    health_seconds = 0.0
    is_done = threading.Event()

    def watch_health() -> None:
        nonlocal health_seconds
        while not is_done.wait(0.1):
            asked_at = time.monotonic()
            is_ready(port)
            health_seconds = max(health_seconds, time.monotonic() - asked_at)

    n_clients = 1 if load.is_in_turn else load.n
    with (
        ThreadPoolExecutor(1) as watchers,
        ThreadPoolExecutor(n_clients) as clients,
        ExitStack() as stack,
        peak_memory(pid) as resident,
    ):
        for _ in range(load.n_stalled):
            stack.enter_context(announce(port, load.stalled_bytes))
        time.sleep(load.n_stalled > 0)  # until they are read
        watch = watchers.submit(watch_health)
        started_at = time.monotonic()
        sent = clients.map(lambda body: send(port, load.path, body), bodies)
        statuses = Counter(sent)
        seconds = time.monotonic() - started_at
        is_done.set()
        watch.result()
    first_rss, peak_rss = resident
    time.sleep(1)
    last_rss = psutil.Process(pid).memory_info().rss

    counts = ", ".join(f"{n} x {status}" for status, n in statuses.items())
    return (
        f"{counts:12} {seconds:6.1f} s  /health {health_seconds:4.1f} s"
        f"  {first_rss / 1e6:5.0f} -> {peak_rss / 1e6:6.0f} MB"
        f" -> {last_rss / 1e6:5.0f} MB"
        f"  {(peak_rss - first_rss) / n_bytes:6.1f} a byte"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--memory", type=int, default=0)
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        for name, load in LOADS.items():
            if not any(word in name for word in options.only):
                continue
            scratch = Path(folder)
            model = Path(options.model or "demo")
            if load.has_images and not options.model:
                model = tiny_vision().tiny_vision_model("qwen3_vl", scratch)
            with our_server(
                model, scratch, memory_limit_bytes=options.memory
            ) as server:
                text = measure(server.port, server.pid, load)
            print(f"{name:35} {text}", flush=True)


if __name__ == "__main__":
    main()
