"""DRAFTS: the same replies and the same KV as without, in fewer steps."""

import itertools
import logging
import time

import httpx
import numpy as np
import pytest
import start_llm as s
from drafting import (
    check_a_burst_may_be_cancelled,
    check_others_may_join,
    check_same_reply,
    forced,
)
from engine_fixture import GREEDY, words
from nights import at_night
from server_fixture import Served, user, wait_until, wait_until_idle
from tiny_models import DENSE, HYBRID, MLA, SLIDING, TOOLS, tiny_model
from tiny_vision import DENSE_VISION, HYBRID_VISION, tiny_vision_model
from vision_fixture import Seeing, picture, picture_message

KINDS = [DENSE, HYBRID, SLIDING, MLA]
# Windows sum in another order after a call of several tokens, and MLA in one of several.
TOLERANCES = {DENSE: 0.0, HYBRID: 0.0, SLIDING: 1e-4, MLA: 1e-4}
SEEDED = GREEDY.model_copy(update={"temperature": 0.8, "top_k": 20, "seed": 4})
PENALTY = GREEDY.model_copy(update={"repetition_penalty": 1.2})


# -- where a draft is tried ----------------------------------------------------------------


def measured(seconds):
    """Costs of calls of these lengths; the first of each is not counted, the second not alone."""
    costs = s.DraftCosts()
    for n_fed, call_seconds in [*seconds.items()] * 3:
        costs.measure(n_fed, call_seconds)
    return costs


def drafter(past, seconds, **fields):
    """One for a reply after a past, where calls of these lengths take so long."""
    costs = measured(seconds)
    fields = {"end_ids": frozenset(), **fields}
    prompt = np.array(past, np.int32)
    return s.CopyDrafter(prompt, costs=costs, metrics=s.CacheMetrics(), **fields)


FILE = [*range(100, 200)]
BEGUN = [*FILE, 7, 8, *FILE[:6]]


def draft_after(y, writer, max_tokens=1000):
    return writer.draft(max_tokens, lambda: y, None)


def test_a_draft_is_what_followed():
    on_gpu = {1: 1.0, 16: 1.2, 32: 1.3}

    def draft(past, seconds, y=FILE[6], max_tokens=1000, **fields):
        return draft_after(y, drafter(past, seconds, **fields), max_tokens)

    assert draft(BEGUN, on_gpu) == FILE[7:22]
    assert draft(BEGUN, on_gpu, max_tokens=5) == FILE[7:12]
    assert draft(BEGUN, on_gpu, max_tokens=-1) == []
    assert draft(BEGUN, on_gpu, y=5) == []
    assert draft(BEGUN, {1: 1.0, 16: 17.0, 32: 33.0}) == []
    assert draft(BEGUN, {}) == []
    assert draft([*FILE, *FILE[:5]], on_gpu, FILE[5]) == []
    assert draft(BEGUN, on_gpu, end_ids=frozenset([109])) == FILE[7:9]
    assert draft(BEGUN, on_gpu, end_ids=frozenset([106])) == []
    image = [*FILE[:8], -5, -6, *FILE[:6]]
    assert draft(image, on_gpu) == FILE[7:8]
    assert draft([5, *[6, 7] * 30], on_gpu, y=6) == [7, 6] * 7 + [7]


@pytest.mark.parametrize(("cost", "n_long"), [(31.0, 31), (32.0, 15)])
def test_a_draft_is_longer_after_one_that_was_right_to_its_end(cost, n_long):
    """Unless so long a call takes as many plain steps as it has tokens."""
    writer = drafter(BEGUN, {1: 1.0, 16: 1.2, 32: cost})
    lengths = []
    for n_right in (15, n_long, 3, 15):
        draft = draft_after(FILE[6], writer)
        lengths.append(len(draft))
        writer.learn(n_draft=len(draft), n_accepted=n_right, seconds=1.2)

    assert lengths == [15, n_long, n_long, 15]


