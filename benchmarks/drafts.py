"""What drafts do to decoding: tokens a second with them by those without, in one run.

    LD_PRELOAD=... .venv/bin/python benchmarks/drafts.py [--rounds 3] [--kinds qwen3 qwen3_5]

For each kind of reply, which a constraint forces, since models here are random:

    rewrite  400 tokens that stand before, every 150th of them another one
    diff     pieces of 24 tokens of that text, with 12 new ones between them
    call     40 new tokens, then 200 that stand before
    free     400 random tokens

LD_PRELOAD: the OpenBLAS that install_and_run.py uses (libopenblas-for-mlx.so in .venv). Without
it a call of 32 tokens takes as long as 30 of one, and drafts rest.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import mlx_lm
import numpy as np
from project_files import make_tiny_model, start_llm

SIZE: Final = {"hidden": 512, "mlp": 1536, "layers": 8}
N_TEXT: Final = 400
N_WORDS: Final = 300  # of the vocabulary that are plain words, from the tenth on


def words(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, N_WORDS) for _ in range(n)]


def rewrite(rng: random.Random, text: list[int]) -> list[int]:
    return [words(rng, 1)[0] if n % 150 == 149 else text[n] for n in range(N_TEXT)]


def diff(rng: random.Random, text: list[int]) -> list[int]:
    reply: list[int] = []
    for start in range(0, N_TEXT - 24, 48):
        reply += text[start : start + 24] + words(rng, 12)
    return reply


def call(rng: random.Random, text: list[int]) -> list[int]:
    return words(rng, 40) + text[100:300]


def free(rng: random.Random, _text: list[int]) -> list[int]:
    return words(rng, N_TEXT)


REPLIES: Final[dict[str, Callable[[random.Random, list[int]], list[int]]]] = {
    "rewrite": rewrite,
    "diff": diff,
    "call": call,
    "free": free,
}


class Decoder:
    """An engine that is made to write a reply."""

    def __init__(self, folder: Path, speculation: str) -> None:
        self._server = start_llm()
        config = self._server.Config(model_path=str(folder), speculation=speculation)
        self.metrics = self._server.CacheMetrics()
        self._engine = self._server.Engine(
            config, self.metrics, load=lambda: self._server.load_model(folder, config)
        )
        self._engine.start()
        while self._engine.state == "loading":
            time.sleep(0.01)

    def speed(self, prompt: list[int], reply: list[int]) -> float:
        """Tokens a second, from the first to the last."""
        server = self._server

        def force() -> Iterator[Any]:
            for token_id in reply:
                flags = np.zeros(token_id + 1, bool)
                flags[token_id] = True
                yield server.AllowedTokens(flags, others=False)
            yield server.AllowedTokens(
                n_steps=1 << 40
            )  # the last step samples one more

        tokens = np.array(prompt, np.int32)
        request = server.EngineRequest(
            key=server.TokenKey(b"", tokens, server.block_hashes(tokens, 16, root=b"")),
            checkpoint_positions=(),
            max_tokens=len(reply),
            sampling=server.SamplingParams(temperature=0, repetition_context_size=0),
            constraints=(force,),
        )
        handle = self._engine.submit(request)
        stamps: list[float] = []
        ids: list[int] = []
        while not isinstance(event := handle.next_event(600), server.FinishedEvent):
            if isinstance(event, server.TokenEvent):
                ids.append(event.token_id)
                stamps.append(time.perf_counter())
        assert ids == reply, "it wrote something else"
        return (len(ids) - 1) / (stamps[-1] - stamps[0])

    def stop(self) -> None:
        self._engine.stop()


def measure(folder: Path, kind: str, rounds: int) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    assert len(tokenizer) > N_WORDS
    plain = Decoder(folder, "off")
    drafting = Decoder(folder, "auto")
    rng = random.Random(1)
    text = words(rng, N_TEXT)
    for name, write in REPLIES.items():
        reply = write(rng, text)
        ratios = []
        for _ in range(rounds):
            prompt = text + words(rng, 40)
            without = plain.speed(prompt, reply)
            ratios.append(drafting.speed(prompt, reply) / without)
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{kind:8} {name:8} {shown}  ({without:.0f} tokens/s without)", flush=True
        )
    counts = drafting.metrics.snapshot()
    print(kind, {name: counts[name] for name in counts if "draft" in name})
    plain.stop()
    drafting.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["qwen3", "qwen3_5"])
    options = parser.parse_args()
    maker = make_tiny_model()
    with TemporaryDirectory() as scratch:
        for kind in options.kinds:
            folder = Path(scratch) / kind
            maker.make_model(folder, maker.choose_recipe(kind, size="small", **SIZE))
            measure(folder, kind, options.rounds)


if __name__ == "__main__":
    main()
