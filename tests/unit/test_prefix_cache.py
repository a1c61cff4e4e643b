"""CACHE: any history of requests gets the deepest exact prefix, and nobody's bytes are touched.

KV is stood in for by arrays that say which token they belong to, so a wrong slice, an aliased
buffer or a lost tail shows as a wrong number.
"""

import random
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from nights import at_night, by_day

ROOT = b"root"
BLOCK = 16


class Clock:
    """It goes on by so much whenever it is looked at."""

    def __init__(self, step=1.0):
        self.now = 0.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


def make_cache(
    *, has_state=False, max_bytes=1 << 30, clock=None, token_bytes=16, **settings
):
    config = s.Config(**{"prompt_cache_max_entries_global": 1000, **settings})
    shape = s.KVSpec(
        token_bytes,
        packed_token_bytes=token_bytes,
        state_bytes=8,
        has_state=has_state,
        can_batch=True,
        can_tap=False,
    )

    return s.PrefixCache(
        config,
        shape,
        max_bytes=max_bytes,
        metrics=s.CacheMetrics(),
        clock=clock or Clock(),
    )


def span_of(tokens, capacity=None):
    """One layer, one head, one dimension: the KV of token t is t (keys) and -t (values)."""
    n_padding = (capacity or len(tokens)) - len(tokens)
    padded = mx.array([*tokens, *[0] * n_padding], mx.float32)
    keys = padded.reshape(1, 1, -1, 1)
    values = -keys
    mx.eval(keys, values)
    return s.KVSpan([keys, values], len(tokens))


def tokens_in(span):
    keys, values = (array.reshape(-1)[: span.length].tolist() for array in span.arrays)
    assert [-v for v in values] == keys
    return [int(k) for k in keys]


def state_of(tokens):
    return s.StateCheckpoint((tuple(tokens),), 8)


@dataclass
class Running:
    """A request on the model: it holds the KV of its first `filled` tokens."""

    tokens: list[int]
    filled: list[int] = field(default_factory=list)
    line: s.CacheEntry | None = None
    source: s.CacheEntry | None = None

    def load_kv(self, span, state):
        self.filled = tokens_in(span)
        n_cached = len(self.filled)
        assert self.filled == self.tokens[:n_cached], "KV of other tokens"
        if state is not None:
            states = list(state.leaves[0])
            assert states == self.tokens[:n_cached], "a state of another past"

    def read_span(self, end):
        assert end <= len(self.filled)
        return span_of(self.filled[:end])


def prompt_of(tokens, root=ROOT):
    hashes = s.block_hashes(tokens, BLOCK, root=root)
    return s.TokenKey(root, np.asarray(tokens, np.int32), hashes)


def cached_tokens(cache, tokens):
    """How many of a prompt a request would find, if it came now."""
    return cache.find(prompt_of(tokens)).cached_tokens


def begin(cache, tokens, *, head_end=0, session="", is_background=False):
    prompt = prompt_of(tokens)
    reuse = cache.find(prompt)
    row = Running(list(tokens))
    owner = s.RequestOwner("", session)
    row.source = reuse.kv_owner
    row.line, span = cache.start(
        reuse,
        prompt,
        read_span=row.read_span,
        owner=owner,
        head_end=head_end,
        is_background=is_background,
    )
    if span is not None:
        row.load_kv(span, reuse.state)
    assert len(row.filled) == reuse.cached_tokens == row.line.end
    assert (reuse.state is not None) == (cache._spec.has_state and row.filled != [])

    return row, reuse


def advance(cache, row, count, checkpoint=False):
    row.filled = row.tokens[: min(len(row.tokens), len(row.filled) + count)]
    cache.advance(row.line, len(row.filled))
    if checkpoint and row.filled:
        cache.add_checkpoint(row.line, len(row.filled), state_of(row.filled))


def end(cache, row, reply=()):
    tokens = row.filled
    if len(row.filled) == len(row.tokens):
        tokens = [*row.filled, *reply]
    if not tokens:
        cache.drop(row.line)
        return tokens

    cache.add_checkpoint(row.line, len(tokens), state_of(tokens))
    cache.put_back(row.line, prompt_of(tokens), span_of(tokens, len(tokens) + 7))
    return tokens


