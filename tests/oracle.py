"""Cold runs of a plain model: what warm logits are compared with."""

import copy
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache


class Oracle:
    """The plain model on exactly these tokens: no server code, no cache but what it fed itself."""

    def __init__(self, folder: Path, *, at_once: int) -> None:
        self._model = load(str(folder))[0]
        self._at_once = at_once
        self._caches: dict[bytes, list] = {}  # after whole slices, by the tokens so far

    def logprobs(self, tokens, *, n: int) -> np.ndarray:
        """Of what may follow each of the last n of these tokens: (n, vocabulary)."""
        ids, size = np.array(tokens, np.int32), self._at_once
        ends = range((len(ids) - n) // size * size, 0, -size)
        done = next((end for end in ends if ids[:end].tobytes() in self._caches), 0)
        known = self._caches.get(ids[:done].tobytes())
        cache = copy.deepcopy(known) if known else make_prompt_cache(self._model)
        rows = []
        for end in range(done + size, len(ids) + size, size):
            logits = self._model(mx.array(ids[None, end - size : end]), cache=cache)[0]
            mx.eval([layer.state for layer in cache])
            if end > len(ids) - n:  # most of the work is in scores, and not done if nobody looks
                rows.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
            if end <= len(ids):
                self._caches[ids[:end].tobytes()] = copy.deepcopy(cache)
        return np.concatenate(rows)[-n:]