def test_after_a_change_a_copy_goes_on_where_three_tokens_are_the_same():
    on_gpu = {1: 1.0, 16: 1.2, 32: 1.3}
    writer = drafter([*FILE, *range(1000, 1200), *FILE, 7], on_gpu)
    reply = FILE[:6]
    writer.follow(reply, len(reply))
    assert draft_after(FILE[6], writer) == FILE[7:22]

    writer.learn(n_draft=15, n_accepted=9, seconds=1.3)
    reply = [*FILE[:16], 1, 2, 3, *FILE[18:20]]
    writer.follow(reply, len(reply))
    assert draft_after(FILE[20], writer) == []
    reply += FILE[20:21]
    writer.follow(reply, len(reply))
    assert draft_after(FILE[21], writer) == FILE[22:37]

    # Elsewhere six are needed.
    writer.learn(n_draft=15, n_accepted=0, seconds=1.3)
    reply += [5, *FILE[95:98], *[4] * 9, *FILE[94:98]]
    writer.follow(reply, len(reply))
    assert draft_after(FILE[98], writer) == []


def test_what_the_reply_repeats_of_itself_is_a_draft():
    writer = drafter([1, 2, 3], {1: 1.0, 16: 1.0, 32: 1.0})
    reply = [*FILE, 7, *FILE[:6]]
    writer.follow(reply, len(FILE) + 1)
    writer.follow(reply, len(reply))

    assert draft_after(FILE[6], writer) == FILE[7:22]


def test_the_first_call_of_a_length_does_not_count():
    """It may have compiled kernels."""
    writer = drafter(BEGUN, {1: 1.0})
    writer.budget.costs.measure(16, 100.0)
    assert draft_after(FILE[6], writer) == FILE[7:22]

    for _ in range(2):
        writer.budget.costs.measure(16, 100.0)
    assert draft_after(FILE[6], writer) == []


def test_a_length_does_not_rest_because_one_step_was_held_up():
    """The first that counts, at the start, when the machine does much else."""
    writer = drafter(BEGUN, {1: 1.0})
    for seconds in (75.0, 300.0, 1.2, 1.2):
        assert len(draft_after(FILE[6], writer)) == 15
        writer.learn(n_draft=15, n_accepted=14, seconds=seconds)

    assert writer.budget.costs.in_plain_steps(writer.budget.costs._seconds[16]) < 2.4


def test_a_first_call_that_compiles_costs_a_reply_no_drafts():
    writer = drafter(BEGUN, {1: 1.0})
    assert len(draft_after(FILE[6], writer)) == 15
    writer.learn(n_draft=15, n_accepted=15, seconds=75.0)

    assert writer.budget.balance == 8


def test_what_a_draft_cut_short_took_is_a_cost_of_the_length_that_was_chosen():
    seconds = {1: 1.0, 16: 2.0, 32: 99.0}
    writer = drafter(BEGUN, seconds, end_ids=frozenset([109]))
    for _ in range(20):
        assert draft_after(FILE[6], writer) == FILE[7:9]
        writer.learn(n_draft=2, n_accepted=2, seconds=15.5)
        writer.budget.balance = 0

    assert writer.budget.costs.can_pay(15)
    writer.learn(n_draft=2, n_accepted=2, seconds=20.0)
    assert not writer.budget.costs.can_pay(15)


def write(writer, n_tokens, seconds, *, n_right):
    """A reply that repeats six tokens, and of what followed them then so many, or none.

    Returns how many drafts were tried, and what all took.
    """
    output_ids = []
    n_tried, n_seconds = 0, 0.0
    while len(output_ids) < n_tokens:
        writer.follow(output_ids, len(output_ids))
        draft = draft_after(FILE[6], writer)
        if draft:
            n_tried += 1
            n_accepted = min(n_right, len(draft))
            took = seconds[len(draft) + 1]
            writer.learn(n_draft=len(draft), n_accepted=n_accepted, seconds=took)
            n_new = 1 + n_accepted
        else:
            took = seconds[1]
            writer.budget.learn_plain(took)
            n_new = 1
        n_seconds += took
        # The same place again and again, so that there always is a copy.
        output_ids += [FILE[len(output_ids) % 6] for _ in range(n_new)]
    return n_tried, n_seconds


