"""CACHE: any history of requests gets the deepest exact prefix, and nobody's bytes are touched.

KV is stood in for by arrays that say which token they belong to, so a wrong slice, an aliased
buffer or a lost tail shows as a wrong number.
"""

import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s

ROOT = b"root"
BLOCK = 16


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def make_cache(*, has_state=False, max_bytes=1 << 30, clock=None, token_bytes=16, **settings):
    config = s.Config(**{"prompt_cache_max_entries_global": 1000, **settings})
    shape = s.KvShape(
        token_bytes, state_bytes=8, has_state=has_state, can_batch=True, can_note=False
    )
    return s.LRUPromptCache(
        config, shape, max_bytes=max_bytes, metrics=s.CacheMetrics(), clock=clock or Clock()
    )


def span_of(tokens, capacity=None):
    """One layer, one head, one dimension: the KV of token t is t (keys) and -t (values)."""
    padded = list(tokens) + [0] * ((capacity or len(tokens)) - len(tokens))
    keys = mx.array(padded, mx.float32).reshape(1, 1, -1, 1)
    values = -keys
    mx.eval(keys, values)
    return s.Span([keys, values], len(tokens))


def tokens_in(span):
    keys, values = (array.reshape(-1)[: span.length].tolist() for array in span.arrays)
    assert [-v for v in values] == keys
    return [int(k) for k in keys]


def state_of(tokens):
    return s.StateSnapshot((tuple(tokens),), 8)


@dataclass
class Running:
    """A row in flight: it holds the KV of its first `filled` tokens."""

    line: s.Line
    tokens: list[int]
    filled: list[int]

    def read_span(self, end):
        assert end <= len(self.filled)
        return span_of(self.filled[:end])


def prompt_of(tokens, root=ROOT):
    return s.Prompt(root, np.asarray(tokens, np.int32), s._block_hashes(tokens, BLOCK, root=root))


def begin(cache, tokens):
    prompt = prompt_of(tokens)
    reuse = cache.find(prompt)
    line, span = cache.acquire(reuse, prompt)
    held = tokens_in(span) if span else []
    assert held == tokens[: reuse.depth], "the buffers hold other tokens than were looked up"
    if reuse.state is not None:
        assert list(reuse.state.leaves[0]) == tokens[: reuse.depth], "a state of another past"
    row = Running(line, list(tokens), list(held))
    line.lender, line.end = row.read_span, len(held)
    return row, reuse


def advance(cache, row, count, checkpoint=False):
    row.filled = row.tokens[: min(len(row.tokens), len(row.filled) + count)]
    row.line.end = len(row.filled)
    if checkpoint and row.filled:
        cache.add_checkpoint(row.line, len(row.filled), snapshot=state_of(row.filled))


def end(cache, row, reply=()):
    tokens = row.filled + list(reply) if len(row.filled) == len(row.tokens) else row.filled
    if not tokens:
        cache.drop(row.line)
        return tokens
    cache.add_checkpoint(row.line, len(tokens), snapshot=state_of(tokens))
    cache.put_back(row.line, prompt_of(tokens), span=span_of(tokens, len(tokens) + 7))
    return tokens


def check(cache, running):
    """Every line at rest holds exactly the KV of its own part of its path."""
    for line in cache.lines:
        path = line.prompt.tokens.tolist()
        assert line.end <= len(path)
        if line.lender is None:
            assert line.span is not None
            assert tokens_in(line.span) == path[line.start : line.end]
        if (parent := line.parent) is not None:
            assert parent in cache.lines and parent.start < line.start <= parent.end
            assert parent.prompt.tokens.tolist()[: line.start] == path[: line.start]
        else:
            assert line.start == 0
        for position, snapshot in line.checkpoints.items():
            assert list(snapshot.leaves[0]) == path[:position]
    for row in running:
        assert row.line in cache.lines or row.line.parent is None


