"""What KV_BITS changes in what a model says, and what it costs: beside plain KV, in one run.

    .venv/bin/python benchmarks/kv_quality.py [MODEL_DIR] [--text FILE] [--conversations 40]

It prints a table in Markdown, a line for each scheme:

    bytes     of packed KV by those of bfloat16
    KL        of the next token's probabilities to those with plain KV, in nats, mean over a text
    top       tokens of that text for which the likeliest next token is the same
    calls     of the demo model's replies that should call a tool: the right one, to the character
    quotes    of its answers after a result: everything that they must quote
    needles   with --needles: of its answers to questions about a file that was read when 10, 50 or
              90 % of a conversation of --context tokens were there, and that were not asked then:
              the value, to the character
    speed     with --speed: prefill and decode of 8,000 tokens, by those with plain KV
    peak      with --peak: bytes at most in a prefill of so many tokens, beside the weights

Without a text, for the demo model alone, conversations that it has not seen are the text.
The scheme mlx-vlm is that library's own TurboQuant, in all layers that the others pack.
"""

from __future__ import annotations

import argparse
import copy
import copyreg
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import demo_model
import mlx.core as mx
import mlx_lm
from demo_model import demo_dialogues
from mlx_lm.models.cache import KVCache, make_prompt_cache
from project_files import start_llm

