"""SCHEDULER counts the tokens that a step accepts, not steps: a step may accept several."""

import itertools

import numpy as np
import pytest
import start_llm as s
from engine_fixture import GREEDY, words
from server_fixture import wait_until, wait_until_idle
from test_engine_limits import Poisoned, is_exact

KINDS = ["qwen3", "qwen3_5"]  # attention; with layers that keep state
N_AT_ONCE = [4, 1, 5, 2, 3]


class SeveralAtOnce(s.DecodeBatch):
    """A decode batch whose drafts are always right: a step accepts up to five tokens.

    As AcceptedTokens wants it, what may end a reply is the last token of a step.
    """

    sizes = itertools.cycle(N_AT_ONCE)
    end_ids = frozenset()

    def step(self):
        token_ids = {running: [] for running in self.requests}
        held = None
        for _ in range(next(self.sizes)):
            accepted = super().step()
            held = held or self._what_is_held()
            for running, ids in accepted:
                token_ids[running] += ids
            if any(self._may_end(running, ids[-1]) for running, ids in accepted):
                break
        vars(self).update(held)
        return [s.AcceptedTokens(running, ids) for running, ids in token_ids.items()]

    def _what_is_held(self):
        """What the batch holds of the time before its first step."""
        return {name: held for name, held in vars(self).items() if "held" in name}

    def _may_end(self, running, token_id):
        request = running.request
        is_full = len(running.output_ids) >= request.max_tokens
        end_ids = self.end_ids | request.checkpoint_ids
        return is_full or running.has_failed or token_id in end_ids


@pytest.fixture
def several(monkeypatch):
    """From now on, requests decode in batches that accept several tokens in a step."""
    n_accepted = []
    step = SeveralAtOnce.step

    def counted(batch):
        accepted = step(batch)
        n_accepted.extend(len(ids) for _, ids in accepted)
        return accepted

    def begin():
        monkeypatch.setattr(SeveralAtOnce, "sizes", itertools.cycle(N_AT_ONCE))
        monkeypatch.setattr(SeveralAtOnce, "step", counted)
        monkeypatch.setattr(s, "DecodeBatch", SeveralAtOnce)
        return n_accepted

    yield begin
    assert max(n_accepted) > 1, "no step accepted several: this tested nothing"


def forget(bench):
    bench.engine.call(lambda scheduler: scheduler.cache.evict_session("", None))


SEEDED = GREEDY.model_copy(update={"temperature": 0.9, "top_k": 20, "seed": 4})
PENALTY = GREEDY.model_copy(update={"repetition_penalty": 1.3})