COSTS = [
    {1: 1.0, 16: 1.2, 32: 1.3},
    {1: 1.0, 16: 2.6, 32: 3.7},
    {1: 1.0, 16: 15.0, 32: 29.0},
]


@pytest.mark.parametrize("seconds", COSTS, ids=str)
def test_drafts_that_are_wrong_cost_a_hundredth_of_a_reply(monkeypatch, seconds):
    monkeypatch.setattr(s.CopyDrafter, "_find_copy", lambda _, n: FILE[6 : 6 + n])
    writer = drafter(BEGUN, seconds)
    n_tried, n_seconds = write(writer, 20_000, seconds, n_right=0)

    assert n_tried > 3
    assert n_seconds <= 20_000 * 1.01 + 8 + max(seconds.values())


def test_what_drafts_have_gained_they_may_lose():
    seconds = {1: 1.0, 16: 2.6, 32: 3.7}
    budget = drafter(BEGUN, seconds).budget
    assert budget.choose_length() == 15
    budget.learn(n_draft=15, n_accepted=15, seconds=2.6)
    assert budget.balance == pytest.approx(8 + 16 - 2.6)

    for _ in range(13):
        assert budget.choose_length() > 0
        budget.learn(n_draft=15, n_accepted=0, seconds=2.6)
    while budget.balance >= 0:
        budget.learn(n_draft=15, n_accepted=0, seconds=2.6)
    assert budget.choose_length() == 0

    for _ in range(200):
        budget.learn_plain(1.0)
    assert budget.choose_length() > 0


def test_a_length_that_was_slow_is_tried_again(monkeypatch):
    """On a machine that was busy with something else when it was measured."""
    monkeypatch.setattr(s.CopyDrafter, "_find_copy", lambda _, n: FILE[6 : 6 + n])
    writer = drafter(BEGUN, {1: 1.0, 16: 20.0, 32: 40.0})
    seconds = {1: 1.0, 16: 1.2, 32: 1.3}
    n_tried, n_seconds = write(writer, 40_000, seconds, n_right=31)

    assert n_tried > 50
    assert n_seconds < 15_000


def test_what_other_conversations_have_is_copied_where_this_one_has_nothing():
    on_gpu = {1: 1.0, 16: 1.2, 32: 1.3}
    newest = np.array([1, 2, *FILE[:10], 8, 9, *[4] * 30], np.int32)
    oldest = np.array([*FILE, 5], np.int32)
    begun = [7, *FILE[:6]]

    def copied(past, *others):
        writer = drafter(past, on_gpu, others=others)
        return draft_after(past[-1] + 1, writer)

    assert copied(begun) == []
    assert copied(begun, oldest) == FILE[7:22]
    assert copied(begun, newest, oldest) == [*FILE[7:10], 8, 9, *[4] * 10]
    assert copied([*FILE[:9], *[3] * 30, *begun], newest, oldest) == [
        *FILE[7:9],
        *[3] * 13,
    ]
    # A draft does not go on from one conversation into the next.
    assert copied([7, *FILE[92:98]], oldest, newest) == [FILE[99], 5]


def test_of_other_conversations_a_bounded_part_is_looked_through():
    others = [np.full(60_000, number, np.int32) for number in range(5)]
    writer = drafter(BEGUN, {1: 1.0}, others=others)

    text = writer._history[: -len(BEGUN)]
    assert len(text) == 100_002
    assert set(text.tolist()) == {-1, 0, 1}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("is_known", [True, False])
