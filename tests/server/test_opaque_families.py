"""Models with caches of their own kind, in the engine: warm is as cold as upstream is."""

import io
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import Bench, words
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_model
from nights import at_night
from opaque_families import FAMILIES, opaque_model
from server_fixture import Recorder, clear_cache
from test_vision_families import tokens_one_by_one  # noqa: F401  (a fixture)


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


pytestmark = pytest.mark.covering(1, over="module")


BY_DAY = ("deepseek_v4", "cohere2_moe")  # one that cannot be cut, and one that can
PARAMS = [*BY_DAY, *(at_night(name) for name in FAMILIES if name not in BY_DAY)]


@pytest.fixture(scope="module", params=PARAMS)
def bench(request, tmp_path_factory):
    folder = opaque_model(request.param, tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        bench = OpaqueBench(folder, patch)
        bench.family = FAMILIES[request.param]
        yield bench
        bench.engine.stop()


@pytest.fixture(autouse=True)
def fresh(request):
    if "bench" in request.fixturenames:
        clear_cache(request.getfixturevalue("bench").engine)


def ask(bench, tokens, n=6, **fields):
    """A reply whose logits are those of a cold run: (its ids, how many were cached)."""
    ids, end, ticket = bench.ask(tokens, n=n, **fields)
    assert bench.largest_difference(ticket, ids) <= bench.family.tolerance
    return ids, end.cached_tokens


def message_ends(prompt):
    """Where system prompt and messages end, of a prompt of two messages."""
    return [len(prompt) // 2, len(prompt) - 3]


def test_a_conversation_that_is_edited_goes_back_to_the_last_copy(bench, rng):
    prompt = words(rng, 150)
    reply, _ = ask(bench, prompt, boundaries=message_ends(prompt))
    longer = [*prompt, *reply, *words(rng, 40)]
    ask(bench, longer, boundaries=message_ends(longer))
    n_reply_end = len(prompt) + len(reply)

    # The last message, the reply, the last message but one, something in the middle.
    for n_kept, n_cached in (
        (len(longer) - 20, n_reply_end),
        (n_reply_end - 5, len(prompt) - 3),
        (len(prompt) - 10, len(prompt) // 2),
        (len(prompt) // 2 - 1, 0),
    ):
        edited = [*longer[:n_kept], *words(rng, 30)]
        if not bench.family.is_opaque:  # or where a window was copied for other reasons
            assert ask(bench, edited)[1] >= n_cached
        else:
            assert ask(bench, edited)[1] == n_cached


def test_requests_decode_together_only_where_all_layers_can(bench, rng):
    bench.model.n_rows_most = 0
    tickets = [bench.submit(words(rng, 60 + i), n=30) for i in range(3)]
    for ticket in tickets:
        ids, _ = bench.finish(ticket)
        assert bench.largest_difference(ticket, ids) <= bench.family.tolerance
    assert (bench.model.n_rows_most == 1) == bench.family.is_opaque


def test_all_bytes_are_counted_and_what_does_not_fit_is_evicted(bench, rng):
    prompt = words(rng, 400)
    ask(bench, prompt, boundaries=message_ends(prompt))
    report = bench.engine.call(
        lambda scheduler: [
            (entry.nbytes, entry.state_bytes, scheduler.spec)
            for entry in scheduler.cache.entries
        ]
    )
    ((n_bytes, state_bytes, spec),) = report
    copies = [200, 397, 420]
    expected = [spec.count_state_bytes(n) for n in copies]
    if bench.family.is_opaque:
        # Buffers of whole steps, and windows that are not full.
        assert 0.5 * sum(expected) <= state_bytes <= 1.5 * sum(expected)
    assert n_bytes >= state_bytes

    def shrink(scheduler):
        scheduler.cache.max_bytes = n_bytes
        scheduler.cache.evict_to_fit(0)

    old_max_bytes = bench.engine.call(lambda scheduler: scheduler.cache.max_bytes)
    bench.engine.call(shrink)
    for _ in range(3):
        past = words(rng, 200)
        ask(bench, past, boundaries=message_ends(past))
        held = bench.engine.call(lambda scheduler: scheduler.cache.nbytes)
        assert held <= n_bytes
    bench.engine.call(
        lambda scheduler: setattr(scheduler.cache, "max_bytes", old_max_bytes)
    )


def test_no_graph_grows_with_the_steps_of_a_reply(bench, monkeypatch):
    """A step asks for its logits alone, and some layers write more than these need."""
    monkeypatch.setattr(s, "REPLY_CHECKPOINT_SPACING", 20)  # then all is computed
    n_edges = []
    step = s.DecodeBatch.step

    def count_edges_after_step(batch):
        accepted = step(batch)
        leaves = s.cache_leaves(batch._generator.layer_caches)
        arrays = [array for _, array in tree_flatten([vars(leaf) for leaf in leaves])]
        dot = io.StringIO()
        mx.export_to_dot(dot, *(a for a in arrays if isinstance(a, mx.array)))
        n_edges.append(dot.getvalue().count("->"))
        return accepted

    monkeypatch.setattr(s.DecodeBatch, "step", count_edges_after_step)
    bench.ask(words(np.random.default_rng(9), 30), n=80)

    assert max(n_edges[40:]) <= 1.1 * max(n_edges[:40])


def test_two_agents_on_one_prefix_do_not_disturb_each_other(bench, rng):
    prefix = words(rng, 120)
    ask(bench, [*prefix, *words(rng, 10)], n=4, boundaries=[120, 127])
    talks = [[*prefix, *words(rng, 25)] for _ in range(2)]
    n_known = [120, 120]
    for _ in range(3):
        tickets = [bench.submit(t, n=6, boundaries=[120, len(t) - 3]) for t in talks]
        for i, ticket in enumerate(tickets):
            ids, end = bench.finish(ticket)
            assert bench.largest_difference(ticket, ids) <= bench.family.tolerance
            assert end.cached_tokens == n_known[i]
            n_known[i] = len(talks[i]) + len(ids)
            talks[i] = [*talks[i], *ids, *words(rng, 9)]


def test_what_a_client_cancels_in_prefill_is_gone_on_from(bench, rng):
    prompt = words(rng, 600)
    tickets = []

    def cancel(_):
        if tickets:
            tickets[0].stop_reason = "cancelled"

    bench.model.fed.clear()
    bench.model.before_call = cancel
    tickets.append(bench.submit(prompt, boundaries=[300, 500]))
    _, end = bench.outcome(tickets[0])
    bench.model.before_call = lambda _: None
    assert end.reason == "cancelled"
    n_read = sum(len(fed.tokens) for fed in bench.model.fed)
    assert 0 < n_read < len(prompt)

    _, n_cached = ask(bench, prompt, boundaries=[300, 500])
    assert n_cached == n_read
    _, n_cached = ask(bench, [*prompt[:550], *words(rng, 30)])
    assert n_cached == 500


@pytest.mark.parametrize(
    "name", [name if name == "deepseek_v4" else at_night(name) for name in FAMILIES]
)
def test_a_restart_goes_on_from_the_disk(
    name, tmp_path_factory, tmp_path, monkeypatch, rng
):
    folder = opaque_model(name, tmp_path_factory.getbasetemp())
    past = words(rng, 300)
    n_known = 0
    for _ in range(2):
        bench = OpaqueBench(folder, monkeypatch, cache_disk_folder=str(tmp_path))
        bench.family = FAMILIES[name]
        assert bench.engine.disk is not None
        ids, n_cached = ask(bench, past, boundaries=message_ends(past))
        assert n_cached == n_known
        bench.engine.call(lambda scheduler: scheduler.disk.save_all(60.0))
        bench.engine.stop()
        n_known = len(past) + len(ids)
        past = [*past, *ids, *words(rng, 40)]