def lcp(a, b):
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("use_index", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_histories_get_the_deepest_prefix_and_never_alias(has_state, use_index, seed):
    rng = random.Random(seed)
    cache = make_cache(has_state=has_state, cache_use_block_index=use_index)
    pasts: list[list[int]] = []
    known: set[tuple[int, ...]] = set()  # positions with a state, as prefixes
    running: list[Running] = []
    depths = 0
    for _ in range(60):
        if running and rng.random() < 0.5:
            row = running.pop(rng.randrange(len(running)))
            advance(cache, row, rng.choice([0, 40, 10_000]), checkpoint=True)
            known.add(tuple(row.filled))
            done = end(cache, row, [rng.randrange(1, 9) for _ in range(rng.randrange(30))])
            known.add(tuple(done))
            pasts.append(done)
        else:
            base = rng.choice(pasts) if pasts and rng.random() < 0.85 else []
            cut = rng.choice([len(base), rng.randrange(len(base) + 1)])
            tokens = base[:cut] + [rng.randrange(1, 9) for _ in range(rng.randrange(1, 400))]
            row, reuse = begin(cache, tokens)
            ready = [r.filled for r in running if r is not row]
            expected = max((min(lcp(p, tokens), len(tokens) - 1) for p in pasts + ready), default=0)
            if has_state:
                expected = max(
                    (len(k) for k in known if len(k) < len(tokens) and tokens[: len(k)] == list(k)),
                    default=0,
                )
            if reuse.promised <= expected:
                assert reuse.depth == expected
            depths += reuse.depth
            advance(cache, row, rng.choice([0, 64, 10_000]), checkpoint=True)
            known.add(tuple(row.filled))
            running.append(row)
        known.discard(())
        check(cache, running)
    assert depths > 0, "nothing was ever reused: this run tested nothing"


def converse(cache, tokens, reply):
    row, reuse = begin(cache, tokens)
    advance(cache, row, 100_000)
    return end(cache, row, reply), reuse


def test_a_growing_conversation_keeps_one_line_and_its_buffers():
    cache = make_cache()
    past, _ = converse(cache, list(range(1, 600)), [7, 7])
    for turn in range(5):
        past, reuse = converse(cache, [*past, *range(1000 + turn * 50, 1040 + turn * 50)], [9, 9])
        assert reuse.layer == "line"
        assert len(cache.lines) == 1


def test_branches_hold_their_prefix_once():
    cache = make_cache()
    prefix = list(range(1, 4001))
    tails = [[5000 + 100 * i + j for j in range(100)] for i in range(8)]
    for tail in tails:
        converse(cache, prefix + tail, [1])
    unique = 8 * (len(prefix) + sum(len(t) + 1 for t in tails))  # keys and values, 4 bytes each
    assert cache.nbytes <= 1.1 * unique
    for tail in tails:  # and every one of them is still whole
        row, reuse = begin(cache, prefix + tail)
        assert reuse.depth == len(prefix) + len(tail) - 1
        advance(cache, row, 100_000)
        end(cache, row, [1])
        check(cache, [])
    assert cache.nbytes <= 1.1 * unique


def test_a_tail_another_conversation_owns_survives_a_divergence_before_it():
    cache = make_cache()
    first, _ = converse(cache, list(range(1, 1001)), [3] * 40)
    converse(cache, [*first[:900], *range(2000, 2050)], [4] * 5)
    _, reuse = begin(cache, [*first, 8, 8])
    assert reuse.depth == len(first)


def test_a_lent_line_is_visible_and_promises_what_it_will_hold():
    cache = make_cache()
    row, _ = begin(cache, list(range(1, 2001)))
    advance(cache, row, 500)
    twin = [*range(1, 1501), 9, 9, 9]
    reuse = cache.find(prompt_of(twin))
    assert (reuse.depth, reuse.promised) == (500, 1500)
    advance(cache, row, 1500)
    other, reuse = begin(cache, twin)
    assert reuse.depth == 1500
    end(cache, row)
    advance(cache, other, 100)
    end(cache, other)
    check(cache, [])


def test_another_root_shares_nothing():
    cache = make_cache()
    tokens = list(range(1, 200))
    converse(cache, tokens, [1])
    assert cache.find(prompt_of(tokens, root=b"tenant")).depth == 0


def test_no_entries_means_no_reuse():
    cache = make_cache(prompt_cache_max_entries_global=0)
    tokens = list(range(1, 200))
    for _ in range(3):
        _, reuse = converse(cache, tokens, [1])
        assert reuse.depth == 0
    assert not cache.lines


def test_eviction_is_by_value_and_keeps_what_branches_need():
    clock = Clock()
    cache = make_cache(max_bytes=8 * 3000, clock=clock)
    prefix = list(range(1, 1001))
    converse(cache, [*prefix, *range(2000, 2300)], [1])
    converse(cache, [*prefix, *range(3000, 3300)], [1])
    for _ in range(4):
        converse(cache, [*prefix, *range(3000, 3300)], [1])  # used often
    clock.now += 900
    converse(cache, list(range(5000, 6200)), [1])
    check(cache, [])
    assert cache.nbytes <= cache.max_bytes
    _, often = begin(cache, [*prefix, *range(3000, 3300), 1, 2])
    assert often.depth >= 1300, "the line that was used most was evicted first"


def make_room(cache, tokens, n_more=0):
    """As a request does before it starts; what it was promised, and whether all fits."""
    reuse = cache.find(prompt_of(tokens))
    n_bytes = 8 * (len(tokens) + n_more)
    return reuse, cache.evict_to_fit(n_bytes, reuse.line, depth=reuse.depth)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_room_for_a_request_is_never_made_of_what_it_goes_on_from(has_state, seed):
    """Extended, branched, cut short; its line old or young, and by itself or among branches."""
    rng, clock = random.Random(seed), Clock()
    cache = make_cache(has_state=has_state, max_bytes=8 * 3000, token_bytes=8, clock=clock)
    pasts, n_evicting, n_reused = [], 0, 0
    for _ in range(120):
        base = rng.choice(pasts[-6:]) if pasts and rng.random() < 0.8 else []
        cut = rng.choice([len(base), rng.randrange(len(base) + 1)])
        tokens = base[:cut] + [rng.randrange(1, 9) for _ in range(rng.randrange(1, 900))]
        tokens = tokens[:2400]
        clock.now += rng.choice([0, 0, 900])
        before = cache.metrics.snapshot()["evicted_for_room"]
        promised, fits = make_room(cache, tokens)
        n_evicting += cache.metrics.snapshot()["evicted_for_room"] > before
        row, reuse = begin(cache, tokens)
        if fits:
            assert reuse.depth >= promised.depth
            n_reused += reuse.depth > 0
        while len(row.filled) < len(tokens):
            advance(cache, row, rng.choice([100, 400, 10_000]), checkpoint=True)
        pasts.append(end(cache, row, [9]))
        check(cache, [])
    assert n_evicting > 10 and n_reused > 10


def test_a_long_line_gives_up_its_end_and_not_the_beginning_that_is_asked_for():
    clock = Clock()
    cache = make_cache(max_bytes=8 * 3000, token_bytes=8, clock=clock)
    converse(cache, list(range(1, 1801)), [1])
    young, _ = converse(cache, list(range(3000, 4000)), [1])
    for line in cache.lines:
        line.last_used -= 900 * (line.prompt.tokens[0] == 1)
    promised, fits = make_room(cache, [*range(1, 701), *range(5000, 5200)])
    assert fits and promised.depth == 700
    assert begin(cache, [*range(1, 701), *range(5000, 5200)])[1].depth == 700
    assert cache.find(prompt_of([*young, 1])).depth == len(young)


def test_a_new_conversation_among_many_old_ones_is_kept_from_turn_to_turn():
    """No entry is free: not the conversation that is going on must make room for the next one."""
    clock = Clock()
    cache = make_cache(prompt_cache_max_entries_global=24, clock=clock)
    for i in range(24):
        converse(cache, [10_000 * i + j for j in range(1, 3000)], [1])
    for line in cache.lines:
        line.uses = 10
    clock.now += 600
    past: list[int] = []
    for turn in range(4):
        new = range(500_000 + 300 * turn, 500_300 + 300 * turn)
        n_known, (past, reuse) = len(past), converse(cache, [*past, *new], [7] * 20)
        assert reuse.depth == n_known
        assert len(cache.lines) <= 24


@pytest.mark.parametrize("head", [0, 2000])
def test_a_running_branch_takes_the_checkpoints_of_the_line_that_is_evicted(head):
    """It has that KV in its own buffers, and brings it back: others still begin behind it."""
    cache = make_cache(has_state=True)
    past = list(range(9000))
    row, _ = begin(cache, past)
    row.line.head = head
    for count in (2000, 2000, 5000):
        advance(cache, row, count, checkpoint=True)
    end(cache, row)
    branch, reuse = begin(cache, [*past[:4000], *range(20_000, 20_500)])
    assert reuse.depth == 4000
    advance(cache, branch, 400)
    cache.max_bytes = 10_000
    cache.evict_to_fit(5000)
    cache.max_bytes = 1 << 30
    advance(cache, branch, 100)
    end(cache, branch)
    for depth in (2000, 4000):
        assert cache.find(prompt_of([*past[:depth], *range(30_000, 30_100)])).depth == depth


def test_one_entry_too_many_costs_one_line_and_no_other_its_end():
    cache = make_cache(prompt_cache_max_entries_global=3)
    head = list(range(1, 1001))
    main, _ = converse(cache, [*head, *range(5000, 7000)], [1])
    converse(cache, [*head, *range(9000, 12_000)], [1])
    for line in cache.lines:
        line.last_used -= 200 * (line.parent is None)
    for start in (20_000, 30_000):
        converse(cache, list(range(start, start + 3600)), [1])
    assert len(cache.lines) == 3
    assert cache.find(prompt_of([*main, 1])).depth == len(main)


@pytest.mark.parametrize("max_bytes", [150_000, 1 << 30])
def test_checkpoints_give_way_before_any_kv_does_and_only_where_room_is_short(max_bytes):
    """Five agents in turn, a checkpoint for each message: half the budget is enough for all KV."""
    cache = make_cache(has_state=True, max_bytes=max_bytes, token_bytes=8)
    pasts = [[10_000 * i + j for j in range(300)] for i in range(5)]
    for turn, i in product(range(12), range(5)):
        tokens = pasts[i] + [10_000 * i + 1000 + 100 * turn + j for j in range(60)]
        make_room(cache, tokens)
        row, reuse = begin(cache, tokens)
        assert reuse.depth == (len(pasts[i]) if turn else 0)
        for at in range(reuse.depth + 15, len(tokens) + 1, 15):
            advance(cache, row, at - len(row.filled))
            snapshot = s.StateSnapshot((tuple(tokens[:at]),), 2000)
            cache.add_checkpoint(row.line, at, snapshot=snapshot)
        cache.put_back(row.line, prompt_of(tokens), span=span_of(tokens))
        pasts[i] = tokens
        check(cache, [])
    assert cache.metrics.snapshot()["evicted_for_room"] == 0
    held = [len(line.checkpoints) for line in cache.lines]
    assert len(held) == 5
    assert max(held) <= 12 if max_bytes == 150_000 else min(held) > 50


def test_thinning_leaves_the_end_of_the_head_that_sessions_share():
    """It is close to the first message, and not the first: the lattice begins inside the head."""
    cache = make_cache(has_state=True, max_bytes=5000)
    head = list(range(1, 141))
    row, _ = begin(cache, [*head, *range(1000, 1400)])
    row.line.head = len(head)
    for at in (20, 130, 140, 145, *range(200, 540, 10)):
        advance(cache, row, at - len(row.filled), checkpoint=True)
    advance(cache, row, 1000)
    end(cache, row, [1])
    assert cache.evict_to_fit(480)
    (line,) = cache.lines
    assert len(line.checkpoints) < 30
    assert begin(cache, [*head, *range(2000, 2100)])[1].depth == len(head)


def test_requests_cancelled_before_they_fed_anything_push_nothing_out():
    cache = make_cache(prompt_cache_max_entries_global=8)
    rows = [begin(cache, list(range(300)) + [1000 + i] * 700) for i in range(3)]
    pasts = []
    for row, _ in rows:
        advance(cache, row, 1000)
        pasts.append(end(cache, row))
    for i in range(30):
        row, reuse = begin(cache, list(range(300)) + [5000 + i] * 20)
        assert reuse.depth == 300
        end(cache, row)
    assert len(cache.lines) <= 8
    assert all(cache.find(prompt_of([*past, 1])).depth == len(past) for past in pasts)


def test_nothing_fits_what_cannot_fit():
    cache = make_cache(max_bytes=1000)
    assert not cache.evict_to_fit(2000)
    assert cache.evict_to_fit(500)


def test_idle_lines_go_after_their_ttl_and_not_before():
    clock = Clock()
    cache = make_cache(clock=clock, prompt_cache_ttl_seconds=100)
    converse(cache, list(range(1, 400)), [1])
    cache.sweep()
    assert cache.lines
    clock.now += 200
    cache.sweep()
    assert not cache.lines and cache.nbytes == 0


def test_checkpoints_are_thinned_but_never_the_first_and_the_newest():
    cache = make_cache(has_state=True, max_bytes=800)
    row, _ = begin(cache, list(range(1, 40)))
    for _ in range(39):
        advance(cache, row, 1, checkpoint=True)
    end(cache, row, [1])
    (line,) = cache.lines
    kept = sorted(line.checkpoints)
    assert sum(c.nbytes for c in line.checkpoints.values()) <= 200 < 8 * 40
    assert kept[0] == 1 and kept[-1] == 40


def test_a_failed_row_takes_its_branches_at_rest_with_it():
    cache = make_cache()
    prefix = list(range(1, 1001))
    row, _ = begin(cache, [*prefix, 5, 5, 5])
    advance(cache, row, 100_000)
    converse(cache, [*prefix, *range(2000, 2100)], [1])
    cache.drop(row.line)
    assert not cache.lines
    _, reuse = begin(cache, [*prefix, 6])
    assert reuse.depth == 0


@pytest.fixture
def copies_left(monkeypatch):
    """A list with how many copies of KV are made until one fails; none does from 0 on down."""
    left, real = [0], s.Span.cut

    def cut(span, start, end):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return real(span, start, end)

    monkeypatch.setattr(s.Span, "cut", cut)
    return left


def continuation(rng, pasts):
    """Some tokens behind a part of a past, or behind none."""
    base = rng.choice(pasts) if pasts and rng.random() < 0.85 else []
    past = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])]
    return past + [rng.randrange(1, 9) for _ in range(rng.randrange(1, 400))]


