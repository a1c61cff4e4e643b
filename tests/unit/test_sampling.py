"""What a sampler may choose, how often it does, and that its noise belongs to tokens."""

import math
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

NONE = -np.inf


def logprobs_of(rng, vocab, *, spread, masked):
    """`(1, vocab)` as a model makes them, some ids forbidden as a grammar does."""
    logits = mx.array(rng.standard_normal((1, vocab)) * spread, mx.float32)
    forbidden = mx.array(rng.random((1, vocab)) < masked)
    logits = mx.where(forbidden, NONE, logits)
    logits[0, int(rng.integers(vocab))] = 0.0
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def upstream(logprobs, sampling):
    """mlx-lm's way: each filter over the whole vocabulary; {id: log-probability}."""
    left = logprobs.astype(mx.float32)
    if sampling.top_p < 1:
        left = apply_top_p(left, sampling.top_p)
    if sampling.min_p > 0:
        left = apply_min_p(left, sampling.min_p)
    if 0 < sampling.top_k < left.shape[-1]:
        left = apply_top_k(left, sampling.top_k)
    values = np.array(left)[0]
    return {int(i): values[i] for i in np.flatnonzero(values > NONE)}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [0.0, 0.5, 0.999])
@pytest.mark.parametrize(
    "vocab", [7, 300, 5_121, 20_000]
)  # with and without blocks of 128
def test_the_candidates_are_those_that_mlx_lm_leaves(vocab, masked, dtype):
    rng, n_seen = np.random.default_rng([vocab, int(masked * 1000)]), 0
    for spread in (0.5, 8.0):
        logprobs = logprobs_of(rng, vocab, spread=spread, masked=masked).astype(dtype)
        for k in (0, 1, 40):
            for top_p, min_p in ((1.0, 0.0), (0.9, 0.05), (0.3, 0.0)):
                sampling = s.SamplingParams(
                    temperature=1.0, top_k=k, top_p=top_p, min_p=min_p
                )
                values, ids = s._find_candidates(logprobs, sampling)
                pairs = zip(np.array(ids), np.array(values), strict=True)
                found = {int(i): value for i, value in pairs if value > NONE}
                wanted = upstream(logprobs, sampling)
                # Of equal ones at the edge any may be left: bfloat16 has many.
                assert sorted(found.values()) == sorted(wanted.values())
                last = min(found.values())
                assert {found[i] for i in found.keys() - wanted.keys()} <= {last}
                n_seen += len(found)
    assert n_seen > 18, "nothing was compared"


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_penalty_looks_back_on_as_many_tokens_as_it_says(size):
    """On none, too: upstream would look back on all of them then."""
    told = s.SamplingParams(repetition_penalty=2.0, repetition_context_size=size)
    tokens = mx.array([5, 6, 7])
    made = s.make_processors(told, ())
    logits = mx.ones((1, 10))
    for process in made:
        logits = process(tokens, logits)
    assert [i for i, x in enumerate(logits[0].tolist()) if x < 1] == [5, 6, 7][
        3 - min(size, 3) :
    ]


def test_what_is_drawn_is_as_frequent_as_it_is_probable():
    probable = np.array([0.4, 0.0, 0.25, 0.2, 0.1, 0.05])
    logprobs = mx.array(
        np.log(probable, where=probable > 0, out=np.full(6, NONE))[None]
    )
    logprobs = mx.concatenate([logprobs, mx.full((1, 9_000), NONE)], axis=-1)
    for sampling in (
        s.SamplingParams(temperature=1.0, top_k=20),
        s.SamplingParams(temperature=1.0),
    ):
        draw = s.make_sampler(sampling.model_copy(update={"seed": 11}))
        drawn = np.array(mx.concatenate([draw(logprobs) for _ in range(4_000)]))
        frequent = np.bincount(drawn, minlength=6) / 4_000
        assert len(frequent) == 6 and frequent[1] == 0
        deviation = np.sqrt(probable * (1 - probable) / 4_000) + 1e-9
        assert (np.abs(frequent - probable) <= 5 * deviation).all(), frequent


def test_the_last_bits_of_a_batch_do_not_change_what_is_drawn():
    """Candidates that are nearly equal are found in any order; a seed must say the same text."""
    rng = np.random.default_rng(3)
    sampling = s.SamplingParams(temperature=1.0, top_k=40, seed=7)
    alone, batched = s.make_sampler(sampling), s.make_sampler(sampling)
    n_same = 0
    for _ in range(200):
        logits = np.full((1, 8_000), -20.0)
        logits[0, rng.choice(8_000, 30, replace=False)] = (
            0.0  # equal, as bfloat16 makes many
        )
        rounded = logits + rng.uniform(-1e-6, 1e-6, logits.shape)
        pair = (mx.array(each, mx.float32) for each in (logits, rounded))
        one, other = (
            each - mx.logsumexp(each, axis=-1, keepdims=True) for each in pair
        )
        n_same += alone(one).item() == batched(other).item()
    assert n_same >= 199  # the noise itself may tie to a millionth


def test_a_whole_vocabulary_is_never_sorted(monkeypatch):
    """why(L-100): of a hundred thousand it takes longer than many a model needs for a token."""
    sizes, sort = [], mx.argpartition

    def noted(array, kth, axis=-1):
        sizes.append(array.shape[axis])
        return sort(array, kth, axis)

    monkeypatch.setattr(s.mx, "argpartition", noted)
    logprobs = logprobs_of(np.random.default_rng(5), 151_936, spread=3.0, masked=0.0)
    s._find_candidates(
        logprobs, s.SamplingParams(temperature=0.1, top_p=0.9, top_k=40, min_p=0.05)
    )
    assert sizes and max(sizes) <= 8_192


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_logit_leaves_no_token_to_its_row_and_all_to_the_others(dtype, bad):
    """why(L-54): read from the numbers themselves, in every type that a model computes in."""
    logits = mx.array(np.random.default_rng(1).normal(0, 9, (2, 301)), dtype)
    logits[1, 17], logits[0, 5] = (
        bad,
        -mx.inf,
    )  # the latter is ruled out, which is no fault
    rows, told = list(logits - mx.logsumexp(logits, axis=-1, keepdims=True)), []
    job = SimpleNamespace(top_logprobs=-1)
    for logprobs in rows:
        row = object.__new__(s.RunningRequest)
        row.output_ids, row.request = [], job
        row.handle = SimpleNamespace(put=told.append)
        for token in (0, 1, 17, 300):
            row.add_token(token, logprobs=logprobs)
        assert row.output_ids == (
            [s.NO_TOKEN] * 4 if logprobs is rows[1] else [0, 1, 17, 300]
        )
    assert [token.token_id for token in told] == [0, 1, 17, 300]
