"""DRAFTS: the same replies and the same KV as without, in fewer steps."""

import itertools
import time

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from drafting import (
    DIFFERS,
    FIRST,
    PENALTY,
    SEEDED,
    check_drafted_replies,
    counters,
    drafters,
    forced,
    make_eager,
    none_cut,
    nothing_taken_back,
    one_cut_too_few,
    one_cut_too_many,
    state_not_put_back,
    windows_counted_and_not_cut,
)
from engine_fixture import GREEDY, words
from mlx_lm.models.cache import make_prompt_cache
from nights import at_night
from server_fixture import Served, user, wait_until
from test_checkpoints import make_model
from tiny_heads import GEMMA, tiny_head, tiny_pair
from tiny_models import DENSE, HYBRID, SLIDING, TOOLS
from tiny_vision import HYBRID_VISION, tiny_vision_model
from vision_fixture import Seeing, picture, picture_message

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


def test_where_a_long_draft_pays_no_more_there_is_one_of_the_usual_length():
    """Plain steps have become a little faster since a draft was right to its end."""
    writer = drafter(BEGUN, {1: 10.0, 16: 12.0, 32: 310.0})
    writer.learn(n_draft=15, n_accepted=15, seconds=12.0)
    assert len(draft_after(FILE[6], writer)) == 31
    for _ in range(9):
        writer.budget.learn_plain(9.0)

    assert len(draft_after(FILE[6], writer)) == 15


def test_after_a_change_a_copy_goes_on_where_three_tokens_are_the_same():
    on_gpu = {1: 1.0, 16: 1.2, 32: 1.3}
    writer = drafter([*FILE, *range(1000, 1200), *FILE, 7], on_gpu)
    reply = FILE[:6]
    writer.add_reply(reply, len(reply))
    assert draft_after(FILE[6], writer) == FILE[7:22]

    writer.learn(n_draft=15, n_accepted=9, seconds=1.3)
    reply = [*FILE[:16], 1, 2, 3, *FILE[18:20]]
    writer.add_reply(reply, len(reply))
    assert draft_after(FILE[20], writer) == []
    reply += FILE[20:21]
    writer.add_reply(reply, len(reply))
    assert draft_after(FILE[21], writer) == FILE[22:37]

    # Elsewhere six are needed.
    writer.learn(n_draft=15, n_accepted=0, seconds=1.3)
    reply += [5, *FILE[95:98], *[4] * 9, *FILE[94:98]]
    writer.add_reply(reply, len(reply))
    assert draft_after(FILE[98], writer) == []


def test_what_the_reply_repeats_of_itself_is_a_draft():
    writer = drafter([1, 2, 3], {1: 1.0, 16: 1.0, 32: 1.0})
    reply = [*FILE, 7, *FILE[:6]]
    writer.add_reply(reply, len(FILE) + 1)
    writer.add_reply(reply, len(reply))

    assert draft_after(FILE[6], writer) == FILE[7:22]


def test_a_length_does_not_rest_because_one_step_was_held_up():
    """The first that counts, at the start, when the machine does much else."""
    writer = drafter(BEGUN, {1: 1.0})
    for seconds in (75.0, 300.0, 1.2, 1.2):
        assert len(draft_after(FILE[6], writer)) == 15
        writer.learn(n_draft=15, n_accepted=14, seconds=seconds)

    assert writer.budget.costs.in_plain_steps(writer.budget.costs._seconds[16]) < 2.4


def test_a_plain_step_is_measured_again_after_many_with_drafts():
    """A head drafts in each step; what was measured at first may have been a busy machine."""
    costs = measured({1: 10.0, 4: 2.0})
    assert costs.in_plain_steps(2.0) >= 1
    for _ in range(s._MAX_SINCE_PLAIN):
        costs.measure(4, 2.0)
    assert not costs.is_known
    costs.measure(1, 1.0)
    assert costs.is_known


def write(writer, n_tokens, seconds, *, n_right):
    """A reply that repeats six tokens, and of what followed them then so many, or none.

    Returns how many drafts were tried, and what all took.
    """
    output_ids = []
    n_tried, n_seconds = 0, 0.0
    while len(output_ids) < n_tokens:
        writer.add_reply(output_ids, len(output_ids))
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
    monkeypatch.setattr(s.CopyDrafter, "_find_start", lambda *_: 6)
    writer = drafter(BEGUN, seconds)
    n_tried, n_seconds = write(writer, 20_000, seconds, n_right=0)

    assert n_tried > 3
    assert n_seconds <= 20_000 * 1.01 + 8 + max(seconds.values())


