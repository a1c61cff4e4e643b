"""What a restart costs: the first token after it, beside warm and cold ones.

    .venv/bin/python benchmarks/restart.py [--tokens 8000 16000] [--only WORD ...]

For dense and hybrid models, in one run, each length in turn:

    cold      the first request of a conversation
    warm      the same conversation with a new message
    restart   the same after the server was stopped and started
    dropped   the same, with the files out of the system's page cache

    writing   tokens a second of a reply while a large entry is written, beside alone
    growth    bytes of files beside bytes of new KV, over 30 turns of a conversation
    start     seconds to read 10,000 headers

Medians of three rounds. The figures are ratios within this run.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from compared_servers import Server, our_server
from project_files import make_tiny_model, start_llm

TEXT = "the agent reads a file and writes what it has found into another one"
ROUNDS = 3
N_REPLIES = 30  # in which entries are written


def words(n: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(TEXT.split(), k=n))


def ask(server: Server, *texts: str, max_tokens: int = 2) -> Any:
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return server.ask(body)


def drop_page_cache(folder: Path) -> None:
    """Have the system forget what it holds of these files."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def first_tokens(model: Path, scratch: Path, n_tokens: int) -> dict[str, float]:
    """Seconds to the first token, by what was done before; the median of the rounds."""
    seconds: dict[str, list[float]] = {}
    for number in range(ROUNDS):
        folder = scratch / f"disk-{n_tokens}-{number}"
        settings = {"cache_disk": "on", "cache_disk_folder": folder}
        text = words(n_tokens, number)

        def measure(name: str, server: Server, *texts: str) -> str:
            reply = ask(server, *texts)
            seconds.setdefault(name, []).append(reply.ttft)
            return str(reply.message.get("content") or "")

        with our_server(model, scratch, **settings) as server:
            answer = measure("cold", server, text)
            measure("warm", server, text, answer, words(20, 1))
        for seed, name in ((2, "restart"), (3, "dropped")):  # a new message each time
            if name == "dropped":
                drop_page_cache(folder)
            with our_server(model, scratch, **settings) as server:
                measure(name, server, text, answer, words(20, seed))
    return {name: statistics.median(values) for name, values in seconds.items()}


def writing(model: Path, scratch: Path) -> float:
    """Tokens a second of replies while entries are written, by those alone.

    The median of rounds, in each of which both are measured, one after the other.
    """
    ratios = []
    for number in range(ROUNDS):
        folder = scratch / f"disk-writing-{number}"
        alone = reply_speed(model, scratch)
        beside = reply_speed(model, scratch, cache_disk="on", cache_disk_folder=folder)
        assert list(folder.rglob("*.safetensors")), "nothing was written"
        ratios.append(beside / alone)
    print("rounds", *(f"{ratio:.2f}" for ratio in ratios))
    return statistics.median(ratios)


def reply_speed(model: Path, scratch: Path, **settings: object) -> float:
    """Tokens a second of replies, after eight conversations that are to be written."""
    with our_server(model, scratch, **settings) as server:
        for number in range(8):
            ask(server, words(3_000, number))
        n_out = 0
        seconds = 0.0
        for number in range(N_REPLIES):
            reply = ask(server, words(100, number), max_tokens=400)
            n_out += reply.n_out - 1
            seconds += reply.stamps[-1] - reply.stamps[0]
    return n_out / seconds


def growth(model: Path, scratch: Path) -> float:
    """Bytes written by bytes of new KV, over 30 turns with a stop after each."""
    folder = scratch / "disk-growth"
    settings = {"cache_disk": "on", "cache_disk_folder": folder}
    texts = [words(2000, 0)]
    n_kv = 0
    for number in range(30):
        with our_server(model, scratch, **settings) as server:
            reply = ask(server, *texts, max_tokens=20)
        n_kv = reply.n_prompt + reply.n_out
        texts += [str(reply.message.get("content") or "-"), words(300, number)]
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    (first, *_) = sorted(folder.rglob("*.safetensors"), key=lambda p: p.stat().st_mtime)
    segment, arrays = start_llm().read_segment(first, ("kv.",))
    kv_bytes = sum(array.nbytes for array in arrays.values())
    token_bytes = kv_bytes / (segment.end - segment.start)
    return n_bytes / (n_kv * token_bytes)


def start(scratch: Path, n_files: int = 10_000) -> float:
    """Seconds to open a folder of so many files."""
    module = start_llm()
    folder = scratch / "disk-start"
    folder.mkdir()
    for number in range(n_files):
        tokens = np.full(600, number, "<i4")
        key = module.TokenKey(b"r", tokens, [])
        segment = module.Segment(
            name=module.name_segment(key, 600),
            parent=module.name_segment(key, 0),
            start=0,
            end=600,
        )
        module.write_segment(folder, segment, {"tokens": tokens})
    lock_file = module._take_lock(folder)
    began = time.perf_counter()
    files = module.KVFiles(lock_file, max_bytes=1 << 40, max_bytes_per_day=1 << 40)
    seconds = time.perf_counter() - began
    assert files.report()["files"] == n_files
    files.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8_000, 16_000])
    parser.add_argument("--only", nargs="+", help="of: first, writing, growth, start")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        if is_wanted(options.only, "start"):
            print(f"start      10,000 files   {start(scratch):.2f} s", flush=True)
        for kind in ("qwen3", "qwen3_5"):
            maker = make_tiny_model()
            model = scratch / kind
            maker.make_model(model, maker.choose_recipe(kind, size="small"))
            measure_kind(kind, model, scratch / f"{kind}-runs", options)
    return 0


def is_wanted(only: list[str] | None, name: str) -> bool:
    return only is None or name in only


def measure_kind(
    kind: str, model: Path, scratch: Path, options: argparse.Namespace
) -> None:
    scratch.mkdir()
    if is_wanted(options.only, "first"):
        for n_tokens in options.tokens:
            seconds = first_tokens(model, scratch, n_tokens)
            ratios = "  ".join(
                f"{name} {value:.3f} s ({value / seconds['warm']:.2f})"
                for name, value in seconds.items()
            )
            print(f"{kind:8} {n_tokens:6} tokens  {ratios}", flush=True)
    others: dict[str, Callable[[], float]] = {
        "growth": lambda: growth(model, scratch),
        "writing": lambda: writing(model, scratch),
    }
    for name, measure in others.items():
        if is_wanted(options.only, name):
            print(f"{kind:8} {name:8} {measure():.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
