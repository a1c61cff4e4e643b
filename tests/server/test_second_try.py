"""A request that fails before its first token is tried again, once, without the cache."""

import threading

import numpy as np
import openai
import pytest
import start_llm as s
from engine_fixture import TOLERANCE, words
from nights import at_night
from server_fixture import MAX_WAIT_SECONDS, SYSTEM, Served, user, wait_until

# Attention, with layers that keep state, sliding windows.
KINDS = [at_night("qwen3"), "qwen3_5", at_night("gemma3_text")]


@pytest.fixture
def bench(bench):
    def make(kind, **settings):
        engine_bench = bench(kind, **settings)
        engine_bench.may_try_again = True
        return engine_bench

    return make


def n_second_tries(bench):
    return bench.metrics.snapshot()["second_tries"]


def entries_of(bench, tokens):
    """Entries whose prompt begins so."""

    def find(scheduler):
        n = len(tokens)
        entries = scheduler.cache.entries
        return [entry for entry in entries if entry.key.tokens[:n].tolist() == tokens]

    return bench.engine.call(find)


class FailingOnce:
    """Stands in for a function; raises at one call of those on the model thread."""

    def __init__(self, error, *, at_call=1):
        self.error = error
        self.n_left = at_call

    def __call__(self, *_):
        self.n_left -= 1
        if self.n_left == 0:
            raise self.error


def planted():
    return RuntimeError("planted")


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_whose_cached_kv_cannot_be_loaded_is_answered_cold(
    bench, monkeypatch, kind
):
    b = bench(kind)
    rng = np.random.default_rng(3)
    past = words(rng, 400)
    reply, _, _ = b.ask(past)
    (entry,) = entries_of(b, past)
    real = s.load_span
    fail = FailingOnce(planted())
    monkeypatch.setattr(s, "load_span", lambda *how: fail() or real(*how))

    ids, end, ticket = b.ask(past + reply + words(rng, 30))

    assert b.largest_difference(ticket, ids) <= TOLERANCE.get(kind, 0.0)
    assert (end.cached_tokens, end.hit_kind) == (0, "miss")
    assert n_second_tries(b) == 1
    assert entry not in entries_of(b, past)


