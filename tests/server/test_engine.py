"""ENGINE: whatever was cached, batched, cancelled or evicted, the logits are those of a cold run.

The oracle is the plain model on the same tokens with a fresh cache, no server code. Logits are
compared, not samples: with sampled tokens a wrong slice went unnoticed.
"""

import itertools
import threading
import time

import numpy as np
import pytest
import start_llm as s
from engine_fixture import GREEDY, TOLERANCE, words
from mlx_lm.models.cache import ArraysCache
from nights import at_night
from server_fixture import MAX_WAIT_SECONDS
from tiny_models import MLA, RECOMMENDED

KINDS = ("qwen3_5", "qwen3", "gemma3_text")


# -- scenarios: each returns its replies, [(ticket, ids, end)]


def ask(b, replies, prompt, **options):
    """Add the reply to a prompt to the replies; its ids."""
    ids, end, ticket = b.ask(prompt, **options)
    replies.append((ticket, ids, end))
    return ids


def branch_and_return(b, rng):
    head = words(rng, 400)
    main = head + words(rng, 100)
    replies = []
    for turn in range(3):
        ids = ask(b, replies, main, boundaries=[400])
        main = main + ids + words(rng, 30)
        for _ in range(2):
            sub = head + words(rng, 60 + turn)
            ask(b, replies, sub, boundaries=[400])

    return replies


def edits_everywhere(b, rng):
    past = words(rng, 200)
    cuts = []
    replies = []
    for _ in range(6):
        cuts.append(len(past))
        ids = ask(b, replies, past, boundaries=cuts[-2:])
        past = past + ids + words(rng, 30)

    for cut in cuts:
        ask(b, replies, past[:cut] + words(rng, 25), boundaries=[cut])
    return replies


def early_branch(b, rng):
    """Much follows the branch point, so the branch works on a copy and the line stays whole."""
    main = words(rng, 900)
    replies = []
    for _ in range(3):
        for prompt in (main, main[:300] + words(rng, 40)):
            ids = ask(b, replies, prompt, boundaries=[300])
            if prompt is main:
                main = main + ids + words(rng, 20)

    return replies


def one_more_token(b, rng):
    """The reply's own end is the point of reuse, three times: decoding goes on from it at once."""
    past = words(rng, 150)
    replies = []
    past = past + ask(b, replies, past, n=20)
    for word in (20, 30, 40):
        ask(b, replies, [*past, word], n=20)
    return replies


def cancelled(b, rng):
    past = words(rng, 3000)
    ticket = b.submit(past, boundaries=[1000, 2000])
    n_prefilled = 0
    while n_prefilled < 500:
        event = ticket.next_event(60)
        if isinstance(event, int):
            n_prefilled = event

    ticket.stop_reason = "cancelled"
    b.finish(ticket)
    ids, end, ticket = b.ask(past, boundaries=[1000, 2000])
    # Of layers with state a checkpoint would be needed, and the first was not reached.
    if b.path.name.startswith(("qwen3-", f"{MLA}-")):
        assert end.cached_tokens >= 500, "it is kept"

    return [(ticket, ids, end)]


def finish_all(b, tickets):
    return [(ticket, *b.finish(ticket)) for ticket in tickets]


def continue_all(b, rng, replies, n):
    """The prompts of these replies, each with its reply and n new tokens."""
    return [b.asked[ticket] + ids + words(rng, n) for ticket, ids, _ in replies]


def at_once(b, rng):
    prefix = words(rng, 600)
    prompts = [prefix + words(rng, 20 + 5 * i) for i in range(6)]
    tickets = [b.submit(prompt, n=12 + i) for i, prompt in enumerate(prompts)]
    replies = finish_all(b, tickets)

    prompts = continue_all(b, rng, replies, 15)
    tickets = [b.submit(prompt, n=10) for prompt in prompts]
    return replies + finish_all(b, tickets)


