"""DRAFT_MODEL: the same replies and the same KV as without, in fewer steps."""

import json
import logging
import shutil
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from drafting import count_guesses, load_with, make_eager, refusal
from engine_fixture import words
from server_fixture import wait_until
from tiny_models import DENSE, HYBRID


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    make_eager(monkeypatch, "model")


# -- in the engine -------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_always_right(make_drafting, rng):
    b = make_drafting("model", DENSE).start()
    head = words(rng, 40)
    past = head
    for n in range(3):
        ids, end, ticket = b.ask(past, n=60)
        assert end.saved_steps > 25
        assert b.largest_difference(ticket, ids) == 0.0
        b.ask(head + words(rng, 25 + 40 * n), n=30)  # another one, alike at first
        past = past + ids + words(rng, 5)

    n_drafted, n_right = count_guesses(b)
    assert n_drafted == n_right > 150


def test_until_the_next_step_is_launched_a_draft_costs(make_drafting, monkeypatch, rng):
    """Nothing is launched before it is known."""
    drafting = make_drafting("model", DENSE)
    b = drafting.start()
    steps, gaps = [], []

    def learn(drafter, *, n_draft, n_accepted, seconds):
        steps.append(seconds)

    def charge(budget, seconds, *, n_tokens=0):
        gaps.append(seconds)

    monkeypatch.setattr(s.GuessDrafter, "learn", learn)
    monkeypatch.setattr(s.DraftBudget, "charge", charge)
    b.ask(drafting.prompt(rng), n=40)

    assert len(steps) > 5
    assert len(gaps) >= len(steps) - 1
    assert all(gap > 0 for gap in gaps)


def test_a_long_conversation_is_followed_at_its_end(make_drafting, monkeypatch):
    monkeypatch.setattr(s, "_MAX_TAIL_TOKENS", 64)
    monkeypatch.setattr(s, "_MAX_READ_TOKENS", 16)
    monkeypatch.setattr(s, "_FEW_TOKENS", 16)
    drafting = make_drafting("model", DENSE)
    b = drafting.start()
    prompt = words(np.random.default_rng(8), 300)
    expected, _, _ = drafting.start_plain().ask(prompt, n=100)
    most = 0
    n_begun = 0
    guess = s.DraftModel.guess

    def watched(draft_model, past, n_tokens, generator, *, tenant):
        nonlocal most, n_begun
        old_caches = draft_model._layer_caches
        guessed = guess(draft_model, past, n_tokens, generator, tenant=tenant)
        n_begun += draft_model._layer_caches is not old_caches
        start, read_ids = draft_model._start, draft_model._read_ids
        assert read_ids.tolist() == past[start:][: len(read_ids)].tolist()
        assert bool(guessed) == (start + len(read_ids) == len(past))
        offsets = {layer.offset for layer in draft_model._layer_caches}
        assert offsets == {len(read_ids)}
        most = max(most, *offsets)
        return guessed

    monkeypatch.setattr(s.DraftModel, "guess", watched)
    ids, _, _ = b.ask(prompt, n=100)

    assert ids == expected
    assert 32 < most <= 64
    assert 2 <= n_begun <= 4
    assert count_guesses(b)[0] > 0


def test_what_was_forgotten_is_not_kept_by_the_draft_model(make_drafting):
    b = make_drafting("model", DENSE).start()
    b.ask(words(np.random.default_rng(10), 30), n=20)

    def read_ids(scheduler):
        return len(scheduler.guesser._read_ids)

    assert b.engine.call(read_ids) > 30
    b.engine.call(lambda scheduler: scheduler.drop_kv("", None))
    assert b.engine.call(read_ids) == 0


# -- without an engine ---------------------------------------------------------------------


class CountingModel:
    """A draft model that says 7 after everything, and counts what it is fed."""

    def __init__(self):
        self.layers = [None]
        self.n_fed = 0

    def make_cache(self):
        return [s.KVCache()]

    def __call__(self, tokens, cache):
        self.n_fed += tokens.shape[1]
        kv = mx.zeros((1, 1, tokens.shape[1], 4))
        cache[0].update_and_fetch(kv, kv)
        return mx.broadcast_to(mx.arange(8) == 7, (*tokens.shape, 8))


