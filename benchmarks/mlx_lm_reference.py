"""mlx-lm without a server, in this process: what the model itself needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

SLICE = 2048  # as both servers prefill


class Plain:
    """One model with one growing cache."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer, *_ = load(str(folder))
        self._cache = make_prompt_cache(self.model)
        self._random = np.random.default_rng(1)
        self.depth = 0

    def _feed(self, n_tokens: int) -> mx.array:
        """Random text tokens; the logits behind the last one."""
        tokens = mx.array(self._random.integers(10, 300, n_tokens))
        logits: mx.array = self.model(tokens[None], cache=self._cache)
        mx.eval([layer.state for layer in self._cache])
        self.depth += n_tokens
        return logits

    def extend_to(self, depth: int) -> float:
        """Prefill up to `depth` tokens; seconds."""
        began = time.perf_counter()
        while self.depth < depth:
            self._feed(min(SLICE, depth - self.depth))
            mx.clear_cache()
        return time.perf_counter() - began

    def floor(self, n_new: int) -> float:
        """Seconds to the first token with the cache ready: new tokens, then one decode step."""
        began = time.perf_counter()
        if n_new > 1:
            self._feed(n_new - 1)
        mx.argmax(self._feed(1)[:, -1, :]).item()
        return time.perf_counter() - began

    def decode_speed(self, prompt: list[int], fields: dict[str, Any]) -> float:
        """Tokens per second, first token to last, with the `logit_bias` of a request."""
        bias = {int(token): value for token, value in fields["logit_bias"].items()}
        processors = make_logits_processors(bias)
        return self.speed_with(processors, prompt, fields["max_tokens"])

    def speed_with(
        self, processors: list[Any], prompt: list[int], n_tokens: int
    ) -> float:
        """Tokens per second of mlx_lm's stream_generate, first token to last."""
        stamps = [
            time.perf_counter()
            for _ in stream_generate(
                self.model,
                self.tokenizer,
                prompt,
                max_tokens=n_tokens,
                logits_processors=processors,
            )
        ]
        return (n_tokens - 1) / (stamps[n_tokens - 1] - stamps[0])
