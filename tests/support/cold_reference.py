"""Cold runs of a plain model: what warm logits are compared with."""

import copy
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

SIGNS_SEED = 20504


class Rounding:
    """How packed KV rounds, told without a packed array: (bits of keys, of values) ..."""

    def __init__(self, bits, *, group_size, is_rotated):
        self.bits = bits
        self.group_size = group_size
        signs = np.random.default_rng(SIGNS_SEED).choice((-1.0, 1.0), group_size)
        self.signs = mx.array(signs.astype(np.float32)) if is_rotated else None

    def apply(self, plain, bits):
        """The numbers that are read where these were written."""
        groups = plain.reshape(*plain.shape[:-1], -1, self.group_size)
        if self.signs is not None:
            groups = mx.hadamard_transform(groups * self.signs)
        words, *scales = mx.quantize(groups, group_size=self.group_size, bits=bits)
        scales = [scale.astype(mx.bfloat16).astype(plain.dtype) for scale in scales]
        groups = mx.dequantize(words, *scales, group_size=self.group_size, bits=bits)
        if self.signs is not None:
            groups = mx.hadamard_transform(groups) * self.signs
        return groups.reshape(plain.shape)


class RoundedKVCache(KVCache):
    """Plain KV of numbers that are rounded when they are written."""

    def __init__(self, rounding):
        super().__init__()
        self.rounding = rounding

    def update_and_fetch(self, keys, values):
        sizes = (keys.shape[-1], values.shape[-1])
        if any(not size or size % self.rounding.group_size for size in sizes):
            return super().update_and_fetch(keys, values)
        key_bits, value_bits = self.rounding.bits
        return super().update_and_fetch(
            self.rounding.apply(keys, key_bits), self.rounding.apply(values, value_bits)
        )


class Oracle:
    """The plain model on exactly these tokens: no server code, only caches of its own.

    Most of a tiny model's work is in the logits, so it computes only those it returns.
    """

    def __init__(
        self, folder: Path, *, at_once: int, rounding: Rounding | None = None
    ) -> None:
        self._model, _ = load(str(folder))
        self._slice_size = at_once
        self._rounding = rounding
        # After whole slices, by the tokens so far.
        self._caches: dict[bytes, list] = {}
        self._logprobs: dict[tuple[bytes, int], np.ndarray] = {}

    def logprobs(self, tokens, *, n: int) -> np.ndarray:
        """Of what may follow each of the last n of these tokens: (n, vocabulary)."""
        ids = np.array(tokens, np.int32)
        key = (ids.tobytes(), n)
        if key in self._logprobs:
            return self._logprobs[key]

        cache = self._prefill(ids[:-n])
        last_ids = mx.array(ids[None, -n:])
        logits = self._model(last_ids, cache=cache)[0]
        log_total = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = np.array(logits - log_total)
        self._logprobs[key] = logprobs
        return logprobs

    def _prefill(self, ids: np.ndarray) -> list:
        """A cache that holds these tokens."""
        size = self._slice_size
        offset, cache = self._longest_cache(ids)

        while offset < len(ids):
            end = min(offset + size, len(ids))
            next_ids = mx.array(ids[None, offset:end])
            self._model(next_ids, cache=cache)
            mx.eval([layer.state for layer in cache])
            if end % size == 0:
                key = ids[:end].tobytes()
                self._caches[key] = copy.deepcopy(cache)
            offset = end
        return cache

    def _longest_cache(self, ids: np.ndarray) -> tuple[int, list]:
        """How many of these tokens an earlier run prefilled, and a copy of its cache."""
        offset = len(ids) - len(ids) % self._slice_size
        while offset:
            key = ids[:offset].tobytes()
            if key in self._caches:
                return offset, copy.deepcopy(self._caches[key])
            offset -= self._slice_size
        return 0, [self._round(layer) for layer in make_prompt_cache(self._model)]

    def _round(self, layer):
        if isinstance(layer, CacheList):
            layer.caches = tuple(map(self._round, layer.caches))
        if self._rounding is not None and type(layer) is KVCache:
            return RoundedKVCache(self._rounding)
        return layer