def test_only_what_the_same_tenant_has_sent_is_copied(bench, is_known):
    b = bench(DENSE, speculation="auto")
    rng = np.random.default_rng(9)
    text = words(rng, 60)
    b.ask(text, n=1, owner=s.RequestOwner("a", "first"))
    owner = s.RequestOwner("a" if is_known else "b", "second")
    ids, _, _ = b.ask(words(rng, 20), n=60, owner=owner, constraints=(forced(text),))

    assert ids == text
    assert (counters(b)["draft_tokens_accepted"] > 0) == is_known


@pytest.mark.parametrize("n_past", range(1, 9))
def test_a_past_of_a_few_tokens_has_little_to_copy(n_past):
    draft = draft_after(5, drafter([5] * n_past, {1: 1.0}))
    assert draft == ([5] * 15 if n_past > 6 else [])


# -- in the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_step_that_was_done_before_somebody_waited_is_not_measured(
    bench, monkeypatch, seconds
):
    """As after a slice of another prompt: what is left of such a step is no plain step."""
    step = s.DecodeBatch.step

    def later(batch):
        time.sleep(seconds)
        return step(batch)

    monkeypatch.setattr(s.DecodeBatch, "step", later)
    b = bench(DENSE)
    b.ask(words(np.random.default_rng(14), 40), n=20)
    is_known = b.engine.call(lambda scheduler: scheduler.draft_costs.is_known)

    assert is_known == (seconds == 0)


@pytest.mark.usefixtures("eager")
def test_a_step_that_waits_for_what_is_fed_again_is_not_measured(bench, monkeypatch):
    """It is launched by the step before, which returns a token that is known already."""
    learned, slow = [], []
    step = s.TokenGenerator.step

    def watched(generator):
        slow[:] = [*slow[-1:], bool(generator.pending_ids)]
        return step(generator)

    def learn_plain(_budget, _seconds):
        learned.append(any(slow))

    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    monkeypatch.setattr(s.TokenGenerator, "step", watched)
    b = bench(HYBRID)
    prompt = words(np.random.default_rng(15), 60) * 3
    b.ask(prompt, n=5)
    monkeypatch.setattr(s.DraftBudget, "learn_plain", learn_plain)
    reply = copies_with_faults(np.random.default_rng(16), prompt[:120], 100, 12)
    b.ask(prompt, n=100, constraints=(forced(reply),))

    assert len(learned) > 5
    assert not any(learned)


@pytest.fixture
def eager(monkeypatch):
    """Drafts are tried wherever there is something to copy, of unlike lengths."""
    lengths = itertools.cycle([7, 15, 31, 3])
    monkeypatch.setattr(s.DraftBudget, "choose_length", lambda _: next(lengths))
    monkeypatch.setattr(s.DraftCosts, "in_plain_steps", lambda *_: 0.0)


def copies_with_faults(rng, source, n, every):
    """A reply that copies parts of a text, with other tokens in between."""
    reply = []
    at = 0
    while len(reply) < n:
        if rng.random() < 1 / every:
            reply.append(int(rng.integers(10, 300)))
            at = int(rng.integers(0, len(source) - n))
        else:
            reply.append(source[at])
            at += 1
    return reply


def counters(bench):
    return {
        name: bench.metrics.snapshot()[name]
        for name in ("draft_steps", "draft_tokens", "draft_tokens_accepted")
    }


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_copy_takes_fewer_steps_and_leaves_the_same_kv(bench, kind):
    b = bench(kind, speculation="auto")
    rng = np.random.default_rng(3)
    past = words(rng, 300)
    for _ in range(4):
        reply = copies_with_faults(rng, past[:300], 80, 15)
        ids, end, ticket = b.ask(past, n=80, constraints=(forced(reply),))
        assert ids == reply
        assert end.reason == "length"
        past = past + ids + words(rng, 30)
        ids, end, ticket = b.ask(past, n=6)
        assert end.cached_tokens >= len(past) - 31
        assert b.largest_difference(ticket, ids) <= TOLERANCES[kind]
        past = past + ids + words(rng, 10)

    counted = counters(b)
    assert counted["draft_tokens"] > counted["draft_tokens_accepted"] > 60


