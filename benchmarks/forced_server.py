"""A server whose model writes given replies: drafts.py starts it.

    python forced_server.py REPLIES start-llm|mlx_lm.server [ARGUMENT ...]

REPLIES is a JSON file with the token ids of replies, of which each request takes the next one.
While there are none the model writes what it likes. The server is whole, and so is its model.
A draft head (DRAFT_MODEL) does all its work, and then knows the reply: each of its tokens is
right as often as the file beside REPLIES says (`.right`).
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from compared_servers import OURS
from project_files import start_llm

Processor = Callable[[mx.array, mx.array], mx.array]


def force(reply: list[int]) -> Processor:
    """A logits processor after which only the next token of the reply can be sampled."""
    n_prompt = 0

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal n_prompt
        n_prompt = n_prompt or len(tokens)
        n_done = len(tokens) - n_prompt
        next_id = reply[min(n_done, len(reply) - 1)]  # one more step may be launched
        return mx.where(mx.arange(logits.shape[-1]) == next_id, logits, -mx.inf)

    return processor


def forcing(make_processors: Any, file: Path) -> Any:
    """In the place of what makes the logits processors of a request."""
    numbers = itertools.count()

    def make_forcing(*arguments: Any) -> Any:
        replies = json.loads(file.read_text())
        if not replies:
            return make_processors(*arguments)
        return [force(replies[next(numbers) % len(replies)])]

    return make_forcing


def guessing(guess: Any, file: Path) -> Any:
    """In the place of what a head guesses."""
    chance = random.Random(1)

    def guess_known(
        head: Any, past: Any, n_tokens: int, *rest: Any, **fields: Any
    ) -> list[int]:
        guessed: list[int] = guess(head, past, n_tokens, *rest, **fields)
        share_right = float(file.with_suffix(".right").read_text())
        for reply in json.loads(file.read_text()):
            end = past[-len(reply) :].tolist()
            n_written = next(
                (n for n in range(len(end), 0, -1) if end[-n:] == reply[:n]), 0
            )
            if n_written:
                coming = reply[n_written : n_written + n_tokens]
                guessed[: len(coming)] = [
                    token_id if chance.random() < share_right else token_id - 1
                    for token_id in coming
                ]
        return guessed

    return guess_known


def main() -> None:
    replies = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    if sys.argv[0] == OURS:
        ours = start_llm()
        ours.make_processors = forcing(ours.make_processors, replies)
        ours.DraftHead.guess = guessing(ours.DraftHead.guess, replies)
        ours.end_process(ours.main())

    import mlx_lm.server as theirs

    theirs._make_logits_processors = forcing(theirs._make_logits_processors, replies)
    theirs.main()


if __name__ == "__main__":
    main()