@pytest.fixture
def counting():
    model = CountingModel()
    loaded = s.LoadedDraftModel(model, None, nbytes=0, vocab_size=8)
    draft_model = s.DraftModel(loaded)
    model.n_fed = 0
    return SimpleNamespace(model=model, draft_model=draft_model)


NOTHING_PENDS = SimpleNamespace(pending_ids=[])


def tokens(*ids):
    return np.array(ids, np.int32)


def test_a_token_is_read_once_and_only_by_its_own_tenant(counting):
    def n_fed(*ids, n=3, tenant="a"):
        before = counting.model.n_fed
        guess = counting.draft_model.guess
        assert guess(tokens(*ids), n, NOTHING_PENDS, tenant=tenant) == [7] * n
        return counting.model.n_fed - before

    assert n_fed(1, 2, 3, 4) == 4 + 2
    assert n_fed(1, 2, 3, 4, 7, 7) == 2 + 2  # what it has guessed is fed again
    assert n_fed(1, 2, 3, 5) == 1 + 2
    assert n_fed(1, 2, 3, 5, 6, 6, 6) == 3 + 2
    assert n_fed(1, 2, 3, 5, 6, 6, 6, tenant="b") == 7 + 2
    assert n_fed(1, 2, 3) == 3 + 2
    assert n_fed(1, n=1) == 1


def test_what_it_cannot_read_has_no_draft(counting):
    count_readable = counting.draft_model.count_readable

    assert count_readable(tokens(1, -5, 2), NOTHING_PENDS) == 0
    assert count_readable(tokens(1, 8, 2), NOTHING_PENDS) == 0
    assert count_readable(tokens(1, 7, 2), NOTHING_PENDS) == 4096
    assert count_readable(tokens(1, 7, 2), SimpleNamespace(pending_ids=[5])) == 0
    guess = counting.draft_model.guess
    assert guess(tokens(1, 2, 8), 3, NOTHING_PENDS, tenant="") == []  # y alone
    assert counting.model.n_fed == 0


def test_it_reads_a_part_in_each_step(counting):
    past = np.full(1200, 3, np.int32)
    guess = counting.draft_model.guess
    drafts = [guess(past, 2, NOTHING_PENDS, tenant="") for _ in range(4)]

    assert drafts == [[], [], [], [7, 7]]
    assert counting.model.n_fed == 1200 + 1


def drafter_of(counting, *end_ids):
    """For a reply to a prompt of two tokens."""
    return s.GuessDrafter(
        tokens(1, 2),
        counting.draft_model,
        tenant="",
        end_ids=frozenset(end_ids),
        metrics=s.CacheMetrics(),
    )


def know_plain_steps(counting, seconds=1.0):
    for _ in range(2):  # the first is not counted
        counting.draft_model.budget.costs.measure(1, seconds)


def never_waited_for():
    raise AssertionError("the token sampled last was waited for")


def test_nobody_waits_for_who_cannot_draft(counting):
    know_plain_steps(counting)
    drafter = drafter_of(counting)
    drafter.add_reply([3, -5, 3], 3)

    assert drafter.draft(7, never_waited_for, NOTHING_PENDS) == []


def test_after_a_failure_no_request_asks_it_for_thousands_of_steps(
    counting, monkeypatch, caplog
):
    monkeypatch.undo()
    know_plain_steps(counting)
    with monkeypatch.context() as patch:
        patch.setattr(CountingModel, "__call__", None)
        assert drafter_of(counting).draft(7, lambda: 3, NOTHING_PENDS) == []
    assert "the draft model has failed" in caplog.text

    for _ in range(9_000):
        drafter = drafter_of(counting)
        assert drafter.draft(7, never_waited_for, NOTHING_PENDS) == []
        drafter.budget.learn_plain(1.0)
    for _ in range(1_000):
        drafter.budget.learn_plain(1.0)
    assert drafter.draft(7, lambda: 3, NOTHING_PENDS) == [7] * 4


def test_a_request_whose_guess_has_failed_late_is_asked_again_like_others(
    counting, monkeypatch
):
    """Reading has a bound in each request: that time was none."""
    monkeypatch.undo()
    know_plain_steps(counting, 1e-5)
    drafter = drafter_of(counting)

    def fail_late(*_args, **_fields):
        time.sleep(1e-5 * 2 * s._MAX_READ_COST)
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(CountingModel, "__call__", fail_late)
        assert drafter.draft(7, lambda: 3, NOTHING_PENDS) == []
    for _ in range(10_000):
        drafter.budget.learn_plain(1e-5)

    assert drafter.draft(7, lambda: 3, NOTHING_PENDS) == [7] * 4