@pytest.mark.covering(1)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": SEEDED},
        {"sampling": PENALTY},
        {"top_logprobs": 3},
    ],
    ids=["greedy", "seeded", "penalty", "logprobs"],
)
@pytest.mark.parametrize("n_others", [1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_the_same_with_drafts_and_without(
    bench, monkeypatch, kind, n_others, fields
):
    """Free, or nearly a copy: at each place the copy's token or another one."""
    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    fields = dict(fields)
    plain = bench(kind, speculation="off")
    drafting = bench(kind, speculation="auto")
    rng = np.random.default_rng(4)
    for _ in range(2):
        prompt = words(rng, 60) * 3
        if n_others is not None:
            fields["constraints"] = (forced(prompt[:60] * 2, n_others=n_others),)
        same = {"n": 100, "tolerance": TOLERANCES[kind], **fields}
        check_same_reply(plain, drafting, prompt, **same)

    counted = counters(drafting)
    assert counted["draft_steps"] > 0
    if n_others:  # a free reply may have no draft that is right
        assert counted["draft_tokens_accepted"] > 0
    assert counters(plain)["draft_steps"] == 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [HYBRID, SLIDING])
def test_what_has_to_be_fed_again_is_bounded(bench, monkeypatch, kind):
    """Each draft is right for some tokens, and then wrong; it pays, so none rests.

    The checkpoints of a reply, one every 64 tokens, feed what is pending.
    """
    reply = words(np.random.default_rng(12), 240)
    n_pending = []
    step_with = s.TokenGenerator.step_with

    def counted(generator, draft):
        n_pending.append(len(generator.pending_ids))
        return step_with(generator, draft)

    def draft(drafter, max_tokens, _wait_for_y, _generator):
        y_place = drafter._n_history - drafter._reply_start
        right = reply[y_place + 1 : y_place + 7]
        return [*right, 9, 9][: max(0, max_tokens)]

    monkeypatch.setattr(s.TokenGenerator, "step_with", counted)
    monkeypatch.setattr(s.CopyDrafter, "draft", draft)
    b = bench(kind)
    ids, _, _ = b.ask(
        words(np.random.default_rng(13), 50), n=240, constraints=(forced(reply),)
    )

    assert ids == reply
    assert len(n_pending) > 10
    assert 30 < max(n_pending) <= 64


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [HYBRID, SLIDING, *map(at_night, (DENSE, MLA))])
def test_requests_that_join_and_leave_change_nothing(bench, kind):
    b = bench(kind, speculation="auto")
    rng = np.random.default_rng(5)
    past = words(rng, 300)
    reply = copies_with_faults(rng, past, 150, 12)
    check_others_may_join(b, past, reply, rng=rng, tolerance=TOLERANCES[kind])
    assert counters(b)["draft_steps"] > 0


@pytest.mark.covering(1)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("first", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_who_is_left_alone_is_sampled_its_own_way(bench, monkeypatch, kind, first):
    """The batch was begun by another request, which has left: it sampled otherwise."""
    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    second = GREEDY if first is SEEDED else SEEDED
    b = bench(kind)
    prompt = words(np.random.default_rng(10), 60) * 3
    alone, _, _ = b.ask(prompt, n=100, sampling=second)

    began = b.submit(words(np.random.default_rng(11), 90), n=900, sampling=first)
    began.next_event(60)
    left_alone = b.submit(prompt, n=100, sampling=second)
    ids = []
    while not ids:
        event = left_alone.next_event(60)
        if isinstance(event, s.TokenEvent):
            ids.append(event.token_id)
    began.stop_reason = "cancelled"
    b.finish(began)
    rest, _ = b.finish(left_alone)

    assert ids + rest == alone


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [HYBRID, SLIDING, *map(at_night, (DENSE, MLA))])
def test_a_reply_that_is_cancelled_inside_a_burst_is_gone_on_with(bench, kind):
    b = bench(kind, speculation="auto")
    rng = np.random.default_rng(6)
    past = words(rng, 200)
    reply = copies_with_faults(rng, past, 150, 10)
    tolerance = TOLERANCES[kind]
    check_a_burst_may_be_cancelled(b, past, reply, rng=rng, tolerance=tolerance)


