"""What holds for each drafter, whatever it draws from: copies, a draft model, a head."""

import time

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import VOCAB, Bench, words
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache


def load_with(folder, draft_folder, **settings):
    config = s.Config(model_path=str(folder), draft_model=str(draft_folder), **settings)
    return s.load_model(folder, config)


def refusal(*folders, **settings):
    """What the start says of a folder and a DRAFT_MODEL that does not suit it."""
    with pytest.raises(s.ModelError) as caught:
        load_with(*folders, **settings)
    return str(caught.value)


def forced(reply, *, n_others=0):
    """A constraint that leaves one token at each place, or some, while it lasts."""

    def begin():
        for token_id in reply:
            flags = s._flag_ids([*range(10, 10 + n_others), token_id])
            yield s.AllowedTokens(flags, others=False)
        yield s.AllowedTokens(n_steps=s._FOREVER)

    return begin


def follow(folder, prompt, rng, *, n, every):
    """What the model of a folder says, with a random token now and then."""
    model, _ = load(str(folder))
    caches = make_prompt_cache(model)
    reply = []
    logits = model(mx.array(prompt)[None], cache=caches)
    for _ in range(n):
        token_id = mx.argmax(logits[0, -1]).item()
        if rng.random() < 1 / every:
            token_id = int(rng.integers(10, VOCAB))
        reply.append(token_id)
        logits = model(mx.array([[token_id]]), cache=caches)
    return reply


def count_guesses(bench: Bench) -> tuple[int, int]:
    """Of a draft model or a head: all, and those that were right."""
    snapshot = bench.metrics.snapshot()
    return snapshot["draft_model_tokens"], snapshot["draft_model_tokens_accepted"]


def check_others_may_join(b: Bench, past, reply, *, rng, tolerance=0.0):
    """Four requests come and go beside a reply; all are exact, and so is what goes on from it."""
    one = b.submit(past, n=len(reply), constraints=(forced(reply),))
    others = []
    for number in range(4):
        time.sleep(0.02)
        others.append(b.submit(words(rng, 150 + number), n=10))
    ids, _ = b.finish(one)
    assert ids == reply
    for handle in others:
        other_ids, _ = b.finish(handle)
        assert b.largest_difference(handle, other_ids) <= tolerance

    ids, _, handle = b.ask(past + ids + words(rng, 9), n=5)
    assert b.largest_difference(handle, ids) <= tolerance


def check_a_burst_may_be_cancelled(b: Bench, past, reply, *, rng, tolerance=0.0):
    """The client leaves after some tokens; its conversation goes on from all that it has."""
    for n_read in (1, 9, 30):
        handle = b.submit(past, n=len(reply), constraints=(forced(reply),))
        ids = []
        while len(ids) < n_read:
            event = handle.next_event(60)
            if isinstance(event, s.TokenEvent):
                ids.append(event.token_id)
        handle.stop_reason = "cancelled"
        rest, _ = b.finish(handle)
        ids += rest
        assert ids == reply[: len(ids)]

        for prompt in (past + ids, past + ids[:n_read]):
            new_prompt = prompt + words(rng, 12)
            new_ids, end, handle = b.ask(new_prompt, n=4)
            assert b.largest_difference(handle, new_ids) <= tolerance
            if prompt == past + ids:
                assert end.cached_tokens >= len(new_prompt) - 12 - 2


def check_same_reply(plain: Bench, b: Bench, prompt, *, tolerance=0.0, **fields):
    """With drafts and without: tokens, log-probabilities, and what goes on from it.

    Returns what was read of the cache for what goes on, beside the most that could be.
    """
    n = fields.pop("n", 80)
    expected, _, plain_handle = plain.ask(prompt, n=n, **fields)
    ids, _, handle = b.ask(prompt, n=n, **fields)
    assert ids == expected
    np.testing.assert_allclose(
        b.seen[handle], plain.seen[plain_handle], atol=tolerance, rtol=0.0
    )

    ids, end, handle = b.ask(prompt + ids + words(np.random.default_rng(n), 9), n=5)
    assert b.largest_difference(handle, ids) <= tolerance
    return len(prompt) + n - end.cached_tokens