def staggered(b, rng):
    """Rows of unlike length join and leave each other's batches, cold and then warm."""
    prompts = [words(rng, n) for n in (1200, 300, 310, 1300, 340, 1250)]
    replies = []
    for _ in range(2):
        tickets = []
        for prompt in prompts:
            tickets.append(b.submit(prompt, n=30))
            time.sleep(0.03)
        new_replies = finish_all(b, tickets)
        prompts = continue_all(b, rng, new_replies, 9)
        replies += new_replies

    return replies


def long_beside_short(b, rng):
    """A row of 3,600 tokens decodes while rows of 300 to 1,200 come and go."""
    lengths = (3_600, 300, 1_200, 700)
    tickets = [b.submit(words(rng, n), n=40 if n > 1000 else 15) for n in lengths]
    replies = finish_all(b, tickets)

    (past, *_) = continue_all(b, rng, replies[:1], 12)
    ids, end, ticket = b.ask(past)
    assert end.cached_tokens == len(past) - 12

    return [*replies, (ticket, ids, end)]


ONE_HEAD = {"heads": 1, "kv_heads": 1}  # half the cost of a long row
SCENARIOS = [
    branch_and_return,
    early_branch,
    edits_everywhere,
    one_more_token,
    cancelled,
    at_once,
    staggered,
    long_beside_short,
]


CASES = [
    *(
        at_night(*case) if case[1] is long_beside_short else case
        for case in itertools.product(KINDS, SCENARIOS)
    ),
    *itertools.product(RECOMMENDED, [early_branch, edits_everywhere, at_once]),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "kind, scenario", CASES, ids=lambda x: getattr(x, "__name__", x)
)
def test_warm_logits_are_cold_logits(bench, kind, scenario):
    b = bench(kind, ONE_HEAD if scenario is long_beside_short else {})
    results = scenario(b, np.random.default_rng(7))
    worst = max(b.largest_difference(ticket, ids) for ticket, ids, _ in results)
    assert worst <= TOLERANCE.get(kind, 0.0)
    if len(results) > 1:
        assert any(end.cached_tokens for _, _, end in results), (
            "nothing was reused: this tested nothing"
        )


def test_only_what_mla_has_decoded_differs_from_what_it_prefills(bench, rng):
    """Of a prompt that was prefilled all is reused to the last bit; of a reply nearly."""
    warm = bench(MLA)
    cold = bench(MLA, prompt_cache_max_entries_global=0)
    past = words(rng, 400)

    def difference(prompt):
        ids, end, ticket = warm.ask(prompt)
        cold_ids, _, cold_ticket = cold.ask(prompt)
        assert ids == cold_ids
        both = np.array(warm.seen[ticket]), np.array(cold.seen[cold_ticket])
        return end.cached_tokens, np.abs(both[0] - both[1]).max()

    reply, _, _ = warm.ask(past)
    assert difference(past[:200] + words(rng, 30)) == (200, 0.0)
    assert difference(past) == (399, 0.0)

    n_cached, after_reply = difference(past + reply + words(rng, 30))
    assert n_cached == len(past + reply)
    assert 0.0 < after_reply <= TOLERANCE[MLA]


# -- planted faults: test_warm_logits_are_cold_logits must notice every one


def one_token_too_many(monkeypatch):
    real = s.common_prefix_length

    def one_more(a, b):
        return min(real(a, b) + 1, len(a), len(b))

    monkeypatch.setattr(s, "common_prefix_length", one_more)


def skipped_token(monkeypatch):
    def skip_one(running):
        tokens = running.request.key.tokens
        n_computed = running.num_computed_tokens
        start = n_computed + 1 if n_computed else 0
        return tokens[start:-1]

    monkeypatch.setattr(s.RunningRequest, "prompt_rest", skip_one)


def shared_state(monkeypatch):
    real = s.KVSpan.cut

    def cut_without_copy(span, start, end):
        return span if start == 0 else real(span, start, end)

    monkeypatch.setattr(s, "_map_arrays", lambda state, change: state)
    monkeypatch.setattr(s.KVSpan, "cut", cut_without_copy)