@pytest.mark.usefixtures("eager")
def test_no_draft_has_a_token_that_may_end_the_reply(bench, monkeypatch):
    b = bench(DENSE, speculation="auto")
    past = words(np.random.default_rng(8), 40) * 3
    plain, _, _ = b.ask(past, n=80)
    end_id = plain[60]

    def set_ends(scheduler):
        loaded = scheduler.loaded
        scheduler.loaded = s.replace(loaded, eos_ids=frozenset([end_id]))

    b.engine.call(set_ends)
    b.engine.call(lambda scheduler: scheduler.cache.evict_session("", None))
    ids, end, _ = b.ask(past, n=80)

    assert ids == plain[: plain.index(end_id) + 1]
    assert end.reason == "stop"


# -- through the API ---------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"enum": ["src/server/main.py", "src/server/test_main.py"]},
        "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["path", "lines"],
    "additionalProperties": False,
}
BODIES = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5, "top_p": 0.95},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    "logit_bias": {"logit_bias": {"40": 3, "41": -100}},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "strict": True, "schema": SCHEMA},
        },
        "tools": [],
    },
    "forced call": {"tools": TOOLS, "tool_choice": "required"},
    "thinking budget": {"extra_body": {"thinking_budget": 12}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [HYBRID, *map(at_night, (DENSE, SLIDING, MLA))])
def test_all_that_a_request_may_ask_for_is_answered_as_without_drafts(
    kind, monkeypatch, tmp_path_factory
):
    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    folder = tiny_model(kind, tmp_path_factory.getbasetemp())
    plain = Served(folder, speculation="off")
    drafting = Served(folder)
    try:
        for name, fields in BODIES.items():
            check_same_answer(plain, drafting, name, fields)
        counts = drafting.state.metrics.snapshot()
        assert counts["draft_tokens_accepted"] > 20
    finally:
        plain.close()
        drafting.close()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [at_night(DENSE_VISION), HYBRID_VISION])
def test_after_an_image_a_reply_is_the_same_with_drafts_and_without(
    kind, monkeypatch, tmp_path
):
    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    folder = tiny_vision_model(kind, tmp_path)
    logs = str(tmp_path / "logs")
    plain = Seeing(folder, monkeypatch, speculation="off", log_root=logs)
    drafting = Seeing(folder, monkeypatch, log_root=logs)
    parts = ("main.py " * 9, picture(1), "say it again: main.py")
    history = [picture_message(*parts)]
    fields = {"temperature": 0, "max_tokens": 70, "tool_choice": "none"}
    try:
        for _ in range(2):
            expected = plain.ask(history, **fields)
            reply = drafting.ask(history, **fields)
            assert reply.answer == expected.answer
            history += [expected.answer, user("and now?")]
        counts = drafting.state.metrics.snapshot()
        assert reply.cached > 0
        assert counts["draft_tokens_accepted"] > 0
    finally:
        plain.close()
        drafting.close()


def without_ids(answer):
    """An answer; the ids of its calls are random."""
    calls = [call["function"] for call in answer.get("tool_calls") or ()]
    return {**answer, "tool_calls": calls}


