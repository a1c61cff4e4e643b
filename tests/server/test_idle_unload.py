"""IDLE_UNLOAD_SECONDS: weights and KV leave the memory, and come back with the next request."""

import signal
import sys

import mlx.core as mx
import psutil
import pytest
import start_llm as s
from http_client import exchange
from nights import at_night
from program import CHAT, Program
from server_fixture import SYSTEM, Served, user, wait_until
from status_client import FIELDS, ask, status, words
from tiny_models import DENSE, HYBRID

NEVER = 1e9
pytestmark = pytest.mark.covering(1, over="module")


@pytest.fixture(scope="module", params=[DENSE, at_night(HYBRID)])
def folder(request, models):
    return models(request.param)


class Sleeper(Served):
    """A server that sleeps when a test wants it to."""

    def fall_asleep(self):
        self.set_seconds(0.01)
        wait_until(lambda: self.state.engine.state == "asleep")
        self.set_seconds(NEVER)

    def set_seconds(self, seconds):
        config = self.state.config.model_copy(update={"idle_unload_seconds": seconds})
        self.state.engine._config = config

    def is_asleep(self):
        return self.state.engine.state == "asleep"

    def memory(self):
        """Bytes that MLX has, by the model thread."""
        mx.clear_cache()
        return mx.get_active_memory()

    def say(self, n_steps=2):
        """A conversation; how much of each prompt was cached, and the last answer."""
        messages = [SYSTEM, user(words(400))]
        for n in range(n_steps):
            exchange = self.ask(messages, max_tokens=30)
            messages += [exchange.answer, user(f"Go on {words(9, n)}")]
        return messages, exchange


@pytest.fixture(params=["on", "off"])
def served(request, folder, tmp_path):
    settings = {
        "cache_disk": request.param,
        "cache_disk_folder": str(tmp_path),
        "idle_unload_seconds": NEVER,
    }
    with Sleeper(folder, **settings) as server:
        yield server


def test_the_next_request_finds_its_conversation(served):
    """As if the server had been awake, or had been started anew on the same disk."""
    messages, before = served.say()
    with_prompt = served.ask(messages, max_tokens=30)

    served.fall_asleep()
    again = served.ask(messages, max_tokens=30)

    assert again.said == with_prompt.said
    n_before = before.usage["prompt_tokens"] + before.n_generated - 1
    assert again.n_cached >= n_before - s.MIN_ENDANGERED_TOKENS
    assert status(served)["engine"]["state"] == "ready"
    longer = [*messages, again.answer, user("And on")]
    assert served.ask(longer).n_cached > again.usage["prompt_tokens"]


def test_memory_is_given_back(served, caplog):
    served.say()
    kv_bytes = served.state.engine.call(lambda scheduler: scheduler.cache.nbytes)
    n_weights = served.state.engine.model.nbytes
    bytes_before = served.memory()

    with caplog.at_level("INFO"):
        served.fall_asleep()

    has_disk = served.state.config.cache_disk == "on"
    freed = bytes_before - served.memory()
    assert freed >= 0.95 * (n_weights + has_disk * kv_bytes)
    left = served.state.engine.call(lambda scheduler: scheduler.cache.nbytes)
    assert left <= (0.1 if has_disk else 1.0) * kv_bytes
    assert "asleep after" in caplog.text
    wait_until(lambda: status(served)["memory"]["model"] == 0)
    served.ask([SYSTEM, user("Hello")], max_tokens=3)
    wait_until(lambda: status(served)["memory"]["model"] == n_weights)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RSS is Linux's")
def test_the_process_is_smaller_by_the_weights_while_it_sleeps(models, tmp_path):
    """As the system counts it, and not MLX: a process that no other test has left memory in."""
    folder = models(DENSE, hidden=512, mlp=1536, layers=6)
    n_weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    program = Program(
        tmp_path / "program", folder, IDLE_UNLOAD_SECONDS="1", CACHE_DISK="on"
    )

    def has_state(state):
        return program.get("/v1/status")[1]["engine"]["state"] == state

    def bytes_held():
        return psutil.Process(program.process.pid).memory_info().rss

    def bytes_awake():
        """Asked again where it fell asleep before it was measured."""
        while True:
            body = {"messages": [user(words(400))], "max_tokens": 3}
            exchange(program.port, "POST", CHAT, body)
            held = bytes_held()
            if has_state("ready"):
                return held

    def bytes_asleep():
        wait_until(lambda: has_state("asleep"))
        return bytes_held()

    try:
        program.wait_until_ready()
        bytes_awake()  # what is made once
        asleep, awake, asleep_again = bytes_asleep(), bytes_awake(), bytes_asleep()
    finally:
        program.end(signal.SIGTERM)

    assert n_weights > 60_000_000
    assert awake - asleep >= 0.8 * n_weights
    assert awake - asleep_again >= 0.8 * n_weights


def test_nothing_but_a_request_for_the_model_wakes_it(served):
    messages, _ = served.say()
    served.fall_asleep()
    body = {"messages": messages, **FIELDS}

    code, health = ask(served, "GET", "/health")
    assert (code, health["status"]) == (200, "asleep")
    for path in ("/v1/status", "/v1/status?detail=cache", "/metrics", "/v1/models"):
        assert ask(served, "GET", path)[0] == 200
    claude = {"model": "any", "messages": [user("How long?")]}
    assert ask(served, "POST", "/v1/messages/count_tokens", claude)[0] == 200
    code, told = ask(served, "POST", "/v1/cache/explain", body)
    assert code == 200
    if served.state.config.cache_disk == "on":
        assert told["would_reuse"] >= 0.9 * told["prompt"] - s.MIN_ENDANGERED_TOKENS
    assert ask(served, "DELETE", "/v1/cache?session=nobody")[0] == 200
    assert served.is_asleep()

    assert ask(served, "DELETE", "/v1/cache")[0] == 200
    assert served.is_asleep()
    assert served.ask(messages, max_tokens=3).n_cached == 0


def test_who_comes_while_it_falls_asleep_is_served(served, monkeypatch):
    served.say()
    handle = s.RequestHandle(served.prepare([SYSTEM, user("Now")], max_tokens=2))
    unasked = [handle]
    save_some = s.Scheduler.save_some

    def save_and_be_asked(scheduler, *, is_closing=False):
        if is_closing and unasked:
            unasked.clear()
            served.state.engine._inbox.put(lambda sched: sched.waiting.append(handle))
        return save_some(scheduler, is_closing=is_closing)

    monkeypatch.setattr(s.Scheduler, "save_some", save_and_be_asked)
    served.set_seconds(0.01)
    wait_until(lambda: handle.times.activity == "ended")
    served.set_seconds(NEVER)
    assert not unasked


def test_other_weights_are_not_served(served, monkeypatch):
    """Somebody has changed the files meanwhile: what is cached is of others."""
    served.say(1)
    served.fall_asleep()
    load_model = s.load_model

    def load_others(*args):
        return s.replace(load_model(*args), revision="0" * 16)

    monkeypatch.setattr(s, "load_model", load_others)
    code, _ = ask(
        served,
        "POST",
        "/v1/chat/completions",
        {"model": "any", "messages": [user("Hello")], "max_tokens": 2},
    )
    assert code == 503
    assert "others than at the start" in served.state.engine.failure


def test_ranks_refuse_it():
    config = s.Config(model_path="x", idle_unload_seconds=1)
    with pytest.raises(s.ConfigError, match="IDLE_UNLOAD_SECONDS"):
        s._join_ranks(config, None, None)