def check(cache, running):
    """Every line at rest holds exactly the KV of its own part of its path."""
    for line in cache.entries:
        path = line.key.tokens.tolist()
        assert line.end <= len(path)
        if not line.is_running:
            assert line.span is not None
            assert tokens_in(line.span) == path[line.start : line.end]

        parent = line.parent
        if parent is None:
            assert line.start == 0
        else:
            assert parent in cache.entries
            assert parent.start < line.start <= parent.end
            assert parent.key.tokens.tolist()[: line.start] == path[: line.start]

        for position, snapshot in line.checkpoints.items():
            assert list(snapshot.leaves[0]) == path[:position]

    for row in running:
        assert row.line in cache.entries or row.line.parent is None


def lcp(a, b):
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def random_tokens(rng, n_tokens):
    return [rng.randrange(1, 9) for _ in range(n_tokens)]


def continuation(rng, pasts, *, max_tokens=400):
    """Some tokens after a part of a past, or after none."""
    base = rng.choice(pasts) if pasts and rng.random() < 0.85 else []
    n_common = rng.choice([len(base), rng.randrange(len(base) + 1)])
    return base[:n_common] + random_tokens(rng, rng.randrange(1, max_tokens))


class History:
    """Requests that begin and end at random, and all that a later one may find."""

    def __init__(self, cache, rng):
        self.cache = cache
        self.rng = rng
        self.pasts: list[list[int]] = []
        self.running: list[Running] = []
        self.with_state: set[tuple[int, ...]] = set()  # prefixes

    def advance(self, row, counts):
        advance(self.cache, row, self.rng.choice(counts), checkpoint=True)
        self.with_state.add(tuple(row.filled))

    def begin_one(self):
        """Returns how many tokens were found: all that could be."""
        tokens = continuation(self.rng, self.pasts)
        expected = self.longest_match(tokens)
        row, reuse = begin(self.cache, tokens)
        if reuse.pending_tokens <= expected:
            assert reuse.cached_tokens == expected

        self.advance(row, [0, 64, 10_000])
        self.running.append(row)
        return reuse.cached_tokens

    def end_one(self):
        row = self.running.pop(self.rng.randrange(len(self.running)))
        self.advance(row, [0, 40, 10_000])
        reply = random_tokens(self.rng, self.rng.randrange(30))
        past = end(self.cache, row, reply)
        self.with_state.add(tuple(past))
        self.pasts.append(past)

    def longest_match(self, tokens):
        """Of what was read, and the last token of a prompt is read in any case."""
        n_max = len(tokens) - 1
        if self.cache._spec.has_state:
            lengths = [
                len(prefix)
                for prefix in self.with_state
                if len(prefix) <= n_max and lcp(prefix, tokens) == len(prefix)
            ]
            return max(lengths, default=0)
        read = self.pasts + [row.filled for row in self.running]

        return max((min(lcp(past, tokens), n_max) for past in read), default=0)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("use_index", [True, False])
@pytest.mark.parametrize("seed", by_day(2, of=12))
def test_random_histories_get_the_deepest_prefix_and_never_alias(
    has_state, use_index, seed
):
    rng = random.Random(seed)
    cache = make_cache(has_state=has_state, cache_use_block_index=use_index)
    history = History(cache, rng)
    n_reused = 0

    for _ in range(60):
        if history.running and rng.random() < 0.5:
            history.end_one()
        else:
            n_reused += history.begin_one()
        check(cache, history.running)

    assert n_reused > 0, "nothing was ever reused: this run tested nothing"


def converse(cache, tokens, reply):
    row, reuse = begin(cache, tokens)
    advance(cache, row, 100_000)
    return end(cache, row, reply), reuse


def test_branches_hold_their_prefix_once():
    cache = make_cache()
    prefix = list(range(1, 4001))
    tails = [[5000 + 100 * i + j for j in range(100)] for i in range(8)]
    for tail in tails:
        converse(cache, prefix + tail, [1])

    n_unique_tokens = len(prefix) + sum(len(tail) + 1 for tail in tails)
    n_unique_bytes = 8 * n_unique_tokens  # keys and values, 4 bytes each
    assert cache.nbytes <= 1.1 * n_unique_bytes

    for tail in tails:  # and every one of them is still whole
        row, reuse = begin(cache, prefix + tail)
        assert reuse.cached_tokens == len(prefix) + len(tail) - 1
        advance(cache, row, 100_000)
        end(cache, row, [1])
        check(cache, [])
    assert cache.nbytes <= 1.1 * n_unique_bytes


