"""Cold runs of a plain model: what warm logits are compared with."""

import copy
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache


class Oracle:
    """The plain model on exactly these tokens: no server code, no cache but what it fed itself.

    Most of a tiny model's work is in scores, so it makes none but those that are asked for.
    """

    def __init__(self, folder: Path, *, at_once: int) -> None:
        self._model = load(str(folder))[0]
        self._at_once = at_once
        self._caches: dict[bytes, list] = {}  # after whole slices, by the tokens so far
        self._answers: dict[tuple[bytes, int], np.ndarray] = {}

    def logprobs(self, tokens, *, n: int) -> np.ndarray:
        """Of what may follow each of the last n of these tokens: (n, vocabulary)."""
        ids = np.array(tokens, np.int32)
        asked = ids.tobytes(), n
        if asked not in self._answers:
            cache = self._fed(ids[:-n])
            logits = self._model(mx.array(ids[None, -n:]), cache=cache)[0]
            self._answers[asked] = np.array(
                logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            )
        return self._answers[asked]

    def _fed(self, ids: np.ndarray) -> list:
        """A cache that has been given these tokens."""
        size, whole = self._at_once, len(ids) // self._at_once * self._at_once
        done = whole
        while done and ids[:done].tobytes() not in self._caches:
            done -= size
        known = self._caches.get(ids[:done].tobytes())
        cache = copy.deepcopy(known) if known else make_prompt_cache(self._model)
        for end in (*range(done + size, whole + 1, size), len(ids)):
            if end == done:
                break
            self._model(mx.array(ids[None, done:end]), cache=cache)
            mx.eval([layer.state for layer in cache])
            if end % size == 0:
                self._caches[ids[:end].tobytes()] = copy.deepcopy(cache)
            done = end
        return cache
