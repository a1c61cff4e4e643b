"""ENGINE: whatever was cached, batched, cancelled or evicted, the logits are those of a cold run.

The oracle is the plain model on the same tokens with a fresh cache, no server code. Logits are
compared, not samples: with sampled tokens a wrong slice went unnoticed.
"""

import threading
import time

import numpy as np
import pytest
import start_llm as s
from engine_fixture import TOLERANCE, words
from server_fixture import PATIENCE

KINDS = ("qwen3", "qwen3_5", "gemma3_text")


# -- scenarios: each returns [(ticket, ids, end)]


def append_only(b, rng):
    past, out = words(rng, 300), []
    for _ in range(4):
        ids, end, ticket = b.ask(past, boundaries=[len(past) - 20])
        out.append((ticket, ids, end))
        past = past + ids + words(rng, 40)
    return out


def branch_and_return(b, rng):
    head = words(rng, 400)
    main, out = head + words(rng, 100), []
    for turn in range(3):
        ids, end, ticket = b.ask(main, boundaries=[400])
        out.append((ticket, ids, end))
        main = main + ids + words(rng, 30)
        for _ in range(2):
            sub = head + words(rng, 60 + turn)
            ids, end, ticket = b.ask(sub, boundaries=[400])
            out.append((ticket, ids, end))
    return out


def edits_everywhere(b, rng):
    past, cuts, out = words(rng, 200), [], []
    for _ in range(6):
        cuts.append(len(past))
        ids, end, ticket = b.ask(past, boundaries=cuts[-2:])
        out.append((ticket, ids, end))
        past = past + ids + words(rng, 30)
    for cut in cuts:
        ids, end, ticket = b.ask(past[:cut] + words(rng, 25), boundaries=[cut])
        out.append((ticket, ids, end))
    return out


def early_branch(b, rng):
    """Much follows the branch point, so the branch works on a copy and the line stays whole."""
    main, out = words(rng, 900), []
    for _ in range(3):
        for prompt in (main, main[:300] + words(rng, 40)):
            ids, end, ticket = b.ask(prompt, boundaries=[300])
            out.append((ticket, ids, end))
            main = main + ids + words(rng, 20) if prompt is main else main
    return out


def one_more_token(b, rng):
    """The reply's own end is the point of reuse, three times: decoding goes on from it at once."""
    past = words(rng, 150)
    ids, end, ticket = b.ask(past, n=20)
    out, past = [(ticket, ids, end)], past + ids
    for word in (20, 30, 40):
        ids, end, ticket = b.ask([*past, word], n=20)
        out.append((ticket, ids, end))
    return out


def resent(b, rng):
    past = words(rng, 350)
    asks = (b.ask(past, boundaries=[len(past)]) for _ in range(3))
    return [(t, ids, end) for ids, end, t in asks]


def cancelled(b, rng):
    past = words(rng, 3000)
    ticket = b.submit(past, boundaries=[1000, 2000])
    while not isinstance(event := ticket.next_event(60), int) or event < 500:
        pass
    ticket.stop_reason = "cancelled"
    b.finish(ticket)
    ids, end, ticket = b.ask(past, boundaries=[1000, 2000])
    assert end.cached_tokens >= 500 or not end.cached_tokens, "kept"
    return [(ticket, ids, end)]


def at_once(b, rng):
    prefix = words(rng, 600)
    prompts = [prefix + words(rng, 20 + 5 * i) for i in range(6)]
    tickets = [b.submit(p, n=12 + i) for i, p in enumerate(prompts)]
    out = [(t, *b.finish(t)) for t in tickets]
    follow = [
        p + ids + words(rng, 15) for p, (_, ids, _) in zip(prompts, out, strict=True)
    ]
    tickets = [b.submit(p, n=10) for p in follow]
    return out + [(t, *b.finish(t)) for t in tickets]


