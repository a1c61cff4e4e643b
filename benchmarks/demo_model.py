"""How well the demo model does what it is for, on conversations that it has not seen.

    .venv/bin/python benchmarks/demo_model.py [MODEL_DIR] [--conversations 200] [--filler 16000]

Words of these conversations (files, tools, arguments, keys, values) occur in none that it learnt
from; `--filler` begins each system prompt with so many tokens of unrelated text (sources of
Python's library, which it never saw either), the same for twenty conversations. Every reply is
generated at temperature 0 after the right past.

    well-formed   of the replies that should call: one whole call of an offered tool, with every
                  required argument and no unknown one
    right         of the same replies: the right tool, and every argument to the character
    quotes        of the answers after a result: everything that they must quote
    no tool       of the questions that need none: answered without a call, and as expected
    title         of the wishes for a title: the expected one

With `LD_PRELOAD` of the OpenBLAS that install_and_run.py makes (`libopenblas-tried.so` in .venv)
it is about ten times faster on Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import inspect
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "training"))

import demo_dialogues  # noqa: E402, F401  (path; kv_quality.py takes it from here)
from demo_dialogues import Conversation, Exchange, Step, write_conversation  # noqa: E402  (path)

REPLY: Final = re.compile(r"(?P<thought>[^<]*)\n</think>\n\n(?P<rest>.*)", re.DOTALL)
CALL: Final = re.compile(
    r"<tool_call>\n<function=(?P<name>[^>\n]+)>\n(?P<arguments>.*)</function>\n</tool_call>",
    re.DOTALL,
)
ARGUMENT: Final = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
MAX_TOKENS: Final = 250
SHARING: Final = 20  # conversations with the same filler, which is then read once
PREFILL_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One reply: what came before it, and what it should be."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    step: Step | None  # None: an answer
    exchange: Exchange


def cases(conversation: Conversation) -> Iterator[Case]:
    """Every reply of a conversation, each after the right past."""
    messages = conversation.messages()
    n_messages = 1 if conversation.system else 0
    for exchange in conversation.exchanges:
        for step in (*exchange.steps, None):
            n_messages += 1
            yield Case(
                exchange.kind, messages[:n_messages], conversation.tools, step, exchange
            )
            n_messages += 1


def parse_call(reply: str) -> tuple[str, dict[str, str]] | None:
    """The name and the arguments of a reply that is one call as the template writes it."""
    found = CALL.fullmatch(reply)
    if not found:
        return None
    arguments = found["arguments"]
    if ARGUMENT.sub("", arguments):
        return None
    return found["name"], dict(ARGUMENT.findall(arguments))


def is_well_formed(
    call: tuple[str, dict[str, str]] | None, tools: list[dict[str, Any]]
) -> bool:
    """Whether the call is one of an offered tool, by its schema."""
    if not call:
        return False
    offered = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in tools
    }
    schema = offered.get(call[0])
    if not schema:
        return False
    return set(schema["required"]) <= set(call[1]) <= set(schema["properties"])


def is_right(call: tuple[str, dict[str, str]] | None, step: Step) -> bool:
    """Whether it is the call that was wanted."""
    if not call or call[0] != step.tool:
        return False
    _, arguments = call
    wanted = {k: spelled(v) for k, v in step.arguments.items() if k not in step.loose}
    written = {k: v for k, v in arguments.items() if k not in step.loose}
    return wanted == written


def spelled(value: Any) -> str:
    """An argument as the template writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def judge(case: Case, reply: str) -> dict[str, bool]:
    """What a reply counts for."""
    match = REPLY.fullmatch(reply)
    text = match["rest"] if match else ""
    if case.step:
        call = parse_call(text)
        return {
            "well-formed": is_well_formed(call, case.tools),
            "right": is_right(call, case.step),
        }

    has_quotes = all(quote in text for quote in case.exchange.quotes)
    fits = has_quotes and "<tool_call>" not in text
    if case.kind == "title":
        return {"title": fits}
    return {"quotes": fits} if case.exchange.steps else {"no tool": fits}


