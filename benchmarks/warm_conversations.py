"""How many conversations stay warm in the same memory, with KV_BITS and without.

    .venv/bin/python benchmarks/warm_conversations.py [--conversations 40] [--tokens 700]

A dense random model in bfloat16, and a budget of KV (PROMPT_CACHE_MAX_BYTES) that is full after
some ten conversations. All are begun, one after the other; then each gets a new message, those
that were begun last first. It is warm if nine tenths of its prompt are reused. Nothing here
depends on time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx.core as mx
from compared_servers import Server, our_server
from project_files import make_tiny_model

TEXT: Final = "the agent reads a file and writes what it has found into another one"
N_PLAIN: Final = 10  # conversations that fit, about, as bfloat16
LAYERS: Final = 2
HEADS: Final = {"kv_heads": 1, "head_dim": 128}
SCHEMES: Final = [("off", "uniform"), ("8", "uniform"), ("4", "turboquant")]


def make_model(folder: Path) -> None:
    """A random model, as wide in a token of KV as few layers of a real one."""
    maker = make_tiny_model()
    recipe = maker.choose_recipe("qwen3", layers=LAYERS, **HEADS)
    maker.make_model(folder, recipe)
    file = folder / "model.safetensors"
    weights = {
        name: array.astype(mx.bfloat16) for name, array in mx.load(str(file)).items()
    }
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


def user(n_words: int, seed: int) -> dict[str, Any]:
    """A message of so many words, each of which is a token."""
    words = random.Random(seed).choices(TEXT.split(), k=n_words)
    return {"role": "user", "content": " ".join(words)}


def ask(server: Server, messages: list[dict[str, Any]]) -> Any:
    return server.ask({"messages": messages, "max_tokens": 2, "temperature": 0})


def evictions(server: Server) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/v1/status")
    counters = json.loads(connection.getresponse().read())["counters"]
    connection.close()
    return int(counters["evicted_for_room"])


def count_warm(server: Server, n_conversations: int, n_tokens: int) -> tuple[int, int]:
    """Conversations that are warm once all have begun, and evictions until then."""
    begun = []
    for number in range(n_conversations):
        messages = [user(n_tokens, number)]
        begun.append([*messages, ask(server, messages).message])
    n_evicted = evictions(server)

    n_warm = 0
    for number, messages in reversed([*enumerate(begun)]):
        reply = ask(server, [*messages, user(8, -1 - number)])
        n_warm += reply.n_cached > 0.9 * reply.n_prompt
    return n_warm, n_evicted


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=700)
    options = parser.parse_args()

    token_bytes = LAYERS * HEADS["kv_heads"] * HEADS["head_dim"] * 2 * 2
    budget = N_PLAIN * options.tokens * token_bytes
    print(f"{options.conversations} conversations of {options.tokens:,} tokens", end="")
    print(f", {budget / 1e6:.0f} MB of KV\n")
    print("| KV_BITS | scheme | warm | by plain KV | evictions |")
    print("|---|---|--:|--:|--:|")
    n_plain = 0
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for bits, scheme in SCHEMES:
            settings = {
                "cpu_float32": "off",
                "kv_bits": bits,
                "kv_quant_scheme": scheme,
                "prompt_cache_max_bytes": budget,
            }
            with our_server(model, Path(folder), **settings) as server:
                n_warm, n_evicted = count_warm(
                    server, options.conversations, options.tokens
                )
            n_plain = n_plain or n_warm
            ratio = f"{n_warm / n_plain:.1f}"
            print(
                f"| {bits} | {scheme} | {n_warm} | {ratio} | {n_evicted} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
