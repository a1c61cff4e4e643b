"""ENGINE under limits and faults: who is over a limit ends cleanly, everybody else exactly."""

import itertools
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import GREEDY, Ended, Loaded, words
from nights import at_night
from server_fixture import MAX_WAIT_SECONDS, wait_until, wait_until_idle

TOLERANCE = {"qwen3": 0.0, "qwen3_5": 0.0, "gemma3_text": 1e-4}


def is_exact(bench, kind, ticket, ids):
    """What came is what a cold run of these tokens says."""
    bench.seen[ticket] = bench.seen[ticket][: len(ids)]
    return bench.largest_difference(ticket, ids) <= TOLERANCE[kind]


def count_tokens(fed):
    return sum(len(row.tokens) for row in fed)


class Clock:
    """What the scheduler takes for the time: calls of the model alone move it, as said."""

    def __init__(self, b, seconds_of):
        self._seconds = time.monotonic()
        self._seconds_of = seconds_of
        b.engine.call(lambda scheduler: setattr(scheduler, "_now", self.now))
        b.model.before_call = self.pass_time

    def now(self):
        return self._seconds

    def pass_time(self, fed):
        self._seconds += self._seconds_of(fed)


def slow_decode(seconds, *, n_rows=3):
    """Sleeps in each call with a token a row, and in no slice of a prompt."""

    def pause(fed):
        if count_tokens(fed) <= n_rows:
            time.sleep(seconds)

    return pause


def check_all_finish(b, tickets, timeout=MAX_WAIT_SECONDS):
    for ticket in tickets:
        _, end = b.outcome(ticket, timeout)
        assert isinstance(end, Ended), end


def check_it_still_works(b, kind, prompts):
    """Nothing is left running, and each prompt, warm by now or not, is answered exactly."""
    wait_until_idle(b.engine)
    for prompt in prompts:
        ids, _, ticket = b.ask(prompt, n=4)
        assert is_exact(b, kind, ticket, ids)
    assert b.engine.state == "ready"
    entries = b.engine.call(lambda scheduler: scheduler.cache.describe())
    assert not any(entry["running"] for _, entry in entries)


# -- deadlines -------------------------------------------------------------------------------------


