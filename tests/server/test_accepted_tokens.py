"""SCHEDULER counts the tokens that a step accepts, not steps: a step may accept several."""

import itertools

import numpy as np
import pytest
import start_llm as s
from engine_fixture import words
from nights import at_night
from server_fixture import wait_until, wait_until_idle
from test_engine_limits import Poisoned, is_exact

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
    wait_until(lambda: ticket._events.qsize() > 230)
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


@pytest.mark.parametrize(
    "position", [107, *map(at_night, (104, 105, 106, 108, 109, 110, 111))]
)
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