def test_a_length_that_was_slow_is_tried_again(monkeypatch):
    """On a machine that was busy with something else when it was measured."""
    monkeypatch.setattr(s.CopyDrafter, "_find_start", lambda *_: 6)
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
        writer = drafter(past, on_gpu, other_conversations=others)
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
    writer = drafter(BEGUN, {1: 1.0}, other_conversations=others)

    text = writer._history[: -len(BEGUN)]
    assert len(text) == 100_002
    assert set(text.tolist()) == {-1, 0, 1}


@pytest.fixture
def eager(monkeypatch):
    make_eager(monkeypatch, "copies")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("is_known", [True, False])
def test_only_what_the_same_tenant_has_sent_is_copied(bench, is_known, rng):
    b = bench(DENSE, speculation="auto")
    text = words(rng, 60)
    b.ask(text, n=1, owner=s.RequestOwner("a", "first"))
    owner = s.RequestOwner("a" if is_known else "b", "second")
    ids, _, _ = b.ask(words(rng, 20), n=60, owner=owner, constraints=(forced(text),))

    assert ids == text
    assert (counters(b)["draft_tokens_accepted"] > 0) == is_known


# -- in the engine, whoever drafts -----------------------------------------------------------


@pytest.fixture
def drafting(request, make_drafting):
    return make_drafting(*request.param)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "fields",
    [{}, {"sampling": SEEDED}, {"sampling": PENALTY}, {"top_logprobs": 3}],
    ids=["greedy", "seeded", "penalty", "logprobs"],
)
@pytest.mark.parametrize("n_others", [0, 1, None])
@drafters(*FIRST, ("copies", SLIDING))
def test_a_reply_is_the_same_with_drafts_and_without(drafting, n_others, fields):
    check_drafted_replies(drafting, fields, n_others=n_others)


@drafters()
def test_a_reply_as_guessed_takes_fewer_steps_and_leaves_the_same_kv(drafting, rng):
    b = drafting.start()
    past = drafting.prompt(rng, 100)
    for _ in range(2):
        reply = drafting.reply(past, rng, n=80, every=15)
        ids, end, _ = b.ask(past, n=80, constraints=(forced(reply),))
        assert ids == reply
        assert end.saved_steps > 20

        past = past + ids + words(rng, 9)
        ids, end, handle = b.ask(past, n=5)
        assert end.cached_tokens >= len(past) - 10
        assert b.largest_difference(handle, ids) <= drafting.tolerance
        past = past + ids + words(rng, 9)


@drafters(("copies", HYBRID), ("copies", SLIDING), ("model", HYBRID), ("head", GEMMA))
def test_requests_that_join_and_leave_change_nothing(drafting, rng):
    """Four come and go beside a reply; all are exact, and so is what goes on from it."""
    b = drafting.start()
    past = drafting.prompt(rng, 80)
    reply = drafting.reply(past, rng, n=150, every=15)
    one = b.submit(past, n=len(reply), constraints=(forced(reply),))
    others = []
    for number in range(4):
        time.sleep(0.02)
        others.append(b.submit(words(rng, 150 + number), n=10))
    ids, _ = b.finish(one)
    assert ids == reply
    for handle in others:
        other_ids, _ = b.finish(handle)
        assert b.largest_difference(handle, other_ids) <= drafting.tolerance

    ids, _, handle = b.ask(past + ids + words(rng, 9), n=5)
    assert b.largest_difference(handle, ids) <= drafting.tolerance
    assert counters(b)["draft_tokens_accepted"] > 0