@pytest.mark.parametrize("seed", range(20))
def test_failures_and_evictions_at_any_moment_leave_whole_lines(seed, copies_left, monkeypatch):
    monkeypatch.setattr(s, "SHARE_MIN_TOKENS", 32)  # many branches
    rng = random.Random(seed)
    settings = {"max_bytes": rng.choice([3000, 12_000, 1 << 30]), "prompt_cache_ttl_seconds": 200}
    settings["prompt_cache_max_entries_global"] = rng.choice([3, 8, 1000])
    cache = make_cache(has_state=seed % 2 == 0, **settings)
    pasts, running = [], []
    for _ in range(120):
        match rng.choice(["begin", "begin", "fail", "end", "end", "drop", "sweep", "evict"]):
            case "begin":
                running.append(begin(cache, continuation(rng, pasts))[0])
                advance(cache, running[-1], rng.choice([0, 64, 10_000]), checkpoint=True)
            case "fail":
                copies_left[0] = rng.choice([1, 2])
                with suppress(MemoryError):
                    cache.drop(begin(cache, continuation(rng, pasts))[0].line)
                copies_left[0] = 0
                cache.mend()
            case "end" if running:
                row = running.pop(rng.randrange(len(running)))
                advance(cache, row, rng.choice([0, 40, 10_000]), checkpoint=True)
                pasts.append(end(cache, row, [rng.randrange(1, 9)] * rng.randrange(30)))
            case "drop" if running:
                cache.drop(running.pop(rng.randrange(len(running))).line)
            case "sweep":
                cache.sweep()
            case "evict":
                cache.evict_to_fit(rng.choice([500, 20_000]))
        check(cache, running)


def test_a_session_is_dropped_whole_whichever_of_its_branches_went_on_last():
    cache, shared = make_cache(), list(range(600))
    tips = [shared + list(range(1000 * n, 1000 * n + 400)) for n in (1, 2, 3)]
    for tip in [*tips, tips[1] + [7] * 50]:
        row, _ = begin(cache, tip)
        row.line.owner = ("", "x")
        advance(cache, row, len(tip))
        end(cache, row)
    assert len(cache.lines) == 3
    cache.release("", "x")
    assert cache.lines == []
