"""How many prompt tokens a server prefilled, and the fewest any exact server could have.

Knows nothing of the server. It is given what the model was called with and, in the order they were
sent, the tokens of each request and its reply:

    fewest = prompt length - longest prefix that an earlier request had fed or generated, at least 1

A model with layers that cannot be cut back can only go on from a boundary that lies within that
prefix: the end of the system prompt, the newest question, the generation prompt, the prompt's end
minus one, the end of a reply, or where a cancelled prefill stood.

    python fewest.py LOG.json

LOG.json: {"turns": {"start": id, "system": [ids], "user": [ids], "tool": [ids]}, "rewinds": bool,
"requests": [{"prompt": [ids], "reply": [ids], "reached": n or null}], "fed": [[position, [ids]]]}
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Fed:
    """What one call gave one row of the model: `tokens` at positions `at`, `at` + 1 ..."""

    at: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """`reached`: how far a request got that was cancelled in prefill; None: to the reply's end."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...] = ()
    reached: int | None = None

    @property
    def known(self) -> np.ndarray:
        """The tokens whose state a server could have kept."""
        return np.array((self.prompt + self.reply)[: self.reached], np.int64)

    @property
    def wanted(self) -> np.ndarray:
        """The prompt tokens that have to be in the cache before the reply can begin."""
        return np.array(self.prompt[: self.reached], np.int64)


@dataclass(frozen=True, slots=True)
class Turns:
    """How messages look in tokens; `system`, `user` and `tool` begin with `start`."""

    start: int
    system: tuple[int, ...]
    user: tuple[int, ...]
    tool: tuple[int, ...]

    def boundaries(self, request: Request) -> set[int]:
        """Where a server that cannot cut back must be able to go on."""
        prompt = request.prompt
        starts = [at for at, token in enumerate(prompt) if token == self.start]
        questions = [at for at in starts if self._is_question(prompt, at)]
        system_end = starts[1:2] if prompt[: len(self.system)] == self.system else []
        found = {*system_end, *questions[-1:], *starts[-1:], len(prompt) - 1}
        depth = len(request.known)
        return {at for at in found if at <= depth} | {depth}

    def _is_question(self, prompt: tuple[int, ...], at: int) -> bool:
        is_tool = prompt[at : at + len(self.tool)] == self.tool
        return prompt[at : at + len(self.user)] == self.user and not is_tool


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n


def fewest(requests: Sequence[Request], turns: Turns | None = None) -> list[int]:
    """Per request, the fewest prompt tokens to prefill; `turns` for models that cannot cut back."""
    needed = []
    for place, request in enumerate(requests):
        wanted, deepest = request.wanted, 0
        for earlier in requests[:place]:
            shared = min(common_prefix(wanted, earlier.known), len(wanted) - 1)
            if turns is not None:
                shared = max(
                    (b for b in turns.boundaries(earlier) if b <= shared), default=0
                )
            deepest = max(deepest, shared)
        needed.append(len(wanted) - deepest)
    return needed


def prefilled(fed: Sequence[Fed], requests: Sequence[Request]) -> int:
    """Prompt tokens the model was given: all it was given, less the replies fed back to it.

    Raises ValueError when the log is not explained by these requests: a token of a reply that was
    never fed (its last one need not be), or a token fed that no prompt has there.
    """
    steps = Counter((one.at, one.tokens[0]) for one in fed if len(one.tokens) == 1)
    for request in requests:
        replied = list(enumerate(request.reply, start=len(request.prompt)))
        if missing := Counter(replied[:-1]) - steps:
            raise ValueError(
                f"generated and never fed: (position, token) {sorted(missing)[:3]}"
            )
        steps -= Counter(replied)
    slices = [one for one in fed if len(one.tokens) > 1]
    singles = [Fed(at, (token,)) for at, token in steps.elements()]
    for one in (*slices, *singles):
        if not any(_is_part(one, request.prompt) for request in requests):
            raise ValueError(f"fed, but in no prompt: {one.tokens[:8]} at {one.at}")
    return sum(len(one.tokens) for one in (*slices, *singles))


def _is_part(one: Fed, prompt: tuple[int, ...]) -> bool:
    return prompt[one.at : one.at + len(one.tokens)] == one.tokens


def main() -> int:
    log = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    turns = {
        key: tuple(v) if isinstance(v, list) else v for key, v in log["turns"].items()
    }
    requests = [
        Request(tuple(one["prompt"]), tuple(one["reply"]), one["reached"])
        for one in log["requests"]
    ]
    fed = [Fed(at, tuple(tokens)) for at, tokens in log["fed"]]
    needed = fewest(requests, None if log["rewinds"] else Turns(**turns))
    total = prefilled(fed, requests)
    sys.stdout.write(
        f"prefilled {total}, fewest {sum(needed)}, ratio {total / sum(needed):.4f}\n"
        f"fewest per request: {needed}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
