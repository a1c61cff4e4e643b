"""ENGINE under limits and faults: who is over a limit ends cleanly, everybody else exactly."""

import threading
import time

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import start_llm as s
from engine_fixture import GREEDY, Loaded, words
from server_fixture import PATIENCE, wait_until, wait_until_idle

TOLERANCE = {"qwen3": 0.0, "qwen3_5": 0.0, "gemma3_text": 1e-4}


def is_exact(bench, kind, ticket, ids):
    """What came is what a cold run of these tokens says."""
    bench.seen[ticket] = bench.seen[ticket][: len(ids)]
    return bench.worst(ticket, ids) <= TOLERANCE[kind]


def slowly(seconds_per_token):
    return lambda fed: time.sleep(
        seconds_per_token * sum(len(one.tokens) for one in fed)
    )


def check_it_still_works(b, kind, prompts):
    """Nothing is left running, and each prompt, warm by now or not, is answered exactly."""
    wait_until_idle(b.engine)
    for prompt in prompts:
        ids, _, ticket = b.ask(prompt, n=4)
        assert is_exact(b, kind, ticket, ids)
    assert b.engine.state == "ready"
    assert not any(
        line["running"] for _, line in b.engine.call(lambda x: x.cache.describe())
    )


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_reply_ends_at_its_deadline_and_what_it_computed_is_kept(bench, kind):
    b = bench(kind, generation_watchdog_seconds=0.5)
    prompt = words(np.random.default_rng(1), 300)
    b.model.before_call = lambda fed: time.sleep(0.02)
    began = time.monotonic()
    ids, end, ticket = b.ask(prompt, n=4000)
    assert end.reason == "deadline" and time.monotonic() - began >= 0.5
    assert 0 < len(ids) < 100 and is_exact(b, kind, ticket, ids)
    again, end, ticket = b.ask(prompt + ids, n=3)
    assert end.cached_tokens >= len(prompt + ids) - 2 and is_exact(
        b, kind, ticket, again
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_retries_of_a_prompt_too_long_for_one_deadline_finish_it(bench, kind):
    b = bench(kind, generation_watchdog_seconds=0.6)
    prompt, ends = words(np.random.default_rng(2), 6000), []
    b.model.before_call = slowly(0.25e-3)  # 1.5 s for the prompt
    while not ends or ends[-1].reason == "deadline":
        # its last message's end, as every request has one: it may be cut just before it answers
        ids, end, ticket = b.ask(prompt, n=1, boundaries=[len(prompt) - 1])
        ends.append(end)
    assert len(ends) > 1 and len(ids) == 1
    cached = [end.cached_tokens for end in ends]
    assert cached == sorted(set(cached)), (
        "an attempt did not go on from where the last one was"
    )
    b.model.before_call = lambda fed: None
    assert is_exact(b, kind, ticket, ids)
    assert sum(len(one.tokens) for one in b.model.fed) <= len(prompt) + 2 * len(ends)


def test_who_waits_longer_than_allowed_is_told_and_the_one_at_work_is_not_disturbed(
    bench,
):
    b = bench("qwen3", batch_max_rows=1, queue_timeout_seconds=0.3)
    rng = np.random.default_rng(3)
    b.model.before_call = lambda fed: time.sleep(0.01)
    running = b.submit(words(rng, 100), n=150)
    waiting = b.submit(words(rng, 100))
    ids, error = b.outcome(waiting)
    assert ids == [] and isinstance(error, s.Overloaded)
    assert "QUEUE_TIMEOUT_SECONDS" in str(error) and error.headers["Retry-After"]
    ids, end = b.finish(running)
    assert (
        end.reason == "length"
        and len(ids) == 150
        and is_exact(b, "qwen3", running, ids)
    )


def test_who_does_not_read_is_dropped_and_the_others_go_on(bench, monkeypatch):
    monkeypatch.setattr(s, "MAX_UNREAD_EVENTS", 50)
    b, rng = bench("qwen3"), np.random.default_rng(4)
    deaf = b.submit(words(rng, 100), n=3000)
    prompt = words(rng, 100)
    ids, _, ticket = b.ask(prompt, n=40)
    assert is_exact(b, "qwen3", ticket, ids)
    wait_until_idle(b.engine)
    ids, end = b.outcome(deaf)
    assert end.reason == "cancelled" and len(ids) < 100


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5", "gemma3_text"])
def test_memory_stays_below_its_limit_whatever_is_asked_at_once(
    bench, monkeypatch, kind
):
    peaks, reset = [], mx.reset_peak_memory

    def noted():
        peaks.append(mx.get_peak_memory())
        reset()

    monkeypatch.setattr(mx, "reset_peak_memory", noted)
    reset()
    limit = 32 << 20
    b, rng = bench(kind, memory_limit_bytes=limit), np.random.default_rng(5)
    base = mx.get_active_memory() - (
        1 << 20
    )  # both models, but what the limit counts for one
    most = min(b.engine.report["capacity_tokens"] - 100, 4000)
    shared = words(rng, 500)
    for _ in range(3):
        lengths = rng.integers(10, most - 500, 10).tolist()
        tickets = [
            b.submit(shared + words(rng, n), n=32) for n in [*lengths, most - 500]
        ]
        results = [b.outcome(ticket, 120) for ticket in tickets]
        assert all(isinstance(end, s.FinishedEvent) for _, end in results)
    noted()
    ids, _, ticket = b.ask(shared + words(rng, 10))
    assert is_exact(b, kind, ticket, ids)
    assert (peak := max(peaks) - base) < limit, peak
    assert b.metrics.snapshot()["evicted_for_room"] > 0, (
        "it was never tight: this tested nothing"
    )


def test_a_group_changes_with_two_copies_at_most(bench, monkeypatch, table):
    # why(L-69): all its KV is in one layer here, so that joined, padded and grown it is a chain
    taken = {"merge": [], "step": [], "remove": []}

    def measured(change, parts):
        def measuring(group, *args):
            before, held = mx.get_active_memory(), group.nbytes
            mx.reset_peak_memory()
            result = change(group, *args)
            mx.synchronize()
            parts.append((mx.get_peak_memory() - before) / max(held, group.nbytes))
            return result

        return measuring

    for name, parts in taken.items():
        monkeypatch.setattr(
            s.DecodeBatch, name, measured(getattr(s.DecodeBatch, name), parts)
        )
    decode = s.Scheduler._decode

    def together(scheduler, group):
        if not scheduler.waiting and not scheduler.prefilling:
            decode(scheduler, group)

    monkeypatch.setattr(s.Scheduler, "_decode", together)
    b, rng = bench("gemma3_text"), np.random.default_rng(8)
    tickets = [b.submit(words(rng, 3500 + n), n=90) for n in range(0, 120, 20)]
    assert all(
        isinstance(b.outcome(ticket, PATIENCE)[1], s.FinishedEvent)
        for ticket in tickets
    )
    for name, parts in taken.items():
        table(
            f"group {name:7s} {len(parts):3d} times, at most {max(parts):.2f} of its KV besides"
        )
    assert len(taken["merge"]) == 5
    assert all(max(parts) < 2.1 for parts in taken.values())


def test_who_parts_from_a_large_line_takes_its_buffers(bench):
    b, rng = (
        bench("qwen3", memory_limit_bytes=8 << 20),
        np.random.default_rng(1),
    )  # why(L-73)
    past = words(rng, int(b.engine.report["capacity_tokens"] * 0.7))
    ids, _, _ = b.ask(past, n=20)
    ids, end, ticket = b.ask(past + ids[:-10] + words(rng, 20), n=4)
    assert end.cached_tokens >= len(past)
    assert is_exact(b, "qwen3", ticket, ids)


def test_nothing_is_evicted_for_a_join_that_cannot_be(bench):
    b, rng = (
        bench("qwen3", memory_limit_bytes=6 << 20),
        np.random.default_rng(1),
    )  # why(L-73)
    small, large = (
        int(b.engine.report["capacity_tokens"] * share) for share in (0.1, 0.36)
    )
    rests = words(rng, small)
    b.ask(rests, n=4)
    tickets = [b.submit(words(rng, large), n=60) for _ in range(2)]
    assert all(
        isinstance(b.outcome(ticket, PATIENCE)[1], s.FinishedEvent)
        for ticket in tickets
    )
    _, end, _ = b.ask(rests + words(rng, 10), n=2)
    assert end.cached_tokens == small


def test_nothing_is_evicted_for_who_does_not_fit_beside_running_checkpoints(bench):
    rng = np.random.default_rng(1)  # why(L-97)
    b = bench("gemma3_text", size={"window": 512}, memory_limit_bytes=30_000_000)
    rests = [words(rng, 600) for _ in range(3)]
    for rest in rests:
        b.ask(rest, n=4, boundaries=[100, 500])
    shape, most = b.engine.call(lambda x: (x.spec, x.cache.max_bytes))
    n = int(0.35 * most / shape.token_bytes)
    running = b.submit(
        words(rng, n), n=100_000, boundaries=list(range(100, n, n // 14))
    )
    wait_until(lambda: b.engine.report["decoding"])
    taken, held = b.engine.call(
        lambda x: (
            x.running_bytes,
            sum(y.state_bytes for y in x.cache.entries if y.is_running),
        )
    )
    assert held > 8 * shape.state_bytes
    wanted = (
        int((most - taken - 8_000 - shape.state_bytes) / shape.token_bytes * 32 / 33)
        - 257
    )
    needed = taken + b.engine.call(lambda x: x.budget.prompt_bytes(wanted))
    assert needed < most < needed + held  # its KV alone would fit
    large = b.submit(words(rng, wanted), n=4)
    wait_until(lambda: b.engine.report["queued"])
    for rest in rests:
        _, end, _ = b.ask([*rest, 5, 6, 7], n=1)
        assert end.cached_tokens >= 500
    running.stop_reason = "cancelled"
    assert isinstance(b.outcome(large, PATIENCE)[1], s.FinishedEvent)


def test_checkpoints_of_many_running_rows_do_not_double_what_is_held(bench, table):
    rng, n_rows = np.random.default_rng(1), 20  # why(L-97)
    b = bench("gemma3_text", size={"window": 512}, memory_limit_bytes=30_000_000)
    shape, most = b.engine.call(lambda x: (x.spec, x.cache.max_bytes))
    n = int((most / n_rows - shape.state_bytes) / shape.token_bytes * 32 / 33) - 300
    ends = list(range(100, n, n // 24))
    tickets = [
        b.submit(words(rng, n), n=100_000, boundaries=ends) for _ in range(n_rows)
    ]
    assert n_rows * b.engine.call(lambda x: x.budget.prompt_bytes(n)) > 0.9 * most
    wait_until(
        lambda: b.engine.report["decoding"] > 0.75 * n_rows
    )  # a few may have to wait
    held = b.engine.call(lambda x: x.cache.nbytes + x.running_bytes)
    table(f"{n_rows} rows with checkpoints hold {held / most:.2f} of the KV budget")
    assert held < 1.5 * most
    for ticket in tickets:
        ticket.stop_reason = "cancelled"


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "qwen3_5"])
def test_a_state_taken_on_the_way_is_no_larger_than_one_at_the_end(bench, kind):
    b, rng = bench(kind), np.random.default_rng(1)  # why(L-74)
    b.ask(words(rng, 900), n=2, boundaries=[500])
    most = b.engine.call(lambda scheduler: scheduler.spec.state_bytes)
    taken = b.engine.call(
        lambda x: [p.nbytes for y in x.cache.entries for p in y.checkpoints.values()]
    )
    assert len(taken) >= 2
    assert max(taken) <= most


def test_checkpoints_of_a_row_being_read_keep_to_their_share(bench, monkeypatch):
    b, rng = (
        bench("qwen3_5", memory_limit_bytes=(1 << 20) + 1_600_000),
        np.random.default_rng(1),
    )
    held, add = [], s.CacheLease.add_checkpoint  # why(L-74)

    def noted(lease, *args):
        add(lease, *args)
        held.append(lease.state_bytes / most)

    most = b.engine.call(lambda x: x.cache.max_bytes)
    monkeypatch.setattr(s.CacheLease, "add_checkpoint", noted)
    prompt = words(rng, 1500)
    b.ask(prompt, n=2, boundaries=list(range(5, 1500, 5)))
    assert len(held) > 100
    assert max(held) <= s.CHECKPOINT_SHARE
    ids, end, ticket = b.ask(prompt + words(rng, 5), n=4)
    assert end.cached_tokens >= 1400
    assert is_exact(b, "qwen3_5", ticket, ids)


def test_the_end_of_the_head_is_there_for_another_session_when_checkpoints_are_few(
    bench, monkeypatch
):
    monkeypatch.setattr(
        s, "CHECKPOINT_SPACING", 100
    )  # it begins inside the head; why(L-77)
    b, rng = bench("qwen3_5"), np.random.default_rng(1)
    head = words(rng, 280)
    b.ask(head + words(rng, 700), n=2, boundaries=[280, 285, 290, 600])

    def thin(scheduler):
        assert scheduler.cache._thin_largest(1 << 60, min_left=4)

    b.engine.call(thin)
    _, end, _ = b.ask(head + words(rng, 50), n=2, boundaries=[280])
    assert end.cached_tokens == 280


def test_memory_that_runs_out_while_room_is_made_ends_one_request_only(
    bench, monkeypatch
):
    b, rng = bench("qwen3", memory_limit_bytes=8 << 20), np.random.default_rng(1)
    some = int(b.engine.report["capacity_tokens"] * 0.15)
    head = words(rng, 2 * some)
    for _ in range(
        2
    ):  # what one of them goes on from must be copied to be evicted in part
        b.ask(head + words(rng, some), n=2)

    with monkeypatch.context() as patch:

        def fail(*_):
            patch.setattr(s.KVSpan, "cut", fail)
            raise RuntimeError("[malloc] Unable to allocate 7 bytes.")

        b.model.before_call = fail
        end = b.outcome(b.submit(words(rng, 100)), PATIENCE)[1]
        b.model.before_call = slowly(0)
    assert isinstance(end, s.Overloaded)
    check_it_still_works(b, "qwen3", [words(rng, 50)])


def test_a_long_prompt_gets_its_share_beside_short_ones_without_end(bench):
    b, rng = bench("qwen3", prefill_step_size=64), np.random.default_rng(1)  # why(L-71)
    b.model.before_call = slowly(0.001)
    b.ask(words(rng, 200), n=1)  # it knows its speed
    long, n_short = b.submit(words(rng, 1200), n=1), 0
    short = [b.submit(words(rng, 100), n=1) for _ in range(2)]

    def is_there(scheduler):
        return long in [*scheduler.waiting, *(row.handle for row in scheduler.running)]

    while n_short < 250 and b.engine.call(is_there):
        b.outcome(short.pop(0), PATIENCE)
        short.append(b.submit(words(rng, 100), n=1))
        n_short += 1
    assert (
        20 < n_short < 200
    )  # of a hundred tokens each; its share would be 96, without it 400


def test_a_short_prompt_is_read_at_a_stretch_beside_a_long_one(bench):
    b, rng = bench("qwen3", prefill_step_size=64), np.random.default_rng(1)  # why(L-71)
    b.model.before_call = slowly(0.001)
    long = b.submit(words(rng, 1500), n=1)
    wait_until(lambda: b.engine.report["prefilling"] == 1)
    prompt = words(rng, 300)
    short = b.submit(prompt, n=1)
    for ticket in (short, long):
        assert isinstance(b.outcome(ticket, PATIENCE)[1], s.FinishedEvent)
    ours = [
        i
        for i, one in enumerate(b.model.fed)
        if len(one.tokens) > 1
        and [*one.tokens] == prompt[one.at : one.at + len(one.tokens)]
    ]
    assert len(ours) > 3 and ours[-1] - ours[0] == len(ours) - 1, ours


def test_rows_that_outgrow_memory_together_give_way_one_by_one(bench):
    b, rng = bench("qwen3", memory_limit_bytes=7 << 20), np.random.default_rng(6)
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
    held = b.engine.memory["running"] + b.engine.memory["cache"]
    assert held <= b.engine.report["cache_max_bytes"]
    check_it_still_works(b, "qwen3", prompts[:2])


def test_who_goes_on_from_a_line_waits_for_room_and_the_line_waits_too(bench):
    """Its own KV is the last to be evicted for it, and nothing is while rows leave no room."""
    b, rng = bench("qwen3", memory_limit_bytes=8 << 20), np.random.default_rng(2)
    capacity = b.engine.report["capacity_tokens"]
    past = words(rng, capacity * 35 // 100)
    past += b.ask(past, n=4)[0]
    b.model.before_call = lambda fed: time.sleep(
        0.02 * (sum(len(one.tokens) for one in fed) < 4)
    )
    running = b.submit(words(rng, capacity * 45 // 100), n=100)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    on = b.submit(past + words(rng, capacity * 22 // 100), n=8)
    ids, end = b.outcome(on, 60)
    assert isinstance(end, s.FinishedEvent) and end.cached_tokens == len(past), end
    assert is_exact(b, "qwen3", on, ids)
    assert isinstance(b.outcome(running, 60)[1], s.FinishedEvent)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_small_request_beside_one_of_nearly_all_memory_is_answered(bench, is_first):
    """All KV fits; that copies of it would not is no reason to end one of them (L-79)."""
    b, rng = bench("qwen3", memory_limit_bytes=8 << 20), np.random.default_rng(4)
    large = words(rng, int(b.engine.report["capacity_tokens"] * 0.9)), 60
    requests = [(words(rng, 20), 40 if is_first else 400), large]
    requests.sort(key=lambda one: len(one[0]), reverse=is_first)
    b.model.before_call = lambda fed: time.sleep(
        0.01 * (sum(len(one.tokens) for one in fed) < 4)
    )
    tickets = [b.submit(requests[0][0], n=requests[0][1])]
    wait_until(lambda: b.engine.report["decoding"] == 1)
    tickets.append(b.submit(requests[1][0], n=requests[1][1]))
    for ticket, (_, n_out) in zip(tickets, requests, strict=True):
        ids, end = b.outcome(ticket, 120)
        assert isinstance(end, s.FinishedEvent) and len(ids) == n_out, end


@pytest.mark.parametrize(("kind", "limit"), [("qwen3", 8 << 20), ("qwen3_5", 16 << 20)])
def test_two_agents_that_hardly_fit_keep_most_of_their_pasts(bench, kind, limit):
    """They need 103 % of the KV bytes: what lacks goes, not a whole conversation (L-87)."""
    b, rng = bench(kind, memory_limit_bytes=limit), np.random.default_rng(1)
    capacity = b.engine.report["capacity_tokens"]
    pasts = [words(rng, int(capacity * share)) for share in (0.55, 0.48)]
    for turn in range(3):
        for i, past in enumerate(pasts):
            ids, end, ticket = b.ask(past, n=8, boundaries=[1000, len(past) - 3])
            assert turn == 0 or end.cached_tokens > len(past) // 2, (
                turn,
                i,
                end.cached_tokens,
                len(past),
            )
            if turn == 2:
                assert is_exact(b, kind, ticket, ids)
            pasts[i] = past + ids + words(rng, 20)


def test_a_conversation_that_outgrows_its_buffers_is_not_held_twice(bench, monkeypatch):
    reserve, taken = s.reserve_tokens, []

    def measured(cache, tokens, *, capacity):
        before, held = mx.get_active_memory(), sum(layer.nbytes for layer in cache)
        mx.reset_peak_memory()
        reserve(cache, tokens, capacity=capacity)
        if held < sum(layer.nbytes for layer in cache):
            taken.append((mx.get_peak_memory() - before) / held if held else 0.0)

    monkeypatch.setattr(s, "reserve_tokens", measured)
    b, rng = bench("qwen3", {"layers": 12}), np.random.default_rng(5)
    prompt = words(rng, 3000)
    ids, _, _ = b.ask(prompt)
    _, end, _ = b.ask(prompt + ids + words(rng, 700))
    assert end.cached_tokens >= 3000 and len(taken) == 2
    assert taken[-1] < 0.6, "what it grows by, and one layer of twelve"


def test_nothing_is_kept_beside_rows_and_what_is_at_rest(bench, monkeypatch):
    """Where a branch has ended, its copy of the prefix is gone before the next slice is read."""
    finish, prefill, turn, held = (
        s.Scheduler._finish,
        s.Scheduler._prefill,
        s.Scheduler.step,
        {},
    )

    def begun(scheduler):
        held.pop("ended", None)
        turn(scheduler)

    def ended(scheduler, *how):
        finish(scheduler, *how)
        held["ended"] = 0

    def read(scheduler, row):
        parts = [
            layer.nbytes for one in scheduler.prefilling for layer in one.layer_caches
        ]
        known = (
            scheduler.cache.nbytes
            + sum(parts)
            + sum(g.nbytes for g in scheduler.batches)
        )
        held["behind an end" if "ended" in held else "usual"] = (
            mx.get_active_memory() - known
        )
        prefill(scheduler, row)

    for name, how in (("step", begun), ("_finish", ended), ("_prefill", read)):
        monkeypatch.setattr(s.Scheduler, name, how)
    b, rng = bench("qwen3", {"layers": 12}), np.random.default_rng(0)
    head = words(rng, 3000)
    b.ask(head + words(rng, 3600))
    branch, other = (
        b.submit(head + words(rng, 600), n=4),
        b.submit(words(rng, 1500), n=2),
    )
    b.finish(branch), b.finish(other)
    assert held["behind an end"] < 1.5 * held["usual"]


def test_a_row_does_not_keep_the_state_that_it_began_with(bench):
    """Else a checkpoint that its line gives up stays in memory, and nothing counts it."""
    b, rng = bench("qwen3_5"), np.random.default_rng(0)
    prompt = words(rng, 600)
    ids, _, _ = b.ask(prompt, boundaries=[300])
    ticket = b.submit(prompt + ids + words(rng, 30), n=3000)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    assert b.engine.call(
        lambda x: [(row.match.cached_tokens > 0, row.match.state) for row in x.running]
    ) == [(True, None)]
    ticket.stop_reason = "cancelled"
    b.finish(ticket)


def test_a_running_branch_keeps_no_second_copy_of_its_prefix(bench):
    b, rng = bench("qwen3", memory_limit_bytes=8 << 20), np.random.default_rng(4)
    capacity = b.engine.report["capacity_tokens"]
    old = words(rng, capacity * 58 // 100)
    b.ask(old, n=2)
    cut = capacity * 27 // 100
    running, most = b.submit(old[:cut] + words(rng, 40), n=capacity * 65 // 100), 0

    def held(scheduler):
        scheduler.hold_limit()  # as it does every quarter of a second
        return scheduler.cache.nbytes + scheduler.running_bytes, bool(scheduler.running)

    wait_until(lambda: b.engine.report["decoding"] == 1)
    n_bytes, is_running = b.engine.call(held)
    assert is_running
    while is_running:
        most = max(most, n_bytes)
        n_bytes, is_running = b.engine.call(held)
    assert isinstance(b.outcome(running, PATIENCE)[1], s.FinishedEvent)
    assert most <= 1.02 * b.engine.report["cache_max_bytes"]
    ids, end, ticket = b.ask(old[:cut] + words(rng, 10), n=4)
    assert end.cached_tokens == cut and is_exact(b, "qwen3", ticket, ids)


def test_prompts_that_come_together_are_not_all_answered_last(bench):
    """One after the other, but for the share of the oldest (L-71)."""
    b, rng = bench("qwen3", prefill_step_size=64), np.random.default_rng(1)
    b.model.before_call = slowly(0.0005)
    b.ask(words(rng, 200), n=1)  # it knows its speed
    n_fed = [sum(len(one.tokens) for one in b.model.fed)]
    tickets = [b.submit(words(rng, 1000), n=1) for _ in range(6)]
    when = {}
    while len(when) < len(tickets):
        for ticket in tickets:
            event = ticket.next_event(0.001)
            if isinstance(event, s.FinishedEvent):
                when[ticket] = sum(len(one.tokens) for one in b.model.fed) - n_fed[0]
    share = sorted(n / (6 * 1000) for n in when.values())
    assert share[0] < 0.4 and sum(share) / 6 < 0.75, (
        share
    )  # in turns: 0.9 and more for each


def test_a_small_request_passes_one_that_waits_for_room(bench):
    b, rng = bench("qwen3", memory_limit_bytes=8 << 20), np.random.default_rng(1)
    capacity = b.engine.report["capacity_tokens"]
    b.model.before_call = lambda fed: time.sleep(
        0.01 * (sum(len(one.tokens) for one in fed) < 5)
    )
    running = b.submit(words(rng, capacity * 45 // 100), n=200)
    wait_until(lambda: b.engine.report["decoding"] == 1)
    large = b.submit(words(rng, capacity * 55 // 100), n=4)
    small = b.submit(words(rng, 60), n=4)
    assert isinstance(b.outcome(small, PATIENCE)[1], s.FinishedEvent)
    assert b.engine.call(lambda x: [row.handle for row in x.running]) == [running]
    for ticket in (running, large):
        assert isinstance(b.outcome(ticket, 60)[1], s.FinishedEvent)


def test_those_who_wait_for_a_prefix_keep_no_row_free_from_others(bench):
    b, rng = (
        bench("qwen3", batch_max_rows=3, prefill_step_size=64),
        np.random.default_rng(1),
    )
    b.model.before_call = slowly(0.002)
    head = words(rng, 1500)
    family = [b.submit(head + words(rng, 10), n=2) for _ in range(4)]
    stranger = b.submit(words(rng, 20), n=2)
    assert isinstance(b.outcome(stranger, PATIENCE)[1], s.FinishedEvent)
    assert b.engine.call(lambda x: len(x.waiting)) == 3
    for ticket in family:
        assert isinstance(b.outcome(ticket, PATIENCE)[1], s.FinishedEvent)


def test_the_deadline_does_not_count_what_waits_to_be_read(bench):
    b, rng = bench("qwen3", generation_watchdog_seconds=3.0), np.random.default_rng(1)
    pauses = [5.0]
    b.model.before_call = lambda _fed: time.sleep(pauses.pop() if pauses else 0)
    tickets = [b.submit(words(rng, n), n=2) for n in (90, 300)]
    first, second = (b.outcome(ticket, PATIENCE)[1] for ticket in tickets)
    assert (first.reason, second.reason) == ("deadline", "length")
    assert second.seconds[0] >= 2.0  # it waited


def test_no_number_is_kept_when_the_client_leaves_in_that_very_turn(bench, monkeypatch):
    b, rng = bench("qwen3"), np.random.default_rng(1)
    prompt, broken = words(rng, 300), [True]
    plain, add_token = b.model.plain, s.RunningRequest.add_token

    class Broken:
        def __call__(self, tokens, cache=None):
            logits = plain(tokens, cache=cache)
            return logits * float("nan") if broken else logits

        def __getattr__(self, name):
            return getattr(plain, name)

    def leave(row, token, *, logprobs):
        add_token(row, token, logprobs=logprobs)
        if row.output_ids[-1] == s.NO_TOKEN and broken:
            row.handle.stop_reason = "cancelled"
            broken.clear()

    monkeypatch.setattr(b.model, "plain", Broken())
    monkeypatch.setattr(s.RunningRequest, "add_token", leave)
    assert b.outcome(b.submit(prompt, n=5), PATIENCE)[1].reason == "cancelled"
    assert not b.engine.call(lambda x: x.cache.entries)


def test_branches_that_go_on_at_once_wait_for_the_copies_of_their_prefix(bench):
    b, rng = bench("qwen3", memory_limit_bytes=8 << 20), np.random.default_rng(3)
    shared = words(rng, b.engine.report["capacity_tokens"] * 4 // 10)
    prompts = [shared + words(rng, 300) for _ in range(3)]
    prompts = [prompt + b.ask(prompt, n=4)[0] + words(rng, 20) for prompt in prompts]
    b.model.before_call = lambda fed: time.sleep(
        0.01 * (sum(len(one.tokens) for one in fed) < 4)
    )
    tickets = [b.submit(prompt, n=60) for prompt in prompts]
    for ticket in tickets:
        _, end = b.outcome(ticket, 60)
        assert isinstance(end, s.FinishedEvent) and end.cached_tokens >= len(shared), (
            end
        )


def test_a_model_that_leaves_no_room_for_kv_is_refused_in_a_sentence(
    models, monkeypatch
):
    def load():
        loaded = s.mlx_lm.load(str(models("qwen3")))[0]
        return Loaded(loaded)

    engine = s.Engine(s.Config(memory_limit_bytes=1 << 20), s.CacheMetrics(), load=load)
    engine.start()
    wait_until(lambda: engine.state != "loading")
    assert "MEMORY_LIMIT_BYTES" in engine.failure
    engine.stop()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[malloc] Unable to allocate 7 bytes.")]
)
def test_memory_that_runs_out_is_the_trouble_of_one_request(bench, error):
    b, prompt = bench("qwen3"), words(np.random.default_rng(7), 300)

    def fail(_fed):
        b.model.before_call = lambda fed: None
        raise error

    b.model.before_call = fail
    ids, end = b.outcome(b.submit(prompt))
    assert ids == [] and end.status == 503
    assert "malloc" not in str(end)
    check_it_still_works(b, "qwen3", [prompt])


# -- numbers that are none -------------------------------------------------------------------------


class Poisoned:
    """The model, but a row that feeds its token number `at` gets bad logits."""

    def __init__(self, plain, at, value):
        self._plain, self._at, self._value = plain, at, value

    def __call__(self, inputs, cache=None):
        offset = next(layer.offset for layer in cache if hasattr(layer, "offset"))
        n_rows, n_new = inputs.shape
        depths = mx.zeros(n_rows, mx.int32) + offset
        logits = self._plain(inputs, cache=cache)
        is_hit = (depths <= self._at) & (self._at < depths + n_new)
        bad = mx.array(np.resize(np.array(self._value, np.float32), logits.shape[-1]))
        return mx.where(is_hit[:, None, None], bad, logits)

    def __getattr__(self, name):
        return getattr(self._plain, name)


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, [0.0, np.inf], [0.0, np.nan]]
)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("at", [499, 505])
def test_a_reply_of_no_numbers_is_an_error_and_nothing_of_it_is_kept(
    bench, kind, at, value
):
    b, rng = bench(kind), np.random.default_rng(8)
    prompt, other = words(rng, 500), words(rng, 450)
    sampling = GREEDY.model_copy(
        update={"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}
    )
    for bad_sampling in (GREEDY, sampling):
        plain = b.model.plain
        b.model.plain = Poisoned(plain, at, value)
        healthy, sick = (
            b.submit(other, n=30),
            b.submit(prompt, n=30, sampling=bad_sampling),
        )
        ids, error = b.outcome(sick)
        assert isinstance(error, s.GenerationFailed) and "NaN" in str(error)
        assert len(ids) <= max(0, at - 499)
        ids, _ = b.finish(healthy)
        assert len(ids) == 30 and is_exact(b, kind, healthy, ids)
        b.model.plain = plain
        check_it_still_works(b, kind, [prompt, other])


# -- an exception at every step --------------------------------------------------------------------

STEPS = [
    *((s.PrefixCache, name) for name in ("find", "start", "_give_kv", "evict_to_fit")),
    *((s.CacheLease, name) for name in ("put_back", "add_checkpoint", "advance")),
    *((s.EntryTree, name) for name in ("take_kv", "_split", "_shorten", "insert")),
    *((s.EntryTree, name) for name in ("_join_to_parent",)),
    *((s.CacheEntry, name) for name in ("copy_kv", "path_checkpoints")),
    *((s.Scheduler, name) for name in ("_admit", "_start", "_prepare", "_prefill")),
    *((s.Scheduler, name) for name in ("_prefill_slice", "_feed", "_begin_decode")),
    *((s.Scheduler, name) for name in ("_decode", "_finish")),
    *((s.SchedulingPolicy, name) for name in ("charge_slice", "charge_prefill")),
    *((s.MemoryBudget, name) for name in ("make_room", "make_room_to_merge")),
    *((s.DecodeBatch, name) for name in ("__init__", "_prefill_rest", "step")),
    *((s.DecodeBatch, name) for name in ("merge", "remove", "padding_with")),
    *((s.RunningRequest, name) for name in ("add_token", "load_kv", "read_span")),
    *((s.RunningRequest, name) for name in ("computed_key", "add_slice_ends")),
    *((s, name) for name in ("reserve_tokens", "evaluate_caches", "load_span")),
    *((s, name) for name in ("take_span", "copy_span", "copy_state", "restore_state")),
    *((s, name) for name in ("kv_cache_offset", "extract_row", "to_batch")),
    *((s, name) for name in ("make_prompt_cache", "block_hashes", "slice_end")),
    *((s, name) for name in ("_find_slice_ends", "_token_choice", "make_sampler")),
    *((s, name) for name in ("hold_recurrent_state", "_remaining_prefill")),
]


# A dense model has no state to restore.
NOT_TAKEN = {("qwen3", "restore_state")}


@pytest.mark.parametrize("owner, name", STEPS, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_an_exception_anywhere_costs_no_more_than_the_requests_it_met(
    bench, monkeypatch, kind, owner, name
):
    b, rng = bench(kind, batch_max_rows=3), np.random.default_rng(9)
    past = words(rng, 300)
    first, _, _ = b.ask(past, n=4, boundaries=(200,))
    prompts = [
        past + first + words(rng, 20),
        past[:200] + words(rng, 30),
        words(rng, 150),
    ]
    real, n_met = getattr(owner, name), 0
    for fail_at in (1, 2, 4):
        left = [fail_at]

        def broken(*args, left=left, **how):
            if threading.current_thread().name == "model":
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError("planted: /secret/path [metal::x]")
            return real(*args, **how)

        monkeypatch.setattr(owner, name, broken)
        tickets = [b.submit(prompt, n=6, boundaries=(200,)) for prompt in prompts]
        results = [b.outcome(ticket) for ticket in tickets]
        monkeypatch.setattr(owner, name, real)
        n_met += left[0] <= 0
        for ticket, (ids, end) in zip(tickets, results, strict=True):
            if ids:
                assert is_exact(b, kind, ticket, ids)
            assert isinstance(end, s.FinishedEvent) or "planted" not in str(end)
        check_it_still_works(b, kind, prompts)
    assert n_met or (kind, name) in NOT_TAKEN, (
        "the step was never taken: this tested nothing"
    )


def test_a_call_that_is_refused_while_the_model_loads_never_runs(models):
    may_load = threading.Event()
    calls = []

    def load():
        may_load.wait(PATIENCE)
        return Loaded(mlx_lm.load(str(models("qwen3")))[0])

    engine = s.Engine(s.Config(), s.CacheMetrics(), load=load)
    engine.start()
    try:
        with pytest.raises(s.NotReady, match="loading"):
            engine.call(lambda _scheduler: calls.append("refused"))
        may_load.set()
        wait_until(lambda: engine.state == "ready")
        engine.call(lambda _scheduler: calls.append("served"))
    finally:
        may_load.set()
        engine.stop()
    assert calls == ["served"]


def test_a_dead_model_thread_is_told_to_all_who_wait_and_to_all_who_come(
    bench, monkeypatch
):
    b, prompt = bench("qwen3"), words(np.random.default_rng(10), 100)
    b.model.before_call = lambda fed: time.sleep(0.01)
    running = b.submit(prompt, n=4000)
    wait_until(lambda: b.engine.report["decoding"])

    def broken(_self):
        raise RuntimeError("planted: /secret/path")

    monkeypatch.setattr(s.PrefixCache, "evict_idle", broken)
    _, error = b.outcome(running, 10)
    assert isinstance(error, s.NotReady) and error.status == 503
    with pytest.raises(s.NotReady):
        b.submit(prompt)
    with pytest.raises(s.NotReady):
        b.engine.call(lambda scheduler: None)
    assert b.engine.state == "dead" and "planted" not in str(error)