def stale_checkpoint(monkeypatch):
    real = s.CacheEntry.path_checkpoints

    def stale(line, limit):
        usable = real(line, limit)
        return dict.fromkeys(usable, usable[min(usable)]) if usable else {}

    monkeypatch.setattr(s.CacheEntry, "path_checkpoints", stale)


def another_rows_state(monkeypatch):
    real = s.extract_row

    def extract_another_row(cache, row):
        layers = real(cache, row)
        n_rows = cache[-1].offset.size
        others = real(cache, (row + 1) % n_rows)
        pairs = zip(layers, others, strict=True)
        return [
            other if isinstance(other, ArraysCache) else layer for layer, other in pairs
        ]

    monkeypatch.setattr(s, "extract_row", extract_another_row)


FAULTS = [
    (one_token_too_many, "qwen3", edits_everywhere),
    (skipped_token, "qwen3", branch_and_return),
    (shared_state, "gemma3_text", one_more_token),
    (stale_checkpoint, "qwen3_5", edits_everywhere),
    (another_rows_state, "qwen3_5", at_once),
    at_night(one_token_too_many, MLA, edits_everywhere),
    at_night(stale_checkpoint, "qwen3_5_moe", edits_everywhere),
]


@pytest.mark.parametrize(
    "fault, kind, scenario", FAULTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_planted_fault_is_noticed(bench, monkeypatch, fault, kind, scenario):
    fault(monkeypatch)
    b = bench(kind)
    results = scenario(b, np.random.default_rng(7))
    worst = max(b.largest_difference(ticket, ids) for ticket, ids, _ in results)
    assert worst > 10 * TOLERANCE.get(kind, 1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_prompt_that_goes_on_from_one_still_in_prefill_harms_neither(
    bench, kind, rng
):
    """As completions do while somebody types; the first cannot stop behind its own end."""
    b = bench(kind, prefill_step_size=64)
    first = words(rng, 3000)
    tickets = [b.submit(first, n=4), b.submit(first + words(rng, 100), n=4)]
    for ticket in tickets:
        ids, _ = b.finish(ticket)
        assert b.largest_difference(ticket, ids) == 0.0


def note_calls(b):
    """Of each call of the model: how many rows, and tokens in a row."""
    calls = []

    def note(fed):
        calls.append((len(fed), max(len(row.tokens) for row in fed)))

    b.model.before_call = note
    return calls


def prompts_of(*lengths):
    return [words(np.random.default_rng(n), n) for n in lengths]


@pytest.mark.parametrize("n_shared", [0, 600])
def test_short_rests_of_like_lengths_are_read_in_one_call(bench, n_shared, rng):
    """Of cold prompts, or after one cached prefix."""
    b = bench("qwen3")
    prefix = words(rng, n_shared)
    if prefix:
        b.ask(prefix, n=1)
    prompts = [prefix + words(rng, n) for n in (40, 41, 44, 47)]
    calls = note_calls(b)

    tickets = b.submit_at_once(prompts)
    replies = [b.finish(ticket) for ticket in tickets]

    assert (4, 46) in calls
    assert (4, 1) in calls, "all decode together"
    assert max(n_rows for n_rows, _ in calls) == 4
    for ticket, (reply, end) in zip(tickets, replies, strict=True):
        assert end.cached_tokens >= n_shared - 1
        assert b.largest_difference(ticket, reply) == 0.0
    for prompt, (reply, _) in zip(prompts, replies, strict=True):
        more, end, ticket = b.ask(prompt + reply + words(rng, 9))
        assert end.cached_tokens >= len(prompt) + len(reply) - 1
        assert b.largest_difference(ticket, more) == 0.0


@pytest.mark.parametrize(
    ("kind", "n_shared"), [("qwen3_5", 600), ("gemma3_text", 0), at_night("qwen3_5", 0)]
)
def test_a_model_whose_layers_keep_state_reads_each_prompt_alone(
    bench, kind, n_shared, rng
):
    b = bench(kind)
    prefix = words(rng, n_shared)
    if prefix:
        b.ask(prefix, n=1, boundaries=[n_shared - 1])
    calls = note_calls(b)

    tickets = b.submit_at_once([prefix + words(rng, n) for n in (40, 41, 45)])

    for ticket in tickets:
        reply, end = b.finish(ticket)
        assert end.cached_tokens >= n_shared - 1
        difference = b.largest_difference(ticket, reply)
        assert difference <= TOLERANCE.get(kind, 0.0)
    assert {n_rows for n_rows, n_tokens in calls if n_tokens > 1} == {1}


def test_scheduler_reads_rests_one_by_one_without_memory_for_copies(
    bench, monkeypatch, rng
):
    b = bench("qwen3")
    prefix = words(rng, 600)
    b.ask(prefix, n=1)
    calls = note_calls(b)
    monkeypatch.setattr(s.MemoryBudget, "make_room_to_merge", lambda *_: False)

    tickets = b.submit_at_once([prefix + words(rng, n) for n in (40, 41, 45)])

    for ticket in tickets:
        assert b.largest_difference(ticket, b.finish(ticket)[0]) == 0.0
    assert {n_rows for n_rows, _ in calls} == {1}


def test_prompts_of_unlike_lengths_are_read_apart_and_decode_together(bench):
    b = bench("qwen3")
    calls = note_calls(b)

    tickets = b.submit_at_once(prompts_of(40, 42, 90, 99, 300))

    for ticket in tickets:
        assert b.largest_difference(ticket, b.finish(ticket)[0]) == 0.0
    reads = [call for call in calls if call[1] > 1]
    assert reads[:2] == [(2, 41), (2, 98)], "as far as padding is worth it"
    assert {n_rows for n_rows, _ in reads[2:]} == {1}, "this one is long enough alone"
    assert max(calls) == (5, 1)


def test_short_prompts_beside_a_reply_are_read_in_one_call_before_any_slice(bench):
    """How fast slices are read is not known then (L-220)."""
    b = bench("qwen3")
    is_decoding, everyone = threading.Event(), threading.Event()
    calls = []

    def hold_the_reply(fed):
        calls.append((len(fed), max(len(row.tokens) for row in fed)))
        if len(calls) == 3:
            is_decoding.set()
            everyone.wait(MAX_WAIT_SECONDS)

    b.model.before_call = hold_the_reply
    first, *others = prompts_of(40, 41, 44, 47)
    tickets = [b.submit(first, n=20)]
    assert is_decoding.wait(MAX_WAIT_SECONDS)
    tickets += [b.submit(prompt) for prompt in others]
    everyone.set()

    for ticket in tickets:
        assert b.largest_difference(ticket, b.finish(ticket)[0]) == 0.0
    assert (3, 46) in calls


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_short_prompt_waits_for_one_that_is_being_prepared(
    bench, monkeypatch, is_refused
):
    """They are read together (L-220). It does not wait for itself, nor for one refused."""
    monkeypatch.setattr(s, "GATHER_SHARE", 1e9)
    monkeypatch.setattr(s, "MAX_GATHER_SECONDS", 2 * MAX_WAIT_SECONDS)
    b = bench("qwen3")
    prompts = prompts_of(40, 44)
    is_prepared, is_over = threading.Event(), threading.Event()
    later = []

    def prepare():
        with b.engine.expecting():
            is_prepared.set()
            while not b.engine._scheduler.waiting:  # the other one has not come
                time.sleep(0.001)
            if not is_refused:
                later.append(b.submit(prompts[1]))
        is_over.set()

    threading.Thread(target=prepare, daemon=True).start()
    is_prepared.wait(MAX_WAIT_SECONDS)
    calls = note_calls(b)
    with b.engine.expecting():
        first = b.submit(prompts[0])

        b.finish(first)

    is_over.wait(MAX_WAIT_SECONDS)
    for handle in later:
        b.finish(handle)
    assert ((2, 43) in calls) == (not is_refused)


def test_what_waits_for_requests_being_prepared_is_queued(bench, monkeypatch):
    monkeypatch.setattr(s, "GATHER_SHARE", 1e9)
    monkeypatch.setattr(s, "MAX_GATHER_SECONDS", 2 * MAX_WAIT_SECONDS)
    b = bench("qwen3", max_queued_requests=1)
    b.engine._expected.add(-1)  # somebody prepares one
    first = b.submit(prompts_of(40)[0])
    b.engine.call(lambda _: None)  # that one has been taken from the inbox

    with pytest.raises(s.Overloaded):
        b.submit(prompts_of(44)[0])

    b.engine._expected.clear()
    b.finish(first)


def test_a_failure_in_a_joint_call_is_tried_again_alone(bench):
    b = bench("qwen3")
    b.may_try_again = True
    calls = []

    def fail_first(fed):
        calls.append((len(fed), len(fed[0].tokens)))
        if len(calls) == 1:
            raise RuntimeError("planted")

    b.model.before_call = fail_first
    tickets = b.submit_at_once(prompts_of(40, 41, 44, 47))

    for ticket in tickets:
        assert b.largest_difference(ticket, b.finish(ticket)[0]) == 0.0
        assert ticket.is_second_try
    assert {n_rows for n_rows, n_tokens in calls[1:] if n_tokens > 1} == {1}


def test_rows_of_a_joint_call_choose_their_tokens_by_themselves(bench):
    """Each has its own seed, penalties and limit, as alone."""
    prompts = prompts_of(40, 41, 44, 47)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 1.0}
    changes = [{"temperature": 0.9, "seed": seed} for seed in (1, 2)]
    changes += [penalties, {}]
    fields = [{"sampling": GREEDY.model_copy(update=c)} for c in changes]
    fields[3]["n"] = 3
    cold = bench("qwen3")
    alone = [cold.ask(p, **how)[0] for p, how in zip(prompts, fields, strict=True)]
    b = bench("qwen3")
    calls = note_calls(b)

    tickets = b.submit_at_once(prompts, fields)

    assert [b.finish(ticket)[0] for ticket in tickets] == alone
    assert calls[0] == (4, 46)


def test_short_prompts_decode_together_whatever_their_lengths(bench):
    """Buffers grow by 256 tokens, so padding up to there costs no memory."""
    b = bench("qwen3_5")
    is_everyone_here = threading.Event()
    widths = []

    def note_width(fed):
        is_everyone_here.wait(MAX_WAIT_SECONDS)
        widths.append(len(fed))

    b.model.before_call = note_width
    lengths = (16, 60, 130, 250)
    prompts = [words(np.random.default_rng(n), n) for n in lengths]
    tickets = [b.submit(prompt, n=20) for prompt in prompts]
    is_everyone_here.set()

    for ticket in tickets:
        ids, _ = b.finish(ticket)
        assert b.largest_difference(ticket, ids) == 0.0
    assert max(widths) == 4


def test_a_failure_in_the_model_costs_the_rows_it_touched_and_nothing_after_them(
    bench, rng
):
    b = bench("qwen3_5")
    past = words(rng, 400)
    for n_failures, fail_at in ((2, 1), (2, 2), (1, 5)):  # the second try fails, too
        calls = itertools.count(1)
        failing = range(fail_at, fail_at + n_failures)

        def fail(_rows, calls=calls, failing=failing):
            if next(calls) in failing:
                raise RuntimeError("planted")

        b.model.before_call = fail
        _, end = b.outcome(b.submit(past, n=8))
        assert isinstance(end, s.GenerationFailed)
        b.model.before_call = lambda _rows: None
        ids, _, ticket = b.ask(past)
        assert b.largest_difference(ticket, ids) == 0.0

    assert b.engine.state == "ready"
