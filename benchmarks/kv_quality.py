"""What KV_BITS changes in what a model says, and what it costs: beside plain KV, in one run.

    .venv/bin/python benchmarks/kv_quality.py [MODEL_DIR] [--text FILE]

It prints a table in Markdown, a line for each scheme:

    bytes     of packed KV by those of bfloat16
    KL        of the next token's probabilities to those with plain KV, in nats, mean over a text
    top       tokens of that text for which the likeliest next token is the same
    speed     with --speed: prefill and decode of 8,000 tokens, by those with plain KV
    peak      with --peak: bytes at most in a prefill of so many tokens, beside the weights

Without a text, three conversations are the text (conversations.json): the demo model has not seen
their words.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from project_files import start_llm

DEMO: Final = Path(__file__).resolve().parents[1] / "models" / "demo"
MAX_TOKENS: Final = 2_000  # of a text that are read at once
SLICE_TOKENS: Final = 512  # of a prefill
CONVERSATIONS: Final = Path(__file__).with_name("conversations.json")
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
    for talk in json.loads(CONVERSATIONS.read_text("utf-8")):
        ids = tokenizer.apply_chat_template(
            talk["messages"], tools=talk["tools"] or None, return_dict=False
        )
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


# -- time and memory ---------------------------------------------------------------------


def prefill(model: Any, n_tokens: int) -> list[Any]:
    """The caches of a model that has read so many tokens."""
    ids = mx.array([[index % 1_000 for index in range(n_tokens)]])
    cache = make_prompt_cache(model)
    for start in range(0, n_tokens, SLICE_TOKENS):
        model(ids[:, start : start + SLICE_TOKENS], cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


def peak_bytes(model: Any, n_tokens: int) -> int:
    """Of memory, at most, in a prefill and a decode step after it; without weights.

    From now on the model computes in bfloat16.
    """
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    mx.clear_cache()
    n_before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = prefill(model, n_tokens)
    mx.eval(model(mx.array([[1]]), cache=cache))
    n_peak: int = mx.get_peak_memory() - n_before
    return n_peak


def seconds_of(model: Any, n_tokens: int, n_out: int = 20) -> tuple[float, float]:
    """Of a prefill, and of one decode step after it."""
    began = time.perf_counter()
    cache = prefill(model, n_tokens)
    read = time.perf_counter() - began
    steps = []
    for _ in range(n_out):
        began = time.perf_counter()
        mx.eval(model(mx.array([[1]]), cache=cache))
        steps.append(time.perf_counter() - began)
    return read, statistics.median(steps)


def speed(plain: Any, packed: Any, n_tokens: int) -> list[str]:
    """Ratios of prefill and decode; pairs, one after the other."""
    pairs = [(seconds_of(plain, n_tokens), seconds_of(packed, n_tokens)) for _ in "abc"]
    return [
        f"{statistics.median(old[i] / new[i] for old, new in pairs):.2f}"
        for i in range(2)
    ]


# -- the table -----------------------------------------------------------------------------


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


def print_row(cells: list[str]) -> None:
    """One line of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, default=DEMO)
    parser.add_argument(
        "--text", type=Path, help="a file of what the model is used for"
    )
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--schemes", help='some of them, as in "plain-off uniform-8"')
    parser.add_argument("--speed", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--peak", type=int, default=0, metavar="TOKENS")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    path = options.model_dir

    plain, tokenizer = mlx_lm.load(str(path))
    expected = [
        (ids, log_probabilities(plain, ids)) for ids in texts(tokenizer, options)
    ]
    print("tokens", sum(len(ids) for ids, _ in expected), end="\n\n", flush=True)
    names = ["scheme", "bits", "bytes", "KL", "top"]
    names += ["prefill", "decode"] if options.speed else []
    names += ["peak"] if options.peak else []
    print_row(names)
    print_row(["---", *("--:" for _ in names[1:])])
    for scheme, bits in [("plain", "off"), *SCHEMES]:
        if options.schemes and f"{scheme}-{bits}" not in options.schemes.split():
            continue

        def load(folder: Path, scheme: str = scheme, bits: str = bits) -> Any:
            name = "uniform" if scheme == "plain" else scheme
            return with_packing(folder, name, bits, options.group_size)

        model = load(path)
        kl, top = compare(model, expected)
        row = [scheme, bits, f"{share_of_bytes(path, load):.2f}"]
        row += [f"{kl:.6f}", f"{top:.2%}"]
        if options.speed:
            row += speed(plain, model, options.speed)
        if options.peak:
            row.append(f"{peak_bytes(model, options.peak) / 1e6:,.0f} MB")
        print_row(row)


if __name__ == "__main__":
    main()