def staggered(b, rng):
    """Rows of unlike length join and leave each other's batches, cold and then warm."""
    prompts, out = [words(rng, n) for n in (2000, 300, 310, 2100, 340, 2050)], []
    for _ in range(2):
        tickets = []
        for prompt in prompts:
            tickets.append(b.submit(prompt, n=30))
            time.sleep(0.03)
        ends = [(t, *b.finish(t)) for t in tickets]
        prompts = [
            p + ids + words(rng, 9)
            for p, (_, ids, _) in zip(prompts, ends, strict=True)
        ]
        out += ends
    return out


def long_beside_short(b, rng):
    """A 16k row decodes while rows of 300 to 5,000 tokens come and go."""
    lengths = (16_000, 300, 5_000, 700)
    tickets = [b.submit(words(rng, n), n=40 if n > 4000 else 15) for n in lengths]
    out = [(t, *b.finish(t, timeout=PATIENCE)) for t in tickets]
    past = b.asked[tickets[0]] + out[0][1] + words(rng, 12)
    ids, end, ticket = b.ask(past)
    assert end.cached_tokens == len(past) - 12
    return [*out, (ticket, ids, end)]


ONE_HEAD = {"heads": 1, "kv_heads": 1}  # half the cost of 16k tokens
SCENARIOS = [
    append_only,
    branch_and_return,
    early_branch,
    edits_everywhere,
    one_more_token,
    resent,
    cancelled,
    at_once,
    staggered,
    long_beside_short,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_warm_logits_are_cold_logits(bench, kind, scenario):
    b = bench(kind, ONE_HEAD if scenario is long_beside_short else {})
    results = scenario(b, np.random.default_rng(7))
    worst = max(b.worst(ticket, ids) for ticket, ids, _ in results)
    assert worst <= TOLERANCE.get(kind, 0.0)
    if len(results) > 1:
        assert any(end.cached_tokens for _, _, end in results), (
            "nothing was reused: this tested nothing"
        )


# -- planted faults: the test above must notice every one


def one_token_too_many(monkeypatch):
    real = s.common_prefix_length
    monkeypatch.setattr(
        s, "common_prefix_length", lambda a, b: min(real(a, b) + 1, len(a), len(b))
    )


def skipped_token(monkeypatch):
    monkeypatch.setattr(
        s,
        "_remaining_prefill",
        lambda t, offset: t[offset + (offset > 0) : -1] or t[-2:-1],
    )


def doubled_token(monkeypatch):
    monkeypatch.setattr(
        s, "_remaining_prefill", lambda t, offset: t[offset - (offset > 0) : -1]
    )


def shared_state(monkeypatch):
    monkeypatch.setattr(s, "_map_arrays", lambda state, change: state)
    monkeypatch.setattr(
        s.KVSpan,
        "cut",
        lambda span, start, end: span if start == 0 else real_cut(span, start, end),
    )


def stale_checkpoint(monkeypatch):
    real = s.CacheEntry.path_checkpoints

    def stale(line, limit):
        usable = real(line, limit)
        return dict.fromkeys(usable, usable[min(usable)]) if usable else {}

    monkeypatch.setattr(s.CacheEntry, "path_checkpoints", stale)


def another_rows_state(monkeypatch):
    real = s.extract_row
    monkeypatch.setattr(
        s, "extract_row", lambda cache, row: real(cache, 0 if row else 1)
    )


real_cut = s.KVSpan.cut
FAULTS = [
    (one_token_too_many, "qwen3", edits_everywhere),
    (skipped_token, "qwen3", append_only),
    (doubled_token, "qwen3", append_only),
    (shared_state, "qwen3", early_branch),
    (shared_state, "gemma3_text", one_more_token),
    (stale_checkpoint, "qwen3_5", edits_everywhere),
    (another_rows_state, "qwen3_5", at_once),
]


@pytest.mark.parametrize(
    "fault, kind, scenario", FAULTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_planted_fault_is_noticed(bench, monkeypatch, fault, kind, scenario):
    fault(monkeypatch)
    b = bench(kind)
    with pytest.raises(AssertionError):
        results = scenario(b, np.random.default_rng(7))
        assert max(b.worst(t, ids) for t, ids, _ in results) <= TOLERANCE.get(kind, 0.0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_prompt_that_goes_on_from_one_still_in_prefill_harms_neither(bench, kind):
    """As completions do while somebody types; the first cannot stop behind its own end."""
    b, rng = bench(kind, prefill_step_size=64), np.random.default_rng(5)
    first = words(rng, 3000)
    tickets = [b.submit(first, n=4), b.submit(first + words(rng, 100), n=4)]
    for ticket in tickets:
        ids, _ = b.finish(ticket)
        assert b.worst(ticket, ids) == 0.0


def test_who_comes_together_decodes_together(bench):
    """Prompts of one slice each: hardly a step goes by with some of them, while others wait."""
    b, everyone, widths = bench("qwen3"), threading.Event(), []

    def noted(fed):
        everyone.wait(PATIENCE)
        widths.append(len(fed))

    b.model.before_call = noted
    tickets = [b.submit(words(np.random.default_rng(n), 100), n=20) for n in range(8)]
    everyone.set()
    for ticket in tickets:
        assert b.worst(ticket, b.finish(ticket)[0]) == 0.0
    assert (
        sum(1 < width < 8 for width in widths[: widths.index(8)]) < 3
    )  # one by one it is six


def test_a_failure_while_starting_costs_that_request_and_nothing_after_it(
    bench, monkeypatch
):
    b, rng = bench("qwen3"), np.random.default_rng(3)
    past, real = words(rng, 400), s.load_span
    first, _, _ = b.ask(past)

    def broken(cache, span):
        raise RuntimeError("planted")

    monkeypatch.setattr(s, "load_span", broken)
    b.may_try_again = True
    ids, _, ticket = b.ask(past + first + words(rng, 10))
    assert b.worst(ticket, ids) == 0.0
    b.may_try_again = False
    monkeypatch.setattr(s, "load_span", real)
    for _ in range(2):
        ids, _, ticket = b.ask(past + first + words(rng, 10))
        assert b.worst(ticket, ids) == 0.0


def test_a_failure_in_the_model_costs_the_rows_it_touched_and_nothing_after_them(
    bench, monkeypatch
):
    b, rng = bench("qwen3_5"), np.random.default_rng(3)
    past = words(rng, 400)
    for n_failures, fail_at in ((2, 1), (2, 2), (1, 5)):  # the second try fails, too
        left = [fail_at]

        def broken(_rows, left=left, n_failures=n_failures):
            left[0] -= 1
            if -n_failures < left[0] <= 0:
                raise RuntimeError("planted")

        b.model.before_call = broken
        with pytest.raises(AssertionError):
            b.finish(b.submit(past, n=8))
        b.model.before_call = lambda _rows: None
        ids, _, ticket = b.ask(past)
        assert b.worst(ticket, ids) == 0.0
    assert b.engine.state == "ready"


def test_a_failure_while_a_row_leaves_its_group_is_told_to_all_rows_of_the_group(
    bench, monkeypatch
):
    b, rng = bench("qwen3"), np.random.default_rng(3)
    tickets = [b.submit(words(rng, 200), n=4000) for _ in range(3)]
    while b.engine.report["decoding"] < 3 or b.engine.report["groups"] > 1:
        time.sleep(0.01)

    def broken(group, row):
        raise RuntimeError("planted")

    real = s.DecodeBatch.remove
    monkeypatch.setattr(s.DecodeBatch, "remove", broken)
    tickets[0].stop_reason = "cancelled"
    for ticket in tickets:
        while not isinstance(event := ticket.next_event(20), s.ServerError):
            assert isinstance(event, int | s.TokenEvent)
    monkeypatch.setattr(s.DecodeBatch, "remove", real)
    ids, _, ticket = b.ask(words(rng, 200))
    assert b.worst(ticket, ids) == 0.0