def check_same_answer(plain, drafting, name, fields):
    """Without a stop string, and with one that is a part of the reply, inside a burst."""
    fields = {"max_tokens": 70, "temperature": 0, **fields}
    messages = [user(f"{name}: " + "read src/server/main.py and say it again. " * 4)]
    expected = plain.ask(messages, **fields)
    reply = drafting.ask(messages, **fields)
    assert without_ids(reply.answer) == without_ids(expected.answer), name
    assert reply.n_generated == expected.n_generated

    words = expected.answer.get("content") or ""
    if len(words) > 20 and name not in ("schema", "logprobs"):
        stops = {**fields, "stop": [words[len(words) // 2 :][:4]]}
        expected = plain.ask(messages, **stops)
        reply = drafting.ask(messages, **stops)
        assert without_ids(reply.answer) == without_ids(expected.answer), name


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("n_sent", [0, 1, 5, 30])
def test_a_client_that_leaves_inside_a_burst_is_logged(
    monkeypatch, caplog, tmp_path_factory, n_sent
):
    caplog.set_level(logging.INFO, s.logger.name)
    monkeypatch.setattr(s, "_MATCH_TOKENS", 2)
    events = itertools.count()
    send_event = s.ResponseWriter.send_event

    def leave(writer, body):
        if next(events) >= n_sent:
            wait_until_idle(served.state.engine)  # the whole reply has been made
            raise s.ClientGone
        send_event(writer, body)

    served = Served(tiny_model(DENSE, tmp_path_factory.getbasetemp()))
    try:
        monkeypatch.setattr(s.ResponseWriter, "send_event", leave)
        with (
            pytest.raises(httpx.RemoteProtocolError),
            served.stream(
                [user("Say it again: " + "src/main.py " * 20)],
                temperature=0,
                max_tokens=90,
            ) as chunks,
        ):
            list(chunks)
        wait_until(lambda: any("cancelled" in line for line in caplog.messages))
    finally:
        served.close()
    (facts,) = served.state.stores.recent
    assert facts["out"] < 90
    assert facts["saved_steps"] <= max(0, facts["out"] - 1)
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


# -- planted faults ----------------------------------------------------------------------


def one_token_too_many(monkeypatch):
    along = s.TokenGenerator._sample_along

    def more(generator, fed_ids, logits):
        sampled = along(generator, fed_ids, logits)
        n_right = len(sampled) - 1
        if n_right < len(fed_ids) - 1:
            wrong = s.SampledToken(fed_ids[n_right + 1], sampled[-1].logprobs)
            return [*sampled[:-1], wrong, sampled[-1]]
        return sampled

    monkeypatch.setattr(s.TokenGenerator, "_sample_along", more)


def nothing_taken_back(monkeypatch):
    monkeypatch.setattr(s.KVCache, "trim", lambda leaf, n: n)


def state_not_put_back(monkeypatch):
    kinds = {
        leaf: kind._replace(can_put_back=False) for leaf, kind in s.LEAF_KINDS.items()
    }
    real = s.TokenGenerator.step_with

    def step_with(generator, draft):
        with monkeypatch.context() as patch:
            patch.setattr(s, "LEAF_KINDS", kinds)
            return real(generator, draft)

    monkeypatch.setattr(s.TokenGenerator, "step_with", step_with)


def key_split_twice(monkeypatch):
    along = s.TokenGenerator._sample_along

    def after_one_more(generator, fed_ids, logits):
        generator._choices[0].sampler(logits[:1])
        return along(generator, fed_ids, logits)

    monkeypatch.setattr(s.TokenGenerator, "_sample_along", after_one_more)


# Other tokens, other log-probabilities, or none.
DIFFERS = r"assert .* == .*|Not equal to tolerance|assert .* <= |NaN or infinity"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "fault, kind, fields",
    [
        (one_token_too_many, DENSE, {}),
        (nothing_taken_back, DENSE, {}),
        (state_not_put_back, HYBRID, {}),
        (state_not_put_back, SLIDING, {}),
        (key_split_twice, DENSE, {"sampling": SEEDED}),
    ],
)
def test_a_planted_fault_of_drafts_is_noticed(bench, monkeypatch, fault, kind, fields):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=DIFFERS):
        test_a_reply_is_the_same_with_drafts_and_without(
            bench, monkeypatch, kind, 1, fields
        )
