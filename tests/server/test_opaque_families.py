"""Models whose layers keep caches of their own kind, in the engine: warm is as cold as upstream is."""

from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import Bench, words
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_model
from opaque_families import FAMILIES, opaque_model
from server_fixture import Recorder, wait_until


class OpaqueBench(Bench):
    """An engine on a model that the server has loaded; the oracle is mlx-vlm's own."""

    def _load(self) -> s.LoadedModel:
        loaded = s.load_model(self.path, s.Config(model_path=str(self.path)))
        self.model = Recorder(loaded.model)
        object.__setattr__(loaded, "model", self.model)
        object.__setattr__(loaded, "eos_ids", frozenset())
        return loaded

    @cached_property
    def oracle(self) -> Any:
        return load_model(self.path).language_model

    def cold_logprobs(self, tokens: list[int], *, n: int) -> np.ndarray:
        """Of what may follow each of the last n tokens, all read in one call."""
        fields = {}
        if hasattr(self.oracle, "get_rope_index"):
            places = mx.arange(len(tokens))
            fields["position_ids"] = mx.broadcast_to(places, (3, 1, len(tokens)))
        cache = make_prompt_cache(self.oracle)
        logits = self.oracle(mx.array([tokens]), cache=cache, **fields).logits[0, -n:]
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    def largest_difference(self, ticket: Any, ids: list[int]) -> float:
        warm = np.array(self.seen[ticket])
        cold = self.cold_logprobs([*self.asked[ticket], *ids[:-1]], n=len(ids))
        assert np.ptp(cold) > 1, "logits that say nothing cannot tell a wrong cache"
        return float(np.abs(cold - warm).max())


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request, tmp_path_factory):
    folder = opaque_model(request.param, tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        bench = OpaqueBench(folder, patch)
        bench.family = FAMILIES[request.param]
        yield bench
        bench.engine.stop()


def check(bench, ticket, ids):
    assert bench.largest_difference(ticket, ids) <= bench.family.tolerance


def ends_of(prompt):
    """Where the server would keep a copy: before the last message, and at the end."""
    return [len(prompt) // 2, len(prompt) - 3]


def test_a_conversation_that_grows_is_reused_to_its_last_token(bench):
    rng = np.random.default_rng(1)
    past = words(rng, 150)
    n_reused = 0
    for turn in range(4):
        ids, end, ticket = bench.ask(past, n=20, boundaries=ends_of(past))
        check(bench, ticket, ids)
        assert end.reuse.cached_tokens == n_reused
        n_reused = len(past) + len(ids)
        past = [*past, *ids, *words(rng, 7 + 30 * turn)]
