"""What a sampler may choose, how often it does, and that its noise belongs to tokens."""

import math
from itertools import product
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

NONE = -np.inf


def normalized(logits):
    logits = mx.array(logits, mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def logprobs_of(rng, vocab, *, spread, masked):
    """`(1, vocab)` as a model makes them, some ids forbidden as a grammar does."""
    shape = (1, vocab)
    logits = mx.array(rng.standard_normal(shape) * spread, mx.float32)
    forbidden = mx.array(rng.random(shape) < masked)
    logits = mx.where(forbidden, NONE, logits)
    allowed_id = int(rng.integers(vocab))
    logits[0, allowed_id] = 0.0
    return normalized(logits)


def upstream(logprobs, sampling):
    """mlx-lm's way: each filter over the whole vocabulary; {id: log-probability}."""
    filtered = logprobs.astype(mx.float32)
    if sampling.top_p < 1:
        filtered = apply_top_p(filtered, sampling.top_p)
    if sampling.min_p > 0:
        filtered = apply_min_p(filtered, sampling.min_p)
    if 0 < sampling.top_k < filtered.shape[-1]:
        filtered = apply_top_k(filtered, sampling.top_k)

    values = np.array(filtered)[0]
    ids = np.flatnonzero(values > NONE)
    return dict(zip(ids.tolist(), values[ids], strict=True))


def candidates(logprobs, sampling):
    """Ours; {id: log-probability}."""
    values, ids = s._find_candidates(logprobs, sampling)
    found = {}
    for token, value in zip(np.array(ids), np.array(values), strict=True):
        if value > NONE:
            found[int(token)] = value
    return found


# With and without blocks of 128.
VOCABULARIES = [7, 300, 5_121, 20_000]
TOP_KS = (0, 1, 40)
FILTERS = (
    {"top_p": 1.0, "min_p": 0.0},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.3, "min_p": 0.0},
)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_candidates_are_those_that_mlx_lm_leaves(vocab, masked, dtype):
    rng = np.random.default_rng([vocab, int(masked * 1000)])
    n_compared = 0
    for spread in (0.5, 8.0):
        logprobs = logprobs_of(rng, vocab, spread=spread, masked=masked)
        logprobs = logprobs.astype(dtype)
        for top_k, filters in product(TOP_KS, FILTERS):
            sampling = s.SamplingParams(temperature=1.0, top_k=top_k, **filters)

            found = candidates(logprobs, sampling)
            wanted = upstream(logprobs, sampling)

            # Of equal ones at the edge any may be left: bfloat16 has many.
            assert sorted(found.values()) == sorted(wanted.values())
            at_the_edge = min(found.values())
            only_ours = found.keys() - wanted.keys()
            assert {found[i] for i in only_ours} <= {at_the_edge}
            n_compared += len(found)

    assert n_compared > 18, "nothing was compared"


@pytest.mark.parametrize(("top_p", "n_kept"), [(0.6, 2), (0.85, 2), (0.95, 3)])
def test_mlx_lm_takes_top_p_of_the_tokens_that_it_is_given(top_p, n_kept):
    """Of 0.5, 0.3 and 0.1, which are 0.9 in all; _find_candidates counts on it."""
    logprobs = mx.log(mx.array([0.3, 0.5, 0.1]))

    kept = np.array(apply_top_p(logprobs, top_p)) > NONE

    assert kept.sum() == n_kept


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("size", [0, 1, 256])
def test_a_look_back_of_none_is_that_of_the_repetition_penalty_alone(name, size):
    fields = {name: 1.0, "repetition_penalty": 2.0}
    sampling = s.SamplingParams(**fields, repetition_context_size=size)
    logits = mx.full((1, 10), 8.0)

    for process in s.make_processors(sampling, ()):
        logits = process(mx.array([5, 6, 7]), logits)

    expected = {0: [7, 7, 7], 1: [8, 8, 3], 256: [3, 3, 3]}
    assert np.array(logits[0])[5:8].tolist() == expected[size]


