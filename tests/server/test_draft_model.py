"""DRAFT_MODEL: the same replies and the same KV as without, in fewer steps."""

import itertools
import json
import shutil
import time
from contextlib import closing
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from drafting import (
    check_a_burst_may_be_cancelled,
    check_others_may_join,
    check_same_reply,
    count_guesses,
    follow,
    forced,
    load_with,
    refusal,
)
from engine_fixture import words
from nights import at_night
from server_fixture import SYSTEM, Served, user, wait_until
from test_drafts import (
    DIFFERS,
    KINDS,
    PENALTY,
    SEEDED,
    TOLERANCES,
    state_not_put_back,
)
from tiny_models import DENSE, HYBRID, SLIDING


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The model is always asked, for drafts of unlike lengths, and nothing is copied."""
    lengths = itertools.cycle([7, 2, 4, 1, 3])
    monkeypatch.setattr(s.DraftBudget, "choose_length", lambda _: next(lengths))
    monkeypatch.setattr(s.DraftCosts, "in_plain_steps", lambda *_: 0.0)
    monkeypatch.setattr(s.CopyDrafter, "_find_copy", lambda *_: [])


@pytest.fixture
def drafting(bench, models):
    """Makes engines with a draft model: the dense one, whatever decodes."""

    def make(kind, **size):
        return bench(kind, speculation="auto", draft_folder=models(DENSE, **size))

    return make


@pytest.fixture
def engines(bench, drafting):
    """One without drafts, and one with."""
    return lambda kind: (bench(kind, speculation="off"), drafting(kind))


# -- in the engine -------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_always_right(drafting):
    b = drafting(DENSE)
    rng = np.random.default_rng(1)
    head = words(rng, 40)
    past = head
    for n in range(4):
        ids, end, ticket = b.ask(past, n=60)
        assert end.saved_steps > 25
        assert b.largest_difference(ticket, ids) == 0.0
        b.ask(head + words(rng, 25 + 40 * n), n=30)  # another one, alike at first
        past = past + ids + words(rng, 5)

    n_drafted, n_right = count_guesses(b)
    assert n_drafted == n_right > 200


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "fields",
    [{}, {"sampling": SEEDED}, {"sampling": PENALTY}, {"top_logprobs": 3}],
    ids=["greedy", "seeded", "penalty", "logprobs"],
)
@pytest.mark.parametrize(
    "kind, n_others",
    [(DENSE, None), (DENSE, 1), *itertools.product(KINDS[1:], [0, 1])],
)
def test_a_reply_is_the_same_with_a_draft_model_and_without(
    engines, models, kind, n_others, fields
):
    """Free, or at each place what the draft model says, mostly, or one of others."""
    fields = dict(fields)
    plain, b = engines(kind)
    rng = np.random.default_rng(4)
    for _ in range(2):
        prompt = words(rng, 60)
        if n_others is not None:
            reply = follow(models(DENSE), prompt, rng, n=80, every=12)
            fields["constraints"] = (forced(reply, n_others=n_others),)
        n_lost = check_same_reply(
            plain, b, prompt, tolerance=TOLERANCES[kind], **fields
        )
        assert n_lost <= 2

    n_drafted, n_right = count_guesses(b)
    assert n_drafted > 0
    if not n_others:  # else the reply may have nothing of what the draft model says
        assert n_right > 0


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_a_forced_reply_takes_fewer_steps(drafting, models, kind):
    b = drafting(kind)
    rng = np.random.default_rng(3)
    prompt = words(rng, 50)
    reply = follow(models(DENSE), prompt, rng, n=100, every=20)
    ids, end, _ = b.ask(prompt, n=100, constraints=(forced(reply),))

    assert ids == reply
    assert end.saved_steps > 40


def test_another_model_that_is_wrong_changes_nothing(bench, drafting):
    plain = bench(DENSE, speculation="off")
    b = drafting(DENSE, seed=77)
    prompt = words(np.random.default_rng(5), 50)
    expected, _, _ = plain.ask(prompt, n=60)
    ids, _, ticket = b.ask(prompt, n=60)

    assert ids == expected
    assert b.largest_difference(ticket, ids) == 0.0
    n_drafted, n_right = count_guesses(b)
    assert n_drafted > 5 * n_right


@pytest.mark.parametrize("kind", [at_night(DENSE), HYBRID])
def test_requests_that_join_and_leave_change_nothing(drafting, models, kind):
    b = drafting(kind)
    rng = np.random.default_rng(6)
    past = words(rng, 60)
    reply = follow(models(DENSE), past, rng, n=150, every=15)
    check_others_may_join(b, past, reply, rng=rng)
    assert count_guesses(b)[1] > 0


@pytest.mark.parametrize("kind", [at_night(DENSE), HYBRID])
def test_a_reply_that_is_cancelled_inside_a_burst_is_gone_on_with(
    drafting, models, kind
):
    b = drafting(kind)
    rng = np.random.default_rng(7)
    past = words(rng, 60)
    reply = follow(models(DENSE), past, rng, n=100, every=15)
    check_a_burst_may_be_cancelled(b, past, reply, rng=rng)


def test_a_long_conversation_is_followed_at_its_end(bench, drafting, monkeypatch):
    monkeypatch.setattr(s, "_MAX_TAIL_TOKENS", 64)
    monkeypatch.setattr(s, "_MAX_READ_TOKENS", 16)
    monkeypatch.setattr(s, "_FEW_TOKENS", 16)
    b = drafting(DENSE)
    prompt = words(np.random.default_rng(8), 300)
    expected, _, _ = bench(DENSE, speculation="off").ask(prompt, n=100)
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


def test_a_draft_model_that_fails_costs_nobody_anything(drafting, caplog):
    b = drafting(DENSE)
    prompt = words(np.random.default_rng(9), 50)
    fed = iter(range(100))

    def failing(_tokens, cache):
        if next(fed) == 12:
            raise RuntimeError("out of memory")
        return b.draft_model.model(_tokens, cache=cache)

    def set_model(scheduler):
        loaded = b.draft_model._replace(model=failing)
        scheduler.draft_model._loaded = loaded

    b.engine.call(set_model)
    ids, end, ticket = b.ask(prompt, n=60)

    assert end.reason == "length"
    assert b.largest_difference(ticket, ids) == 0.0
    assert "the draft model has failed" in caplog.text
    assert next(fed) == 13
    assert b.engine.call(lambda scheduler: scheduler.draft_model._layer_caches) == []


def test_its_memory_is_taken_from_the_limit(bench, drafting):
    without = bench(DENSE, speculation="auto")
    b = drafting(DENSE)

    n_bytes = b.engine.memory["draft_model"]
    assert "draft_model" not in without.engine.memory
    lost_bytes = [bench.engine.report["cache_max_bytes"] for bench in (without, b)]
    assert lost_bytes[0] - lost_bytes[1] == pytest.approx(n_bytes * s.KV_SHARE, abs=2)
    token_bytes = b.engine.report["kv_bytes_per_token"]
    assert n_bytes >= (1 << 20) + 8192 * token_bytes


def test_the_seconds_that_a_draft_takes_count(drafting, monkeypatch):
    guess = s.DraftModel.guess

    def slowly(*args, **fields):
        time.sleep(0.05)
        return guess(*args, **fields)

    monkeypatch.setattr(s.DraftModel, "guess", slowly)
    b = drafting(DENSE)
    b.ask(words(np.random.default_rng(11), 30), n=60)
    costs = b.engine.call(lambda scheduler: scheduler.draft_model.budget.costs)

    with_draft = [seconds for n_fed, seconds in costs._seconds.items() if n_fed > 1]
    assert with_draft
    assert min(with_draft) >= 0.05


def test_what_was_forgotten_is_not_kept_by_the_draft_model(drafting):
    b = drafting(DENSE)
    b.ask(words(np.random.default_rng(10), 30), n=20)

    def read_ids(scheduler):
        return len(scheduler.draft_model._read_ids)

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


def test_the_end_of_a_conversation_is_followed(counting):
    """Its last 4,096 tokens at first, and no more than 8,192."""
    past = np.full(13_000, 3, np.int32)

    def start_at(n_past):
        while not counting.draft_model.guess(
            past[:n_past], 2, NOTHING_PENDS, tenant=""
        ):
            pass
        return counting.draft_model._start

    assert start_at(5000) == 904
    assert start_at(904 + 8192) == 904
    assert start_at(904 + 8193) == 904 + 8193 - 4096
    assert start_at(1) == 0
    assert start_at(4097) == 0
    assert start_at(8194) == 4098


def drafter_of(counting, *end_ids):
    """For a reply to a prompt of two tokens."""
    return s.GuessDrafter(
        tokens(1, 2),
        counting.draft_model,
        tenant="",
        end_ids=frozenset(end_ids),
        metrics=s.CacheMetrics(),
    )


def know_plain_steps(counting):
    for _ in range(2):  # the first is not counted
        counting.draft_model.budget.costs.measure(1, 1.0)


def test_for_a_draft_model_that_has_failed_nobody_waits(counting):
    def wait():
        raise AssertionError("the token sampled last was waited for")

    know_plain_steps(counting)
    counting.draft_model.has_failed = True
    drafter = drafter_of(counting)

    assert drafter.draft(7, wait, NOTHING_PENDS) == []


def test_for_a_tail_with_an_image_nobody_waits(counting):
    def wait():
        raise AssertionError("the token sampled last was waited for")

    know_plain_steps(counting)
    drafter = drafter_of(counting)
    drafter.follow([3, -5, 3], 3)

    assert drafter.draft(7, wait, NOTHING_PENDS) == []


@pytest.mark.parametrize("n_right, n_least, n_most", [(0, 4, 20), (7, 149, 999)])
def test_where_drafts_do_not_pay_it_rests(
    counting, monkeypatch, n_right, n_least, n_most
):
    """It may lose eight steps and a hundredth of the reply, and nothing more."""
    monkeypatch.undo()
    know_plain_steps(counting)
    drafter = drafter_of(counting)
    output_ids = []
    n_drafts = 0
    while len(output_ids) < 1200:
        drafter.follow(output_ids, len(output_ids))
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
    gain = counting.draft_model.gain
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


def test_two_conversations_in_turn_do_not_make_it_read_for_ever(counting, monkeypatch):
    monkeypatch.undo()
    know_plain_steps(counting)
    monkeypatch.setattr(s.DraftCosts, "in_plain_steps", lambda *_: 1.0)  # a part read
    drafters = [drafter_of(counting) for _ in range(2)]
    for number, drafter in enumerate(drafters):
        drafter.follow([number] * 4000, 4000)
    for _ in range(2000):
        for drafter in drafters:
            assert drafter.draft(7, lambda: 6, NOTHING_PENDS) == []
            drafter.budget.learn_plain(1.0)

    # Of 8,000,000 tokens.
    assert counting.model.n_fed <= 2 * s._MAX_READ_TOKENS * s._MAX_READ_COST


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
    assert refusal(models(DENSE), tmp_path) == (
        f"DRAFT_MODEL={tmp_path}: it cannot be served; the line above says why"
    )
    assert "layers that cannot go back" in refusal(models(DENSE), models(HYBRID))
    assert "layers that cannot go back" in refusal(models(DENSE), models(SLIDING))

    other = shutil.copytree(models(DENSE), tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last_id = max(vocabulary.values())
    for token, token_id in vocabulary.items():
        vocabulary[token] = last_id - token_id
    file.write_text(json.dumps(tokenizer))
    assert "has another vocabulary than" in refusal(models(DENSE), other)

    (other / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "cannot be loaded by mlx-lm" in refusal(models(DENSE), other)


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


def gain_of(served):
    """What /v1/status says of the draft model."""
    return s.status_body(served.state)["engine"]["draft_model"]


def test_a_server_with_a_draft_model_answers_as_without_and_counts_it(models):
    replies = []
    for settings in ({}, {"draft_model": str(models(DENSE))}):
        with closing(Served(models(DENSE), **settings)) as served:
            exchange = served.ask([SYSTEM, user("Go on.")], max_tokens=60, tools=[])
            replies.append(exchange.answer)
            banner = s._write_banner(served.state)
            memory = served.state.engine.memory
            counted = served.state.metrics.snapshot()
            n_accepted = counted["draft_model_tokens_accepted"]
            # Each step of a draft writes a token of its own, too. Not counted is the first
            # step of each length: 4 and 7 tokens, and a token of its own.
            n_written = n_accepted + counted["draft_steps"]
            if settings:  # the model thread publishes it a few times a second
                wait_until(lambda: gain_of(served)["tokens"] >= n_written - 13)  # noqa: B023
                gain = gain_of(served)

    assert replies[0] == replies[1]
    assert memory["draft_model"] > 100_000
    assert str(models(DENSE)) in banner.split("\n  drafts ")[1]
    assert n_accepted > 0
    assert 0 < gain["tokens"] <= n_written - 5


# -- planted faults ----------------------------------------------------------------------


def kv_not_cut(monkeypatch):
    monkeypatch.setattr(s.DraftModel, "_cut", lambda *_: None)


def test_kv_of_the_draft_model_that_is_not_cut_is_noticed(drafting, monkeypatch):
    kv_not_cut(monkeypatch)
    with pytest.raises(AssertionError, match="saved_steps"):
        test_a_model_that_drafts_for_itself_is_always_right(drafting)


def test_state_that_is_not_put_back_is_noticed(engines, models, monkeypatch):
    state_not_put_back(monkeypatch)
    with pytest.raises(AssertionError, match=DIFFERS):
        test_a_reply_is_the_same_with_a_draft_model_and_without(
            engines, models, HYBRID, 0, {}
        )