class Speaker:
    """The model, reading on from what it has read of the same conversation."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = mlx_lm.load(str(folder))[:2]
        self.open([])

    def open(self, tokens: list[int]) -> None:
        """Read how the next conversations begin."""
        self.start_anew()
        self.prefill(tokens)
        self.opening = (tokens, copy.deepcopy(self.cache))

    def tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[int]:
        """The prompt for a reply."""
        return list(self.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True,
            preserve_thinking=True, return_dict=False,
        ))  # fmt: skip

    def reply(self, case: Case) -> str:
        """The most likely reply, without its end mark."""
        tokens = self.tokens(case.messages, case.tools)
        if tokens[: len(self.read)] != self.read or len(tokens) <= len(self.read):
            self.read, self.cache = copy.deepcopy(self.opening)
            # Requests for a title have no filler.
            if tokens[: len(self.read)] != self.read:
                self.start_anew()

        # All but the last token stay; what is generated goes into a copy.
        self.prefill(tokens[len(self.read) : -1])
        return self.generate(tokens[-1], copy.deepcopy(self.cache))

    def start_anew(self) -> None:
        """With nothing read."""
        self.read: list[int] = []
        self.cache = make_prompt_cache(self.model)

    def prefill(self, tokens: list[int]) -> None:
        """Read on."""
        self.read = self.read + tokens
        for start in range(0, len(tokens), PREFILL_TOKENS):
            part = mx.array(tokens[start : start + PREFILL_TOKENS])[None]
            self.model.model(part, cache=self.cache)
            mx.eval([layer.state for layer in self.cache])

    def generate(self, last: int, cache: list[Any]) -> str:
        """Greedy decoding up to the end mark."""
        reply_ids: list[int] = []
        token = last
        while len(reply_ids) < MAX_TOKENS:
            logits = self.model(mx.array([[token]]), cache=cache)[0, -1]
            token = int(mx.argmax(logits))
            if token in self.tokenizer.eos_token_ids:
                break
            reply_ids.append(token)
        return str(self.tokenizer.decode(reply_ids))


def unseen_text(rng: random.Random, n_chars: int) -> str:
    """Program text from Python's library, from anywhere in it."""
    sources = "\n".join(
        inspect.getsource(module) for module in (argparse, asyncio.events, inspect)
    )
    start = rng.randrange(len(sources) - n_chars) if n_chars < len(sources) else 0
    return sources[start : start + n_chars]


def conversations(
    speaker: Speaker, options: argparse.Namespace
) -> Iterator[Conversation]:
    """Held-out conversations, whose beginning the speaker has read."""
    filler = ""
    for i in range(options.conversations):
        if options.filler and i % SHARING == 0:
            rng = random.Random(f"filler {options.seed} {i}")
            filler = unseen_text(rng, int(options.filler * 2.5))
            messages = [
                {"role": "system", "content": filler},
                {"role": "user", "content": ""},
            ]
            tokens = speaker.tokens(messages, [])
            speaker.open(tokens[:-40])  # without what ends the prompt
        rng = random.Random(f"held out {options.seed} {i}")
        yield write_conversation(rng, held_out=True, filler=filler)


def table(counts: Mapping[str, Counter[bool]]) -> str:
    """One line for each thing that was counted."""
    lines = []
    for name, counter in sorted(counts.items()):
        n_good = counter[True]
        n_all = counter.total()
        lines.append(f"{name:24} {n_good:5} of {n_all:5}  {n_good / n_all:7.1%}")
    return "\n".join(lines)


def verdicts(
    speaker: Speaker, options: argparse.Namespace
) -> Iterator[tuple[str, str, bool]]:
    """What each reply counts for: (kind, what is counted, whether it is good)."""
    began = time.monotonic()
    for conversation in conversations(speaker, options):
        if options.seconds and time.monotonic() - began > options.seconds:
            return
        for case in cases(conversation):
            reply = speaker.reply(case)
            verdict = judge(case, reply)
            if options.show and not all(verdict.values()):
                wanted = case.step or case.exchange.answer
                question = case.messages[-1]["content"]
                print(
                    f"--- {case.kind} {verdict}\n{question!r}\n{reply!r}\n{wanted!r}",
                    flush=True,
                )
            for name, is_good in verdict.items():
                yield case.kind, name, is_good


def measure(speaker: Speaker, options: argparse.Namespace) -> str:
    """Generate every reply and count."""
    totals: dict[str, Counter[bool]] = {}
    kinds: dict[str, Counter[bool]] = {}
    began = time.monotonic()
    for kind, name, good in verdicts(speaker, options):
        totals.setdefault(name, Counter())[good] += 1
        kinds.setdefault(f"{kind}: {name}", Counter())[good] += 1
    title = f"{options.filler} tokens of filler, {time.monotonic() - began:.0f} s"
    return f"{title}\n\n{table(totals)}\n\n{table(kinds)}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=ROOT / "models" / "demo"
    )
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--filler", type=int, default=0, help="tokens, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=0, help="stop after so many; 0: never"
    )
    parser.add_argument("--show", action="store_true", help="print what was wrong")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    print(measure(Speaker(options.model_dir), options))


if __name__ == "__main__":
    main()