@drafters(("copies", HYBRID), ("copies", SLIDING), ("model", HYBRID), ("head", GEMMA))
def test_a_reply_that_is_cancelled_inside_a_burst_is_gone_on_with(drafting, rng):
    """The client leaves after some tokens; its conversation goes on from all that it has."""
    b = drafting.start()
    past = drafting.prompt(rng)
    reply = drafting.reply(past, rng, n=100, every=10)
    for n_read in (1, 9, 30):
        handle = b.submit(past, n=len(reply), constraints=(forced(reply),))
        ids = read_tokens(handle, n_read)
        handle.stop_reason = "cancelled"
        rest, _ = b.finish(handle)
        ids += rest
        assert ids == reply[: len(ids)]

        for prompt in (past + ids, past + ids[:n_read]):
            new_prompt = prompt + words(rng, 12)
            new_ids, end, handle = b.ask(new_prompt, n=4)
            assert b.largest_difference(handle, new_ids) <= drafting.tolerance
            if prompt == past + ids:
                assert end.cached_tokens >= len(new_prompt) - 12 - 2


def read_tokens(handle, n):
    """The first tokens of a reply, as they come."""
    ids = []
    while len(ids) < n:
        event = handle.next_event(60)
        if isinstance(event, s.TokenEvent):
            ids.append(event.token_id)
    return ids


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@drafters(("copies", HYBRID), ("copies", SLIDING))
def test_who_is_left_alone_is_sampled_its_own_way(drafting, first):
    """The batch was begun by another request, which has left: it sampled otherwise."""
    second = GREEDY if first is SEEDED else SEEDED
    b = drafting.start()
    prompt = drafting.prompt(np.random.default_rng(10))
    alone, _, _ = b.ask(prompt, n=100, sampling=second)

    began = b.submit(words(np.random.default_rng(11), 90), n=900, sampling=first)
    began.next_event(60)
    left_alone = b.submit(prompt, n=100, sampling=second)
    ids = read_tokens(left_alone, 1)
    began.stop_reason = "cancelled"
    b.finish(began)
    rest, _ = b.finish(left_alone)

    assert ids + rest == alone


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("kind", "n_least", "n_most"), [(HYBRID, 31, 64), (SLIDING, 0, 0)]
)
def test_what_has_to_be_fed_again_is_bounded(bench, monkeypatch, kind, n_least, n_most):
    """Each draft is right for some tokens, and then wrong; it pays, so none rests.

    The checkpoints of a reply, one every 64 tokens, feed what is pending. Windows are
    cut, so there nothing is.
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
    assert n_least <= max(n_pending) <= n_most


def test_windows_beside_recurrent_layers_are_put_back_with_them():
    model = make_model("recurrent_gemma")
    prompt = np.random.default_rng(14).integers(10, 50, 12).tolist()

    def begin():
        caches = make_prompt_cache(model)
        choice = s.TokenChoice(s.greedy_sampler, [], s.TokenBuffer([]))
        return s.TokenGenerator(model, mx.array([prompt]), caches, [choice])

    plain, drafted = begin(), begin()
    expected = [token for _ in range(80) for token in plain.step()]
    ids = [token.token_id for token in expected]
    tokens = []
    n_pending = []
    for n_right in itertools.cycle([0, 2, 5]):
        place = len(tokens) + 1
        if place > 60:
            break
        wrong = (ids[place + n_right] + 1) % 50
        tokens += drafted.step_with([*ids[place : place + n_right], wrong, wrong])
        n_pending.append(len(drafted.pending_ids))
        if n_right == 5:  # one is fed in a call of its own, too
            drafted.settle()
            tokens += drafted.step()

    kinds = {s.leaf_kind(leaf).name for leaf in s.cache_leaves(drafted.layer_caches)}
    assert kinds == {"recurrent", "window"}
    assert min(n_pending) > 0
    assert [token.token_id for token in tokens] == ids[: len(tokens)]
    for token, plain_token in zip(tokens, expected, strict=False):
        assert mx.abs(token.logprobs - plain_token.logprobs).max() < 1e-4


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


@drafters(("copies", HYBRID), ("head", HYBRID))
def test_all_that_a_request_may_ask_for_is_answered_as_without_drafts(drafting):
    with (
        Served(drafting.folder, speculation="off") as plain,
        Served(drafting.folder, **drafting.settings) as drafted,
    ):
        for name, fields in BODIES.items():
            check_same_answer(plain, drafted, name, fields)
        counts = drafted.state.metrics.snapshot()
        banner = s._write_banner(drafted.state)
        if drafting.settings:
            wait_until(lambda: gain_of(drafted)["tokens"] > 0)

    assert counts["draft_tokens_accepted"] > 20
    is_named = str(drafting.draft_folder) in banner.partition("\n  drafts ")[2]
    assert is_named == bool(drafting.settings)


def gain_of(served):
    """What /v1/status says of the draft model."""
    return s.status_body(served.state)["engine"]["draft_model"]


def check_same_answer(plain, drafted, name, fields):
    """Without a stop string, and with one that is a part of the reply, inside a burst."""
    fields = {"max_tokens": 70, "temperature": 0, **fields}
    messages = [user(f"{name}: " + "read src/server/main.py and say it again. " * 4)]
    expected = plain.ask(messages, **fields)
    reply = drafted.ask(messages, **fields)
    assert reply.said == expected.said, name
    assert reply.n_generated == expected.n_generated

    text = expected.answer.get("content") or ""
    if len(text) > 20 and name not in ("schema", "logprobs"):
        stops = {**fields, "stop": [text[len(text) // 2 :][:4]]}
        expected = plain.ask(messages, **stops)
        assert drafted.ask(messages, **stops).said == expected.said, name


class Looking(Seeing):
    """A running server on any model that sees images."""

    def _plain(self):
        """Nothing is compared with upstream's own way."""

    def talk(self):
        """The conversation about an image, and how many tokens of drafts were right."""
        history = [picture_message("main.py " * 9, picture(1), "say it again: main.py")]
        fields = {"temperature": 0, "max_tokens": 60, "tool_choice": "none"}
        for _ in range(2):
            reply = self.openai.chat.completions.create(
                model="x", messages=history, tools=TOOLS, **fields
            )
            history += [reply.choices[0].message.to_dict(), user("and now?")]
        assert reply.usage.prompt_tokens_details.cached_tokens > 0
        return history, self.state.metrics.snapshot()["draft_tokens_accepted"]


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        ("copies", HYBRID_VISION),
        at_night("head", HYBRID_VISION),
        at_night("head", GEMMA),
    ],
)
def test_after_an_image_a_reply_is_the_same_with_drafts_and_without(
    drafter, kind, monkeypatch, tmp_path
):
    make_eager(monkeypatch, drafter)
    if kind == GEMMA:
        folder, head_folder = tiny_pair(kind, tmp_path)
    else:
        folder = tiny_vision_model(kind, tmp_path)
        head_folder = tiny_head(folder) if drafter == "head" else ""
    talks = []
    for settings in ({"speculation": "off"}, {"draft_model": str(head_folder)}):
        logs = str(tmp_path / "logs")
        looking = Looking(folder, monkeypatch, log_root=logs, **settings)
        try:
            talks.append(looking.talk())
        finally:
            looking.close()

    (plain, n_plain), (drafted, n_drafted) = talks
    assert drafted == plain
    assert n_plain == 0
    assert n_drafted > 0 or drafter == "head"


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