def test_one_step_that_was_held_up_does_not_say_that_drafts_do_not_pay(
    counting, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.undo()
    know_plain_steps(counting)
    drafter = drafter_of(counting)
    for step in range(100):
        draft = drafter.draft(1000, lambda: 6, NOTHING_PENDS)
        seconds = 500.0 if step == 9 else 1.2
        drafter.learn(n_draft=len(draft), n_accepted=len(draft), seconds=seconds)
        drafter.budget.learn_plain(1.0)

    gain = counting.draft_model.budget.gain
    assert 100 < gain["plain_steps"] < 140
    assert gain["tokens"] > 700
    assert " pays: " in caplog.text


@pytest.mark.parametrize("n_right, n_least, n_most", [(0, 2, 14), (7, 149, 999)])
def test_where_drafts_do_not_pay_it_rests(
    counting, monkeypatch, n_right, n_least, n_most
):
    """It may lose a step or two and a hundredth of all replies: else each would find out anew."""
    monkeypatch.undo()
    know_plain_steps(counting)
    n_drafts = 0
    for _ in range(3):
        drafter = drafter_of(counting)
        output_ids = []
        while len(output_ids) < 400:
            drafter.add_reply(output_ids, len(output_ids))
            draft = drafter.draft(1000, lambda: 6, NOTHING_PENDS)
            if draft:
                n_drafts += 1
                n = min(n_right, len(draft))
                drafter.learn(n_draft=len(draft), n_accepted=n, seconds=2.1)
                output_ids += [6, *draft[:n]]
            else:
                drafter.budget.learn_plain(1.0)
                output_ids.append(6)

    assert n_least <= n_drafts <= n_most
    gain = counting.draft_model.budget.gain
    assert (gain["tokens"] > gain["plain_steps"]) == (n_right > 0)
    assert gain["plain_steps"] == pytest.approx(2.1 * n_drafts, rel=0.1)
    for n_fed in (8, 5, 3) * 12:  # its own seconds count
        counting.draft_model.budget.costs.measure(n_fed, 1000.0)
    assert drafter.draft(1000, lambda: 6, NOTHING_PENDS) == []


def test_no_draft_goes_on_after_a_token_that_may_end_the_reply(counting):
    know_plain_steps(counting)

    def drafted(y, *end_ids):
        return drafter_of(counting, *end_ids).draft(2, lambda: y, NOTHING_PENDS)

    assert set(drafted(3)) == {7}
    assert drafted(3, 3) == []
    assert drafted(3, 7) == []


# -- loading -------------------------------------------------------------------------------


def test_a_draft_model_is_loaded_beside_the_model(models):
    loaded = load_with(models(HYBRID), models(DENSE))

    assert loaded.draft_model.path == models(DENSE)
    assert loaded.draft_model.nbytes > 100_000
    assert (
        load_with(models(HYBRID), models(DENSE), speculation="off").draft_model is None
    )
    assert load_with(models(HYBRID), "").draft_model is None


def test_a_draft_model_that_does_not_suit_stops_the_start(models, tmp_path):
    assert "layers that cannot go back" in refusal(models(DENSE), models(HYBRID))

    other = shutil.copytree(models(DENSE), tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last_id = max(vocabulary.values())
    for token, token_id in vocabulary.items():
        vocabulary[token] = last_id - token_id
    file.write_text(json.dumps(tokenizer))
    assert "has another vocabulary than" in refusal(models(DENSE), other)


def test_a_start_that_a_draft_model_makes_impossible_says_so(
    bench, models, monkeypatch
):
    def failure(**settings):
        b = bench(DENSE, is_awaited=False, draft_folder=models(DENSE), **settings)
        wait_until(lambda: b.engine.state != "loading")
        return b.engine.failure

    assert "the one of DRAFT_MODEL take" in failure(memory_limit_bytes=1 << 22)
    monkeypatch.setattr(s, "can_draft", lambda _: False)
    assert failure() == "DRAFT_MODEL: the model has layers that no draft suits"
