"""WARM-UP: each kind of work runs once before requests are let in, and leaves nothing."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import start_llm as s
from engine_fixture import words
from nights import at_night
from server_fixture import MAX_WAIT_SECONDS
from tiny_models import DENSE, HYBRID, SLIDING

# As small as a slice may be, so that a tiny context has more than one.
WARM_UP = {"kernel_warm_up": "on", "prefill_step_size": 256}


@pytest.mark.parametrize("kind", [at_night(DENSE), HYBRID, at_night(SLIDING)])
def test_each_kind_of_work_runs_and_nothing_of_it_is_left(bench, kind, monkeypatch):
    batch_sizes, hit_kinds = set(), set()
    step, start = s.DecodeBatch.step, s.PrefixCache.start

    def note_step(batch, *args, **fields):
        batch_sizes.add(len(batch.requests))
        return step(batch, *args, **fields)

    def note_start(cache, match, *args, **fields):
        hit_kinds.add(match.hit_kind)
        return start(cache, match, *args, **fields)

    monkeypatch.setattr(s.DecodeBatch, "step", note_step)
    monkeypatch.setattr(s.PrefixCache, "start", note_start)
    put = s.RequestHandle.put
    endings = []

    def note_end(handle, event):
        if isinstance(event, str | s.ServerError):
            endings.append(event)
        put(handle, event)

    monkeypatch.setattr(s.RequestHandle, "put", note_end)
    engine = bench(kind, **WARM_UP).engine

    assert {1, 8} <= batch_sizes
    assert {"miss", "branch" if kind == DENSE else "checkpoint"} <= hit_kinds
    assert len(endings) == 2 + 2 + 4 + 8
    assert set(endings) == {"length"}
    assert engine.warm_up is None
    assert engine.call(lambda scheduler: scheduler.cache.entries) == []


def test_what_comes_after_it_is_exact(bench):
    b = bench(DENSE, **WARM_UP)
    prompt = words(np.random.default_rng(1), 300)
    ids, end, ticket = b.ask(prompt)
    assert end.cached_tokens == 0
    assert b.largest_difference(ticket, ids) == 0


@pytest.mark.parametrize(
    ("setting", "is_wanted"),
    [("on", True), ("exit", True), ("off", False), ("auto", False)],
)
def test_on_a_processor_it_is_left_out_unless_it_is_wanted(setting, is_wanted):
    assert s.is_warm_up_wanted(s.Config(kernel_warm_up=setting)) == is_wanted


def test_litellm_is_not_said_to_start_where_the_server_only_warms_up():
    assert s._find_proxy(s.Config()) is not None
    assert s._find_proxy(s.Config(kernel_warm_up="exit")) is None


def test_a_request_that_fails_is_logged_and_the_server_starts(
    bench, monkeypatch, caplog
):
    def fail(*_args, **_fields):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(s.DecodeBatch, "step", fail)
    engine = bench(DENSE, **WARM_UP).engine
    assert engine.state == "ready"
    assert "warm-up: " in caplog.text


def test_a_stop_during_the_warm_up_waits_for_its_end(bench, monkeypatch):
    opened, began, may_go_on = [], threading.Event(), threading.Event()
    step = s.Scheduler.step

    def slow_step(scheduler):
        began.set()
        may_go_on.wait(MAX_WAIT_SECONDS)
        step(scheduler)

    monkeypatch.setattr(s.Scheduler, "step", slow_step)
    monkeypatch.setattr(s.Engine, "_open", lambda *_args: opened.append(True))
    engine = bench(DENSE, is_awaited=False, **WARM_UP).engine
    assert began.wait(MAX_WAIT_SECONDS)
    threading.Timer(0.2, may_go_on.set).start()
    engine.stop()

    assert not engine._thread.is_alive()
    assert not opened


def test_health_says_how_far_it_is():
    engine = SimpleNamespace(state="loading", warm_up=s.WarmUpProgress(3, 7))
    proxy = SimpleNamespace(body=lambda: {"state": "off", "url": None})

    code, body = s.health_body(SimpleNamespace(engine=engine, proxy=proxy))

    assert code == 503
    assert body["status"] == "loading"
    assert body["warm_up"] == {"done": 3, "steps": 7}
