"""How often one key guesses, by time, which of two texts another key has sent.

    .venv/bin/python benchmarks/tenants.py [--guesses 60] [--server start-llm.py]

It starts a server of its own, with CACHE_ISOLATION=key and two keys. In each round the
first key sends one of two new texts, chosen at random. Then the second key sends both,
in random order, and takes the quicker one for it. With nothing to learn it is right as
often as a coin; the probability says how often a coin is at least as far from half.

    text     the second key sends the texts as they are: memos of all kinds
    words    it sends their words in another order: what the tokenizer keeps

Requests count tokens, so the model's own time hides nothing.
"""

import argparse
import http.client
import json
import math
import os
import random
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("first-key", "second-key")
N_WORDS = 3_000
START_SECONDS = 120


@contextmanager
def serving(script: Path, model: str) -> Iterator[int]:
    """The port of a server that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with TemporaryDirectory() as log_folder:
        settings = {
            "MODEL_PATH": model,
            "MLX_HOST": "127.0.0.1",
            "MLX_PORT": str(port),
            "CACHE_DISK": "off",
            "API_KEY": ",".join(KEYS),
            "CACHE_ISOLATION": "key",
            "ENABLE_PROXY": "false",
            "LOG_ROOT": log_folder,
        }
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **settings},
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until_ready(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), closing(connect(port)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError("the server does not become ready")


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)


def count_tokens(port: int, key: str, text: str) -> float:
    """The seconds that a request takes. Raises RuntimeError if it is refused."""
    body = {"messages": [{"role": "user", "content": text}]}
    payload = json.dumps(body)
    headers = {"x-api-key": key, "Content-Type": "application/json"}
    with closing(connect(port)) as connection:
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/messages/count_tokens", payload, headers)
        response = connection.getresponse()
        answer = response.read()
        spent = time.perf_counter() - began
    if response.status != 200:
        raise RuntimeError(answer.decode())
    return spent


def random_words(dice: random.Random) -> list[str]:
    letters = string.ascii_lowercase
    return [
        "".join(dice.choices(letters, k=dice.randint(5, 12))) for _ in range(N_WORDS)
    ]


def guess_is_right(port: int, kind: str, dice: random.Random) -> bool:
    """One round."""
    texts = [random_words(dice), random_words(dice)]
    sent = dice.randrange(2)
    count_tokens(port, KEYS[0], " ".join(texts[sent]))

    times = [0.0, 0.0]
    for index in dice.sample(range(2), 2):
        words = texts[index]
        if kind == "words":
            words = dice.sample(words, len(words))
        times[index] = count_tokens(port, KEYS[1], " ".join(words))
    return times.index(min(times)) == sent


def chance(n_right: int, n_guesses: int) -> float:
    """The probability that a coin is at least as far from half."""
    distance = abs(n_right - n_guesses / 2)
    n_ways = sum(
        math.comb(n_guesses, n)
        for n in range(n_guesses + 1)
        if abs(n - n_guesses / 2) >= distance
    )
    return n_ways / 2**n_guesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--guesses", type=int, default=60)
    parser.add_argument("--server", type=Path, default=ROOT / "start-llm.py")
    parser.add_argument("--model", default="demo", help="repository, folder or demo")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    dice = random.Random(options.seed)
    with serving(options.server, options.model) as port:
        for key in KEYS:
            count_tokens(port, key, "Hello.")
        for kind in ("text", "words"):
            rights = [guess_is_right(port, kind, dice) for _ in range(options.guesses)]
            n_right = sum(rights)
            probability = chance(n_right, options.guesses)
            print(
                f"{kind:6} {n_right} of {options.guesses} right, p = {probability:.2g}"
            )


if __name__ == "__main__":
    main()
