"""What KV_BITS changes in what a model says, and in how fast: beside plain KV, in one run.

    .venv/bin/python benchmarks/kv_quality.py [MODEL_DIR] [--text FILE] [--conversations 40]

    kl      of the next token's probabilities to those with plain KV, in nats, mean over a text
    top     tokens of that text for which the likeliest next token is the same
    right   of the demo model's replies that should call a tool: the right one, to the character
    quotes  of its answers after a result: everything that they must quote (a value in a file that
            was read some turns before)
    bytes   of packed KV by those of bfloat16
    speed   with --speed: prefill and decode of 8,000 tokens, by those with plain KV

Without a text, for the demo model alone, conversations that it has not seen are the text.
"""

from __future__ import annotations

import argparse
import copyreg
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import demo_model
import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from project_files import start_llm

DEMO: Final = Path(__file__).resolve().parents[1] / "models" / "demo"
MAX_TOKENS: Final = 2_000  # of a text that are read at once
SCHEMES: Final = [
    *(("uniform", bits) for bits in ("8", "6", "4", "3.5", "3", "2.5", "2")),
    *(("turboquant", bits) for bits in ("8", "4", "3.5", "3", "2.5")),
]


def texts(tokenizer: Any, options: argparse.Namespace) -> Iterator[list[int]]:
    """Token ids to be read, some thousand."""
    if options.text is not None:
        ids = tokenizer.encode(options.text.read_text("utf-8"))
        for start in range(0, len(ids), MAX_TOKENS):
            yield ids[start : start + MAX_TOKENS]
        return
    for seed in range(3):
        rng = random.Random(f"kv {seed}")
        talk = demo_model.write_conversation(rng, held_out=True, n_exchanges=8)
        ids = tokenizer.apply_chat_template(talk.messages(), tools=talk.tools or None)
        yield list(ids)[:MAX_TOKENS]


def log_probabilities(model: Any, ids: list[int]) -> mx.array:
    """Of the token after each of these: `(n, vocab)`."""
    logits = model(mx.array(ids)[None], cache=make_prompt_cache(model))[0]
    logits = logits.astype(mx.float32)
    probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(probabilities)
    return probabilities


def compare(
    model: Any, expected: list[tuple[list[int], mx.array]]
) -> tuple[float, float]:
    """(kl, top) of a model whose KV is packed."""
    n_tokens = sum(len(ids) for ids, _ in expected)
    total = 0.0
    n_same = 0
    for ids, plain in expected:
        packed = log_probabilities(model, ids)
        total += float((mx.exp(plain) * (plain - packed)).sum())
        n_same += int((plain.argmax(-1) == packed.argmax(-1)).sum())
    return total / n_tokens, n_same / n_tokens


def replies(speaker: Any, options: argparse.Namespace) -> str:
    """Shares of the demo model's replies that are right."""
    counts: dict[str, Counter[bool]] = {}
    for _, name, is_good in demo_model.verdicts(speaker, options):
        counts.setdefault(name, Counter())[is_good] += 1
    shares = {name: count[True] / count.total() for name, count in counts.items()}
    return "  ".join(f"{name} {shares[name]:.3f}" for name in ("right", "quotes"))


def seconds_of(model: Any, n_tokens: int, n_out: int = 20) -> tuple[float, float]:
    """Of a prefill, and of one decode step after it."""
    ids = mx.array([[index % 1_000 for index in range(n_tokens)]])
    cache = make_prompt_cache(model)
    began = time.perf_counter()
    for start in range(0, n_tokens, 512):
        model(ids[:, start : start + 512], cache=cache)
        mx.eval([layer.state for layer in cache])
    read = time.perf_counter() - began
    steps = []
    for _ in range(n_out):
        began = time.perf_counter()
        mx.eval(model(ids[:, :1], cache=cache))
        steps.append(time.perf_counter() - began)
    return read, statistics.median(steps)


def speed(plain: Any, packed: Any, n_tokens: int) -> str:
    """Ratios of prefill and decode; pairs, one after the other."""
    pairs = [(seconds_of(plain, n_tokens), seconds_of(packed, n_tokens)) for _ in "abc"]
    prefill = statistics.median(old[0] / new[0] for old, new in pairs)
    decode = statistics.median(old[1] / new[1] for old, new in pairs)
    return f"prefill {prefill:.2f}  decode {decode:.2f}"


def with_packing(path: Path, scheme: str, bits: str, group_size: str) -> Any:
    """The model, as the server has it with these settings."""
    module = start_llm()
    model, _ = mlx_lm.load(str(path))
    settings = {"kv_quant_scheme": scheme, "kv_bits": bits, "kv_group_size": group_size}
    module.pack_caches(model, module.choose_packing(module.Config(**settings)))
    return model


def share_of_bytes(path: Path, make: Callable[[Path], Any]) -> float:
    """Bytes of a token by those of bfloat16."""
    module = start_llm()
    plain, _ = mlx_lm.load(str(path))
    packed = make(path)
    plain.set_dtype(mx.bfloat16)
    packed.set_dtype(mx.bfloat16)
    share: float
    share = module.measure_kv(packed).token_bytes / module.measure_kv(plain).token_bytes
    return share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, default=DEMO)
    parser.add_argument(
        "--text", type=Path, help="a file of what the model is used for"
    )
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--speed", type=int, default=0, metavar="TOKENS")
    options = parser.parse_args()
    options.filler = options.seed = options.seconds = 0
    options.show = False
    path = options.model_dir
    copyreg.pickle(mx.Dtype, str)  # demo_model copies caches, which name one

    plain, tokenizer = mlx_lm.load(str(path))
    expected = [
        (ids, log_probabilities(plain, ids)) for ids in texts(tokenizer, options)
    ]
    print("tokens", sum(len(ids) for ids, _ in expected), flush=True)
    for scheme, bits in [("plain", "off"), *SCHEMES]:

        def load(folder: Path, scheme: str = scheme, bits: str = bits) -> Any:
            name = "uniform" if scheme == "plain" else scheme
            return with_packing(folder, name, bits, options.group_size)

        model = load(path)
        kl, top = compare(model, expected)
        line = f"{scheme:10} {bits:>3}  bytes {share_of_bytes(path, load):.3f}"
        line += f"  kl {kl:.6f}  top {top:.4f}"
        if path == DEMO and options.conversations:
            speaker = demo_model.Speaker(path)
            speaker.model = model
            speaker.open([])  # with caches of this model
            line += "  " + replies(speaker, options)
        if options.speed and bits != "off":
            line += "  " + speed(plain, model, options.speed)
        print(line, flush=True)


if __name__ == "__main__":
    main()