def answer(cache, prompt, reply, **how):
    """A request from its beginning to its end; a state is kept shortly before the reply."""
    row, _ = begin(cache, prompt, **how)
    if not row.filled:
        advance(cache, row, len(prompt) - 5, checkpoint=True)
    advance(cache, row, len(prompt))
    end(cache, row, reply)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize(
    ("n_prompt", "n_reply", "n_entries"),
    [(400, 8, 1), (30, 60, 1), (400, 600, 2)],  # a branch, and the root it came from
)
def test_a_prompt_that_comes_again_leaves_no_entry_each_time(
    has_state, n_prompt, n_reply, n_entries
):
    cache = make_cache(has_state=has_state)
    prompt = list(range(n_prompt))
    reply = list(range(5000, 5000 + n_reply))

    for n in range(5):
        answer(cache, prompt, reply, is_background=n > 2)
        check(cache, [])

    assert len(cache.entries) == n_entries
    assert cached_tokens(cache, [*prompt, *reply, 1]) == n_prompt + n_reply
    assert max(entry.n_uses for entry in cache.entries) == 4
    assert not all(entry.is_background for entry in cache.entries)


def test_a_shorter_reply_that_a_longer_one_begins_with_is_gone_on_with_all_the_same():
    cache = make_cache(has_state=True)
    for n_reply in (20, 50):
        answer(cache, list(range(400)), list(range(5000, 5000 + n_reply)))

    assert len(cache.entries) == 1
    assert cached_tokens(cache, [*range(400), *range(5000, 5020), 1]) == 420


def test_another_root_shares_nothing():
    cache = make_cache()
    tokens = list(range(1, 200))
    converse(cache, tokens, [1])
    assert cache.find(prompt_of(tokens, root=b"tenant")).cached_tokens == 0


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
    _, reuse = begin(cache, [*prefix, *range(3000, 3300), 1, 2])
    assert reuse.cached_tokens >= 1300, "the line that was used most was evicted first"


def test_end_of_a_shared_conversation_counts_by_its_own_bytes():
    """Of its 2,000 tokens, branches need 1,800: 200 go if it is evicted, not 2,000."""
    clock = Clock(step=0.0)
    cache = make_cache(max_bytes=8 * 4000, token_bytes=8, clock=clock)
    old, _ = converse(cache, list(range(5000, 6000)), [1])
    clock.now += 900
    prefix = list(range(1, 1801))
    shared = [*prefix, *range(2000, 2200)]
    converse(cache, [*prefix, *range(3000, 3300)], [1])
    converse(cache, shared, [1])
    clock.now += 900

    cache.evict_to_fit(cache.max_bytes - cache.nbytes + 8)

    assert cached_tokens(cache, [*shared, 1, 2]) == 2001
    assert cached_tokens(cache, [*old, 2]) < len(old)


def make_room(cache, tokens, n_more=0):
    """As a request does before it starts; what it was promised, and whether all fits."""
    reuse = cache.find(prompt_of(tokens))
    n_bytes = 8 * (len(tokens) + n_more)
    return reuse, cache.evict_to_fit(n_bytes, keep=reuse)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("seed", by_day(1, of=12))
def test_room_for_a_request_is_never_made_of_what_it_goes_on_from(has_state, seed):
    """Extended, branched, cut short; its line old or young, and by itself or among branches."""
    rng = random.Random(seed)
    clock = Clock()
    cache = make_cache(
        has_state=has_state, max_bytes=8 * 3000, token_bytes=8, clock=clock
    )
    pasts = []
    n_evicting = 0
    n_reused = 0

    for _ in range(120):
        tokens = continuation(rng, pasts[-6:], max_tokens=900)[:2400]
        clock.now += rng.choice([0, 0, 900])
        n_evicted_before = cache.metrics.snapshot()["evicted_for_room"]
        promised, fits = make_room(cache, tokens)
        n_evicted = cache.metrics.snapshot()["evicted_for_room"]
        n_evicting += n_evicted > n_evicted_before

        row, reuse = begin(cache, tokens)
        if fits:
            assert reuse.cached_tokens >= promised.cached_tokens
            n_reused += reuse.cached_tokens > 0
        while len(row.filled) < len(tokens):
            advance(cache, row, rng.choice([100, 400, 10_000]), checkpoint=True)
        pasts.append(end(cache, row, [9]))
        check(cache, [])

    assert n_evicting > 10
    assert n_reused > 10


