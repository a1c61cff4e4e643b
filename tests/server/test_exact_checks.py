"""EXACT_CHECKS: warm replies are computed again without the cache, while nobody waits."""

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from nights import at_night
from server_fixture import SYSTEM, TOOLS, Served, user, wait_until, wait_until_idle
from status_client import ask, forget, status, words
from tiny_models import DENSE, HYBRID

HEADERS = {"x-session-id": "checked"}


@pytest.fixture(scope="module", params=[DENSE, at_night(HYBRID)])
def served(request, models):
    with Served(models(request.param), exact_checks=1) as server:
        yield server


@pytest.fixture(autouse=True)
def start(served, monkeypatch):
    """Nothing is cached or waits to be checked; checks begin when a test lets them."""
    monkeypatch.setattr(s, "CHECK_AFTER_SECONDS", 1e9)
    forget(served)
    checks = checks_of(served)
    checks.n_checked = checks.worst = 0


def checks_of(served):
    return served.state.engine.call(lambda scheduler: scheduler.exact_checks)


def say(served, n_words=200, *, seed=0, **fields):
    """A conversation's two requests, of which the second one is warm."""
    messages = [SYSTEM, user(words(n_words, seed))]
    fields = {"max_tokens": 40, "extra_headers": HEADERS, **fields}
    first = served.ask(messages, **fields)
    messages = [*messages, first.answer, user("Go on")]
    second = served.ask(messages, **fields)
    assert second.n_cached > 0
    wait_until_idle(served.state.engine)
    return second


def check_all(served, monkeypatch):
    monkeypatch.setattr(s, "CHECK_AFTER_SECONDS", 0.0)
    checks = checks_of(served)
    wait_until(lambda: not checks.unchecked)
    return checks


def test_a_warm_reply_is_what_the_model_computes_without_the_cache(served, monkeypatch):
    say(served)
    n_before = status(served)["counters"]["exact_checks"]
    checks = check_all(served, monkeypatch)

    assert checks.n_checked == 1
    assert checks.worst < 1e-3
    wait_until(lambda: "exact_worst" in status(served)["engine"])
    assert status(served)["engine"]["exact_worst"] == checks.worst
    assert status(served)["counters"]["exact_checks"] == n_before + 1
    metrics = ask(served, "GET", "/metrics")[1]
    assert f"start_llm_exact_checks_total {n_before + 1}.0" in metrics
    assert "start_llm_exact_worst " in metrics


def test_wrong_kv_is_seen(served, monkeypatch):
    """Planted: a cached key differs by a tenth."""
    load_span = s.load_span

    def load_other_kv(layer_caches, span):
        arrays = [1.1 * array for array in span.arrays]
        load_span(layer_caches, span._replace(arrays=arrays))

    monkeypatch.setattr(s, "load_span", load_other_kv)
    say(served)
    monkeypatch.setattr(s, "load_span", load_span)

    assert check_all(served, monkeypatch).worst > 0.01


def test_what_is_no_number_is_the_largest_difference():
    noted = s.NotedLogprobs(np.arange(2), np.array([-1.0, -2.0], np.float32))
    assert noted.difference(mx.array([-1.0, -2.5])) == 0.5
    assert noted.difference(mx.array([-1.0, mx.nan])) == s._MAX_DIFFERENCE
    assert noted.difference(mx.array([-1.0, -mx.inf])) == s._MAX_DIFFERENCE


def test_a_request_that_comes_is_served_before_the_next_slice(served, monkeypatch):
    say(served, 600)
    checks = checks_of(served)
    monkeypatch.setattr(s, "CHECK_SLICE_SECONDS", 0.0)  # slices of MIN_SLICE_TOKENS
    calls = []  # of the model: where each begins, and whether a check holds KV
    replies = []
    now = served.prepare([SYSTEM, user("Now")], max_tokens=2)

    def come(fed):
        calls.append((fed[0].at, checks._reading is not None))
        if len(calls) == 3:
            replies.append(served.state.engine.submit(now))

    with served.holding(come):
        monkeypatch.setattr(s, "CHECK_AFTER_SECONDS", 0.0)
        wait_until(lambda: replies and replies[0].times.activity == "ended")

    n_slice = s.MIN_SLICE_TOKENS
    assert calls[:3] == [(0, True), (n_slice, True), (2 * n_slice, True)]
    assert not calls[3][1]
    wait_until(lambda: not checks.unchecked)
    assert checks.n_checked >= 1  # from its beginning


def test_what_is_forgotten_is_not_checked(served, monkeypatch):
    say(served)
    assert checks_of(served).unchecked
    other = {"x-session-id": "other"}
    say(served, seed=5, extra_headers=other)
    ask(served, "DELETE", "/v1/cache?session=checked")

    sessions = [reply.owner.session for reply in checks_of(served).unchecked]
    assert sessions
    assert "checked" not in " ".join(sessions)
    ask(served, "DELETE", "/v1/cache")
    assert not checks_of(served).unchecked


def test_replies_whose_probabilities_were_changed_are_not_checked(served):
    say(served, logit_bias={"5": 1})
    assert not checks_of(served).unchecked


def test_who_leaves_before_the_first_token_leaves_its_kv(served, caplog):
    warm = say(served)
    messages = [SYSTEM, user(words(200, 0)), served.exchanges[-2].answer, user("Go on")]
    handles = []

    def leave(fed):
        handles[0].stop_reason = "cancelled"

    with served.holding(leave):
        messages_of_long = [*messages, warm.answer, user(words(3000, 9))]
        long = served.prepare(messages_of_long, tools=TOOLS)
        handles.append(served.state.engine.submit(long))
        wait_until(lambda: handles[0].times.activity == "ended")
    again = served.ask([*messages, warm.answer, user("And?")], extra_headers=HEADERS)
    assert again.n_cached >= warm.n_cached
    assert "lost" not in caplog.text


def test_every_nth_is_checked_and_none_by_default(served, monkeypatch):
    checks = checks_of(served)
    monkeypatch.setattr(checks, "every", 3)
    monkeypatch.setattr(checks, "_n_warm", 0)
    n_before = len(served.exchanges)
    for seed in range(1, 5):
        say(served, seed=seed)
    n_warm = sum(exchange.n_cached > 0 for exchange in served.exchanges[n_before:])
    assert len(checks.unchecked) == n_warm // 3 > 0

    monkeypatch.setattr(checks, "every", s.Config().exact_checks)
    for seed in range(5, 8):
        say(served, seed=seed)
    assert len(checks.unchecked) == n_warm // 3
