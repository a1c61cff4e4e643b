"""SCHEDULER: background requests wait for others, for ten seconds, and evict nothing of them.

Steps are made one by one, with a clock that only a test moves.
"""

import random

import client_bodies
import pytest
import start_llm as s
from engine_fixture import Bench, words
from server_fixture import user
from tiny_models import TOOLS

STEP = 128  # tokens of a slice


class Stage:
    """A scheduler whose steps and time are the test's."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.now = 1000.0
        self._rng = random.Random(4)
        for owner in (scheduler.cache, scheduler.cache._tree):
            owner._clock = self.clock
        scheduler._now = self.clock

    def clock(self):
        return self.now

    def come(self, n_tokens=600, *, is_background=False, n=4, prefix=()):
        tokens = [*prefix, *(self._rng.randrange(10, 300) for _ in range(n_tokens))]
        key = s.TokenKey(
            b"r",
            s.np.asarray(tokens, s.np.int32),
            s.block_hashes(tokens, 16, root=b"r"),
        )
        request = s.EngineRequest(
            key=key,
            checkpoint_positions=(),
            max_tokens=n,
            sampling=s.SamplingParams(temperature=0, repetition_context_size=0),
            owner=s.RequestOwner(session=str(self._rng.random())),
            is_background=is_background,
        )
        handle = s.RequestHandle(request, self.now)
        self.scheduler.waiting.append(handle)
        return handle

    def step(self, n=1):
        for _ in range(n):
            self.scheduler.step()

    def running(self, handle):
        return next(r for r in self.scheduler.running if r.handle is handle)

    def has_ended(self, handle):
        return handle.times.activity == "ended"

    def run(self, *handles):
        for _ in range(200):
            if all(map(self.has_ended, handles)):
                return
            self.step()
        raise AssertionError("a request did not end")


@pytest.fixture
def on_stage(folder, monkeypatch):
    """Runs a scene on the model thread."""
    bench = Bench(folder, monkeypatch, prefill_step_size=STEP, speculation="off")
    monkeypatch.setattr(s, "HANDOVER_SECONDS", 0)

    def play(scene):
        bench.engine.call(lambda scheduler: scene(Stage(scheduler)))

    yield play
    bench.engine.stop()


def n_read(stage, handle):
    return stage.running(handle).num_computed_tokens


def test_others_are_read_first(on_stage):
    def scene(stage):
        title = stage.come(1000, is_background=True)
        stage.step(2)
        n_before = n_read(stage, title)
        assert 0 < n_before < 1000

        question = stage.come(600)
        while question.times.activity != "decode":
            stage.step()
            assert n_read(stage, title) == n_before
        stage.run(question)
        stage.run(title)

    on_stage(scene)


def test_after_ten_seconds_it_is_as_all_others(on_stage):
    def scene(stage):
        title = stage.come(600, is_background=True)
        stage.step()
        n_before = n_read(stage, title)
        stage.come(5000)
        stage.step()
        assert n_read(stage, title) == n_before
        stage.now += s.BACKGROUND_SECONDS
        stage.step()
        assert n_read(stage, title) > n_before  # it ends before the other one does

    on_stage(scene)


def test_its_reply_waits_while_others_are_read_and_not_while_they_decode(on_stage):
    def scene(stage):
        title = stage.come(300, is_background=True, n=60)
        while title.times.activity != "decode":
            stage.step()
        stage.step(3)
        n_before = len(stage.running(title).output_ids)
        question = stage.come(600, n=50)
        while question.times.activity != "decode":
            stage.step()
            assert len(stage.running(title).output_ids) == n_before
        stage.step(2)
        assert len(stage.running(title).output_ids) > n_before
        stage.run(question, title)

    on_stage(scene)


def test_nobody_else_waits_for_a_prefix_that_it_reads(on_stage):
    def scene(stage):
        system = words(s.np.random.default_rng(1), 700)
        title = stage.come(20, is_background=True, prefix=system)
        stage.step()
        assert 0 < n_read(stage, title) < 700

        question = stage.come(20, prefix=system)
        stage.step()

        assert question.times.activity == "prefill"
        stage.run(question, title)

    on_stage(scene)


def limit_cache(stage, n_tokens):
    """So many tokens of KV have room, in all."""
    stage.scheduler.cache.max_bytes = n_tokens * stage.scheduler.spec.token_bytes


def entry_of(stage, handle):
    tokens = handle.request.key.tokens
    for entry in stage.scheduler.cache.entries:
        n = min(len(tokens), entry.end)
        if n > 100 and entry.key.tokens[:n].tolist() == tokens[:n].tolist():
            return entry
    return None


def test_what_was_used_lately_is_not_evicted_for_it(on_stage):
    def scene(stage):
        question = stage.come(1500)
        stage.run(question)
        limit_cache(stage, 2500)
        title = stage.come(1200, is_background=True)
        stage.step(3)
        assert title.times.phase == "queued"
        assert entry_of(stage, question).end >= 1500
        assert stage.scheduler.sleep_seconds > 0  # nobody spins meanwhile

        stage.now += s.BACKGROUND_SECONDS
        stage.run(title)

    on_stage(scene)


def test_its_kv_goes_first(on_stage):
    """Though it was used last, and although others are worth less for each byte."""

    def scene(stage):
        question = stage.come(1000)
        stage.run(question)
        stage.now += 60
        title = stage.come(1000, is_background=True)
        stage.run(title)
        limit_cache(stage, 3300)
        other = stage.come(1000)
        stage.run(other)

        assert entry_of(stage, question).end >= 1000
        left = entry_of(stage, title)
        assert left is None or left.end < 1000

    on_stage(scene)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_entry_that_others_use_too_is_theirs(on_stage, is_first):
    """A recap goes on with the conversation; a conversation, with what a recap has read."""

    def scene(stage):
        begins = stage.come(600, is_background=is_first)
        stage.run(begins)
        prefix = begins.request.key.tokens.tolist()
        follows = stage.come(30, is_background=not is_first, prefix=prefix)
        stage.run(follows)
        assert not entry_of(stage, follows).is_background

    on_stage(scene)


# -- which requests are in the background ----------------------------------------------


def request_of(parse, body):
    return parse({"max_tokens": 9, **body}, s.Config(), request_id="a", headers={})


def chat(*messages, **fields):
    return request_of(s.parse_chat_request, {"messages": [*messages], **fields})


SYSTEM = {"role": "system", "content": "You are a title generator. You output ONLY ..."}
TASK = "### Task:\nGenerate a concise, 3-5 word title with an emoji"


def test_side_requests_are_known_by_a_table():
    schema = {
        "type": "json_schema",
        "json_schema": {"schema": client_bodies.TITLE_SCHEMA},
    }
    assert s.is_background(chat(SYSTEM, user("Hello")))
    assert s.is_background(chat(user(TASK)))
    assert s.is_background(chat(user("Hello"), response_format=schema))
    title = client_bodies.MESSAGES["title"]
    assert s.is_background(request_of(s.parse_anthropic_request, title))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [user("Hello")]},
        {"messages": [SYSTEM, user("Hello")], "tools": TOOLS},
        {"messages": [user("Hello, " + TASK)]},
        {"messages": [user(TASK), {"role": "assistant", "content": "x"}, user("On")]},
        {"messages": [SYSTEM, user("Hello")], "service_tier": "priority"},
        {"messages": [user("Hello")], "service_tier": "default"},
    ],
)
def test_all_else_is_not_in_the_background(fields):
    assert not s.is_background(request_of(s.parse_chat_request, fields))


def test_a_client_says_by_flex_that_it_can_wait():
    assert s.is_background(chat(user("Hello"), service_tier="flex", tools=TOOLS))
    body = {"messages": [user("Hello")], "service_tier": "flex"}
    assert s.is_background(request_of(s.parse_anthropic_request, body))