def test_a_new_conversation_among_many_old_ones_is_kept_from_turn_to_turn():
    """No entry is free: not the conversation that is going on must make room for the next one."""
    clock = Clock()
    cache = make_cache(prompt_cache_max_entries_global=24, clock=clock)
    for i in range(24):
        converse(cache, [10_000 * i + j for j in range(1, 3000)], [1])
    for line in cache.entries:
        line.n_uses = 10
    clock.now += 600
    past: list[int] = []

    for turn in range(4):
        new = range(500_000 + 300 * turn, 500_300 + 300 * turn)
        n_known = len(past)
        past, reuse = converse(cache, [*past, *new], [7] * 20)
        assert reuse.cached_tokens == n_known
        assert len(cache.entries) <= 24


def branched(*, head_end):
    """A line of 9,000 tokens with states that rests, and a running branch at 4,000."""
    cache = make_cache(has_state=True)
    past = list(range(9000))
    row, _ = begin(cache, past, head_end=head_end)
    for count in (2000, 2000, 5000):
        advance(cache, row, count, checkpoint=True)
    end(cache, row)

    branch, reuse = begin(cache, [*past[:4000], *range(20_000, 20_500)])
    assert reuse.cached_tokens == 4000
    advance(cache, branch, 400)
    return cache, row, branch


@pytest.mark.parametrize("head", [0, 2000])
def test_a_running_branch_takes_the_checkpoints_of_the_line_that_is_evicted(head):
    """It has that KV in its own buffers, and brings it back: others still begin behind it."""
    cache, _, branch = branched(head_end=head)
    cache.max_bytes = 10_000
    cache.evict_to_fit(5000)
    cache.max_bytes = 1 << 30
    advance(cache, branch, 100)
    end(cache, branch)
    for depth in (2000, 4000):
        tokens = [*range(depth), *range(30_000, 30_100)]
        assert cached_tokens(cache, tokens) == depth


@pytest.mark.parametrize("max_bytes", [150_000, 1 << 30])
def test_checkpoints_give_way_before_any_kv_does_and_only_where_room_is_short(
    max_bytes,
):
    """Five agents in turn, a checkpoint for each message: half the budget is enough for all KV."""
    cache = make_cache(has_state=True, max_bytes=max_bytes, token_bytes=8)
    pasts = [[10_000 * i + j for j in range(300)] for i in range(5)]
    for turn, i in product(range(12), range(5)):
        start = 10_000 * i + 1000 + 100 * turn
        tokens = [*pasts[i], *range(start, start + 60)]
        make_room(cache, tokens)
        row, reuse = begin(cache, tokens)
        assert reuse.cached_tokens == (len(pasts[i]) if turn else 0)

        for position in range(reuse.cached_tokens + 15, len(tokens) + 1, 15):
            advance(cache, row, position - len(row.filled))
            snapshot = s.StateCheckpoint((tuple(tokens[:position]),), 2000)
            cache.add_checkpoint(row.line, position, snapshot)
        cache.put_back(row.line, prompt_of(tokens), span_of(tokens))
        pasts[i] = tokens
        check(cache, [])

    assert cache.metrics.snapshot()["evicted_for_room"] == 0
    n_checkpoints = [len(line.checkpoints) for line in cache.entries]
    assert len(n_checkpoints) == 5
    if max_bytes == 150_000:
        assert max(n_checkpoints) <= 12
    else:
        assert min(n_checkpoints) > 50


def test_thinning_leaves_the_end_of_the_head_that_sessions_share():
    """It is close to the first message, and not the first: the lattice begins inside the head."""
    cache = make_cache(has_state=True, max_bytes=5000)
    head = list(range(1, 141))
    row, _ = begin(cache, [*head, *range(1000, 1400)], head_end=len(head))
    for position in (20, 130, 140, 145, *range(200, 540, 10)):
        advance(cache, row, position - len(row.filled), checkpoint=True)
    advance(cache, row, 1000)
    end(cache, row, [1])

    assert cache.evict_to_fit(480)

    (line,) = cache.entries
    assert len(line.checkpoints) < 30
    _, reuse = begin(cache, [*head, *range(2000, 2100)])
    assert reuse.cached_tokens == len(head)