def end_thinking():
    return s.limit_thinking(7, start=[], ends=[11])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": SEEDED},
        {"sampling": PENALTY},
        {"constraints": (end_thinking,)},
        {"constraints": (lambda: s.forbid_tokens(range(10, 200)),)},
        {"top_logprobs": 3},
    ],
    ids=["greedy", "seeded", "penalty", "thinking", "forbidden", "logprobs"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_the_same_and_has_all_its_tokens(bench, several, kind, fields):
    b = bench(kind)
    prompt = words(np.random.default_rng(1), 100)
    expected_ids, expected_end, _ = b.ask(prompt, n=33, **fields)
    forget(b)
    several()

    ids, end, ticket = b.ask(prompt, n=33, **fields)

    assert ids == expected_ids
    assert end.reason == expected_end.reason == "length"
    if not fields:
        assert is_exact(b, kind, ticket, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_ends_a_reply_wherever_it_comes(bench, several, monkeypatch, kind):
    b = bench(kind)
    several()
    rng = np.random.default_rng(2)
    for _ in range(4):
        prompt = words(rng, 60)
        plain_ids, _, _ = b.ask(prompt, n=30)
        end_ids = frozenset(plain_ids[12:13])

        def set_ends(scheduler, end_ids=end_ids):
            object.__setattr__(scheduler.loaded, "eos_ids", end_ids)

        b.engine.call(set_ends)
        monkeypatch.setattr(SeveralAtOnce, "end_ids", end_ids)
        ids, end, ticket = b.ask(prompt, n=30)
        assert end.reason == "stop"
        assert ids == plain_ids[: plain_ids.index(plain_ids[12]) + 1]

        b.engine.call(lambda scheduler: set_ends(scheduler, frozenset()))
        monkeypatch.setattr(SeveralAtOnce, "end_ids", frozenset())
        more_ids, end, ticket = b.ask(prompt + ids + words(rng, 10), n=3)
        assert is_exact(b, kind, ticket, more_ids)
        assert end.cached_tokens == len(prompt + ids)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_reply", range(20, 26))
def test_what_goes_on_with_a_part_of_a_reply_is_exact(bench, several, kind, n_reply):
    """The state that is kept from before the last step stands where that step began."""
    b = bench(kind)
    n_accepted = several()
    rng = np.random.default_rng(n_reply)
    prompt = words(rng, 90)
    ids, _, _ = b.ask(prompt, n=n_reply)
    n_last = n_accepted[-1]

    for n_cut in sorted({n_last, 1, 2, 3}):
        part = prompt + ids[: len(ids) - n_cut]
        more_ids, end, ticket = b.ask(part + words(rng, 20), n=4)
        assert is_exact(b, kind, ticket, more_ids)
        if n_cut == n_last:
            assert end.cached_tokens == len(part)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_come_and_go_in_batches_are_exact(bench, several, kind):
    b = bench(kind)
    several()
    rng = np.random.default_rng(3)
    prompts = [words(rng, n) for n in (50, 120, 70, 60)]
    tickets = [
        b.submit(prompt, n=n)
        for prompt, n in zip(prompts, (40, 25, 33, 12), strict=True)
    ]

    for prompt, ticket in zip(prompts, tickets, strict=True):
        ids, end = b.finish(ticket)
        assert len(ids) == ticket.request.max_tokens
        assert end.reason == "length"
        assert is_exact(b, kind, ticket, ids)
        more_ids, _, again = b.ask(prompt + ids + words(rng, 10), n=3)
        assert is_exact(b, kind, again, more_ids)


def test_a_state_is_kept_once_in_64_accepted_tokens(bench, several, monkeypatch):
    b = bench("qwen3_5")
    several()
    positions = []
    add_checkpoint = s.PrefixCache.add_checkpoint

    def noted(cache, entry, position, state):
        positions.append(position)
        add_checkpoint(cache, entry, position, state)

    monkeypatch.setattr(s.PrefixCache, "add_checkpoint", noted)
    rng = np.random.default_rng(4)
    prompt = words(rng, 100)
    ticket = b.submit(prompt, n=3000)
    wait_until(lambda: ticket.n_unread() > 230)
    ticket.stop_reason = "cancelled"
    ids, _ = b.outcome(ticket)
    wait_until_idle(b.engine)

    spaced = [p for p in positions if len(prompt) < p < len(prompt) + len(ids) - 6]
    n_spaces = [(position - len(prompt)) // 64 for position in spaced]
    assert n_spaces == list(range(1, len(spaced) + 1))
    assert all((position - len(prompt)) % 64 < max(N_AT_ONCE) for position in spaced)

    part = prompt + ids[: spaced[-1] - len(prompt)]
    more_ids, end, again = b.ask(part + words(rng, 10), n=3)
    assert end.cached_tokens == len(part)
    assert is_exact(b, "qwen3_5", again, more_ids)


@pytest.mark.parametrize("position", range(104, 112))
def test_a_token_of_no_numbers_fails_a_reply_wherever_it_comes(
    bench, several, position
):
    b = bench("qwen3")
    several()
    prompt = words(np.random.default_rng(5), 100)
    expected_ids, _, _ = b.ask(prompt, n=20)
    forget(b)
    b.model.plain = Poisoned(b.model.plain, position, np.nan)

    ids, end = b.outcome(b.submit(prompt, n=20))

    assert isinstance(end, s.GenerationFailed)
    assert ids == expected_ids[: len(ids)]
    assert len(ids) == position - len(prompt) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_after_one_without_numbers_do_not_hide_it(bench, kind):
    b = bench(kind)
    ticket = b.submit(words(np.random.default_rng(6), 30), n=3000)
    wait_until(lambda: b.engine.report["decoding"] == 1)

    def add_tokens(scheduler):
        (running,) = scheduler.running
        good = s.mx.zeros(300)
        bad = good * float("nan")
        n_before = ticket.n_unread()
        for logprobs in (bad, good, good):
            running.add_token(20, logprobs=logprobs)
        return running.has_failed, ticket.n_unread() - n_before

    assert b.engine.call(add_tokens) == (True, 0)
    assert isinstance(b.outcome(ticket)[1], s.GenerationFailed)