@pytest.mark.parametrize("kind", KINDS)
def test_kv_without_numbers_is_used_once_and_never_again(bench, kind):
    """The request leaves the entry early, so it works on a copy and the entry stays."""
    b = bench(kind)
    rng = np.random.default_rng(4)
    past = words(rng, 2000)
    b.ask(past, boundaries=(600,))

    def damage(scheduler):
        for entry in scheduler.cache.entries:
            arrays = [array * float("nan") for array in entry.span.arrays]
            entry.span = entry.span._replace(arrays=arrays)
        return list(scheduler.cache.entries)

    damaged = b.engine.call(damage)
    for _ in range(2):
        ids, _, ticket = b.ask(past[:600] + words(rng, 30))
        assert b.largest_difference(ticket, ids) <= TOLERANCE.get(kind, 0.0)

    assert n_second_tries(b) == 1
    assert not set(damaged) & set(b.engine.call(lambda x: list(x.cache.entries)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_call", [at_night(1), 2])
def test_an_error_in_a_prompt_is_not_heard_of(bench, kind, at_call):
    b = bench(kind, prefill_step_size=64)
    rng = np.random.default_rng(5)
    b.model.before_call = FailingOnce(planted(), at_call=at_call)

    ids, _, ticket = b.ask(words(rng, 200))

    assert b.largest_difference(ticket, ids) <= TOLERANCE.get(kind, 0.0)
    assert n_second_tries(b) == 1


def test_there_is_no_third_try(bench):
    b = bench("qwen3")
    n_calls = 0

    def broken(_rows):
        nonlocal n_calls
        n_calls += 1
        raise planted()

    b.model.before_call = broken
    ids, end = b.outcome(b.submit(words(np.random.default_rng(6), 100)))

    assert (ids, type(end), n_calls) == ([], s.GenerationFailed, 2)
    assert n_second_tries(b) == 1


def test_scheduler_tries_requests_that_failed_together_again_as_they_came(bench):
    b = bench("qwen3")
    scheduler = b.engine.call(lambda scheduler: scheduler)
    rng = np.random.default_rng(13)
    is_held, are_submitted = threading.Event(), threading.Event()

    def hold(_scheduler):
        is_held.set()
        are_submitted.wait(MAX_WAIT_SECONDS)

    b.engine._inbox.put(hold)
    assert is_held.wait(MAX_WAIT_SECONDS)  # else it may take one of them with this task
    tickets = [b.submit(words(rng, 40)) for _ in range(3)]
    orders = []

    def note_order(_rows):
        orders.append([running.handle for running in scheduler.running])
        if len(orders) == 1:
            raise planted()

    b.model.before_call = note_order
    are_submitted.set()
    for ticket in tickets:
        b.finish(ticket)

    assert n_second_tries(b) == 3
    assert orders[:2] == [tickets, tickets]


def test_scheduler_answers_though_the_disk_cache_fails_at_each_look(
    bench, monkeypatch, tmp_path
):
    b = bench("qwen3", cache_disk="on", cache_disk_folder=str(tmp_path / "kv"))
    prompt = words(np.random.default_rng(14), 300)

    def fail(*_):
        raise planted()

    monkeypatch.setattr(s.KVFiles, "find", fail)
    ids, _, ticket = b.ask(prompt)

    assert b.largest_difference(ticket, ids) == 0.0
    assert ticket.is_second_try
    assert b.engine.state == "ready"


def test_after_the_first_token_an_error_is_an_error(bench):
    b = bench("qwen3")
    b.model.before_call = FailingOnce(planted(), at_call=4)

    ids, end = b.outcome(b.submit(words(np.random.default_rng(7), 50)))

    assert ids and isinstance(end, s.GenerationFailed)
    assert n_second_tries(b) == 0


@pytest.mark.parametrize(
    "error", [MemoryError("planted"), RuntimeError("[malloc] Unable to allocate")]
)
def test_want_of_memory_is_not_tried_again(bench, error):
    b = bench("qwen3")
    b.model.before_call = FailingOnce(error)

    ids, end = b.outcome(b.submit(words(np.random.default_rng(8), 100)))

    assert (ids, type(end)) == ([], s.Overloaded)
    assert n_second_tries(b) == 0


def test_who_has_left_is_not_tried_again(bench):
    b = bench("qwen3")
    is_submitted = threading.Event()

    def leave(_rows):
        is_submitted.wait(MAX_WAIT_SECONDS)
        ticket.stop_reason = "cancelled"
        raise planted()

    b.model.before_call = leave
    ticket = b.submit(words(np.random.default_rng(9), 100))
    is_submitted.set()

    assert isinstance(b.outcome(ticket)[1], s.GenerationFailed)
    assert n_second_tries(b) == 0


@pytest.mark.parametrize("is_stream", [at_night(False), True])
def test_a_client_hears_nothing_of_a_first_try(folder, caplog, is_stream):
    question = [SYSTEM, user("What is the weather? " * 60)]
    fields = {"max_tokens": 20, "temperature": 0}
    with Served(folder) as served:
        expected = served.ask(question, **fields)
        follow_up = [*question, expected.answer, user("And now? " * 10)]
        cold = served.ask(follow_up, **fields)
        served.forget()
        served.ask(question, **fields)
        s.logger.propagate = True  # caplog listens to the root logger
        with served.holding(FailingOnce(planted())):
            exchange = served.ask(follow_up, stream=is_stream, **fields)

        assert exchange.answer == cold.answer
        assert exchange.n_cached == 0
        assert served.state.metrics.snapshot()["second_tries"] == 1
        assert b"start_llm_second_tries_total 1.0" in s.metrics_text(served.state)

    assert "RuntimeError: planted" in caplog.text


@pytest.mark.parametrize("n_tokens", [at_night(5), 60])
def test_a_reply_that_fails_after_some_tokens_is_no_past(n_tokens, folder):
    """In its thinking and in its text: neither tokens nor thinking are recorded (law 6)."""
    with Served(folder) as served:
        stores = served.state.stores
        served.ask([SYSTEM, user("A reply that ends.")])
        known = stores.ledger.snapshot()
        fail = FailingOnce(planted(), at_call=n_tokens)
        fields = {"temperature": 0, "logit_bias": {str(served.scribe.end): -100}}

        chunks = []
        with (
            served.holding(fail),
            pytest.raises(openai.APIError),
            served.stream([SYSTEM, user("Go on.")], max_tokens=90, **fields) as stream,
        ):
            chunks += stream

        assert len(chunks) > 2
        wait_until(lambda: not stores.live)
        assert stores.recent[-1]["finish"] == "failed"
        now_known = stores.ledger.snapshot()
        for name in ("transcripts", "healing"):
            assert now_known[name] == known[name]