def test_what_is_drawn_is_as_frequent_as_it_is_probable():
    n_draws = 500
    probabilities = np.array([0.4, 0.0, 0.25, 0.2, 0.1, 0.05])
    variances = probabilities * (1 - probabilities) / n_draws
    deviations = np.sqrt(variances) + 1e-9
    logprobs = np.full((1, 9_006), NONE)
    np.log(probabilities, where=probabilities > 0, out=logprobs[0, :6])
    logprobs = mx.array(logprobs)

    for top_k in (20, 0):
        sampling = s.SamplingParams(temperature=1.0, top_k=top_k, seed=11)
        draw = s.make_sampler(sampling)
        drawn = [draw(logprobs).item() for _ in range(n_draws)]
        frequencies = np.bincount(drawn, minlength=6) / n_draws

        assert len(frequencies) == 6
        assert frequencies[1] == 0
        differences = np.abs(frequencies - probabilities)
        assert (differences <= 5 * deviations).all(), frequencies


def test_the_last_bits_of_a_batch_do_not_change_what_is_drawn():
    """Candidates that are nearly equal are found in any order; a seed must say the same text."""
    rng = np.random.default_rng(3)
    sampling = s.SamplingParams(temperature=1.0, top_k=40, seed=7)
    draw_alone = s.make_sampler(sampling)
    draw_batched = s.make_sampler(sampling)
    n_same = 0

    for _ in range(200):
        logits = np.full((1, 8_000), -20.0)
        candidate_ids = rng.choice(8_000, 30, replace=False)
        logits[0, candidate_ids] = 0.0  # equal, as bfloat16 makes many
        rounded = logits + rng.uniform(-1e-6, 1e-6, logits.shape)
        token = draw_alone(normalized(logits)).item()
        n_same += draw_batched(normalized(rounded)).item() == token

    assert n_same >= 199  # the noise itself may tie to a millionth


def test_a_whole_vocabulary_is_never_sorted(monkeypatch):
    """why(L-100): of a hundred thousand it takes longer than many a model needs for a token."""
    sizes = []
    argpartition = mx.argpartition

    def noted(array, kth, axis=-1):
        sizes.append(array.shape[axis])
        return argpartition(array, kth, axis)

    monkeypatch.setattr(s.mx, "argpartition", noted)
    rng = np.random.default_rng(5)
    logprobs = logprobs_of(rng, 151_936, spread=3.0, masked=0.0)
    sampling = s.SamplingParams(temperature=0.1, top_p=0.9, top_k=40, min_p=0.05)

    s._find_candidates(logprobs, sampling)

    assert sizes
    assert max(sizes) <= 8_192


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_logit_leaves_no_token_to_its_row_and_all_to_the_others(dtype, bad):
    """why(L-54): read from the numbers themselves, in every type that a model computes in."""
    rng = np.random.default_rng(1)
    normal = rng.normal(0, 9, (2, 301))
    logits = mx.array(normal, dtype)
    logits[0, 5] = -mx.inf  # ruled out, which is no fault
    # Of constraints that have no token in common, all logits are minus infinity.
    logits[1, slice(None) if bad == -math.inf else 17] = bad
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = [0, 1, 17, 300]
    events = []

    def output_of(row_logprobs):
        row = object.__new__(s.RunningRequest)
        row.output_ids = []
        row.lockstep = s.ALONE
        row.request = SimpleNamespace(top_logprobs=-1)
        row.handle = SimpleNamespace(put=events.append)
        row.warm_reply = None
        for token in tokens:
            row.add_token(token, logprobs=row_logprobs)
        return row.output_ids

    assert output_of(logprobs[0]) == tokens
    assert output_of(logprobs[1]) == [s.NO_TOKEN]  # nothing follows it
    assert [event.token_id for event in events] == tokens