def test_idle_lines_go_after_their_ttl_and_not_before():
    clock = Clock()
    cache = make_cache(clock=clock, prompt_cache_ttl_seconds=100)
    converse(cache, list(range(1, 400)), [1])
    cache.evict_idle()
    assert cache.entries

    clock.now += 200
    cache.evict_idle()
    assert not cache.entries
    assert cache.nbytes == 0


def test_checkpoints_are_thinned_but_never_the_first_and_the_newest():
    cache = make_cache(has_state=True, max_bytes=800)
    row, _ = begin(cache, list(range(1, 40)))
    for _ in range(39):
        advance(cache, row, 1, checkpoint=True)
    end(cache, row, [1])

    (line,) = cache.entries
    n_bytes = sum(checkpoint.nbytes for checkpoint in line.checkpoints.values())
    assert n_bytes <= 200 < 8 * 40
    assert min(line.checkpoints) == 1
    assert max(line.checkpoints) == 40


def test_the_source_of_a_failed_request_goes_though_it_was_split_meanwhile():
    cache = make_cache()
    rng = random.Random(5)
    past = random_tokens(rng, 2000)
    row, _ = begin(cache, past)
    advance(cache, row, 2000)
    failed, _ = begin(cache, [*past[:1500], *random_tokens(rng, 20)])  # copied: it runs
    end(cache, row)
    other, _ = begin(cache, [*past[:1200], *random_tokens(rng, 20)])  # splits it
    advance(cache, other, 5000)
    end(cache, other)
    assert failed.line.parent.start == 1200

    cache.drop(failed.line)
    cache.drop(failed.source)

    assert cached_tokens(cache, past) == 0
    check(cache, [])


@pytest.fixture
def copies_left(monkeypatch):
    """A list with how many copies of KV are made until one fails; none does from 0 on down."""
    n_left = [0]
    copy_of_part = s.KVSpan.cut

    def cut(span, start, end):
        n_left[0] -= 1
        if n_left[0] == 0:
            raise MemoryError
        return copy_of_part(span, start, end)

    monkeypatch.setattr(s.KVSpan, "cut", cut)
    return n_left


@pytest.mark.parametrize("seed", by_day(10, of=20))
def test_failures_and_evictions_at_any_moment_leave_whole_lines(
    seed, copies_left, monkeypatch
):
    monkeypatch.setattr(s, "MIN_PREFIX_TOKENS", 32)  # many branches
    rng = random.Random(seed)
    cache = make_cache(
        has_state=seed % 2 == 0,
        max_bytes=rng.choice([3000, 12_000, 1 << 30]),
        prompt_cache_ttl_seconds=200,
        prompt_cache_max_entries_global=rng.choice([3, 8, 1000]),
    )
    steps = ["begin", "begin", "fail", "end", "end", "drop", "sweep", "evict"]
    pasts = []
    running = []

    for _ in range(120):
        match rng.choice(steps):
            case "begin":
                row, _ = begin(cache, continuation(rng, pasts))
                advance(cache, row, rng.choice([0, 64, 10_000]), checkpoint=True)
                running.append(row)
            case "fail":
                copies_left[0] = rng.choice([1, 2])
                with suppress(MemoryError):
                    row, _ = begin(cache, continuation(rng, pasts))
                    cache.drop(row.line)
                copies_left[0] = 0
            case "end" if running:
                row = running.pop(rng.randrange(len(running)))
                advance(cache, row, rng.choice([0, 40, 10_000]), checkpoint=True)
                reply = [rng.randrange(1, 9)] * rng.randrange(30)
                copies_left[0] = rng.choice([0, 0, 1])
                try:
                    pasts.append(end(cache, row, reply))
                except MemoryError:  # of a branch without memory for its tail
                    assert row.line not in cache.entries
                    cache.drop(row.line)  # as whoever runs the request does
                copies_left[0] = 0
            case "drop" if running:
                cache.drop(running.pop(rng.randrange(len(running))).line)
            case "sweep":
                cache.evict_idle()
            case "evict":
                cache.evict_to_fit(rng.choice([500, 20_000]))
        check(cache, running)