def key_split_twice(monkeypatch):
    along = s.TokenGenerator._sample_along

    def after_one_more(generator, fed_ids, logits):
        generator._choices[0].sampler(logits[:1])
        return along(generator, fed_ids, logits)

    monkeypatch.setattr(s.TokenGenerator, "_sample_along", after_one_more)


@pytest.mark.parametrize(
    ("fault", "drafting", "fields"),
    [
        (one_token_too_many, ("copies", DENSE), {}),
        (state_not_put_back, ("copies", HYBRID), {}),
        at_night(nothing_taken_back, ("copies", DENSE), {}),
        (one_cut_too_few, ("copies", SLIDING), {}),
        at_night(none_cut, ("copies", SLIDING), {}),
        at_night(windows_counted_and_not_cut, ("copies", SLIDING), {}),
        at_night(one_cut_too_few, ("head", GEMMA), {}),
        at_night(one_cut_too_many, ("head", GEMMA), {}),
        at_night(none_cut, ("head", GEMMA), {}),
        at_night(windows_counted_and_not_cut, ("head", GEMMA), {}),
        at_night(state_not_put_back, ("model", HYBRID), {}),
        at_night(state_not_put_back, ("head", HYBRID), {}),
        at_night(key_split_twice, ("copies", DENSE), {"sampling": SEEDED}),
    ],
    indirect=["drafting"],
)
def test_a_planted_fault_of_drafts_is_noticed(drafting, monkeypatch, fault, fields):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=DIFFERS):
        check_drafted_replies(drafting, fields, n_others=1)