DEMO: Final = Path(__file__).resolve().parents[1] / "models" / "demo"
MAX_TOKENS: Final = 2_000  # of a text that are read at once
SLICE_TOKENS: Final = 512  # of a prefill
DEPTHS: Final = (0.1, 0.5, 0.9)  # of a conversation, where a needle lies
SCHEMES: Final = [
    *(("uniform", bits) for bits in ("8", "6", "4", "3.5", "3", "2.5", "2")),
    *(("turboquant", bits) for bits in ("8", "4", "3.5", "3", "2.5")),
    *(("mlx-vlm", bits) for bits in ("8", "4", "4/3", "3.5", "3")),
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


def replies(speaker: Any, options: argparse.Namespace) -> list[str]:
    """The demo model's replies that are right, of all."""
    counts: dict[str, Counter[bool]] = {}
    for _, name, is_good in demo_model.verdicts(speaker, options):
        counts.setdefault(name, Counter())[is_good] += 1
    judged = [counts["right"], counts["quotes"]]
    return [f"{count[True]} of {count.total()}" for count in judged]


# -- needles -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needle:
    """A value in a file, and the question that is asked for it at the end."""

    depth: float  # share of the conversation that was there when the file was read
    question: str
    key: str
    line_end: str  # of the value's line, after the key


@dataclass(frozen=True, slots=True)
class Haystack:
    """A conversation about files, three of which have needles."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    needles: list[Needle]


def write_haystack(speaker: Any, rng: random.Random, n_tokens: int) -> Haystack:
    """One of so many tokens, in words that the demo model has not seen."""
    words = demo_dialogues.Words(rng, held_out=True)
    desk = demo_dialogues.Desk(words)
    desk.roles["read"] = demo_dialogues.offer_role(words, "read")
    tools = [desk.roles["read"].schema]
    draws = [demo_dialogues.read_key, demo_dialogues.read_whole]
    exchanges: list[demo_dialogues.Exchange] = []
    needles: list[Needle] = []
    waiting = list(DEPTHS)

    def messages() -> list[dict[str, Any]]:
        talk = demo_dialogues.Conversation("", tools, tuple(exchanges))
        return talk.messages()

    n_there = 0
    while n_there < n_tokens:
        if waiting and n_there >= waiting[0] * n_tokens:
            exchange, found = write_needles(desk, waiting.pop(0))
            exchanges.append(exchange)
            needles += found
        else:
            exchanges.append(rng.choice(draws)(desk))
        n_there = len(speaker.tokens(messages(), tools))

    results = [step.result for exchange in exchanges for step in exchange.steps]
    text = "\n".join(results)
    unique = [needle for needle in needles if text.count(needle.key) == 1]
    return Haystack(messages(), tools, unique)


def write_needles(
    desk: demo_dialogues.Desk, depth: float
) -> tuple[demo_dialogues.Exchange, list[Needle]]:
    """A question about the first value of a file, and needles: its other values."""
    file = desk.words.file()
    pairs, content, line_ends = demo_dialogues.settings(desk, 4)
    (key, value), *others = pairs
    exchange = demo_dialogues.Exchange(
        "key",
        desk.say("read_key", k=key, f=file),
        (demo_dialogues.obtain(desk, file, content),),
        f"The result says: {key}{line_ends[0]}\nI can answer.",
        f"The {key} is {value}, says {file}.",
        (value,),
    )
    needles = [
        Needle(depth, desk.say("read_key", k=key, f=file), key, line_end)
        for (key, _), line_end in zip(others, line_ends[1:], strict=True)
    ]
    return exchange, needles


def find_needles(speaker: Any, haystack: Haystack) -> Iterator[tuple[float, bool]]:
    """(depth, whether the value is right) of each needle.

    The reply is begun, or the model would read the file again: "The result says: KEY".
    What it must go on with is the rest of that line.
    """
    prompts: list[list[int]] = []
    n_rests: list[int] = []
    for needle in haystack.needles:
        question = {"role": "user", "content": needle.question}
        prompt = speaker.tokens([*haystack.messages, question], haystack.tools)
        begun = f"The result says: {needle.key}"
        encode = speaker.tokenizer.encode
        reply = encode(f"{begun}{needle.line_end}\n", add_special_tokens=False)
        n_begun = len(encode(begun, add_special_tokens=False))
        prompts.append(prompt + reply)
        n_rests.append(len(reply) - n_begun)

    # All but the questions.
    n_read = min(len(prompt) for prompt in prompts)
    while any(prompt[:n_read] != prompts[0][:n_read] for prompt in prompts):
        n_read -= 1
    speaker.start_anew()
    speaker.prefill(prompts[0][:n_read])
    for needle, ids, n_rest in zip(haystack.needles, prompts, n_rests, strict=True):
        cache = copy.deepcopy(speaker.cache)
        logits = speaker.model(mx.array([ids[n_read:-1]]), cache=cache)[0, -n_rest:]
        yield needle.depth, logits.argmax(-1).tolist() == ids[-n_rest:]


def needle_shares(speaker: Any, haystacks: list[Haystack]) -> list[str]:
    """Right answers of all, for each depth."""
    counts: dict[float, Counter[bool]] = {depth: Counter() for depth in DEPTHS}
    for haystack in haystacks:
        for depth, is_right in find_needles(speaker, haystack):
            counts[depth][is_right] += 1
    return [f"{count[True]} of {count.total()}" for count in counts.values()]


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


def with_mlx_vlm(path: Path, bits: str) -> Any:
    """The model with mlx-vlm's codec in the place of ours.

    Its cache and its attention, as that library's own models call them; but in the last
    layer too, which it leaves plain. "4/3" has 4 bits for keys and 3 for values, as our
    3.5 have; its own 3.5 have it the other way round.
    """
    # Here, because it takes a second, and all else can do without.
    from mlx_vlm.models.base import scaled_dot_product_attention as attend_theirs
    from mlx_vlm.turboquant import TurboQuantKVCache

    model, _ = mlx_lm.load(str(path))
    make_plain = model.make_cache
    widths = {"bits": float(bits.split("/")[0])}
    if "/" in bits:
        key_bits, value_bits = map(float, bits.split("/"))
        widths |= {"key_bits": key_bits, "value_bits": value_bits}

    def make_packed() -> list[Any]:
        return [
            TurboQuantKVCache(**widths) if type(layer) is KVCache else layer
            for layer in make_plain()
        ]

    model.make_cache = make_packed
    for name in {type(part).__module__ for part in model.modules()}:
        attend = getattr(sys.modules[name], "scaled_dot_product_attention", None)
        if attend is not None and not isinstance(attend, EitherAttention):
            either = EitherAttention(attend, attend_theirs)
            sys.modules[name].scaled_dot_product_attention = either  # type: ignore[attr-defined]
    return model


@dataclass(frozen=True, slots=True)
class EitherAttention:
    """mlx-lm's attention, but mlx-vlm's for caches of its own."""

    attend_others: Callable[..., mx.array]
    attend_theirs: Callable[..., mx.array]

    def __call__(self, *args: Any, cache: Any, **kwargs: Any) -> mx.array:
        attend = self.attend_theirs if is_of_mlx_vlm(cache) else self.attend_others
        return attend(*args, cache=cache, **kwargs)


def is_of_mlx_vlm(cache: Any) -> bool:
    """Whether it is a cache with mlx-vlm's codec."""
    return type(cache).__module__ == "mlx_vlm.turboquant"


def share_of_bytes(path: Path, make: Callable[[Path], Any]) -> float:
    """Bytes of a token by those of bfloat16."""
    module = start_llm()
    plain, _ = mlx_lm.load(str(path))
    packed = make(path)
    if any(map(is_of_mlx_vlm, make_prompt_cache(packed))):
        return share_of_mlx_vlm(plain, packed)
    plain.set_dtype(mx.bfloat16)
    packed.set_dtype(mx.bfloat16)
    share: float
    share = module.measure_kv(packed).token_bytes / module.measure_kv(plain).token_bytes
    return share


def share_of_mlx_vlm(plain: Any, packed: Any, n_tokens: int = SLICE_TOKENS) -> float:
    """The same of caches that are no list of arrays: counted after so many tokens."""
    plain.set_dtype(mx.bfloat16)
    n_plain = n_packed = 0
    for old, new in zip(
        prefill(plain, n_tokens), prefill(packed, n_tokens), strict=True
    ):
        if is_of_mlx_vlm(new):
            n_plain += old.nbytes
            n_packed += new.nbytes
    return n_packed / n_plain


def headings(options: argparse.Namespace) -> list[str]:
    """Of the columns that are measured."""
    names = ["scheme", "bits", "bytes", "KL", "top"]
    if options.conversations:
        names += ["calls", "quotes"]
    if options.needles:
        names += [f"needles at {depth:.0%}" for depth in DEPTHS]
    if options.speed:
        names += ["prefill", "decode"]
    if options.peak:
        names.append("peak")
    return names


def print_row(cells: list[str]) -> None:
    """One line of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def parse_options() -> argparse.Namespace:
    """The command line, and what demo_model.verdicts() wants beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", nargs="?", type=Path, default=DEMO)
    parser.add_argument(
        "--text", type=Path, help="a file of what the model is used for"
    )
    parser.add_argument("--group-size", default="64")
    parser.add_argument("--schemes", help='some of them, as in "plain-off uniform-8"')
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--needles", type=int, default=0, metavar="CONVERSATIONS")
    parser.add_argument("--context", type=int, default=8_000, metavar="TOKENS")
    parser.add_argument("--speed", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--peak", type=int, default=0, metavar="TOKENS")
    options = parser.parse_args()
    options.filler = options.seed = options.seconds = 0
    options.show = False
    if options.model_dir != DEMO:  # the others were not trained to do it
        options.conversations = options.needles = 0
    return options


def measure(
    row: list[str],
    model: Any,
    plain: Any,
    haystacks: list[Haystack],
    options: argparse.Namespace,
) -> None:
    """Add to the row of a scheme what the options want measured."""
    if options.conversations or options.needles:
        speaker = demo_model.Speaker(options.model_dir)
        speaker.model = model
        speaker.open([])  # with caches of this model
    if options.conversations:
        row += replies(speaker, options)
    if options.needles:
        row += needle_shares(speaker, haystacks)
    if options.speed:
        row += speed(plain, model, options.speed)
    if options.peak:
        row.append(f"{peak_bytes(model, options.peak) / 1e6:,.0f} MB")


def main() -> None:
    options = parse_options()
    path = options.model_dir
    copyreg.pickle(mx.Dtype, str)  # demo_model copies caches, which name one

    plain, tokenizer = mlx_lm.load(str(path))
    expected = [
        (ids, log_probabilities(plain, ids)) for ids in texts(tokenizer, options)
    ]
    haystacks = []
    for seed in range(options.needles):
        speaker = demo_model.Speaker(path)
        rng = random.Random(f"needles {seed}")
        haystacks.append(write_haystack(speaker, rng, options.context))

    print("tokens", sum(len(ids) for ids, _ in expected), end="\n\n", flush=True)
    names = headings(options)
    print_row(names)
    print_row(["---", *("--:" for _ in names[1:])])
    for scheme, bits in [("plain", "off"), *SCHEMES]:
        if options.schemes and f"{scheme}-{bits}" not in options.schemes.split():
            continue

        def load(folder: Path, scheme: str = scheme, bits: str = bits) -> Any:
            if scheme == "mlx-vlm":
                return with_mlx_vlm(folder, bits)
            name = "uniform" if scheme == "plain" else scheme
            return with_packing(folder, name, bits, options.group_size)

        model = load(path)
        kl, top = compare(model, expected)
        row = [scheme, bits, f"{share_of_bytes(path, load):.2f}"]
        row += [f"{kl:.6f}", f"{top:.2%}"]
        measure(row, model, plain, haystacks, options)
        print_row(row)


if __name__ == "__main__":
    main()