KINDS = [at_night("qwen3"), "qwen3_5"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_ends_at_its_deadline_and_what_it_computed_is_kept(bench, kind):
    b = bench(kind, generation_watchdog_seconds=600.0)
    prompt = words(np.random.default_rng(1), 300)
    Clock(b, lambda _fed: 20.0)
    ids, end, ticket = b.ask(prompt, n=4000)

    assert end.reason == "deadline"
    assert 20 < len(ids) <= 31
    assert is_exact(b, kind, ticket, ids)

    more_ids, end, ticket = b.ask(prompt + ids, n=3)
    assert end.cached_tokens >= len(prompt + ids) - 2
    assert is_exact(b, kind, ticket, more_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_retries_of_a_prompt_too_long_for_one_deadline_finish_it(bench, kind):
    b = bench(kind, generation_watchdog_seconds=600.0)
    prompt = words(np.random.default_rng(2), 2400)
    ends = []
    b.model.fed.clear()  # what was fed to measure the model
    Clock(b, lambda fed: 0.6 * count_tokens(fed))  # 1,440 s for the prompt
    while not ends or ends[-1].reason == "deadline":
        # its last message's end, as every request has one: it may be cut just before it answers
        ids, end, ticket = b.ask(prompt, n=1, boundaries=[len(prompt) - 1])
        ends.append(end)

    assert len(ends) > 1
    assert len(ids) == 1

    n_cached = [end.cached_tokens for end in ends]
    assert n_cached == sorted(set(n_cached)), (
        "an attempt did not go on from where the last one was"
    )

    b.model.before_call = lambda fed: None
    assert is_exact(b, kind, ticket, ids)
    assert count_tokens(b.model.fed) <= len(prompt) + 2 * len(ends)


def test_who_waits_longer_than_allowed_is_told_and_the_one_at_work_is_not_disturbed(
    bench, rng
):
    settings = {"queue_timeout_seconds": 300.0, "generation_watchdog_seconds": 0}
    b = bench("qwen3", batch_max_rows=1, **settings)
    Clock(b, lambda _fed: 10.0)
    running = b.submit(words(rng, 100), n=150)
    waiting = b.submit(words(rng, 100))

    ids, error = b.outcome(waiting)
    assert ids == []
    assert isinstance(error, s.Overloaded)
    assert "QUEUE_TIMEOUT_SECONDS" in str(error)
    assert error.headers["Retry-After"]

    ids, end = b.finish(running)
    assert end.reason == "length"
    assert len(ids) == 150
    assert is_exact(b, "qwen3", running, ids)


def test_engine_refuses_a_burst_between_two_reports(bench, monkeypatch):
    b = bench("qwen3", batch_max_rows=1, max_queued_requests=2)
    prompt = words(np.random.default_rng(11), 50)
    tickets = [b.submit(prompt, n=4_000)]
    wait_until(lambda: b.engine.report["decoding"])
    monkeypatch.setattr(s, "REPORT_SECONDS", MAX_WAIT_SECONDS)

    with pytest.raises(s.Overloaded, match="2 requests are waiting already"):
        for _ in range(5):
            tickets.append(b.submit(prompt, n=4))
            b.engine.call(lambda scheduler: None)  # the inbox is empty then

    assert len(tickets) == 1 + 2
    for ticket in tickets:
        ticket.stop_reason = "cancelled"


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [at_night("qwen3"), "qwen3_5", at_night("gemma3_text")]
)
def test_memory_stays_below_its_limit_whatever_is_asked_at_once(
    bench, monkeypatch, kind
):
    peaks = []
    reset = mx.reset_peak_memory

    def note_peak():
        peaks.append(mx.get_peak_memory())
        reset()

    monkeypatch.setattr(mx, "reset_peak_memory", note_peak)
    limit = 16 << 20
    # What the test before has left may be freed at any time: it is no peak of this one.
    left_bytes = mx.get_active_memory()
    reset()
    b = bench(kind, memory_limit_bytes=limit)
    note_peak()
    assert max(peaks) - left_bytes < limit, "while it was loaded"
    peaks.clear()
    rng = np.random.default_rng(5)
    # both models, but what the limit counts for one
    base = mx.get_active_memory() - (1 << 20)
    max_tokens = min(b.engine.report["capacity_tokens"] - 100, 2500)
    head = words(rng, 500)

    for _ in range(2):
        lengths = rng.integers(10, max_tokens - 500, 10).tolist()
        lengths.append(max_tokens - 500)
        tickets = [b.submit(head + words(rng, n), n=32) for n in lengths]
        check_all_finish(b, tickets, 120)

    note_peak()

    ids, _, ticket = b.ask(head + words(rng, 10))
    assert is_exact(b, kind, ticket, ids)

    peak = max(peaks) - base
    assert peak < limit, peak
    assert b.metrics.snapshot()["evicted_for_room"] > 0, (
        "it was never tight: this tested nothing"
    )


@pytest.mark.slow
def test_a_group_changes_with_two_copies_at_most(bench, monkeypatch, table, rng):
    # why(L-69): all its KV is in one layer here, so that joined, padded and grown it is a chain
    copies = {"merge": [], "step": [], "remove": []}

    def measure_copies(change, measured):
        def change_and_measure(group, *args):
            active_bytes = mx.get_active_memory()
            group_bytes = group.nbytes
            mx.reset_peak_memory()
            result = change(group, *args)
            mx.synchronize()
            extra_bytes = mx.get_peak_memory() - active_bytes
            measured.append(extra_bytes / max(group_bytes, group.nbytes))
            return result

        return change_and_measure

    for name, measured in copies.items():
        change = measure_copies(getattr(s.DecodeBatch, name), measured)
        monkeypatch.setattr(s.DecodeBatch, name, change)
    decode = s.Scheduler._decode

    def decode_together(scheduler, group):
        if not scheduler.waiting and not scheduler.prefilling:
            decode(scheduler, group)

    monkeypatch.setattr(s.Scheduler, "_decode", decode_together)
    b = bench("gemma3_text")

    tickets = [b.submit(words(rng, 3500 + n), n=90) for n in range(0, 120, 20)]
    check_all_finish(b, tickets)

    for name, measured in copies.items():
        n_times = f"{len(measured):3d} times"
        table(
            f"group {name:7s} {n_times}, at most {max(measured):.2f} of its KV besides"
        )
    assert len(copies["merge"]) == 5
    assert all(max(measured) < 2.1 for measured in copies.values())


def test_who_parts_from_a_large_line_takes_its_buffers(bench, rng):
    b = bench("qwen3", memory_limit_bytes=5 << 20)  # why(L-73)
    past = words(rng, int(b.engine.report["capacity_tokens"] * 0.7))
    ids, _, _ = b.ask(past, n=20)
    ids, end, ticket = b.ask(past + ids[:-10] + words(rng, 20), n=4)
    assert end.cached_tokens >= len(past)
    assert is_exact(b, "qwen3", ticket, ids)


def test_memory_budget_counts_all_of_the_buffers_that_a_request_takes_over(
    bench, monkeypatch, rng
):
    monkeypatch.setattr(s.PrefillPolicy, "may_interrupt", lambda _, *, is_short: False)
    b = bench("qwen3")
    past = words(rng, 4000)
    b.ask(past, n=4)
    decoding = b.submit(words(rng, 200), n=100_000)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    parting = b.submit(past[:2100] + words(rng, 20))
    wait_until(lambda: b.engine.report["prefilling"] == 1)

    def measure(scheduler):
        (running,) = scheduler.prefilling
        counted_bytes = scheduler.budget.running_bytes([running])
        return counted_bytes, s.count_kv_bytes(running.layer_caches)

    counted_bytes, held_bytes = b.engine.call(measure)
    assert counted_bytes == held_bytes
    decoding.stop_reason = "cancelled"
    check_all_finish(b, [decoding, parting])


def test_nothing_is_evicted_for_a_join_that_cannot_be(bench, rng):
    b = bench("qwen3", memory_limit_bytes=6 << 20)  # why(L-73)
    capacity = b.engine.report["capacity_tokens"]
    n_idle = int(capacity * 0.1)
    idle_prompt = words(rng, n_idle)
    b.ask(idle_prompt, n=4)

    n_large = int(capacity * 0.36)
    tickets = [b.submit(words(rng, n_large), n=60) for _ in range(2)]
    check_all_finish(b, tickets)

    _, end, _ = b.ask(idle_prompt + words(rng, 10), n=2)
    assert end.cached_tokens == n_idle


@pytest.mark.slow
def test_nothing_is_evicted_for_who_does_not_fit_beside_running_checkpoints(bench):
    rng = np.random.default_rng(1)  # why(L-97)
    b = bench("gemma3_text", size={"window": 512}, memory_limit_bytes=20_000_000)
    idle_prompts = [words(rng, 600) for _ in range(3)]
    for prompt in idle_prompts:
        b.ask(prompt, n=4, boundaries=[100, 500])

    spec = b.engine.call(lambda scheduler: scheduler.spec)
    max_bytes = b.engine.call(lambda scheduler: scheduler.cache.max_bytes)
    n = int(0.35 * max_bytes / spec.token_bytes)
    ends = list(range(100, n, n // 14))
    running = b.submit(words(rng, n), n=100_000, boundaries=ends)
    wait_until(lambda: b.engine.report["decoding"])

    def measure_running(scheduler):
        entries = [entry for entry in scheduler.cache.entries if entry.is_running]
        return scheduler.budget.running_bytes(scheduler.running), sum(
            entry.state_bytes for entry in entries
        )

    running_bytes, checkpoint_bytes = b.engine.call(measure_running)
    assert checkpoint_bytes > 8 * spec.state_bytes

    free_bytes = max_bytes - running_bytes - 8_000 - spec.state_bytes
    n_large = int(free_bytes / spec.token_bytes * 32 / 33) - 257
    large_bytes = b.engine.call(lambda x: x.budget.prompt_bytes(n_large))
    needed_bytes = running_bytes + large_bytes

    # its KV alone would fit
    assert needed_bytes < max_bytes < needed_bytes + checkpoint_bytes

    large = b.submit(words(rng, n_large), n=4)
    wait_until(lambda: b.engine.report["queued"])
    for prompt in idle_prompts:
        _, end, _ = b.ask([*prompt, 5, 6, 7], n=1)
        assert end.cached_tokens >= 500

    running.stop_reason = "cancelled"
    check_all_finish(b, [large])


@pytest.mark.parametrize("kind", ["gemma3_text", at_night("gpt_oss"), "qwen3_5"])
def test_a_state_taken_on_the_way_is_no_larger_than_one_at_the_end(bench, kind, rng):
    b = bench(kind)  # why(L-74)
    b.ask(words(rng, 900), n=2, boundaries=[500])

    def checkpoint_sizes(scheduler):
        sizes = []
        for entry in scheduler.cache.entries:
            sizes += [state.nbytes for state in entry.checkpoints.values()]
        return sizes

    state_bytes = b.engine.call(lambda scheduler: scheduler.spec.state_bytes)
    sizes = b.engine.call(checkpoint_sizes)
    assert len(sizes) >= 2
    assert max(sizes) <= state_bytes


def test_checkpoints_of_a_row_being_read_keep_to_their_share(bench, monkeypatch, rng):
    b = bench("qwen3_5", memory_limit_bytes=(1 << 20) + 1_600_000)
    max_bytes = b.engine.call(lambda scheduler: scheduler.cache.max_bytes)
    shares = []  # why(L-74)
    add = s.PrefixCache.add_checkpoint

    def add_and_note(cache, entry, *args):
        add(cache, entry, *args)
        shares.append(entry.state_bytes / max_bytes)

    monkeypatch.setattr(s.PrefixCache, "add_checkpoint", add_and_note)
    prompt = words(rng, 1500)
    b.ask(prompt, n=2, boundaries=list(range(5, 1500, 5)))
    assert len(shares) > 100
    assert max(shares) <= s.CHECKPOINT_SHARE

    ids, end, ticket = b.ask(prompt + words(rng, 5), n=4)
    assert end.cached_tokens >= 1400
    assert is_exact(b, "qwen3_5", ticket, ids)


def test_the_end_of_the_head_is_there_for_another_session_when_checkpoints_are_few(
    bench, monkeypatch, rng
):
    # it begins inside the head; why(L-77)
    monkeypatch.setattr(s, "CHECKPOINT_SPACING", 100)
    b = bench("qwen3_5")
    head = words(rng, 280)
    b.ask(head + words(rng, 700), n=2, boundaries=[280, 285, 290, 600])

    def thin(scheduler):
        assert scheduler.cache._thin_largest(1 << 60, s.NO_MATCH, min_left=4)

    b.engine.call(thin)
    _, end, _ = b.ask(head + words(rng, 50), n=2, boundaries=[280])
    assert end.cached_tokens == 280


def test_a_long_prompt_gets_its_share_beside_short_ones_without_end(bench, rng):
    b = bench("qwen3", prefill_step_size=64)  # why(L-71)
    Clock(b, lambda fed: 0.001 * count_tokens(fed))
    b.ask(words(rng, 200), n=1)  # it knows its speed
    b.model.fed.clear()
    long_prompt = words(rng, 1200)
    prompts = [long_prompt, *(words(rng, 100) for _ in range(60))]

    check_all_finish(b, b.submit_at_once(prompts, [{"n": 1}] * len(prompts)))

    def is_long(row):
        return [*row.tokens] == long_prompt[row.at : row.at + len(row.tokens)]

    reads = [row for row in b.model.fed if len(row.tokens) > 1]
    long_end = max(i for i, row in enumerate(reads) if is_long(row))
    # The short ones take 6 s, the long one 1.2 s.
    assert 5 < sum(row.at == 0 for row in reads[:long_end]) < 50


@pytest.mark.slow
def test_rows_that_outgrow_memory_together_give_way_one_by_one(bench, rng):
    b = bench("qwen3", memory_limit_bytes=7 << 20)
    capacity = b.engine.report["capacity_tokens"]
    prompts = [words(rng, 100) for _ in range(6)]
    tickets = [b.submit(prompt, n=capacity // 2) for prompt in prompts]
    results = [b.outcome(ticket, 120) for ticket in tickets]
    refused = [end for _, end in results if isinstance(end, s.Overloaded)]

    assert 0 < len(refused) < len(tickets)
    assert all("bytes of KV are in use" in str(error) for error in refused)

    for ticket, (ids, _) in zip(tickets, results, strict=True):
        if ids:
            assert is_exact(b, "qwen3", ticket, ids[:200])

    kv_bytes = b.engine.memory["running"] + b.engine.memory["cache"]
    assert kv_bytes <= b.engine.report["cache_max_bytes"]
    check_it_still_works(b, "qwen3", prompts[:2])


def test_who_goes_on_from_a_line_waits_for_room_and_the_line_waits_too(bench, rng):
    """Its own KV is the last to be evicted for it, and nothing is while rows leave no room."""
    b = bench("qwen3", memory_limit_bytes=5 << 20)
    capacity = b.engine.report["capacity_tokens"]
    past = words(rng, capacity * 35 // 100)
    ids, _, _ = b.ask(past, n=4)
    past += ids
    b.model.before_call = slow_decode(0.01)
    running = b.submit(words(rng, capacity * 45 // 100), n=100)
    wait_until(lambda: b.engine.report["decoding"] == 1)

    continued = b.submit(past + words(rng, capacity * 22 // 100), n=8)
    ids, end = b.outcome(continued, 60)
    assert isinstance(end, Ended), end
    assert end.cached_tokens == len(past), end
    assert is_exact(b, "qwen3", continued, ids)
    check_all_finish(b, [running], 60)


@pytest.mark.parametrize("is_first", [True, at_night(False)])
def test_a_small_request_beside_one_of_nearly_all_memory_is_answered(
    bench, is_first, rng
):
    """All KV fits; that copies of it would not is no reason to end one of them (L-79)."""
    b = bench("qwen3", memory_limit_bytes=5 << 20)
    n_large = int(b.engine.report["capacity_tokens"] * 0.9)
    large = (words(rng, n_large), 60)
    small = (words(rng, 20), 40 if is_first else 400)
    requests = [large, small] if is_first else [small, large]
    b.model.before_call = slow_decode(0.01)

    (first_prompt, n_first), (second_prompt, n_second) = requests
    first = b.submit(first_prompt, n=n_first)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    second = b.submit(second_prompt, n=n_second)

    for ticket, n_wanted in ((first, n_first), (second, n_second)):
        ids, end = b.outcome(ticket, 120)
        assert isinstance(end, Ended), end
        assert len(ids) == n_wanted, end


@pytest.mark.parametrize(
    ("kind", "limit"), [("qwen3", 5 << 20), at_night("qwen3_5", 16 << 20)]
)
def test_two_agents_that_hardly_fit_keep_most_of_their_pasts(bench, kind, limit, rng):
    """They need 103 % of the KV bytes: what lacks goes, not a whole conversation (L-87)."""
    b = bench(kind, memory_limit_bytes=limit)
    capacity = b.engine.report["capacity_tokens"]
    pasts = [words(rng, int(capacity * share)) for share in (0.55, 0.48)]
    for turn in range(3):
        for i, past in enumerate(pasts):
            ids, end, ticket = b.ask(past, n=8, boundaries=[1000, len(past) - 3])
            n_cached = end.cached_tokens
            if turn > 0:
                assert n_cached > len(past) // 2, (turn, i, n_cached, len(past))
            if turn == 2:
                assert is_exact(b, kind, ticket, ids)
            pasts[i] = past + ids + words(rng, 20)


def test_a_row_does_not_keep_the_state_that_it_began_with(bench, rng):
    """Else a checkpoint that its entry gives up stays in memory, and nothing counts it."""
    b = bench("qwen3_5")
    prompt = words(rng, 600)
    ids, _, _ = b.ask(prompt, boundaries=[300])
    ticket = b.submit(prompt + ids + words(rng, 30), n=3000)
    wait_until(lambda: b.engine.report["decoding"] == 1)

    def kept_values(scheduler):
        (running,) = scheduler.running
        return [*vars(running).values(), *vars(running.handle).values()]

    assert ticket.cached_tokens > 0
    values = b.engine.call(kept_values)
    assert not any(isinstance(v, s.PrefixMatch | s.StateCheckpoint) for v in values)

    ticket.stop_reason = "cancelled"
    b.finish(ticket)


def test_those_who_wait_for_a_prefix_keep_no_row_free_from_others(bench, rng):
    b = bench("qwen3", batch_max_rows=3, prefill_step_size=64)
    b.model.before_call = lambda fed: time.sleep(0.001 * count_tokens(fed))
    head = words(rng, 1500)
    family = [b.submit(head + words(rng, 10), n=2) for _ in range(4)]
    stranger = b.submit(words(rng, 20), n=2)

    check_all_finish(b, [stranger])
    assert b.engine.call(lambda scheduler: len(scheduler.waiting)) == 3
    check_all_finish(b, family)


def test_the_deadline_does_not_count_what_waits_to_be_read(bench, rng):
    b = bench("qwen3", generation_watchdog_seconds=300.0)
    pauses = [500.0]
    Clock(b, lambda _fed: pauses.pop() if pauses else 0.0)

    first = b.submit(words(rng, 90), n=2)
    second = b.submit(words(rng, 300), n=2)
    _, first_end = b.outcome(first)
    _, second_end = b.outcome(second)

    assert first_end.reason == "deadline"
    assert second_end.reason == "length"
    # It may have come while the model was busy already, so that nobody gave a cause.
    seconds = second_end.times.earlier
    waited = sum(seconds.values()) - seconds["prefill"] - seconds["decode"]
    assert waited >= 200.0


def test_branches_that_go_on_at_once_wait_for_the_copies_of_their_prefix(bench, rng):
    b = bench("qwen3", memory_limit_bytes=5 << 20)
    head = words(rng, b.engine.report["capacity_tokens"] * 4 // 10)
    prompts = [head + words(rng, 300) for _ in range(3)]
    for i, prompt in enumerate(prompts):
        ids, _, _ = b.ask(prompt, n=4)
        prompts[i] = prompt + ids + words(rng, 20)
    b.model.before_call = slow_decode(0.01)
    tickets = [b.submit(prompt, n=60) for prompt in prompts]
    for ticket in tickets:
        _, end = b.outcome(ticket, 60)
        assert isinstance(end, Ended), end
        assert end.cached_tokens >= len(head), end


def test_a_model_that_leaves_no_room_for_kv_is_refused_in_a_sentence(models):
    def load():
        loaded = s.mlx_lm.load(str(models("qwen3")))[0]
        return Loaded(loaded)

    engine = s.Engine(s.Config(memory_limit_bytes=1 << 20), s.CacheMetrics(), load=load)
    engine.start()
    wait_until(lambda: engine.state != "loading")
    assert "MEMORY_LIMIT_BYTES" in engine.failure

    engine.stop()


# -- numbers that are none -------------------------------------------------------------------------


class Poisoned:
    """The model, but a row that feeds its token at `position` gets bad logits."""

    def __init__(self, plain, position, value):
        self._plain = plain
        self._position = position
        self._value = value

    def __call__(self, inputs, cache=None):
        offset = next(layer.offset for layer in cache if hasattr(layer, "offset"))
        n_rows, n_new = inputs.shape
        offsets = mx.zeros(n_rows, mx.int32) + offset
        is_hit = (offsets <= self._position) & (self._position < offsets + n_new)

        logits = self._plain(inputs, cache=cache)
        values = np.array(self._value, np.float32)
        bad_logits = mx.array(np.resize(values, logits.shape[-1]))
        return mx.where(is_hit[:, None, None], bad_logits, logits)

    def __getattr__(self, name):
        return getattr(self._plain, name)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "value", [np.nan, [0.0, np.inf], *map(at_night, (np.inf, -np.inf, [0.0, np.nan]))]
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("position", [199, 205])
def test_a_reply_of_no_numbers_is_an_error_and_nothing_of_it_is_kept(
    bench, kind, position, value, rng
):
    b = bench(kind)
    bad_prompt = words(rng, 200)
    good_prompt = words(rng, 150)
    sampling = GREEDY.model_copy(
        update={"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}
    )
    for bad_sampling in (GREEDY, sampling):
        plain = b.model.plain
        b.model.plain = Poisoned(plain, position, value)
        healthy = b.submit(good_prompt, n=30)
        sick = b.submit(bad_prompt, n=30, sampling=bad_sampling)

        ids, error = b.outcome(sick)
        assert isinstance(error, s.GenerationFailed)
        assert "NaN" in str(error)
        assert len(ids) <= max(0, position - 199)

        ids, _ = b.finish(healthy)
        assert len(ids) == 30
        assert is_exact(b, kind, healthy, ids)

        b.model.plain = plain
        check_it_still_works(b, kind, [bad_prompt, good_prompt])


@pytest.mark.parametrize("kind", ["qwen3", at_night("qwen3_5")])
def test_tokens_after_one_without_numbers_do_not_hide_it(bench, kind):
    b = bench(kind)
    ticket = b.submit(words(np.random.default_rng(6), 30), n=3000)
    wait_until(lambda: b.engine.report["decoding"] == 1)

    def add_tokens(scheduler):
        (running,) = scheduler.running
        good = s.mx.zeros(300)
        bad = good * float("nan")
        n_before = ticket._events.qsize()
        for logprobs in (bad, good, good):
            running.add_token(20, logprobs=logprobs)
        return running.has_failed, ticket._events.qsize() - n_before

    assert b.engine.call(add_tokens) == (True, 0)
    assert isinstance(b.outcome(ticket)[1], s.GenerationFailed)


# -- an exception at every step --------------------------------------------------------------------

STEPS = {
    s.PrefixCache: "find start evict_to_fit put_back add_checkpoint advance",
    s.EntryTree: "start take_kv _split insert _join_to_parent",
    s.CacheEntry: "copy_kv path_checkpoints",
    s.Scheduler: "_admit _start_running make_drafters _find_host _keep_reply_states",
    s.PromptReader: "prepare read_slice begin_batch max_slice_tokens",
    s.PrefillPolicy: "charge_prefill",
    s.MemoryBudget: "make_room make_room_to_merge",
    s.DecodeBatch: "__init__ step merge remove padding_with",
    s.RunningRequest: "add_token read_span computed_key add_slice_ends prompt_rest",
    s: "reserve_tokens evaluate_caches load_span take_span copy_span copy_state"
    " restore_state kv_cache_offset extract_row to_batch make_prompt_cache"
    " block_hashes slice_end _find_slice_ends _token_choice make_sampler"
    " hold_recurrent_state",
}


# A dense model has no state to restore or to keep.
NOT_TAKEN = {("qwen3", "restore_state"), ("qwen3", "_keep_reply_states")}
OF_STATES = {"add_checkpoint", "copy_state", "hold_recurrent_state", "path_checkpoints"}
OF_STATES |= {name for _, name in NOT_TAKEN}


BY_DAY = {"evict_to_fit", "insert", "_admit", "read_slice", "make_room", "remove"}
BY_DAY |= {"load_span", "_token_choice", "add_checkpoint", "restore_state"}


def kinds_and_steps():
    """Of kinds one by day: about states, the one that has them."""
    for owner, names in STEPS.items():
        for name in names.split():
            kinds = ("qwen3_5", "qwen3") if name in OF_STATES else ("qwen3", "qwen3_5")
            case = (kinds[0], (owner, name))
            yield case if name in BY_DAY else at_night(*case)
            yield at_night(kinds[1], (owner, name))


@pytest.mark.parametrize(
    ("kind", "step"),
    [*kinds_and_steps()],
    ids=lambda x: x if isinstance(x, str) else f"{x[0].__name__}.{x[1]}",
)
@pytest.mark.parametrize("places", [(1, 2), at_night((1, 2, 4))], ids=str)
def test_an_exception_anywhere_costs_no_more_than_the_requests_it_met(
    bench, monkeypatch, kind, step, places
):
    owner, name = step
    b = bench(kind, batch_max_rows=3)
    rng = np.random.default_rng(9)
    past = words(rng, 300)
    first, _, _ = b.ask(past, n=4, boundaries=(200,))
    prompts = [
        past + first + words(rng, 20),
        past[:200] + words(rng, 30),
        words(rng, s.SHORT_TOKENS + 44),  # so it is read by itself
    ]
    plain_step = getattr(owner, name)
    was_taken = []

    for fail_at in places:
        calls = itertools.count(1)

        def broken_step(*args, calls=calls, fail_at=fail_at, **fields):
            if threading.current_thread().name == "model":
                n_calls = next(calls)
                if n_calls == fail_at:
                    raise RuntimeError("planted: /secret/path [metal::x]")
            return plain_step(*args, **fields)

        monkeypatch.setattr(owner, name, broken_step)
        tickets = [b.submit(prompt, n=6, boundaries=(200,)) for prompt in prompts]
        results = [b.outcome(ticket) for ticket in tickets]
        monkeypatch.setattr(owner, name, plain_step)

        was_taken.append(next(calls) > fail_at)
        for ticket, (ids, end) in zip(tickets, results, strict=True):
            if ids:
                assert is_exact(b, kind, ticket, ids)
            assert isinstance(end, Ended) or "planted" not in str(end)
        check_it_still_works(b, kind, prompts)

    assert any(was_taken) or (kind, name) in NOT_TAKEN, (
        "the step was never taken: this tested nothing"
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (s.Scheduler, "hold_limit"),
        at_night(s.MemoryBudget, "evict_for_running"),
        (s.PrefixCache, "evict_idle"),
        at_night(s.PrefixCache, "describe"),
        (s.Engine, "_rest"),
    ],
)
def test_engine_goes_on_if_what_it_does_beside_requests_fails(
    bench, monkeypatch, caplog, owner, name
):
    b = bench("qwen3")
    prompt = words(np.random.default_rng(10), 100)
    failures = []

    def fail(*_args, **_fields):
        failures.append(RuntimeError("planted"))
        raise failures[-1]

    monkeypatch.setattr(s, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(owner, name, fail)
    wait_until(lambda: len(failures) > 5)
    ids, _, ticket = b.ask(prompt)

    assert is_exact(b, "qwen3", ticket, ids)
    assert b.engine.state == "ready"
    n_logged = sum("planted" in str(record.exc_info) for record in caplog.records)
    assert n_logged == 1, "the same fault fills the log"


# -- what a request is not told of -----------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "error", [RuntimeError("planted"), RuntimeError("[malloc] Unable to allocate")]
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_scheduler_ends_a_reply_as_usual_if_its_kv_cannot_be_kept(
    bench, monkeypatch, kind, error
):
    b = bench(kind)
    prompt = words(np.random.default_rng(1), 200)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(s.PrefixCache, "put_back", fail)
        ids, end, _ = b.ask(prompt, n=5)

    assert (len(ids), end.reason) == (5, "length")
    assert not b.engine.call(lambda scheduler: scheduler.cache.entries)
    check_it_still_works(b, kind, [prompt])


def test_scheduler_counts_only_the_wait_for_memory_before_none_may_pass(bench, rng):
    b = bench("qwen3", memory_limit_bytes=5 << 20)
    capacity = b.engine.report["capacity_tokens"]
    b.model.before_call = slow_decode(0.01, n_rows=4)
    running = b.submit(words(rng, capacity * 45 // 100), n=200)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    large = b.submit(words(rng, capacity * 55 // 100), n=4)
    large.submitted_at -= 60  # as if it had waited for a place until now
    small = b.submit(words(rng, 60), n=4)

    check_all_finish(b, [small])
    assert b.engine.call(lambda x: [row.handle for row in x.running]) == [running]
    check_all_finish(b, [running, large], 60)


def test_scheduler_ends_an_admitted_request_that_the_model_has_no_time_for(
    bench, monkeypatch, rng
):
    monkeypatch.setattr(s.PrefillPolicy, "may_interrupt", lambda _, *, is_short: False)
    b = bench("qwen3", queue_timeout_seconds=0.2)
    running = b.submit(words(rng, 200), n=100_000)
    wait_until(lambda: b.engine.report["decoding"] == 1)

    ids, error = b.outcome(b.submit(words(rng, 200)))

    assert ids == []
    assert isinstance(error, s.Overloaded)
    assert "QUEUE_TIMEOUT_SECONDS" in str(error)
    running.stop_reason = "cancelled"
    b.finish(running)


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_lets_an_admitted_request_wait_again_if_memory_grows_short(
    bench, monkeypatch, kind, rng, has_begun
):
    handles = []

    def may_interrupt(_policy, *, is_short):
        return has_begun and all(handle.times.phase == "queued" for handle in handles)

    monkeypatch.setattr(s.PrefillPolicy, "may_interrupt", may_interrupt)
    b = bench(kind, prefill_step_size=64, queue_timeout_seconds=300.0)
    past = words(rng, 300)
    reply, _, _ = b.ask(past)
    running = b.submit(words(rng, 200), n=100_000)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    admitted = b.submit(past + reply + words(rng, 200))
    handles.append(admitted)
    phase = "prefill" if has_begun else "queued"
    wait_until(lambda: b.engine.report["prefilling"] and admitted.times.phase == phase)
    n_cached = admitted.cached_tokens

    def hold_limit(scheduler):
        excess = [None, scheduler.running[1]]
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.budget, "find_excess", lambda _: excess.pop())
            scheduler.hold_limit()
        if has_begun:  # the model had time for it
            admitted.submitted_at -= 600  # as if it had come before that
        return list(scheduler.waiting)

    assert b.engine.call(hold_limit) == [admitted]
    running.stop_reason = "cancelled"
    ids, end = b.finish(admitted)
    assert end.cached_tokens == n_cached >= len(past)
    assert is_exact(b, kind, admitted, ids)


def test_scheduler_keeps_the_previous_state_of_all_that_end_in_one_step(bench, rng):
    b = bench("qwen3_5")
    may_read = threading.Event()
    widths = []

    def note_width(fed):
        may_read.wait(MAX_WAIT_SECONDS)
        widths.append(len(fed))

    b.model.before_call = note_width
    prompts = [words(rng, 100) for _ in range(3)]
    tickets = [b.submit(prompt, n=6) for prompt in prompts]
    may_read.set()
    replies = [b.finish(ticket)[0] for ticket in tickets]

    assert max(widths) == 3
    for prompt, reply in zip(prompts, replies, strict=True):
        part = prompt + reply[:-1]
        ids, end, ticket = b.ask(part + words(rng, 9), n=3)
        assert end.cached_tokens == len(part)
        assert is_exact(b, "qwen3_5", ticket, ids)


@pytest.mark.parametrize("reason", ["stop", at_night("repeated")])
def test_a_reply_cut_by_its_connection_goes_on_from_a_state_inside_it(bench, reason):
    """A stop string or a loop ends it: its client has the text before that."""
    b = bench("qwen3_5")
    rng = np.random.default_rng(7)
    prompt = words(rng, 100)
    ticket = b.submit(prompt, n=3000)
    wait_until(lambda: ticket._events.qsize() > s.REPLY_CHECKPOINT_SPACING + 10)
    ticket.stop_reason = reason
    ids, _ = b.outcome(ticket)
    wait_until_idle(b.engine)

    n_kept = len(ids) - len(ids) % s.REPLY_CHECKPOINT_SPACING
    part = prompt + ids[:n_kept]
    more_ids, end, again = b.ask(part + words(rng, 10), n=3)

    assert end.cached_tokens == len(part)
    assert is_exact(b, "qwen3_5", again, more_ids)