def test_a_session_is_dropped_whole_whichever_of_its_branches_went_on_last():
    cache = make_cache()
    shared = list(range(600))
    tips = [shared + list(range(1000 * n, 1000 * n + 400)) for n in (1, 2, 3)]
    for tip in [*tips, tips[1] + [7] * 50]:
        row, _ = begin(cache, tip, session="x")
        advance(cache, row, len(tip))
        end(cache, row)
    assert len(cache.entries) == 3

    cache.evict_session("", "x")
    assert cache.entries == []


def test_a_request_that_has_read_nothing_pushes_out_no_other_entry():
    """The newest entry is spared when one is too many, but not an empty one (L-78)."""
    cache = make_cache(prompt_cache_max_entries_global=2)
    first = list(range(1000))
    second = list(range(1000, 2000))
    for tokens in (first, second):
        row, _ = begin(cache, tokens)
        advance(cache, row, len(tokens))
        end(cache, row)
    row, reuse = begin(cache, [*first[:400], *range(2000, 2100)])
    assert reuse.cached_tokens == 400 == row.line.start

    end(cache, row)  # it was cancelled at once

    assert len(cache.entries) == 2
    for tokens in (first, second):
        assert cached_tokens(cache, [*tokens, 1]) == 1000


# -- who goes when memory is short, and who does not while it is free ------------------------------


class Sessions:
    """Conversations that each send one more message when it is their turn.

    Their cache has room for `n_fitting` of them with `n_tokens` each, of 8 bytes.
    """

    def __init__(self, n_fitting, *, n_tokens=700, has_state=False):
        self.clock = Clock(step=0.0)
        self._cache = make_cache(
            has_state=has_state,
            max_bytes=8 * n_fitting * n_tokens,
            token_bytes=8,
            clock=self.clock,
        )
        self._pasts = {}

    def take_turn(self, name, *, seconds):
        """After so many seconds; returns how much of its past was found, 0 to 1."""
        self.clock.now += seconds
        first = [100_000 * (name + 1) + j for j in range(600)]
        past = self._pasts.get(name, first)
        tokens = [*past, 15_000_000 + len(past)]

        make_room(self._cache, tokens)
        row, reuse = begin(self._cache, tokens, session=str(name))
        advance(self._cache, row, len(tokens), checkpoint=True)
        self._pasts[name] = end(self._cache, row, [5])
        check(self._cache, [])
        return reuse.cached_tokens / len(past)


@pytest.mark.covering(1)
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("seconds", [2, 600, at_night(60)])
@pytest.mark.parametrize("jitter", [0.0, 0.9])
def test_of_twice_as_many_agents_in_turn_as_fit_nearly_half_find_their_past(
    has_state, seconds, jitter
):
    rng = random.Random(1)
    # A state of 8 bytes counts, too; a little room for what is read meanwhile.
    sessions = Sessions(8, has_state=has_state)
    found = []

    for _round in range(9):
        for name in range(16):
            pause = seconds * (1 + jitter * rng.uniform(-1, 1))
            found.append(sessions.take_turn(name, seconds=pause))

    steady = found[3 * 16 :]
    assert sum(steady) / len(steady) >= 0.44


def test_who_works_keeps_its_past_while_others_take_turns():
    """Every few seconds, among twelve that return every two minutes; six fit."""
    sessions = Sessions(6)
    found = []

    for turn in range(100):
        found.append(sessions.take_turn(99, seconds=5))
        sessions.take_turn(turn % 12, seconds=5)

    assert min(found[1:]) == 1.0


def test_who_has_left_gives_way_to_those_who_return():
    """Four conversations that paused for a minute each time, and are over now."""
    sessions = Sessions(5)
    for _ in range(4):
        for name in range(4):
            sessions.take_turn(name, seconds=15)

    sessions.clock.now += 3600
    found = []
    for _ in range(4):
        found += [sessions.take_turn(name, seconds=15) for name in range(10, 14)]

    assert found[4:] == [1.0] * 12


