"""Compare this server with mlx_lm.server on a model of real size, on a GPU, in ten minutes.

    .venv/bin/python benchmarks/gpu.py MODEL [--tokens 3000 12000 48000]

MODEL is a repository or a folder that mlx-lm loads. Both servers run one after the other, each
alone on the GPU, and are asked the same: cold prompts and the messages that follow, one reply and
eight at once, eight agents on one prefix, four short prompts at once, twelve steps of an agent.
mlx_lm.generate decodes once without a server. Each is asked everything once before it is measured,
so that kernels are compiled. It runs on a processor, too, with a small model.

What it prints of a random model of 7 billion parameters in bfloat16 on an H200 (26 November 2026):
first token cold at 12,000 tokens about 1.5 s and 2.0 s, next message 0.1 s and 0.3 s, one stream
159 and 102 tokens a second, eight at once 443 and 495, the agent 5 s and 30 s.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

import mlx.core as mx
from agent_workload import Body, Words, endless
from compared_servers import Reply, Server, our_server, their_server
from mlx_lm_reference import Plain
from report import markdown
from rich.console import Console
from sections import ask_together, speed_in_all, tokenizer_of

N_STEPS = 12  # of the agent
N_AT_ONCE = 8
N_OUT = 128
say = Console(stderr=True, highlight=False).print


class Asker:
    """Asks one server all there is to ask."""

    def __init__(self, server: Server, words: Words, tokens: Sequence[int]) -> None:
        self._server = server
        self._words = words
        self._tokens = tokens
        self._fields = endless(words.tokenizer, N_OUT)
        self.rows: dict[str, str] = {}

    def body(self, *texts: str, n_out: int = N_OUT) -> Body:
        """A chat of a system prompt and questions, each answered with "yes" but the last."""
        system, *questions = texts
        messages = [{"role": "system", "content": system}]
        for question in questions:
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "yes"},
            ]
        return {**self._fields, "messages": messages[:-1], "max_tokens": n_out}

    def text(self, n_tokens: int) -> str:
        return self._words.text(n_tokens)

    def add(self, what: str, text: str) -> None:
        self.rows[what] = text
        say(f"  {what}: {text}")

    def run(self) -> dict[str, str]:
        """A text for each row of the table, in its order."""
        for n_tokens in self._tokens:
            self._measure_first_token(n_tokens)
        reply = self._server.ask(self.body(self.text(100), self.text(100)))
        self.add("decode, one stream", f"{reply.decode_speed:.0f} tokens/s")
        for n_requests, n_prompt, n_out in ((N_AT_ONCE, 150, N_OUT), (4, 40, 24)):
            bodies = [
                self.body(self.text(20), self.text(n_prompt), n_out=n_out)
                for _ in range(n_requests)
            ]
            speed = speed_in_all(ask_together(self._server, bodies))
            what = f"{n_requests} at once, prompts of {n_prompt}, replies of {n_out}"
            self.add(what, f"{speed:.0f} tokens/s")
        self._measure_shared_prefix()
        self._measure_agent()
        return self.rows

    def _measure_first_token(self, n_tokens: int) -> None:
        system = self.text(n_tokens)
        question, next_question = self.text(20), self.text(20)
        cold = self._server.ask(self.body(system, question, n_out=24))
        warm = self._server.ask(self.body(system, question, next_question, n_out=24))
        what = f"first token, cold; next message: {n_tokens:,} tokens"
        self.add(what, f"{cold.ttft:.2f}; {warm.ttft:.2f} s")

    def _measure_shared_prefix(self) -> None:
        n_shared = self._tokens[len(self._tokens) // 2]
        system = self.text(n_shared)
        bodies = [self.body(system, self.text(20), n_out=32) for _ in range(N_AT_ONCE)]
        replies = ask_together(self._server, bodies)
        what = f"{N_AT_ONCE} at once on one prefix of {n_shared:,} tokens"
        self.add(what, seconds_and_tokens(replies))

    def _measure_agent(self) -> None:
        """OpenClaw's shape: another message id in the system prompt at each step."""
        n_system = self._tokens[len(self._tokens) // 2]
        instructions, rules = self.text(n_system // 4), self.text(n_system * 3 // 4)
        random = Random(5)
        questions: list[str] = []
        replies: list[Reply] = []
        for _ in range(N_STEPS):
            message_id = uuid.UUID(int=random.getrandbits(128), version=4)
            context = f'```json\n{{\n  "message_id": "{message_id}",\n'
            context += '  "sender": "user",\n  "channel": "telegram"\n}\n```'
            system = f"{instructions}\n## Inbound Context\n{context}\n{rules}"
            questions.append(self.text(120))
            replies.append(self._server.ask(self.body(system, *questions, n_out=24)))
        what = f"{N_STEPS} steps of an agent, {n_system:,} tokens of instructions"
        self.add(what, seconds_and_tokens(replies))


def seconds_and_tokens(replies: Sequence[Reply]) -> str:
    """From the first request to the last token, and how many tokens were read."""
    began = min(reply.sent for reply in replies)
    ended = max(reply.sent + reply.stamps[-1] for reply in replies)
    n_read = sum(reply.prefilled for reply in replies)
    return f"{ended - began:.2f} s ({n_read:,} tokens read)"


def measure(
    start: Callable[[Path, Path], AbstractContextManager[Server]],
    model: Path,
    tokens: Sequence[int],
) -> dict[str, str]:
    """The rows of one server, which runs meanwhile."""
    tokenizer = tokenizer_of(model)
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        with start(model, Path(scratch)) as server:
            say(f"{server.name} answers after {time.perf_counter() - began:.1f} s")
            say("once, so that all is compiled:")
            Asker(server, Words(tokenizer, 3), tokens).run()
            say("measured:")
            return Asker(server, Words(tokenizer, 4), tokens).run()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[3_000, 12_000, 48_000]
    )
    options = parser.parse_args()

    ours = measure(our_server, options.model, options.tokens)
    theirs = measure(their_server, options.model, options.tokens)
    plain = Plain(options.model)  # now that the GPU is free
    prompt = plain.tokenizer.encode(Words(plain.tokenizer, 5).text(200))
    speed = plain.decode_speed(prompt, endless(plain.tokenizer, N_OUT))

    rows = [(what, text, theirs[what]) for what, text in ours.items()]
    rows.append(
        ("decode, mlx_lm.generate without a server", "", f"{speed:.0f} tokens/s")
    )
    device = mx.device_info().get("device_name", "")
    headings = (f"{options.model.name} on {device}", "start-llm", "mlx_lm.server")
    print(markdown(headings, rows, "With `gpu.py`, each server alone on the GPU."))


if __name__ == "__main__":
    main()
