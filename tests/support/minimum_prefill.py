"""How many prompt tokens a server prefilled, and the fewest any exact server could have.

It does not use the server. Its input is what the model was called with and, in the order in which
they were sent, the tokens of each request and its reply:

    fewest = prompt length - longest prefix that an earlier request had fed or generated, at least 1

A model with layers that cannot be cut back can only go on from a boundary that lies within that
prefix: the end of the system prompt, the newest question, the generation prompt, the prompt's end
minus one, the end of a reply, or where a cancelled prefill stood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fed:
    """What one call gave one row of the model: `tokens` at positions `at`, `at` + 1 ..."""

    at: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Request:
    """`reached`: how far a request got that was cancelled in prefill; None: to the reply's end."""

    prompt: Tokens
    reply: Tokens = ()
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
    system: Tokens
    user: Tokens
    tool: Tokens

    def boundaries(self, request: Request) -> set[int]:
        """Where a server that cannot cut back must be able to go on."""
        prompt = request.prompt
        starts = [i for i, token in enumerate(prompt) if token == self.start]
        questions = [start for start in starts if self._is_question(prompt[start:])]
        system_end = starts[1:2] if is_prefix(self.system, prompt) else []

        offsets = {*system_end, *questions[-1:], *starts[-1:], len(prompt) - 1}
        n_known = len(request.known)
        return {offset for offset in offsets if offset <= n_known} | {n_known}

    def _is_question(self, tokens: Tokens) -> bool:
        is_tool_result = is_prefix(self.tool, tokens)
        return is_prefix(self.user, tokens) and not is_tool_result


def is_prefix(header: Tokens, tokens: tuple[int, ...]) -> bool:
    return tokens[: len(header)] == header


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginning."""
    n = min(len(a), len(b))
    is_different = np.asarray(a[:n]) != np.asarray(b[:n])
    if not is_different.any():
        return n
    return int(is_different.argmax())


def fewest(requests: Sequence[Request], turns: Turns | None = None) -> list[int]:
    """Per request, the fewest prompt tokens to prefill; `turns` for models that cannot cut back."""
    counts = []
    for index, request in enumerate(requests):
        prompt = request.wanted
        n_reusable = 0

        for earlier in requests[:index]:
            n_common = common_prefix(prompt, earlier.known)
            offset = min(n_common, len(prompt) - 1)
            if turns is not None:
                boundaries = turns.boundaries(earlier)
                offset = max((b for b in boundaries if b <= offset), default=0)
            n_reusable = max(n_reusable, offset)
        counts.append(len(prompt) - n_reusable)
    return counts


def prefilled(fed: Sequence[Fed], requests: Sequence[Request]) -> int:
    """Prompt tokens the model was given: all it was given, less the replies fed back to it.

    Raises ValueError when the log is not explained by these requests: a token of a reply that was
    never fed (the last one need not be), or a token fed that no prompt has there.
    """
    single_tokens: Counter[tuple[int, int]] = Counter()
    inputs = []  # of prompts
    for model_input in fed:
        if len(model_input.tokens) == 1:
            (token,) = model_input.tokens
            single_tokens[model_input.at, token] += 1
        else:
            inputs.append(model_input)

    for request in requests:
        replied = list(enumerate(request.reply, start=len(request.prompt)))
        missing = Counter(replied[:-1]) - single_tokens
        if missing:
            examples = sorted(missing)[:3]
            raise ValueError(f"generated and never fed: (position, token) {examples}")
        single_tokens -= Counter(replied)
    inputs += [Fed(offset, (token,)) for offset, token in single_tokens.elements()]

    for model_input in inputs:
        if not any(_is_part(model_input, request.prompt) for request in requests):
            examples = model_input.tokens[:8]
            raise ValueError(f"fed, but in no prompt: {examples} at {model_input.at}")
    return sum(len(model_input.tokens) for model_input in inputs)


def _is_part(model_input: Fed, prompt: Tokens) -> bool:
    return is_prefix(model_input.tokens, prompt[model_input.at :])