def test_nothing_is_evicted_while_memory_is_free():
    """By default no count does it, nor a clock: five hundred, and a week later."""
    clock = Clock(step=0.0)
    cache = s.PrefixCache(
        s.Config(),
        s.KVSpec(16, 16, state_bytes=0, has_state=False, can_batch=True, can_tap=False),
        max_bytes=1 << 40,
        metrics=s.CacheMetrics(),
        clock=clock,
    )
    pasts = []
    for n in range(500):
        past, _ = converse(cache, list(range(1000 * n, 1000 * n + 40)), [1])
        pasts.append(past)

    clock.now += 7 * 24 * 3600
    cache.evict_idle()

    for past in pasts:
        assert cached_tokens(cache, [*past, 1]) == len(past)


# -- counters --------------------------------------------------------------------------------------


def test_no_eviction_cuts_inside_an_image():
    """Wherever it falls; so no lookup has to retreat, and the counter stays where it is."""
    text = np.arange(700, dtype=np.int32)
    image = s.inject_image_markers(text, slice(100, 600), digest="ab" * 32)

    for lacking in range(8, 8 * 600, 61):
        cache = make_cache(token_bytes=8)
        past, _ = converse(cache, [*range(5000, 5300), *image.tolist()], [1])
        assert cache.evict_to_fit(cache.max_bytes - cache.nbytes + lacking)
        _, found = begin(cache, [*past, 2])
        assert not s.is_inside_image(np.array(past, np.int32), found.cached_tokens)
        assert found.cached_tokens >= 300 or lacking > 8 * 400
        assert cache.metrics.snapshot()["vlm_retreat"] == 0


def test_a_tail_that_is_cut_off_stays_as_old_as_it_was():
    """A request that diverges inside an entry uses its beginning, and not its tail."""
    clock = Clock(step=0.0)
    cache = make_cache(clock=clock)
    past, _ = converse(cache, list(range(1, 1001)), [1])
    clock.now += 900

    row, reuse = begin(cache, [*past[:800], *range(2000, 2020)])

    assert reuse.cached_tokens == 800
    (tail,) = (entry for entry in cache.entries if entry is not row.line)
    assert (tail.start, tail.end) == (800, len(past))
    assert (tail.last_used, tail.n_uses) == (0.0, 0)
    assert (row.line.last_used, row.line.n_uses) == (900.0, 1)


@pytest.mark.parametrize(
    ("checkpoint", "n_missed"), [(None, 1), (20, 1), (500, 1), (900, 0), (1000, 0)]
)
def test_a_deep_prefix_that_falls_back_to_a_shallow_checkpoint_is_a_miss(
    checkpoint, n_missed
):
    """1,000 tokens are the same: to read 256 of them again, or more, is counted."""
    cache = make_cache(has_state=True)
    row, _ = begin(cache, list(range(2000)))
    if checkpoint:
        advance(cache, row, checkpoint, checkpoint=True)
    advance(cache, row, 2000)
    end(cache, row)
    _, reuse = begin(cache, [*range(1000), *range(5000, 5100)])

    assert reuse.cached_tokens == (checkpoint or 0)
    assert cache.metrics.snapshot()["hybrid_trim_miss"] == n_missed


def test_nobody_waits_for_tokens_that_end_inside_an_image():
    """The slice that reads them would end there, and an image is read whole (L-57)."""
    cache = make_cache()
    text = np.arange(1, 1001, dtype=np.int32)
    tokens = s.inject_image_markers(text, slice(300, 900), digest="ab" * 32).tolist()
    begin(cache, tokens)

    match = cache.find(prompt_of([*tokens[:700], 5, 6]))

    assert (match.cached_tokens, match.pending_tokens) == (0, 300)


def test_a_retreat_from_an_image_is_counted_once_by_the_request_that_retreats():
    """Not by each entry that a lookup reads, nor by one that only asks."""
    cache = make_cache()
    text = np.arange(1, 501, dtype=np.int32)
    tokens = s.inject_image_markers(text, slice(300, 500), digest="ab" * 32).tolist()
    for _ in range(3):
        row, _ = begin(cache, tokens)
        advance(cache, row, 400)  # an image is read whole: this is a fault
        row.filled = row.tokens[:400]
        end(cache, row)

    n_before = cache.metrics.snapshot()["vlm_retreat"]
    found = cache.find(prompt_of(tokens))
    assert found.cached_tokens == 300
    assert cache.metrics.snapshot()["vlm_retreat"] == n_before
    begin(cache, tokens)
    assert cache.metrics.snapshot()["vlm_retreat"] == n_before + 1
